"""Problems whose posterior, evidence and predictive distribution have closed forms, to test a method against.

Four conjugate problems in float64 (Bishop, 2006, "Pattern Recognition and Machine Learning", chapters 2 and 3): a coin,
the mean of a Gaussian, linear regression with known noise, and linear regression with unknown noise. Each has its
`data`, the model as a `density()` (linear regression also as a `model()`), and the exact answers. All but the last also
have the best factorised Gaussian approximation, which mean-field variational inference must reach.

>>> coin = Coin(heads=17, tails=13, a=5, b=3)
>>> round(coin.log_evidence, 4)
-21.3972
>>> coin.best_gaussian().elbo < coin.log_evidence
True
"""

from __future__ import annotations

from priory.testing.exact.coin import Coin
from priory.testing.exact.gaussian_mean import GaussianMean
from priory.testing.exact.inputs import Optimum
from priory.testing.exact.regression import LinearRegression, NormalGamma, NormalGammaPosterior

__all__ = ["Coin", "GaussianMean", "LinearRegression", "NormalGamma", "NormalGammaPosterior", "Optimum", "make"]


def make(seed: int = 0) -> tuple[Coin, GaussianMean, LinearRegression, NormalGamma]:
    """Make one small instance of every exact problem.

    Args:
        seed: Seed of the data. Default: 0.

    Returns:
        The four problems.

    Example:
        >>> [target.name for target in make(seed=0)]
        ['coin', 'gaussian mean', 'linear regression', 'normal gamma']
    """
    return Coin.make(seed), GaussianMean.make(seed), LinearRegression.make(seed), NormalGamma.make(seed)
