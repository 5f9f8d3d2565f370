"""The variational auto-encoder (Kingma and Welling, 2014; Rezende, Mohamed and Wierstra, 2014), as variational EM.

    p(z) = N(0, I),      p(y | z, theta) = likelihood(decoder(z)),      q(z | y, phi) = N(m(y), diag s(y)^2)

p(z | y, theta) has no closed form, and a separate q per row would need an optimisation per row. Inference is amortised
instead: the encoder, one network, computes m and log s of every row. With draws z_i = m + s e_i, e_i ~ N(0, I), and

    log w_i = log p(y | z_i, theta) + log p(z_i) - log q(z_i | y, phi)

    ELBO = E[log w]            <=  log p(y | theta), with the gap KL(q || p(z | y, theta))
    IWAE = E[log 1/S sum w_i]  between the two, closer to log p(y | theta) as S grows (Burda, Grosse and Salakhutdinov,
                               2016)

The E-step is gradient ascent of the bound in phi, the M-step in theta. If q is the exact posterior, log w is the same
for all z, and both bounds equal the log-likelihood for every draw.
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import functional_call

from priory.core.errors import InputError, is_integer, require
from priory.core.flat import Param
from priory.core.streams import stream
from priory.latent.base import Expectation, Generated, Latent, Rows, Theta
from priory.likelihoods import Gaussian
from priory.likelihoods.base import Likelihood
from priory.models.base import BaseModel, Capabilities

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import TypeIs

LOG_TAU = math.log(2 * math.pi)
CAPABILITIES = Capabilities(latent=True, encoder=True)
ENCODER_PREFIX, DECODER_PREFIX, LIKELIHOOD_PREFIX = "encoder.", "decoder.", "likelihood."  # of parameters' names


class VAE(Latent):
    """A variational auto-encoder: z ~ N(0, I), y ~ likelihood(decoder(z)), q(z | y) given by the encoder.

    Both networks are copied, never changed, and evaluated in eval mode. It is fitted by `AmortisedEM`.

    Args:
        encoder: A module that maps rows (n, ...) to (n, 2 latent): means, then log standard deviations.
        decoder: A module that maps z (n, latent) to the outputs that the likelihood expects.
        latent: Number of dimensions of z.
        likelihood: The distribution of a row given the decoder's outputs. Default: None, `Gaussian()`.

    Raises:
        InputError: If an argument is invalid, or a network has buffers.

    Example:
        >>> VAE(nn.Linear(3, 4), nn.Linear(2, 3), latent=0)
        Traceback (most recent call last):
        ...
        priory.InputError: The 'latent' argument of VAE must be an integer >= 1, got 0.
    """

    exact: bool = False

    def __init__(
        self, encoder: nn.Module, decoder: nn.Module, latent: int, likelihood: Likelihood | None = None
    ) -> None:
        for name, module in (("encoder", encoder), ("decoder", decoder)):
            require(isinstance(module, nn.Module), name, "VAE", "be an nn.Module", type(module).__name__)
            must = "have no buffers, such as a BatchNorm's"
            require(not list(module.buffers()), name, "VAE", must, ", ".join(n for n, _ in module.named_buffers()))
        require(is_integer(latent, 1), "latent", "VAE", "be an integer >= 1", repr(latent))
        likelihood = Gaussian() if likelihood is None else likelihood
        require(isinstance(likelihood, Likelihood), "likelihood", "VAE", "be a likelihood", type(likelihood).__name__)
        self.encoder, self.decoder = copy.deepcopy(encoder).eval(), copy.deepcopy(decoder).eval()
        self.likelihood = likelihood
        self.latent = int(latent)

    def __repr__(self) -> str:
        return f"VAE(latent={self.latent}, {self.likelihood!r})"

    @property
    def capabilities(self) -> Capabilities:
        """A model with hidden variables and an encoder, which amortised EM trains."""
        return CAPABILITIES

    def params(self, *shapes: tuple[int, ...]) -> dict[str, Param]:
        """Declare phi, the encoder's parameters, then theta: the decoder's and the likelihood's parameters."""
        networks = {ENCODER_PREFIX: self.encoder, DECODER_PREFIX: self.decoder}
        found = {prefix + n: Param(tuple(p.shape)) for prefix, m in networks.items() for n, p in m.named_parameters()}
        return found | {LIKELIHOOD_PREFIX + name: declared.param for name, declared in self.likelihood.declared.items()}

    @property
    def split(self) -> int:
        """Index of the first coordinate of theta in the flat vector, after phi."""
        return next(block.start for block in self.layout.blocks if not block.name.startswith(ENCODER_PREFIX))

    def begin(self, rows: Rows, how: str, generator: torch.Generator) -> Theta:
        """Initialise with the networks' parameters and the likelihood's start, and check that they suit the rows."""
        named = {ENCODER_PREFIX: self.encoder.named_parameters(), DECODER_PREFIX: self.decoder.named_parameters()}
        theta = {prefix + n: p.detach().to(self.device, self.dtype) for prefix, own in named.items() for n, p in own}
        theta |= {
            LIKELIHOOD_PREFIX + name: t.to(self.device, self.dtype)
            for name, t in self.likelihood.start(rows["y"]).items()
        }
        self._check_networks(theta, rows.at(torch.arange(1)))
        return {name: t.clone() for name, t in theta.items()}

    def _check_networks(self, theta: Theta, row: Rows) -> None:
        for name, inputs, wanted in (
            ("encoder", row["y"], (1, 2 * self.latent)),
            ("decoder", row["y"].new_zeros(1, self.latent), None),
        ):
            try:
                got = tuple(self._run(name, theta, inputs).shape)
            except InputError:
                raise
            except Exception as error:
                reason = str(error).strip().split("\n")[0]
                raise InputError(
                    f"The '{name}' argument of VAE must take {tuple(inputs.shape)}. It raised: {reason}"
                ) from error
            require(wanted is None or got == wanted, name, "VAE", f"give {wanted} for one row", got)
        self.log_weights(
            theta, row["y"], row["y"].new_zeros(1, 1, self.latent)
        )  # raises the likelihood's error if shapes don't agree

    # The equations.

    def encode(self, theta: Theta, y: Tensor) -> tuple[Tensor, Tensor]:
        """The mean and the log standard deviation of q(z | y), each (n, latent)."""
        return self._run("encoder", theta, y).chunk(2, -1)  # pyright: ignore[reportReturnType] - two chunks

    def decode(self, theta: Theta, z: Tensor, event: torch.Size) -> Tensor:
        """Return the outputs of the decoder at z (n, latent), arranged for rows of the shape `event`."""
        return self.likelihood.arrange(self._run("decoder", theta, z), event)

    def log_weights(self, theta: Theta, y: Tensor, noise: Tensor) -> Tensor:
        """log p(y, z) / q(z | y) at z = m + s e, (S, n), for noise e (S, n, latent)."""
        mean, log_std = self.encode(theta, y)
        z = mean + log_std.exp() * noise
        log_q = -(0.5 * (noise.square() + LOG_TAU) + log_std).sum(-1)
        log_prior = -0.5 * (z.square() + LOG_TAU).sum(-1)
        draws, n = noise.shape[:2]
        outputs = self.decode(theta, z.flatten(0, 1), y.shape[1:])
        learnt = {
            name.removeprefix(LIKELIHOOD_PREFIX): t for name, t in theta.items() if name.startswith(LIKELIHOOD_PREFIX)
        }
        every = self.likelihood.log_prob(outputs, y.repeat(draws, *[1] * (y.ndim - 1)), learnt)
        return every.reshape(draws, n) + log_prior - log_q

    def elbo(self, theta: Theta, y: Tensor, noise: Tensor) -> Tensor:
        """The mean of log w, (n,)."""
        return self.log_weights(theta, y, noise).mean(0)

    def iwae(self, theta: Theta, y: Tensor, noise: Tensor) -> Tensor:
        """The log of the mean of w, (n,)."""
        return self.log_weights(theta, y, noise).logsumexp(0) - math.log(len(noise))

    def noise(self, rows: int, draws: int, generator: torch.Generator) -> Tensor:
        """e, (S, n, latent)."""
        return torch.randn(draws, rows, self.latent, generator=generator, dtype=self.dtype, device=self.device)

    def generate(self, theta: Theta, n: int, generator: torch.Generator, steps: int | None = None) -> Generated:
        """z from its prior, and y from the likelihood."""
        assert self.shapes is not None
        learnt = {
            name.removeprefix(LIKELIHOOD_PREFIX): t for name, t in theta.items() if name.startswith(LIKELIHOOD_PREFIX)
        }
        z = self.noise(n, 1, generator)[0]
        return Generated(self.likelihood.draw(self.decode(theta, z, torch.Size(self.shapes[0])), learnt, generator), z)

    def e_step(self, theta: Theta, rows: Rows) -> Expectation:
        """Return the ELBO per row, with `rows.draws` draws, and no statistics: the M-step follows gradients."""
        generator = rows.generator or stream(0, "e-step", device=self.device)
        return Expectation({}, self.elbo(theta, rows["y"], self.noise(len(rows), max(1, rows.draws), generator)))

    def complete(self, theta: Theta, statistics: Mapping[str, Tensor]) -> Tensor:
        """Raise an error, because Q is not a function of a few statistics."""
        raise InputError(f"{self!r} has no closed M-step: fit it by AmortisedEM.")

    def _run(self, name: str, theta: Theta, inputs: Tensor) -> Tensor:
        params = {n.removeprefix(name + "."): t for n, t in theta.items() if n.startswith(name + ".")}
        return functional_call(getattr(self, name), params, (inputs,))


def has_encoder(model: object) -> TypeIs[VAE]:
    """Whether this is a model with an encoder, as it declares."""
    return isinstance(model, BaseModel) and model.capabilities.encoder
