"""The Bayesian Gaussian mixture by variational EM, as `sklearn.mixture.BayesianGaussianMixture` is called.

What it does differently: `lower_bound_` is the whole bound on log p(X), in nats, with every constant, and
`log_evidence_`, which counts the ways to number the components too, compares numbers of components. `score_samples` is
the density of a new row with the doubt of the parameters in it, a mixture of Student's t, and `sample` draws from it.
Degrees of freedom begin where a covariance has a prior mean. With "diag" each column has degrees of its own.
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
from priory.sklearn.base import STARTS, Array, MixtureEstimator, arrays, positive, precision_roots, tensors

SHAPES = ("full", "diag")
PRIORS = ("dirichlet_process", "dirichlet_distribution")


class BayesianGaussianMixture(MixtureEstimator):
    """K Gaussians with priors, of which as few are used as the data need.

    Priors that are left out are scikit-learn's, but for the degrees of freedom, D + 2 (3 a column for "diag"), and the
    covariance, which has the data's variances and no correlations. Fitted: `weights_`, `means_`, `covariances_` (the
    inverse of the expected precision), `precisions_`, `precisions_cholesky_`, `weight_concentration_`,
    `mean_precision_`, `degrees_of_freedom_`, the priors with an underscore after their names, `converged_`, `n_iter_`,
    `lower_bound_`, `lower_bounds_` and `log_evidence_`.

    >>> BayesianGaussianMixture(covariance_type="tied").fit([[0.0], [1.0]])
    Traceback (most recent call last):
    ...
    priory.InputError: The 'covariance_type' argument of BayesianGaussianMixture must be one of full, diag, got 'tied'.
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
        """Fit to rows (n, D), NaN where a value is missing, each counted as often as `sample_weight` says."""
        self._check_options(SHAPES)
        kind, must = self.weight_concentration_prior_type, f"be one of {', '.join(PRIORS)}"
        require(kind in PRIORS, "weight_concentration_prior_type", type(self).__name__, must, repr(kind))
        warm = bool(self.warm_start) and hasattr(self, "means_")
        rows = self._read(X, reset=not warm, least=2)
        weights = self._weigh(sample_weight, rows)
        self._set_priors(rows, weights)
        start = tensors(self._phi) if warm else STARTS[self.init_params]
        method = VariationalEM(restarts=1 if warm else int(self.n_init), tolerance=float(self.tol), start=start)
        data = rows if weights is None else (rows, weights)
        posterior = self._run(self._model(weights is not None), data, method, self._seed())
        assert isinstance(posterior, ConjugatePosterior)
        self._keep(posterior)
        return self

    def score_samples(self, X: Any) -> Array:
        """log E_q[p(x_n | theta)] of what was seen of each row, (n,)."""
        return self._ask("log_predictive", X)

    # Its parts.

    def _set_priors(self, X: Array, weights: Array | None) -> None:
        """The priors, from what is given or from the data's means and variances."""
        name, d = type(self).__name__, X.shape[1]
        full = self.covariance_type == "full"
        size = d if full else 1  # columns that a Wishart has
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

    def _keep(self, posterior: ConjugatePosterior) -> None:
        """q(theta) as fitted attributes."""
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
        root = self.precisions_cholesky_ = precision_roots(self.covariances_, self.covariance_type)
        self.precisions_ = root @ np.swapaxes(root, -1, -2) if self.covariance_type == "full" else root**2
        self.lower_bounds_ = [float(value) for value in posterior.history["bound"]]
        self.lower_bound_ = posterior.bound
        self.log_evidence_ = posterior.log_evidence_of_labels.value

    def _posterior(self) -> ConjugatePosterior:
        phi = tensors(self._phi)
        shape = ((self.n_features_in_,),)
        model = self._model().in_shapes(shape, phi["means"].dtype, torch.device("cpu"), **tensors(self._frame))
        return ConjugatePosterior(Target(model, None), phi, self.lower_bound_, self.converged_)

    def _made(self, n: int) -> tuple[Array, Array]:
        """Rows of the density that `score_samples` has."""
        y, z = self._posterior().generate(n, seed=self._seed())
        return y.numpy(), z.numpy()


def weighted_moments(X: Array, weights: Array | None) -> tuple[Array, Array]:
    """The mean and the variance of what was seen of each column, (D,); a variance of 1 where nothing varies."""
    seen = ~np.isnan(X) * (1.0 if weights is None else weights[:, None])
    total = np.maximum(seen.sum(0), np.finfo(np.float64).tiny)
    filled = np.nan_to_num(X, nan=0.0)
    mean = (seen * filled).sum(0) / total
    variance = (seen * (filled - mean) ** 2).sum(0) / total
    return mean, np.where(variance > 1e-24 * mean**2, variance, 1.0)
