"""Class labels: y ~ Categorical(softmax(f(x))), one label per row, or one per position in a row (pixels, tokens).

For labels (n, *places) the network gives logits (n, K, *places), as in `torch.nn.functional.cross_entropy`. Arranged
outputs have the K logits last: (n, *places, K). The labels of a row are independent given f.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn.functional import cross_entropy, log_softmax

from priory.core.errors import InputError, require
from priory.likelihoods.base import Likelihood, per_datum, shaped

if TYPE_CHECKING:
    from torch import Generator, Tensor


class Categorical(Likelihood):
    """Categorical likelihood of class labels: y in {0, ..., K - 1} with p(y = k) = softmax(f)_k.

    The network gives K logits per label: (n, K) for labels (n,), and (n, K, *places) for labels (n, *places).

    Example:
        >>> Categorical().log_prob(torch.zeros(1, 4, dtype=torch.float64), torch.tensor([2]), {}).exp().item()
        0.25
    """

    classes: ClassVar[bool] = True

    def __repr__(self) -> str:
        return "Categorical()"

    @property
    def canonical(self) -> bool:
        return True

    def prepare(self, targets: Tensor, dtype: torch.dtype) -> Tensor:
        whole = not (targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool)
        must = "be integer labels 0 to K - 1 (use y.long() for labels stored as floats)"
        require(whole, "targets", "Categorical", must, targets.dtype)
        # labels (n, 1) are treated as (n,)
        labels = (targets.squeeze(1) if targets.ndim == 2 and targets.shape[1] == 1 else targets).long()
        require(bool((labels >= 0).all()), "targets", "Categorical", "be labels >= 0", int(labels.min()))
        return labels

    def arrange(self, outputs: Tensor, event: torch.Size) -> Tensor:
        one_hot = outputs.ndim == 2 and len(event) > 0
        must = "have one label per row (use y.argmax(1) for one-hot labels)"
        require(not one_hot, "targets", "Categorical", must, f"the shape {(len(outputs), *event)}")
        if outputs.ndim == 3 and outputs.shape[2] == 1 and event == ():  # the labels were (n, 1)
            outputs = outputs.squeeze(2)
        if outputs.ndim < 2 or outputs.shape[1] < 2 or outputs.shape[2:] != event:
            wanted = ", ".join(("rows", "classes", *map(str, event)))
            raise InputError(
                f"The network's output must fit Categorical: ({wanted}), with one logit per class and at least two "
                f"classes, got {shaped(outputs.shape[1:])}."
            )
        return outputs.movedim(1, -1)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Check that every label is below the number of logits."""
        classes = outputs.shape[-1]
        require(
            int(targets.max()) < classes,
            "targets",
            "Categorical",
            f"be labels below {classes}",
            int(targets.max()),
        )

    def log_prob(self, outputs: Tensor, targets: Tensor, learnt: dict[str, Tensor]) -> Tensor:
        if outputs.ndim == targets.ndim + 1:
            return per_datum(-cross_entropy(outputs.movedim(-1, 1), targets, reduction="none"), targets)
        picked = targets.expand(outputs.shape[:-1]).unsqueeze(-1)
        return per_datum(log_softmax(outputs, dim=-1).gather(-1, picked).squeeze(-1), targets)

    def mean(self, outputs: Tensor, learnt: dict[str, Tensor]) -> Tensor:
        return torch.softmax(outputs, dim=-1)

    def variance(self, outputs: Tensor, learnt: dict[str, Tensor]) -> Tensor:
        p = torch.softmax(outputs, dim=-1)
        return p * (1 - p)

    def draw(self, outputs: Tensor, learnt: dict[str, Tensor], generator: Generator) -> Tensor:
        p = torch.softmax(outputs, dim=-1)
        return torch.multinomial(p.flatten(0, -2), 1, generator=generator).reshape(p.shape[:-1])

    def roots(self, outputs: Tensor, learnt: dict[str, Tensor]) -> Tensor:
        # sum_c p_c (e_c - p) (e_c - p)' = diag(p) - p p', separately for each position
        p = torch.softmax(outputs, dim=-1)
        flat = p.reshape(len(p), -1, p.shape[-1])  # (n, places, K)
        columns = (torch.eye(p.shape[-1]).to(p) - flat.unsqueeze(-2)) * flat.sqrt().unsqueeze(-1)  # (n, places, c, K)
        if p.ndim == 2:
            return columns[:, 0].transpose(0, 1)
        blocks = torch.diag_embed(columns.permute(2, 3, 0, 1))  # (c, K, n, places, places): zero between positions
        return blocks.permute(3, 0, 2, 4, 1).reshape(-1, *p.shape)

    def entropy(self, probs: Tensor, event_dims: int) -> Tensor:
        terms = torch.special.entr(probs).sum(-1)
        return terms.flatten(-event_dims).sum(-1) if event_dims else terms
