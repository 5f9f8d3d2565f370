"""The code of every page runs, from the first block to the last, in an empty folder."""

import re
from pathlib import Path

import pytest

import priory as pr

DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [page for page in sorted(DOCS.glob("*.md")) if BLOCK.search(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_the_page_runs_in_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    names: dict[str, object] = {"__name__": "__page__"}
    for block in BLOCK.finditer(text):
        above = text.count("\n", 0, block.start(1))  # so that a traceback shows the page's own line
        exec(compile("\n" * above + block.group(1), str(page), "exec"), names)


def test_every_public_name_stands_in_the_reference():
    reference = (DOCS / "api.md").read_text(encoding="utf-8")
    assert [name for name in pr.__all__ if name != "__version__" and not re.search(rf"\b{name}\b", reference)] == []


def test_there_are_pages_with_code():
    assert {"index.md", "tutorial.md", "examples.md"} <= {page.name for page in PAGES}
