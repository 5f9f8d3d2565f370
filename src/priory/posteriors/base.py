"""The base class of all posteriors.

A posterior is a distribution over a model's flat vector w of unconstrained parameters. Subclasses define how to draw w
and which tensors to store. Sampling by name, predicting, summarising and saving are implemented here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from priory.core.data import Data
from priory.core.errors import InputError, is_integer, require, warn
from priory.core.streams import stream
from priory.core.tables import counted
from priory.divergences.result import ComputesKL, Divergence
from priory.models.base import has_network
from priory.posteriors.divergence import kl_from
from priory.posteriors.frames import frame_of
from priory.posteriors.inputs import explain_input_errors, inputs_for_prediction, reject_unknown_options
from priory.posteriors.pointwise import draws_of, pointwise, rows_of
from priory.posteriors.status import CONVERGED, MIN_HISTORY_STEPS, NOT_IN_FILE, UNKNOWN, Status, of_history, worst
from priory.posteriors.summaries import summarise
from priory.predictive import Prediction, predict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from os import PathLike

    from torch.distributions import Distribution

    from priory.check import Check
    from priory.core.data import Batch
    from priory.diagnostics import Summary
    from priory.models.target import Target
    from priory.posteriors.status import HistoryWords


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


BLOCK_ELEMENTS = 1 << 21  # draws x weights of a prediction at a time, so that they stay in the cache
KINDS: dict[str, type[Posterior]] = {}  # by the name of each kind in files


class Posterior(ComputesKL, ABC):
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
            setattr(cls, "predict", reject_unknown_options(vars(cls)["predict"]))  # noqa: B010 - its type stays the subclass's

    def __init__(self, target: Target, buffers: Mapping[str, Tensor] | None = None) -> None:
        self.target, self.model = target, target.model_with_prior()
        self.buffers = {name: b.detach().clone() for name, b in (buffers or {}).items()}
        self.history: dict[str, Tensor] = {}
        self.method = ""
        self.seed = 0
        self.data: Data | None = None  # the data of the fit; not stored
        self._evidence: Evidence | None = None
        self._generator: torch.Generator | None = None
        self._given_status: Status | None = None  # status given by the method, or by a file
        self.history_words: HistoryWords | None = None  # how the status speaks of the history's steps
        self.stopped: Status | None = None  # status given by the driver, of a fit that ended early
        self.warned = False  # whether a warning has already reported its status

    # The interface of a subclass.

    @abstractmethod
    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """Return n draws of the flat vector, (n, P)."""

    def draw_for_prediction(self, n: int, generator: torch.Generator) -> Tensor:
        """Return n draws to average over, (n, P): independent, or antithetic pairs if the posterior has them."""
        return self.draw(n, generator)

    def starts(self, n: int, generator: torch.Generator) -> Tensor:
        """Return n vectors from which other fits start, (n, P): draws, as spread out as possible."""
        return self.draw(n, generator)

    def draw_blocks(self, sizes: list[int], generator: torch.Generator) -> Iterator[Tensor]:
        """Yield draws for one prediction in blocks of the given sizes; stored draws are taken without replacement."""
        return (self.draw_for_prediction(size, generator) for size in sizes)

    centre: Tensor | None = None  # centre of antithetic draws for predictions, if they are used

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a file stores."""

    def to_json(self) -> dict[str, Any]:
        """Return the other values that a file stores, as JSON; `of_tensors` gets them as options."""
        return {}

    @classmethod
    @abstractmethod
    def of_tensors(
        cls, target: Target, tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor], **options: Any
    ) -> Posterior:
        """Restore the posterior from the tensors and values of a file."""

    @classmethod
    def in_model_type(cls, tensors: Mapping[str, Tensor], options: Mapping[str, Any]) -> list[Tensor]:
        """Return the tensors of a file whose dtype must be the model's: all, unless a subclass overrides this."""
        return list(tensors.values())

    def results(self) -> dict[str, Any]:
        """Return results computed after the fit, which a file stores as JSON; `restore_results` reads them."""
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

    def kl_to(self, p: Any, samples: int, seed: int) -> Divergence:
        """Return KL(posterior || p); for the arguments see `priory.kl`."""
        return kl_from(self, p, samples, seed)

    def evidence(self) -> Evidence:
        """Compute log p(D), or a bound on it or an estimate of it; `log_evidence` caches it."""
        raise InputError(
            f"{self.method or type(self).__name__} gives no evidence: it is a point, and points have no volume."
        )

    point: ClassVar[bool] = False  # whether all draws are equal
    stored_draws: int | None = None  # number of draws, for a posterior that is a set of draws
    stored_w: Tensor | None = None  # those draws, (S, P)
    relative_efficiency: float = 1.0  # effective draws per stored draw, which is 1 for independent draws

    def gaussian_coordinates(self) -> tuple[Tensor, Tensor] | None:
        """Return mean and standard deviation of each unconstrained coordinate, (P,) each; None if not Gaussian."""
        return None

    def gaussian_distribution(self) -> Distribution | None:
        """Return the posterior of the unconstrained vector as a Gaussian of torch, of event shape (P,), if known."""
        return None

    def compute_status(self, history: Mapping[str, Tensor] | None = None) -> Status:
        """Return the status from the method and from the history of the objective.

        Subclasses override this if they have other diagnostics, such as the R-hat of chains, or if their history is not
        that of an objective. Members that were fitted together get the `history` of the whole ensemble.
        """
        found = of_history(self.history if history is None else history, self.history_words)
        if self._given_status is None or found is UNKNOWN:
            return self._given_status or found
        return worst([self._given_status, found])

    def join(self) -> None:
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
        """log p(D), or the method's bound on it or estimate of it; `.kind` says which."""
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

    @reject_unknown_options
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
        num_draws = 1 if self.point else int(samples)
        block_size = max(2, 2 * (BLOCK_ELEMENTS // (2 * self.model.layout.size)))  # even, for antithetic pairs
        sizes = [min(block_size, num_draws - start) for start in range(0, num_draws, block_size)]
        draws = self.draw_blocks(sizes, generator)
        with explain_input_errors(inputs):
            prediction = predict(
                self.model, draws, inputs, self.buffers, self.target.event, int(seed), centre=self.centre
            )
        self._check_rows(inputs, len(prediction))
        return prediction

    def predictive(
        self, function: Callable[..., Any], *arguments: Any, samples: int | None = None, seed: int = 0
    ) -> Any:
        """Evaluate a function of the parameters at every draw: derived quantities, or predictive draws of data.

        It is `priory.generate` with this posterior's draws, which also takes the draws of a prior. For the targets of a
        network at new inputs, use `predict`.

        Args:
            function: Takes a dict of constrained parameters of one draw and `arguments`; returns a tensor, or a dict,
                list or tuple of tensors. It may take random numbers from torch.
            arguments: Further arguments of the function, the same for every draw, such as new inputs.
            samples: Number of draws. Default: None, all stored draws, or 1,000 if none are stored.
            seed: Seed of the draws and of the function's random numbers. Default: 0.

        Returns:
            What the function returns, with the draws in front: (chain, draw, ...) for all draws of `Chains`, (n, ...)
            otherwise.
        """
        from priory.analysis.generated import MEMORY_LIMIT_BYTES, at_draws

        return at_draws(function, self, arguments, samples, seed, MEMORY_LIMIT_BYTES, "predictive")

    def log_likelihood(self, data: Any = None, samples: int | None = None, seed: int = 0) -> Tensor:
        """Pointwise log-likelihood: log p(y_n | x_n, w) of each row at draws of the parameters.

        Args:
            data: Data in the form that `fit` takes. Default: None, the data of the fit; a posterior from a file has
                none.
            samples: Number of draws. Default: None, all stored draws, or 1,000 if none are stored. A point has one.
            seed: Seed of the draws.

        Returns:
            The values in nats, (draw, row); all draws of `Chains` are (chain, draw, row). Weights of rows and the
            temperature of the fit are not applied.

        Raises:
            InputError: If the likelihood has no terms per row, as for a `Density` that is one `log_prob`.
        """
        rows = rows_of(self, data, "log_likelihood")
        generator = stream(seed, "log_likelihood", device=self.model.device)
        return pointwise(self.target, draws_of(self, samples, generator, "log_likelihood"), rows, self.buffers)

    def to_pandas(self, samples: int | None = None, seed: int = 0) -> Any:
        """Draws of the constrained parameters as a pandas DataFrame (with the extra `plot`).

        Args:
            samples: Number of draws. Default: None, all stored draws, or 1,000 if none are stored. A point has one.
            seed: Seed of the draws.

        Returns:
            One row per draw and one column per entry, such as "theta[0]". Entries that a support keeps constant are
            left out. The index is `draw`; for all draws of `Chains` it is (`chain`, `draw`).
        """
        generator = stream(seed, "to_pandas", device=self.model.device)
        return frame_of(self.model.layout, draws_of(self, samples, generator, "to_pandas"))

    def _inputs(self, x: Any) -> Batch:
        """Convert new inputs to the network's dtype, and raise an error that says what is wrong with x."""
        return inputs_for_prediction(self.model, x)

    def _check_rows(self, inputs: Batch, count: int) -> None:
        """Raise an error unless the network returned one row per input."""
        shapes = [tuple(t.shape) for t in inputs]
        require(count == len(inputs[0]), "x", "predict", "have a row for each prediction", shapes)

    @property
    def status(self) -> Status:
        """Whether the fit converged: `.name` is "converged", "doubtful" or "not_converged", `.reason` a sentence."""
        return worst([*([self.stopped] if self.stopped else []), self.compute_status()])

    def quick_status(self) -> Status:
        """Return the status that `fit` warns about, without expensive computations.

        A history that is too short to estimate its noise counts as converged, because its length was intended.
        """
        short = 0 < max((len(values) for values in self.history.values()), default=0) < MIN_HISTORY_STEPS
        return CONVERGED if short else self.status

    def know(self, status: Status, warned: bool = False) -> None:
        """Add a status given by the method; `warned` if a warning has already reported it."""
        self._given_status = status if self._given_status is None else worst([self._given_status, status])
        self.warned = self.warned or warned

    def doubt(self, sentence: str) -> None:
        """Warn that the posterior is doubtful, and make the sentence the reason of its status."""
        warn(sentence)
        self.know(Status("doubtful", sentence), warned=True)

    def stored_status(self) -> dict[str, str] | None:
        """Return the status that a file stores; None where the rest of the file determines it."""
        status = self.status
        return None if status is UNKNOWN else asdict(status)

    def load_status(self, stored: Mapping[str, Any] | None, has_status: bool) -> None:
        """Restore the status from a file; `has_status` is False for older files, which store none."""
        if stored is not None:
            self._given_status = Status(**stored)
        elif not has_status and self.compute_status() is UNKNOWN:
            self._given_status = NOT_IN_FILE

    def summary(self) -> Summary:
        """Return a table of means, standard deviations and quantiles (5, 50, 95 %) of every parameter.

        Values are exact where there are closed forms, and otherwise estimated from draws with a fixed seed. A tensor
        with more than 50 entries shows its first 10.

        Returns:
            A `Summary`: `print` it, or read `summary["sd"]`, `summary.row("theta[0]")`, `summary.to_dict()`.
        """
        return replace(summarise(self), status=str(self.status))

    def check(
        self, data: Any = None, *, against: Posterior | None = None, reference: str | None = None, seed: int = 0
    ) -> Check:
        """Check whether this posterior may be believed, and why not.

        Args:
            data: Held-out rows, in the form that `fit` takes, for calibration. Default: None, only what the data of
                the fit allow.
            against: Another posterior of the same model, such as draws of NUTS, to compare this one with. Default:
                None.
            reference: "nuts" to fit NUTS to the same data and compare with its draws. Default: None.
            seed: Seed of the draws. Default: 0.

        Returns:
            A `Check`: print it for a table of items that ends in a verdict; `.verdict` is a sentence that begins with
            "Believe it", "Believe the mean", "Believe nothing" or "Cannot tell", `.items` has the measurements,
            `.plot()` pictures of them.
        """
        from priory.check import check

        return check(self, data, against=against, reference=reference, seed=seed)

    def save(self, path: str | PathLike[str]) -> None:
        """Save the posterior to a file that `priory.load` reads: safetensors and JSON, no pickle.

        Args:
            path: Path of the file.
        """
        from priory.fitting.store import save

        save(self, path)

    def __repr__(self) -> str:
        noun = "standardised row" if self.model.bound_tensors() else "row"
        data = "no data" if self.num_data is None else counted(self.num_data, noun)
        size = counted(self.model.layout.size, "parameter")
        return f"{type(self).__name__}({size}, {data}, by {self.method}{self._status_text()})"

    def _status_text(self) -> str:
        """Format the status for the end of a repr; empty where it is unknown."""
        status = self.status
        return "" if status is UNKNOWN else f", {status}"


def choose_indices(stored: int, n: int, generator: torch.Generator) -> Tensor:
    """Choose n indices of `stored` draws, (n,): without replacement if there are enough, otherwise with replacement."""
    if n <= stored:
        return torch.randperm(stored, generator=generator, device=generator.device)[:n]
    return torch.randint(stored, (n,), generator=generator, device=generator.device)
