"""scikit-learn's estimators over the EM of this library, under the names that scikit-learn and hmmlearn use.

They do what those don't: rows may have weights and missing values (NaN), minibatches come by `partial_fit`, and the
Bayesian mixture's `lower_bound_` has all of its constants, so that it may choose the number of components.

>>> import numpy as np
>>> X = np.random.default_rng(0).normal(size=(200, 2)) + 5 * (np.arange(200) % 2)[:, None]
>>> mixture = GaussianMixture(n_components=2, random_state=0).fit(X)
>>> mixture.means_.round().tolist() in ([[0, 0], [5, 5]], [[5, 5], [0, 0]])
True
"""

from priory.core.errors import extra

extra("sklearn", "sklearn")  # says what to install, where it is missing

from priory.sklearn.bayesian_mixture import BayesianGaussianMixture  # noqa: E402
from priory.sklearn.gaussian_mixture import GaussianMixture  # noqa: E402
from priory.sklearn.hidden_markov import HMM  # noqa: E402

__all__ = ["HMM", "BayesianGaussianMixture", "GaussianMixture"]
