"""The loop of a fit: steps, progress, history, draws, callbacks, checkpoints, and the handling of NaN."""

from __future__ import annotations

import dataclasses
import secrets
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from priory.core.distributed import gather, own_stream, rank, spread
from priory.core.errors import DivergedError, warn
from priory.core.streams import stream
from priory.fitting.callbacks import FitProgress, StatefulCallback, is_stop
from priory.fitting.checkpoint import CheckpointWriter, copied, leaves, rebuild
from priory.fitting.draws_store import KeptDraws
from priory.fitting.history import History
from priory.fitting.identity import identity, repr_of
from priory.fitting.interrupts import InterruptWatch
from priory.fitting.progress import Progress
from priory.posteriors.function_space import function_space
from priory.posteriors.status import Status, of_callback, of_interrupt, of_nonfinite

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from priory.core.data import Batch, Data
    from priory.fitting.checkpoint import Checkpoint
    from priory.methods.base import Method, Plan
    from priory.models.target import Target
    from priory.posteriors import Posterior

    Callback = Callable[[FitProgress], Any]

CHECK_EVERY_STEPS = 100  # steps between two checks that all values are finite; the state is copied at each


class Run:
    """One fit in progress: its State, current step, history and draws."""

    def __init__(
        self, target: Target, method: Method[Any], plan: Plan, seed: int, start: Posterior | None = None
    ) -> None:
        self.target, self.method, self.plan, self.seed = target, method, plan, seed
        self.spread, self.reads_passes = spread(method), method.traits.reads == "pass"
        streams = own_stream if self.spread else stream
        self.generator = streams(seed, "noise", device=target.model.device)
        self.state = method.init(target, plan, self.generator, torch.Size(), start)
        self.step = 0
        self.stopped: Status | None = None  # set when the fit ends early
        self.interrupts = InterruptWatch()
        self.history = History()
        self.draws = KeptDraws()
        compared = function_space(target, plan.data, target.buffers()) if method.traits.chains else None
        self.monitor = method.traits.draws.monitor(self.spread, plan.open_ended, compared)
        self.writer: CheckpointWriter | None = None
        self._good: tuple[int, dict[str, Any]] = (0, copied(self.state))
        self._interrupted = False  # whether Ctrl-C ended the fit
        self._unfinished = False  # whether the fit can't be resumed from the current step

    def open(self, checkpoint: Checkpoint | None, rows: Data) -> None:
        """Choose where draws are kept: in the method's folder, beside the checkpoint, or in memory."""
        store = self.method.traits.draws.store
        if checkpoint is not None:
            self.writer = CheckpointWriter(checkpoint, identity(self, rows))
        if store is not None:
            stamp = secrets.token_hex(16) if self.writer is None else self.writer.stamp
            self.draws = KeptDraws(store, stamp, mapped=True)
        elif self.writer is not None:
            self.draws = KeptDraws(self.writer.draws_folder, self.writer.stamp)

    def run(self, progress: bool = False, callbacks: Sequence[Callback] = ()) -> None:
        """Take steps until the plan, the method, its draws or a callback ends the fit."""
        self._resume(callbacks)
        resumed_at_end = self.step >= self.plan.steps
        with Progress(repr_of(self.method), self.plan.steps, progress and rank() == 0, self.step) as bar:
            try:
                with self.interrupts:
                    self._take_steps(bar, callbacks)
            except KeyboardInterrupt:
                if self.writer is not None and not self._unfinished and self._nonfinite() is None:
                    self._save(callbacks)
                self.draws.flush()
                raise
            if bar.on:
                bar.show(self.step, self._shown(), self.monitor.expected_end)
        if self.writer is not None and not resumed_at_end and not self._interrupted:
            self._save(callbacks, ended=True)
        self.draws.flush()

    def posterior(self) -> Posterior:
        """Return the posterior at the current State."""
        posterior = self.method.posterior(self.target, self.state, self.draws.tensor())
        posterior.history, posterior.method = self.history.values(), repr_of(self.method)
        posterior.seed, posterior.stopped, posterior.data = self.seed, self.stopped, self.plan.data
        posterior.warned = posterior.warned or self._interrupted
        return posterior

    def _take_steps(self, bar: Progress, callbacks: Sequence[Callback]) -> None:
        """Take the steps of the fit."""
        for batch, epoch_ends in self._batches():
            self._unfinished = True
            self.state, info = self.method.step(self.target, self.state, batch, self.generator)
            self.history.record(info)
            if info.draw is not None:
                if not len(self.draws):
                    self.monitor.first_step = self.step
                self.draws.append(info.draw)
            self.step += 1
            if self.step % CHECK_EVERY_STEPS == 0:
                self._check_finite()
            enough = info.draw is not None and self.monitor.enough(self.draws, self.step, self.plan.steps, bar.on)
            self._unfinished = enough  # a fit resumed from here would not stop
            if bar.due():
                bar.show(self.step, self._shown(), self.monitor.expected_end)
            stop = info.done or enough
            if not stop and callbacks and epoch_ends and self._call(callbacks):
                stop, self.stopped = True, of_callback(self.step, self.plan.steps)
            if self.writer is not None and (stop or self.writer.due(self.step)):
                self._check_finite()
                self._save(callbacks, ended=bool(stop))
            if stop:
                break
            if self.interrupts.pressed and self.step < self.plan.steps:
                self._interrupt(callbacks)
                break
        self._check_finite()

    def _interrupt(self, callbacks: Sequence[Callback]) -> None:
        """End the fit after Ctrl-C, with a warning and a checkpoint; raise KeyboardInterrupt if there are no draws yet.

        The processes of a fit that is spread over several raise it too, because they may be at different steps.
        """
        if self.spread or (self.method.traits.chains and not len(self.draws)):
            raise KeyboardInterrupt
        if self.writer is not None:
            self._check_finite()
            self._save(callbacks)
        self.stopped, self._interrupted = of_interrupt(self.step, self.plan.steps), True
        warn(f"The fit by {repr_of(self.method)} was interrupted. {self.stopped.reason}")

    def _batches(self) -> Iterator[tuple[Batch | Data, bool]]:
        """Yield the batch or pass of each remaining step, and whether an epoch ends with it."""
        plan = self.plan
        while self.step < plan.steps:
            rows = plan.rows(self.step)
            if self.reads_passes:
                yield rows, True
                continue
            begin, end = (0, plan.turn) if rows is plan.early else (plan.turn, plan.steps)
            each = rows.steps_per_epoch
            epoch, skip = divmod(self.step - begin, each)
            for index, batch in enumerate(rows.batches(self.seed, begin + epoch, skip), start=skip):
                if self.step >= end:
                    break
                yield batch, index == each - 1

    def _call(self, callbacks: Sequence[Callback]) -> bool:
        """Call every callback, and return whether one of them ends the fit."""
        each = 1 if self.reads_passes else self.plan.rows(self.step - 1).steps_per_epoch
        epoch = self.step if self.reads_passes else self.plan.epochs(self.step)
        now = FitProgress(self.step, self.plan.steps, epoch, self.history.recent_mean(each), self.posterior)
        return any([is_stop(callback(now)) for callback in callbacks])  # noqa: C419 - every callback is called

    def _shown(self) -> dict[str, float]:
        """Return the values of the progress bar: metrics, counts since the first draw, effective sample size, R-hat."""
        shown, quality = self.history.summary(self.monitor.first_step), self.monitor.quality
        if quality is None:
            return shown
        return {**shown, "ess": quality.bulk, **({"r_hat": quality.r_hat} if self.monitor.strict else {})}

    # Values that are not finite.

    def _check_finite(self) -> None:
        """Copy the State if it is finite; otherwise raise an error with the posterior of the last copy."""
        wrong = self._nonfinite()
        if wrong is None:
            self._good = (self.step, copied(self.state))
            return
        name, step = wrong
        good, kept = self._good
        self.state = rebuild(self.state, kept)
        self.stopped = of_nonfinite(name, step + 1, good)
        posterior = self.posterior()
        posterior.history = self.history.values(good)
        where = f"step {step + 1} of {self.plan.steps}"
        raise DivergedError(
            f"The {name} of {type(self.method).__name__} was not finite at {where}; the state of step {good} is in the "
            "error's 'posterior'. Try a smaller learning_rate, data of about unit scale, or a narrower prior.",
            posterior,
        )

    def _nonfinite(self) -> tuple[str, int] | None:
        """Return the name and step of a metric that is not finite, or of a part of the State with NaN, or None."""
        for path, value in leaves(self.state):
            if isinstance(value, Tensor) and value.is_floating_point() and bool(torch.isnan(value).any()):
                return self.history.first_nonfinite() or (path, self.step - 1)
        return self.history.first_nonfinite()

    # Checkpoints.

    def _save(self, callbacks: Sequence[Callback], ended: bool = False) -> None:
        """Write the checkpoint, after the draws that it counts."""
        assert self.writer is not None
        self.draws.flush()
        kept = {f"history.{name}": values for name, values in self.history.values().items()}
        stopped = None if self.stopped is None else dataclasses.asdict(self.stopped)
        place = {"ended": ended, "stopped": stopped, "draws": len(self.draws), "monitor": self.monitor.state_dict()}
        notes: list[Any] = [place, *[c.state_dict() if isinstance(c, StatefulCallback) else None for c in callbacks]]
        self.writer.write(self.step, self.state, self.generator, kept, notes)

    def _resume(self, callbacks: Sequence[Callback]) -> None:
        """Continue from the checkpoint, if there is one."""
        found = self.writer.read(self.state, self.generator) if self.writer is not None else None
        if found is None:
            self.draws.begin(0)
        else:
            self.step, self.state, kept, (place, *notes) = found
            past = {name.removeprefix("history."): v for name, v in kept.items() if name.startswith("history.")}
            self.history = History(past)
            self.draws.begin(place["draws"], self.target.model.device)
            self.monitor.load_state_dict(place["monitor"])
            for callback, note in zip(callbacks, notes, strict=False):
                if note is not None and isinstance(callback, StatefulCallback):
                    callback.load_state_dict(note)
            self._good = (self.step, copied(self.state))
            if place.get("stopped"):
                self.stopped = Status(**place["stopped"])
            if place["ended"]:
                self.plan = dataclasses.replace(self.plan, steps=self.step)
        if self.writer is not None and self.spread:
            self._synchronise()

    def _synchronise(self) -> None:
        """Truncate to the earliest step at which any process stopped, so that all processes agree."""
        device = self.target.model.device
        self.monitor.synchronise(device)
        ends = gather(torch.tensor([self.plan.steps], device=device))
        self.plan = dataclasses.replace(self.plan, steps=int(ends.min()))
