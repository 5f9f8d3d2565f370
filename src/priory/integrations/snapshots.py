"""SWAG for a network that is trained elsewhere: moments of its weights, collected during the training.

The Gaussian is that of `priory.methods.ensemble.swag`, from snapshots of the last part of the training. The learning
rate should not decay in that part: otherwise the weights stop moving, and the Gaussian is too narrow.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from priory.core.errors import InputError, is_integer, require
from priory.integrations.external import ExternalTraining
from priory.methods.ensemble.swag import SWAG, SWAGState, take
from priory.methods.optimise import Adam

if TYPE_CHECKING:
    from torch import nn

    from priory.posteriors import Variational

STATE_TENSORS = ("mean", "squares", "last")  # what a checkpoint holds of the SWAG state


class Snapshots:
    """Snapshots of the weights of `model.net` during training, and the SWAG posterior that they define.

    In a custom training loop, call `take()` for each snapshot, and read `posterior` at the end. The callbacks for
    Lightning and the Hugging Face Trainer take the snapshots themselves.

    Args:
        model: A `Model`, made from the network that is trained.
        data: Training data, as for `fit`.
        held: Held-out data, on which a learnt noise of the likelihood is fitted. Default: None; required if the
            likelihood has a learnt noise.
        rank: Number of last snapshots that form the low-rank part of the covariance, an integer >= 2. Default: 20.
        begin: Fraction of the training after which a callback takes snapshots, in [0, 1). Default: 0.75.
        every: Number of optimizer steps between snapshots of a callback. Default: None, for one snapshot per epoch.

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> import priory as pr
        >>> from torch import nn
        >>> net, X, y = nn.Linear(1, 1), torch.ones(4, 1), torch.ones(4)
        >>> snapshots = Snapshots(pr.Model(net, pr.Gaussian(0.1)), (X, y), rank=2)
        >>> for value in (0.0, 1.0, 2.0):
        ...     _ = nn.init.constant_(net.weight, value)
        ...     snapshots.take()
        >>> snapshots.posterior.mean["weight"]
        tensor([[1.]])

    References:
        Maddox et al. (2019), A simple baseline for Bayesian uncertainty in deep learning.
    """

    def __init__(
        self, model: Any, data: Any, held: Any = None, rank: int = 20, begin: float = 0.75, every: int | None = None
    ) -> None:
        owner = type(self).__name__
        require(is_integer(rank, 2), "rank", owner, "be an integer >= 2", repr(rank))
        number = isinstance(begin, (int, float)) and not isinstance(begin, bool)
        require(number and 0 <= begin < 1, "begin", owner, "be a number in [0, 1)", repr(begin))
        require(every is None or is_integer(every, 1), "every", owner, "be an integer >= 1, or None", repr(every))
        self.external = ExternalTraining(owner, model, data, held)
        self.rank, self.begin, self.every = int(rank), float(begin), every
        self._step = 0  # the last optimizer step seen by `on_step`
        w = self.external.start
        idle = Adam.of(w.new_empty(0), torch.zeros(1))  # another optimizer moves the weights
        last = w.new_zeros(self.rank, len(w))
        self._state = SWAGState(w, idle, {}, torch.zeros_like(w), torch.zeros_like(w), last, 0, every=1, factors={})

    @property
    def count(self) -> int:
        """The number of snapshots taken so far."""
        return self._state.count

    def check_module(self, module: nn.Module) -> None:
        """Check before the training that a module contains the network of the model.

        Args:
            module: The module that will be trained.

        Raises:
            InputError: If the module does not contain the network.
        """
        self.external.check(module)

    def on_step(self, step: int, steps: int, epoch_ends: bool = False) -> None:
        """Take a snapshot after an optimizer step, if one is due.

        Args:
            step: Number of optimizer steps so far.
            steps: Total number of optimizer steps of the training.
            epoch_ends: Whether this call marks the end of an epoch. Default: False.
        """
        fresh, self._step = step != self._step, step
        due = epoch_ends if self.every is None else fresh and step % self.every == 0
        if due and step > self.begin * steps:
            self.take()

    def take(self) -> None:
        """Take a snapshot of the current weights."""
        self._state.w = self.external.vector()
        take(self._state)

    @property
    def posterior(self) -> Variational:
        """The SWAG posterior of the snapshots so far, with the current running statistics of the network."""
        if self.count < 2:
            raise InputError(
                f"The posterior of {type(self).__name__} needs at least 2 snapshots, got {self.count}; train for "
                "longer, or lower 'begin' or 'every'."
            )
        external = self.external
        mean, last = external.with_fitted_noise(self._state.mean.clone()), self._state.last.clone()
        learnt = external.model.learnt
        last[:, learnt] = mean[learnt]  # a learnt noise is fitted at the end, once for all snapshots
        state = replace(self._state, mean=mean, last=last, buffers=external.buffers())
        found = SWAG(self.count + self.rank, self.rank).posterior(external.target, state)
        found.method, found.data = "SWAG", external.rows
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"count": self.count, "step": self._step, **{name: getattr(self._state, name) for name in STATE_TENSORS}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from a checkpoint.

        Args:
            state: What `state_dict` returned, for the same model and rank.

        Raises:
            InputError: If the state is of another model or rank.
        """
        fits = all(state[name].shape == getattr(self._state, name).shape for name in STATE_TENSORS)
        require(fits, "state", type(self).__name__, "be of the same model and rank", list(state["last"].shape))
        for name in STATE_TENSORS:
            setattr(self._state, name, state[name].to(self.external.start))
        self._state.count, self._step = int(state["count"]), int(state["step"])
