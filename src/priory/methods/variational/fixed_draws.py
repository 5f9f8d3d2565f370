"""Fits of any family by fixed draws: an ordinary function of theta, maximised by L-BFGS.

    maximise    F(theta) = mean_s log p(w_s(theta)) + H(q_theta),      w_s(theta) = the draw of q_theta from noise s

The noise stays the same within a round (Giordano, Ingram and Broderick 2024), and has exactly the moments of a standard
normal where q consists of Gaussians. A round ends when L-BFGS gains less than 1e-3 nats. The next round has other
noise. What L-BFGS gains there is what the two optima have lost to their draws together, so that half of it is the
distance to the optimum of the family. If it is below 0.01 nats, and the means of q move by less than 0.05 standard
deviations, the average of both is the result. Otherwise the next round has four times as many draws.

Fits work in a `Frame` that the best Gaussian gives.

References:
    Giordano, Ingram and Broderick (2024), Black box variational inference with a deterministic objective: faster, more
    accurate, and even more black box.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from priory.diagnostics.flatness import FLATNESS_DRAWS
from priory.families.base import FixedNoise
from priory.methods.base import Info
from priory.methods.variational.flat_directions import warn_if_flat
from priory.methods.variational.gaussian_newton import (
    DRAWS_GROWTH,
    FRESH_GAP_NATS,
    MAX_DRAWS,
    MAX_MEAN_SHIFT,
    first_draws,
    matched_draws,
    sobol,
)
from priory.posteriors.status import CONVERGED, Status
from priory.posteriors.variational import Variational

if TYPE_CHECKING:
    from priory.families import Family, Form
    from priory.methods.variational.arrival import Search
    from priory.methods.variational.frame import Frame
    from priory.models.target import Target

STEP_ITERATIONS = 40  # of L-BFGS in one step of the fit
LBFGS_HISTORY = 20
MIN_GAIN_NATS = 1e-3  # of a step, below which a round ends
MAX_STEPS = 60


@dataclass
class FixedDrawsState:
    """Variational parameters in a frame, and the round of fixed draws that they are fitted to."""

    theta: Tensor  # (*B, K), float64
    before: Tensor  # (*B, K), the optimum of the round before
    form: Form = field(metadata={"fixed": True})
    frame: Frame = field(metadata={"fixed": True})
    search: Search = field(metadata={"fixed": True})
    columns: int = field(metadata={"fixed": True})  # normal variables per draw
    given: Status = field(metadata={"fixed": True})  # of the start: whether it covers the posterior
    round: int = 0
    count: int = 0  # draws of the round
    steps: int = 0
    gain: float = 0.0  # of the objective in this round, nats
    gap: float = math.inf  # nats to the optimum of the family
    shift: float = math.inf  # standard deviations by which the last round has moved a mean
    ended: bool = False

    def noise(self) -> FixedNoise:
        """Return the noise of the round."""
        seed, device = self.search.seed + self.round, self.theta.device
        return FixedNoise(
            sobol(self.count, self.columns, seed).to(device), matched_draws(self.count, self.columns, seed, device)
        )

    def advance(self) -> tuple[Family, Tensor, Tensor, Tensor]:
        """Run L-BFGS for some iterations; return the family before, its draws, values of log p and entropy."""
        noise, theta = self.noise(), self.theta.reshape(-1, self.theta.shape[-1])[0].clone().requires_grad_()
        family = self.form.family(theta.detach())
        first: float | None = None
        found: tuple[Tensor, Tensor, Tensor] | None = None
        best, lowest = theta.detach().clone(), math.inf
        search = torch.optim.LBFGS(
            [theta],
            max_iter=STEP_ITERATIONS,
            history_size=LBFGS_HISTORY,
            line_search_fn="strong_wolfe",
            tolerance_grad=0.0,
            tolerance_change=0.0,
        )

        def loss() -> Tensor:
            nonlocal first, found, best, lowest
            search.zero_grad()
            with torch.enable_grad():
                value, parts = self.objective(theta, noise)
                (-value).backward()
            if found is None:
                first, found = float(value.detach()), parts
            ok = math.isfinite(float(value.detach())) and bool(torch.isfinite(theta.grad).all())  # pyright: ignore
            if ok and -float(value.detach()) < lowest:
                best, lowest = theta.detach().clone(), -float(value.detach())
            return -value.detach() if ok else torch.full_like(value.detach(), math.inf)

        search.step(loss)
        assert first is not None  # L-BFGS has evaluated the loss
        assert found is not None
        self._account(best, -lowest - first)
        return family, *found

    def objective(self, theta: Tensor, noise: FixedNoise) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Return F at theta (K,), differentiable; and the draws (S, P), log p at them and the entropy of q."""
        family = self.form.family(theta)
        v = family.sample(self.count, noise.restarted())
        weights, w = family.weights(len(v)), self.frame.outward(v.detach())
        values, gradient = self.search.joint(w)
        attached = values + (self.frame.pulled_back(gradient) * (v - v.detach())).sum(-1)
        entropy = family.entropy()
        if entropy is None:
            log_q = family.log_prob(v)
            entropy = -log_q.mean() if weights is None else -(weights * log_q).sum()
        mean = attached.mean() if weights is None else (weights * attached).sum()
        return mean + entropy, (w, values, entropy.detach() + self.frame.log_det())

    def _account(self, theta: Tensor, gain: float) -> None:
        """Take the result of L-BFGS, and decide whether the round or the fit has ended."""
        self.steps += 1
        self.theta, self.gain = theta.expand_as(self.theta).clone(), self.gain + gain
        if gain > MIN_GAIN_NATS and self.steps < MAX_STEPS:
            return
        if self.round > 0:
            self.gap, self.shift = 0.5 * self.gain, self._mean_shift()
            more = DRAWS_GROWTH * self.count
            if self.converged:
                self.theta = 0.5 * (self.theta + self.before) if self.round == 1 else self.theta
                self.ended = True
            elif more * self.columns > MAX_DRAWS * 64 or more > MAX_DRAWS or self.steps >= MAX_STEPS:
                self.ended = True
            else:
                self.count = more
        self.round, self.before, self.gain = self.round + 1, self.theta.clone(), 0.0

    def _mean_shift(self) -> float:
        """Return the largest move of a mean since the round before, in standard deviations."""
        pair = [self.form.family(t.reshape(-1, t.shape[-1])[0]).moments() for t in (self.theta, self.before)]
        if pair[0] is None or pair[1] is None:
            return 0.0
        return float(((pair[0][0] - pair[1][0]) / pair[0][1].sqrt()).abs().max())

    @property
    def converged(self) -> bool:
        """Whether the last round has changed nothing that matters."""
        return self.gap <= FRESH_GAP_NATS and self.shift <= MAX_MEAN_SHIFT

    def status(self) -> Status:
        """Return the status of the fit, apart from k-hat."""
        if self.converged:
            return self.given
        if not math.isfinite(self.gap):
            return Status("not_converged", f"The bound was still rising after {self.steps} steps: use NUTS.")
        what = f"With {self.count:,} draws the bound is {self.gap:.2g} nats from its optimum"
        if self.gap <= FRESH_GAP_NATS:
            what = f"With {self.count:,} draws the means are uncertain by {self.shift:.2g} standard deviations"
        return Status("not_converged", f"{what}, because log p varies too strongly over q: use NUTS.")


def begin_fixed_draws(
    form: Form, theta: Tensor, frame: Frame, search: Search, columns: int, shape: torch.Size, given: Status = CONVERGED
) -> FixedDrawsState:
    """Return the state of a fit from theta (K,) in a frame; `columns` is the number of normal variables per draw."""
    theta = theta.double().expand(*shape, len(theta)).clone()
    return FixedDrawsState(theta, theta.clone(), form, frame, search, columns, given, count=first_draws(columns))


def fixed_draws_step(state: FixedDrawsState) -> tuple[FixedDrawsState, Info]:
    """Take one step, with the bound before it as metrics."""
    family, w, values, entropy = state.advance()
    bound = state.search.bound(w, values, entropy, family.weights(len(w)))
    metrics = {"elbo": bound.value, "nll": bound.nll, "kl": bound.kl, "loss": bound.loss}
    lead = state.theta.shape[:-1]
    return state, Info({k: v.expand(lead) for k, v in metrics.items()}, done=state.ended)


def fixed_draws_posterior(target: Target, state: FixedDrawsState, owner: str) -> Variational:
    """Return the posterior of a fit, with its status and, once the fit has ended, its k-hat."""
    theta = state.form.moved(state.theta, state.frame.centre, state.frame.root)
    assert theta is not None
    found = Variational(target, state.form, theta.to(target.model.dtype))
    found.end_by_rule(state.status(), state.search.data if state.ended else None)
    if state.ended and not state.converged:
        warn_if_flat(found, torch.zeros_like(state.frame.centre), FLATNESS_DRAWS, owner)
    return found
