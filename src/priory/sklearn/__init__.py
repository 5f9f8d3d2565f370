"""Estimators with the interfaces of scikit-learn and hmmlearn, fitted by this library's EM.

Beyond the originals, rows may have weights and missing values (NaN), `partial_fit` accepts minibatches, and the
`lower_bound_` of the Bayesian mixture includes all constants, so it can be used to choose the number of components.

>>> import numpy as np
>>> X = np.random.default_rng(0).normal(size=(200, 2)) + 5 * (np.arange(200) % 2)[:, None]
>>> mixture = GaussianMixture(n_components=2, random_state=0).fit(X)
>>> mixture.means_.round().tolist() in ([[0, 0], [5, 5]], [[5, 5], [0, 0]])
True
"""

from priory.core.errors import extra

extra("sklearn", "sklearn")  # raises an error that names the extra to install

from priory.sklearn.bayesian_mixture import BayesianGaussianMixture  # noqa: E402
from priory.sklearn.gaussian_mixture import GaussianMixture  # noqa: E402
from priory.sklearn.hidden_markov import HMM  # noqa: E402

__all__ = ["HMM", "BayesianGaussianMixture", "GaussianMixture"]
