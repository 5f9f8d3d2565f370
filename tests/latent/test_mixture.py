"""All mixtures: equations against enumeration and autograd, row weights, known z and degenerate data."""

import itertools
import math
import warnings

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
import torch.distributions as td
from torch import Tensor

from priory.core.errors import InputError, PrioryWarning
from priory.core.streams import stream
from priory.fitting.prepare import make_target
from priory.fitting.run import Run
from priory.latent import (
    BernoulliMixture,
    GaussianMixture,
    MixtureModel,
    MultinomialMixture,
    PoissonMixture,
    RegressionMixture,
    bounds,
    expect,
    score,
)
from priory.latent.expectation import lbfgs_steps
from priory.latent.starts import clusters
from priory.methods.em.em import EM

KINDS = ["full", "tied", "diagonal", "spherical", "column", "bernoulli", "poisson", "multinomial", "regression"]


def example(
    kind: str, rows: int = 40, seed: int = 0, k: int = 3, given: tuple[str, ...] = ()
) -> tuple[MixtureModel, tuple]:
    """Return a model of this kind and data for it."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 2, generator=generator, dtype=torch.float64)
    x[: rows // 2] += 2.0
    rates = (1 + x.abs()) * torch.tensor([1.0, 4.0], dtype=torch.float64)
    counts = torch.poisson(torch.cat([rates, rates.flip(1)], 1), generator=generator)
    if kind in ("full", "tied", "diagonal", "spherical"):
        return GaussianMixture(k, kind, given=given), (x * torch.tensor([1.0, 30.0]) - 100,)
    if kind == "column":
        return GaussianMixture(k, given=given), (x[:, 0] + 7,)
    if kind == "bernoulli":
        return BernoulliMixture(k, given=given), ((counts > 2).double(),)
    if kind == "poisson":
        return PoissonMixture(k, given=given), (counts,)
    if kind == "multinomial":
        return MultinomialMixture(k, given=given), (counts,)
    noise = 0.1 * torch.randn(rows, generator=generator, dtype=torch.float64)
    return RegressionMixture(k, given=given), (x, torch.where(counts[:, 0] > 2, x[:, 0], 2 - x[:, 1]) + noise)


def prepare_and_start(kind: str, **options):
    model, data = example(kind, **options)
    model, rows = model.meet(data)
    assert rows.tensors is not None
    theta = model.begin(model.rows(rows.tensors), model.starts[0], stream(1, "test"))
    (found,) = expect(model, [theta], rows.blocks(1000))
    theta = model.m_step(found.statistics, theta)
    return model, rows, model.rows(rows.tensors), theta


@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_plus_the_divergence_is_the_log_likelihood_by_enumeration(kind):
    model, rows, block, theta = prepare_and_start(kind, rows=9, k=2)
    joint = model.log_joint(theta, block)  # (K, n)
    all_z = torch.tensor(list(itertools.product(range(2), repeat=len(block))))  # all z, (2^n, n)
    log_joint = joint[all_z, torch.arange(len(block))].sum(1)  # log p(y, z) of each
    evidence = log_joint.logsumexp(0)
    (found,) = expect(model, [theta], rows.blocks(3))
    torch.testing.assert_close(found.bound, evidence, rtol=1e-10, atol=1e-10)
    q = torch.rand(len(block), 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    q = q / q.sum(1, keepdim=True)
    log_q = q[torch.arange(len(block)), all_z].log().sum(1)
    elbo = (log_q.exp() * (log_joint - log_q)).sum()
    divergence = (log_q.exp() * (log_q - (log_joint - evidence))).sum()
    torch.testing.assert_close(elbo + divergence, evidence, rtol=1e-10, atol=1e-10)
    for value in bounds(model, theta, block, q).values():
        torch.testing.assert_close(value, elbo, rtol=1e-10, atol=1e-10)


def density(kind: str, theta: dict[str, Tensor], parts: tuple[Tensor, ...]) -> Tensor:
    """Return log p(y | z = k), (n, K), computed with torch.distributions."""
    y = parts[-1].unsqueeze(1)  # (n, 1, ...)
    if kind == "bernoulli":
        return td.Bernoulli(theta["probs"]).log_prob(y).sum(-1)
    if kind == "poisson":
        return td.Poisson(theta["rates"]).log_prob(y).sum(-1)
    if kind == "multinomial":
        totals = [int(row.sum()) for row in parts[-1]]
        rows = [td.Multinomial(n, theta["probs"]).log_prob(row) for n, row in zip(totals, parts[-1], strict=True)]
        return torch.stack(rows)
    if kind == "regression":
        means = parts[0] @ theta["coefficients"].T + theta["intercepts"]
        return td.Normal(means, theta["variances"].sqrt()).log_prob(y)
    if kind == "column":
        return td.Normal(theta["means"], theta["covariances"].sqrt()).log_prob(y)
    spread = theta["covariances"]
    if kind in ("full", "tied"):
        return td.MultivariateNormal(theta["means"], spread).log_prob(y)
    spread = spread if kind == "diagonal" else spread[:, None]
    return td.Normal(theta["means"], spread.sqrt()).log_prob(y).sum(-1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_density_is_the_weighted_sum_of_the_components(kind):
    model, _, block, theta = prepare_and_start(kind)
    each = density(kind, theta, tuple(block.parts.values())) + theta["weights"].log()
    torch.testing.assert_close(model.log_joint(theta, block).T, each, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(model.e_step(theta, block).bound, each.logsumexp(1), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["full", "tied", "diagonal", "spherical", "column", "regression"])
def test_the_density_of_narrow_components_is_accurate(kind):
    model, _, block, theta = prepare_and_start(kind)
    name = "variances" if kind == "regression" else "covariances"
    narrow = {**theta, name: theta[name] * 1e-7}
    each = density(kind, narrow, tuple(block.parts.values())) + theta["weights"].log()
    found = model.e_step(narrow, block).bound
    torch.testing.assert_close(found, each.logsumexp(1), rtol=1e-11, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_the_expected_log_joint_plus_the_entropy_is_the_bound_in_its_three_forms(kind):
    model, rows, block, theta = prepare_and_start(kind)
    (found,) = expect(model, [theta], rows.blocks(11))
    q = model.responsibilities(theta, block)
    entropy = -torch.xlogy(q, q).sum()
    for value in (model.complete(theta, found.statistics) + entropy, *bounds(model, theta, block, q).values()):
        torch.testing.assert_close(value, found.bound, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_the_m_step_has_zero_gradient_and_gradient_ascent_finds_no_higher_value(kind):
    model, rows, _, theta = prepare_and_start(kind)
    (found,) = expect(model, [theta], rows.blocks(1000))
    best = model.m_step(found.statistics, theta)
    u = model.layout.unconstrain(best).requires_grad_()
    model.complete(model.layout.constrain(u), found.statistics).backward()
    assert u.grad is not None
    assert float(u.grad.abs().max()) < 1e-6
    at_best = model.complete(best, found.statistics)
    by_ascent = model.complete(lbfgs_steps(model, found.statistics, theta, 100), found.statistics)
    torch.testing.assert_close(by_ascent, at_best, rtol=1e-6, atol=1e-6)
    assert float(at_best - by_ascent) > -1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_fishers_identity_holds(kind):
    model, rows, block, theta = prepare_and_start(kind)
    u = model.layout.unconstrain(theta).requires_grad_()
    model.log_marginal(model.layout.constrain(u), block).sum().backward()
    torch.testing.assert_close(score(model, theta, rows), u.grad, rtol=1e-8, atol=1e-7)


@hypothesis.settings(max_examples=12)
@hypothesis.given(st.sampled_from(KINDS), st.integers(0, 10_000), st.booleans(), st.sampled_from([1, 2, 4]))
def test_the_bound_never_falls(kind, seed, accelerate, k):
    model, data = example(kind, rows=30, seed=seed, k=k)
    model, rows = model.meet(data)
    target = make_target(model, rows)
    method = EM(restarts=2, start=model.starts[-1], accelerate=accelerate, tolerance=0.0)
    run = Run(target, method, method.plan(target, rows, 30, seed), seed, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrioryWarning)
        run.run(False, [])
        history = run.posterior().history
    rise = history["bound"].diff()
    assert float((rise / history["bound"][:-1].abs()).min()) > -1e-10
    assert float(history["gap"].min()) > -1e-9 * float(history["bound"].abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_weight_equals_that_many_repetitions(kind, fit_by_em):
    _, data = example(kind)
    repeats = torch.arange(len(data[0])) % 3
    model, _, _, theta = prepare_and_start(kind)
    repeated = tuple(t.repeat_interleave(repeats, 0) for t in data)
    (repeated_rows,) = expect(model, [theta], [model.prepare(repeated)])
    model.given = ("weights",)
    (weighted,) = expect(model, [theta], [model.prepare((*data, repeats.double()))])
    torch.testing.assert_close(weighted.bound, repeated_rows.bound, rtol=1e-12, atol=1e-10)
    for name, t in repeated_rows.statistics.items():
        torch.testing.assert_close(weighted.statistics[name], t, rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_with_all_z_known_one_iteration_is_complete_data_maximum_likelihood(kind, fit_by_em):
    model, data = example(kind, given=("z",))
    z = torch.arange(len(data[0])) % 3
    once = fit_by_em(model, (*data, z), EM(tolerance=0.0), steps=1)
    often = fit_by_em(model, (*data, z), EM(tolerance=0.0), steps=3)
    shares = z.bincount().double() / len(z)
    torch.testing.assert_close(once.mean["weights"], shares, rtol=1e-10, atol=1e-10)
    for name, t in once.mean.items():
        torch.testing.assert_close(often.mean[name], t, rtol=1e-8, atol=1e-8)
    joint = once.latent.log_joint(once.theta, once.latent.rows((*data, z)))  # log p(y_n, z_n), summed, is the bound
    value = joint[z, torch.arange(len(z))].sum()
    assert once.log_evidence.value == pytest.approx(float(value), rel=1e-10)


def test_known_z_fix_the_order_of_the_components(fit_by_em):
    generator = torch.Generator().manual_seed(0)
    z = torch.arange(90) % 3
    y = torch.randn(90, 2, generator=generator, dtype=torch.float64) + 4 * torch.stack([z, -z], 1)
    known_z = torch.where(torch.arange(90) < 9, z, -1)
    posterior = fit_by_em(GaussianMixture(3, given="z"), (y, known_z))
    assert torch.equal(posterior.predict_labels(y), z)
    q = posterior.responsibilities((y, known_z))
    assert torch.equal(q[:9], torch.nn.functional.one_hot(z[:9], 3).double())
    assert torch.equal(posterior.predict_labels(y), posterior.responsibilities(y).argmax(1))


def test_draws_of_z_have_the_mean_of_q():
    model, rows, _, theta = prepare_and_start("full")
    (exact_q,) = expect(model, [theta], rows.blocks(1000))
    sampled = [
        expect(model, [theta], rows.blocks(1000), draws=1, generator=stream(i, "test"))[0].statistics["sums"]
        for i in range(400)
    ]
    mean, error = torch.stack(sampled).mean(0), torch.stack(sampled).std(0) / 20
    # 18 numbers at 5 standard errors: false alarms below 1e-4
    assert bool(((mean - exact_q.statistics["sums"]).abs() <= 5 * error + 1e-9).all())
    assert torch.equal(
        expect(model, [theta], rows.blocks(1000), draws=3, generator=stream(0, "t"))[0].bound, exact_q.bound
    )


def test_the_gap_of_a_tempered_q_is_its_divergence_from_the_posterior():
    model, rows, block, theta = prepare_and_start("diagonal")
    (exact,) = expect(model, [theta], rows.blocks(1000))
    (tempered,) = expect(model, [theta], rows.blocks(1000), temperature=3.0)
    posterior = model.responsibilities(theta, block)
    q = posterior ** (1 / 3)
    q = q / q.sum(1, keepdim=True)
    divergence = (q * (q.log() - posterior.log())).sum()
    torch.testing.assert_close(tempered.gap, divergence, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(tempered.log_likelihood, exact.bound, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(tempered.bound, bounds(model, theta, block, q)["joint"], rtol=1e-10, atol=1e-10)


def test_an_empty_component_keeps_its_parameters_with_a_warning(fit_by_em):
    y = torch.tensor([0.0, 0.1, 0.2, 0.3, 5.0], dtype=torch.float64)
    start = {"weights": [0.5, 0.5], "means": [1.0, 1e6], "covariances": [1.0, 1.0]}
    start = {name: torch.tensor(values, dtype=torch.float64) for name, values in start.items()}
    with pytest.warns(PrioryWarning, match="Component 1 of .* has no rows"):
        posterior = fit_by_em(GaussianMixture(2), y, EM(start=start))
    assert float(posterior.mean["weights"][1]) == 0.0
    torch.testing.assert_close(posterior.mean["means"], torch.tensor([y.mean(), 1e6], dtype=torch.float64))
    assert bool(torch.isfinite(posterior.history["bound"]).all())


@pytest.mark.parametrize("kind", KINDS)
def test_identical_rows_and_fewer_rows_than_components_give_a_finite_result(kind, fit_by_em):
    model, data = example(kind)
    for rows in (tuple(t[:1].expand(6, *t.shape[1:]).clone() for t in data), tuple(t[:2] for t in data)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            posterior = fit_by_em(model, rows)
        assert all(bool(torch.isfinite(t).all()) for t in posterior.mean.values())
        assert bool(torch.isfinite(posterior.history["bound"]).all())
        assert {w.category for w in caught} <= {PrioryWarning}
        if len(rows[0]) < model.k:
            assert any("more components than there are rows" in str(w.message) for w in caught)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_agrees_with_float64(kind, fit_by_em):
    model, data = example(kind, k=2)
    double = fit_by_em(model, data, EM(tolerance=0.0), steps=5)
    single = fit_by_em(model, tuple(t.float() for t in data), EM(tolerance=0.0), steps=5)
    for name, t in double.mean.items():
        assert single.mean[name].dtype == torch.float32
        torch.testing.assert_close(single.mean[name].double(), t, rtol=2e-3, atol=2e-3)


def test_k_means_plus_plus_finds_far_clusters_and_keeps_known_ones():
    z = torch.arange(60) % 4
    x = 0.01 * torch.randn(60, 2, generator=torch.Generator().manual_seed(0)) + 10 * torch.stack([z % 2, z // 2], 1)
    labels = clusters(x, 4, "k-means++", stream(0, "test"))
    assert len({(int(a), int(b)) for a, b in zip(labels, z, strict=True)}) == 4
    known_z = torch.where(torch.arange(60) < 8, z, -1)
    assert torch.equal(clusters(x, 4, "k-means++", stream(0, "test"), z=known_z), z)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("multinomial", "regression")])
def test_generated_rows_have_the_moments_of_the_model(kind):
    model, _, _, theta = prepare_and_start(kind)
    y, z = model.generate(theta, 20_000, stream(0, "test"))
    weights = theta["weights"]
    counts = torch.bincount(z, minlength=3)
    assert bool(((counts / 20_000 - weights).abs() < 5 * (weights * (1 - weights) / 20_000).sqrt() + 1e-12).all())
    name = {"bernoulli": "probs", "poisson": "rates"}.get(kind, "means")
    for k in range(3):
        of_component = y[z == k]
        error = of_component.std(0) / len(of_component) ** 0.5
        assert bool(
            ((of_component.mean(0) - theta[name][k]).abs() <= 5 * error + 1e-9).all()
        )  # false alarms below 1e-4
        if kind in ("full", "tied"):
            wanted = theta["covariances"].expand(3, 2, 2)[k]
            size = wanted.diagonal().sqrt()
            assert bool(
                (
                    (of_component.T.cov() - wanted).abs() < 5 * (2 / len(of_component)) ** 0.5 * size[:, None] * size
                ).all()
            )
        elif name == "means":
            ratio = of_component.var(0) / theta["covariances"][k]
            assert bool(((ratio - 1).abs() < 5 * (2 / len(of_component)) ** 0.5).all())


def test_conditional_models_refuse_to_generate_rows():
    for kind, message in (
        ("multinomial", "how many counts a row has"),
        ("regression", "of y given x only. Use predict."),
    ):
        model, _, _, theta = prepare_and_start(kind)
        with pytest.raises(InputError, match=message):
            model.generate(theta, 3, stream(0, "test"))


@pytest.mark.parametrize("kind", ["bernoulli", "poisson", "multinomial"])
def test_values_outside_the_support_are_refused(kind):
    model, (y,) = example(kind)
    with pytest.raises(InputError, match=r"must be (0 and 1|integers >= 0), got \[0.5\]"):
        model.meet(y.clone().index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(0.5).double()))


@pytest.mark.parametrize("kind", ["diagonal", "spherical", "full", "tied", "bernoulli", "poisson"])
def test_missing_values_are_marginalised(kind):
    """A row without values has likelihood 1, and Fisher's identity ties the statistics to the observed likelihood."""
    model, rows, block, theta = prepare_and_start(kind, k=2)
    y: Tensor = block["y"].clone()
    missing = torch.rand(y.shape, generator=torch.Generator().manual_seed(5)) < 0.3
    missing[0] = True  # a row without any value
    observed = model.rows(model.prepare((torch.where(missing, torch.nan, y),)))
    assert float(model.log_marginal(theta, observed)[0].abs()) < 1e-10
    u = model.layout.unconstrain(theta).requires_grad_()
    values = model.log_marginal(model.layout.constrain(u), observed)
    values.sum().backward()
    with_missing = rows.prepared(lambda batch: (torch.where(missing, torch.nan, batch[0]),))
    torch.testing.assert_close(score(model, theta, with_missing), u.grad, rtol=1e-8, atol=1e-7)
    (found,) = expect(model, [theta], with_missing.blocks(7))
    torch.testing.assert_close(found.bound, values.sum().detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("covariance", ["full", "tied", "diagonal", "spherical"])
def test_a_posterior_scores_narrow_components_accurately(fit_by_em, covariance):
    noise = torch.randn(60, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.cat([noise[:30], 50 + 1e-4 * noise[30:]]) + 1000
    posterior = fit_by_em(GaussianMixture(2, covariance, floor=1e-12), y, EM(restarts=2), steps=30)
    theta, terms = posterior.mean, []
    for k in range(2):
        spread = theta["covariances"] if covariance == "tied" else theta["covariances"][k]
        spread = spread if spread.ndim == 2 else spread.expand(2).diag()
        density = scipy.stats.multivariate_normal(theta["means"][k].numpy(), spread.numpy())
        terms.append(math.log(theta["weights"][k]) + density.logpdf(y.numpy()))
    exact = scipy.special.logsumexp(terms, axis=0)
    assert posterior.log_likelihood(y).numpy() == pytest.approx(exact, rel=1e-8, abs=1e-8)
    assert posterior.responsibilities(y).numpy() == pytest.approx(np.exp(np.array(terms) - exact).T, abs=1e-8)
