"""The benchmark's protocol on one standard split, against the published row that it must beat."""

import importlib.util
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "uci.py"


@pytest.mark.reference
@pytest.mark.parametrize(("name", "published", "epochs"), [("concrete", -3.39, 60), ("yacht", -3.43, 200)])
def test_mean_field_is_above_the_published_variational_row_on_a_standard_split(
    name: str, published: float, epochs: int, shared_data: Path
) -> None:
    """A third of the benchmark's epochs: the margin over 20 splits at full length is 0.16 and 2.2 nats."""
    spec = importlib.util.spec_from_file_location("uci", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    uci = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(uci)
    _, log_likelihood = uci.one_split(shared_data, name, 0, "MeanField", epochs, 64)
    assert log_likelihood > published
