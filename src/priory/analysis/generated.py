"""Generated quantities: a function of the parameters, evaluated at every draw of a posterior or a prior."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._pytree import tree_map

from priory.core.errors import is_integer, require
from priory.core.streams import stream
from priory.network.map_draws import MEMORY_LIMIT_BYTES, DrawMap, joined, seeded
from priory.posteriors import Chains, Posterior

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DEFAULT_DRAWS = 1_000  # of a posterior that is not a set of draws


def generate(
    function: Callable[..., Any],
    draws: Posterior | Mapping[str, Tensor],
    *arguments: Any,
    samples: int | None = None,
    seed: int = 0,
    limit: int = MEMORY_LIMIT_BYTES,
) -> Any:
    """Evaluate a function of the parameters at every draw: derived quantities, or predictive draws of data.

    With the draws of `prior_draws` it makes prior predictive draws, with a posterior posterior predictive draws. The
    function is written for one draw and vectorised by `vmap`. It may take random numbers from torch, as
    `torch.distributions` do: every draw has its own.

    Args:
        function: Takes a dict of constrained parameters of one draw and `arguments`; returns a tensor, or a dict, list
            or tuple of tensors.
        draws: A posterior, or a dict of tensors (n, ...) by name.
        arguments: Further arguments of the function, the same for every draw, such as new inputs.
        samples: Number of draws from a posterior. Default: None, all draws of chains and of posteriors that are a set
            of draws, and 1,000 of others.
        seed: Seed of the draws and of the function's random numbers. Default: 0.
        limit: Bytes that the tensors of one block of draws may take. Default: 2^29, half a gigabyte.

    Returns:
        What the function returns, with the draws in front: (chain, draw, ...) for all draws of chains, (n, ...)
        otherwise.

    Raises:
        InputError: If `draws` has no draws or their numbers differ, or if the function does not return tensors.

    Example:
        >>> import torch
        >>> draws = {"mu": torch.zeros(500), "sigma": torch.ones(500)}
        >>> replicated = generate(lambda p: torch.distributions.Normal(p["mu"], p["sigma"]).sample((8,)), draws)
        >>> replicated.shape
        torch.Size([500, 8])
    """
    return at_draws(function, draws, arguments, samples, seed, limit, "generate")


def at_draws(
    function: Callable[..., Any],
    draws: Posterior | Mapping[str, Tensor],
    arguments: tuple[Any, ...],
    samples: int | None,
    seed: int,
    limit: int,
    owner: str,
) -> Any:
    """Evaluate a function as `generate` does; `owner` is the public function that errors name."""
    require(callable(function), "function", owner, "be a function of the parameters", type(function).__name__)
    require(samples is None or is_integer(samples, 1), "samples", owner, "be an integer >= 1 or None", samples)
    require(is_integer(limit, 1), "limit", owner, "be an integer >= 1", limit)
    mapped = DrawMap(function, arguments, owner, int(limit))
    if isinstance(draws, Mapping):
        require(samples is None, "samples", owner, "be None for a dict, of which all draws are used", samples)
        first = {name: x[0] for name, x in checked(draws).items()}
        layout, device = None, next(iter(first.values())).device
    else:
        posterior = isinstance(draws, Posterior)
        require(posterior, "draws", owner, "be a posterior or a dict of tensors", type(draws).__name__)
        layout, device = draws.model.layout, draws.model.device
        first = layout.constrain(draws.draw(1, stream(seed, "trial", device=device))[0])
    with seeded(seed, "generate", device):
        size = mapped.block_size(first)
    with seeded(seed, "generate", device):
        if isinstance(draws, Mapping):
            return joined(mapped(block) for block in blocks_of_dict(draws, size))
        assert layout is not None
        found = joined(mapped(layout.constrain(w)) for w in blocks_of_posterior(draws, samples, size, seed))
    if not isinstance(draws, Chains) or samples is not None:
        return found
    shape = (draws.num_chains, draws.num_draws)
    return tree_map(lambda t: t.unflatten(0, shape), found)


def checked(draws: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return draws by name, or raise an error if they are not tensors with the same number of draws in front."""
    shapes = {name: tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for name, x in draws.items()}
    ok = len(draws) > 0 and all(isinstance(x, Tensor) and x.ndim > 0 and len(x) > 0 for x in draws.values())
    require(ok, "draws", "generate", "hold tensors (n, ...) with n >= 1", shapes)
    same = len({len(x) for x in draws.values()}) == 1
    require(same, "draws", "generate", "have the same number of draws of every parameter", shapes)
    return draws


def blocks_of_dict(draws: Mapping[str, Tensor], size: int) -> Iterator[dict[str, Tensor]]:
    """Blocks of `size` draws of named parameters, in order."""
    for start in range(0, len(next(iter(draws.values()))), size):
        yield {name: x[start : start + size] for name, x in draws.items()}


def blocks_of_posterior(posterior: Posterior, samples: int | None, size: int, seed: int) -> Iterator[Tensor]:
    """Blocks of at most `size` vectors (n, P): all draws of chains in order, or `samples` draws of a posterior."""
    if isinstance(posterior, Chains) and samples is None:
        for w in posterior.w.flatten(0, 1).split(size):
            yield w.to(posterior.model.device)
        return
    generator = stream(seed, "sample", device=posterior.model.device)
    count = int(samples or posterior.stored_draws or DEFAULT_DRAWS)
    sizes = [min(size, count - start) for start in range(0, count, size)]
    stored = isinstance(posterior, Chains) or posterior.stored_draws is not None
    # stored draws are taken without replacement; others are independent, and not in antithetic pairs
    yield from posterior.draw_blocks(sizes, generator) if stored else (posterior.draw(n, generator) for n in sizes)
