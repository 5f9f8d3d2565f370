"""The posterior N(m, diag(s^2)) that a `VariationalOnlineNewton` optimizer has learnt in a custom training loop.

The prior of the model should be the one that the optimizer used. It affects the evidence but not the predictions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from priory.core.errors import require
from priory.families import DiagonalFamily
from priory.integrations.external import ExternalTraining
from priory.optim import VariationalOnlineNewton
from priory.posteriors import DiagonalGaussian

if TYPE_CHECKING:
    from torch.optim import Optimizer

POINT_SCALE = 1e-12  # standard deviation of a learnt noise, which is a point estimate from the held-out rows


def posterior_of(optimizer: Optimizer, model: Any, data: Any, held: Any = None) -> DiagonalGaussian:
    """Return the Gaussian posterior over the weights of `model.net` that an optimizer has learnt.

    Args:
        optimizer: A `priory.optim.VariationalOnlineNewton` over all trainable parameters of the network.
        model: A `Model`, made from the network that the optimizer has trained.
        data: Training data, as for `fit`.
        held: Held-out data, on which a learnt noise of the likelihood is fitted. Default: None; required if the
            likelihood has a learnt noise.

    Returns:
        The posterior, with the optimizer's means and standard deviations.

    Raises:
        InputError: If the optimizer is of another kind or lacks parameters of the network, or if `held` is missing.
    """
    owner = "posterior_of"
    supported = isinstance(optimizer, VariationalOnlineNewton)
    require(supported, "optimizer", owner, "be a VariationalOnlineNewton", type(optimizer).__name__)
    assert isinstance(optimizer, VariationalOnlineNewton)
    external, mean, std = ExternalTraining(owner, model, data, held), optimizer.mean(), optimizer.std()
    moved = all(p in mean for p in external.parameters.values())
    require(moved, "optimizer", owner, "have every trainable parameter of the model's network", "one that lacks some")
    loc = external.with_fitted_noise(external.vector({name: mean[p] for name, p in external.parameters.items()}))
    scale = external.vector({name: std[p] for name, p in external.parameters.items()})
    scale[external.model.network.size :] = POINT_SCALE
    found = DiagonalGaussian(external.target, DiagonalFamily(loc, scale.log()), external.buffers())
    found.method, found.data = "VariationalOnlineNewton", external.rows
    return found
