"""SWAG as a callback of the Hugging Face Trainer: train as usual, and get a posterior at the end.

A model of `transformers` takes many arguments and returns an output object. The network of a `Model` takes tensors and
returns one tensor, so a small wrapper is needed:

    class Logits(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, input_ids, attention_mask):
            return self.inner(input_ids=input_ids, attention_mask=attention_mask).logits

    callback = SWAGCallback(pr.Model(Logits(bert).eval(), pr.Categorical()), (input_ids, attention_mask, labels))
    Trainer(bert, arguments, train_dataset=rows, callbacks=[callback]).train()
    callback.posterior.predict((input_ids, attention_mask))

The Trainer trains the same `bert` that the model was made from. `eval()` turns dropout off in the model's copy; the
Trainer turns it on for the training. The Trainer's default learning rate decays to zero; use
`lr_scheduler_type="constant"`, so that the weights keep moving.
"""

from __future__ import annotations

from typing import Any

from priory.core.errors import MissingExtra, extra
from priory.integrations.snapshots import Snapshots

try:
    TrainerCallback: Any = extra("transformers", "transformers").TrainerCallback
except MissingExtra:
    TrainerCallback = object  # the constructor of SWAGCallback raises the error


class SWAGCallback(Snapshots, TrainerCallback):
    """Hugging Face callback that collects the moments of the weights during `Trainer.train`, for `posterior`.

    Args:
        model: A `Model`, made from the network that is trained.
        data: Training data, as for `fit`.
        held: Held-out data, on which a learnt noise of the likelihood is fitted. Default: None; required if the
            likelihood has a learnt noise.
        rank: Number of last snapshots that form the low-rank part of the covariance, an integer >= 2. Default: 20.
        begin: Fraction of the training after which snapshots are taken, in [0, 1). Default: 0.75.
        every: Number of optimizer steps between snapshots. Default: None, for one snapshot per epoch.

    Raises:
        MissingExtra: If `transformers` is not installed.
        InputError: If an argument is invalid.
    """

    def __init__(
        self, model: Any, data: Any, held: Any = None, rank: int = 20, begin: float = 0.75, every: int | None = None
    ) -> None:
        extra("transformers", "transformers")
        super().__init__(model, data, held, rank, begin, every)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.check_module(kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_step(state.global_step, state.max_steps)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_step(state.global_step, state.max_steps, epoch_ends=True)
