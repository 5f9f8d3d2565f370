"""The prior of a density, given as one distribution per parameter.

    log p(x) = sum_k log p(x_k | x_1, ..., x_{k-1})

Each factor is a distribution, or a function of the parameters before it that returns one. The log density is the sum,
and draws are made one parameter after the other, without a sampler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from priory.constraints import bijector
from priory.core.errors import InputError, require
from priory.models.supports import support_of
from priory.network.map_draws import DrawMap, seeded
from priory.priors.base import fitting, flattens, moved

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from priory.core.flat import Block, Layout

    Factor = Distribution | Callable[[dict[str, Tensor]], Distribution]

BOUND_TOLERANCE = 1e-6  # relative difference of two bounds that counts as rounding, as that of 0.1 in float32


class NamedPrior:
    """A log prior from distributions by name: call it for the log density, or draw from it.

    Args:
        factors: For each parameter a distribution, or a function from a dict of the parameters before it to one.
        layout: The parameters: names, shapes and supports.
        dtype: Floating type of the parameters.
        device: Device of the parameters.

    Attributes:
        restricted: Parameters whose support is narrower than that of their distribution. The log density is then
            known up to a constant only, and there are no exact draws.

    Raises:
        InputError: If names, shapes or supports don't match the parameters.
    """

    def __init__(
        self, factors: Mapping[str, Factor], layout: Layout, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        same = set(factors) == set(layout.names)
        require(same, "log_prior", "Density", f"have the names {', '.join(layout.names)}", ", ".join(map(str, factors)))
        self.like = torch.zeros((), dtype=dtype, device=device)
        self.layout = layout
        self.factors: dict[str, Factor] = {
            name: moved(factor, self.like) if isinstance(factor, Distribution) else factor
            for name, factor in factors.items()
        }
        start, self.restricted = layout.constrain(layout.start(dtype, device)), []
        for name in self.factors:
            distribution, block = self._trial(name, start), layout[name]
            fitting(distribution, block)
            joint, must = flattens(distribution, block), f"have events of its shape {block.shape}"
            require(not joint, "prior", f"'{name}'", must, tuple(distribution.event_shape))
            if not covers(distribution, block):
                raise InputError(
                    f"The 'log_prior' argument of Density must have the support of its parameter '{name}', got "
                    f"{type(distribution).__name__} on {distribution.support}: give the same support to its Param."
                )
            if bijector(support_of(distribution), block.shape).identity and not block.bijector.identity:
                self.restricted.append(name)

    def __call__(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return log p(x), (*B,) for parameters (*B, *shape)."""
        total: Tensor | float = 0.0
        for name in self.factors:
            distribution = self.distribution(name, params)
            values = distribution.log_prob(params[name])
            rest = len(self.layout[name].shape) - len(distribution.event_shape)
            total = total + (values.sum(tuple(range(-rest, 0))) if rest else values)
        assert isinstance(total, Tensor)
        return total

    def distribution(self, name: str, params: Mapping[str, Tensor]) -> Distribution:
        """Return the distribution of one parameter given those before it."""
        factor = self.factors[name]
        if isinstance(factor, Distribution):
            return factor
        before = {}
        for other in self.factors:
            if other == name:
                break
            before[other] = params[other]
        return factor(before)

    def draw(self, n: int, seed: int) -> dict[str, Tensor]:
        """Draw n values of every parameter, (n, *shape) each."""
        draws: dict[str, Tensor] = {}
        with seeded(seed, "prior", self.like.device):
            for name, factor in self.factors.items():
                shape = self.layout[name].shape
                one = lambda p, name=name, shape=shape: sampled(self.distribution(name, p), shape)  # noqa: E731
                if isinstance(factor, Distribution):
                    rest = shape[: len(shape) - len(factor.event_shape)]
                    draws[name] = factor.expand(rest).sample((n,))
                elif not draws:
                    draws[name] = torch.stack([one({}) for _ in range(n)])
                else:
                    draws[name] = DrawMap(one, owner="prior_draws")(draws)
                draws[name] = draws[name].to(self.like)
        return {name: draws[name] for name in self.layout.names}

    def _trial(self, name: str, start: Mapping[str, Tensor]) -> Distribution:
        """Return the distribution of a parameter at the start of a fit, or raise an error that says what is wrong."""
        must = "be a distribution, or a function of the parameters listed before it that returns one,"
        try:
            found: Any = self.distribution(name, start)
        except Exception as error:
            raise InputError(
                f"The 'log_prior' of '{name}' must {must} got {type(error).__name__}: {str(error).strip()}"
            ) from error
        if not isinstance(found, Distribution):
            raise InputError(f"The 'log_prior' of '{name}' must {must} got {type(found).__name__}.")
        return found


def sampled(distribution: Distribution, shape: tuple[int, ...]) -> Tensor:
    """Draw one value of a parameter of this shape."""
    rest = shape[: len(shape) - len(distribution.event_shape)]
    return distribution.expand(rest).sample()


def covers(distribution: Distribution, block: Block) -> bool:
    """Whether a distribution lives on the support of a parameter, or on all real numbers."""
    try:
        own = bijector(support_of(distribution), block.shape)
    except (InputError, NotImplementedError):
        return False
    if own.identity:
        return True
    bounds = [
        [torch.as_tensor(getattr(f, name)) for name in ("bound", "sign", "low", "high") if hasattr(f, name)]
        for f in (own, block.bijector)
    ]
    return type(own) is type(block.bijector) and all(
        bool(torch.isclose(a.double(), b.double(), rtol=BOUND_TOLERANCE).all()) for a, b in zip(*bounds, strict=True)
    )
