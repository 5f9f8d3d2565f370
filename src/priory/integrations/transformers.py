"""SWAG as a callback of the Hugging Face Trainer: train as you do, and have a posterior at the end.

A model of `transformers` takes many arguments and returns a record. The network of a `Model` takes tensors and returns
one, so that a few lines stand between them:

    class Logits(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, input_ids, attention_mask):
            return self.inner(input_ids=input_ids, attention_mask=attention_mask).logits

    callback = SWAGCallback(pr.Model(Logits(bert).eval(), pr.Categorical()), (input_ids, attention_mask, labels))
    Trainer(bert, arguments, train_dataset=rows, callbacks=[callback]).train()
    callback.posterior.predict((input_ids, attention_mask))

The Trainer trains `bert` itself, which the model holds. In evaluation mode dropout is off in the model's own copy; the
Trainer turns it on for the training. Its default rate falls to zero: `lr_scheduler_type="constant"` lets the weights
wander.
"""

from __future__ import annotations

from typing import Any

from priory.core.errors import MissingExtra, extra
from priory.integrations.snapshots import Snapshots

try:
    TrainerCallback: Any = extra("transformers", "transformers").TrainerCallback
except MissingExtra:
    TrainerCallback = object  # it is said when a callback is made


class SWAGCallback(Snapshots, TrainerCallback):
    """Collects the moments of the weights during `Trainer.train`; `posterior` is there afterwards.

    The arguments are those of `priory.integrations.Snapshots`.
    """

    def __init__(
        self, model: Any, data: Any, held: Any = None, rank: int = 20, begin: float = 0.75, every: int | None = None
    ) -> None:
        extra("transformers", "transformers")
        super().__init__(model, data, held, rank, begin, every)

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.begin_with(others["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.look(state.global_step, state.max_steps)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.look(state.global_step, state.max_steps, epoch_ends=True)
