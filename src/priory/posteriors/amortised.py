"""The posterior of amortised EM: a point theta with an encoder, which gives q(z | y) for any y."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from priory.core.errors import InputError, is_integer, require
from priory.core.streams import stream
from priory.latent.vae import has_encoder
from priory.posteriors.base import Evidence, Posterior

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from priory.latent.base import Generated
    from priory.models.target import Target

BOUND_DRAWS = 64  # of z per row, for the bound on the evidence


class AmortisedPosterior(Posterior):
    """A fitted variational auto-encoder: delta(theta - theta*), with the encoder's q(z | y) for any y.

    Args:
        target: Target of the fit, whose model is a `latent.VAE`.
        w: Parameters of encoder and decoder, unconstrained, (P,).
    """

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
        """The importance-weighted bound on log p(y | theta*) of the data of the fit, from 64 draws per row."""
        if self.data is None:
            raise InputError("A posterior from a file has no data: use .log_likelihood(data).")
        total, variance = 0.0, 0.0
        for log_weights in self._log_weights(self.data, BOUND_DRAWS, 0):
            total += float(log_mean(log_weights).double().sum())
            share = log_weights.softmax(0)  # share of each draw in the mean, for the error by the delta method
            per_row = (share.square().sum(0) - 1 / BOUND_DRAWS) * BOUND_DRAWS / (BOUND_DRAWS - 1)
            variance += float(per_row.double().sum())
        return Evidence(total, "lower bound of the log-likelihood at theta", variance**0.5)

    # Functions of data, computed in blocks of rows.

    def encode(self, data: Any) -> tuple[Tensor, Tensor]:
        """Encode the rows of some data.

        Args:
            data: Rows of y.

        Returns:
            The mean and the standard deviation of q(z | y) for each row, each (n, latent).
        """
        with torch.no_grad():
            parts = [self.latent.encode(self.mean, rows["y"]) for rows in self.latent.blocks(data)]
        return torch.cat([m for m, _ in parts]), torch.cat([s for _, s in parts]).exp()

    def log_likelihood(  # pyright: ignore[reportIncompatibleMethodOverride] - of a point
        self, data: Any, samples: int = BOUND_DRAWS, seed: int = 0
    ) -> Tensor:
        """Return a lower bound on log p(y_n | theta*) per row: the ELBO for one draw, a tighter bound for more.

        Args:
            data: Rows of y.
            samples: Number of draws of z per row.
            seed: Seed of the draws.

        Returns:
            The bounds, (n,).
        """
        require(is_integer(samples, 1), "samples", "log_likelihood", "be an integer >= 1", repr(samples))
        return torch.cat([log_mean(log_weights) for log_weights in self._log_weights(data, int(samples), seed)])

    def generate(self, n: int, seed: int = 0) -> Generated:
        """Draw rows from the model.

        Args:
            n: Number of rows.
            seed: Seed of the draws.

        Returns:
            The rows and their latent variables: `y, z = posterior.generate(100)`.
        """
        require(is_integer(n, 1), "n", "generate", "be an integer >= 1", repr(n))
        with torch.no_grad():
            return self.latent.generate(self.mean, n, stream(seed, "generate", device=self.model.device))

    def _log_weights(self, data: Any, samples: int, seed: int) -> Iterator[Tensor]:
        """Yield log w_i of each block of rows, (samples, n)."""
        model, generator = self.latent, stream(seed, "predict", device=self.model.device)
        with torch.no_grad():
            for rows in model.blocks(data):
                yield model.log_weights(self.mean, rows["y"], model.noise(len(rows), samples, generator))

    # Files.

    def tensors(self) -> dict[str, Tensor]:
        return {"w": self.w}

    @classmethod
    def of_tensors(
        cls, target: Target, tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor], **options: Any
    ) -> AmortisedPosterior:
        return cls(target, tensors["w"])


def log_mean(log_weights: Tensor) -> Tensor:
    """Return the log of the mean of w over draws, (S, n) -> (n,)."""
    return log_weights.logsumexp(0) - math.log(len(log_weights))
