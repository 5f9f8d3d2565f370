"""The Gaussian mixture by EM, as `sklearn.mixture.GaussianMixture` is called.

What it does differently: `reg_covar` is a floor under the variances, as a share of the data's own, and nothing is added
to them; the likelihood therefore never falls. NaN is a value that wasn't seen, and is summed out.

`partial_fit` is online EM (Cappe and Moulines, 2009). What earlier rows say is in the parameters themselves: the
expected statistics of a row are its component's share and first two moments, s(theta). With theta_b the M-step of
this batch alone, and t how many batches of its size have been seen,

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
from priory.latent.base import Theta, expect
from priory.methods import EM
from priory.models.target import Target
from priory.posteriors import LatentPoint
from priory.sklearn.base import STARTS, Array, MixtureEstimator, arrays, positive, precision_roots, tensors

if TYPE_CHECKING:
    from torch import Tensor

SHAPES = ("full", "tied", "diag", "spherical")


class GaussianMixture(MixtureEstimator):
    """K Gaussians by maximum likelihood.

    Fitted: `weights_`, `means_`, `covariances_`, `precisions_`, `precisions_cholesky_`, `converged_`, `n_iter_`,
    `lower_bound_` (the mean log-likelihood of a row) and `lower_bounds_`, one an iteration.

    >>> GaussianMixture(n_components=0).fit([[0.0], [1.0]])
    Traceback (most recent call last):
    ...
    priory.InputError: The 'n_components' argument of GaussianMixture must be an integer >= 1, got 0.
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
        """Fit to rows (n, D), NaN where a value is missing, each counted as often as `sample_weight` says."""
        self._check_options(SHAPES)
        rows, model, data, weight = self._met(X, sample_weight, not self._warm())
        seed = self._seed()
        start = self._start(model, data, seed)
        method = EM(restarts=1 if isinstance(start, dict) else int(self.n_init), tolerance=float(self.tol), start=start)
        posterior = self._run(model, data, method, seed)
        self._keep(posterior.mean)
        self.lower_bounds_ = [float(value) / weight for value in posterior.history["bound"]]
        self.lower_bound_ = self.lower_bounds_[-1]
        self.n_samples_seen_ = len(rows)
        return self

    def partial_fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> GaussianMixture:
        """One step of online EM on some more rows."""
        self._check_options(SHAPES)
        ok = isinstance(self.learning_decay, Real) and 0.5 < self.learning_decay <= 1
        require(ok, "learning_decay", type(self).__name__, "lie above 0.5 and not above 1", repr(self.learning_decay))
        first = not hasattr(self, "means_")
        rows, model, data, weight = self._met(X, sample_weight, first)
        met, batches = model.meet(data)
        if first:
            self._frame = arrays(dict(met.frame))
            seed = self._seed()
            start = self._start(met, batches, seed)
            theta = EM(start=start).first(
                met, batches.random_rows(met.sample, met.block, stream(seed)), stream(seed), None
            )
            self.n_samples_seen_, self.n_iter_, self.converged_ = 0, 0, False
        else:
            met.frame = tensors(self._frame)
            theta = self._theta()
        (found,) = expect(met, [theta], batches.blocks(met.block), 1 / weight)
        alone = met.m_step(found.statistics, theta)
        rate = (self.n_samples_seen_ / len(rows) + 1) ** -self.learning_decay
        sums = (1 - rate) * moments(met, theta) + rate * moments(met, alone)
        self._keep(met.m_step({"sums": sums.double()}, theta))
        self.lower_bound_ = float(found.bound)
        self.n_samples_seen_ += len(rows)
        self.n_iter_ += 1
        return self

    def score_samples(self, X: Any) -> Array:
        """log p(x_n | theta) of what was seen of each row, (n,)."""
        return self._ask("log_likelihood", X)

    def bic(self, X: Any) -> float:
        """The Bayesian information criterion on some rows: lower is better."""
        return -2 * float(self.score_samples(X).sum()) + self._n_parameters() * math.log(len(X))

    def aic(self, X: Any) -> float:
        """Akaike's information criterion on some rows: lower is better."""
        return -2 * float(self.score_samples(X).sum()) + 2 * self._n_parameters()

    # Its parts.

    def _warm(self) -> bool:
        return bool(self.warm_start) and hasattr(self, "means_")

    def _model(self, weighted: bool = False) -> latent.GaussianMixture:
        ok = isinstance(self.reg_covar, Real) and 0 < self.reg_covar < 1
        require(ok, "reg_covar", type(self).__name__, "lie between 0 and 1", repr(self.reg_covar))
        given = "weights" if weighted else ()
        return latent.GaussianMixture(int(self.n_components), self.covariance_type, float(self.reg_covar), given)

    def _met(self, X: Any, sample_weight: Any, reset: bool) -> tuple[Array, latent.GaussianMixture, Any, float]:
        """Rows, the model and the data as the engine reads them, and how many rows they count as."""
        rows = self._read(X, reset=reset, least=2)
        weights = self._weigh(sample_weight, rows)
        data = rows if weights is None else (rows, weights)
        return rows, self._model(weights is not None), data, float(len(rows) if weights is None else weights.sum())

    def _start(self, model: latent.GaussianMixture, data: Any, seed: int) -> str | dict[str, Any]:
        """The way to begin; or where, if some of it is given."""
        if self._warm():
            return dict(self._theta())
        how = STARTS[self.init_params]
        given = self._given()
        if not given:
            return how
        met, batches = model.meet(data)
        generator = stream(seed, "start")
        begun = met.begin(met.rows(batches.random_rows(met.sample, met.block, generator)), how, generator)
        return {**begun, **given}

    def _given(self) -> dict[str, Array]:
        """Weights, means and covariances, where they are given."""
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

    def _keep(self, theta: Theta) -> None:
        """Theta as fitted attributes."""
        found = arrays(theta)
        self.weights_, self.means_, self.covariances_ = found["weights"], found["means"], found["covariances"]
        self.precisions_cholesky_ = precision_roots(self.covariances_, self.covariance_type)
        crossed = self.covariance_type in ("full", "tied")
        root = self.precisions_cholesky_
        self.precisions_ = root @ np.swapaxes(root, -1, -2) if crossed else root**2

    def _theta(self) -> Theta:
        return tensors({"weights": self.weights_, "means": self.means_, "covariances": self.covariances_})

    def _posterior(self) -> LatentPoint:
        theta = self._theta()
        shape = ((self.n_features_in_,),)
        model = self._model().in_shapes(shape, theta["means"].dtype, torch.device("cpu"), **tensors(self._frame))
        return LatentPoint(Target(model, None), theta, self.lower_bound_, self.converged_)

    def _made(self, n: int) -> tuple[Array, Array]:
        y, z = self._posterior().generate(n, seed=self._seed())
        return y.numpy(), z.numpy()

    def _n_parameters(self) -> int:
        check_is_fitted(self)
        k, d = self.means_.shape
        pairs = d * (d + 1) // 2
        spread = {"full": k * pairs, "tied": pairs, "diag": k * d, "spherical": k}[self.covariance_type]
        return k - 1 + k * d + spread


def moments(model: latent.GaussianMixture, theta: Theta) -> Tensor:
    """s(theta), (K, F): the expected statistics of a row of the mixture itself, whose M-step is theta."""
    means, spread = model.standard(theta)
    one = torch.ones_like(means[:, :1])
    if spread.ndim == 3:
        i, j = torch.triu_indices(means.shape[1], means.shape[1])
        squares = (spread + means[:, :, None] * means[:, None, :])[:, i, j]
        features = torch.cat([squares, means, one], 1)
    else:
        features = torch.cat([spread + means.square(), means, torch.ones_like(means), one], 1)
    return theta["weights"][:, None] * features
