"""A mixture of Gaussians, q(w) = sum_k pi_k N(w; m_k, C_k), which can represent several modes.

The choice of a component cannot be reparameterised. `sample` therefore draws from every component and weights the draws
by pi_k, so that gradients also reach the weights (Morningstar et al. 2021, "Automatic Differentiation Variational
Inference with Mixtures"):

    E_q[f(w)] = sum_k pi_k E_k[f(w)]
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from priory.core.errors import require
from priory.families.base import Family, Form
from priory.families.diagonal import DiagonalForm
from priory.families.full_rank import FullRankForm

if TYPE_CHECKING:
    from torch import Tensor

COVARIANCES: dict[str, type[DiagonalForm | FullRankForm]] = {"diagonal": DiagonalForm, "full": FullRankForm}
# Fraction of each initial variance that lies between the components, so that they start well separated.
INITIAL_BETWEEN_SHARE = 0.75


@dataclass(frozen=True, eq=False)
class MixtureFamily(Family):
    """Mixture of Gaussians, q(w) = sum_k pi_k N(w; m_k, C_k).

    Args:
        logits: Logits of the weights pi, (*B, K).
        components: The components as one family with leading dimensions (*B, K).
    """

    logits: Tensor
    components: Family

    @property
    def size(self) -> int:
        return self.components.size

    @property
    def proportions(self) -> Tensor:
        """The weights pi of the components, (*B, K)."""
        return self.logits.softmax(-1)

    def sample(self, n: int, generator: Any) -> Tensor:
        """Draw max(1, n // K) values from each component; the number of draws is a multiple of K."""
        w = self.components.sample(self._each(n), generator)  # (n // K, *B, K, P)
        return w.movedim(-2, 1).flatten(0, 1)

    def weights(self, n: int) -> Tensor:
        each = self._each(n)
        pi = self.proportions.movedim(-1, 0) / each  # (K, *B)
        return pi.repeat(each, *[1] * (pi.ndim - 1))

    def independent(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw a component and then w for each draw; gradients reach the components but not their weights."""
        pi = self.proportions.detach()
        chosen = torch.multinomial(pi.reshape(-1, pi.shape[-1]), n, replacement=True, generator=generator)
        index = chosen.T.reshape(n, *pi.shape[:-1], 1, 1).expand(*[-1] * pi.ndim, 1, self.size)
        return self.components.sample(n, generator).gather(-2, index).squeeze(-2)

    def log_prob(self, w: Tensor) -> Tensor:
        return (self.logits.log_softmax(-1) + self.components.log_prob(w.unsqueeze(-2))).logsumexp(-1)

    def moments(self) -> tuple[Tensor, Tensor] | None:
        moments = self.components.moments()
        if moments is None:
            return None
        means, variances = moments  # (*B, K, P)
        pi = self.proportions.unsqueeze(-1)
        mean = (pi * means).sum(-2)
        return mean, (pi * (variances + (means - mean.unsqueeze(-2)).square())).sum(-2)

    def _each(self, n: int) -> int:
        """The number of draws per component."""
        return max(1, n // self.logits.shape[-1])


@dataclass(frozen=True)
class MixtureForm(Form):
    """Parametrisation of a mixture of Gaussians, theta = [logits, theta of the first component, ...].

    Args:
        size: Length P of the flat vector.
        components: Number K of components. Default: 2.
        covariance: "diagonal" (default) or "full".

    Example:
        >>> MixtureForm(size=3, components=2).length
        14
    """

    kind: ClassVar[str] = "mixture"
    components: int = 2
    covariance: str = "diagonal"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_integer("components", 1)
        must = "be 'diagonal' or 'full'"
        require(self.covariance in COVARIANCES, "covariance", "MixtureForm", must, repr(self.covariance))

    @property
    def component(self) -> DiagonalForm | FullRankForm:
        """The form of one component."""
        return COVARIANCES[self.covariance](self.size)

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.components, self.components * self.component.length)

    def initial(self, loc: Tensor, scale: Tensor, generator: torch.Generator) -> Tensor:
        """Return theta with equal weights and random centres, for which mean and variances are exactly those given."""
        spread, one = self.expanded_scale(loc, scale), self.components == 1
        shape = (*loc.shape[:-1], self.components, self.size)
        offset = torch.randn(shape, generator=generator, dtype=loc.dtype, device=loc.device)
        offset = offset - offset.mean(-2, keepdim=True)
        offset = offset / offset.square().mean(-2, keepdim=True).sqrt().clamp(min=torch.finfo(loc.dtype).tiny)
        between = 0.0 if one else INITIAL_BETWEEN_SHARE
        centres = loc.unsqueeze(-2) + math.sqrt(between) * spread.unsqueeze(-2) * offset
        theta = self.component.initial(centres, math.sqrt(1 - between) * scale, generator)
        return torch.cat([loc.new_zeros(*loc.shape[:-1], self.components), theta.flatten(-2)], -1)

    def family(self, theta: Tensor) -> MixtureFamily:
        logits, each = self.split(theta)
        return MixtureFamily(logits, self.component.family(each.unflatten(-1, (self.components, -1))))

    def moved(self, theta: Tensor, centre: Tensor, root: Tensor) -> Tensor | None:
        logits, each = self.split(theta)
        found = self.component.moved(each.unflatten(-1, (self.components, -1)), centre, root)
        return None if found is None else torch.cat([logits, found.flatten(-2)], -1)
