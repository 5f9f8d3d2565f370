"""Hidden Markov model fitted by EM, with the input format and the attribute names of hmmlearn.

X has one row per time step, (n_samples, n_features). `lengths` gives the number of steps of each sequence, in order; by
default all rows are one sequence. A missing value is NaN. A whole step may be missing, except the last of a sequence,
which marks its end.
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
from priory.core.errors import is_integer, require
from priory.latent.hidden_markov import EMISSION_TYPES
from priory.latent.sequences import padded, padded_states
from priory.methods import EM
from priory.models.target import Target
from priory.posteriors import LatentPoint
from priory.sklearn.base import START_METHODS, Array, LatentEstimator, arrays, tensors

if TYPE_CHECKING:
    from torch import Tensor

COVARIANCE_TYPES = ("full", "tied", "diag", "spherical")
# Fitted attributes under hmmlearn's names, and the names of `priory.latent.HiddenMarkov`.
ENGINE_NAMES = {
    "startprob_": "initial",
    "transmat_": "transitions",
    "means_": "means",
    "covars_": "covariances",
    "lambdas_": "rates",
    "emissionprob_": "probs",
}


class HMM(LatentEstimator):
    """Hidden Markov model with Gaussian, Poisson or categorical emissions, fitted by maximum likelihood.

    Args:
        n_components: Number of states K. Default: 1.
        emissions: "gaussian" (default), "poisson" or "categorical"; categories are integers >= 0 in one column.
        covariance_type: "full" (default), "tied", "diag" or "spherical", for Gaussian emissions.
        tol: Tolerance of EM on the rise of the log-likelihood per time step. Default: 1e-3.
        min_covar: Lower bound on the variances, as a fraction of the variances of the data; between 0 and 1. Default:
            1e-6.
        max_iter: Maximum number of iterations. Default: 100.
        n_init: Number of restarts; the fit with the highest likelihood is kept. Default: 1.
        init_params: Initialisation: "kmeans", "k-means++", "random_from_data" or "random". Default: "kmeans".
        random_state: Seed of initialisation and `sample`, as in scikit-learn. Default: None.
        verbose: Whether to show progress. Default: 0.

    Attributes:
        startprob_: Probabilities of the first state, (K,).
        transmat_: Transition probabilities, (K, K).
        means_: Means of Gaussian emissions, (K, D).
        covars_: Covariances of Gaussian emissions, in the shape of `covariance_type`.
        lambdas_: Rates of Poisson emissions, (K, D).
        emissionprob_: Probabilities of categorical emissions, (K, C).
        converged_: Whether the fit converged.
        n_iter_: Number of iterations.
        lower_bound_: The log-likelihood.
        lower_bounds_: The log-likelihood after each iteration.

    Example:
        >>> X = np.random.default_rng(0).normal(size=(200, 1)) + 5 * (np.arange(200) // 50 % 2)[:, None]
        >>> model = HMM(n_components=2, random_state=0).fit(X)
        >>> int((np.diff(model.predict(X)) != 0).sum())  # changes of the state
        3
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
        """Fit the model to one or several sequences.

        Args:
            X: Rows, one per time step, (n_samples, n_features), with NaN for missing values.
            y: Ignored; present for scikit-learn's interface.
            lengths: Number of steps of each sequence, with sum n_samples. Default: one sequence.

        Returns:
            The fitted estimator.

        Raises:
            InputError: If an option, `X` or `lengths` is invalid.
        """
        self._check_options(COVARIANCE_TYPES)
        require(
            self.emissions in EMISSION_TYPES,
            "emissions",
            "HMM",
            f"be one of {', '.join(EMISSION_TYPES)}",
            repr(self.emissions),
        )
        ok = isinstance(self.min_covar, Real) and 0 < self.min_covar < 1
        require(ok, "min_covar", "HMM", "lie between 0 and 1", repr(self.min_covar))
        rows = self._read(X, reset=True, min_rows=2)
        counts = self._sequence_lengths(rows, lengths)
        self._categories = self._count_categories(rows)
        tolerance = float(self.tol) * len(rows) / len(counts)  # EM's tolerance is per sequence, `tol` is per time step
        method = EM(restarts=int(self.n_init), tolerance=tolerance, start=START_METHODS[self.init_params])
        posterior = self._run(self._model(), self._sequences(rows, counts), method, self._seed())
        found = arrays(posterior.mean)
        for name, engine in ENGINE_NAMES.items():
            if engine in found:
                setattr(self, name, found[engine])
        self.lower_bounds_ = [float(value) for value in posterior.history["bound"]]
        self.lower_bound_ = self.lower_bounds_[-1]
        return self

    def predict(self, X: Any, lengths: Any = None) -> Array:
        """The most probable path of states (Viterbi), (n_samples,)."""
        return self._per_step("predict_labels", X, lengths)

    def predict_proba(self, X: Any, lengths: Any = None) -> Array:
        """p(z_t = k | X), (n_samples, K)."""
        return self._per_step("responsibilities", X, lengths)

    def decode(self, X: Any, lengths: Any = None) -> tuple[float, Array]:
        """The most probable path of states, (n_samples,), after its log joint density log p(X, path)."""
        path = self.predict(X, lengths)
        rows = self._read(X, reset=False)
        counts = self._sequence_lengths(rows, lengths)
        sequences, model = self._sequences(rows, counts), self._model(given="z")
        states = padded_states(list(torch.split(torch.as_tensor(path), counts)), "HMM")
        return float(self._posterior(sequences.shape[1], model).log_likelihood((sequences, states)).sum()), path

    def score(self, X: Any, y: Any = None, lengths: Any = None) -> float:  # pyright: ignore
        """The log-likelihood log p(X), summed over all sequences."""
        check_is_fitted(self)
        rows = self._read(X, reset=False)
        sequences = self._sequences(rows, self._sequence_lengths(rows, lengths))
        return float(self._posterior(sequences.shape[1]).log_likelihood(sequences).sum())

    def bic(self, X: Any, lengths: Any = None) -> float:
        """The Bayesian information criterion on the sequences X; lower is better."""
        return -2 * self.score(X, lengths=lengths) + self._n_parameters() * math.log(len(X))

    def aic(self, X: Any, lengths: Any = None) -> float:
        """Akaike's information criterion on the sequences X; lower is better."""
        return -2 * self.score(X, lengths=lengths) + 2 * self._n_parameters()

    def sample(self, n_samples: int = 1) -> tuple[Array, Array]:
        """Sample one sequence of `n_samples` steps: its rows, (n_samples, n_features), and states, (n_samples,)."""
        check_is_fitted(self)
        require(is_integer(n_samples, 1), "n_samples", "HMM.sample", "be an integer >= 1", repr(n_samples))
        y, z = self._posterior(int(n_samples)).generate(1, seed=self._seed(), steps=int(n_samples))
        return y[0].reshape(int(n_samples), -1).numpy(), z[0].numpy()

    # Helpers.

    def _count_categories(self, X: Array) -> int | None:
        """The number of categories in one column of integers; None for other emissions."""
        if self.emissions != "categorical":
            return None
        values = X[~np.isnan(X)]
        ok = X.shape[1] == 1 and len(values) > 0 and bool(((values >= 0) & (values == np.floor(values))).all())
        require(ok, "X", "HMM", "be one column of integers >= 0 for categorical emissions", repr(X[:3].tolist()))
        return max(int(values.max()) + 1, 2)

    def _sequence_lengths(self, X: Array, lengths: Any) -> list[int]:
        """The number of steps of each sequence."""
        given = [len(X)] if lengths is None else np.asarray(lengths).tolist()
        ok = isinstance(given, list) and all(is_integer(n, 1) for n in given) and sum(given) == len(X)
        require(ok, "lengths", "HMM", f"be integers >= 1 that add up to {len(X)}", repr(given))
        last = np.isnan(X[np.cumsum(given) - 1]).all(1)
        got = f"only NaN in the last of sequence {int(last.argmax())}"
        require(not bool(last.any()), "X", "HMM", "have a value in the last row of each sequence", got)
        return [int(n) for n in given]

    def _sequences(self, X: Array, counts: list[int]) -> Tensor:
        """The sequences padded with NaN to one length: (n, T, D), or (n, T) for categories."""
        rows = padded(list(torch.split(tensor_of(X, "X"), counts)))
        return rows[..., 0] if self.emissions == "categorical" else rows

    def _per_step(self, question: str, X: Any, lengths: Any) -> Array:
        """Evaluate a method of the posterior, by name, at each time step, with sequences concatenated."""
        check_is_fitted(self)
        rows = self._read(X, reset=False)
        counts = self._sequence_lengths(rows, lengths)
        sequences = self._sequences(rows, counts)
        found = getattr(self._posterior(sequences.shape[1]), question)(sequences)
        return torch.cat([row[:n] for row, n in zip(found, counts, strict=True)]).numpy()

    def _model(self, given: str | tuple[str, ...] = ()) -> latent.HiddenMarkov:
        k, kind = int(self.n_components), self.emissions
        return latent.HiddenMarkov(k, kind, self.covariance_type, self._categories, float(self.min_covar), given)

    def _posterior(self, steps: int = 1, model: latent.HiddenMarkov | None = None) -> LatentPoint:
        """The posterior, rebuilt from the fitted arrays, for sequences of this many steps."""
        theta = tensors({engine: getattr(self, name) for name, engine in ENGINE_NAMES.items() if hasattr(self, name)})
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
