"""Doctests see the modules that everything else sees."""

import importlib
from pathlib import Path


def pytest_collect_file(file_path: Path) -> None:
    """Import a module's package by its name first: pytest, by the path alone, would execute the module twice."""
    if file_path.suffix == ".py" and file_path.name != "conftest.py":
        importlib.import_module(".".join(file_path.parent.relative_to(Path(__file__).parent).parts))
