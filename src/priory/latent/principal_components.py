"""Probabilistic principal components: factor analysis with the same noise in every column (Tipping and Bishop, 1999).

    z ~ N(0, I_k),      y | z ~ N(mu + W z, v I)

Its likelihood has its maximum where the columns of W span the k leading eigenvectors of the data's covariance, with
W W' = U (Lambda - v I) U' and v the mean of the other eigenvalues: the start named "eigen" is there at once if no value
is missing, and EM goes there from anywhere. With missing values there is no such form, and EM is the way.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from priory.latent.factor_analysis import FactorAnalysis


class PrincipalComponents(FactorAnalysis):
    """k components of D columns: `mean` (D,), `loadings` (D, k) and `variance` (). Data are (n, D), NaN missing.

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
