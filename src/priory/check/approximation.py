"""Items about the approximation: draws of q are compared with the joint density p(w, D).

**k-hat.** The Pareto k-hat of the ratios p(w, D) / q(w) (Vehtari et al. 2024). Above 0.7 the ratios have no variance to
speak of: q misses part of the posterior.

**Moments by gradients.** For a Gaussian posterior with precision A and mean mu, the gradients g = -A (w - mu) of the
log joint at draws w of any q give its moments exactly:

    C = Cov(w) # Cov(g)^-1 = A^-1,        mu = E[w] + C E[g]

with the geometric mean # of matrices (`priory.methods.mcmc.metrics`). So the item "mean" is the largest |C E[g]|_i in
standard deviations, and the item "spread" the ratio of the standard deviations of q and of C. Both are local: they see
the posterior where q has draws. Unlike importance weights, they stay informative in many dimensions.

Where k-hat is at most 0.7, importance-weighted moments take their place, because these are right for any posterior.

**Bound.** log p(D) - ELBO is the divergence KL(q || p). The importance-weighted bound with K draws (Burda et al. 2016)
rises to log p(D) as K grows, so its gain over the ELBO is a lower bound on the divergence.

A network with hidden layers is not compared in weights: symmetries give its posterior many equal parts, and a
linearised prediction doesn't use the joint density at draws of q. Its predictions of held-out rows are judged instead.

**Shape**, for a Laplace approximation: along its principal directions, how far log p departs from the parabola at one
and two standard deviations.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from priory.check.result import Item, judged, unknown
from priory.core.data import Data
from priory.core.errors import InputError
from priory.core.linalg import eigh
from priory.core.streams import stream
from priory.diagnostics.flatness import name_of
from priory.diagnostics.importance import k_hat, psis
from priory.methods.mcmc.metrics import DenseMetric, DiagonalMetric
from priory.models.base import has_network
from priory.posteriors.status import MAX_K_HAT

if TYPE_CHECKING:
    from torch import Tensor

    from priory.posteriors import Posterior

GROUP = "approximation"
DENSITY_DRAWS, NETWORK_DRAWS = 4096, 1024
GRADIENT_DRAWS, MIN_POINTS = 2048, 16  # draws with gradients, and how many of them must be finite
POINTS_PER_COORDINATE = 4  # that a dense covariance needs
MAX_COORDINATES = 2000  # of a density, or of a network of one layer
MAX_DENSE_COORDINATES = 256
BLOCK_DRAWS = 256  # evaluated together
MAX_NAMES = 200  # coordinates that a picture names
MAX_EVALUATIONS = 20_000_000  # draws x rows of a network
MAX_MEAN_SHIFT = 0.5  # standard deviations
MAX_SD_RATIO = 1.5  # between the standard deviations of q and of the posterior, either way
SHAPE_DIRECTIONS = 20
SHAPE_NATS = {1.0: 0.5, 2.0: 2.0}  # departure from the parabola at so many standard deviations, in nats
BOUND_DRAWS = (1, 4, 16, 64, 256, 1024)  # K of the importance-weighted bounds


class ComparedDraws(NamedTuple):
    """Draws of q with log p(w, D) - log q(w), and some of them with gradients of log p(w, D)."""

    draws: Tensor  # (S, P)
    log_ratios: Tensor | None  # (S,); None for a posterior without a density, such as a set of particles
    points: Tensor  # (n, P)
    gradients: Tensor  # (n, P)


def approximation_items(posterior: Posterior, seed: int) -> list[Item]:
    """Return the items that compare a posterior having a density with the joint density."""
    why = not_comparable(posterior)
    if why:
        return [unknown("k-hat", GROUP, f"below {MAX_K_HAT}", why)]
    rows = rows_of_fit(posterior)
    if rows is None:
        why = "The posterior comes from a file without the data of its fit: call check(data) with held-out rows."
        return [unknown("k-hat", GROUP, f"below {MAX_K_HAT}", why)]
    found = compared(posterior, rows, seed)
    return [*importance_items(found), *moment_items(posterior, found), *shape_items(posterior, rows)]


def not_comparable(posterior: Posterior) -> str:
    """Why draws can't be compared with the joint density; empty if they can."""
    size, rows = posterior.model.layout.size, posterior.num_data or 1
    if not has_network(posterior.model):
        return (
            "" if size <= MAX_COORDINATES else f"The density has {size:,} coordinates, too many for importance weights."
        )
    layers = {name.rpartition(".")[0] for name in posterior.model.network.params}
    if len(layers) > 1:
        return (
            "The posterior of a network with hidden layers can only be judged by predictions of rows that were not "
            "fitted: call check(data) with such rows."
        )
    if size > MAX_COORDINATES or NETWORK_DRAWS * rows > MAX_EVALUATIONS:
        return f"There are too many weights ({size:,}) or rows ({rows:,}) for importance weights."
    return ""


def rows_of_fit(posterior: Posterior) -> Data | None:
    """The data of the fit; None for a posterior from a file whose model doesn't contain them."""
    if posterior.data is None and posterior.num_data is None:
        return Data.of(None)
    return posterior.data


def log_q(posterior: Posterior, w: Tensor) -> Tensor | None:
    """The log density of the posterior over the unconstrained coordinates at its draws (S, P); None if it has none."""
    layout = posterior.model.layout
    try:
        return posterior.log_prob(layout.constrain(w)).double() + layout.log_det(w).double()
    except InputError:
        return None


def compared(posterior: Posterior, rows: Data, seed: int) -> ComparedDraws:
    """Draws of the posterior with ratios and gradients of the joint density."""
    target, size = posterior.target, posterior.model.layout.size
    count = NETWORK_DRAWS if has_network(posterior.model) else DENSITY_DRAWS
    generator = stream(seed, "check", device=posterior.model.device)
    stored = posterior.stored_w
    log_ratios = None
    with torch.no_grad():
        w = stored if stored is not None and len(stored) < count else posterior.draw(count, generator)
        density = log_q(posterior, w)
        if density is not None:
            joint = torch.cat([log_joint(posterior, part, rows) for part in w.split(BLOCK_DRAWS)])
            log_ratios = (joint - density).nan_to_num(nan=-math.inf)
    points = w[: max(GRADIENT_DRAWS, POINTS_PER_COORDINATE * size)]
    gradients = torch.cat([target.whole_log_joint_and_grad(part, rows)[1] for part in points.split(BLOCK_DRAWS)])
    fine = gradients.isfinite().all(1)
    return ComparedDraws(w, log_ratios, points[fine].double(), gradients[fine].double())


def log_joint(posterior: Posterior, w: Tensor, rows: Data) -> Tensor:
    """The tempered log joint over all rows at vectors (S, P), in float64, (S,)."""
    target = posterior.target
    return target.log_joint(w, target.log_likelihood(w, rows, posterior.buffers), target.log_prior(w)).double()


def importance_items(found: ComparedDraws) -> list[Item]:
    """k-hat, and the gain of importance-weighted bounds over the ELBO."""
    if found.log_ratios is None:
        return []
    if not bool(found.log_ratios.max() > -math.inf):
        finding = "The joint density is zero or undefined at every draw of this posterior."
        return [judged("k-hat", GROUP, math.inf, False, f"below {MAX_K_HAT}", finding, "fit again", against="mean")]
    k = k_hat(found.log_ratios)
    bounds = importance_weighted_bounds(found.log_ratios)
    gain = bounds[-1] - bounds[0]
    return [
        judged(
            "k-hat",
            GROUP,
            k,
            k <= MAX_K_HAT,
            f"below {MAX_K_HAT}",
            f"The k-hat of its importance weights is {k:.2f}: it misses part of the posterior.",
            "use a richer family, or NUTS",
            decisive=True,
            details={"log_ratios": found.log_ratios.cpu()},
        ),
        Item(
            "gap of the bound",
            GROUP,
            gain,
            "nats, for information",
            "passed",
            details={"draws": list(BOUND_DRAWS[: len(bounds)]), "bounds": bounds},
        ),
    ]


def importance_weighted_bounds(log_ratios: Tensor) -> list[float]:
    """The importance-weighted bounds of K = 1, 4, 16, ... draws, from all S of them in groups of K."""
    total = len(log_ratios)
    return [
        float((log_ratios[: total - total % k].view(-1, k).logsumexp(1) - math.log(k)).mean())
        for k in BOUND_DRAWS
        if k <= total
    ]


class Moments(NamedTuple):
    """Estimated moments of the posterior in the coordinates that vary, beside those of q."""

    shift: Tensor  # of the mean, minus three standard errors, in standard deviations of the posterior, (p,)
    ratio: Tensor  # of the standard deviations of q and of the posterior, (p,)


def moment_items(posterior: Posterior, found: ComparedDraws) -> list[Item]:
    """How far the posterior's means are from those of q, and the ratio of their standard deviations."""
    moves = found.draws.var(0) > 0
    if not bool(moves.any()) or len(found.points) < MIN_POINTS:
        return []
    places = moves.nonzero()[:, 0].tolist()
    reliable = found.log_ratios is not None and k_hat(found.log_ratios) <= MAX_K_HAT
    shift, ratio = weighted_moments(found, moves) if reliable else gradient_moments(found, moves)
    worst, widest = int(shift.argmax()), int(ratio.log().abs().nan_to_num(nan=math.inf).argmax())
    name, other = (name_of(posterior.target, places[place]) for place in (worst, widest))
    far, wide = float(shift[worst]), float(ratio[widest])
    what, by = ("narrow" if wide < 1 else "wide"), "importance weights" if reliable else "gradients"
    return [
        judged(
            "mean",
            GROUP,
            far,
            far <= MAX_MEAN_SHIFT,
            f"off by at most {MAX_MEAN_SHIFT} sd",
            f"The mean of {name} is {far:.2g} standard deviations from where the {by} put it.",
            "let the fit converge, or use NUTS",
            against="mean",
            decisive=True,
        ),
        judged(
            "spread",
            GROUP,
            wide,
            1 / MAX_SD_RATIO <= wide <= MAX_SD_RATIO,
            f"sd ratio {1 / MAX_SD_RATIO:.2f} to {MAX_SD_RATIO}",
            f"The spread of {other} is too {what}: {wide:.2g} times the standard deviation that the {by} give.",
            "use FullRank, LowRank or NUTS" if wide < 1 else "let the fit converge, or use NUTS",
            details={"ratios": ratio.cpu(), "names": [name_of(posterior.target, p) for p in places[:MAX_NAMES]]},
        ),
    ]


def weighted_moments(found: ComparedDraws, moves: Tensor) -> Moments:
    """Moments of the draws with smoothed importance weights."""
    assert found.log_ratios is not None
    weights, x = psis(found.log_ratios)[0].double().exp(), found.draws[:, moves].double()
    mean = weights @ x
    deviation = (weights @ (x - mean).square()).sqrt()
    error = deviation * weights.square().sum().sqrt()
    return Moments(beyond_noise(x.mean(0) - mean, error) / deviation, x.std(0) / deviation)


def gradient_moments(found: ComparedDraws, moves: Tensor) -> Moments:
    """Moments of the Gaussian that the gradients at the draws belong to; with few draws, of its coordinates alone."""
    x, g = found.points[:, moves], found.gradients[:, moves]
    dense = x.shape[1] <= MAX_DENSE_COORDINATES and len(x) >= POINTS_PER_COORDINATE * x.shape[1]
    metric = (DenseMetric if dense else DiagonalMetric).unit(x).learnt(x, g)
    newton = metric.velocity(g)  # C g at each draw: its mean is the distance to the posterior's mean
    variance = metric.covariance.diagonal() if isinstance(metric, DenseMetric) else metric.variance[0]
    deviation = variance.sqrt()
    return Moments(
        beyond_noise(newton.mean(0), newton.std(0) / math.sqrt(len(x))) / deviation,
        found.draws[:, moves].double().std(0) / deviation,
    )


def beyond_noise(value: Tensor, error: Tensor) -> Tensor:
    """The part of a value that three standard errors don't explain."""
    return (value.abs() - 3 * error).clamp(min=0).nan_to_num(nan=math.inf)


def shape_items(posterior: Posterior, rows: Data) -> list[Item]:
    """For a Gaussian around a mode: the log density along its principal directions, against the parabola."""
    gaussian = posterior.gaussian_distribution() if posterior.kind == "laplace" else None
    centre = posterior.centre
    if gaussian is None or centre is None:
        return []
    covariance = gaussian.covariance_matrix  # pyright: ignore[reportAttributeAccessIssue] - a MultivariateNormal
    values, vectors = eigh(covariance.double())
    chosen = values.argsort(descending=True)[:SHAPE_DIRECTIONS]
    axes = (vectors[:, chosen] * values[chosen].clamp(min=0).sqrt()).mT  # (directions, P)
    reach = torch.tensor([0.0, *[sign * t for t in SHAPE_NATS for sign in (1, -1)]], dtype=torch.float64)
    points = centre.double() + reach[:, None, None] * axes  # (1 + 4, directions, P)
    with torch.no_grad():
        height = log_joint(posterior, points.flatten(0, 1).to(centre.dtype), rows).view(len(reach), -1)
    departure = height - height[:1] + 0.5 * reach.square()[:, None]  # 0 for a Gaussian
    allowed = torch.tensor([1.0, *[SHAPE_NATS[t] for t in SHAPE_NATS for _ in (1, -1)]], dtype=torch.float64)
    share = (departure.abs() / allowed[:, None]).nan_to_num(nan=math.inf)
    worst = float(share.max())
    return [
        judged(
            "shape",
            GROUP,
            worst,
            worst <= 1,
            "departure from a parabola, at most 1",
            "The log density departs from the parabola of this Gaussian within two standard deviations of the mode.",
            "reparameterise, or use MeanField, FullRank or NUTS",
            details={"reach": reach, "height": (height - height[:1]).cpu()},
        )
    ]
