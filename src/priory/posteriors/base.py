"""What is known after the data: one interface for every posterior.

A posterior is a distribution over the flat vector w with the model it belongs to. Subclasses say how to draw
w and what their tensors are; sampling by name, predicting, saving and the rest are written once, here.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar

import torch
from torch import Tensor

from priory.core.data import Data, tensor_of
from priory.core.errors import InputError, require, whole
from priory.core.streams import stream
from priory.models.base import has_network
from priory.posteriors.status import CONVERGED, FEWEST_STEPS, NOT_IN_FILE, UNKNOWN, Status, of_history, worst
from priory.posteriors.summaries import summarise
from priory.predictive import Prediction, predict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from os import PathLike

    from priory.core.data import Batch
    from priory.diagnostics import Summary
    from priory.models.target import Target

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Evidence:
    """log p(D) or what stands for it, in nats: `kind` says which, `error` is a standard error (0 if exact)."""

    value: float
    kind: str
    error: float = 0.0

    def __float__(self) -> float:
        return self.value


DRAWN = 1 << 21  # numbers of weights that a prediction draws at a time: they are used while still in the cache
KINDS: dict[str, type[Posterior]] = {}  # by the name that a file has for each


def with_own_options(predict: Callable[P, R]) -> Callable[P, R]:
    """Refuse in one sentence what the predictions of other posteriors take, such as the `link` of Laplace's."""
    own = list(inspect.signature(predict).parameters)[2:]

    @functools.wraps(predict)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        for name, value in options.items():
            must = f"be left out: {type(args[0]).__name__} takes {', '.join(own)}"
            require(name in ("x", *own), name, "predict", must, repr(value))
        return predict(*args, **options)

    return checked


class Posterior(ABC):
    """A distribution over a model's parameters, given data."""

    kind: ClassVar[str]  # how a file calls it

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "kind" in vars(cls):
            KINDS[cls.kind] = cls
        if "predict" in vars(cls):
            setattr(cls, "predict", with_own_options(vars(cls)["predict"]))  # noqa: B010 - its type stays the subclass's

    def __init__(self, target: Target, buffers: Mapping[str, Tensor] | None = None) -> None:
        self.target, self.model = target, target.believed_model()
        self.buffers = {name: b.detach().clone() for name, b in (buffers or {}).items()}
        self.history: dict[str, Tensor] = {}
        self.method = ""
        self.seed = 0
        self.data: Data | None = None  # what it was fitted to; not stored
        self._evidence: Evidence | None = None
        self._generator: torch.Generator | None = None
        self._known: Status | None = None  # what its method, or its file, says of the fit
        self.stopped: Status | None = None  # what the driver says of a fit that ended before its time
        self.warned = False  # whether a warning has said already what its status says

    # What a subclass says.

    @abstractmethod
    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """n draws of the flat vector, (n, P)."""

    def draw_for_prediction(self, n: int, generator: torch.Generator) -> Tensor:
        """n draws whose average is wanted: independent, unless a posterior knows how to balance them."""
        return self.draw(n, generator)

    def starts(self, n: int, generator: torch.Generator) -> Tensor:
        """n vectors for fits to start from, (n, P): draws, as far apart as a posterior knows how to have them."""
        return self.draw(n, generator)

    def pieces(self, sizes: list[int], generator: torch.Generator) -> Iterator[Tensor]:
        """Draws for one prediction, so many at a time; those of a set that is stored are taken from it but once."""
        return (self.draw_for_prediction(size, generator) for size in sizes)

    centre: Tensor | None = None  # what draws for a prediction are mirrored around, if they are

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What a file keeps."""

    def own(self) -> dict[str, Any]:
        """What a file keeps beside tensors, as JSON; `of_tensors` gets it back."""
        return {}

    @classmethod
    @abstractmethod
    def of_tensors(
        cls, target: Target, tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor], **own: Any
    ) -> Posterior:
        """The posterior that a file kept."""

    @classmethod
    def in_model_type(cls, tensors: Mapping[str, Tensor], own: Mapping[str, Any]) -> list[Tensor]:
        """Those of a file's tensors whose floating type must be the model's: all, unless a posterior says otherwise."""
        return list(tensors.values())

    def results(self) -> dict[str, Any]:
        """What was computed after the fit and a file keeps too, as JSON; `restore_results` gets it back."""
        return {"evidence": None if self._evidence is None else vars(self._evidence)}

    def restore_results(self, results: Mapping[str, Any]) -> None:
        """Take back what `results` wrote."""
        self._evidence = None if results["evidence"] is None else Evidence(**results["evidence"])

    @property
    @abstractmethod
    def mean(self) -> dict[str, Tensor]:
        """E[parameter | D] by name, in the person's own (constrained) parameters."""

    def log_prob(self, params: Mapping[str, Tensor]) -> Tensor:
        """log q at named parameters, as a density over the person's own parameters."""
        raise InputError(f"The posterior of {self.method or type(self).__name__} has no density.")

    def evidence(self) -> Evidence:
        """log p(D), or a bound or an estimate of it."""
        raise InputError(
            f"{self.method or type(self).__name__} gives no evidence: it is a point, and points have no volume."
        )

    point: ClassVar[bool] = False  # whether all draws are equal
    stored_draws: int | None = None  # how many there are, of a posterior that is a set of them

    def gaussian_coordinates(self) -> tuple[Tensor, Tensor] | None:
        """The mean and the standard deviation of each unconstrained coordinate, (P,) both, where it is Gaussian."""
        return None

    def judged(self, history: Mapping[str, Tensor] | None = None) -> Status:
        """What the posterior itself says of its fit: what its method said, and the history of its objective.

        A subclass that knows more, as chains know R-hat, or for which the history is no objective, overrides it.
        `history` is that of the members of an ensemble, if they were fitted as one.
        """
        found = of_history(self.history if history is None else history)
        if self._known is None or found is UNKNOWN:
            return self._known or found
        return worst([self._known, found])

    def join(self) -> None:  # noqa: B027 - most posteriors are the same on every process
        """Take in the chains or members of the other processes, in the order of the processes."""

    # What every posterior does.

    @property
    def num_data(self) -> int | None:
        """N, the number of rows it was fitted to."""
        return self.target.num_data

    @property
    def temperature(self) -> float:
        """T, as the fit had it."""
        return self.target.temperature

    @property
    def parts(self) -> dict[str, float | int | None]:
        """What the objective was made of at the last step, in nats for the whole data, with N and T."""
        last = {name: float(values[-1]) for name, values in self.history.items() if len(values)}
        return {**last, "num_data": self.num_data, "temperature": self.temperature}

    @property
    def log_evidence(self) -> Evidence:
        """log p(D), or what the method has for it; `.kind` says what."""
        if self._evidence is None:
            self._evidence = self.evidence()
        return self._evidence

    def sample(self, n: int = 1, seed: int | None = None) -> dict[str, Tensor]:
        """n draws of every parameter by name, each (n, ...); without a seed each call has new ones."""
        require(whole(n, 1), "n", "sample", "be an integer >= 1", n)
        if seed is not None:
            generator = stream(seed, "sample", device=self.model.device)
        else:
            if self._generator is None:
                self._generator = stream(self.seed, "sample", device=self.model.device)
            generator = self._generator
        return self.model.layout.constrain(self.draw(n, generator))

    @with_own_options
    def predict(self, x: Any, samples: int = 64, seed: int = 0) -> Prediction:
        """What is known of y at new inputs x (a tensor, an array, or a tuple for a network of several inputs)."""
        require(whole(samples, 1), "samples", "predict", "be an integer >= 1", repr(samples))
        require(whole(seed, -(2**63)), "seed", "predict", "be an integer", repr(seed))
        inputs = self._inputs(x)
        assert has_network(self.model)
        generator = stream(seed, "predict", device=self.model.device)
        wanted = 1 if self.point else int(samples)
        few = max(2, 2 * (DRAWN // (2 * self.model.layout.size)))  # an even number, for pairs
        sizes = [min(few, wanted - start) for start in range(0, wanted, few)]
        draws = self.pieces(sizes, generator)
        with taking(inputs):
            prediction = predict(
                self.model, draws, inputs, self.buffers, self.target.event, int(seed), centre=self.centre
            )
        self._check_rows(inputs, len(prediction))
        return prediction

    def _inputs(self, x: Any) -> Batch:
        """New inputs in the network's type, or the sentence that says why not."""
        if not has_network(self.model):
            raise InputError(
                "A posterior over a Density has no network to predict with: use .sample() and your own function."
            )
        several = isinstance(x, tuple) or (isinstance(x, list) and len(x) > 0 and isinstance(x[0], Tensor))
        parts = tuple(x) if several else (x,)
        name = lambda i: f"Part {i} of the 'x' argument of predict" if len(parts) > 1 else "The 'x' argument of predict"  # noqa: E731
        inputs = tuple(tensor_of(part, name(i)) for i, part in enumerate(parts))
        rows, shapes = {len(t) for t in inputs}, [tuple(t.shape) for t in inputs]
        require(len(rows) == 1 and min(rows) > 0, "x", "predict", "have rows, as many in each part", shapes)
        for t in inputs:
            odd = (~torch.isfinite(t)).reshape(len(t), -1).any(1)
            got = "NaN" if bool(torch.isnan(t).any()) else "infinity"
            require(not bool(odd.any()), "x", "predict", "be finite", f"{got} in row {int(odd.byte().argmax())}")
        return self.model.prepare_inputs(inputs)

    def _check_rows(self, inputs: Batch, count: int) -> None:
        """Refuse inputs of which the network makes another number of rows."""
        shapes = [tuple(t.shape) for t in inputs]
        require(count == len(inputs[0]), "x", "predict", "have a row for each prediction", shapes)

    @property
    def status(self) -> Status:
        """Whether the fit converged: `.name` is "converged", "doubtful" or "not_converged", `.reason` a sentence."""
        return worst([self.judged(), *([self.stopped] if self.stopped else [])])

    def quick_status(self) -> Status:
        """What `fit` warns about: the status, without work that a fit should not wait for.

        A method whose own length is so short that its noise is not known was meant to be stopped there.
        """
        short = 0 < max((len(values) for values in self.history.values()), default=0) < FEWEST_STEPS
        return CONVERGED if short else self.status

    def know(self, status: Status, warned: bool = False) -> None:
        """Take what the method says of the fit; `warned` if a warning has said it already."""
        self._known = status if self._known is None else worst([self._known, status])
        self.warned = self.warned or warned

    def stored_status(self) -> dict[str, str] | None:
        """What a file keeps of the status; None where it follows from the rest of the file."""
        status = self.status
        return None if status is UNKNOWN else asdict(status)

    def load_status(self, stored: Mapping[str, Any] | None, told: bool) -> None:
        """Take the status of a file; where it tells none, what else it holds must say it."""
        if stored is not None:
            self._known = Status(**stored)
        elif not told and self.judged() is UNKNOWN:
            self._known = NOT_IN_FILE

    def summary(self) -> Summary:
        """Means, standard deviations and quantiles (5, 50, 95 %) of every parameter by name, to be printed.

        They are exact where closed forms are known, and otherwise those of draws with a fixed seed. Of a tensor with
        more than 50 entries the first 10 are in the table.

        Returns:
            A `Summary`: `print` it, or read `summary["sd"]`, `summary.row("theta[0]")`, `summary.to_dict()`.
        """
        return replace(summarise(self), status=str(self.status))

    def save(self, path: str | PathLike[str]) -> None:
        """Write the posterior to a file that `load` reads: safetensors and JSON, no pickle."""
        from priory.fitting.store import save

        save(self, path)

    def __repr__(self) -> str:
        data = "no data" if self.num_data is None else f"{self.num_data:,} rows"
        size = f"{self.model.layout.size:,} parameters"
        return f"{type(self).__name__}({size}, {data}, by {self.method}{self._status_text()})"

    def _status_text(self) -> str:
        """The status as the end of a repr; nothing where nothing is known of the fit."""
        status = self.status
        return "" if status is UNKNOWN else f", {status}"


def chosen(stored: int, n: int, generator: torch.Generator) -> Tensor:
    """The places of n of so many draws, (n,): no one twice where there are enough, and with replacement otherwise."""
    if n <= stored:
        return torch.randperm(stored, generator=generator, device=generator.device)[:n]
    return torch.randint(stored, (n,), generator=generator, device=generator.device)


@contextlib.contextmanager
def taking(inputs: Batch) -> Iterator[None]:
    """Say in a sentence that the network can't take the inputs, if it can't."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        shapes = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in inputs)
        reason = str(error).strip().split("\n")[0]
        raise InputError(f"The network must take the inputs, got {shapes} and it raised: {reason}") from error
