"""A point with a fixed function added to it: a member of randomised prior functions (Osband et al. 2018).

    f(x) = f(x; w) + f(x; a)

The weights w are fitted; a is a draw from the prior. For a network that is linear in its weights this is f(x; w + a).
For any other network no single vector of weights gives that function, so there are predictions but no parameters.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from priory.core.errors import InputError, is_integer, require
from priory.posteriors.base import Posterior
from priory.posteriors.inputs import explain_input_errors
from priory.predictive import Prediction, predict

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch
    from torch import Tensor

    from priory.core.data import Batch
    from priory.models.model import Buffers
    from priory.models.target import Target


class PriorFunction(Posterior):
    """The network at `w` plus the network at `a`; the latter uses the buffers that the network had before the fit.

    Args:
        target: Target of the fit.
        w: Fitted weights, (P,).
        a: Weights of the fixed function, (P,).
        buffers: The fitted network's buffers. Default: None, those of the model.
    """

    kind: ClassVar[str] = "prior_function"
    point: ClassVar[bool] = True

    def __init__(self, target: Target, w: Tensor, a: Tensor, buffers: Mapping[str, Tensor] | None = None) -> None:
        super().__init__(target, buffers)
        self.w, self.a = w.detach().clone(), a.detach().clone()

    def predict(self, x: Any, samples: int = 64, seed: int = 0) -> Prediction:
        """Predict the targets at new inputs by the likelihood at the sum of both functions; there is one draw.

        Args:
            x: New inputs: a tensor, an array, or a tuple for a network of several inputs.
            samples: Ignored, because there is one draw only.
            seed: Seed of the draws.

        Returns:
            A `Prediction`.
        """
        require(is_integer(samples, 1), "samples", "predict", "be an integer >= 1", repr(samples))
        require(is_integer(seed, -(2**63)), "seed", "predict", "be an integer", repr(seed))
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
        cls, target: Target, tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor], **likelihood_mixture: Any
    ) -> PriorFunction:
        return cls(target, tensors["w"], tensors["a"], buffers)


def predicted(
    target: Target, w: Iterable[Tensor], a: Iterable[Tensor], inputs: Batch, buffers: Buffers, seed: int
) -> Prediction:
    """Predict with the sums of two functions at vectors w and a, each (S, P) in one or several blocks."""
    model: Any = target.model
    with explain_input_errors(inputs):
        learnt = predict(model, w, inputs, buffers, target.event, seed)
        fixed = predict(model, a, inputs, {}, target.event, seed)
    likelihood_mixture: Any = learnt.distribution
    return Prediction.of(
        dataclasses.replace(likelihood_mixture, outputs=learnt.outputs + fixed.outputs), learnt.prepare
    )


def without_parameters() -> InputError:
    """Return the error that is raised when weights are requested."""
    return InputError(
        "A network with a prior function added to it has no single parameter vector; use predict, or its 'w' and 'a'."
    )
