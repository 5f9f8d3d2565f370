"""Priors over the flat vector of parameters.

p(w) is a product over the named parameters. Coordinates with a Normal prior (or LogNormal, for a positive parameter
stored as its logarithm) are kept as two vectors, location and precision, so log densities, gradients and divergences
over millions of them take a few passes. All other priors are evaluated through their own log density. Flat coordinates
have precision 0 and contribute nothing.

A `Hierarchical` prior learns a precision: either as a coordinate beside the weights, or, by empirical Bayes, as a
number in the vector of precisions, which `with_empirical_precisions` replaces.
"""

from __future__ import annotations

import copy
import fnmatch
import functools
import math
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, LogNormal, Normal, TransformedDistribution, constraints

from priory.core.errors import InputError, require
from priory.core.flat import Param
from priory.priors.hierarchical import Hierarchical, precision_name
from priory.priors.rules import RULES, by_rule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from priory.core.flat import Block, Layout

FLAT = "flat"
ParameterPrior = Distribution | Hierarchical | str  # prior of one named parameter; the string is FLAT


@runtime_checkable
class NetworkPrior(Protocol):
    """Protocol of objects that set the prior of each parameter of a network: a penalty, an edge of chaos."""

    def priors_of(self, net: nn.Module, dtype: torch.dtype) -> Mapping[str, ParameterPrior]:
        """Return the prior of every trainable parameter, by name."""
        ...


class Prior:
    """The log prior of the flat vector w (*B, P), in unconstrained coordinates.

    Values are in nats and include every normalising constant and the log-determinants of the constraints.

    Args:
        layout: Names, shapes and positions of the parameters in the flat vector.
        by_name: Prior of each parameter: a distribution, a `Hierarchical` or "flat".
        like: Tensor whose data type and device the prior takes.

    Attributes:
        loc: Means of the Gaussian coordinates, (P,) or (*B, P).
        precision: Precisions of the Gaussian coordinates, 0 for all others, (P,) or (*B, P).
        others: Parameters without a Gaussian prior, with their distributions.
        hierarchical: Parameters whose precision is learnt, with their `Hierarchical` priors.
        improper: Whether log p(w) is known up to a constant only.
    """

    def __init__(self, layout: Layout, by_name: Mapping[str, ParameterPrior], like: Tensor) -> None:
        self.layout = layout
        self.hierarchical: list[tuple[Block, Hierarchical]] = []
        self.loc = like.new_zeros(layout.size)
        self.precision = like.new_zeros(layout.size)
        self.others: list[tuple[Block, Distribution | Hierarchical]] = []
        self.improper = False
        log_normaliser = 0.0
        for block in layout.blocks:
            distribution = by_name.get(block.name)
            if distribution is None:  # a precision is handled together with its weights
                continue
            if isinstance(distribution, str):
                self.improper = True
                continue
            if isinstance(distribution, Hierarchical):
                self.hierarchical.append((block, distribution))
                if not distribution.empirical:
                    self.others.append((block, distribution))
                continue
            self.improper = self.improper or bool(getattr(distribution, "improper", False))
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
        self.centred = not bool(self.loc.any())
        self.empirical = [(block, distribution) for block, distribution in self.hierarchical if distribution.empirical]
        self._fixed = (self.precision, log_normaliser)  # before empirical Bayes
        self.log_normaliser: float | Tensor = log_normaliser
        self.factors: dict[str, Tensor] = {}  # by which `scaled` has multiplied the precisions
        self._given: Prior | None = None
        if self.empirical:
            self._set({precision_name(block.name): like.new_tensor(b.start) for block, b in self.empirical})

    def log_prob(self, w: Tensor) -> Tensor:
        """Return log p(w), (*B,).

        Args:
            w: Unconstrained coordinates, (*B, P).
        """
        deviation = w - self.loc
        gaussian = self.log_normaliser - 0.5 * (self.precision * deviation * deviation).sum(-1)
        return gaussian + self.log_prob_of_others(w) if self.others else gaussian

    def log_prob_of_others(self, w: Tensor, jacobian: bool = True) -> Tensor:
        """Return the part of log p(w) that is not Gaussian, (*B,).

        Args:
            w: Unconstrained coordinates, (*B, P).
            jacobian: Whether to include the log-determinants of the constraints. Default: True.
        """
        total = w.new_zeros(w.shape[:-1])
        # split once: the gradient is assembled in one pass, whereas each slice alone would allocate a whole vector
        cut = w.split([block.stop - block.start for block in self.layout.blocks], -1)
        pieces = dict(zip(self.layout.names, cut, strict=True))
        for block, distribution in self.others:
            piece = pieces[block.name]
            if isinstance(distribution, Hierarchical):
                log_precision = pieces[precision_name(block.name)].squeeze(-1)
                total = total + distribution.log_prob(piece, log_precision, jacobian)
                continue
            u = piece.reshape((*w.shape[:-1], *block.bijector.free_shape))
            x = block.bijector.forward(u)
            values = distribution.log_prob(x.flatten(w.ndim - 1) if flattens(distribution, block) else x)
            total = total + values.flatten(w.ndim - 1).sum(-1) if values.ndim >= w.ndim else total + values
            if jacobian and not block.bijector.identity:
                total = total + block.bijector.log_det(u, x)
        return total

    # Variants.

    def centred_at(self, loc: Tensor) -> Prior:
        """Return the prior with other means for its Gaussian coordinates.

        Args:
            loc: Means, (*B, P).
        """
        other = copy.copy(self)
        other.loc, other.centred = loc, not bool(loc.any())
        return other

    def with_others(self, keep: Callable[[Block, Distribution | Hierarchical], bool]) -> Prior:
        """Return the prior restricted, among the parameters without a Gaussian prior, to those selected by `keep`.

        Args:
            keep: Function from a parameter's block and prior to whether it is kept.
        """
        other = copy.copy(self)
        other.others = [(block, distribution) for block, distribution in self.others if keep(block, distribution)]
        return other

    # Learnt precisions.

    def start(self, like: Tensor) -> Tensor:
        """Return the initial values of the precisions that are coordinates, unconstrained, (k,).

        Args:
            like: Tensor whose data type and device the result takes.
        """
        starts = [math.log(distribution.start) for _, distribution in self.hierarchical if not distribution.empirical]
        return torch.tensor(starts, dtype=like.dtype, device=like.device)

    def precisions(self, mean: Tensor, variance: Tensor) -> dict[str, Tensor]:
        """Return the optimal precision of each hierarchical prior under q, by name, (*B,).

        Args:
            mean: Means of q(w), (*B, P).
            variance: Variances of q(w), (*B, P).
        """
        found = {}
        for block, distribution in self.hierarchical:
            m, v = (t[..., block.start : block.stop] for t in (mean, variance))
            square = torch.linalg.vecdot(m, m) + v.sum(-1)
            found[precision_name(block.name)] = distribution.precision(m.shape[-1], square)
        return found

    def with_empirical_precisions(self, mean: Tensor, variance: Tensor) -> Prior:
        """Return the prior with the precisions that empirical Bayes sets under q.

        Args:
            mean: Means of q(w), (*B, P).
            variance: Variances of q(w), (*B, P).
        """
        if not self.empirical:
            return self
        other = copy.copy(self.given)
        other._set(self.precisions(mean.detach(), variance.detach()))
        learnt = {block.name for block, _ in self.empirical}
        return other.scaled({name: factor for name, factor in self.factors.items() if name not in learnt})

    @property
    def given(self) -> Prior:
        """The user's prior, before any factor."""
        return self._given or self

    @functools.cached_property
    def gaussian(self) -> list[Block]:
        """Parameters whose coordinates all have a Gaussian precision, which `scaled` can multiply."""
        return [b for b in self.layout.blocks if bool((self.precision[..., b.start : b.stop] > 0).all())]

    def scaled(self, factors: Mapping[str, Tensor | float]) -> Prior:
        """Return the prior with the precisions of some Gaussian parameters multiplied, and its normaliser adjusted.

        Factors of an earlier call remain: they multiply.

        Args:
            factors: Factor of each parameter, by name: a number, (n,) for the n coordinates of the parameter, or (*B,
                1) or (*B, n) with one prior per member.

        Raises:
            InputError: If a parameter has no Gaussian prior, or a factor is not positive and finite.
        """
        given = self.given
        blocks = {block.name: block for block in given.gaussian}
        merged = dict(self.factors)
        for name, factor in factors.items():
            known = f"name parameters with a Gaussian prior, among {', '.join(blocks)}"
            require(name in blocks, "factors", "scaled", known, repr(name))
            t = torch.as_tensor(factor, dtype=given.precision.dtype, device=given.precision.device)
            size = blocks[name].stop - blocks[name].start
            fits = t.ndim == 0 or t.shape[-1] in (1, size)
            require(fits, "factors", "scaled", f"be one number or {size} for '{name}'", f"the shape {tuple(t.shape)}")
            low, high = float(t.min()), float(t.max())
            ok, got = low > 0 and high < math.inf, high if high == math.inf else low
            require(ok, "factors", "scaled", "be positive and finite", got)
            merged[name] = t * merged.get(name, 1.0)
        if not merged:
            return self
        other = copy.copy(given)
        other.factors, other._given = merged, given
        lead = torch.broadcast_shapes(given.precision.shape[:-1], *(t.shape[:-1] for t in merged.values()))
        other.precision = given.precision.expand((*lead, -1)).clone()
        gain = torch.zeros(lead, dtype=torch.float64, device=other.precision.device)
        for name, t in merged.items():
            block = blocks[name]
            other.precision[..., block.start : block.stop] *= t
            each = t.double().log()
            gain += 0.5 * (block.stop - block.start) * (each.mean(-1) if t.ndim else each)
        normaliser = given.log_normaliser + gain
        other.log_normaliser = normaliser.to(other.precision) if lead else float(normaliser)
        return other

    def _set(self, precisions: Mapping[str, Tensor]) -> None:
        """Write the precisions (*B,) of empirical Bayes into the vector of precisions, and update the normaliser."""
        fixed, constant = self._fixed
        lead = next(iter(precisions.values())).shape
        self.precision, log_normaliser = fixed.expand((*lead, -1)).clone(), fixed.new_full(lead, constant).double()
        for block, _ in self.empirical:
            tau = precisions[precision_name(block.name)]
            self.precision[..., block.start : block.stop] = tau[..., None]
            log_normaliser += 0.5 * (block.stop - block.start) * (tau.double() / (2 * math.pi)).log()
        self.log_normaliser = log_normaliser.to(fixed) if lead else float(log_normaliser)

    def typical_scale(self) -> Tensor:
        """Return a standard deviation per coordinate, 1 where the prior has none, (P,)."""
        scale = torch.where(self.precision > 0, self.precision, torch.ones_like(self.precision)).rsqrt()
        for block, distribution in self.others:
            if isinstance(distribution, Hierarchical):
                at = self.layout[precision_name(block.name)]
                scale[block.start : block.stop] = distribution.start**-0.5
                # standard deviation of log tau given w
                scale[at.start] = (distribution.shape + 0.5 * (block.stop - block.start)) ** -0.5
                continue
            try:
                variance = distribution.variance
            except NotImplementedError:
                continue
            if block.bijector.identity and bool(torch.isfinite(variance).all()) and not flattens(distribution, block):
                scale[block.start : block.stop] = variance.sqrt().expand(block.shape).reshape(-1)
        return scale


def as_normal(distribution: Distribution, block: Block) -> tuple[Tensor, Tensor] | None:
    """Return the location and scale of the block's unconstrained coordinates, or None if not Normal."""
    base = distribution.base_dist if isinstance(distribution, Independent) else distribution
    if isinstance(base, Normal) and block.bijector.identity:
        return _broadcast(base.loc, base.scale, block)
    if isinstance(base, LogNormal) and block.bijector.exponential:
        return _broadcast(base.loc, base.scale, block)
    return None


def _broadcast(loc: Tensor, scale: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Return the location and scale, or raise an InputError if they do not broadcast to the block's shape."""
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
    """Return whether a joint distribution covers all entries of a matrix as one vector."""
    return len(block.shape) > 1 and tuple(distribution.event_shape) == (math.prod(block.shape),)


def fitting(distribution: Distribution, block: Block) -> Distribution:
    """Return the distribution, or raise an InputError if its shapes do not fit the block."""
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
    """Return the distribution with the dtype and device of `like`, if it can be rebuilt from its parameters."""
    if isinstance(distribution, Independent):
        return Independent(moved(distribution.base_dist, like), distribution.reinterpreted_batch_ndims)
    derived = isinstance(distribution, TransformedDistribution)  # such as HalfNormal, whose parameters are properties
    names = [name for name in distribution.arg_constraints if derived or name in vars(distribution)]
    if not names:
        return distribution
    try:
        cast = {name: getattr(distribution, name).to(like) for name in names}
        return type(distribution)(**cast, validate_args=False)
    except (AttributeError, TypeError, ValueError, NotImplementedError):
        return distribution


def read_prior(spec: Any, names: Sequence[str], net: nn.Module, dtype: torch.dtype) -> dict[str, ParameterPrior]:
    """Return the prior of each parameter, by name.

    Args:
        spec: A distribution, a number (the scale of a centred normal), the name of a rule, "flat", a penalty, an edge
            of chaos, a `Hierarchical`, or a dict from name patterns to these; the first matching pattern applies.
        names: Names of the parameters.
        net: The network.
        dtype: Data type of the priors' tensors.

    Raises:
        InputError: If `spec` is not valid, matches no parameter, or does not cover every parameter.
    """
    chosen: dict[str, Any] = {}
    if isinstance(spec, dict):
        require(bool(spec), "prior", "Model", "name at least one pattern", spec)
        for pattern, value in spec.items():
            matched = fnmatch.filter(names, str(pattern))
            if not matched:
                known = ", ".join(names)
                raise InputError(
                    f"The 'prior' argument of Model must use names of the network: {known}, got {pattern!r}."
                )
            for name in matched:
                chosen.setdefault(name, value)
        missing = [name for name in names if name not in chosen]
        must = "cover every parameter, for example with a last '*'"
        require(not missing, "prior", "Model", must, f"none for {missing}")
    else:
        chosen = dict.fromkeys(names, spec)
    by_name: dict[str, ParameterPrior] = {}
    read: dict[int, Mapping[str, ParameterPrior]] = {}  # by identity: a rule for all parameters is evaluated once
    for name, value in chosen.items():
        if id(value) not in read:
            if isinstance(value, str) and value in RULES:
                read[id(value)] = by_rule(value, net, dtype)
            elif isinstance(value, NetworkPrior) and not isinstance(value, type):
                read[id(value)] = value.priors_of(net, dtype)
        by_name[name] = read[id(value)][name] if id(value) in read else _one(value)
    return {name: by_name[name] for name in names}


def declared(by_name: Mapping[str, ParameterPrior]) -> dict[str, Param]:
    """Return the parameters that a prior adds to the model: the precisions that are coordinates.

    Args:
        by_name: Prior of each parameter.
    """
    return {
        precision_name(name): Param((), constraints.positive)
        for name, distribution in by_name.items()
        if isinstance(distribution, Hierarchical) and not distribution.empirical
    }


def _one(value: Any) -> ParameterPrior:
    """Return the prior of one parameter given by the user."""
    if isinstance(value, Hierarchical):
        return value
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
            f"{type(value).__name__} over integers",
        )
        if value.support not in (constraints.real, constraints.real_vector) and not _covers_the_line(value):
            kind = f"{type(value).__name__} on {value.support}"
            raise InputError(f"The 'prior' argument of Model must be over the whole line, as weights are, got {kind}.")
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        require(0 < value < math.inf, "prior", "Model", "have a scale above zero", value)
        scale = torch.tensor(float(value), dtype=torch.float64)
        return Normal(torch.zeros_like(scale), scale)
    require(False, "prior", "Model", "be a distribution, a number, a rule or a dict of them", type(value).__name__)
    return FLAT


def _covers_the_line(distribution: Distribution) -> bool:
    """Return whether the support of a distribution is the whole real line."""
    support: Any = distribution.support
    while hasattr(support, "base_constraint"):  # of an Independent or a mixture
        support = support.base_constraint
    return support in (constraints.real, constraints.real_vector)
