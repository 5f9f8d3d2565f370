"""Comparing and stacking densities: held-out rows are scored by their log pointwise predictive density."""

import math

import pytest
import torch
from torch import nn
from torch.distributions import Normal, StudentT

import priory as pr
from priory.core.data import Data
from priory.core.streams import stream
from priory.fitting.prepare import make_target
from priory.posteriors import Draws, Mixture
from priory.posteriors.chains import Chains

DOUBLE = torch.float64
Y = torch.randn(30, generator=stream(0, "rows"), dtype=DOUBLE) + 1
HELD = torch.randn(20, generator=stream(1, "rows"), dtype=DOUBLE) + 1


def location(noise) -> pr.Density:
    return pr.Density(
        params={"mu": pr.Param()},
        log_prior=lambda p: Normal(0.0, 1.0).log_prob(p["mu"]),
        log_likelihood=lambda p, y: noise(p["mu"]).log_prob(y),
    )


NORMAL = location(lambda mu: Normal(mu, 1.0))
HEAVY = location(lambda mu: StudentT(3.0, mu, 1.0))


def exact(density: pr.Density, n: int = 400) -> Draws:
    """Draws of the posterior of NORMAL given Y, as a posterior of any of the densities."""
    w = Y.sum() / 31 + torch.randn(n, 1, generator=stream(2, "draws"), dtype=DOUBLE) / math.sqrt(31)
    return Draws(make_target(density, Data.of(Y).prepared(density.prepare)), w)


def test_a_comparison_scores_the_log_pointwise_predictive_density():
    """p(y | D) = N(mean, 1 + 1/31) with 2,000 draws of the Gaussian posterior that MeanField finds."""
    found = pr.compare(NORMAL, Y, [pr.MeanField(), pr.MAP()], HELD, steps=1500, samples=2000, progress=False)
    mean = Y.sum() / 31
    wanted = -Normal(mean, math.sqrt(1 + 1 / 31)).log_prob(HELD)
    # the log of a mean over 2,000 draws has an error near 0.2 / sqrt(2000); MeanField's own is below 0.01
    torch.testing.assert_close(found.pointwise["MeanField"], wanted, rtol=0, atol=0.05)
    torch.testing.assert_close(found.pointwise["MAP"], -Normal(mean, 1.0).log_prob(HELD), rtol=0, atol=0.02)
    row = found.rows[0]
    assert row["nll"] == pytest.approx(float(found.pointwise["MeanField"].mean()), rel=1e-12)
    assert found.columns == ["method", "nll", "fit_seconds", "predict_seconds", "status"]
    assert [row["status"] for row in found.rows] == [found.posteriors[name].status.name for name in found.posteriors]
    assert found.predictions == {}
    assert found.baseline is None
    assert "RMSE" not in str(found)
    assert found.heading == "30 rows to fit, 20 held out, seed 0"
    gap, error = found.difference("MAP", "MeanField")
    assert math.isfinite(gap)
    assert error > 0


def test_a_fraction_of_the_rows_is_held_out():
    found = pr.compare(NORMAL, Y, [pr.MAP()], 0.2, steps=5, progress=False)
    assert found.heading == "24 rows to fit, 6 held out, seed 0"
    assert found.targets.shape == (6,)
    assert all(bool((y == Y).any()) for y in found.targets)


def test_rows_of_several_parts_are_compared_in_their_form():
    line = pr.Density(
        params={"b": pr.Param()},
        log_prior=lambda p: Normal(0.0, 1.0).log_prob(p["b"]),
        log_likelihood=lambda p, rows: Normal(p["b"] * rows[0], 1.0).log_prob(rows[1]),
    )
    found = pr.compare(line, (Y, 2 * Y), [pr.MAP()], (HELD, 2 * HELD), steps=3, progress=False)
    b = found.posteriors["MAP"].mean["b"]
    torch.testing.assert_close(found.pointwise["MAP"], -Normal(b * HELD, 1.0).log_prob(2 * HELD))
    assert found.failures == {}


def test_the_report_of_a_density_has_no_predictions(tmp_path):
    pytest.importorskip("matplotlib")
    found = pr.compare(NORMAL, Y, [pr.MAP(), pr.MeanField()], HELD, steps=30, progress=False)
    text = found.report(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "NLL, nats per row" in text
    assert "Root of the mean squared" not in text
    assert "calibration" not in text


def test_a_method_that_fails_has_its_error_in_its_row():
    found = pr.compare(NORMAL, Y, [pr.MAP(), pr.Dropout()], HELD, steps=3, progress=False)
    assert list(found.failures) == ["Dropout"]
    assert found.best == "MAP"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"test": 0.001}, "'test' argument of compare must hold out at least one of the 30 rows"),
        ({"test": None}, "'test' argument of compare must be data of the density, or a fraction between 0 and 1"),
        ({"data": None}, "'data' argument of compare must be given"),
    ],
)
def test_invalid_arguments_are_refused(options, message):
    given = {"model": NORMAL, "data": Y, "methods": [pr.MAP()], "test": HELD, "progress": False, **options}
    with pytest.raises(pr.InputError, match=message):
        pr.compare(**given)


def test_a_density_of_one_log_prob_is_refused():
    whole = pr.Density(lambda p: -p["mu"].square(), {"mu": pr.Param()})
    with pytest.raises(
        pr.InputError, match=r"'model' argument of compare must be a Model, .* or a Density with a log_l"
    ):
        pr.compare(whole, Y, [pr.MAP()], HELD)
    posterior = pr.fit(whole, None, pr.MAP(), steps=2, progress=False)
    with pytest.raises(pr.InputError, match="must be of a Model, or of a Density with a log_likelihood, got Density"):
        pr.stack([posterior, posterior], HELD)


def test_stacking_maximises_the_log_density_of_the_mixture():
    """Held-out rows of which two are far out: the best weight of two densities is found on a grid."""
    rows = torch.cat([HELD, HELD[:2] + 3])
    members = [exact(NORMAL), exact(HEAVY)]
    mixture = pr.stack(members, rows, samples=400)
    assert isinstance(mixture, Mixture)
    scores = torch.stack([m.log_likelihood(rows).logsumexp(0) - math.log(400) for m in members])
    grid = torch.linspace(0, 1, 10_001, dtype=DOUBLE)[1:-1]
    values = torch.logaddexp(grid.log()[:, None] + scores[0], (1 - grid).log()[:, None] + scores[1]).mean(1)
    assert abs(float(mixture.weights[0]) - float(grid[values.argmax()])) < 2e-3
    assert 0.05 < float(mixture.weights[0]) < 0.95


def test_a_stack_of_densities_has_a_log_likelihood_of_its_own():
    members = [exact(NORMAL), exact(HEAVY)]
    mixture = Mixture(members, [0.3, 0.7])
    found = mixture.log_likelihood(HELD, samples=4000).logsumexp(0) - math.log(4000)
    logs = torch.stack([m.log_likelihood(HELD).logsumexp(0) - math.log(400) for m in members])
    wanted = (logs.exp() * torch.tensor([[0.3], [0.7]], dtype=DOUBLE)).sum(0).log()
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.05)  # shares of 4,000 draws: errors near 0.01


def test_chains_are_stacked_like_draws():
    w = exact(NORMAL).w
    chains = Chains(exact(NORMAL).target, w.reshape(4, 100, 1))
    found = pr.stack([chains, exact(HEAVY)], HELD, samples=400).weights
    torch.testing.assert_close(found, pr.stack([exact(NORMAL), exact(HEAVY)], HELD, samples=400).weights)


def test_models_and_densities_are_not_stacked_together():
    X = torch.linspace(-1, 1, 10)[:, None]
    network = pr.fit(pr.Model(nn.Linear(1, 1), pr.Gaussian(0.1)), (X, X[:, 0]), pr.MAP(), steps=2, progress=False)
    with pytest.raises(pr.InputError, match="must be all of a Model, or all of a Density, got Density, Model"):
        pr.stack([exact(NORMAL), network], HELD)
    with pytest.raises(pr.InputError, match="'data' argument of stack must be inputs and targets"):
        pr.stack([exact(NORMAL), exact(HEAVY)], None)
