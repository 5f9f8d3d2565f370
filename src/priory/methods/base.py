"""The interface of a method: hyper-parameters, declared traits, and three functions that the driver calls.

A method is a frozen dataclass. `init` makes a State, `step` improves it, `posterior` turns it into a posterior. It
never sees a module, only a `Target`. Every tensor of a State has the leading shape that `init` was given (chains,
members and restarts are one mechanism), except those declared otherwise. A State is donated: `step` may overwrite it. A
field of a State with the metadata "scratch" is overwritten by every step before it is read, one with "fixed" is made
anew by `init`: neither is copied or stored. One with "lead" has its leading shape after that many dimensions.

State is what the next step needs; what is only worth reporting belongs to Info.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeVar, runtime_checkable

from priory.core.errors import InputError, require
from priory.core.streams import stream
from priory.methods.draw_policy import DrawPolicy

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from priory.core.data import Data
    from priory.models.target import Target
    from priory.posteriors import Posterior

P_co = TypeVar("P_co", bound="Posterior", covariant=True)


@dataclass(frozen=True)
class Traits:
    """What the driver, an ensemble and other callers must know of a method before they run it.

    Args:
        reads: "batch" if each step reads a minibatch, "pass" if it reads the whole data (`steps` then counts
            iterations or draws). Default: "batch".
        follows: Whether the method begins from what another has found, as Laplace does from MAP: then `default_start`
            names that method, which gets the user's epochs, steps and callbacks. Default: False.
        own_start: Whether a `start` that is a string or a dict is the method's own to read. Default: False.
        fixed_start: Whether every fit starts from the same vector, whatever the seed. Default: False.
        chains: Whether the method runs chains of its own and keeps draws (`Info.draw`). Default: False.
        spread: Whether its chains or members are shared among the processes of `torch.distributed`. Default: False.
        draws: Where draws are kept, and when there are enough of them; for methods with `chains`.
        finds_mode: Whether it descends the target's loss to one mode, so that an ensemble may anchor its members.
            Default: False.
        sets_prior: Whether it sets the scales of the prior by the evidence. Default: False.
        draws_masks: Whether it draws dropout masks itself, with the network's own dropout switched off. Default: False.
        learns_rates: Whether dropout rates are learnt together with the weights. Default: False.
        fixed_scales: Whether the scales of its posterior are no part of the objective, as SWAG's. Default: False.
        trains_buffers: Whether it can train a network whose buffers training writes, such as the statistics of batch
            normalisation. The driver refuses such a network otherwise. Default: True.
        empirical_priors: Whether it takes a prior with infer="empirical"; the driver refuses it otherwise.
            Default: True.
    """

    reads: Literal["batch", "pass"] = "batch"
    follows: bool = False
    own_start: bool = False
    fixed_start: bool = False
    chains: bool = False
    spread: bool = False
    draws: DrawPolicy = field(default_factory=DrawPolicy)
    finds_mode: bool = False
    sets_prior: bool = False
    draws_masks: bool = False
    learns_rates: bool = False
    fixed_scales: bool = False
    trains_buffers: bool = True
    empirical_priors: bool = True


@dataclass(frozen=True)
class Info:
    """What one step reports.

    Args:
        metrics: Values for the history, by name; tensors have the leading shape of the State.
        draw: A draw to keep, for samplers. Default: None.
        done: Whether nothing is left to do. Default: False.
        counts: Names of metrics that are counts: progress shows their sum over the steps instead of a recent mean.
        unchecked: Names of metrics that may be infinite or NaN in a fit that works; any other stops the fit.
    """

    metrics: dict[str, Tensor | float]
    draw: Tensor | None = None
    done: bool = False
    counts: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Which rows each step reads: all of `data`, or `early` before the step `turn`, with `held` held out."""

    data: Data
    steps: int
    turn: int = 0
    early: Data | None = None
    held: Data | None = None

    def rows(self, step: int) -> Data:
        """The rows that this step reads."""
        return self.early if self.early is not None and step < self.turn else self.data

    def epochs(self, step: int) -> int:
        """The number of completed passes over the rows after this many steps."""
        if self.early is None:
            return step // self.data.steps_per_epoch
        early = min(step, self.turn) // self.early.steps_per_epoch
        return early + max(0, step - self.turn) // self.data.steps_per_epoch


class Options:
    """The base class of methods: refuses an unknown option in one sentence, and has the common defaults."""

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        known = [f.name for f in fields(cls) if f.init]  # pyright: ignore[reportArgumentType] - methods are dataclasses
        for name in options:
            if name not in known:
                raise InputError(f"The options of {cls.__name__} must be among {', '.join(known)}, got {name!r}.")
        return super().__new__(cls)

    def default_start(self, model: Any) -> Any:
        """The method to fit first where `start` names none, or None."""
        return None

    def plan(self, target: Target, data: Data, steps: int, seed: int) -> Plan:
        """Which rows each step reads: all of them."""
        return Plan(data, steps)


@runtime_checkable
class Method(Protocol[P_co]):
    """How to infer; `P_co` is the class of its posterior."""

    @property
    def traits(self) -> Traits:
        """What the driver must know of the method; may depend on its options."""
        ...

    @property
    def start(self) -> Any:
        """A method that is fitted first, or a posterior to begin from, or None."""
        ...

    def default_start(self, model: Any) -> Any:
        """The method to fit first where `start` names none, or None; for methods whose traits say `follows`."""
        ...

    def length(self, data: Data) -> int:
        """The number of steps if the user names neither epochs nor steps."""
        ...

    def plan(self, target: Target, data: Data, steps: int, seed: int) -> Plan:
        """Which rows each step reads; `Plan(data, steps)` for most methods."""
        ...

    def init(
        self,
        target: Target,
        plan: Plan,
        generator: torch.Generator,
        shape: torch.Size,
        start: Posterior | None = None,
    ) -> Any:
        """The first State, whose tensors have the leading shape `shape`."""
        ...

    def step(self, target: Target, state: Any, batch: Any, generator: torch.Generator) -> tuple[Any, Info]:
        """One improvement, from a Batch or, for a method that reads passes, from Data; may overwrite `state`."""
        ...

    def posterior(self, target: Target, state: Any, draws: Tensor | None = None) -> P_co:
        """The posterior at this State; `draws` are those that the driver has kept."""
        ...


def check_method(method: Any, name: str, owner: str) -> None:
    """Refuse what isn't a method, and the class of one."""
    got = f"the class {method.__name__}: write {method.__name__}()" if isinstance(method, type) else repr(method)
    ok = isinstance(method, Method) and not isinstance(method, type)
    require(ok, name, owner, "be a method such as MeanField()", got)


def check_traits(method: Method[Any], target: Target) -> None:
    """Refuse a model that the method's traits exclude."""
    owner, traits = type(method).__name__, method.traits
    if not traits.trains_buffers:
        written = ", ".join(target.buffers())
        must = "have no buffers that training writes, as BatchNorm has: call net.eval() before Model"
        require(not written, "model", owner, must, written)
    if not traits.empirical_priors:
        must = "be a distribution, as infer='variational' makes it"
        require(not target.empirical, "prior", owner, must, "infer='empirical'")


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
    return {} if start is None else start.target.prior.factors
