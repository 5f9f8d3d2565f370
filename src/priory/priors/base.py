"""A prior over the flat vector: Gaussian coordinates in closed form, the others through their own log
density.

p(w) is a product over the named parameters. Coordinates whose prior is Normal (or LogNormal, for a positive
parameter stored as its logarithm) are kept as two vectors, location and precision, so that log densities,
gradients and divergences over millions of them are a few passes. Flat coordinates have precision 0 and
contribute nothing.
"""

from __future__ import annotations

import fnmatch
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, LogNormal, Normal, constraints

from priory.errors import InputError, require
from priory.priors.rules import RULES, by_rule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from priory.flat import Block, Layout

FLAT = "flat"


class Prior:
    """log p(w) for w (*B, P), in nats with every constant, in unconstrained coordinates (log-determinants included)."""

    def __init__(self, layout: Layout, by_name: Mapping[str, Distribution | str], like: Tensor) -> None:
        self.layout = layout
        self.loc = like.new_zeros(layout.size)
        self.precision = like.new_zeros(layout.size)
        self.others: list[tuple[Block, Distribution]] = []
        self.improper = False
        log_normaliser = 0.0
        for block in layout.blocks:
            distribution = by_name[block.name]
            if isinstance(distribution, str):
                self.improper = True
                continue
            gaussian = as_normal(distribution, block)
            if gaussian is None:
                self.others.append((block, moved(fitting(distribution, block), like)))
                continue
            loc, scale = (t.to(like).expand(block.shape).reshape(-1) for t in gaussian)
            owner, low = f"'{block.name}'", float(scale.min())
            require(low > 0, "prior", owner, "have a scale above zero", low)
            for number in (float(loc.sum()), float(scale.sum())):
                require(math.isfinite(number), "prior", owner, "have a finite location and scale", number)
            self.loc[block.start : block.stop] = loc
            self.precision[block.start : block.stop] = scale**-2
            log_normaliser -= float((scale.double().log() + 0.5 * math.log(2 * math.pi)).sum())
        self.log_normaliser = log_normaliser
        self.centred = not bool(self.loc.any())

    def log_prob(self, w: Tensor) -> Tensor:
        """log p(w), (*B,)."""
        deviation = w - self.loc
        gaussian = self.log_normaliser - 0.5 * (self.precision * deviation * deviation).sum(-1)
        return gaussian + self.log_prob_of_others(w) if self.others else gaussian

    def log_prob_of_others(self, w: Tensor, jacobian: bool = True) -> Tensor:
        """The part of log p(w) that is not Gaussian, (*B,); without `jacobian`, no log-determinants."""
        total = w.new_zeros(w.shape[:-1])
        for block, distribution in self.others:
            u = block.free(w)
            x = block.bijector.forward(u)
            values = distribution.log_prob(x.flatten(w.ndim - 1) if flattens(distribution, block) else x)
            total = total + values.flatten(w.ndim - 1).sum(-1) if values.ndim >= w.ndim else total + values
            if jacobian and not block.bijector.identity:
                total = total + block.bijector.log_det(u, x)
        return total

    def typical_scale(self) -> Tensor:
        """A standard deviation for each coordinate, 1 where the prior has none to offer, (P,)."""
        scale = torch.where(self.precision > 0, self.precision, torch.ones_like(self.precision)).rsqrt()
        for block, distribution in self.others:
            try:
                variance = distribution.variance
            except NotImplementedError:
                continue
            if block.bijector.identity and bool(torch.isfinite(variance).all()) and not flattens(distribution, block):
                scale[block.start : block.stop] = variance.sqrt().expand(block.shape).reshape(-1)
        return scale


def as_normal(distribution: Distribution, block: Block) -> tuple[Tensor, Tensor] | None:
    """The location and scale of the block's unconstrained coordinates, if their prior is Normal."""
    base = distribution.base_dist if isinstance(distribution, Independent) else distribution
    if isinstance(base, Normal) and block.bijector.identity:
        return _broadcast(base.loc, base.scale, block)
    if isinstance(base, LogNormal) and block.bijector.exponential:
        return _broadcast(base.loc, base.scale, block)
    return None


def _broadcast(loc: Tensor, scale: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    for t in (loc, scale):
        fits = t.ndim <= len(block.shape) and all(
            a in (1, b) for a, b in zip(reversed(t.shape), reversed(block.shape), strict=False)
        )
        require(
            fits,
            "prior",
            f"'{block.name}'",
            f"broadcast to its shape {block.shape}",
            f"the shape {tuple(t.shape)}",
        )
    return loc, scale


def flattens(distribution: Distribution, block: Block) -> bool:
    """Whether one joint distribution is over all entries of a matrix, as a vector."""
    return len(block.shape) > 1 and tuple(distribution.event_shape) == (math.prod(block.shape),)


def fitting(distribution: Distribution, block: Block) -> Distribution:
    """Refuse a distribution that can't be over this block."""
    event, batch = tuple(distribution.event_shape), tuple(distribution.batch_shape)
    if flattens(distribution, block) and batch == ():
        return distribution
    rest = block.shape[: len(block.shape) - len(event)]
    fits = block.shape[len(rest) :] == event and len(batch) <= len(rest)
    fits = fits and all(a in (1, b) for a, b in zip(reversed(batch), reversed(rest), strict=False))
    require(
        fits,
        "prior",
        f"'{block.name}'",
        f"broadcast to its shape {block.shape}",
        f"shapes {batch} and {event}",
    )
    return distribution


def moved(distribution: Distribution, like: Tensor) -> Distribution:
    """The distribution with its tensors in the model's type, where it can be rebuilt from its named parameters."""
    if isinstance(distribution, Independent):
        return Independent(moved(distribution.base_dist, like), distribution.reinterpreted_batch_ndims)
    names = [name for name in distribution.arg_constraints if name in vars(distribution)]
    if not names:
        return distribution
    try:
        cast = {name: getattr(distribution, name).to(like) for name in names}
        return type(distribution)(**cast, validate_args=False)
    except (AttributeError, TypeError, ValueError, NotImplementedError):
        return distribution


def compile_prior(spec: Any, layout: Layout, net: nn.Module, own: Mapping[str, Distribution], like: Tensor) -> Prior:
    """A Prior from what a person gives: a distribution, a number (a normal's scale), a rule, "flat", or patterns."""
    names = [name for name in layout.names if name not in own]
    chosen: dict[str, Any] = {}
    if isinstance(spec, dict):
        require(bool(spec), "prior", "Model", "name at least one pattern", spec)
        for pattern, value in spec.items():
            matched = fnmatch.filter(names, str(pattern))
            if not matched:
                known = ", ".join(names)
                raise InputError(
                    f"The 'prior' of Model must use names of the network: {known}. Got {pattern!r} instead."
                )
            for name in matched:
                chosen.setdefault(name, value)
        missing = [name for name in names if name not in chosen]
        require(
            not missing,
            "prior",
            "Model",
            "cover every parameter, for example with a last '*'",
            f"none for {missing}",
        )
    else:
        chosen = dict.fromkeys(names, spec)
    by_name: dict[str, Distribution | str] = dict(own)
    rules: dict[str, dict[str, Normal]] = {}
    for name, value in chosen.items():
        if isinstance(value, str) and value in RULES:
            rules.setdefault(value, by_rule(value, net, like.dtype))
            by_name[name] = rules[value][name]
        else:
            by_name[name] = _one(value)
    return Prior(layout, by_name, like)


def _one(value: Any) -> Distribution | str:
    if isinstance(value, str):
        kinds = ", ".join(repr(r) for r in (*RULES, FLAT))
        require(
            value == FLAT,
            "prior",
            "Model",
            f"be a distribution, a number, a dict or one of {kinds}",
            repr(value),
        )
        return FLAT
    if isinstance(value, Distribution):
        discrete = getattr(value.support, "is_discrete", False)
        require(
            not discrete,
            "prior",
            "Model",
            "be over real numbers",
            f"{type(value).__name__} over whole numbers",
        )
        if value.support not in (constraints.real, constraints.real_vector) and not _covers_the_line(value):
            kind = f"{type(value).__name__} on {value.support}"
            raise InputError(f"The 'prior' of Model must be over the whole line, as weights are. Got {kind} instead.")
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        require(0 < value < math.inf, "prior", "Model", "have a scale above zero", value)
        scale = torch.tensor(float(value), dtype=torch.float64)
        return Normal(torch.zeros_like(scale), scale)
    require(False, "prior", "Model", "be a distribution, a number, a rule or a dict of them", type(value).__name__)
    return FLAT


def _covers_the_line(distribution: Distribution) -> bool:
    support: Any = distribution.support
    while hasattr(support, "base_constraint"):  # of an Independent, of a mixture
        support = support.base_constraint
    return support in (constraints.real, constraints.real_vector)
