"""The factorised Gaussian q(w) = prod_i N(w_i; m_i, s_i^2) on the flat vector.

Its divergence to a prior that is Gaussian with location m0 and precision lambda in every coordinate is

    KL(q || p) = sum_i [ -log s_i + lambda_i s_i^2 / 2 + lambda_i (m_i - m0_i)^2 / 2 - (1 + log lambda_i) / 2 ].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from priory.density import DensityPrior
    from priory.priors import Prior

LOG_2_PI_E = 1 + math.log(2 * math.pi)


@dataclass(frozen=True)
class Diagonal:
    """Means and log standard deviations, (*B, P).

    >>> import torch
    >>> round(Diagonal(torch.zeros(2), torch.zeros(2)).entropy().item(), 4)
    2.8379
    """

    loc: Tensor
    log_scale: Tensor

    @property
    def scale(self) -> Tensor:
        """The standard deviations."""
        return self.log_scale.exp()

    def draw(self, noise: Tensor) -> Tensor:
        """w = m + s noise, for standard normal noise (..., *B, P)."""
        return self.loc + self.scale * noise

    def entropy(self) -> Tensor:
        """H(q) in nats, (*B,)."""
        return self.log_scale.sum(-1) + 0.5 * LOG_2_PI_E * self.loc.shape[-1]

    def log_prob(self, w: Tensor) -> Tensor:
        """log q(w), (..., *B)."""
        z = (w - self.loc) / self.scale
        return -0.5 * (z * z).sum(-1) - self.log_scale.sum(-1) - 0.5 * math.log(2 * math.pi) * self.loc.shape[-1]

    def cross_entropy(self, prior: Prior | DensityPrior) -> Tensor:
        """-E_q[log p(w)] over the coordinates whose prior is Gaussian, in closed form, (*B,)."""
        square = self.scale.square() + (self.loc - prior.loc).square()
        return 0.5 * (prior.precision * square).sum(-1) - prior.log_normaliser
