"""Draws of Markov chains, with their convergence diagnostics."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from priory.core.data import Data, as_batch
from priory.core.distributed import gather
from priory.core.errors import InputError, extra, require
from priory.core.streams import stream
from priory.diagnostics import bfmi, ess_bulk, ess_tail, mcse_mean, r_hat
from priory.diagnostics.flatness import name_of
from priory.diagnostics.summary import Summary, labels
from priory.models.base import has_network
from priory.posteriors.base import Evidence, Posterior, chosen
from priory.posteriors.status import CONVERGED, Status, worst
from priory.posteriors.summaries import varying

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from priory.core.data import Batch
    from priory.models.target import Target

MIN_WARNING_DRAWS, WARNING_R_HAT = 100, 1.1  # draws per chain and R-hat from which fit warns
QUICK_NUMBERS = 1 << 20  # draws x coordinates that fit checks before it warns
STATUS_NUMBERS = 1 << 22  # draws x coordinates that a status checks; of more, evenly spaced coordinates
BLOCK_NUMBERS = 1 << 24  # predictions or likelihoods that are computed together
ARVIZ_NAMES = {"divergent": "diverging", "acceptance": "acceptance_rate", "steps": "n_steps"}


class Chains(Posterior):
    """Draws of Markov chains: (1/KS) sum_ks delta(w - w_ks), S draws of each of K chains.

    `print(posterior.summary())` shows the estimates with their diagnostics.

    Args:
        target: Target of the fit.
        w: Draws in unconstrained parameters, (K, S, P).
        buffers: The network's buffers.
        statistics: Statistics of each draw by name, (K, S): "energy", "acceptance", "divergent", "tree_depth", "steps",
            as far as the sampler has them.
        momenta: Whether the energy includes a kinetic energy. Without it, E-BFMI has no meaning.
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
        on_disk = w.untyped_storage().filename is not None  # mapped from a file, possibly larger than the memory
        self.w = w.detach() if on_disk else w.detach().clone()
        self._measured: Summary | None = None
        self._summary: Summary | None = None
        self.statistics: dict[str, Tensor] = {}
        for name, t in (statistics or {}).items():
            got = f"'{name}' of the shape {tuple(t.shape)}"
            require(t.shape == w.shape[:2], "statistics", "Chains", f"have the shape {tuple(w.shape[:2])}", got)
            # in the model's dtype, so that a file stores them unchanged
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
        """Chains of the finite draws (K, S, P) at the start; without any, of the current position (K, P)."""
        finite = 0 if draws is None else int(torch.isfinite(draws).all(-1).all(0).long().cumprod(0).sum())
        if draws is None or finite == 0:
            return cls(target, now.unsqueeze(-2), buffers)
        return cls(target, draws[:, :finite], buffers, {n: t[:, :finite] for n, t in (statistics or {}).items()})

    # The draws.

    @property
    def num_chains(self) -> int:
        """Number of chains, K."""
        return self.w.shape[0]

    @property
    def num_draws(self) -> int:
        """Number of draws per chain, S."""
        return self.w.shape[1]

    @cached_property
    def draws(self) -> dict[str, Tensor]:
        """Draws of every parameter by name, (chain, draw, ...), in constrained parameters."""
        return self.model.layout.constrain(self.w)

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """n of all draws, (n, P): without replacement if there are enough, otherwise with replacement."""
        return next(self.pieces([n], generator))

    def pieces(self, sizes: list[int], generator: torch.Generator) -> Iterator[Tensor]:
        """Draws for one prediction in blocks of the given sizes, without replacement if there are enough."""
        w = self.w.flatten(0, 1)
        places = chosen(len(w), sum(sizes), generator).to(w.device)
        return (w[some].to(self.model.device) for some in places.split(sizes))  # draws on disk are read on the CPU

    def join(self) -> None:
        """Gather the chains of all processes, truncated to the same number of draws."""
        draws = int(gather(torch.tensor([self.num_draws], device=self.w.device)).min())
        self.w = gather(self.w[:, :draws])
        self.statistics = {name: gather(t[:, :draws]) for name, t in self.statistics.items()}

    @property
    def mean(self) -> dict[str, Tensor]:
        return {name: x.mean((0, 1)) for name, x in self.draws.items()}

    def evidence(self) -> Evidence:
        raise InputError(f"{self.method or 'A set of chains'} gives no evidence: its draws have no density.")

    # Diagnostics.

    @property
    def diagnostics(self) -> dict[str, dict[str, Tensor]]:
        """R-hat, bulk and tail ESS and the standard error of the mean, each by parameter, in the parameter's shape."""
        measures = {"r_hat": r_hat, "ess_bulk": ess_bulk, "ess_tail": ess_tail, "mcse_mean": mcse_mean}
        return {name: {p: measure(x) for p, x in self.draws.items()} for name, measure in measures.items()}

    @property
    def divergences(self) -> Tensor:
        """The (chain, draw) indices of divergent draws, (n, 2); empty for samplers without trajectories."""
        found = self.statistics.get("divergent")
        return torch.empty(0, 2, dtype=torch.long) if found is None else found.bool().nonzero()

    def summary(self) -> Summary:
        """Mean, sd, quantiles and diagnostics of every entry of every parameter, computed once.

        Entries that a support keeps constant, such as those above the diagonal of a Cholesky factor, are left out.

        Returns:
            A `Summary`: `print` it, or read `summary["r_hat"]`, `summary.row("theta[0]")`, `summary.to_dict()`.
        """
        if self._summary is None:
            status = self.status
            self._summary = replace(self._table(), status=str(status))
        return self._summary

    def _table(self) -> Summary:
        """The summary without a status."""
        if self._measured is None:
            columns, names = [], []
            for block in self.model.layout.blocks:
                x = self.draws[block.name]
                flat, free = x.reshape(*x.shape[:2], -1), varying(block.bijector).to(x.device)
                columns.append(flat if bool(free.all()) else flat[..., free])
                names += [n for n, varies in zip(labels(block.name, x.shape[2:]), free.tolist(), strict=True) if varies]
            energy = self.statistics.get("energy") if self.momenta else None
            self._measured = Summary.of(
                names,
                columns,
                divergences=len(self.divergences) if "divergent" in self.statistics else None,
                bfmi=None if energy is None else bfmi(energy),
                title=self.method,
            )
        return self._measured

    def judged(self, history: Mapping[str, Tensor] | None = None) -> Status:
        """The status from R-hat and ESS of every entry, or of some of many coordinates, and from the sampler."""
        return self._judged if self._known is None else worst([self._known, self._judged])

    @cached_property
    def _judged(self) -> Status:
        """The status from the draws and their statistics."""
        if self.num_draws < 4:
            few = f"{self.num_draws} draws per chain say nothing about convergence: give the fit more steps."
            return Status("not_converged", few.replace("1 draws per chain say", "1 draw per chain says"))
        table = self._table() if self.w.numel() <= STATUS_NUMBERS else self._some()
        if bool(torch.isnan(table["r_hat"]).all()):
            return Status("not_converged", "No quantity varies: the chains have not moved. Try another start.")
        problem = table.disagreement or table.shortage
        if problem and has_network(self.model):
            look = "Weights have symmetries that chains need not cross, so look at function_space(x)."
            return Status("doubtful", f"{problem} {look}")
        if problem:
            return Status("not_converged", problem)
        return Status("doubtful", " ".join(table.trouble)) if table.trouble else CONVERGED

    def quick_status(self) -> Status:
        """The sampler's status, or a status for a density whose chains clearly disagree in some coordinates."""
        if self._known is not None or has_network(self.model) or self.num_draws < MIN_WARNING_DRAWS:
            return self._known or CONVERGED
        places = self._places(QUICK_NUMBERS)
        reduction = r_hat(self.w[..., places])
        worst_place = int(reduction.nan_to_num(nan=0.0).argmax())
        if not float(reduction[worst_place]) > WARNING_R_HAT:
            return CONVERGED
        name = name_of(self.target, int(places[worst_place]))
        reason = f"R-hat is {float(reduction[worst_place]):.3g} for {name}: the chains disagree"
        return Status("not_converged", f"{reason}. Let them run longer, or reparameterise the model.")

    def _places(self, numbers: int) -> Tensor:
        """Evenly spaced coordinates, as many as keep all their draws within `numbers` values."""
        few = max(1, numbers // (self.num_chains * self.num_draws))
        return torch.linspace(0, self.w.shape[2] - 1, min(few, self.w.shape[2])).long().unique()

    def _some(self) -> Summary:
        """The summary of evenly spaced coordinates, in unconstrained parameters: ranks are the same there."""
        places = self._places(STATUS_NUMBERS)
        names = [name_of(self.target, int(place)) for place in places]
        return Summary.of(names, self.w[..., places], len(self.divergences))

    def function_space(self, x: Any) -> Summary:
        """Mean, sd, quantiles and diagnostics of the mean predictions at inputs x.

        The weights of a network have symmetries, so two chains may represent the same function at weights that never
        agree. Predictions have no such symmetries: use their R-hat and ESS to assess convergence.

        Args:
            x: Inputs: a tensor, an array, or a tuple for a network of several inputs.

        Returns:
            A `Summary` with one row per prediction.
        """
        self.predict(x, samples=1)  # raises an error for invalid inputs
        model = self.model
        assert has_network(model)
        parts = isinstance(x, tuple) or (isinstance(x, list) and isinstance(x[0], Tensor))
        inputs = model.prepare_inputs(as_batch(x if parts else (x,), "of x"))
        found, w = [], self.w.flatten(0, 1)
        some = max(1, BLOCK_NUMBERS // max(1, len(inputs[0])))
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

    # Export.

    def to_arviz(self, data: Any = None) -> Any:
        """Convert the draws to ArviZ: an InferenceData, or a DataTree from ArviZ 1 on.

        The groups are posterior, sample_stats and log_likelihood (one value per row and draw, for `az.loo`). A network
        also has observed_data and posterior_predictive, for posterior predictive checks. A density that is a single
        `log_prob` has no rows. Memory grows with draws x rows.

        Args:
            data: Data for the groups that need them. Default: None, the data of the fit; a posterior from a file has
                none.

        Returns:
            The ArviZ object.
        """
        az = extra("arviz", "plot")
        groups = {"posterior": {name: as_array(x) for name, x in self.draws.items()}}
        if self.statistics:
            groups["sample_stats"] = {ARVIZ_NAMES.get(n, n): as_array(t) for n, t in self.statistics.items()}
        rows = self.data if data is None else self.model.bind(data)[1]
        if rows is not None and rows.num_data is not None:
            own = self.replicated(rows) if has_network(self.model) else {}
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
        """The targets of a network's rows, (row, ...), and replicates of them per draw, (chain, draw, row, ...)."""
        w, model, generator = self.w.flatten(0, 1), self.model, stream(self.seed, "replicated", device=self.w.device)
        assert has_network(model)
        observed, drawn = [], []
        for *inputs, targets in self._blocks(rows):
            with torch.no_grad():
                outputs = model.outputs(w, tuple(inputs), self.buffers, self.target.event)
                drawn.append(model.likelihood.draw(outputs, model.learnt_at(w), generator))
            observed.append(targets)
        together = torch.cat(drawn, 1).unflatten(0, self.w.shape[:2])
        return {"posterior_predictive": together, "observed_data": torch.cat(observed)}

    def _blocks(self, rows: Data) -> Iterator[Batch]:
        """One pass over rows, in blocks that keep one value per row and draw within the memory limit."""
        return rows.blocks(max(1, BLOCK_NUMBERS // (self.num_chains * self.num_draws)))

    def stored_status(self) -> dict[str, str] | None:
        """The sampler's status; the rest follows from the draws."""
        return None if self._known is None else asdict(self._known)

    def load_status(self, stored: Mapping[str, Any] | None, told: bool) -> None:
        self._known = None if stored is None else Status(**stored)

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


def finite(w: Tensor) -> bool:
    """Whether all draws (K, S, P) are finite, checked in blocks."""
    rows = max(1, BLOCK_NUMBERS // w.shape[-1])
    return all(bool(torch.isfinite(some).all()) for some in w.flatten(0, 1).split(rows))


def as_array(t: Tensor) -> Any:
    """Convert a tensor on any device to a numpy array."""
    return t.detach().cpu().numpy()
