"""Combine several posteriors, weighted by held-out scores or by evidence.

Stacking (Yao, Vehtari, Simpson and Gelman 2018, "Using Stacking to Average Bayesian Predictive Distributions") picks
the weights whose mixture predicts held-out rows best,

    maximise  L(a) = 1/n sum_i log sum_k a_k p_k(y_i | x_i, D),    a_k >= 0, sum_k a_k = 1

which is concave. `stack` iterates a_k <- a_k g_k with g_k = 1/n sum_i p_k(y_i) / sum_l a_l p_l(y_i). This is the EM
iteration for mixture weights, so L never decreases. It stops when max_k g_k - 1, an upper bound on the distance of L
from its maximum, is below a tolerance. Model averaging (Hoeting et al. 1999) weights by the evidence instead, a_k in
proportion to p(D | k) p(k). It assumes that one of the models is true, and the weights concentrate on one model
quickly; stacking does not need a true model.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from priory.core.errors import InputError, require
from priory.evaluate.cross_validation import log_density
from priory.models.base import has_network
from priory.models.density import Density
from priory.models.model import rows_given
from priory.posteriors import Mixture, Posterior

if TYPE_CHECKING:
    from collections.abc import Sequence

TOLERANCE_NATS = 1e-9  # per row, below the maximum
MAX_ITERATIONS = 100_000
ROWS_PER_BLOCK = 4096  # rows that are predicted together
MIN_WEIGHT = 1e-9  # members with a smaller weight are left out


def stack(posteriors: Sequence[Posterior], data: Any, *, samples: int = 64, seed: int = 0) -> Mixture:
    """Combine posteriors with the weights that predict held-out rows best.

    The weights maximise the mean log predictive density of the mixture, 1/n sum_i log sum_k a_k p_k(y_i | x_i, D). For
    a density it is the log pointwise predictive density, log 1/S sum_s p(y_i | w_s) over draws of its posterior.

    Args:
        posteriors: Fitted posteriors of models that predict the same targets, or of densities with a `log_likelihood`
            of the same rows.
        data: Held-out inputs and targets, (X, y), or held-out rows of the densities. They must not be rows that the
            posteriors were fitted to.
        samples: Draws of each posterior per prediction. Default: 64.
        seed: Seed of the draws. Default: 0.

    Returns:
        The mixture of the posteriors; its `weights` are the optimal weights, (K,).

    Raises:
        InputError: If a posterior can't predict, or if a row has density zero under every posterior.

    Example:
        >>> from torch import nn
        >>> import priory as pr
        >>> X = torch.linspace(-1, 1, 40)[:, None]
        >>> y = 2 * X[:, 0]
        >>> model = pr.Model(nn.Linear(1, 1), pr.Gaussian(0.1))
        >>> good = pr.fit(model, (X[::2], y[::2]), pr.MAP(), steps=2000, progress=False)
        >>> poor = pr.fit(model, (X[::2], 0 * y[::2]), pr.MAP(), steps=2000, progress=False)
        >>> stack([good, poor], (X[1::2], y[1::2])).weights.round(decimals=3)
        tensor([1., 0.])

    References:
        Yao, Vehtari, Simpson and Gelman (2018), "Using Stacking to Average Bayesian Predictive Distributions".
    """
    check_posteriors(posteriors, "stack")
    networks = [has_network(posterior.model) for posterior in posteriors]
    for posterior, network in zip(posteriors, networks, strict=True):
        must, got = "be of a Model, or of a Density with a log_likelihood", type(posterior.model).__name__
        require(network or is_density_of_rows(posterior.model), "posteriors", "stack", must, got)
    kinds = [type(posterior.model).__name__ for posterior in posteriors]
    require(len(set(networks)) == 1, "posteriors", "stack", "be all of a Model, or all of a Density", ", ".join(kinds))
    require(data is not None, "data", "stack", "be inputs and targets, such as (X, y), or held-out rows", None)
    scored = log_scores if networks[0] else log_densities
    scores = [scored(posterior, data, samples, seed) for posterior in posteriors]
    sizes = [len(score) for score in scores]
    require(len(set(sizes)) == 1, "posteriors", "stack", "have a score for each row of the data", sizes)
    weights = best_weights(torch.stack(scores))  # from (K, n)
    mixture = Mixture(posteriors, weights)
    if networks[0]:
        mixture.predict(rows_given(data, "stack").some(1)[:-1], samples=1)  # refuses what doesn't predict the same
    mixture.method = f"stack of {len(posteriors)}"
    return mixture


def average(posteriors: Sequence[Posterior], prior: Sequence[float] | None = None) -> Mixture:
    """Combine posteriors with weights in proportion to their evidence times a prior: a_k ~ p(D | k) p(k).

    Each posterior needs a `log_evidence` for the same rows. If that is a bound or an estimate, the weights are only
    approximate.

    Args:
        posteriors: Posteriors fitted at temperature 1 to the same rows, with proper priors.
        prior: Prior weights p(k) of the models, one number >= 0 per posterior. Default: None, equal weights.

    Returns:
        The mixture of the posteriors; its `weights` are the posterior probabilities of the models, (K,).

    Raises:
        InputError: If the evidences are not comparable: other numbers of rows, improper priors, or a temperature other
            than 1.

    Example:
        >>> import priory as pr
        >>> X = torch.linspace(-1, 1, 40)[:, None]
        >>> models = [pr.Model(torch.nn.Linear(1, 1), pr.Gaussian(noise)) for noise in (0.1, 0.2)]
        >>> posteriors = [pr.fit(m, (X, X[:, 0]), pr.Laplace(), steps=1000, progress=False) for m in models]
        >>> pr.average(posteriors).weights.round(decimals=3)  # the rows have no noise at all
        tensor([1., 0.])

    References:
        Hoeting, Madigan, Raftery and Volinsky (1999), "Bayesian Model Averaging: A Tutorial".
    """
    check_posteriors(posteriors, "average")
    count = len(posteriors)
    must = f"be {count} numbers >= 0, not all of them 0"
    try:
        own_prior = torch.full((count,), 1 / count) if prior is None else torch.as_tensor(prior, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"The 'prior' argument of average must {must}, got {prior!r}.") from None
    ok = own_prior.shape == (count,) and bool((own_prior >= 0).all()) and float(own_prior.sum()) > 0
    require(ok, "prior", "average", must, repr(prior))
    rows = {posterior.num_data for posterior in posteriors}
    require(len(rows) == 1, "posteriors", "average", "be of the same rows", f"{rows} rows")
    improper = [repr(posterior) for posterior in posteriors if posterior.model.prior.improper]
    must = "have proper priors: the evidence of an improper one is known up to a constant"
    require(not improper, "posteriors", "average", must, ", ".join(improper))
    # a tempered fit counts each row 1/T times, so its evidence is not log p(D)
    tempered = sorted({posterior.temperature for posterior in posteriors} - {1.0})
    must = "be fitted at temperature 1, at which the evidence is that of the data"
    require(not tempered, "posteriors", "average", must, ", ".join(f"T = {t:g}" for t in tempered))
    logs = torch.tensor([posterior.log_evidence.value for posterior in posteriors], dtype=torch.float64)
    mixture = Mixture(posteriors, torch.softmax(logs + own_prior.double().log(), 0))
    mixture.method = f"average of {count}"
    return mixture


def check_posteriors(posteriors: Any, owner: str) -> None:
    """Raise an error unless `posteriors` is a list of posteriors."""
    ok = isinstance(posteriors, (list, tuple)) and len(posteriors) > 0
    ok = ok and all(isinstance(posterior, Posterior) for posterior in posteriors)
    require(ok, "posteriors", owner, "be a list of posteriors", repr(posteriors))


def log_scores(posterior: Posterior, data: Any, samples: int, seed: int) -> Tensor:
    """Return log p(y_i | x_i, D) of each row, (n,)."""
    found = []
    for *inputs, y in rows_given(data, "stack").blocks(ROWS_PER_BLOCK):
        found.append(posterior.predict(tuple(inputs), samples=samples, seed=seed).log_prob(y))
    return torch.cat(found)


def log_densities(posterior: Posterior, data: Any, samples: int, seed: int) -> Tensor:
    """Return the log pointwise predictive density of each row, log 1/S sum_s p(y_i | w_s), (n,), in float64."""
    return log_density(posterior.log_likelihood(data, samples, seed).double())


def is_density_of_rows(model: object) -> bool:
    """Whether a model is a density with a log-likelihood of each row."""
    return isinstance(model, Density) and model.capabilities.separate_likelihood


def best_weights(scores: Tensor) -> Tensor:
    """Return the weights (K,) that maximise the mean log density of the mixture, from log densities (K, n)."""
    impossible = torch.isneginf(scores).all(0)
    if bool(impossible.any()):
        row = int(impossible.nonzero()[0])
        raise InputError(f"Every row must have positive density under some posterior, got row {row}, which has none.")
    p = (scores - scores.amax(0)).double().exp()
    a = torch.full((len(p),), 1 / len(p), dtype=torch.float64, device=p.device)
    for _ in range(MAX_ITERATIONS):
        gain = (p / (a @ p)).mean(1)
        if float(gain.max()) - 1 < TOLERANCE_NATS:
            break
        a = a * gain
    a = torch.where(a < MIN_WEIGHT, 0.0, a)
    assert math.isfinite(float(a.sum()))
    return a / a.sum()
