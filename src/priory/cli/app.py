"""The commands, built with typer: `priory compare` and `priory version`."""

from __future__ import annotations

import dataclasses
import itertools
import math
import platform
import re
import time
import warnings
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

import priory
from priory import methods
from priory.analysis.comparison import compare, split_rows
from priory.analysis.comparison_table import COLUMN_TITLES, TEXT_COLUMNS, Comparison
from priory.cli.tables import SHIPPED_DATA, DataTable, read_table
from priory.core.errors import InputError, MissingExtra, extra, is_integer, require
from priory.core.tables import counted
from priory.methods.em.ascent import Ascent
from priory.priors.base import FLAT
from priory.priors.rules import RULES

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_show_locals=False)


def known_methods() -> dict[str, str]:
    """Methods for networks that need no argument, by command-line name: mean_field for MeanField."""
    found = {}
    for name in methods.__all__:
        one = methods.by_name(name)
        latent = isinstance(one, type) and issubclass(one, (Ascent, methods.AmortisedEM))
        if not latent and dataclasses.is_dataclass(one) and hasattr(one, "init") and hasattr(one, "step"):
            needed = (part.default is part.default_factory is dataclasses.MISSING for part in dataclasses.fields(one))
            if not any(needed):
                found[re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()] = name
    return found


METHOD_NAMES = known_methods()
SINGLE_THREAD_ELEMENTS = 1_000_000  # table entries below which one thread is fastest


@app.callback()
def command() -> None:
    """Give the model you already have a posterior you can trust."""


@app.command("version")
def version() -> None:
    """Print the versions that a bug report needs."""
    print(f"priory {priory.__version__}, torch {torch.__version__}, Python {platform.python_version()}")


@app.command("compare")
def compare_command(
    data: Annotated[str, typer.Option(help=f"A CSV file, or one of {', '.join(SHIPPED_DATA)}.")],
    target: Annotated[str | None, typer.Option(help="The column to predict; default: the last one.")] = None,
    task: Annotated[str, typer.Option(help="regression, classification, or auto: decided by the target.")] = "auto",
    names: Annotated[
        str, typer.Option("--methods", help=f"Names of methods, separated by commas: {', '.join(METHOD_NAMES)}.")
    ] = "map,mean_field",
    hidden: Annotated[str, typer.Option(help="Units of each hidden layer, separated by commas: 50 or 50,50.")] = "50",
    prior: Annotated[
        str, typer.Option(help="Scale rule (he, glorot, fan_in, flat), or the standard deviation of the weights.")
    ] = "he",
    epochs: Annotated[int | None, typer.Option(help="Passes over the data; default: chosen by each method.")] = None,
    test: Annotated[float, typer.Option(help="Fraction of the rows to hold out.")] = 0.2,
    seed: Annotated[int, typer.Option(help="Seed of the split, the initial weights and the fits.")] = 0,
    report: Annotated[Path | None, typer.Option(help="Write the comparison to this HTML file.")] = None,
) -> None:
    """Fit several methods to a table, score them on held-out rows, and print the scores."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = print_warning
            comparison = run(data, target, task, names, hidden, prior, epochs, test, seed, report)
    except (InputError, MissingExtra) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None
    if comparison.best is None:
        raise typer.Exit(1)


def print_warning(message: Warning | str, *_: Any) -> None:
    """Print a warning as one line, in place of `warnings.showwarning`, because there is no code to point at."""
    typer.echo(f"Warning: {message}", err=True)


def run(
    data: str,
    target: str | None,
    task: str,
    names: str,
    hidden: str,
    prior: str,
    epochs: int | None,
    test: float,
    seed: int,
    report: Path | None,
) -> Comparison:
    """Run `priory compare`: read the table, fit and score the methods, print the scores, and write the report."""
    chosen, widths, spread = _methods(names), _widths(hidden), _prior(prior)
    require(0 < test < 1, "test", "compare", "be a fraction between 0 and 1", test)
    require(epochs is None or is_integer(epochs, 1), "epochs", "compare", "be an integer >= 1", epochs)
    if report is not None:  # before the fits, so that a missing folder doesn't lose them
        extra("matplotlib.figure", "plot")
        require(
            report.parent.is_dir() and not report.is_dir(),
            "report",
            "compare",
            "be a file in a folder that exists",
            str(report),
        )
    table = read_table(data, target, task)
    if table.x.numel() < SINGLE_THREAD_ELEMENTS:  # synchronising threads would cost more than they save
        torch.set_num_threads(1)
    began = time.perf_counter()
    fitted, held = split_rows((table.x, table.y), test, seed)
    model = build_model(table, widths, spread, seed)
    # Print only after all arguments are validated, so that a wrong argument prints its error alone.
    console = Console(highlight=False)
    rows, columns = (counted(size, noun) for size, noun in zip(table.x.shape, ("row", "column"), strict=True))
    kind = f"{len(table.classes)} classes" if table.classes else "regression"
    console.print(f"{table.name}: {rows}, {columns}, target '{table.target}' ({kind})", markup=False)
    for note in table.notes:
        console.print(f"  {note}", markup=False, soft_wrap=True)
    progress = console.is_terminal
    comparison = compare(model, fitted, chosen, held, epochs=epochs, seed=seed, progress=progress)
    about = {"data": " ".join([f"{data}, target '{table.target}'.", *table.notes]), "inputs": ", ".join(table.columns)}
    comparison = dataclasses.replace(comparison, about=about | comparison.about)
    console.print()
    if console.is_terminal:
        print_rich(console, comparison)
    else:
        print(comparison)
    console.print(f"Done in {time.perf_counter() - began:.0f} s.", markup=False)
    if report is not None:
        path = comparison.report(report, f"{table.name}: {', '.join(chosen)}")
        console.print(f"Report: {path}", markup=False, soft_wrap=True)
    return comparison


def build_model(table: DataTable, widths: list[int], prior: str | float, seed: int) -> Any:
    """Build a multilayer perceptron, initialised from the seed, with the likelihood of the task, at unit scale."""
    from priory.likelihoods import Categorical, Gaussian
    from priory.models.model import Model

    outputs = len(table.classes) if table.classes else 1
    sizes = [table.x.shape[1], *widths]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[torch.nn.Module] = []
        for before, after in itertools.pairwise(sizes):
            layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]
        net = torch.nn.Sequential(*layers, torch.nn.Linear(sizes[-1], outputs))
    return Model(net, Categorical() if table.classes else Gaussian(), prior, standardise=True)


def _methods(text: str) -> dict[str, Any]:
    names = [name.strip().lower().replace("-", "_") for name in text.split(",") if name.strip()]
    require(len(names) > 0, "methods", "compare", f"name at least one of {', '.join(METHOD_NAMES)}", repr(text))
    for name in names:
        require(name in METHOD_NAMES, "methods", "compare", f"be among {', '.join(METHOD_NAMES)}", repr(name))
    return {METHOD_NAMES[name]: methods.by_name(METHOD_NAMES[name])() for name in names}


def _widths(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    ok = all(part.isdigit() and int(part) >= 1 for part in parts)
    require(ok, "hidden", "compare", "be integers separated by commas, such as 50 or 50,50", repr(text))
    return [int(part) for part in parts]


def _prior(text: str) -> str | float:
    try:
        scale = float(text)
    except ValueError:
        rules = (*RULES, FLAT)
        require(text in rules, "prior", "compare", f"be a positive number or one of {', '.join(rules)}", repr(text))
        return text
    require(0 < scale < math.inf, "prior", "compare", "be a positive number or a rule's name", text)
    return scale


def print_rich(console: Console, comparison: Comparison) -> None:
    """Print the table on a terminal, the best value of each column in bold green."""
    table = RichTable(caption=comparison.heading, caption_justify="left", header_style="bold")
    for column in comparison.columns:
        table.add_column(Text(COLUMN_TITLES[column]), justify="left" if column in TEXT_COLUMNS else "right")
    for place, cells in enumerate(comparison.cells()):
        guess = place >= len(comparison.rows)
        name = None if guess else comparison.rows[place]["method"]
        marks = [name in comparison.winners(column) for column in comparison.columns]
        parts = [Text(text, "bold green" if best else "") for text, best in zip(cells, marks, strict=True)]
        if guess:
            table.add_section()
        table.add_row(*parts, style="dim" if guess else None)
    console.print(table)
    for name, error in comparison.failures.items():
        console.print(f"{name} failed: {error}", style="red", markup=False)
    better = ", except for accuracy" if "accuracy" in comparison.columns else ""
    console.print(f"NLL in nats per row, with its standard error. Lower is better{better}.", style="dim", markup=False)
    console.print(comparison.verdict, markup=False)
    if comparison.worse_than_baseline:
        console.print(comparison.worse_than_baseline, markup=False)
