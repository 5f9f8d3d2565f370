"""Draws of Markov chains, with their convergence diagnostics."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from priory.core.distributed import gather, rank
from priory.core.errors import InputError, require
from priory.core.tables import counted
from priory.diagnostics import bfmi, ess_bulk, ess_mean, ess_tail, mcse_mean, nested_r_hat, r_hat
from priory.diagnostics.convergence import by_superchain
from priory.diagnostics.flatness import name_of
from priory.diagnostics.summary import Summary, labels
from priory.models.base import has_network
from priory.posteriors.arviz import exported
from priory.posteriors.base import Evidence, Posterior, choose_indices
from priory.posteriors.frames import frame_of
from priory.posteriors.function_space import FunctionSpace, training_inputs
from priory.posteriors.status import CONVERGED, Status, worst
from priory.posteriors.summaries import varying

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from priory.core.data import Batch
    from priory.models.target import Target

MIN_WARNING_DRAWS, WARNING_R_HAT = 100, 1.1  # draws per chain and R-hat from which fit warns
QUICK_CHECK_ELEMENTS = 1 << 20  # draws x coordinates that `fit` checks to decide whether it warns
STATUS_CHECK_ELEMENTS = 1 << 22  # draws x coordinates that a status checks; if there are more, some coordinates
BLOCK_ELEMENTS = 1 << 24  # predictions or likelihoods that are computed together


class Chains(Posterior):
    """Draws of Markov chains: (1/KS) sum_ks delta(w - w_ks), S draws of each of K chains.

    `print(posterior.summary())` shows the estimates with their diagnostics.

    Args:
        target: Target of the fit.
        w: Draws in unconstrained parameters, (K, S, P).
        buffers: The network's buffers. Default: None, those of the model.
        statistics: Statistics of each draw by name, (K, S): "energy", "acceptance", "divergent", "tree_depth", "steps",
            as far as the sampler has them. Default: None.
        momenta: Whether the energy includes a kinetic energy. Without it, E-BFMI has no meaning. Default: True.
        superchains: Superchain of each chain, (K,) integers: chains of one superchain shared a start. There must be two
            superchains or more, of the same number of chains. Default: None, there are no superchains.
        inputs: For a network, inputs at whose predictions the chains are compared, one tensor per part. Default: None,
            32 inputs of the data of the fit, once `data` is set.
    """

    kind: ClassVar[str] = "chains"

    def __init__(
        self,
        target: Target,
        w: Tensor,
        buffers: Mapping[str, Tensor] | None = None,
        statistics: Mapping[str, Tensor] | None = None,
        momenta: bool = True,
        superchains: Tensor | Sequence[int] | None = None,
        inputs: Batch | None = None,
    ) -> None:
        super().__init__(target, buffers)
        self.momenta = momenta
        self._compared_inputs = inputs
        ok = isinstance(w, Tensor) and w.ndim == 3 and w.numel() > 0 and w.shape[2] == target.size
        must = f"be draws (chain, draw, {target.size} coordinates), one or more"
        require(ok, "w", "Chains", must, f"the shape {tuple(getattr(w, 'shape', ()))}")
        require(finite(w), "w", "Chains", "be finite", "a draw that is not")
        on_disk = w.untyped_storage().filename is not None  # mapped from a file, possibly larger than the memory
        self.w = w.detach() if on_disk else w.detach().clone()
        self.superchains: Tensor | None = None
        if superchains is not None:
            by_superchain(superchains, len(w), "Chains")
            self.superchains = torch.as_tensor(superchains).detach().long().cpu().clone()
        self._draws_table: Summary | None = None
        self._functions_table: Summary | None = None
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
        superchains: Tensor | None = None,
    ) -> Chains:
        """Return chains of the draws (K, S, P) before the first non-finite one, or of the position `now`."""
        finite = 0 if draws is None else int(torch.isfinite(draws).all(-1).all(0).long().cumprod(0).sum())
        if draws is None or finite == 0:
            return cls(target, now.unsqueeze(-2), buffers, superchains=superchains)
        kept = {n: t[:, :finite] for n, t in (statistics or {}).items()}
        return cls(target, draws[:, :finite], buffers, kept, superchains=superchains)

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

    @property
    def stored_w(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride] - read only
        """All draws, chain after chain, (K S, P)."""
        return self.w.flatten(0, 1)

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """Return n of all draws, (n, P): without replacement if there are enough, otherwise with replacement."""
        return next(self.draw_blocks([n], generator))

    def draw_blocks(self, sizes: list[int], generator: torch.Generator) -> Iterator[Tensor]:
        """Yield draws for one prediction in blocks of the given sizes, without replacement if there are enough."""
        w = self.w.flatten(0, 1)
        indices = choose_indices(len(w), sum(sizes), generator).to(w.device)
        return (w[block].to(self.model.device) for block in indices.split(sizes))  # draws on disk are read on the CPU

    def join(self) -> None:
        """Gather the chains of all processes, truncated to the same number of draws."""
        draws = int(gather(torch.tensor([self.num_draws], device=self.w.device)).min())
        self.w = gather(self.w[:, :draws])
        self.statistics = {name: gather(t[:, :draws]) for name, t in self.statistics.items()}
        if self.superchains is not None:  # no two processes share a superchain
            count = int(self.superchains.max() - self.superchains.min()) + 1
            own = self.superchains - self.superchains.min() + rank() * count
            self.superchains = gather(own.to(self.w.device)).cpu()

    @property
    def mean(self) -> dict[str, Tensor]:
        return {name: x.mean((0, 1)) for name, x in self.draws.items()}

    def evidence(self) -> Evidence:
        raise InputError(f"{self.method or 'A set of chains'} gives no evidence: its draws have no density.")

    # Diagnostics.

    @property
    def diagnostics(self) -> dict[str, dict[str, Tensor]]:
        """R-hat, bulk and tail ESS and the standard error of the mean, each by parameter, in the parameter's shape.

        Chains in superchains also have nested R-hat.
        """
        measures = {"r_hat": r_hat, "ess_bulk": ess_bulk, "ess_tail": ess_tail, "mcse_mean": mcse_mean}
        ids = self.superchains
        if ids is not None:
            measures["nested_r_hat"] = lambda x: nested_r_hat(x, ids)
        return {name: {p: measure(x) for p, x in self.draws.items()} for name, measure in measures.items()}

    @property
    def divergences(self) -> Tensor:
        """The (chain, draw) indices of divergent draws, (n, 2); empty for samplers without trajectories."""
        found = self.statistics.get("divergent")
        return torch.empty(0, 2, dtype=torch.long) if found is None else found.bool().nonzero()

    def summary(self) -> Summary:
        """Return a table of mean, sd, quantiles and diagnostics of every entry of every parameter, computed once.

        Entries that a support keeps constant, such as those above the diagonal of a Cholesky factor, are left out.
        Chains in superchains have a column "nested_r_hat" beside "r_hat"; the status of short chains depends on it. For
        a network, `summary().predictions` is a table of mean predictions at training inputs. It is printed first, and
        decides whether the chains have converged: weights have symmetries, and need not agree.

        Returns:
            A `Summary`: `print` it, or read `summary["r_hat"]`, `summary.row("theta[0]")`, `summary.to_dict()`.
        """
        if self._summary is None:
            status = self.status
            self._summary = replace(self._table(), status=str(status), predictions=self._predictions_table)
        return self._summary

    def _table(self) -> Summary:
        """Return the summary without a status."""
        if self._draws_table is None:
            columns, names = [], []
            for block in self.model.layout.blocks:
                x = self.draws[block.name]
                flat, free = x.reshape(*x.shape[:2], -1), varying(block.bijector).to(x.device)
                columns.append(flat if bool(free.all()) else flat[..., free])
                names += [n for n, varies in zip(labels(block.name, x.shape[2:]), free.tolist(), strict=True) if varies]
            self._draws_table = Summary.of(
                names,
                columns,
                divergences=len(self.divergences) if "divergent" in self.statistics else None,
                bfmi=self._bfmi,
                title=self.method,
                superchains=self.superchains,
            )
            if self.rate_note:
                self._draws_table = replace(self._draws_table, remarks=[f"L{self.rate_note[1:]}."])
        return self._draws_table

    @property
    def rate_note(self) -> str:
        """A phrase with the learning rate that a sampler read from its target; empty if it read none."""
        rate, halvings = self.history.get("learning_rate"), self.history.get("halvings")
        if rate is None or halvings is None or not len(rate):
            return ""
        halved = f", halved {counted(round(float(halvings[-1])), 'time')}" if float(halvings[-1]) >= 0.5 else ""
        return f"learning rate {float(rate[-1]):.2g}, read from the curvature in the burn-in{halved}"

    def _status_text(self) -> str:
        return (f", {self.rate_note}" if self.rate_note else "") + super()._status_text()

    def compute_status(self, history: Mapping[str, Tensor] | None = None) -> Status:
        """Return the status from the sampler, and from R-hat and ESS of all entries, or of some of very many."""
        return self._draws_status if self._given_status is None else worst([self._given_status, self._draws_status])

    @property
    def functions(self) -> FunctionSpace | None:
        """The quantities by which chains of a network are compared; None for a density, or without any inputs."""
        if self._compared_inputs is None and has_network(self.model) and self.data is not None:
            self._compared_inputs = training_inputs(self.data)
        return (
            None if self._compared_inputs is None else FunctionSpace(self.target, self._compared_inputs, self.buffers)
        )

    @property
    def _draws_status(self) -> Status:
        """The status from the draws and their statistics."""
        if self.num_draws < 4 and self.superchains is None:
            few = f"{self.num_draws} draws per chain say nothing about convergence: give the fit more steps."
            return Status("not_converged", few.replace("1 draws per chain say", "1 draw per chain says"))
        table = self._predictions_table
        if table is None:
            table = self._table() if self.w.numel() <= STATUS_CHECK_ELEMENTS else self._summary_of_some()
        if bool(torch.isnan(table[table.agreement]).all()):
            return Status("not_converged", "No quantity varies: the chains have not moved. Try another start.")
        problem = table.disagreement or table.shortage
        if problem and has_network(self.model) and self._predictions_table is None:
            remedy = "Weights have symmetries that chains need not cross: check function_space(x) instead."
            return Status("doubtful", f"{problem} {remedy}")
        trouble = replace(table, divergences=len(self.divergences), bfmi=self._bfmi).trouble
        if problem:
            return Status("not_converged", " ".join([problem, *trouble]))
        return Status("doubtful", " ".join(trouble)) if trouble else CONVERGED

    @property
    def _bfmi(self) -> Tensor | None:
        """E-BFMI of each chain or superchain, if the energy includes a kinetic energy."""
        energy = self.statistics.get("energy") if self.momenta else None
        return None if energy is None else bfmi(energy, self.superchains)

    @property
    def _predictions_table(self) -> Summary | None:
        """The summary of the predictions by which chains of a network are compared, computed once."""
        functions = self.functions
        if functions is not None and self._functions_table is None:
            rows = len(functions.inputs[0])
            of = "" if self.num_data is None else f" of {self.num_data:,}"
            title = f"Mean predictions at {rows}{of} training inputs, by which the chains are compared:"
            x, names = functions(self.w), functions.names(self.w[0, 0])
            table = Summary.of(names, x, title=title, superchains=self.superchains, noun="predictions")
            self._functions_table = table
        return self._functions_table

    def quick_status(self) -> Status:
        """Return the sampler's status, or "not_converged" for a density whose chains clearly disagree.

        Chains in superchains are compared by nested R-hat, whose noise depends on the draws per superchain.
        """
        ids, functions = self.superchains, self.functions
        per_start = 1 if ids is None else self.num_chains // len(ids.unique())
        unknown = has_network(self.model) and functions is None
        if self._given_status is not None or unknown or per_start * self.num_draws < MIN_WARNING_DRAWS:
            return self._given_status or CONVERGED
        if functions is not None:
            w, names = functions(self.w), functions.names(self.w[0, 0])
        else:
            coordinates = self._spaced_coordinates(QUICK_CHECK_ELEMENTS)
            w, names = self.w[..., coordinates], [name_of(self.target, int(i)) for i in coordinates]
        r_hats = r_hat(w) if ids is None else nested_r_hat(w, ids)
        worst_index = int(r_hats.nan_to_num(nan=0.0).argmax())
        if not float(r_hats[worst_index]) > WARNING_R_HAT:
            return CONVERGED
        measure, who = ("R-hat", "chains") if ids is None else ("Nested R-hat", "superchains")
        reason = f"{measure} is {float(r_hats[worst_index]):.3g} for {names[worst_index]}: the {who} disagree"
        return Status("not_converged", f"{reason}. Let them run longer, or reparameterise the model.")

    def _spaced_coordinates(self, max_elements: int) -> Tensor:
        """Return evenly spaced coordinates, as many as have at most `max_elements` values in all their draws."""
        count = max(1, max_elements // (self.num_chains * self.num_draws))
        return torch.linspace(0, self.w.shape[2] - 1, min(count, self.w.shape[2])).long().unique()

    def _summary_of_some(self) -> Summary:
        """Return the summary of evenly spaced coordinates, unconstrained: monotone maps don't change ranks."""
        coordinates = self._spaced_coordinates(STATUS_CHECK_ELEMENTS)
        names = [name_of(self.target, int(coordinate)) for coordinate in coordinates]
        return Summary.of(names, self.w[..., coordinates], len(self.divergences), superchains=self.superchains)

    def function_space(self, x: Any) -> Summary:
        """Return a table of mean, sd, quantiles and diagnostics of the mean predictions at inputs x.

        The weights of a network have symmetries, so two chains may represent the same function at weights that never
        agree. Predictions have no such symmetries: use their R-hat and ESS to assess convergence.

        Args:
            x: Inputs: a tensor, an array, or a tuple for a network of several inputs.

        Returns:
            A `Summary` with one row per prediction.
        """
        self.predict(x, samples=1)  # raises an error for invalid inputs
        means = FunctionSpace(self.target, self._inputs(x), self.buffers).predictions(self.w.flatten(0, 1))
        means = means.unflatten(0, self.w.shape[:2])
        names = labels("y", means.shape[2:])
        title = f"{self.method}: mean predictions".lstrip(": ")
        return Summary.of(names, means.flatten(2), title=title, superchains=self.superchains, noun="predictions")

    # Export.

    def to_arviz(self, data: Any = None) -> Any:
        """Convert the draws to ArviZ: an InferenceData, or a DataTree from ArviZ 1 on.

        The groups are posterior, sample_stats and log_likelihood (one value per row and draw, for `az.loo`). A network
        also has observed_data and posterior_predictive, for posterior predictive checks. A density that is a single
        `log_prob` has no rows. Superchains are the variable `superchain` of constant_data, one value per chain. Memory
        grows with draws x rows.

        Args:
            data: Data for the groups that need them. Default: None, the data of the fit; a posterior from a file has
                none.

        Returns:
            The ArviZ object.
        """
        return exported(self, data)

    def log_likelihood(self, data: Any = None, samples: int | None = None, seed: int = 0) -> Tensor:
        found = super().log_likelihood(data, samples, seed)
        return found.unflatten(0, self.w.shape[:2]) if samples is None else found

    def to_pandas(self, samples: int | None = None, seed: int = 0) -> Any:
        if samples is not None:
            return super().to_pandas(samples, seed)
        return frame_of(self.model.layout, self.stored_w, self.num_chains)

    @cached_property
    def relative_efficiency(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride] - read only
        """Effective draws per draw: the mean over all entries of all parameters of ESS / KS, as in ArviZ.

        For a single chain it is 1, and for many coordinates it is estimated from evenly spaced ones.
        """
        total = self.num_chains * self.num_draws
        if self.num_chains == 1:
            return 1.0
        few = self.w.numel() <= STATUS_CHECK_ELEMENTS
        parts = list(self.draws.values()) if few else [self.w[..., self._spaced_coordinates(STATUS_CHECK_ELEMENTS)]]
        sizes = torch.cat([ess_mean(x).reshape(-1) for x in parts])
        return float(sizes.nan_to_num(nan=total).mean()) / total  # NaN is the ESS of a constant, which has no error

    def stored_status(self) -> dict[str, str] | None:
        """Return the sampler's status; the draws determine the rest."""
        return None if self._given_status is None else asdict(self._given_status)

    def load_status(self, stored: Mapping[str, Any] | None, has_status: bool) -> None:
        self._given_status = None if stored is None else Status(**stored)

    def tensors(self) -> dict[str, Tensor]:
        functions = self.functions
        inputs = {} if functions is None else {f"inputs.{i}": x for i, x in enumerate(functions.inputs)}
        statistics = {f"statistics.{name}": t.to(self.w.dtype) for name, t in self.statistics.items()}
        return {"w": self.w, **statistics, **inputs}

    def to_json(self) -> dict[str, Any]:
        types = {name: str(t.dtype).removeprefix("torch.") for name, t in self.statistics.items()}
        ids = {} if self.superchains is None else {"superchains": self.superchains.tolist()}
        return {"types": types, "momenta": self.momenta, **ids}

    @classmethod
    def of_tensors(
        cls, target: Target, tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor], **options: Any
    ) -> Chains:
        types = options["types"]
        statistics = {name: tensors[f"statistics.{name}"].to(getattr(torch, types[name])) for name in types}
        momenta = options.get("momenta", True)  # older files have neither it nor inputs
        inputs = tuple(tensors[f"inputs.{i}"] for i in range(len(tensors)) if f"inputs.{i}" in tensors)
        return cls(target, tensors["w"], buffers, statistics, momenta, options.get("superchains"), inputs or None)

    @classmethod
    def in_model_type(cls, tensors: Mapping[str, Tensor], options: Mapping[str, Any]) -> list[Tensor]:
        return [t for name, t in tensors.items() if not name.startswith("inputs.")]


def finite(w: Tensor) -> bool:
    """Whether all draws (K, S, P) are finite, checked in blocks."""
    rows = max(1, BLOCK_ELEMENTS // w.shape[-1])
    return all(bool(torch.isfinite(block).all()) for block in w.flatten(0, 1).split(rows))
