"""A point in theta with an encoder, which gives q(z | y) for any y: what is left of a variational auto-encoder."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from priory.core.errors import InputError, require, whole
from priory.core.streams import stream
from priory.latent.vae import has_encoder
from priory.posteriors.base import Evidence, Posterior

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from priory.latent.base import Generated
    from priory.models.target import Target

DRAWS = 64  # of z a row, for the bound that stands for the evidence


class AmortisedPosterior(Posterior):
    """delta(theta - theta*), with q(z | y) for whatever y is asked of."""

    kind: ClassVar[str] = "amortised"
    point: ClassVar[bool] = True

    def __init__(self, target: Target, w: Tensor) -> None:
        super().__init__(target)
        model = target.model
        assert has_encoder(model)
        self.latent, self.w = model, w.detach().clone()

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        return self.w.expand(n, -1)

    @property
    def mean(self) -> dict[str, Tensor]:
        return {name: t.clone() for name, t in self.latent.layout.constrain(self.w).items()}

    def evidence(self) -> Evidence:
        """The tighter bound of log p(y | theta*) for the data of the fit, by 64 draws of z a row, and its error."""
        if self.data is None:
            raise InputError("A posterior from a file has no data: use .log_likelihood(data).")
        total, variance = 0.0, 0.0
        for log_weights in self._log_weights(self.data, DRAWS, 0):
            total += float(log_mean(log_weights).double().sum())
            share = log_weights.softmax(0)  # of each draw in the mean: the delta method has its error
            variance += float(((share.square().sum(0) - 1 / DRAWS) * DRAWS / (DRAWS - 1)).double().sum())
        return Evidence(total, "lower bound of the log-likelihood at theta", variance**0.5)

    # Of data, in blocks.

    def encode(self, data: Any) -> tuple[Tensor, Tensor]:
        """The mean and the standard deviation of q(z | y) for each row of some data, each (n, latent)."""
        with torch.no_grad():
            parts = [self.latent.encode(self.mean, rows["y"]) for rows in self.latent.blocks(data)]
        return torch.cat([m for m, _ in parts]), torch.cat([s for _, s in parts]).exp()

    def log_likelihood(self, data: Any, samples: int = DRAWS, seed: int = 0) -> Tensor:
        """A lower bound of log p(y_n | theta*) for each row, (n,): the ELBO for one draw, IWAE's for more."""
        require(whole(samples, 1), "samples", "log_likelihood", "be an integer >= 1", repr(samples))
        return torch.cat([log_mean(log_weights) for log_weights in self._log_weights(data, int(samples), seed)])

    def generate(self, n: int, seed: int = 0) -> Generated:
        """n rows drawn from the model, and the z that each came from: `y, z = posterior.generate(100)`."""
        require(whole(n, 1), "n", "generate", "be an integer >= 1", repr(n))
        with torch.no_grad():
            return self.latent.generate(self.mean, n, stream(seed, "generate", device=self.model.device))

    def _log_weights(self, data: Any, samples: int, seed: int) -> Iterator[Tensor]:
        """log w_i of each block of rows, (samples, n)."""
        model, generator = self.latent, stream(seed, "predict", device=self.model.device)
        with torch.no_grad():
            for rows in model.blocks(data):
                yield model.log_weights(self.mean, rows["y"], model.noise(len(rows), samples, generator))

    # Files.

    def tensors(self) -> dict[str, Tensor]:
        return {"w": self.w}

    @classmethod
    def of_tensors(
        cls, target: Target, tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor], **own: Any
    ) -> AmortisedPosterior:
        return cls(target, tensors["w"])


def log_mean(log_weights: Tensor) -> Tensor:
    """The log of the mean of w over draws (S, n), (n,)."""
    return log_weights.logsumexp(0) - math.log(len(log_weights))
