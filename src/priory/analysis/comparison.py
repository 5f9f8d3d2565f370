"""Compare methods on one model and one data set.

Every method is fitted to the same rows and scored on the same held-out rows, and the scores form one table. If a method
fails, the error message replaces the scores in its row and the other methods are not affected.
"""

from __future__ import annotations

import html
import math
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from priory import evaluate
from priory.core.data import Data
from priory.core.errors import require, whole
from priory.core.tables import text_table
from priory.fitting.fit import fit
from priory.fitting.identity import repr_of
from priory.methods.base import Method
from priory.predictive.units import Units

HIGHER_IS_BETTER = {"accuracy"}
TIME_COLUMNS = {"fit_seconds", "predict_seconds"}
MIN_SECONDS = 0.1  # shorter times are mostly noise of the machine
SAME_PREDICTIONS_NATS = 5e-4  # per row; the printed scores have three decimals
COLUMN_TITLES = {
    "method": "method",
    "nll": "NLL",
    "rmse": "RMSE",
    "accuracy": "accuracy",
    "calibration": "calibration",
    "fit_seconds": "fit [s]",
    "predict_seconds": "predict [s]",
}


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`: print it, display it in a notebook, or write it as a report.

    Attributes:
        rows: One dict per method with `method`, `nll` (nats per row) and its standard error `nll_error`, `rmse` or
            `accuracy`, `calibration`, `fit_seconds`, `predict_seconds` and `error` (None, or the message of the error
            that the method raised).
        posteriors: The fitted posteriors by the method's name.
        predictions: The predictions of the held-out rows by the method's name.
        inputs: The held-out inputs.
        targets: The held-out targets.
        about: The settings of the comparison, as text by name.
        baseline: The scores of a prediction that ignores the inputs, as a dict like those of `rows`; None if there is
            no such prediction for the targets.
        pointwise: The negative log predictive density of each held-out row, (n,), by the method's name.
    """

    rows: list[dict[str, Any]]
    posteriors: dict[str, Any]
    predictions: dict[str, Any]
    inputs: Any
    targets: Tensor
    about: dict[str, str]
    baseline: dict[str, Any] | None = None
    pointwise: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def best(self) -> str | None:
        """Name of the method with the lowest NLL; None if all failed."""
        scored = [row for row in self.rows if row["error"] is None and math.isfinite(row["nll"])]
        return min(scored, key=lambda row: row["nll"])["method"] if scored else None

    def difference(self, first: str, second: str) -> tuple[float, float]:
        """Return the NLL of one method minus the NLL of another, with the standard error of the difference.

        The difference is taken row by row. Both methods find the same rows hard, so its standard error is usually
        smaller than the standard errors of the two scores.

        Args:
            first: Name of a method that was scored.
            second: Name of the method to subtract.

        Returns:
            The mean difference and its standard error, in nats per row.

        Raises:
            InputError: If a method is unknown or was not scored.
        """
        for name in (first, second):
            require(name in self.pointwise, "methods", "difference", f"be among {sorted(self.pointwise)}", name)
        gap = self.pointwise[first] - self.pointwise[second]
        return gap.mean().item(), standard_error(gap)

    @property
    def verdict(self) -> str:
        """One sentence that names the best method and says whether its lead exceeds the noise of the held-out rows."""
        best = self.best
        if best is None:
            return "No method could be scored."
        others = [name for name, losses in self.pointwise.items() if math.isfinite(losses.mean().item())]
        far = {name: (self.pointwise[name] - self.pointwise[best]).abs().mean().item() for name in others}
        same = [name for name in others if far[name] < SAME_PREDICTIONS_NATS]
        others = [name for name in others if name not in same]
        if not others and same == [best]:
            return f"{best} is the only method that was scored."
        if not others:
            return f"{_listed(same)} give the same predictions: there is nothing to tell apart."
        second = min(others, key=lambda name: self.pointwise[name].mean().item())
        gap, error = self.difference(second, best)
        best, has = _listed(same), "has" if len(same) == 1 else "have"
        if math.isnan(error):
            return (
                f"{best} {has} the lowest NLL, {gap:.3f} nats below {second}: one held-out row can't tell them apart."
            )
        clear = "more than these rows' noise" if gap > 2 * error else "too close for these rows to tell apart"
        places = max(3, 1 - math.floor(math.log10(error))) if error > 0 else 3  # never 0.000 ± 0.000
        text = f"{gap:.{places}f} ± {error:.{places}f}"
        return f"{best} {has} the lowest NLL, {text} nats per row below {second}: {clear}."

    def report(self, path: str | Path, title: str = "Comparison of methods") -> Path:
        """Write the comparison as one self-contained HTML page.

        Args:
            path: The file to write.
            title: The title of the page.

        Returns:
            The path of the file.
        """
        from priory.reports import write_comparison

        return write_comparison(self, path, title)

    @property
    def columns(self) -> list[str]:
        """Names of the table's columns."""
        quality = "accuracy" if any("accuracy" in row for row in self.rows) else "rmse"
        return ["method", "nll", quality, "calibration", "fit_seconds", "predict_seconds"]

    def winners(self, column: str) -> set[str]:
        """Return the names of the methods with the best value of a column.

        The set is empty if all values are equal, or if fewer than two methods were scored. The shortest time wins only
        if it is at least 0.1 seconds and every other time is more than 10 % longer.

        Args:
            column: One of `columns`.

        Returns:
            The names of the best methods.
        """
        values = {row["method"]: row[column] for row in self.rows if row["error"] is None}
        if column == "method" or len(values) < 2:
            return set()
        values = {name: value for name, value in values.items() if math.isfinite(value)}
        if not values:
            return set()
        top = (max if column in HIGHER_IS_BETTER else min)(values.values())
        best = {name for name, value in values.items() if value == top}
        if column in TIME_COLUMNS:
            alone = sum(value <= 1.1 * top for value in values.values()) == 1
            return best if alone and top >= MIN_SECONDS else set()
        return best if len(best) < len(values) else set()

    def cells(self) -> list[list[str]]:
        """Return the table as text, one list per row, with the baseline last."""
        table = [*self.rows, *([self.baseline] if self.baseline else [])]
        columns = [_column_text(name, [row.get(name) for row in table]) for name in self.columns]
        nll = self.columns.index("nll")
        errors = _column_text("nll", [_known(row.get("nll_error")) for row in table])
        columns[nll] = [
            f"{value} ± {error}" if error else value for value, error in zip(columns[nll], errors, strict=True)
        ]
        return [list(row) for row in zip(*columns, strict=True)]

    @property
    def failures(self) -> dict[str, str]:
        """Error messages of the methods that failed, by the method's name."""
        return {row["method"]: row["error"] for row in self.rows if row["error"] is not None}

    @property
    def heading(self) -> str:
        """One line with the numbers of rows and the seed."""
        about = self.about
        fitted = counted(int(about["rows to fit"]), "row")
        return f"{fitted} to fit, {about['rows held out']} held out, seed {about['seed']}"

    def __str__(self) -> str:
        heads = [COLUMN_TITLES[name] for name in self.columns]
        cells = self.cells()
        for row, text in zip(self.rows, cells, strict=False):
            for place, column in enumerate(self.columns):
                text[place] += " *" if row["method"] in self.winners(column) else "  "
        if self.baseline:
            cells[-1] = [text + "  " for text in cells[-1]]
        heads = [heads[0], *(head + "  " for head in heads[1:])]
        lines = text_table([heads, *cells], gap=3, rule=True)
        if self.baseline:
            lines.insert(-1, lines[1])
        notes = [f"{name} failed: {error}" for name, error in self.failures.items()]
        legend = "* best. NLL in nats per row, with its standard error. Lower is better"
        legend += ", except for accuracy." if "accuracy" in self.columns else "."
        return "\n".join([self.heading, "", *lines, "", *notes, legend, self.verdict])

    def _repr_html_(self) -> str:
        return table_html(self)


def compare(
    model: Any,
    data: Any,
    methods: Sequence[Any] | Mapping[str, Any],
    test: Any = 0.2,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    samples: int = 64,
    seed: int = 0,
    temperature: float = 1.0,
    tempers: str = "likelihood",
    progress: bool = True,
    units: Units | None = None,
) -> Comparison:
    """Fit each method to the same rows and score it on the same held-out rows.

    Args:
        model: A model with a likelihood.
        data: Inputs and targets, such as (X, y).
        methods: A list of methods, or a dict from names of your choice to methods.
        test: A pair (X, y), or the fraction of the rows of `data` to hold out. Default: 0.2.
        epochs: Passes over the data, as in `fit`.
        steps: Optimiser steps, as in `fit`; give either `epochs` or `steps`.
        batch_size: Rows per minibatch, as in `fit`.
        samples: Posterior draws per prediction. Default: 64.
        seed: Seed of the split, of every fit and of the predictions. Default: 0.
        temperature: Temperature T of every fit. Default: 1.0.
        tempers: "likelihood" or "posterior", the density that the temperature applies to. Default: "likelihood".
        progress: Whether to show progress bars. Default: True.
        units: Mean and scale of the targets, if `data` holds standardised ones. The scores are then reported in the
            original units. Default: None.

    Returns:
        The scores, posteriors and predictions of all methods. A method that raises an error has the message in its
        row and no posterior.

    Raises:
        InputError: If an argument is invalid. Errors of a method are recorded instead.
    """
    named = _named(methods)
    require(
        hasattr(model, "likelihood"),
        "model",
        "compare",
        "be a Model, with a likelihood",
        type(model).__name__,
    )
    require(
        whole(samples, 1),
        "samples",
        "compare",
        "be an integer, at least 1",
        samples,
    )
    for name, value in (("epochs", epochs), ("steps", steps), ("batch_size", batch_size)):
        ok = value is None or whole(value, 1)
        require(ok, name, "compare", "be an integer, at least 1", value)
    require(epochs is None or steps is None, "steps", "compare", "be left out when epochs are given", steps)
    rows_to_fit, (inputs, targets) = split_rows(data, test, seed, batch_size)

    options: dict[str, Any] = {"epochs": epochs, "steps": steps, "seed": seed}
    options |= {"temperature": temperature, "tempers": tempers, "progress": progress}
    rows, posteriors, predictions, pointwise = [], {}, {}, {}
    scale = units or Units()
    if units is not None:
        numbers = not (model.likelihood.classes or model.likelihood.discrete)
        require(numbers, "units", "compare", "be left out here", f"{model.likelihood} with units")
    restored = scale.restore(targets) if units is not None else targets
    for name, method in named.items():
        row: dict[str, Any] = {"method": name, "error": None}
        rows.append(row)
        try:
            began = time.perf_counter()
            posteriors[name] = posterior = fit(model, rows_to_fit, method, **options)
            row["fit_seconds"] = time.perf_counter() - began
            began = time.perf_counter()
            prediction = posterior.predict(inputs, samples=samples, seed=seed)
            row["predict_seconds"] = time.perf_counter() - began
            if units is not None:
                prediction = prediction.in_units(units)
            row |= _scores(prediction, restored)
        except Exception as error:
            row["error"] = str(error).strip() or type(error).__name__
            continue
        predictions[name] = prediction
        pointwise[name] = -prediction.log_prob(restored).detach().double().cpu()
    about = _about(model, rows_to_fit, inputs, restored, posteriors, options, samples)
    baseline = _baseline(model, rows_to_fit, restored, scale)
    return Comparison(rows, posteriors, predictions, inputs, restored, about, baseline, pointwise)


def table_html(comparison: Comparison) -> str:
    """Write the table as HTML, with the best value of each column in bold and all text escaped."""
    heads = "".join(f'<th scope="col">{html.escape(COLUMN_TITLES[name])}</th>' for name in comparison.columns)
    body = []
    names = [row["method"] for row in comparison.rows]
    for place, cells in enumerate(comparison.cells()):
        name = names[place] if place < len(names) else None
        marks = [name is not None and name in comparison.winners(column) for column in comparison.columns]
        parts = [f'<th scope="row">{html.escape(cells[0])}</th>']
        if name in comparison.failures:
            sentence = html.escape(comparison.failures[str(name)])
            parts.append(f'<td colspan="{len(cells) - 1}" class="failed">failed: {sentence}</td>')
        else:
            for text, best in zip(cells[1:], marks[1:], strict=True):
                inner = f"<strong>{html.escape(text)}</strong>" if best else html.escape(text)
                parts.append(f'<td class="best">{inner}</td>' if best else f"<td>{inner}</td>")
        opening = "<tr>" if name is not None else '<tr class="baseline">'
        body.append(f"{opening}{''.join(parts)}</tr>")
    head = f"<caption>{html.escape(comparison.heading)}</caption>\n<thead><tr>{heads}</tr></thead>"
    return "\n".join(["<table>", head, "<tbody>", *body, "</tbody>", "</table>"])


def counted(count: int, noun: str) -> str:
    """Write a count with its noun in the singular or the plural.

    >>> counted(1, "row"), counted(2, "row")
    ('1 row', '2 rows')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _named(methods: Any) -> dict[str, Any]:
    """Return the methods by name: the dict's names, or class names with the options needed to distinguish them."""
    many = isinstance(methods, Sequence | Mapping) and not isinstance(methods, str)
    require(many, "methods", "compare", "be a list of methods, or a dict from names to methods", methods)
    require(len(methods) > 0, "methods", "compare", "hold at least one method", methods)
    for method in methods.values() if isinstance(methods, Mapping) else methods:
        kind = isinstance(method, type)
        require(not kind, "methods", "compare", "hold methods, not classes: MAP(), not MAP", method)
        require(isinstance(method, Method), "methods", "compare", "hold methods such as MAP() and MeanField()", method)
    if isinstance(methods, Mapping):
        for name in methods:
            require(isinstance(name, str), "methods", "compare", "have text as names", name)
        return dict(methods)
    named: dict[str, Any] = {}
    members: list[Any] = list(methods)
    classes = [type(method).__name__ for method in members]
    for method, name in zip(members, classes, strict=True):
        label = name if classes.count(name) == 1 else repr_of(method).removesuffix("()")
        copies = sum(other == label or other.startswith(f"{label} #") for other in named)
        named[f"{label} #{copies + 1}" if copies else label] = method
    return named


def split_rows(data: Any, test: Any, seed: int, batch_size: int | None = None) -> tuple[Data, tuple[Any, Tensor]]:
    """Split the rows into those to fit and those held out: `test` itself, or a random fraction of `data`."""
    require(data is not None, "data", "compare", "be given", data)
    rows = Data.of(data, batch_size)
    if isinstance(test, tuple | list):
        require(len(test) >= 2, "test", "compare", "be inputs and targets, (X, y)", f"{len(test)} part")
        return rows, _inputs_and_targets(Data.of(tuple(test)))
    fraction = isinstance(test, float) and 0 < test < 1
    require(fraction, "test", "compare", "be a pair (X, y), or a fraction between 0 and 1", test)
    enough = 1 <= round(test * (rows.num_data or 0)) < (rows.num_data or 0)
    require(enough, "test", "compare", f"hold out at least one of the {rows.num_data} rows and leave one", test)
    kept, held = rows.split(test, seed)
    return kept, _inputs_and_targets(held)


def _inputs_and_targets(held: Data) -> tuple[Any, Tensor]:
    *inputs, targets = next(iter(held.blocks(held.num_data or 1)))
    return inputs[0] if len(inputs) == 1 else tuple(inputs), targets


def _scores(prediction: Any, targets: Tensor) -> dict[str, float]:
    """Compute the numbers of one row of the table."""
    losses = -prediction.log_prob(targets).detach().double().cpu()
    quality = "accuracy" if prediction.classes else "rmse"
    return {
        "nll": losses.mean().item(),
        "nll_error": standard_error(losses),
        quality: getattr(evaluate, quality)(prediction, targets),
        "calibration": evaluate.calibration_error(prediction, targets),
    }


def standard_error(values: Tensor) -> float:
    """Return the standard error of the mean of the values; NaN for one value."""
    return (values.std() / math.sqrt(len(values))).item() if len(values) > 1 else math.nan


def _baseline(model: Any, data: Data, targets: Tensor, units: Units) -> dict[str, Any] | None:
    """Score a prediction that ignores the inputs: the frequencies of the targets, or their mean and deviation."""
    if data.tensors is None or targets.ndim != 1:
        return None
    seen = data.tensors[-1].double().cpu()
    targets = targets.cpu()
    row: dict[str, Any] = {"method": "(no inputs)", "error": None}
    if model.likelihood.classes:
        count = int(max(seen.max(), targets.max())) + 1
        frequency = (torch.bincount(seen.long(), minlength=max(2, count)) + 1.0).double()  # one more of each: no zeros
        frequency /= frequency.sum()
        losses = -frequency.log()[targets.long()]
        row["accuracy"] = (targets.long() == frequency.argmax()).double().mean().item()
    elif getattr(model.likelihood, "discrete", False):
        return None
    else:
        seen = units.restore(seen)
        guess = torch.distributions.Normal(seen.mean(), seen.std(unbiased=False).clamp_min(1e-12))
        losses = -guess.log_prob(targets.double())
        row["rmse"] = math.sqrt((targets.double() - seen.mean()).square().mean().item())
    return row | {"nll": losses.mean().item(), "nll_error": standard_error(losses)}


def _about(
    model: Any,
    data: Data,
    inputs: Any,
    targets: Tensor,
    posteriors: dict[str, Any],
    options: dict[str, Any],
    samples: int,
) -> dict[str, str]:
    """Describe the settings of the comparison, as text by name."""
    about = {"rows to fit": str(data.num_data), "rows held out": str(len(targets))}
    if isinstance(inputs, Tensor):
        about["columns"] = " x ".join(map(str, inputs.shape[1:])) or "1"
    about["network"] = str(getattr(model, "net", type(model).__name__))
    about["model"] = str(model)
    lengths = {name: max(map(len, one.history.values()), default=0) for name, one in posteriors.items()}
    about["steps"] = ", ".join(f"{name}: {steps}" for name, steps in lengths.items())
    about["batch size"] = str(data.batch_size)
    about["temperature"] = f"{options['temperature']:g} (tempers the {options['tempers']})"
    about["samples of the posterior"] = str(samples)
    about["seed"] = str(options["seed"])
    about["versions"] = f"priory {_version('priory')}, torch {torch.__version__}, Python {platform.python_version()}"
    return about


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(from source)"


def _column_text(name: str, values: list[Any]) -> list[str]:
    """Write one column as text with the same number of decimals in every row; empty where there is no value."""
    if name == "method":
        return [str(value) for value in values]
    decimals = 2 if name == "fit_seconds" else 3
    sizes = sorted(abs(v) for v in values if v is not None and math.isfinite(v) and v != 0)
    if name == "rmse" and sizes:  # in the units of the targets, so four digits rather than three decimals
        decimals = min(8, max(0, 3 - math.floor(math.log10(sizes[len(sizes) // 2]))))
    return ["" if v is None else f"{v:.{decimals}f}" if abs(v) < 1e7 else f"{v:.2e}" for v in values]


def _known(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value
