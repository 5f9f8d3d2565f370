"""Comparison of methods: scores, the split, the table, failures and invalid arguments."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import priory as pr
from priory import evaluate
from priory.analysis.comparison import Comparison, compare, split_rows
from priory.core.errors import InputError


def rows(count: int = 60, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator)
    return x, x[:, 0] - 0.5 * x[:, 1] + 0.3 * torch.randn(count, generator=generator)


def labels(count: int = 60, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = rows(count, seed)
    return x, (y > 0).long() + (y > 1).long()


def regression() -> Any:
    torch.manual_seed(0)
    return pr.Model(nn.Linear(3, 1), pr.Gaussian(0.3))


def classification() -> Any:
    torch.manual_seed(0)
    return pr.Model(nn.Linear(3, 3), pr.Categorical())


METHODS = (pr.MAP(), pr.MeanField())


def run(model: Any, data: Any, methods: Any = METHODS, **options: Any) -> Comparison:
    return compare(model, data, methods, **({"steps": 40, "samples": 8, "progress": False} | options))


@dataclass(frozen=True)
class Broken(pr.MAP):
    """A method that raises when it starts."""

    def init(self, *arguments: Any, **options: Any) -> Any:
        raise RuntimeError("The broken method can't begin.")


def test_a_row_holds_the_scores_of_its_own_posterior_on_the_held_out_rows() -> None:
    x, y = rows(20, seed=1)
    comparison = run(regression(), rows(), test=(x, y))
    assert [row["method"] for row in comparison.rows] == ["MAP", "MeanField"]
    for row in comparison.rows:
        prediction = comparison.posteriors[row["method"]].predict(x, samples=8, seed=0)
        losses = -prediction.log_prob(y).double()
        assert row["nll"] == pytest.approx(evaluate.nll(prediction, y), rel=1e-12)
        assert row["nll_error"] == pytest.approx((losses.std() / math.sqrt(20)).item(), rel=1e-12)
        assert row["rmse"] == evaluate.rmse(prediction, y)
        assert row["calibration"] == evaluate.calibration_error(prediction, y)
        assert row["error"] is None
        assert row["status"] == comparison.posteriors[row["method"]].status.name
        assert min(row["fit_seconds"], row["predict_seconds"]) >= 0
    assert comparison.best == min(comparison.rows, key=lambda row: row["nll"])["method"]


def test_a_row_equals_the_result_of_fit() -> None:
    x, y = rows(20, seed=1)
    comparison = run(regression(), rows(), test=(x, y))
    alone = pr.fit(regression(), rows(), pr.MeanField(), steps=40, seed=0, progress=False)
    assert comparison.rows[1]["nll"] == evaluate.nll(alone.predict(x, samples=8, seed=0), y)


def test_rows_of_classes_have_an_accuracy_and_no_rmse() -> None:
    comparison = run(classification(), labels())
    for row in comparison.rows:
        assert "rmse" not in row
        prediction = comparison.predictions[row["method"]]
        assert row["accuracy"] == evaluate.accuracy(prediction, comparison.targets)
    assert "accuracy" in str(comparison)


def test_the_same_seed_gives_the_same_scores() -> None:
    first, second = run(regression(), rows(), seed=3), run(regression(), rows(), seed=3)
    assert [row["nll"] for row in first.rows] == [row["nll"] for row in second.rows]


def test_a_fraction_holds_out_rows_that_were_not_fitted() -> None:
    x, y = torch.arange(50.0)[:, None], torch.arange(50.0)
    kept, (held_x, held_y) = split_rows((x, y), 0.2, seed=0)
    assert kept.tensors is not None
    assert sorted([*kept.tensors[1].tolist(), *held_y.tolist()]) == y.tolist()
    assert len(held_y) == 10
    assert torch.equal(held_x[:, 0], held_y)
    assert not torch.equal(held_y, split_rows((x, y), 0.2, seed=1)[1][1])


@pytest.mark.parametrize("wrap", [lambda pair: TensorDataset(*pair), lambda pair: DataLoader(TensorDataset(*pair), 16)])
def test_datasets_and_loaders_are_compared_like_tensors(wrap: Any) -> None:
    comparison = run(regression(), wrap(rows()), test=rows(20, seed=1), methods=[pr.MAP()])
    assert comparison.best == "MAP"
    assert comparison.about["rows to fit"] == "60"


def test_arrays_are_compared_like_tensors() -> None:
    x, y = rows()
    tensors, arrays = run(regression(), (x, y)), run(regression(), (x.numpy(), y.numpy()))
    assert [row["nll"] for row in tensors.rows] == [row["nll"] for row in arrays.rows]


def test_a_standardised_model_is_scored_in_the_targets_own_units() -> None:
    (x, y), (x_new, y_new) = rows(), rows(20, seed=1)
    centre, spread = y.mean(), y.std(correction=0)
    standard = lambda x_, y_: ((x_ - x.mean(0)) / x.std(0, correction=0), (y_ - centre) / spread)  # noqa: E731
    plain = run(unit_noise(False), standard(x, y), test=standard(x_new, y_new))
    scaled = run(unit_noise(True), (x, 100 + 20 * y), test=(x_new, 100 + 20 * y_new))
    scale = 20 * spread.item()
    for before, after in zip(plain.rows, scaled.rows, strict=True):
        assert after["nll"] == pytest.approx(before["nll"] + math.log(scale), abs=1e-3)  # float32
        assert after["rmse"] == pytest.approx(scale * before["rmse"], rel=1e-3)
        assert after["calibration"] == pytest.approx(before["calibration"], abs=1e-3)
    assert scaled.baseline is not None
    assert plain.baseline is not None
    assert scaled.baseline["nll"] == pytest.approx(plain.baseline["nll"] + math.log(scale), abs=1e-4)


def unit_noise(standardise: bool) -> Any:
    torch.manual_seed(0)
    return pr.Model(nn.Linear(3, 1), pr.Gaussian(), standardise=standardise)


def test_rows_of_any_type_are_compared_in_the_type_of_the_network() -> None:
    comparison = run(regression(), tuple(part.double() for part in rows()))
    assert not comparison.failures


def test_the_baseline_of_numbers_is_a_gaussian_of_the_fitted_targets() -> None:
    (_, seen), (x, y) = rows(), rows(20, seed=1)
    baseline = run(regression(), rows(), test=(x, y)).baseline
    assert baseline is not None
    mean, std = seen.double().mean().item(), seen.double().std(unbiased=False).item()
    losses = 0.5 * ((y.double().numpy() - mean) / std) ** 2 + math.log(std) + 0.5 * math.log(2 * math.pi)
    assert baseline["nll"] == pytest.approx(losses.mean(), rel=1e-10)
    assert baseline["rmse"] == pytest.approx(np.sqrt(((y.double().numpy() - mean) ** 2).mean()), rel=1e-10)


def test_the_baseline_of_classes_is_their_frequency_with_one_more_of_each() -> None:
    (_, seen), (x, y) = labels(), labels(20, seed=1)
    baseline = run(classification(), labels(), test=(x, y)).baseline
    assert baseline is not None
    frequency = (np.bincount(seen.numpy(), minlength=3) + 1) / 63
    assert baseline["nll"] == pytest.approx(-np.log(frequency)[y.numpy()].mean(), rel=1e-12)
    assert baseline["accuracy"] == (y.numpy() == frequency.argmax()).mean()


def test_a_method_below_the_baseline_is_named_in_a_sentence() -> None:
    x = torch.linspace(-1, 1, 40)[:, None]
    model = pr.Model(nn.Linear(1, 1), pr.Gaussian(0.1), prior=1e-3)  # so narrow that the slope stays at zero
    bad = run(model, (x, 5 * x[:, 0]), [pr.MAP()])
    assert bad.rows[0]["nll"] > bad.baseline["nll"]
    assert "MAP has a higher NLL than (no inputs), a prediction that ignores the inputs" in bad.worse_than_baseline
    assert str(bad).endswith(bad.worse_than_baseline)
    good = run(regression(), rows(), {"one": pr.MAP()}, steps=600)
    assert good.worse_than_baseline == ""
    assert "status" in str(good).splitlines()[2]


def test_a_method_that_fails_costs_only_its_own_row() -> None:
    comparison = run(regression(), rows(), methods={"good": pr.MAP(), "bad": Broken()})
    assert comparison.best == "good"
    assert comparison.failures == {"bad": "The broken method can't begin."}
    assert "bad failed: The broken method can't begin." in str(comparison)
    assert "failed: The broken method can&#x27;t begin." in comparison._repr_html_()
    assert set(comparison.predictions) == {"good"}


def test_one_held_out_row_has_no_standard_error_and_tells_nothing_apart() -> None:
    x, y = rows(1, seed=1)
    comparison = run(regression(), rows(), test=(x, y))
    assert comparison.verdict.endswith("one held-out row can't tell them apart.")
    assert "nan" not in str(comparison)


def test_when_all_fail_there_is_no_best_and_the_table_still_prints() -> None:
    comparison = run(regression(), rows(), methods=[Broken()])
    assert comparison.best is None
    assert comparison.verdict == "No method could be scored."
    assert "Broken failed" in str(comparison)


def test_the_table_is_aligned_and_marks_the_best_of_each_column() -> None:
    comparison = run(regression(), rows())
    lines = str(comparison).splitlines()
    head = next(place for place, line in enumerate(lines) if line.startswith("method"))
    table = [lines[head], *lines[head + 2 : head + 4]]
    ends = {line.index(word) + len(word) for line, word in zip(table, ("RMSE", *_rmse(comparison)), strict=True)}
    assert len(ends) == 1
    marked = [column for column in comparison.columns if comparison.winners(column)]
    assert str(comparison).count(" *") == len(marked)
    assert {"nll", "rmse"} <= set(marked)
    calibrations = {round(row["calibration"], 3) for row in comparison.rows}  # twelve rows can well be covered alike
    assert ("calibration" in marked) is (len(calibrations) > 1)
    assert lines[0] == "48 rows to fit, 12 held out, seed 0"
    assert any(line.startswith("(no inputs)") for line in lines)


@pytest.mark.parametrize(
    ("first", "second", "winners"),
    [(0.01, 5.0, set()), (2.0, 2.1, set()), (2.0, 2.3, {"MAP"}), (0.11, 0.1, set()), (3.0, 0.2, {"MeanField"})],
)
def test_a_time_wins_if_it_can_be_measured_and_is_a_tenth_shorter(
    first: float, second: float, winners: set[str]
) -> None:
    comparison = run(regression(), rows(), steps=2)
    for row, seconds in zip(comparison.rows, (first, second), strict=True):
        row["fit_seconds"] = seconds
    assert comparison.winners("fit_seconds") == winners


def test_equal_methods_are_not_compared_with_each_other() -> None:
    pair = run(regression(), rows(), methods=[pr.MAP(), pr.MAP()])
    assert pair.verdict == "MAP and MAP #2 give the same predictions: none is better than another."
    assert pair.winners("nll") == set()
    three = run(regression(), rows(), methods=[pr.MAP(), pr.MeanField(), pr.MAP()])
    assert three.verdict.startswith(("MAP and MAP #2 have the lowest NLL, ", "MeanField has the lowest NLL, "))
    single = run(regression(), rows(), methods=[pr.MAP()])
    assert single.verdict == "MAP is the only method that was scored."


def test_a_small_difference_is_printed_with_the_digits_it_needs() -> None:
    comparison = run(regression(), rows(), methods={"one": pr.MAP(), "two": pr.MAP()})
    comparison.pointwise["two"] = comparison.pointwise["one"] + 1e-3 * torch.tensor([1.0, -0.5] * 6)
    assert "0.00025 ± 0.00023 nats per row below two" in comparison.verdict  # 0.75 * sqrt(12/11) / sqrt(12) = 0.226


def test_numpy_integers_are_accepted_as_integers() -> None:
    comparison = run(regression(), rows(), samples=np.int64(4), steps=np.int32(2), batch_size=np.int64(16))
    assert comparison.failures == {}


def _rmse(comparison: Comparison) -> list[str]:
    return [cells[comparison.columns.index("rmse")] for cells in comparison.cells()[:2]]


def test_names_are_escaped_in_html() -> None:
    comparison = run(regression(), rows(), methods={"<script>": pr.MAP(), "b": pr.MAP()})
    assert "<script>" not in comparison._repr_html_()
    assert "&lt;script&gt;" in comparison._repr_html_()


def test_methods_of_one_class_are_named_by_their_differences() -> None:
    methods = [pr.MeanField(), pr.MeanField(samples=2), pr.MAP(), pr.MeanField(samples=2)]
    names = [row["method"] for row in run(regression(), rows(), methods=methods, steps=2).rows]
    assert names == ["MeanField", "MeanField(samples=2)", "MAP", "MeanField(samples=2) #2"]


def test_the_difference_of_two_methods_is_taken_row_by_row() -> None:
    comparison = run(regression(), rows())
    y = comparison.targets
    first, second = (comparison.predictions[name].log_prob(y).double() for name in ("MAP", "MeanField"))
    gap, error = comparison.difference("MAP", "MeanField")
    assert gap == pytest.approx((second - first).mean().item(), rel=1e-10)
    assert error == pytest.approx(((second - first).std() / math.sqrt(len(y))).item(), rel=1e-10)
    with pytest.raises(InputError, match=r"must be among \['MAP', 'MeanField'\], got HMC"):
        comparison.difference("HMC", "MAP")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"methods": []}, r"'methods' argument of compare must hold at least one method"),
        ({"methods": pr.MAP()}, r"'methods' argument of compare must be a list of methods, or a dict"),
        ({"methods": "map"}, r"'methods' argument of compare must be a list of methods, or a dict"),
        ({"methods": [pr.MAP]}, r"must hold methods, not classes: MAP\(\), not MAP"),
        ({"methods": ["map"]}, r"must hold methods such as MAP\(\) and MeanField\(\), got map"),
        ({"methods": {1: pr.MAP()}}, r"must have text as names, got 1"),
        (
            {"test": 1.5},
            r"'test' argument of compare must be a pair \(X, y\), or a fraction between 0 and 1, got 1\.5",
        ),
        ({"test": 0.001}, r"must hold out at least one of the 60 rows and leave one"),
        ({"test": None}, r"'test' argument of compare must be a pair"),
        ({"test": (torch.zeros(3, 3),)}, r"'test' argument of compare must be inputs and targets"),
        ({"test": (torch.zeros(3, 3), torch.zeros(4))}, r"same number of rows"),
        ({"samples": 0}, r"'samples' argument of compare must be an integer >= 1, got 0"),
        ({"steps": -1}, r"'steps' argument of compare must be an integer >= 1, got -1"),
        ({"epochs": 3}, r"'steps' argument of compare must be left out when epochs are given"),
        ({"data": None}, r"'data' argument of compare must be given"),
        ({"model": nn.Linear(3, 1)}, r"'model' argument of compare must be a Model, with a likelihood, or a Density"),
    ],
)
def test_invalid_arguments_are_refused(options: dict[str, Any], sentence: str) -> None:
    arguments = {"model": regression(), "data": rows(), **options}
    with pytest.raises(InputError, match=sentence):
        run(arguments.pop("model"), arguments.pop("data"), **arguments)
