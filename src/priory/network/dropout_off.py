"""Switches off dropout that a network calls as a function, such as `torch.nn.functional.dropout`.

Dropout modules are switched off by their training flag (`Network.disable_dropout`); a function does not read that flag.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

ELEMENTWISE_DROPOUT = (functional.dropout, torch.dropout)
CHANNEL_DROPOUT = (functional.dropout1d, functional.dropout2d, functional.dropout3d, torch.feature_dropout)
ALPHA_DROPOUT = (
    *(functional.alpha_dropout, functional.feature_alpha_dropout),
    *(torch.alpha_dropout, torch.feature_alpha_dropout),
)
DROPOUT_FUNCTIONS = (*ELEMENTWISE_DROPOUT, *CHANNEL_DROPOUT, *ALPHA_DROPOUT)


class DropoutOff(TorchFunctionMode):
    """A context in which torch's dropout functions return their input, in training mode too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in DROPOUT_FUNCTIONS:
            return args[0] if args else kwargs["input"]
        if func is functional.scaled_dot_product_attention:
            args, kwargs = without_dropout(args, kwargs)
        return func(*args, **kwargs)


def without_dropout(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of scaled dot-product attention with its dropout rate set to zero."""
    return ((*args[:4], 0.0, *args[5:]), kwargs) if len(args) > 4 else (args, {**kwargs, "dropout_p": 0.0})
