"""SWAG: a Gaussian fitted to the path of the optimiser (Maddox et al. 2019).

From a mode, Adam continues at a constant rate and moves around it. From n snapshots w_i of its path

    m = 1/n sum_i w_i,    v = 1/n sum_i (w_i - m)^2,    D = (w_i - m) for the last r of them, as columns
    q(w) = N(m, diag(v) / 2 + D D' / (2 (r - 1)))

Deviations are taken from the mean of all snapshots. In the paper each is taken from the mean of the snapshots up to it,
which makes early ones smaller. The mean alone is stochastic weight averaging (Izmailov et al. 2018). The width of the
path depends on the rate and on the batch size as well as on the data, so SWAG is a heuristic: check its k-hat and its
calibration. `Ensemble(SWAG(), size)` is multi-SWAG (Wilson and Izmailov 2020).

Cost of a step: that of MAP, and O(P) per snapshot; memory O(r P).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from priory.core.errors import is_integer, require
from priory.families.low_rank import LowRankForm
from priory.methods.base import Info, Options, Plan, Traits, factors_of
from priory.methods.optimise import Adam, check_rate, rates
from priory.methods.point.map import MAP
from priory.posteriors import Posterior, Variational
from priory.posteriors.status import CONVERGED, HistoryWords, Status, of_start

if TYPE_CHECKING:
    from torch import Tensor

    from priory.core.data import Batch, Data
    from priory.models.target import Target

MIN_SPREAD_RATIO = 0.5  # of the standard deviations of the snapshots to those of a posterior, and its inverse
MIN_VARIANCE = 1e-30  # of a coordinate that never moves, such as a learnt noise scale: the paper's floor


@dataclass
class SWAGState:
    """The current vector, and the moments of the snapshots so far."""

    w: Tensor  # (*B, P)
    adam: Adam
    buffers: dict[str, Tensor]
    mean: Tensor  # (*B, P)
    squares: Tensor  # sum_i (w_i - m)^2, (*B, P)
    last: Tensor  # the last r snapshots, the newest first, (*B, r, P)
    count: int
    every: int = field(metadata={"fixed": True})
    factors: dict[str, Tensor] = field(metadata={"fixed": True})  # on the prior precisions, as at the mode
    begun: Status = field(default=CONVERGED, metadata={"fixed": True})  # the status of the fit that found the mode
    rise: Tensor | float = 0.0  # sum over the counted snapshots of loss(w_i) - loss(m), on a fresh batch, (*B,)
    counted: int = 0  # snapshots in `rise`


@dataclass(frozen=True)
class SWAG(Options):
    """Stochastic weight averaging, Gaussian: low rank plus diagonal, from snapshots of the optimiser around a mode.

    Args:
        snapshots: Number of snapshots. Default: 100.
        rank: Number of the last snapshots in the low-rank part, at most `snapshots`. Default: 20.
        every: Steps between snapshots. Default: None, one epoch.
        learning_rate: Constant learning rate of Adam while snapshots are taken. Together with the noise of minibatches
            it sets how far the snapshots spread; `status` says how that compares with a posterior. Default: 0.01.
        start: Method or fitted posterior that gives the mode. Default: None, `MAP()`, with the epochs or steps of
            `fit`.

    Example:
        >>> import torch
        >>> import priory as pr
        >>> X = torch.linspace(-1, 1, 50)[:, None]
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> model = pr.Model(net, pr.Gaussian(0.1))
        >>> posterior = pr.fit(model, (X, X[:, 0]), pr.SWAG(), steps=1000, progress=False)
        >>> abs(posterior.predict(X[:1]).mean.item() + 1) < 0.2
        True

    References:
        Maddox, Garipov, Izmailov, Vetrov and Wilson (2019), A simple baseline for Bayesian uncertainty in deep
        learning.
        Izmailov, Podoprikhin, Garipov, Vetrov and Wilson (2018), Averaging weights leads to wider optima and better
        generalization.
    """

    snapshots: int = 100
    rank: int = 20
    every: int | None = None
    learning_rate: float = 1e-2
    start: Any = None

    def __post_init__(self) -> None:
        require(is_integer(self.rank, 2), "rank", "SWAG", "be an integer >= 2", repr(self.rank))
        require(is_integer(self.snapshots, 2), "snapshots", "SWAG", "be an integer >= 2", repr(self.snapshots))
        ok = self.every is None or is_integer(self.every, 1)
        require(ok, "every", "SWAG", "be an integer >= 1, or None", repr(self.every))
        check_rate(self.learning_rate, "constant", "SWAG")

    @property
    def columns(self) -> int:
        """The number of snapshots in the low-rank part."""
        return min(self.rank, self.snapshots)

    def default_start(self, model: Any) -> MAP:
        """The method that finds the mode."""
        return MAP()

    @property
    def traits(self) -> Traits:
        return Traits(follows=True, fixed_scales=True)

    def length(self, data: Data) -> int:
        return self.snapshots * self._every(data)

    def _every(self, data: Data) -> int:
        return self.every or data.steps_per_epoch

    def init(
        self,
        target: Target,
        plan: Plan,
        generator: torch.Generator,
        shape: torch.Size = torch.Size(),
        start: Posterior | None = None,
    ) -> SWAGState:
        w = target.start(plan.data, shape, generator, start)
        adam = Adam.of(w, rates("constant", self.learning_rate, plan.steps, "SWAG"))
        last = w.new_zeros(*shape, self.columns, target.size)
        zeros, every = torch.zeros_like(w), self._every(plan.data)
        buffers, factors = target.buffers(shape, start), factors_of(start)
        begun = CONVERGED if start is None else of_start(start.status, "The mode comes")
        rise = torch.zeros_like(w[..., 0])
        return SWAGState(w, adam, buffers, zeros, zeros.clone(), last, 0, every, factors, begun, rise)

    def step(
        self, target: Target, state: SWAGState, batch: Batch, generator: torch.Generator
    ) -> tuple[SWAGState, Info]:
        target = target.scaled(state.factors)
        value, gradient = target.log_likelihood_and_grad(state.w, batch, state.buffers)
        log_prior, prior_gradient = target.log_prior_and_grad(state.w, jacobian=False)
        down = torch.add(gradient, prior_gradient, alpha=target.prior_weight).neg_()
        down[..., target.model.learnt.start :] = 0  # not maximised jointly with the weights: MAP has set them
        if state.count > self.snapshots // 2 and state.adam.step % state.every == 0:  # w is the last snapshot
            at_mean = target.log_likelihood_of(state.mean, batch, state.buffers)
            at_mean = at_mean + target.prior_weight * target.log_prior_and_grad(state.mean, jacobian=False)[0]
            state.rise = state.rise + (at_mean - value - target.prior_weight * log_prior)
            state.counted += 1
        state.adam.descend(state.w, down)
        if state.adam.step % state.every == 0:
            take(state)
        loss = -value - target.prior_weight * log_prior
        return state, Info({"loss": loss, "nll": -value, "log_prior": log_prior})

    def posterior(self, target: Target, state: SWAGState, draws: Tensor | None = None) -> Variational:
        if state.count == 0:
            take(state)
        form = LowRankForm(target.size, self.columns)
        found = Variational(target.scaled(state.factors), form, theta_of(state), state.buffers)
        found.history_words = HistoryWords(
            " that SWAG took after the mode", "give the fit of the mode more steps, or SWAG more snapshots"
        )
        found.know(state.begun)
        if state.count < self.snapshots:
            short = f"{state.count} of {self.snapshots} snapshots were taken before the fit ended: give it more steps."
            found.know(Status("not_converged", short))
        elif state.begun.name == "converged":
            found.know(spread_status(target, state))
        return found


def take(state: SWAGState) -> None:
    """Record one snapshot, with the moments updated as by Welford (1962), without the cancellation of E[w^2] - m^2."""
    state.count += 1
    before = state.w - state.mean
    state.mean = state.mean + before / state.count
    state.squares = torch.addcmul(state.squares, before, state.w - state.mean)
    state.last = torch.cat([state.w.unsqueeze(-2), state.last[..., :-1, :]], -2)


def spread_status(target: Target, state: SWAGState) -> Status:
    """Return the status from the loss of the snapshots, which is that of draws of a posterior if they spread like it.

    For w ~ N(m, C) and a posterior of precision H / T, E[loss(w) - loss(m)] = tr(H C) / 2, which is T P / 2 for the
    posterior itself, and for every q whose scale maximises the ELBO. The spread of snapshots is set by the learning
    rate and the noise of minibatches, and may have any other value.
    """
    if not state.counted or state.buffers:  # batch normalisation gives every batch another loss
        return CONVERGED
    expected = 0.5 * target.entropy_weight * target.model.learnt.start
    rise = float(torch.as_tensor(state.rise).mean()) / state.counted
    ratio = math.sqrt(max(rise, 0.0) / expected) if expected else 1.0
    if MIN_SPREAD_RATIO <= ratio <= 1 / MIN_SPREAD_RATIO:
        return CONVERGED
    narrow = "raise learning_rate, or give a smaller batch_size" if ratio < 1 else "lower learning_rate"
    return Status(
        "doubtful",
        f"The snapshots raise the loss by {rise:.2g} nats on average, draws of a posterior would by {expected:.3g}: "
        f"standard deviations are about {ratio:.2g} of the posterior's, so {narrow}, or use Laplace.",
    )


def theta_of(state: SWAGState) -> Tensor:
    """The parameters of N(m, D D' / (2 (r - 1)) + diag(v / 2)), from the snapshots recorded so far."""
    rank, kept = state.last.shape[-2], min(state.count, state.last.shape[-2])
    scale = (0.5 * state.squares / state.count).clamp_min(MIN_VARIANCE).sqrt()  # (*B, P)
    away = (state.last - state.mean.unsqueeze(-2)) / (2 * max(1, rank - 1)) ** 0.5
    away[..., kept:, :] = 0
    ratio = (away * ((rank - 1) / max(1, kept - 1)) ** 0.5 / scale.unsqueeze(-2)).mT  # (*B, P, r)
    return torch.cat([state.mean, ratio.flatten(-2), scale.log()], -1)
