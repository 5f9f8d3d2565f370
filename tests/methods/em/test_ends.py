"""Where EM ends, and the evidence that it reports: the limit of the bound, and all rows."""

from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_wine
from sklearn.decomposition import FactorAnalysis as Reference
from torch import Tensor
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal

import priory as pr
from priory import latent
from priory.methods.em.ascent import distance_to_limit

NOISE = torch.randn(600, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
X = NOISE + 4 * (torch.arange(600) % 2)[:, None]
INFINITY = float("inf")


def fitted(model: Any, data: Any, method: Any, **options: Any) -> Any:
    return pr.fit(model, data, method, progress=False, **options)


@pytest.mark.parametrize("accelerate", [False, True])
def test_factor_analysis_ends_at_the_maximum_of_the_likelihood(accelerate: bool) -> None:
    """Three factors of wine: EM's rises are small long before their sum is, 0.015 nats at a rise of 1e-6 per row."""
    x = load_wine().data
    x = (x - x.mean(0)) / x.std(0)
    exact = Reference(3, tol=1e-10, max_iter=20_000, svd_method="lapack").fit(x).score(x) * len(x)
    posterior = fitted(latent.FactorAnalysis(3), torch.tensor(x), pr.EM(accelerate=accelerate))
    assert posterior.status.name == "converged"
    assert abs(posterior.log_evidence.value - exact) < 1e-3


def test_a_fit_that_ends_at_its_cap_far_from_the_limit_says_so() -> None:
    x = load_breast_cancer().data
    x = (x - x.mean(0)) / x.std(0)
    posterior = fitted(latent.FactorAnalysis(3), torch.tensor(x), pr.EM(), steps=112)
    assert posterior.status.name == "not_converged"


@pytest.mark.parametrize("cycle", [1, 2])
@pytest.mark.parametrize("ratio", [0.1, 0.9, 0.99])
def test_the_distance_of_a_geometric_series_from_its_limit_is_exact(ratio: float, cycle: int) -> None:
    bounds = -(ratio ** torch.arange(20.0, 29.0, dtype=torch.float64))
    assert distance_to_limit(bounds, cycle) == pytest.approx(ratio**28, rel=1e-6)


@pytest.mark.parametrize(
    "bounds",
    [[0.0, 1.0, 2.0, 3.0, 4.0], [0.0, 1.0, 3.0, 6.0, 10.0], [-INFINITY] * 3 + [0.0, 1e-9], [-INFINITY] * 4 + [0.0]],
    ids=["a line", "a plateau that is left", "one rise", "no rise"],
)
def test_a_bound_whose_rises_do_not_shrink_is_infinitely_far_from_its_limit(bounds: list[float]) -> None:
    assert distance_to_limit(torch.tensor(bounds, dtype=torch.float64)) == INFINITY


# Minibatches.


def check_evidence(posterior: Any, expected: Tensor | float, path: Path, model: Any) -> None:
    assert posterior.log_evidence.value == pytest.approx(float(expected), rel=1e-12)
    posterior.save(path)
    assert pr.load(path, model).log_evidence.value == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_the_evidence_of_online_em_is_that_of_all_rows(seed: int, tmp_path: Path) -> None:
    model = latent.GaussianMixture(2)
    posterior = fitted(model, X, pr.EM(online=0.7), steps=30, batch_size=20, seed=seed)
    check_evidence(posterior, posterior.log_likelihood(X).sum(), tmp_path / "em.priory", model)
    assert posterior.log_evidence.kind == "log-likelihood at theta"


def test_the_bound_of_online_variational_em_is_that_of_all_rows(tmp_path: Path) -> None:
    model = latent.BayesianGaussianMixture(2)
    posterior = fitted(model, X, pr.VariationalEM(online=0.7), steps=30, batch_size=20)
    again = fitted(model, X, pr.VariationalEM(start=posterior, tolerance=0.0), steps=1)  # coordinate ascent from there
    best = fitted(model, X, pr.VariationalEM(start=posterior))
    assert posterior.log_evidence.value <= again.log_evidence.value <= best.log_evidence.value + 1e-9
    assert best.log_evidence.value - posterior.log_evidence.value < 30
    check_evidence(posterior, posterior.bound, tmp_path / "vem.priory", model)


def test_the_evidence_of_online_em_counts_the_weights_of_rows() -> None:
    weights = torch.rand(len(X), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    posterior = fitted(latent.GaussianMixture(2), X, pr.EM(online=0.7), steps=30, batch_size=20, weights=weights)
    theta = posterior.mean
    components = MultivariateNormal(theta["means"], theta["covariances"])
    each = MixtureSameFamily(Categorical(theta["weights"]), components).log_prob(X)
    expected = (weights * each).sum()
    assert posterior.log_evidence.value == pytest.approx(float(expected), rel=1e-10)
