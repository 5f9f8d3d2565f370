"""Values and gradients at many vectors w (S, P) of a function that takes one vector (P,).

`torch.vmap` evaluates it in one pass. Gradients are traced once per shape with `make_fx`, because running the recorded
graph takes a third to a half of the time of running vmap through grad each time. A function that vmap does not support
is evaluated in a loop, with a warning. Distributions do not validate their arguments meanwhile (`unchecked`): outside
its support a log density is NaN or -inf instead of an error. A matrix that `torch.linalg` can't handle gives NaN at its
own vector alone (`priory.network.failures`).
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.func import grad_and_value, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from priory.core.errors import warn
from priory.network.failures import failures_as_nan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MAX_TRACES = 16  # graphs kept at a time, one per shape; a data set has two (full batches and the last one)


class Vectorised:
    """A function fn(w: (P,), *args) -> scalar or tensor, evaluated over a leading dimension of w.

    Args:
        fn: The function of one vector.
        owner: Subject of the warning if vmap fails, such as "This network".
        loop: Whether to evaluate in a loop instead of with vmap.

    >>> square = Vectorised(lambda w, a: (a * w * w).sum(), "the example")
    >>> value, gradient = square.values_and_grads(torch.eye(2), torch.tensor(3.0))
    >>> value.tolist(), gradient.tolist()
    ([3.0, 3.0], [[6.0, 0.0], [0.0, 6.0]])
    """

    def __init__(self, fn: Callable[..., Tensor], owner: str, loop: bool = False) -> None:
        self.fn, self.owner, self.loop = fn, owner, loop
        self._traces: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def values(self, w: Tensor, *args: Any) -> Tensor:
        """fn for each row of w (S, P), stacked: (S, ...)."""
        if not self.loop:
            many = vmap(self.fn, in_dims=(0, *[None] * len(args)))
            try:
                with unchecked():
                    try:
                        return many(w, *args)
                    except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
                        return failures_as_nan(many)(w, *args)
            except (RuntimeError, TypeError, ValueError) as error:
                self._fall_back(error, w, args)
        return torch.stack([self.fn(row, *args) for row in w])

    def values_and_grads(self, w: Tensor, *args: Any, each: tuple[Tensor, ...] = ()) -> tuple[Tensor, Tensor]:
        """fn and its gradient for each row of w (S, P): (S,) and (S, P).

        Row s of w is evaluated with row s of the tensors in `each`, (S, ...), which follow the shared arguments.
        """
        if not self.loop:
            parts, spec = tree_flatten(args)
            tensors = [t for t in parts if isinstance(t, Tensor)]
            constants = tuple(None if isinstance(t, Tensor) else t for t in parts)
            key = (constants, str(spec), *[(tuple(t.shape), t.dtype, t.device) for t in (w, *each, *tensors)])
            if key not in self._traces:
                try:
                    self._trace(key, w, each, tensors, constants, spec)
                except (RuntimeError, TypeError, ValueError) as error:
                    self._fall_back(error, w, (*args, *(t[0] for t in each)))
            if not self.loop:
                with torch.no_grad():
                    gradient, value = self._traces[key](w, *each, *tensors)
                return value, gradient
        pairs = [value_and_grad(self.fn, row, *args, *(t[i] for t in each)) for i, row in enumerate(w)]
        return torch.stack([v for v, _ in pairs]), torch.stack([g for _, g in pairs])

    def _trace(
        self,
        key: tuple[Any, ...],
        w: Tensor,
        each: tuple[Tensor, ...],
        tensors: list[Tensor],
        constants: tuple[Any, ...],
        spec: TreeSpec,
    ) -> None:
        def one(v: Tensor, *given: Tensor) -> Tensor:
            own, rest = given[: len(each)], iter(given[len(each) :])
            # tensors are inputs of the graph, numbers are constants in it
            return self.fn(v, *tree_unflatten([next(rest) if c is None else c for c in constants], spec), *own)

        many = vmap(grad_and_value(one), in_dims=(0, *[0] * len(each), *[None] * len(tensors)))
        while len(self._traces) >= MAX_TRACES:
            self._traces.pop(next(iter(self._traces)))
        with unchecked():
            self._traces[key] = make_fx(failures_as_nan(many))(w, *each, *tensors)

    def _fall_back(self, error: Exception, w: Tensor, args: tuple[Any, ...]) -> None:
        self.fn(w[0], *args)  # an error of the function itself is raised here unchanged
        self.loop = True
        reason = str(error).strip().split("\n")[0][:160]
        warn(f"{self.owner} can't be vectorised over draws by vmap, so it runs in a loop, which is slower ({reason}).")


@contextmanager
def unchecked() -> Iterator[None]:
    """Disable `validate_args` of distributions: it depends on values and breaks tracing and vmap."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def value_and_grad(fn: Callable[..., Tensor], w: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """fn(w) and its gradient for one vector."""
    leaf = w.detach().requires_grad_()
    with torch.enable_grad():
        value = fn(leaf, *args)
        (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), gradient
