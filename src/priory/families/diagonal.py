"""The factorised Gaussian q(w) = prod_i N(w_i; m_i, s_i^2) on the flat vector.

Its KL divergence to a factorised Gaussian prior with locations m0 and precisions lambda is

    KL(q || p) = sum_i [ -log s_i + lambda_i s_i^2 / 2 + lambda_i (m_i - m0_i)^2 / 2 - (1 + log lambda_i) / 2 ].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from priory.families.base import Family, Form, normal_noise

if TYPE_CHECKING:
    from torch import Tensor

    from priory.models.density import DensityPrior
    from priory.priors import Prior

LOG_2_PI_E = 1 + math.log(2 * math.pi)


@dataclass(frozen=True, eq=False)
class DiagonalFamily(Family):
    """Factorised Gaussian, q(w) = prod_i N(w_i; m_i, s_i^2).

    Args:
        loc: Means m, (*B, P).
        log_scale: Log standard deviations log s, (*B, P).

    Example:
        >>> import torch
        >>> round(DiagonalFamily(torch.zeros(2), torch.zeros(2)).entropy().item(), 4)
        2.8379
    """

    loc: Tensor
    log_scale: Tensor

    @property
    def size(self) -> int:
        return self.loc.shape[-1]

    @property
    def scale(self) -> Tensor:
        """The standard deviations s, (*B, P)."""
        return self.log_scale.exp()

    def draw(self, noise: Tensor) -> Tensor:
        """Return w = m + s noise for standard normal noise (..., *B, P)."""
        return self.loc + self.scale * noise

    def sample(self, n: int, generator: Any) -> Tensor:
        return self.draw(normal_noise(n, self.loc, generator))

    def log_prob(self, w: Tensor) -> Tensor:
        z = (w - self.loc) / self.scale
        return -0.5 * (z * z).sum(-1) - self.log_scale.sum(-1) - 0.5 * math.log(2 * math.pi) * self.size

    def entropy(self) -> Tensor:
        return self.log_scale.sum(-1) + 0.5 * LOG_2_PI_E * self.size

    def moments(self) -> tuple[Tensor, Tensor]:
        return self.loc, self.scale.square()

    def cross_entropy(self, prior: Prior | DensityPrior) -> Tensor:
        square = self.scale.square() + (self.loc - prior.loc).square()
        return 0.5 * (prior.precision * square).sum(-1) - prior.log_normaliser


@dataclass(frozen=True)
class DiagonalForm(Form):
    """Parametrisation of a factorised Gaussian, theta = [loc, log_scale].

    Args:
        size: Length P of the flat vector.

    Example:
        >>> DiagonalForm(3).length
        6
    """

    kind: ClassVar[str] = "diagonal"

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.size, self.size)

    def initial(self, loc: Tensor, scale: Tensor, generator: torch.Generator) -> Tensor:
        return torch.cat([loc, self.expanded_scale(loc, scale).log()], -1)

    def family(self, theta: Tensor) -> DiagonalFamily:
        return DiagonalFamily(*self.split(theta))

    def moved(self, theta: Tensor, centre: Tensor, root: Tensor) -> Tensor | None:
        loc, log_scale = self.split(theta)
        return torch.cat([centre + root * loc, log_scale + root.log()], -1) if root.ndim == 1 else None
