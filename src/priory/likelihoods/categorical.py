"""Classes: y ~ Categorical(softmax(f(x))), one label a row."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn.functional import cross_entropy, log_softmax

from priory.errors import InputError, require
from priory.likelihoods.base import Likelihood, shaped

if TYPE_CHECKING:
    from torch import Generator, Tensor


class Categorical(Likelihood):
    """y in {0, ..., K - 1} with p(y = k) = softmax(f)_k; the network gives K logits a row.

    >>> Categorical().log_prob(torch.zeros(1, 4, dtype=torch.float64), torch.tensor([2]), {}).exp().item()
    0.25
    """

    classes: ClassVar[bool] = True

    def __repr__(self) -> str:
        return "Categorical()"

    def prepare(self, targets: Tensor, dtype: torch.dtype) -> Tensor:
        whole = not (targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool)
        must = "be whole numbers, the labels 0 to K - 1, as y.long() gives"
        require(whole, "targets", "Categorical", must, targets.dtype)
        targets = targets.squeeze(1) if targets.ndim == 2 and targets.shape[1] == 1 else targets
        require(
            targets.ndim == 1,
            "targets",
            "Categorical",
            "have one label a row",
            f"the shape {tuple(targets.shape)}",
        )
        labels = targets.long()
        require(bool((labels >= 0).all()), "targets", "Categorical", "be labels from 0", int(labels.min()))
        return labels

    def arrange(self, outputs: Tensor, event: torch.Size) -> Tensor:
        if outputs.ndim != 2 or outputs.shape[1] < 2:
            raise InputError(
                "The network's output must fit Categorical: (rows, classes), one logit a class, two classes or more. "
                f"Got {shaped(outputs.shape[1:])} instead."
            )
        return outputs

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Labels must lie below the number of logits."""
        classes = outputs.shape[-1]
        require(
            int(targets.max()) < classes,
            "targets",
            "Categorical",
            f"be labels below {classes}",
            int(targets.max()),
        )

    def log_prob(self, outputs: Tensor, targets: Tensor, learnt: dict[str, Tensor]) -> Tensor:
        if outputs.ndim == 2:
            return -cross_entropy(outputs, targets, reduction="none")
        picked = targets.expand(outputs.shape[:-1]).unsqueeze(-1)
        return log_softmax(outputs, dim=-1).gather(-1, picked).squeeze(-1)

    def mean(self, outputs: Tensor, learnt: dict[str, Tensor]) -> Tensor:
        return torch.softmax(outputs, dim=-1)

    def variance(self, outputs: Tensor, learnt: dict[str, Tensor]) -> Tensor:
        p = torch.softmax(outputs, dim=-1)
        return p * (1 - p)

    def draw(self, outputs: Tensor, learnt: dict[str, Tensor], generator: Generator) -> Tensor:
        p = torch.softmax(outputs, dim=-1)
        return torch.multinomial(p.flatten(0, -2), 1, generator=generator).reshape(p.shape[:-1])

    def entropy(self, probs: Tensor, event_dims: int) -> Tensor:
        return torch.special.entr(probs).sum(-1)
