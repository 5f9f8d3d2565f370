"""The posterior of what `VariationalOnlineNewton` has learnt in a loop of one's own: N(m, diag(s^2)).

The prior is the model's, and should be the one that the optimizer had: it enters the evidence, not the predictions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from priory.core.errors import require
from priory.families import Diagonal
from priory.integrations.outside import Outside
from priory.optim import VariationalOnlineNewton
from priory.posteriors import DiagonalGaussian

if TYPE_CHECKING:
    from torch.optim import Optimizer

POINT = 1e-12  # the standard deviation of what the optimizer doesn't move: a noise, which held-out rows set


def posterior_of(optimizer: Optimizer, model: Any, data: Any, held: Any = None) -> DiagonalGaussian:
    """The Gaussian over `model.net`'s weights that the optimizer holds.

    `data` are the rows of the training, as for `fit`; `held` are others, which set a noise that the likelihood learns.
    """
    owner = "posterior_of"
    own = isinstance(optimizer, VariationalOnlineNewton)
    require(own, "optimizer", owner, "be a VariationalOnlineNewton", type(optimizer).__name__)
    assert isinstance(optimizer, VariationalOnlineNewton)
    outside, mean, std = Outside(owner, model, data, held), optimizer.mean(), optimizer.std()
    moved = all(p in mean for p in outside.parameters.values())
    require(moved, "optimizer", owner, "have every trainable parameter of the model's network", "one that lacks some")
    loc = outside.settle(outside.vector({name: mean[p] for name, p in outside.parameters.items()}))
    scale = outside.vector({name: std[p] for name, p in outside.parameters.items()})
    scale[outside.model.network.size :] = POINT
    found = DiagonalGaussian(outside.target, Diagonal(loc, scale.log()), outside.buffers())
    found.method, found.data = "VariationalOnlineNewton", outside.rows
    return found
