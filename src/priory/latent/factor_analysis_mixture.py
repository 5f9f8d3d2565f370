"""The mixture of factor analysers: each component has its own factors.

    z ~ pi,      f ~ N(0, I),      y | z = k, f ~ N(mu_k + W_k f, diag(psi_k))

so y given k is Gaussian with covariance W_k W_k' + diag(psi_k), a compromise between a diagonal and a full covariance
for data with many columns. Both z and the factors f are hidden (Ghahramani and Hinton, 1996; McLachlan and Peel, 2000):

    E-step   q_nk as in any Gaussian mixture, and given k    E[f | y] = B_k (y - mu_k),     Cov[f | y] = C_k
             C_k = (I + W_k' diag(psi_k)^-1 W_k)^-1,         B_k = C_k W_k' diag(psi_k)^-1
    M-step   for each k the regression of y on (f, 1) with the weights q_nk, as in factor analysis

E[f | y] is linear in y. The expected second moments of (y, f, 1) therefore follow from those of (y, 1), which are the
statistics of the Gaussian mixture. Its E-step is used, also for rows with missing values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributions import constraints

from priory.core.errors import is_integer, require
from priory.core.flat import Param
from priory.latent.base import Expectation, Rows, Theta
from priory.latent.factor_analysis import principal, residuals
from priory.latent.gaussian_mixture import AT_FLOOR, LOG_TAU, GaussianMixture, conditional, matrices, patterns
from priory.latent.mixture import MixtureModel, log_weights

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MIN_INITIAL_NOISE = 1e-3  # of the data's variance, so that a small cluster doesn't start as a spike


class FactorAnalysisMixture(GaussianMixture):
    """A mixture of K factor analysers.

    Data are (n, D); NaN marks a missing value. The parameters are `weights` (K,), `means` (K, D), `loadings`
    (K, D, factors) and `variances` (K, D).

    Args:
        k: Number of components K.
        factors: Number of factors of each component, less than D.
        floor: Smallest noise variance of a column, as a fraction of the column's variance. Default: 1e-6.
        given: The parts that follow the rows in the data: "weights", one per row; "z", the known component of each row,
            -1 where it is hidden; or both. Default: ().

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> FactorAnalysisMixture(2, factors=0)
        Traceback (most recent call last):
        ...
        priory.InputError: The 'factors' argument of FactorAnalysisMixture must be an integer >= 1, got 0.
    """

    def __init__(self, k: int, factors: int, floor: float = 1e-6, given: str | Sequence[str] = ()) -> None:
        super().__init__(k, "full", floor, given)
        require(is_integer(factors, 1), "factors", type(self).__name__, "be an integer >= 1", repr(factors))
        self.factors = int(factors)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.k}, factors={self.factors})"

    def components(self, *shapes: tuple[int, ...]) -> dict[str, Param]:
        """mu, W and psi of each component."""
        shape = shapes[0]
        require(len(shape) == 1, "y", repr(self), "be (n, D)", f"rows of the shape {shape}")
        require(self.factors < shape[0], "factors", repr(self), f"be less than the columns, {shape[0]}", self.factors)
        noise = Param((self.k, *self.noise_shape(shape[0])), constraints.positive)
        return {"means": Param((self.k, *shape)), "loadings": Param((self.k, *shape, self.factors)), "variances": noise}

    # The noise variances, one per column or shared.

    def noise_shape(self, columns: int) -> tuple[int, ...]:
        """The shape of a component's psi."""
        return (columns,)

    def pooled(self, psi: Tensor) -> Tensor:
        """Return psi in the shape of the parameter, from one value per column (K, D)."""
        return psi

    # The frame.

    def lines(self, theta: Theta) -> tuple[Tensor, Tensor, Tensor]:
        """mu (K, D), W (K, D, factors) and psi (K, D) in the frame."""
        centre, scale = self.frame["centre"], self.frame["scale"]
        psi = theta["variances"].reshape(self.k, -1) / scale.square()
        return (theta["means"] - centre) / scale, theta["loadings"] / scale[:, None], psi

    def standard(self, theta: Theta) -> tuple[Tensor, Tensor]:
        """Means (K, D) and covariances W W' + diag(psi), (K, D, D), in the frame."""
        means, loadings, psi = self.lines(theta)
        return means, loadings @ loadings.mT + torch.diag_embed(psi)

    def named(self, means: Tensor, loadings: Tensor, psi: Tensor) -> Theta:
        """Convert the components' parameters from the frame to the units of the data."""
        centre, scale = self.frame["centre"].double(), self.frame["scale"].double()
        variances = self.pooled(psi * scale.square())
        return {"means": centre + scale * means, "loadings": scale[:, None] * loadings, "variances": variances}

    # The equations, in the frame.

    def gain(self, theta: Theta) -> tuple[Tensor, Tensor]:
        """B (K, factors, D) and C (K, factors, factors)."""
        _, loadings, psi = self.lines(theta)
        short = loadings.mT / psi[:, None]  # W' diag(psi)^-1
        unit = torch.eye(self.factors, dtype=psi.dtype, device=psi.device)
        left = torch.linalg.inv(unit + short @ loadings)
        return left @ short, left

    def e_step(self, theta: Theta, rows: Rows) -> Expectation:
        """Responsibilities, and the expected second moments of (y, f, 1), each component's in one row."""
        found = super().e_step(theta, rows)
        jacobian = -(~rows["y"].isnan() * self.frame["scale"].log()).sum(1)
        sums = self.moments(theta, found.statistics["sums"]).flatten(1)
        return Expectation({"sums": sums, "base": rows.counted(jacobian).sum()}, found.bound, found.gap)

    def moments(self, theta: Theta, sums: Tensor) -> Tensor:
        """E[(y, f, 1)(y, f, 1)'] of each component, (K, D + factors + 1, .), from the sums of (y_i y_j, y, 1)."""
        d, k = len(self.frame["scale"]), self.k
        means, _, _ = self.lines(theta)
        gain, left = self.gain(theta)
        seen = torch.cat([matrices(sums[:, : -1 - d], d), sums[:, -1 - d : -1, None]], 2)
        seen = torch.cat([seen, sums[:, None, -1 - d :]], 1)  # of (y, 1)
        unit = torch.eye(d + 1, dtype=sums.dtype, device=sums.device).expand(k, -1, -1)
        fitted = torch.cat([gain, -gain @ means[..., None]], 2)  # f = fitted (y, 1)
        every = torch.cat([unit[:, :d], fitted, unit[:, d:]], 1)  # (y, f, 1) = every (y, 1)
        return every @ seen @ every.mT + sums[:, -1, None, None] * torch.nn.functional.pad(left, (d, 1, d, 1))

    def complete(self, theta: Theta, statistics: Mapping[str, Tensor]) -> Tensor:
        """Q: the expected log pi_k + log N(y; mu_k + W_k f, psi_k) + log N(f; 0, I), over all rows."""
        moments, d = self.squares(statistics["sums"]), len(self.frame["scale"])
        means, loadings, psi = (t.to(moments.dtype) for t in self.lines(theta))
        psi = psi.expand(self.k, d)
        counts, factors = moments[:, -1, -1], moments[:, d:-1, d:-1].diagonal(dim1=1, dim2=2)
        left = residuals(moments, torch.cat([loadings, means[..., None]], 2))
        noise = -0.5 * (left / psi + counts[:, None] * (psi.log() + LOG_TAU)).sum()
        hidden = (counts * log_weights(theta)).sum() - 0.5 * (factors + counts[:, None] * LOG_TAU).sum()
        return noise + hidden + statistics["base"]

    def squares(self, sums: Tensor) -> Tensor:
        """Statistics as matrices, (K, D + factors + 1, D + factors + 1)."""
        size = len(self.frame["scale"]) + self.factors + 1
        return sums.unflatten(1, (size, size))

    def maximise(self, sums: Tensor, theta: Theta) -> Theta:
        """Regress y on (f, 1), and compute the mean squared residuals."""
        moments, d = self.squares(sums), len(self.frame["scale"])
        counts = moments[:, -1:, -1:]
        unit = torch.eye(moments.shape[1], dtype=sums.dtype, device=sums.device)
        moments = torch.where(counts > 0, moments, unit)  # a component without rows stays as it was, whatever is here
        lines = torch.linalg.solve(moments[:, d:, d:], moments[:, d:, :d]).mT
        left = residuals(moments, lines) / moments[:, -1, -1:]
        psi = self.pooled(left).reshape(self.k, -1).clamp_min(self.floor)
        return self.named(lines[..., -1], lines[..., :-1], psi.expand(self.k, d))

    def hidden(self, theta: Theta, rows: Rows) -> dict[str, Tensor]:
        """`responsibilities` (n, K), and `mean` (n, K, factors): the factors given y and the component."""
        means, spread = self.standard(theta)
        gain, _ = self.gain(theta)
        x = self.framed(rows)
        mean = x.new_zeros(len(x), self.k, self.factors)
        for index, seen in patterns(x, torch.ones(len(x), dtype=torch.bool, device=x.device)):
            _, filled, _ = conditional(x[index], seen, means, spread, self.frame["scale"])
            mean[index] = ((filled - means[:, None]) @ gain.mT).transpose(0, 1)
        return {"responsibilities": self.responsibilities(theta, rows), "mean": mean}

    # Initialisation and warnings.

    def begin_from(self, labels: Tensor, rows: Rows) -> Theta:
        """Initialise from the leading eigenvectors of each cluster's covariance."""
        sums, d = self.split(labels, rows), len(self.frame["scale"])
        counts = sums[:, -1:]
        means = sums[:, -1 - d : -1] / counts
        spread = matrices(sums[:, : -1 - d], d) / counts[..., None] - means[:, :, None] * means[:, None]
        loadings = torch.stack([principal(own, self.factors)[0] for own in spread])
        psi = self.pooled(spread.diagonal(dim1=1, dim2=2) - loadings.square().sum(2)).reshape(self.k, -1)
        theta = self.named(means, loadings, psi.clamp_min(max(MIN_INITIAL_NOISE, self.floor)).expand(self.k, d))
        theta["weights"] = counts[:, 0] / counts.sum()
        return {name: theta[name].to(self.dtype) for name in self.layout.names}

    def allows(self, theta: Theta) -> bool:
        """Whether all noise is above the floor."""
        return bool((self.lines(theta)[2] >= self.floor).all())

    def problems(self, theta: Theta, statistics: Mapping[str, Tensor]) -> list[str]:
        """Warn about components without rows, and about noise variances at the floor."""
        least = self.lines(theta)[2].amin(1)
        held = ((least <= AT_FLOOR * self.floor) & (theta["weights"] > 0)).nonzero()[:, 0].tolist()
        sentences = MixtureModel.problems(self, theta, statistics)
        if held:
            which = f"component{'s' * (len(held) > 1)} {', '.join(map(str, held))}"
            sentences.append(
                f"The factors of {which} of {self!r} explain a column completely: the noise is held at {self.floor:g} "
                "of the data's variance. Try fewer components or factors."
            )
        return sentences
