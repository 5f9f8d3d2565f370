"""Where variational inference of a density begins, and the fit of a Gaussian q by fixed draws.

A fit of a density whose length the user has not given starts where the mass is and ends by a rule:

1. **Arrive.** A population of points climbs log p from random starts and learns the covariance of the posterior from
   its gradients (`priory.methods.mcmc.population`), whatever the posterior's place and scales.
2. **Fit** q by Newton steps with fixed draws (`priory.methods.variational.gaussian_newton`), from the best point.
3. **Check** it with draws that it was not fitted to. If they would move q by more than 0.01 nats, or a mean by more
   than 0.05 standard deviations, the fit continues with four times as many. Otherwise q moves half of the way to the
   optimum for the new draws, which averages the two sets, and the fit has converged.
4. **Look for other optima.** A point of the population that a valley of log p separates from q starts another fit. The
   fit with the largest bound is the result. The bound of a fit estimates the log mass of its region, so that the share
   of the posterior that q doesn't cover is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from priory.core.linalg import cholesky
from priory.diagnostics.flatness import FLATNESS_DRAWS
from priory.estimators.evidence_bound import Elbo, assemble
from priory.families import DiagonalFamily, FullRankFamily, FullRankForm
from priory.families.diagonal import LOG_2_PI_E
from priory.methods.base import Info
from priory.methods.mcmc.joint import log_joint
from priory.methods.mcmc.metrics import DenseMetric
from priory.methods.mcmc.population import ascend as climb_together
from priory.methods.mcmc.starts import begin
from priory.methods.variational.flat_directions import warn_if_flat
from priory.methods.variational.gaussian_newton import (
    DRAWS_GROWTH,
    FRESH_GAP_NATS,
    MAX_DRAWS,
    MAX_MEAN_SHIFT,
    MAX_PARAMETERS,
    GaussianQ,
    NewtonPoint,
    ascend,
    first_draws,
    matched_draws,
)
from priory.models.base import has_network
from priory.posteriors import DiagonalGaussian
from priory.posteriors.status import CONVERGED, Status
from priory.posteriors.variational import Variational

if TYPE_CHECKING:
    from collections.abc import Callable

    from priory.core.data import Data
    from priory.methods.base import Plan
    from priory.models.target import Target
    from priory.posteriors import Posterior

MIN_POINTS = 64  # of the population
SPARE_POINTS = 24  # of the population beyond one per coordinate, from which a covariance is learnt
MAX_ROWS = 1 << 17  # above which a density is fitted with minibatches
MAX_STEPS = 200  # of a fit
MAX_LOCAL_STEPS = 60  # of a fit that looks for another optimum
MAX_OPTIMA = 4
MAX_SHRINKAGE = 60  # halvings of a first q whose draws have no density
RUNAWAY_RATIO = 1e8  # growth of a standard deviation after which the density counts as improper
VALLEY_POINTS = 8  # of a line between q and a point
MIN_VALLEY_NATS = 1.0  # depth of a valley below both of its ends
MIN_SHARE = 0.01  # of the posterior's mass that q may not miss silently
MISSED_NATS = 5.0  # by which log p exceeds log q throughout a mode that q misses
START_JITTER = 0.01  # of a start that is a point, relative to 1 + |w|


def arrives(target: Target, plan: Plan) -> bool:
    """Whether a fit starts where the mass is: for a density in memory, if the user has given no length."""
    return plan.open_ended and searchable(target, plan.data)


def searchable(target: Target, data: Data) -> bool:
    """Whether a population can climb the log joint: for a density with few enough parameters and rows."""
    return not has_network(target.model) and (data.num_data or 1) <= MAX_ROWS and target.size <= MAX_PARAMETERS


class Search:
    """The log joint of a fit at the draws of a Gaussian q, and the population from which the fit starts."""

    def __init__(
        self, target: Target, data: Data, generator: torch.Generator, start: Posterior | None = None, owner: str = "fit"
    ) -> None:
        self.target, self.data, self.owner = target, data, owner
        self.count = first_draws(target.size)
        self.seed = int(torch.randint(2**31, (), generator=generator, device=generator.device))
        self._population = self._arrived(generator, start)
        self._draws: dict[tuple[int, int], Tensor] = {}

    def _arrived(self, generator: torch.Generator, start: Posterior | None) -> Any:
        """Climb from random starts, or from draws of a posterior; a point is jittered."""
        count = max(MIN_POINTS, self.target.size + SPARE_POINTS)
        w = self.target.start(self.data, torch.Size([count]), generator, start)
        if start is not None and len(torch.unique(w, dim=0)) <= self.target.size:
            noise = torch.randn(w.shape, generator=generator, dtype=w.dtype, device=w.device)
            w = w + START_JITTER * (1 + w.abs()) * noise
        joint = log_joint(self.target, self.data, w)
        w, value, gradient = begin(joint, w, self.target, self.owner)
        w, value, gradient, metric, _ = climb_together(joint, DenseMetric.unit(w), w, value, gradient, generator)
        return joint, w, value, metric

    @cached_property
    def _joint(self) -> Any:
        """The log joint at `count` vectors."""
        like = self._population[1][:1].expand(self.count, -1).contiguous()
        return log_joint(self.target, self.data, like)

    def joint(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Return log p and its gradient at vectors (S, P), in float64."""
        spare = -len(w) % self.count  # the recorded function takes `count` vectors
        padded = torch.cat([w, w[-1:].expand(spare, -1)]) if spare else w
        found = [self._joint(part.to(self.target.model.dtype)) for part in padded.split(self.count)]
        values, gradients = zip(*found, strict=True)
        return torch.cat(values)[: len(w)].double(), torch.cat(gradients)[: len(w)].double()

    def draws(self, number: int, count: int) -> Tensor:
        """Return the standard normal draws of a round, (count, P)."""
        if (number, count) not in self._draws:
            made = matched_draws(count, self.target.size, self.seed + number, self.target.model.device)
            self._draws = {key: z for key, z in self._draws.items() if key[0] >= number - 1} | {(number, count): made}
        return self._draws[number, count]

    def at(self, q: GaussianQ, number: int, count: int) -> NewtonPoint | None:
        """Return the objective at q with the draws of a round."""
        return NewtonPoint.at(self.joint, q, self.draws(number, count))

    # Starts.

    def first(self, full: bool) -> GaussianQ:
        """Return the best point of the population with the covariance that the population has learnt."""
        _, w, value, metric = self._population
        best = torch.where(torch.isfinite(value), value, -math.inf).argmax()
        factor = metric.factor.double()
        root = factor if full else torch.cholesky_inverse(factor).diagonal().rsqrt()
        return self.usable(GaussianQ(w[best].double(), root))

    def usable(self, q: GaussianQ) -> GaussianQ:
        """Return q, narrowed until log p is finite at all of its draws."""
        for _ in range(MAX_SHRINKAGE):
            if self.at(q, 0, self.count) is not None:
                break
            q = GaussianQ(q.loc, 0.5 * q.root)
        return q

    def beyond_valleys(self, optima: list[GaussianQ]) -> Tensor | None:
        """Return the best point of the population that a valley separates from each optimum, (P,), or None."""
        joint, w, value, _ = self._population
        apart = torch.isfinite(value)
        for q in optima:
            centre = q.loc.to(w.dtype).expand_as(w).contiguous()
            ends = torch.minimum(value, joint(centre)[0])
            lowest = value
            for i in range(1, VALLEY_POINTS):
                there = joint(torch.lerp(centre, w, i / VALLEY_POINTS))[0]
                lowest = torch.minimum(lowest, torch.where(torch.isnan(there), -math.inf, there))
            apart = apart & (lowest < ends - MIN_VALLEY_NATS)
        if not bool(apart.any()):
            return None
        return w[torch.where(apart, value, -math.inf).argmax()].double()

    def elbo(self, here: NewtonPoint) -> Elbo:
        """Return the bound and its parts from the draws of a Newton step."""
        entropy = here.q.log_det() + 0.5 * LOG_2_PI_E * self.target.size
        return self.bound(here.q.at(here.z), here.values, entropy)

    def bound(self, w: Tensor, values: Tensor, entropy: Tensor, weights: Tensor | None = None) -> Elbo:
        """Return the bound and its parts, in nats for the whole data, from log p at draws w (S, P) and H(q)."""
        target = self.target

        def mean(x: Tensor) -> Tensor:
            return x.double().mean() if weights is None else (weights * x).sum()

        with torch.no_grad():
            prior, volume = (mean(f(w.to(target.model.dtype))) for f in (target.log_prior, target.model.layout.log_det))
        a, b = target.likelihood_power, target.prior_power
        log_likelihood = (mean(values) - b * prior - (1 - b) * volume) / a
        return assemble(target, log_likelihood, -prior, entropy, volume)


@dataclass
class ArrivalState:
    """A Gaussian q, the round of fixed draws that it is fitted to, and what the check with fresh draws has found."""

    loc: Tensor  # (*B, P), float64
    root: Tensor  # (*B, P) or (*B, P, P), float64
    rivals: Tensor  # (*B, MAX_OPTIMA), objectives of other optima in nats, minus infinity if there are fewer
    search: Search = field(metadata={"fixed": True})
    widest: float = field(metadata={"fixed": True})  # standard deviation from which q counts as diverging
    here: NewtonPoint | None = field(default=None, metadata={"fixed": True})  # the objective at q, once computed
    round: int = 0
    count: int = 0  # draws of the round
    steps: int = 0
    gap: float = math.inf  # nats to the optimum of the family, by fresh draws
    shift: float = math.inf  # standard deviations by which fresh draws move a mean
    objective: float = -math.inf
    looked: bool = False  # whether other optima have been looked for
    ended: bool = False
    optima: list[tuple[GaussianQ, float]] = field(default_factory=list, metadata={"fixed": True})  # all that were found

    @property
    def q(self) -> GaussianQ:
        """The Gaussian of the first member; all are equal."""
        full = self.root.ndim > self.loc.ndim
        size = self.loc.shape[-1]
        return GaussianQ(self.loc.reshape(-1, size)[0], self.root.reshape(-1, *[size] * (1 + full))[0])

    def move(self, q: GaussianQ) -> None:
        """Set the Gaussian of all members."""
        self.loc, self.root = q.loc.expand_as(self.loc).clone(), q.root.expand_as(self.root).clone()

    def advance(self) -> NewtonPoint | None:
        """Take one step, or check q with fresh draws at the end of a round; return the objective at a q of this step.

        Returns None, and ends the fit, if log p is not finite at a draw.
        """
        self.steps += 1
        here = self.here if self.here is not None and self.here.q.loc.equal(self.q.loc) else None
        here = here or self.search.at(self.q, self.round, self.count)
        self.ended = here is None
        if here is None:
            return None
        there = None if here.settled else ascend(self.search.joint, here)
        if there is None:
            self._check(here)
            return here
        self.move(there.q)
        self.ended = self.steps >= MAX_STEPS or float(there.q.scales().max()) > self.widest
        self.here, self.objective = there, there.objective
        return there

    def _check(self, here: NewtonPoint) -> None:
        """Check q with fresh draws, after which the fit has ended, looks for other optima, or needs more draws."""
        self.objective = here.objective
        fresh = self.search.at(self.q, self.round + 1, self.count)
        self.gap, self.shift = (math.inf, math.inf) if fresh is None else (fresh.gap, fresh.shift)
        more = DRAWS_GROWTH * self.count
        if fresh is not None and self.converged:
            self.move(fresh.step(0.5))
            self.ended = self.looked or not self._found_better()
            self.looked = True
        elif fresh is None or more > MAX_DRAWS:
            self.ended = True
        else:
            self.round, self.count, self.here = self.round + 1, more, None

    def _found_better(self) -> bool:
        """Look for other optima, and move to the best one if it is better than q; the others become rivals."""
        others = other_optima(self.search, [self.q])
        optima, bounds = [self.q, *(o.q for o in others)], [self.objective, *(o.objective for o in others)]
        best = max(range(len(bounds)), key=bounds.__getitem__)
        self.optima = sorted(zip(optima, bounds, strict=True), key=lambda found: -found[1])
        for place, bound in enumerate(bound for i, bound in enumerate(bounds) if i != best):
            self.rivals[..., place] = bound
        if best:
            self.move(optima[best])
            self.here, self.objective = None, bounds[best]
        return best > 0

    @property
    def converged(self) -> bool:
        """Whether fresh draws find nothing to improve."""
        return self.gap <= FRESH_GAP_NATS and self.shift <= MAX_MEAN_SHIFT

    def status(self) -> Status:
        """Return the status of the fit, apart from k-hat."""
        if self.converged:
            return self.status_of_rivals()
        if not math.isfinite(self.gap):
            what = f"The bound was still rising after {self.steps} steps"
            return Status("not_converged", f"{what}: give the density a proper prior, or use NUTS.")
        what = f"With {self.count:,} draws the bound is {self.gap:.2g} nats from its optimum"
        if self.gap <= FRESH_GAP_NATS:
            what = f"With {self.count:,} draws the means are uncertain by {self.shift:.2g} standard deviations"
        return Status("not_converged", f"{what}, because log p varies too strongly over q: use NUTS.")

    def status_of_rivals(self) -> Status:
        """Return the status by the share of the posterior in other optima."""
        rivals = self.rivals.reshape(-1, MAX_OPTIMA)[0]
        shares = torch.cat([rivals, rivals.new_tensor([self.objective])]).softmax(0)[:-1]
        missed, count = missed_text(shares)
        if not count:
            return CONVERGED
        remedy = f"use MixtureOfGaussians(components={count + 1}) or NUTS"
        return Status("doubtful", f"{missed}, which q doesn't cover: {remedy}.")


def begin_arrival(search: Search, shape: torch.Size, full: bool) -> ArrivalState:
    """Return the state of a fit that starts from the best point of the population."""
    q = search.first(full)
    return ArrivalState(
        q.loc.expand(*shape, *q.loc.shape).clone(),
        q.root.expand(*shape, *q.root.shape).clone(),
        q.loc.new_full((*shape, MAX_OPTIMA), -math.inf),
        search,
        RUNAWAY_RATIO * float(q.scales().max()),
        count=search.count,
    )


def best_gaussian(search: Search, full: bool) -> ArrivalState:
    """Return the state of a fit after its last step."""
    state = begin_arrival(search, torch.Size(), full)
    while not state.ended:
        state.advance()
    if not state.optima:
        state.optima = [(state.q, state.objective)]
    return state


def local_optimum(search: Search, q: GaussianQ) -> NewtonPoint | None:
    """Return a Gaussian near the optimum that q leads to, with the draws of the first round."""
    here = search.at(search.usable(q), 0, search.count)
    if here is None:
        return None
    for _ in range(MAX_LOCAL_STEPS):
        there = None if here.settled else ascend(search.joint, here)
        if there is None:
            break
        here = there
    return here


def other_optima(search: Search, known: list[GaussianQ]) -> list[NewtonPoint]:
    """Return the optima that points of the population lead to, beyond valleys around those that are known."""
    found: list[NewtonPoint] = []
    while len(found) < MAX_OPTIMA:
        optima = [*known, *(other.q for other in found)]
        point = search.beyond_valleys(optima)
        other = None if point is None else local_optimum(search, GaussianQ(point, known[0].root))
        if other is None or any(same_optimum(other.q, q) for q in optima):
            break
        found.append(other)
    return found


def missed_text(shares: Tensor) -> tuple[str, int]:
    """Return how many optima, with which shares of the posterior, other starts found, and their number."""
    large = shares[shares > MIN_SHARE]
    modes = "another mode" if len(large) == 1 else f"{len(large)} other modes"
    return f"Other starts found {modes} with about {100 * float(large.sum()):.2g} % of the posterior", len(large)


def missed_modes(search: Search, known: list[GaussianQ], log_q: Callable[[Tensor], Tensor], log_evidence: float) -> str:
    """Return a sentence on the optima that a mixture of Gaussians misses, with their share; empty if there are none.

    Args:
        search: The log joint and its population.
        known: Gaussians of the mixture.
        log_q: Log of the largest density of a Gaussian of the mixture at vectors (n, P), (n,).
        log_evidence: Log of the mass of the posterior that the mixture has found, in nats.
    """
    different: list[GaussianQ] = []
    for q in known:
        if not any(same_optimum(q, other) for other in different):
            different.append(q)
    entropy = 0.5 * LOG_2_PI_E * search.target.size  # which the objectives leave out
    bounds = []
    for other in other_optima(search, different):
        excess = other.values - log_q(other.q.at(other.z)) - log_evidence
        if float(excess.median()) > MISSED_NATS:
            bounds.append(other.objective + entropy)
    missed, count = missed_text(torch.tensor([*bounds, log_evidence], dtype=torch.float64).softmax(0)[:-1])
    return f"{missed}, which no path reached: use more paths, MixtureOfGaussians or NUTS." if count else ""


def same_optimum(one: GaussianQ, other: GaussianQ) -> bool:
    """Whether the means of two Gaussians differ by less than a standard deviation of either, in every coordinate."""
    distance = ((one.loc - other.loc).abs() / torch.maximum(one.scales(), other.scales())).max()
    return float(distance) < 1.0


def arrival_step(state: ArrivalState) -> tuple[ArrivalState, Info]:
    """Take one step of a fit, with the bound at its draws as metrics."""
    here = state.advance()
    if here is None:
        nothing = torch.full_like(state.loc[..., 0], math.nan)
        return state, Info({"elbo": nothing, "loss": nothing}, done=True, unchecked=("elbo", "loss"))
    bound = state.search.elbo(here)
    metrics = {"elbo": bound.value, "nll": bound.nll, "kl": bound.kl, "loss": bound.loss}
    return state, Info({k: v.expand(state.loc.shape[:-1]) for k, v in metrics.items()}, done=state.ended)


def arrived_posterior(target: Target, state: ArrivalState, owner: str) -> Variational:
    """Return the posterior of a fit, with its status and, once the fit has ended, its k-hat."""
    q, dtype = state.q, target.model.dtype
    if q.full:
        form = FullRankForm(target.size)
        tril = cholesky(q.covariance(), "covariance of q")
        found = Variational(target, form, form.theta(FullRankFamily(q.loc, tril)).to(dtype))
    else:
        found = DiagonalGaussian(target, DiagonalFamily(q.loc.to(dtype), q.root.log().to(dtype)))
    found.end_by_rule(state.status(), state.search.data if state.ended else None)
    if state.ended and not state.converged:
        warn_if_flat(found, torch.zeros_like(q.loc), FLATNESS_DRAWS, owner)
    return found
