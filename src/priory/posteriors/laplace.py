"""A Gaussian around a mode, whose precision is the curvature there: the posterior of Laplace's method.

    q(w) = N(w*, Q^-1) over p coordinates of w,    Q = scale H + diag(precision);    the other coordinates stay at w*
    log p(D) ~ log p(D, w*) + p/2 log 2 pi - 1/2 log det Q

A network predicts through its linearisation (Immer, Korzepa and Bauer 2021), for which the curvature is exact:

    f(x) ~ N(f(x; w*), J Q^-1 J'),    J = df(x; w*) / dw

or, on request, through the network itself at draws of w. Coordinates that are held fixed (a noise scale that the
likelihood learns, layers that were not selected) are points throughout.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from priory.constraints import gaussian_mean
from priory.core.errors import InputError, is_integer, require
from priory.core.streams import stream
from priory.curvature import STRUCTURES, Curvature, PrecisionGaussian, select
from priory.curvature.evidence import log_evidence
from priory.curvature.layer_jacobians import LayerJacobians, picks
from priory.models.base import has_network
from priory.network.skeleton import MEMORY_LIMIT
from priory.posteriors.base import Evidence, Posterior
from priory.posteriors.inputs import explain_input_errors
from priory.posteriors.mode import Mode
from priory.posteriors.point import FACTOR_PREFIX
from priory.posteriors.status import UNKNOWN, Status
from priory.predictive import LINKS, Linearised, Prediction

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from priory.core.data import Batch
    from priory.models.target import Target

Through = Literal["linear", "network"]
CURVATURE_PREFIX = "curvature."  # in files, of the curvature's tensors
MAX_JOINT_OUTPUTS = 256  # outputs per row up to which a prediction uses their full covariance
OUTPUTS_PER_PASS = 32  # beyond that, outputs whose backward passes run together
MEAN_DRAWS = 4096  # for the mean of a parameter without a closed form
MAX_DENSE_COORDINATES = 1000  # of which the covariance is written out for a KL divergence


class LaplacePosterior(Posterior):
    """A Gaussian around the mode, N(w*, (scale H + diag(precision))^-1), over the selected coordinates.

    The prior of its target includes the factors that maximising the evidence found.

    Args:
        target: Target of the fit.
        w: Mode in unconstrained parameters, (P,).
        curvature: Curvature H at the mode, over the selected coordinates.
        precision: Diagonal that is added to the curvature, (p,).
        scale: Factor of the curvature.
        gaussian: The Gaussian, if it was already computed. Default: None.
        log_evidence: The evidence, if it was already computed. Default: None, computed when first needed.
        buffers: The network's buffers. Default: None, those of the model.
        through: Default of `predict`: "linear" or "network".
        notes: Where the curvature is coarser than its structure says, one sentence each. Default: none.
        mode: How the mode of a density was found. Default: None.
    """

    kind: ClassVar[str] = "laplace"

    def __init__(
        self,
        target: Target,
        w: Tensor,
        curvature: Curvature,
        precision: Tensor,
        scale: float,
        gaussian: PrecisionGaussian | None = None,
        log_evidence: float | None = None,
        buffers: Mapping[str, Tensor] | None = None,
        through: Through = "linear",
        notes: Sequence[str] = (),
        mode: Mode | None = None,
    ) -> None:
        super().__init__(target, buffers)
        self.w, self.centre = w.detach().clone(), w.detach().clone()
        self.curvature, self.selection = curvature, curvature.selection
        self.precision, self.scale, self._value = precision.detach().clone(), float(scale), log_evidence
        self.gaussian = curvature.gaussian(self.precision, self.scale) if gaussian is None else gaussian
        self.through: Through = through
        self.notes, self.mode = tuple(notes), mode

    def __repr__(self) -> str:
        rows = "no data" if self.num_data is None else f"{self.num_data:,} rows"
        over = f"{self.selection.size:,} of {self.model.layout.size:,} parameters"
        notes = f"; {' '.join(self.notes)}" if self.notes else ""
        found = "" if self.mode is None else f"; {self.mode}"
        kind, by = self.curvature.structure, f"by {self.method}{notes}{self._status_text()}{found}"
        return f"LaplacePosterior({kind} over {over}, {rows}, {by})"

    # The distribution.

    def compute_status(self, history: Mapping[str, Tensor] | None = None) -> Status:
        """The method's status at the mode: the history belongs to the fit of the mode, or to one pass over the data."""
        return self._given_status or UNKNOWN

    def gaussian_coordinates(self) -> tuple[Tensor, Tensor]:
        scale = torch.zeros_like(self.w)
        scale[self.selection.places] = self.gaussian.variance().sqrt().to(scale.dtype)
        return self.w, scale

    def gaussian_distribution(self) -> MultivariateNormal | None:
        if not self.selection.size == self.model.layout.size <= MAX_DENSE_COORDINATES:
            return None
        eye = torch.eye(self.selection.size, dtype=torch.float64, device=self.w.device)
        covariance, places = torch.empty_like(eye), self.selection.places
        found = self.gaussian.solve(eye.to(self.w.dtype)).double()
        covariance[places[:, None], places] = 0.5 * (found + found.mT)
        return MultivariateNormal(self.w.double(), covariance)

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        return self._around(self.gaussian.draw(n, generator))

    def draw_for_prediction(self, n: int, generator: torch.Generator) -> Tensor:
        """Antithetic pairs w* + e, w* - e, whose errors cancel to first order."""
        half = self.gaussian.draw((n + 1) // 2, generator)
        return self._around(torch.cat([half, -half[: n // 2]]))

    def _around(self, deviations: Tensor) -> Tensor:
        w = self.w.repeat(len(deviations), 1)
        w[:, self.selection.places] += deviations
        return w

    @property
    def mean(self) -> dict[str, Tensor]:
        layout, drawn = self.model.layout, set(self.selection.names)
        exact = {block.name: block.free(self.w) for block in layout.blocks if block.bijector.identity}
        if len(exact) == len(layout.blocks):
            return exact
        curved = [b for b in layout.constrained if b.name in drawn]
        at_mode = {b.name: b.bijector.forward(b.free(self.w)) for b in layout.constrained if b.name not in drawn}
        if curved:
            scale = self.gaussian_coordinates()[1]
            draws = layout.constrain(self.draw(MEAN_DRAWS, stream(0, "mean", device=self.model.device)))
            for b in curved:
                alone = b.stop - b.start == 1 or b.bijector.exponential  # its map acts on each coordinate separately
                closed = gaussian_mean(b.bijector, b.free(self.w), b.free(scale)) if alone else None
                at_mode[b.name] = draws[b.name].mean(0) if closed is None else closed
        return {b.name: exact[b.name] if b.name in exact else at_mode[b.name] for b in layout.blocks}

    def log_prob(self, params: Mapping[str, Tensor]) -> Tensor:
        """log q of the selected coordinates, as a density over the constrained parameters."""
        layout, places = self.model.layout, self.selection.places
        layout.refuse_auxiliary("The posterior")
        w = layout.unconstrain(params)
        deviation = w[..., places] - self.w[places]
        value = 0.5 * (self.gaussian.log_det - self.selection.size * math.log(2 * math.pi))
        value = value.to(w) - 0.5 * self.gaussian.quadratic(deviation)
        for block in layout.constrained:
            if block.name in self.selection.names:
                u = block.free(w)
                value = value - block.bijector.log_det(u, block.bijector.forward(u))
        return torch.where(torch.isnan(w[..., places]).any(-1), -torch.inf, value)  # outside the support

    def evidence(self) -> Evidence:
        """The Laplace approximation of the evidence, computed by one pass over the data when first needed or saved."""
        if self._value is None:
            if self.data is None:
                raise InputError("The evidence needs the data of the fit, and this posterior was made without them.")
            log_likelihood = self.target.log_likelihood(self.w, self.data, self.buffers)
            self._value = float(log_evidence(self.target, self.w, self.gaussian, log_likelihood, self.selection))
        return Evidence(self._value, self._kind_of_evidence())

    def _kind_of_evidence(self) -> str:
        if self.target.temperature != 1:
            return f"tempered Laplace evidence, T = {self.target.temperature}, no approximation of log p(D)"
        held = [name for name in self.model.layout.names if name not in self.selection.names]
        if self.selection.size < self.model.layout.size:
            given = ", ".join(held) if 0 < len(held) <= 3 and self.selection.whole else "the coordinates held fixed"
            kind = f"Laplace approximation of log p(D | {given})"
        else:
            kind = "Laplace approximation of log p(D)"
        return f"{kind}, up to a constant: the prior is improper" if self.target.prior.improper else kind

    # Predictions.

    def predict(
        self,
        x: Any,
        samples: int = 64,
        seed: int = 0,
        through: Through | None = None,
        link: Literal["samples", "probit", "extended", "bridge"] = "samples",
    ) -> Prediction:
        """Predict the targets at new inputs.

        The outputs of a row are correlated. Of more than 256 outputs, those at different positions (pixels, tokens) are
        treated as independent, and the classes at one position jointly.

        Args:
            x: New inputs: a tensor, an array, or a tuple for a network of several inputs.
            samples: Number of draws of the outputs, or of the weights with `through="network"`. A Gaussian likelihood
                of the linearised network needs none.
            seed: Seed of the draws.
            through: "linear" for the linearised network, whose outputs are Gaussian, or "network" for draws of the
                weights. Default: None, the choice of the method.
            link: For labels, "samples" (default) or one of the closed forms "probit", "extended" and "bridge".

        Returns:
            A `Prediction`.
        """
        known = through in (None, "linear", "network")
        require(known, "through", "predict", "be 'linear' or 'network'", repr(through))
        links = ("samples", *LINKS)
        require(link in links, "link", "predict", f"be among {', '.join(links)}", repr(link))
        if (through or self.through) == "network" or not has_network(self.model):
            require(link == "samples", "link", "predict", "be 'samples' for draws through the network", repr(link))
            return super().predict(x, samples, seed)
        require(is_integer(samples, 1), "samples", "predict", "be an integer >= 1", repr(samples))
        require(is_integer(seed, -(2**63)), "seed", "predict", "be an integer", repr(seed))
        model = self.model
        labels = link == "samples" or model.likelihood.classes
        must = f"be 'samples' for {model.likelihood!r}, whose targets are numbers"
        require(labels, "link", "predict", must, repr(link))
        mean, covariance = self._marginals(x)
        learnt = model.learnt_at(self.w)
        distribution = Linearised.of(
            model.likelihood, mean, covariance, learnt, self.target.event, int(seed), int(samples), link
        )
        return Prediction.of(distribution, model.prepare_targets)

    def outputs(self, x: Any, joint: bool = False, limit: int = MEMORY_LIMIT) -> tuple[Tensor, Tensor]:
        """Return mean and covariance of the linearised outputs, which are Gaussian.

        Args:
            x: New inputs.
            joint: Whether to return the covariance between all inputs instead of that at each input.
            limit: Memory limit of the Jacobians.

        Returns:
            The mean, (n, *rest), and the covariance: (n, C, C), or (n, C, n, C) if `joint`.
        """
        inputs = self._inputs(x)
        if joint:
            return self._jointly(inputs, limit)
        parts = [
            (rows.outputs, self.gaussian.output_covariance(rows))
            for rows in self._jacobians(inputs).rows(inputs, limit=limit)
        ]
        return torch.cat([mean for mean, _ in parts]), torch.cat([covariance for _, covariance in parts])

    def _marginals(self, x: Any, limit: int = MEMORY_LIMIT) -> tuple[Tensor, Tensor]:
        """Return the mean of the outputs, (n, *rest), and the covariances that predictions need: see `Linearised.of`.

        For few outputs that is the full covariance. Otherwise it is one block for the last dimension, if that holds the
        classes at a position, or the variances only. Each block of outputs has its own forward and backward pass.
        """
        inputs = self._inputs(x)
        jacobians = self._jacobians(inputs)
        rest, outputs = jacobians.plan.rest, jacobians.plan.rest.numel()
        if outputs <= MAX_JOINT_OUTPUTS:
            return self.outputs(x, limit=limit)
        block = rest[-1] if len(rest) > len(self.target.event) else 1
        outputs_per_pass, mean, blocks = max(block, OUTPUTS_PER_PASS // block * block), jacobians.w, []
        for first in range(0, outputs, outputs_per_pass):
            span = range(first, min(outputs, first + outputs_per_pass))
            parts = list(jacobians.rows(inputs, lambda f, _, span=span: picks(f, span), len(span), limit))
            mean = torch.cat([rows.outputs for rows in parts])
            blocks += [torch.cat([blocks_of(self.gaussian.output_covariance(rows), block) for rows in parts])]
        covariance = torch.cat(blocks, 1)  # (n, positions, block, block)
        return mean, covariance.reshape(len(mean), *rest, *([block] if block > 1 else []))

    def _jointly(self, inputs: Batch, limit: int) -> tuple[Tensor, Tensor]:
        """Return the mean of the outputs and J Q^-1 J' between all inputs, with one block of J per side at a time."""
        means, columns = [], []
        jacobians = self._jacobians(inputs)
        chunks = lambda: (chunk for rows in jacobians.rows(inputs, limit=limit) for chunk in rows.chunks(limit))  # noqa: E731
        for left in chunks():
            solved = self.gaussian.solve(left.dense())  # (a, C, p)
            blocks = [torch.einsum("acp,bdp->acbd", solved, right.dense()) for right in chunks()]
            means.append(left.outputs)
            columns.append(torch.cat(blocks, 2))
        return torch.cat(means), torch.cat(columns)

    def _jacobians(self, inputs: Batch) -> LayerJacobians:
        return LayerJacobians(self.target, self.w, inputs, self.selection, self.buffers)

    def _inputs(self, x: Any) -> Batch:
        prepared = super()._inputs(x)
        assert has_network(self.model)
        with explain_input_errors(prepared):
            outputs = self.model.network.at_two_rows(self.w, prepared, self.buffers)
        self._check_rows(tuple(t[:2] for t in prepared), len(outputs))
        return prepared

    # Files.

    def to_json(self) -> dict[str, Any]:
        return {
            "structure": self.curvature.structure,
            "curvature": self.curvature.to_json(),
            "runs": runs(self.selection.places),
            "scale": self.scale,
            "log_evidence": self.log_evidence.value,
            "through": self.through,
            "notes": list(self.notes),
            **({} if self.mode is None else {"mode": asdict(self.mode)}),
        }

    def tensors(self) -> dict[str, Tensor]:
        kept = {CURVATURE_PREFIX + name: t for name, t in self.curvature.tensors().items()}
        kept |= {FACTOR_PREFIX + name: factor for name, factor in self.target.prior.factors.items()}
        return {"w": self.w, "precision": self.precision, **kept}

    @classmethod
    def in_model_type(cls, tensors: Mapping[str, Tensor], options: Mapping[str, Any]) -> list[Tensor]:
        """Return all tensors except those of the curvature, which may be in float64 whatever the model's dtype."""
        return [t for name, t in tensors.items() if not name.startswith(CURVATURE_PREFIX)]

    @classmethod
    def of_tensors(
        cls, target: Target, tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor], **options: Any
    ) -> LaplacePosterior:
        part = lambda prefix: {k[len(prefix) :]: t for k, t in tensors.items() if k.startswith(prefix)}  # noqa: E731
        places = torch.cat([torch.arange(start, stop) for start, stop in options["runs"]])
        selection = select(target.model, places)
        curvature = STRUCTURES[options["structure"]].of_tensors(
            selection, part(CURVATURE_PREFIX), **options["curvature"]
        )
        return cls(
            target.scaled(part(FACTOR_PREFIX)),
            tensors["w"],
            curvature,
            tensors["precision"],
            options["scale"],
            log_evidence=options["log_evidence"],
            buffers=buffers,
            through=options["through"],
            notes=options["notes"],
            mode=Mode(**options["mode"]) if "mode" in options else None,
        )


def blocks_of(covariance: Tensor, size: int) -> Tensor:
    """Return the diagonal blocks of (n, C, C), as (n, C / size, size, size).

    >>> blocks_of(torch.arange(16).view(1, 4, 4), 2)[0].tolist()
    [[[0, 1], [4, 5]], [[10, 11], [14, 15]]]
    """
    cut = covariance.unflatten(2, (-1, size)).unflatten(1, (-1, size))  # (n, positions, size, positions, size)
    return cut.diagonal(dim1=1, dim2=3).movedim(-1, 1)


def runs(places: Tensor) -> list[list[int]]:
    """Convert ascending integers to [start, stop) runs, the form in which files store coordinates.

    >>> runs(torch.tensor([0, 1, 2, 5]))
    [[0, 3], [5, 6]]
    """
    ends = torch.cat([torch.where(places.diff() != 1)[0] + 1, torch.tensor([len(places)], device=places.device)])
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    return [[int(places[a]), int(places[b - 1]) + 1] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
