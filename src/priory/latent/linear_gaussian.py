"""The linear-Gaussian state space model: linear dynamics and linear observations of a hidden state, with noise.

    z_1 ~ N(m, V),      z_t | z_{t-1} ~ N(A z_{t-1}, Q),      y_t | z_t ~ N(C z_t + d, diag(psi))

E-step: the Kalman filter (1960) and the smoother of Rauch, Tung and Striebel (1965). With P_t = A V_{t-1} A' + Q, and
W_t the precisions 1/psi of the values that were seen at t, 0 elsewhere:

    filter     V_t = (P_t^-1 + C' W_t C)^-1,         m_t = p_t + V_t C' W_t (y_t - C p_t - d),      p_t = A m_{t-1}
    smoother   J_t = V_t A' P_{t+1}^-1,              s_t = m_t + J_t (s_{t+1} - p_{t+1}),
               S_t = V_t + J_t (S_{t+1} - P_{t+1}) J_t',      Cov[z_{t+1}, z_t | y] = S_{t+1} J_t'

M-step (Shumway and Stoffer, 1982): the regressions of z_t on z_{t-1}, and of each column of y on (z, 1) over the steps
where it was observed. A missing value, NaN, has precision zero.

The state is identified up to a linear change of coordinates. The noise variance of a column is kept above `floor` times
the column's variance, and Q and V have no eigenvalue below `floor`: with a single sequence, the V of its first state
would tend to zero. If no value is missing, the covariances are the same in all sequences and are computed once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.distributions import constraints as torch_constraints

from priory import constraints
from priory.core.errors import is_integer, require
from priory.core.flat import Param
from priory.core.linalg import cholesky
from priory.latent.base import Expectation, Generated, Rows, Theta, warn_of_silent
from priory.latent.frames import frame
from priory.latent.gaussian_mixture import AT_FLOOR, LOG_TAU, raised
from priory.latent.sequences import SequenceModel, lengths, seen

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class LinearGaussian(SequenceModel):
    """A linear-Gaussian state space model (Kalman filter) with a state of k numbers.

    Data are sequences (n, T) or (n, T, D), padded with NaN at the end, or a list of (T,) or (T, D); NaN before the end
    marks a missing value. The parameters are `initial_mean` (k,), `initial_covariance` (k, k), `transition` A (k, k),
    `transition_noise` Q (k, k), `loadings` C (D, k), `offset` d (D,) and `variances` psi (D,).

    Args:
        k: Size of the state.
        floor: Smallest noise variance of a column, as a fraction of the column's variance, and smallest eigenvalue of
            `initial_covariance` and `transition_noise`. Default: 1e-6.
        given: "weights" if the data end with one weight per sequence. Default: ().

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> LinearGaussian(0)
        Traceback (most recent call last):
        ...
        priory.InputError: The 'k' argument of LinearGaussian must be an integer >= 1, got 0.
    """

    weighs: ClassVar[bool] = True

    def __init__(self, k: int, floor: float = 1e-6, given: str | Sequence[str] = ()) -> None:
        require(is_integer(k, 1), "k", "LinearGaussian", "be an integer >= 1", repr(k))
        ok = isinstance(floor, (int, float)) and 0 < floor < 1
        require(ok, "floor", "LinearGaussian", "lie between 0 and 1", repr(floor))
        named = (given,) if isinstance(given, str) else tuple(given)
        require(named in ((), ("weights",)), "given", "LinearGaussian", "be 'weights' or left out", repr(given))
        self.k, self.floor, self.given = int(k), float(floor), named

    def __repr__(self) -> str:
        return f"LinearGaussian({self.k})"

    def params(self, *shapes: tuple[int, ...]) -> dict[str, Param]:
        """Declare the parameters of the first state, the transitions and the observations."""
        shape, k = shapes[0], self.k
        require(len(shape) in (1, 2), "y", repr(self), "be (n, T) or (n, T, D)", f"rows of the shape {shape}")
        d = shape[1] if len(shape) == 2 else 1
        return {
            "initial_mean": Param((k,)),
            "initial_covariance": Param((k, k), constraints.positive_definite),
            "transition": Param((k, k)),
            "transition_noise": Param((k, k), constraints.positive_definite),
            "loadings": Param((d, k)),
            "offset": Param((d,)),
            "variances": Param((d,), torch_constraints.positive),
        }

    # The frame.

    def look(self, rows: Rows) -> dict[str, Tensor]:
        """The centre and the scale of each column, over all steps."""
        y = columns(rows["y"])
        weights = None if rows.weights is None else rows.weights.repeat_interleave(y.shape[1])
        centre, scale = frame(y.flatten(0, 1), weights, "y", repr(self), self.dtype)
        warn_of_silent(int(y.flatten(1).isnan().all(1).sum()), repr(self), "sequence")
        return {"centre": centre, "scale": scale}

    def framed(self, rows: Rows) -> Tensor:
        """Sequences in the frame, (n, T, D)."""
        return (columns(rows["y"]) - self.frame["centre"]) / self.frame["scale"]

    def standard(self, theta: Theta) -> tuple[Tensor, Tensor]:
        """[C d] (D, k + 1) and psi (D,) in the frame."""
        centre, scale = self.frame["centre"], self.frame["scale"]
        offset = (theta["offset"] - centre) / scale
        lines = torch.cat([theta["loadings"] / scale[:, None], offset[:, None]], 1)
        return lines, theta["variances"] / scale.square()

    # The equations, in the frame.

    def e_step(self, theta: Theta, rows: Rows) -> Expectation:
        """Run filter and smoother, and compute the expected second moments of z_t, (z_t, z_{t-1}) and (z_t, 1, y_t)."""
        y = self.framed(rows)
        value, path = self.filtered(theta, y)
        mean, spread, cross = smoothed(theta["transition"], path)
        steps = mean.shape[1]
        length = lengths(seen(rows["y"]))
        inside = (torch.arange(steps, device=y.device) < length[:, None]).to(self.dtype)  # (n, T)
        weight = rows.counted(inside)
        second = spread + mean[..., None] * mean[..., None, :]  # E[z_t z_t'], (n, T, k, k)
        pairs = cross + mean[:, 1:, :, None] * mean[:, :-1, None]  # E[z_t z_{t-1}']
        with_one = bordered(second, mean)
        there = (~y.isnan()).to(self.dtype) * weight[..., None]  # (n, T, D), each multiplied by its weight
        known = y.nan_to_num(0.0)
        states = torch.cat([mean, torch.ones_like(mean[..., :1])], 2)
        moved = weight[:, 1:]
        jacobian = -(~y.isnan() * self.frame["scale"].log()).sum((1, 2))
        statistics = {
            "initial": torch.einsum("n,nij->ij", weight[:, 0], with_one[:, 0]),
            "before": torch.einsum("nt,ntij->ij", moved, second[:, :-1]),
            "after": torch.einsum("nt,ntij->ij", moved, second[:, 1:]),
            "pairs": torch.einsum("nt,ntij->ij", moved, pairs),
            "moves": moved.sum(),
            "states": torch.einsum("ntd,ntij->dij", there, with_one),
            "cross": torch.einsum("ntd,nti->di", there * known, states),
            "squares": (there * known.square()).sum((0, 1)),
            "base": rows.counted(jacobian).sum(),
        }
        return Expectation(statistics, value + jacobian)

    def complete(self, theta: Theta, statistics: Mapping[str, Tensor]) -> Tensor:
        """Return Q, the expected log density of first states, transitions and observations."""
        s = statistics
        theta = {name: t.to(s["squares"].dtype) for name, t in theta.items()}
        lines, psi = self.standard(theta)
        one = torch.cat([theta["initial_mean"], s["squares"].new_ones(1)])
        shift = torch.cat([torch.eye(self.k, dtype=one.dtype, device=one.device), -one[:-1, None]], 1)
        first = gaussian(shift @ s["initial"] @ shift.mT, theta["initial_covariance"], s["initial"][-1, -1])
        a = theta["transition"]
        left = s["after"] - a @ s["pairs"].mT - s["pairs"] @ a.mT + a @ s["before"] @ a.mT
        motion = gaussian(left, theta["transition_noise"], s["moves"])
        counts = s["states"][:, -1, -1]
        noise = -0.5 * (self.residuals(lines, s) / psi + counts * (psi.log() + LOG_TAU)).sum()
        return first + motion + noise + s["base"]

    def residuals(self, lines: Tensor, s: Mapping[str, Tensor]) -> Tensor:
        """sum E[(y_d - lines_d (z, 1))^2] over the steps where column d was seen, (D,)."""
        squared = (lines[:, None] @ s["states"] @ lines[..., None])[:, 0, 0]
        return s["squares"] - 2 * (lines * s["cross"]).sum(1) + squared

    def m_step(self, statistics: Mapping[str, Tensor], theta: Theta) -> Theta:
        """Compute the regressions and their mean squared residuals, raised to the floor."""
        s, f = statistics, {name: t.double() for name, t in self.frame.items()}
        count = s["initial"][-1, -1]
        mean = s["initial"][:-1, -1] / count
        spread = s["initial"][:-1, :-1] / count - mean[:, None] * mean
        fresh = {"initial_mean": mean, "initial_covariance": raised(symmetric(spread)[None], self.floor)[0]}
        fresh |= {name: theta[name] for name in ("transition", "transition_noise")}
        if bool(s["moves"] > 0):
            a = torch.linalg.solve(s["before"], s["pairs"].mT).mT
            left = symmetric(s["after"] - a @ s["pairs"].mT) / s["moves"]
            fresh |= {"transition": a, "transition_noise": raised(left[None], self.floor)[0]}
        lines = torch.linalg.solve(s["states"], s["cross"][..., None])[..., 0]
        psi = (self.residuals(lines, s) / s["states"][:, -1, -1]).clamp_min(self.floor)
        fresh["loadings"] = f["scale"][:, None] * lines[:, :-1]
        fresh["offset"] = f["centre"] + f["scale"] * lines[:, -1]
        fresh["variances"] = f["scale"].square() * psi
        return {name: fresh[name].to(self.dtype) for name in self.layout.names}

    def log_marginal(self, theta: Theta, rows: Rows) -> Tensor:
        """Return log p(y_n | theta), (n,), differentiable by autograd."""
        y = self.framed(rows)
        return self.filtered(theta, y)[0] - (~y.isnan() * self.frame["scale"].log()).sum((1, 2))

    def filtered(self, theta: Theta, y: Tensor) -> tuple[Tensor, Path]:
        """log p(y) (n,) and the filter's path, for sequences in the frame (n, T, D)."""
        lines, psi = self.standard(theta)
        loadings, offset = lines[:, :-1], lines[:, -1]
        there = ~y.isnan()
        precision = there / psi  # W_t, (n, T, D)
        away = torch.where(there, y - offset, 0.0)
        same = precision[:1] if bool(there.all()) else precision
        informed = torch.einsum("di,ntd,dj->ntij", loadings, same, loadings)  # C' W C, (n or 1, T, k, k)
        unit = torch.eye(self.k, dtype=y.dtype, device=y.device)
        mean, spread = theta["initial_mean"].expand(len(y), self.k), theta["initial_covariance"][None]
        value, path = -0.5 * (there * (psi.log() + LOG_TAU)).sum((1, 2)), Path([], [], [], [])
        for t in range(y.shape[1]):
            path.predicted.append(mean)
            path.spread.append(spread)
            left = away[:, t] - mean @ loadings.mT
            pull = (precision[:, t] * left) @ loadings  # C' W (y - C p - d), (n, k)
            factor = torch.linalg.cholesky(spread)
            inner = torch.linalg.cholesky(unit + factor.mT @ informed[:, t] @ factor)
            root = torch.linalg.solve_triangular(inner, factor.mT, upper=False)  # V = root' root
            short = (root @ pull[..., None])[..., 0]
            fit = (precision[:, t] * left.square()).sum(1) - short.square().sum(1)
            value = value - 0.5 * fit - inner.diagonal(dim1=-2, dim2=-1).log().sum(-1)
            mean, spread = mean + (root.mT @ short[..., None])[..., 0], root.mT @ root
            path.mean.append(mean)
            path.covariance.append(spread)
            mean = mean @ theta["transition"].mT
            spread = theta["transition"] @ spread @ theta["transition"].mT + theta["transition_noise"]
        return value, path

    # The hidden states.

    def hidden(self, theta: Theta, rows: Rows) -> dict[str, Tensor]:
        """The states given the whole sequence: `mean` (n, T, k) and `covariance` (n, T, k, k), NaN after the end."""
        y = self.framed(rows)
        mean, spread, _ = smoothed(theta["transition"], self.filtered(theta, y)[1])
        inside = torch.arange(y.shape[1], device=y.device) < lengths(seen(rows["y"]))[:, None]
        covariance = torch.where(inside[..., None, None], spread, torch.nan)
        return {"mean": torch.where(inside[..., None], mean, torch.nan), "covariance": covariance}

    def generate(self, theta: Theta, n: int, generator: torch.Generator, steps: int | None = None) -> Generated:
        """Draw paths of the state, (n, T, k), and their observations."""
        length = self.steps_or(steps)
        draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=self.dtype, device=self.device)  # noqa: E731
        first = cholesky(theta["initial_covariance"], "covariance of the first state")
        moving = cholesky(theta["transition_noise"], "covariance of the transition noise")
        states = [theta["initial_mean"] + draw(n, self.k) @ first.mT]
        for _ in range(length - 1):
            states.append(states[-1] @ theta["transition"].mT + draw(n, self.k) @ moving.mT)
        z = torch.stack(states, 1)
        noise = theta["variances"].sqrt() * draw(n, length, len(theta["variances"]))
        y = z @ theta["loadings"].mT + theta["offset"] + noise
        assert self.shapes is not None
        return Generated(y if len(self.shapes[0]) == 2 else y[..., 0], z)

    # Initialisation and warnings.

    def begin(self, rows: Rows, how: str, generator: torch.Generator) -> Theta:
        """Initialise with a mean-reverting state and random loadings that explain about half of each column."""
        centre, scale, k = self.frame["centre"], self.frame["scale"], self.k
        draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=self.dtype, device=self.device)  # noqa: E731
        unit = torch.eye(k, dtype=self.dtype, device=self.device)
        return {
            "initial_mean": torch.zeros_like(unit[0]),
            "initial_covariance": unit.clone(),
            "transition": 0.7 * unit + 0.2 * draw(k, k) / k**0.5,
            "transition_noise": 0.5 * unit,
            "loadings": scale[:, None] * draw(len(scale), k) / (2 * k) ** 0.5,
            "offset": centre.clone(),
            "variances": 0.5 * scale.square(),
        }

    def allows(self, theta: Theta) -> bool:
        """Whether all noise is above the floor."""
        least = [torch.linalg.eigvalsh(theta[name])[0] for name in ("initial_covariance", "transition_noise")]
        return bool(torch.stack([*least, self.standard(theta)[1].min()]).min() >= self.floor)

    def problems(self, theta: Theta, statistics: Mapping[str, Tensor]) -> list[str]:
        """Warn about columns whose noise variance is at the floor."""
        held = (self.standard(theta)[1] <= AT_FLOOR * self.floor).nonzero()[:, 0].tolist()
        if not held:
            return []
        which = f"column{'s' * (len(held) > 1)} {', '.join(map(str, held))}"
        return [
            f"The state of {self!r} explains {which} completely: the noise is held at {self.floor:g} of the data's "
            "variance. Try a smaller state."
        ]


@dataclass
class Path:
    """Results of the filter per step: p_t and m_t (n, k); P_t and V_t (n, k, k), or (1, k, k) if they are equal."""

    predicted: list[Tensor]
    spread: list[Tensor]
    mean: list[Tensor]
    covariance: list[Tensor]


def smoothed(transition: Tensor, path: Path) -> tuple[Tensor, Tensor, Tensor]:
    """s_t (n, T, k), S_t (n, T, k, k) and Cov[z_{t+1}, z_t | y] (n, T - 1, k, k)."""
    means, spreads, crosses = [path.mean[-1]], [path.covariance[-1]], []
    for t in range(len(path.mean) - 2, -1, -1):
        ahead = path.spread[t + 1]
        gain = torch.linalg.solve(ahead, transition @ path.covariance[t]).mT  # J_t
        step = (gain @ (means[-1] - path.predicted[t + 1])[..., None])[..., 0]
        crosses.append(spreads[-1] @ gain.mT)
        spreads.append(path.covariance[t] + gain @ (spreads[-1] - ahead) @ gain.mT)
        means.append(path.mean[t] + step)
    mean, spread = torch.stack(means[::-1], 1), torch.stack(spreads[::-1], 1)
    cross = torch.stack(crosses[::-1], 1) if crosses else spread[:, :0]
    return mean, spread.expand(len(mean), *spread.shape[1:]), cross.expand(len(mean), *cross.shape[1:])


def bordered(second: Tensor, mean: Tensor) -> Tensor:
    """E[(z, 1)(z, 1)'], (..., k + 1, k + 1), from E[z z'] and E[z]."""
    top = torch.cat([second, mean[..., None]], -1)
    low = torch.cat([mean, torch.ones_like(mean[..., :1])], -1)
    return torch.cat([top, low[..., None, :]], -2)


def gaussian(squares: Tensor, spread: Tensor, count: Tensor) -> Tensor:
    """The sum of `count` log N(x; 0, spread), from the sum of x x'."""
    log_det = torch.logdet(spread)
    return -0.5 * (torch.linalg.solve(spread, squares).diagonal().sum() + count * (log_det + len(spread) * LOG_TAU))


def symmetric(matrix: Tensor) -> Tensor:
    """Return the symmetric part of a matrix, which removes rounding errors."""
    return (matrix + matrix.mT) / 2


def columns(y: Tensor) -> Tensor:
    """Sequences as (n, T, D)."""
    return y[..., None] if y.ndim == 2 else y
