"""The picture of the README can be made again, and is the one that its script makes."""

import importlib.util
import struct
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("readme_picture", ROOT / "examples" / "readme_picture.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def size(path: Path) -> tuple[int, int]:
    """Width and height as a PNG's header states them."""
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", header[16:24])


def test_the_script_draws_the_picture(example: ModuleType, tmp_path: Path) -> None:
    path = example.draw(tmp_path / "picture.png", steps=30)
    assert size(path) == (1400, 600)


def test_the_same_script_draws_the_same_picture(example: ModuleType, tmp_path: Path) -> None:
    first, second = (example.draw(tmp_path / name, steps=5) for name in ("first.png", "second.png"))
    assert first.read_bytes() == second.read_bytes()


def test_the_picture_in_the_docs_exists_and_is_small(example: ModuleType) -> None:
    assert size(example.PICTURE) == (1400, 600)
    assert example.PICTURE.stat().st_size < 150_000
