"""Temperature sweeps: each row is a fit at its temperature, with its errors and what the certificate says."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import priory as pr
from priory import evaluate
from priory.analysis import sweeps
from priory.analysis.sweeps import (
    TemperatureSweep,
    resampled_error,
    scored,
    standard_error,
    statement,
    temperature_sweep,
    tempered_certificate,
)
from priory.core.errors import DivergedError, InputError
from priory.penalties import heat_residual
from priory.plot import sweeps as pictures
from priory.predictive import Prediction


def rows(count: int = 60, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator)
    return x, x[:, 0] - 0.5 * x[:, 1] + 0.3 * torch.randn(count, generator=generator)


def labels(count: int = 60, seed: int = 0) -> tuple[Tensor, Tensor]:
    x, y = rows(count, seed)
    return x, (y > 0).long() + (y > 1).long()


def regression(dtype: torch.dtype = torch.float32) -> pr.Model:
    torch.manual_seed(0)
    return pr.Model(nn.Linear(3, 1).to(dtype), pr.Gaussian(0.3), prior=1.0)


def classification() -> pr.Model:
    torch.manual_seed(0)
    return pr.Model(nn.Linear(3, 3), pr.Categorical())


def sweep(model: Any = None, data: Any = None, method: Any = None, **options: Any) -> TemperatureSweep:
    known = {"grid": (0.1, 1.0), "steps": 40, "samples": 8}
    return temperature_sweep(model or regression(), data or rows(), method or pr.MeanField(), **(known | options))


def test_a_row_equals_the_result_of_fit_at_its_temperature():
    test = labels(30, seed=1)
    found = sweep(classification(), labels(), grid=(1.0, 0.1), test=test, tempers="posterior", seed=3)
    assert found.temperatures == (0.1, 1.0)
    for i, t in enumerate(found.temperatures):
        alone = pr.fit(
            classification(),
            labels(),
            pr.MeanField(),
            steps=40,
            seed=3,
            temperature=t,
            tempers="posterior",
            progress=False,
        )
        prediction = alone.predict(test[0], samples=8, seed=3)
        assert float(found.nll[i]) == pytest.approx(evaluate.nll(prediction, test[1]), rel=1e-12)
        assert float(found.accuracy[i]) == evaluate.accuracy(prediction, test[1])
        assert float(found.ece[i]) == evaluate.expected_calibration_error(prediction, test[1])
        losses = -prediction.log_prob(test[1]).double()
        assert found.errors["nll"][i] == pytest.approx((losses.std() / math.sqrt(30)).item(), rel=1e-12)
        p = float(found.accuracy[i])
        assert found.errors["accuracy"][i] == pytest.approx(math.sqrt(p * (1 - p) / 29), rel=1e-12)


def test_numbers_have_an_rmse_with_its_error_and_no_accuracy():
    found = sweep(test=rows(30, seed=1))
    assert list(found.scores) == ["nll", "rmse"]
    prediction = found.posteriors[1.0].predict(rows(30, seed=1)[0], samples=8, seed=0)
    assert float(found.rmse[1]) == pytest.approx(evaluate.rmse(prediction, rows(30, seed=1)[1]), rel=1e-6)
    with pytest.raises(InputError, match="must be one of nll, rmse"):
        _ = found.accuracy


def test_the_error_of_an_rmse_is_the_spread_of_its_values_over_many_data_sets():
    """False alarms: the ratio of the two has a relative standard deviation of about 4 % here; five of them."""
    generator = torch.Generator().manual_seed(0)
    values, errors = [], []
    for _ in range(600):
        y = torch.randn(100, generator=generator, dtype=torch.float64)
        outputs = torch.zeros(1, 100, dtype=torch.float64)
        prediction = Prediction.of_draws(pr.Gaussian(1.0), outputs, {}, torch.Size(), lambda t: t)
        value, error = scored(prediction, y)["rmse"]
        values.append(value)
        errors.append(error)
    ratio = torch.tensor(values).std() / torch.tensor(errors).mean()
    assert float(ratio) == pytest.approx(1.0, abs=0.2)


def test_the_error_of_a_calibration_error_is_that_of_a_mean_where_one_bin_holds_all():
    """With all confidences in one bin and far from the frequency, ECE is the absolute mean of their gap."""
    generator = torch.Generator().manual_seed(0)
    confidence = 0.96 + 0.02 * torch.rand(400, generator=generator, dtype=torch.float64)
    correct = (torch.rand(400, generator=generator, dtype=torch.float64) < 0.5).double()
    wanted = standard_error(correct - confidence)
    # 200 resampled sets give a standard deviation to 5 %; five of those
    assert resampled_error(confidence, correct) == pytest.approx(wanted, rel=0.25)


def test_the_best_temperature_is_the_one_of_the_lowest_nll_and_the_verdict_compares_it_with_one():
    found = sweep(grid=(0.01, 0.1, 1.0, 30.0))
    assert found.best == found.temperatures[int(found.nll.argmin())]
    gap, error = found.difference(30.0, 1.0)
    assert gap == pytest.approx(float(found.nll[3] - found.nll[2]), rel=1e-9)
    losses = found.pointwise[30.0] - found.pointwise[1.0]
    assert error == pytest.approx((losses.std() / math.sqrt(len(losses))).item(), rel=1e-12)
    assert f"T* = {found.best:g}" in found.verdict


def test_a_point_at_t_is_the_mode_under_a_prior_that_is_wider_by_the_root_of_t():
    data = tuple(t.double() for t in rows())
    torch.manual_seed(0)
    net = nn.Linear(3, 1).double()
    tempered = pr.Model(net, pr.Gaussian(0.3), prior=0.2)
    wider = pr.Model(net, pr.Gaussian(0.3), prior=0.2 / math.sqrt(0.25))
    options: dict[str, Any] = {"steps": 800, "batch_size": 60, "progress": False}
    cold = pr.fit(tempered, data, pr.MAP(), temperature=0.25, **options)
    plain = pr.fit(wider, data, pr.MAP(), **options)
    torch.testing.assert_close(cold.mean["weight"], plain.mean["weight"], rtol=1e-8, atol=1e-8)
    assert "a Gaussian prior 2 times wider" in statement(0.25, "point", "likelihood")


# What the certificate says.


@pytest.mark.parametrize("tempers", ["likelihood", "posterior"])
@pytest.mark.parametrize("temperature", [0.1, 3.0])
def test_a_tempered_penalty_with_learnt_scales_has_the_residual_one_minus_t_and_is_refused(
    temperature: float, tempers: str, monkeypatch: pytest.MonkeyPatch
):
    certified: list[Any] = []
    read = sweeps.prior_from_penalty
    monkeypatch.setattr(sweeps, "prior_from_penalty", lambda *given: certified.append(given[0]) or read(*given))
    certificate = tempered_certificate(temperature, "gaussian", tempers)
    assert not certificate.valid
    assert certificate.kind == "tempered"
    assert certificate.missing_entropy == pytest.approx(1 - temperature, abs=1e-6)
    (penalty,) = certified
    assert heat_residual(penalty, 0.7, 0.3).item() == pytest.approx(1 - temperature, abs=1e-6)
    # T KL(q || p), or -E_q[log p] - T H(q), but for a constant
    mu, s = torch.tensor([[0.7, -2.0, 0.1], [0.3, 1.5, 1.0]], dtype=torch.float64)
    weight = temperature if tempers == "likelihood" else 1.0
    wanted = weight * 0.5 * (mu**2 + s**2) - temperature * s.log()
    found = penalty(mu, s)
    torch.testing.assert_close(found - found[-1], wanted - wanted[-1], rtol=1e-10, atol=1e-10)


def test_the_same_penalty_at_a_point_is_valid_and_at_one_every_family_is():
    assert tempered_certificate(0.1, "dirac").valid
    assert tempered_certificate(1.0, "gaussian").valid
    assert tempered_certificate(1.0, "laplace").valid


@pytest.mark.parametrize(
    ("method", "learnt", "words"),
    [
        (pr.MeanField(), "scales", "Bayesian for no prior: the heat residual is rho = 1 - T = 0.9"),
        (pr.MeanField(family="laplace"), "scales", "A tempered KL: T = 0.1"),
        (pr.MAP(), "point", "T = 0.1 is a Gaussian prior 3.2 times wider"),
        (pr.SWAG(), "point", "fixed scales"),
        (pr.Dropout(), "point", "fixed scales"),
        (pr.Ensemble(pr.MAP(), 2), "point", "fixed scales"),
    ],
)
def test_the_statement_says_what_a_temperature_means_for_what_the_method_learns(method: Any, learnt: str, words: str):
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 1))
    if not isinstance(method, pr.Dropout):
        net.eval()
    found = sweep(pr.Model(net, pr.Gaussian(0.3)), method=method, grid=(0.1,), steps=20, samples=4)
    assert found.learnt == learnt
    assert words in found.statement
    assert found.statement in str(found)
    assert found.certificate is not None
    assert found.certificate.valid == (learnt == "point")


def test_learnt_rates_of_dropout_are_bayesian_at_one_only():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    found = sweep(pr.Model(net, pr.Gaussian(0.3)), method=pr.Dropout("learn"), grid=(0.1,), steps=20, samples=4)
    assert (found.learnt, found.certificate) == ("rates", None)
    assert "with learnt rates" in found.statement
    assert "T = 0.1 is Bayesian for no prior" in found.statement
    assert "T = 1 is Bayesian. With fixed rates" in statement(1.0, "rates", "likelihood")


def test_a_gaussian_around_a_mode_counts_each_row_so_many_times():
    found = sweep(method=pr.Laplace(at=pr.MAP()), grid=(0.1,), steps=1500, batch_size=48)
    assert found.learnt == "draws"
    assert "count each row 1/T times (10 at T = 0.1)" in found.statement
    assert found.certificate is None


def test_a_mode_that_tempers_the_whole_posterior_says_that_t_does_nothing():
    found = sweep(method=pr.MAP(), tempers="posterior")
    assert float(found.nll[0]) == float(found.nll[1])
    assert "does not depend on T" in found.statement


@dataclass(frozen=True)
class BreaksWhenCold(pr.MAP):
    """A method that diverges below T = 1."""

    def step(self, target: Any, *rest: Any) -> Any:
        if target.temperature < 1:
            raise DivergedError("It broke.")
        return super().step(target, *rest)


def test_a_fit_that_diverges_costs_its_own_row_only():
    found = sweep(method=BreaksWhenCold(), grid=(0.1, 1.0))
    assert found.nll.isnan().tolist() == [True, False]
    assert found.best == 1.0
    assert "T = 0.1 failed: It broke." in str(found)
    nothing = sweep(method=BreaksWhenCold(), grid=(0.1,))
    assert math.isnan(nothing.best)
    assert nothing.verdict == "No temperature could be scored."


def test_the_table_and_the_picture_show_every_score_and_the_best(tmp_path: Path):
    found = sweep(classification(), labels())
    lines = str(found).splitlines()
    assert lines[2].split() == ["T", "NLL", "accuracy", "ECE"]
    assert sum(" * " in line for line in lines[3:5]) == 1
    figure = found.plot(tmp_path / "sweep.png")
    assert [ax.get_ylabel() for ax in figure.axes] == ["NLL", "accuracy", "ECE"]
    assert list(figure.axes[0].get_lines()[0].get_ydata()) == found.nll.tolist()
    assert (tmp_path / "sweep.png").stat().st_size > 10_000


def test_a_picture_of_something_else_is_refused():
    with pytest.raises(InputError, match=r"must be a TemperatureSweep, got int."):
        pictures.temperatures(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match=r"must be a PruningCurve, got int."):
        pictures.pruning(3)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"grid": ()}, "The 'grid' argument of temperature_sweep must be temperatures"),
        (
            {"grid": (0.0, 1.0)},
            r"The 'grid' argument of temperature_sweep must hold positive numbers, got \[0.0, 1.0\].",
        ),
        ({"grid": (1.0, 1.0)}, "must hold each temperature once"),
        ({"test": 2.0}, "The 'test' argument of temperature_sweep must be a pair"),
        ({"samples": 0}, "The 'samples' argument of temperature_sweep must be an integer >= 1, got 0."),
        ({"tempers": "prior"}, "The 'tempers' argument of temperature_sweep must be 'likelihood' or 'posterior'"),
        ({"method": pr.MAP}, "The 'method' argument of temperature_sweep must be a method"),
        ({"model": 3}, "The 'model' argument of temperature_sweep must be a Model"),
    ],
)
def test_invalid_arguments_are_refused(options: dict[str, Any], sentence: str):
    with pytest.raises(InputError, match=sentence):
        sweep(**options)


def test_data_must_be_given():
    with pytest.raises(InputError, match=r"The 'data' argument of temperature_sweep must be given, got None."):
        temperature_sweep(regression(), None, pr.MAP())
