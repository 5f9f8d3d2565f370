"""Adam in place on one flat tensor, and learning rates from a schedule, for the methods that follow gradients.

Adam (Kingma and Ba 2015) is torch's fused kernel, called once per step for all parameters. The kernel is private; the
public `torch.optim.adam.adam(..., fused=True)` gives the same bits, but groups and checks its tensors at each call,
which takes as long as the kernel on small networks (smallest CPU time over repetitions, one thread):

    parameters                       kernel       public
    251                              5.6 us      13.9 us
    10,000                           9.5 us      17.7 us
    1,000,000                        503 us       525 us
    step of MeanField, 13-50-2       333 us       362 us  (+9 %)
    step of MAP, 13-50-2             303 us       327 us  (+8 %)
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from priory.core.errors import InputError, require

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer


SECOND_MOMENT_DECAY, ADAM_EPSILON = 0.999, 1e-8  # beta2, and the constant added to sqrt(v)


@dataclass
class Adam:
    """Adam's moments of one tensor, and the learning rate of each step."""

    first: Tensor
    second: Tensor
    count: Tensor  # a float32 scalar, as the kernel wants it
    rates: Tensor = field(metadata={"fixed": True})  # (steps,), float64 on the CPU
    step: int = 0

    @classmethod
    def of(cls, parameter: Tensor, rates: Tensor) -> Adam:
        """Start with moments of zero."""
        count = torch.zeros((), dtype=torch.float32, device=parameter.device)
        return cls(torch.zeros_like(parameter), torch.zeros_like(parameter), count, rates)

    def descend(self, parameter: Tensor, gradient: Tensor) -> None:
        """Take one step down the gradient, in place."""
        gradient = gradient.contiguous()  # the kernel reads memory in order, whatever the strides
        rate = float(self.rates[min(self.step, len(self.rates) - 1)])
        self.count += 1  # the kernel reads it for the bias correction, and doesn't change it
        torch._fused_adam_(  # pyright: ignore[reportPrivateImportUsage] - what torch.optim itself calls
            [parameter],
            [gradient],
            [self.first],
            [self.second],
            [],
            [self.count],
            lr=rate,
            beta1=0.9,
            beta2=SECOND_MOMENT_DECAY,
            weight_decay=0.0,
            eps=ADAM_EPSILON,
            amsgrad=False,
            maximize=False,
        )
        self.step += 1

    def stride(self) -> Tensor:
        """Return the step size of each coordinate in the last step, rate / (sqrt(v) + eps)."""
        rate = float(self.rates[min(self.step - 1, len(self.rates) - 1)])
        return rate / ((self.second / (1 - SECOND_MOMENT_DECAY**self.step)).sqrt() + ADAM_EPSILON)


def rates(schedule: str | Callable[[Optimizer], LRScheduler], learning_rate: float, steps: int, owner: str) -> Tensor:
    """Return the learning rate of each step, (steps,).

    `schedule` is "cosine" (decay to zero), "constant", or a function from an optimizer to a torch scheduler.

    >>> rates("constant", 0.1, 3, "MAP").tolist()
    [0.1, 0.1, 0.1]
    >>> step = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    >>> rates(step, 1.0, 3, "MAP").tolist()
    [1.0, 0.5, 0.25]
    """
    if schedule == "constant":
        return torch.full((steps,), learning_rate, dtype=torch.float64)
    if schedule == "cosine":
        t = torch.arange(steps, dtype=torch.float64) / max(1, steps)
        return 0.5 * learning_rate * (1 + torch.cos(math.pi * t))
    require(
        callable(schedule),
        "schedule",
        owner,
        "be 'cosine', 'constant' or a function of an optimizer",
        schedule,
    )
    assert not isinstance(schedule, str)
    optimizer = torch.optim.SGD([torch.zeros((), requires_grad=True)], lr=learning_rate)
    try:
        scheduler = schedule(optimizer)
    except TypeError as error:
        must = f"The 'schedule' argument of {owner} must be a function of one argument, an optimizer."
        raise InputError(f"{must} It raised: {error}") from error
    if isinstance(scheduler, ReduceLROnPlateau) or not isinstance(scheduler, LRScheduler):
        kind = type(scheduler).__name__
        raise InputError(f"The 'schedule' argument of {owner} must make a scheduler that needs no metric, got {kind}.")
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the optimizer took no step: it never does here
        for _ in range(steps):
            found.append(float(optimizer.param_groups[0]["lr"]))
            scheduler.step()
    return torch.tensor(found, dtype=torch.float64)


def check_rate(learning_rate: float, schedule: object, owner: str) -> None:
    """Check a learning rate and a schedule when the method is built."""
    ok = isinstance(learning_rate, (int, float)) and 0 < learning_rate < math.inf
    require(ok, "learning_rate", owner, "be a positive number", learning_rate)
    ok = schedule in ("cosine", "constant") if isinstance(schedule, str) else callable(schedule)
    require(ok, "schedule", owner, "be 'cosine', 'constant' or a function of an optimizer", schedule)


def default_steps(data_steps_per_epoch: int, epochs: int, least: int, most: int) -> int:
    """Return the number of steps of some epochs, between `least` and `most`."""
    return max(least, min(most, epochs * data_steps_per_epoch))
