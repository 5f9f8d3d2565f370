"""A point with a fixed function beside it, as randomised prior functions leave it (Osband et al. 2018).

    f(x) = f(x; w) + f(x; a)

The weights w were learnt, a are a draw from the prior. For a network that is linear in its weights this is f(x; w + a);
for any other there is no vector of weights with that function, so that there are predictions, and no parameters.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from priory.core.errors import InputError, require, whole
from priory.posteriors.base import Posterior, taking
from priory.predictive import Prediction, predict

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch
    from torch import Tensor

    from priory.core.data import Batch
    from priory.models.model import Buffers
    from priory.models.target import Target


class PriorFunction(Posterior):
    """The network at `w` plus the network at `a`, whose statistics of batches are those that the person gave."""

    kind: ClassVar[str] = "prior_function"
    point: ClassVar[bool] = True

    def __init__(self, target: Target, w: Tensor, a: Tensor, buffers: Mapping[str, Tensor] | None = None) -> None:
        super().__init__(target, buffers)
        self.w, self.a = w.detach().clone(), a.detach().clone()

    def predict(self, x: Any, samples: int = 64, seed: int = 0) -> Prediction:
        """What is known of y at new inputs: the likelihood at the sum of the two functions; there is one draw."""
        require(whole(samples, 1), "samples", "predict", "be an integer >= 1", repr(samples))
        require(whole(seed, -(2**63)), "seed", "predict", "be an integer", repr(seed))
        inputs = self._inputs(x)
        prediction = predicted(self.target, [self.w[None]], [self.a[None]], inputs, self.buffers, seed)
        self._check_rows(inputs, len(prediction))
        return prediction

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        raise without_parameters()

    @property
    def mean(self) -> dict[str, Tensor]:
        raise without_parameters()

    def tensors(self) -> dict[str, Tensor]:
        return {"w": self.w, "a": self.a}

    @classmethod
    def of_tensors(
        cls, target: Target, tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor], **own: Any
    ) -> PriorFunction:
        return cls(target, tensors["w"], tensors["a"], buffers)


def predicted(
    target: Target, w: Iterable[Tensor], a: Iterable[Tensor], inputs: Batch, buffers: Buffers, seed: int
) -> Prediction:
    """The mixture over sums of two functions, at vectors w and a, each (S, P) in one piece or several."""
    model: Any = target.model
    with taking(inputs):
        learnt = predict(model, w, inputs, buffers, target.event, seed)
        fixed = predict(model, a, inputs, {}, target.event, seed)
    own: Any = learnt.distribution
    return Prediction.of(dataclasses.replace(own, outputs=learnt.outputs + fixed.outputs), learnt.prepare)


def without_parameters() -> InputError:
    """What is said to whom asks for weights."""
    return InputError(
        "A network with a prior function beside it has no parameters of its own: use predict, or 'w' and 'a' of each."
    )
