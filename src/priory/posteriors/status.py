"""Whether a fit has converged, from what its method and the history of its objective say.

Three names: "converged"; "not_converged", where more steps, draws or another method are needed; "doubtful", where
nothing says that it converged, or something speaks against the answer though the fit came to its end.

The objective of a stochastic optimiser is judged by its history. The last two sixths of the steps are compared, as the
rows that a mode holds out for its noise join in at two thirds. Each sixth is cut into eight blocks, and the noise of a
block's mean is what a straight line through the blocks leaves, so that a trend is no noise. The fit is not converged if
the gain g from one sixth to the next

    - is above its noise: g > 3.93 standard errors, Student's t with 12 degrees of freedom at 1 in 1,000: a history that
      has settled is called not converged once in a thousand fits
    - is at least 0.1 nats, below which no posterior changes
    - is at least 1 % of what the objective gained since its first sixth: below, the gain is that of a learning rate
      that goes to zero, and with it the noise of the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from priory.core.errors import require

if TYPE_CHECKING:
    from torch import Tensor

Name = Literal["converged", "doubtful", "not_converged"]
NAMES: tuple[Name, ...] = ("converged", "doubtful", "not_converged")  # from the best to the worst
GOOD_K_HAT = 0.7
PARTS, BLOCKS = 6, 8  # of a history that are compared, and of each of them
FEWEST_STEPS = PARTS * BLOCKS  # below, the noise of a history is not known
STUDENT_T = 3.930  # 2 (BLOCKS - 2) = 12 degrees of freedom, one-sided at 1 in 1,000
LEAST_GAIN = 0.1  # nats
PLENTY_STEPS, TELLING_SHARE = 500, 0.05  # in fewer steps, noise above this share of the whole gain hides a trend
LEAST_SHARE = 0.01  # of what was gained in all
OBJECTIVES = {"loss": -1.0, "bound": 1.0, "elbo": 1.0}  # by name, and whether it goes up; the first that is there


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


CONVERGED = Status("converged")
UNKNOWN = Status("doubtful", "Nothing is known of how this posterior was fitted: fit the model again to find out.")
NOT_IN_FILE = Status("doubtful", "The file does not say whether the fit converged: fit the model again to find out.")


def worst(statuses: Sequence[Status]) -> Status:
    """The worst of some statuses, the first of several that are as bad.

    >>> worst([CONVERGED, Status("doubtful", "Why?")]).name
    'doubtful'
    """
    return max(statuses, key=lambda status: NAMES.index(status.name))


def of_members(statuses: Sequence[Status]) -> Status:
    """The worst status of several posteriors that are one, with how many of them have it."""
    found = worst(statuses)
    if found.name == "converged" or found is UNKNOWN or len(statuses) == 1:
        return found
    count, name = sum(status.name == found.name for status in statuses), found.name.replace("_", " ")
    are = "is" if count == 1 else "are"
    return Status(found.name, f"{count} of {len(statuses)} members {are} {name}. {found.reason}")


def of_k_hat(k_hat: float | None, remedy: str) -> Status:
    """What a k-hat says, if there is one."""
    if k_hat is None or k_hat <= GOOD_K_HAT:
        return CONVERGED
    return Status("doubtful", f"The k-hat of the importance weights is {k_hat:.2f}, above {GOOD_K_HAT}: {remedy}.")


def of_cap(converged: bool, steps: int | None, owner: str) -> Status:
    """What a method that ends by itself says: whether it did, or was stopped after so many steps, if they are known."""
    if converged:
        return CONVERGED
    after = "when its steps were used up" if steps is None else f"after {steps:,} iterations"
    return Status("not_converged", f"{owner} was still improving {after}: give the fit more steps.")


def of_history(history: Mapping[str, Tensor]) -> Status:
    """What the history of an objective says of its end.

    >>> of_history({"loss": torch.linspace(100, 0, 600)}).name
    'not_converged'
    >>> of_history({"loss": torch.exp(-torch.linspace(0, 60, 600))}).name
    'converged'
    """
    name = next((name for name in OBJECTIVES if len(history.get(name, ()))), None)
    if name is None:
        return UNKNOWN
    values = OBJECTIVES[name] * history[name].detach().cpu().double()
    falls = "falling" if OBJECTIVES[name] < 0 else "rising"
    n = len(values)
    if not bool(torch.isfinite(values).all()):
        return Status("not_converged", f"The {name} was not finite at some steps: try a smaller learning_rate.")
    if n < FEWEST_STEPS:
        return of_few(values, name, falls)
    width = n // PARTS
    each = width // BLOCKS
    blocks = values[n - 2 * BLOCKS * each :].reshape(2, BLOCKS, each).mean(2)
    gain = float(blocks[1].mean() - blocks[0].mean())
    error = math.sqrt(float(noise(blocks).square().sum()) / (2 * (BLOCKS - 2)) * 2 / BLOCKS)
    total = float(values[-width:].mean() - values[:width].mean())
    if gain > max(STUDENT_T * error, LEAST_GAIN, LEAST_SHARE * total):
        return Status(
            "not_converged",
            f"The {name} was still {falls} at the end of {n:,} steps, by {gain:.3g} nats over the last sixth of them: "
            "give the fit more steps.",
        )
    if n < PLENTY_STEPS and STUDENT_T * error > max(LEAST_GAIN, TELLING_SHARE * total):
        return too_few(n, name)
    return CONVERGED


def too_few(steps: int, name: str) -> Status:
    """What is said where a history is too short for its noise."""
    are = "1 step is" if steps == 1 else f"{steps} steps are"
    return Status("doubtful", f"{are} too few to tell whether the {name} has settled: give the fit more steps.")


def of_few(values: Tensor, name: str, falls: str) -> Status:
    """What an objective (n,) of so few steps says that their noise is not known."""
    n = len(values)
    steps = f"{n} step" if n == 1 else f"{n} steps"
    third = n // 3
    gain = float(values[n - third :].mean() - values[n - 2 * third : n - third].mean()) if third else 0.0
    if gain > LEAST_GAIN:
        reason = f"The {name} was still {falls} at the end of {steps}, by {gain:.3g} nats over the last third of them"
        return Status("not_converged", f"{reason}: give the fit more steps.")
    return too_few(n, name)


def of_callback(step: int, steps: int) -> Status | None:
    """What the driver says of a fit that a callback ended; nothing at its last step."""
    if step >= steps:
        return None
    return Status("doubtful", f"A callback ended the fit at step {step:,} of {steps:,}: leave it out to go on.")


def of_nonfinite(name: str, step: int, good: int) -> Status:
    """What the driver says of the last good state of a fit that met a NaN or an infinity."""
    what = f"The {name} was not finite at step {step:,}, and this is the state of step {good:,}"
    return Status("not_converged", f"{what}: try a smaller learning_rate, or data of about unit scale.")


def of_ascent(converged: bool, history: Mapping[str, Tensor]) -> Status:
    """What EM says: whether its bound has settled; of minibatches or draws, of which none does, what the history says.

    An iteration that gains little may be one of many: where their gains shrink slowly, what all that are left would add
    is told, if it is above 0.1 nats.
    """
    bound = history.get("bound", torch.empty(0))
    if not converged and len(bound) and "gap" not in history:
        return of_history(history)
    if not converged:
        return of_cap(False, len(bound), "The bound")
    left = remaining(bound) if "gap" in history else 0.0
    if left < LEAST_GAIN:
        return CONVERGED
    slow = f"The bound settled within its tolerance while it still rose slowly, with about {left:.2g} nats to come"
    return Status("doubtful", f"{slow}: lower the tolerance, or set accelerate=True.")


def of_start(status: Status, what: str) -> Status:
    """What a fit that takes something from another says; `what` is it with its verb, as "The mode comes"."""
    if status.name == "converged" or status is UNKNOWN:
        return CONVERGED
    return Status("doubtful", f"{what} from a fit that is {status}")


def noise(blocks: Tensor) -> Tensor:
    """What straight lines through the blocks of each row leave, (rows, blocks)."""
    time = torch.arange(blocks.shape[1], dtype=blocks.dtype) - (blocks.shape[1] - 1) / 2
    centred = blocks - blocks.mean(1, keepdim=True)
    return centred - (centred @ time / time.square().sum())[:, None] * time


def remaining(bound: Tensor) -> float:
    """The nats that a bound (n,) which converges linearly still lacks, from its last three values (Aitken 1926)."""
    if len(bound) < 4:
        return 0.0
    before, last = (float(step) for step in bound[-3:].double().diff())
    ratio = last / before if before > 0 else 0.0
    return last * ratio / (1 - ratio) if 0 < ratio < 1 else 0.0
