"""Binary labels: y ~ Bernoulli(sigmoid(f(x))), one or several independent labels per row (multi-label)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn.functional import logsigmoid

from priory.core.errors import require
from priory.likelihoods.base import Likelihood, as_float, diagonal_roots, per_datum, squeeze_last

if TYPE_CHECKING:
    from torch import Generator, Tensor


class Bernoulli(Likelihood):
    """Bernoulli likelihood of binary labels: y in {0, 1} with p(y = 1) = sigmoid(f).

    The network gives one logit per label. Several outputs per row are independent labels.

    Example:
        >>> Bernoulli().log_prob(torch.zeros(1, dtype=torch.float64), torch.ones(1), {}).exp().item()
        0.5
    """

    classes: ClassVar[bool] = True

    def __repr__(self) -> str:
        return "Bernoulli()"

    @property
    def canonical(self) -> bool:
        return True

    def prepare(self, targets: Tensor, dtype: torch.dtype) -> Tensor:
        y = as_float(targets, dtype, "Bernoulli")
        wrong = y[(y != 0) & (y != 1)]
        require(wrong.numel() == 0, "targets", "Bernoulli", "be 0 or 1", wrong.flatten()[:1].tolist())
        return y

    def arrange(self, outputs: Tensor, event: torch.Size) -> Tensor:
        return squeeze_last(outputs, event, "Bernoulli")

    def log_prob(self, outputs: Tensor, targets: Tensor, learnt: dict[str, Tensor]) -> Tensor:
        return per_datum(logsigmoid(outputs * (2 * targets - 1)), targets)

    def mean(self, outputs: Tensor, learnt: dict[str, Tensor]) -> Tensor:
        return torch.sigmoid(outputs)

    def variance(self, outputs: Tensor, learnt: dict[str, Tensor]) -> Tensor:
        return torch.sigmoid(outputs) * torch.sigmoid(-outputs)

    def draw(self, outputs: Tensor, learnt: dict[str, Tensor], generator: Generator) -> Tensor:
        return torch.bernoulli(torch.sigmoid(outputs), generator=generator)

    def roots(self, outputs: Tensor, learnt: dict[str, Tensor]) -> Tensor:
        return diagonal_roots(self.variance(outputs, learnt).sqrt())

    def entropy(self, probs: Tensor, event_dims: int) -> Tensor:
        terms = torch.special.entr(probs) + torch.special.entr(1 - probs)
        return terms.flatten(-event_dims).sum(-1) if event_dims else terms
