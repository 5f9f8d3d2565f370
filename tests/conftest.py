"""One thread, reproducible property tests, and the reference data that may lie beside the project."""

from pathlib import Path

import hypothesis
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
SHARED_DATA = ROOT.parent / "shared" / "data"
MISSING = "needs the reference data in the folder shared/data beside the project"

torch.set_num_threads(1)
hypothesis.settings.register_profile("priory", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("priory")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if SHARED_DATA.is_dir():
        return
    for item in items:
        if item.get_closest_marker("reference"):
            item.add_marker(pytest.mark.skip(reason=MISSING))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of reference data; a test that asks for it carries the `reference` marker."""
    if not SHARED_DATA.is_dir():
        pytest.skip(MISSING)
    return SHARED_DATA
