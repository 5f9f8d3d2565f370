"""Mean-field variational inference: the best factorised Gaussian (Graves 2011; Blundell 2015; Kingma and
Welling 2014).

    q(w) = prod_i N(w_i; m_i, s_i^2),   maximise   elbo = E_q[log p(D|w)] - T KL(q || p)

With w = m + s eps, eps ~ N(0, I), and g = d log p(D|w) / dw at the draw, the loss -elbo has the gradients

    d/dm_i     = -g_i + T lambda_i (m_i - m0_i)
    d/dlog s_i = -g_i eps_i s_i + T (lambda_i s_i^2 - 1)

for a Gaussian prior of location m0 and precision lambda; other priors enter at the draw, like the likelihood.
The step works in place on one (2, *B, P) tensor of means and log standard deviations, with no autograd
through the sampling; `estimators.elbo` is the definition that it is tested against. Cost of a step: `samples`
passes of the network and O(samples P).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from priory.errors import require, whole
from priory.estimators.evidence_bound import assemble
from priory.families import Diagonal
from priory.families.diagonal import LOG_2_PI_E
from priory.methods.base import Info, Options, Plan
from priory.methods.optimise import Adam, check_rate, default_steps, rates
from priory.posteriors import DiagonalGaussian, Posterior

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from priory.data import Batch, Data
    from priory.target import Target


@dataclass
class State:
    """The variational parameters and Adam's moments; the work tensors are overwritten by every step."""

    variational: Tensor  # (2, *B, P): means, log standard deviations
    adam: Adam
    buffers: dict[str, Tensor]
    noise: Tensor = field(metadata={"scratch": True})  # (S, *B, P), as drawn
    w: Tensor = field(metadata={"scratch": True})  # (S, *B, P)
    scale: Tensor = field(metadata={"scratch": True})  # (*B, P)
    gradient: Tensor = field(metadata={"scratch": True})  # (2, *B, P), of the loss


@dataclass(frozen=True)
class MeanField(Options):
    """Factorised Gaussian variational inference by reparameterised gradients.

    `samples` is the number of draws of w a step; an even number comes in pairs eps, -eps, whose odd errors cancel.
    `initial_scale` multiplies the prior's standard deviations to give those that q starts with: small, so that the
    first steps see the network and not the noise. `schedule` is "cosine" (down to zero, so that the last steps
    average the noise away), "constant", or a function from an optimizer to a `torch.optim.lr_scheduler`.

    >>> MeanField(samples=0)
    Traceback (most recent call last):
    ...
    priory.errors.InputError: The 'samples' of MeanField must be a whole number from 1. Got 0 instead.
    """

    family: str = "gaussian"
    samples: int = 1
    learning_rate: float = 1e-2
    schedule: str | Callable[[Optimizer], LRScheduler] = "cosine"
    initial_scale: float = 0.02
    start: Any = None

    reads: ClassVar[Literal["batch", "pass"]] = "batch"

    def __post_init__(self) -> None:
        require(self.family == "gaussian", "family", "MeanField", "be 'gaussian'", repr(self.family))
        require(whole(self.samples, 1), "samples", "MeanField", "be a whole number from 1", self.samples)
        check_rate(self.learning_rate, self.schedule, "MeanField")
        ok = isinstance(self.initial_scale, (int, float)) and 0 < self.initial_scale < float("inf")
        require(ok, "initial_scale", "MeanField", "be a positive number", self.initial_scale)

    def length(self, data: Data) -> int:
        return default_steps(data.steps_per_epoch, epochs=200, least=4_000, most=50_000)

    def plan(self, target: Target, data: Data, steps: int, seed: int) -> Plan:
        return Plan(data, steps)

    def init(
        self,
        target: Target,
        plan: Plan,
        generator: torch.Generator,
        shape: torch.Size = torch.Size(),
        start: Posterior | None = None,
    ) -> State:
        loc = target.start(plan.data, shape, generator, start)
        variational = torch.stack([loc, torch.empty_like(loc)])
        variational[1] = torch.log(self.initial_scale * target.model.prior.typical_scale())
        learning = rates(self.schedule, self.learning_rate, plan.steps, "MeanField")
        work = loc.new_empty(self.samples, *loc.shape)
        return State(
            variational,
            Adam.of(variational, learning),
            target.buffers(shape, start),
            noise=work,
            w=torch.empty_like(work),
            scale=torch.empty_like(loc),
            gradient=torch.empty_like(variational),
        )

    def step(self, target: Target, state: State, batch: Batch, generator: torch.Generator) -> tuple[State, Info]:
        w = self.draw(state, generator)
        value, gradient = target.log_likelihood_and_grad(w, batch, state.buffers)
        return self.update(target, state, w, value, gradient)

    def posterior(self, target: Target, state: State, draws: Tensor | None = None) -> DiagonalGaussian:
        return DiagonalGaussian(target, Diagonal(*state.variational), state.buffers)

    # The two halves of a step, for loops of one's own.

    def draw(self, state: State, generator: torch.Generator) -> Tensor:
        """w = m + s eps: (*B, P), or (S, *B, P) for several samples; valid until the next draw."""
        m, log_s = state.variational
        torch.exp(log_s, out=state.scale)
        if self.samples % 2:
            state.noise.normal_(generator=generator)
        else:
            half = state.noise[: self.samples // 2].normal_(generator=generator)
            torch.neg(half, out=state.noise[self.samples // 2 :])
        torch.addcmul(m, state.noise, state.scale, out=state.w)
        return state.w[0] if self.samples == 1 else state.w

    def update(self, target: Target, state: State, w: Tensor, value: Tensor, gradient: Tensor) -> tuple[State, Info]:
        """Descend the loss, given log p(D|w) and its gradient at the draws that `draw` returned."""
        prior, a, t = target.model.prior, target.prior_weight, target.entropy_weight
        m, log_s = state.variational
        noise, others, volume = state.noise[0], None, None
        if prior.others:
            others, others_gradient = target.others_and_grad(w)
            gradient = gradient.add(others_gradient, alpha=a)
        if a != t and target.model.layout.constrained:
            volume, volume_gradient = target.volume_and_grad(w)
            gradient = gradient.add(volume_gradient, alpha=t - a)
        if self.samples > 1:  # averages over the draws: of log p(D|w), of g, and of g eps in the place of g
            push, noise = (gradient * state.noise).mean(0), 1.0
            value, gradient = value.mean(0), gradient.mean(0)
            others, volume = (None if part is None else part.mean(0) for part in (others, volume))
        else:
            push = gradient

        toward, spread = state.gradient  # the loss's gradient: in the means, in the log standard deviations
        deviation = m if prior.centred else m - prior.loc
        torch.mul(deviation, prior.precision, out=toward)
        torch.mul(state.scale, prior.precision, out=spread)
        square = inner(toward, deviation) + inner(spread, state.scale)  # sum_i lambda_i ((m - m0)^2 + s^2)
        if a != 1:
            state.gradient.mul_(a)
        toward.sub_(gradient)
        spread = spread.addcmul_(push, noise, value=-1) if isinstance(noise, Tensor) else spread.sub_(push)
        spread.mul_(state.scale).sub_(t)
        metrics = parts(target, value, square, log_s, others, volume)
        state.adam.descend(state.variational, state.gradient)
        return state, Info(metrics)


def parts(
    target: Target, value: Tensor, square: Tensor, log_s: Tensor, others: Tensor | None, volume: Tensor | None
) -> dict[str, Tensor | float]:
    """The bound and its parts. One member on the CPU is counted in plain numbers, which cost a tenth of tensors."""
    numbers: list[Any] = [value, square, log_s.sum(-1), *(0.0 if part is None else part for part in (others, volume))]
    if value.ndim == 0 and value.device.type == "cpu":
        numbers = [float(number) for number in numbers]
    log_likelihood, quadratic, log_scales, sampled, log_det = numbers
    cross = 0.5 * quadratic - target.model.prior.log_normaliser - sampled
    entropy = log_scales + 0.5 * LOG_2_PI_E * log_s.shape[-1]
    bound = assemble(target, log_likelihood, cross, entropy, log_det)
    return {"elbo": bound.value, "nll": bound.nll, "kl": bound.kl, "loss": bound.loss}


def inner(x: Tensor, y: Tensor) -> Tensor:
    """sum_i x_i y_i over the last dimension, (*B,)."""
    return torch.dot(x, y) if x.ndim == 1 else torch.linalg.vecdot(x, y)
