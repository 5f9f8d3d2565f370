"""The example of CONTRIBUTING.md keeps the contract that it teaches."""

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

import priory as pr
from priory.testing import LinearRegression
from priory.testing.contract import CLAUSES

PATH = Path(__file__).resolve().parents[2] / "examples" / "new_method.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("new_method", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["new_method"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("clause", CLAUSES, ids=lambda clause: clause.__name__)
def test_the_example_keeps_the_contract(clause: Callable[..., None], example: ModuleType):
    clause(example.SGDPoint())


def test_one_step_is_the_gradient_of_the_log_joint_times_the_rate_over_n(example: ModuleType):
    exact = LinearRegression.make(0)
    method = example.SGDPoint(learning_rate=0.2, decay=0.0)
    posterior = pr.fit(exact.model(), exact.data, method, steps=1, progress=False)
    gradient = exact.precision @ exact.posterior.mean  # d log p(w, D) / dw at w = 0
    found = torch.cat([posterior.mean["weight"].reshape(-1), posterior.mean["bias"].reshape(-1)])
    torch.testing.assert_close(found, 0.2 / len(exact.y) * gradient, rtol=0, atol=1e-12)


def test_the_example_runs_and_finds_the_mode(example: ModuleType, capsys: pytest.CaptureFixture[str]):
    example.main()
    found, exact = (
        [float(n) for n in re.findall(r"-?\d+\.\d+", line)] for line in capsys.readouterr().out.splitlines()
    )
    assert found == pytest.approx(exact, abs=0.01)
