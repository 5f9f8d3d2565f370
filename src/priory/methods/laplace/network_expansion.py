"""The Laplace approximation of a network: curvature at its weights, prior precision, and tuning by the evidence.

The weights are the result of MAP or of the user's own training. H is the generalised Gauss-Newton matrix in one of the
structures of `priory.curvature`; minus the second derivative of the log prior is diagonal. Cost: one pass over the data
with one backward pass per output, plus the cost of the structure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Independent

from priory.core.data import Data
from priory.core.errors import InputError, warn
from priory.curvature import STRUCTURES, Curvature, Pass, PrecisionGaussian, Selection, select
from priory.curvature.evidence import prior_precision, prior_second_derivative
from priory.curvature.tuning import tune
from priory.methods.laplace.mode_gradient import ModeGradient
from priory.penalties.as_prior.proximal import proximal_blocks
from priory.posteriors.status import CONVERGED, Status

if TYPE_CHECKING:
    from collections.abc import Mapping

    from priory.core.flat import Block
    from priory.methods.laplace.laplace import Laplace
    from priory.models.model import Model
    from priory.models.target import Target

METRIC_NAMES = ("loss", "nll", "log_prior", "gradient")


@dataclass
class NetworkState:
    """Weights of a network and the Gaussians there; `init` computes them, so a step only reports metrics."""

    w: Tensor  # (*B, P)
    buffers: dict[str, Tensor]
    around: list[LocalGaussian | None] = field(
        metadata={"fixed": True}
    )  # one per member; None for weights that are not finite
    data: Data = field(metadata={"fixed": True})
    begun: Status = field(default=CONVERGED, metadata={"fixed": True})  # the status of the fit that found the mode


@dataclass(frozen=True)
class LocalGaussian:
    """The Gaussian at one weight vector, the curvature and precision it is made of, and the check of the mode."""

    curvature: Curvature
    precision: Tensor  # (p,), of the prior, with its temperature
    scale: float  # of the curvature: 1/T times the effect of a tuned noise
    gaussian: PrecisionGaussian
    mode: ModeGradient  # before a prior or a noise was tuned
    log_prior: float
    notes: tuple[str, ...]
    factors: dict[str, Tensor]  # on the prior's precisions
    log_evidence: float | None = None  # if tuning computed it

    def metrics(self, target: Target) -> dict[str, float]:
        """Return the metrics of a step."""
        nll = -self.mode.log_likelihood
        values = (nll - target.prior_weight * self.log_prior, nll, self.log_prior, self.mode.gradient)
        return dict(zip(METRIC_NAMES, values, strict=True))


def expand_at(
    method: Laplace, target: Target, w: Tensor, data: Data, buffers: Mapping[str, Tensor], generator: torch.Generator
) -> LocalGaussian:
    """Compute the Gaussian at one weight vector; a noise that the evidence sets is overwritten in it."""
    model = target.network_model("Laplace")
    kind = (method.curvature, method.samples, generator, buffers)
    selection = selection_at(method, target, w, data, buffers, generator)
    check_prior(target, w, selection)
    structure = method.structure_for(model)
    of = lambda v: curvature_at(method, structure, Pass(target, v, data, selection, *kind))  # noqa: E731
    curvature, scale = of(w), target.likelihood_power
    precision = target.prior_power * prior_precision(target, w)[selection.places]
    gaussian = curvature.gaussian(precision, scale)
    mode = ModeGradient.of(target, w, data, buffers, gaussian, selection.places)
    notes = (*curvature.notes(), *notes_on_prior(target, selection))
    log_prior = float(target.log_prior(w))
    found = LocalGaussian(curvature, precision, scale, gaussian, mode, log_prior, notes, target.prior.factors)
    if not method.tunes(model):
        return found
    tuned = tune(target, w, curvature, data, buffers, method.tune, kind=method.curvature, again=of)
    w.copy_(tuned.w)
    # rebuilt as if loaded from a file: a basis cached for another prior may have other signs
    curvature = type(curvature).of_tensors(selection, tuned.curvature.tensors(), **tuned.curvature.to_json())
    return LocalGaussian(
        curvature,
        tuned.precision,
        tuned.scale,
        curvature.gaussian(tuned.precision, tuned.scale),
        mode,
        float(tuned.target.log_prior(w)),
        (*notes, *tuned.notes),
        tuned.target.prior.factors,
        tuned.log_evidence,
    )


def selection_at(
    method: Laplace,
    target: Target,
    w: Tensor,
    data: Data,
    buffers: Mapping[str, Tensor],
    generator: torch.Generator,
) -> Selection:
    """Return the coordinates that `over` selects at w."""
    model, size = target.model, method.subnetwork_size
    if size is None:
        return select(model, method.over, data.some(2)[:-1])
    everything = select(model)
    given = Pass(target, w, data, everything, method.curvature, method.samples, generator, buffers)
    rough = curvature_at(method, "diag", given).diagonal()
    precision = rough + target.prior_weight * prior_precision(target, w)[everything.places].to(rough)
    return select(model, everything.places[torch.topk(-precision, size).indices])


def curvature_at(method: Laplace, structure: str, given: Pass) -> Curvature:
    """Compute the curvature in one structure, with the options of the method."""
    options: dict[str, Any] = {"sharing": method.sharing} if structure == "kron" else {}
    if structure == "lowrank" and method.rank is not None:
        options["rank"] = method.rank
    return STRUCTURES[structure].of(given, **options)


def check_batch_norm(model: Model, buffers: Mapping[str, Tensor]) -> None:
    """Require running statistics of batch normalisation, and warn where they were never updated."""
    for name, module in model.network.skeleton.named_modules():
        if not isinstance(module, nn.modules.batchnorm._BatchNorm):
            continue
        if module.running_mean is None:
            raise InputError(
                f"The batch normalisation '{name}' must keep running statistics for Laplace, or data would depend on "
                "each other, got track_running_stats=False."
            )
        key = f"{name}.num_batches_tracked" if name else "num_batches_tracked"
        count = buffers[key] if key in buffers else model.network.given[key]
        if not bool(count.all()):
            warn(
                f"The batch normalisation '{name}' has never updated the running statistics that Laplace runs it on: "
                "train the network in training mode first."
            )


def others_of(target: Target, selection: Selection) -> list[tuple[Block, Distribution]]:
    """Return the selected parameters whose prior is not Gaussian."""
    return [(b, d) for b, d in target.prior.others if b.name in selection.names and isinstance(d, Distribution)]


def check_prior(target: Target, w: Tensor, selection: Selection) -> None:
    """Raise InputError for a log prior that is not concave at the mode, where it has no precision."""
    others = others_of(target, selection)
    if not others:
        return
    free = torch.full_like(w, -math.inf)
    free[selection.places] = prior_second_derivative(target, w)[selection.places]
    for block, distribution in others:
        at = block.start + int(free[block.start : block.stop].argmax())
        if float(free[at]) >= 0:
            raise InputError(
                f"The log prior of '{block.name}' must curve down at the mode, where minus its second derivative "
                f"stands for a precision, got {name_of(distribution)} with {0 - float(free[at]):.3g} at the weight "
                f"{float(w[at]):.3g}: use a Normal prior."
            )
    chosen = torch.zeros_like(w, dtype=torch.bool)
    chosen[selection.places] = True
    meets = proximal_blocks(target.prior)
    held = sum(int((chosen & (w == 0))[block.start : block.stop].sum()) for block in meets)
    if held:
        warn(
            f"{held} weights lie on the corner of their prior at zero, where it has no second derivative: Laplace says "
            "nothing of the corner, and its evidence leaves it out."
        )


def notes_on_prior(target: Target, selection: Selection) -> list[str]:
    """Return notes on how the precision of non-Gaussian priors is approximated."""
    what = "minus the second derivative of its logarithm at the mode stands for a precision"
    return [f"{block.name}: its prior is {name_of(d)}, and {what}." for block, d in others_of(target, selection)]


def name_of(distribution: Distribution) -> str:
    """Return the name of a distribution for messages."""
    base = distribution.base_dist if isinstance(distribution, Independent) else distribution
    return f"the distribution {type(base).__name__}"
