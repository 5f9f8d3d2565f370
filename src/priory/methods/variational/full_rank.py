"""Variational inference with a full covariance, by natural gradients in q's own coordinates.

    q(w) = N(m, L L'),   maximise   elbo = E_q[log p(D|w)] - T KL(q || p)

With w = m + L eps, a step moves m to m + L d and L to L (I + N) exp(S), N strictly lower-triangular and S diagonal. In
these local coordinates the Fisher information is the identity for d and N, and two for S, so that

    d = -rate L' dm,     N = -rate tril(L' dL, -1),     S = -rate diag(L' dL) / 2

is a natural gradient (Lin, Nielsen, Khan, Schmidt 2021), the same in every affine coordinate system: a posterior that
is narrow or tilted takes no more steps than a round one. The exponential keeps L's diagonal positive. Steps are kept
below one standard deviation a coordinate. The estimator sticks the landing: nothing of its noise is left where q is the
posterior, so that a Gaussian posterior is reached to the last digit. Cost of a step: `samples` passes, O(samples P^2),
P^3 multiplications (two products, of whose factors only the lower triangles are read), and P^2 numbers of memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from priory.core.errors import require
from priory.families.full_rank import FullRankFamily as Gaussian
from priory.families.full_rank import FullRankForm
from priory.methods.base import Info
from priory.methods.optimise import rates
from priory.methods.variational.base import VariationalMethod, moved_average, told
from priory.posteriors.variational import Variational

if TYPE_CHECKING:
    from priory.core.data import Batch
    from priory.methods.base import Plan
    from priory.models.target import Target
    from priory.posteriors import Posterior

LARGEST = 5_000  # parameters, whose factor takes 200 MB in double precision
STRIP = 128  # columns of a strip of a triangular product: wide enough that its parts are products at full speed


@dataclass
class State:
    """Mean and Cholesky factor of q, the rate of each step, and an average of f as the baseline of score functions."""

    loc: Tensor  # (*B, P)
    tril: Tensor  # (*B, P, P)
    buffers: dict[str, Tensor]
    baseline: Tensor  # (*B,)
    rates: Tensor = field(metadata={"fixed": True})  # (steps,)
    count: int = 0


@dataclass(frozen=True)
class FullRank(VariationalMethod):
    """Gaussian variational inference with every correlation, for up to a few thousand parameters.

    `learning_rate` is that of the natural gradient, a fraction of the way to the optimum; the other options are those
    of `MeanField`.

    >>> FullRank(samples=1, estimator="vargrad")
    Traceback (most recent call last):
    ...
    priory.InputError: The 'samples' argument of FullRank must be at least 2 for vargrad, got 1.
    """

    samples: int = 16
    learning_rate: float = 0.1

    most: ClassVar[int] = LARGEST

    def form(self, target: Target) -> FullRankForm:
        return FullRankForm(target.size)

    def init(
        self,
        target: Target,
        plan: Plan,
        generator: torch.Generator,
        shape: torch.Size = torch.Size(),
        start: Posterior | None = None,
    ) -> State:
        few = target.size <= self.most
        require(few, "model", "FullRank", f"have at most {self.most:,} parameters (LowRank takes more)", target.size)
        loc = target.start(plan.data, shape, generator, start)
        scale = self.first_scale(target).expand_as(loc)
        learning = rates(self.schedule, self.learning_rate, plan.steps, "FullRank")
        return State(loc, scale.diag_embed(), target.buffers(shape, start), loc.new_zeros(shape), learning)

    def step(self, target: Target, state: Any, batch: Batch, generator: torch.Generator) -> tuple[Any, Info]:
        loc, tril = (t.detach().requires_grad_() for t in (state.loc, state.tril))
        with torch.enable_grad():
            found = self.bound.estimate(target, Gaussian(loc, tril), batch, state, generator)
            toward, spread = torch.autograd.grad(found.loss.sum(), (loc, tril))
        # the loss is T times the divergence to the tempered posterior, of which the rate is a fraction of the way
        rate = float(state.rates[min(state.count, len(state.rates) - 1)]) / target.entropy_weight
        state.loc, state.tril = natural_step(state.loc, state.tril, toward, spread, rate, self.samples)
        state.baseline = moved_average(state.baseline, found, first=state.count == 0)
        state.count += 1
        return state, Info(told(found))

    def posterior(self, target: Target, state: Any, draws: Tensor | None = None) -> Variational:
        form = self.form(target)
        found = Variational(target, form, form.theta(Gaussian(state.loc, state.tril)), state.buffers)
        self.warn_if_flat(found)
        return found


def natural_step(
    loc: Tensor, tril: Tensor, toward: Tensor, spread: Tensor, rate: float, samples: int
) -> tuple[Tensor, Tensor]:
    """N(m, L L') after one natural-gradient step, given the loss's gradients in m (*B, P) and in L (*B, P, P).

    From few draws N and S are noisy in proportion to P / samples, and their rate is lowered by as much.
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
    """a b of two lower-triangular matrices, (*B, P, P), strip by strip: a third of the multiplications.

    >>> lower_product(torch.tensor([[1.0, 0.0], [2.0, 1.0]]), torch.tensor([[1.0, 0.0], [3.0, 1.0]]))
    tensor([[1., 0.],
            [5., 1.]])
    """
    product = torch.zeros_like(b)
    for at in range(0, b.shape[-1], STRIP):
        strip = slice(at, at + STRIP)
        product[..., at:, strip] = a[..., at:, at:] @ b[..., at:, strip]
    return product


def lower_of_transposed_product(a: Tensor, b: Tensor) -> Tensor:
    """tril(a' b) of a lower-triangular a and any b, (*B, P, P), strip by strip: a sixth of the multiplications.

    >>> lower_of_transposed_product(torch.tensor([[1.0, 0.0], [2.0, 1.0]]), torch.ones(2, 2))
    tensor([[3., 0.],
            [1., 1.]])
    """
    product = torch.zeros_like(b)
    for at in range(0, b.shape[-1], STRIP):
        strip = slice(at, at + STRIP)
        product[..., strip, : at + STRIP] = a[..., at:, strip].mT @ b[..., at:, : at + STRIP]
    return product.tril_()


def within(step: Tensor, length: float, dims: tuple[int, ...]) -> Tensor:
    """The step, shortened to this length where it is longer; nowhere to go where it is not a number."""
    norm = torch.linalg.vector_norm(step, dim=dims, keepdim=True)
    return step * torch.clamp(length / norm, max=1.0)
