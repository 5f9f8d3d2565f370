"""A variational method from scratch: a factorised Gaussian by reparameterised gradients (Kingma and Welling 2014).

    maximise  E_q[log p(w, D)] + H(q),    q(w) = prod_i N(w_i; m_i, s_i^2),    w = m + s eps,  eps ~ N(0, I)

with the gradient g of the tempered log joint at w and H(q) = sum_i log s_i + constant:

    d/dm = g,    d/dlog s = g s eps + 1

The target scales a minibatch by N/n and tempers the log joint. Cost of a step: one pass of the network and O(P).

Run it: python examples/new_variational_method.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import priory as pr
from priory.families import DiagonalFamily
from priory.methods.base import Info, Options, Plan, Traits
from priory.methods.optimise import Adam, check_rate, default_steps, rates
from priory.posteriors import DiagonalGaussian, Posterior

if TYPE_CHECKING:
    from priory.core.data import Batch, Data
    from priory.models.target import Target

INITIAL_SCALE = 0.02  # of the prior's standard deviations


@dataclass
class State:
    """What the next step needs; tensors have the leading shape (*B) that `init` was given."""

    theta: Tensor  # m and log s, (*B, 2 P)
    adam: Adam
    buffers: dict[str, Tensor]  # what training writes, such as the statistics of batch normalisation


@dataclass(frozen=True)
class FactorisedGaussian(Options):
    """Gaussian variational inference without correlations, one draw per step.

    Args:
        learning_rate: Step size of Adam at the first step. Default: 0.01.
        start: A method that is fitted first, or a posterior to begin from. Default: None, the model's own weights.
    """

    learning_rate: float = 1e-2
    start: Any = None

    def __post_init__(self) -> None:
        check_rate(self.learning_rate, "cosine", "FactorisedGaussian")

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
    ) -> State:
        loc = target.start(plan.data, shape, generator, start)
        log_scale = (INITIAL_SCALE * target.prior.typical_scale()).log().expand_as(loc)
        theta = torch.cat([loc, log_scale], -1)
        learning = rates("cosine", self.learning_rate, plan.steps, "FactorisedGaussian")
        return State(theta, Adam.of(theta, learning), target.buffers(shape, start))

    def step(self, target: Target, state: State, batch: Batch, generator: torch.Generator) -> tuple[State, Info]:
        noise = torch.randn(
            *state.theta.shape[:-1], target.size, generator=generator, dtype=state.theta.dtype, device=generator.device
        )
        elbo, gradient = elbo_and_grad(target, state.theta, noise, batch, state.buffers)
        state.adam.descend(state.theta, -gradient)
        return state, Info({"elbo": -target.loss(elbo), "loss": target.loss(elbo)})

    def posterior(self, target: Target, state: State, draws: Tensor | None = None) -> DiagonalGaussian:
        loc, log_scale = state.theta.chunk(2, -1)
        return DiagonalGaussian(target, DiagonalFamily(loc, log_scale), state.buffers)


def elbo_and_grad(
    target: Target, theta: Tensor, noise: Tensor, batch: Batch, buffers: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """One draw's estimate of the ELBO of the tempered posterior, and its gradient in theta: (*B,), (*B, 2 P)."""
    loc, log_scale = theta.chunk(2, -1)
    moved = log_scale.exp() * noise
    value, gradient = target.log_joint_and_grad(loc + moved, batch, buffers)
    entropy = (log_scale + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)
    return value + entropy, torch.cat([gradient, gradient * moved + 1], -1)


def main() -> None:
    """Fit a line to inputs without correlation, and compare with the posterior in closed form."""
    generator = torch.Generator().manual_seed(0)
    X = torch.linalg.qr(torch.randn(200, 2, generator=generator, dtype=torch.float64)).Q * 200**0.5
    y = X @ torch.tensor([1.0, -2.0], dtype=torch.float64)
    y = y + 0.5 * torch.randn(200, generator=generator, dtype=torch.float64)
    model = pr.Model(nn.Linear(2, 1, bias=False, dtype=torch.float64), pr.Gaussian(0.5), prior=1.0)
    posterior = pr.fit(model, (X, y), FactorisedGaussian(), progress=False)
    precision = X.T @ X / 0.5**2 + torch.eye(2, dtype=torch.float64)
    print("found", posterior.mean["weight"].squeeze(0).tolist(), posterior.family.scale.tolist())
    mean = torch.linalg.solve(precision, X.T @ y / 0.5**2)
    print("exact", mean.tolist(), precision.diagonal().rsqrt().tolist())


if __name__ == "__main__":
    main()
