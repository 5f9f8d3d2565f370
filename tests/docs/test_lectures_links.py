"""Every row of docs/lectures.md and docs/errata.md leads somewhere: names import, files and tests exist."""

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def rows(page: str) -> list[dict[str, str]]:
    """The rows of every table of a page, by the names of their columns."""
    found: list[dict[str, str]] = []
    header: list[str] = []
    for line in (DOCS / page).read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            header = []
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not header:
            header = cells
        elif set(line) - set("| -"):
            assert len(cells) == len(header), f"{page}: {line}"
            found.append(dict(zip(header, cells, strict=True)))
    return found


LECTURES, ERRATA = rows("lectures.md"), rows("errata.md")
TODAY = [row for row in LECTURES if not row["function"].startswith("planned")]
PLANNED = [row for row in LECTURES if row["function"].startswith("planned")]


def label(row: dict[str, str]) -> str:
    return row["where"].replace(" ", "_")


def code(cell: str) -> str:
    """The one name in backticks that a cell holds."""
    match = re.fullmatch(r"`([^`]+)`", cell)
    assert match, f"not one name in backticks: {cell!r}"
    return match.group(1)


def resolve(dotted: str) -> object:
    """The object of a dotted name: the longest prefix that imports as a module, then attributes."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for name in parts[cut:]:
            found = getattr(found, name)
        return found
    raise ModuleNotFoundError(dotted)


@cache
def names_in(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def assert_test_exists(identifier: str) -> None:
    path, _, name = identifier.partition("::")
    assert name.startswith("test_"), identifier
    assert name in names_in(path), identifier


@pytest.mark.parametrize("row", TODAY, ids=label)
def test_a_row_of_the_lectures_has_a_name_an_example_and_a_test_that_exist(row: dict[str, str]):
    name = code(row["function"])
    assert name.split(".")[0] == "priory"
    resolve(name)
    link = re.fullmatch(r"\[[^\]]+\]\(([^)]+)\)", row["example"])
    assert link, row["example"]
    assert (DOCS / link.group(1)).is_file()
    assert_test_exists(code(row["test"]))


@pytest.mark.parametrize("row", PLANNED, ids=label)
def test_a_planned_row_names_what_is_planned_and_claims_nothing(row: dict[str, str]):
    match = re.fullmatch(r"planned: `([\w.]+)`", row["function"])
    assert match, row["function"]
    assert row["example"] == row["test"] == ""


@pytest.mark.parametrize("row", ERRATA, ids=label)
def test_a_row_of_the_errata_has_a_test_that_exists(row: dict[str, str]):
    assert all(row.values()), row
    assert_test_exists(code(row["test"]))


def test_every_test_of_the_lectures_and_of_the_errata_is_named_by_a_row():
    named = {row["test"].strip("`") for row in LECTURES + ERRATA}
    for path in ("tests/docs/test_lectures.py", "tests/docs/test_errata.py"):
        for name in names_in(path):
            assert not name.startswith("test_") or f"{path}::{name}" in named, name


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_every_link_between_the_pages_leads_to_a_file(page: Path):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target
