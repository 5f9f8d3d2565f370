"""Summary tables of named quantities, with convergence diagnostics for Markov chains.

Every posterior has one: `print(posterior.summary())`. The rows are entries of parameters; the columns are the mean, the
standard deviation and the 5 %, 50 % and 95 % quantiles. For Markov chains there are also the Monte Carlo standard
error, the effective sample sizes and R-hat (see `priory.diagnostics.convergence`), and for chains in superchains nested
R-hat.

R-hat below 1.01 needs about a hundred effective draws from each chain. Chains in superchains that have fewer by their
own autocorrelation, in some quantity, are judged by nested R-hat instead, which needs them only from each superchain.
It can't tell a superchain that has mixed from one whose chains all stay near different points, so such chains also need
an effective sample size of two per chain: chains that never move have about one.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING

import torch

from priory.core.errors import require
from priory.core.tables import counted, text_table
from priory.diagnostics.convergence import measures, nested_r_hat

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

MAX_R_HAT = 1.01
ESS_PER_CHAIN, MAX_REQUIRED_ESS = 100, 400  # sufficient effective draws: per chain, and for any number of chains
ESS_PER_SHORT_CHAIN = 2  # of chains that nested R-hat judges
MIN_BFMI = 0.3
MAX_PRINTED_ROWS = 50  # of more quantities those with the highest R-hat are printed
SUMMARY_PROBABILITIES = (0.05, 0.5, 0.95)
MOMENT_COLUMNS = ("mean", "sd", "5%", "50%", "95%")
CHAIN_COLUMNS = ("mean", "mcse", "sd", "5%", "50%", "95%", "ess_bulk", "ess_tail", "r_hat")


@dataclass(frozen=True)
class Summary:
    """Means, standard deviations and quantiles of named quantities, as a table to print or to read by column and row.

    Attributes:
        names: Names of the quantities, such as "theta[0]".
        columns: Values of each column, (n,). `summary["sd"]` reads one, `summary.row("theta[0]")` one quantity, and
            `summary.to_dict()` everything.
        chains: Number of chains; 0 for a summary that is not of chains.
        draws: Number of draws per chain.
        divergences: Number of divergent draws, if the sampler reports them.
        bfmi: E-BFMI of each chain, for Hamiltonian samplers.
        title: Line above the table.
        status: Status of the fit, printed under the table.
        remarks: Further lines under the table.
        short: Whether chains are too short for R-hat: fewer than 100 effective draws each in some quantity.
        predictions: Summary of the mean predictions of a network, which is printed first and decides whether its chains
            have converged; None for other models.
        noun: What the quantities are called in sentences. Default: "quantities".

    Example:
        >>> table = Summary(["mu"], {"mean": torch.tensor([1.5]), "sd": torch.tensor([0.25])})
        >>> table.row("mu")
        {'mean': 1.5, 'sd': 0.25}
        >>> print(table)
            mean    sd
        mu   1.5  0.25
    """

    names: list[str]
    columns: dict[str, Tensor]
    chains: int = 0
    draws: int = 0
    divergences: int | None = None
    bfmi: Tensor | None = None
    title: str = ""
    status: str = ""
    remarks: list[str] = field(default_factory=list)  # lines under the table
    short: bool = False
    predictions: Summary | None = None
    noun: str = "quantities"

    @classmethod
    def of(
        cls,
        names: list[str],
        x: Tensor | Iterable[Tensor],
        divergences: int | None = None,
        bfmi: Tensor | None = None,
        title: str = "",
        superchains: Tensor | None = None,
        noun: str = "quantities",
    ) -> Summary:
        """Summarise draws of Markov chains.

        Args:
            names: Names of the quantities.
            x: Draws, (chain, draw, quantity), as one tensor or as several with the same chains and draws.
            divergences: Number of divergent draws.
            bfmi: E-BFMI of each chain.
            title: Line above the table.
            superchains: Superchain of each chain, (chain,), for a column of nested R-hat. Default: None, no column.
            noun: What the quantities are called in sentences. Default: "quantities".

        Returns:
            A `Summary` with standard errors, effective sample sizes and R-hat.
        """
        pieces = [x] if isinstance(x, torch.Tensor) else list(x)
        found = [measures(piece, SUMMARY_PROBABILITIES) for piece in pieces]
        parts = [(m.mean, m.mcse, m.sd, *m.quantiles, m.ess_bulk, m.ess_tail, m.r_hat) for m in found]
        together = [torch.cat(part).cpu() for part in zip(*parts, strict=True)]
        columns: dict[str, Tensor] = dict(zip(CHAIN_COLUMNS, together, strict=True))
        chains, draws = pieces[0].shape[:2]
        if superchains is not None and (draws > 1 or len(superchains.unique()) < chains):  # else no variance within
            columns["nested_r_hat"] = torch.cat([nested_r_hat(piece, superchains) for piece in pieces]).cpu()
        short = draws < 4 or any(bool((m.ess_within < ESS_PER_CHAIN * chains).any()) for m in found)
        return cls(names, columns, chains, draws, divergences, bfmi, title, short=short, noun=noun)

    def __getitem__(self, column: str) -> Tensor:
        require(column in self.columns, "column", "Summary", f"be among {', '.join(self.columns)}", repr(column))
        return self.columns[column]

    def row(self, name: str) -> dict[str, float]:
        """The values of one quantity, by column."""
        known = ", ".join(self.names[:20]) + (", ..." if len(self.names) > 20 else "")
        require(name in self._index_by_name, "name", "Summary", f"be among {known}", repr(name))
        return {column: float(values[self._index_by_name[name]]) for column, values in self.columns.items()}

    def to_dict(self) -> dict[str, dict[str, float]]:
        """The values of every quantity, by name and column."""
        values = [column.tolist() for column in self.columns.values()]
        return {name: dict(zip(self.columns, row, strict=True)) for name, *row in zip(self.names, *values, strict=True)}

    @cached_property
    def _index_by_name(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.names)}

    @property
    def agreement(self) -> str:
        """The column by which the chains are compared: "nested_r_hat" for short chains in superchains, or "r_hat"."""
        return "nested_r_hat" if self.short and "nested_r_hat" in self.columns else "r_hat"

    @property
    def disagreement(self) -> str:
        """A sentence about quantities whose chains disagree; empty if there are none."""
        r = self[self.agreement]
        if not bool((r > MAX_R_HAT).any()):
            return ""
        place = int(r.nan_to_num(nan=0.0).argmax())
        who = "the chains" if self.chains != 1 else "the halves of the chain"
        nested = self.agreement == "nested_r_hat"
        return (
            f"{'Nested R-hat' if nested else 'R-hat'} is above {MAX_R_HAT} for {int((r > MAX_R_HAT).sum())} of "
            f"{len(self.names)} {self.noun}, and largest ({float(r[place]):.4g}) for {self.names[place]}: "
            f"{'the superchains' if nested else who} disagree. Take more draws."
        )

    @property
    def shortage(self) -> str:
        """A sentence about quantities with too few effective draws; empty if there are none."""
        if self.draws < 4:
            return "Fewer than 4 draws per chain have no effective sample size: take more draws."
        ess, required = (
            torch.fmin(self["ess_bulk"], self["ess_tail"]),
            min(ESS_PER_CHAIN * self.chains, MAX_REQUIRED_ESS),
        )
        why, moved = "", ESS_PER_SHORT_CHAIN * self.chains
        if self.agreement == "nested_r_hat" and moved > required:
            required, why = moved, f" ({ESS_PER_SHORT_CHAIN} per chain, below which chains stay near their starts)"
        if not bool((ess < required).any()):
            return ""
        place = int(ess.nan_to_num(nan=torch.inf).argmin())
        return (
            f"ESS is below {required}{why} for {int((ess < required).sum())} of {len(self.names)} {self.noun}, and "
            f"smallest ({float(ess[place]):.0f}) for {self.names[place]}: take more draws."
        )

    @property
    def verdict(self) -> list[str]:
        """Problems with the draws, one sentence each; empty if there are none."""
        if "r_hat" not in self.columns:
            return []
        if self.predictions is not None:
            return self.predictions.verdict + self.trouble
        if self.draws < 4 and "nested_r_hat" not in self.columns:
            return ["Fewer than 4 draws per chain say nothing about convergence."]
        lines, total = [sentence for sentence in (self.disagreement, self.shortage) if sentence], len(self.names)
        constant = int(torch.isnan(self[self.agreement]).sum())
        if constant:
            lines.append(f"{constant} of {total} {self.noun} never vary, or are not finite: they have no diagnostics.")
        return lines + self.trouble

    @property
    def trouble(self) -> list[str]:
        """Problems that the sampler reported, one sentence each: divergences and a low E-BFMI."""
        lines = []
        if self.divergences:
            share = 100 * self.divergences / (self.chains * self.draws)
            lines.append(
                f"{self.divergences} draws diverged ({share:.2g} %): the sampler could not follow the density there, "
                "and draws near it are missing. Raise 'accept', or reparameterise the model."
            )
        if self.bfmi is not None and bool((self.bfmi < MIN_BFMI).any()):
            lines.append(
                f"E-BFMI is below {MIN_BFMI} for {int((self.bfmi < MIN_BFMI).sum())} of {len(self.bfmi)} "
                f"{'chains' if len(self.bfmi) == self.chains else 'superchains'}: the "
                "energy changes too slowly to reach the tails. Reparameterise the model."
            )
        return lines

    @property
    def notes(self) -> list[str]:
        """The lines under the table."""
        lines = list(self.remarks)
        if self.chains:
            lines.append(f"{counted(self.chains, 'chain')} of {counted(self.draws, 'draw')}.")
            if self.divergences is not None:
                lines[-1] += f" Divergences: {self.divergences}."
            if self.bfmi is not None and not bool(self.bfmi.isnan().all()):
                lines[-1] += f" E-BFMI: {float(self.bfmi.min()):.2f} at the least."
        if len(self._printed_rows) < len(self.names):
            highest = "nested R-hat" if self.agreement == "nested_r_hat" else "R-hat"
            count = f"{MAX_PRINTED_ROWS} of {len(self.names):,}"
            lines.append(f"Shown are the {count} {self.noun} with the highest {highest}.")
        return lines + self.verdict + ([f"Status: {self.status}"] if self.status else [])

    @property
    def _printed_rows(self) -> Sequence[int]:
        """The indices of the printed rows."""
        if "r_hat" not in self.columns or len(self.names) <= MAX_PRINTED_ROWS:
            return range(len(self.names))
        order = self[self.agreement].nan_to_num(nan=-1.0).argsort(descending=True, stable=True)
        return sorted(order[:MAX_PRINTED_ROWS].tolist())

    @property
    def cells(self) -> list[list[str]]:
        """The rows of the table as strings."""
        return [
            [self.names[i], *[format_value(name, float(column[i])) for name, column in self.columns.items()]]
            for i in self._printed_rows
        ]

    @property
    def _tables(self) -> list[Summary]:
        """The printed tables: that of a network's predictions comes first."""
        return [self] if self.predictions is None else [self.predictions, self]

    def __str__(self) -> str:
        lines = [self.title] if self.title else []
        for table in self._tables:
            lines += [
                *([table.title, ""] if table is not self else []),
                *text_table([["", *table.columns], *table.cells]),
                "",
            ]
        return "\n".join(lines + self.notes if self.notes else lines[:-1])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        tables = []
        for table in self._tables:
            head = "".join(f"<th>{escape(c)}</th>" for c in ("", *table.columns))
            rows = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in table.cells)
            tables.append(f"<table><caption>{escape(table.title)}</caption><tr>{head}</tr>{rows}</table>")
        return "".join(tables) + "".join(f"<p>{escape(note)}</p>" for note in self.notes)


def labels(name: str, shape: Sequence[int]) -> list[str]:
    """One name per entry of a tensor.

    >>> labels("theta", (2, 2))
    ['theta[0, 0]', 'theta[0, 1]', 'theta[1, 0]', 'theta[1, 1]']
    >>> labels("mu", ())
    ['mu']
    """
    if not shape:
        return [name]
    return [f"{name}[{', '.join(map(str, place))}]" for place in itertools.product(*map(range, shape))]


def format_value(column: str, value: float) -> str:
    """Format a value of a column."""
    if column.startswith("ess"):
        return f"{value:.0f}"
    return f"{value:.3f}" if column in ("r_hat", "nested_r_hat") else f"{value:.3g}"
