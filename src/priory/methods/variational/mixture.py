"""Variational inference with a mixture of Gaussians (Jaakkola and Jordan 1998; Miller, Foti and Adams 2017).

    q(w) = sum_k pi_k N(w; m_k, S_k)

It fits several modes, or one mode that no single Gaussian fits. Each step draws equally many times from every component
and weights the draws by pi, so that the weights have gradients as well; `samples` is rounded accordingly. Cost of a
step: `samples` passes and O(samples components P).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from priory.core.errors import is_integer, require
from priory.core.linalg import cholesky
from priory.families.full_rank import FullRankFamily, FullRankForm
from priory.families.mixture import MixtureForm
from priory.methods.variational.arrival import best_gaussian
from priory.methods.variational.base import VariationalMethod
from priory.methods.variational.fixed_draws import begin_fixed_draws
from priory.methods.variational.frame import Frame

if TYPE_CHECKING:
    from priory.methods.variational.arrival import Search
    from priory.models.target import Target

SPLIT_DISTANCE = 0.5  # standard deviations per coordinate between components that start at the same optimum


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

    def begin_fixed(self, target: Target, search: Search, generator: torch.Generator, shape: torch.Size) -> Any:
        best, form = best_gaussian(search, self.covariance == "full"), self.form(target)
        optima = best.optima[: self.components]
        best.rivals[: len(optima) - 1] = -math.inf  # those that have a component are not missed
        full = isinstance(form.component, FullRankForm)
        root = cholesky(best.q.covariance(), "covariance of q") if full else best.q.root
        frame, each, logits = Frame(best.q.loc, root), [], []
        for k in range(self.components):
            q, bound = optima[k % len(optima)]
            loc = frame.inward(q.loc)
            if k >= len(optima):  # components that share an optimum start beside each other
                loc = loc + SPLIT_DISTANCE * torch.randn(loc.shape, generator=generator, dtype=loc.dtype).to(loc)
            if isinstance(form.component, FullRankForm):
                tril = torch.linalg.solve_triangular(root, cholesky(q.covariance(), "covariance of q"), upper=False)
                each.append(form.component.theta(FullRankFamily(loc, tril)))
            else:
                each.append(torch.cat([loc, (q.root / root).log()]))
            logits.append(bound - math.log(sum(j % len(optima) == k % len(optima) for j in range(self.components))))
        theta = torch.cat([torch.tensor(logits, dtype=torch.float64).log_softmax(0), *each])
        columns = self.components * target.size
        return begin_fixed_draws(form, theta, frame, search, columns, shape, best.status_of_rivals())
