"""The mixture of probabilistic principal component analysers (Tipping and Bishop, 1999).

    z ~ pi,      f ~ N(0, I),      y | z = k, f ~ N(mu_k + W_k f, v_k I)

It is the mixture of factor analysers with equal noise in all columns of a component. The components are local linear
approximations of a curved cloud of points.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from priory.latent.factor_analysis_mixture import FactorAnalysisMixture

if TYPE_CHECKING:
    from torch import Tensor


class PrincipalComponentsMixture(FactorAnalysisMixture):
    """A mixture of K probabilistic principal component analysers.

    Data are (n, D); NaN marks a missing value. The parameters are `weights` (K,), `means` (K, D), `loadings`
    (K, D, factors) and `variances` (K,).

    Args:
        k: Number of components K of the mixture.
        factors: Number of principal directions of each component, less than D.
        floor: Smallest noise variance, as a fraction of the data's variance. Default: 1e-6.
        given: The parts that follow the rows in the data: "weights", one per row; "z", the known component of each row,
            -1 where it is hidden; or both. Default: ().

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> PrincipalComponentsMixture(0, factors=1)
        Traceback (most recent call last):
        ...
        priory.InputError: The 'k' argument of PrincipalComponentsMixture must be an integer >= 1, got 0.
    """

    @property
    def _alike(self) -> bool:
        return True

    def noise_shape(self, columns: int) -> tuple[int, ...]:
        """One number for all columns."""
        return ()

    def pooled(self, psi: Tensor) -> Tensor:
        """The mean over columns."""
        return psi.mean(1)
