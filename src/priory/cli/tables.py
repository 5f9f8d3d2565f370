"""Tables for the command line: a data set that ships with scikit-learn, or a CSV file, as tensors with names.

Everything that was done to the data on the way is kept as a sentence in `notes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from priory.errors import InputError, extra, require

SHIPPED = ("diabetes", "breast_cancer", "wine", "iris", "digits")
MOST_CLASSES = 10  # whole numbers with more values than this are read as amounts
MOST_TEXTS = 50  # a column of more texts than this, or than half the rows, is a name or a date rather than a kind


@dataclass(frozen=True)
class Table:
    """Inputs (N, D) and targets (N,), real numbers or class numbers, with their names."""

    name: str
    x: Tensor
    y: Tensor
    columns: list[str]
    target: str
    classes: list[str] | None
    notes: list[str]


def read_table(source: str, target: str | None = None, task: str = "auto") -> Table:
    """Read a data set by its name or a CSV file by its path; the target is the last column unless named."""
    require(
        task in ("auto", "regression", "classification"),
        "task",
        "compare",
        "be auto, regression or classification",
        task,
    )
    if source in SHIPPED and not Path(source).is_file():
        frame, default = _shipped(source)
    else:
        frame, default = _csv(source), None
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
    notes: list[str] = []
    frame = _complete_rows(frame, source, notes)
    y, classes = _targets(frame[target], task, target, notes)
    x, columns = _inputs(frame.drop(columns=[target]), source, notes)
    return Table(Path(source).name, x, y, columns, target, classes, notes)


def _shipped(name: str) -> tuple[Any, str]:
    """Load a data set that ships with scikit-learn, as a frame with named classes."""
    datasets = extra("sklearn.datasets", "sklearn")
    bunch = getattr(datasets, f"load_{name}")(as_frame=True)
    frame = bunch.frame
    if "target_names" in bunch and name not in ("diabetes", "digits"):
        frame["target"] = [str(bunch.target_names[k]) for k in frame["target"]]
    return frame, "target"


def _csv(source: str) -> Any:
    """Read a CSV file as a frame; semicolons and tabs are understood."""
    pandas = extra("pandas", "cli")
    path = Path(source)
    names = ", ".join(SHIPPED)
    require(path.is_file(), "data", "compare", f"be the path of a CSV file, or one of {names}", repr(source))
    try:
        frame = pandas.read_csv(path, skipinitialspace=True)
        for separator in (";", "\t"):
            if frame.shape[1] == 1 and separator in str(frame.columns[0]):
                frame = pandas.read_csv(path, sep=separator, skipinitialspace=True)
    except pandas.errors.EmptyDataError as error:
        raise InputError(
            f"The file {source} is empty: it must have a line of column names and rows below it."
        ) from error
    except (pandas.errors.ParserError, UnicodeDecodeError) as error:
        raise InputError(f"The file {source} can't be read as CSV: {str(error).strip()}.") from error
    require(
        len(frame) > 0,
        "data",
        "compare",
        "have rows below its line of column names",
        f"{source} with no rows",
    )
    frame.columns = [str(name).strip() for name in frame.columns]
    return frame


def _complete_rows(frame: Any, source: str, notes: list[str]) -> Any:
    """Rows without missing or infinite values."""
    complete = frame.replace([float("inf"), float("-inf")], float("nan")).dropna()
    dropped = len(frame) - len(complete)
    if dropped:
        worst = str(frame.isna().sum().idxmax())
        require(
            len(complete) > 0,
            "data",
            "compare",
            f"have rows with no value missing (see column '{worst}')",
            source,
        )
        notes.append(f"{dropped} of {len(frame)} rows have missing or infinite values and were left out.")
    require(
        len(complete) >= 5,
        "data",
        "compare",
        "have at least 5 complete rows",
        f"{source} with {len(complete)}",
    )
    return complete


def _targets(column: Any, task: str, name: str, notes: list[str]) -> tuple[Tensor, list[str] | None]:
    """Real targets, or class numbers with the classes' names."""
    types = extra("pandas", "cli").api.types
    numeric = types.is_numeric_dtype(column) and not types.is_bool_dtype(column)
    values = column.nunique()
    require(values >= 2, "target", "compare", "take at least two values", f"the constant column '{name}'")
    if task == "auto":
        counts = numeric and values <= MOST_CLASSES and bool((column == column.round()).all())
        task = "classification" if counts or not numeric else "regression"
        if counts:
            notes.append(f"'{name}' holds {values} whole numbers, read as classes (amounts: --task regression).")
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
        not numeric or values <= max(MOST_CLASSES, len(column) // 5),
        "target",
        "compare",
        "repeat its classes for classification",
        f"'{name}' with {values} different values in {len(column)} rows",
    )
    classes = sorted(column.unique().tolist())
    number = {value: place for place, value in enumerate(classes)}
    return torch.tensor([number[value] for value in column.tolist()]), [str(value) for value in classes]


def _inputs(frame: Any, source: str, notes: list[str]) -> tuple[Tensor, list[str]]:
    """Columns of numbers as they are, columns of text as one column of 0 and 1 for each text."""
    pandas = extra("pandas", "cli")
    parts = []
    for name in frame.columns:
        column = frame[name]
        if column.nunique() < 2:
            notes.append(f"The column '{name}' is constant and was left out.")
        elif pandas.api.types.is_numeric_dtype(column):
            parts.append(column.astype(float))
        elif column.nunique() > min(MOST_TEXTS, len(column) // 2):
            notes.append(f"The column '{name}' holds {column.nunique()} different texts and was left out.")
        else:
            coded = pandas.get_dummies(column.astype(str), prefix=name, prefix_sep="=", dtype=float)
            # One kind of two is the other's absence: a second column would say nothing new.
            parts.append(coded.iloc[:, 1:] if coded.shape[1] == 2 else coded)
            notes.append(f"The column '{name}' holds text and became {parts[-1].shape[1]} column(s) of 0 and 1.")
    require(len(parts) > 0, "data", "compare", "have at least one column that varies beside the target", source)
    wide = pandas.concat(parts, axis=1)
    return torch.tensor(wide.to_numpy().tolist(), dtype=torch.float64), [str(name) for name in wide.columns]
