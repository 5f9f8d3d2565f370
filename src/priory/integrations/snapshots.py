"""SWAG of a training that is not ours: the moments of the weights while something else trains them.

The Gaussian is that of `priory.methods.ensemble.swag`, from snapshots of the last part of a training. Its
rate should stay up meanwhile: weights that a schedule has brought to rest wander no more, and their Gaussian is too
narrow.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from priory.core.errors import InputError, require, whole
from priory.integrations.outside import Outside
from priory.methods.ensemble.swag import SWAG, State, take
from priory.methods.optimise import Adam

if TYPE_CHECKING:
    from torch import nn

    from priory.posteriors import Variational

KEPT = ("mean", "squares", "last")


class Snapshots:
    """Snapshots of `model.net`, from which `posterior` is made.

    They are taken from the fraction `begin` of the training on, once an epoch, or every `every` steps of the optimizer.
    `rank` of them make the low-rank part. In a loop of one's own: `take()` where a snapshot is wanted.

    >>> import priory as pr
    >>> from torch import nn
    >>> net, X, y = nn.Linear(1, 1), torch.ones(4, 1), torch.ones(4)
    >>> snapshots = Snapshots(pr.Model(net, pr.Gaussian(0.1)), (X, y), rank=2)
    >>> for value in (0.0, 1.0, 2.0):
    ...     _ = nn.init.constant_(net.weight, value)
    ...     snapshots.take()
    >>> snapshots.posterior.mean["weight"]
    tensor([[1.]])
    """

    def __init__(
        self, model: Any, data: Any, held: Any = None, rank: int = 20, begin: float = 0.75, every: int | None = None
    ) -> None:
        owner = type(self).__name__
        require(whole(rank, 2), "rank", owner, "be an integer >= 2", repr(rank))
        number = isinstance(begin, (int, float)) and not isinstance(begin, bool)
        require(number and 0 <= begin < 1, "begin", owner, "lie from 0 to below 1", repr(begin))
        require(every is None or whole(every, 1), "every", owner, "be an integer >= 1, or None", repr(every))
        self.outside = Outside(owner, model, data, held)
        self.rank, self.begin, self.every = int(rank), float(begin), every
        self._step = 0  # the last one that was looked at
        w = self.outside.start
        idle = Adam.of(w.new_empty(0), torch.zeros(1))  # another optimizer moves the weights
        last = w.new_zeros(self.rank, len(w))
        self._state = State(w, idle, {}, torch.zeros_like(w), torch.zeros_like(w), last, 0, every=1, factors={})

    @property
    def count(self) -> int:
        """How many snapshots there are."""
        return self._state.count

    def begin_with(self, module: nn.Module) -> None:
        """Refuse a module in which the network is not, before it is trained."""
        self.outside.check(module)

    def look(self, step: int, steps: int, epoch_ends: bool = False) -> None:
        """Take a snapshot after this many of all steps of the optimizer, if one is due."""
        fresh, self._step = step != self._step, step
        due = epoch_ends if self.every is None else fresh and step % self.every == 0
        if due and step > self.begin * steps:
            self.take()

    def take(self) -> None:
        """One snapshot of the weights as they are."""
        self._state.w = self.outside.vector()
        take(self._state)

    @property
    def posterior(self) -> Variational:
        """The Gaussian of the snapshots so far, with the running statistics of the last."""
        if self.count < 2:
            raise InputError(
                f"A posterior of {type(self).__name__} needs two snapshots or more, got {self.count}: train "
                "for longer, or lower 'begin' or 'every'."
            )
        outside = self.outside
        mean, last = outside.settle(self._state.mean.clone()), self._state.last.clone()
        learnt = outside.model.learnt
        last[:, learnt] = mean[learnt]  # the noise is set afterwards, once for all snapshots
        state = replace(self._state, mean=mean, last=last, buffers=outside.buffers())
        found = SWAG(self.count + self.rank, self.rank).posterior(outside.target, state)
        found.method, found.data = "SWAG", outside.rows
        return found

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"count": self.count, "step": self._step, **{name: getattr(self._state, name) for name in KEPT}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        fits = all(state[name].shape == getattr(self._state, name).shape for name in KEPT)
        require(fits, "state", type(self).__name__, "be one of the same model and rank", list(state["last"].shape))
        for name in KEPT:
            setattr(self._state, name, state[name].to(self.outside.start))
        self._state.count, self._step = int(state["count"]), int(state["step"])
