"""Every expression and command in the tables of README.md runs as it is written, on small data."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

import priory as pr
from priory.cli.app import app
from priory.posteriors.base import Posterior

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
CODE_CELLS = [code for line in README.splitlines() if line.startswith("|") for code in re.findall(r"`([^`]+)`", line)]
EXPRESSIONS = [code for code in CODE_CELLS if code.startswith("pr.")]
COMMANDS = [code for code in CODE_CELLS if code.startswith("priory ")]


def names_of_the_readme(expression: str) -> dict[str, object]:
    """Return the variables that the expressions leave to the reader: `net`, `X`, `y` and `loader`."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(24, 2, generator=generator)
    classes = (X[:, 0] > 0).long()
    num_outputs = 2 if "Categorical" in expression else 1
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, num_outputs))
    loader = DataLoader(TensorDataset(X, classes), batch_size=8)
    return {"pr": pr, "net": net, "X": X, "y": X[:, 0] - X[:, 1], "loader": loader}


@pytest.mark.parametrize("expression", EXPRESSIONS)
# The network is not trained here, so Laplace warns that it isn't at a mode.
@pytest.mark.filterwarnings("ignore:The gradient of the log joint:priory.core.errors.PrioryWarning")
def test_an_expression_of_the_tables_evaluates(expression: str) -> None:
    result = eval(expression, names_of_the_readme(expression))
    assert result is not None
    if expression.startswith("pr.fit("):
        assert isinstance(result, Posterior)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_tables_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"{k},{(7 * k) % 11},{3 * k + (5 * k) % 7 + 0.5}\n" for k in range(40))
    Path("measurements.csv").write_text("cement,water,strength\n" + rows, encoding="utf-8")
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output
    assert Path("report.html").is_file()


def test_every_method_of_the_table_of_methods_exists() -> None:
    table = README.split("## Methods")[1].split("\n## ")[0]
    first_cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    names = [name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)]
    assert len(names) >= 20
    assert [name for name in names if not hasattr(pr, name)] == []


def test_the_tables_hold_expressions_and_a_command() -> None:
    assert len(EXPRESSIONS) >= 7
    assert len(COMMANDS) >= 1
