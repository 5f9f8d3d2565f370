"""Reads tables for the command line: a data set that ships with scikit-learn, or a CSV file, as named tensors.

`DataTable.notes` describes every change made to the data, one sentence each.
"""

from __future__ import annotations

import csv
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from priory.core.errors import InputError, extra, require
from priory.core.tables import counted

SHIPPED_DATA = ("diabetes", "breast_cancer", "wine", "iris", "digits")
MAX_CLASSES = 10  # integers with more distinct values than this are a regression target
MAX_CATEGORIES = 50  # a text column with more distinct values than this is left out, whatever the number of rows
DATE_FORMATS = {  # with a description of each; the first format that parses every row is used
    "ISO8601": "year-month-day",
    "%Y/%m/%d": "year/month/day",
    "%d.%m.%Y": "day.month.year",
    "%m/%d/%Y": "month/day/year",
    "%d/%m/%Y": "day/month/year",
    "%m/%d/%y": "month/day/year",
    "%d/%m/%y": "day/month/year",
    "%d-%m-%Y": "day-month-year",
    "%d %b %Y": "day month year",
    "%d %B %Y": "day month year",
    "%d-%b-%Y": "day-month-year",
}


@dataclass(frozen=True)
class DataTable:
    """A data set: inputs (N, D) and targets (N,), which are real numbers or class indices.

    Attributes:
        name: Name of the data set or file.
        x: Inputs, (N, D).
        y: Targets, (N,).
        columns: Names of the D inputs.
        target: Name of the target column.
        classes: Names of the classes, or None for regression.
        notes: Changes made to the data while reading it, one sentence each.
    """

    name: str
    x: Tensor
    y: Tensor
    columns: list[str]
    target: str
    classes: list[str] | None
    notes: list[str]


def read_table(source: str, target: str | None = None, task: str = "auto") -> DataTable:
    """Read a data set by name or a CSV file by path.

    Args:
        source: One of `SHIPPED_DATA`, or the path of a CSV file.
        target: Name of the target column. Default: the last column.
        task: "regression", "classification" or "auto", which decides by the target.

    Returns:
        The table, as tensors.

    Raises:
        InputError: If the file cannot be read or has no usable rows, columns or targets.
    """
    require(
        task in ("auto", "regression", "classification"),
        "task",
        "compare",
        "be auto, regression or classification",
        task,
    )
    notes: list[str] = []
    if source in SHIPPED_DATA and not Path(source).is_file():
        frame, default = _shipped(source)
    else:
        frame, default = _csv(source, notes), None
    target = target or default or str(frame.columns[-1])
    known = ", ".join(map(str, frame.columns[:12])) + (", ..." if len(frame.columns) > 12 else "")
    require(target in frame.columns, "target", "compare", f"be a column of {source} ({known})", repr(target))
    require(
        frame.shape[1] >= 2,
        "data",
        "compare",
        "have a target and at least one other column",
        f"{source} with one column",
    )
    frame = _complete_rows(frame, source, notes)
    y, classes = _targets(frame[target], task, target, notes)
    x, columns = _inputs(frame.drop(columns=[target]), source, notes)
    return DataTable(Path(source).name, x, y, columns, target, classes, notes)


def _shipped(name: str) -> tuple[Any, str]:
    """Load a data set that ships with scikit-learn, as a frame with named classes."""
    datasets = extra("sklearn.datasets", "sklearn")
    bunch = getattr(datasets, f"load_{name}")(as_frame=True)
    frame = bunch.frame
    if "target_names" in bunch and name not in ("diabetes", "digits"):
        frame["target"] = [str(bunch.target_names[k]) for k in frame["target"]]
    return frame, "target"


def _csv(source: str, notes: list[str]) -> Any:
    """Read a CSV file as a frame; semicolons, tabs, decimal commas and a missing header line are handled."""
    pandas = extra("pandas", "cli")
    path = Path(source)
    shipped = ", ".join(SHIPPED_DATA)
    require(path.is_file(), "data", "compare", f"be the path of a CSV file, or one of {shipped}", repr(source))
    text = _text(path, notes)
    if not text.strip():
        raise InputError(f"The file {source} is empty; it must have a line of column names and rows below it.")
    separator = _separator(text)
    names = _names(text, separator, source)
    header = None if _all_numbers(names) else 0
    names = _unique([""] * len(names) if header is None else names, notes)
    options: dict[str, Any] = {"sep": separator, "header": header, "names": names}
    options |= {"skipinitialspace": True, "low_memory": False}
    if header is None:
        notes.append(f"The first line holds numbers, so it was read as a row; the columns are {_ends(names)}.")
    try:
        frame = pandas.read_csv(io.StringIO(text), **options)
        if separator != ",":
            _decimal_commas(frame, pandas.read_csv(io.StringIO(text), decimal=",", **options), notes)
    except pandas.errors.ParserError as error:
        reason = str(error).split("C error:")[-1].strip().rstrip(".")
        reason = "a quotation mark is opened and never closed" if "EOF inside string" in reason else reason
        raise InputError(f"The file {source} can't be read as CSV: {reason}.") from error
    require(len(frame) > 0, "data", "compare", "have rows below its line of column names", f"{source} with no rows")
    return frame


def _text(path: Path, notes: list[str]) -> str:
    """The text of a file in UTF-8, or else in Windows-1252, which contains the letters of Latin-1."""
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
    try:
        text = content.decode("cp1252")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text or content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise InputError(f"The file {path} is not text in UTF-8 (see line {line}); save it as UTF-8.")
    notes.append(f"Line {line} is not UTF-8, so the file was read as Latin-1; if names look wrong, save it as UTF-8.")
    return text


def _separator(text: str) -> str:
    """The separator: a semicolon or tab if each of the first lines has one outside quotation marks, else a comma."""
    lines = [re.sub(r'"[^"]*"', "", line) for line in text[:100_000].splitlines() if line.strip()][:5]
    return next((mark for mark in (";", "\t") if all(mark in line for line in lines)), ",")


def _names(text: str, separator: str, source: str) -> list[str]:
    """The values of the first line, after checking that no other line has more values."""
    names: list[str] = []
    reader = csv.reader(io.StringIO(text), delimiter=separator, skipinitialspace=True)
    try:
        for row in filter(any, reader):
            names = names or [name.strip() for name in row]
            if len(row) > len(names):
                raise InputError(
                    f"The file {source} has {counted(len(row), 'value')} in line {reader.line_num}, "
                    f"but {counted(len(names), 'column')} in its first line."
                )
    except csv.Error as error:
        raise InputError(f"The file {source} can't be read as CSV: {error} (see line {reader.line_num}).") from error
    return names


def _all_numbers(names: list[str]) -> bool:
    """Whether the first line is a row of data; 0, 1, 2, ... are taken as generated column names."""
    given = [name for name in names if name]
    if given == [str(place) for place in range(len(given))]:
        return False
    return all(re.fullmatch(r"[-+]?(\d+[.,]?\d*|[.,]\d+)([eE][-+]?\d+)?", name) for name in given)


def _unique(names: list[str], notes: list[str]) -> list[str]:
    """Unique column names: unnamed and repeated columns get a number."""
    labels: list[str] = []
    for place, name in enumerate(names):
        label, copies = name or f"column_{place + 1}", 1
        while label in labels:
            copies += 1
            label = f"{name}_{copies}"
        if copies > 1:
            notes.append(f"The column name '{name}' occurs more than once; column {place + 1} was renamed '{label}'.")
        labels.append(label)
    return labels


def _decimal_commas(frame: Any, other: Any, notes: list[str]) -> None:
    """Replace, in place, the columns that are numeric only with a decimal comma."""
    numeric = extra("pandas", "cli").api.types.is_numeric_dtype
    found = [name for name in frame.columns if numeric(other[name]) and not numeric(frame[name])]
    for name in found:
        frame[name] = other[name]
    if found:
        notes.append(f"{counted(len(found), 'column')} with decimal commas: {_ends([str(name) for name in found])}.")


def _ends(names: list[str]) -> str:
    """The names, or the first and last of more than three."""
    return ", ".join(names if len(names) <= 3 else [names[0], "...", names[-1]])


def _complete_rows(frame: Any, source: str, notes: list[str]) -> Any:
    """The rows without missing or infinite values."""
    complete = frame.replace([float("inf"), float("-inf")], float("nan")).dropna()
    dropped = len(frame) - len(complete)
    if dropped:
        worst = str(frame.isna().sum().idxmax())
        require(
            len(complete) > 0,
            "data",
            "compare",
            f"have rows without missing values (see column '{worst}')",
            source,
        )
        verbs = ("has", "was") if dropped == 1 else ("have", "were")
        notes.append(f"{dropped} of {len(frame)} rows {verbs[0]} missing or infinite values and {verbs[1]} left out.")
    require(
        len(complete) >= 5,
        "data",
        "compare",
        "have at least 5 complete rows",
        f"{source} with {len(complete)}",
    )
    return complete


def _targets(column: Any, task: str, name: str, notes: list[str]) -> tuple[Tensor, list[str] | None]:
    """Real targets, or class indices with the names of the classes."""
    types = extra("pandas", "cli").api.types
    numeric = types.is_numeric_dtype(column) and not types.is_bool_dtype(column)
    values, repeats = column.nunique(), len(column) // 2
    require(values >= 2, "target", "compare", "take at least two values", f"the constant column '{name}'")
    if task == "auto":
        counts = numeric and values <= min(MAX_CLASSES, repeats) and bool((column == column.round()).all())
        task = "classification" if counts or not numeric else "regression"
        if counts:
            notes.append(
                f"'{name}' holds {values} integers, read as classes (use --task regression to read them as numbers)."
            )
    if task == "regression":
        require(
            numeric,
            "target",
            "compare",
            "be a column of numbers for regression",
            f"'{name}', a column of text",
        )
        return torch.tensor(column.astype(float).tolist(), dtype=torch.float64), None
    require(
        values <= min(repeats, max(MAX_CLASSES, len(column) // 5)),
        "target",
        "compare",
        "repeat its classes for classification",
        f"'{name}' with {values} different values in {len(column)} rows",
    )
    classes = sorted(column.unique().tolist())
    number = {value: place for place, value in enumerate(classes)}
    return torch.tensor([number[value] for value in column.tolist()]), [str(value) for value in classes]


def _inputs(frame: Any, source: str, notes: list[str]) -> tuple[Tensor, list[str]]:
    """The inputs as numbers: dates as days, and text as one column of 0 and 1 per distinct value."""
    pandas = extra("pandas", "cli")
    few = min(max(10, len(frame) // 10), len(frame) // 2, MAX_CATEGORIES)
    parts = []
    for name in frame.columns:
        column = frame[name]
        if column.nunique() < 2:
            notes.append(f"The column '{name}' is constant and was left out.")
        elif pandas.api.types.is_numeric_dtype(column):
            parts.append(column.astype(float))
        elif (days := _days(column, notes)) is not None:
            parts.append(days)
        elif column.nunique() > few:
            notes.append(f"The column '{name}' holds {column.nunique()} distinct texts and was left out.")
        else:
            coded = pandas.get_dummies(column.astype(str), prefix=name, prefix_sep="=", dtype=float)
            # With two distinct values the second column is determined by the first.
            parts.append(coded.iloc[:, 1:] if coded.shape[1] == 2 else coded)
            became = counted(parts[-1].shape[1], "column")
            notes.append(f"The column '{name}' holds text and was encoded as {became} of 0 and 1.")
    require(len(parts) > 0, "data", "compare", "have at least one column that varies beside the target", source)
    wide = pandas.concat(parts, axis=1)
    return torch.tensor(wide.to_numpy().tolist(), dtype=torch.float64), [str(name) for name in wide.columns]


def _days(column: Any, notes: list[str]) -> Any:
    """A column of dates as days since the first date; None for other text."""
    pandas = extra("pandas", "cli")
    for form, words in DATE_FORMATS.items():
        when = pandas.to_datetime(column.astype(str), format=form, errors="coerce", utc=True)
        if when.notna().all():
            first = when.min()
            notes.append(
                f"The column '{column.name}' holds dates ({words}) and was converted to days since {first:%Y-%m-%d}."
            )
            return ((when - first).dt.total_seconds() / 86_400).rename(column.name)
    return None
