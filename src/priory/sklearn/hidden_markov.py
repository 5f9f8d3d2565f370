"""The hidden Markov model by EM, with the rows and the fitted names of hmmlearn.

X has one row a step, (n_samples, n_features), and `lengths` says how many belong to each sequence, one after the other;
left out, all are one. A value that was not seen is NaN. So may be a whole step, but for the last of a sequence, which
ends it.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted

from priory import latent
from priory.core.data import tensor_of
from priory.core.errors import require, whole
from priory.latent.sequences import padded, padded_states
from priory.methods import EM
from priory.models.target import Target
from priory.posteriors import LatentPoint
from priory.sklearn.base import STARTS, Array, LatentEstimator, arrays, tensors

if TYPE_CHECKING:
    from torch import Tensor

KINDS = ("gaussian", "categorical", "poisson")
SHAPES = ("full", "tied", "diag", "spherical")
# Fitted attributes under hmmlearn's names, and the engine's.
NAMES = {
    "startprob_": "initial",
    "transmat_": "transitions",
    "means_": "means",
    "covars_": "covariances",
    "lambdas_": "rates",
    "emissionprob_": "probs",
}


class HMM(LatentEstimator):
    """A chain of K states that is seen through what they emit: "gaussian", "poisson" or "categorical".

    Fitted: `startprob_`, `transmat_`; `means_` and `covars_`, or `lambdas_`, or `emissionprob_`; `converged_`,
    `n_iter_`, `lower_bound_` (the log-likelihood) and `lower_bounds_`. Categories are integers >= 0 in one
    column.

    >>> HMM(emissions="normal").fit([[0.0], [1.0]])
    Traceback (most recent call last):
    ...
    priory.InputError: The 'emissions' argument of HMM must be one of gaussian, categorical, poisson, got 'normal'.
    """

    startprob_: Array
    transmat_: Array
    means_: Array
    covars_: Array
    lambdas_: Array
    emissionprob_: Array

    def __init__(
        self,
        n_components: int = 1,
        *,
        emissions: str = "gaussian",
        covariance_type: str = "full",
        tol: float = 1e-3,
        min_covar: float = 1e-6,
        max_iter: int = 100,
        n_init: int = 1,
        init_params: str = "kmeans",
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        self.n_components = n_components
        self.emissions = emissions
        self.covariance_type = covariance_type
        self.tol = tol
        self.min_covar = min_covar
        self.max_iter = max_iter
        self.n_init = n_init
        self.init_params = init_params
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: Any, y: Any = None, lengths: Any = None) -> HMM:
        """Fit to the steps of one sequence, or of several of these lengths."""
        self._check_options(SHAPES)
        require(self.emissions in KINDS, "emissions", "HMM", f"be one of {', '.join(KINDS)}", repr(self.emissions))
        ok = isinstance(self.min_covar, Real) and 0 < self.min_covar < 1
        require(ok, "min_covar", "HMM", "lie between 0 and 1", repr(self.min_covar))
        rows = self._read(X, reset=True, least=2)
        counts = self._counts(rows, lengths)
        self._categories = self._found_categories(rows)
        tolerance = float(self.tol) * len(rows) / len(counts)  # the engine's is a sequence's, `tol` a step's
        method = EM(restarts=int(self.n_init), tolerance=tolerance, start=STARTS[self.init_params])
        posterior = self._run(self._model(), self._sequences(rows, counts), method, self._seed())
        found = arrays(posterior.mean)
        for name, engine in NAMES.items():
            if engine in found:
                setattr(self, name, found[engine])
        self.lower_bounds_ = [float(value) for value in posterior.history["bound"]]
        self.lower_bound_ = self.lower_bounds_[-1]
        return self

    def predict(self, X: Any, lengths: Any = None) -> Array:
        """The states that are likeliest together (Viterbi), (n_samples,)."""
        return self._by_step("predict_labels", X, lengths)

    def predict_proba(self, X: Any, lengths: Any = None) -> Array:
        """p(z_t = k | X), (n_samples, K)."""
        return self._by_step("responsibilities", X, lengths)

    def decode(self, X: Any, lengths: Any = None) -> tuple[float, Array]:
        """log p(X, path) of the states that are likeliest together, and those states, (n_samples,)."""
        path = self.predict(X, lengths)
        rows = self._read(X, reset=False)
        counts = self._counts(rows, lengths)
        sequences, model = self._sequences(rows, counts), self._model(given="z")
        states = padded_states(list(torch.split(torch.as_tensor(path), counts)), "HMM")
        return float(self._posterior(sequences.shape[1], model).log_likelihood((sequences, states)).sum()), path

    def score(self, X: Any, y: Any = None, lengths: Any = None) -> float:  # pyright: ignore
        """log p(X), of all sequences together."""
        check_is_fitted(self)
        rows = self._read(X, reset=False)
        sequences = self._sequences(rows, self._counts(rows, lengths))
        return float(self._posterior(sequences.shape[1]).log_likelihood(sequences).sum())

    def bic(self, X: Any, lengths: Any = None) -> float:
        """The Bayesian information criterion on some sequences: lower is better."""
        return -2 * self.score(X, lengths=lengths) + self._n_parameters() * math.log(len(X))

    def aic(self, X: Any, lengths: Any = None) -> float:
        """Akaike's information criterion on some sequences: lower is better."""
        return -2 * self.score(X, lengths=lengths) + 2 * self._n_parameters()

    def sample(self, n_samples: int = 1) -> tuple[Array, Array]:
        """A sequence from the fitted model, (n_samples, n_features), and its states, (n_samples,)."""
        check_is_fitted(self)
        require(whole(n_samples, 1), "n_samples", "HMM.sample", "be an integer >= 1", repr(n_samples))
        y, z = self._posterior(int(n_samples)).generate(1, seed=self._seed(), steps=int(n_samples))
        return y[0].reshape(int(n_samples), -1).numpy(), z[0].numpy()

    # Its parts.

    def _found_categories(self, X: Array) -> int | None:
        """How many categories there are in one column of integers."""
        if self.emissions != "categorical":
            return None
        values = X[~np.isnan(X)]
        ok = X.shape[1] == 1 and len(values) > 0 and bool(((values >= 0) & (values == np.floor(values))).all())
        require(ok, "X", "HMM", "be one column of integers >= 0 for categorical emissions", repr(X[:3].tolist()))
        return max(int(values.max()) + 1, 2)

    def _counts(self, X: Array, lengths: Any) -> list[int]:
        """How many steps each sequence has."""
        given = [len(X)] if lengths is None else np.asarray(lengths).tolist()
        ok = isinstance(given, list) and all(whole(n, 1) for n in given) and sum(given) == len(X)
        require(ok, "lengths", "HMM", f"be integers >= 1 that add up to {len(X)}", repr(given))
        last = np.isnan(X[np.cumsum(given) - 1]).all(1)
        got = f"only NaN in the last of sequence {int(last.argmax())}"
        require(not bool(last.any()), "X", "HMM", "have a value in the last row of each sequence", got)
        return [int(n) for n in given]

    def _sequences(self, X: Array, counts: list[int]) -> Tensor:
        """Sequences as the engine reads them, NaN after a shorter one's end: (n, T, D), or (n, T) of categories."""
        rows = padded(list(torch.split(tensor_of(X, "X"), counts)))
        return rows[..., 0] if self.emissions == "categorical" else rows

    def _by_step(self, question: str, X: Any, lengths: Any) -> Array:
        """What a posterior's method says of each step, one sequence after the other."""
        check_is_fitted(self)
        rows = self._read(X, reset=False)
        counts = self._counts(rows, lengths)
        sequences = self._sequences(rows, counts)
        found = getattr(self._posterior(sequences.shape[1]), question)(sequences)
        return torch.cat([row[:n] for row, n in zip(found, counts, strict=True)]).numpy()

    def _model(self, given: str | tuple[str, ...] = ()) -> latent.HiddenMarkov:
        k, kind = int(self.n_components), self.emissions
        return latent.HiddenMarkov(k, kind, self.covariance_type, self._categories, float(self.min_covar), given)

    def _posterior(self, steps: int = 1, model: latent.HiddenMarkov | None = None) -> LatentPoint:
        """What is known, for sequences of so many steps."""
        theta = tensors({engine: getattr(self, name) for name, engine in NAMES.items() if hasattr(self, name)})
        shape = ((steps,) if self.emissions == "categorical" else (steps, self.n_features_in_),)
        kept = tensors(self._frame)
        model = (model or self._model()).in_shapes(shape, theta["initial"].dtype, torch.device("cpu"), **kept)
        return LatentPoint(Target(model, None), theta, self.lower_bound_, self.converged_)

    def _n_parameters(self) -> int:
        check_is_fitted(self)
        k, d = int(self.n_components), self.n_features_in_
        pairs = d * (d + 1) // 2
        spread = {"full": k * pairs, "tied": pairs, "diag": k * d, "spherical": k}[self.covariance_type]
        emitted = {"gaussian": k * d + spread, "poisson": k * d, "categorical": k * ((self._categories or 1) - 1)}
        return k - 1 + k * (k - 1) + emitted[self.emissions]
