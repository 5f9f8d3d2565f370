"""A torch distribution for each parameter, over the support of the parameter: q(x) = prod_j q_j(x_j).

Draws x by `rsample` are mapped to the unconstrained coordinates u of the flat vector, x = f(u):

    u = f^-1(x),    log q(u) = sum_j log q_j(x_j) + log |det df/du|

theta holds the arguments of the distributions in unconstrained coordinates, such as the logarithm of a concentration.
A parameter without a named distribution has independent normals in unconstrained coordinates.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, distributions
from torch.distributions import Distribution, constraints

from priory.constraints import Bijector, bijector
from priory.core.errors import InputError, require
from priory.core.flat import Block, Layout
from priory.core.loaders import swapped
from priory.core.streams import stream
from priory.families.base import Family, Form

if TYPE_CHECKING:
    from collections.abc import Iterator

CLASS_NAME = "PerParameterForm"
# Arguments of torch distributions that are alternatives to another argument.
ALTERNATIVE_ARGUMENTS = ("covariance_matrix", "precision_matrix", "probs")
EXTREME_COORDINATE = 1e4  # an unconstrained coordinate at which every support has reached its end
NUM_FIT_POINTS = 256  # draws of the initial Gaussian to which each distribution is fitted
# Smallest initial scale of a named distribution: at concentrations of thousands some lose precision, and all are slow.
MIN_INITIAL_SCALE = 0.1


@dataclass(frozen=True, eq=False)
class Factor:
    """The distribution of one parameter: its class, and the maps from unconstrained values to its arguments."""

    block: Block
    made: Any  # a class of torch.distributions
    arguments: dict[str, Bijector]
    free: bool  # whether it is over the unconstrained coordinates u instead of x

    @property
    def sizes(self) -> list[int]:
        """The number of entries of theta for each argument."""
        return [math.prod(b.free_shape) for b in self.arguments.values()]

    @property
    def narrowest(self) -> float:
        """The smallest initial standard deviation, in unconstrained coordinates."""
        return 0.0 if self.free else MIN_INITIAL_SCALE

    def distribution(self, theta: Tensor) -> Distribution:
        """Return the distribution with parameters theta (*B, k), of batch and event shape (*B, ...)."""
        parts = torch.split(theta, self.sizes, -1)
        values = {
            name: b.forward(part.unflatten(-1, b.free_shape) if b.free_shape else part.squeeze(-1))
            for (name, b), part in zip(self.arguments.items(), parts, strict=True)
        }
        return self.made(**values, validate_args=False)

    def draw(self, theta: Tensor, n: int) -> Tensor:
        """Return u of n draws, (n, *B, k), using torch's global generator."""
        x = self.distribution(theta).rsample(torch.Size([n]))
        u = x if self.free else self.block.bijector.inverse(self._inside(x))
        return u.reshape(n, *theta.shape[:-1], self.block.stop - self.block.start)

    def log_prob(self, theta: Tensor, w: Tensor) -> Tensor:
        """Return log q(u) of this parameter's coordinates u in w: (..., *B, P) -> (..., *B)."""
        distribution = self.distribution(theta)
        if self.free:
            return distribution.log_prob(w[..., self.block.start : self.block.stop]).sum(-1)
        u = self.block.free(w)
        x = self.block.bijector.forward(u)
        value = distribution.log_prob(x)
        copies = value.ndim - (w.ndim - 1)
        return (value.flatten(-copies).sum(-1) if copies else value) + self.block.bijector.log_det(u, x)

    def _inside(self, x: Tensor) -> Tensor:
        """Move x off the ends of its support, where rounding may have put it and u would be infinite."""
        if self.block.bijector.identity:
            return x
        if not self.block.bijector.elementwise:
            return x.clamp(min=torch.finfo(x.dtype).tiny)  # a simplex, the only such support with a torch distribution
        far = torch.full_like(x, EXTREME_COORDINATE)
        ends = torch.stack([self.block.bijector.forward(far), self.block.bijector.forward(-far)])
        ends = ends.clamp(torch.finfo(x.dtype).min, torch.finfo(x.dtype).max)
        return torch.minimum(torch.maximum(x, ends.amin(0)), ends.amax(0))


@dataclass(frozen=True, eq=False)
class PerParameter(Family):
    """Product of torch distributions, one per parameter.

    Args:
        form: The class of each distribution, and the layout.
        theta: Arguments of the distributions in unconstrained coordinates, (*B, K).
    """

    form: PerParameterForm
    theta: Tensor

    @property
    def size(self) -> int:
        return self.form.size

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        members = self.theta.reshape(-1, self.form.length)
        # a gamma uses a number of random values that depends on its arguments: separate generators decouple members
        seeds = torch.randint(2**62, (len(members),), generator=generator, device=self.theta.device).tolist()
        w = [self._draw(member, n, seed) for member, seed in zip(members, seeds, strict=True)]
        return torch.stack(w, 1).reshape(n, *self.theta.shape[:-1], self.size)

    def log_prob(self, w: Tensor) -> Tensor:
        values = [factor.log_prob(part, w) for factor, part in self._parts()]
        return torch.stack(values).sum(0)

    def distributions(self) -> dict[str, Distribution]:
        """Return the distribution of each parameter by name."""
        return {factor.block.name: factor.distribution(part) for factor, part in self._parts()}

    def _draw(self, theta: Tensor, n: int, seed: int) -> Tensor:
        """n draws (n, P) of the member with parameters theta (K,)."""
        with swapped(stream(seed, "member")):
            parts = zip(self.form.factors, self.form.split(theta), strict=True)
            return torch.cat([factor.draw(part, n) for factor, part in parts], -1)

    def _parts(self) -> Iterator[tuple[Factor, Tensor]]:
        """Each factor with its part of theta."""
        return zip(self.form.factors, self.form.split(self.theta), strict=True)


@dataclass(frozen=True, eq=False)
class PerParameterForm(Form):
    """Parametrisation of a product of torch distributions, theta = [the arguments of each distribution].

    Args:
        classes: Names of classes in `torch.distributions` by parameter name. Other parameters have independent normals
            in unconstrained coordinates.
        layout: Layout of the flat vector.

    Raises:
        InputError: If a class is unknown, cannot be drawn by `rsample`, or does not have the support of its parameter.

    Example:
        >>> from priory.core.flat import Param
        >>> layout = Layout({"p": Param((), constraints.unit_interval), "m": Param((3,))})
        >>> PerParameterForm({"p": "Beta"}, layout).length
        8
    """

    kind: ClassVar[str] = "per_parameter"
    size: int = field(init=False)
    classes: dict[str, str]
    layout: Layout

    def __post_init__(self) -> None:
        require(isinstance(self.layout, Layout), "layout", CLASS_NAME, "be a Layout", type(self.layout).__name__)
        named = isinstance(self.classes, Mapping)
        require(named, "classes", CLASS_NAME, "be a dict from parameter names to class names", self.classes)
        unknown = [name for name in self.classes if name not in self.layout.names]
        require(not unknown, "classes", CLASS_NAME, f"name parameters among {', '.join(self.layout.names)}", unknown)
        object.__setattr__(self, "classes", dict(self.classes))
        object.__setattr__(self, "size", self.layout.size)
        _ = self.factors

    @cached_property
    def factors(self) -> tuple[Factor, ...]:
        """The factors in the order of the layout."""
        return tuple(
            named_factor(block, self.classes[block.name]) if block.name in self.classes else free_normal(block)
            for block in self.layout.blocks
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(sum(factor.sizes) for factor in self.factors)

    def describe(self) -> dict[str, Any]:
        return {"kind": self.kind, "classes": self.classes}

    @classmethod
    def of(cls, description: Mapping[str, Any], layout: Layout) -> PerParameterForm:
        return cls(**description, layout=layout)

    def initial(self, loc: Tensor, scale: Tensor, generator: torch.Generator) -> Tensor:
        """Return the theta that maximises the expected log density under N(loc, scale^2) in unconstrained coordinates.

        The expectation is over points with exactly this mean and these standard deviations, so normals (and log-normals
        of positive parameters) start with both exactly; other distributions start as close as they can. For named
        classes, standard deviations below 0.1 are raised to 0.1.
        """
        least = torch.cat([scale.new_full((f.block.stop - f.block.start,), f.narrowest) for f in self.factors])
        spread = self.expanded_scale(loc, scale).maximum(least.to(loc))
        shape = (NUM_FIT_POINTS, *loc.shape)
        noise = torch.randn(shape, generator=generator, dtype=loc.dtype, device=loc.device).double()
        noise = (noise - noise.mean(0)) / noise.std(0, correction=0)
        points = (loc + spread * noise).detach().reshape(NUM_FIT_POINTS, -1, self.size)
        thetas = [self._fit(points[:, member]) for member in range(points.shape[1])]
        return torch.stack(thetas).reshape(*loc.shape[:-1], self.length).to(loc)

    def family(self, theta: Tensor) -> PerParameter:
        self.split(theta)
        return PerParameter(self, theta)

    def _fit(self, points: Tensor) -> Tensor:
        """The theta (K,) of one member, fitted to points (n, P) one parameter at a time."""
        return torch.cat([fit_factor(factor, points) for factor in self.factors])


def free_normal(block: Block) -> Factor:
    """Return independent normals over the unconstrained coordinates of a parameter."""
    shape = (block.stop - block.start,)
    arguments = {"loc": bijector(constraints.real, shape), "scale": bijector(constraints.positive, shape)}
    return Factor(block, distributions.Normal, arguments, free=True)


def named_factor(block: Block, name: str) -> Factor:
    """Return the factor of a named class, which must have `rsample` and the support of the parameter."""
    made: Any = getattr(distributions, name, None) if isinstance(name, str) else None
    known = isinstance(made, type) and issubclass(made, Distribution)
    require(known, "classes", CLASS_NAME, f"name a class in torch.distributions for '{block.name}'", repr(name))
    must = f"name a distribution for '{block.name}' with the same support"
    support: Any = made.support
    require(same_support(support, block), "classes", CLASS_NAME, must, name)
    extra, parameters = support.event_dim, inspect.signature(made).parameters
    must = f"name a distribution for '{block.name}' whose arguments have constraints and the shape of its draws"
    # for some classes arg_constraints is a property of the instance
    declared = made.arg_constraints if isinstance(made.arg_constraints, dict) else {}
    kept = {key: c for key, c in declared.items() if key in parameters and key not in ALTERNATIVE_ARGUMENTS}
    required = {key for key, p in parameters.items() if p.default is inspect.Parameter.empty}
    ok = required <= {*kept, *ALTERNATIVE_ARGUMENTS} and all(c.event_dim >= extra for c in kept.values())
    require(bool(kept) and ok, "classes", CLASS_NAME, must, name)
    arguments = {key: bijector(c, argument_shape(block, c, extra)) for key, c in kept.items()}
    factor = Factor(block, made, arguments, free=False)
    example = factor.distribution(torch.zeros(sum(factor.sizes)))
    must = f"name a distribution for '{block.name}' that implements rsample"
    require(example.has_rsample, "classes", CLASS_NAME, must, name)
    return factor


def argument_shape(block: Block, constraint: constraints.Constraint, event_dim: int) -> tuple[int, ...]:
    """Return the shape of an argument: that of a draw, plus any extra dimensions of its constraint (for a matrix)."""
    more = constraint.event_dim - event_dim
    return (*block.shape, *block.shape[len(block.shape) - more :])


def same_support(support: Any, block: Block) -> bool:
    """Whether this support equals that of the parameter for all values of the arguments."""
    if constraints.is_dependent(support):
        return False
    try:
        given = bijector(support, block.shape)
    except InputError:
        return False
    wanted = block.bijector
    bounds = {name: (getattr(given, name), getattr(wanted, name, None)) for name in vars(given)}
    numbers = {name: pair for name, pair in bounds.items() if isinstance(pair[0], (int, float))}
    return type(given) is type(wanted) and all(
        other is not None and bool((torch.as_tensor(other) == one).all()) for one, other in numbers.values()
    )


def fit_factor(factor: Factor, points: Tensor) -> Tensor:
    """Return the theta that maximises the mean log density at points (n, P), in float64, by L-BFGS from zero.

    Normals have a closed form. If the search diverges, the best point that it has visited is returned.
    """
    if factor.free:
        u = points[:, factor.block.start : factor.block.stop]
        return torch.cat([u.mean(0), u.std(0, correction=0).log()])
    best, lowest = points.new_zeros(sum(factor.sizes)), math.inf
    theta = best.clone().requires_grad_()
    search = torch.optim.LBFGS([theta], max_iter=200, history_size=20, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        nonlocal best, lowest
        search.zero_grad()
        value = -factor.log_prob(theta, points).mean()
        value.backward()
        if value.item() < lowest:
            best, lowest = theta.detach().clone(), value.item()
        return value

    with torch.enable_grad():
        search.step(loss)
    return best
