"""The identity of a fit, which a resumed fit must share, and the text form of a method."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TYPE_CHECKING, Any

from priory.core.distributed import rank, spread, world
from priory.fitting.store import checksum, fixed, prior_fingerprint
from priory.methods.base import Method
from priory.posteriors import Posterior

if TYPE_CHECKING:
    from collections.abc import Iterable

    from priory.core.data import Data
    from priory.fitting.run import Run


def repr_of(method: Method[Any]) -> str:
    """Return the method as the user would write it, with the options that differ from their defaults."""
    options = []
    for f in dataclasses.fields(method):  # pyright: ignore[reportArgumentType] - a method is a dataclass
        value = vars(method)[f.name]
        if f.repr and value is not f.default and value != f.default:
            named = value.method if isinstance(value, Posterior) else getattr(value, "__name__", None)
            text = repr_of(value) if isinstance(value, Method) and not isinstance(value, type) else repr(value)
            options.append(f"{f.name}={named or text}")
    return f"{type(method).__name__}({', '.join(options)})"


def identity(run: Run, rows: Data) -> dict[str, Any]:
    """Return the properties that a resumed fit must share with the interrupted one, as JSON."""
    model, target = run.target.model, run.target
    return {
        "method": " ".join([repr_of(run.method), *code_of(vars(run.method).values())]),
        "model": model.describe(),
        "type": str(model.dtype),
        "prior": prior_fingerprint(model),
        "rows": rows.num_data,
        "network's fixed part": fixed(model),
        "functions": code_of(vars(model).values()),
        "data": [checksum(t.cpu().contiguous()) for t in rows.tensors or (rows.some(16) if rows.num_data else ())],
        "weights": None if rows.weights is None else checksum(rows.weights),
        "batch size": rows.batch_size,
        "steps": run.plan.steps,
        "seed": run.seed,
        "process": [rank(), world()] if spread(run.method) else [0, 1],
        "temperature": [target.temperature, target.tempers],
    }


def code_of(values: Iterable[Any]) -> list[str]:
    """Return hashes of the bytecode of the functions among some values, since all lambdas share a name."""
    codes = [value.__code__ for value in values if hasattr(value, "__code__")]
    return [hashlib.blake2b(c.co_code + repr(c.co_consts).encode(), digest_size=8).hexdigest() for c in codes]
