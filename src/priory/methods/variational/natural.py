"""Natural-gradient variational inference: the variational online Newton method.

After Khan and Rue (2023, "The Bayesian learning rule"), Lin, Schmidt and Khan (2020) and Shen et al. (2024).

    q(w) = N(m, S^-1),   maximise   elbo = E_q[log p(D|w)] - T KL(q || p)

Let g = d log p(D|w) / dw in nats for the whole data, lambda the prior's precision and m0 its location. A step of size
rho along the natural gradient of the loss -elbo is a Newton step with expected derivatives:

    S <- (1 - rho) S + rho F,               F = (E_q[-d^2 log p(D|w) / dw^2] + T lambda) / T
    m <- m - rho S^-1 (E_q[-g] + T lambda (m - m0)) / T

so on a conjugate model a step of size one gives the exact posterior. The Hessian is never formed. At a draw
w = m + L^-T eps, with S = L L' and eps ~ N(0, I), Stein's lemma gives the unbiased estimate

    E_q[-d^2 log p(D|w) / dw^2] = E[-(g v' + v g') / 2],   v = S (w - m) = L eps,

whose diagonal, for S = diag(1 / s^2), is -g_i eps_i / s_i. It may be negative. A second-order correction (Lin 2020),
exact up to rho^2 times the noise, keeps S positive:

    S <- S + rho (F - S) + rho^2 / 2 (F - S) S^-1 (F - S) = (S + X S^-1 X) / 2 >= S / 2 > 0,   X = (1 - rho) S + rho F.

The mean has a separate rate and a momentum, because its gradient is far less noisy than the Hessian (Shen 2024). Each
coordinate of the mean moves by at most learning_rate x clip prior standard deviations per step. Non-Gaussian priors are
evaluated at the draw, like the likelihood. With `tempers="posterior"`, T lambda is replaced by lambda. Cost of a step:
`samples` passes of the network and O(samples P), or O(P^3) with full covariance.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from priory.core.errors import is_integer, require
from priory.core.linalg import try_cholesky
from priory.families import DiagonalFamily, FullRankFamily, FullRankForm
from priory.methods.base import Info, Options, Plan, Traits
from priory.methods.optimise import check_rate, default_steps, rates
from priory.methods.variational.arrival import (
    ArrivalState,
    Search,
    arrival_step,
    arrived_posterior,
    arrives,
    begin_arrival,
    best_gaussian,
)
from priory.methods.variational.base import inner, parts
from priory.methods.variational.flat_directions import warn_if_flat
from priory.models.base import has_network
from priory.posteriors import DiagonalGaussian
from priory.posteriors.variational import Variational

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from priory.core.data import Batch, Data
    from priory.models.target import Target
    from priory.posteriors import Posterior

MAX_FULL_PARAMETERS = 2_048  # at which a step with full covariance takes about a second
HESSIAN_RATE_TIMES_STEPS = 20.0  # so that, with a cosine schedule, e^-10 of the initial precision remains
HESSIAN_RATE_TIMES_BATCHES = 0.2  # minibatch noise makes the corrected S too large by about rho N / 2n
MAX_HESSIAN_RATE = 0.02  # so that single draws don't dominate the precision


@dataclass
class NaturalGradientState:
    """Mean, precision and averaged gradient, and work tensors that every step overwrites."""

    loc: Tensor  # (*B, P), m
    precision: Tensor  # (*B, P), or (*B, P, P) with full covariance: S
    factor: Tensor | None  # (*B, P, P), L with S = L L', with full covariance
    momentum: Tensor  # (*B, P), the average of g
    buffers: dict[str, Tensor]
    rates: Tensor = field(metadata={"fixed": True})  # (steps,), float64 on the CPU: of the mean
    hessian_rate: float = field(metadata={"fixed": True})  # of the precision, before the schedule
    reach: Tensor = field(metadata={"fixed": True})  # (2, P), bounds on a move of the mean at learning rate 1
    noise: Tensor = field(metadata={"scratch": True})  # (S, *B, P), as drawn
    w: Tensor = field(metadata={"scratch": True})  # (S, *B, P)
    scale: Tensor = field(metadata={"scratch": True})  # (*B, P), s
    work: Tensor = field(metadata={"scratch": True})  # (2, *B, P)
    step: int = 0


@dataclass(frozen=True)
class NaturalGradient(Options):
    """Gaussian variational inference by natural gradients: the variational online Newton method.

    Updates q(w) = N(m, S^-1) by Newton steps with expected derivatives, estimated from draws of q:

        S <- (1 - rho) S + rho F,    F = (E_q[-d^2 log p(D|w) / dw^2] + T lambda) / T
        m <- m - rate S^-1 (E_q[-g] + T lambda (m - m0)) / T

    with lambda and m0 the precision and location of the prior. A step costs `samples` passes and O(samples P), or
    O(P^3) with full covariance.

    A `Density` of up to 1,024 parameters is fitted by such steps with fixed draws until q has converged, unless the
    user gives `steps`, `epochs`, or rates.

    Args:
        covariance: "diagonal", or "full" for up to 2,048 parameters. Default: "diagonal".
        samples: Number of draws of w per step. An even number comes in pairs eps, -eps, between which the gradient
            cancels in the estimate of the Hessian. Default: 1.
        learning_rate: Rate of the mean. Default: 0.3.
        schedule: "cosine", "constant", or a function from an optimizer to a `torch.optim.lr_scheduler`; applies to both
            rates. Default: "cosine".
        momentum: Fraction of the averaged gradient that a step keeps, >= 0 and < 1. Default: 0.9.
        hessian_rate: Rate rho of the precision. Default: None, 20 / steps, enough to forget the initial precision, or
            less where a minibatch is a small part of the data; at most 0.02.
        initial_scale: Initial standard deviations of q, in standard deviations of the prior. Default: 0.1.
        clip: Bound on a step of the mean, in prior standard deviations times the learning rate. Default: 0.1.
        start: Method to fit first, or posterior to start from. Default: None, the model's initial values.

    Example:
        >>> import torch
        >>> import priory as pr
        >>> X = torch.linspace(-1, 1, 50)[:, None]
        >>> model = pr.Model(torch.nn.Linear(1, 1), pr.Gaussian(0.1))
        >>> posterior = pr.fit(model, (X, X[:, 0]), pr.NaturalGradient(), steps=1000, progress=False)
        >>> round(posterior.mean["weight"].item(), 1)
        1.0

    References:
        Khan and Rue (2023), The Bayesian learning rule.
        Lin, Schmidt and Khan (2020), Handling the positive-definite constraint in the Bayesian learning rule.
        Shen et al. (2024), Variational learning is effective for large deep networks.
    """

    covariance: str = "diagonal"
    samples: int = 1
    learning_rate: float = 0.3
    schedule: str | Callable[[Optimizer], LRScheduler] = "cosine"
    momentum: float = 0.9
    hessian_rate: float | None = None
    initial_scale: float = 0.1
    clip: float = 0.1
    start: Any = None

    def __post_init__(self) -> None:
        owner = "NaturalGradient"
        known = self.covariance in ("diagonal", "full")
        require(known, "covariance", owner, "be 'diagonal' or 'full'", repr(self.covariance))
        require(is_integer(self.samples, 1), "samples", owner, "be an integer >= 1", self.samples)
        check_rate(self.learning_rate, self.schedule, owner)
        ok = number(self.momentum) and 0 <= self.momentum < 1
        require(ok, "momentum", owner, "be a number from 0 to below 1", self.momentum)
        ok = self.hessian_rate is None or (number(self.hessian_rate) and 0 < self.hessian_rate <= 1)
        require(ok, "hessian_rate", owner, "be a number above 0, at most 1, or None", self.hessian_rate)
        for name in ("initial_scale", "clip"):
            value = getattr(self, name)
            require(number(value) and 0 < value < float("inf"), name, owner, "be a positive number", value)

    @property
    def traits(self) -> Traits:
        return Traits()

    def length(self, data: Data) -> int:
        return default_steps(data.steps_per_epoch, epochs=200, least=4_000, most=50_000)

    def init(
        self,
        target: Target,
        plan: Plan,
        generator: torch.Generator,
        shape: torch.Size = torch.Size(),
        start: Posterior | None = None,
    ) -> NaturalGradientState | ArrivalState:
        loc, typical = target.start(plan.data, shape, generator, start), target.prior.typical_scale()
        if arrives(target, plan):
            search = Search(target, plan.data, generator, start, "NaturalGradient")
            if not self.adjusted:
                return begin_arrival(search, shape, self.covariance == "full")
            best = best_gaussian(search, full=False).q
            loc, typical = best.loc.to(loc).expand_as(loc).clone(), best.root.to(typical)
        precision, factor = ((self.initial_scale * typical) ** -2).expand_as(loc).clone(), None
        if self.covariance == "full":
            must = f"be 'diagonal' above {MAX_FULL_PARAMETERS:,} parameters"
            got = f"'full' for {target.size:,} parameters"
            require(target.size <= MAX_FULL_PARAMETERS, "covariance", "NaturalGradient", must, got)
            precision, factor = precision.diag_embed(), precision.sqrt().diag_embed()
        work = loc.new_empty(self.samples, *loc.shape)
        return NaturalGradientState(
            loc,
            precision,
            factor,
            torch.zeros_like(loc),
            target.buffers(shape, start),
            rates=rates(self.schedule, self.learning_rate, plan.steps, "NaturalGradient"),
            hessian_rate=self.hessian_rate or default_hessian_rate(plan),
            reach=torch.stack([-self.clip * typical, self.clip * typical]),
            noise=work,
            w=torch.empty_like(work),
            scale=torch.empty_like(loc),
            work=loc.new_empty(2, *loc.shape),
        )

    @property
    def adjusted(self) -> bool:
        """Whether the user has chosen how the optimiser steps."""
        defaults = {f.name: f.default for f in fields(self)}
        names = ("learning_rate", "schedule", "momentum", "hessian_rate", "clip")
        return any(getattr(self, name) != defaults[name] for name in names)

    def step(self, target: Target, state: Any, batch: Batch, generator: torch.Generator) -> tuple[Any, Info]:
        if isinstance(state, ArrivalState):
            return arrival_step(state)
        w = self.draw(state, generator)
        value, gradient = target.log_likelihood_and_grad(w, batch, state.buffers)
        return self.update(target, state, w, value, gradient)

    def posterior(self, target: Target, state: Any, draws: Tensor | None = None) -> Variational:
        if isinstance(state, ArrivalState):
            return arrived_posterior(target, state, "NaturalGradient")
        if state.factor is not None:
            form = FullRankForm(target.size)
            theta = form.theta(FullRankFamily(state.loc, covariance_factor(state.precision)))
            found = Variational(target, form, theta, state.buffers)
        else:
            found = DiagonalGaussian(target, DiagonalFamily(state.loc, -0.5 * state.precision.log()), state.buffers)
        first = self.initial_scale * target.prior.typical_scale()
        warn_if_flat(found, first, self.samples, "NaturalGradient")
        return found

    # The two halves of a step, for custom training loops.

    def draw(self, state: NaturalGradientState, generator: torch.Generator) -> Tensor:
        """Draw w = m + L^-T eps, (*B, P), or (S, *B, P) for several samples; valid until the next draw."""
        if self.samples % 2:
            state.noise.normal_(generator=generator)
        else:
            half = state.noise[: self.samples // 2].normal_(generator=generator)
            torch.neg(half, out=state.noise[self.samples // 2 :])
        if state.factor is None:
            torch.rsqrt(state.precision, out=state.scale)
            torch.addcmul(state.loc, state.noise, state.scale, out=state.w)
        else:
            torch.add(state.loc, solve(state.factor.mT, state.noise, upper=True), out=state.w)
        return state.w[0] if self.samples == 1 else state.w

    def update(
        self, target: Target, state: NaturalGradientState, w: Tensor, value: Tensor, gradient: Tensor
    ) -> tuple[NaturalGradientState, Info]:
        """Take the step, given log p(D|w) and its gradient at the draws that `draw` returned."""
        if has_network(target.model) and target.prior.empirical:
            target = target.with_empirical_precisions(self.posterior(target, state).family)
        prior, a, t = target.prior, target.prior_weight, target.entropy_weight
        others, volume = None, None
        if prior.others:
            others, others_gradient = target.others_and_grad(w)
            gradient = gradient.add(others_gradient, alpha=a)
        if a != t and target.model.layout.constrained:
            volume, volume_gradient = target.volume_and_grad(w)
            gradient = gradient.add(volume_gradient, alpha=t - a)
        each = gradient if self.samples > 1 else gradient[None]  # (S, *B, P)
        rate, hessian_rate = self.rates_of(state)
        state.step += 1
        move, spread = state.work
        deviation = state.loc if prior.centred else state.loc - prior.loc
        torch.mul(deviation, prior.precision, out=move)
        square = inner(move, deviation)  # sum_i lambda_i (m - m0)^2, to which the variances are added
        if state.factor is None:
            log_scales = -0.5 * torch.log(state.precision, out=spread).sum(-1)
            torch.mul(state.scale, prior.precision, out=spread)
            square = square + inner(spread, state.scale)
            spread = hessian_times_scale(spread, each, state.noise, a, t)
            keep_positive(state.precision, spread, state.scale, hessian_rate)
        else:
            square = square + inner(variances(state.factor), prior.precision.expand_as(deviation))
            log_scales = -state.factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
            hessian = (stein(each, multiply(state.factor, state.noise)) + a * prior.precision.diag_embed()) / t
            state.precision.copy_(keep_definite(state.precision, state.factor, hessian, hessian_rate))
            state.factor.copy_(factor_or_nan(state.precision))

        if self.samples > 1:
            value, gradient = value.mean(0), gradient.mean(0)
            others, volume = (None if part is None else part.mean(0) for part in (others, volume))
        state.momentum.lerp_(gradient, 1 - self.momentum)
        if a != 1:
            move.mul_(a)
        move.sub_(state.momentum, alpha=1 / (1 - self.momentum**state.step))  # the average began at zero
        move = move.div_(state.precision) if state.factor is None else newton(state.factor, move)
        if t != 1:
            move.div_(t)
        state.loc.sub_(torch.clamp(move, *state.reach, out=move), alpha=rate)
        return state, Info(parts(target, value, square, log_scales, others, volume))

    def rates_of(self, state: NaturalGradientState) -> tuple[float, float]:
        """Return the rates of this step, of the mean and of the precision."""
        rate = float(state.rates[min(state.step, len(state.rates) - 1)])
        return rate, min(1.0, state.hessian_rate * rate / self.learning_rate)


def default_hessian_rate(plan: Plan) -> float:
    """Return a rate of the precision that forgets its initial value and averages minibatch noise."""
    steps, batches = plan.steps, plan.data.steps_per_epoch
    return min(MAX_HESSIAN_RATE, HESSIAN_RATE_TIMES_STEPS / steps, HESSIAN_RATE_TIMES_BATCHES / batches)


# The update for a precision matrix and exact expectations.


def natural_step(
    loc: Tensor, precision: Tensor, gradient: Tensor, hessian: Tensor, rate: float
) -> tuple[Tensor, Tensor]:
    """Take one step from N(m, S^-1): S' = (1 - rho) S + rho E[H], m' = m - rho S'^-1 E[G], (P,) and (P, P).

    `gradient` and `hessian` are the expected derivatives of minus the log joint under q, divided by T. S' is positive
    definite only if the Hessian allows it.
    """
    changed = torch.lerp(precision, hessian, rate)
    return loc - rate * torch.linalg.solve(changed, gradient), changed


# Diagonal covariance, in place on tensors (*B, P).


def hessian_times_scale(spread: Tensor, gradients: Tensor, noise: Tensor, a: float, t: float) -> Tensor:
    """Overwrite lambda s by F s = (a lambda s - mean of g eps) / t; a and t weight the prior and the entropy."""
    if a != 1:
        spread.mul_(a)
    for g, eps in zip(gradients, noise, strict=True):
        spread.addcmul_(g, eps, value=-1 / len(noise))
    return spread.div_(t) if t != 1 else spread


def keep_positive(precision: Tensor, hessian_times_scale: Tensor, scale: Tensor, rate: float) -> None:
    """Update S <- (S + X^2 / S) / 2 with X = (1 - rho) S + rho F, in place; `scale` is S^(-1/2), and is overwritten.

    At least half of S remains, whatever F is. X^2 / S is the square of X s = (1 - rho) S s + rho F s.
    """
    x = torch.lerp(scale.mul_(precision), hessian_times_scale, rate, out=scale)
    precision.mul_(0.5).addcmul_(x, x, value=0.5)


# Full covariance, on matrices (*B, P, P) and vectors (..., *B, P).


def stein(gradients: Tensor, v: Tensor) -> Tensor:
    """Average over draws -(g v' + v g') / 2, from (S, *B, P) to (*B, P, P)."""
    product = -torch.einsum("s...i,s...j->...ij", gradients, v) / len(v)
    return 0.5 * (product + product.mT)


def keep_definite(precision: Tensor, factor: Tensor, hessian: Tensor, rate: float) -> Tensor:
    """Return (S + X S^-1 X) / 2 with X = (1 - rho) S + rho F and S = L L': at least S / 2 for any F."""
    y = torch.linalg.solve_triangular(factor, torch.lerp(precision, hessian, rate), upper=False)  # L^-1 X
    return 0.5 * (precision + y.mT @ y)


def factor_or_nan(matrix: Tensor) -> Tensor:
    """Return the Cholesky factor, NaN for members whose matrix is not positive definite."""
    factor, definite = try_cholesky(matrix)
    return torch.where(definite[..., None, None], factor, torch.nan)


def multiply(matrix: Tensor, vectors: Tensor) -> Tensor:
    """Multiply vectors (..., *B, P) by a matrix."""
    return (matrix @ vectors[..., None])[..., 0]


def solve(triangular: Tensor, vectors: Tensor, upper: bool) -> Tensor:
    """Solve A x = b for a triangular A and vectors b (..., *B, P)."""
    return torch.linalg.solve_triangular(triangular, vectors[..., None], upper=upper)[..., 0]


def newton(factor: Tensor, vector: Tensor) -> Tensor:
    """Return (L L')^-1 x."""
    return solve(factor.mT, solve(factor, vector, upper=False), upper=True)


def variances(factor: Tensor) -> Tensor:
    """Return the diagonal of (L L')^-1, (*B, P)."""
    eye = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    return torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False).square().sum(-2)


def covariance_factor(precision: Tensor) -> Tensor:
    """Return the lower Cholesky factor of S^-1: U^-T, where S = U U' and U is upper-triangular."""
    upper = factor_or_nan(precision.flip(-2, -1)).flip(-2, -1)
    eye = torch.eye(upper.shape[-1], dtype=upper.dtype, device=upper.device)
    return torch.linalg.solve_triangular(upper, eye.expand_as(upper), upper=True).mT


def number(value: object) -> bool:
    """Whether a value is a plain number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
