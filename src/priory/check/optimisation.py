"""Items about the optimisation: did the fit converge, does its objective oscillate?

The history of the objective is judged by `priory.posteriors.status`. A learning rate that is too large shows in another
way: the objective ends clearly below a level that it had reached before. The last third of the history is cut into six
blocks, and the last block is compared with the best one before it, relative to the noise of both. Earlier steps don't
count, because rows held out to set a learnt noise are added at two thirds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from priory.check.result import Item, Outcome, judged
from priory.posteriors.chains import Chains
from priory.posteriors.status import CONVERGED, K_HAT_REASON, OBJECTIVE_SIGNS

if TYPE_CHECKING:
    from torch import Tensor

    from priory.posteriors import Posterior

GROUP = "optimisation"
HISTORY_BLOCKS, BLOCK_PARTS = 6, 4  # blocks of the last third, and parts of a block that its noise is estimated from
MAX_LOSS_SHARE = 0.02  # of the gain of the whole fit that an objective may lose again
MIN_LOSS_NATS = 1.0
NOISE_ERRORS = 4.0  # standard errors by which a loss must exceed its noise


def optimisation_items(posterior: Posterior, k_hat_known: bool) -> list[Item]:
    """Return the items about the optimisation; a doubt about k-hat is left to its own item where that is known."""
    return [convergence(posterior, k_hat_known), *oscillation(posterior)]


def convergence(posterior: Posterior, k_hat_known: bool = False) -> Item:
    """Whether the fit converged, by the status of the posterior.

    A doubt about chains (divergences, E-BFMI) or about k-hat speaks against the spread. Other doubts, such as a second
    mode or a mode at the edge of a support, speak against the mean too.
    """
    status = posterior.status
    doubts_k_hat = status.name == "doubtful" and status.reason.startswith(K_HAT_REASON)
    if doubts_k_hat and k_hat_known:
        status = CONVERGED
    doubts_spread = doubts_k_hat or (status.name == "doubtful" and isinstance(posterior, Chains))
    outcome: Outcome = "passed" if status.name == "converged" else "not known" if status.unknown else "failed"
    return Item(
        "convergence",
        GROUP,
        None,
        "converged",
        outcome,
        sentence(status.reason),
        "follow the status" if outcome == "failed" else "",
        against="spread" if doubts_spread else "mean",
        details={"history": objective(posterior)},
    )


def sentence(reason: str) -> str:
    """A reason that may follow "because": it begins with a word that can be written in small letters."""
    return reason if not reason or reason.startswith(("The ", "A ", "It ")) else f"The status says: {reason}"


def objective(posterior: Posterior) -> Tensor | None:
    """The history of the objective, one value per step, so that larger is better; None if there is none."""
    for name, sign in OBJECTIVE_SIGNS.items():
        if len(posterior.history.get(name, ())):
            return sign * posterior.history[name].detach().cpu().double()
    return None


def oscillation(posterior: Posterior) -> list[Item]:
    """Whether the objective ends below the level that it had reached before."""
    values = objective(posterior)
    if values is None or len(values) < 3 * HISTORY_BLOCKS * BLOCK_PARTS or not bool(values.isfinite().all()):
        return []
    each = len(values) // (3 * HISTORY_BLOCKS * BLOCK_PARTS)
    parts = values[-each * HISTORY_BLOCKS * BLOCK_PARTS :].reshape(HISTORY_BLOCKS, BLOCK_PARTS, each).mean(2)
    means, errors = parts.mean(1), parts.std(1) / math.sqrt(BLOCK_PARTS)
    best = int(means[:-1].argmax())
    lost = float(means[best] - means[-1])
    total = float(means[best] - values[:each].mean())
    noise = math.hypot(float(errors[best]), float(errors[-1]))
    bad = lost > max(NOISE_ERRORS * noise, MAX_LOSS_SHARE * total, MIN_LOSS_NATS)
    return [
        judged(
            "oscillation",
            GROUP,
            max(0.0, lost),
            not bad,
            "nats lost: none beyond noise",
            f"The objective ends {lost:.3g} nats below the level that it had reached before.",
            "lower the learning_rate, or let the schedule decay to zero",
            against="mean",
        )
    ]
