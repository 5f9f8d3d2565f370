"""Bayesian Gaussian mixture fitted by variational EM, with the interface of `sklearn.mixture.BayesianGaussianMixture`.

Differences from scikit-learn: `lower_bound_` is the bound on log p(X) in nats, with every constant. `log_evidence_`
adds the number of ways to label the components, and compares mixtures with different numbers of components.
`score_samples` is the posterior predictive density of a row, a mixture of Student's t, and `sample` draws from it.
Degrees of freedom must be large enough for the prior covariance to have a mean. With "diag" each column has its own
degrees of freedom.
"""

from __future__ import annotations

from numbers import Real
from typing import Any

import numpy as np
import torch

from priory import latent
from priory.core.errors import require
from priory.methods import VariationalEM
from priory.models.target import Target
from priory.posteriors import ConjugatePosterior
from priory.sklearn.base import (
    START_METHODS,
    Array,
    MixtureEstimator,
    arrays,
    positive,
    precision_cholesky,
    precisions_of,
    tensors,
)

COVARIANCE_TYPES = ("full", "diag")
WEIGHT_PRIORS = ("dirichlet_process", "dirichlet_distribution")


class BayesianGaussianMixture(MixtureEstimator):
    """Variational Bayesian Gaussian mixture, which uses only as many components as the data need.

    Args:
        n_components: Maximum number of components K. Default: 1.
        covariance_type: "full" (default) or "diag".
        tol: Tolerance of EM on the rise of the bound per iteration. Default: 1e-3.
        max_iter: Maximum number of iterations. Default: 100.
        n_init: Number of restarts; the fit with the highest bound is kept. Default: 1.
        init_params: Initialisation: "kmeans", "k-means++", "random_from_data" or "random". Default: "kmeans".
        weight_concentration_prior_type: "dirichlet_process" (default) or "dirichlet_distribution".
        weight_concentration_prior: Concentration of the weights' prior. Default: 1 / K.
        mean_precision_prior: Precision of the prior of the means, relative to a row's. Default: 1.
        mean_prior: Prior mean, (D,). Default: the mean of the data.
        degrees_of_freedom_prior: Prior degrees of freedom, > D + 1. Default: D + 2; for "diag" > 2, and 3 per column.
        covariance_prior: Scale matrix of the inverse Wishart prior, (D, D), or (D,) for "diag". Default: the variances
            of the data, without correlations.
        random_state: Seed of initialisation and `sample`, as in scikit-learn. Default: None.
        warm_start: Whether `fit` starts from the previous fit. Default: False.
        verbose: Whether to show progress. Default: 0.

    Attributes:
        weights_: Expected weights, (K,).
        means_: Expected means, (K, D).
        covariances_: Inverses of the expected precisions, (K, D, D), or (K, D) for "diag".
        precisions_: Expected precisions, in the shape of `covariances_`.
        precisions_cholesky_: Cholesky factors of `precisions_`, as in scikit-learn.
        weight_concentration_: Parameters of the posterior of the weights.
        mean_precision_: Precisions of the posteriors of the means.
        degrees_of_freedom_: Degrees of freedom of the posteriors of the covariances.
        weight_concentration_prior_, mean_precision_prior_, mean_prior_, degrees_of_freedom_prior_, covariance_prior_:
            The priors that were used.
        converged_: Whether the fit converged.
        n_iter_: Number of iterations.
        lower_bound_: The bound on log p(X), in nats.
        lower_bounds_: The bound after each iteration.
        log_evidence_: The bound including all labellings of the components.

    Example:
        >>> X = np.random.default_rng(0).normal(size=(200, 2)) + 5 * (np.arange(200) % 2)[:, None]
        >>> mixture = BayesianGaussianMixture(n_components=5, random_state=0).fit(X)
        >>> int((mixture.weights_ > 0.1).sum())
        2
    """

    def __init__(
        self,
        n_components: int = 1,
        *,
        covariance_type: str = "full",
        tol: float = 1e-3,
        max_iter: int = 100,
        n_init: int = 1,
        init_params: str = "kmeans",
        weight_concentration_prior_type: str = "dirichlet_process",
        weight_concentration_prior: float | None = None,
        mean_precision_prior: float | None = None,
        mean_prior: Any = None,
        degrees_of_freedom_prior: float | None = None,
        covariance_prior: Any = None,
        random_state: Any = None,
        warm_start: bool = False,
        verbose: int = 0,
    ) -> None:
        self.n_components = n_components
        self.covariance_type = covariance_type
        self.tol = tol
        self.max_iter = max_iter
        self.n_init = n_init
        self.init_params = init_params
        self.weight_concentration_prior_type = weight_concentration_prior_type
        self.weight_concentration_prior = weight_concentration_prior
        self.mean_precision_prior = mean_precision_prior
        self.mean_prior = mean_prior
        self.degrees_of_freedom_prior = degrees_of_freedom_prior
        self.covariance_prior = covariance_prior
        self.random_state = random_state
        self.warm_start = warm_start
        self.verbose = verbose

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> BayesianGaussianMixture:
        self._check_options(COVARIANCE_TYPES)
        kind, must = self.weight_concentration_prior_type, f"be one of {', '.join(WEIGHT_PRIORS)}"
        require(kind in WEIGHT_PRIORS, "weight_concentration_prior_type", type(self).__name__, must, repr(kind))
        warm = bool(self.warm_start) and hasattr(self, "means_")
        rows = self._read(X, reset=not warm, min_rows=2)
        weights = self._read_weights(sample_weight, rows)
        self._set_priors(rows, weights)
        start = tensors(self._phi) if warm else START_METHODS[self.init_params]
        method = VariationalEM(restarts=1 if warm else int(self.n_init), tolerance=float(self.tol), start=start)
        data = rows if weights is None else (rows, weights)
        posterior = self._run(self._model(weights is not None), data, method, self._seed())
        assert isinstance(posterior, ConjugatePosterior)
        self._set_fitted(posterior)
        return self

    def score_samples(self, X: Any) -> Array:
        """log E_q[p(x_n | theta)] of the observed values of each row, (n,)."""
        return self._per_row("log_predictive", X)

    # Helpers.

    def _set_priors(self, X: Array, weights: Array | None) -> None:
        """Validate the priors, and fill in missing ones from the means and variances of the data."""
        name, d = type(self).__name__, X.shape[1]
        full = self.covariance_type == "full"
        size = d if full else 1  # dimension of each Wishart distribution
        for option in ("weight_concentration_prior", "mean_precision_prior"):
            value = getattr(self, option)
            require(
                value is None or (isinstance(value, Real) and float(value) > 0),
                option,
                name,
                "be a positive number",
                repr(value),
            )
        nu = self.degrees_of_freedom_prior
        ok = nu is None or (isinstance(nu, Real) and float(nu) > size + 1)
        require(ok, "degrees_of_freedom_prior", name, f"be above {size + 1}", repr(nu))
        shapes = {"mean_prior": (d,), "covariance_prior": (d, d) if full else (d,)}
        for option, shape in shapes.items():
            got = shape if getattr(self, option) is None else np.shape(np.asarray(getattr(self, option)))
            require(got == shape, option, name, f"have the shape {shape}", got)
        mean, variance = weighted_moments(X.astype(np.float64), weights)
        share, strength = self.weight_concentration_prior, self.mean_precision_prior
        self.weight_concentration_prior_ = 1.0 / self.n_components if share is None else float(share)
        self.mean_precision_prior_ = 1.0 if strength is None else float(strength)
        self.mean_prior_ = mean if self.mean_prior is None else np.asarray(self.mean_prior, dtype=np.float64)
        self.degrees_of_freedom_prior_ = float(size + 2) if nu is None else float(nu)
        given = self.covariance_prior
        spread = (np.diag(variance) if full else variance) if given is None else np.asarray(given, dtype=np.float64)
        ok = positive(spread, full)
        require(ok, "covariance_prior", name, "be positive definite" if full else "be positive", spread.tolist())
        self.covariance_prior_ = spread

    def _model(self, weighted: bool = False) -> latent.BayesianGaussianMixture:
        k, d = int(self.n_components), self.n_features_in_
        sticks = self.weight_concentration_prior_type == "dirichlet_process" and k > 1
        kind = latent.DirichletProcessMixture if sticks else latent.BayesianGaussianMixture
        nu, size = self.degrees_of_freedom_prior_, d if self.covariance_type == "full" else 1
        spread = self.covariance_prior_ / (nu - size - 1)  # the mean of an inverse Wishart
        return kind(
            k,
            self.covariance_type,
            concentration=self.weight_concentration_prior_,
            mean=self.mean_prior_,
            strength=self.mean_precision_prior_,
            spread=spread.reshape(-1) if d == 1 else spread,
            freedom=nu,
            given="weights" if weighted else (),
        )

    def _set_fitted(self, posterior: ConjugatePosterior) -> None:
        """Set the fitted attributes from q(theta)."""
        phi = self._phi = arrays(posterior.phi)
        k, d = int(self.n_components), self.n_features_in_
        shape = (k, d, d) if self.covariance_type == "full" else (k, d)
        each = (k,) if self.covariance_type == "full" else (k, d)
        self.weights_ = arrays(posterior.mean)["weights"]
        self.weight_concentration_ = phi["sticks"] if "sticks" in phi else phi["alpha"]
        self.means_ = phi["means"].reshape(k, d)
        self.mean_precision_ = phi["beta"].reshape(each)
        self.degrees_of_freedom_ = phi["nu"].reshape(each)
        self.covariances_ = (phi["scatter"] / phi["nu"][..., None, None]).reshape(shape)
        self.precisions_cholesky_ = precision_cholesky(self.covariances_, self.covariance_type)
        self.precisions_ = precisions_of(self.precisions_cholesky_, self.covariance_type)
        self.lower_bounds_ = [float(value) for value in posterior.history["bound"]]
        self.lower_bound_ = posterior.bound
        self.log_evidence_ = posterior.log_evidence_of_labels.value

    def _posterior(self) -> ConjugatePosterior:
        phi = tensors(self._phi)
        shape = ((self.n_features_in_,),)
        model = self._model().in_shapes(shape, phi["means"].dtype, torch.device("cpu"), **tensors(self._frame))
        return ConjugatePosterior(Target(model, None), phi, self.lower_bound_, self.converged_)


def weighted_moments(X: Array, weights: Array | None) -> tuple[Array, Array]:
    """Mean and variance of the observed values of each column, (D,); a variance of 1 for a constant column."""
    seen = ~np.isnan(X) * (1.0 if weights is None else weights[:, None])
    total = np.maximum(seen.sum(0), np.finfo(np.float64).tiny)
    filled = np.nan_to_num(X, nan=0.0)
    mean = (seen * filled).sum(0) / total
    variance = (seen * (filled - mean) ** 2).sum(0) / total
    return mean, np.where(variance > 1e-24 * mean**2, variance, 1.0)
