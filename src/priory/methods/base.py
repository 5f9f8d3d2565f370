"""The interface of a method: hyper-parameters, declared traits, and three functions that the driver calls.

A method is a frozen dataclass. `init` makes a State, `step` updates it, `posterior` turns it into a posterior. It works
on a `Target`, never on a module. Every tensor of a State has the leading shape passed to `init` (chains, members and
restarts share this mechanism), unless its field says otherwise:

    metadata "scratch"    every step overwrites it before reading it; never copied or stored
    metadata "fixed"      `init` makes it again when a fit resumes; never copied or stored
    metadata "lead"       number of dimensions before its leading shape

`step` may overwrite its State. A State holds what the next step needs; values that are only reported belong
to Info.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field, fields, replace
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

ARGS_SECTION = re.compile(r"^Args:\n((?: {4}.*\n)+)", re.MULTILINE)
ARGS_ENTRY = re.compile(r"^ {4}(\w+):.*\n(?: {5,}.*\n)*", re.MULTILINE)


@dataclass(frozen=True)
class Traits:
    """Properties of a method that the driver, ensembles and other callers need before they run it.

    Args:
        reads: "batch" if each step reads a minibatch, "pass" if it reads the whole data (`steps` then counts
            iterations or draws). Default: "batch".
        follows: Whether the method starts from the result of another, as Laplace does from MAP; `default_start`
            names that method, which gets the user's epochs, steps and callbacks. Default: False.
        own_start: Whether the method itself interprets a `start` that is a string or a dict. Default: False.
        fixed_start: Whether every fit starts from the same vector, whatever the seed. Default: False.
        chains: Whether the method runs several chains itself and keeps draws (`Info.draw`). Default: False.
        spread: Whether its chains or members are shared among the processes of `torch.distributed`. Default: False.
        draws: Where draws are kept, and when there are enough of them; for methods with `chains`.
        finds_mode: Whether it descends the target's loss to one mode, so that an ensemble may anchor its members.
            Default: False.
        sets_prior: Whether it sets the scales of the prior by the evidence. Default: False.
        draws_masks: Whether it draws dropout masks itself, with the network's own dropout switched off. Default: False.
        learns_rates: Whether dropout rates are learnt together with the weights. Default: False.
        fixed_scales: Whether the scales of its posterior are not part of the objective, as for SWAG. Default: False.
        trains_buffers: Whether it can train a network with buffers that training writes, such as batch normalisation
            statistics. Otherwise the driver raises InputError for such a network. Default: True.
        empirical_priors: Whether it supports a prior with infer="empirical"; otherwise the driver raises InputError.
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
    """The report of one step.

    Args:
        metrics: Values for the history, by name; tensors have the leading shape of the State.
        draw: A draw to store, for samplers. Default: None.
        done: Whether the fit is finished. Default: False.
        counts: Names of metrics that are counts, whose sum the progress display shows instead of a recent mean.
            Default: none.
        unchecked: Names of metrics that may be infinite or NaN in a healthy fit; any other stops the fit if it is.
            Default: none.
    """

    metrics: dict[str, Tensor | float]
    draw: Tensor | None = None
    done: bool = False
    counts: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The number of steps of a fit, and the rows that each step reads.

    Args:
        data: All rows.
        steps: Number of steps.
        turn: Step from which all rows are read, where some were held out before. Default: 0.
        early: Rows that are read before `turn`. Default: None, all rows.
        held: Rows that are held out before `turn`. Default: None.
        open_ended: Whether the user has given no length, so that a sampler may end the fit when its draws are enough.
            Default: False.
        search: Whether each step reads all rows as one batch, until the method has found what it looks for. Default:
            False.
    """

    data: Data
    steps: int
    turn: int = 0
    early: Data | None = None
    held: Data | None = None
    open_ended: bool = False
    search: bool = False

    def rows(self, step: int) -> Data:
        """Return the rows that this step reads."""
        return self.early if self.early is not None and step < self.turn else self.data

    def epochs(self, step: int) -> int:
        """Return the number of completed passes over the rows after this many steps."""
        if self.early is None:
            return step // self.data.steps_per_epoch
        early = min(step, self.turn) // self.early.steps_per_epoch
        return early + max(0, step - self.turn) // self.data.steps_per_epoch


def documented_options(docstring: str | None) -> dict[str, str]:
    """Return the entries of the Args section of a docstring, by the name of the option."""
    section = ARGS_SECTION.search(inspect.cleandoc(docstring or "") + "\n")
    return {entry[1]: entry[0] for entry in ARGS_ENTRY.finditer(section[1])} if section else {}


def with_inherited_options(docstring: str | None, base: type) -> str | None:
    """Append the options that only the docstring of the base class documents to the Args section of a docstring."""
    own = documented_options(docstring)
    inherited = "".join(text for name, text in documented_options(base.__doc__).items() if name not in own)
    if not own or not inherited:
        return docstring
    return ARGS_SECTION.sub(lambda section: section[0] + inherited, inspect.cleandoc(docstring or "") + "\n", count=1)


class Options:
    """Base class of methods: raises InputError for unknown options, and provides common defaults.

    An option that several methods share is documented once, by the base class that declares it. `help` and the
    reference show it for each method, because the Args section of a derived class is completed when it is made.
    """

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if cls.__base__ is not None:
            cls.__doc__ = with_inherited_options(cls.__doc__, cls.__base__)

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        known = [f.name for f in fields(cls) if f.init]  # pyright: ignore[reportArgumentType] - methods are dataclasses
        for name in options:
            if name not in known:
                raise InputError(f"The options of {cls.__name__} must be among {', '.join(known)}, got {name!r}.")
        return super().__new__(cls)

    def default_start(self, model: Any) -> Any:
        """Return the method to fit first if `start` is None, or None."""
        return None

    def length(self, data: Data) -> int:
        """Return the number of steps if the user gives neither epochs nor steps."""
        raise NotImplementedError

    def plan(self, target: Target, data: Data, steps: int, seed: int) -> Plan:
        """Return a plan in which every step reads from all rows."""
        return Plan(data, steps)

    def default_plan(self, target: Target, data: Data, seed: int) -> Plan:
        """Return the plan of a fit whose length the user doesn't give."""
        return replace(self.plan(target, data, self.length(data), seed), open_ended=True)


@runtime_checkable
class Method(Protocol[P_co]):
    """An inference method; `P_co` is the class of its posterior."""

    @property
    def traits(self) -> Traits:
        """Properties that the driver needs; may depend on the options."""
        ...

    @property
    def start(self) -> Any:
        """A method to fit first, a posterior to start from, or None."""
        ...

    def default_start(self, model: Any) -> Any:
        """Return the method to fit first if `start` is None, or None; for methods with the trait `follows`."""
        ...

    def length(self, data: Data) -> int:
        """Return the number of steps if the user gives neither epochs nor steps."""
        ...

    def plan(self, target: Target, data: Data, steps: int, seed: int) -> Plan:
        """Return the rows that each step reads; `Plan(data, steps)` for most methods."""
        ...

    def default_plan(self, target: Target, data: Data, seed: int) -> Plan:
        """Return the plan of a fit whose length the user doesn't give."""
        ...

    def init(
        self,
        target: Target,
        plan: Plan,
        generator: torch.Generator,
        shape: torch.Size,
        start: Posterior | None = None,
    ) -> Any:
        """Return the initial State, whose tensors have the leading shape `shape`."""
        ...

    def step(self, target: Target, state: Any, batch: Any, generator: torch.Generator) -> tuple[Any, Info]:
        """Take one step on a Batch, or on Data for a method that reads passes; may overwrite `state`."""
        ...

    def posterior(self, target: Target, state: Any, draws: Tensor | None = None) -> P_co:
        """Return the posterior at this State; `draws` are those that the driver has stored."""
        ...


def check_method(method: Any, name: str, owner: str) -> None:
    """Raise InputError for anything that isn't an instance of a method."""
    got = f"the class {method.__name__}: write {method.__name__}()" if isinstance(method, type) else repr(method)
    ok = isinstance(method, Method) and not isinstance(method, type)
    require(ok, name, owner, "be a method such as MeanField()", got)


def check_traits(method: Method[Any], target: Target) -> None:
    """Raise InputError for a model that the method's traits exclude."""
    owner, traits = type(method).__name__, method.traits
    if not traits.trains_buffers:
        written = ", ".join(target.buffers())
        must = "have no buffers that training writes, such as those of BatchNorm: call net.eval() before Model"
        require(not written, "model", owner, must, written)
    if not traits.empirical_priors:
        must = "be a distribution, as infer='variational' makes it"
        require(not target.empirical, "prior", owner, must, "infer='empirical'")


def centre_of(start: Posterior, owner: str) -> Tensor:
    """Return the centre of a posterior, (P,)."""
    if start.point:
        return start.draw(1, stream(0, "centre", device=start.model.device))[0]
    if start.centre is None:
        raise InputError(
            f"The 'at' argument of {owner} must be a posterior with a centre, such as the result of MAP, got {start!r}."
        )
    return start.centre


def factors_of(start: Posterior | None) -> dict[str, Tensor]:
    """Return the factors on the prior that a posterior was fitted under."""
    return {} if start is None else start.target.prior.factors
