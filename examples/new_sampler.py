"""A sampler from scratch: the unadjusted Langevin algorithm (Roberts and Tweedie 1996), on minibatches (Welling and Teh
2011).

    w <- w + e d/dw log p(w, D) + sqrt(2 e) noise,    e = learning_rate / N

Without a Metropolis test the draws are off by O(e). The chains are one more leading dimension, (*B, K, P); the driver
keeps each `Info.draw`, watches the effective sample size and gives the draws back to `posterior`. Cost of a step: one
pass of the network and O(P), per chain.

Run it: python examples/new_sampler.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import priory as pr
from priory.core.errors import require
from priory.methods.base import Info, Options, Plan, Traits
from priory.methods.optimise import default_steps
from priory.posteriors import Chains, Posterior

if TYPE_CHECKING:
    from priory.core.data import Batch, Data
    from priory.models.target import Target


@dataclass
class State:
    """What the next step needs; tensors have the leading shape (*B) that `init` was given."""

    w: Tensor  # (*B, K, P)
    step: int
    burn_in: int = field(metadata={"fixed": True})  # made anew by `init`, so that a checkpoint doesn't store it


@dataclass(frozen=True)
class Langevin(Options):
    """Langevin dynamics with a constant step size; draws of the second half are kept.

    Args:
        learning_rate: Step size on the mean loss. Default: 0.01.
        chains: Number of chains. Default: 4.
        thin: Number of steps per draw that is kept. Default: 2.
        start: A method that is fitted first, or a posterior to begin from. Default: None, the model's own weights.
    """

    learning_rate: float = 0.01
    chains: int = 4
    thin: int = 2
    start: Any = None

    def __post_init__(self) -> None:
        require(self.learning_rate > 0, "learning_rate", "Langevin", "be positive", self.learning_rate)
        require(self.chains >= 1, "chains", "Langevin", "be an integer >= 1", self.chains)
        require(self.thin >= 1, "thin", "Langevin", "be an integer >= 1", self.thin)

    @property
    def traits(self) -> Traits:
        # the driver refuses batch normalisation in training mode: the log joint must be a function of w alone
        # and a prior with infer="empirical", whose precisions are set by the moments of a q
        return Traits(chains=True, spread=True, trains_buffers=False, empirical_priors=False)

    def length(self, data: Data) -> int:
        return default_steps(data.steps_per_epoch, epochs=200, least=10_000, most=50_000)

    def init(
        self,
        target: Target,
        plan: Plan,
        generator: torch.Generator,
        shape: torch.Size = torch.Size(),
        start: Posterior | None = None,
    ) -> State:
        w = target.start(plan.data, torch.Size([*shape, self.chains]), generator, start)
        return State(w, 0, plan.steps // 2)

    def step(self, target: Target, state: State, batch: Batch, generator: torch.Generator) -> tuple[State, Info]:
        value, gradient = target.log_joint_and_grad(state.w, batch)
        noise = torch.randn(state.w.shape, generator=generator, dtype=state.w.dtype, device=state.w.device)
        state.w = moved(state.w, gradient, noise, self.learning_rate / (target.num_data or 1))
        state.step += 1
        kept = state.step > state.burn_in and state.step % self.thin == 0
        return state, Info({"loss": target.loss(value).mean(-1)}, draw=state.w if kept else None)

    def posterior(self, target: Target, state: State, draws: Tensor | None = None) -> Chains:
        return Chains.kept(target, draws, state.w)


def moved(w: Tensor, gradient: Tensor, noise: Tensor, size: float) -> Tensor:
    """One step of every chain."""
    return w + size * gradient + math.sqrt(2 * size) * noise


def main() -> None:
    """Sample the weights of a line, and compare with the posterior in closed form."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(50, 2, generator=generator, dtype=torch.float64)
    y = X @ torch.tensor([1.0, -2.0], dtype=torch.float64)
    y = y + 0.5 * torch.randn(50, generator=generator, dtype=torch.float64)
    model = pr.Model(nn.Linear(2, 1, bias=False, dtype=torch.float64), pr.Gaussian(0.5), prior=1.0)
    posterior = pr.fit(model, (X, y), Langevin(chains=64), progress=False)
    exact = torch.linalg.solve(X.T @ X / 0.5**2 + torch.eye(2, dtype=torch.float64), X.T @ y / 0.5**2)
    print("found", posterior.mean["weight"].squeeze(0).tolist())
    print("exact", exact.tolist())


if __name__ == "__main__":
    main()
