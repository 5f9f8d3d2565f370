"""Pictures: that they show the numbers they should, and leave nothing behind."""

import io
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from priory import evaluate, plot
from priory.core.errors import InputError
from priory.likelihoods import Categorical, Gaussian, Likelihood
from priory.predictive import Prediction


def prediction(likelihood: Likelihood, outputs: torch.Tensor) -> Prediction:
    def prepare(y: torch.Tensor) -> torch.Tensor:
        return likelihood.prepare(y, torch.float64)

    return Prediction.of_draws(likelihood, outputs, {}, torch.Size(), prepare)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def numbers() -> Prediction:
    return prediction(Gaussian(noise=0.5), normal(8, 30))


def classes() -> Prediction:
    return prediction(Categorical(), normal(8, 30, 3))


LABELS = torch.arange(30) % 3


def line(ax: Axes, label: str) -> tuple[list[float], list[float]]:
    found = next(one for one in ax.get_lines() if one.get_label() == label)
    return list(found.get_xdata()), list(found.get_ydata())


def texts(ax: Axes) -> list[str]:
    legend = ax.get_legend()
    return [] if legend is None else [text.get_text() for text in legend.get_texts()]


def all_pictures() -> list[Axes]:
    fit = SimpleNamespace(history={"elbo": -normal(200).abs(), "nll": normal(200)})
    return [
        plot.history(fit),
        plot.history({"one": fit, "two": fit}, "nll"),
        plot.predictive(numbers(), normal(30), normal(30)),
        plot.predictive(numbers(), normal(30, 4), normal(30)),
        plot.predictive(classes(), None, LABELS),
        plot.calibration(numbers(), normal(30)),
        plot.calibration(classes(), LABELS),
    ]


def test_every_plot_has_a_title_and_axis_labels_and_can_be_saved() -> None:
    for ax in all_pictures():
        assert ax.get_title(loc="left")
        assert ax.get_xlabel()
        assert ax.get_ylabel()
        buffer = io.BytesIO()
        ax.get_figure().savefig(buffer, format="png")
        assert buffer.getvalue().startswith(b"\x89PNG")


def test_given_axes_are_used_and_returned() -> None:
    fit = SimpleNamespace(history={"loss": normal(50)})
    for draw in (
        lambda ax: plot.history(fit, ax=ax),
        lambda ax: plot.predictive(numbers(), None, normal(30), ax=ax),
        lambda ax: plot.calibration(numbers(), normal(30), ax=ax),
        lambda ax: plot.calibration(classes(), LABELS, ax=ax),
    ):
        ax = Figure().subplots()
        assert draw(ax) is ax


def test_the_elbo_is_shown_if_there_is_one_and_otherwise_the_loss() -> None:
    both = SimpleNamespace(history={"nll": normal(9), "loss": normal(9), "elbo": normal(9)})
    loss = SimpleNamespace(history={"nll": normal(9), "loss": normal(9)})
    assert plot.history(both).get_title(loc="left").startswith("Evidence lower bound")
    assert plot.history({"a": both, "b": loss}).get_title(loc="left").startswith("Loss")
    assert texts(plot.history({"a": both, "b": loss})) == ["a", "b"]


def test_a_short_history_is_plotted_value_by_value() -> None:
    values = normal(20)
    ax = plot.history(SimpleNamespace(history={"loss": values}))
    assert list(ax.get_lines()[-1].get_ydata()) == values.tolist()
    assert list(ax.get_lines()[-1].get_xdata()) == list(range(1, 21))


def test_the_strong_line_of_a_long_history_is_its_running_mean() -> None:
    values = normal(200)
    ax = plot.history(SimpleNamespace(history={"loss": values}))
    steps, means = (list(part) for part in ax.get_lines()[-1].get_data())
    assert steps == list(range(4, 201))
    assert means == pytest.approx([values[k : k + 4].mean().item() for k in range(197)], rel=1e-10)


def test_a_few_extreme_steps_do_not_flatten_a_history_and_its_end_is_visible() -> None:
    values = 100 + normal(500)
    values[:10], values[300], values[-10:] = 1e6, float("inf"), 140.0
    low, high = plot.history(SimpleNamespace(history={"loss": values})).get_ylim()
    assert 90 < low < 100
    assert 140 < high < 150


def test_a_steadily_falling_history_is_shown_from_its_first_step() -> None:
    values = torch.linspace(30, 10, 20, dtype=torch.float64)
    low, high = plot.history(SimpleNamespace(history={"loss": values})).get_ylim()
    assert low < 10
    assert high > 30


def test_the_end_of_every_curve_is_visible_however_short_it_is() -> None:
    long, short = (SimpleNamespace(history={"nll": value + normal(count)}) for value, count in ((0, 900), (50, 9)))
    low, high = plot.history({"long": long, "short": short}, "nll").get_ylim()
    assert low < -1
    assert high > 50


def test_ticks_have_full_labels_and_no_offset() -> None:
    ax = plot.history(SimpleNamespace(history={"loss": 118.7 + 1e-4 * normal(50)}))
    ax.get_figure().draw_without_rendering()
    assert ax.yaxis.get_offset_text().get_text() == ""
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert all(label.startswith("118.") for label in labels)
    assert len(set(labels)) == len(labels)


def test_the_histogram_of_confidences_is_linear_and_shows_whole_bars() -> None:
    ax = plot.predictive(classes(), None, LABELS)
    assert ax.get_yscale() == "linear"
    bars = [bar for bar in ax.patches if bar.get_height() > 0]
    tops = [bar.get_y() + bar.get_height() for bar in bars]
    assert max(tops) < ax.get_ylim()[1]
    assert sum(bar.get_height() for bar in bars) == 30
    assert min(bar.get_x() for bar in bars) >= ax.get_xlim()[0] - 1e-9


def test_along_one_input_the_mean_is_sorted_by_it() -> None:
    x, mixture = normal(30, seed=5), numbers()
    xs, means = line(plot.predictive(mixture, x[:, None], normal(30)), "mean")
    order = x.argsort()
    assert xs == x[order].tolist()
    assert means == mixture.mean[order].tolist()


def test_targets_outside_their_intervals_are_marked() -> None:
    mixture, y = numbers(), normal(30, seed=3)
    ax = plot.predictive(mixture, normal(30, 4), y, level=0.5)
    low, high = mixture.interval(0.5)
    outside = sorted(y[(y < low) | (y > high)].tolist())
    assert sorted(line(ax, "target outside")[1]) == outside
    percent = round(100 * (1 - len(outside) / 30))
    assert ax.get_title(loc="left") == f"50 % intervals hold {percent} % of 30 targets"


def test_many_rows_are_thinned_and_the_axis_label_says_so() -> None:
    mixture, y = prediction(Gaussian(noise=0.5), normal(2, 500)), normal(500, seed=1)
    ax = plot.predictive(mixture, None, y)
    assert f"{plot.MAX_INTERVALS} of 500 shown" in ax.get_xlabel()
    assert len(line(ax, "target inside")[0]) + len(line(ax, "target outside")[0]) == plot.MAX_INTERVALS


def test_the_calibration_curve_is_the_coverage() -> None:
    mixture, y = numbers(), normal(30, seed=1)
    levels, inside = line(plot.calibration(mixture, y), "this prediction")
    assert inside == evaluate.coverage(mixture, y, levels).tolist()


def test_invalid_arguments_raise_an_error_that_names_them() -> None:
    fit = SimpleNamespace(history={"loss": normal(9)})
    with pytest.raises(InputError, match=r"'quantity' argument of plot.history must be one of \['loss'\], got elbo"):
        plot.history(fit, "elbo")
    with pytest.raises(InputError, match="hold at least one posterior"):
        plot.history({})
    with pytest.raises(InputError, match="must be given for predictions of classes"):
        plot.predictive(classes(), normal(30))
    with pytest.raises(InputError, match="must be given when the inputs have more than one column"):
        plot.predictive(numbers(), normal(30, 4))
    with pytest.raises(InputError, match="lie strictly between 0 and 1"):
        plot.predictive(numbers(), normal(30), level=95)
    with pytest.raises(InputError, match="one output for each of its inputs"):
        plot.predictive(numbers(), normal(29))


QUIET = """
import sys, torch
from types import SimpleNamespace
from priory import plot
assert "matplotlib" not in sys.modules
plot.history(SimpleNamespace(history={"loss": torch.arange(9.0)}))
assert "matplotlib.pyplot" not in sys.modules
"""


def test_plotting_never_loads_pyplot_and_importing_never_loads_matplotlib() -> None:
    source = str(Path(plot.__file__).resolve().parents[2])
    done = subprocess.run([sys.executable, "-c", QUIET], capture_output=True, text=True, env={"PYTHONPATH": source})
    assert done.returncode == 0, done.stderr


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"needs 'matplotlib': pip install 'priory\[plot\]'"):
        plot.calibration(numbers(), normal(30))
