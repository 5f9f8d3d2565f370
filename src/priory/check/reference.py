"""Items that compare a posterior with another one of the same model, such as draws of NUTS.

For a density the draws are compared, in units of the reference's standard deviations: means, standard deviations, the
sliced Wasserstein distance (Bonneel et al. 2015), and the maximum mean discrepancy (MMD) with a Gaussian kernel, whose
p-value comes from permutations (Gretton et al. 2012). The weights of networks have symmetries, so for them the
predictions are compared: means and standard deviations of numbers, the total variation distance and the agreement
of the most probable class for labels.

References:
    Bonneel, Rabin, Peyre and Pfister (2015), Sliced and Radon Wasserstein barycenters of measures.
    Gretton, Borgwardt, Rasch, Schoelkopf and Smola (2012), A kernel two-sample test.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from priory.check.result import Item, judged
from priory.core.errors import require
from priory.core.streams import stream
from priory.diagnostics.flatness import name_of
from priory.models.base import has_network
from priory.models.model import inputs_as_given

if TYPE_CHECKING:
    from torch import Tensor

    from priory.core.data import Data
    from priory.posteriors import Posterior

GROUP = "reference"
DRAWS = 1000
SLICES = 64  # directions of the sliced Wasserstein distance
MMD_DRAWS, PERMUTATIONS = 250, 200
MAX_MEAN_DISTANCE, MAX_SD_RATIO, MAX_SLICED = 0.3, 1.3, 0.3  # in standard deviations of the reference
MIN_P_VALUE = 0.005
PREDICTION_ROWS, PREDICTION_DRAWS = 500, 128
MAX_TOTAL_VARIATION, MIN_AGREEMENT = 0.1, 0.9


def reference_items(posterior: Posterior, other: Posterior, data: Data | None, seed: int) -> list[Item]:
    """Return the items that compare a posterior with a reference of the same model."""
    same = posterior.model.layout.signature() == other.model.layout.signature()
    require(same, "against", "check", "be a posterior of the same model", repr(other))
    if not has_network(posterior.model):
        return draw_items(posterior, other, seed)
    source = data or posterior.data or other.data
    require(source is not None, "data", "check", "be given, to compare predictions", None)
    assert source is not None
    return prediction_items(posterior, other, source, seed)


def draw_items(posterior: Posterior, other: Posterior, seed: int) -> list[Item]:
    """Compare draws of the unconstrained coordinates."""
    x, y = (
        p.draw(DRAWS, stream(seed, "against", which, device=p.model.device)).double()
        for which, p in enumerate((posterior, other))
    )
    deviation = y.std(0).clamp(min=torch.finfo(torch.float64).tiny)
    x, y = (x - y.mean(0)) / deviation, (y - y.mean(0)) / deviation
    noise = math.sqrt(2 / DRAWS) * 3
    shift = (x.mean(0).abs() - noise).clamp(min=0)
    ratio = x.std(0)
    far, wide = int(shift.argmax()), int(ratio.log().abs().nan_to_num(nan=math.inf).argmax())
    sliced, p_value = sliced_wasserstein(x, y, seed), mmd_p_value(x, y, seed)
    name, other_name = name_of(posterior.target, far), name_of(posterior.target, wide)
    return [
        judged(
            "mean against the reference",
            GROUP,
            float(shift[far]),
            float(shift[far]) <= MAX_MEAN_DISTANCE,
            f"at most {MAX_MEAN_DISTANCE} sd",
            f"The mean of {name} is {float(shift[far]):.2g} standard deviations from the reference.",
            "use the reference",
            against="mean",
            decisive=True,
        ),
        judged(
            "spread against the reference",
            GROUP,
            float(ratio[wide]),
            1 / MAX_SD_RATIO <= float(ratio[wide]) <= MAX_SD_RATIO,
            f"sd ratio {1 / MAX_SD_RATIO:.2f} to {MAX_SD_RATIO}",
            f"The standard deviation of {other_name} is {float(ratio[wide]):.2g} times that of the reference.",
            "use the reference",
            decisive=True,
        ),
        judged(
            "sliced Wasserstein distance",
            GROUP,
            sliced,
            sliced <= MAX_SLICED,
            f"at most {MAX_SLICED} sd",
            f"The distance to the reference is {sliced:.2g} standard deviations, on average over directions.",
            "use the reference",
        ),
        Item("MMD p-value", GROUP, p_value, f"above {MIN_P_VALUE}, for information", "passed"),
    ]


def sliced_wasserstein(x: Tensor, y: Tensor, seed: int) -> float:
    """The mean over directions of the Wasserstein-1 distance between draws (S, P) projected on it.

    Example:
        >>> x = torch.zeros(4, 1)
        >>> round(sliced_wasserstein(x, x + 2, seed=0), 6)
        2.0
    """
    generator = stream(seed, "slices")
    directions = torch.randn(x.shape[1], SLICES, generator=generator, dtype=torch.float64)
    directions = (directions / directions.norm(dim=0)).to(x)
    return float(((x @ directions).sort(0).values - (y @ directions).sort(0).values).abs().mean())


def mmd_p_value(x: Tensor, y: Tensor, seed: int) -> float:
    """The p-value of the hypothesis that two sets of draws (S, P) have one distribution, by permutations of the MMD."""
    x, y = (t[torch.linspace(0, len(t) - 1, min(len(t), MMD_DRAWS)).long()] for t in (x, y))
    both, n = torch.cat([x, y]), len(x)
    distance = torch.cdist(both, both).square()
    kernel = torch.exp(-distance / distance[distance > 0].median()) if bool((distance > 0).any()) else distance + 1

    def statistic(order: Tensor) -> float:
        k = kernel[order][:, order]
        a, b, c = k[:n, :n], k[n:, n:], k[:n, n:]
        return float((a.sum() - n) / (n * (n - 1)) + (b.sum() - len(b)) / (len(b) * (len(b) - 1)) - 2 * c.mean())

    generator = stream(seed, "permutations")
    found = statistic(torch.arange(len(both)))
    by_chance = [statistic(torch.randperm(len(both), generator=generator)) for _ in range(PERMUTATIONS)]
    return (1 + sum(value >= found for value in by_chance)) / (1 + PERMUTATIONS)


def prediction_items(posterior: Posterior, other: Posterior, source: Data, seed: int) -> list[Item]:
    """Compare the predictions of two posteriors at the same rows."""
    *inputs, _ = source.random_rows(PREDICTION_ROWS, 1024, stream(seed, "against rows"))
    given = inputs_as_given(source, tuple(inputs))
    a, b = (p.predict(given, samples=PREDICTION_DRAWS, seed=seed) for p in (posterior, other))
    if a.classes:
        p, q = a.probs.double(), b.probs.double()
        binary = p.shape == posterior.target.event or p.ndim == 1 + len(posterior.target.event)
        apart = (p - q).abs() if binary else 0.5 * (p - q).abs().sum(-1)
        agree = ((p > 0.5) == (q > 0.5)) if binary else (p.argmax(-1) == q.argmax(-1))
        distance, agreement = float(apart.mean()), float(agree.double().mean())
        return [
            judged(
                "total variation against the reference",
                GROUP,
                distance,
                distance <= MAX_TOTAL_VARIATION,
                f"at most {MAX_TOTAL_VARIATION}",
                f"The probabilities differ from the reference by {distance:.2g} on average.",
                "use the reference",
                decisive=True,
            ),
            judged(
                "agreement with the reference",
                GROUP,
                agreement,
                agreement >= MIN_AGREEMENT,
                f"at least {MIN_AGREEMENT}",
                f"The most probable class agrees with the reference in {100 * agreement:.0f} % of the rows.",
                "use the reference",
                against="mean",
                decisive=True,
            ),
        ]
    spread = b.std.double().clamp(min=1e-12)
    shift = float(((a.mean.double() - b.mean.double()) / spread).square().mean().sqrt())
    ratio = float((a.std.double() / spread).log().mean().exp())
    return [
        judged(
            "mean against the reference",
            GROUP,
            shift,
            shift <= MAX_MEAN_DISTANCE,
            f"at most {MAX_MEAN_DISTANCE} sd",
            f"The predicted means are {shift:.2g} predictive standard deviations from the reference.",
            "use the reference",
            against="mean",
            decisive=True,
        ),
        judged(
            "spread against the reference",
            GROUP,
            ratio,
            1 / MAX_SD_RATIO <= ratio <= MAX_SD_RATIO,
            f"sd ratio {1 / MAX_SD_RATIO:.2f} to {MAX_SD_RATIO}",
            f"The predictive standard deviations are {ratio:.2g} times those of the reference.",
            "use the reference",
            decisive=True,
        ),
    ]
