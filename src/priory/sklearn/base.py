"""What the estimators share: options by scikit-learn's names, rows from arrays, and a fit by this library's EM.

Fitted numbers are arrays, as everywhere in scikit-learn, so that an estimator can be cloned, pickled and searched over.
What predicts is built from them when it is asked for.
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
from priory.core.errors import require, whole
from priory.fitting.fit import fit
from priory.posteriors import ConjugatePosterior, LatentPoint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from priory.latent import Latent
    from priory.methods import EM, VariationalEM

Array = np.ndarray
# Ours takes rows as centres by distance, with a few rounds of k-means after it, or at random.
STARTS = {"kmeans": "k-means++", "k-means++": "k-means++", "random_from_data": "random", "random": "random"}


class LatentEstimator(DensityMixin, BaseEstimator):
    """An estimator whose `fit` is EM."""

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

    # Into the engine.

    def _check_options(self, shapes: tuple[str, ...]) -> None:
        """One sentence for an option that can't be used."""
        name = type(self).__name__
        for option in ("n_components", "max_iter", "n_init"):
            value = getattr(self, option)
            require(whole(value, 1), option, name, "be an integer >= 1", repr(value))
        ok = isinstance(self.tol, Real) and 0 <= self.tol < math.inf
        require(ok, "tol", name, "be a number from 0", repr(self.tol))
        must = f"be one of {', '.join(STARTS)}"
        require(str(self.init_params) in STARTS, "init_params", name, must, repr(self.init_params))
        kind = getattr(self, "covariance_type", None)
        require(kind in shapes, "covariance_type", name, f"be one of {', '.join(shapes)}", repr(kind))

    def _read(self, X: Any, reset: bool, least: int = 1) -> Array:
        """Rows as an array of floats, (n, D), NaN where a value is missing."""
        kinds, finite = [np.float64, np.float32], "allow-nan"
        rows: Any = validate_data(self, X, reset=reset, dtype=kinds, ensure_all_finite=finite, ensure_min_samples=least)
        return rows

    def _weigh(self, sample_weight: Any, X: Array) -> Array | None:
        """Weights as an array (n,); None for none."""
        if sample_weight is None:
            return None
        return _check_sample_weight(sample_weight, X, dtype=X.dtype, ensure_non_negative=True)

    def _seed(self) -> int:
        """A seed of the engine's streams."""
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _run(self, model: Latent, data: Any, method: EM | VariationalEM, seed: int) -> LatentPoint | ConjugatePosterior:
        """The engine's fit, what it says of itself as attributes, and a warning where it hasn't settled."""
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

    # Out of it.

    def _posterior(self) -> LatentPoint | ConjugatePosterior:
        """What is known, from the fitted arrays."""
        raise NotImplementedError

    def _ask(self, question: str, X: Any) -> Array:
        """What a posterior's method says of each row."""
        check_is_fitted(self)
        return getattr(self._posterior(), question)(tensor_of(self._read(X, reset=False), "X")).numpy()


class MixtureEstimator(LatentEstimator):
    """A mixture: each row by itself."""

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Any:
        """Fit to rows (n, D), NaN where a value is missing, each counted as often as `sample_weight` says."""
        raise NotImplementedError

    def fit_predict(self, X: Any, y: Any = None, sample_weight: Any = None) -> Array:
        """Fit, and name the component that each of the rows most likely comes from, (n,)."""
        return self.fit(X, y, sample_weight).predict(X)

    def predict(self, X: Any) -> Array:
        """The component that each row most likely comes from, (n,)."""
        return self._ask("predict_labels", X)

    def predict_proba(self, X: Any) -> Array:
        """The responsibilities q(z_n = k), (n, K)."""
        return self._ask("responsibilities", X)

    def score_samples(self, X: Any) -> Array:
        """The log density of what was seen of each row, (n,)."""
        raise NotImplementedError

    def score(self, X: Any, y: Any = None) -> float:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The mean of `score_samples`."""
        return float(self.score_samples(X).mean())

    def sample(self, n_samples: int = 1) -> tuple[Array, Array]:
        """Rows from the fitted mixture, (n, D), in the order of their components, (n,)."""
        check_is_fitted(self)
        owner = f"{type(self).__name__}.sample"
        require(whole(n_samples, 1), "n_samples", owner, "be an integer >= 1", repr(n_samples))
        rows, labels = self._made(int(n_samples))
        order = np.argsort(labels, kind="stable")
        return rows[order], labels[order]

    def _made(self, n: int) -> tuple[Array, Array]:
        """Rows and their components, in any order."""
        raise NotImplementedError


def arrays(tensors: Mapping[str, Tensor]) -> dict[str, Array]:
    """Tensors by name as arrays of their own."""
    return {name: t.detach().cpu().numpy().copy() for name, t in tensors.items()}


def tensors(named: Mapping[str, Array]) -> dict[str, Tensor]:
    """Arrays by name as tensors."""
    return {name: torch.as_tensor(a) for name, a in named.items()}


def precision_roots(covariances: Array, kind: str) -> Array:
    """scikit-learn's `precisions_cholesky_`: U with U U' = C^-1, or 1 / sqrt(C) where columns are apart."""
    if kind not in ("full", "tied"):
        return 1 / np.sqrt(covariances)
    lower = np.linalg.cholesky(covariances)
    return np.swapaxes(np.linalg.solve(lower, np.broadcast_to(np.eye(lower.shape[-1]), lower.shape)), -1, -2)


def positive(spread: Array, matrices: bool) -> bool:
    """Whether variances are above zero, or matrices (*, D, D) positive definite."""
    return bool(((np.linalg.eigvalsh(spread) if matrices else spread) > 0).all())
