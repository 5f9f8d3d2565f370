"""The history of a fit: one value per step for each metric."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from priory.methods.base import Info


class History:
    """Metrics of a fit, one value per step.

    Values stay on their device and are copied to the CPU in bulk, so that recording a step never waits for the device.
    `Info` declares which metrics are counts, and which may be infinite.
    """

    def __init__(self, past: dict[str, Tensor] | None = None) -> None:
        self._past = past or {}
        self._new: dict[str, list[Tensor | float]] = {}
        self._checked = len(next(iter(self._past.values()))) if self._past else 0  # steps known to be finite
        self._counts: tuple[str, ...] = ()
        self._unchecked: tuple[str, ...] = ()

    def record(self, info: Info) -> None:
        """Append the metrics of one step."""
        self._counts, self._unchecked = info.counts, info.unchecked
        for name, value in info.metrics.items():
            self._new.setdefault(name, []).append(value)

    def values(self, steps: int | None = None) -> dict[str, Tensor]:
        """Return each metric as a float64 vector, one value per step (the mean over members), or its first `steps`."""
        self._gather()
        return {name: values[:steps].clone() for name, values in self._past.items()}

    def recent_mean(self, steps: int = 50) -> dict[str, float]:
        """Return the mean of each metric over the last `steps` steps."""
        self._gather()
        return {name: float(values[-steps:].mean()) for name, values in self._past.items()}

    def summary(self, since: int = 0) -> dict[str, float]:
        """Return the recent mean of each metric, and for counts the sum over the steps from `since` on."""
        means = self.recent_mean()
        return means | {name: float(self._past[name][since:].sum()) for name in self._counts if name in means}

    def first_nonfinite(self) -> tuple[str, int] | None:
        """Return the name and step of the first checked metric since the last call that is not finite, or None."""
        self._gather()
        for name, values in self._past.items():
            if name in self._unchecked:
                continue
            wrong = (~torch.isfinite(values[self._checked :])).nonzero()
            if len(wrong):
                return name, self._checked + int(wrong[0])
        self._checked = max((len(values) for values in self._past.values()), default=0)
        return None

    def _gather(self) -> None:
        """Copy the values recorded since the last call to the CPU."""
        for name, values in self._new.items():
            if values:
                fresh = on_cpu(values)
                fresh = fresh.reshape(len(fresh), -1).mean(1)
                past = self._past.get(name)
                self._past[name] = fresh if past is None else torch.cat([past, fresh])
                values.clear()


def on_cpu(values: list[Tensor | float]) -> Tensor:
    """Return the values of some steps as one float64 tensor on the CPU, (steps, *B), in one copy."""
    if all(type(v) is float for v in values):
        return torch.tensor(values, dtype=torch.float64)
    tensors = [v for v in values if isinstance(v, Tensor)]
    if len(tensors) == len(values) and len({v.dtype for v in tensors}) == 1:
        return torch.stack(tensors).to("cpu", torch.float64)
    return torch.stack([torch.as_tensor(v, dtype=torch.float64, device="cpu") for v in values])
