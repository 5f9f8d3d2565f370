"""The edge of chaos: variances of weights and biases at which a signal can propagate through a deep network.

In a wide random network with weights N(0, sigma_w^2 / P) and biases N(0, sigma_b^2), the variance q of a unit's
pre-activation and the correlation c of the pre-activations of two inputs change from layer to layer by

    q <- V(q) = sigma_w^2 E[phi(sqrt(q) z)^2] + sigma_b^2,        c <- (sigma_w^2 E[phi(u1) phi(u2)] + sigma_b^2) / q

with z standard normal and u1, u2 normal with variance q and correlation c. Near c = 1, each layer multiplies a
difference by chi = sigma_w^2 E[phi'(sqrt(q) z)^2]. It vanishes for chi < 1 (order) and grows for chi > 1 (chaos). At
chi = 1, networks of any depth are trainable. The curve chi = 1 needs no search if it is parametrised by q:

    sigma_w^2 = 1 / E[phi'(sqrt(q) z)^2],        sigma_b^2 = q - sigma_w^2 E[phi(sqrt(q) z)^2].

The fixed point q must be stable: V'(q) = sigma_w^2 E[phi phi' z] / sqrt(q) may not exceed 1. Swish and GELU violate
this. Expectations use Gauss-Legendre panels with edges at zero and wherever phi' jumps, such as at -1 and 1 for a hard
tanh. ReLU has the single point (sqrt(2), 0), which is He's initialisation.

The theory assumes Gaussian pre-activations, which holds for wide layers only (Wolinski and Arbel 2022, "Gaussian
Pre-Activations in Neural Networks: Myth or Reality?").

References:
    Poole et al. (2016), Exponential expressivity in deep neural networks through transient chaos.
    Schoenholz et al. (2017), Deep information propagation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from priory.core.errors import InputError, require
from priory.core.special import legendre
from priory.priors.rules import by_rule

if TYPE_CHECKING:
    from torch.distributions import Normal

Activation = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Activation] = {
    "relu": functional.relu,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "elu": functional.elu,
    "softsign": functional.softsign,
    "swish": functional.silu,
    "gelu": functional.gelu,
}
DEFAULT_SIGMA_B = 0.05  # if the curve leaves a choice
QUADRATURE_REACH = 12.0  # in standard deviations
QUADRATURE_PANELS = 48  # zero is a panel edge
POINTS_PER_PANEL = 20
MIN_Q, MAX_Q = 1e-8, 1e4  # range in which points of the curve are searched
Q_GRID_SIZE = 121
MAX_STABLE_SLOPE = 1 + 1e-9  # V' of ReLU is 1 up to rounding
JUMP_SEARCH_REACH = 32.0  # jumps of the slope are searched in [-32, 32]
JUMP_SEARCH_INTERVALS = 4096
JUMP_SEARCH_HALVINGS = 40
MIN_SLOPE_JUMP = 1e-6  # change of the slope within 1e-14, which no smooth function reaches
MAX_ITERATIONS = 100_000  # of a map, before its fixed point is given up


@dataclass(frozen=True)
class EdgeOfChaos:
    """A point of the edge of chaos: weights of variance sigma_w^2 / fan-in, biases of variance sigma_b^2.

    It is accepted as the prior of a `Model`, and as the `variance` of `penalties.layer_factors`. If sigma_b is 0,
    biases keep the N(0, 1) of the other rules, so `edge_of_chaos("relu")` is the prior "he".

    Attributes:
        activation: Name of the activation function.
        sigma_w: Standard deviation of the weights, times the square root of the fan-in.
        sigma_b: Standard deviation of the biases.
        q: Variance of a unit's pre-activation at the fixed point.
        slope: V'(q), the factor by which a layer multiplies a deviation from q.
    """

    activation: str
    sigma_w: float
    sigma_b: float
    q: float
    slope: float

    def __call__(self, fan_in: int, fan_out: int) -> float:
        """Return the variance of a weight, as a scale rule.

        Args:
            fan_in: Number of inputs of a unit.
            fan_out: Number of outputs that an input feeds; not used.
        """
        return self.sigma_w**2 / fan_in

    @property
    def bias_variance(self) -> float:
        """Variance of the prior of a bias; 1 if sigma_b is 0."""
        return self.sigma_b**2 or 1.0

    def priors_of(self, net: nn.Module, dtype: torch.dtype) -> dict[str, Normal]:
        """Return the prior of each trainable parameter, by name.

        Args:
            net: The network.
            dtype: Data type of the priors' tensors.
        """
        return by_rule(self, net, dtype)


@dataclass(frozen=True)
class Propagation:
    """Propagation of the variance and the correlation of pre-activations through a wide random network.

    Attributes:
        q: Fixed point of the variance.
        chi: Slope of the correlation's map at correlation 1.
        correlation: Stable fixed point of the correlation.
        length_depth: Number of layers in which a deviation from q decreases by a factor of e.
        correlation_depth: Number of layers in which a deviation from the fixed correlation decreases by a factor of e.
    """

    q: float
    chi: float
    correlation: float
    length_depth: float
    correlation_depth: float


def edge_of_chaos(activation: str | Activation | nn.Module, bias: float | None = None) -> EdgeOfChaos:
    """Return the point of the edge of chaos for an activation function and a standard deviation of the biases.

    Args:
        activation: "relu", "tanh", "erf", "elu" or "softsign", or any elementwise function of a tensor, or such a
            module.
        bias: Standard deviation sigma_b of the biases. Default: None, which is 0.05, or 0 if the curve is a single
            point, as for ReLU.

    Returns:
        An `EdgeOfChaos`, which can be used as a prior.

    Raises:
        InputError: If the variance of the pre-activations is not stable there, as for Swish and GELU, or if no point of
            the curve has this sigma_b.

    Example:
        >>> point = edge_of_chaos("tanh", bias=0.2)
        >>> round(point.sigma_w, 4), round(point.q, 3)
        (1.3041, 0.512)

    References:
        Poole et al. (2016), Exponential expressivity in deep neural networks through transient chaos.
        Schoenholz et al. (2017), Deep information propagation.
    """
    phi, name = read_activation(activation, "edge_of_chaos")
    jumps = _find_slope_jumps(phi)
    ok = bias is None or (isinstance(bias, (int, float)) and not isinstance(bias, bool) and 0 <= bias < math.inf)
    require(ok, "bias", "edge_of_chaos", "be a standard deviation >= 0", repr(bias))
    grid = torch.logspace(math.log10(MIN_Q), math.log10(MAX_Q), Q_GRID_SIZE, dtype=torch.float64).tolist()
    squares = [_variances_at_edge(phi, q, jumps)[1] for q in grid]
    if all(abs(square) <= 1e-9 * q for square, q in zip(squares, grid, strict=True)):
        require(not bias, "bias", "edge_of_chaos", f"be 0 for {name}, whose edge of chaos is a single point", bias)
        return _point(phi, name, 1.0, 0.0, jumps)
    wanted = (DEFAULT_SIGMA_B if bias is None else bias) ** 2
    if bias == 0 and abs(float(phi(torch.zeros(1, dtype=torch.float64)))) < 1e-12:
        found = [_point(phi, name, MIN_Q, 0.0, jumps)]
    else:
        found = [
            _point(phi, name, _solve_for_q(phi, low, high, wanted, jumps), math.sqrt(wanted), jumps)
            for low, high, a, b in zip(grid, grid[1:], squares, squares[1:], strict=False)
            if (a - wanted) * (b - wanted) <= 0
        ]
    found = [point for point in found if math.isfinite(point.sigma_w)]
    require(
        bool(found), "bias", "edge_of_chaos", f"be a value that the edge of chaos of {name} reaches", math.sqrt(wanted)
    )
    stable = [point for point in found if point.slope <= MAX_STABLE_SLOPE]
    if not stable:
        raise InputError(
            f"The 'activation' argument of edge_of_chaos must have a stable variance q at the edge, got {name}: at "
            f"bias {math.sqrt(wanted):g} each layer multiplies a deviation from q = {found[0].q:.3g} by "
            f"{found[0].slope:.2f}."
        )
    return stable[0]


def propagation(activation: str | Activation | nn.Module, sigma_w: float, sigma_b: float) -> Propagation:
    """Compute the fixed points of variance and correlation in a wide random network, and how fast they are reached.

    Args:
        activation: Activation function, as in `edge_of_chaos`.
        sigma_w: The weights are N(0, sigma_w^2 / P) with P = fan-in.
        sigma_b: The biases are N(0, sigma_b^2).

    Returns:
        A `Propagation`.

    Raises:
        InputError: If the variance of the pre-activations goes to zero or to infinity.

    Example:
        >>> round(propagation("tanh", 1.0, 0.3).correlation_depth, 3)
        2.807
    """
    phi, name = read_activation(activation, "propagation")
    for key, value, low in (("sigma_w", sigma_w, "> 0"), ("sigma_b", sigma_b, ">= 0")):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        ok = number and (value > 0 if key == "sigma_w" else value >= 0) and value < math.inf
        require(ok, key, "propagation", f"be a standard deviation {low}", repr(value))
    jumps = _find_slope_jumps(phi)
    q = _fixed_point(lambda q: sigma_w**2 * float(_moments(phi, q, jumps)[0]) + sigma_b**2, 1.0)
    if q is None or not MIN_Q < q < MAX_Q:
        raise InputError(
            f"The 'sigma_w' argument of propagation must keep the variance of {name} networks finite, got {sigma_w:g} "
            f"with sigma_b = {sigma_b:g}: the variance of the pre-activations goes to zero or to infinity."
        )
    _, slope, variance_slope = (float(m) for m in _moments(phi, q, jumps))
    chi = sigma_w**2 * slope
    correlation, rate = 1.0, chi
    if chi > MAX_STABLE_SLOPE:  # chaos: neighbours separate, and the stable fixed point lies below 1
        rest = _fixed_point(lambda c: (sigma_w**2 * _pair_moment(phi, q, c) + sigma_b**2) / q, 0.5)
        correlation = 1.0 if rest is None else rest
        rate = sigma_w**2 * _pair_moment(functools.partial(_derivative, phi), q, correlation)
    return Propagation(q, chi, correlation, _depth(sigma_w**2 * variance_slope), _depth(rate))


def read_activation(activation: Any, owner: str) -> tuple[Activation, str]:
    """Return the activation as a function of a tensor and its name, after a trial call."""
    if isinstance(activation, str):
        known = activation in ACTIVATIONS
        named = ", ".join(ACTIVATIONS)
        require(known, "activation", owner, f"be one of {named}, or a function", repr(activation))
        return ACTIVATIONS[activation], activation
    if not callable(activation) or isinstance(activation, type):
        raise InputError(
            f"The 'activation' argument of {owner} must be one of {', '.join(ACTIVATIONS)}, or a function, got "
            f"{activation!r}."
        )
    name = getattr(activation, "__name__", type(activation).__name__)
    trial = torch.linspace(-1, 1, 5, dtype=torch.float64)
    try:
        found = activation(trial)
        ok = isinstance(found, Tensor) and found.shape == trial.shape and bool(torch.isfinite(found).all())
        got = f"{name} with another shape or a value that is not finite"
    except Exception as error:
        ok, got = False, f"{name}, which raised {type(error).__name__}: {error}"
    require(ok, "activation", owner, "map a tensor to a finite tensor of the same shape", got)
    return activation, name  # pyright: ignore[reportReturnType] - the trial call succeeded


# The curve chi = 1.


def _variances_at_edge(phi: Activation, q: float, jumps: Tensor) -> tuple[float, float, float]:
    """Return sigma_w^2, sigma_b^2 and V'(q) at the point of the curve chi = 1 with this q."""
    square, slope, variance_slope = (float(m) for m in _moments(phi, q, jumps))
    weights = 1 / slope if slope > 0 else math.inf
    return weights, q - weights * square, weights * variance_slope


def _point(phi: Activation, name: str, q: float, sigma_b: float, jumps: Tensor) -> EdgeOfChaos:
    """Return the point of the curve with this q."""
    weights, _, slope = _variances_at_edge(phi, q, jumps)
    return EdgeOfChaos(name, math.sqrt(weights), sigma_b, q, slope)


def _solve_for_q(phi: Activation, low: float, high: float, wanted: float, jumps: Tensor) -> float:
    """Return the q in [low, high] at which sigma_b^2 has the wanted value, by bisection of log q."""
    low, high = math.log(low), math.log(high)
    falls = _variances_at_edge(phi, math.exp(low), jumps)[1] > wanted
    for _ in range(46):  # the grid step divided by 2^46 is below rounding
        middle = (low + high) / 2
        if (_variances_at_edge(phi, math.exp(middle), jumps)[1] > wanted) == falls:
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)


def _fixed_point(move: Callable[[float], float], start: float) -> float | None:
    """Iterate a map from `start` until it converges; return None if it does not."""
    at = start
    for _ in range(MAX_ITERATIONS):
        following = move(at)
        if not math.isfinite(following) or following > 1e12:
            return None
        if abs(following - at) <= 1e-13 * max(abs(at), 1e-3):
            return following
        at = following
    return None


def _depth(rate: float) -> float:
    """Return the number of layers in which a deviation decreases by a factor of e, at `rate` per layer."""
    return math.inf if abs(rate) >= 1 else -1 / math.log(abs(rate)) if rate else 0.0


# Gaussian expectations, by Gauss-Legendre panels with edges at the corners of the activation.


def _find_slope_jumps(phi: Activation) -> Tensor:
    """Return the points other than zero where the slope jumps, by halving towards the larger change."""
    edges = torch.linspace(-JUMP_SEARCH_REACH, JUMP_SEARCH_REACH, JUMP_SEARCH_INTERVALS + 1, dtype=torch.float64)
    low, high = edges[:-1], edges[1:]
    left, right = _derivative(phi, low), _derivative(phi, high)
    for _ in range(JUMP_SEARCH_HALVINGS):
        middle = (low + high) / 2
        between = _derivative(phi, middle)
        first = (between - left).abs() > (right - between).abs()
        low, left = torch.where(first, low, middle), torch.where(first, left, between)
        high, right = torch.where(first, middle, high), torch.where(first, between, right)
    found = ((low + high) / 2)[(right - left).abs() > MIN_SLOPE_JUMP]
    return found[found.abs() > 1e-9].unique()


@functools.lru_cache(maxsize=2)
def _panel_edges(panels: int) -> Tensor:
    """Return equally spaced panel edges."""
    return torch.linspace(-QUADRATURE_REACH, QUADRATURE_REACH, panels + 1, dtype=torch.float64)


def _normal_quadrature(edges: Tensor, points_each: int = POINTS_PER_PANEL) -> tuple[Tensor, Tensor]:
    """Return nodes z and weights for expectations under a standard normal, on these panels."""
    points, weights = legendre(points_each)
    half = (edges[1:] - edges[:-1])[:, None] / 2
    z = (edges[:-1, None] + half + half * points).reshape(-1)
    return z, (weights * half).reshape(-1) * torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)


def _derivative(phi: Activation, x: Tensor) -> Tensor:
    """Return phi'(x), elementwise."""
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(phi(leaf).sum(), leaf)
    return slope


def _moments(phi: Activation, q: float, jumps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return E[phi^2], E[phi'^2] and d E[phi^2] / dq at the variance q."""
    corners = jumps / math.sqrt(q)
    z, weights = _normal_quadrature(
        torch.cat([_panel_edges(QUADRATURE_PANELS), corners[corners.abs() < QUADRATURE_REACH]]).sort().values
    )
    x = math.sqrt(q) * z
    with torch.no_grad():
        value = phi(x)
    slope = _derivative(phi, x)
    return weights @ value.square(), weights @ slope.square(), weights @ (value * slope * z) / math.sqrt(q)


def _pair_moment(function: Activation, q: float, c: float) -> float:
    """Return E[f(u1) f(u2)] for normal u1, u2 with variance q and correlation c."""
    z, weights = _normal_quadrature(_panel_edges(16), 12)
    mixed = c * z[:, None] + math.sqrt(max(0.0, 1 - c * c)) * z
    inner = function(math.sqrt(q) * mixed.reshape(-1)).reshape(mixed.shape) @ weights  # (points,), over u2 given u1
    return float(weights @ (function(math.sqrt(q) * z) * inner))
