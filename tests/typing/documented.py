"""Documented attributes of every method's posterior, for the type checker: `fit` returns the method's own class.

`make lint` runs pyright over this file; nothing here is executed.
"""

from __future__ import annotations

from typing import Any, assert_type

from torch import Tensor

import priory as pr
from priory import latent
from priory.fitting.callbacks import FitProgress
from priory.posteriors import (
    AmortisedPosterior,
    Chains,
    ConjugatePosterior,
    Draws,
    Evidence,
    LaplacePosterior,
    LastLayerPosterior,
    LatentPoint,
    Masked,
    Mixture,
    Point,
    Posterior,
    Variational,
)


def every_posterior(model: pr.Model, data: tuple[Tensor, Tensor], x: Tensor) -> None:
    posterior = pr.fit(model, data, pr.MAP(), steps=1)
    assert_type(posterior.sample(3)["weight"], Tensor)
    assert_type(posterior.mean["weight"], Tensor)
    assert_type(posterior.history["loss"], Tensor)
    assert_type(posterior.log_prob(posterior.mean), Tensor)
    assert_type(posterior.log_evidence, Evidence)
    assert_type(posterior.log_evidence.value, float)
    assert_type(posterior.log_evidence.kind, str)
    assert_type(posterior.temperature, float)
    assert_type(posterior.num_data, int | None)
    prediction = posterior.predict(x, samples=8)
    assert_type(prediction.mean, Tensor)
    assert_type(prediction.epistemic, Tensor)
    assert_type(prediction.aleatoric, Tensor)
    assert_type(prediction.interval(0.9), tuple[Tensor, Tensor])
    assert_type(prediction.log_prob(data[1]), Tensor)
    posterior.save("posterior.priory")


def points(model: pr.Model, data: tuple[Tensor, Tensor], x: Tensor) -> None:
    assert_type(pr.fit(model, data, pr.MAP()), Point)
    dropout = pr.fit(model, data, pr.Dropout())
    assert_type(dropout, Masked)
    assert_type(dropout.rates, dict[str, float])
    ensemble = pr.fit(model, data, pr.Ensemble(pr.MAP(), 4))
    assert_type(ensemble, Mixture)
    assert_type(ensemble.members[0], Posterior)
    assert_type(ensemble.weights, Tensor)


def variational(model: pr.Model, data: tuple[Tensor, Tensor], x: Tensor) -> None:
    for method in (pr.MeanField(), pr.FullRank(), pr.LowRank(), pr.MixtureOfGaussians(), pr.Flow()):
        posterior = pr.fit(model, data, method)
        assert_type(posterior, Variational)
    natural = pr.fit(model, data, pr.NaturalGradient())
    assert_type(natural, Variational)
    assert_type(natural.elbo(data).value, float)
    assert_type(natural.k_hat, float)
    assert_type(natural.importance(data, samples=8).log_weights, Tensor)
    assert_type(natural.precisions, dict[str, Tensor])
    swag = pr.fit(model, data, pr.SWAG())
    assert_type(swag, Variational)
    draws = pr.fit(model, data, pr.Pathfinder())
    assert_type(draws, Draws)
    assert_type(draws.k_hat, float | None)
    assert_type(pr.fit(model, data, pr.SVGD()), Draws)


def laplace(model: pr.Model, data: tuple[Tensor, Tensor], x: Tensor) -> None:
    posterior = pr.fit(model, data, pr.Laplace())
    assert_type(posterior, LaplacePosterior)
    posterior.predict(x, through="linear", link="probit")
    posterior.outputs(x, joint=True)
    assert_type(posterior.notes, tuple[str, ...])
    last = pr.fit(model, data, pr.LastLayer())
    assert_type(last, LastLayerPosterior)
    assert_type(last.update(data), LastLayerPosterior)


def chains(density: pr.Density, model: pr.Model, data: tuple[Tensor, Tensor], x: Tensor) -> None:
    for sampler in (pr.NUTS(), pr.HMC(), pr.MALA(), pr.RandomWalk()):
        assert_type(pr.fit(density, None, sampler), Chains)
    for sampler in (pr.SGLD(), pr.SGHMC()):
        assert_type(pr.fit(model, data, sampler), Chains)
    posterior = pr.fit(density, None, pr.NUTS())
    assert_type(posterior.draws["w"], Tensor)
    assert_type(posterior.statistics["energy"], Tensor)
    assert_type(posterior.num_chains, int)
    print(posterior.summary(), posterior.diagnostics, posterior.divergences, posterior.function_space(x))
    posterior.to_arviz()


def latent_variables(y: Tensor) -> None:
    posterior = pr.fit(latent.GaussianMixture(3), y, pr.EM())
    assert_type(posterior, LatentPoint)
    assert_type(posterior.responsibilities(y), Tensor)
    assert_type(posterior.predict_labels(y), Tensor)
    assert_type(posterior.log_likelihood(y), Tensor)
    assert_type(posterior.converged, bool)
    rows, z = posterior.generate(10)
    print(rows.shape, z)
    conjugate = pr.fit(latent.BayesianGaussianMixture(3), y, pr.VariationalEM())
    assert_type(conjugate, ConjugatePosterior)
    assert_type(conjugate.phi, dict[str, Tensor])
    assert_type(conjugate.log_predictive(y), Tensor)


def amortised(model: latent.VAE, y: Tensor) -> None:
    posterior = pr.fit(model, y, pr.AmortisedEM())
    assert_type(posterior, AmortisedPosterior)
    mean, scale = posterior.encode(y)
    print(mean.shape, scale.shape)
    assert_type(posterior.log_likelihood(y), Tensor)


def callbacks(model: pr.Model, data: tuple[Tensor, Tensor]) -> None:
    def stop(progress: FitProgress) -> bool:
        return progress.epoch > 3 and progress.metrics["loss"] < float(progress.posterior().history["loss"][0])

    pr.fit(model, data, pr.MAP(), callbacks=[stop, pr.EarlyStop()], checkpoint=pr.Checkpoint("fit.checkpoint"))


def a_method_by_name(model: pr.Model, data: tuple[Tensor, Tensor], method: Any) -> None:
    posterior = pr.fit(model, data, method)
    posterior.predict(data[0])
