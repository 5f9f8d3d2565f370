"""The one driver: `fit` runs any method on any model.

Minibatches, seeds, progress, history, callbacks, checkpoints and what happens when a number is not finite are
written here, once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import secrets
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from priory.core.data import Batch, Data
from priory.core.distributed import gather, own_stream, rank, spread, world
from priory.core.errors import DivergedError, require, warn, whole
from priory.core.streams import stream
from priory.diagnostics import ess_bulk
from priory.fitting.callbacks import Moment, Remembering, says_stop
from priory.fitting.checkpoint import Checkpoint, Keeper, copied, leaves, rebuild
from priory.fitting.draws_store import KeptDraws
from priory.fitting.history import Told
from priory.fitting.progress import Progress
from priory.fitting.store import checksum, fixed, prior_at_two_places
from priory.latent import Latent
from priory.likelihoods.scale import LocationScale
from priory.methods.base import After, Method, Plan
from priory.models.density import Density
from priory.models.model import Model
from priory.models.target import Target
from priory.posteriors import Mixture, Posterior
from priory.posteriors.chains import Chains

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from os import PathLike

LOOK_EVERY = 100  # steps between two looks at whether all is finite; a copy of the state is kept at each
FIRST_LOOK = 50  # draws a chain before the effective sample size says anything
AT_A_TIME = 1 << 22  # numbers of draws whose effective sample size is found together


def fit(
    model: Model | Density,
    data: Any,
    method: Method,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    temperature: float = 1.0,
    tempers: Literal["likelihood", "posterior"] = "likelihood",
    progress: bool = True,
    checkpoint: Checkpoint | str | PathLike[str] | None = None,
    callbacks: Sequence[Callable[[Moment], Any]] = (),
) -> Posterior:
    """Infer the posterior of a model from data by a method.

    `data` is a tuple of tensors or arrays (inputs first, targets last), a `Dataset`, a `DataLoader`, or None
    for a density that has its data inside. Give `epochs` or `steps`, or neither for the method's own default.
    `temperature` T and `tempers` say which posterior: p(D|w)^(1/T) p(w), or the whole to the power 1/T. With
    `checkpoint`, a fit that was killed goes on where it was. A method that comes after another, as `Laplace` after
    `MAP`, gives the epochs, steps and callbacks to that one. Each of `callbacks` is called with a `Moment`
    after every epoch, and ends the fit by returning True.

    A sampler's draws are kept in memory, or in the folder that its `store` names. One that has an `until_ess` stops
    when the least bulk ESS of its coordinates has reached it, or after `steps`. With a process group of
    `torch.distributed`, its chains run on every process and the posterior has all of them (see
    `priory.core.distributed`).

    >>> from torch import nn
    >>> import priory as pr
    >>> _ = torch.manual_seed(0)
    >>> X = torch.linspace(-1, 1, 20)[:, None]
    >>> posterior = pr.fit(pr.Model(nn.Linear(1, 1), pr.Gaussian(0.1)), (X, 2 * X[:, 0]), pr.MAP(), steps=2000)
    >>> round(posterior.predict(torch.tensor([[0.5]])).mean.item(), 1)
    1.0
    """
    require(isinstance(model, (Model, Density)), "model", "fit", "be a Model or a Density", type(model).__name__)
    check_method(method, "method", "fit")
    own = getattr(method, "reads_start", False) and isinstance(method.start, (str, dict))  # by name, or in numbers
    if method.start is not None and not own and not isinstance(method.start, Posterior):
        check_method(method.start, "start", type(method).__name__)
    for name, number in (("epochs", epochs), ("steps", steps)):
        require(number is None or whole(number, 1), name, "fit", "be an integer >= 1", repr(number))
    require(epochs is None or steps is None, "steps", "fit", "be left out when epochs are given", steps)
    require(whole(seed, -(2**63)), "seed", "fit", "be an integer", repr(seed))
    ok = isinstance(callbacks, (tuple, list)) and all(callable(callback) for callback in callbacks)
    require(ok, "callbacks", "fit", "be a list of functions", callbacks)
    check_running(method)
    if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
        path = isinstance(checkpoint, (str, os.PathLike))
        require(path, "checkpoint", "fit", "be a path or a Checkpoint", repr(checkpoint))
        folder = os.path.dirname(os.path.abspath(checkpoint))
        require(os.path.isdir(folder), "checkpoint", "fit", "lie in a folder that exists", folder)
    require(not torch.is_inference_mode_enabled(), "mode", "fit", "allow gradients", "torch.inference_mode()")
    seed = int(seed)

    if isinstance(model, Latent):
        model, rows = model.meet(data, batch_size)
    else:
        rows = data if isinstance(data, Data) else Data.of(data, batch_size).prepared(model.prepare)
    drops = bool(getattr(getattr(method, "inner", method), "drops", False))
    target = make_target(model, rows, temperature, tempers, drops)
    if isinstance(model, Model) and rows.tensors is not None and rows is not data:
        warn_of_scale(model, rows.tensors)
    start: Any = None if own else method.start
    after = isinstance(getattr(method, "inner", method), After)  # an ensemble is what its members are
    if after:
        method.plan(target, rows, method.length(rows), seed)  # what it refuses, it refuses before anything is trained
    if start is None and isinstance(method, After):
        start = method.default_start(model)
    if start is not None and not isinstance(start, Posterior):
        # another seed: the stage must not use the noise that the method itself will
        start = fit(
            model,
            rows,
            start,
            epochs=epochs if after else None,
            steps=steps if after else None,
            seed=seed + 1,
            temperature=temperature,
            tempers=tempers,
            progress=progress,
            checkpoint=None if checkpoint is None else beside(checkpoint, "start"),
            callbacks=callbacks if after else (),
        )
    if start is not None:
        epochs, steps, callbacks = (None, None, ()) if after else (epochs, steps, callbacks)
        same = start.model.layout.signature() == model.layout.signature()
        require(same, "start", type(method).__name__, "be a posterior of the same model", repr(start))
    epoch = 1 if method.reads == "pass" else rows.steps_per_epoch
    total = int(steps or (epochs * epoch if epochs else method.length(rows)))
    plan = method.plan(target, rows, total, seed)
    run = Run(target, method, plan, seed, start)
    if checkpoint is not None:
        if rows.loader is not None and rows.loader.persistent_workers:
            warn("A DataLoader with persistent workers can't be resumed exactly: their random state outlives an epoch.")
        place = beside(checkpoint, str(rank())) if spread(method) and rank() else checkpoint
        run.keeper = Keeper(place, identity(run, rows))
    run.draws = place_of_draws(method, run.keeper)
    run.go(progress, list(callbacks))
    posterior = run.posterior()
    if spread(method):
        join(posterior)
    posterior.data = rows
    return posterior


def beside(checkpoint: Checkpoint | str | PathLike[str], name: str) -> Checkpoint:
    """Another checkpoint, kept as often, whose file has a longer name."""
    kept = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
    return dataclasses.replace(kept, path=f"{os.fspath(kept.path)}.{name}")


def check_running(method: Method) -> None:
    """Refuse a wanted ESS that is no number, and a store that can't be."""
    owner, until, store = type(method).__name__, getattr(method, "until_ess", None), getattr(method, "store", None)
    number = isinstance(until, (int, float)) and not isinstance(until, bool) and 0 < until < math.inf
    require(until is None or number, "until_ess", owner, "be a positive number", repr(until))
    if store is None:
        return
    require(isinstance(store, (str, os.PathLike)), "store", owner, "be the path of a folder", repr(store))
    require(not os.path.isfile(store), "store", owner, "be a folder", f"the file {os.fspath(store)}")
    folder = os.path.dirname(os.path.abspath(store))
    require(os.path.isdir(folder), "store", owner, "lie in a folder that exists", folder)
    require(not spread(method), "store", owner, "be left out when chains run on several processes", os.fspath(store))


def place_of_draws(method: Method, keeper: Keeper | None) -> KeptDraws:
    """Where draws are kept: in the store that the method names, beside the checkpoint, or in memory."""
    stamp = secrets.token_hex(16) if keeper is None else keeper.stamp
    store = getattr(method, "store", None)
    if store is not None:
        return KeptDraws(store, stamp, mapped=True)
    return KeptDraws() if keeper is None else KeptDraws(keeper.folder, stamp)


def join(posterior: Posterior) -> None:
    """Bring in the chains or the members of the other processes, the first process's first."""
    if isinstance(posterior, Mixture):
        posterior.join()
    if not isinstance(posterior, Chains):
        return
    draws = int(gather(torch.tensor([posterior.num_draws], device=posterior.w.device)).min())
    posterior.w = gather(posterior.w[:, :draws])
    posterior.statistics = {name: gather(t[:, :draws]) for name, t in posterior.statistics.items()}


def check_method(method: Any, name: str, owner: str) -> None:
    """Refuse what isn't a method, and the class of one."""
    got = f"the class {method.__name__}: write {method.__name__}()" if isinstance(method, type) else repr(method)
    ok = isinstance(method, Method) and not isinstance(method, type)
    require(ok, name, owner, "be a method such as MeanField()", got)


def make_target(
    model: Model | Density, rows: Data, temperature: float = 1.0, tempers: Any = "likelihood", drops: bool = False
) -> Target:
    """The Target of prepared data, after one trial evaluation on a few rows and a look at every target in memory.

    `drops` says that the method draws the masks of dropout itself.
    """
    if isinstance(model, Model):
        require(rows.num_data is not None, "data", "fit", "be inputs and targets, such as (X, y)", None)
    some = rows.some(128) if rows.num_data is not None else ()
    event = some[-1].shape[1:] if some and isinstance(model, Model) else torch.Size()
    target = Target(model, rows.num_data, temperature, tempers, event, rows.single)
    if isinstance(model, Model):
        model.check(some, drops)
    else:
        model.check(target.form(some))
    if rows.tensors is not None and isinstance(model, Model):
        model.prepare(rows.tensors)  # again, now that the network's outputs are known: labels must fit them
    return target


def warn_of_scale(model: Model, tensors: Batch) -> None:
    """Say when numbers are far from unit scale, for which priors, learning rates and first noises are made."""
    targets = [("targets", tensors[-1])] if isinstance(model.likelihood, LocationScale) else []
    for name, t in [("inputs", tensors[0]), *targets]:
        if not t.is_floating_point() or t.ndim > 2 or len(t) < 2:
            continue
        columns = t.double().reshape(len(t), -1)
        centre, spread, top = columns.mean(0), columns.std(0), columns.abs().amax(0)
        odd = (spread > 50) | ((top > 0) & (top < 0.05)) | (centre.abs() > 20 * spread.clamp_min(0.5))
        if bool(odd.any()):
            column = int(odd.nonzero()[0])
            where = f", column {column}," if columns.shape[1] > 1 else ""
            warn(
                f"The {name}{where} have mean {float(centre[column]):.3g} and standard deviation "
                f"{float(spread[column]):.3g}: standardise them, as priors and learning rates are made for unit scale."
            )


class Run:
    """One fit on its way: a State, where it is, and what it has told so far."""

    def __init__(self, target: Target, method: Method, plan: Plan, seed: int, start: Posterior | None) -> None:
        self.target, self.method, self.plan, self.seed = target, method, plan, seed
        streams = own_stream if spread(method) else stream
        self.generator = streams(seed, "noise", device=target.model.device)
        self.state = method.init(target, plan, self.generator, torch.Size(), start)
        self.step = 0
        self.told = Told()
        self.draws = KeptDraws()
        self.keeper: Keeper | None = None
        self.until: float | None = getattr(method, "until_ess", None)
        self.ess: float | None = None  # the least of all coordinates, when it was last looked at
        self._look_at = FIRST_LOOK  # draws at which it is looked at next
        self._since = 0  # steps before the first draw
        self._expected: int | None = None  # the step at which there should be enough draws
        self._good: tuple[int, dict[str, Any]] = (0, copied(self.state))
        self._inside = False

    def go(self, progress: bool, callbacks: list[Callable[[Moment], Any]]) -> None:
        """Step until the plan, a callback or the method says that it is enough."""
        self._resume(callbacks)
        stopped = self.step >= self.plan.steps
        with Progress(repr_of(self.method), self.plan.steps, progress and rank() == 0, self.step) as bar:
            try:
                batches = self._batches() if not stopped else iter(())
                for batch, epoch_ends in batches:
                    self._inside = True
                    self.state, info = self.method.step(self.target, self.state, batch, self.generator)
                    self.told.hear(info.metrics)
                    if info.draw is not None:
                        self._since = self._since if len(self.draws) else self.step
                        self.draws.append(info.draw)
                    self.step += 1
                    if self.step % LOOK_EVERY == 0:
                        self._look()
                    enough = info.draw is not None and self._enough(bar.on)
                    self._inside = enough  # what is resumed from here would go on
                    if bar.due():
                        bar.show(self.step, self._shown(), self._expected)
                    stop = info.done or enough or (callbacks and epoch_ends and self._call(callbacks))
                    if self.keeper is not None and (stop or self.keeper.due(self.step)):
                        self._look()
                        self._keep(callbacks, ended=bool(stop))
                    if stop:
                        break
                self._look()
            except KeyboardInterrupt:
                # neither half a step nor a state that broke is a place to resume from
                if self.keeper is not None and not self._inside and self._broken() is None:
                    self._keep(callbacks)
                self.draws.flush()
                raise
            if bar.on:
                bar.show(self.step, self._shown(), self._expected)
        if self.keeper is not None and not stopped:
            self._keep(callbacks, ended=True)
        self.draws.flush()

    def posterior(self) -> Posterior:
        """What the State stands for now."""
        posterior = self.method.posterior(self.target, self.state, self.draws.tensor())
        posterior.history, posterior.method = self.told.history(), repr_of(self.method)
        posterior.seed = self.seed
        return posterior

    def _batches(self) -> Iterator[tuple[Batch | Data, bool]]:
        """What each step reads from here on, and whether an epoch ends there."""
        plan = self.plan
        while self.step < plan.steps:
            rows = plan.rows(self.step)
            if self.method.reads == "pass":
                yield rows, True
                continue
            begin, end = (0, plan.turn) if rows is plan.early else (plan.turn, plan.steps)
            each = rows.steps_per_epoch
            epoch, skip = divmod(self.step - begin, each)
            for index, batch in enumerate(rows.batches(self.seed, begin + epoch, skip), start=skip):
                if self.step >= end:
                    break
                yield batch, index == each - 1

    def _call(self, callbacks: list[Callable[[Moment], Any]]) -> bool:
        passes = self.method.reads == "pass"
        each = 1 if passes else self.plan.rows(self.step - 1).steps_per_epoch
        epoch = self.step if passes else self.plan.epochs(self.step)
        moment = Moment(self.step, self.plan.steps, epoch, self.told.recent(each), self.posterior)
        return any([says_stop(callback(moment)) for callback in callbacks])  # noqa: C419 - every callback is called

    def _shown(self) -> dict[str, float]:
        """What the bar shows: recent means, how many draws diverged, and the effective sample size so far."""
        shown = self.told.recent()
        if "divergences" in shown:
            shown["divergences"] = float(self.told.history()["divergences"][self._since :].sum())
        return shown if self.ess is None else {**shown, "ess": self.ess}

    def _enough(self, watched: bool) -> bool:
        """Whether the draws are worth as many independent ones as the method wants.

        It is looked at when somebody wants to know, at intervals that grow with the draws, so that all looks together
        cost a few times the last. Effective draws grow in proportion: the next look is where they should be enough.
        """
        drawn = len(self.draws)
        if drawn < self._look_at or (self.until is None and not watched):
            return False
        self.ess = least_ess(self.draws, together=self.until is not None and spread(self.method))
        if self.until is None:
            self._look_at = 2 * drawn
            return False
        share = self.until / self.ess if self.ess > 0 else math.inf
        self._look_at = math.ceil(drawn * min(2.0, max(1.1, 1.05 * share)))
        more = (share - 1) * (self.step - self._since)
        self._expected = self.step + math.ceil(max(0.0, min(more, self.plan.steps - self.step)))
        return share <= 1

    def _look(self) -> None:
        """Keep a copy of a good state; stop at one that is not."""
        wrong = self._broken()
        if wrong is None:
            self._good = (self.step, copied(self.state))
            return
        name, step = wrong
        good, kept = self._good
        self.state = rebuild(self.state, kept)
        posterior = self.posterior()
        posterior.history = self.told.history(good)
        where = f"step {step + 1} of {self.plan.steps}"
        raise DivergedError(
            f"The {name} of {type(self.method).__name__} was not finite at {where}; the state of step {good} is in the "
            "error's 'posterior'. Try a smaller learning_rate, data of about unit scale, or a narrower prior.",
            posterior,
        )

    def _broken(self) -> tuple[str, int] | None:
        """The name and the step of a number that is not finite, or of a part of the State that is not a number."""
        for path, value in leaves(self.state):
            if isinstance(value, Tensor) and value.is_floating_point() and bool(torch.isnan(value).any()):
                return self.told.first_not_finite() or (path, self.step - 1)
        return self.told.first_not_finite()

    # Checkpoints.

    def _keep(self, callbacks: list[Callable[[Moment], Any]], ended: bool = False) -> None:
        assert self.keeper is not None
        self.draws.flush()  # first: a checkpoint never counts draws that are not there
        kept = {f"history.{name}": values for name, values in self.told.history().items()}
        place = {"ended": ended, "draws": len(self.draws), "look": self._look_at, "since": self._since}
        notes: list[Any] = [place, *[c.state_dict() if isinstance(c, Remembering) else None for c in callbacks]]
        self.keeper.write(self.step, self.state, self.generator, kept, notes)

    def _resume(self, callbacks: list[Callable[[Moment], Any]]) -> None:
        found = self.keeper.read(self.state, self.generator) if self.keeper is not None else None
        if found is None:
            self.draws.begin(0)
        else:
            self.step, self.state, kept, (place, *notes) = found
            self.told = Told({name[len("history.") :]: v for name, v in kept.items() if name.startswith("history.")})
            self.draws.begin(place["draws"], self.target.model.device)
            self._look_at, self._since = place["look"], place["since"]
            for callback, note in zip(callbacks, notes, strict=False):
                if note is not None and isinstance(callback, Remembering):
                    callback.load_state_dict(note)
            self._good = (self.step, copied(self.state))
            if place["ended"]:
                self.plan = dataclasses.replace(self.plan, steps=self.step)
        if self.keeper is not None and spread(self.method):
            self._agree()

    def _agree(self) -> None:
        """Go on as the other processes do, which may have been killed at other steps than this one.

        All look at the effective sample size at the same numbers of draws, from the latest that any of them has
        announced, and all end where one has ended.
        """
        looks, ends = gather(torch.tensor([[self._look_at, self.plan.steps]], device=self.target.model.device)).T
        self._look_at = int(looks.max())
        self.plan = dataclasses.replace(self.plan, steps=int(ends.min()))


def least_ess(draws: KeptDraws, together: bool = False) -> float:
    """The least bulk ESS of all coordinates, over the chains of all processes if `together`.

    Zero as long as there is a coordinate of which nothing can be said: one that never varies, or is not finite.
    """
    numbers = len(draws) * draws.chains * (world() if together else 1)
    some, least = max(1, AT_A_TIME // numbers), math.inf
    for start in range(0, draws.size, some):
        x = draws.columns(start, start + some)
        x = x.reshape(-1, *x.shape[-2:])
        found = ess_bulk(gather(x) if together else x)
        least = min(least, float(found.nan_to_num(nan=0.0).min()))
    return least


def repr_of(method: Method) -> str:
    """The method as a person would write it, with the options that differ from the default."""
    options = []
    for f in dataclasses.fields(method):  # pyright: ignore[reportArgumentType] - a method is a dataclass
        value = getattr(method, f.name)
        if f.repr and value is not f.default and value != f.default:
            named = value.method if isinstance(value, Posterior) else getattr(value, "__name__", None)
            options.append(f"{f.name}={named or repr(value)}")
    return f"{type(method).__name__}({', '.join(options)})"


def identity(run: Run, rows: Data) -> dict[str, Any]:
    """What a resumed fit must share with the one it resumes."""
    model, target = run.target.model, run.target
    return {
        "method": " ".join([repr_of(run.method), *code_of(vars(run.method).values())]),
        "model": model.describe(),
        "type": str(model.dtype),
        "prior": prior_at_two_places(model),
        "rows": rows.num_data,
        "network's fixed part": fixed(model),
        "functions": code_of(vars(model).values()),
        "data": [checksum(t.cpu().contiguous()) for t in rows.tensors or (rows.some(16) if rows.num_data else ())],
        "batch size": rows.batch_size,
        "steps": run.plan.steps,
        "seed": run.seed,
        "process": [rank(), world()] if spread(run.method) else [0, 1],
        "temperature": [target.temperature, target.tempers],
    }


def code_of(values: Iterable[Any]) -> list[str]:
    """Hashes of the functions among some values: two lambdas have one name, and not one code."""
    codes = [value.__code__ for value in values if hasattr(value, "__code__")]
    return [hashlib.blake2b(c.co_code + repr(c.co_consts).encode(), digest_size=8).hexdigest() for c in codes]
