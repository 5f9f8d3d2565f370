"""E- and M-steps in turn: the base of EM and variational EM, for the models of `priory.latent`.

An iteration is an M-step followed by an E-step, so that the bound in the history belongs to the theta that the
posterior would have. With exact steps over all of the data the bound can't fall; if it does, the model's equations are
wrong, and the fit stops with an error.

- `online` averages statistics over minibatches, S <- (1 - r_t) S + r_t N/n S_batch with r_t = (t + 1)^-online (Cappe
  and Moulines 2009; under a conjugate prior it is Hoffman et al.'s stochastic variational inference, 2013).
- A run ends when the bound is close to its limit, not when its last rise is small: EM converges linearly, and the rises
  r, r a, r a^2, ... still to come sum to r a / (1 - a) (Aitken 1926; Boehning et al. 1994).
- `accelerate` extrapolates the path of two iterations, theta_0 -> theta_1 -> theta_2, in unconstrained parameters
  (SQUAREM, Varadhan and Roland 2008): theta = theta_0 + 2 a r + a^2 v with r = theta_1 - theta_0,
  v = theta_2 - theta_1 - r, a = |r| / |v|. The result is kept if its bound is higher than that of theta_2, so the bound
  never falls.
- `annealing` flattens q to p(z | y)^(1/T) for the first iterations (Ueda and Nakano 1998), so that a poor start is left
  more easily.
- `draws` replaces q by draws of z in the statistics (Wei and Tanner 1990).
- `gradient_steps` maximises Q by L-BFGS instead of the closed form: generalised EM. A single step is gradient ascent on
  the likelihood itself, by Fisher's identity.

Cost of an iteration: one pass over the data for all restarts together; memory does not grow with N.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from priory.core.data import Data
from priory.core.errors import DivergedError, is_integer, require
from priory.latent.base import Latent, Theta, has_latent
from priory.latent.expectation import expect, lbfgs_steps
from priory.methods.base import Info, Options, Plan, Traits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from priory.core.data import Batch
    from priory.latent.base import Expectation
    from priory.models.target import Target
    from priory.posteriors import Posterior

MAX_ITERATIONS = 1000  # unless the user gives steps
DEFAULT_EPOCHS = 10  # over the data, with minibatches
START_TOLERANCE = 1e-4  # relative error of given parameters, such as weights that sum to one after rounding
FALL_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}  # relative fall of the bound that is rounding
RECENT_BOUNDS = 9  # from which the limit of a bound is extrapolated: four rises over cycles of two iterations
ROUNDING = {torch.float64: 1e-13, torch.float32: 1e-7}  # relative rise of the bound that is rounding


@dataclass
class AscentState:
    """Theta of each restart, with the statistics of the E-step there: the next iteration starts with an M-step."""

    theta: dict[str, Tensor]  # each (*B, R, ...)
    statistics: dict[str, Tensor]  # each (*B, R, ...)
    bound: Tensor  # L(q, theta), (*B, R)
    entropy: Tensor  # H(q), (*B, R)
    expected: Tensor  # Q(theta, the theta before), (*B, R)
    gap: Tensor  # KL(q before || p(z | y, theta)), (*B, R)
    active: Tensor  # whether a restart is still running, (*B, R)
    recent: Tensor  # the last nine bounds, -inf before the first, (*B, R, 9)
    past: Tensor  # the last two theta in unconstrained coordinates, for `accelerate`, (*B, R, 2, P)
    iteration: int


@dataclass(frozen=True)
class Ascent(Options):
    """Base class of EM and variational EM: E- and M-steps in turn, from several starts.

    Args:
        restarts: Number of runs from different starts; the one with the highest bound is kept. Default: 1.
        tolerance: A run ends when the bound is within this many nats per row of its limit, extrapolated from the last
            iterations, and rises by less per iteration. 0 runs all iterations. `steps` in `fit` is the cap on
            iterations, by default 1,000. Default: 1e-6.
        start: One of the model's initialisations, a dict of parameters, or a fitted posterior. Default: None, the
            model's first initialisation.
        accelerate: Whether to extrapolate every second iteration by SQUAREM. Default: False.
        annealing: Temperatures, each >= 1, of the first iterations, such as (8, 4, 2). They flatten q(z), so that a
            poor start is left more easily. Default: (), none.
        draws: Number of draws of z that replace q(z) in the statistics (Monte Carlo EM). Default: 0, q(z) itself.
        online: Exponent, above 0.5 and at most 1, of the decaying rate of minibatch updates. Default: None, every
            iteration reads all rows.
        gradient_steps: Number of L-BFGS steps that replace the model's closed M-step (generalised EM). Default: None,
            the closed form.
    """

    restarts: int = 1
    tolerance: float = 1e-6
    start: Any = None
    accelerate: bool = False
    annealing: tuple[float, ...] = ()
    draws: int = 0
    online: float | None = None
    gradient_steps: int | None = None

    def __post_init__(self) -> None:
        require(
            is_integer(self.restarts, 1), "restarts", type(self).__name__, "be an integer >= 1", repr(self.restarts)
        )
        number = isinstance(self.tolerance, Real) and 0 <= self.tolerance < math.inf
        require(number, "tolerance", type(self).__name__, "be a number >= 0", repr(self.tolerance))
        given = self.start is not None and not isinstance(self.start, str)
        require(
            self.restarts == 1 or not given,
            "restarts",
            type(self).__name__,
            "be 1 where the start is given",
            self.restarts,
        )
        require(
            isinstance(self.accelerate, bool),
            "accelerate",
            type(self).__name__,
            "be True or False",
            repr(self.accelerate),
        )
        heats = self.annealing
        ok = isinstance(heats, (tuple, list)) and all(isinstance(t, Real) and 1 <= t < math.inf for t in heats)
        require(ok, "annealing", type(self).__name__, "be a tuple of temperatures >= 1", repr(heats))
        object.__setattr__(self, "annealing", tuple(heats))
        require(is_integer(self.draws, 0), "draws", type(self).__name__, "be an integer >= 0", repr(self.draws))
        ok = self.online is None or (isinstance(self.online, Real) and 0.5 < self.online <= 1)
        require(ok, "online", type(self).__name__, "lie above 0.5 and not above 1, or be None", repr(self.online))
        ok = self.gradient_steps is None or is_integer(self.gradient_steps, 1)
        require(ok, "gradient_steps", type(self).__name__, "be an integer >= 1, or None", repr(self.gradient_steps))
        if isinstance(self.start, dict):
            object.__setattr__(self, "start", Given(self.start))
        clash = self.accelerate and (self.online is not None or self.draws > 0 or len(heats) > 0)
        require(
            not clash, "accelerate", type(self).__name__, "be False with online, draws or annealing", self.accelerate
        )

    @property
    def traits(self) -> Traits:
        return Traits(reads="pass" if self.online is None else "batch", own_start=True)

    @property
    def noisy(self) -> bool:
        """Whether the bound is estimated from minibatches or draws, so that it may fall and never converges exactly."""
        return self.online is not None or self.draws > 0

    def length(self, data: Data) -> int:
        return MAX_ITERATIONS if self.online is None else DEFAULT_EPOCHS * data.steps_per_epoch

    def plan(self, target: Target, data: Data, steps: int, seed: int) -> Plan:
        model = self.latent(target)
        require(target.temperature == 1, "temperature", type(self).__name__, "be 1", target.temperature)
        for option, value, able in (("annealing", self.annealing, model.tempers), ("draws", self.draws, model.samples)):
            require(not value or able, option, type(self).__name__, f"be left out for {model!r}", value)
        if isinstance(self.start, str):
            known = ", ".join(model.starts)
            require(
                self.start in model.starts,
                "start",
                type(self).__name__,
                f"be one of {known} for {model!r}",
                repr(self.start),
            )
        return Plan(data, steps)

    def latent(self, target: Target) -> Latent:
        """Return the target's model, which must have an E-step."""
        model = target.model
        must = "be a latent model, such as latent.GaussianMixture(3)"
        require(has_latent(model), "model", type(self).__name__, must, type(model).__name__)
        assert has_latent(model)
        return model

    # The interface of a method.

    def init(
        self,
        target: Target,
        plan: Plan,
        generator: torch.Generator,
        shape: torch.Size = torch.Size(),
        start: Posterior | None = None,
    ) -> AscentState:
        model = self.latent(target)
        lead = torch.Size([*shape, self.restarts])
        batch = plan.data.random_rows(model.sample, model.block, generator)
        thetas = [self.first(model, batch, generator, start) for _ in range(lead.numel())]
        whole_data = plan.data.blocks(model.block) if self.online is None else [batch]
        factor = 1.0 if self.online is None else target.scale(len(batch[0]))
        found = expect(model, thetas, whole_data, factor, **self.e_step_options(0, generator))
        bound = torch.stack([e.bound for e in found])
        entropy = bound - torch.stack([expected(model, t, e.statistics) for t, e in zip(thetas, found, strict=True)])
        size = model.layout.size if self.accelerate else 0
        return AscentState(
            stacked(thetas, lead),
            stacked([e.statistics for e in found], lead),
            bound.reshape(lead),
            entropy.reshape(lead),
            (bound - entropy).reshape(lead),
            torch.zeros(lead, dtype=torch.float64),
            torch.ones(lead, dtype=torch.bool),
            torch.cat(
                [torch.full((*lead, RECENT_BOUNDS - 1), -math.inf, dtype=torch.float64), bound.reshape(*lead, 1)], -1
            ),
            torch.zeros(*lead, 2, size, dtype=model.dtype, device=model.device),
            0,
        )

    def step(
        self, target: Target, state: AscentState, batch: Data | Batch, generator: torch.Generator
    ) -> tuple[AscentState, Info]:
        model, lead = self.latent(target), state.bound.shape
        thetas, sums = members(state.theta, lead), members(state.statistics, lead)
        bound, entropy, q, gap = (t.flatten().clone() for t in (state.bound, state.entropy, state.expected, state.gap))
        active, past = state.active.flatten().clone(), state.past.reshape(lead.numel(), 2, -1)
        recent = state.recent.reshape(lead.numel(), -1).roll(-1, -1)
        live = active.nonzero()[:, 0].tolist()

        moved = {i: self.maximised(model, sums[i], thetas[i]) for i in live}
        found = self.found(target, moved, batch, state.iteration + 1, generator)
        for i in live:
            q[i] = expected(model, moved[i], sums[i])
            gap[i] = found[i].log_likelihood - (q[i] + entropy[i])
        if self.accelerate:
            self.extrapolate(target, state.iteration, thetas, moved, found, past, batch, generator)
        for i in live:
            rise = float(found[i].bound - bound[i])
            self.check_rise(target, state, rise, float(bound[i]))
            thetas[i], bound[i] = moved[i], found[i].bound
            sums[i] = self.blended(sums[i], found[i].statistics, state.iteration)
            entropy[i] = bound[i] - expected(model, thetas[i], sums[i])
            recent[i, -1] = bound[i]
            active[i] = not self.converged(target, recent[i], state.iteration + 1)
        after = AscentState(
            stacked(thetas, lead),
            stacked(sums, lead),
            bound.reshape(lead),
            entropy.reshape(lead),
            q.reshape(lead),
            gap.reshape(lead),
            active.reshape(lead),
            recent.reshape(state.recent.shape),
            past.reshape(state.past.shape),
            state.iteration + 1,
        )
        return after, Info(self.metrics(after), done=not bool(active.any()), unchecked=("Q", "gap"))

    # The parts of an iteration.

    def converged(self, target: Target, recent: Tensor, iteration: int) -> bool:
        """Whether a run has converged, from its last bounds, (9,)."""
        if self.noisy or self.tolerance == 0 or iteration <= len(self.annealing):
            return False
        rows, model = float(target.num_data or 1), self.latent(target)
        rise, limit = float(recent[-1] - recent[-2]), self.tolerance * rows
        rounding = ROUNDING.get(model.dtype, ROUNDING[torch.float32]) * max(abs(float(recent[-1])), rows)
        left = distance_to_limit(recent, 2 if self.accelerate else 1)
        return rise <= min(rounding, limit) or (rise < limit and left < limit)

    def point(self, target: Target, state: AscentState) -> Posterior:
        """Return the posterior of the best restart."""
        raise NotImplementedError

    def best(self, state: AscentState) -> tuple[Theta, dict[str, Tensor], float | None, bool]:
        """Return theta, statistics and bound of the best restart of all members, and whether it has converged.

        The bound is None with minibatches, whose bound is not that of all rows; the posterior computes it when needed.
        """
        lead, index = state.bound.shape, int(state.bound.argmax())
        theta, statistics = members(state.theta, lead)[index], members(state.statistics, lead)[index]
        bound = float(state.bound.flatten()[index]) if self.online is None else None
        return theta, statistics, bound, not bool(state.active.flatten()[index])

    def report_problems(self, target: Target, state: AscentState, posterior: Posterior) -> None:
        """Report problems that the model finds at the best restart, as warnings and in the posterior's status."""
        theta, statistics, _, _ = self.best(state)
        for sentence in self.latent(target).problems(theta, statistics):
            posterior.doubt(sentence)

    def e_step_options(self, iteration: int, generator: torch.Generator) -> dict[str, Any]:
        """The options of the E-step of an iteration."""
        heat = self.annealing[iteration] if iteration < len(self.annealing) else 1.0
        return {"temperature": float(heat), "draws": self.draws, "generator": generator}

    def first(self, model: Latent, batch: Batch, generator: torch.Generator, start: Posterior | None) -> Theta:
        """The initial theta of a restart."""
        if start is None and not isinstance(self.start, dict):
            return model.begin(model.weighted_rows(batch), self.start or model.starts[0], generator)
        given = self.start if start is None else start.mean
        named = {name: torch.as_tensor(t).to(model.device, model.dtype) for name, t in given.items()}
        try:
            u = model.layout.unconstrain(named)
        except RuntimeError:  # a matrix that is not positive definite
            u = torch.full((model.layout.size,), torch.nan)
        inside = model.layout.constrain(u)  # differs from the given values if, for example, weights don't sum to one
        ok = bool(torch.isfinite(u).all()) and all(near(inside[name], named[name]) for name in inside)
        require(ok, "start", type(self).__name__, f"hold parameters of {model!r} inside their supports", given)
        return {name: t.clone() for name, t in inside.items()}

    def maximised(self, model: Latent, sums: Mapping[str, Tensor], theta: Theta) -> Theta:
        """The M-step: the model's closed form, or a few L-BFGS steps on Q."""
        with torch.no_grad():
            if self.gradient_steps is None:
                return model.m_step(sums, theta)
        return lbfgs_steps(model, sums, theta, self.gradient_steps)

    def found(
        self,
        target: Target,
        thetas: Mapping[int, Theta],
        batch: Data | Batch,
        iteration: int,
        generator: torch.Generator,
    ) -> dict[int, Expectation]:
        """The E-step at several theta, from all of the data or from a minibatch scaled to it."""
        model, options = self.latent(target), self.e_step_options(iteration, generator)
        if isinstance(batch, Data):
            found = expect(model, list(thetas.values()), batch.blocks(model.block), **options)
        else:
            found = expect(model, list(thetas.values()), [batch], target.scale(len(batch[0])), **options)
        return dict(zip(thetas, found, strict=True))

    def blended(self, old: Mapping[str, Tensor], fresh: Mapping[str, Tensor], iteration: int) -> dict[str, Tensor]:
        """The statistics for the next M-step: those of the last pass, or an average over minibatches."""
        if self.online is None:
            return dict(fresh)
        rate = (iteration + 2) ** -self.online
        return {name: (1 - rate) * t + rate * fresh[name] for name, t in old.items()}

    def extrapolate(
        self,
        target: Target,
        iteration: int,
        thetas: list[Theta],
        moved: dict[int, Theta],
        found: dict[int, Expectation],
        past: Tensor,
        batch: Data | Batch,
        generator: torch.Generator,
    ) -> None:
        """SQUAREM: after every second iteration extrapolate the last two; keep the result if its bound is higher."""
        model = self.latent(target)
        for i in moved:
            past[i, iteration % 2] = model.layout.unconstrain(thetas[i])
        if iteration % 2 == 0:
            return
        further: dict[int, Theta] = {}
        for i in moved:
            u = squared(past[i, 0], past[i, 1], model.layout.unconstrain(moved[i]))
            if u is not None:
                theta = model.layout.constrain(u)
                if model.allows(theta):
                    further[i] = theta
        reached = self.found(target, further, batch, iteration + 1, generator) if further else {}
        for i, there in reached.items():
            if float(there.bound) > float(found[i].bound):
                moved[i], found[i] = further[i], there

    def check_rise(self, target: Target, state: AscentState, rise: float, before: float) -> None:
        """Raise an error if the bound fell although the steps are exact."""
        model = self.latent(target)
        exact = model.exact and not self.noisy and state.iteration + 1 > len(self.annealing)
        size = max(abs(before), float(target.num_data or 1))
        if exact and rise < -FALL_TOLERANCE.get(model.dtype, FALL_TOLERANCE[torch.float32]) * size:
            where = f"from {before:.10g} at iteration {state.iteration + 1}"
            raise DivergedError(
                f"The bound of {type(self).__name__} fell by {-rise:.3g} {where}: the E-step and M-step of "
                f"{model!r} don't agree. The state before is in the error's 'posterior'.",
                self.point(target, state),
            )

    def metrics(self, state: AscentState) -> dict[str, Tensor | float]:
        """The metrics of the best restart: the bound, Q and the gap, each (*B,)."""
        bound, best = state.bound.max(-1)
        if self.noisy:
            return {"bound": bound}
        take = lambda t: t.gather(-1, best[..., None])[..., 0]  # noqa: E731
        return {"bound": bound, "Q": take(state.expected), "gap": take(state.gap)}


class Given(dict[str, Any]):
    """Initial parameters with a hash as their repr, so that the repr of a method stays short."""

    def __repr__(self) -> str:
        numbers = repr([(name, torch.as_tensor(t).tolist()) for name, t in self.items()])
        return f"<{', '.join(self)}: {hashlib.blake2b(numbers.encode(), digest_size=4).hexdigest()}>"


def expected(model: Latent, theta: Theta, statistics: Mapping[str, Tensor]) -> Tensor:
    """Q(theta, theta_t) + log p(theta), from the statistics at theta_t."""
    with torch.no_grad():
        return (model.complete(theta, statistics) + model.log_prior(theta)).double().cpu()


def distance_to_limit(bounds: Tensor, cycle: int = 1) -> float:
    """Return the distance of a linearly converging bound from its limit, in nats (Aitken 1926).

    Rises that shrink by a factor r per cycle of iterations sum to rise r / (1 - r). Extrapolated iterations shrink them
    irregularly, so the largest of the last factors is taken.

    Args:
        bounds: The last bounds; -inf where there is none.
        cycle: Number of iterations over which rises are compared: 2 if every second one is extrapolated. Default: 1.

    Returns:
        The distance; infinity if the rises don't shrink, or if there are too few.
    """
    cycles = 2 if cycle == 1 else 4
    rises = bounds.flip(0)[: 1 + cycles * cycle : cycle].flip(0).diff()  # over the last cycles
    if not bool(torch.isfinite(rises).all()):
        return math.inf
    ratio = float((rises[1:] / rises[:-1]).nan_to_num(nan=0.0).amax())
    return max(float(rises[-1]), 0.0) * ratio / (1 - ratio) if 0 <= ratio < 1 else math.inf


def near(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal up to the rounding of given numbers."""
    return bool(((a - b).abs() <= START_TOLERANCE * b.abs().amax()).all())


def squared(first: Tensor, second: Tensor, third: Tensor) -> Tensor | None:
    """Return the SQUAREM extrapolation of three consecutive points, (P,); None if it is not beyond the third."""
    r = second - first
    v = (third - second) - r
    length = r.norm() / v.norm()
    if not bool(torch.isfinite(length)) or float(length) <= 1:
        return None
    u = first + 2 * length * r + length.square() * v
    return u if bool(torch.isfinite(u).all()) else None


def members(tree: Mapping[str, Tensor], lead: torch.Size) -> list[dict[str, Tensor]]:
    """Split a dict of tensors (*lead, ...) into one dict per member."""
    flat = {name: t.reshape(lead.numel(), *t.shape[len(lead) :]) for name, t in tree.items()}
    return [{name: t[i] for name, t in flat.items()} for i in range(lead.numel())]


def stacked(trees: list[Theta], lead: torch.Size) -> dict[str, Tensor]:
    """Stack one dict per member into a dict of tensors (*lead, ...)."""
    return {name: torch.stack([t[name] for t in trees]).reshape(*lead, *trees[0][name].shape) for name in trees[0]}
