"""Evaluations that fail at some vectors of a batch give NaN there, and leave the other vectors alone.

One matrix without a Cholesky factor makes `torch.linalg.cholesky` raise an error for a whole batch. For a sampler such
a failure is a point without density: the proposal of one chain is rejected. Inside `FailuresAsNaN` the operations of
`torch.linalg` return NaN for each matrix that they can't handle:

    cholesky, inv, solve, lu_factor     return an error code per matrix, which is read instead of raised
    eigh, svd, eig, pinv, lstsq         raise for a matrix with NaN or infinities, which is replaced by zeros

The mode works below vmap and autograd. A function that is recorded inside it contains the replacements, so that the
graph needs no mode afterwards.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from priory.network.dispatch_mode import DispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable

aten: Any = torch.ops.aten
EVALUATION_ERRORS = (
    RuntimeError,
    ValueError,
    ArithmeticError,
    IndexError,
)  # the errors that an evaluation at one vector may raise
MATRIX_DIMS = 2
# position of the error code in the result, and of the results that it applies to
CODED_OPS: dict[Any, tuple[int, tuple[int, ...]]] = {
    aten.linalg_cholesky_ex.default: (1, (0,)),
    aten.linalg_inv_ex.default: (1, (0,)),
    aten._linalg_solve_ex.default: (3, (0, 1)),
    aten.linalg_lu_factor_ex.default: (2, (0,)),
    aten.linalg_ldl_factor_ex.default: (2, (0,)),
}
READING_CALLS = {
    torch.linalg.cholesky_ex,
    torch.linalg.inv_ex,
    torch.linalg.solve_ex,
    torch.linalg.lu_factor_ex,
    torch.linalg.ldl_factor_ex,
}
RAISING_OPS = {
    aten._linalg_eigh.default,
    aten._linalg_svd.default,
    aten.linalg_eig.default,
    aten.linalg_pinv.atol_rtol_tensor,
    aten.linalg_lstsq.default,
}
REPLACED_OPS = {aten._linalg_check_errors.default, aten.cholesky.default, *CODED_OPS, *RAISING_OPS}


class FailuresAsNaN(DispatchMode):
    """A context in which `torch.linalg` returns NaN for a matrix that it can't handle.

    A function that calls `torch.linalg.cholesky_ex` and the like handles the error codes itself, and gets the results
    of torch.

    Example:
        >>> matrices = torch.stack([torch.eye(2), -torch.eye(2)])
        >>> with FailuresAsNaN():
        ...     factors = torch.linalg.cholesky(matrices)
        >>> factors[:, 0, 0].tolist()
        [1.0, nan]
    """

    def __init__(self) -> None:
        super().__init__()
        self.codes_are_read = False
        self.calls = PublicCalls(self)

    def __enter__(self) -> Self:
        self.calls.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.calls.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        return self.replaced(func, args, options) if func in REPLACED_OPS else func(*args, **options)

    def replaced(self, func: Any, args: Any, options: dict[str, Any]) -> Any:
        """What an operation of `REPLACED_OPS` returns."""
        if func is aten._linalg_check_errors.default:
            return None
        if func in CODED_OPS and not self.codes_are_read:
            return coded(func, args, options)
        if func in RAISING_OPS:
            return sanitised(func, args, options)
        if func is aten.cholesky.default:
            return coded(aten.linalg_cholesky_ex.default, args, options)[0]
        return func(*args, **options)


class PublicCalls(TorchFunctionMode):
    """Tells a `FailuresAsNaN` which calls return their error codes to the function that is evaluated."""

    def __init__(self, mode: FailuresAsNaN) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in READING_CALLS:
            return func(*args, **(kwargs or {}))
        self._mode.codes_are_read = True
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._mode.codes_are_read = False


def failures_as_nan(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called inside `FailuresAsNaN`."""

    def run(*args: Any) -> Any:
        with FailuresAsNaN():
            return function(*args)

    return run


def coded(func: Any, args: Any, options: dict[str, Any]) -> tuple[Tensor, ...]:
    """Call an operation that returns error codes, and set what it returns for a matrix with an error to NaN."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **options, "check_errors": False}
    found = list(func(**given))
    place, results = CODED_OPS[func]
    sound = found[place] == 0
    for i in results:
        found[i] = torch.where(wide(sound, matrix_dims(func, i, args)), found[i], math.nan)
    return tuple(found)


def matrix_dims(func: Any, place: int, args: Any) -> int:
    """The number of trailing dimensions of one matrix, or of one vector, in a result."""
    if func is not aten._linalg_solve_ex.default or place != 0:
        return MATRIX_DIMS
    a, b = args[:2]  # b is a batch of vectors under the rule of torch.linalg.solve
    return 1 if b.ndim == 1 or (a.ndim - 1 == b.ndim and b.shape == a.shape[:-1]) else MATRIX_DIMS


def sanitised(func: Any, args: Any, options: dict[str, Any]) -> Any:
    """Call an operation with zeros for each matrix that is not finite, and set what it returns for that one to NaN."""
    first = args[0]
    sound = finite(first)
    given = [torch.where(wide(sound), first, 0.0), *args[1:]]
    if func is aten.linalg_lstsq.default:
        second, own = args[1], finite(args[1])
        sound, given[1] = sound & own, torch.where(wide(own), second, 0.0)
    found = func(*given, **options)
    if isinstance(found, Tensor):
        return torch.where(wide(sound), found, math.nan)
    return tuple(nan_unless(sound, one) for one in found)


def nan_unless(sound: Tensor, found: Tensor) -> Tensor:
    """A result with NaN where a matrix is not sound; ranks and empty results stay as they are."""
    if not (found.is_floating_point() or found.is_complex()) or found.numel() == 0:
        return found
    return torch.where(wide(sound, found.ndim - sound.ndim), found, math.nan)


def finite(matrix: Tensor) -> Tensor:
    """Whether all entries of each matrix (*B, n, m) are finite, (*B,)."""
    return (matrix - matrix).sum((-2, -1)) == 0


def wide(sound: Tensor, dims: int = MATRIX_DIMS) -> Tensor:
    """One flag per matrix with `dims` further dimensions."""
    return sound[(..., *[None] * dims)]
