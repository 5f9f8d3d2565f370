"""Plots of Markov chains: traces, ranks, pairs of parameters, and energies.

Up to eight chains are drawn one by one. Of more chains the plots show what they have in common, as quantiles over the
chains or as a map with one line per chain, and the chain that is furthest from the others.

References:
    Vehtari, Gelman, Simpson, Carpenter and Bürkner (2021), Rank-normalization, folding, and localization: an improved
    R-hat for assessing convergence of MCMC.
    Betancourt (2016), Diagnosing suboptimal cotangent disintegrations in Hamiltonian Monte Carlo.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from priory.core.errors import extra, require
from priory.diagnostics import bfmi, ess_bulk, r_hat
from priory.diagnostics.chain_statistics import Halves
from priory.diagnostics.convergence import MIN_DRAWS
from priory.diagnostics.summary import labels
from priory.plot.style import BLUE, COLOURS, GREY, INK, SKY, VERMILION, _axes, _list
from priory.posteriors import Chains
from priory.posteriors.summaries import varying

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_SEPARATE_CHAINS = 8  # more lines in one panel cannot be told apart
MAX_ROWS, MAX_PAIRED = 8, 5  # parameters that are shown unless the user names them
MAX_POINTS = 1_000  # draws per line, about one per pixel of width
MAX_SCATTER_POINTS = 3_000  # draws in one panel of pairs; all divergent draws are shown
DENSITY_BINS = 256
MAX_RANK_BINS, DRAWS_PER_RANK_BIN = 20, 5  # bins of a rank histogram, and expected draws of one chain in each at least
MAX_SHOWN_ERRORS = 5.0  # standard errors at which the colours of a rank map end


def trace(posterior: Chains, names: Sequence[str] | str | None = None) -> Figure:
    """Plot the density and the path of each parameter: all chains should cover the same range without a trend.

    Up to eight chains have a line each. Of more chains the path is shown as the median and the central 50 % and 90 %
    of the chains at each draw, with the chain whose mean is furthest from the others. Ticks below the paths of up to
    eight chains are divergent draws.

    Args:
        posterior: Chains.
        names: Names of parameters or of their entries, such as "theta" or "theta[0]". Default: None, the first eight
            entries that vary.

    Returns:
        A figure with one row per entry.

    Raises:
        InputError: If the posterior has no chains, or if a name is unknown.
    """
    entries = chosen_entries(posterior, names, MAX_ROWS, "plot.trace")
    figure = new_figure(8.0, 1.6 * len(entries) + 0.4)
    panels = figure.subplots(len(entries), 2, squeeze=False, width_ratios=[1, 2])
    for row, (name, x) in enumerate(entries.items()):
        left, right = panels[row]
        last = row == len(entries) - 1
        _axes(left, name, "", "density")
        left.set_yticks([])
        _axes(right, f"R-hat {float(r_hat(x)):.3f}, ESS {float(ess_bulk(x)):,.0f}", "draw" if last else "", "")
        shown_draws = torch.arange(0, x.shape[1], max(1, x.shape[1] // MAX_POINTS))
        if len(x) <= MAX_SEPARATE_CHAINS:
            for chain, path in enumerate(x):
                colour = COLOURS[chain % len(COLOURS)]
                left.plot(*map(_list, density_of(path)), color=colour, linewidth=1.2)
                right.plot(_list(shown_draws), _list(path[shown_draws]), color=colour, linewidth=0.5, alpha=0.8)
        else:
            _many_paths(left, right, x, shown_draws)
        right.set_xlim(0, max(1, x.shape[1] - 1))
        right.grid(False)
    divergent = divergent_draws(posterior)
    if posterior.num_chains <= MAX_SEPARATE_CHAINS:
        for right in panels[:, 1]:
            _divergence_ticks(right, divergent)
    else:
        handles, texts = panels[0, 1].get_legend_handles_labels()
        figure.legend(handles, texts, loc="outside lower right", ncols=4, frameon=False, fontsize=9)
    count = f", {int(divergent.sum()):,} divergent" if bool(divergent.any()) else ""
    title = f"{posterior.num_chains} chains of {posterior.num_draws:,} draws{count}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=INK)
    return figure


def rank(posterior: Chains, names: Sequence[str] | str | None = None) -> Figure:
    """Plot how the draws of each chain rank among those of all chains: uniform for chains that agree.

    For up to eight chains there is one histogram of ranks per chain, around its expected height, with two standard
    errors as a band. For more chains there is a map with one line per chain, in the order of their means, whose colours
    are deviations in standard errors. The errors allow for autocorrelation, by the effective sample size within chains.

    Args:
        posterior: Chains.
        names: Names of parameters or of their entries. Default: None, the first eight entries that vary.

    Returns:
        A figure with one panel per entry.

    Raises:
        InputError: If the posterior has no chains, or if a name is unknown.
    """
    entries = chosen_entries(posterior, names, MAX_ROWS, "plot.rank")
    columns = min(len(entries), 2)
    rows = math.ceil(len(entries) / columns)
    figure = new_figure(4.4 * columns, 2.5 * rows + 0.3)
    panels = figure.subplots(rows, columns, squeeze=False).reshape(-1)
    for panel in panels[len(entries) :]:
        panel.set_visible(False)
    image = None
    for index, (name, x) in enumerate(entries.items()):
        ax = panels[index]
        bottom = index >= len(entries) - columns
        _axes(ax, f"{name}: R-hat {float(r_hat(x)):.3f}", "rank of a draw, as a fraction" if bottom else "", "chain")
        deviation, error = rank_deviations(x)
        if len(x) <= MAX_SEPARATE_CHAINS:
            _rank_bars(ax, deviation, error)
        else:
            order = x.mean(1).argsort()
            scaled = (deviation[order] / error).clamp(-MAX_SHOWN_ERRORS, MAX_SHOWN_ERRORS)
            limits = {"vmin": -MAX_SHOWN_ERRORS, "vmax": MAX_SHOWN_ERRORS, "cmap": "RdBu_r"}
            extent = (0.0, 1.0, 0.0, float(len(x)))
            shape = {"aspect": "auto", "origin": "lower", "interpolation": "nearest", "extent": extent}
            image = ax.imshow(_list(scaled), **shape, **limits)
            ax.set_ylabel("chain, by its mean", fontsize=10)
        ax.set_xlim(0, 1)
        ax.grid(False)
    if image is not None:
        figure.colorbar(image, ax=list(panels[: len(entries)]), label="draws above expectation, in standard errors")
    return figure


def pair(posterior: Chains, names: Sequence[str] | str | None = None) -> Figure:
    """Plot parameters against each other, with divergent draws on top, which show where the sampler fails.

    Args:
        posterior: Chains.
        names: Names of parameters or of their entries. Default: None, the first five entries that vary.

    Returns:
        A figure with one panel per pair below the diagonal, and densities on it. It shows at most 3,000 draws of all
        chains, evenly spaced, and every divergent draw.

    Raises:
        InputError: If the posterior has no chains, if a name is unknown, or if there are fewer than two entries.
    """
    entries = chosen_entries(posterior, names, MAX_PAIRED, "plot.pair")
    require(len(entries) > 1, "names", "plot.pair", "name two entries of parameters or more", list(entries))
    count = len(entries)
    figure = new_figure(1.7 * count + 0.8, 1.6 * count + 0.6)
    panels = figure.subplots(count, count, squeeze=False, sharex="col")
    flat = {name: x.reshape(-1) for name, x in entries.items()}
    divergent = divergent_draws(posterior).reshape(-1)
    size = len(divergent)
    some = torch.linspace(0, size - 1, min(size, MAX_SCATTER_POINTS), dtype=torch.float64).round().long()
    some = some[~divergent[some]]
    for i, (below, y) in enumerate(flat.items()):
        for j, (left, x) in enumerate(flat.items()):
            ax = panels[i, j]
            if j > i:
                ax.set_visible(False)
                continue
            _axes(ax, "", left if i == count - 1 else "", below if j == 0 and i else "")
            ax.tick_params(labelsize=8)
            ax.grid(False)
            if i == j:
                ax.plot(*map(_list, density_of(x)), color=BLUE, linewidth=1.4)
                ax.set_yticks([])
                continue
            ax.plot(_list(x[some]), _list(y[some]), ".", color=BLUE, alpha=0.25, markersize=2.5, markeredgewidth=0)
            style = {"color": VERMILION, "markersize": 5, "markeredgecolor": "white", "markeredgewidth": 0.4}
            ax.plot(_list(x[divergent]), _list(y[divergent]), "o", **style)
    shown = f"{len(some):,} of {size:,} draws" if len(some) < size - int(divergent.sum()) else f"{size:,} draws"
    figure.suptitle(
        f"{shown}, {int(divergent.sum()):,} divergent, in orange", x=0.99, ha="right", fontsize=11, color=INK
    )
    return figure


def energy(posterior: Chains, *, ax: Axes | None = None) -> Axes:
    """Plot the energy of the draws and its change from draw to draw: the two should be about equally wide.

    Where the changes are much narrower, with an E-BFMI below 0.3, chains need many draws to reach the tails.

    Args:
        posterior: Chains of a sampler with momenta: `NUTS` or `HMC`.
        ax: Axes to draw on. Default: None, for a new figure.

    Returns:
        The axes.

    Raises:
        InputError: If the posterior has no chains, or no energies with a kinetic part.
    """
    require_chains(posterior, "plot.energy")
    found = posterior.statistics.get("energy")
    ok = found is not None and posterior.momenta and posterior.num_draws > 1
    require(ok, "posterior", "plot.energy", "have energies, as those of NUTS and HMC", posterior.method or "none")
    assert found is not None
    values = found.detach().double().cpu()
    least = bfmi(values).min()
    ax = _axes(ax, f"Energy; E-BFMI is {float(least):.2f} at the least", "energy, from its mean, in nats", "density")
    parts = (
        ("of the draws", values - values.mean(), SKY),
        ("change from draw to draw", values.diff(dim=1), VERMILION),
    )
    for label, x, colour in parts:
        grid, height = density_of(x.reshape(-1))
        ax.plot(_list(grid), _list(height), color=colour, linewidth=1.8, label=label)
        ax.fill_between(_list(grid), _list(height), color=colour, alpha=0.25, linewidth=0)
    ax.set_yticks([])
    ax.set_ylim(bottom=0)
    ax.legend(frameon=False, fontsize=9)
    return ax


def chosen_entries(posterior: Chains, names: Sequence[str] | str | None, most: int, owner: str) -> dict[str, Tensor]:
    """Return the draws of named entries, (chain, draw) each, in their order; without names, of the first that vary."""
    require_chains(posterior, owner)
    wanted = [names] if isinstance(names, str) else None if names is None else list(names)
    found: dict[str, Tensor] = {}
    known: set[str] = set()
    for block in posterior.model.layout.blocks:
        if wanted is None and len(found) >= most:
            break
        entry_names = labels(block.name, block.shape)
        known |= {block.name, *entry_names}
        free = varying(block.bijector)
        if wanted is not None and block.name not in wanted:
            free = torch.tensor([name in wanted for name in entry_names])
        if not bool(free.any()):
            continue
        x = block.bijector.forward(block.free(posterior.w))
        x = x.reshape(*posterior.w.shape[:2], -1)  # (chain, draw, entry)
        for place in free.nonzero()[:, 0].tolist():
            found[entry_names[place]] = x[..., place].double().cpu()
    unknown = [name for name in wanted or [] if name not in known]
    few = ", ".join(posterior.model.layout.names[:MAX_ROWS])
    require(not unknown, "names", owner, f"be names of parameters or of their entries, such as {few}", unknown)
    if wanted is None:
        return dict(list(found.items())[:most])
    return {entry: found[entry] for name in wanted for entry in found if entry == name or entry.startswith(f"{name}[")}


def require_chains(posterior: Any, owner: str) -> None:
    """Raise an error for a posterior without chains."""
    require(isinstance(posterior, Chains), "posterior", owner, "be that of a sampler", type(posterior).__name__)


def divergent_draws(posterior: Chains) -> Tensor:
    """Whether each draw is divergent, (chain, draw)."""
    found = posterior.statistics.get("divergent")
    return torch.zeros(posterior.w.shape[:2], dtype=torch.bool) if found is None else found.bool().cpu()


def density_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """Estimate the density of draws (S,) by a Gaussian kernel, reflected at their extremes: a grid and the heights.

    The bandwidth is that of Silverman (1986), 0.9 min(sd, IQR / 1.34) S^(-1/5).
    """
    low, high = float(x.min()), float(x.max())
    if not low < high:
        return x.new_tensor([low, low]), x.new_tensor([0.0, 1.0])
    step = (high - low) / DENSITY_BINS
    place = ((x - low) / step).long().clamp(max=DENSITY_BINS - 1)
    counts = torch.bincount(place, minlength=DENSITY_BINS).to(x)
    quartiles = x.sort().values[[len(x) // 4, (3 * len(x)) // 4]]
    spread = min(float(x.std()), float(quartiles[1] - quartiles[0]) / 1.34) or float(x.std())
    width = max(0.9 * spread * len(x) ** -0.2 / step, 0.5)  # in bins
    reach = min(DENSITY_BINS, math.ceil(4 * width))
    kernel = (-0.5 * (torch.arange(-reach, reach + 1, dtype=x.dtype) / width).square()).exp()
    mirrored = torch.cat([counts.flip(0)[-reach:], counts, counts.flip(0)[:reach]])
    smooth = torch.nn.functional.conv1d(mirrored[None, None], (kernel / kernel.sum())[None, None])[0, 0]
    grid = low + step * (torch.arange(DENSITY_BINS, dtype=x.dtype) + 0.5)
    return grid, smooth / (len(x) * step)


def rank_deviations(x: Tensor) -> tuple[Tensor, float]:
    """Return the draws of each chain per bin of ranks minus their expectation, (chain, bin), and a standard error.

    The error is that of independent draws, times the square root of draws per effective draw. The effective sample size
    is that within chains, because the variance between them is what the deviations show.
    """
    chains, draws = x.shape
    bins = max(2, min(MAX_RANK_BINS, draws // DRAWS_PER_RANK_BIN))
    ranks = torch.empty(x.numel(), dtype=torch.long)
    ranks[x.reshape(-1).argsort()] = torch.arange(x.numel())
    place = (ranks * bins // x.numel()).reshape(chains, draws)
    counts = torch.nn.functional.one_hot(place, bins).sum(1)
    expected = draws / bins
    effective = float(Halves(x[None]).effective()[1]) if draws >= MIN_DRAWS else math.nan
    inflation = max(1.0, x.numel() / effective) if effective > 0 else 1.0
    return counts.double() - expected, math.sqrt(expected * (1 - 1 / bins) * inflation)


def furthest_chain(x: Tensor) -> int:
    """Return the chain whose mean is furthest from the median of all means."""
    means = x.mean(1)
    return int((means - means.median()).abs().argmax())


def _many_paths(left: Axes, right: Axes, x: Tensor, shown: Tensor) -> None:
    """Plot the quantiles of many chains at each draw, and the furthest chain; their densities on the left."""
    chain = furthest_chain(x)
    levels = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95], dtype=x.dtype)
    ends = [_list(end) for end in torch.quantile(x[:, shown], levels, 0)]
    draws = _list(shown)
    right.fill_between(draws, ends[0], ends[4], color=SKY, alpha=0.35, linewidth=0, label="90 % of the chains")
    right.fill_between(draws, ends[1], ends[3], color=BLUE, alpha=0.35, linewidth=0, label="50 %")
    label = f"furthest (chain {chain})"
    right.plot(draws, _list(x[chain, shown]), color=VERMILION, linewidth=0.5, alpha=0.9, label=label)
    right.plot(draws, ends[2], color=INK, linewidth=1.0, label="median")
    grid, height = density_of(x.reshape(-1))
    left.fill_between(_list(grid), _list(height), color=SKY, alpha=0.5, linewidth=0)
    left.plot(_list(grid), _list(height), color=BLUE, linewidth=1.4)
    left.plot(*map(_list, density_of(x[chain])), color=VERMILION, linewidth=1.0)
    left.set_ylim(0, 1.5 * float(height.max()))  # the density of a chain that is stuck has no end


def _divergence_ticks(ax: Axes, divergent: Tensor) -> None:
    """Mark the draws at which a chain diverged by ticks at the foot of the panel."""
    found = _list(divergent.any(0).nonzero()[:, 0])
    style = {"color": INK, "markersize": 6, "markeredgewidth": 0.6, "transform": ax.get_xaxis_transform()}
    ax.plot(found, [0.03] * len(found), "|", **style, label="divergent")


def _rank_bars(ax: Axes, deviation: Tensor, error: float) -> None:
    """Plot one histogram of ranks per chain, as bars from the expected height, on a line per chain."""
    chains, bins = deviation.shape
    scale = 0.45 / max(float(deviation.abs().max()), 2.5 * error)  # bars stay between neighbouring lines
    centres = [(k + 0.5) / bins for k in range(bins)]
    for chain in range(chains):
        band = 2 * error * scale
        ax.axhspan(chain - band, chain + band, color=GREY, alpha=0.18, linewidth=0)
        colour = COLOURS[chain % len(COLOURS)]
        ax.bar(centres, _list(scale * deviation[chain]), 1 / bins, bottom=chain, color=colour, edgecolor="white")
        ax.axhline(chain, color=INK, linewidth=0.6)
    ax.set_yticks(range(chains))
    ax.set_ylim(-0.6, chains - 0.4)


def new_figure(width: float, height: float) -> Figure:
    """Return a new figure of this size in inches, made without pyplot."""
    return extra("matplotlib.figure", "plot").Figure(figsize=(width, height), dpi=120, layout="constrained")
