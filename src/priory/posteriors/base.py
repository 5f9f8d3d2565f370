"""The base class of all posteriors.

A posterior is a distribution over a model's flat vector w of unconstrained parameters. Subclasses define how to draw w
and which tensors to store. Sampling by name, predicting, summarising and saving are implemented here.
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
from priory.core.errors import InputError, is_integer, require
from priory.core.streams import stream
from priory.core.tables import counted
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
    """The log evidence log p(D), or a bound on it or an estimate of it, in nats. `float(evidence)` is its value.

    Attributes:
        value: The number.
        kind: What it is, such as "lower bound on log p(D) (ELBO, 256 draws)".
        error: Monte Carlo standard error; 0 if exact.
    """

    value: float
    kind: str
    error: float = 0.0

    def __float__(self) -> float:
        return self.value


BLOCK_NUMBERS = 1 << 21  # draws x weights of a prediction at a time, so that they stay in the cache
KINDS: dict[str, type[Posterior]] = {}  # by the name of each kind in files


def with_own_options(predict: Callable[P, R]) -> Callable[P, R]:
    """Raise a clear error for options that only other posteriors take, such as the `link` of Laplace's predict."""
    own = list(inspect.signature(predict).parameters)[2:]

    @functools.wraps(predict)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        for name, value in options.items():
            must = f"be left out: {type(args[0]).__name__} takes {', '.join(own)}"
            require(name in ("x", *own), name, "predict", must, repr(value))
        return predict(*args, **options)

    return checked


class Posterior(ABC):
    """A distribution over a model's parameters, given data. Methods return it from `fit`.

    Attributes:
        model: The fitted model.
        target: Model, prior, number of rows and temperature of the fit.
        buffers: The network's buffers after the fit, such as the statistics of batch norm.
        history: Metrics of the fit by name, one value per step.
        method: Name of the method.
        seed: Seed of the fit.
        data: Data of the fit; None for a posterior from a file.
    """

    kind: ClassVar[str]  # its name in files

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
        self.data: Data | None = None  # the data of the fit; not stored
        self._evidence: Evidence | None = None
        self._generator: torch.Generator | None = None
        self._known: Status | None = None  # status given by the method, or by a file
        self.stopped: Status | None = None  # status given by the driver, of a fit that ended early
        self.warned = False  # whether a warning has already reported its status

    # The interface of a subclass.

    @abstractmethod
    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """n draws of the flat vector, (n, P)."""

    def draw_for_prediction(self, n: int, generator: torch.Generator) -> Tensor:
        """n draws whose average is needed, (n, P): independent, or balanced where a posterior can."""
        return self.draw(n, generator)

    def starts(self, n: int, generator: torch.Generator) -> Tensor:
        """n vectors for fits to start from, (n, P): draws, spread out as far as the posterior can."""
        return self.draw(n, generator)

    def pieces(self, sizes: list[int], generator: torch.Generator) -> Iterator[Tensor]:
        """Draws for one prediction in blocks of the given sizes; stored draws are taken without replacement."""
        return (self.draw_for_prediction(size, generator) for size in sizes)

    centre: Tensor | None = None  # centre of antithetic draws for predictions, if they are used

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that a file stores."""

    def own(self) -> dict[str, Any]:
        """Further values that a file stores as JSON, passed to `of_tensors` as options."""
        return {}

    @classmethod
    @abstractmethod
    def of_tensors(
        cls, target: Target, tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor], **own: Any
    ) -> Posterior:
        """Restore the posterior from the tensors and values of a file."""

    @classmethod
    def in_model_type(cls, tensors: Mapping[str, Tensor], own: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of a file whose dtype must be the model's: all, unless a subclass overrides this."""
        return list(tensors.values())

    def results(self) -> dict[str, Any]:
        """Results computed after the fit that a file stores as JSON; `restore_results` reads them."""
        return {"evidence": None if self._evidence is None else vars(self._evidence)}

    def restore_results(self, results: Mapping[str, Any]) -> None:
        """Restore what `results` returned."""
        self._evidence = None if results["evidence"] is None else Evidence(**results["evidence"])

    @property
    @abstractmethod
    def mean(self) -> dict[str, Tensor]:
        """Posterior mean of each parameter by name, in constrained parameters."""

    def log_prob(self, params: Mapping[str, Tensor]) -> Tensor:
        """Log density of the posterior at named parameters.

        Args:
            params: Constrained parameters by name, each (..., *shape).

        Returns:
            log q as a density over the constrained parameters, (...).

        Raises:
            InputError: If the posterior has no density.
        """
        raise InputError(f"The posterior of {self.method or type(self).__name__} has no density.")

    def evidence(self) -> Evidence:
        """Compute log p(D), or a bound on it or an estimate of it; `log_evidence` caches it."""
        raise InputError(
            f"{self.method or type(self).__name__} gives no evidence: it is a point, and points have no volume."
        )

    point: ClassVar[bool] = False  # whether all draws are equal
    stored_draws: int | None = None  # number of draws, for a posterior that is a set of draws

    def gaussian_coordinates(self) -> tuple[Tensor, Tensor] | None:
        """Mean and standard deviation of each unconstrained coordinate, (P,) both; None if not Gaussian."""
        return None

    def judged(self, history: Mapping[str, Tensor] | None = None) -> Status:
        """The status from the method and from the history of the objective.

        Subclasses override it if they know more, as chains know R-hat, or if their history is not an objective.
        `history` is that of the whole ensemble, for members that were fitted together.
        """
        found = of_history(self.history if history is None else history)
        if self._known is None or found is UNKNOWN:
            return self._known or found
        return worst([self._known, found])

    def join(self) -> None:  # noqa: B027 - most posteriors are the same on every process
        """Gather the chains or members of all processes, in the order of the processes."""

    # Shared by all posteriors.

    @property
    def num_data(self) -> int | None:
        """Number of rows of the fit, N."""
        return self.target.num_data

    @property
    def temperature(self) -> float:
        """Temperature of the fit, T."""
        return self.target.temperature

    @property
    def parts(self) -> dict[str, float | int | None]:
        """Terms of the objective at the last step, in nats for the whole data, with N and T."""
        last = {name: float(values[-1]) for name, values in self.history.items() if len(values)}
        return {**last, "num_data": self.num_data, "temperature": self.temperature}

    @property
    def log_evidence(self) -> Evidence:
        """log p(D), or the method's bound on it or estimate of it; `.kind` tells which."""
        if self._evidence is None:
            self._evidence = self.evidence()
        return self._evidence

    def sample(self, n: int = 1, seed: int | None = None) -> dict[str, Tensor]:
        """Draw parameters by name.

        Args:
            n: Number of draws.
            seed: Seed of the draws. Default: None, every call continues the posterior's own stream.

        Returns:
            Constrained parameters by name, each (n, *shape).
        """
        require(is_integer(n, 1), "n", "sample", "be an integer >= 1", n)
        if seed is not None:
            generator = stream(seed, "sample", device=self.model.device)
        else:
            if self._generator is None:
                self._generator = stream(self.seed, "sample", device=self.model.device)
            generator = self._generator
        return self.model.layout.constrain(self.draw(n, generator))

    @with_own_options
    def predict(self, x: Any, samples: int = 64, seed: int = 0) -> Prediction:
        """Predict the targets at new inputs.

        Args:
            x: New inputs: a tensor, an array, or a tuple for a network of several inputs.
            samples: Number of draws of the weights.
            seed: Seed of the draws.

        Returns:
            A `Prediction`.
        """
        require(is_integer(samples, 1), "samples", "predict", "be an integer >= 1", repr(samples))
        require(is_integer(seed, -(2**63)), "seed", "predict", "be an integer", repr(seed))
        inputs = self._inputs(x)
        assert has_network(self.model)
        generator = stream(seed, "predict", device=self.model.device)
        wanted = 1 if self.point else int(samples)
        few = max(2, 2 * (BLOCK_NUMBERS // (2 * self.model.layout.size)))  # an even number, for pairs
        sizes = [min(few, wanted - start) for start in range(0, wanted, few)]
        draws = self.pieces(sizes, generator)
        with taking(inputs):
            prediction = predict(
                self.model, draws, inputs, self.buffers, self.target.event, int(seed), centre=self.centre
            )
        self._check_rows(inputs, len(prediction))
        return prediction

    def _inputs(self, x: Any) -> Batch:
        """New inputs in the network's dtype; raises an error that explains what is wrong with x."""
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
        """Raise an error if the network returns another number of rows than the inputs have."""
        shapes = [tuple(t.shape) for t in inputs]
        require(count == len(inputs[0]), "x", "predict", "have a row for each prediction", shapes)

    @property
    def status(self) -> Status:
        """Whether the fit converged: `.name` is "converged", "doubtful" or "not_converged", `.reason` a sentence."""
        return worst([self.judged(), *([self.stopped] if self.stopped else [])])

    def quick_status(self) -> Status:
        """The status that `fit` warns about, without expensive computations.

        A history that is too short to estimate its noise counts as converged, because its length was intended.
        """
        short = 0 < max((len(values) for values in self.history.values()), default=0) < FEWEST_STEPS
        return CONVERGED if short else self.status

    def know(self, status: Status, warned: bool = False) -> None:
        """Add a status given by the method; `warned` if a warning has already reported it."""
        self._known = status if self._known is None else worst([self._known, status])
        self.warned = self.warned or warned

    def stored_status(self) -> dict[str, str] | None:
        """The status that a file stores; None where it follows from the rest of the file."""
        status = self.status
        return None if status is UNKNOWN else asdict(status)

    def load_status(self, stored: Mapping[str, Any] | None, told: bool) -> None:
        """Restore the status from a file; `told` is whether the file stores statuses at all."""
        if stored is not None:
            self._known = Status(**stored)
        elif not told and self.judged() is UNKNOWN:
            self._known = NOT_IN_FILE

    def summary(self) -> Summary:
        """Means, standard deviations and quantiles (5, 50, 95 %) of every parameter, as a table.

        Values are exact where closed forms are known, and otherwise estimated from draws with a fixed seed. A tensor
        with more than 50 entries shows its first 10.

        Returns:
            A `Summary`: `print` it, or read `summary["sd"]`, `summary.row("theta[0]")`, `summary.to_dict()`.
        """
        return replace(summarise(self), status=str(self.status))

    def save(self, path: str | PathLike[str]) -> None:
        """Save the posterior to a file that `priory.load` reads: safetensors and JSON, no pickle.

        Args:
            path: Path of the file.
        """
        from priory.fitting.store import save

        save(self, path)

    def __repr__(self) -> str:
        data = "no data" if self.num_data is None else counted(self.num_data, "row")
        size = counted(self.model.layout.size, "parameter")
        return f"{type(self).__name__}({size}, {data}, by {self.method}{self._status_text()})"

    def _status_text(self) -> str:
        """The status as the end of a repr; empty where it is unknown."""
        status = self.status
        return "" if status is UNKNOWN else f", {status}"


def chosen(stored: int, n: int, generator: torch.Generator) -> Tensor:
    """Indices of n out of `stored` draws, (n,): without replacement if there are enough, otherwise with."""
    if n <= stored:
        return torch.randperm(stored, generator=generator, device=generator.device)[:n]
    return torch.randint(stored, (n,), generator=generator, device=generator.device)


@contextlib.contextmanager
def taking(inputs: Batch) -> Iterator[None]:
    """Raise a clear error if the network can't process the inputs."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        shapes = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in inputs)
        reason = str(error).strip().split("\n")[0]
        raise InputError(f"The network must take the inputs, got {shapes} and it raised: {reason}") from error
