"""The summary table of any posterior: means, standard deviations and quantiles of its parameters by name.

For a Gaussian over unconstrained parameters the values are exact for every parameter with an elementwise map: quantiles
are mapped by the monotone map, and moments of transformed parameters are one-dimensional integrals. Everything else is
estimated from draws with a fixed seed, which a remark under the table reports.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from priory.constraints import gaussian_expectation
from priory.core.streams import stream
from priory.diagnostics.summary import MOMENT_COLUMNS, SUMMARY_PROBABILITIES, Summary, labels

if TYPE_CHECKING:
    from collections.abc import Mapping

    from priory.constraints import Bijector
    from priory.core.flat import Block
    from priory.posteriors.base import Posterior

MAX_DRAWS, MIN_DRAWS = 4096, 256  # where there is no closed form; fewer for many parameters
MAX_ELEMENTS = 1 << 26  # draws x parameters in total
BLOCK_ELEMENTS = 1 << 22  # draws x parameters at a time
MAX_ENTRIES, SHOWN_ENTRIES = 50, 10  # a longer tensor shows only its first entries


def summarise(posterior: Posterior) -> Summary:
    """The summary of a posterior over parameters, without a status."""
    layout, means = posterior.model.layout, posterior.mean
    entries = {block.name: shown_entries(block) for block in layout.blocks}
    exact = closed_forms(posterior, means)
    drawn, count = {}, 0
    if len(exact) < len(layout.blocks):
        wanted = {name: indices for name, indices in entries.items() if name not in exact}
        drawn, count = from_draws(posterior, wanted)
    rows: list[Tensor] = []
    names, remarks = [], []
    for block in layout.blocks:
        indices = entries[block.name]
        all_names = labels(block.name, block.shape) if math.prod(block.shape) <= MAX_ENTRIES else first_labels(block)
        names += [all_names[int(index)] for index in indices]
        if block.name in exact:
            rows.append(torch.stack([column.reshape(-1)[indices] for column in exact[block.name]], -1))
        else:
            mean = means[block.name].detach().double().cpu().reshape(-1)[indices]
            rows.append(torch.cat([mean[:, None], drawn[block.name]], -1))
        size = math.prod(block.shape)
        if size > MAX_ENTRIES:
            remarks.append(f"{block.name}: {len(indices)} of {size:,} entries.")
    if count:
        some = "" if not exact else f" of {', '.join(name for name in layout.names if name not in exact)}"
        remarks.append(f"Standard deviations and quantiles{some} are those of {count:,} draws.")
    table = torch.cat(rows)
    columns: dict[str, Tensor] = dict(zip(MOMENT_COLUMNS, table.unbind(-1), strict=True))
    return Summary(names, columns, title=posterior.method, remarks=remarks)


def closed_forms(posterior: Posterior, means: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, ...]]:
    """Mean, sd and quantiles of each parameter for which they are exact, in the order of the columns."""
    at = lambda x: x.detach().double().cpu()  # noqa: E731
    if posterior.point:
        still = {name: at(x) for name, x in means.items()}
        return {name: (x, torch.zeros_like(x), x, x, x) for name, x in still.items()}
    gaussian = posterior.gaussian_coordinates()
    if gaussian is None:
        return {}
    loc, scale = (at(part) for part in gaussian)
    found = {}
    for block in posterior.model.layout.blocks:
        f, u, s = block.bijector, block.free(loc), block.free(scale)
        if not f.elementwise:
            continue
        ends = [f.forward(u + normal_quantile(q) * s) for q in SUMMARY_PROBABILITIES]
        ends = list(torch.stack(ends).sort(0).values)  # a decreasing map reverses the quantiles
        if f.identity:
            found[block.name] = (u, s, *ends)
            continue
        mean = at(means[block.name])
        variance = gaussian_expectation(lambda v, f=f, mean=mean: (f.forward(v) - mean).square(), u, s)
        if f.exponential:
            variance = (2 * u + s.square()).exp() * torch.expm1(s.square())
        found[block.name] = (mean, variance.sqrt(), *ends)
    return found


def normal_quantile(q: float) -> float:
    """Phi^-1(q)."""
    return float(torch.special.ndtri(torch.tensor(q, dtype=torch.float64)))


def from_draws(posterior: Posterior, entries: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], int]:
    """The sd and the quantiles of entries of parameters, (n, 4) by name, and the number of draws."""
    size = posterior.model.layout.size
    num_draws = min(posterior.stored_draws or MAX_DRAWS, max(MIN_DRAWS, MAX_ELEMENTS // size))
    block_size, parts = max(1, BLOCK_ELEMENTS // size), []
    for index, start in enumerate(range(0, num_draws, block_size)):
        draws = posterior.sample(min(block_size, num_draws - start), seed=index)
        parts.append(
            {
                name: draws[name]
                .detach()
                .reshape(len(draws[name]), -1)[:, indices.to(draws[name].device)]
                .double()
                .cpu()
                for name, indices in entries.items()
            }
        )
    found = {}
    for name in entries:
        x = torch.cat([part[name] for part in parts])  # (draws, n)
        ends = torch.quantile(x, x.new_tensor(SUMMARY_PROBABILITIES), 0)
        spread = x.std(0, correction=min(1, len(x) - 1))
        found[name] = torch.stack([spread, *ends], -1)
    return found, num_draws


def shown_entries(block: Block) -> Tensor:
    """The indices of the entries of a parameter in the table, (n,): all that vary, or the first of many."""
    if math.prod(block.shape) > MAX_ENTRIES:
        return torch.arange(SHOWN_ENTRIES)
    return varying(block.bijector).nonzero()[:, 0]


def first_labels(block: Block) -> list[str]:
    """Names of the first entries of a long tensor."""
    names, strides = [], [math.prod(block.shape[i + 1 :]) for i in range(len(block.shape))]
    for index in range(SHOWN_ENTRIES):
        index = [index // stride % size for stride, size in zip(strides, block.shape, strict=True)]
        names.append(f"{block.name}[{', '.join(map(str, index))}]")
    return names


def varying(bijector: Bijector) -> Tensor:
    """Return which entries of a parameter vary, (n,): those above a Cholesky factor's diagonal, for example, don't."""
    size = math.prod(bijector.shape)
    if bijector.elementwise:
        return torch.ones(size, dtype=torch.bool)
    u = torch.randn(3, *bijector.free_shape, generator=stream(0, "varying"), dtype=torch.float64)
    x = bijector.forward(u).reshape(3, size)
    return (x != x[0]).any(0)
