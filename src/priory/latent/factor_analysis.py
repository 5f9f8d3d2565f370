"""Factor analysis: a few hidden factors z explain the covariance of the columns; each column has its own noise.

    z ~ N(0, I_k),      y | z ~ N(mu + W z, diag(psi)),      so that      y ~ N(mu, W W' + diag(psi))

    E-step   E[z | y] = W' (W W' + diag(psi))^-1 (y - mu),     Cov[z | y] = I - W' (W W' + diag(psi))^-1 W
    M-step   the regression of y on (z, 1):   [W mu] = S_y,(z,1) S_(z,1)^-1,     psi_d the mean squared residual

with S the expected second moments of (y, z, 1), summed over rows (Rubin and Thayer, 1982). (y, z) is jointly Gaussian,
so a missing value of y, NaN, is treated as hidden like z. W is identified up to a rotation of the factors.

Data are first centred and scaled by a fixed frame. If the factors explain a column completely, its noise variance tends
to zero (a Heywood case). psi is therefore kept above `floor` times the column's variance; the M-step is exact under
this constraint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.distributions import constraints

from priory.core.errors import is_integer, require
from priory.core.flat import Param
from priory.core.linalg import eigh
from priory.latent.base import Expectation, Generated, Latent, Rows, Theta, warn_of_silent
from priory.latent.frames import frame
from priory.latent.gaussian_mixture import AT_FLOOR, LOG_TAU, conditional, patterns

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


class FactorAnalysis(Latent):
    """Factor analysis: y = mu + W z + noise with k hidden factors z ~ N(0, I).

    Data are (n, D); NaN marks a missing value. The parameters are `mean` (D,), `loadings` W (D, k) and `variances` psi
    (D,).

    Args:
        k: Number of factors, less than D.
        floor: Smallest noise variance of a column, as a fraction of the column's variance. Default: 1e-6.
        given: "weights" if the data end with one weight per row. Default: ().

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> FactorAnalysis(0)
        Traceback (most recent call last):
        ...
        priory.InputError: The 'k' argument of FactorAnalysis must be an integer >= 1, got 0.
    """

    weighs: ClassVar[bool] = True
    missing: ClassVar[bool] = True
    starts: ClassVar[tuple[str, ...]] = ("eigen", "random")
    noise: ClassVar[str] = "variances"  # the name of psi

    def __init__(self, k: int, floor: float = 1e-6, given: str | Sequence[str] = ()) -> None:
        name = type(self).__name__
        require(is_integer(k, 1), "k", name, "be an integer >= 1", repr(k))
        ok = isinstance(floor, (int, float)) and 0 < floor < 1
        require(ok, "floor", name, "lie between 0 and 1", repr(floor))
        named = (given,) if isinstance(given, str) else tuple(given)
        require(named in ((), ("weights",)), "given", name, "be 'weights' or left out", repr(given))
        self.k, self.floor, self.given = int(k), float(floor), named

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.k})"

    def params(self, *shapes: tuple[int, ...]) -> dict[str, Param]:
        """mu, W and psi."""
        shape = shapes[0]
        require(len(shape) == 1, "y", repr(self), "be (n, D)", f"rows of the shape {shape}")
        require(self.k < shape[0], "k", repr(self), f"be less than the columns, {shape[0]}", self.k)
        psi = Param(self.noise_shape(shape[0]), constraints.positive)
        return {"mean": Param(shape), "loadings": Param((*shape, self.k)), self.noise: psi}

    # The noise variances, one per column or shared.

    def noise_shape(self, columns: int) -> tuple[int, ...]:
        """The shape of psi."""
        return (columns,)

    def pooled(self, psi: Tensor) -> Tensor:
        """Return psi in the shape of the parameter, from one value per column (D,)."""
        return psi

    # The frame.

    def look(self, rows: Rows) -> dict[str, Tensor]:
        """The centre and the scale of each column."""
        y = rows["y"]
        together = self.noise_shape(y.shape[1]) == ()
        centre, scale = frame(y, rows.weights, "y", repr(self), self.dtype, together)
        warn_of_silent(int(y.isnan().all(1).sum()), repr(self))
        return {"centre": centre, "scale": scale}

    def framed(self, rows: Rows) -> Tensor:
        """Rows in the frame, (n, D)."""
        return (rows["y"] - self.frame["centre"]) / self.frame["scale"]

    def standard(self, theta: Theta) -> tuple[Tensor, Tensor, Tensor]:
        """mu (D,), W (D, k) and psi (D,) in the frame."""
        centre, scale = self.frame["centre"], self.frame["scale"]
        psi = theta[self.noise].expand(len(scale))
        return (theta["mean"] - centre) / scale, theta["loadings"] / scale[:, None], psi / scale.square()

    def unframed(self, mean: Tensor, loadings: Tensor, psi: Tensor) -> Theta:
        """Convert the parameters from the frame to the units of the data."""
        centre, scale = self.frame["centre"].double(), self.frame["scale"].double()
        found = {"mean": centre + scale * mean, "loadings": scale[:, None] * loadings}
        found[self.noise] = self.pooled(psi * scale.square())
        return {name: found[name].to(self.dtype) for name in self.layout.names}

    # The equations, in the frame.

    def joint(self, theta: Theta) -> tuple[Tensor, Tensor]:
        """The mean (D + k,) and the covariance (D + k, D + k) of (y, z)."""
        mean, loadings, psi = self.standard(theta)
        unit = torch.eye(self.k, dtype=loadings.dtype, device=loadings.device)
        spread = loadings @ loadings.mT + torch.diag_embed(psi)
        both = torch.cat([torch.cat([spread, loadings], 1), torch.cat([loadings.mT, unit], 1)])
        return torch.cat([mean, torch.zeros_like(unit[0])]), both

    def conditionals(self, theta: Theta, rows: Rows) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Yield, per pattern of missing values: indices, log p(y), E[(y, z) | seen] (m, D + k) and its covariance."""
        mean, spread = self.joint(theta)
        x = self.framed(rows)
        blank = x.new_zeros(len(x), self.k)
        scale = torch.cat([self.frame["scale"], torch.ones_like(blank[0])])
        for index, seen in patterns(x, torch.ones(len(x), dtype=torch.bool, device=x.device)):
            seen = torch.cat([seen, seen.new_zeros(self.k)])
            full = torch.cat([x[index], blank[index]], 1)
            value, filled, left = conditional(full, seen, mean[None], spread[None], scale)
            yield index, value[0], filled[0], left[0]

    def e_step(self, theta: Theta, rows: Rows) -> Expectation:
        """The expected second moments of (y, z, 1), and log p(y)."""
        bound, moments = rows["y"].new_zeros(len(rows)), 0.0
        for index, value, filled, left in self.conditionals(theta, rows):
            bound[index] = value
            some = rows.at(index)
            x = torch.cat([filled, torch.ones_like(filled[:, :1])], 1)
            count = some.counted(torch.ones_like(value)).sum()
            moments = moments + some.counted(x).mT @ x + count * torch.nn.functional.pad(left, (0, 1, 0, 1))
        assert isinstance(moments, Tensor)
        jacobian = -(~rows["y"].isnan() * self.frame["scale"].log()).sum(1)
        return Expectation({"moments": moments, "base": rows.counted(jacobian).sum()}, bound)

    def complete(self, theta: Theta, statistics: Mapping[str, Tensor]) -> Tensor:
        """Q: the expected log N(y; mu + W z, psi) + log N(z; 0, I), over all rows."""
        moments, d = statistics["moments"], len(self.frame["scale"])
        mean, loadings, psi = (t.to(moments.dtype) for t in self.standard(theta))
        lines = torch.cat([loadings, mean[:, None]], 1)  # y = lines (z, 1) + noise
        count, z = moments[-1, -1], moments[d:-1, d:-1]
        left = residuals(moments, lines)
        noise = -0.5 * (left / psi).sum() - 0.5 * count * (psi.log().sum() + d * LOG_TAU)
        return noise - 0.5 * (z.trace() + count * self.k * LOG_TAU) + statistics["base"]

    def m_step(self, statistics: Mapping[str, Tensor], theta: Theta) -> Theta:
        """Regress y on (z, 1), and compute the mean squared residuals."""
        moments, d = statistics["moments"], len(self.frame["scale"])
        lines = torch.linalg.solve(moments[d:, d:], moments[d:, :d]).mT
        left = residuals(moments, lines) / moments[-1, -1]
        psi = self.pooled(left).expand(d).clamp_min(self.floor)
        return self.unframed(lines[:, -1], lines[:, :-1], psi)

    def log_marginal(self, theta: Theta, rows: Rows) -> Tensor:
        """Return log p(y_n | theta) of the observed values, (n,), differentiable by autograd."""
        (mean, spread), x, scale = self.joint(theta), self.framed(rows), self.frame["scale"]
        places, values = [], []
        for index, seen in patterns(x, torch.ones(len(x), dtype=torch.bool, device=x.device)):
            s = seen.nonzero()[:, 0]
            factor = torch.linalg.cholesky(spread[s[:, None], s])
            white = torch.linalg.solve_triangular(factor, (x[index][:, s] - mean[s]).mT, upper=False)
            log_det = factor.diagonal(dim1=-2, dim2=-1).log().sum() + scale[s].log().sum() + 0.5 * len(s) * LOG_TAU
            places.append(index)
            values.append(-0.5 * white.square().sum(0) - log_det)
        return torch.cat(values)[torch.cat(places).argsort()]

    def hidden(self, theta: Theta, rows: Rows) -> dict[str, Tensor]:
        """The factors given y: `mean` (n, k) and `covariance` (n, k, k)."""
        d = len(self.frame["scale"])
        mean, covariance = rows["y"].new_zeros(len(rows), self.k), rows["y"].new_zeros(len(rows), self.k, self.k)
        for index, _, filled, left in self.conditionals(theta, rows):
            mean[index], covariance[index] = filled[:, d:], left[d:, d:]
        return {"mean": mean, "covariance": covariance}

    def generate(self, theta: Theta, n: int, generator: torch.Generator, steps: int | None = None) -> Generated:
        """Factors z, and y = mu + W z + noise."""
        z, noise = (
            torch.randn(n, size, generator=generator, dtype=self.dtype, device=self.device)
            for size in (self.k, len(theta["mean"]))
        )
        return Generated(theta["mean"] + z @ theta["loadings"].mT + theta[self.noise].sqrt() * noise, z)

    # Initialisation and warnings.

    def begin(self, rows: Rows, how: str, generator: torch.Generator) -> Theta:
        """Initialise from the leading eigenvectors of the data's covariance, or with random loadings."""
        x = self.framed(rows).nan_to_num(0.0).double()
        counts = rows.counted(torch.ones_like(x[:, :1]))
        mean = (counts * x).sum(0) / counts.sum()
        spread = (counts * (x - mean)).mT @ (x - mean) / counts.sum()
        if how == "eigen":
            loadings, _ = principal(spread, self.k)
        else:
            size = (spread.diagonal() / (2 * self.k)).sqrt()[:, None]
            loadings = size * torch.randn(len(mean), self.k, generator=generator, dtype=x.dtype, device=x.device)
        psi = self.pooled(spread.diagonal() - loadings.square().sum(1)).expand_as(mean)
        return self.unframed(mean, loadings, psi.clamp_min(max(self.floor, 1e-3 if how == "random" else 0.0)))

    def allows(self, theta: Theta) -> bool:
        """Whether all noise is above the floor."""
        return bool((self.standard(theta)[2] >= self.floor).all())

    def problems(self, theta: Theta, statistics: Mapping[str, Tensor]) -> list[str]:
        """Warn about columns whose noise variance is at the floor."""
        held = (self.standard(theta)[2] <= AT_FLOOR * self.floor).nonzero()[:, 0].tolist()
        if not held:
            return []
        which = f"column{'s' * (len(held) > 1)} {', '.join(map(str, held))}"
        return [
            f"The factors of {self!r} explain {which} completely: the noise is held at {self.floor:g} of the data's "
            "variance. Try fewer factors."
        ]


def residuals(moments: Tensor, lines: Tensor) -> Tensor:
    """sum_n E[(y_d - lines_d (z, 1))^2] of each column, (..., D), from the moments of (y, z, 1)."""
    d = lines.shape[-2]
    square, cross = moments.diagonal(dim1=-2, dim2=-1)[..., :d], moments[..., :d, d:]
    return square - 2 * (lines * cross).sum(-1) + ((lines @ moments[..., d:, d:]) * lines).sum(-1)


def principal(spread: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the maximum likelihood W (D, k) and v of N(mu, W W' + v I), from the data's covariance (D, D).

    v is the mean of the D - k smallest eigenvalues (Tipping and Bishop, 1999).
    """
    values, vectors = eigh(spread)
    noise = values[:-k].mean().clamp_min(0.0)
    return vectors[:, -k:] * (values[-k:] - noise).clamp_min(0.0).sqrt(), noise
