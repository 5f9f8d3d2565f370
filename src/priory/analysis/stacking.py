"""Weights for several posteriors: by held-out scores, or by evidence.

Stacking (Yao, Vehtari, Simpson and Gelman 2018, "Using Stacking to Average Bayesian Predictive Distributions") picks
the weights whose mixture predicts held-out rows best,

    maximise  L(a) = 1/n sum_i log sum_k a_k p_k(y_i | x_i, D),    a_k >= 0, sum_k a_k = 1

which is concave. `stack` climbs by a_k <- a_k g_k with g_k = 1/n sum_i p_k(y_i) / sum_l a_l p_l(y_i), an EM iteration
for mixture weights whose L never falls, and stops where max_k g_k - 1, which bounds how far L is below its maximum, is
under a tolerance. Model averaging (Hoeting et al. 1999) weighs by the evidence instead, a_k in proportion to p(D | k)
p(k): right if one of the models is, and then the data decide quickly; stacking doesn't ask for a right one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from priory.core.errors import InputError, require
from priory.models.base import has_network
from priory.models.model import rows_given
from priory.posteriors import Mixture, Posterior

if TYPE_CHECKING:
    from collections.abc import Sequence

GAP = 1e-9  # nats a row below the maximum
ITERATIONS = 100_000
ROWS = 4096  # predicted at a time
SLIGHT = 1e-9  # a weight below which a member is left out


def stack(posteriors: Sequence[Posterior], data: Any, *, samples: int = 64, seed: int = 0) -> Mixture:
    """The mixture of posteriors that predicts these rows best; they must not be those of the fits.

    >>> from torch import nn
    >>> import priory as pr
    >>> X = torch.linspace(-1, 1, 40)[:, None]
    >>> y = 2 * X[:, 0]
    >>> model = pr.Model(nn.Linear(1, 1), pr.Gaussian(0.1))
    >>> good = pr.fit(model, (X[::2], y[::2]), pr.MAP(), steps=2000, progress=False)
    >>> poor = pr.fit(model, (X[::2], 0 * y[::2]), pr.MAP(), steps=2000, progress=False)
    >>> stack([good, poor], (X[1::2], y[1::2])).weights.round(decimals=3)
    tensor([1., 0.])
    """
    check_posteriors(posteriors, "stack")
    for posterior in posteriors:
        predicts = has_network(posterior.model)
        require(predicts, "posteriors", "stack", "be of a Model, which predicts", type(posterior.model).__name__)
    scores = torch.stack([log_scores(posterior, data, samples, seed) for posterior in posteriors])  # (K, n)
    weights = best_weights(scores)
    mixture = Mixture(posteriors, weights)
    mixture.predict(rows_given(data, "stack").some(1)[:-1], samples=1)  # refuses what doesn't predict the same
    mixture.method = f"stack of {len(posteriors)}"
    return mixture


def average(posteriors: Sequence[Posterior], prior: Sequence[float] | None = None) -> Mixture:
    """The mixture of posteriors weighed by their evidence and by what is believed of each before the data.

    Each posterior needs a `log_evidence` of the same rows: a bound or an estimate makes the weights one too.
    """
    check_posteriors(posteriors, "average")
    count = len(posteriors)
    must = f"be {count} numbers from 0, not all of them 0"
    try:
        believed = torch.full((count,), 1 / count) if prior is None else torch.as_tensor(prior, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"The 'prior' argument of average must {must}, got {prior!r}.") from None
    ok = believed.shape == (count,) and bool((believed >= 0).all()) and float(believed.sum()) > 0
    require(ok, "prior", "average", must, repr(prior))
    rows = {posterior.num_data for posterior in posteriors}
    require(len(rows) == 1, "posteriors", "average", "be of the same rows", f"{rows} rows")
    improper = [repr(posterior) for posterior in posteriors if posterior.model.prior.improper]
    must = "have proper priors: the evidence of an improper one is known up to a constant"
    require(not improper, "posteriors", "average", must, ", ".join(improper))
    # a hotter fit reads its data as fewer rows, and what it pays for them is no log p(D)
    tempered = sorted({posterior.temperature for posterior in posteriors} - {1.0})
    must = "be of the temperature 1, at which evidence is that of the data"
    require(not tempered, "posteriors", "average", must, ", ".join(f"T = {t:g}" for t in tempered))
    logs = torch.tensor([posterior.log_evidence.value for posterior in posteriors], dtype=torch.float64)
    mixture = Mixture(posteriors, torch.softmax(logs + believed.double().log(), 0))
    mixture.method = f"average of {count}"
    return mixture


def check_posteriors(posteriors: Any, owner: str) -> None:
    """Refuse what isn't a list of posteriors."""
    ok = isinstance(posteriors, (list, tuple)) and len(posteriors) > 0
    ok = ok and all(isinstance(posterior, Posterior) for posterior in posteriors)
    require(ok, "posteriors", owner, "be a list of posteriors", repr(posteriors))


def log_scores(posterior: Posterior, data: Any, samples: int, seed: int) -> Tensor:
    """log p(y_i | x_i, D) of each row, (n,)."""
    found = []
    for *inputs, y in rows_given(data, "stack").blocks(ROWS):
        found.append(posterior.predict(tuple(inputs), samples=samples, seed=seed).log_prob(y))
    return torch.cat(found)


def best_weights(scores: Tensor) -> Tensor:
    """The weights, (K,), that maximise the mean log of the mixture of exp(scores), scores (K, n)."""
    lost = torch.isneginf(scores).all(0)
    if bool(lost.any()):
        raise InputError(f"A row must be possible under a posterior, got row {int(lost.nonzero()[0])}, which is not.")
    p = (scores - scores.amax(0)).double().exp()
    a = torch.full((len(p),), 1 / len(p), dtype=torch.float64, device=p.device)
    for _ in range(ITERATIONS):
        gain = (p / (a @ p)).mean(1)
        if float(gain.max()) - 1 < GAP:
            break
        a = a * gain
    a = torch.where(a < SLIGHT, 0.0, a)
    assert math.isfinite(float(a.sum()))
    return a / a.sum()
