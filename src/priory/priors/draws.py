"""Exact draws from the prior of a network's parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from priory.core.errors import require
from priory.priors.base import flattens
from priory.priors.hierarchical import Hierarchical, precision_name

if TYPE_CHECKING:
    from torch.distributions import Distribution

    from priory.core.flat import Block
    from priory.priors.base import Prior


def draw_prior(
    prior: Prior, shape: torch.Size, generator: torch.Generator, *, argument: str, owner: str, must: str
) -> Tensor:
    """Draw vectors of unconstrained parameters from a prior, (*shape, P).

    Args:
        prior: The prior.
        shape: Leading shape of the draws.
        generator: Source of randomness.
        argument: Name of the argument that an error is about.
        owner: Name of the class or function that takes the argument.
        must: Beginning of the rule that an error states, which ends in "every prior is a proper distribution".

    Raises:
        InputError: If a parameter's prior is improper, or has no draws.
    """
    layout, like = prior.layout, prior.loc
    noise = torch.randn((*shape, layout.size), generator=generator, dtype=like.dtype, device=like.device)
    w = prior.loc + noise * prior.precision.rsqrt()
    others = {block.name: distribution for block, distribution in prior.others}
    for block in layout.blocks:
        distribution, here = others.get(block.name), slice(block.start, block.stop)
        if isinstance(distribution, Hierarchical):
            gamma = torch.full(shape, distribution.shape, dtype=w.dtype, device=w.device)
            precision = torch._standard_gamma(gamma, generator=generator) / distribution.rate  # pyright: ignore
            w[..., layout[precision_name(block.name)].start] = precision.log()
            w[..., here] = noise[..., here] * precision.rsqrt()[..., None]
        elif distribution is not None:
            rule = f"{must} every prior can be drawn from"
            w[..., here] = draw_block(distribution, block, shape, generator, (argument, owner, rule))
    flat = [block.name for block in layout.blocks if not bool(torch.isfinite(w[..., block.start : block.stop]).all())]
    got = f"a prior of '{', '.join(flat)}' that has no finite draws"
    require(not flat, argument, owner, f"{must} every prior is a proper distribution", got)
    return w


def draw_block(
    distribution: Distribution,
    block: Block,
    shape: torch.Size,
    generator: torch.Generator,
    rule: tuple[str, str, str],
) -> Tensor:
    """Draws from one parameter's distribution in unconstrained parameters, (*shape, n).

    torch.distributions use the global random state, which is restored afterwards. `rule` is what an error says: the
    argument, its owner, and what it must be.
    """
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    rest = () if flattens(distribution, block) else block.shape[: len(block.shape) - len(distribution.event_shape)]
    with torch.random.fork_rng(devices=[generator.device] if generator.device.type == "cuda" else []):
        torch.manual_seed(seed)
        try:
            x = distribution.expand(rest).sample(shape)
        except NotImplementedError:
            require(False, *rule, f"{type(distribution).__name__} for '{block.name}'")
            raise
    return block.bijector.inverse(x.reshape(*shape, *block.shape)).reshape(*shape, -1)
