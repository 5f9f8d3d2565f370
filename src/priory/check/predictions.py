"""Items about predictions of a network: are they better than a constant, calibrated, and free of patterns?

The probability integral transform u = F(y) of each row is uniform under the true distribution (Gneiting, Balabdaoui and
Raftery 2007); for counts it is drawn uniformly between F(y - 1) and F(y). r = Phi^-1(u) is then standard normal, a
residual for any likelihood. Of these,

    "bias"             the mean of u is 1/2
    "calibration"      u is uniform, by the distance of Kolmogorov and Smirnov
    "outliers"         one row in 1,000 lies outside of the 99.9 % interval
    "residuals"        the mean of r is zero in each of eight ranges of each input
    "noise"            the mean of r^2 is the same in each of eight ranges of each input

For labels, "calibration" is the expected calibration error beyond that of labels drawn from the predictions themselves.
An item fails if it is beyond chance, at 1 in 1,000 with as many comparisons as it makes, and large enough to matter.
Rows that were fitted are predicted better than others, so only held-out rows are decisive.

References:
    Gneiting, Balabdaoui and Raftery (2007), Probabilistic forecasts, calibration and sharpness.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributions import Normal

from priory.check.result import Item, judged, unknown
from priory.core.streams import stream
from priory.core.tables import counted
from priory.evaluate.calibration import expected_calibration_error, pit, reliability_bins
from priory.evaluate.scores import matched, top_class
from priory.models.base import has_network
from priory.models.model import inputs_as_given

if TYPE_CHECKING:
    from priory.core.data import Batch, Data
    from priory.posteriors import Posterior
    from priory.predictive import Prediction

GROUP = "model"
PREDICTION_DRAWS = 32
MAX_PASSES = 10  # over the rows of the fit, that predictions may cost
MIN_JUDGED_ROWS = 20  # fewer say nothing about predictions
MIN_ROWS, MAX_ROWS = 500, 20_000  # rows that are predicted, if there are so many
RANGES = 8  # of an input
MAX_INPUT_COLUMNS = 50
MIN_RANGE_ROWS = 15
FALSE_ALARM = 1e-3  # probability with which an item fails by chance, at the most
KOLMOGOROV = 1.95  # the distance times sqrt(n) that chance exceeds once in 1,000
MIN_DISTANCE = 0.05  # of Kolmogorov and Smirnov that matters
MIN_BIAS = 0.1  # of the mean of u
MIN_RESIDUAL = 0.4  # of the mean of r in a range of an input
MIN_NOISE_RATIO = 2.0  # between the mean squares of r in two ranges
MIN_CALIBRATION_ERROR = 0.03
SIMULATIONS = 2000  # of labels, for the calibration error by chance
BLOCK_ELEMENTS = 1 << 22  # labels that are simulated together
OUTLIER_SHARE, MIN_OUTLIERS = 1e-3, 3
MIN_EPISTEMIC_SHARE = 1e-6  # of the variance of a prediction, below which all draws predict the same
PRIOR_RATIOS = (1e-4, 9.0)  # of the squares of weights to the prior's variances, on average
MIN_PRIOR_WEIGHTS = 8


@dataclass(frozen=True)
class PredictedRows:
    """Rows with their predictions, and whether they were held out of the fit."""

    inputs: Batch
    targets: Tensor
    prediction: Prediction
    held_out: bool


def prediction_items(posterior: Posterior, data: Data | None, seed: int) -> list[Item]:
    """Return the items about predictions of held-out rows, or of rows of the fit; and about the prior."""
    source = data if data is not None else posterior.data
    if not has_network(posterior.model) or source is None or source.num_data is None:
        return []
    if source.num_data < MIN_JUDGED_ROWS:
        why = f"The predictions of {counted(source.num_data, 'row')} say nothing: give at least {MIN_JUDGED_ROWS}."
        return [unknown("calibration", GROUP, "uniform", why)]
    rows = predicted(posterior, source, data is not None, seed)
    items = [better_than_constant(rows), *([] if posterior.point else [disagreement(rows)])]
    items += label_items(rows, seed) if rows.prediction.classes else number_items(rows, seed)
    return [*items, *prior_items(posterior, seed)]


def predicted(posterior: Posterior, source: Data, held_out: bool, seed: int) -> PredictedRows:
    """Predict as many rows as a few passes over the data of the fit allow."""
    fitted = posterior.num_data or 1
    limit = min(MAX_ROWS, max(MIN_ROWS, MAX_PASSES * fitted // PREDICTION_DRAWS))
    *inputs, targets = source.random_rows(limit, 1024, stream(seed, "check rows"))
    given = inputs_as_given(source, tuple(inputs))
    prediction = posterior.predict(given, samples=PREDICTION_DRAWS, seed=seed)
    return PredictedRows(tuple(inputs), targets, prediction, held_out)


# Better than nothing.


def better_than_constant(rows: PredictedRows) -> Item:
    """Whether the predicted means have smaller squared errors than the mean of the targets.

    For labels they are the probabilities, and the squared error is the Brier score.
    """
    mean = rows.prediction.mean.double().cpu()
    y = rows.targets.cpu()
    if rows.prediction.classes and mean.shape != y.shape:
        y = nn.functional.one_hot(y.long(), mean.shape[-1])
    y = y.double().reshape(mean.shape)
    gain = (
        ((y - y.mean(0)).square() - (y - mean).square()).flatten(1).sum(1)
        if y.ndim > 1
        else ((y - y.mean()).square() - (y - mean).square())
    )
    total = float((y - y.mean(0)).square().sum()) / len(y)
    share = float(gain.mean()) / total if total > 0 else 0.0
    error = float(gain.std()) / math.sqrt(len(gain)) / total if len(gain) > 1 and total > 0 else math.inf
    return judged(
        "better than a constant",
        GROUP,
        share,
        not share < 2 * error,
        "share of variance explained, above 0",
        f"The predictions explain {share:.2g} of the variance of the targets, no more than chance: nothing was learnt.",
        "let the fit converge, widen the prior, or see whether the inputs carry information",
        against="mean",
    )


def disagreement(rows: PredictedRows) -> Item:
    """Whether draws of the posterior predict different things."""
    share = float((rows.prediction.epistemic / rows.prediction.variance).nan_to_num(nan=0.0).mean())
    return judged(
        "epistemic share",
        GROUP,
        share,
        share > MIN_EPISTEMIC_SHARE,
        "of the variance, above 0",
        "The draws of this posterior all predict the same: it has no epistemic uncertainty.",
        "see the rate of Dropout, the members of the Ensemble, or the scales of q",
    )


# Numbers.


def number_items(rows: PredictedRows, seed: int) -> list[Item]:
    """Items about the transforms u = F(y) of numbers or counts."""
    u = transforms(rows, seed)
    n = u.numel()
    items = [bias(u, n, rows.held_out), calibration(u, n, rows.held_out), outliers(u, n)]
    r = Normal(0.0, 1.0).icdf(u.clamp(1e-9, 1 - 1e-9))
    columns = input_columns(rows)
    if u.ndim == 1 and columns:
        items += pattern_items(r, columns)
    return items


def transforms(rows: PredictedRows, seed: int) -> Tensor:
    """F(y) of each target, in float64; for counts a uniform draw between F(y - 1) and F(y)."""
    prediction = rows.prediction
    if not prediction.likelihood.discrete:
        return pit(prediction, rows.targets).double().cpu()
    y = matched(rows.targets, prediction.mean, "check")
    low, high = (prediction.cdf(v).double().cpu() for v in (y - 1, y))
    return low + (high - low) * torch.rand(low.shape, generator=stream(seed, "check counts"), dtype=torch.float64)


def bias(u: Tensor, n: int, held_out: bool) -> Item:
    """Whether targets lie above their predictions as often as below."""
    off = float(u.mean()) - 0.5
    error = 1 / math.sqrt(12 * n)
    bad = abs(off) > max(chance_errors(1) * error, MIN_BIAS)
    side = "above" if off > 0 else "below"
    return judged(
        "bias",
        GROUP,
        off,
        not bad,
        f"within {MIN_BIAS} of 0",
        f"The targets lie {side} their predictions too often.",
        "let the fit converge, or use a network that can follow the data",
        against="mean",
        decisive=held_out,
    )


def calibration(u: Tensor, n: int, held_out: bool) -> Item:
    """Whether the transforms are uniform."""
    ordered = u.flatten().sort().values
    grid = torch.arange(1, n + 1, dtype=torch.float64) / n
    distance = float(torch.maximum((grid - ordered).abs(), (ordered - grid + 1 / n).abs()).max())
    bad = distance > max(KOLMOGOROV / math.sqrt(n), MIN_DISTANCE)
    inside = float(((u > 0.05) & (u < 0.95)).double().mean())
    what = "narrow" if inside < 0.9 else "wide"
    return judged(
        "calibration",
        GROUP,
        distance,
        not bad,
        f"distance from uniform, at most {max(KOLMOGOROV / math.sqrt(n), MIN_DISTANCE):.2g}",
        f"The predictions are too {what}: their 90 % intervals hold {100 * inside:.0f} % of the targets.",
        "see the noise of the likelihood, or recalibrate on held-out rows",
        decisive=held_out,
        details={"u": u.flatten()},
    )


def outliers(u: Tensor, n: int) -> Item:
    """Whether more targets than expected lie outside of the 99.9 % interval."""
    count, expected = int(((u < OUTLIER_SHARE / 2) | (u > 1 - OUTLIER_SHARE / 2)).sum()), OUTLIER_SHARE * n
    tail = 1 - float(torch.special.gammaincc(torch.tensor(max(count, 1.0)), torch.tensor(expected))) if count else 1.0
    bad = count >= MIN_OUTLIERS and tail < FALSE_ALARM
    return judged(
        "outliers",
        GROUP,
        float(count),
        not bad,
        f"about {max(1, round(expected))} expected",
        f"The 99.9 % intervals miss {count} of {n} targets.",
        "use pr.StudentT(df=4) as likelihood, or look at these rows",
    )


def input_columns(rows: PredictedRows) -> dict[str, Tensor]:
    """The columns that residuals are compared with, by name: inputs of a table, and the predicted mean."""
    found = {}
    table = [t for t in rows.inputs if t.ndim == 2 and t.is_floating_point()]
    if len(table) == len(rows.inputs) == 1 and table[0].shape[1] <= MAX_INPUT_COLUMNS:
        found = {f"input {j}": column.double().cpu().contiguous() for j, column in enumerate(table[0].unbind(1))}
    mean = rows.prediction.mean.double().cpu()
    if mean.ndim == 1:
        found["the prediction"] = mean
    return {name: x for name, x in found.items() if float(x.std()) > 0}


def pattern_items(r: Tensor, columns: dict[str, Tensor]) -> list[Item]:
    """Means and mean squares of the residuals in ranges of each column."""
    errors = chance_errors(RANGES * len(columns))
    level, width = (0.0, ""), (1.0, "")
    bad_level = bad_width = False
    overall = max(float(r.square().mean()), 1e-12)
    for name, x in columns.items():
        parts = ranges(r, x)
        if len(parts) < 2:
            continue
        n = torch.tensor([len(part) for part in parts], dtype=torch.float64)
        means = torch.stack([part.mean() for part in parts])
        squares = torch.stack([(part - part.mean()).square().mean() for part in parts]) / overall
        sizes = means.abs()
        spread = (overall / n).sqrt()
        j = int(sizes.argmax())
        beyond = bool((sizes > torch.maximum(errors * spread, torch.tensor(MIN_RESIDUAL))).any())
        if float(sizes[j]) > level[0]:
            level = (float(sizes[j]), name)
        bad_level = bad_level or beyond
        ratio = float(squares.max() / squares.min().clamp(min=1e-12))
        noise = math.sqrt(2 * (1 / float(n[squares.argmax()]) + 1 / float(n[squares.argmin()])))
        bad_width = bad_width or math.log(ratio) > max(errors * noise, math.log(MIN_NOISE_RATIO))
        if ratio > width[0]:
            width = (ratio, name)
    return [
        judged(
            "residuals",
            GROUP,
            level[0],
            not bad_level,
            f"mean at most {MIN_RESIDUAL} in any range",
            f"The residuals depend on {level[1]}: the predictions miss a pattern.",
            "use a larger network, or let the fit converge",
            against="mean",
        ),
        judged(
            "noise",
            GROUP,
            width[0],
            not bad_width,
            f"variance ratio at most {MIN_NOISE_RATIO:g}",
            f"The noise depends on {width[1]}, by a factor of {width[0]:.2g} in variance.",
            'use pr.Gaussian(noise="network")',
        ),
    ]


def ranges(r: Tensor, x: Tensor) -> list[Tensor]:
    """The residuals in ranges of x with about equally many rows."""
    edges = x.quantile(torch.linspace(0, 1, RANGES + 1, dtype=torch.float64)[1:-1]).unique()
    place = torch.bucketize(x, edges)
    return [part for k in range(len(edges) + 1) if len(part := r[place == k]) >= MIN_RANGE_ROWS]


def chance_errors(comparisons: int) -> float:
    """The standard errors that one of so many comparisons exceeds by chance with the allowed probability."""
    return float(Normal(0.0, 1.0).icdf(torch.tensor(1 - FALSE_ALARM / (2 * comparisons), dtype=torch.float64)))


# Labels.


def label_items(rows: PredictedRows, seed: int) -> list[Item]:
    """Whether the confidence in the most probable class is its frequency."""
    probs, y = rows.prediction.probs.double().cpu(), rows.targets.cpu()
    error = expected_calibration_error(probs, y)
    confidence, correct = top_class(probs, y, "check")
    by_chance = errors_by_chance(confidence, stream(seed, "check labels"))
    excess = error - float(by_chance.mean())
    beyond = error > float(by_chance.quantile(1 - FALSE_ALARM)) and excess > MIN_CALIBRATION_ERROR
    sure = "confident" if float(confidence.mean() - correct.double().mean()) > 0 else "cautious"
    return [
        judged(
            "calibration",
            GROUP,
            excess,
            not beyond,
            f"error beyond chance, at most {MIN_CALIBRATION_ERROR}",
            f"The predictions are too {sure}: mean confidence {float(confidence.mean()):.2f}, accuracy "
            f"{float(correct.double().mean()):.2f}.",
            "use an Ensemble or Laplace, or recalibrate on held-out rows",
            decisive=rows.held_out,
            details={"probs": probs, "labels": y},
        )
    ]


def errors_by_chance(confidence: Tensor, generator: torch.Generator) -> Tensor:
    """Expected calibration errors of labels that are right with the probability of their confidence, (simulations,)."""
    bins = reliability_bins(confidence)
    found = []
    for part in torch.arange(SIMULATIONS).split(max(1, BLOCK_ELEMENTS // len(confidence))):
        right = torch.rand(len(part), len(confidence), generator=generator, dtype=torch.float64) < confidence
        gaps = torch.zeros(len(part), int(bins.max()) + 1, dtype=torch.float64)
        found.append(gaps.index_add_(1, bins, right.double() - confidence).abs().sum(1) / len(confidence))
    return torch.cat(found)


# The prior.


def prior_items(posterior: Posterior, seed: int) -> list[Item]:
    """Whether the weights have the size that their prior expects, tensor by tensor."""
    prior, layout = posterior.target.prior, posterior.model.layout
    generator = stream(seed, "check prior", device=posterior.model.device)
    w = posterior.draw(1 if posterior.point else 8, generator)
    worst, low, name, other = 0.0, math.inf, "", ""
    for block in layout.blocks:
        span = slice(block.start, block.stop)
        precision = prior.precision[..., span]
        if block.stop - block.start < MIN_PRIOR_WEIGHTS or not bool((precision > 0).all()):
            continue
        size = float((precision * (w[:, span] - prior.loc[..., span]).square()).mean())
        worst, name = max((worst, name), (size, block.name))
        low, other = min((low, other), (size, block.name))
    if not name:
        return []
    narrow = worst > PRIOR_RATIOS[1]
    value, which = (worst, name) if narrow else (low, other)
    finding = (
        f"The weights of {which} are {math.sqrt(value):.2g} times as large as their prior expects."
        if narrow
        else f"The prior of {which} is {1 / math.sqrt(max(value, 1e-300)):.2g} times as wide as its weights."
    )
    return [
        judged(
            "prior",
            GROUP,
            value,
            PRIOR_RATIOS[0] <= value <= PRIOR_RATIOS[1],
            f"weights^2 / variance, {PRIOR_RATIOS[0]:g} to {PRIOR_RATIOS[1]:g}",
            finding,
            "give the prior a scale near the weights', or learn it: MAP(evidence_every=5), Laplace(tune=...)",
            against="mean" if narrow else "spread",
        )
    ]
