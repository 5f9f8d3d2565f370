"""The Bayesian Gaussian mixture: Dirichlet weights, Normal-Wishart components (Attias, 1999; Bishop, 2006, 10.2).

    pi ~ Dirichlet(alpha_0),    Lambda_k ~ Wishart(nu_0, V_0^-1),    mu_k | Lambda_k ~ N(m_0, (beta_0 Lambda_k)^-1)

q(theta) = q(pi) prod_k q(mu_k, Lambda_k) is of the same families. With N_k, ybar_k, S_k the count, mean and covariance
of the rows of component k, each row counted by its responsibility:

    alpha_k = alpha_0 + N_k,      beta_k = beta_0 + N_k,      nu_k = nu_0 + N_k
    m_k     = (beta_0 m_0 + N_k ybar_k) / beta_k
    V_k     = V_0 + N_k S_k + beta_0 N_k / beta_k (ybar_k - m_0)(ybar_k - m_0)'

The E-step is that of EM for a mixture with means m_k, covariances V_k / nu_k and discounted weights. The discount
accounts for the uncertainty about the component, whose expected log density is below the log density at its mean:

    q(z_n = k)  ~  pi~_k N(y_n; m_k, V_k / nu_k),      log pi~_k = E[log pi_k] + discount_k
    discount_k  =  ( E[log |Lambda_k|] - log |nu_k V_k^-1| - D / beta_k ) / 2      (Bishop, 10.64 to 10.66)

The bound includes every constant, so it can be used to choose the number of components: superfluous ones increase
KL(q(theta) || p(theta)). q covers one of the k! equivalent labellings of the components. The posterior's
`log_evidence_of_labels` adds log k!; use it to compare numbers of components.

With covariance "diagonal", each column of a component has its own one-dimensional Wishart distribution, a Gamma. In the
code, the parameters of q are arranged in blocks: one block of D columns, or D blocks of one column.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import constraints as torch_constraints

from priory import constraints
from priory.core.errors import require
from priory.core.flat import Param
from priory.core.linalg import cholesky
from priory.latent.base import Expectation, Generated, Rows, Theta
from priory.latent.conjugate import (
    LOG_TAU,
    Conjugate,
    Phi,
    gammas,
    kl_dirichlet,
    kl_wishart,
    log_beta,
    log_det,
    log_dirichlet,
    log_precision,
    log_wishart,
    normals,
    positive,
)
from priory.latent.gaussian_mixture import GaussianMixture, columns, matrices, patterns
from priory.latent.mixture import restricted
from priory.latent.starts import clusters

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

UNUSED_COMPONENT_ROWS = 1e-3  # sum of responsibilities below which a component's q equals the prior


class BayesianGaussianMixture(Conjugate, GaussianMixture):
    """A mixture of K Gaussians with Dirichlet weights and Normal-Wishart components.

    Data and parameters are those of `GaussianMixture`. `VariationalEM` fits q(theta); EM fits the mode.

    Args:
        k: Number of components K.
        covariance: "full" or "diagonal" (or "diag"). Default: "full".
        concentration: Concentration alpha_0 of the Dirichlet prior of the weights. Default: 1.0.
        mean: Prior mean m_0 of the components' means, (D,). Default: None, the mean of the data.
        strength: Weight beta_0 of the prior mean, in rows. Default: 0.01.
        spread: Prior mean of a component's covariance, (D, D), or variances (D,). Default: None, the variances of the
            data.
        freedom: Degrees of freedom nu_0, the weight of the prior covariance in rows. Default: None, the smallest
            integer for which covariances have a prior mean.
        given: The parts that follow the rows in the data: "weights", one per row; "z", the known component of each row,
            -1 where it is hidden; or both. Default: ().

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> BayesianGaussianMixture(3, strength=-1)
        Traceback (most recent call last):
        ...
        priory.InputError: The 'strength' argument of BayesianGaussianMixture must be a positive number, got -1.
    """

    def __init__(
        self,
        k: int,
        covariance: str = "full",
        concentration: float = 1.0,
        mean: Any = None,
        strength: float = 0.01,
        spread: Any = None,
        freedom: float | None = None,
        given: str | Sequence[str] = (),
    ) -> None:
        GaussianMixture.__init__(self, k, covariance, given=given)
        name = type(self).__name__
        must = "be one of full, diagonal"
        require(self.covariance in ("full", "diagonal"), "covariance", name, must, repr(covariance))
        self.concentration = positive(concentration, "concentration", name)
        self.strength = positive(strength, "strength", name)
        self.freedom = None if freedom is None else positive(freedom, "freedom", name)
        self.mean0 = None if mean is None else torch.as_tensor(mean, dtype=torch.float64)
        self.spread0 = None if spread is None else torch.as_tensor(spread, dtype=torch.float64)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.k}, covariance={self.covariance!r})"

    def components(self, *shapes: tuple[int, ...]) -> dict[str, Param]:
        """Declare the means and covariances, after checking the prior against the shape of the data."""
        found = super().components(*shapes)
        (d,) = shapes[0] or (1,)
        size = d if self._crossed else 1
        ok = self.freedom is None or self.freedom > size + 1
        must = f"be above {size + 1} for {self.covariance} covariances of {d} columns"
        require(ok, "freedom", type(self).__name__, must, self.freedom)
        ok = self.mean0 is None or (self.mean0.numel() == d and bool(torch.isfinite(self.mean0).all()))
        require(ok, "mean", type(self).__name__, f"be {d} finite numbers", self.mean0)
        ok = self.spread0 is None or (
            tuple(self.spread0.shape) in (((), (1,)) if d == 1 else ((d,), (d, d)) if self._crossed else ((d,),))
            and bool(torch.isfinite(self.spread0).all())
            and bool((torch.linalg.eigvalsh(_square(self.spread0, d)) > 0).all())
        )
        require(ok, "spread", type(self).__name__, f"be positive, for {d} columns", self.spread0)
        return found

    def neutral(self) -> dict[str, Tensor]:
        """Return the frame that changes nothing."""
        assert self.shapes is not None
        (d,) = self.shapes[0] or (1,)
        zero = torch.zeros(d, dtype=self.dtype, device=self.device)
        return {"centre": zero, "scale": zero + 1}

    # Blocks of columns.

    @property
    def sizes(self) -> tuple[int, int]:
        """Number of blocks of a component, and columns per block."""
        d = len(self.frame["scale"])
        return (1, d) if self._crossed else (d, 1)

    def prior_q(self, like: Tensor) -> Phi:
        """Return the parameters of the prior in the form of q of one component, each (blocks, ...)."""
        blocks, size = self.sizes
        centre, scale = self.frame["centre"].to(like), self.frame["scale"].to(like)
        mean = centre if self.mean0 is None else self.mean0.to(like).reshape(-1)
        spread = scale.square().diag() if self.spread0 is None else _square(self.spread0.to(like), len(scale))
        nu = torch.full_like(scale[:blocks], size + 2 if self.freedom is None else self.freedom)
        inner = spread[None] if self._crossed else spread.diagonal()[:, None, None]
        return {
            "means": mean.reshape(blocks, size),
            "beta": torch.full_like(nu, self.strength),
            "nu": nu,
            "scatter": (nu - size - 1)[:, None, None] * inner,
        }

    def blocked(self, theta: Theta) -> tuple[Tensor, Tensor]:
        """Return means (*B, K, blocks, d) and covariances (*B, K, blocks, d, d) of theta (*B, ...)."""
        blocks, size = self.sizes
        lead = theta["weights"].shape[:-1]
        means = theta["means"].reshape(*lead, self.k, blocks, size)
        return means, theta["covariances"].reshape(*lead, self.k, blocks, size, size)

    def named(self, means: Tensor, spread: Tensor) -> Theta:
        """Return means and covariances in the shapes of theta, from blocks with any leading dimensions."""
        shapes = {block.name: block.shape for block in self.layout.blocks}
        lead = means.shape[:-3]
        return {
            "means": means.reshape(*lead, *shapes["means"]),
            "covariances": spread.reshape(*lead, *shapes["covariances"]),
        }

    # The weights: Dirichlet.

    def weight_params(self) -> dict[str, Param]:
        """alpha, (K,)."""
        return {"alpha": Param((self.k,), torch_constraints.positive)}

    def weight_step(self, counts: Tensor) -> Phi:
        """alpha_k = alpha_0 + N_k."""
        return {"alpha": self.concentration + counts}

    def log_weights_q(self, phi: Phi) -> Tensor:
        """E[log pi_k], (K,)."""
        return log_dirichlet(phi["alpha"])

    def weight_kl(self, phi: Phi) -> Tensor:
        """KL(q(pi) || p(pi))."""
        return kl_dirichlet(phi["alpha"], torch.full_like(phi["alpha"], self.concentration))

    def weight_mean(self, phi: Phi) -> Tensor:
        """E[pi], (K,)."""
        return phi["alpha"] / phi["alpha"].sum()

    def weight_mode(self, phi: Phi) -> Tensor:
        """Return the mode of q(pi), (K,), in which components with alpha below 1 have weight zero."""
        above = (phi["alpha"] - 1).clamp_min(0.0)
        return above / above.sum() if bool(above.sum() > 0) else self.weight_mean(phi)

    def weight_sample(self, phi: Phi, n: int, generator: torch.Generator) -> Tensor:
        """Draws of pi, (n, K)."""
        drawn = gammas(phi["alpha"], torch.ones_like(phi["alpha"]), n, generator)
        return drawn / drawn.sum(-1, keepdim=True)

    def log_weight_q(self, phi: Phi, weights: Tensor) -> Tensor:
        """log q(pi)."""
        return torch.xlogy(phi["alpha"] - 1, weights).sum(-1) - log_beta(phi["alpha"])

    def weight_prior(self, like: Tensor) -> Phi:
        """Return the parameters of the prior of pi."""
        return {"alpha": torch.full_like(like, self.concentration)}

    # Point estimates, for EM, MAP and samplers.

    def log_prior(self, theta: Theta) -> Tensor:
        """Return log p(theta): the density of q with the parameters of the prior."""
        weights = theta["weights"]
        return self.log_q({**self.weight_prior(weights), **self.prior_q(weights)}, theta)

    def m_step(self, statistics: Mapping[str, Tensor], theta: Theta) -> Theta:
        """Return the mode of q for these statistics, which is exact because the prior is conjugate."""
        phi = self.m_step_q(statistics, {})
        spread = phi["scatter"] / (phi["nu"] + phi["scatter"].shape[-1] + 2)[..., None, None]
        fresh = {"weights": self.weight_mode(phi), **self.named(phi["means"], spread)}
        return {name: fresh[name].to(self.dtype) for name in self.layout.names}

    def allows(self, theta: Theta) -> bool:
        """True for any theta: the prior prevents covariances from collapsing."""
        return True

    def problems(self, theta: Theta, statistics: Mapping[str, Tensor]) -> list[str]:
        """Return no problems: the prior prevents those of a Gaussian mixture."""
        return []

    # As q(theta).

    def params_q(self) -> dict[str, Param]:
        """Declare the parameters of q(pi), and m, beta, nu and V of each component."""
        blocks, size = self.sizes
        above = torch_constraints.positive
        return {
            **self.weight_params(),
            "means": Param((self.k, blocks, size)),
            "beta": Param((self.k, blocks), above),
            "nu": Param((self.k, blocks), torch_constraints.greater_than(float(size - 1))),
            "scatter": Param((self.k, blocks, size, size), constraints.positive_definite),
        }

    def begin_q(self, rows: Rows, how: str, generator: torch.Generator) -> Phi:
        """Initialise by clustering the rows and taking the M-step of the clusters."""
        labels = clusters(self.coordinates(rows), self.k, how, generator, rows.weights, rows.z)
        q = torch.nn.functional.one_hot(labels, self.k).T.to(self.dtype)
        sums = self.split_statistics(q if rows.weights is None else q * rows.weights, rows)
        return {name: t.to(self.dtype) for name, t in self.m_step_q({"sums": sums.double()}, {}).items()}

    def e_step_q(self, phi: Phi, rows: Rows) -> Expectation:
        """Run EM's E-step at the centre of q with discounted weights."""
        return self.e_step(self.centre(phi), rows)

    def complete_q(self, phi: Phi, statistics: Mapping[str, Tensor]) -> Tensor:
        """Return EM's Q at the centre of q with discounted weights."""
        return self.complete(self.centre(phi), statistics)

    def responsibilities_q(self, phi: Phi, rows: Rows) -> Tensor:
        """q(z_n = k), (n, K)."""
        return self.responsibilities(self.centre(phi), rows)

    def centre(self, phi: Phi) -> Theta:
        """Return m_k, V_k / nu_k and pi~_k; for diagonal covariances the discounts apply per observed column."""
        discount = discounts(phi, self.sizes[1])  # (K, blocks)
        theta = self.named(phi["means"], phi["scatter"] / phi["nu"][..., None, None])
        log_weights = self.log_weights_q(phi)
        if self._crossed:
            return {"weights": (log_weights + discount[:, 0]).exp(), **theta}
        return {"weights": log_weights.exp(), **theta, "discounts": discount}

    def natural(self, theta: Theta) -> Tensor:
        """Return eta, (K, F), with the discounts added to the coefficients of the observed columns."""
        eta = super().natural(theta)
        if "discounts" not in theta:
            return eta
        d = len(self.frame["scale"])
        return torch.cat([eta[:, : 2 * d], eta[:, 2 * d : 3 * d] + theta["discounts"], eta[:, 3 * d :]], 1)

    def direct(self, theta: Theta, rows: Rows, which: Tensor) -> Tensor:
        """Return the discounted log density of narrow components."""
        found = super().direct(theta, rows, which)
        if "discounts" not in theta:
            return found
        seen = (~columns(rows["y"]).isnan()).to(found.dtype)
        return found + theta["discounts"][which] @ seen.T

    def m_step_q(self, statistics: Mapping[str, Tensor], phi: Phi) -> Phi:
        """Compute alpha, beta, nu, m and V from the counts, means and covariances of the components."""
        sums = statistics["sums"]
        n, mean, around = self.moments(sums)
        prior = self.prior_q(sums)
        beta, nu = prior["beta"] + n, prior["nu"] + n
        away = mean - prior["means"]
        pull = (prior["beta"] * n / beta)[..., None, None] * away[..., :, None] * away[..., None, :]
        return {
            **self.weight_step(sums[:, -1]),
            "means": prior["means"] + (n / beta)[..., None] * away,
            "beta": beta,
            "nu": nu,
            "scatter": prior["scatter"] + around + pull,
        }

    def moments(self, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return N_k (K, blocks), ybar_k (K, blocks, d) and N_k S_k (K, blocks, d, d) in the units of the data."""
        blocks, size = self.sizes
        d = blocks * size
        if self._crossed:
            n, linear, squares = sums[:, -1:], sums[:, None, -1 - d : -1], matrices(sums[:, : -1 - d], d)[:, None]
        else:
            square, linear, n, _ = sums.split([d, d, d, 1], 1)
            linear, squares = linear[..., None], square[..., None, None]
        mean = linear / n[..., None].clamp_min(torch.finfo(sums.dtype).tiny)
        around = squares - linear[..., :, None] * mean[..., None, :]
        centre = self.frame["centre"].to(sums).reshape(blocks, size)
        scale = self.frame["scale"].to(sums).reshape(blocks, size)
        return n, centre + scale * mean, around * scale[..., :, None] * scale[..., None, :]

    def kl_q(self, phi: Phi) -> Tensor:
        """KL of the weights, of the precisions, and of the means given the precisions."""
        prior, size = self.prior_q(phi["beta"]), self.sizes[1]
        away = (phi["means"] - prior["means"])[..., None]
        distance = (away * torch.linalg.solve(phi["scatter"], away)).sum((-2, -1))
        ratio = prior["beta"] / phi["beta"]
        means = 0.5 * (size * (ratio - 1 - ratio.log()) + prior["beta"] * phi["nu"] * distance)
        precisions = kl_wishart(phi["nu"], phi["scatter"], prior["nu"], prior["scatter"])
        return self.weight_kl(phi) + (means + precisions).sum()

    def mean_q(self, phi: Phi) -> Theta:
        """E[pi], E[mu], E[Sigma]."""
        spread = phi["scatter"] / (phi["nu"] - self.sizes[1] - 1)[..., None, None]
        return {"weights": self.weight_mean(phi), **self.named(phi["means"], spread)}

    def sample_q(self, phi: Phi, n: int, generator: torch.Generator) -> Theta:
        """Draws of pi, and of Sigma by Bartlett's decomposition of its inverse, and of mu given Sigma."""
        size = self.sizes[1]
        below = torch.tril(torch.ones(size, size, dtype=torch.bool, device=self.device), -1)
        a = torch.where(below, normals(phi["scatter"], n, generator), 0.0)
        freedom = phi["nu"][..., None] - torch.arange(size, device=self.device)  # of the i-th chi-squared
        half = torch.full_like(freedom, 0.5)
        a = a + gammas(0.5 * freedom, half, n, generator).sqrt().diag_embed()
        factor = cholesky(phi["scatter"], "scatter of a component").mT.expand_as(a)
        root = torch.linalg.solve_triangular(a, factor, upper=False).mT  # Sigma = root root'
        noise = normals(phi["means"], n, generator)[..., None]
        means = phi["means"] + (root @ noise)[..., 0] / phi["beta"].sqrt()[..., None]
        return {"weights": self.weight_sample(phi, n, generator), **self.named(means, root @ root.mT)}

    def log_q(self, phi: Phi, theta: Theta) -> Tensor:
        """log q(pi) + sum_k log N(mu_k; m_k, Sigma_k / beta_k) + log inverse-Wishart(Sigma_k; nu_k, V_k)."""
        size, (means, spread) = self.sizes[1], self.blocked(theta)
        log_spread = log_det(spread)
        away = (means - phi["means"])[..., None]
        distance = phi["beta"] * (away * torch.linalg.solve(spread, away)).sum((-2, -1))
        normal = 0.5 * (size * (phi["beta"].log() - LOG_TAU) - log_spread - distance)
        trace = torch.linalg.solve(spread, phi["scatter"].expand_as(spread)).diagonal(dim1=-2, dim2=-1).sum(-1)
        wishart = log_wishart(phi["nu"], log_det(phi["scatter"]), size)
        inverse = wishart - 0.5 * ((phi["nu"] + size + 1) * log_spread + trace)
        return self.log_weight_q(phi, theta["weights"]) + (normal + inverse).expand(means.shape[:-1]).sum((-2, -1))

    def predictive_q(self, phi: Phi, rows: Rows) -> Tensor:
        """Return the log predictive density of each row under q, (n,): a mixture of Student's t (Bishop, 10.81)."""
        blocks, size = self.sizes
        y = columns(rows["y"])
        x = y.reshape(len(y), 1, blocks, size) - phi["means"]  # (n, K, blocks, d)
        freedom, scale = phi["nu"] + 1 - size, self.student_scale(phi)
        logits = torch.empty_like(x[..., 0, 0])
        for index, there in patterns(y, torch.ones(len(y), dtype=torch.bool, device=y.device)):
            seen = there.nonzero()[:, 0]
            part = x[index][..., seen] if self._crossed else x[index][:, :, seen]
            inner = scale[..., seen, :][..., seen] if self._crossed else scale[:, seen]
            free = freedom if self._crossed else freedom[:, seen]
            logits[index] = log_student(part, free, inner).sum(-1)
        return restricted((logits + self.weight_mean(phi).log()).T, rows.z).logsumexp(0)

    def generate_q(self, phi: Phi, n: int, generator: torch.Generator) -> Generated:
        """Draw z from E[pi], and y from Student's t of its component: a normal over the root of a chi-squared draw."""
        assert self.shapes is not None
        z = torch.multinomial(self.weight_mean(phi), n, replacement=True, generator=generator)
        freedom, root = phi["nu"] + 1 - self.sizes[1], cholesky(self.student_scale(phi), "scale of a component")
        noise = torch.randn(*phi["means"][z].shape, generator=generator, dtype=self.dtype, device=self.device)
        half = 0.5 * freedom[z]
        narrow = (gammas(half, half, 1, generator)[0]).sqrt()  # of chi-squared over its degrees of freedom
        y = phi["means"][z] + (root[z] @ noise[..., None])[..., 0] / narrow[..., None]
        return Generated(y.reshape(n, *self.shapes[0]), z)

    def student_scale(self, phi: Phi) -> Tensor:
        """The scale matrix of each component's predictive density, (K, blocks, d, d)."""
        freedom = phi["nu"] + 1 - self.sizes[1]
        return phi["scatter"] * ((1 + phi["beta"]) / (phi["beta"] * freedom))[..., None, None]

    def symmetry(self, phi: Phi) -> float:
        """Return log k!, less the log number of permutations of components without rows, which change nothing."""
        unused = int((phi["nu"].amax(1) - self.prior_q(phi["nu"])["nu"].amax() < UNUSED_COMPONENT_ROWS).sum())
        return math.lgamma(self.k + 1) - math.lgamma(unused + 1)


def discounts(phi: Phi, size: int) -> Tensor:
    """(E[log |Lambda|] - log |nu V^-1| - d / beta) / 2, which is always below zero, (K, blocks)."""
    log_centre = size * phi["nu"].log() - log_det(phi["scatter"])
    return 0.5 * (log_precision(phi["nu"], phi["scatter"]) - log_centre - size / phi["beta"])


def log_student(away: Tensor, freedom: Tensor, scale: Tensor) -> Tensor:
    """Return the log density of a d-dimensional Student's t at deviation (*, d), with scale matrix (*, d, d)."""
    d = away.shape[-1]
    root = cholesky(scale, "scale of a component")
    white = torch.linalg.solve_triangular(root, away[..., None], upper=False)
    constant = (0.5 * (freedom + d)).lgamma() - (0.5 * freedom).lgamma() - 0.5 * d * (freedom * math.pi).log()
    return constant - 0.5 * log_det(scale) - 0.5 * (freedom + d) * (white.square().sum((-2, -1)) / freedom).log1p()


def _square(spread: Tensor, d: int) -> Tensor:
    """Return a covariance (D, D) from variances or from a covariance."""
    return spread if spread.ndim == 2 else spread.reshape(-1).expand(d).diag()
