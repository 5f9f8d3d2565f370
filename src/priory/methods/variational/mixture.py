"""Variational inference with a mixture of Gaussians (Jaakkola and Jordan 1998; Miller, Foti and Adams 2017).

    q(w) = sum_k pi_k N(w; m_k, S_k)

Several modes, or one that no Gaussian fits. Each step draws from every component and weighs the draws by pi, so that
the weights have gradients as well: `samples` is rounded to as many for each. Cost of a step: `samples` passes and
O(samples components P).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from priory.core.errors import require, whole
from priory.families.mixture import MixtureForm
from priory.methods.variational.base import VariationalMethod

if TYPE_CHECKING:
    from priory.models.target import Target


@dataclass(frozen=True)
class MixtureOfGaussians(VariationalMethod):
    """Variational inference with `components` Gaussians of a "diagonal" or "full" covariance.

    The other options are those of `MeanField`; `samples` counts the draws of all components together.

    >>> MixtureOfGaussians(components=0)
    Traceback (most recent call last):
    ...
    priory.InputError: The 'components' argument of MixtureOfGaussians must be an integer >= 1, got 0.
    """

    components: int = 2
    covariance: str = "diagonal"
    samples: int = 16

    narrow: ClassVar[bool] = False
    usual_weighted: ClassVar[str] = "pathwise"  # draws of the components carry weights, which "doubly" has no place for

    def __post_init__(self) -> None:
        super().__post_init__()
        ok = whole(self.components, 1)
        require(ok, "components", "MixtureOfGaussians", "be an integer >= 1", self.components)
        must = "be 'pathwise' for the objective 'iwae'"
        require(self.estimator != "doubly", "estimator", "MixtureOfGaussians", must, repr(self.estimator))
        known = self.covariance in ("diagonal", "full")
        require(known, "covariance", "MixtureOfGaussians", "be 'diagonal' or 'full'", repr(self.covariance))

    def form(self, target: Target) -> MixtureForm:
        return MixtureForm(target.size, self.components, self.covariance)
