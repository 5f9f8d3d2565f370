"""Inputs of predictions: their checks, and errors that say what is wrong with them."""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from priory.core.data import tensor_of
from priory.core.errors import InputError, require
from priory.models.base import has_network

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from priory.core.data import Batch
    from priory.models.base import BaseModel

P = ParamSpec("P")
R = TypeVar("R")


def reject_unknown_options(predict: Callable[P, R]) -> Callable[P, R]:
    """Raise a clear error for options that only other posteriors take, such as the `link` of Laplace's predict."""
    allowed = list(inspect.signature(predict).parameters)[2:]

    @functools.wraps(predict)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        for name, value in options.items():
            must = f"be left out: {type(args[0]).__name__} takes {', '.join(allowed)}"
            require(name in ("x", *allowed), name, "predict", must, repr(value))
        return predict(*args, **options)

    return checked


def inputs_for_prediction(model: BaseModel, x: Any) -> Batch:
    """Convert new inputs to the network's dtype, and raise an error that says what is wrong with x."""
    if not has_network(model):
        raise InputError(
            "A posterior over a Density has no network to predict with: use posterior.predictive(function)."
        )
    several = isinstance(x, tuple) or (isinstance(x, list) and len(x) > 0 and isinstance(x[0], Tensor))
    parts = tuple(x) if several else (x,)
    name = lambda i: f"Part {i} of the 'x' argument of predict" if len(parts) > 1 else "The 'x' argument of predict"  # noqa: E731
    inputs = tuple(tensor_of(part, name(i)) for i, part in enumerate(parts))
    rows, shapes = {len(t) for t in inputs}, [tuple(t.shape) for t in inputs]
    must = "have one row or more, and equally many in each part"
    require(len(rows) == 1 and min(rows) > 0, "x", "predict", must, shapes)
    for t in inputs:
        bad_rows = (~torch.isfinite(t)).reshape(len(t), -1).any(1)
        got = "NaN" if bool(torch.isnan(t).any()) else "infinity"
        first = int(bad_rows.byte().argmax())
        require(not bool(bad_rows.any()), "x", "predict", "be finite", f"{got} in row {first}")
    return model.prepare_inputs(inputs)


@contextlib.contextmanager
def explain_input_errors(inputs: Batch) -> Iterator[None]:
    """Raise a clear error if the network can't process the inputs."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        shapes = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in inputs)
        reason = str(error).strip().split("\n")[0]
        raise InputError(f"The network must take the inputs, got {shapes} and it raised: {reason}") from error
