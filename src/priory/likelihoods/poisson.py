"""Counts: y ~ Poisson(exp(f(x))), with the network's output as the log rate."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from priory.core.errors import require
from priory.likelihoods.base import Likelihood, as_float, diagonal_roots, per_datum, squeeze_last

if TYPE_CHECKING:
    from torch import Generator, Tensor


class Poisson(Likelihood):
    """Poisson likelihood of counts: y in {0, 1, 2, ...} with rate exp(f); the network gives log rates.

    Example:
        >>> round(Poisson().log_prob(torch.zeros(1, dtype=torch.float64), torch.tensor([2.0]), {}).exp().item(), 6)
        0.18394
    """

    discrete: ClassVar[bool] = True

    def __repr__(self) -> str:
        return "Poisson()"

    @property
    def canonical(self) -> bool:
        return True

    def prepare(self, targets: Tensor, dtype: torch.dtype) -> Tensor:
        y = as_float(targets, dtype, "Poisson")
        wrong = y[(y < 0) | (y != y.round())]
        require(wrong.numel() == 0, "targets", "Poisson", "be counts 0, 1, 2, ...", wrong.flatten()[:1].tolist())
        return y

    def arrange(self, outputs: Tensor, event: torch.Size) -> Tensor:
        return squeeze_last(outputs, event, "Poisson")

    def log_prob(self, outputs: Tensor, targets: Tensor, learnt: dict[str, Tensor]) -> Tensor:
        return per_datum(targets * outputs - outputs.exp() - torch.lgamma(targets + 1), targets)

    def mean(self, outputs: Tensor, learnt: dict[str, Tensor]) -> Tensor:
        return outputs.exp()

    def variance(self, outputs: Tensor, learnt: dict[str, Tensor]) -> Tensor:
        return outputs.exp()

    def draw(self, outputs: Tensor, learnt: dict[str, Tensor], generator: Generator) -> Tensor:
        return torch.poisson(outputs.exp(), generator=generator)

    def roots(self, outputs: Tensor, learnt: dict[str, Tensor]) -> Tensor:
        return diagonal_roots((0.5 * outputs).exp())

    def cdf(self, outputs: Tensor, learnt: dict[str, Tensor], value: Tensor) -> Tensor:
        # P(y <= k) = Q(k + 1, rate), the regularised upper incomplete gamma function
        below = torch.special.gammaincc(value.floor().clamp_min(0) + 1, outputs.exp())
        return torch.where(value < 0, torch.zeros_like(below), below)
