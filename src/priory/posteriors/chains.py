"""Draws of Markov chains, with what says whether they may be believed."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from priory.core.data import Data, as_batch
from priory.core.errors import InputError, extra, require
from priory.core.streams import stream
from priory.diagnostics import bfmi, ess_bulk, ess_tail, mcse_mean, quantile, r_hat
from priory.models.model import Model
from priory.posteriors.base import Evidence, Posterior, chosen

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from priory.core.data import Batch
    from priory.models.target import Target

GOOD_R_HAT = 1.01
GOOD_ESS, ENOUGH = 100, 400  # effective draws a chain; and of all chains, however many
GOOD_BFMI = 0.3
ROWS = 50  # of a table; of more quantities those of the highest R-hat are shown
AT_A_TIME = 1 << 24  # numbers of predictions or likelihoods that are made together
ARVIZ_NAMES = {"divergent": "diverging", "acceptance": "acceptance_rate", "steps": "n_steps"}


class Chains(Posterior):
    """(1/KS) sum_ks delta(w - w_ks), in unconstrained coordinates, w (K, S, P): S draws of each of K chains.

    `statistics` are what a sampler tells of each draw, (K, S): "energy", "acceptance", "divergent", "tree_depth",
    "steps", whichever it has. Without `momenta` the energy is -log p alone, of which E-BFMI says nothing.
    `print(posterior.summary())` says what is known and whether it may be believed.
    """

    kind: ClassVar[str] = "chains"

    def __init__(
        self,
        target: Target,
        w: Tensor,
        buffers: Mapping[str, Tensor] | None = None,
        statistics: Mapping[str, Tensor] | None = None,
        momenta: bool = True,
    ) -> None:
        super().__init__(target, buffers)
        self.momenta = momenta
        ok = isinstance(w, Tensor) and w.ndim == 3 and w.numel() > 0 and w.shape[2] == target.size
        must = f"be draws (chain, draw, {target.size} coordinates), one or more"
        require(ok, "w", "Chains", must, f"the shape {tuple(getattr(w, 'shape', ()))}")
        require(finite(w), "w", "Chains", "be finite", "a draw that is not")
        on_disk = w.untyped_storage().filename is not None  # mapped from a file: larger, maybe, than the memory
        self.w = w.detach() if on_disk else w.detach().clone()
        self.statistics: dict[str, Tensor] = {}
        for name, t in (statistics or {}).items():
            got = f"'{name}' of the shape {tuple(t.shape)}"
            require(t.shape == w.shape[:2], "statistics", "Chains", f"have the shape {tuple(w.shape[:2])}", got)
            # in the model's type, so that a file keeps them as they are
            self.statistics[name] = t.detach().to(w.dtype if t.is_floating_point() else t.dtype, copy=True)

    @classmethod
    def kept(
        cls,
        target: Target,
        draws: Tensor | None,
        now: Tensor,
        buffers: Mapping[str, Tensor] | None = None,
        statistics: Mapping[str, Tensor] | None = None,
    ) -> Chains:
        """What a sampler has: its draws (K, S, P) before the first that is not finite, or where it is, (K, P)."""
        finite = 0 if draws is None else int(torch.isfinite(draws).all(-1).all(0).long().cumprod(0).sum())
        if draws is None or finite == 0:
            return cls(target, now.unsqueeze(-2), buffers)
        return cls(target, draws[:, :finite], buffers, {n: t[:, :finite] for n, t in (statistics or {}).items()})

    # The draws.

    @property
    def num_chains(self) -> int:
        """K."""
        return self.w.shape[0]

    @property
    def num_draws(self) -> int:
        """S, of each chain."""
        return self.w.shape[1]

    @cached_property
    def draws(self) -> dict[str, Tensor]:
        """The draws of every parameter by name, (chain, draw, ...), in the person's own (constrained) parameters."""
        return self.model.layout.constrain(self.w)

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """n of all draws, (n, P): no one twice where there are enough, and with replacement otherwise."""
        return next(self.pieces([n], generator))

    def pieces(self, sizes: list[int], generator: torch.Generator) -> Iterator[Tensor]:
        """The same, so many at a time."""
        w = self.w.flatten(0, 1)
        places = chosen(len(w), sum(sizes), generator).to(w.device)
        return (w[some].to(self.model.device) for some in places.split(sizes))  # those on disk are the CPU's

    @property
    def mean(self) -> dict[str, Tensor]:
        return {name: x.mean((0, 1)) for name, x in self.draws.items()}

    def evidence(self) -> Evidence:
        raise InputError(f"{self.method or 'A set of chains'} gives no evidence: its draws have no density.")

    # Whether they may be believed.

    @property
    def diagnostics(self) -> dict[str, dict[str, Tensor]]:
        """R-hat, bulk and tail ESS and the standard error of the mean, each by parameter, in the parameter's shape."""
        measures = {"r_hat": r_hat, "ess_bulk": ess_bulk, "ess_tail": ess_tail, "mcse_mean": mcse_mean}
        return {name: {p: measure(x) for p, x in self.draws.items()} for name, measure in measures.items()}

    @property
    def divergences(self) -> Tensor:
        """The (chain, draw) of every draw whose trajectory diverged, (n, 2); none of a sampler without trajectories."""
        found = self.statistics.get("divergent")
        return torch.empty(0, 2, dtype=torch.long) if found is None else found.bool().nonzero()

    def summary(self) -> Summary:
        """Mean, sd, quantiles and diagnostics of every parameter, to be printed."""
        columns = [x.reshape(*x.shape[:2], -1) for x in self.draws.values()]
        names = [label for name, x in self.draws.items() for label in labels(name, x.shape[2:])]
        energy = self.statistics.get("energy") if self.momenta else None
        return Summary.of(
            names,
            torch.cat(columns, 2),
            divergences=len(self.divergences) if "divergent" in self.statistics else None,
            bfmi=None if energy is None else bfmi(energy),
            title=self.method,
        )

    def function_space(self, x: Any) -> Summary:
        """The same of the mean predictions at inputs x.

        The weights of a network have symmetries, so that two chains may hold the same function at weights that never
        meet. Predictions have none: their R-hat and ESS are those that count.
        """
        self.predict(x, samples=1)  # refuses what can't be inputs
        model = self.model
        assert isinstance(model, Model)
        parts = isinstance(x, tuple) or (isinstance(x, list) and isinstance(x[0], Tensor))
        inputs = model.prepare_inputs(as_batch(x if parts else (x,), "of x"))
        found, w = [], self.w.flatten(0, 1)
        some = max(1, AT_A_TIME // max(1, len(inputs[0])))
        with torch.no_grad():
            for start in range(0, len(w), some):
                piece = w[start : start + some]
                outputs = model.outputs(piece, inputs, self.buffers, self.target.event)
                found.append(model.likelihood.mean(outputs, model.learnt_at(piece)))
        means = torch.cat(found).unflatten(0, self.w.shape[:2])
        names = labels("y", means.shape[2:])
        return Summary.of(
            names, means.reshape(*means.shape[:2], -1), title=f"{self.method}: mean predictions".lstrip(": ")
        )

    # Elsewhere.

    def to_arviz(self, data: Any = None) -> Any:
        """The draws as ArviZ has them: an InferenceData, or from its version 1 on a DataTree.

        Its groups are posterior, sample_stats and the log_likelihood of each datum, for `az.loo`; of a network also
        observed_data and posterior_predictive, a target drawn at each draw, for posterior predictive checks. Data are
        those of the fit, or `data` (which a posterior from a file needs, as it keeps none); a density that is one
        `log_prob` has none. Its numbers are draws x rows.
        """
        az = extra("arviz", "plot")
        groups = {"posterior": {name: as_array(x) for name, x in self.draws.items()}}
        if self.statistics:
            groups["sample_stats"] = {ARVIZ_NAMES.get(n, n): as_array(t) for n, t in self.statistics.items()}
        rows = self.data if data is None else Data.of(data).prepared(self.model.prepare)
        if rows is not None and rows.num_data is not None:
            own = self.replicated(rows) if isinstance(self.model, Model) else {}
            found = {"log_likelihood": self.pointwise(rows), **own}
            groups |= {name: {"y": as_array(t)} for name, t in found.items()}
        # from version 1 on the groups come as one dict
        return az.from_dict(groups) if int(az.__version__.split(".")[0]) >= 1 else az.from_dict(**groups)

    def pointwise(self, rows: Data) -> Tensor:
        """log p(y_n | x_n, w) of every row at every draw, (chain, draw, row)."""
        w = self.w.flatten(0, 1)
        found = [self.target.pointwise(w, batch, self.buffers) for batch in self._blocks(rows)]
        return torch.cat(found, -1).unflatten(0, self.w.shape[:2])

    def replicated(self, rows: Data) -> dict[str, Tensor]:
        """The targets of a network's rows, (row, ...), and one for each at every draw, (chain, draw, row, ...)."""
        w, model, generator = self.w.flatten(0, 1), self.model, stream(self.seed, "replicated", device=self.w.device)
        assert isinstance(model, Model)
        observed, drawn = [], []
        for *inputs, targets in self._blocks(rows):
            with torch.no_grad():
                outputs = model.outputs(w, tuple(inputs), self.buffers, self.target.event)
                drawn.append(model.likelihood.draw(outputs, model.learnt_at(w), generator))
            observed.append(targets)
        together = torch.cat(drawn, 1).unflatten(0, self.w.shape[:2])
        return {"posterior_predictive": together, "observed_data": torch.cat(observed)}

    def _blocks(self, rows: Data) -> Iterator[Batch]:
        """One pass over rows, so many at a time that a number for each at every draw has room."""
        return rows.blocks(max(1, AT_A_TIME // (self.num_chains * self.num_draws)))

    def tensors(self) -> dict[str, Tensor]:
        return {"w": self.w, **{f"statistics.{name}": t.to(self.w.dtype) for name, t in self.statistics.items()}}

    def own(self) -> dict[str, Any]:
        types = {name: str(t.dtype).removeprefix("torch.") for name, t in self.statistics.items()}
        return {"types": types, "momenta": self.momenta}

    @classmethod
    def of_tensors(
        cls, target: Target, tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor], **own: Any
    ) -> Chains:
        types = own["types"]
        statistics = {name: tensors[f"statistics.{name}"].to(getattr(torch, types[name])) for name in types}
        return cls(target, tensors["w"], buffers, statistics, own.get("momenta", True))  # older files don't have it


COLUMNS = ("mean", "mcse", "sd", "5%", "50%", "95%", "ess_bulk", "ess_tail", "r_hat")


@dataclass(frozen=True)
class Summary:
    """What is known of some quantities, and whether it may be believed: a table to print, and its columns, (n,)."""

    names: list[str]
    columns: dict[str, Tensor]
    chains: int
    draws: int
    divergences: int | None = None
    bfmi: Tensor | None = None
    title: str = ""

    @classmethod
    def of(
        cls,
        names: list[str],
        x: Tensor,
        divergences: int | None = None,
        bfmi: Tensor | None = None,
        title: str = "",
    ) -> Summary:
        """Of draws (chain, draw, quantity)."""
        flat = x.double().flatten(0, 1)
        values = (flat.mean(0), mcse_mean(x), flat.std(0), *[quantile(x, q) for q in (0.05, 0.5, 0.95)])
        columns = dict(zip(COLUMNS, (*values, ess_bulk(x), ess_tail(x), r_hat(x)), strict=True))
        chains, draws = x.shape[:2]
        return cls(names, {n: c.cpu() for n, c in columns.items()}, chains, draws, divergences, bfmi, title)

    def __getitem__(self, column: str) -> Tensor:
        require(column in self.columns, "column", "Summary", f"be among {', '.join(self.columns)}", repr(column))
        return self.columns[column]

    @property
    def verdict(self) -> list[str]:
        """What speaks against the draws, a sentence each; nothing where they are good."""
        r, ess = self["r_hat"], torch.fmin(self["ess_bulk"], self["ess_tail"])
        wanted, total = min(GOOD_ESS * self.chains, ENOUGH), len(self.names)
        said = []
        if self.draws < 4:
            return ["Fewer than 4 draws a chain say nothing about convergence."]
        if bool((r > GOOD_R_HAT).any()):
            place = int(r.nan_to_num(nan=0.0).argmax())
            said.append(
                f"R-hat is above {GOOD_R_HAT} for {int((r > GOOD_R_HAT).sum())} of {total} quantities, and largest "
                f"({float(r[place]):.4g}) for {self.names[place]}: the chains disagree. Let them run longer."
            )
        if bool((ess < wanted).any()):
            place = int(ess.nan_to_num(nan=torch.inf).argmin())
            said.append(
                f"ESS is below {wanted} for {int((ess < wanted).sum())} of {total} quantities, and "
                f"smallest ({float(ess[place]):.0f}) for {self.names[place]}: take more draws."
            )
        still = int(torch.isnan(r).sum())
        if still:
            said.append(f"{still} of {total} quantities never vary, or are not finite: nothing is said of them.")
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
        said = [f"{self.chains} chains of {self.draws:,} draws."]
        if self.divergences is not None:
            said[0] += f" Divergences: {self.divergences}."
        if self.bfmi is not None:
            said[0] += f" E-BFMI: {float(self.bfmi.min()):.2f} at the least."
        if len(self.names) > ROWS:
            said.append(f"Shown are the {ROWS} of {len(self.names):,} quantities with the highest R-hat.")
        return said + self.verdict

    @property
    def cells(self) -> list[list[str]]:
        """The rows of the table as texts."""
        shown: Sequence[int] = range(len(self.names))
        if len(self.names) > ROWS:
            worst = self["r_hat"].nan_to_num(nan=-1.0).argsort(descending=True, stable=True)[:ROWS]
            shown = sorted(worst.tolist())
        return [[self.names[i], *[written(name, float(self[name][i])) for name in COLUMNS]] for i in shown]

    def __str__(self) -> str:
        rows = [["", *COLUMNS], *self.cells]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *[c.rjust(n) for c, n in zip(row[1:], widths[1:], strict=True)]])
            for row in rows
        ]
        return "\n".join([*([self.title] if self.title else []), *lines, "", *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(c)}</th>" for c in ("", *COLUMNS))
        rows = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in self.cells)
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        return f"<table><caption>{escape(self.title)}</caption><tr>{head}</tr>{rows}</table>{notes}"


def finite(w: Tensor) -> bool:
    """Whether all draws (K, S, P) are numbers, some of them looked at at a time."""
    rows = max(1, AT_A_TIME // w.shape[-1])
    return all(bool(torch.isfinite(some).all()) for some in w.flatten(0, 1).split(rows))


def labels(name: str, shape: torch.Size) -> list[str]:
    """A name for each entry of a tensor.

    >>> labels("theta", torch.Size([2, 2]))
    ['theta[0, 0]', 'theta[0, 1]', 'theta[1, 0]', 'theta[1, 1]']
    >>> labels("mu", torch.Size())
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


def as_array(t: Tensor) -> Any:
    """A numpy array of a tensor on any device."""
    return t.detach().cpu().numpy()
