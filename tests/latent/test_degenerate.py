"""Degenerate data give a finite result, perhaps with a PrioryWarning, or raise an InputError."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from priory.core.errors import InputError, PrioryWarning
from priory.fitting.fit import fit
from priory.latent import (
    BayesianGaussianMixture,
    BayesianRegression,
    BernoulliMixture,
    DirichletProcessMixture,
    FactorAnalysis,
    FactorAnalysisMixture,
    GaussianMixture,
    HiddenMarkov,
    Latent,
    LinearGaussian,
    MixtureOfExperts,
    MultinomialMixture,
    NormalGamma,
    PoissonMixture,
    PrincipalComponents,
    PrincipalComponentsMixture,
    RegressionMixture,
)
from priory.latent.conjugate import Conjugate
from priory.methods.em.em import EM
from priory.methods.em.variational_em import VariationalEM

NAN = float("nan")
ROWS = torch.randn(12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
COUNTS = torch.poisson(2 + ROWS.abs(), generator=torch.Generator().manual_seed(1))


def with_empty_rows(y: Tensor) -> Tensor:
    """Return a copy in which two rows have no value."""
    y = y.clone()
    y[:2] = NAN
    return y


TABLES = {
    "identical rows": lambda y: y[:1].expand(12, 3).clone(),
    "one row": lambda y: y[:1],
    "fewer rows than components": lambda y: y[:2],
    "a constant column": lambda y: y * torch.tensor([1.0, 0.0, 1.0]).double(),
    "a large constant column": lambda y: y * torch.tensor([1.0, 0.0, 1.0]).double() + 1e6,
    "constant columns": lambda y: torch.ones_like(y),
    "a duplicate column": lambda y: torch.cat([y[:, :2], y[:, :1]], 1),
    "rows without a value": with_empty_rows,
    "no row with a value": lambda y: torch.full_like(y, NAN),
}
MODELS = {
    "full": (GaussianMixture(3), ROWS),
    "tied": (GaussianMixture(3, "tied"), ROWS),
    "diagonal": (GaussianMixture(3, "diagonal"), ROWS),
    "spherical": (GaussianMixture(3, "spherical"), ROWS),
    "bernoulli": (BernoulliMixture(3), (ROWS > 0).double()),
    "poisson": (PoissonMixture(3), COUNTS),
    "multinomial": (MultinomialMixture(3), COUNTS),
    "factors": (FactorAnalysis(2), ROWS),
    "principal": (PrincipalComponents(2), ROWS),
    "mixture of factors": (FactorAnalysisMixture(3, 2), ROWS),
    "mixture of principal": (PrincipalComponentsMixture(3, 1), ROWS),
    "bayesian": (BayesianGaussianMixture(3), ROWS),
    "bayesian diagonal": (BayesianGaussianMixture(3, "diagonal"), ROWS),
    "dirichlet process": (DirichletProcessMixture(3), ROWS),
}
REGRESSIONS = {
    "lines": RegressionMixture(3),
    "experts": MixtureOfExperts(3),
    "bayesian": BayesianRegression(),
}
SEQUENCES = {
    "full": HiddenMarkov(3),
    "diagonal": HiddenMarkov(3, covariance="diagonal"),
    "state space": LinearGaussian(2),
}


def fit_or_error(model: Latent, data: Any) -> str:
    """Return the warnings of a fit with a finite result, or the message of the InputError."""
    method = VariationalEM() if isinstance(model, Conjugate) else EM()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            posterior = fit(model, data, method, steps=15, progress=False)
        except InputError as error:
            return str(error)
    assert {w.category for w in caught} <= {PrioryWarning}, [str(w.message) for w in caught]
    assert all(bool(torch.isfinite(t).all()) for t in posterior.mean.values())
    assert bool(torch.isfinite(posterior.history["bound"]).all())
    return "; ".join(str(w.message) for w in caught)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("table", TABLES)
def test_a_degenerate_table_gives_a_finite_result_or_an_input_error(model: str, table: str):
    made, y = MODELS[model]
    messages = fit_or_error(made, TABLES[table](y))
    if "no row" in table:
        assert "in each column" in messages or "must be finite" in messages
    elif "without" in table:
        assert "no value" in messages or "must be finite" in messages


@pytest.mark.parametrize("model", REGRESSIONS)
@pytest.mark.parametrize("table", TABLES)
def test_degenerate_regression_data_give_a_finite_result_or_an_input_error(model: str, table: str):
    y = TABLES[table](ROWS)
    messages = fit_or_error(REGRESSIONS[model], (y[:, :2], y[:, 2]))
    if "value" in table:
        assert "must be finite" in messages


@pytest.mark.parametrize("model", SEQUENCES)
@pytest.mark.parametrize("table", TABLES)
def test_a_degenerate_sequence_gives_a_finite_result_or_an_input_error(model: str, table: str):
    y = TABLES[table](ROWS)
    messages = fit_or_error(SEQUENCES[model], y[None])
    if "no row" in table:
        assert "have a value" in messages


def test_a_degenerate_column_gives_a_finite_result_or_an_input_error():
    for y in (torch.ones(5), torch.ones(1), torch.tensor([1.0, NAN, 2.0]), torch.full((3,), NAN)):
        for model in (GaussianMixture(2), NormalGamma(), HiddenMarkov(2), LinearGaussian(1)):
            fit_or_error(model, y.double() if isinstance(model, (GaussianMixture, NormalGamma)) else y.double()[None])
