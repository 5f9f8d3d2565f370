"""The hidden Markov model: a chain of hidden states z_1, z_2, ..., each of which emits an observation.

    p(y, z) = pi_{z_1} prod_{t>1} A_{z_{t-1} z_t} prod_t p(y_t | theta_{z_t}),     sum_z p(y, z) in T K^2 operations

E-step (Baum, Petrie, Soules and Weiss, 1970): expected counts of first states and of pairs of states, and expected
statistics of the emissions, by the recursions in `forward_backward` with b_t(k) = p(y_t | theta_k).

M-step: pi and A are normalised counts, and the emissions are fitted as the components of a mixture are.

The scaled recursions stay exact because no probability is below `MIN_PROBABILITY`. b_t is divided by its largest entry,
and entries below `MIN_EMISSION_RATIO` are raised to it. This changes nothing: for a path through such a state there is
always a much more probable one that avoids it, at the cost of two transitions. States excluded by a known z are treated
in the same way.

Annealing uses q proportional to p(y, z)^s with s = 1 / T. The log of its sum over paths is another such recursion. Its
gradients in s log pi, s log A and s log b are the expected counts under q.
"""

from __future__ import annotations

import copy
import math
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor
from torch.distributions import constraints

from priory.core.errors import InputError, is_integer, require, warn
from priory.core.flat import Param
from priory.latent.base import Expectation, Generated, Rows, Theta, warn_of_silent
from priory.latent.forward_backward import Smoothed, arrange_chunks, cuts, smooth
from priory.latent.gaussian_mixture import GaussianMixture, filled_sums
from priory.latent.mixture import EMPTY_COMPONENT_ROWS, MixtureModel, check_known, named_parts, restricted
from priory.latent.multinomial_mixture import MultinomialMixture, raised_shares
from priory.latent.poisson_mixture import PoissonMixture
from priory.latent.sequences import SequenceModel, seen, sequences_of
from priory.latent.starts import clusters
from priory.latent.state_paths import counted_paths, filtered, mean_log, paths, viterbi

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

MIN_PROBABILITY = {torch.float64: 1e-30, torch.float32: 1e-8}  # EM could never change a probability of exactly 0
MIN_EMISSION_RATIO = {torch.float64: 1e-260, torch.float32: 1e-28}  # of an entry of b_t to its largest entry

EMISSION_TYPES = ("gaussian", "categorical", "poisson")


class HiddenMarkov(SequenceModel):
    """A hidden Markov model with K states.

    Data are sequences (n, T) or (n, T, D), padded with NaN at the end, or a list of (T,) or (T, D); NaN before the end
    marks a missing value. The parameters are `initial` (K,), `transitions` (K, K), from the row's state to the
    column's, and those of the emissions: `means` and `covariances` as in `GaussianMixture`, `rates` (K, D), or `probs`
    (K, categories).

    Args:
        k: Number of states K.
        emissions: "gaussian", "categorical" (integers from 0 to categories - 1) or "poisson" (integers >= 0). Default:
            "gaussian".
        covariance: Covariances of Gaussian emissions, as in `GaussianMixture`. Default: "full".
        categories: Number of categories, an integer >= 2; for categorical emissions only. Default: None.
        floor: Smallest variance of Gaussian emissions, as a fraction of the data's variance. Default: 1e-6.
        given: The parts that follow the sequences in the data: "weights", one per sequence; "z", the known states,
            (n, T) or a list of (T,), -1 where hidden; or both. Default: ().

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> HiddenMarkov(2, emissions="normal")
        Traceback (most recent call last):
        ...
        priory.InputError: The 'emissions' argument of HiddenMarkov must be one of gaussian, categorical, poisson, got \
'normal'.
    """

    weighs: ClassVar[bool] = True
    starts: ClassVar[tuple[str, ...]] = ("k-means++", "random")
    labels: ClassVar[bool] = True
    tempers: ClassVar[bool] = True
    samples: ClassVar[bool] = True

    def __init__(
        self,
        k: int,
        emissions: str = "gaussian",
        covariance: str = "full",
        categories: int | None = None,
        floor: float = 1e-6,
        given: str | Sequence[str] = (),
    ) -> None:
        require(is_integer(k, 1), "k", "HiddenMarkov", "be an integer >= 1", repr(k))
        known = isinstance(emissions, str) and emissions in EMISSION_TYPES
        require(known, "emissions", "HiddenMarkov", f"be one of {', '.join(EMISSION_TYPES)}", repr(emissions))
        drawn = emissions == "categorical"
        must = "be an integer >= 2 for categorical emissions" if drawn else "be left out without them"
        ok = is_integer(categories, 2) if drawn else categories is None
        require(ok, "categories", "HiddenMarkov", must, repr(categories))
        self.k, self.emissions, self.categories = int(k), emissions, categories
        self.given = named_parts(given, "HiddenMarkov")
        makers = {
            "gaussian": lambda: GaussianMixture(k, covariance, floor),
            "categorical": lambda: MultinomialMixture(k),
            "poisson": lambda: PoissonMixture(k),
        }
        self.emission: MixtureModel = makers[emissions]()
        self.emission.warns_about_rows = False

    def __repr__(self) -> str:
        if isinstance(self.emission, GaussianMixture):
            return f"HiddenMarkov({self.k}, covariance={self.emission.covariance!r})"
        more = f", categories={self.categories}" if self.categories else ""
        return f"HiddenMarkov({self.k}, emissions={self.emissions!r}{more})"

    # Binding the model to data.

    def in_shapes(
        self, shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device, **frame: Tensor
    ) -> Self:
        """Return a copy of the model for sequences of this shape, with emissions for their steps."""
        model = copy.copy(self)
        step = tuple(shapes[0][1:])
        one = len(shapes[0]) == 1 or (len(shapes[0]) == 2 and not self.categories)
        must = "be (n, T), one number per step" if self.categories else "be (n, T) or (n, T, D)"
        require(one, "y", repr(self), must, f"rows of the shape {tuple(shapes[0])}")
        step = (self.categories,) if self.categories else step
        model.emission = self.emission.in_shapes((step,), dtype, device, **frame)
        return super(HiddenMarkov, model).in_shapes(shapes, dtype, device, **frame)

    def params(self, *shapes: tuple[int, ...]) -> dict[str, Param]:
        """Declare the probabilities of the chain and the parameters of the emissions."""
        own = {
            "initial": Param((self.k,), constraints.simplex),
            "transitions": Param((self.k, self.k), constraints.simplex),
        }
        return own | self.emission.components(*(self.emission.shapes or ()))

    def look(self, rows: Rows) -> dict[str, Tensor]:
        """Return the frame of the emissions, from all steps that have a value."""
        y, there, length = sequences_of(rows)
        require(bool(there.any()), "y", repr(self), "have a value", "only NaN")
        warn_of_silent(int((length == 0).sum()), repr(self), "sequence")
        if (steps := int(there.sum())) < self.k:
            warn(f"{self!r} has more states than there are steps, {steps}: some will be unused or equal.")
        weights = None if rows.weights is None else rows.weights[:, None].expand_as(there)[there]
        with self.naming_this_model():
            self.emission.frame = self.emission.look(replace(self.steps(y[there]), weights=weights))
        return dict(self.emission.frame)

    def z_shape(self, rows: Rows) -> tuple[tuple[int, ...], str]:
        """Return (n, T): there is one z per step."""
        return tuple(rows["y"].shape[:2]), "step"

    def check_rows(self, rows: Rows) -> None:
        """Check that steps are possible under the emissions, and that known z are states."""
        y, there, length = sequences_of(rows)
        check_known(rows.z, self.k, repr(self))
        if rows.z is not None:
            after = torch.arange(y.shape[1], device=y.device) >= length[:, None]
            must = "be -1 after the last value of a sequence"
            require(not bool((after & (rows.z >= 0)).any()), "z", repr(self), must, "a state there")
        values = y[there]
        if self.categories:
            ok = bool(((values >= 0) & (values < self.categories) & (values == values.floor())).all())
            require(ok, "y", repr(self), f"be integers from 0 to {self.categories - 1}", values)
        else:
            with self.naming_this_model():
                self.emission.check_rows(self.steps(values))

    @contextmanager
    def naming_this_model(self) -> Iterator[None]:
        """Replace the name of the emissions in error messages by that of this model, which the user wrote."""
        try:
            yield
        except InputError as error:
            raise InputError(str(error).replace(repr(self.emission), repr(self))) from None

    def steps(self, y: Tensor) -> Rows:
        """Return steps (m, ...), in any order, as rows of the emissions."""
        if self.categories:
            y = torch.nn.functional.one_hot(y.long(), self.categories).to(self.dtype)
        return Rows({"y": y})

    # The equations.

    def chances(self, theta: Theta) -> tuple[Tensor, Tensor]:
        """Return pi (K,) and A (K, K), clamped to MIN_PROBABILITY."""
        least = MIN_PROBABILITY[self.dtype]
        return theta["initial"].clamp_min(least), theta["transitions"].clamp_min(least)

    def e_step(self, theta: Theta, rows: Rows) -> Expectation:
        """Run forward-backward and compute the expected counts of first states, pairs of states and emissions."""
        if rows.temperature != 1 or rows.draws:
            return self.expected_by_steps(theta, rows)
        found, emitted, log_base = self.smoothed(theta, rows)
        _, _, length = sequences_of(rows)
        q, inside = found.marginals(), found.inside(length)
        for t in (q, found.lead):
            if rows.weights is None:
                t.flatten(1).index_fill_(1, (~inside).flatten().nonzero()[:, 0], 0.0)
            else:
                t.mul_(inside * rows.weights.repeat(found.chunks))  # (L, B)
        statistics = {
            "initial": q[:, 0, : len(rows)].sum(1),
            "transitions": found.transitions * found.pairs(),
            "sums": emitted.sums(q.flatten(1)),
            "base": rows.counted(log_base).sum(),
        }
        return Expectation(statistics, found.log_evidence(length) + log_base)

    def expected_by_steps(self, theta: Theta, rows: Rows) -> Expectation:
        """Run the E-step with a tempered q, or with draws of paths in place of q, one step at a time."""
        _, _, length = sequences_of(rows)
        emitted = self.emitted(arrange_chunks(rows["y"], 1))
        log_b = mask_known_states(self.log_b(theta, emitted), rows.z, 1)
        log_b = torch.maximum(log_b, log_b.amax(0) + math.log(MIN_EMISSION_RATIO[self.dtype])).unflatten(
            1, emitted.there.shape
        )
        initial, transitions = (t.log() for t in self.chances(theta))
        cold, least = 1 / rows.temperature, MIN_PROBABILITY[self.dtype]
        leaves = [(cold * t).detach().requires_grad_() for t in (initial, transitions, log_b)]
        with torch.enable_grad():
            total, messages = filtered(leaves[0], leaves[1], leaves[2], length, least)  # log sum_z p^s, (n,)
            first, pairs, q = torch.autograd.grad(rows.counted(total).sum(), leaves)
        bound, messages, gap = total.detach(), [t.detach() for t in messages], None
        if cold != 1:
            bound = bound + (1 - cold) * mean_log(initial, transitions, log_b, messages, length, cold, least)
            gap = filtered(initial, transitions, log_b, length, least)[0] - bound
        if rows.draws:
            path = paths(messages, cold * transitions, length, rows.draws, rows.generator)
            first, pairs, q = counted_paths(path, length, self.k, rows.counted(torch.ones_like(bound)))
        log_base = emitted.base.sum(0)
        statistics = {"initial": first, "transitions": pairs, "sums": emitted.sums(q.flatten(1))}
        return Expectation(statistics | {"base": rows.counted(log_base).sum()}, bound + log_base, gap)

    def complete(self, theta: Theta, statistics: Mapping[str, Tensor]) -> Tensor:
        """Return Q = sum_k S_k log pi_k + sum_ij S_ij log A_ij + sum_kf S_kf eta_kf + sum_nt log h(y_nt)."""
        initial, transitions = self.chances(theta)
        chain = (statistics["initial"] * initial.log()).sum() + (statistics["transitions"] * transitions.log()).sum()
        return chain + (statistics["sums"] * self.emission.natural(theta)).sum() + statistics["base"]

    def m_step(self, statistics: Mapping[str, Tensor], theta: Theta) -> Theta:
        """Normalise the counts of first states and of pairs, and run the M-step of the emissions."""
        least = MIN_PROBABILITY[self.dtype]
        fresh = self.emission.m_step({"sums": statistics["sums"]}, theta)
        fresh["initial"] = shares(statistics["initial"][None], theta["initial"][None], least)[0]
        fresh["transitions"] = shares(statistics["transitions"], theta["transitions"], least)
        return {name: fresh[name].to(self.dtype) for name in self.layout.names}

    def log_marginal(self, theta: Theta, rows: Rows) -> Tensor:
        """Return log p(y_n | theta), (n,), differentiable by autograd, computed one step at a time."""
        _, _, length = sequences_of(rows)
        emitted = self.emitted(arrange_chunks(rows["y"], 1))
        emitted.features = emitted.features.clone()
        log_b = mask_known_states(self.log_b(theta, emitted, careful=False), rows.z, 1).unflatten(
            1, emitted.there.shape
        )
        initial, transitions = self.chances(theta)
        return filtered(initial.log(), transitions.log(), log_b, length, MIN_PROBABILITY[self.dtype])[
            0
        ] + emitted.base.sum(0)

    def smoothed(self, theta: Theta, rows: Rows) -> tuple[Smoothed, Emitted, Tensor]:
        """Return the forward and backward messages, all steps as rows of the emissions, and log h(y_n), (n,)."""
        y = rows["y"]
        chunks = cuts(len(y), y.shape[1], self.k)
        emitted = self.emitted(arrange_chunks(y, chunks))
        log_b = mask_known_states(self.log_b(theta, emitted), rows.z, chunks).unflatten(1, emitted.there.shape)
        found = smooth(*self.chances(theta), log_b, chunks, MIN_EMISSION_RATIO[self.dtype])
        return found, emitted, emitted.base.sum(0).unflatten(0, (chunks, -1)).sum(0)

    def emitted(self, steps: Tensor) -> Emitted:
        """Return steps (L, B, ...) as rows of the emissions."""
        there = seen(steps)
        values, gone = steps.flatten(0, 1), (~there).flatten().nonzero()[:, 0]
        if len(gone):
            values = values.index_fill(0, gone, 0.0)
        rows, holes = self.steps(values), None
        features, log_base = self.emission.features(rows), None if self.categories else self.emission.base(rows)
        log_base = features.new_zeros(len(values)) if log_base is None else log_base
        if len(gone):
            features, log_base = features.index_fill_(1, gone, 0.0), log_base.index_fill(0, gone, 0.0)
        if bool(values.sum().isnan()) and bool(features.sum().isnan()):  # features of diagonal covariances have no NaN
            holes = values.isnan().any(1)
            features = features.index_fill_(1, holes.nonzero()[:, 0], 0.0)
        return Emitted(rows, features, there, log_base.unflatten(0, there.shape), holes)

    def log_b(self, theta: Theta, emitted: Emitted, careful: bool = True) -> Tensor:
        """Return log b_t(k) without log h, (K, L * B); with `careful`, narrow states are evaluated without features."""
        log_b = self.emission.natural(theta) @ emitted.features
        which = self.emission.narrow_components(theta) if careful else None
        if which is not None and len(which):
            log_b[which] = self.emission.direct(theta, emitted.rows, which) * emitted.there.flatten()
        if emitted.holes is not None:
            assert isinstance(self.emission, GaussianMixture)
            for index, logits, filled, left in self.emission.by_missing_pattern(theta, emitted.rows, emitted.holes):
                log_b[:, index] = logits
                emitted.filled.append((index, filled, left))
        return log_b

    # The hidden states.

    def hidden(self, theta: Theta, rows: Rows) -> dict[str, Tensor]:
        """Return `responsibilities` p(z_t = k | y), (n, T, K), and the most probable `path`, (n, T)."""
        return {"responsibilities": self.responsibilities(theta, rows), "path": self.most_likely(theta, rows)}

    def responsibilities(self, theta: Theta, rows: Rows) -> Tensor:
        """Return p(z_t = k | y), (n, T, K), NaN after the end."""
        y, _, length = sequences_of(rows)
        found, _, _ = self.smoothed(theta, rows)
        steps = y.shape[1]
        q = found.marginals().unflatten(2, (found.chunks, -1)).permute(3, 2, 1, 0).flatten(1, 2)[:, :steps]
        return torch.where((torch.arange(steps, device=y.device) < length[:, None])[..., None], q, torch.nan)

    def most_likely(self, theta: Theta, rows: Rows) -> Tensor:
        """Return the most probable path of states (Viterbi, 1967), (n, T), -1 after the end."""
        y, _, length = sequences_of(rows)
        emitted = self.emitted(arrange_chunks(y, 1))
        log_b = mask_known_states(self.log_b(theta, emitted), rows.z, 1).unflatten(1, emitted.there.shape)  # (K, T, n)
        initial, transitions = self.chances(theta)
        return viterbi(initial.log(), transitions.log(), log_b, length)

    def generate(self, theta: Theta, n: int, generator: torch.Generator, steps: int | None = None) -> Generated:
        """Draw paths of states (n, T), and an emission of each state."""
        length = self.steps_or(steps)
        path = [torch.multinomial(theta["initial"], n, replacement=True, generator=generator)]
        for _ in range(length - 1):
            path.append(torch.multinomial(theta["transitions"][path[-1]], 1, generator=generator)[:, 0])
        z = torch.stack(path, 1)
        flat = z.flatten()
        if self.categories:
            y = torch.multinomial(theta["probs"][flat], 1, generator=generator)[:, 0].to(self.dtype)
        else:
            y = self.emission.emit(theta, flat, generator)
        return Generated(y.unflatten(0, (n, length)), z)

    # Initialisation and warnings.

    def begin(self, rows: Rows, how: str, generator: torch.Generator) -> Theta:
        """Initialise by the M-step of a clustering of all steps; one is added to the count of each pair of states."""
        y, there, _ = sequences_of(rows)
        counts = y.new_ones(len(y)) if rows.weights is None else rows.weights
        counts = counts[:, None].expand_as(there)
        steps = replace(self.steps(y[there]), weights=counts[there])
        known = None if rows.z is None else rows.z[there]
        labels = clusters(self.emission.coordinates(steps), self.k, how, generator, steps.weights, known)
        emitted = self.emission.begin_from(labels, steps)
        z = torch.full(there.shape, -1, dtype=torch.long, device=y.device)
        z[there] = labels
        begun = z[:, 0] >= 0
        first = torch.bincount(z[begun, 0], counts[begun, 0], minlength=self.k).to(self.dtype) + 1
        both = (z[:, 1:] >= 0) & (z[:, :-1] >= 0)
        kinds = (z[:, :-1] * self.k + z[:, 1:])[both]
        pairs = torch.bincount(kinds, counts[:, 1:][both], minlength=self.k**2).reshape(self.k, self.k) + 1
        pairs = pairs.to(self.dtype)
        chain = {"initial": first / first.sum(), "transitions": pairs / pairs.sum(1, keepdim=True)}
        return {name: (chain | emitted)[name] for name in self.layout.names}

    def allows(self, theta: Theta) -> bool:
        """Whether no probability is below MIN_PROBABILITY, and the emissions satisfy their bounds."""
        least = min(float(theta[name].min()) for name in ("initial", "transitions"))
        return least >= MIN_PROBABILITY[self.dtype] and self.emission.allows(theta)

    def problems(self, theta: Theta, statistics: Mapping[str, Tensor]) -> list[str]:
        """Warn about states that are never visited, and about emissions whose variance is at the floor."""
        visits = statistics["sums"][:, -1]
        sentences = self.emission.problems(
            theta | {"weights": torch.where(visits > EMPTY_COMPONENT_ROWS, visits, 0.0)}, statistics
        )
        return [sentence.replace(repr(self.emission), repr(self)) for sentence in sentences]


@dataclass
class Emitted:
    """All steps of some sequences, (L, B), as rows of the emissions."""

    rows: Rows  # (L * B, ...)
    features: Tensor  # (F, L * B), zero where nothing was seen, and in holes
    there: Tensor  # whether a step has a value, (L, B)
    base: Tensor  # log h(y_t), (L, B)
    holes: Tensor | None  # whether a step with a full covariance lacks some values, (L * B,); None if none does
    filled: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)  # of holes: which, E[x] and Cov at theta

    def sums(self, q: Tensor) -> Tensor:
        """S (K, F) of all steps, counted by q (K, L * B)."""
        found = q @ self.features.mT
        for index, filled, left in self.filled:
            found = found + filled_sums(q[:, index], filled, left)
        return found


def mask_known_states(log_b: Tensor, z: Tensor | None, chunks: int) -> Tensor:
    """Set log b_t (K, L * B) to minus infinity for all states except the known ones, from z (n, T)."""
    return log_b if z is None else restricted(log_b, arrange_chunks(z.to(log_b.dtype), chunks).flatten())


def shares(counts: Tensor, before: Tensor, least: float) -> Tensor:
    """Normalise rows of counts (m, K), with no probability below `least`; a row without counts stays unchanged."""
    total = counts.sum(1, keepdim=True)
    kept = torch.where(
        total > EMPTY_COMPONENT_ROWS, counts / total.clamp_min(EMPTY_COMPONENT_ROWS), before.to(counts.dtype)
    )
    return raised_shares(kept, least)
