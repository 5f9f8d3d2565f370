"""Mixtures of factor analysers and of principal components against dense Gaussians and single-component models."""

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import MultivariateNormal

from priory.core.errors import InputError, PrioryWarning
from priory.core.streams import stream
from priory.latent import FactorAnalysis, PrincipalComponents, expect, score
from priory.latent.factor_analysis_mixture import FactorAnalysisMixture
from priory.latent.principal_components_mixture import PrincipalComponentsMixture
from priory.methods.em.em import EM
from priory.posteriors.latent import LatentPoint

KINDS = {"factors": FactorAnalysisMixture, "components": PrincipalComponentsMixture}
SINGLE_COMPONENT = {"factors": FactorAnalysis, "components": PrincipalComponents}


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def table(n: int = 40, seed: int = 0) -> Tensor:
    """Draw rows of two low-rank clusters in five columns with unequal means and scales."""
    clouds = [randn(seed + i, n, 2) @ randn(seed + 10 + i, 2, 5) + 0.4 * randn(seed + 20 + i, n, 5) for i in range(2)]
    clouds[1] = clouds[1] + torch.tensor([3.0, 0.0, -3.0, 1.0, 2.0])
    scales = torch.tensor([1.0, 10.0, 0.1, 1.0, 3.0]).double()
    return torch.cat(clouds) * scales + torch.tensor([5.0, -20.0, 1.0, 0.0, 100.0]).double()


def with_missing(y: Tensor, share: float = 0.2, seed: int = 4) -> Tensor:
    return y.masked_fill(torch.rand(y.shape, generator=torch.Generator().manual_seed(seed)) < share, torch.nan)


def prepare_and_start(kind: str, y: Tensor, k: int = 2):
    model, data = KINDS[kind](k, factors=2).meet(y)
    theta = model.begin(model.rows((y,)), "k-means++", stream(0, "test"))
    (found,) = expect(model, [theta], data.blocks(1000))
    return model, data, model.rows((y,)), model.m_step(found.statistics, theta)


def dense(theta: dict[str, Tensor]) -> Tensor:
    noise = theta["variances"].reshape(len(theta["means"]), -1).expand_as(theta["means"])
    return theta["loadings"] @ theta["loadings"].mT + torch.diag_embed(noise)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("missing", [False, True])
def test_a_mixture_of_one_component_equals_the_single_model(kind, missing, fit_by_em):
    y = with_missing(table()) if missing else table()
    single = SINGLE_COMPONENT[kind](2).meet(y)[0]
    first = single.begin(single.rows((y,)), "random", stream(3, "test"))
    noise = "variances" if kind == "factors" else "variance"
    start = {"weights": torch.ones(1).double(), "means": first["mean"][None], "loadings": first["loadings"][None]}
    start["variances"] = first[noise][None]
    one = fit_by_em(SINGLE_COMPONENT[kind](2), y, EM(tolerance=0.0, start=first), steps=15)
    mixed = fit_by_em(KINDS[kind](1, factors=2), y, EM(tolerance=0.0, start=start), steps=15)
    for name, other in (("mean", "means"), ("loadings", "loadings"), (noise, "variances")):
        torch.testing.assert_close(mixed.mean[other][0], one.mean[name], rtol=1e-10, atol=1e-10)
    for name in ("bound", "Q", "gap"):
        torch.testing.assert_close(mixed.history[name], one.history[name], rtol=1e-10, atol=1e-8)
    torch.testing.assert_close(mixed.hidden(y)["mean"][:, 0], one.hidden(y)["mean"], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_the_density_equals_that_of_gaussians_of_the_observed_values(kind):
    y = with_missing(table(15))
    model, _, rows, theta = prepare_and_start(kind, y)
    spread, found = dense(theta), model.e_step(theta, rows).bound
    for n, row in enumerate(y):
        s = (~row.isnan()).nonzero()[:, 0]
        each = [
            MultivariateNormal(m[s], c[s[:, None], s]).log_prob(row[s])
            for m, c in zip(theta["means"], spread, strict=True)
        ]
        wanted = (torch.stack(each) + theta["weights"].log()).logsumexp(0)
        torch.testing.assert_close(found[n], wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("missing", [False, True])
def test_fishers_identity_holds_and_the_gradient_of_q_is_zero_at_the_m_step(kind, missing):
    y = with_missing(table()) if missing else table()
    model, data, rows, theta = prepare_and_start(kind, y)
    u = model.layout.unconstrain(theta).requires_grad_()
    model.log_marginal(model.layout.constrain(u), rows).sum().backward()
    torch.testing.assert_close(score(model, theta, data), u.grad, rtol=1e-8, atol=1e-7)
    (found,) = expect(model, [theta], data.blocks(7))
    best = model.layout.unconstrain(model.m_step(found.statistics, theta)).requires_grad_()
    (slope,) = torch.autograd.grad(model.complete(model.layout.constrain(best), found.statistics), best)
    assert float(slope.abs().max()) < 1e-6


def test_q_and_the_entropies_of_z_and_of_the_factors_add_up_to_the_likelihood():
    y = table()
    model, data, rows, theta = prepare_and_start("factors", y)
    (found,) = expect(model, [theta], data.blocks(1000))
    q = model.responsibilities(theta, rows)
    factors = torch.logdet(model.gain(theta)[1]) / 2 + 1 + math.log(2 * math.pi)  # two factors per component
    entropy = -torch.xlogy(q, q).sum() + (q * factors).sum()
    value = model.complete(theta, found.statistics) + entropy
    torch.testing.assert_close(value, found.bound, rtol=1e-9, atol=1e-8)


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    kind=st.sampled_from(list(KINDS)),
    k=st.integers(1, 4),
    missing=st.booleans(),
    accelerate=st.booleans(),
    how=st.sampled_from(["k-means++", "random"]),
)
def test_the_bound_never_falls(fit_by_em, seed, kind, k, missing, accelerate, how):
    y = table(20, seed % 1000)
    y = with_missing(y, 0.1, seed) if missing else y
    method = EM(tolerance=0.0, start=how, accelerate=accelerate)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrioryWarning)
        history = fit_by_em(KINDS[kind](k, factors=1 + seed % 2), y, method, steps=15, seed=seed).history["bound"]
    assert float((history.diff() / history[1:].abs()).min()) >= -1e-10


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_weight_equals_that_many_repetitions_and_known_z_are_kept(kind, fit_by_em):
    y = table(20)
    repeats = 1 + torch.arange(40) % 3
    _, _, _, start = prepare_and_start(kind, y)
    method = EM(tolerance=0.0, start=start)
    weighted_fit = fit_by_em(KINDS[kind](2, 2, given="weights"), (y, repeats), method, steps=5)
    repeated = fit_by_em(KINDS[kind](2, 2), y.repeat_interleave(repeats, 0), method, steps=5)
    for name, t in repeated.mean.items():
        torch.testing.assert_close(weighted_fit.mean[name], t, rtol=1e-8, atol=1e-8)
    z = torch.arange(40) // 20
    with_known_z = fit_by_em(KINDS[kind](2, 2, given="z"), (y, z), method, steps=5)
    noise = "variances" if kind == "factors" else "variance"
    for k in range(2):
        first = {"mean": start["means"][k], "loadings": start["loadings"][k], noise: start["variances"][k]}
        single = fit_by_em(SINGLE_COMPONENT[kind](2), y[z == k], EM(tolerance=0.0, start=first), steps=5)
        torch.testing.assert_close(with_known_z.mean["loadings"][k], single.mean["loadings"], rtol=1e-7, atol=1e-8)
        torch.testing.assert_close(with_known_z.mean["variances"][k], single.mean[noise], rtol=1e-7, atol=1e-8)


def test_two_low_rank_clusters_are_recovered_and_the_posterior_is_rebuilt_from_its_tensors(fit_by_em):
    y = table(60)
    posterior = fit_by_em(FactorAnalysisMixture(2, factors=2), y, EM(restarts=2), steps=40)
    labels = posterior.predict_labels(y)
    assert min(int((labels == torch.arange(120) // 60).sum()), int((labels != torch.arange(120) // 60).sum())) < 6
    rebuilt = LatentPoint.of_tensors(posterior.target, posterior.tensors(), {}, **posterior.to_json())
    assert torch.equal(rebuilt.log_likelihood(y), posterior.log_likelihood(y))
    drawn, z = posterior.generate(20_000)
    mean = torch.stack([drawn[z == k].mean(0) for k in range(2)])
    spread = torch.stack([drawn[z == k].T.cov() for k in range(2)])
    wanted = dense(posterior.mean)
    scale = wanted.diagonal(dim1=1, dim2=2).sqrt()
    # 10 means and 50 covariances at 5 standard errors of about 8,000 draws: false alarms below 1e-4
    assert bool(((mean - posterior.mean["means"]).abs() < 5 * scale / 8000**0.5).all())
    assert bool(((spread - wanted).abs() < 5 * 2**0.5 * scale[:, :, None] * scale[:, None] / 8000**0.5).all())


def test_degenerate_rows_give_a_result_with_a_warning(fit_by_em):
    same = torch.ones(8, 3).double()
    with pytest.warns(PrioryWarning, match="explain a column completely"):
        posterior = fit_by_em(FactorAnalysisMixture(2, factors=1), same)
    assert bool(torch.isfinite(posterior.history["bound"]).all())
    with pytest.warns(PrioryWarning) as caught:
        posterior = fit_by_em(PrincipalComponentsMixture(3, factors=1), table()[:2])
    assert any("more components than there are rows" in str(w.message) for w in caught)
    assert bool(torch.isfinite(posterior.history["bound"]).all())
    start = {name: t.clone() for name, t in prepare_and_start("factors", table())[3].items()}
    start["means"][1] = 1e9
    with pytest.warns(PrioryWarning, match="Component 1 of FactorAnalysisMixture.* has no rows"):
        fit_by_em(FactorAnalysisMixture(2, factors=2), table(), EM(start=start), steps=5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FactorAnalysisMixture(0, 1), "The 'k' argument of FactorAnalysisMixture must be an integer >= 1"),
        (
            lambda: FactorAnalysisMixture(2, 1.5),
            "The 'factors' argument of FactorAnalysisMixture must be an integer >= 1",
        ),  # pyright: ignore[reportArgumentType]
        (
            lambda: PrincipalComponentsMixture(2, 1, 0),
            "The 'floor' argument of PrincipalComponentsMixture must lie between 0 and 1",
        ),
        (
            lambda: FactorAnalysisMixture(2, 1, given="x"),
            "The 'given' argument of FactorAnalysisMixture must be 'weights', 'z'",
        ),
        (
            lambda: FactorAnalysisMixture(2, 3).meet(torch.ones(4, 3)),
            "must be less than the columns, 3, got 3.",
        ),
        (lambda: FactorAnalysisMixture(2, 1).meet(torch.ones(4)), "must be (n, D), got rows of the shape ()"),
    ],
)
def test_impossible_models_and_data_raise_an_error(make, message):
    with pytest.raises(InputError) as caught:
        make()
    assert message in str(caught.value)
