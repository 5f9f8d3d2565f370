"""A method from nothing: stochastic gradient ascent to a point (Robbins and Monro 1951), in the form of every method.

    w <- w + a_t / N * d/dw [log p(D|w) + T log p(w)],    a_t = learning_rate / (1 + decay t)

D stands for a minibatch multiplied by N/n, which the target does. The division by N makes `learning_rate` one for the
mean loss, as in the usual training loop. Parameters that the likelihood learns, such as a noise, stay where they begin:
chosen together with the weights they would run away. Cost of a step: one pass of the network and O(P).

Run it: python examples/new_method.py
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
    """What the next step needs."""

    w: Tensor  # (*B, P)
    step: int
    buffers: dict[str, Tensor]


@dataclass(frozen=True)
class SGDPoint(Options):
    """The mode of the posterior by plain stochastic gradients, with steps that shrink."""

    learning_rate: float = 0.1
    decay: float = 0.01
    start: Any = None

    def __post_init__(self) -> None:
        require(self.learning_rate > 0, "learning_rate", "SGDPoint", "be positive", self.learning_rate)
        require(self.decay >= 0, "decay", "SGDPoint", "be zero or more", self.decay)

    @property
    def traits(self) -> Traits:
        return Traits()

    def length(self, data: Data) -> int:
        return max(1000, 100 * data.steps_per_epoch)

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
        if start is None:
            w = target.start(plan.data, shape, generator)
        else:
            w = start.draw(1, generator)[0].expand(*shape, -1).clone()
        return State(w, 0, target.buffers(shape))

    def step(self, target: Target, state: State, batch: Batch, generator: torch.Generator) -> tuple[State, Info]:
        log_likelihood, gradient = target.log_likelihood_and_grad(state.w, batch, state.buffers)
        log_prior, prior_gradient = target.log_prior_and_grad(state.w, jacobian=False)
        uphill = gradient + target.prior_weight * prior_gradient
        uphill[..., target.model.learnt] = 0
        state.w += rate(self, state.step) / (target.num_data or 1) * uphill  # the state is ours to overwrite
        state.step += 1
        loss = -log_likelihood - target.prior_weight * log_prior
        return state, Info({"loss": loss, "nll": -log_likelihood, "log_prior": log_prior})

    def posterior(self, target: Target, state: State, draws: Tensor | None = None) -> Point:
        return Point(target, state.w, state.buffers)


def rate(method: SGDPoint, step: int) -> float:
    """a_t: its sum is infinite and that of its square is not, so that the noise of minibatches dies out."""
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
