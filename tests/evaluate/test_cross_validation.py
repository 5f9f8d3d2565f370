"""PSIS-LOO and WAIC: against ArviZ, loops in numpy, and exact leave-one-out densities."""

import math

import numpy as np
import pytest
import scipy.special
import torch
from torch.distributions import Normal

import priory as pr
from priory.core.data import Data
from priory.core.streams import stream
from priory.evaluate import ELPD, loo, waic
from priory.fitting.prepare import make_target
from priory.posteriors import Draws
from priory.posteriors.chains import Chains
from priory.testing import LinearRegression

DOUBLE = torch.float64


def regression(draws: int = 1000, chains: int = 4) -> tuple[LinearRegression, Chains]:
    """Exact draws of a linear regression's posterior."""
    exact = LinearRegression.make(0)
    model = exact.model()
    rows = Data.of(exact.data).prepared(model.prepare)
    noise = torch.randn(chains, draws, 4, generator=stream(2, "loo"), dtype=DOUBLE)
    posterior = Chains(make_target(model, rows), exact.posterior.loc + noise @ exact.posterior.scale_tril.T)
    posterior.data = rows
    return exact, posterior


def heavy(draws: int, rows: int) -> torch.Tensor:
    """Log-likelihoods (draw, row) whose tails become heavier from row to row."""
    z = torch.randn(draws, rows, generator=stream(0, "heavy"), dtype=DOUBLE)
    return -1 - torch.linspace(0.1, 1.5, rows, dtype=DOUBLE) * z.square()


def numpy_loo(log_likelihood: np.ndarray, efficiency: float) -> tuple[np.ndarray, np.ndarray]:
    """elpd and k-hat of each row of (draw, row), by the formulas of Vehtari et al. (2024) in loops."""
    count, values, shapes = len(log_likelihood), [], []
    size = math.ceil(min(count / 5, 3 * math.sqrt(count / efficiency)))
    for row in log_likelihood.T:
        weights = np.exp(-row - np.max(-row))
        order = np.argsort(weights)
        cutoff = weights[order[-size - 1]]
        tail = [i for i in order if weights[i] > cutoff]
        x = np.array([weights[i] - cutoff for i in tail])
        n, grid = len(x), 30 + int(math.sqrt(len(x)))
        b = [1 / x[-1] + (1 - math.sqrt(grid / (j + 0.5))) / (3 * x[int(n / 4 + 0.5) - 1]) for j in range(grid)]
        ks = [np.mean(np.log(1 - b_j * x)) for b_j in b]
        profile = np.array([n * (math.log(-b_j / k_j) - k_j - 1) for b_j, k_j in zip(b, ks, strict=True)])
        centre = np.sum(np.exp(profile - profile.max()) * b) / np.exp(profile - profile.max()).sum()
        raw = np.mean(np.log(1 - centre * x))
        shape = (n * raw + 5) / (n + 10)
        for j, i in enumerate(tail):
            weights[i] = min(1.0, cutoff - raw / centre * ((1 - (j + 0.5) / n) ** -shape - 1) / shape)
        values.append(math.log(np.sum(weights * np.exp(row)) / weights.sum()))
        shapes.append(shape)
    return np.array(values), np.array(shapes)


@pytest.mark.parametrize(("draws", "rows", "efficiency"), [(200, 7, 1.0), (2000, 5, 1.0), (1001, 4, 0.3)])
def test_loo_is_the_paper_written_as_loops(draws, rows, efficiency):
    matrix = heavy(draws, rows)
    values, shapes = numpy_loo(matrix.numpy(), efficiency)
    found = loo(matrix, relative_efficiency=efficiency)
    np.testing.assert_allclose(found.pointwise.numpy(), values, rtol=1e-8, atol=1e-8)
    assert found.k_hat is not None
    np.testing.assert_allclose(found.k_hat.numpy(), shapes, rtol=1e-8, atol=1e-8)
    fitted = np.sum(np.log(np.mean(np.exp(matrix.numpy()), 0)))
    assert abs(found.value - values.sum()) < 1e-8
    assert abs(found.p - (fitted - values.sum())) < 1e-8
    assert abs(found.error - math.sqrt(rows) * values.std()) < 1e-8
    assert float(found) == found.value


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.filterwarnings("ignore:Estimated shape parameter:UserWarning")
@pytest.mark.filterwarnings("ignore:For one or more samples:UserWarning")
def test_loo_and_waic_are_those_of_arviz_for_the_same_log_likelihood(tied):
    """Draws that are repeated, as by a Metropolis sampler, tie at the cutoff."""
    az = pytest.importorskip("arviz")
    if int(az.__version__.split(".")[0]) >= 1:
        pytest.skip("arviz 1 has other names")
    matrix = heavy(1000, 6).reshape(4, 250, 6)
    if tied:
        matrix = matrix.repeat_interleave(3, 1)
    data = az.from_dict(posterior={"a": np.zeros(matrix.shape[:2])}, log_likelihood={"y": matrix.numpy()})
    for efficiency in (1.0, 0.4):
        theirs = az.loo(data, pointwise=True, reff=efficiency)
        found = loo(matrix, relative_efficiency=efficiency)
        assert found.k_hat is not None
        np.testing.assert_allclose(found.pointwise.numpy(), theirs.loo_i.to_numpy(), rtol=1e-8, atol=1e-8)
        np.testing.assert_allclose(found.k_hat.numpy(), theirs.pareto_k.to_numpy(), rtol=1e-8, atol=1e-8)
        for ours, name in ((found.value, "elpd_loo"), (found.error, "se"), (found.p, "p_loo")):
            assert abs(ours - theirs[name]) < 1e-8
        assert found.max_k_hat == pytest.approx(theirs.good_k, rel=1e-12)
    theirs, found = az.waic(data, pointwise=True), waic(matrix)
    np.testing.assert_allclose(found.pointwise.numpy(), theirs.waic_i.to_numpy(), rtol=1e-8, atol=1e-8)
    for ours, name in ((found.value, "elpd_waic"), (found.error, "se"), (found.p, "p_waic")):
        assert abs(ours - theirs[name]) < 1e-8


def test_loo_of_chains_is_that_of_arviz_for_the_same_posterior():
    az = pytest.importorskip("arviz")
    _, posterior = regression()
    theirs = az.loo(posterior.to_arviz())
    found = loo(posterior)
    theirs_elpd = getattr(theirs, "elpd_loo", getattr(theirs, "elpd", math.nan))  # the name from version 1 on
    assert abs(found.value - float(theirs_elpd)) < 1e-8
    assert 0.5 < posterior.relative_efficiency < 1.5


def test_waic_is_the_formula_written_out():
    matrix = heavy(50, 3).numpy()
    terms = scipy.special.logsumexp(matrix, 0) - math.log(50) - matrix.var(0)
    found = waic(torch.from_numpy(matrix))
    np.testing.assert_allclose(found.pointwise.numpy(), terms, rtol=1e-12)
    assert abs(found.p - matrix.var(0).sum()) < 1e-12
    assert found.k_hat is None


def exact_leave_one_out(exact: LinearRegression) -> torch.Tensor:
    """log p(y_n | the other rows) of a linear regression with known noise, in closed form."""
    found, y = [], exact.y
    design = exact.design(exact.X)
    prior = torch.linalg.inv(exact.posterior.covariance_matrix) - design.T @ design / exact.noise**2
    centre = torch.linalg.solve(
        prior, exact.posterior.precision_matrix @ exact.posterior.loc - design.T @ y / exact.noise**2
    )
    for n in range(len(y)):
        others = torch.arange(len(y)) != n
        precision = prior + design[others].T @ design[others] / exact.noise**2
        mean = torch.linalg.solve(precision, prior @ centre + design[others].T @ y[others] / exact.noise**2)
        variance = design[n] @ torch.linalg.solve(precision, design[n]) + exact.noise**2
        found.append(Normal(design[n] @ mean, variance.sqrt()).log_prob(y[n]))
    return torch.stack(found)


def test_loo_is_close_to_the_exact_leave_one_out_density():
    """20,000 independent draws: with k-hat below 0.7 the error of a row is far below 0.05 nats."""
    exact, posterior = regression(5000)
    found, wanted = loo(posterior), exact_leave_one_out(exact)
    assert found.k_hat is not None
    good = found.k_hat < 0.7
    assert int(good.sum()) >= 15
    assert float((found.pointwise - wanted)[good].abs().max()) < 0.05
    assert abs(found.value - float(wanted.sum())) < 0.2
    assert float(waic(posterior).pointwise.sub(wanted).abs().median()) < 0.05


def test_rows_with_a_heavy_tail_are_counted_in_the_message():
    found = loo(heavy(4000, 10))
    assert found.k_hat is not None
    count = int((found.k_hat > 0.7).sum())
    assert 0 < count < 10
    assert found.verdict.startswith(f"{count} of 10 rows have a Pareto k-hat above 0.7, so the estimate is unreliable:")
    assert found.verdict in str(found)
    assert loo(0.1 * heavy(4000, 10)).verdict == ""
    assert waic(heavy(4000, 10)).verdict.endswith("use loo, whose k-hat reports whether it can be trusted.")
    assert waic(0.1 * heavy(4000, 10)).verdict == ""


def test_of_few_draws_a_lower_k_hat_is_reliable():
    assert loo(heavy(100, 2)).max_k_hat == pytest.approx(0.5)
    assert loo(heavy(4000, 2)).max_k_hat == 0.7


def test_the_table_has_the_estimate_and_its_error():
    head, columns, elpd, p = str(loo(0.1 * heavy(4000, 10))).split("\n")
    assert head == "PSIS-LOO: 10 rows, 4,000 draws"
    assert columns.split() == ["estimate", "error"]
    assert [elpd.split()[0], p.split()[0]] == ["elpd", "p"]


def test_two_models_are_compared_row_by_row():
    one, other = loo(0.1 * heavy(500, 6)), loo(0.2 * heavy(500, 6))
    gap, error = one.difference(other)
    terms = (one.pointwise - other.pointwise).numpy()
    assert abs(gap - terms.sum()) < 1e-12
    assert abs(error - math.sqrt(6) * terms.std()) < 1e-12
    for wrong in (waic(heavy(500, 6)), loo(heavy(500, 5)), 3.0):
        with pytest.raises(
            pr.InputError, match="The 'other' argument of difference must be a PSIS-LOO estimate of the"
        ):
            one.difference(wrong)  # pyright: ignore[reportArgumentType]


def test_a_density_with_rows_and_a_posterior_of_draws_have_loo():
    y = torch.tensor([0.1, -0.4, 0.5, 1.3], dtype=DOUBLE)
    density = pr.Density(
        params={"mu": pr.Param()},
        log_prior=lambda p: -0.5 * p["mu"].square(),
        log_likelihood=lambda p, y: Normal(p["mu"], 1.0).log_prob(y),
    )
    rows = Data.of(y).prepared(density.prepare)
    w = y.sum() / 5 + torch.randn(4000, 1, generator=stream(0, "mu"), dtype=DOUBLE) / math.sqrt(5)
    found = loo(Draws(make_target(density, rows), w), y)
    others = (y.sum() - y) / 4  # posterior means without each row, of precision 4
    wanted = Normal(others, math.sqrt(1 + 1 / 4)).log_prob(y)
    assert isinstance(found, ELPD)
    assert float((found.pointwise - wanted).abs().max()) < 0.05  # k-hat is below 0.5
    assert loo(Draws(make_target(density, rows), w), y, samples=500).draws == 500


def test_float32_is_worked_on_in_float64():
    assert loo(heavy(500, 3).float()).pointwise.dtype == DOUBLE


@pytest.mark.parametrize("criterion", [loo, waic])
def test_posteriors_without_draws_are_refused(criterion):
    name = criterion.__name__
    model = pr.Model(torch.nn.Linear(1, 1), pr.Gaussian(0.1))
    X = torch.linspace(-1, 1, 10)[:, None]
    point = pr.fit(model, (X, X[:, 0]), pr.MAP(), steps=2, progress=False)
    with pytest.raises(pr.InputError, match=f"The 'posterior' argument of {name} must be a posterior with draws, or"):
        criterion(point)
    with pytest.raises(pr.InputError, match=f"The 'posterior' argument of {name} must be a posterior with draws, or"):
        criterion("chains")
    with pytest.raises(pr.InputError, match="must have a log-likelihood"):
        criterion(torch.zeros(5))
    with pytest.raises(pr.InputError, match="must have a log-likelihood"):
        criterion(torch.zeros(1, 5))
    with pytest.raises(
        pr.InputError, match="must give each row a finite log-likelihood at every draw, got another in row 1"
    ):
        criterion(torch.tensor([[0.0, 0.0], [0.0, -math.inf]]))
    with pytest.raises(pr.InputError, match=r"The 'data' argument of .* must be left out beside a log-likelihood"):
        criterion(torch.zeros(5, 2), X)
    with pytest.raises(pr.InputError, match=r"The 'samples' argument of .* must be an integer >= 2"):
        criterion(torch.zeros(5, 2), samples=1)


@pytest.mark.parametrize("efficiency", [0, -1.0, math.inf, "half"])
def test_a_relative_efficiency_is_positive(efficiency):
    with pytest.raises(pr.InputError, match="The 'relative_efficiency' argument of psis must be a positive number"):
        loo(heavy(100, 2), relative_efficiency=efficiency)
