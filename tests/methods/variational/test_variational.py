"""Variational methods: combinations of estimators and objectives."""

from typing import Any

import pytest
import torch
from torch import nn

import priory as pr
from priory.divergences import Renyi

METHODS = [pr.MeanField, pr.FullRank, pr.LowRank, pr.MixtureOfGaussians, pr.Flow]
F64 = torch.float64


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)
@pytest.mark.parametrize("options", [{"objective": "iwae"}, {"divergence": Renyi(0.5)}], ids=["iwae", "divergence"])
def test_a_suitable_estimator_is_chosen_for_each_objective(method: Any, options: dict[str, Any]) -> None:
    X = torch.linspace(-1, 1, 12, dtype=F64)[:, None]
    model = pr.Model(nn.Linear(1, 1, dtype=F64), pr.Gaussian(0.3))
    posterior = pr.fit(model, (X, X[:, 0].sin()), method(samples=4, **options), steps=3, batch_size=12, progress=False)
    assert bool(torch.isfinite(posterior.history["loss"]).all())


def test_the_default_estimator_is_replaced_only_if_the_objective_needs_it() -> None:
    assert pr.FullRank().bound.estimator == "sticking"
    assert pr.FullRank(objective="iwae").bound.estimator == "doubly"
    assert pr.FullRank(divergence=Renyi(0.5)).bound.estimator == "pathwise"
    assert pr.MixtureOfGaussians(objective="iwae").bound.estimator == "pathwise"
    assert pr.MeanField(objective="iwae", samples=4).bound.estimator == "pathwise"
    assert pr.MeanField(objective="iwae", samples=4, family={"p": torch.distributions.Beta}).bound.estimator == "doubly"
    assert pr.FullRank(estimator="score").bound.estimator == "score"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "iwae", "estimator": "sticking"}, "must be one of pathwise, doubly for the objective 'iwae'"),
        ({"estimator": "doubly"}, "vargrad for the objective 'elbo', got 'doubly'"),
        ({"objective": "iwae", "samples": 1}, "must be at least 2 for the objective 'iwae', got 1"),
        ({"divergence": Renyi(0.5), "estimator": "sticking"}, "must be left out unless the estimator is 'pathwise'"),
        (
            {"divergence": Renyi(0.5), "objective": "iwae"},
            "must be left out unless the estimator is 'pathwise' of the elbo",
        ),
    ],
)
def test_options_that_cannot_be_combined_are_refused(options: dict[str, Any], message: str) -> None:
    for method in (pr.FullRank, pr.Flow, pr.MixtureOfGaussians):
        with pytest.raises(pr.InputError, match=message):
            method(**options)


def test_a_mixture_refuses_other_estimators_for_iwae() -> None:
    with pytest.raises(pr.InputError, match="of MixtureOfGaussians must be 'pathwise' for the objective 'iwae'"):
        pr.MixtureOfGaussians(objective="iwae", estimator="doubly")
