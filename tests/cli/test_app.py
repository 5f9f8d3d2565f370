"""The command line: its output, its files and its errors."""

import io
import math
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

import priory
from priory import methods
from priory.cli import main
from priory.cli.app import METHOD_NAMES, app, build_model, print_rich
from priory.cli.tables import read_table
from priory.core.errors import warn


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def words(result: Result) -> str:
    """Return the printed text without line breaks."""
    return " ".join((result.output + result.stderr).split())


def table(text: str, folder: Path) -> str:
    path = folder / "table.csv"
    path.write_text(text, encoding="utf-8")
    return str(path)


NUMBERS = "a,b,y\n" + "".join(f"{k},{(7 * k) % 11},{3 * k + (5 * k) % 7 + 0.5}\n" for k in range(40))
LABELS = "a,b,y\n" + "".join(f"{k},{(7 * k) % 11},{'yes' if k % 3 else 'no'}\n" for k in range(40))


def test_compare_prints_a_table_and_writes_a_report(tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    result = run("compare", "--data", table(NUMBERS, tmp_path), "--epochs", "2", "--report", str(report))
    assert result.exit_code == 0, result.output
    for part in (
        "40 rows, 2 columns, target 'y' (regression)",
        "32 rows to fit, 8 held out",
        "MAP",
        "MeanField",
        "RMSE",
    ):
        assert part in words(result)
    assert result.output.rstrip().endswith(f"Report: {report}")
    page = report.read_text(encoding="utf-8")
    assert "<title>table.csv: MAP, MeanField</title>" in page
    assert "target &#x27;y&#x27;" in page


def test_a_warning_is_one_line_without_a_place_in_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def warned(*_: Any) -> Any:
        warn("The fit has not converged.")
        raise priory.InputError("The end.")

    monkeypatch.setattr("priory.cli.app.run", warned)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        shown = warnings.showwarning
        result = run("compare", "--data", table(NUMBERS, tmp_path))
        assert warnings.showwarning is shown
    assert result.output == "Warning: The fit has not converged.\nError: The end.\n"


def test_compare_reads_classes_and_takes_its_options(tmp_path: Path) -> None:
    options = ["--methods", "mean-field", "--hidden", "5,4", "--epochs", "2", "--test", "0.5", "--seed", "3"]
    result = run("compare", "--data", table(LABELS, tmp_path), "--target", "y", "--prior", "1.0", *options)
    assert result.exit_code == 0, result.output
    assert "20 rows to fit, 20 held out, seed 3" in words(result)
    assert "accuracy" in result.output
    assert "MAP" not in result.output


def test_one_column_is_named_in_the_singular(tmp_path: Path) -> None:
    text = "a,y\n" + "".join(f"{k},{k / 7}\n" for k in range(20))
    result = run("compare", "--data", table(text, tmp_path), "--methods", "map", "--epochs", "2")
    assert "20 rows, 1 column, target" in words(result)
    assert "MAP is the only method that was scored." in words(result)


def test_the_same_seed_prints_the_same_scores(tmp_path: Path) -> None:
    command = ["compare", "--data", table(NUMBERS, tmp_path), "--epochs", "2", "--methods", "map"]
    scores = [run(*command).output.split("MAP")[1].split()[:4] for _ in range(2)]
    assert scores[0] == scores[1]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--data", "none.csv"], "must be the path of a CSV file, or one of diabetes"),
        (["--data", "iris", "--target", "colour"], "must be a column of iris"),
        (
            ["--data", "iris", "--methods", "magic"],
            "The 'methods' argument of compare must be among hmc, mala, map, nuts",
        ),
        (["--data", "iris", "--methods", ","], "must name at least one of hmc, mala, map, nuts"),
        (
            ["--data", "iris", "--hidden", "many"],
            "must be integers separated by commas, such as 50 or 50,50, got 'many'",
        ),
        (["--data", "iris", "--test", "2"], "a fraction between 0 and 1, got 2.0"),
        (["--data", "iris", "--epochs", "0"], "must be an integer >= 1, got 0"),
        (["--data", "iris", "--report", "none/report.html"], "must be a file in a folder that exists"),
        (["--data", "iris", "--test", "0.001"], "must hold out at least one of the 150 rows and leave one"),
        (["--data", "iris", "--prior", "loose"], "must be a positive number or one of fan_in, glorot, he, flat"),
        (["--data", "iris", "--prior", "-1"], "must be a positive number or a rule's name, got -1"),
    ],
)
def test_invalid_arguments_print_an_error_without_a_traceback(options: list[str], sentence: str) -> None:
    result = run("compare", *options)
    assert result.exit_code == 1
    assert sentence in words(result)
    assert "Traceback" not in words(result)
    assert result.stdout == ""  # the error is raised before any output
    assert result.stderr.startswith("Error: The")


def test_version_names_what_a_bug_report_needs() -> None:
    result = run("version")
    assert result.exit_code == 0
    assert f"torch {torch.__version__}" in result.output


def test_scores_are_in_the_units_of_the_table(tmp_path: Path) -> None:
    def scores(text: str) -> tuple[float, float]:
        line = next(line for line in run(*_command(text)).output.splitlines() if line.startswith("MAP"))
        numbers = [float(part) for part in line.split() if part[0].isdigit()]
        return numbers[0], numbers[2]

    def _command(text: str) -> list[str]:
        return ["compare", "--data", table(text, tmp_path), "--methods", "map", "--epochs", "5"]

    thousand = "a,b,y\n" + "".join(
        f"{a},{b},{1000 * float(y)}\n" for a, b, y in (line.split(",") for line in NUMBERS.splitlines()[1:])
    )
    (nll, rmse), (nll_thousand, rmse_thousand) = scores(NUMBERS), scores(thousand)
    assert nll_thousand - nll == pytest.approx(math.log(1000), abs=2e-3)  # as printed, with three decimals
    assert rmse_thousand == pytest.approx(1000 * rmse, rel=2e-3)


def test_the_model_standardises_its_rows() -> None:
    assert build_model(read_table("diabetes"), [5], "he", 0).standardise


def test_the_network_is_a_function_of_the_seed_and_torch_keeps_its_own_stream() -> None:
    numbers = read_table("diabetes")
    before = torch.get_rng_state()
    first, same, other = (build_model(numbers, [5], "he", seed).net[0].weight for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.get_rng_state())


def test_every_method_that_needs_no_argument_has_a_name_on_the_command_line() -> None:
    assert METHOD_NAMES["map"] == "MAP"
    assert METHOD_NAMES["mean_field"] == "MeanField"
    for name in METHOD_NAMES.values():
        getattr(methods, name)()


def test_without_its_extra_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 1
    assert "needs 'typer': pip install 'priory[cli]'" in capsys.readouterr().err


def test_python_dash_m_is_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["priory", "version"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_module("priory", run_name="__main__")
    assert exit_.value.code == 0
    assert capsys.readouterr().out.startswith("priory ")


def test_importing_the_command_loads_none_of_its_extras() -> None:
    code = "import sys, priory.cli, priory.cli.tables, priory.analysis.comparison, priory.reports, priory.plot\n"
    code += "assert not {'typer', 'rich', 'pandas', 'sklearn', 'matplotlib'} & set(sys.modules)"
    source = str(Path(priory.__file__).resolve().parents[1])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": source})
    assert done.returncode == 0, done.stderr


def test_on_a_terminal_the_table_keeps_its_brackets_and_marks_the_best() -> None:
    x = torch.randn(30, 2, generator=torch.Generator().manual_seed(0))
    model = priory.Model(torch.nn.Linear(2, 1), priory.Gaussian(0.5))
    chosen = {"one[red]": priory.MAP(), "two": priory.MAP(learning_rate=0.1)}
    comparison = priory.compare(model, (x, x[:, 0]), chosen, steps=3, progress=False)
    console = Console(file=io.StringIO(), force_terminal=True, width=120, highlight=False)
    print_rich(console, comparison)
    printed = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "fit [s]" in printed
    assert "one[red]" in printed
    assert "\x1b[1;32m" in printed
    assert comparison.verdict in printed
