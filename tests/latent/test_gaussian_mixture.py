"""Gaussian mixture: scikit-learn and SciPy as references, the floor of the variance, and missing values."""

from contextlib import nullcontext

import numpy as np
import pytest
import scipy.stats
import torch
from sklearn.mixture import GaussianMixture as Peer
from torch import Tensor

from priory.core.errors import InputError, PrioryWarning
from priory.latent import GaussianMixture, expect
from priory.latent.gaussian_mixture import raised
from priory.methods.em.em import EM

KINDS = {"full": "full", "tied": "tied", "diagonal": "diag", "spherical": "spherical"}


def begin(y: Tensor, k: int, covariance: str) -> dict[str, Tensor]:
    """Return a start with equal weights, rows as means and the covariance of the data for each component."""
    spread = torch.cov(y.T)
    shaped = {
        "full": spread.expand(k, -1, -1),
        "tied": spread,
        "diagonal": spread.diagonal().expand(k, -1),
        "spherical": spread.diagonal().mean().expand(k),
    }
    return {
        "weights": torch.full((k,), 1 / k, dtype=torch.float64),
        "means": y[:: len(y) // k][:k],
        "covariances": shaped[covariance],
    }


@pytest.mark.parametrize("covariance", KINDS)
def test_fifty_iterations_from_the_same_start_equal_those_of_scikit_learn(covariance, fit_by_em, clouds):
    start = begin(clouds, 3, covariance)
    spread = start["covariances"].numpy()
    sklearn_fit = Peer(
        3,
        covariance_type=KINDS[covariance],
        max_iter=50,
        tol=0.0,
        reg_covar=0.0,
        weights_init=start["weights"].numpy(),
        means_init=start["means"].numpy(),
        precisions_init=np.linalg.inv(spread) if spread.ndim > 1 and covariance in ("full", "tied") else 1 / spread,
    )
    with pytest.warns(Warning, match="did not converge"):
        sklearn_fit.fit(clouds.numpy())
    posterior = fit_by_em(GaussianMixture(3, covariance), clouds, EM(tolerance=0.0, start=start), steps=50)
    assert len(posterior.history["bound"]) == 50
    found = posterior.mean
    for name, sklearn_covariances in (
        ("weights", sklearn_fit.weights_),
        ("means", sklearn_fit.means_),
        ("covariances", sklearn_fit.covariances_),
    ):
        torch.testing.assert_close(found[name], torch.from_numpy(sklearn_covariances), rtol=1e-6, atol=1e-6)
    total = sklearn_fit.score(clouds.numpy()) * len(clouds)
    assert posterior.log_evidence.value == pytest.approx(total, rel=1e-9)
    assert posterior.log_evidence.kind == "log-likelihood at theta"
    q = torch.from_numpy(sklearn_fit.predict_proba(clouds.numpy()))
    torch.testing.assert_close(posterior.responsibilities(clouds), q, rtol=1e-6, atol=1e-6)


def test_one_column_gives_the_same_fit_as_a_table_with_one_column(fit_by_em, clouds):
    for covariance in KINDS:
        line = fit_by_em(GaussianMixture(2, covariance), clouds[:, 0], EM(tolerance=0.0), steps=20)
        table = fit_by_em(GaussianMixture(2, covariance), clouds[:, :1], EM(tolerance=0.0), steps=20)
        assert line.mean["means"].shape == (2,)
        torch.testing.assert_close(line.mean["means"], table.mean["means"][:, 0], rtol=1e-9, atol=0)
        spread = table.mean["covariances"].reshape(line.mean["covariances"].shape)
        torch.testing.assert_close(line.mean["covariances"], spread, rtol=1e-8, atol=0)


def test_one_component_is_the_mean_and_the_covariance_of_the_data(fit_by_em, clouds):
    posterior = fit_by_em(GaussianMixture(1), clouds, steps=1)
    torch.testing.assert_close(posterior.mean["means"][0], clouds.mean(0), rtol=1e-12, atol=0)
    spread = torch.cov(clouds.T, correction=0)
    torch.testing.assert_close(posterior.mean["covariances"][0], spread, rtol=1e-10, atol=1e-12)
    log_prob = torch.distributions.MultivariateNormal(clouds.mean(0), spread).log_prob(clouds)
    torch.testing.assert_close(posterior.log_likelihood(clouds), log_prob, rtol=1e-10, atol=1e-10)


def test_shifting_the_data_does_not_change_the_fit(fit_by_em, clouds):
    near = fit_by_em(GaussianMixture(3), clouds, EM(tolerance=0.0), steps=10)
    far = fit_by_em(GaussianMixture(3), clouds + 1e6, EM(tolerance=0.0), steps=10)
    torch.testing.assert_close(far.mean["covariances"], near.mean["covariances"], rtol=1e-5, atol=1e-8)


def test_clamped_eigenvalues_maximise_the_likelihood_above_the_floor():
    factor = torch.randn(3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sample = factor @ torch.diag(torch.tensor([1e-4, 0.5, 2.0], dtype=torch.float64)) @ factor.T
    floor = 0.05
    gain = lambda c: -torch.logdet(c) - torch.trace(torch.linalg.solve(c, sample))  # noqa: E731
    best = raised(sample[None], floor)[0]
    assert float(torch.linalg.eigvalsh(best)[0]) == pytest.approx(floor)
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        step = 0.05 * torch.randn(3, 3, generator=generator, dtype=torch.float64)
        other = raised((best + step + step.T)[None], floor)[0]
        assert float(gain(other)) <= float(gain(best)) + 1e-12


@pytest.mark.parametrize("covariance", KINDS)
def test_a_component_on_one_row_is_held_at_the_floor_with_a_warning(covariance, fit_by_em):
    generator = torch.Generator().manual_seed(0)
    y = torch.cat([torch.randn(30, 2, generator=generator), torch.full((1, 2), 40.0)]).double()
    if covariance == "tied":
        y = torch.cat([y, y.sum(1, keepdim=True)], 1)  # rows in a plane: singular also for the tied covariance
    its = "their variances are" if covariance == "tied" else "its variance is"
    with pytest.warns(PrioryWarning, match=rf"singular covariance: {its} held at 1e-06"):
        posterior = fit_by_em(GaussianMixture(2, covariance), y, EM(tolerance=0.0), steps=20)
    assert float(posterior.history["bound"].diff().min()) > -1e-8
    assert all(bool(torch.isfinite(t).all()) for t in posterior.mean.values())


def test_a_single_component_is_not_told_to_have_fewer(fit_by_em, clouds):
    y = torch.cat([clouds, clouds[:, :1]], 1)
    with pytest.warns(PrioryWarning, match=r"^Component 0 of .*1e-06 of the data's\. Try a simpler covariance"):
        fit_by_em(GaussianMixture(1), y)


@pytest.mark.parametrize("covariance", KINDS)
def test_a_constant_column_gives_a_result_with_a_warning(covariance, fit_by_em, clouds):
    y = torch.cat([clouds, torch.full((len(clouds), 1), 7.0)], 1)
    caught = pytest.warns(PrioryWarning, match="singular") if covariance != "spherical" else nullcontext()
    with caught:
        posterior = fit_by_em(GaussianMixture(2, covariance), y)
    torch.testing.assert_close(posterior.mean["means"][:, 3], torch.full((2,), 7.0).double(), rtol=1e-9, atol=0)


def with_missing(y: Tensor, share: float = 0.2) -> Tensor:
    return y.masked_fill(torch.rand(y.shape, generator=torch.Generator().manual_seed(4)) < share, torch.nan)


@pytest.mark.parametrize("covariance", KINDS)
def test_the_density_of_a_row_with_missing_values_is_the_marginal_of_the_observed_ones(covariance, fit_by_em, clouds):
    y = with_missing(clouds)
    posterior = fit_by_em(GaussianMixture(2, covariance), y, EM(tolerance=0.0), steps=5)
    theta = {name: t.numpy() for name, t in posterior.mean.items()}
    spread = {
        "full": lambda k: theta["covariances"][k],
        "tied": lambda k: theta["covariances"],
        "diagonal": lambda k: np.diag(theta["covariances"][k]),
        "spherical": lambda k: theta["covariances"][k] * np.eye(3),
    }[covariance]
    found = posterior.log_likelihood(y).numpy()
    for row, value in zip(y.numpy(), found, strict=True):
        observed = ~np.isnan(row)
        density = 1.0
        if observed.any():
            density = sum(
                theta["weights"][k]
                * scipy.stats.multivariate_normal(
                    theta["means"][k][observed], spread(k)[np.ix_(observed, observed)]
                ).pdf(row[observed])
                for k in range(2)
            )
        assert value == pytest.approx(np.log(density), rel=1e-8, abs=1e-8)
    assert posterior.log_evidence.value == pytest.approx(found.sum(), rel=1e-10)
    assert float(posterior.history["bound"].diff().min()) > 0


def test_one_gaussian_with_missing_values_reaches_the_maximum_of_the_observed_likelihood(fit_by_em, clouds):
    posterior = fit_by_em(GaussianMixture(1), with_missing(clouds), EM(tolerance=1e-14), steps=500)
    model = posterior.latent
    u = model.layout.unconstrain(posterior.theta).requires_grad_()
    model.log_marginal(model.layout.constrain(u), model.rows((with_missing(clouds),))).sum().backward()
    assert u.grad is not None
    assert float(u.grad.abs().max()) < 1e-4


def test_rows_with_a_missing_column_contribute_their_other_columns(clouds):
    y = clouds.clone()
    y[:, 2] = torch.where(torch.arange(len(y)) < 60, torch.nan, y[:, 2])
    model, _ = GaussianMixture(2).meet(y)
    theta = begin(clouds, 2, "full")
    (whole,) = expect(model, [theta], [(y,)])
    parts = [expect(model, [theta], [(part,)])[0] for part in (y[:60], y[60:])]
    total = parts[0].statistics["sums"] + parts[1].statistics["sums"]
    torch.testing.assert_close(whole.statistics["sums"], total, rtol=1e-10, atol=1e-10)


def test_rows_without_any_value_give_a_warning_and_do_not_change_the_fit(fit_by_em, clouds):
    y = torch.cat([clouds, torch.full((5, 3), torch.nan).double()])
    for covariance in ("full", "diagonal"):
        plain = fit_by_em(
            GaussianMixture(2, covariance), clouds, EM(tolerance=0.0, start=begin(clouds, 2, covariance)), 5
        )
        with pytest.warns(PrioryWarning, match="5 rows have no value"):
            other = fit_by_em(
                GaussianMixture(2, covariance), y, EM(tolerance=0.0, start=begin(clouds, 2, covariance)), 5
            )
        assert other.log_evidence.value == pytest.approx(plain.log_evidence.value, rel=1e-2)
        assert bool(torch.isfinite(other.mean["means"]).all())


def test_a_column_without_any_value_is_refused(clouds):
    y = torch.cat([clouds, torch.full((len(clouds), 1), torch.nan).double()], 1)
    with pytest.raises(InputError, match=r"have a value in each column, got only NaN in column 3"):
        GaussianMixture(2).meet(y)


def test_one_row_gives_a_warning_and_images_are_refused(fit_by_em):
    with pytest.warns(PrioryWarning, match="singular"):
        posterior = fit_by_em(GaussianMixture(1), torch.tensor([[1.0, 2.0]]))
    assert posterior.mean["means"].tolist() == [[1.0, 2.0]]
    with pytest.raises(InputError, match=r"\(n, D\), or \(n,\), got rows of the shape \(2, 2\)"):
        GaussianMixture(2).meet(torch.ones(3, 2, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"k": 2, "covariance": 3},
            "The 'covariance' argument of GaussianMixture must be one of full, tied, diagonal, spherical",
        ),
        ({"k": 2, "floor": 0}, "The 'floor' argument of GaussianMixture must lie between 0 and 1, got 0."),
        ({"k": 2.0}, "The 'k' argument of GaussianMixture must be an integer >= 1, got 2.0."),
        ({"k": 2, "given": ("z", "z")}, "The 'given' argument of GaussianMixture must be 'weights', 'z' or both"),
    ],
)
def test_invalid_options_raise_an_error_that_names_them(options, message):
    with pytest.raises(InputError) as caught:
        GaussianMixture(**options)
    assert message in str(caught.value)
