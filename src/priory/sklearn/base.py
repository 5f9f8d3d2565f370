"""Base classes of the estimators: scikit-learn's options, rows as arrays, and fitting by this library's EM.

Fitted attributes are NumPy arrays, as in scikit-learn, so an estimator can be cloned, pickled and used in a grid
search. The posterior is rebuilt from them for each prediction.
"""

from __future__ import annotations

import math
import warnings
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, DensityMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from priory.core.data import tensor_of
from priory.core.errors import is_integer, require
from priory.fitting.fit import fit
from priory.posteriors import ConjugatePosterior, LatentPoint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from priory.latent import Latent
    from priory.methods import EM, VariationalEM

Array = np.ndarray
# This library starts from k-means++ centres followed by a few rounds of k-means, or from random rows.
START_METHODS = {"kmeans": "k-means++", "k-means++": "k-means++", "random_from_data": "random", "random": "random"}


class LatentEstimator(DensityMixin, BaseEstimator):
    """Base class of estimators that are fitted by EM."""

    n_components: int
    tol: float
    max_iter: int
    n_init: int
    init_params: str
    random_state: Any
    verbose: int
    n_features_in_: int

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    # Validation and fitting.

    def _check_options(self, shapes: tuple[str, ...]) -> None:
        """Raise an `InputError` for an invalid option."""
        name = type(self).__name__
        for option in ("n_components", "max_iter", "n_init"):
            value = getattr(self, option)
            require(is_integer(value, 1), option, name, "be an integer >= 1", repr(value))
        ok = isinstance(self.tol, Real) and 0 <= self.tol < math.inf
        require(ok, "tol", name, "be a number >= 0", repr(self.tol))
        must = f"be one of {', '.join(START_METHODS)}"
        require(str(self.init_params) in START_METHODS, "init_params", name, must, repr(self.init_params))
        kind = getattr(self, "covariance_type", None)
        require(kind in shapes, "covariance_type", name, f"be one of {', '.join(shapes)}", repr(kind))

    def _read(self, X: Any, reset: bool, min_rows: int = 1) -> Array:
        """Rows as an array of floats, (n, D), NaN where a value is missing."""
        kinds, finite = [np.float64, np.float32], "allow-nan"
        rows: Any = validate_data(
            self, X, reset=reset, dtype=kinds, ensure_all_finite=finite, ensure_min_samples=min_rows
        )
        return rows

    def _read_weights(self, sample_weight: Any, X: Array) -> Array | None:
        """The sample weights as an array (n,), or None if there are none."""
        if sample_weight is None:
            return None
        return _check_sample_weight(sample_weight, X, dtype=X.dtype, ensure_non_negative=True)

    def _seed(self) -> int:
        """An integer seed drawn from `random_state`."""
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _run(self, model: Latent, data: Any, method: EM | VariationalEM, seed: int) -> LatentPoint | ConjugatePosterior:
        """Fit the model, set `converged_` and `n_iter_`, and warn if the fit did not converge."""
        posterior = fit(model, data, method, steps=int(self.max_iter), seed=seed, progress=bool(self.verbose))
        assert isinstance(posterior, (LatentPoint, ConjugatePosterior))
        assert isinstance(posterior.latent.frame, dict)
        self._frame = arrays(posterior.latent.frame)
        self.converged_ = posterior.converged
        self.n_iter_ = len(posterior.history["bound"])
        if not self.converged_ and self.tol > 0:
            warnings.warn(
                f"{type(self).__name__} did not converge in {self.max_iter} iterations. Raise max_iter or tol, try "
                "another init_params or random_state, or look at the data for degeneracies.",
                ConvergenceWarning,
                stacklevel=3,
            )
        return posterior

    # Prediction.

    def _posterior(self) -> LatentPoint | ConjugatePosterior:
        """The posterior, rebuilt from the fitted arrays."""
        raise NotImplementedError

    def _per_row(self, question: str, X: Any) -> Array:
        """Evaluate a method of the posterior, by name, at each row of X."""
        check_is_fitted(self)
        return getattr(self._posterior(), question)(tensor_of(self._read(X, reset=False), "X")).numpy()


class MixtureEstimator(LatentEstimator):
    """Base class of mixtures, whose rows are independent."""

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Any:
        """Fit the mixture to rows.

        Args:
            X: Rows, (n, D), with NaN for missing values.
            y: Ignored; present for scikit-learn's interface.
            sample_weight: Non-negative weight of each row, (n,). Default: 1 for all rows.

        Returns:
            The fitted estimator.

        Raises:
            InputError: If an option is invalid.
        """
        raise NotImplementedError

    def fit_predict(self, X: Any, y: Any = None, sample_weight: Any = None) -> Array:
        """Fit the mixture, and return the most probable component of each row, (n,)."""
        return self.fit(X, y, sample_weight).predict(X)

    def predict(self, X: Any) -> Array:
        """The most probable component of each row, (n,)."""
        return self._per_row("predict_labels", X)

    def predict_proba(self, X: Any) -> Array:
        """The responsibilities q(z_n = k), (n, K)."""
        return self._per_row("responsibilities", X)

    def score_samples(self, X: Any) -> Array:
        """The log density of the observed values of each row, (n,)."""
        raise NotImplementedError

    def score(self, X: Any, y: Any = None) -> float:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The mean of `score_samples`."""
        return float(self.score_samples(X).mean())

    def sample(self, n_samples: int = 1) -> tuple[Array, Array]:
        """Sample from the fitted mixture.

        Args:
            n_samples: Number of rows, an integer >= 1.

        Returns:
            The rows, (n_samples, D), sorted by component, and their components, (n_samples,).
        """
        check_is_fitted(self)
        owner = f"{type(self).__name__}.sample"
        require(is_integer(n_samples, 1), "n_samples", owner, "be an integer >= 1", repr(n_samples))
        rows, labels = (t.numpy() for t in self._posterior().generate(int(n_samples), seed=self._seed()))
        order = np.argsort(labels, kind="stable")
        return rows[order], labels[order]


def arrays(tensors: Mapping[str, Tensor]) -> dict[str, Array]:
    """Tensors by name as copies in NumPy arrays."""
    return {name: t.detach().cpu().numpy().copy() for name, t in tensors.items()}


def tensors(named: Mapping[str, Array]) -> dict[str, Tensor]:
    """Arrays by name as tensors."""
    return {name: torch.as_tensor(a) for name, a in named.items()}


def precision_cholesky(covariances: Array, kind: str) -> Array:
    """scikit-learn's `precisions_cholesky_`: U with U U' = C^-1, or 1 / sqrt(C) for diagonal types."""
    if kind not in ("full", "tied"):
        return 1 / np.sqrt(covariances)
    lower = np.linalg.cholesky(covariances)
    return np.swapaxes(np.linalg.solve(lower, np.broadcast_to(np.eye(lower.shape[-1]), lower.shape)), -1, -2)


def precisions_of(root: Array, kind: str) -> Array:
    """scikit-learn's `precisions_` from its `precisions_cholesky_`."""
    return root @ np.swapaxes(root, -1, -2) if kind in ("full", "tied") else root**2


def positive(spread: Array, matrices: bool) -> bool:
    """Whether variances are positive, or matrices (*, D, D) positive definite."""
    return bool(((np.linalg.eigvalsh(spread) if matrices else spread) > 0).all())
