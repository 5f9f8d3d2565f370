"""Items about Markov chains: do they agree, are they long enough, did they get stuck or diverge?

The numbers are those of `summary()`. For a network they are those of its predictions at rows of the fit, because
weights have symmetries that chains need not cross.

Chains are stuck if their own variance is a small part of that of all chains, in some quantity. Several modes are
counted by the means of the chains: a gap between two neighbouring ones that is wider than the spread of the chains on
either side separates two modes, and the shares of the chains are shares of starts, not of the posterior.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from priory.check.result import Item, judged, unknown
from priory.diagnostics.summary import MAX_R_HAT, MAX_REQUIRED_ESS, MIN_BFMI, labels
from priory.models.base import has_network
from priory.models.model import inputs_as_given

if TYPE_CHECKING:
    from torch import Tensor

    from priory.diagnostics import Summary
    from priory.posteriors.chains import Chains

GROUP = "chains"
FUNCTION_ROWS = 64  # rows of the fit at which the predictions of a network are compared
MAX_DIVERGENT_SHARE = 0.001  # of the draws
STUCK_VARIANCE_SHARE = 1e-3  # of the variance of all chains
MODE_GAP = 2.0  # pooled standard deviations within chains, between the means of chains in two modes
MIN_MODE_SHARE = 0.02  # of the chains


def chain_items(posterior: Chains) -> list[Item]:
    """Return the items about chains."""
    table, draws = quantities(posterior)
    if table is None:
        why = "The chains of a network are compared by predictions, and the data of the fit are missing."
        return [unknown("R-hat", GROUP, f"below {MAX_R_HAT}", why)]
    return [*agreement(table), *divergences(posterior), *energy(table), *separation(table, draws)]


def quantities(posterior: Chains) -> tuple[Summary | None, Tensor]:
    """The summary of the quantities that are compared, and their draws (chain, draw, quantity)."""
    if not has_network(posterior.model):
        table = posterior.summary()
        found = {
            name: x
            for parameter, draws in posterior.draws.items()
            for name, x in zip(
                labels(parameter, draws.shape[2:]), draws.reshape(*draws.shape[:2], -1).unbind(2), strict=True
            )
        }
        return table, torch.stack([found[name] for name in table.names], -1)
    if posterior.data is None:
        return None, posterior.w
    inputs = posterior.data.some(FUNCTION_ROWS)[:-1]
    return posterior.function_space(inputs_as_given(posterior.data, tuple(inputs))), posterior.w


def agreement(table: Summary) -> list[Item]:
    """R-hat or nested R-hat, and the smallest effective sample sizes."""
    r = table[table.agreement].nan_to_num(nan=1.0)
    place, largest = int(r.argmax()), float(r.max())
    name = "nested R-hat" if table.agreement == "nested_r_hat" else "R-hat"
    items = [
        judged(
            name,
            GROUP,
            largest,
            largest <= MAX_R_HAT,
            f"below {MAX_R_HAT}",
            f"The chains disagree: {name} is {largest:.4g} for {table.names[place]}.",
            "take more draws, or reparameterise",
            against="mean",
            decisive=True,
            details={"r_hat": r},
        )
    ]
    for column, what in (("ess_bulk", "bulk ESS"), ("ess_tail", "tail ESS")):
        ess = table[column].nan_to_num(nan=torch.inf)
        place, least = int(ess.argmin()), float(ess.min())
        items.append(
            judged(
                what,
                GROUP,
                least,
                least >= MAX_REQUIRED_ESS,
                f"at least {MAX_REQUIRED_ESS}",
                f"The draws of {table.names[place]} are worth {least:.0f} independent ones ({what}).",
                "take more draws",
                against="mean" if column == "ess_bulk" else "spread",
                details={column: ess},
            )
        )
    return items


def divergences(posterior: Chains) -> list[Item]:
    """The share of divergent draws."""
    if "divergent" not in posterior.statistics:
        return []
    count = len(posterior.divergences)
    share = count / (posterior.num_chains * posterior.num_draws)
    return [
        judged(
            "divergences",
            GROUP,
            float(count),
            share <= MAX_DIVERGENT_SHARE,
            f"at most {100 * MAX_DIVERGENT_SHARE:g} % of the draws",
            f"The sampler could not follow the density in {count:,} draws, and draws near them are missing.",
            "reparameterise, or raise 'accept'",
        )
    ]


def energy(table: Summary) -> list[Item]:
    """The smallest E-BFMI."""
    if table.bfmi is None or bool(table.bfmi.isnan().all()):
        return []
    least = float(table.bfmi.nan_to_num(nan=torch.inf).min())
    return [
        judged(
            "E-BFMI",
            GROUP,
            least,
            least >= MIN_BFMI,
            f"at least {MIN_BFMI}",
            f"The energy changes too slowly to reach the tails: E-BFMI is {least:.2f}.",
            "reparameterise",
        )
    ]


def separation(table: Summary, w: Tensor) -> list[Item]:
    """Stuck chains, and chains of a density in separate modes; `w` has the quantities, or the weights of a network."""
    if w.shape[0] < 2 or w.shape[1] < 4:
        return []
    within, everything = w.var(1), w.flatten(0, 1).var(0)
    varies = everything > 0
    share = (within / everything)[:, varies]
    stuck = int((share.median(1).values < STUCK_VARIANCE_SHARE).sum()) if share.numel() else 0
    items = [
        judged(
            "stuck chains",
            GROUP,
            float(stuck),
            stuck == 0,
            "none",
            f"The chains that did not move are {stuck} of {len(w)}.",
            "raise 'accept', or try another start",
            against="mean",
        )
    ]
    if w.shape[2] != len(table.names):  # weights, whose symmetries separate chains
        return items
    modes, shares, name = modes_of(w, table.names)
    items.append(
        judged(
            "modes",
            GROUP,
            float(modes),
            modes == 1,
            "one",
            f"The chains are in {modes} separate regions of {name} ({', '.join(f'{100 * s:.0f} %' for s in shares)} of "
            "the chains), and their weights are not known.",
            "order the parameters if the regions are relabellings, or report each region",
            against="mean",
        )
    )
    return items


def modes_of(w: Tensor, names: list[str]) -> tuple[int, list[float], str]:
    """The largest number of regions that the chains are in, in some coordinate, with their shares and its name."""
    means, deviations = w.mean(1), w.std(1)  # (K, P)
    best: tuple[int, list[float], str] = (1, [1.0], "")
    for j in range(w.shape[2]):
        order = means[:, j].argsort()
        m, s = means[order, j], deviations[order, j]
        gap = (m[1:] - m[:-1]) / (MODE_GAP * torch.maximum(s[1:], s[:-1])).clamp(min=torch.finfo(w.dtype).tiny)
        cuts = [0, *((gap > 1).nonzero()[:, 0] + 1).tolist(), len(m)]
        shares = [(b - a) / len(m) for a, b in itertools.pairwise(cuts)]
        found = [s for s in shares if s >= MIN_MODE_SHARE]
        if len(found) > best[0]:
            best = (len(found), found, names[j])
    return best
