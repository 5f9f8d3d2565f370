"""The Kullback-Leibler divergence of a posterior from a distribution over its parameters.

    KL(q || p) = E_q[log q(theta) - log p(theta)]

over the constrained parameters theta. A Gaussian q over real parameters has closed forms. If q factorises over
parameters, and p does too, the divergence is the sum over parameters, each by the most accurate rule of `priory.kl`.
Everything else is a Monte Carlo average with a standard error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, LogNormal, Normal

from priory.core.errors import is_integer, require
from priory.divergences import Divergence, kl
from priory.divergences.densities import log_density
from priory.divergences.monte_carlo import mean_and_error
from priory.divergences.result import KINDS_BY_ACCURACY

if TYPE_CHECKING:
    from priory.core.flat import Block
    from priory.posteriors.base import Posterior

ALLOWED_P = "be a torch distribution over the parameters, a dict of them by name, or a posterior of the same parameters"


def kl_from(q: Posterior, p: Any, samples: int, seed: int) -> Divergence:
    """Return KL(q || p) of a posterior q; see `priory.kl`."""
    require(is_integer(samples, 2), "samples", "kl", "be an integer >= 2", samples)
    blocks = q.model.layout.blocks
    if isinstance(p, Distribution) and len(blocks) == 1:
        p = {blocks[0].name: p}
    if isinstance(p, Mapping):
        check_names(p, [block.name for block in blocks])
        p = {block.name: as_event(p[block.name], block) for block in blocks}
    gaussian = q.gaussian_distribution()
    if gaussian is not None and isinstance(p, Distribution) and all(block.bijector.identity for block in blocks):
        check_flat(p, q.model.layout.size)
        return kl(gaussian, p, samples, seed)
    if gaussian is not None and isinstance(p, dict):
        parts = closed_parts(gaussian, p, blocks)
        if parts is not None:
            return summed([kl(part, p[name], samples, seed) for name, part in parts.items()])
    params = q.sample(samples, seed)
    value, error = mean_and_error(q.log_prob(params) - log_density_of(p, params, blocks))
    return Divergence(value, "Monte Carlo", error)


def closed_parts(
    gaussian: Distribution, p: Mapping[str, Distribution], blocks: tuple[Block, ...]
) -> dict[str, Distribution] | None:
    """Return the factors of a Gaussian q by parameter, if they are known distributions; None otherwise.

    The factors of independent coordinates are normal, or log-normal for a parameter x = exp(u). A single parameter has
    one factor, q itself.
    """
    if len(blocks) == 1 and blocks[0].bijector.identity and len(blocks[0].shape) == 1:
        return {blocks[0].name: gaussian}
    if not (isinstance(gaussian, Independent) and isinstance(gaussian.base_dist, Normal)):
        return None
    loc, scale = gaussian.base_dist.loc, gaussian.base_dist.scale
    found: dict[str, Distribution] = {}
    for block in blocks:
        if not (block.bijector.identity or block.bijector.exponential):
            return None
        kind = Normal if block.bijector.identity else LogNormal
        factor = kind(block.free(loc), block.free(scale))
        found[block.name] = Independent(factor, len(block.shape)) if block.shape else factor
    return found


def as_event(d: Distribution, block: Block) -> Distribution:
    """Return a distribution over one parameter as a whole, with the parameter's shape as its event shape."""
    owner = f"p['{block.name}']"
    require(isinstance(d, Distribution), owner, "kl", "be a torch distribution", type(d).__name__)
    shape = (*d.batch_shape, *d.event_shape)
    fits = len(shape) <= len(block.shape) and tuple(block.shape[len(block.shape) - len(shape) :]) == shape
    require(fits, owner, "kl", f"have the shape {block.shape} of the parameter", tuple(shape))
    batch = block.shape[: len(block.shape) - len(d.event_shape)]
    return Independent(d.expand(batch), len(batch)) if batch else d


def log_density_of(p: Any, params: Mapping[str, Tensor], blocks: tuple[Block, ...]) -> Tensor:
    """Return log p at draws of the parameters by name, (S,)."""
    if isinstance(p, dict):
        terms = torch.stack(
            [log_density(d, params[name]).reshape(len(params[name]), -1).sum(1) for name, d in p.items()]
        )
        return terms.sum(0)
    if isinstance(p, Distribution):
        flat = torch.cat([params[block.name].reshape(len(params[block.name]), -1) for block in blocks], 1)
        check_flat(p, flat.shape[1])
        return log_density(p, flat)
    ask = getattr(p, "log_prob", None)
    require(callable(ask), "p", "kl", ALLOWED_P, type(p).__name__)
    return p.log_prob(params)


def check_flat(p: Distribution, size: int) -> None:
    """Raise an error unless p is a distribution over the vector of all entries of all parameters."""
    shape = (*p.batch_shape, *p.event_shape)
    must = f"have the event shape ({size},), for all entries of the parameters in their order, or be a dict by name"
    require(tuple(p.event_shape) == (size,) and shape == (size,), "p", "kl", must, tuple(shape))


def check_names(p: Mapping[str, Any], names: list[str]) -> None:
    """Raise an error unless a dict has exactly the parameters' names."""
    require(sorted(p) == sorted(names), "p", "kl", f"name the parameters {', '.join(names)}", sorted(p))


def summed(parts: list[Divergence]) -> Divergence:
    """Return the sum of independent divergences, with the least accurate of their kinds."""
    kind = max((part.kind for part in parts), key=KINDS_BY_ACCURACY.index)
    value = torch.stack([part.value.double() for part in parts]).sum(0)
    errors = [float(part.error) for part in parts]
    drawn = math.sqrt(sum(e**2 for e, part in zip(errors, parts, strict=True) if part.kind == "Monte Carlo"))
    bounds = sum(e for e, part in zip(errors, parts, strict=True) if part.kind != "Monte Carlo")
    return Divergence(value, kind, value.new_tensor(drawn + bounds))
