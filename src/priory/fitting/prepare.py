"""The first stage of a fit: bind the data to the model, check both, and make the target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from priory.core.data import Data
from priory.core.distributed import spread
from priory.core.errors import require
from priory.methods.base import Method, check_method, check_traits
from priory.models.base import BaseModel, has_network
from priory.models.target import Target
from priory.posteriors import Posterior

if TYPE_CHECKING:
    from priory.fitting.settings import Settings

TRIAL_ROWS = 128  # rows on which the model is evaluated once before a fit


@dataclass(frozen=True)
class Problem:
    """The target, the rows and the method of a fit."""

    target: Target
    rows: Data
    method: Method[Any]


def prepare(
    model: Any,
    data: Any,
    method: Method[Any],
    batch_size: int | None,
    settings: Settings,
    weights: Any = None,
    num_data: int | None = None,
) -> Problem:
    """Bind the data to the model, and raise errors for invalid arguments before anything is trained."""
    must = "be a Model, a Density or a latent model, such as pr.Model(net, pr.Gaussian())"
    require(isinstance(model, BaseModel), "model", "fit", must, type(model).__name__)
    check_method(method, "method", "fit")
    owner, traits = type(method).__name__, method.traits
    if method.start is not None and not reads_own_start(method) and not isinstance(method.start, Posterior):
        check_method(method.start, "start", owner)
    traits.draws.check(owner, spread(method))
    model = in_units_of_start(model, method)
    model, rows = model.bind(data, batch_size, weights, num_data)
    target = make_target(model, rows, settings.temperature, settings.tempers, traits.draws_masks)
    check_traits(method, target)
    if rows is not data:
        model.warn_of_scale(rows)
    if traits.follows:
        method.plan(target, rows, method.length(rows), settings.seed)  # raises errors before the first method is fitted
    return Problem(target, rows, method)


def in_units_of_start(model: Any, method: Method[Any]) -> Any:
    """Return the model in the units of the posterior that the method starts from, whose weights belong to them.

    Weights of a network that was trained elsewhere belong to rows that are not standardised.
    """
    if not has_network(model):
        return model
    owner, start = type(method).__name__, method.start
    if isinstance(start, Posterior) and has_network(start.model):
        units = start.model.units
        if model.standardise and model.units is None and units is not None:
            return model.with_units(units)
        given = "with standardise=True" if units is not None else "without standardise=True"
        same = model.units == units and (units is not None or not model.standardise)
        require(same, "start", owner, "be a posterior of a model that standardises alike", f"one {given}")
    trained = method.traits.fixed_start and model.standardise
    must = "be a method or a posterior where the model standardises: a trained network expects its own inputs"
    require(not trained, "at", owner, must, "'network'")
    return model


def reads_own_start(method: Method[Any]) -> bool:
    """Whether the method's `start` is a name or parameters that the method interprets itself."""
    return method.traits.own_start and isinstance(method.start, (str, dict))


def make_target(
    model: BaseModel, rows: Data, temperature: float = 1.0, tempers: Any = "likelihood", drops: bool = False
) -> Target:
    """Make the target of a model and prepared data, after a trial evaluation on a few rows and a check of all targets.

    Args:
        model: The model.
        rows: Its data, prepared by the model.
        temperature: T. Default: 1.
        tempers: "likelihood" or "posterior". Default: "likelihood".
        drops: Whether the method draws dropout masks itself. Default: False.

    Returns:
        The target.
    """
    trial_rows = rows.some(TRIAL_ROWS) if rows.num_data is not None else ()
    target = Target(model, rows.num_data, temperature, tempers, model.event_shape(trial_rows), rows.single)
    model.check(target.form(trial_rows), rows, drops)
    return target
