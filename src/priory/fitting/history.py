"""The history of a fit: one number a step by name, gathered as they come and read in bulk."""

from __future__ import annotations

import torch
from torch import Tensor

VITAL = ("loss", "elbo", "nll", "kl", "log_prior", "bound")  # others may be infinite, as the energy of a lost chain is


class Told:
    """What the steps have told. Numbers stay tensors until somebody asks, so that a step never waits for them."""

    def __init__(self, past: dict[str, Tensor] | None = None) -> None:
        self._past = past or {}
        self._new: dict[str, list[Tensor | float]] = {}
        self._looked = len(next(iter(self._past.values()))) if self._past else 0

    def hear(self, metrics: dict[str, Tensor | float]) -> None:
        """Take one step's numbers."""
        for name, value in metrics.items():
            self._new.setdefault(name, []).append(value)

    def history(self, steps: int | None = None) -> dict[str, Tensor]:
        """Every number so far by name, a float64 vector with one value a step (the mean over members)."""
        self._gather()
        return {name: values[:steps].clone() for name, values in self._past.items()}

    def recent(self, steps: int = 50) -> dict[str, float]:
        """The mean of the last numbers."""
        self._gather()
        return {name: float(values[-steps:].mean()) for name, values in self._past.items()}

    def first_not_finite(self) -> tuple[str, int] | None:
        """The name and the step of the first number since the last look that is not finite."""
        self._gather()
        for name, values in self._past.items():
            if name not in VITAL:
                continue
            wrong = (~torch.isfinite(values[self._looked :])).nonzero()
            if len(wrong):
                return name, self._looked + int(wrong[0])
        self._looked = max((len(values) for values in self._past.values()), default=0)
        return None

    def _gather(self) -> None:
        for name, values in self._new.items():
            if values:
                fresh = torch.stack([torch.as_tensor(v, dtype=torch.float64, device="cpu") for v in values])
                fresh = fresh.reshape(len(fresh), -1).mean(1)
                past = self._past.get(name)
                self._past[name] = fresh if past is None else torch.cat([past, fresh])
                values.clear()
