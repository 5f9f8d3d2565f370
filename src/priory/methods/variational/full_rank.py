"""Variational inference with a full covariance, by natural gradients in the local coordinates of q.

    q(w) = N(m, L L'),   maximise   elbo = E_q[log p(D|w)] - T KL(q || p)

With w = m + L eps, a step moves m to m + L d and L to L (I + N) exp(S), N strictly lower-triangular and S diagonal. In
these local coordinates the Fisher information is the identity for d and N, and two for S, so that

    d = -rate L' dm,     N = -rate tril(L' dL, -1),     S = -rate diag(L' dL) / 2

is a natural gradient (Lin, Nielsen, Khan, Schmidt 2021). It is invariant to affine reparameterisation, so a narrow or
correlated posterior takes no more steps than a round one. The exponential keeps the diagonal of L positive. Steps are
limited to one standard deviation per coordinate. The default estimator sticks the landing: its noise vanishes where q
is the posterior, so a Gaussian posterior is reached to the last digit. Cost of a step: `samples` passes, O(samples
P^2), P^3 multiplications (two products, each reading lower triangles only), and memory for P^2 numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from priory.core.errors import require
from priory.core.linalg import cholesky
from priory.families.full_rank import FullRankFamily as Gaussian
from priory.families.full_rank import FullRankForm
from priory.methods.base import Info
from priory.methods.optimise import rates
from priory.methods.variational.arrival import (
    ArrivalState,
    Search,
    arrival_step,
    arrived_posterior,
    arrives,
    begin_arrival,
    best_gaussian,
)
from priory.methods.variational.base import VariationalMethod, bound_metrics, status_of_gap, updated_baseline
from priory.posteriors.status import CONVERGED, Status, worst
from priory.posteriors.variational import Variational

if TYPE_CHECKING:
    from priory.core.data import Batch
    from priory.methods.base import Plan
    from priory.models.target import Target
    from priory.posteriors import Posterior

MAX_PARAMETERS = 5_000  # whose Cholesky factor takes 200 MB in double precision
STRIP_COLUMNS = 128  # per strip of a triangular product: wide enough to multiply at full speed


@dataclass
class FullRankState:
    """Mean and Cholesky factor of q, learning rates, and the moving average of f, the baseline of score functions."""

    loc: Tensor  # (*B, P)
    tril: Tensor  # (*B, P, P)
    buffers: dict[str, Tensor]
    baseline: Tensor  # (*B,)
    rates: Tensor = field(metadata={"fixed": True})  # (steps,)
    search: Search | None = field(default=None, metadata={"fixed": True})  # from which the fit has arrived
    given: Status = field(default=CONVERGED, metadata={"fixed": True})  # of the start: whether it covers the posterior
    count: int = 0


@dataclass(frozen=True)
class FullRank(VariationalMethod):
    """Gaussian variational inference with a full covariance, for up to 5,000 parameters.

    Maximises the evidence lower bound over

        q(w) = N(m, L L'),    L lower-triangular

    by natural gradients, which need no more steps for a narrow or correlated posterior than for a round one. A step
    costs `samples` passes, P^3 multiplications and memory for P^2 numbers. Use `LowRank` for more parameters.

    A `Density` of up to 1,024 parameters is fitted by Newton steps with fixed draws until q has converged, unless the
    user gives `steps`, `epochs`, or options of the stochastic steps.

    Args:
        samples: Number of draws of w per step. Default: 16.
        learning_rate: Step of the natural gradient, as a fraction of the way to the optimum. Default: 0.1.

    Example:
        >>> import torch
        >>> import priory as pr
        >>> precision = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
        >>> density = pr.Density(lambda p: -0.5 * p["x"] @ precision @ p["x"], {"x": pr.Param((2,))})
        >>> posterior = pr.fit(density, None, pr.FullRank(), steps=1000, progress=False)
        >>> posterior.summary()["sd"].square()  # the diagonal of the inverse: 2/3
        tensor([0.6667, 0.6667], dtype=torch.float64)

    References:
        Titsias and Lazaro-Gredilla (2014), Doubly stochastic variational Bayes for non-conjugate inference.
        Lin, Nielsen, Khan and Schmidt (2021), Tractable structured natural-gradient descent using local
        parameterizations.
    """

    samples: int = 16
    learning_rate: float = 0.1

    most: ClassVar[int] = MAX_PARAMETERS

    def form(self, target: Target) -> FullRankForm:
        return FullRankForm(target.size)

    def init(
        self,
        target: Target,
        plan: Plan,
        generator: torch.Generator,
        shape: torch.Size = torch.Size(),
        start: Posterior | None = None,
    ) -> FullRankState | ArrivalState:
        few = target.size <= self.most
        require(few, "model", "FullRank", f"have at most {self.most:,} parameters (LowRank takes more)", target.size)
        learning = rates(self.schedule, self.learning_rate, plan.steps, "FullRank")
        if self.divergence is None and arrives(target, plan):
            search = Search(target, plan.data, generator, start, "FullRank")
            if not self.adjusted:
                return begin_arrival(search, shape, full=True)
            best, dtype = best_gaussian(search, full=True), target.model.dtype
            loc, tril = best.q.loc.to(dtype), cholesky(best.q.covariance(), "covariance of q").to(dtype)
            loc, tril = loc.expand(*shape, *loc.shape).clone(), tril.expand(*shape, *tril.shape).clone()
            given = best.status_of_rivals()
            return FullRankState(loc, tril, {}, loc.new_zeros(shape), learning, search, given)
        loc = target.start(plan.data, shape, generator, start)
        scale = self.first_scale(target).expand_as(loc)
        return FullRankState(loc, scale.diag_embed(), target.buffers(shape, start), loc.new_zeros(shape), learning)

    def step(self, target: Target, state: Any, batch: Batch, generator: torch.Generator) -> tuple[Any, Info]:
        if isinstance(state, ArrivalState):
            return arrival_step(state)
        loc, tril = (t.detach().requires_grad_() for t in (state.loc, state.tril))
        with torch.enable_grad():
            found = self.bound.estimate(target, Gaussian(loc, tril), batch, state, generator)
            toward, spread = torch.autograd.grad(found.loss.sum(), (loc, tril))
        # the loss is T times the divergence to the tempered posterior: divide by T to keep the rate a fraction
        rate = float(state.rates[min(state.count, len(state.rates) - 1)]) / target.entropy_weight
        state.loc, state.tril = natural_step(state.loc, state.tril, toward, spread, rate, self.samples)
        state.baseline = updated_baseline(state.baseline, found, first=state.count == 0)
        state.count += 1
        return state, Info(bound_metrics(found, self.divergence is not None))

    def posterior(self, target: Target, state: Any, draws: Tensor | None = None) -> Variational:
        if isinstance(state, ArrivalState):
            return arrived_posterior(target, state, "FullRank")
        form = self.form(target)
        found = Variational(target, form, form.theta(Gaussian(state.loc, state.tril)), state.buffers)
        if state.search is not None and state.count >= len(state.rates):
            found.know(worst([state.given, status_of_gap(found.family, state.search, self.chosen)]))
            found.compute_k_hat(state.search.data)
        self.warn_if_flat(found)
        return found


def natural_step(
    loc: Tensor, tril: Tensor, toward: Tensor, spread: Tensor, rate: float, samples: int
) -> tuple[Tensor, Tensor]:
    """Take one natural-gradient step from N(m, L L'), given the gradients of the loss in m (*B, P) and L (*B, P, P).

    The noise of N and S grows as P / samples, so their rate is lowered by samples / P where that is below 1.
    """
    size = loc.shape[-1]
    d = within(-rate * (tril.mT @ toward.unsqueeze(-1)).squeeze(-1), math.sqrt(size), dims=(-1,))
    matrix = lower_of_transposed_product(tril, spread)
    matrix.diagonal(0, -2, -1).mul_(0.5)
    matrix = within(-rate * min(1.0, samples / size) * matrix, 0.5, dims=(-2, -1))
    scale = matrix.diagonal(0, -2, -1).exp()
    matrix.diagonal(0, -2, -1).fill_(1.0)
    return loc + (tril @ d.unsqueeze(-1)).squeeze(-1), lower_product(tril, matrix) * scale.unsqueeze(-2)


def lower_product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply two lower-triangular matrices, (*B, P, P), strip by strip: a third of the multiplications.

    >>> lower_product(torch.tensor([[1.0, 0.0], [2.0, 1.0]]), torch.tensor([[1.0, 0.0], [3.0, 1.0]]))
    tensor([[1., 0.],
            [5., 1.]])
    """
    product = torch.zeros_like(b)
    for at in range(0, b.shape[-1], STRIP_COLUMNS):
        strip = slice(at, at + STRIP_COLUMNS)
        product[..., at:, strip] = a[..., at:, at:] @ b[..., at:, strip]
    return product


def lower_of_transposed_product(a: Tensor, b: Tensor) -> Tensor:
    """Compute tril(a' b) for a lower-triangular a and any b, (*B, P, P), with a sixth of the multiplications.

    >>> lower_of_transposed_product(torch.tensor([[1.0, 0.0], [2.0, 1.0]]), torch.ones(2, 2))
    tensor([[3., 0.],
            [1., 1.]])
    """
    product = torch.zeros_like(b)
    for at in range(0, b.shape[-1], STRIP_COLUMNS):
        strip = slice(at, at + STRIP_COLUMNS)
        product[..., strip, : at + STRIP_COLUMNS] = a[..., at:, strip].mT @ b[..., at:, : at + STRIP_COLUMNS]
    return product.tril_()


def within(step: Tensor, length: float, dims: tuple[int, ...]) -> Tensor:
    """Shorten a step to at most this length; NaN stays NaN."""
    norm = torch.linalg.vector_norm(step, dim=dims, keepdim=True)
    return step * torch.clamp(length / norm, max=1.0)
