"""SWAG as a callback of Lightning: train as you do, and have a posterior at the end.

    callback = SWAGCallback(pr.Model(module.net, pr.Categorical()), (X, y))
    Trainer(max_epochs=20, callbacks=[callback]).fit(module, loader)
    callback.posterior.predict(X_new)

The model holds the network that the module trains, itself and not a copy. The Trainer's checkpoints keep the snapshots.
`VariationalOnlineNewton` needs no callback: a module returns it from `configure_optimizers`, and Lightning's automatic
optimisation calls its `step` with a closure, without accumulation. `integrations.posterior_of` makes a posterior of it.
"""

from __future__ import annotations

from typing import Any

from priory.core.errors import MissingExtra, extra
from priory.integrations.snapshots import Snapshots

try:
    Callback: Any = extra("lightning.pytorch", "lightning").Callback
except MissingExtra:
    Callback = object  # it is said when a callback is made


class SWAGCallback(Snapshots, Callback):
    """Collects the moments of the weights during `Trainer.fit`; `posterior` is there afterwards.

    The arguments are those of `priory.integrations.Snapshots`.
    """

    def __init__(
        self, model: Any, data: Any, held: Any = None, rank: int = 20, begin: float = 0.75, every: int | None = None
    ) -> None:
        extra("lightning.pytorch", "lightning")
        super().__init__(model, data, held, rank, begin, every)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.begin_with(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.look(trainer.global_step, trainer.estimated_stepping_batches)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.look(trainer.global_step, trainer.estimated_stepping_batches, epoch_ends=True)
