"""A table of what is known of some quantities, and of whether it may be believed.

Every posterior has one: `print(posterior.summary())`. Its rows are entries of parameters, its columns the mean, the
standard deviation and the quantiles 5 %, 50 % and 95 %. That of Markov chains has the Monte Carlo standard error, the
effective sample sizes and R-hat beside them (see `priory.diagnostics.convergence`).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING

import torch

from priory.core.errors import require
from priory.core.tables import text_table
from priory.diagnostics.convergence import measures

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

GOOD_R_HAT = 1.01
ESS_PER_CHAIN, ESS_IN_ALL = 100, 400  # effective draws that are enough: of each chain, and of all, however many
GOOD_BFMI = 0.3
ROWS = 50  # of a printed table; of more quantities those of the highest R-hat are shown
QUANTILES = (0.05, 0.5, 0.95)
PLAIN = ("mean", "sd", "5%", "50%", "95%")
COLUMNS = ("mean", "mcse", "sd", "5%", "50%", "95%", "ess_bulk", "ess_tail", "r_hat")


@dataclass(frozen=True)
class Summary:
    """Means, standard deviations and quantiles of named quantities: a table to print, and its columns, (n,).

    `summary["sd"]` is a column, `summary.row("theta[0]")` the numbers of one quantity, and `summary.to_dict()` all of
    them by name. That of chains has `chains` and `draws`; `verdict` lists what speaks against them.

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

    @classmethod
    def of(
        cls,
        names: list[str],
        x: Tensor | Iterable[Tensor],
        divergences: int | None = None,
        bfmi: Tensor | None = None,
        title: str = "",
    ) -> Summary:
        """The summary of draws (chain, draw, quantity), in one piece or several with as many chains and draws."""
        pieces = [x] if isinstance(x, torch.Tensor) else list(x)
        found = [measures(piece, QUANTILES) for piece in pieces]
        parts = [(m.mean, m.mcse, m.sd, *m.quantiles, m.ess_bulk, m.ess_tail, m.r_hat) for m in found]
        together = [torch.cat(part).cpu() for part in zip(*parts, strict=True)]
        chains, draws = pieces[0].shape[:2]
        return cls(names, dict(zip(COLUMNS, together, strict=True)), chains, draws, divergences, bfmi, title)

    def __getitem__(self, column: str) -> Tensor:
        require(column in self.columns, "column", "Summary", f"be among {', '.join(self.columns)}", repr(column))
        return self.columns[column]

    def row(self, name: str) -> dict[str, float]:
        """The numbers of one quantity by column."""
        known = ", ".join(self.names[:20]) + (", ..." if len(self.names) > 20 else "")
        require(name in self._places, "name", "Summary", f"be among {known}", repr(name))
        return {column: float(values[self._places[name]]) for column, values in self.columns.items()}

    def to_dict(self) -> dict[str, dict[str, float]]:
        """The numbers of every quantity, by name and column."""
        values = [column.tolist() for column in self.columns.values()]
        return {name: dict(zip(self.columns, row, strict=True)) for name, *row in zip(self.names, *values, strict=True)}

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.names)}

    @property
    def disagreement(self) -> str:
        """The sentence that says where chains disagree, or nothing."""
        r = self["r_hat"]
        if not bool((r > GOOD_R_HAT).any()):
            return ""
        place = int(r.nan_to_num(nan=0.0).argmax())
        return (
            f"R-hat is above {GOOD_R_HAT} for {int((r > GOOD_R_HAT).sum())} of {len(self.names)} quantities, and "
            f"largest ({float(r[place]):.4g}) for {self.names[place]}: the chains disagree. Let them run longer."
        )

    @property
    def shortage(self) -> str:
        """The sentence that says where there are too few effective draws, or nothing."""
        ess, wanted = torch.fmin(self["ess_bulk"], self["ess_tail"]), min(ESS_PER_CHAIN * self.chains, ESS_IN_ALL)
        if not bool((ess < wanted).any()):
            return ""
        place = int(ess.nan_to_num(nan=torch.inf).argmin())
        return (
            f"ESS is below {wanted} for {int((ess < wanted).sum())} of {len(self.names)} quantities, and "
            f"smallest ({float(ess[place]):.0f}) for {self.names[place]}: take more draws."
        )

    @property
    def verdict(self) -> list[str]:
        """What speaks against the draws, a sentence each; nothing where they are good."""
        if "r_hat" not in self.columns:
            return []
        if self.draws < 4:
            return ["Fewer than 4 draws a chain say nothing about convergence."]
        said, total = [sentence for sentence in (self.disagreement, self.shortage) if sentence], len(self.names)
        still = int(torch.isnan(self["r_hat"]).sum())
        if still:
            said.append(f"{still} of {total} quantities never vary, or are not finite: nothing is said of them.")
        return said + self.trouble

    @property
    def trouble(self) -> list[str]:
        """What the sampler itself met, a sentence each: trajectories that diverged, and an energy that is slow."""
        said = []
        if self.divergences:
            share = 100 * self.divergences / (self.chains * self.draws)
            said.append(
                f"{self.divergences} draws diverged ({share:.2g} %): the sampler could not follow the density there, "
                "and draws near it are missing. Raise the wanted acceptance, or give the parameters another form."
            )
        if self.bfmi is not None and bool((self.bfmi < GOOD_BFMI).any()):
            said.append(
                f"E-BFMI is below {GOOD_BFMI} for {int((self.bfmi < GOOD_BFMI).sum())} of {self.chains} chains: the "
                "energy wanders too slowly to reach the tails. Give the parameters another form."
            )
        return said

    @property
    def notes(self) -> list[str]:
        """The lines under the table."""
        said = list(self.remarks)
        if self.chains:
            said.append(f"{self.chains} chains of {self.draws:,} draws.")
            if self.divergences is not None:
                said[-1] += f" Divergences: {self.divergences}."
            if self.bfmi is not None:
                said[-1] += f" E-BFMI: {float(self.bfmi.min()):.2f} at the least."
        if len(self._shown) < len(self.names):
            said.append(f"Shown are the {ROWS} of {len(self.names):,} quantities with the highest R-hat.")
        return said + self.verdict + ([f"Status: {self.status}"] if self.status else [])

    @property
    def _shown(self) -> Sequence[int]:
        """The places of the rows that are printed."""
        if "r_hat" not in self.columns or len(self.names) <= ROWS:
            return range(len(self.names))
        return sorted(self["r_hat"].nan_to_num(nan=-1.0).argsort(descending=True, stable=True)[:ROWS].tolist())

    @property
    def cells(self) -> list[list[str]]:
        """The rows of the table as texts."""
        return [
            [self.names[i], *[written(name, float(column[i])) for name, column in self.columns.items()]]
            for i in self._shown
        ]

    def __str__(self) -> str:
        lines = text_table([["", *self.columns], *self.cells])
        below = ["", *self.notes] if self.notes else []
        return "\n".join([*([self.title] if self.title else []), *lines, *below])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(c)}</th>" for c in ("", *self.columns))
        rows = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in self.cells)
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        return f"<table><caption>{escape(self.title)}</caption><tr>{head}</tr>{rows}</table>{notes}"


def labels(name: str, shape: Sequence[int]) -> list[str]:
    """A name for each entry of a tensor.

    >>> labels("theta", (2, 2))
    ['theta[0, 0]', 'theta[0, 1]', 'theta[1, 0]', 'theta[1, 1]']
    >>> labels("mu", ())
    ['mu']
    """
    if not shape:
        return [name]
    return [f"{name}[{', '.join(map(str, place))}]" for place in itertools.product(*map(range, shape))]


def written(column: str, value: float) -> str:
    """A number as the table has it."""
    if column.startswith("ess"):
        return f"{value:.0f}"
    return f"{value:.3f}" if column == "r_hat" else f"{value:.3g}"
