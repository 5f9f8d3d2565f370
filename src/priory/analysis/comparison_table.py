"""The table of a comparison: scores of methods on the same held-out rows, as text, HTML or a report."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from priory.core.errors import require
from priory.core.tables import counted, text_table

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
    "status": "status",
}
TEXT_COLUMNS = {"method", "status"}


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`: print it, display it in a notebook, or write it as a report.

    Attributes:
        rows: One dict per method with `method`, `nll` (nats per row) and its standard error `nll_error`, `rmse` or
            `accuracy`, `calibration`, `fit_seconds`, `predict_seconds`, `status` (the name of the posterior's status)
            and `error` (None, or the message of the error that the method raised).
        posteriors: The fitted posteriors by the method's name.
        predictions: The predictions of the held-out rows by the method's name; empty for a density.
        inputs: The held-out inputs; for a density the held-out rows.
        targets: The held-out targets; for a density the last part of the held-out rows.
        about: The settings of the comparison, as text by name.
        baseline: The scores of a prediction that ignores the inputs, as a dict like those of `rows`; None if there is
            no such prediction for the targets.
        pointwise: The negative log predictive density of each held-out row, (n,), by the method's name.
        predicts: Whether there are predictions of targets, with RMSE or accuracy and calibration; not for a density.
    """

    rows: list[dict[str, Any]]
    posteriors: dict[str, Any]
    predictions: dict[str, Any]
    inputs: Any
    targets: Tensor
    about: dict[str, str]
    baseline: dict[str, Any] | None = None
    pointwise: dict[str, Tensor] = field(default_factory=dict, repr=False)
    predicts: bool = True

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
            return f"{_join_names(same)} give the same predictions: none is better than another."
        second = min(others, key=lambda name: self.pointwise[name].mean().item())
        gap, error = self.difference(second, best)
        best, has = _join_names(same), "has" if len(same) == 1 else "have"
        if math.isnan(error):
            return (
                f"{best} {has} the lowest NLL, {gap:.3f} nats below {second}: one held-out row can't tell them apart."
            )
        clear = "more than these rows' noise" if gap > 2 * error else "too close to distinguish on these rows"
        places = max(3, 1 - math.floor(math.log10(error))) if error > 0 else 3  # never 0.000 ± 0.000
        text = f"{gap:.{places}f} ± {error:.{places}f}"
        return f"{best} {has} the lowest NLL, {text} nats per row below {second}: {clear}."

    @property
    def worse_than_baseline(self) -> str:
        """One sentence that names the methods with a higher NLL than the baseline; empty if there are none."""
        if self.baseline is None:
            return ""
        limit = self.baseline["nll"] + SAME_PREDICTIONS_NATS
        names = [row["method"] for row in self.rows if row["error"] is None and not row["nll"] <= limit]
        if not names:
            return ""
        have, their = ("have", "their") if len(names) > 1 else ("has", "its")
        return (
            f"{_join_names(names)} {have} a higher NLL than {self.baseline['method']}, a prediction that ignores the "
            f"inputs: see {their} status, and don't use the predictions."
        )

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
        if not self.predicts:
            return ["method", "nll", "fit_seconds", "predict_seconds", "status"]
        quality = "accuracy" if any("accuracy" in row for row in self.rows) else "rmse"
        return ["method", "nll", quality, "calibration", "fit_seconds", "predict_seconds", "status"]

    def winners(self, column: str) -> set[str]:
        """Return the names of the methods with the best value of a column.

        The set is empty if all values are equal, or if fewer than two methods were scored. The shortest time wins only
        if it is at least 0.1 seconds and every other time is more than 10 % longer.

        Args:
            column: One of `columns`.

        Returns:
            The names of the best methods.
        """
        if column in TEXT_COLUMNS:
            return set()
        values = {row["method"]: row[column] for row in self.rows if row["error"] is None}
        if len(values) < 2:
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
        sentences = [self.verdict, *([self.worse_than_baseline] if self.worse_than_baseline else [])]
        return "\n".join([self.heading, "", *lines, "", *notes, legend, *sentences])

    def _repr_html_(self) -> str:
        return table_html(self)


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


def _join_names(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def standard_error(values: Tensor) -> float:
    """Return the standard error of the mean of the values; NaN for one value."""
    return (values.std() / math.sqrt(len(values))).item() if len(values) > 1 else math.nan


def _column_text(name: str, values: list[Any]) -> list[str]:
    """Write one column as text with the same number of decimals in every row; empty where there is no value."""
    if name in TEXT_COLUMNS:
        return ["" if value is None else str(value).replace("_", " ") for value in values]
    decimals = 2 if name == "fit_seconds" else 3
    sizes = sorted(abs(v) for v in values if v is not None and math.isfinite(v) and v != 0)
    if name == "rmse" and sizes:  # in the units of the targets, so four digits rather than three decimals
        decimals = min(8, max(0, 3 - math.floor(math.log10(sizes[len(sizes) // 2]))))
    return ["" if v is None else f"{v:.{decimals}f}" if abs(v) < 1e7 else f"{v:.2e}" for v in values]


def _known(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value
