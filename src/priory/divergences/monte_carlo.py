"""Monte Carlo expectations under q, with a standard error and an unbiased gradient.

Where q can be reparameterised, x = g(noise, theta), the gradient of the mean is the mean of the gradients. Elsewhere
the draws are constants, and the score-function term f grad log q is added to the gradient without changing the value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from priory.core.loaders import swapped
from priory.core.streams import stream

if TYPE_CHECKING:
    from torch.distributions import Distribution


def draws(d: Distribution, samples: int, seed: int, *names: str) -> Tensor:
    """Draw (samples, *batch, *event) values, reproducibly for a seed; torch's global generator is not advanced."""
    draw = d.rsample if d.has_rsample else d.sample
    with swapped(stream(seed, *names)):  # torch's distributions can draw from the global generator only
        return draw(torch.Size([samples]))


def with_score(each: Tensor, log_q: Tensor, q: Distribution) -> Tensor:
    """Add the score-function term to the gradient of the values if q cannot be reparameterised."""
    if q.has_rsample or not log_q.requires_grad:
        return each
    return each + torch.where(each.isfinite(), each, 0.0).detach() * (log_q - log_q.detach())


def mean_and_error(each: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean over the draws and its standard error, which is 0 where the mean is infinite."""
    mean = each.mean(0)
    error = each.detach().std(0) / each.shape[0] ** 0.5
    return mean, torch.where(torch.isfinite(mean), error, 0.0)
