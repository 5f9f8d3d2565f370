"""The driver: `fit` runs any method on any model, in three stages.

1. `prepare` binds the data to the model, checks both, and makes the target.
2. `find_start` fits the method that comes first, if there is one, as MAP before Laplace.
3. `run` takes the method's steps and returns the posterior.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from priory.core.distributed import rank, spread
from priory.core.errors import require, warn
from priory.fitting.prepare import Problem, prepare, reads_own_start
from priory.fitting.run import Run
from priory.fitting.settings import Settings
from priory.posteriors import Posterior

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from os import PathLike

    from priory.fitting.callbacks import FitProgress
    from priory.fitting.checkpoint import Checkpoint
    from priory.methods.base import Method
    from priory.models.base import BaseModel

P = TypeVar("P", bound=Posterior)


def fit(
    model: BaseModel,
    data: Any,
    method: Method[P],
    *,
    epochs: int | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    weights: Any = None,
    num_data: int | None = None,
    seed: int = 0,
    temperature: float = 1.0,
    tempers: Literal["likelihood", "posterior"] = "likelihood",
    progress: bool = True,
    checkpoint: Checkpoint | str | PathLike[str] | None = None,
    callbacks: Sequence[Callable[[FitProgress], Any]] = (),
) -> P:
    """Infer the posterior of a model from data by a method.

    A sampler keeps its draws in memory, or in the folder that its `store` names. One with `until_ess` stops when the
    smallest bulk effective sample size of its coordinates has reached it, or after `steps`. With a process group of
    `torch.distributed`, its chains run on every process and the posterior has all of them (see
    `priory.core.distributed`).

    Ctrl-C ends the fit after the current step and returns the posterior so far, with the status "not_converged" and a
    warning. A second Ctrl-C, or one before a sampler has kept a draw, raises KeyboardInterrupt.

    Args:
        model: A `Model`, a `Density` or a latent-variable model.
        data: A tuple of tensors or arrays (inputs first, targets last), a `Dataset`, a `DataLoader`, or None for a
            density that contains its data.
        method: How to infer, such as `MeanField()`. A method that follows another, as `Laplace` follows `MAP`, passes
            `epochs`, `steps` and `callbacks` on to that one.
        epochs: Number of passes over the data. Default: None, the method's own length.
        steps: Number of steps, in place of `epochs`. Default: None.
        batch_size: Number of rows per minibatch. Default: None, chosen from the data.
        weights: How often each row counts, one finite number >= 0 per row: log p(D|w) = sum_n weights_n log p(y_n | w).
            Integer weights act as repeated rows, but the number of rows N doesn't change. For tensors, arrays and
            datasets with an index, not for a `DataLoader`. Default: None, every row counts once.
        num_data: Number of rows N, for data from which it can't be read: an `IterableDataset` without a length, or a
            `DataLoader` whose sampler reads other rows in every epoch. Default: None, read from the data.
        seed: Seed of all noise; the same seed gives the same posterior. Default: 0.
        temperature: T of a tempered posterior. Default: 1.
        tempers: "likelihood" for p(D|w)^(1/T) p(w), or "posterior" for (p(D|w) p(w))^(1/T). Default: "likelihood".
        progress: Whether to show a progress bar, on a terminal. Default: True.
        checkpoint: A path or a `Checkpoint`, from which an interrupted fit resumes. Default: None.
        callbacks: Functions that are called with a `FitProgress` after every epoch, and end the fit by returning True.
            Default: none.

    Returns:
        The posterior. Its class depends on the method: `Chains` for a sampler, `LaplacePosterior` for `Laplace`.

    Raises:
        InputError: If an argument can't be used; the message says why.
        DivergedError: If a value is not finite during the fit; its `posterior` is built from the last good state.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import priory as pr
        >>> _ = torch.manual_seed(0)
        >>> X = torch.linspace(-1, 1, 20)[:, None]
        >>> posterior = pr.fit(pr.Model(nn.Linear(1, 1), pr.Gaussian(0.1)), (X, 2 * X[:, 0]), pr.MAP(), steps=2000)
        >>> round(posterior.predict(torch.tensor([[0.5]])).mean.item(), 1)
        1.0
    """
    settings = Settings(epochs, steps, seed, temperature, tempers, progress, checkpoint, callbacks)
    posterior = infer(model, data, method, batch_size, settings, weights, num_data)
    if epochs is None and steps is None:  # no warning if the user chose the length, which may be short on purpose
        warn_of_status(posterior)
    return posterior


def infer(
    model: BaseModel,
    data: Any,
    method: Method[Any],
    batch_size: int | None,
    settings: Settings,
    weights: Any = None,
    num_data: int | None = None,
) -> Any:
    """Run the three stages of a fit: prepare, find a start, run."""
    problem = with_default_start(prepare(model, data, method, batch_size, settings, weights, num_data))
    start, settings = find_start(problem, settings)
    return run(problem, settings, start)


def warn_of_status(posterior: Posterior) -> None:
    """Warn that a fit has not converged, unless its method has warned already."""
    status = posterior.quick_status()
    if status.name == "not_converged" and not posterior.warned:
        warn(f"The fit by {posterior.method} has not converged. {status.reason}")


def with_default_start(problem: Problem) -> Problem:
    """Write the default start of a sampler into its method, so that its repr shows it."""
    method, model = problem.method, problem.target.model
    default = method.default_start(model) if method.start is None and not method.traits.follows else None
    return problem if default is None else replace(problem, method=replace(cast("Any", method), start=default))


def find_start(problem: Problem, settings: Settings) -> tuple[Posterior | None, Settings]:
    """Return the posterior that the method starts from, or None, and the settings of the method itself."""
    method, model, follows = problem.method, problem.target.model, problem.method.traits.follows
    start = None if reads_own_start(method) else method.start
    if start is None and follows:
        start = method.default_start(model)
    if start is None:
        return None, settings
    if not isinstance(start, Posterior):
        first = (settings if follows else settings.without_length()).for_start()
        start = infer(model, problem.rows, start, None, first)
    same = start.model.layout.signature() == model.layout.signature()
    require(same, "start", type(method).__name__, "be a posterior of the same model", repr(start))
    return start, settings.without_length() if follows else settings


def run(problem: Problem, settings: Settings, start: Posterior | None) -> Any:
    """Take the method's steps and return the posterior."""
    target, rows, method, seed = problem.target, problem.rows, problem.method, settings.seed
    epoch_steps = 1 if method.traits.reads == "pass" else rows.steps_per_epoch
    steps = settings.steps or (settings.epochs or 0) * epoch_steps
    plan = method.plan(target, rows, int(steps), seed) if steps else method.default_plan(target, rows, seed)
    taken = Run(target, method, plan, seed, start)
    checkpoint = settings.checkpoint
    if checkpoint is not None:
        if rows.loader is not None and rows.loader.persistent_workers:
            warn("A DataLoader with persistent workers can't be resumed exactly: their random state outlives an epoch.")
        checkpoint = settings.checkpoint_named(str(rank())) if spread(method) and rank() else checkpoint
    taken.open(checkpoint, rows)
    taken.run(settings.progress, settings.callbacks)
    posterior = taken.posterior()
    if spread(method):
        posterior.join()
    posterior.data = rows
    return posterior
