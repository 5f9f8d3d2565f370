"""Writes the stored posteriors: one small file for each kind, and what each gives once it is loaded.

    python tests/stored/make.py

Existing files are never overwritten: a case that has a file already is left as it is, and only new cases are added.
The tests use the model and data makers of `CASES` and `observed`; the expected values come from `expected.safetensors`.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributions import Beta, Dirichlet, Gamma, Laplace, Normal, StudentT, constraints

import priory as pr
from priory.integrations import Snapshots

FOLDER = Path(__file__).parent
EXPECTED = FOLDER / "expected.safetensors"
SUFFIX = ".priory"
DTYPE = torch.float64


class Case(NamedTuple):
    """How one file is made; `method` may be a function of the model, the data and the options of the fit."""

    model: Callable[[], Any]
    data: Callable[[], Any]
    method: Any
    options: dict[str, Any]


# Numbers that don't depend on the global stream.


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=DTYPE, generator=torch.Generator().manual_seed(seed))


def weighted(net: nn.Module, seed: int = 0, dtype: torch.dtype = DTYPE) -> nn.Module:
    """The network with parameters drawn from a generator of its own."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(0.5 * torch.randn(p.shape, dtype=DTYPE, generator=generator))
    return net.to(dtype)


# Networks.


def plain(outputs: int = 1, dtype: torch.dtype = DTYPE) -> nn.Module:
    return weighted(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, outputs)), dtype=dtype)


def normed() -> nn.Module:
    return weighted(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1)))


def frozen() -> nn.Module:
    net = plain()
    for p in net[0].parameters():  # pyright: ignore[reportIndexIssue]
        p.requires_grad_(False)
    return net


def convolution() -> nn.Module:
    return weighted(nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 1)))


class Pair(nn.Module):
    """A network of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(1, 2)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return (self.first(x).tanh() * self.second(z)).sum(-1)


def network(
    net: Callable[[], nn.Module] = plain, likelihood: Callable[[], Any] = pr.Gaussian, prior: Callable[[], Any] = str
) -> Callable[[], pr.Model]:
    """A maker of models; each call makes the likelihood and the prior anew."""
    return lambda: pr.Model(net(), likelihood(), prior() or "glorot")


def on_q() -> Any:
    return pr.penalties.Variational(lambda m, s: 0.5 * (m**2 + s**2 - 1) - s.log())


def own_penalty() -> Any:
    return pr.penalties.Penalty(lambda w: w.abs() + w.square(), 1.0)


# Densities.


def density() -> pr.Density:
    params = {"mean": pr.Param((2,)), "spread": pr.Param((), constraints.positive)}
    return pr.Density(lambda p: -p["mean"].square().sum() - (p["spread"] - 1).square(), params)


def bounded() -> pr.Density:
    params = {
        "rate": pr.Param((), constraints.positive),
        "chance": pr.Param((2,), constraints.unit_interval),
        "place": pr.Param(()),
        "shares": pr.Param((3,), constraints.simplex),
    }

    def log_prob(p: dict[str, Tensor]) -> Tensor:
        value = 2 * p["rate"].log() - p["rate"] - 0.5 * p["place"].square()
        value = value + (2 * p["chance"].log() + torch.log1p(-p["chance"])).sum(-1)
        return value + p["shares"].log().sum(-1)

    return pr.Density(log_prob, params)


def with_rows() -> pr.Density:
    params = {"mean": pr.Param((2,)), "scale": pr.Param((), constraints.positive)}
    return pr.Density(
        None,
        params,
        log_prior=lambda p: -0.5 * p["mean"].square().sum(-1) - p["scale"],
        log_likelihood=lambda p, batch: Normal(p["mean"], p["scale"]).log_prob(first(batch)).sum(-1),
    )


def first(batch: Any) -> Tensor:
    """The rows, whether they were given alone or in a tuple."""
    return batch[0] if isinstance(batch, tuple) else batch


def autoencoder() -> pr.latent.VAE:
    encoder, decoder = weighted(nn.Linear(2, 2)), weighted(nn.Linear(1, 2), 1)
    return pr.latent.VAE(encoder, decoder, 1, pr.Gaussian())


# Data.

ROWS = 12


def inputs() -> Tensor:
    return normal(ROWS, 2)


def regression() -> tuple[Tensor, Tensor]:
    x = inputs()
    return x, torch.sin(x[:, 0]) - 0.5 * x[:, 1] + 0.1 * normal(ROWS, seed=1)


def two_outputs() -> tuple[Tensor, Tensor]:
    x, y = regression()
    return x, torch.stack([y, y.square()], 1)


def classes() -> tuple[Tensor, Tensor]:
    return inputs(), torch.arange(ROWS) % 3


def binary() -> tuple[Tensor, Tensor]:
    return inputs(), (inputs()[:, 0] > 0).long()


def counts() -> tuple[Tensor, Tensor]:
    return inputs(), torch.arange(ROWS) % 4


def images() -> tuple[Tensor, Tensor]:
    x = normal(ROWS, 1, 3, 3)
    return x, x.mean((1, 2, 3))


def two_inputs() -> tuple[Tensor, Tensor, Tensor]:
    x, y = regression()
    return x, normal(ROWS, 1, seed=2), y


def clusters() -> Tensor:
    return normal(24, 2, seed=3) + 4 * (torch.arange(24) % 2)[:, None]


def line() -> Tensor:
    return normal(ROWS, seed=4)


def many_columns() -> Tensor:
    return normal(24, 1, seed=5) @ normal(1, 3, seed=6) + 0.3 * normal(24, 3, seed=7)


def bits() -> Tensor:
    return (normal(24, 3, seed=8) + 2 * (torch.arange(24) % 2)[:, None] > 1).to(DTYPE)


def tallies() -> Tensor:
    return (3 * normal(24, 3, seed=9).square()).floor() + 1 + 5 * (torch.arange(24) % 2)[:, None]


def sequences() -> Tensor:
    return normal(4, 6, 2, seed=10) + 3 * (torch.arange(6) // 3)[None, :, None]


def symbols() -> Tensor:
    return (torch.arange(24).reshape(4, 6) * 7) % 3


def tally_sequences() -> Tensor:
    return tallies()[:, :1].reshape(4, 6, 1)


def lines() -> tuple[Tensor, Tensor]:
    x = normal(24, 1, seed=11)
    return x, torch.where(torch.arange(24) % 2 == 0, 2 * x[:, 0], 1 - x[:, 0]) + 0.1 * normal(24, seed=12)


def nothing() -> None:
    return None


# What is made by more than one fit.


def member(of: int = 1) -> Callable[..., Any]:
    """One member of an ensemble with prior functions."""

    def made(model: Any, data: Any, options: dict[str, Any]) -> Any:
        posterior = pr.fit(model, data, pr.Ensemble(pr.MAP(), 2, anchored="function"), **options)
        found = posterior.members[of]
        found.method, found.seed = "MAP", 0
        return found

    return made


def stacked(model: Any, data: Any, options: dict[str, Any]) -> Any:
    both = [pr.fit(model, data, method, **options) for method in (pr.MAP(), pr.MeanField())]
    return pr.stack(both, (data[0] + 0.1, data[1]), samples=8)


def averaged(model: Any, data: Any, options: dict[str, Any]) -> Any:
    methods = (pr.Laplace("diag"), pr.Laplace("full"))
    return pr.average([pr.fit(model, data, method, **options) for method in methods])


def snapshots(model: Any, data: Any, options: dict[str, Any]) -> Any:
    taken = Snapshots(model, data, rank=2)
    for k in range(4):
        with torch.no_grad():
            for p in model.net.parameters():
                p.add_(0.1 * normal(*p.shape, seed=20 + k))
        taken.take()
    return taken.posterior


def updated(model: Any, data: Any, options: dict[str, Any]) -> Any:
    return pr.fit(model, data, pr.LastLayer(), **options).update((data[0] + 0.1, data[1]))


def with_k_hat(method: Any) -> Callable[..., Any]:
    """A fit whose importance ratios are looked at before it is saved."""

    def made(model: Any, data: Any, options: dict[str, Any]) -> Any:
        posterior = pr.fit(model, data, method, **options)
        assert isinstance(posterior.k_hat, float)
        return posterior

    return made


def without_evidence(method: Any) -> Callable[..., Any]:
    """A fit that is saved before its evidence is asked for."""
    return lambda model, data, options: pr.fit(model, data, method, **options)


FEW = {"steps": 4, "batch_size": 5, "seed": 5}
WHOLE = {"steps": 4, "seed": 5}
DRAWN = {"steps": 5, "seed": 5}
ALONE: dict[str, Any] = {"seed": 5}
given = lambda noise=0.5: lambda: pr.Gaussian(noise)  # noqa: E731
latent = pr.latent

CASES: dict[str, Case] = {
    # Points.
    "map": Case(network(), regression, pr.MAP(), FEW),
    "map_float32": Case(network(lambda: plain(dtype=torch.float32)), regression, pr.MAP(), FEW),
    "map_batch_norm": Case(network(normed), regression, pr.MAP(), FEW),
    "map_frozen_layer": Case(network(frozen), regression, pr.MAP(), FEW),
    "map_two_inputs": Case(network(lambda: weighted(Pair())), two_inputs, pr.MAP(), FEW),
    "map_given_noise": Case(network(likelihood=given()), regression, pr.MAP(), FEW),
    "map_noise_of_network": Case(network(lambda: plain(2), given("network")), regression, pr.MAP(), FEW),
    "map_two_outputs": Case(network(lambda: plain(2), lambda: pr.Gaussian(outputs=2)), two_outputs, pr.MAP(), FEW),
    "map_given_noises": Case(
        network(lambda: plain(2), lambda: pr.Gaussian(torch.tensor([0.5, 0.2], dtype=DTYPE))),
        two_outputs,
        pr.MAP(),
        FEW,
    ),
    "map_categorical": Case(network(lambda: plain(3), pr.Categorical), classes, pr.MAP(), FEW),
    "map_bernoulli": Case(network(plain, pr.Bernoulli), binary, pr.MAP(), FEW),
    "map_poisson": Case(network(plain, pr.Poisson), counts, pr.MAP(), FEW),
    "map_student_t": Case(network(plain, lambda: pr.StudentT(4.0)), regression, pr.MAP(), FEW),
    "map_student_t_given": Case(network(plain, lambda: pr.StudentT(4.0, 0.5)), regression, pr.MAP(), FEW),
    "map_evidence": Case(network(), regression, pr.MAP(evidence_every=2), {"epochs": 4, "batch_size": 5, "seed": 5}),
    "map_density": Case(density, nothing, pr.MAP(), WHOLE),
    "map_density_rows": Case(with_rows, lambda: (clusters(),), pr.MAP(), FEW),
    "map_tempered": Case(network(), regression, pr.MAP(), FEW | {"temperature": 0.5}),
    # Priors.
    "map_prior_table": Case(
        network(prior=lambda: {"0.weight": Laplace(0.0, 1.0), "*.bias": 2.0, "*": StudentT(3.0)}),
        regression,
        pr.MAP(),
        FEW,
    ),
    "map_flat_prior": Case(network(prior=lambda: "flat"), regression, pr.MAP(), FEW),
    "map_l1": Case(network(prior=lambda: pr.penalties.L1(1.0)), regression, pr.MAP(), FEW),
    "map_group_lasso": Case(network(prior=lambda: pr.penalties.GroupLasso(1.0)), regression, pr.MAP(), FEW),
    "map_bridge": Case(network(prior=lambda: pr.penalties.Bridge(1.5, 1.0)), regression, pr.MAP(), FEW),
    "map_elastic_net": Case(network(prior=lambda: pr.penalties.ElasticNet(1.0, 0.5)), regression, pr.MAP(), FEW),
    "map_own_penalty": Case(network(prior=own_penalty), regression, pr.MAP(), FEW),
    "map_horseshoe": Case(network(prior=lambda: pr.distributions.Horseshoe(1.0)), regression, pr.MAP(), FEW),
    "mean_field_hierarchical": Case(network(prior=pr.priors.Hierarchical), regression, pr.MeanField(), FEW),
    "mean_field_empirical": Case(
        network(prior=lambda: pr.priors.Hierarchical(infer="empirical")), regression, pr.MeanField(), FEW
    ),
    "mean_field_penalty_on_q": Case(network(plain, given(), on_q), regression, pr.MeanField(), FEW),
    # Variational families.
    "mean_field": Case(network(), regression, pr.MeanField(), FEW),
    "mean_field_float32": Case(network(lambda: plain(dtype=torch.float32)), regression, pr.MeanField(), FEW),
    "mean_field_without_evidence": Case(network(), regression, without_evidence(pr.MeanField()), FEW),
    "mean_field_k_hat": Case(network(), regression, with_k_hat(pr.MeanField()), FEW),
    "mean_field_batch_norm": Case(network(normed), regression, pr.MeanField(samples=2), FEW),
    "mean_field_laplace": Case(network(), regression, pr.MeanField(family="laplace"), FEW),
    "mean_field_uniform": Case(network(), regression, pr.MeanField(family="uniform"), FEW),
    "mean_field_tempered": Case(
        network(), regression, pr.MeanField(), FEW | {"temperature": 0.5, "tempers": "posterior"}
    ),
    "mean_field_density": Case(density, nothing, pr.MeanField(), WHOLE),
    "mean_field_density_rows": Case(with_rows, clusters, pr.MeanField(), FEW),
    "mean_field_per_parameter": Case(
        bounded,
        nothing,
        pr.MeanField(family={"rate": Gamma, "chance": Beta, "shares": Dirichlet}),
        WHOLE,
    ),
    "full_rank": Case(network(), regression, pr.FullRank(samples=2), FEW),
    "full_rank_density": Case(bounded, nothing, pr.FullRank(samples=2), WHOLE),
    "low_rank": Case(network(), regression, pr.LowRank(rank=2, samples=2), FEW),
    "mixture_of_gaussians": Case(network(), regression, pr.MixtureOfGaussians(components=2, samples=2), FEW),
    "mixture_of_gaussians_full": Case(
        density, nothing, pr.MixtureOfGaussians(components=2, covariance="full", samples=2), WHOLE
    ),
    "flow": Case(network(), regression, pr.Flow(layers=2, hidden=2, samples=2), FEW),
    "natural_gradient": Case(network(), regression, pr.NaturalGradient(), FEW),
    "natural_gradient_full": Case(network(), regression, pr.NaturalGradient("full"), FEW),
    "swag": Case(network(), regression, pr.SWAG(4, 2), {"steps": 8, "batch_size": 5, "seed": 5}),
    "swag_snapshots": Case(network(likelihood=given()), regression, snapshots, {}),
    # Draws.
    "pathfinder": Case(density, nothing, pr.Pathfinder(paths=2, draws=40, iterations=20), ALONE),
    "pathfinder_network": Case(network(), regression, pr.Pathfinder(paths=2, draws=6, iterations=20), ALONE),
    # Laplace.
    "laplace_kron": Case(network(), regression, pr.Laplace("kron"), WHOLE),
    "laplace_kron_float32": Case(network(lambda: plain(dtype=torch.float32)), regression, pr.Laplace("kron"), WHOLE),
    "laplace_kron_convolution": Case(network(convolution, given()), images, pr.Laplace("kron"), WHOLE),
    "laplace_kron_batch_norm": Case(network(normed), regression, pr.Laplace("kron", over=["0.*", "3.*"]), WHOLE),
    "laplace_kron_categorical": Case(network(lambda: plain(3), pr.Categorical), classes, pr.Laplace("kron"), WHOLE),
    "laplace_kron_tuned": Case(network(), regression, pr.Laplace("kron", tune="layer"), WHOLE),
    "laplace_diag": Case(network(), regression, pr.Laplace("diag"), WHOLE),
    "laplace_diag_tuned": Case(network(), regression, pr.Laplace("diag", tune="parameter"), WHOLE),
    "laplace_diag_empirical": Case(network(), regression, pr.Laplace("diag", curvature="empirical"), WHOLE),
    "laplace_full": Case(network(), regression, pr.Laplace("full"), WHOLE),
    "laplace_full_bernoulli": Case(network(plain, pr.Bernoulli), binary, pr.Laplace("full"), WHOLE),
    "laplace_full_through_network": Case(network(), regression, pr.Laplace("full", predictive="network"), WHOLE),
    "laplace_full_tempered": Case(network(), regression, pr.Laplace("full"), WHOLE | {"temperature": 0.5}),
    "laplace_lowrank": Case(network(), regression, pr.Laplace("lowrank", rank=3), WHOLE),
    "laplace_last": Case(network(), regression, pr.Laplace(over="last"), WHOLE),
    "laplace_coordinates": Case(network(), regression, pr.Laplace(over=torch.tensor([0, 1, 4, 9])), WHOLE),
    "laplace_subnetwork": Case(network(), regression, pr.Laplace(over=pr.Subnetwork(5)), WHOLE),
    "laplace_evidence_of_map": Case(
        network(),
        regression,
        pr.Laplace("kron", at=pr.MAP(evidence_every=2)),
        {"epochs": 4, "batch_size": 5, "seed": 5},
    ),
    "laplace_density": Case(bounded, nothing, pr.Laplace(), ALONE),
    "laplace_density_rows": Case(with_rows, clusters, pr.Laplace(), ALONE),
    "last_layer": Case(network(), regression, pr.LastLayer(), WHOLE),
    "last_layer_categorical": Case(network(lambda: plain(3), pr.Categorical), classes, pr.LastLayer(), WHOLE),
    "last_layer_updated": Case(network(), regression, updated, WHOLE),
    # Dropout.
    "dropout": Case(network(), regression, pr.Dropout(0.2), FEW),
    "dropout_gaussian": Case(network(), regression, pr.Dropout(0.2, noise="gaussian"), FEW),
    "dropout_learnt": Case(network(), regression, pr.Dropout("learn"), FEW),
    "dropout_convolution": Case(network(convolution, given()), images, pr.Dropout(0.2), FEW),
    # Mixtures.
    "ensemble_map": Case(network(), regression, pr.Ensemble(pr.MAP(), 2), FEW),
    "ensemble_batch_norm": Case(network(normed), regression, pr.Ensemble(pr.MAP(), 2), FEW),
    "ensemble_anchored": Case(network(), regression, pr.Ensemble(pr.MAP(), 2, anchored=True), FEW),
    "ensemble_prior_functions": Case(network(), regression, pr.Ensemble(pr.MAP(), 2, anchored="function"), FEW),
    "ensemble_mean_field": Case(network(), regression, pr.Ensemble(pr.MeanField(), 2), FEW),
    "ensemble_full_rank": Case(network(), regression, pr.Ensemble(pr.FullRank(samples=2), 2), FEW),
    "ensemble_laplace": Case(network(), regression, pr.Ensemble(pr.Laplace("kron"), 2), WHOLE),
    "ensemble_dropout": Case(network(), regression, pr.Ensemble(pr.Dropout(0.2), 2), FEW),
    "prior_function": Case(network(), regression, member(), FEW),
    "prior_function_batch_norm": Case(network(normed), regression, member(), FEW),
    "stack": Case(network(), regression, stacked, WHOLE),
    "average": Case(network(likelihood=given()), regression, averaged, WHOLE),
    # Chains.
    "hmc": Case(network(), regression, pr.HMC(chains=2, warmup=10), DRAWN),
    "nuts": Case(network(), regression, pr.NUTS(chains=2, warmup=10, max_depth=4), DRAWN),
    "nuts_density": Case(bounded, nothing, pr.NUTS(chains=2, warmup=10), DRAWN),
    "nuts_density_rows": Case(with_rows, clusters, pr.NUTS(chains=2, warmup=10), DRAWN),
    "mala": Case(network(), regression, pr.MALA(chains=2, warmup=10), DRAWN),
    "random_walk": Case(density, nothing, pr.RandomWalk(chains=2, warmup=10), DRAWN),
    "sgld": Case(network(), regression, pr.SGLD(chains=2), {"steps": 10, "batch_size": 5, "seed": 5}),
    "sghmc": Case(network(), regression, pr.SGHMC(chains=2), {"steps": 10, "batch_size": 5, "seed": 5}),
    # Latent-variable models.
    "em_gaussian_mixture": Case(lambda: latent.GaussianMixture(2), clusters, pr.EM(), WHOLE),
    "em_gaussian_mixture_tied": Case(lambda: latent.GaussianMixture(2, "tied"), clusters, pr.EM(), WHOLE),
    "em_bernoulli_mixture": Case(lambda: latent.BernoulliMixture(2), bits, pr.EM(), WHOLE),
    "em_multinomial_mixture": Case(lambda: latent.MultinomialMixture(2), tallies, pr.EM(), WHOLE),
    "em_poisson_mixture": Case(lambda: latent.PoissonMixture(2), tallies, pr.EM(), WHOLE),
    "em_regression_mixture": Case(lambda: latent.RegressionMixture(2), lines, pr.EM(), WHOLE),
    "em_mixture_of_experts": Case(lambda: latent.MixtureOfExperts(2), lines, pr.EM(), WHOLE),
    "em_mixture_of_experts_gate": Case(
        lambda: latent.MixtureOfExperts(2, weighted(nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 2)))),
        lines,
        pr.EM(),
        WHOLE,
    ),
    "em_factor_analysis": Case(lambda: latent.FactorAnalysis(1), many_columns, pr.EM(), WHOLE),
    "em_principal_components": Case(lambda: latent.PrincipalComponents(1), many_columns, pr.EM(), WHOLE),
    "em_factor_analysis_mixture": Case(lambda: latent.FactorAnalysisMixture(2, 1), many_columns, pr.EM(), WHOLE),
    "em_principal_components_mixture": Case(
        lambda: latent.PrincipalComponentsMixture(2, 1), many_columns, pr.EM(), WHOLE
    ),
    "em_hidden_markov": Case(lambda: latent.HiddenMarkov(2), sequences, pr.EM(), WHOLE),
    "em_hidden_markov_categorical": Case(
        lambda: latent.HiddenMarkov(2, "categorical", categories=3), symbols, pr.EM(), WHOLE
    ),
    "em_hidden_markov_poisson": Case(lambda: latent.HiddenMarkov(2, "poisson"), tally_sequences, pr.EM(), WHOLE),
    "em_linear_gaussian": Case(lambda: latent.LinearGaussian(1), sequences, pr.EM(), WHOLE),
    "variational_em_normal_gamma": Case(latent.NormalGamma, line, pr.VariationalEM(), WHOLE),
    "variational_em_mixture": Case(lambda: latent.BayesianGaussianMixture(2), clusters, pr.VariationalEM(), WHOLE),
    "variational_em_regression": Case(latent.BayesianRegression, lines, pr.VariationalEM(), WHOLE),
    "variational_em_dirichlet_process": Case(
        lambda: latent.DirichletProcessMixture(3), clusters, pr.VariationalEM(), WHOLE
    ),
    "amortised_em": Case(autoencoder, clusters, pr.AmortisedEM(), FEW),
}


# What a posterior gives.

SEED, SOME = 3, 4  # of everything that is drawn; rows that are predicted
ASKED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "mean": lambda p, data, some: p.mean,
    "sample": lambda p, data, some: joined(p.sample(2, seed=SEED)),
    "log_prob": lambda p, data, some: p.log_prob(p.sample(2, seed=SEED)),
    "log_evidence": lambda p, data, some: p.log_evidence,
    "elbo": lambda p, data, some: p.elbo(data, samples=8, seed=SEED),
    "predict": lambda p, data, some: predicted(p, some),
    "predict_network": lambda p, data, some: predicted(p, some, through="network"),
    "predict_linear": lambda p, data, some: predicted(p, some, through="linear") if p.through == "network" else None,
    "predict_probit": lambda p, data, some: predicted(p, some, link="probit"),
    "updated": lambda p, data, some: p.update(some).mean,
    "k_hat": lambda p, data, some: p.k_hat,
    "precisions": lambda p, data, some: p.precisions,
    "certificate": lambda p, data, some: p.certificate.valid,
    "rates": lambda p, data, some: p.rates,
    "weights": lambda p, data, some: p.weights,
    "statistics": lambda p, data, some: p.statistics,
    "responsibilities": lambda p, data, some: p.responsibilities(some),
    "labels": lambda p, data, some: p.predict_labels(some),
    "hidden": lambda p, data, some: p.hidden(some),
    "log_likelihood": lambda p, data, some: p.log_likelihood(some),
    "log_predictive": lambda p, data, some: p.log_predictive(some, samples=8, seed=SEED),
    "encode": lambda p, data, some: p.encode(some),
    "generate": lambda p, data, some: p.generate(2, seed=SEED),
}


def joined(draws: dict[str, Tensor]) -> Tensor:
    """Draws of all parameters side by side, in the order of their names."""
    return torch.cat([draws[name].reshape(len(draws[name]), -1) for name in sorted(draws)], 1)


def predicted(posterior: Any, some: Any, **options: Any) -> dict[str, Tensor] | None:
    """The moments and the density of a prediction at some rows, if they are inputs and targets."""
    if not isinstance(some, tuple) or len(some) < 2:
        return None
    *x, y = some
    prediction = posterior.predict(tuple(x) if len(x) > 1 else x[0], samples=6, seed=SEED, **options)
    mixture = prediction.of_all_components()  # the variance over these draws, as files of all versions hold it
    return {"mean": prediction.mean, "variance": mixture.variance, "log_prob": prediction.log_prob(y)}


def observed(posterior: Any, case: Case) -> dict[str, Tensor]:
    """All that a posterior can be asked for, by name; what it refuses is left out."""
    data = case.data()
    if isinstance(data, tuple):
        some: Any = tuple(t[:SOME] for t in data)
    else:
        some = None if data is None else data[:SOME]
    found: dict[str, Tensor] = {}
    for name, ask in ASKED.items():
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            try:
                value = ask(posterior, data, some)
            except (pr.InputError, AttributeError, TypeError):
                continue
        found |= flattened(name, value)
    return found


def flattened(name: str, value: Any) -> dict[str, Tensor]:
    """A value as tensors by name."""
    if value is None:
        return {}
    if isinstance(value, Tensor):
        return {name: value.detach().clone().contiguous()}
    if isinstance(value, dict):
        return {k: t for key, part in value.items() for k, t in flattened(f"{name}.{key}", part).items()}
    if isinstance(value, tuple):
        return {k: t for i, part in enumerate(value) for k, t in flattened(f"{name}.{i}", part).items()}
    if hasattr(value, "error"):
        return flattened(name, {"value": value.value, "error": value.error})
    return {name: torch.tensor(float(value), dtype=torch.float64)}


def about(posterior: Any) -> dict[str, Any]:
    """What a posterior says of its fit."""
    return {name: getattr(posterior, name) for name in ("kind", "method", "seed", "num_data", "temperature")}


def fitted(case: Case) -> Any:
    """The posterior of a case; its evidence is worked out, unless the case says otherwise or there is none."""
    options = {"progress": False, **case.options}
    model, data = case.model(), case.data()
    if callable(case.method) and not hasattr(case.method, "reads"):
        return case.method(model, data, options)
    posterior = pr.fit(model, data, case.method, **options)
    with contextlib.suppress(pr.InputError):
        posterior.log_evidence  # noqa: B018 - kept by the posterior
    return posterior


# Expected values: one tensor for each case, in double precision, and the names, types and shapes of what it holds.


def packed(found: dict[str, Tensor]) -> tuple[Tensor, dict[str, str]]:
    """Values in one row, and how to take them apart."""
    kinds = {name: " ".join([str(t.dtype).removeprefix("torch."), *map(str, t.shape)]) for name, t in found.items()}
    return torch.cat([t.double().reshape(-1) for t in found.values()]), kinds


def unpacked(row: Tensor, kinds: dict[str, str]) -> dict[str, Tensor]:
    """What `packed` had."""
    found, start = {}, 0
    for name, kind in kinds.items():
        dtype, *sizes = kind.split()
        shape = torch.Size(map(int, sizes))
        found[name] = row[start : start + shape.numel()].to(getattr(torch, dtype)).reshape(shape)
        start += shape.numel()
    return found


def stored() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The rows of numbers by case, and by case what the posterior says of its fit and what its row holds."""
    if not EXPECTED.is_file():
        return {}, {}
    with safe_open(str(EXPECTED), framework="pt") as file:
        rows = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        return rows, json.loads(file.metadata()["cases"])


def main() -> None:
    """Write the cases that have no file yet."""
    torch.set_num_threads(1)
    rows, cases = stored()
    for name, case in CASES.items():
        path = FOLDER / f"{name}{SUFFIX}"
        if name in cases:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if not path.exists():
                fitted(case).save(path)
            posterior = pr.load(path, case.model())
        rows[name], holds = packed(observed(posterior, case))
        cases[name] = {"about": about(posterior), "holds": holds}
        print(f"{name}: {path.stat().st_size} bytes, {rows[name].numel()} numbers")
    save_file(rows, str(EXPECTED), metadata={"cases": json.dumps(cases, separators=(",", ":"))})
    EXPECTED.chmod(0o644)


if __name__ == "__main__":
    main()
