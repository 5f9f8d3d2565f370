"""The learning rate of the stochastic-gradient samplers, read from the curvature and the gradient noise of a target.

Let H be the Hessian of the mean loss per row, lambda its largest eigenvalue, and C T/N times the variance of a
minibatch's gradient in that direction. With the friction a (1 for SGLD), a step of the rate r is stable up to

    r = 2 (2 - a) / lambda

In the stiffest direction the variance of the draws is too large, by a share of r lambda / (2 (2 - a)) from the
discretisation and of about

    r C / (2 a) * x / (2 + x),        x = M r lambda / a

from the M minibatches of an epoch, which cancel in part, because an epoch reads every row once. The burn-in begins with
`STABLE_SHARE` of the stable rate. Its second half takes at most the rate at which the second share is `NOISE_SHARE`,
but not a rate so small that the kept steps are fewer than `MIN_RELAXATIONS` relaxation times a / (r lambda).

lambda comes from power iteration with finite differences of the gradient: `START_PRODUCTS` products on one minibatch
at the start, and one product every `READ_EVERY_STEPS` steps of the burn-in, from where the last one ended. It rises at
once and falls slowly. C comes from the difference between the two halves of a minibatch. Its running mean starts again
after a quarter of the burn-in, because rows differ by more near the start than later. Curvature grows in the burn-in
where a noise scale is learnt, by a factor of 60 on some data sets. A chain whose loss explodes or is not finite goes
back to the best position so far, at half the rate. After the burn-in the rate is fixed, so the draws have one kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from priory.core.data import split_rows
from priory.core.streams import stream
from priory.posteriors.status import Status

if TYPE_CHECKING:
    from priory.core.data import Batch
    from priory.models.target import Target

STABLE_SHARE = 0.1  # of the largest stable rate
NOISE_SHARE = 0.25  # of the variance in the stiffest direction that minibatches may add
MAX_ADDED_VARIANCE = 1.0  # share of the posterior's variance above which a status names it
MIN_RELAXATIONS = 20  # relaxation times of the stiffest direction in the kept steps
START_PRODUCTS = 12  # Hessian-vector products before the first step
READ_EVERY_STEPS = 20  # steps of the burn-in between two readings
CURVATURE_DECAY, NOISE_DECAY = 0.9, 0.9  # per reading
UNKNOWN_RATE = 0.01  # where the curvature is zero or not finite
DIFFERENCE_LENGTH = 1e-3  # of finite differences, relative to the norm of w or to 1
EXPLOSION_FACTOR = 10  # times the nats of the first loss, plus one per row and per parameter, above the first loss


@dataclass
class ReadRate:
    """The learning rate of each member, and what it was read from.

    Args:
        rate: Learning rate, (*B,).
        curvature: Largest eigenvalue of the Hessian of the mean loss, recent maximum over chains, (*B,).
        noise: T/N times the variance of a minibatch's gradient in the stiffest direction, mean over chains, (*B,).
        halvings: Number of times that a chain exploded and the rate was halved, (*B,).
        direction: Unit vector of the stiffest direction of each chain, (*B, K, P).
        ceiling: Loss above which a chain has exploded, in nats, (*B, K).
        best_loss: Smallest loss of each chain so far, in nats, (*B, K).
        best: Position with the smallest loss, (*B, K, P).
        epoch_steps: Number of minibatches in a pass over the data.
        readings: Number of readings in the noise.
    """

    rate: Tensor
    curvature: Tensor
    noise: Tensor
    halvings: Tensor
    direction: Tensor
    ceiling: Tensor
    best_loss: Tensor
    best: Tensor
    epoch_steps: int
    readings: int = 1

    @classmethod
    def at(cls, target: Target, w: Tensor, batch: Batch, epoch_steps: int, scale: Tensor | None = None) -> ReadRate:
        """Read curvature and noise at starting positions w (*B, K, P) from one minibatch; `choose` sets the rate.

        `scale` is the square root of a preconditioner, (*B, 1, P).
        """
        value, gradient = target.log_joint_and_grad(w, batch)
        normal = torch.randn(w.shape[-1], generator=stream(0, "direction"), dtype=torch.float64).to(w)
        direction = (normal / normal.norm()).expand_as(w).clone()
        ceiling = -value + EXPLOSION_FACTOR * (value.abs() + (target.num_data or 0) + w.shape[-1])
        rate, curvature, noise, halvings = (w.new_zeros(w.shape[:-2]) for _ in range(4))
        found = cls(rate, curvature, noise, halvings, direction, ceiling, -value, w.clone(), epoch_steps)
        sound = torch.ones_like(value, dtype=torch.bool)
        for _ in range(START_PRODUCTS):
            found.curvature = found.advance(target, w, gradient, batch, sound, scale).amax(-1)
        found.noise = found.gradient_noise(target, w, gradient, batch, scale)
        return found

    def follow(
        self,
        target: Target,
        w: Tensor,
        value: Tensor,
        gradient: Tensor,
        batch: Batch,
        reads: bool,
        restarts: bool = False,
        scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Follow one step of the burn-in: rescue chains that exploded, and read curvature and noise if `reads`.

        Args:
            target: The target.
            w: Positions, (*B, K, P); those of exploded chains are changed in place to their best positions.
            value: Tempered log joint at w, (*B, K).
            gradient: Its gradient, (*B, K, P).
            batch: The minibatch of both.
            reads: Whether to read curvature and noise.
            restarts: Whether earlier readings of the noise are dropped.
            scale: Square root of a preconditioner, (*B, 1, P).

        Returns:
            The value and the gradient, with the best value and zero for exploded chains, and the mask of exploded
            chains, (*B, K, 1).
        """
        exploded = ~(-value <= self.ceiling)  # true for NaN
        better = ~exploded & (-value < self.best_loss)
        self.best = torch.where(better.unsqueeze(-1), w, self.best)
        self.best_loss = torch.where(better, -value, self.best_loss)
        mask = exploded.unsqueeze(-1)
        value, gradient = torch.where(exploded, -self.best_loss, value), gradient.masked_fill(mask, 0.0)
        w.copy_(torch.where(mask, self.best, w))
        if reads:
            curvature = self.advance(target, w, gradient, batch, ~exploded, scale).amax(-1)
            self.curvature = torch.maximum(curvature, CURVATURE_DECAY * self.curvature)
            self.readings = 1 if restarts else self.readings + 1
            weight = max(1 - NOISE_DECAY, 1 / self.readings)
            self.noise = self.noise.lerp(self.gradient_noise(target, w, gradient, batch, scale), weight)
        once = exploded.any(-1).to(w.dtype)
        self.halvings = self.halvings + once
        self.curvature, self.rate = self.curvature * (1 + once), self.rate / (1 + once)
        return value, gradient, mask

    def choose(self, friction: float, kept_steps: int | None = None) -> None:
        """Set the rate from the curvature, and from the noise too if the number of kept steps is given."""
        rate = STABLE_SHARE * 2 * (2 - friction) / self.curvature
        if kept_steps is not None:
            noise, epoch = self.noise / (2 * friction), self.curvature * self.epoch_steps / friction
            both = NOISE_SHARE * epoch
            quiet = (both + (both.square() + 8 * both * noise).sqrt()) / (2 * noise * epoch)
            least = MIN_RELAXATIONS * friction / (kept_steps * self.curvature)
            rate = torch.minimum(rate, torch.maximum(quiet, least))
        self.rate = torch.where(torch.isfinite(rate), rate, UNKNOWN_RATE)

    def added_variance(self, friction: float) -> Tensor:
        """Return the share of variance that minibatches add in the stiffest direction, (*B,)."""
        epoch = self.rate * self.curvature * self.epoch_steps / friction
        return self.rate * self.noise / (2 * friction) * epoch / (2 + epoch)

    def advance(
        self, target: Target, w: Tensor, gradient: Tensor, batch: Batch, sound: Tensor, scale: Tensor | None
    ) -> Tensor:
        """Take one step of power iteration, and return the curvature along each chain's direction, (*B, K).

        It is zero for chains that are not `sound`, and for those where it is not finite; their directions stay.
        """
        along = self.direction if scale is None else scale * self.direction
        length = DIFFERENCE_LENGTH * w.norm(dim=-1, keepdim=True).clamp_min(1.0) / along.norm(dim=-1, keepdim=True)
        change = target.log_joint_and_grad(w + length * along, batch)[1] - gradient
        product = -target.mean_loss_scale * change / length
        product = product if scale is None else scale * product
        curvature = product.norm(dim=-1)
        usable = sound & torch.isfinite(curvature) & (curvature > 0)
        self.direction = torch.where(usable.unsqueeze(-1), product / curvature.unsqueeze(-1), self.direction)
        return torch.where(usable, curvature, 0.0)

    def gradient_noise(self, target: Target, w: Tensor, gradient: Tensor, batch: Batch, scale: Tensor | None) -> Tensor:
        """Return T/N times the variance of a minibatch's gradient along the direction, a mean over chains, (*B,).

        The halves of a minibatch of n rows differ by four times the variance of its own gradient, but for the factor
        1 - n/N of rows that are drawn without replacement. A single row has the square of its gradient instead.
        """
        rows = len(batch[0]) if batch else 0
        if target.num_data is None or rows >= target.num_data:
            return w.new_zeros(w.shape[:-2])
        if rows == 1:
            difference = 2 * gradient
        else:
            first, second, *_ = split_rows(batch, rows // 2)
            difference = target.log_joint_and_grad(w, first)[1] - target.log_joint_and_grad(w, second)[1]
        along = self.direction if scale is None else scale * self.direction
        variance = (difference * along).sum(-1).square() / 4 * target.unread_share(rows)
        return target.mean_loss_scale * torch.where(torch.isfinite(variance), variance, 0.0).mean(-1)

    def status(self, friction: float) -> Status | None:
        """Return a status that names the noise of minibatches if it exceeds the noise of the sampler, else None."""
        added = float(self.added_variance(friction))
        if not added > MAX_ADDED_VARIANCE:
            return None
        share = f"Minibatches add about {added:,.1f} times the posterior's variance in the stiffest direction"
        return Status("doubtful", f"{share}: raise batch_size, or give the fit more steps.")


def metrics(target: Target, value: Tensor, read: ReadRate | None) -> dict[str, Tensor | float]:
    """The metrics of a step: the loss, and the learning rate and its halvings if it was read from the target."""
    found: dict[str, Tensor | float] = {"loss": target.loss(value.mean(-1))}
    return found if read is None else {**found, "learning_rate": read.rate, "halvings": read.halvings}
