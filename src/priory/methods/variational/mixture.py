"""Variational inference with a mixture of Gaussians (Jaakkola and Jordan 1998; Miller, Foti and Adams 2017).

    q(w) = sum_k pi_k N(w; m_k, S_k)

It fits several modes, or one mode that no single Gaussian fits. Each step draws equally many times from every component
and weights the draws by pi, so that the weights have gradients as well; `samples` is rounded accordingly. Cost of a
step: `samples` passes and O(samples components P).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from priory.core.errors import is_integer, require
from priory.families.mixture import MixtureForm
from priory.methods.variational.base import VariationalMethod

if TYPE_CHECKING:
    from priory.models.target import Target


@dataclass(frozen=True)
class MixtureOfGaussians(VariationalMethod):
    """Variational inference with a mixture of Gaussians.

    Maximises the evidence lower bound over

        q(w) = sum_k pi_k N(w; m_k, S_k)

    Fits several modes, or one mode that no single Gaussian fits. Each step draws equally many times from every
    component. A step costs `samples` passes and O(samples components P).

    Args:
        components: Number of Gaussians. Default: 2.
        covariance: Covariance of each component, "diagonal" or "full". Default: "diagonal".
        samples: Number of draws of w per step over all components, rounded to equally many per component. Default: 16.
        estimator: Gradient estimator, one of `priory.estimators.ESTIMATORS` except "local" and "flipout".
            Default: None, "sticking" for the ELBO, "pathwise" for "iwae", and "pathwise" with a `divergence`.
        initial_scale: Initial standard deviations of q, in standard deviations of the prior. Default: None, 0.02 for a
            network and 1 for a `Density`.

    Example:
        >>> import torch
        >>> import priory as pr
        >>> modes = torch.tensor([-3.0, 3.0], dtype=torch.float64)
        >>> density = pr.Density(lambda p: (-0.5 * (p["x"] - modes).square()).logsumexp(0), {"x": pr.Param()})
        >>> posterior = pr.fit(density, None, pr.MixtureOfGaussians(), steps=1000, progress=False)
        >>> round(posterior.summary().row("x")["sd"])  # both modes: sqrt(10)
        3

    References:
        Jaakkola and Jordan (1998), Improving the mean field approximation via the use of mixture distributions.
        Miller, Foti and Adams (2017), Variational boosting: iteratively refining posterior approximations.
    """

    components: int = 2
    covariance: str = "diagonal"
    samples: int = 16

    narrow: ClassVar[bool] = False
    usual_weighted: ClassVar[str] = "pathwise"  # "doubly" doesn't support the weighted draws

    def __post_init__(self) -> None:
        super().__post_init__()
        ok = is_integer(self.components, 1)
        require(ok, "components", "MixtureOfGaussians", "be an integer >= 1", self.components)
        must = "be 'pathwise' for the objective 'iwae'"
        require(self.estimator != "doubly", "estimator", "MixtureOfGaussians", must, repr(self.estimator))
        known = self.covariance in ("diagonal", "full")
        require(known, "covariance", "MixtureOfGaussians", "be 'diagonal' or 'full'", repr(self.covariance))

    def form(self, target: Target) -> MixtureForm:
        return MixtureForm(target.size, self.components, self.covariance)
