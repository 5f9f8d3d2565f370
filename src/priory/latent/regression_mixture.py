"""The mixture of linear regressions: each row follows one of K lines (De Veaux, 1989).

p(y | x) = sum_k pi_k N(y; b_k . (x, 1), v_k),      T(x, y) = (y^2, y (x, 1), (x, 1)(x, 1)', 1)

M-step:   b_k solves  [sum_n q_nk (x, 1)(x, 1)'] b_k = sum_n q_nk y_n (x, 1),   v_k the mean squared residual
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.distributions import constraints

from priory.core.errors import require
from priory.core.flat import Param
from priory.latent.base import Rows, Theta
from priory.latent.frames import frame
from priory.latent.gaussian_mixture import AT_FLOOR, LOG_TAU, NARROW_VARIANCE, columns, matrices, pairs
from priory.latent.mixture import MixtureModel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class RegressionMixture(MixtureModel):
    """A mixture of K linear regressions with Gaussian noise.

    Data are inputs (n, D) or (n,) and targets (n,). The parameters are `weights` (K,), `coefficients` (K, D),
    `intercepts` (K,) and `variances` (K,).

    Args:
        k: Number of regressions K.
        floor: Smallest variance of a component, as a fraction of the variance of y. It prevents the variance of a line
            through few rows from vanishing. Default: 1e-6.
        given: The parts that follow the rows in the data: "weights", one per row; "z", the known component of each row,
            -1 where it is hidden; or both. Default: ().

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> RegressionMixture(2, floor=0.0)
        Traceback (most recent call last):
        ...
        priory.InputError: The 'floor' argument of RegressionMixture must lie between 0 and 1, got 0.0.
    """

    parts: ClassVar[tuple[str, ...]] = ("x", "y")
    starts: ClassVar[tuple[str, ...]] = ("random",)
    soft: ClassVar[float] = 0.2

    def __init__(self, k: int, floor: float = 1e-6, given: str | Sequence[str] = ()) -> None:
        super().__init__(k, given)
        ok = isinstance(floor, (int, float)) and 0 < floor < 1
        require(ok, "floor", "RegressionMixture", "lie between 0 and 1", repr(floor))
        self.floor = float(floor)

    def components(self, *shapes: tuple[int, ...]) -> dict[str, Param]:
        """Declare a line and a variance per component."""
        x, y = shapes
        require(len(x) < 2, "x", repr(self), "be (n, D), or (n,)", f"rows of the shape {x}")
        require(y == (), "y", repr(self), "be one number per row, (n,)", f"rows of the shape {y}")
        return {
            "coefficients": Param((self.k, *(x or (1,)))),
            "intercepts": Param((self.k,)),
            "variances": Param((self.k,), constraints.positive),
        }

    # The frame: x and y centred and scaled.

    def look(self, rows: Rows) -> dict[str, Tensor]:
        """The centres and scales of x and y."""
        self.warn_of(len(rows))
        found = {}
        for name in ("x", "y"):
            centre, scale = frame(columns(rows[name]), rows.weights, name, repr(self), self.dtype)
            found |= {f"{name}_centre": centre, f"{name}_scale": scale}
        return found

    def framed(self, rows: Rows, name: str) -> Tensor:
        """A part of the data in the frame, (n, D)."""
        return (columns(rows[name]) - self.frame[f"{name}_centre"]) / self.frame[f"{name}_scale"]

    def standard(self, theta: Theta) -> tuple[Tensor, Tensor]:
        """Lines (K, D + 1), intercept last, and variances (K,) in the frame."""
        f = self.frame
        slopes = theta["coefficients"] * f["x_scale"] / f["y_scale"]
        at_centre = theta["intercepts"] + theta["coefficients"] @ f["x_centre"].to(theta["coefficients"].dtype)
        intercepts = (at_centre - f["y_centre"]) / f["y_scale"]
        return torch.cat([slopes, intercepts[:, None]], 1), theta["variances"] / f["y_scale"].square()

    def unframed(self, lines: Tensor, variances: Tensor) -> Theta:
        """Convert lines and variances from the frame to the units of the data."""
        f = {name: t.double() for name, t in self.frame.items()}
        slopes = lines[:, :-1] * f["y_scale"] / f["x_scale"]
        intercepts = f["y_centre"] + f["y_scale"] * lines[:, -1] - slopes @ f["x_centre"]
        return {
            "coefficients": slopes,
            "intercepts": intercepts,
            "variances": variances * f["y_scale"].square(),
        }

    # The equations, in the frame.

    def features(self, rows: Rows) -> Tensor:
        """(y^2, y x, y, x_i x_j for i <= j with the 1 as the last x, 1)."""
        x, y = self.framed(rows, "x").T, self.framed(rows, "y").T
        with_one = torch.cat([x, torch.ones_like(y)])
        return torch.cat([y.square(), y * with_one, pairs(with_one)[: -1 - len(with_one)], torch.ones_like(y)])

    def natural(self, theta: Theta) -> Tensor:
        """-(y - b . x)^2 / (2 v) - log(2 pi v) / 2 - log scale, as a function of the features."""
        lines, variances = self.standard(theta)
        d = lines.shape[1]
        i, j = torch.triu_indices(d, d)
        once = torch.where(i == j, -0.5, -1.0).to(lines)
        v = variances[:, None]
        constant = -0.5 * (v.log() + LOG_TAU) - self.frame["y_scale"].log()
        return torch.cat([-0.5 / v, lines / v, once * lines[:, i] * lines[:, j] / v, constant], 1)

    def narrow_components(self, theta: Theta) -> Tensor:
        """Components with little noise."""
        return (self.standard(theta)[1] < NARROW_VARIANCE).nonzero()[:, 0]

    def direct(self, theta: Theta, rows: Rows, which: Tensor) -> Tensor:
        """log N(y_n; b_k . x_n, v_k) from the residuals."""
        lines, variances = self.standard(theta)
        x, y = self.framed(rows, "x"), self.framed(rows, "y")
        left = y.T - lines[which, :-1] @ x.T - lines[which, -1:]
        v = variances[which, None]
        return -0.5 * (left.square() / v + v.log() + LOG_TAU) - self.frame["y_scale"].log()

    def maximise(self, sums: Tensor, theta: Theta) -> Theta:
        """Solve weighted least squares, with the minimum-norm solution if it is not unique."""
        d = self.layout["coefficients"].shape[1] + 1
        squares, cross = sums[:, 0], sums[:, 1 : 1 + d]
        gram = matrices(sums[:, 1 + d : -1], d)
        inverse = torch.linalg.pinv(gram, hermitian=True, rtol=1e-12)
        lines = (inverse @ cross[..., None])[..., 0]
        left = squares - (2 * lines * cross).sum(1) + (lines[:, None] @ gram @ lines[..., None])[:, 0, 0]
        variances = left / sums[:, -1].clamp_min(1e-300)
        return self.unframed(lines, variances.clamp_min(self.floor))

    def coordinates(self, rows: Rows) -> Tensor:
        """x and y in the frame."""
        return torch.cat([self.framed(rows, "x"), self.framed(rows, "y")], 1)

    def begin(self, rows: Rows, how: str, generator: torch.Generator) -> Theta:
        """Initialise with K lines through a few random rows each, and assign each row to the nearest line."""
        x, y = self.framed(rows, "x"), self.framed(rows, "y")
        with_one = torch.cat([x, torch.ones_like(y)], 1)
        few = with_one.shape[1] + 1
        picked = torch.randint(len(rows), (self.k, few), generator=generator, device=x.device)
        lines = torch.linalg.pinv(with_one[picked]) @ y[picked]  # (K, D + 1, 1)
        labels = (y - with_one @ lines[..., 0].T).abs().argmin(1)
        return self.begin_from(labels if rows.z is None else torch.where(rows.z >= 0, rows.z, labels), rows)

    def predictive(self, theta: Theta, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The lines at x: weights, means and variances, each (n, K)."""
        means = columns(x) @ theta["coefficients"].T + theta["intercepts"]
        return theta["weights"].expand_as(means), means, theta["variances"].expand_as(means)

    def allows(self, theta: Theta) -> bool:
        """Whether all variances are above the floor."""
        return bool((self.standard(theta)[1] >= self.floor).all())

    def problems(self, theta: Theta, statistics: Mapping[str, Tensor]) -> list[str]:
        """Warn about components without rows, and about components whose variance is at the floor."""
        _, variances = self.standard(theta)
        held = ((variances <= AT_FLOOR * self.floor) & (theta["weights"] > 0)).nonzero()[:, 0].tolist()
        if not held:
            return super().problems(theta, statistics)
        fit = (
            "fit their rows exactly: their variances are" if len(held) > 1 else "fits its rows exactly: its variance is"
        )
        sentence = f"{self.named_components(held)} {fit} held at {self.floor:g} of y's. Try fewer components."
        return [*super().problems(theta, statistics), sentence]
