"""The page of worked examples names every script that there is, and shows pictures that are there and small."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
SCRIPTS = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
# scripts that other pages tell of
APART = (
    "drawing",
    "new_point_method",
    "new_sampler",
    "new_variational_method",
    "readme_picture",
)
PICTURES = re.findall(r"\]\(images/(\w+\.png)\)", PAGE)


def test_every_script_is_on_the_page_and_has_a_test():
    named = set(re.findall(r"^\| `examples/(\w+)\.py`", PAGE, re.MULTILINE))
    assert named == set(SCRIPTS) - set(APART)
    assert all((ROOT / "tests" / "examples" / f"test_{name}.py").is_file() for name in named)


@pytest.mark.parametrize("name", PICTURES)
def test_every_picture_of_the_page_exists_and_is_small(name: str):
    path = ROOT / "docs" / "images" / name
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert path.stat().st_size < 80_000
