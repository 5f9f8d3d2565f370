"""What a method is: hyper-parameters, and three functions that the one driver calls.

A method is a frozen dataclass. `init` makes a State, `step` improves it, `posterior` says what it stands for.
It never sees a module, only a `Target`. Every tensor of a State has the leading shape that `init` was given
(chains, members and restarts are one mechanism), except those that say otherwise. A State is donated: `step`
may overwrite it. A field with the metadata "scratch" is overwritten by every step before it is read, one with
"fixed" is made anew by `init`: neither is copied or stored. One with "lead" has its leading shape after so many
dimensions.

State is what the next step needs; what a person wants to see is in Info.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, runtime_checkable

from priory.core.errors import InputError
from priory.core.streams import stream
from priory.models.model import Model

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from priory.core.data import Data
    from priory.models.target import Target
    from priory.posteriors import Posterior


@dataclass(frozen=True)
class Info:
    """What a step has to tell: numbers for the history, a draw to keep, whether there is nothing left to do."""

    metrics: dict[str, Tensor | float]
    draw: Tensor | None = None
    done: bool = False


@dataclass(frozen=True)
class Plan:
    """Which rows each step reads: all of them, or `early` until the step `turn`, with `held` kept back."""

    data: Data
    steps: int
    turn: int = 0
    early: Data | None = None
    held: Data | None = None

    def rows(self, step: int) -> Data:
        """The rows that this step reads."""
        return self.early if self.early is not None and step < self.turn else self.data

    def epochs(self, step: int) -> int:
        """How many passes over its rows have ended after so many steps."""
        if self.early is None:
            return step // self.data.steps_per_epoch
        early = min(step, self.turn) // self.early.steps_per_epoch
        return early + max(0, step - self.turn) // self.data.steps_per_epoch


class Options:
    """Refuses, in one sentence, an option that a method doesn't have."""

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        known = [f.name for f in fields(cls) if f.init]  # pyright: ignore[reportArgumentType] - methods are dataclasses
        for name in options:
            if name not in known:
                raise InputError(f"The options of {cls.__name__} must be among {', '.join(known)}, got {name!r}.")
        return super().__new__(cls)


@runtime_checkable
class Method(Protocol):
    """How to infer."""

    reads: ClassVar[Literal["batch", "pass"]]
    """A minibatch a step, or the whole re-iterable Data (then steps count iterations or draws)."""

    @property
    def start(self) -> Any:
        """A method that is fitted first, or a posterior to begin from, or None."""
        ...

    def length(self, data: Data) -> int:
        """Steps, if the person names none."""
        ...

    def plan(self, target: Target, data: Data, steps: int, seed: int) -> Plan:
        """Which rows each step reads; `Plan(data, steps)` for most."""
        ...

    def init(
        self,
        target: Target,
        plan: Plan,
        generator: torch.Generator,
        shape: torch.Size,
        start: Posterior | None = None,
    ) -> Any:
        """The State to begin with, its tensors led by `shape`."""
        ...

    def step(self, target: Target, state: Any, batch: Any, generator: torch.Generator) -> tuple[Any, Info]:
        """One improvement, from a Batch or, for a method that reads passes, from Data; `state` may be overwritten."""
        ...

    def posterior(self, target: Target, state: Any, draws: Tensor | None = None) -> Posterior:
        """What the State stands for; the draws that the driver kept come with it."""
        ...


@runtime_checkable
class After(Protocol):
    """A method that looks at what another has found: the person's epochs, steps and callbacks are that one's."""

    def default_start(self, model: Any) -> Any:
        """The method to fit first where `start` names none, or None."""
        ...


def centre_of(start: Posterior, owner: str) -> Tensor:
    """The point that a posterior is around, (P,)."""
    if start.point:
        return start.draw(1, stream(0, "centre", device=start.model.device))[0]
    if start.centre is None:
        raise InputError(
            f"The 'at' argument of {owner} must be a posterior with a centre, as MAP leaves it, got {start!r}."
        )
    return start.centre


def factors_of(start: Posterior | None) -> dict[str, Tensor]:
    """What the prior that a posterior was fitted under was multiplied by."""
    return start.model.prior.factors if start is not None and isinstance(start.model, Model) else {}
