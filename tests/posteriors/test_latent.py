"""Point estimates of latent-variable models: parameters by name, q(z) of new data, and files."""

from pathlib import Path

import pytest
import torch

from priory.core.errors import InputError, StoreError
from priory.core.flat import Param
from priory.fitting.fit import fit
from priory.fitting.store import load
from priory.latent import Expectation, GaussianMixture, Latent, RegressionMixture
from priory.methods.em.em import EM
from priory.posteriors.latent import LatentPoint

Y = torch.cat([torch.randn(40, 2, generator=torch.Generator().manual_seed(0)) + 5 * i for i in range(2)]).double()


def posterior(**options) -> LatentPoint:
    model, rows = GaussianMixture(2, **options).meet(Y)
    found = fit(model, rows, EM(), steps=20, progress=False)
    assert isinstance(found, LatentPoint)
    return found


def test_draws_equal_theta_by_name():
    found = posterior()
    draws = found.sample(3)
    for name, t in found.mean.items():
        assert torch.equal(draws[name], t.expand(3, *t.shape))
    flat = found.model.layout.constrain(found.draw(1, torch.Generator()))
    for name, t in found.mean.items():
        torch.testing.assert_close(flat[name][0], t, rtol=1e-10, atol=1e-12)


def test_responsibilities_and_labels_are_computed_for_any_data():
    found = posterior()
    q = found.responsibilities(Y[:7])
    assert q.shape == (7, 2)
    torch.testing.assert_close(q.sum(1), torch.ones(7).double())
    assert torch.equal(found.predict_labels(Y).bincount(), torch.tensor([40, 40]))
    assert found.log_likelihood(Y.numpy()).sum().item() == pytest.approx(found.log_evidence.value, rel=1e-10)
    with pytest.raises(InputError, match=r"must have rows of the shape \(2,\)"):
        found.responsibilities(Y[:, :1])


def test_latent_variables_are_returned_by_name_and_rows_are_generated():
    found = posterior()
    assert torch.equal(found.hidden(Y)["responsibilities"], found.responsibilities(Y))
    y, z = found.generate(500, seed=3)
    assert y.shape == (500, 2)
    assert torch.equal(found.predict_labels(y), z)  # the clusters are 7 standard deviations apart
    assert torch.equal(found.generate(500, seed=3).y, y)
    assert not torch.equal(found.generate(500, seed=4).y, y)
    with pytest.raises(InputError, match=r"The 'n' argument of generate must be an integer >= 1, got 0."):
        found.generate(0)
    with pytest.raises(InputError, match=r"The 'steps' argument of generate must be left out for GaussianMixture\(2"):
        found.generate(2, steps=3)


def test_a_saved_posterior_loads_unchanged(tmp_path: Path):
    found = posterior(covariance="tied")
    found.save(tmp_path / "mixture.priory")
    again = load(tmp_path / "mixture.priory", GaussianMixture(2, "tied").meet(Y[:9])[0])
    assert isinstance(again, LatentPoint)
    for name, t in found.mean.items():
        assert torch.equal(again.mean[name], t)
    assert again.log_evidence == found.log_evidence
    assert again.converged == found.converged
    assert torch.equal(again.history["bound"], found.history["bound"])
    assert torch.equal(again.responsibilities(Y), found.responsibilities(Y))


def test_a_model_without_data_takes_its_shapes_from_the_file():
    found = posterior()
    same = GaussianMixture(2).like(found.model.describe())
    assert same.describe() == found.model.describe()
    assert found.latent.like({}) is found.latent


def test_a_file_of_another_mixture_is_refused(tmp_path: Path):
    posterior().save(tmp_path / "mixture.priory")
    with pytest.raises(StoreError, match="belongs to another model"):
        load(tmp_path / "mixture.priory", GaussianMixture(3).meet(Y)[0])


class Normal(Latent):
    """A model without latent variables."""

    def params(self, *shapes):
        return {"mean": Param(shapes[0])}

    def e_step(self, theta, rows):
        away = rows["y"] - theta["mean"]
        sums = {"n": rows.counted(torch.ones(len(rows))).sum(), "sum": rows.counted(rows["y"]).sum(0)}
        return Expectation({**sums, "square": rows["y"].square().sum()}, -0.5 * away.square().sum(1))

    def complete(self, theta, statistics):
        s, m = statistics, theta["mean"]
        return -0.5 * (s["square"] - 2 * (m * s["sum"]).sum() + s["n"] * m.square().sum())


def test_a_model_without_components_has_no_responsibilities():
    model, rows = Normal().meet(Y)
    found = fit(model, rows, EM(), steps=20, progress=False)
    assert isinstance(found, LatentPoint)
    torch.testing.assert_close(found.mean["mean"], Y.mean(0), rtol=1e-6, atol=1e-6)
    with pytest.raises(InputError, match=r"Normal\(\) has no responsibilities"):
        found.responsibilities(Y)


def lines() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.linspace(-1, 1, 60, dtype=torch.float64)
    noise = 0.3 * torch.randn(60, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, torch.where(torch.arange(60) % 3 == 0, 2 * x, 1 - x) + noise


def test_a_regression_mixture_predicts_the_mixture_of_its_lines():
    model, rows = RegressionMixture(2).meet(lines())
    found = fit(model, rows, EM(), steps=50, progress=False)
    assert isinstance(found, LatentPoint)
    x = torch.tensor([-0.5, 0.7], dtype=torch.float64)
    prediction = found.predict(x)
    theta = found.mean
    y = torch.linspace(-12, 12, 20_001, dtype=torch.float64)
    for i in range(2):
        centres = theta["coefficients"][:, 0] * x[i] + theta["intercepts"]
        density = (
            theta["weights"] * torch.distributions.Normal(centres, theta["variances"].sqrt()).log_prob(y[:, None]).exp()
        ).sum(1)
        mean = torch.trapezoid(y * density, y)
        torch.testing.assert_close(prediction.mean[i], mean, rtol=1e-8, atol=1e-8)
        variance = torch.trapezoid((y - mean).square() * density, y)
        torch.testing.assert_close(prediction.variance[i], variance, rtol=1e-8, atol=1e-8)
        low, high = prediction.interval(0.8)
        inside = (y >= low[i]) & (y <= high[i])
        assert float(torch.trapezoid(density * inside, y)) == pytest.approx(0.8, abs=2e-3)
    torch.testing.assert_close(prediction.std.square(), prediction.epistemic + prediction.aleatoric)
    joint = found.log_likelihood((x, torch.tensor([0.3, 0.4], dtype=torch.float64)))
    torch.testing.assert_close(prediction.log_prob(torch.tensor([0.3, 0.4])), joint, rtol=1e-6, atol=1e-6)


def test_invalid_inputs_are_refused():
    model, rows = RegressionMixture(2).meet(lines())
    found = fit(model, rows, EM(), steps=5, progress=False)
    prediction = found.predict(torch.zeros(3))
    for call, message in (
        (lambda: found.predict(torch.zeros(3, 2)), r"The 'x' argument of predict must have rows of the shape \(\)"),
        (lambda: prediction.log_prob(torch.zeros(2)), r"The 'y' argument of log_prob must have the shape \(3,\)"),
        (lambda: prediction.quantile(1.0), "The 'q' argument of quantile must lie between 0 and 1"),
        (lambda: prediction.interval(2), "The 'level' argument of interval must lie between 0 and 1"),
        (lambda: posterior().predict(Y), r"GaussianMixture\(2, covariance='full'\) has no inputs to predict from"),
        (lambda: found.sample(0), "The 'n' argument of sample must be an integer >= 1"),
    ):
        with pytest.raises(InputError, match=message):
            call()
