"""The quantities by which chains of a network are compared: its mean predictions, at inputs from the training data.

The weights of a network have symmetries: hidden units can be exchanged, and signs flipped. Chains may represent the
same function at weights that never agree, and need not cross from one such place to another. Predictions have no
symmetries, and neither have the parameters of the likelihood and of a hierarchical prior, nor the weights of a network
that is a single layer. R-hat and the effective sample sizes of these decide whether chains of a network have converged.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from priory.diagnostics.flatness import name_of
from priory.diagnostics.summary import labels
from priory.models.base import has_network

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from priory.core.data import Batch, Data
    from priory.models.model import Model
    from priory.models.target import Target

MAX_INPUTS = 32  # rows of the training data at which predictions are compared
MAX_PREDICTIONS = 128  # predictions at these rows, of all outputs
BLOCK_ELEMENTS = 1 << 24  # predictions that are computed together


@dataclass(frozen=True)
class FunctionSpace:
    """Mean predictions of a network at fixed inputs, and the parameters without symmetries, as functions of w.

    Args:
        target: Target of the fit, of a model with a network.
        inputs: Inputs of n rows, in the network's types.
        buffers: The network's buffers.
    """

    target: Target
    inputs: Batch
    buffers: Mapping[str, Tensor]

    @property
    def model(self) -> Model:
        """The model with the network."""
        assert has_network(self.target.model)
        return self.target.model

    @cached_property
    def hidden_layers(self) -> int:
        """Number of layers with parameters, without the last."""
        return hidden_layers(self.model)

    @cached_property
    def coordinates(self) -> Tensor:
        """Indices of the coordinates without symmetries, (c,)."""
        return torch.arange(self.model.network.size if self.hidden_layers else 0, self.model.layout.size)

    def predictions(self, w: Tensor) -> Tensor:
        """All mean predictions at vectors w (S, P), (S, n, ...)."""
        found, size = [], max(1, BLOCK_ELEMENTS // max(1, len(self.inputs[0])))
        with torch.no_grad():
            for block in w.split(size):
                block = block.to(self.model.device)
                outputs = self.model.outputs(block, self.inputs, self.buffers, self.target.event)
                found.append(self.model.likelihood.mean(outputs, self.model.learnt_at(block)))
        return torch.cat(found)

    def __call__(self, w: Tensor) -> Tensor:
        """The compared quantities at vectors w (..., P), (..., Q): some predictions, then some coordinates."""
        flat = w.reshape(-1, w.shape[-1])
        y = self.predictions(flat).flatten(1)
        y = y[:, evenly_spaced(y.shape[1], MAX_PREDICTIONS).to(y.device)].to(w.device)
        return torch.cat([y, flat[:, self.coordinates.to(w.device)]], 1).reshape(*w.shape[:-1], -1)

    def names(self, w: Tensor) -> list[str]:
        """The names of the quantities of `__call__`; w (P,) is any vector."""
        every = labels("y", self.predictions(w[None]).shape[1:])
        chosen = [every[i] for i in evenly_spaced(len(every), MAX_PREDICTIONS).tolist()]
        return chosen + [name_of(self.target, i) for i in self.coordinates.tolist()]


def hidden_layers(model: Model) -> int:
    """Number of layers of a network that have parameters, without the last."""
    return len({name.rpartition(".")[0] for name in model.network.params}) - 1


def function_space(target: Target, data: Data, buffers: Mapping[str, Tensor]) -> FunctionSpace | None:
    """The function space of a network at some of its training inputs; None for a model without a network."""
    if not has_network(target.model) or data.num_data is None:
        return None
    return FunctionSpace(target, training_inputs(data), buffers)


def training_inputs(data: Data) -> Batch:
    """Inputs of evenly spaced rows of data in memory, and otherwise of the first rows."""
    if data.tensors is None:
        return data.some(MAX_INPUTS)[:-1]
    rows = evenly_spaced(len(data.tensors[0]), MAX_INPUTS)
    return tuple(t[rows.to(t.device)] for t in data.tensors[:-1])


def evenly_spaced(count: int, most: int) -> Tensor:
    """At most `most` of the indices 0 ... count - 1, evenly spaced.

    >>> evenly_spaced(5, 3)
    tensor([0, 2, 4])
    """
    return torch.linspace(0, count - 1, min(count, most)).round().long()
