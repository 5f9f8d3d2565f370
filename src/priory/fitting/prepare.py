"""The first stage of a fit: bind the data to the model, check both, and make the target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from priory.core.data import Batch, Data
from priory.core.distributed import spread
from priory.core.errors import require, warn
from priory.latent import Latent
from priory.methods.base import Method, check_method, check_traits
from priory.models.density import Density
from priory.models.model import Model
from priory.models.target import Target
from priory.posteriors import Posterior

if TYPE_CHECKING:
    from priory.fitting.settings import Settings

TRIAL_ROWS = 128  # rows on which the model is evaluated once before a fit


@dataclass(frozen=True)
class Problem:
    """What is to be inferred, from which rows, by which method."""

    target: Target
    rows: Data
    method: Method[Any]


def prepare(model: Any, data: Any, method: Method[Any], batch_size: int | None, settings: Settings) -> Problem:
    """Bind the data to the model, and refuse what can't be fitted before anything is trained."""
    require(isinstance(model, (Model, Density)), "model", "fit", "be a Model or a Density", type(model).__name__)
    check_method(method, "method", "fit")
    owner, traits = type(method).__name__, method.traits
    if method.start is not None and not reads_own_start(method) and not isinstance(method.start, Posterior):
        check_method(method.start, "start", owner)
    traits.draws.check(owner, spread(method))
    if isinstance(model, Latent):
        model, rows = model.meet(data, batch_size)
    else:
        rows = data if isinstance(data, Data) else Data.of(data, batch_size).prepared(model.prepare)
    target = make_target(model, rows, settings.temperature, settings.tempers, traits.draws_masks)
    check_traits(method, target)
    if isinstance(model, Model) and rows.tensors is not None and rows is not data:
        warn_of_scale(model, rows.tensors)
    if traits.follows:
        method.plan(target, rows, method.length(rows), settings.seed)  # refuses before the first method is fitted
    return Problem(target, rows, method)


def reads_own_start(method: Method[Any]) -> bool:
    """Whether the method's `start` is a name or numbers that the method reads itself."""
    return method.traits.own_start and isinstance(method.start, (str, dict))


def make_target(
    model: Model | Density, rows: Data, temperature: float = 1.0, tempers: Any = "likelihood", drops: bool = False
) -> Target:
    """The target of a model and prepared data, after one trial evaluation on a few rows and a check of all targets.

    Args:
        model: The model.
        rows: Its data, prepared by the model.
        temperature: T. Default: 1.
        tempers: "likelihood" or "posterior". Default: "likelihood".
        drops: Whether the method draws dropout masks itself. Default: False.
    """
    if isinstance(model, Model):
        require(rows.num_data is not None, "data", "fit", "be inputs and targets, such as (X, y)", None)
    some = rows.some(TRIAL_ROWS) if rows.num_data is not None else ()
    event = some[-1].shape[1:] if some and isinstance(model, Model) else torch.Size()
    target = Target(model, rows.num_data, temperature, tempers, event, rows.single)
    if isinstance(model, Model):
        model.check(some, drops)
    else:
        model.check(target.form(some))
    if rows.tensors is not None and isinstance(model, Model):
        model.prepare(rows.tensors)  # again, now that the network's outputs are known: labels must fit them
    return target


def warn_of_scale(model: Model, tensors: Batch) -> None:
    """Warn of inputs or targets far from unit scale, for which priors, learning rates and first noises are made."""
    targets = [("targets", tensors[-1])] if model.likelihood.unit_scale else []
    for name, t in [("inputs", tensors[0]), *targets]:
        if not t.is_floating_point() or t.ndim > 2 or len(t) < 2:
            continue
        columns = t.double().reshape(len(t), -1)
        centre, scale, top = columns.mean(0), columns.std(0), columns.abs().amax(0)
        odd = (scale > 50) | ((top > 0) & (top < 0.05)) | (centre.abs() > 20 * scale.clamp_min(0.5))
        if bool(odd.any()):
            column = int(odd.nonzero()[0])
            where = f", column {column}," if columns.shape[1] > 1 else ""
            warn(
                f"The {name}{where} have mean {float(centre[column]):.3g} and standard deviation "
                f"{float(scale[column]):.3g}: standardise them, as priors and learning rates are made for unit scale."
            )
