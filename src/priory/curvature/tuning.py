"""The prior precisions and the noise that maximise the evidence of a Gaussian around a mode (MacKay 1992).

Type-II maximum likelihood. With Sigma = Q^-1, a factor delta on the precisions tau0 of a group of n weights, and a
noise of scale s, on which H depends as s^-2:

    gamma   = sum_i (1 - tau_i Sigma_ii)                  number of weights determined by the data
    delta   = gamma_group / sum_i tau0_i (w_i - m_i)^2
    s^2     = sum_n omega_n r_n^2 / (N d - gamma)         residuals r; omega is 1 for Gaussian noise, and
                                                          (df + 1) / (df + r^2 / s^2) for Student's t

set the gradients in log delta and log s^2 to zero, and each update is an ascent direction. All are updated together. If
the evidence would fall, the change of the logarithms is halved repeatedly, so the evidence never falls by more than
rounding. With one noise per output, gamma of output d is the trace of J_d Sigma J_d' / s_d^2, and H is recomputed.
Other parameters of a likelihood are not changed. Cost of an update: one `Curvature.gaussian` with its variances, and
two passes over the data with one noise per output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from priory.core.errors import InputError, is_integer, require
from priory.curvature.evidence import gaussian_part, log_evidence, prior_precision
from priory.curvature.layer_jacobians import jacobian_rows
from priory.likelihoods import Gaussian as GaussianNoise
from priory.likelihoods.scale import LocationScale
from priory.priors.hierarchical import Hierarchical, precision_name

if TYPE_CHECKING:
    from priory.core.data import Data
    from priory.curvature.base import Curvature, Kind, PrecisionGaussian, Selection
    from priory.models.target import Target

By = Literal["scalar", "layer", "parameter"]
BY: tuple[By, ...] = ("scalar", "layer", "parameter")
MIN_FACTOR, MAX_FACTOR = 1e-8, 1e8  # bounds of a factor, and of the ratio of two variances of a noise
MAX_HALVINGS = 30  # of a move that lowers the evidence, before tuning stops
CONVERGED_MOVE = 1e-6  # of all logarithms, below which tuning has converged
BLOCK_ROWS = 1024  # rows read at a time


@dataclass(frozen=True)
class Tuned:
    """The prior factors and noise that maximise the evidence, and the Gaussian there."""

    target: Target  # with the scaled prior
    w: Tensor  # (P,), with the noise set
    factors: dict[str, Tensor]  # on the prior's precisions, by parameter name
    noise: dict[str, Tensor]  # learnt values of the likelihood, by name, such as "likelihood.noise"
    curvature: Curvature
    scale: float  # Q = scale H + diag(precision); includes 1/T and the effect of the noise
    precision: Tensor  # (p,), of the prior, tempered
    gaussian: PrecisionGaussian  # N(0, Q^-1)
    log_evidence: float
    trace: list[float]  # the evidence before the first update, and after each
    notes: list[str]  # on parameters that were not tuned


def tune(
    target: Target,
    w: Tensor,
    curvature: Curvature,
    data: Data,
    buffers: Mapping[str, Tensor] | None = None,
    by: By | None = "scalar",
    noise: bool = True,
    kind: Kind = "ggn",
    again: Callable[[Tensor], Curvature] | None = None,
    steps: int = 100,
) -> Tuned:
    """Maximise the evidence at w over factors on the prior's precisions and over a learnt noise.

    Only Gaussian priors are scaled, and only at the coordinates of H.

    Args:
        target: The target of the fit.
        w: The weights at the mode, (P,).
        curvature: H at w.
        data: The rows.
        buffers: Buffers of the network, by name. Default: None.
        by: One factor for all selected weights ("scalar"), one per module ("layer"), one per weight ("parameter", for
            the structures "diag" and "full"), or None for an unchanged prior. Default: "scalar".
        noise: Whether to set a learnt noise. Default: True.
        kind: Kind of the curvature. Default: "ggn".
        again: Computes H at another vector, which one noise per output needs. Default: None.
        steps: Largest number of updates. Default: 100.

    Returns:
        The tuned target, weights, curvature and Gaussian.
    """
    target.network_model("The evidence that tunes a prior", "has its prior inside")
    require(by is None or by in BY, "tune", "Laplace", f"be None or among {', '.join(BY)}", repr(by))
    require(is_integer(steps, 1), "steps", "tune", "be an integer >= 1", steps)
    fine = by != "parameter" or curvature.structure in ("diag", "full")
    require(fine, "structure", "Laplace", "be 'diag' or 'full' for tune='parameter'", repr(curvature.structure))
    groups = PrecisionGroups.of(target, w, curvature.selection, by)
    found = NoiseScale.of(target, w, data, buffers, kind, again) if noise else NoiseScale.none(target, w, data, buffers)
    fixed = prior_precision(target, w)[curvature.selection.places].double()
    ascent = EvidenceAscent(target, w, curvature, groups, found, fixed, data, buffers, again)
    here = ascent.at(ascent.start())
    trace = [float(here.value)]
    for _ in range(steps if len(here.theta) else 0):
        move = ascent.update(here) - here.theta
        there = ascent.better(here, move)
        if there is None:
            break
        gain, moved = float(there.value - here.value), float((there.theta - here.theta).abs().max())
        here = there
        trace.append(float(here.value))
        if moved < CONVERGED_MOVE or gain <= ascent.rounding(here):
            break
    return ascent.result(here, trace)


@dataclass(frozen=True)
class PrecisionGroups:
    """The groups of selected coordinates that share a factor, with the sums that its update needs."""

    index: Tensor  # (p,), the group of each coordinate; G for coordinates without a factor
    count: Tensor  # n, (G,)
    square: Tensor  # sum_i tau0_i (w_i - m_i)^2, (G,)
    tau: Tensor  # tau0 of each coordinate, (p,), float64

    @classmethod
    def of(cls, target: Target, w: Tensor, selection: Selection, by: By | None) -> PrecisionGroups:
        loc, precision = gaussian_part(target, w)
        tau, d = precision[selection.places].double(), (w - loc)[selection.places].double()
        label = torch.zeros_like(selection.places)
        if by == "layer":
            modules = {name: name.rpartition(".")[0] for name in selection.names}
            number = {module: i for i, module in enumerate(dict.fromkeys(modules.values()))}
            for name, span in selection.spans().items():
                label[span] = number[modules[name]]
        elif by == "parameter":
            label = torch.arange(selection.size, device=label.device)
        free = cls._free(target, selection, tau, by)
        if by is not None and not bool(free.any()):
            raise InputError(
                "The 'tune' argument of Laplace must have a Gaussian prior to scale, got none among the weights."
            )
        groups = label[free].unique()
        index = torch.full_like(label, len(groups))
        index[free] = torch.searchsorted(groups, label[free])
        count = torch.bincount(index, minlength=len(groups) + 1)[:-1].double()
        square = tau.new_zeros(len(groups) + 1).index_add_(0, index, tau * d * d)[:-1]
        return cls(index, count, square, tau)

    @staticmethod
    def _free(target: Target, selection: Selection, tau: Tensor, by: By | None) -> Tensor:
        """Return which coordinates have a factor: those with a Gaussian prior, learnt precisions only as a whole."""
        free = (tau > 0) if by is not None else torch.zeros_like(tau, dtype=torch.bool)
        learnt = {b.name: b.stop - b.start for b, d in target.prior.others if isinstance(d, Hierarchical)}
        for name, span in selection.spans().items():
            if name in learnt and (by == "parameter" or span.stop - span.start < learnt[name]):
                free[span] = False
        return free

    def each(self, log_factors: Tensor) -> Tensor:
        """Return the log factor of each coordinate, (G,) -> (p,)."""
        return torch.cat([log_factors, log_factors.new_zeros(1)])[self.index]

    def sums(self, values: Tensor) -> Tensor:
        """Sum over the coordinates of each group, (p,) -> (G,)."""
        return values.new_zeros(len(self.count) + 1).index_add_(0, self.index, values)[:-1]


@dataclass(frozen=True)
class NoiseScale:
    """A noise that the evidence sets from the residuals at w, or no noise and a constant log-likelihood."""

    name: str | None  # "noise" or "scale"; None if there is none to set
    start: Tensor  # log s^2 at w, (D,): one value, or one per output
    residuals: Tensor  # (n, D), float64, at the scale of the outputs
    weights: Tensor  # (n,), N / rows seen times the weight of the row
    likelihood: LocationScale | None  # of the residuals
    constant: float  # log p(D|w) if no noise is set; otherwise what the residuals don't determine
    power: float  # k in H proportional to s^-2k
    note: str | None = None

    @classmethod
    def none(
        cls, target: Target, w: Tensor, data: Data, buffers: Mapping[str, Tensor] | None, note: str | None = None
    ) -> NoiseScale:
        """Return a NoiseScale without a noise to set."""
        value = float(target.log_likelihood(w, data, buffers).double())
        empty = torch.zeros(0, dtype=torch.float64, device=w.device)
        return cls(None, empty, empty[None], empty, None, value, 1.0, note)

    @classmethod
    def of(
        cls,
        target: Target,
        w: Tensor,
        data: Data,
        buffers: Mapping[str, Tensor] | None,
        kind: Kind,
        again: Callable[[Tensor], Curvature] | None,
    ) -> NoiseScale:
        """Return the learnt scale of the likelihood, if H is proportional to a power of it."""
        model = target.network_model("The evidence")
        likelihood = model.likelihood
        if not likelihood.declared:
            return cls.none(target, w, data, buffers)
        names = ", ".join(f"likelihood.{name}" for name in likelihood.declared)
        if not isinstance(likelihood, LocationScale):
            note = f"{names}: left unchanged, because only the scales of Gaussian and StudentT are tuned."
            return cls.none(target, w, data, buffers, note)
        (name,) = likelihood.declared
        value = model.learnt_at(w)[name].double().reshape(-1)
        gaussian = isinstance(likelihood, GaussianNoise)
        if kind not in ("ggn", "fisher") and not (gaussian and len(value) == 1):
            note = f"{names}: left unchanged, because the curvature {kind!r} isn't proportional to a power of it."
            return cls.none(target, w, data, buffers, note)
        if len(value) > 1 and again is None:
            note = f"{names}: left unchanged, because one noise per output needs `again`."
            return cls.none(target, w, data, buffers, note)
        pieces, counts, seen = [], [], 0
        for batch in data.blocks(BLOCK_ROWS):
            with torch.no_grad():
                outputs = model.outputs(w[None], batch[:-1], buffers or {}, batch[-1].shape[1:])[0]
            residuals = (likelihood.standard(batch[-1].double()) - outputs.double()).reshape(-1, len(value))
            own, each = (
                target.row_weights(batch),
                len(residuals) // len(batch[0]),
            )  # values per row that share one noise
            pieces.append(residuals)
            counts.append(w.new_ones(len(residuals)) if own is None else own.repeat_interleave(each))
            seen += len(batch[0])
        weights = target.scale(seen) * torch.cat(counts).double()
        power = 2.0 if kind == "empirical" else 1.0  # the square of a score r / s^2
        # log p(y) = log p(residual) minus the log scales of the outputs, `each` of which share the weight of their row
        volume = 0.0 if likelihood.units is None else likelihood.units.log_volume(target.event)
        per_row = float(weights.sum()) * len(value) / max(1, target.event.numel())
        inner = likelihood.in_units(None)
        return cls(name, 2 * value.log(), torch.cat(pieces), weights, inner, -volume * per_row, power)

    def log_likelihood(self, log_square: Tensor) -> float:
        """Return log p(D|w) at the noise exp(log_square / 2)."""
        if self.likelihood is None:
            return self.constant
        values = self.likelihood.log_prob(*self._as_data(log_square))
        return self.constant + float((self.weights * values).sum())

    def update(self, log_square: Tensor, gamma: Tensor) -> Tensor:
        """Return the next log s^2, (D,), given the numbers gamma, (D,), of weights that each output determines."""
        if self.likelihood is None:
            return log_square
        outputs, targets, learnt = self._as_data(log_square)
        score = self.likelihood.score(outputs, targets, learnt).reshape(-1, len(log_square))
        square = (self.weights[:, None] * self.residuals * score).sum(0) * log_square.exp()  # omega r^2 = s^2 r score
        rest = self.weights.sum() - self.power * gamma
        return _log_ratio(square, rest)

    def _as_data(self, log_square: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return zero outputs, the residuals as targets, and the noise, for the functions of the likelihood."""
        assert self.name is not None
        one = len(log_square) == 1
        r, s = (self.residuals[:, 0], log_square[0]) if one else (self.residuals, log_square)
        return torch.zeros_like(r), r, {self.name: (0.5 * s).exp()}


@dataclass(frozen=True)
class EvidencePoint:
    """Hyper-parameters with the Gaussian and the evidence there."""

    theta: Tensor  # log delta of each group, then log s^2 of each noise
    curvature: Curvature
    scale: float
    gaussian: PrecisionGaussian
    value: Tensor


@dataclass(frozen=True)
class EvidenceAscent:
    """The evidence as a function of theta = (log delta, log s^2), and the update that climbs it."""

    target: Target
    w: Tensor
    curvature: Curvature
    groups: PrecisionGroups
    noise: NoiseScale
    fixed: Tensor  # prior precision of each selected coordinate before scaling, (p,)
    data: Data
    buffers: Mapping[str, Tensor] | None
    again: Callable[[Tensor], Curvature] | None

    def start(self) -> Tensor:
        """Return the initial hyper-parameters."""
        return torch.cat([torch.zeros_like(self.groups.count), self.noise.start])

    def at(self, theta: Tensor) -> EvidencePoint:
        log_delta, log_square = self.cut(theta)
        a, b = self.target.likelihood_power, self.target.prior_power
        factors = self.groups.each(log_delta)
        curvature, scale = self.curvature, a
        if len(log_square) == 1:
            scale = a * math.exp(self.noise.power * float(self.noise.start - log_square))
        elif len(log_square) > 1:
            assert self.again is not None
            curvature = self.again(self.at_noise(log_square))
        gaussian = curvature.gaussian((b * self.fixed * factors.exp()).to(self.w.dtype), scale)
        # log p(w) changes only by the normalisers and squares of the factors
        change = 0.5 * (self.groups.count * log_delta - self.groups.square * log_delta.expm1()).sum()
        value = log_evidence(
            self.target, self.w, gaussian, self.noise.log_likelihood(log_square), self.curvature.selection
        )
        return EvidencePoint(theta, curvature, scale, gaussian, value + b * change.cpu())

    def update(self, here: EvidencePoint) -> Tensor:
        """Apply MacKay's update to the hyper-parameters."""
        log_delta, log_square = self.cut(here.theta)
        a, b = self.target.likelihood_power, self.target.prior_power
        variance = here.gaussian.variance().double()
        tau = self.groups.tau * self.groups.each(log_delta).exp()
        determined = self.groups.count - self.groups.sums(tau * variance)
        delta = _log_ratio(determined, self.groups.square)
        if len(log_square) == 1:
            share = b * self.fixed * self.groups.each(log_delta).exp() * variance
            gamma = (1 - share).sum()[None] / a
        else:
            gamma = self.per_output(here, log_square) if len(log_square) else log_square
        square = self.noise.update(log_square, gamma)
        bounds = self.start()
        return torch.cat([delta, square]).clamp(bounds + math.log(MIN_FACTOR), bounds + math.log(MAX_FACTOR))

    def per_output(self, here: EvidencePoint, log_square: Tensor) -> Tensor:
        """Return the number of weights that each output determines, the trace of J_d Sigma J_d' L_dd, (D,)."""
        model, w = self.target.network_model("The evidence"), self.at_noise(log_square)
        total, seen = torch.zeros_like(log_square), 0
        for batch in self.data.blocks(BLOCK_ROWS):
            weights, first = self.target.row_weights(batch), 0
            for some in jacobian_rows(self.target, w, batch[:-1], self.curvature.selection, buffers=self.buffers):
                spread = here.gaussian.output_covariance(some).diagonal(dim1=-2, dim2=-1).double()
                informed = model.likelihood.roots(some.outputs, model.learnt_at(w)).double().square().sum(0)
                each = informed.reshape(spread.shape) * spread
                each = each if weights is None else each * weights[first : first + len(some), None]
                total += each.reshape(-1, len(total)).sum(0)
                first += len(some)
            seen += len(batch[0])
        return self.target.scale(seen) * total

    def better(self, here: EvidencePoint, move: Tensor) -> EvidencePoint | None:
        """Return the point after the move, halved until the evidence doesn't fall; None if it always does."""
        for half in range(MAX_HALVINGS):
            candidate = self.at(here.theta + move / 2**half)
            if bool(candidate.value >= here.value - self.rounding(here)):
                return candidate
        return None

    def rounding(self, here: EvidencePoint) -> float:
        """Return the rounding error of the evidence in the dtype of the weights."""
        return 4 * torch.finfo(self.w.dtype).eps * (1 + abs(float(here.value)))

    def cut(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Split theta into the logarithms of factors (G,) and of squared noises (D,)."""
        return theta[: len(self.groups.count)], theta[len(self.groups.count) :]

    def at_noise(self, log_square: Tensor) -> Tensor:
        """Return w with this noise."""
        if self.noise.name is None:
            return self.w
        block, w = self.target.model.layout[f"likelihood.{self.noise.name}"], self.w.clone()
        value = (0.5 * log_square).exp().to(w).reshape(block.shape)
        w[block.start : block.stop] = block.bijector.inverse(value).reshape(-1)
        return w

    def result(self, here: EvidencePoint, trace: list[float]) -> Tuned:
        """Return the result, with the Gaussian of the scaled target."""
        log_delta, log_square = self.cut(here.theta)
        w, model = self.at_noise(log_square), self.target.network_model("The evidence")
        factors: dict[str, Tensor] = {}
        log_factors, selection = self.groups.each(log_delta), self.curvature.selection
        learnt = {
            block.name for block, distribution in self.target.prior.others if isinstance(distribution, Hierarchical)
        }
        for name, span in selection.spans().items():
            block, own = model.layout[name], log_factors[span]
            if not bool((self.groups.index[span] < len(log_delta)).any()):
                continue
            if name in learnt:
                w[model.layout[precision_name(name)].start] += own[0].to(w)
                continue
            if len(own) == block.stop - block.start and bool((own == own[0]).all()):
                factors[name] = own[0].exp().to(w)
                continue
            factors[name] = torch.ones(block.stop - block.start, dtype=w.dtype, device=w.device)
            factors[name][selection.places[span] - block.start] = own.exp().to(w)
        target = self.target.scaled(factors)
        precision = target.prior_power * prior_precision(target, w)[selection.places]
        gaussian = here.curvature.gaussian(precision, here.scale)
        noise = {}
        if self.noise.name is not None:
            noise[f"likelihood.{self.noise.name}"] = model.learnt_at(w)[self.noise.name]
        notes = [self.noise.note] if self.noise.note else []
        return Tuned(
            target, w, factors, noise, here.curvature, here.scale, precision, gaussian, trace[-1], trace, notes
        )


def _log_ratio(top: Tensor, bottom: Tensor) -> Tensor:
    """Return log(top / bottom), very small or infinite where one of them is not positive; the caller clamps it."""
    tiny = torch.finfo(torch.float64).tiny
    return torch.where(bottom > 0, top.clamp_min(tiny).log() - bottom.clamp_min(tiny).log(), math.inf)
