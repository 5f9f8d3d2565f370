"""SWAG as a Lightning callback: train as usual, and get a posterior at the end.

    callback = SWAGCallback(pr.Model(module.net, pr.Categorical()), (X, y))
    Trainer(max_epochs=20, callbacks=[callback]).fit(module, loader)
    callback.posterior.predict(X_new)

The model must be made from the network that the module trains, not from a copy. Checkpoints of the Trainer include the
snapshots. `VariationalOnlineNewton` needs no callback: return it from `configure_optimizers`, and Lightning's automatic
optimisation calls its `step` with a closure (without gradient accumulation). `integrations.posterior_of` turns the
optimizer into a posterior.
"""

from __future__ import annotations

from typing import Any

from priory.core.errors import MissingExtra, extra
from priory.integrations.snapshots import Snapshots

try:
    Callback: Any = extra("lightning.pytorch", "lightning").Callback
except MissingExtra:
    Callback = object  # the constructor of SWAGCallback raises the error


class SWAGCallback(Snapshots, Callback):
    """Lightning callback that collects the moments of the weights during `Trainer.fit`, for `posterior`.

    Args:
        model: A `Model`, made from the network that is trained.
        data: Training data, as for `fit`.
        held: Held-out data, on which a learnt noise of the likelihood is fitted. Default: None; required if the
            likelihood has a learnt noise.
        rank: Number of last snapshots that form the low-rank part of the covariance, an integer >= 2. Default: 20.
        begin: Fraction of the training after which snapshots are taken, in [0, 1). Default: 0.75.
        every: Number of optimizer steps between snapshots. Default: None, for one snapshot per epoch.

    Raises:
        MissingExtra: If Lightning is not installed.
        InputError: If an argument is invalid.
    """

    def __init__(
        self, model: Any, data: Any, held: Any = None, rank: int = 20, begin: float = 0.75, every: int | None = None
    ) -> None:
        extra("lightning.pytorch", "lightning")
        super().__init__(model, data, held, rank, begin, every)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.check_module(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.on_step(trainer.global_step, trainer.estimated_stepping_batches)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.on_step(trainer.global_step, trainer.estimated_stepping_batches, epoch_ends=True)
