"""The edge of chaos: variances of weights and biases at which a deep network passes its inputs on (Poole et al. 2016;
Schoenholz et al. 2017, "Deep Information Propagation").

In a wide random network with weights N(0, sigma_w^2 / P) and biases N(0, sigma_b^2), the variance q of a unit's input
and the correlation c of two inputs go from layer to layer by

    q <- V(q) = sigma_w^2 E[phi(sqrt(q) z)^2] + sigma_b^2,        c <- (sigma_w^2 E[phi(u1) phi(u2)] + sigma_b^2) / q

with z standard normal and u1, u2 normal of variance q and correlation c. Near c = 1 a difference is multiplied by
chi = sigma_w^2 E[phi'(sqrt(q) z)^2] a layer: it dies out below 1 (order), grows above (chaos), and at 1 a network is
trainable at any depth. The curve chi = 1 needs no search when q is its parameter:

    sigma_w^2 = 1 / E[phi'(sqrt(q) z)^2],        sigma_b^2 = q - sigma_w^2 E[phi(sqrt(q) z)^2].

The fixed point q must hold: V'(q) = sigma_w^2 E[phi phi' z] / sqrt(q) may not exceed 1. Swish and GELU fail that.
Expectations are Gauss-Legendre panels that end at zero and wherever phi' jumps, as a hard tanh's does at -1 and 1. ReLU
has the single point (sqrt(2), 0), which is He's initialisation. The theory takes the inputs of units as Gaussian, which
is right for wide layers only (Wolinski and Arbel 2022, "Gaussian Pre-Activations in Neural Networks: Myth or
Reality?").
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
USUAL_BIAS = 0.05  # sigma_b where the curve leaves a choice and none is made
REACH, PANELS, POINTS = 12.0, 48, 20  # of the quadrature: standard deviations, panels (zero is an edge), points in each
LEAST, MOST, TRIED = 1e-8, 1e4, 121  # the lengths q among which a point of the curve is looked for
STABLE = 1 + 1e-9  # V' of ReLU is 1 but for rounding
REACHED, APART, HALVINGS = 32.0, 4096, 40  # where jumps of a slope are looked for: up to there, in so many intervals
JUMP = 1e-6  # of a slope within 1e-14: no smooth function has one
LAYERS = 100_000  # of the maps, before a fixed point that is not reached is given up


@dataclass(frozen=True)
class EdgeOfChaos:
    """A point of the curve: weights of variance sigma_w^2 / fan-in, biases of variance sigma_b^2.

    It is a prior for a Model, and a variance for `penalties.layer_factors`. `q` is the variance of a unit's input, and
    `slope` is V'(q): what is left of a deviation from q a layer later. Where sigma_b is 0, no Gaussian is that narrow,
    and biases keep the N(0, 1) of the other rules: `edge_of_chaos("relu")` is the prior "he".
    """

    activation: str
    sigma_w: float
    sigma_b: float
    q: float
    slope: float

    def __call__(self, fan_in: int, fan_out: int) -> float:
        """The variance of a weight, as a scale rule."""
        return self.sigma_w**2 / fan_in

    @property
    def bias_variance(self) -> float:
        """The variance of a bias, 1 where the curve has none."""
        return self.sigma_b**2 or 1.0

    def beliefs(self, net: nn.Module, dtype: torch.dtype) -> dict[str, Normal]:
        """The prior of each trainable parameter of a network."""
        return by_rule(self, net, dtype)


@dataclass(frozen=True)
class Propagation:
    """How far a wide random network carries the length and the correlation of its inputs.

    `q` and `correlation` are where the maps come to rest, `chi` is the slope of the correlation's map at 1. A
    deviation from q falls by a factor e in `length_depth` layers, one from the correlation in `correlation_depth`.
    """

    q: float
    chi: float
    correlation: float
    length_depth: float
    correlation_depth: float


def edge_of_chaos(activation: str | Activation | nn.Module, bias: float | None = None) -> EdgeOfChaos:
    """The point of the edge of chaos with biases of standard deviation `bias`.

    `activation` is "relu", "tanh", "erf", "elu", "softsign", or any function of a tensor that acts on each entry, or
    such a module. Without `bias` it is 0.05, or 0 where the curve is a single point, as for ReLU. An activation whose
    lengths run away there is refused.

    >>> point = edge_of_chaos("tanh", bias=0.2)
    >>> round(point.sigma_w, 4), round(point.q, 3)
    (1.3041, 0.512)
    """
    phi, name = read_activation(activation, "edge_of_chaos")
    jumps = _jumps(phi)
    ok = bias is None or (isinstance(bias, (int, float)) and not isinstance(bias, bool) and 0 <= bias < math.inf)
    require(ok, "bias", "edge_of_chaos", "be a standard deviation, 0 or above", repr(bias))
    grid = torch.logspace(math.log10(LEAST), math.log10(MOST), TRIED, dtype=torch.float64).tolist()
    squares = [_curve(phi, q, jumps)[1] for q in grid]
    if all(abs(square) <= 1e-9 * q for square, q in zip(squares, grid, strict=True)):
        require(not bias, "bias", "edge_of_chaos", f"be 0 for {name}, whose edge is a single point", bias)
        return _point(phi, name, 1.0, 0.0, jumps)
    wanted = (USUAL_BIAS if bias is None else bias) ** 2
    if bias == 0 and abs(float(phi(torch.zeros(1, dtype=torch.float64)))) < 1e-12:
        found = [_point(phi, name, LEAST, 0.0, jumps)]
    else:
        found = [
            _point(phi, name, _root(phi, low, high, wanted, jumps), math.sqrt(wanted), jumps)
            for low, high, a, b in zip(grid, grid[1:], squares, squares[1:], strict=False)
            if (a - wanted) * (b - wanted) <= 0
        ]
    found = [point for point in found if math.isfinite(point.sigma_w)]
    require(bool(found), "bias", "edge_of_chaos", f"be one that the edge of {name} reaches", math.sqrt(wanted))
    steady = [point for point in found if point.slope <= STABLE]
    if not steady:
        raise InputError(
            f"The 'activation' argument of edge_of_chaos must keep the length of its inputs at the edge, got "
            f"{name}: at "
            f"bias {math.sqrt(wanted):g} a deviation from q = {found[0].q:.3g} grows by {found[0].slope:.2f} a layer."
        )
    return steady[0]


def propagation(activation: str | Activation | nn.Module, sigma_w: float, sigma_b: float) -> Propagation:
    """Where q and c come to rest for weights N(0, sigma_w^2 / P) and biases N(0, sigma_b^2), and how fast.

    >>> round(propagation("tanh", 1.0, 0.3).correlation_depth, 3)
    2.807
    """
    phi, name = read_activation(activation, "propagation")
    for key, value, low in (("sigma_w", sigma_w, "above 0"), ("sigma_b", sigma_b, "from 0")):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        ok = number and (value > 0 if key == "sigma_w" else value >= 0) and value < math.inf
        require(ok, key, "propagation", f"be a standard deviation {low}", repr(value))
    jumps = _jumps(phi)
    q = _rest(lambda q: sigma_w**2 * float(_moments(phi, q, jumps)[0]) + sigma_b**2, 1.0)
    if q is None or not LEAST < q < MOST:
        raise InputError(
            f"The 'sigma_w' argument of propagation must give {name} a length that stays, got {sigma_w:g} with "
            f"sigma_b = "
            f"{sigma_b:g}: the variance of a unit's input goes to zero or to infinity."
        )
    _, slope, bend = (float(m) for m in _moments(phi, q, jumps))
    chi = sigma_w**2 * slope
    correlation, rate = 1.0, chi
    if chi > STABLE:  # chaos: neighbours part, and the map has another point of rest, with a slope of its own
        rest = _rest(lambda c: (sigma_w**2 * _pair(phi, q, c) + sigma_b**2) / q, 0.5)
        correlation = 1.0 if rest is None else rest
        rate = sigma_w**2 * _pair(functools.partial(_slope, phi), q, correlation)
    return Propagation(q, chi, correlation, _depth(sigma_w**2 * bend), _depth(rate))


def read_activation(activation: Any, owner: str) -> tuple[Activation, str]:
    """A function of a tensor and its name, tried once."""
    if isinstance(activation, str):
        known = activation in ACTIVATIONS
        named = ", ".join(ACTIVATIONS)
        require(known, "activation", owner, f"be one of {named}, or a function", repr(activation))
        return ACTIVATIONS[activation], activation
    if not callable(activation) or isinstance(activation, type):
        raise InputError(
            f"The 'activation' argument of {owner} must be one of {', '.join(ACTIVATIONS)}, or a function, got "
            f"{activation!r} "
            "."
        )
    name = getattr(activation, "__name__", type(activation).__name__)
    trial = torch.linspace(-1, 1, 5, dtype=torch.float64)
    try:
        found = activation(trial)
        ok = isinstance(found, Tensor) and found.shape == trial.shape and bool(torch.isfinite(found).all())
        got = f"{name} with another shape or a value that is not finite"
    except Exception as error:
        ok, got = False, f"{name}, which raised {type(error).__name__}: {error}"
    require(ok, "activation", owner, "take a tensor to one of its shape, entry by entry", got)
    return activation, name  # pyright: ignore[reportReturnType] - it was just tried


# The curve.


def _curve(phi: Activation, q: float, jumps: Tensor) -> tuple[float, float, float]:
    """sigma_w^2, sigma_b^2 and V'(q) where chi is 1 at this length."""
    square, slope, bend = (float(m) for m in _moments(phi, q, jumps))
    weights = 1 / slope if slope > 0 else math.inf
    return weights, q - weights * square, weights * bend


def _point(phi: Activation, name: str, q: float, sigma_b: float, jumps: Tensor) -> EdgeOfChaos:
    weights, _, slope = _curve(phi, q, jumps)
    return EdgeOfChaos(name, math.sqrt(weights), sigma_b, q, slope)


def _root(phi: Activation, low: float, high: float, wanted: float, jumps: Tensor) -> float:
    """The length between two others at which sigma_b^2 is as wanted, by bisection of its logarithm."""
    low, high = math.log(low), math.log(high)
    falls = _curve(phi, math.exp(low), jumps)[1] > wanted
    for _ in range(46):  # a grid's step over 2^46 is a rounding error
        middle = (low + high) / 2
        if (_curve(phi, math.exp(middle), jumps)[1] > wanted) == falls:
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)


def _rest(move: Callable[[float], float], start: float) -> float | None:
    """Where a map that is iterated comes to rest, as layers iterate it."""
    at = start
    for _ in range(LAYERS):
        following = move(at)
        if not math.isfinite(following) or following > 1e12:
            return None
        if abs(following - at) <= 1e-13 * max(abs(at), 1e-3):
            return following
        at = following
    return None


def _depth(rate: float) -> float:
    """In how many layers a deviation falls by a factor e when a layer multiplies it by this."""
    return math.inf if abs(rate) >= 1 else -1 / math.log(abs(rate)) if rate else 0.0


# Gaussian expectations, by Gauss-Legendre panels that meet where activations have their corners.


def _jumps(phi: Activation) -> Tensor:
    """Where the slope of an activation jumps, other than at zero: intervals, halved towards the larger change."""
    edges = torch.linspace(-REACHED, REACHED, APART + 1, dtype=torch.float64)
    low, high = edges[:-1], edges[1:]
    left, right = _slope(phi, low), _slope(phi, high)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        between = _slope(phi, middle)
        first = (between - left).abs() > (right - between).abs()
        low, left = torch.where(first, low, middle), torch.where(first, left, between)
        high, right = torch.where(first, middle, high), torch.where(first, between, right)
    found = ((low + high) / 2)[(right - left).abs() > JUMP]
    return found[found.abs() > 1e-9].unique()


@functools.lru_cache(maxsize=2)
def _edges(panels: int) -> Tensor:
    return torch.linspace(-REACH, REACH, panels + 1, dtype=torch.float64)


def _normal(edges: Tensor, points_each: int = POINTS) -> tuple[Tensor, Tensor]:
    """Points z and weights that integrate against a standard normal, panel by panel."""
    points, weights = legendre(points_each)
    half = (edges[1:] - edges[:-1])[:, None] / 2
    z = (edges[:-1, None] + half + half * points).reshape(-1)
    return z, (weights * half).reshape(-1) * torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)


def _slope(phi: Activation, x: Tensor) -> Tensor:
    """phi'(x), entry by entry."""
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(phi(leaf).sum(), leaf)
    return slope


def _moments(phi: Activation, q: float, jumps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """E[phi^2], E[phi'^2] and d E[phi^2] / dq at the length q."""
    own = jumps / math.sqrt(q)
    z, weights = _normal(torch.cat([_edges(PANELS), own[own.abs() < REACH]]).sort().values)
    x = math.sqrt(q) * z
    with torch.no_grad():
        value = phi(x)
    slope = _slope(phi, x)
    return weights @ value.square(), weights @ slope.square(), weights @ (value * slope * z) / math.sqrt(q)


def _pair(function: Activation, q: float, c: float) -> float:
    """E[f(u1) f(u2)] for normal u1, u2 of variance q and correlation c."""
    z, weights = _normal(_edges(16), 12)
    mixed = c * z[:, None] + math.sqrt(max(0.0, 1 - c * c)) * z
    inner = function(math.sqrt(q) * mixed.reshape(-1)).reshape(mixed.shape) @ weights  # (points,), over u2 given u1
    return float(weights @ (function(math.sqrt(q) * z) * inner))
