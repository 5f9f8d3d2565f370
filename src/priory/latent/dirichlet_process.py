"""The Dirichlet-process mixture of Gaussians, truncated, in its stick-breaking form (Blei and Jordan, 2006).

    v_k ~ Beta(1, alpha),      pi_k = v_k prod_{j<k} (1 - v_j),      components as in the Bayesian mixture

The number of components is unbounded: component k takes the share v_k of the rest of the unit stick that components
1 to k - 1 have left. q is truncated at K components, q(v_K = 1) = 1, but the model is not, so K only has to be large
enough. With N_k the number of rows of component k:

    q(v_k) = Beta(1 + N_k, alpha + sum_{j>k} N_j),      E[log pi_k] = E[log v_k] + sum_{j<k} E[log (1 - v_j)]

The E-step, the components and the bound are those of `bayesian_mixture`. Stick-breaking favours an order with large
components first, so clusters are sorted by size at initialisation, which maximises the bound (Kurihara, Welling and
Teh, 2007).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import constraints as torch_constraints

from priory.core.errors import InputError, is_integer, require
from priory.core.flat import Param
from priory.latent.base import Rows
from priory.latent.bayesian_mixture import BayesianGaussianMixture
from priory.latent.conjugate import Phi, gammas, kl_dirichlet, log_beta, log_dirichlet

if TYPE_CHECKING:
    from collections.abc import Sequence


class DirichletProcessMixture(BayesianGaussianMixture):
    """A mixture of as many Gaussians as the data need, at most k: a truncated Dirichlet process.

    Data and parameters are those of `GaussianMixture`. It is fitted by `VariationalEM`.

    Args:
        k: Truncation, the largest number of components, an integer >= 2. Default: 20.
        covariance: "full" or "diagonal" (or "diag"). Default: "full".
        concentration: Concentration alpha of the process; larger values favour more components. Default: 1.0.
        mean: Prior mean m_0 of the components' means, (D,). Default: None, the mean of the data.
        strength: Weight beta_0 of the prior mean, in rows. Default: 0.01.
        spread: Prior mean of a component's covariance, (D, D), or variances (D,). Default: None, the variances of the
            data.
        freedom: Degrees of freedom nu_0, the weight of the prior covariance in rows. Default: None, the smallest
            integer for which covariances have a prior mean.
        given: "weights" if the data end with one weight per row. Default: ().

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> DirichletProcessMixture(1)
        Traceback (most recent call last):
        ...
        priory.InputError: The 'k' argument of DirichletProcessMixture must be an integer >= 2, got 1.
    """

    def __init__(
        self,
        k: int = 20,
        covariance: str = "full",
        concentration: float = 1.0,
        mean: Any = None,
        strength: float = 0.01,
        spread: Any = None,
        freedom: float | None = None,
        given: str | Sequence[str] = (),
    ) -> None:
        require(is_integer(k, 2), "k", "DirichletProcessMixture", "be an integer >= 2", repr(k))
        super().__init__(k, covariance, concentration, mean, strength, spread, freedom, given)
        require("z" not in self.given, "given", "DirichletProcessMixture", "be 'weights' or nothing", repr(given))

    # The weights: (v_k, 1 - v_k) is Beta, a Dirichlet with two entries.

    def weight_params(self) -> dict[str, Param]:
        """Declare the parameters of each stick's Beta distribution, (K - 1, 2)."""
        return {"sticks": Param((self.k - 1, 2), torch_constraints.positive)}

    def weight_step(self, counts: Tensor) -> Phi:
        """Return the parameters 1 + N_k and alpha + sum_{j>k} N_j of q(v_k)."""
        later = counts.flip(0).cumsum(0).flip(0)[1:]
        return {"sticks": torch.stack([1 + counts[:-1], self.concentration + later], 1)}

    def weight_prior(self, like: Tensor) -> Phi:
        """Beta(1, alpha) for each stick."""
        one = torch.ones_like(like[..., :-1].reshape(-1, self.k - 1)[0])
        return {"sticks": torch.stack([one, self.concentration * one], 1)}

    def log_weights_q(self, phi: Phi) -> Tensor:
        """E[log v_k] + sum_{j<k} E[log (1 - v_j)]."""
        return broken(*log_dirichlet(phi["sticks"]).unbind(-1))

    def weight_kl(self, phi: Phi) -> Tensor:
        """KL of the sticks."""
        return kl_dirichlet(phi["sticks"], self.weight_prior(self.log_weights_q(phi))["sticks"]).sum()

    def weight_mean(self, phi: Phi) -> Tensor:
        """E[pi_k]: a product, as sticks are independent."""
        shares = phi["sticks"] / phi["sticks"].sum(1, keepdim=True)
        return broken(*shares.log().unbind(-1)).exp()

    def weight_mode(self, phi: Phi) -> Tensor:
        """Raise an error, because the density of the weights is unbounded."""
        raise InputError(f"{self!r} has no mode: fit it by VariationalEM.")

    def weight_sample(self, phi: Phi, n: int, generator: torch.Generator) -> Tensor:
        """Draws of pi, (n, K)."""
        drawn = gammas(phi["sticks"], torch.ones_like(phi["sticks"]), n, generator).log()
        return broken(*drawn.log_softmax(-1).unbind(-1)).exp()

    def log_weight_q(self, phi: Phi, weights: Tensor) -> Tensor:
        """Return log q(pi): the log density of the sticks v plus the log-determinant of the map from pi to v."""
        left = (1 - weights.cumsum(-1)).clamp_min(torch.finfo(weights.dtype).tiny)[..., :-1]
        before = torch.cat([torch.ones_like(left[..., :1]), left[..., :-1]], -1)
        a, b = phi["sticks"].unbind(-1)
        taken, rest = weights[..., :-1] / before, left / before
        beta = torch.xlogy(a - 1, taken) + torch.xlogy(b - 1, rest) - log_beta(phi["sticks"])
        return (beta - before.log()).sum(-1)

    def begin_q(self, rows: Rows, how: str, generator: torch.Generator) -> Phi:
        """Initialise by the M-step of clusters, sorted by size with the largest first."""
        phi = super().begin_q(rows, how, generator)
        order = phi["nu"].amax(1).argsort(descending=True)
        sorted_ = {name: t[order] for name, t in phi.items() if name != "sticks"}
        counts = sorted_["nu"].amax(1) - self.prior_q(phi["nu"])["nu"].amax()
        return {**self.weight_step(counts.clamp_min(0.0)), **sorted_}

    def symmetry(self, phi: Phi) -> float:
        """Return 0, because the order of the sticks identifies the components."""
        return 0.0


def broken(taken: Tensor, left: Tensor) -> Tensor:
    """log pi_k, (*B, K), from log v_k and log (1 - v_k), each (*B, K - 1)."""
    none = torch.zeros_like(taken[..., :1])
    return torch.cat([taken, none], -1) + torch.cat([none, left.cumsum(-1)], -1)
