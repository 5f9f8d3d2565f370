"""A point method from scratch: stochastic gradient ascent to the mode (Robbins and Monro 1951).

    w <- w + a_t / N * d/dw [log p(D|w) + T log p(w)],    a_t = learning_rate / (1 + decay t)

The target scales a minibatch by N/n. The division by N makes `learning_rate` one for the mean loss, as in the usual
training loop. Cost of a step: one pass of the network and O(P).

A point leaves the parameters of the likelihood, such as a noise to be learnt, where they start: the joint density of
weights and noise is unbounded. A q and a sampler treat them as coordinates like any other.

Run it: python examples/new_point_method.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import priory as pr
from priory.core.errors import require
from priory.methods.base import Info, Options, Plan, Traits
from priory.posteriors import Point, Posterior

if TYPE_CHECKING:
    from priory.core.data import Batch, Data
    from priory.models.target import Target


@dataclass
class State:
    """What the next step needs; tensors have the leading shape (*B) that `init` was given."""

    w: Tensor  # (*B, P)
    step: int
    buffers: dict[str, Tensor]  # what training writes, such as the statistics of batch normalisation


@dataclass(frozen=True)
class SGDPoint(Options):
    """The mode of the posterior by plain stochastic gradients, with steps that shrink.

    Args:
        learning_rate: Step size on the mean loss at the first step. Default: 0.1.
        decay: How fast the step size falls. Default: 0.01.
        start: A method that is fitted first, or a posterior to begin from. Default: None, the model's own weights.
    """

    learning_rate: float = 0.1
    decay: float = 0.01
    start: Any = None

    def __post_init__(self) -> None:
        require(self.learning_rate > 0, "learning_rate", "SGDPoint", "be positive", self.learning_rate)
        require(self.decay >= 0, "decay", "SGDPoint", "be >= 0", self.decay)

    @property
    def traits(self) -> Traits:
        return Traits(finds_mode=True)

    def length(self, data: Data) -> int:
        return max(1000, 100 * data.steps_per_epoch)

    def init(
        self,
        target: Target,
        plan: Plan,
        generator: torch.Generator,
        shape: torch.Size = torch.Size(),
        start: Posterior | None = None,
    ) -> State:
        return State(target.start(plan.data, shape, generator, start), 0, target.buffers(shape, start))

    def step(self, target: Target, state: State, batch: Batch, generator: torch.Generator) -> tuple[State, Info]:
        log_likelihood, gradient = target.log_likelihood_and_grad(state.w, batch, state.buffers)
        log_prior, prior_gradient = target.log_prior_and_grad(state.w, jacobian=False)  # a mode of the parameters
        ascent = gradient + target.prior_weight * prior_gradient
        ascent[..., target.model.learnt] = 0
        state.w += rate(self, state.step) / (target.num_data or 1) * ascent  # a State may be overwritten
        state.step += 1
        loss = -log_likelihood - target.prior_weight * log_prior
        return state, Info({"loss": loss, "nll": -log_likelihood, "log_prior": log_prior})

    def posterior(self, target: Target, state: State, draws: Tensor | None = None) -> Point:
        return Point(target, state.w, state.buffers)


def rate(method: SGDPoint, step: int) -> float:
    """a_t: its sum is infinite and that of its square is finite, so that the noise of minibatches dies out."""
    return method.learning_rate / (1 + method.decay * step)


def main() -> None:
    """Fit a line, and compare with the mode in closed form."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(200, 2, generator=generator, dtype=torch.float64)
    y = X @ torch.tensor([1.0, -2.0], dtype=torch.float64)
    y = y + 0.5 * torch.randn(200, generator=generator, dtype=torch.float64)
    model = pr.Model(nn.Linear(2, 1, bias=False, dtype=torch.float64), pr.Gaussian(0.5), prior=1.0)
    found = pr.fit(model, (X, y), SGDPoint(), progress=False).mean["weight"]
    exact = torch.linalg.solve(X.T @ X / 0.5**2 + torch.eye(2, dtype=torch.float64), X.T @ y / 0.5**2)
    print("found", found.squeeze(0).tolist())
    print("exact", exact.tolist())


if __name__ == "__main__":
    main()
