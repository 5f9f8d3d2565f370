"""Probabilistic principal components: factor analysis with the same noise in every column (Tipping and Bishop, 1999).

    z ~ N(0, I_k),      y | z ~ N(mu + W z, v I)

The likelihood is maximal where the columns of W span the k leading eigenvectors of the data's covariance, with
W W' = U (Lambda - v I) U' and v the mean of the other eigenvalues. Without missing values the start "eigen" is this
maximum, and EM converges to it from any start. With missing values there is no closed form, and EM is needed.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from priory.latent.factor_analysis import FactorAnalysis


class PrincipalComponents(FactorAnalysis):
    """Probabilistic principal components: y = mu + W z + noise with equal noise in all columns.

    Data are (n, D); NaN marks a missing value. The parameters are `mean` (D,), `loadings` W (D, k) and `variance` ().

    Args:
        k: Number of components, less than D.
        floor: Smallest noise variance, as a fraction of the data's variance. Default: 1e-6.
        given: "weights" if the data end with one weight per row. Default: ().

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> PrincipalComponents(2, floor=0)
        Traceback (most recent call last):
        ...
        priory.InputError: The 'floor' argument of PrincipalComponents must lie between 0 and 1, got 0.
    """

    noise: ClassVar[str] = "variance"

    def noise_shape(self, columns: int) -> tuple[int, ...]:
        """One number for all columns."""
        return ()

    def pooled(self, psi: Tensor) -> Tensor:
        """The mean over columns."""
        return psi.mean()
