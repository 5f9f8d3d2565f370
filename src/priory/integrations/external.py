"""A model whose network is trained elsewhere: by a custom loop, a Trainer or another optimizer.

A `Model` copies its network and keeps a reference to the user's original in `model.net`. While the original is trained,
its weights are read here as one flat vector. They are never modified.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from priory.core.data import Data
from priory.core.errors import InputError, require
from priory.fitting.prepare import make_target
from priory.methods.point.held_out import HELD_ROWS, learn_from_held_out, learns
from priory.models.base import has_network

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

NOISE_UPDATES = 20  # updates of a learnt noise on the held-out rows: its initial value may be far off


class ExternalTraining:
    """A model, its data, and the current weights of the network that is trained elsewhere.

    Args:
        owner: Name of the class or function in error messages.
        model: A `Model`, made from the network that is trained.
        data: Training data, as for `fit`.
        held: Held-out data, on which a learnt noise is fitted; on the training data it would be too small.
    """

    def __init__(self, owner: str, model: Any, data: Any, held: Any = None) -> None:
        require(has_network(model), "model", owner, "be a Model", type(model).__name__)
        self.owner, self.model = owner, model
        self.rows = Data.of(data).prepared(model.prepare)
        # dropout belongs to the training and is off in predictions
        self.target = make_target(model, self.rows, drops=True)
        self.held = None if held is None else Data.of(held).prepared(model.prepare).some(HELD_ROWS)
        must = "be held-out rows such as (X, y), since the likelihood has a learnt noise"
        require(self.held is not None or not learns(self.target), "held", owner, must, held)
        self.start = self.target.start(self.rows, torch.Size(), torch.Generator(device=model.device))  # (P,)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trainable parameters of the user's network by name, in the order of the flat vector."""
        live = dict(self.model.net.named_parameters())
        return {name: live[name] for name in self.model.network.params}

    def check(self, module: nn.Module) -> None:
        """Raise an InputError unless the module contains the parameters of the model's network."""
        inside = {id(p) for p in module.parameters()}
        ok = all(id(p) in inside for p in self.parameters.values())
        must = "be made from the network that is trained, not from a copy"
        got = f"a {type(self.model.net).__name__} that is not part of the {type(module).__name__}"
        require(ok, "model", self.owner, must, got)

    def vector(self, values: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the network's weights, or other values by name, as one vector (P,); learnt noises keep their start."""
        self._check_frozen()
        given = self.parameters if values is None else values
        w = self.start.clone()
        w[: self.model.network.size] = torch.cat([given[name].detach().reshape(-1).to(w) for name in self.parameters])
        if not bool(torch.isfinite(w).all()):
            raise InputError(f"The weights that {self.owner} reads must be finite; the training has diverged.")
        return w

    def _check_frozen(self) -> None:
        """Raise an InputError if parameters that were frozen when the model was made have been trained."""
        live, fixed = dict(self.model.net.named_parameters()), self.model.network.fixed()
        moved = [n for n, p in live.items() if n in fixed and not torch.equal(p.detach(), fixed[n].to(p))]
        must = "be made when all parameters to be trained require gradients"
        got = f"'{', '.join(moved)}', which was frozen when the model was made and has been trained since"
        require(not moved, "model", self.owner, must, got)

    def buffers(self) -> dict[str, Tensor]:
        """Return the current values of the buffers that the training has changed since the model was made."""
        live, given = dict(self.model.net.named_buffers()), self.model.network.given
        current = {name: b.detach() for name, b in live.items() if name in given}
        changed = {*self.target.buffers(), *(n for n, b in current.items() if not torch.equal(b, given[n].to(b)))}
        return {name: b.to(given[name], copy=True) for name, b in current.items() if name in changed}

    def with_fitted_noise(self, w: Tensor) -> Tensor:
        """Set a learnt noise in the vector w, in place, to the value that predicts the held-out rows best."""
        if self.held is not None and learns(self.target):
            for _ in range(NOISE_UPDATES):
                w[self.model.learnt] = learn_from_held_out(self.target, w[None], self.held, self.buffers())
        return w
