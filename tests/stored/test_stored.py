"""Files that version 0.1.0 wrote are read for good: each loads, and gives what it gave when it was written.

Numbers that a file holds as they are must come back as they are. What is computed from them (products, factorisations,
exponentials) may differ by rounding from one processor to another, and by no more.
"""

import importlib.util
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import priory as pr

spec = importlib.util.spec_from_file_location("stored_posteriors", Path(__file__).with_name("make.py"))
assert spec is not None
assert spec.loader is not None
make = sys.modules["stored_posteriors"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make)

FILES = sorted(Path(__file__).parent.glob("*.priory"))
ROWS, CASES = make.stored()
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-6}
VECTORISED = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")  # as where the files were written
KINDS = {
    "amortised",
    "chains",
    "conjugate",
    "diagonal_gaussian",
    "draws",
    "laplace",
    "last_layer",
    "latent",
    "masked",
    "mixture",
    "point",
    "prior_function",
    "variational",
}


def contents(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a file and its JSON, read without the library."""
    with safe_open(str(path), framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        return tensors, json.loads(file.metadata()["meta"])


def numbers(meta: Any) -> list[float]:
    """All numbers in a file's JSON."""
    if isinstance(meta, dict):
        meta = list(meta.values())
    if isinstance(meta, list):
        return [number for part in meta for number in numbers(part)]
    return [float(meta)] if isinstance(meta, (int, float)) else []


def part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, t in wanted.items():
        torch.testing.assert_close(found[name], t, rtol=0, atol=0, equal_nan=True)


def test_every_kind_of_posterior_and_every_case_has_its_file() -> None:
    assert {path.stem for path in FILES} == set(make.CASES) == set(ROWS) == set(CASES)
    assert {contents(path)[1]["kind"] for path in FILES} == KINDS


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_stored_posterior_loads_and_gives_what_it_gave(path: Path) -> None:
    name = path.stem
    case, said = make.CASES[name], CASES[name]
    with warnings.catch_warnings():
        if not VECTORISED:  # a prior is recognised by its values, bit for bit, which other instructions round otherwise
            warnings.filterwarnings("ignore", ".* was fitted with another prior", pr.PrioryWarning)
        posterior = pr.load(path, case.model())
    tensors, meta = contents(path)

    assert make.about(posterior) == said["about"]
    assert_same(posterior.history, part(tensors, "history."))
    assert_same(posterior.buffers, part(tensors, "buffer."))

    wanted, found = make.unpacked(ROWS[name], said["holds"]), make.observed(posterior, case)
    assert wanted.keys() <= found.keys()
    kept = [torch.tensor(numbers(meta), dtype=torch.float64), *tensors.values()]
    held = torch.cat([t.double().reshape(-1) for t in kept])
    tolerance = max(ROUNDING.get(t.dtype, 0.0) for t in wanted.values())
    for key, value in wanted.items():
        exact = torch.isin(value.double(), held)
        assert torch.equal(found[key][exact], value[exact]), key
        message = lambda text, key=key: f"{key}: {text}"  # noqa: E731
        torch.testing.assert_close(found[key], value, rtol=tolerance, atol=tolerance, equal_nan=True, msg=message)
