"""Convergence status of a fit, from its method and from the history of its objective.

There are three names: "converged"; "not_converged", where more steps, draws or another method are needed; and
"doubtful", where it is unknown whether the fit converged, or where there is evidence against its result.

The objective of a stochastic optimiser is judged by its history. The last two sixths of the steps are compared, because
rows held out to set a learnt noise are added at two thirds. Each sixth is split into eight blocks. The noise of a
block's mean is estimated from the residuals of a straight line through the blocks, so that a trend does not count as
noise. The fit has not converged if the gain g from one sixth to the next

    - exceeds its noise: g > 3.93 standard errors, Student's t with 12 degrees of freedom at 1 in 1,000, so that a
      converged history is classified as not converged once in a thousand fits
    - is at least 0.1 nats, below which no posterior changes
    - is at least 1 % of the total gain since the first sixth: a smaller gain comes from a learning rate that decays
      to zero, and the noise of the parameters with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from priory.core.errors import require
from priory.core.tables import counted

if TYPE_CHECKING:
    from torch import Tensor

Name = Literal["converged", "doubtful", "not_converged"]
NAMES: tuple[Name, ...] = ("converged", "doubtful", "not_converged")  # from the best to the worst
MAX_K_HAT = 0.7
HISTORY_PARTS, PART_BLOCKS = 6, 8  # parts of a history, and blocks of each part
MIN_HISTORY_STEPS = HISTORY_PARTS * PART_BLOCKS  # with fewer, the noise of a history can't be estimated
STUDENT_T = 3.930  # 2 (PART_BLOCKS - 2) = 12 degrees of freedom, one-sided at 1 in 1,000
MIN_GAIN_NATS = 0.1  # over a sixth of the steps; a smaller gain changes no posterior
MIN_NOISY_STEPS, MAX_NOISE_SHARE = 500, 0.05  # with fewer steps, more noise hides a trend
MIN_GAIN_SHARE = 0.01  # of the total gain
OBJECTIVE_SIGNS = {"loss": -1.0, "bound": 1.0, "elbo": 1.0}  # 1 if it is maximised; the first one in a history is used


@dataclass(frozen=True)
class Status:
    """Whether a posterior's fit converged.

    Attributes:
        name: "converged", "doubtful" or "not_converged".
        reason: One sentence that says why, with the remedy; empty if converged.

    Example:
        >>> print(Status("not_converged", "The loss was still falling: give the fit more steps."))
        not converged: The loss was still falling: give the fit more steps.
    """

    name: Name
    reason: str = ""

    def __post_init__(self) -> None:
        require(self.name in NAMES, "name", "Status", f"be among {', '.join(NAMES)}", repr(self.name))
        ok = bool(self.reason) == (self.name != "converged")
        require(ok, "reason", "Status", "be a sentence, or empty if converged", repr(self.reason))

    def __str__(self) -> str:
        return ": ".join(part for part in (self.name.replace("_", " "), self.reason) if part)

    @property
    def unknown(self) -> bool:
        """Whether it is doubtful because nothing is known, and not because something speaks against the result."""
        return self.name == "doubtful" and (self in (UNKNOWN, NOT_IN_FILE) or TOO_FEW_STEPS in self.reason)


CONVERGED = Status("converged")
UNKNOWN = Status(
    "doubtful", "How this posterior was fitted is unknown: fit the model again to find out whether it converges."
)
NOT_IN_FILE = Status("doubtful", "The file doesn't record whether the fit converged: fit the model again to find out.")


K_HAT_REASON = "The k-hat of the importance weights"  # the beginning of the reason of a large k-hat
TOO_FEW_STEPS = "too few to tell whether"  # in the reason of a history that is too short for its noise


def worst(statuses: Sequence[Status]) -> Status:
    """The worst of several statuses; the first, if several are equally bad.

    >>> worst([CONVERGED, Status("doubtful", "Why?")]).name
    'doubtful'
    """
    return max(statuses, key=lambda status: NAMES.index(status.name))


def of_members(statuses: Sequence[Status]) -> Status:
    """The worst status of the members of a mixture, with the number of members that have it."""
    found = worst(statuses)
    if found.name == "converged" or found is UNKNOWN or len(statuses) == 1:
        return found
    count, name = sum(status.name == found.name for status in statuses), found.name.replace("_", " ")
    are = "is" if count == 1 else "are"
    return Status(found.name, f"{count} of {len(statuses)} members {are} {name}. {found.reason}")


def of_k_hat(k_hat: float | None, remedy: str) -> Status:
    """The status from a k-hat; converged if there is none."""
    if k_hat is None or k_hat <= MAX_K_HAT:
        return CONVERGED
    return Status("doubtful", f"{K_HAT_REASON} is {k_hat:.2f}, above {MAX_K_HAT}: {remedy}.")


def of_cap(converged: bool, steps: int | None, owner: str) -> Status:
    """Return the status of a method with a stopping rule: whether it stopped by the rule, or at its cap on steps."""
    if converged:
        return CONVERGED
    after = "at its last step" if steps is None else f"after {counted(steps, 'iteration')}"
    return Status("not_converged", f"{owner} was still improving {after}: give the fit more steps.")


@dataclass(frozen=True)
class HistoryWords:
    """How the reason of a status names the steps of a history, and what the user can do to have more of them."""

    owner: str = ""  # whose steps they are, after "100 steps"; empty if they are those of `fit`
    remedy: str = "give the fit more steps"

    def steps(self, count: int) -> str:
        """Return the number of steps with its noun and its owner."""
        return f"{counted(count, 'step')}{self.owner}"


FIT_WORDS = HistoryWords()


def of_history(history: Mapping[str, Tensor], words: HistoryWords | None = None) -> Status:
    """The status from the history of an objective.

    >>> of_history({"loss": torch.linspace(100, 0, 600)}).name
    'not_converged'
    >>> of_history({"loss": torch.exp(-torch.linspace(0, 60, 600))}).name
    'converged'
    """
    words = words or FIT_WORDS
    name = next((name for name in OBJECTIVE_SIGNS if len(history.get(name, ()))), None)
    if name is None:
        return UNKNOWN
    values = OBJECTIVE_SIGNS[name] * history[name].detach().cpu().double()
    falls = "falling" if OBJECTIVE_SIGNS[name] < 0 else "rising"
    n = len(values)
    if not bool(torch.isfinite(values).all()):
        return Status("not_converged", f"The {name} was not finite at some steps: try a smaller learning_rate.")
    if n < MIN_HISTORY_STEPS:
        return of_few(values, name, falls, words)
    width = n // HISTORY_PARTS
    each = width // PART_BLOCKS
    blocks = values[n - 2 * PART_BLOCKS * each :].reshape(2, PART_BLOCKS, each).mean(2)
    gain = float(blocks[1].mean() - blocks[0].mean())
    error = math.sqrt(float(noise(blocks).square().sum()) / (2 * (PART_BLOCKS - 2)) * 2 / PART_BLOCKS)
    total = float(values[-width:].mean() - values[:width].mean())
    if gain > max(STUDENT_T * error, MIN_GAIN_NATS, MIN_GAIN_SHARE * total):
        return Status(
            "not_converged",
            f"The {name} was still {falls} at the end of {words.steps(n)}, by {gain:.3g} nats over the last sixth of "
            f"them: {words.remedy}.",
        )
    if n < MIN_NOISY_STEPS and STUDENT_T * error > max(MIN_GAIN_NATS, MAX_NOISE_SHARE * total):
        return too_few(n, name, words)
    return CONVERGED


def too_few(steps: int, name: str, words: HistoryWords) -> Status:
    """The status of a history that is too short for its noise."""
    are = f"{words.steps(steps)} {'is' if steps == 1 else 'are'}"
    return Status("doubtful", f"{are} {TOO_FEW_STEPS} the {name} has converged: {words.remedy}.")


def of_few(values: Tensor, name: str, falls: str, words: HistoryWords = FIT_WORDS) -> Status:
    """The status from an objective (n,) of so few steps that its noise can't be estimated."""
    n = len(values)
    third = n // 3
    gain = float(values[n - third :].mean() - values[n - 2 * third : n - third].mean()) if third else 0.0
    if gain > MIN_GAIN_NATS:
        end = f"the end of {words.steps(n)}, by {gain:.3g} nats over the last third of them"
        return Status("not_converged", f"The {name} was still {falls} at {end}: {words.remedy}.")
    return too_few(n, name, words)


def of_callback(step: int, steps: int) -> Status | None:
    """The status of a fit that a callback ended; None at its last step."""
    if step >= steps:
        return None
    return Status(
        "doubtful", f"A callback ended the fit at step {step:,} of {steps:,}: leave out the callback to run all steps."
    )


def of_interrupt(step: int, steps: int) -> Status:
    """Return the status of a fit that the user interrupted."""
    return Status("not_converged", f"It was stopped by Ctrl-C after step {step:,} of {steps:,}: let it run to its end.")


def of_nonfinite(name: str, step: int, good: int) -> Status:
    """The status of the last good state of a fit that reached a NaN or an infinity."""
    what = f"The {name} was not finite at step {step:,}, so this is the state of step {good:,}"
    return Status("not_converged", f"{what}: try a smaller learning_rate, or data of about unit scale.")


def of_ascent(converged: bool, history: Mapping[str, Tensor]) -> Status:
    """The status of EM: whether its bound converged; with minibatches or draws, the status from the history.

    A small gain may be followed by many more. Where the gains shrink slowly, their extrapolated sum is reported
    if it exceeds 0.1 nats.
    """
    bound = history.get("bound", torch.empty(0))
    if not converged and len(bound) and "gap" not in history:
        return of_history(history)
    if not converged:
        return of_cap(False, len(bound), "The bound")
    left = remaining(bound) if "gap" in history else 0.0
    if left < MIN_GAIN_NATS:
        return CONVERGED
    slow = f"The gain per iteration is below the tolerance, but about {left:.2g} nats of gains are still to come"
    return Status("doubtful", f"{slow}: lower the tolerance, or set accelerate=True.")


def of_start(status: Status, what: str) -> Status:
    """Return the status of a fit that starts from another fit; `what` begins the reason, such as "The mode comes"."""
    if status.name == "converged" or status is UNKNOWN:
        return CONVERGED
    return Status("doubtful", f"{what} from a fit that is {status}")


def noise(blocks: Tensor) -> Tensor:
    """Return the residuals of a straight line through the blocks of each row, (rows, blocks)."""
    time = torch.arange(blocks.shape[1], dtype=blocks.dtype) - (blocks.shape[1] - 1) / 2
    centred = blocks - blocks.mean(1, keepdim=True)
    return centred - (centred @ time / time.square().sum())[:, None] * time


def remaining(bound: Tensor) -> float:
    """Return the distance of a linearly converging bound (n,) from its limit, in nats (Aitken 1926)."""
    if len(bound) < 4:
        return 0.0
    before, last = (float(step) for step in bound[-3:].double().diff())
    ratio = last / before if before > 0 else 0.0
    return last * ratio / (1 - ratio) if 0 < ratio < 1 else 0.0
