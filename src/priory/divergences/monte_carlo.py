"""Expectations under q by draws, with a standard error and the right gradient in expectation.

Where q can be reparameterised, x = g(noise, theta), the mean's gradient is the mean of the gradients. Elsewhere the
draws are constants, and the score's term f grad log q is added, without changing the value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from priory.core.data import swapped
from priory.core.streams import stream

if TYPE_CHECKING:
    from torch.distributions import Distribution


def draws(d: Distribution, samples: int, seed: int, *names: str) -> Tensor:
    """Draws with a leading dimension, the same for the same seed; torch's global stream is left alone."""
    draw = d.rsample if d.has_rsample else d.sample
    with swapped(stream(seed, *names)):  # torch's distributions draw from the global stream alone
        return draw(torch.Size([samples]))


def with_score(each: Tensor, log_q: Tensor, q: Distribution) -> Tensor:
    """The values at draws of q, with the score's term in their gradient where q has no reparameterisation."""
    if q.has_rsample or not log_q.requires_grad:
        return each
    return each + torch.where(each.isfinite(), each, 0.0).detach() * (log_q - log_q.detach())


def mean_and_error(each: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over the draws and its standard error, 0 where the mean is infinite."""
    mean = each.mean(0)
    error = each.detach().std(0) / each.shape[0] ** 0.5
    return mean, torch.where(torch.isfinite(mean), error, 0.0)
