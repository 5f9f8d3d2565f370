"""A model whose network is trained by something else: a loop, a Trainer, an optimizer of one's own.

`Model` copies the network that it is given and keeps a reference to the person's own, `model.net`. While that one is
trained its weights are read from here as one flat vector, and never written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from priory.core.data import Data
from priory.core.errors import InputError, require
from priory.fitting.prepare import make_target
from priory.methods.point.held_out import HELD_ROWS, learns, settled
from priory.models.base import has_network

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

LOOKS = 20  # rounds in which a noise is set on the held-out rows: it may begin far away


class Outside:
    """The model, the rows, and the network as it is at the moment.

    `data` are the rows that are trained on, as for `fit`. `held` are others, which set a noise that the likelihood
    learns: on the rows of the training it would come out too small.
    """

    def __init__(self, owner: str, model: Any, data: Any, held: Any = None) -> None:
        require(has_network(model), "model", owner, "be a Model", type(model).__name__)
        self.owner, self.model = owner, model
        self.rows = Data.of(data).prepared(model.prepare)
        self.target = make_target(model, self.rows, drops=True)  # dropout is the training's, and off in predictions
        self.held = None if held is None else Data.of(held).prepared(model.prepare).some(HELD_ROWS)
        noise = "be rows that are not trained on, such as (X, y), for a noise that is learnt"
        require(self.held is not None or not learns(self.target), "held", owner, noise, held)
        self.start = self.target.start(self.rows, torch.Size(), torch.Generator(device=model.device))  # (P,)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trainable parameters of the person's network by name, in the order of the vector."""
        live = dict(self.model.net.named_parameters())
        return {name: live[name] for name in self.model.network.params}

    def check(self, module: nn.Module) -> None:
        """Refuse a module in which the model's network is not trained."""
        inside = {id(p) for p in module.parameters()}
        ok = all(id(p) in inside for p in self.parameters.values())
        must = "hold the network that is trained, itself and not a copy"
        require(
            ok, "model", self.owner, must, f"a {type(self.model.net).__name__} that {type(module).__name__} has not"
        )

    def vector(self, values: Mapping[str, Tensor] | None = None) -> Tensor:
        """The network's weights, or other values of these shapes, as one vector (P,), whose tail is where it began."""
        self._refuse_thawed()
        given = self.parameters if values is None else values
        w = self.start.clone()
        w[: self.model.network.size] = torch.cat([given[name].detach().reshape(-1).to(w) for name in self.parameters])
        if not bool(torch.isfinite(w).all()):
            raise InputError(f"The weights that {self.owner} reads must be finite: the training has diverged.")
        return w

    def _refuse_thawed(self) -> None:
        """Refuse a training that moves what was frozen when the model was made: its copy there stays as it was."""
        live, fixed = dict(self.model.net.named_parameters()), self.model.network.fixed()
        moved = [n for n, p in live.items() if n in fixed and not torch.equal(p.detach(), fixed[n].to(p))]
        must = "be made when the parameters that are trained need gradients"
        require(not moved, "model", self.owner, must, f"'{', '.join(moved)}', frozen then and trained since")

    def buffers(self) -> dict[str, Tensor]:
        """The buffers as the training has left them, of those that it has changed since the model was made."""
        live, given = dict(self.model.net.named_buffers()), self.model.network.given
        own = {name: b.detach() for name, b in live.items() if name in given}
        changed = {*self.target.buffers(), *(n for n, b in own.items() if not torch.equal(b, given[n].to(b)))}
        return {name: b.to(given[name], copy=True) for name, b in own.items() if name in changed}

    def settle(self, w: Tensor) -> Tensor:
        """The vector with a learnt noise where the held-out rows are predicted best."""
        if self.held is not None and learns(self.target):
            for _ in range(LOOKS):
                w[self.model.learnt] = settled(self.target, w[None], self.held, self.buffers())
        return w
