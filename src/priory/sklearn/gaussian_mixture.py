"""Gaussian mixture fitted by EM, with the interface of `sklearn.mixture.GaussianMixture`.

Differences from scikit-learn: `reg_covar` is a lower bound on the variances, as a fraction of the variances of the
data, and is not added to them, so the likelihood never decreases. NaN is a missing value, and is marginalised out.

`partial_fit` is online EM (Cappe and Moulines, 2009). The parameters summarise the earlier rows: the expected
statistics of a row are the weight and the first two moments of its component, s(theta). With theta_b the M-step of this
batch alone, and t the number of batches of its size seen so far,

    theta  <-  M-step of  (1 - r) s(theta) + r s(theta_b),      r = (t + 1)^-learning_decay
"""

from __future__ import annotations

import math
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted

from priory import latent
from priory.core.errors import require
from priory.core.streams import stream
from priory.latent.base import Theta
from priory.latent.expectation import expect
from priory.methods import EM
from priory.models.target import Target
from priory.posteriors import LatentPoint
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

if TYPE_CHECKING:
    from torch import Tensor

COVARIANCE_TYPES = ("full", "tied", "diag", "spherical")


class GaussianMixture(MixtureEstimator):
    """Gaussian mixture fitted by maximum likelihood.

    Args:
        n_components: Number of components K. Default: 1.
        covariance_type: "full" (default), "tied", "diag" or "spherical".
        tol: Tolerance of EM on the rise of the log-likelihood per iteration. Default: 1e-3.
        reg_covar: Lower bound on the variances, as a fraction of the variances of the data; between 0 and 1. Default:
            1e-6.
        max_iter: Maximum number of iterations. Default: 100.
        n_init: Number of restarts; the fit with the highest likelihood is kept. Default: 1.
        init_params: Initialisation: "kmeans", "k-means++", "random_from_data" or "random". Default: "kmeans".
        weights_init: Initial weights, (K,), positive, with sum 1. Default: None.
        means_init: Initial means, (K, D). Default: None.
        precisions_init: Initial precisions, in the shape of `covariances_`. Default: None.
        random_state: Seed of initialisation and `sample`, as in scikit-learn. Default: None.
        warm_start: Whether `fit` starts from the previous fit. Default: False.
        learning_decay: Exponent of the step size of `partial_fit`, above 0.5 and at most 1. Default: 0.7.
        verbose: Whether to show progress. Default: 0.

    Attributes:
        weights_: Weights, (K,).
        means_: Means, (K, D).
        covariances_: Covariances: (K, D, D), (D, D), (K, D) or (K,), by `covariance_type`.
        precisions_: Precisions, in the shape of `covariances_`.
        precisions_cholesky_: Cholesky factors of `precisions_`, as in scikit-learn.
        converged_: Whether the fit converged.
        n_iter_: Number of iterations.
        lower_bound_: Mean log-likelihood per row.
        lower_bounds_: Mean log-likelihood per row after each iteration.
        n_samples_seen_: Number of rows seen.

    Example:
        >>> X = np.random.default_rng(0).normal(size=(200, 2)) + 5 * (np.arange(200) % 2)[:, None]
        >>> mixture = GaussianMixture(n_components=2, random_state=0).fit(X)
        >>> mixture.weights_.round(2).tolist()
        [0.5, 0.5]
    """

    def __init__(
        self,
        n_components: int = 1,
        *,
        covariance_type: str = "full",
        tol: float = 1e-3,
        reg_covar: float = 1e-6,
        max_iter: int = 100,
        n_init: int = 1,
        init_params: str = "kmeans",
        weights_init: Any = None,
        means_init: Any = None,
        precisions_init: Any = None,
        random_state: Any = None,
        warm_start: bool = False,
        learning_decay: float = 0.7,
        verbose: int = 0,
    ) -> None:
        self.n_components = n_components
        self.covariance_type = covariance_type
        self.tol = tol
        self.reg_covar = reg_covar
        self.max_iter = max_iter
        self.n_init = n_init
        self.init_params = init_params
        self.weights_init = weights_init
        self.means_init = means_init
        self.precisions_init = precisions_init
        self.random_state = random_state
        self.warm_start = warm_start
        self.learning_decay = learning_decay
        self.verbose = verbose

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> GaussianMixture:
        self._check_options(COVARIANCE_TYPES)
        rows, model, data, weight = self._prepare(X, sample_weight, not self._warm())
        seed = self._seed()
        start = self._start(model, data, seed)
        method = EM(restarts=1 if isinstance(start, dict) else int(self.n_init), tolerance=float(self.tol), start=start)
        posterior = self._run(model, data, method, seed)
        self._set_fitted(posterior.mean)
        self.lower_bounds_ = [float(value) / weight for value in posterior.history["bound"]]
        self.lower_bound_ = self.lower_bounds_[-1]
        self.n_samples_seen_ = len(rows)
        return self

    def partial_fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> GaussianMixture:
        """Update the mixture by one step of online EM.

        Args:
            X: New rows, (n, D), with NaN for missing values.
            y: Ignored; present for scikit-learn's interface.
            sample_weight: Non-negative weight of each row, (n,). Default: 1 for all rows.

        Returns:
            The fitted estimator.
        """
        self._check_options(COVARIANCE_TYPES)
        ok = isinstance(self.learning_decay, Real) and 0.5 < self.learning_decay <= 1
        require(ok, "learning_decay", type(self).__name__, "be above 0.5 and at most 1", repr(self.learning_decay))
        first = not hasattr(self, "means_")
        rows, model, data, weight = self._prepare(X, sample_weight, first)
        model, batches = model.bind(data)
        if first:
            self._frame = arrays(dict(model.frame))
            seed = self._seed()
            start = self._start(model, batches, seed)
            theta = EM(start=start).first(
                model, batches.random_rows(model.sample, model.block, stream(seed)), stream(seed), None
            )
            self.n_samples_seen_, self.n_iter_, self.converged_ = 0, 0, False
        else:
            model.frame = tensors(self._frame)
            theta = self._theta()
        (found,) = expect(model, [theta], batches.blocks(model.block), 1 / weight)
        alone = model.m_step(found.statistics, theta)
        rate = (self.n_samples_seen_ / len(rows) + 1) ** -self.learning_decay
        sums = (1 - rate) * moments(model, theta) + rate * moments(model, alone)
        self._set_fitted(model.m_step({"sums": sums.double()}, theta))
        self.lower_bound_ = float(found.bound)
        self.n_samples_seen_ += len(rows)
        self.n_iter_ += 1
        return self

    def score_samples(self, X: Any) -> Array:
        """log p(x_n | theta) of the observed values of each row, (n,)."""
        return self._per_row("log_likelihood", X)

    def bic(self, X: Any) -> float:
        """The Bayesian information criterion on the rows X; lower is better."""
        return -2 * float(self.score_samples(X).sum()) + self._n_parameters() * math.log(len(X))

    def aic(self, X: Any) -> float:
        """Akaike's information criterion on the rows X; lower is better."""
        return -2 * float(self.score_samples(X).sum()) + 2 * self._n_parameters()

    # Helpers.

    def _warm(self) -> bool:
        return bool(self.warm_start) and hasattr(self, "means_")

    def _model(self, weighted: bool = False) -> latent.GaussianMixture:
        ok = isinstance(self.reg_covar, Real) and 0 < self.reg_covar < 1
        require(ok, "reg_covar", type(self).__name__, "lie between 0 and 1", repr(self.reg_covar))
        given = "weights" if weighted else ()
        return latent.GaussianMixture(int(self.n_components), self.covariance_type, float(self.reg_covar), given)

    def _prepare(self, X: Any, sample_weight: Any, reset: bool) -> tuple[Array, latent.GaussianMixture, Any, float]:
        """The rows, the model, the data in the form that `fit` accepts, and the total weight of the rows."""
        rows = self._read(X, reset=reset, min_rows=2)
        weights = self._read_weights(sample_weight, rows)
        data = rows if weights is None else (rows, weights)
        return rows, self._model(weights is not None), data, float(len(rows) if weights is None else weights.sum())

    def _start(self, model: latent.GaussianMixture, data: Any, seed: int) -> str | dict[str, Any]:
        """The initialisation method, or the initial parameters if any of them are given."""
        if self._warm():
            return dict(self._theta())
        how = START_METHODS[self.init_params]
        given = self._given_start()
        if not given:
            return how
        model, batches = model.bind(data)
        generator = stream(seed, "start")
        begun = model.begin(model.rows(batches.random_rows(model.sample, model.block, generator)), how, generator)
        return {**begun, **given}

    def _given_start(self) -> dict[str, Array]:
        """The initial weights, means and covariances that the user gave."""
        k, d, kind = int(self.n_components), self.n_features_in_, self.covariance_type
        spread = {"full": (k, d, d), "tied": (d, d), "diag": (k, d), "spherical": (k,)}[kind]
        shapes = {"weights_init": (k,), "means_init": (k, d), "precisions_init": spread}
        given = {option: np.asarray(getattr(self, option), dtype=np.float64) for option in shapes if self._has(option)}
        for option, value in given.items():
            must = f"have the shape {shapes[option]}"
            require(value.shape == shapes[option], option, type(self).__name__, must, value.shape)
        weights, precisions = given.get("weights_init", np.full(k, 1 / k)), given.get("precisions_init")
        ok = bool((weights > 0).all()) and abs(weights.sum() - 1) < 1e-6
        require(ok, "weights_init", type(self).__name__, "be positive and add up to 1", weights.tolist())
        found: dict[str, Array] = {
            option.removesuffix("_init"): value for option, value in given.items() if value is not precisions
        }
        if precisions is not None:
            crossed = kind in ("full", "tied")
            ok, must = positive(precisions, crossed), "be positive definite" if crossed else "be positive"
            require(ok, "precisions_init", type(self).__name__, must, precisions.tolist())
            found["covariances"] = np.linalg.inv(precisions) if crossed else 1 / precisions
        return found

    def _has(self, option: str) -> bool:
        return getattr(self, option) is not None

    def _set_fitted(self, theta: Theta) -> None:
        """Set the fitted attributes from theta."""
        found = arrays(theta)
        self.weights_, self.means_, self.covariances_ = found["weights"], found["means"], found["covariances"]
        self.precisions_cholesky_ = precision_cholesky(self.covariances_, self.covariance_type)
        self.precisions_ = precisions_of(self.precisions_cholesky_, self.covariance_type)

    def _theta(self) -> Theta:
        return tensors({"weights": self.weights_, "means": self.means_, "covariances": self.covariances_})

    def _posterior(self) -> LatentPoint:
        theta = self._theta()
        shape = ((self.n_features_in_,),)
        model = self._model().in_shapes(shape, theta["means"].dtype, torch.device("cpu"), **tensors(self._frame))
        return LatentPoint(Target(model, None), theta, self.lower_bound_, self.converged_)

    def _n_parameters(self) -> int:
        check_is_fitted(self)
        k, d = self.means_.shape
        pairs = d * (d + 1) // 2
        spread = {"full": k * pairs, "tied": pairs, "diag": k * d, "spherical": k}[self.covariance_type]
        return k - 1 + k * d + spread


def moments(model: latent.GaussianMixture, theta: Theta) -> Tensor:
    """s(theta), (K, F): the expected statistics of a row under the mixture, whose M-step is theta."""
    means, spread = model.standard(theta)
    one = torch.ones_like(means[:, :1])
    if spread.ndim == 3:
        i, j = torch.triu_indices(means.shape[1], means.shape[1])
        squares = (spread + means[:, :, None] * means[:, None, :])[:, i, j]
        features = torch.cat([squares, means, one], 1)
    else:
        features = torch.cat([spread + means.square(), means, torch.ones_like(means), one], 1)
    return theta["weights"][:, None] * features
