"""Amortised variational EM: fits a variational auto-encoder by stochastic gradients.

    E-step   phi   <- phi   + rate * gradient of L in phi      q approaches p(z | y, theta): the gap closes
    M-step   theta <- theta + rate * gradient of L in theta    the bound rises, and log p(y | theta) with it

q(z | y, phi) is an encoder network. L is the ELBO, or the tighter bound of Burda, Grosse and Salakhutdinov (2016), of a
minibatch scaled to all rows, with reparameterised draws of z (Kingma and Welling 2014). By default phi and theta move
together by one gradient. `e_steps` adds steps of phi only before each joint step, which helps if the encoder lags
behind the decoder (He, Spokoyny, Neubig and Berg-Kirkpatrick 2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from priory.core.errors import is_integer, require
from priory.latent.vae import VAE, has_encoder
from priory.methods.base import Info, Options, Plan, Traits
from priory.methods.optimise import Adam, check_rate, default_steps, rates
from priory.posteriors.amortised import AmortisedPosterior

if TYPE_CHECKING:
    from priory.core.data import Batch, Data
    from priory.models.target import Target
    from priory.posteriors import Posterior


@dataclass
class AmortisedState:
    """phi and theta in one vector, and Adam's moments of each."""

    w: Tensor  # (*B, P)
    encoder: Adam
    decoder: Adam


@dataclass(frozen=True)
class AmortisedEM(Options):
    """Amortised variational EM: a point estimate of theta and an encoder, for `latent.VAE`.

    Maximises a bound on log p(y | theta) by minibatch gradients with Adam.

    Args:
        bound: "elbo" (default), or "iwae", the tighter importance-weighted bound.
        samples: Number of draws of z per row. Default: 1.
        e_steps: Number of additional encoder steps before each joint step. Default: 0.
        learning_rate: Learning rate of Adam. Default: 0.001.
        schedule: Schedule of the learning rate: "cosine" (default) or "constant".
        start: A posterior of an earlier fit to continue from. Default: None, the model's own initialisation.

    Example:
        >>> import torch
        >>> import priory as pr
        >>> y = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
        >>> model = pr.latent.VAE(torch.nn.Linear(3, 2), torch.nn.Linear(1, 3), latent=1)
        >>> posterior = pr.fit(model, y, pr.AmortisedEM(), epochs=5, progress=False)
        >>> mean, std = posterior.encode(y)
        >>> mean.shape
        torch.Size([200, 1])

    References:
        Kingma and Welling (2014), Auto-encoding variational Bayes.
        Burda, Grosse and Salakhutdinov (2016), Importance weighted autoencoders.
        He, Spokoyny, Neubig and Berg-Kirkpatrick (2019), Lagging inference networks and posterior collapse in
        variational autoencoders.
    """

    bound: Literal["elbo", "iwae"] = "elbo"
    samples: int = 1
    e_steps: int = 0
    learning_rate: float = 1e-3
    schedule: str = "cosine"
    start: AmortisedPosterior | None = None

    def __post_init__(self) -> None:
        require(self.bound in ("elbo", "iwae"), "bound", "AmortisedEM", "be 'elbo' or 'iwae'", repr(self.bound))
        require(is_integer(self.samples, 1), "samples", "AmortisedEM", "be an integer >= 1", repr(self.samples))
        require(is_integer(self.e_steps, 0), "e_steps", "AmortisedEM", "be an integer >= 0", repr(self.e_steps))
        check_rate(self.learning_rate, self.schedule, "AmortisedEM")

    @property
    def traits(self) -> Traits:
        return Traits()

    def length(self, data: Data) -> int:
        return default_steps(data.steps_per_epoch, epochs=100, least=2_000, most=50_000)

    def plan(self, target: Target, data: Data, steps: int, seed: int) -> Plan:
        vae_of(target)
        require(target.temperature == 1, "temperature", "AmortisedEM", "be 1", target.temperature)
        return Plan(data, steps)

    def init(
        self,
        target: Target,
        plan: Plan,
        generator: torch.Generator,
        shape: torch.Size = torch.Size(),
        start: Posterior | None = None,
    ) -> AmortisedState:
        model = vae_of(target)
        theta = model.begin(model.rows(plan.data.some(model.sample)), "", generator) if start is None else start.mean
        w = model.layout.unconstrain(theta).expand(*shape, -1).clone()
        moving = rates(self.schedule, self.learning_rate, plan.steps, "AmortisedEM")
        alone = moving.repeat_interleave(self.e_steps + 1)
        return AmortisedState(
            w, Adam.of(w[..., : model.split].clone(), alone), Adam.of(w[..., model.split :].clone(), moving)
        )

    def step(
        self, target: Target, state: AmortisedState, batch: Batch, generator: torch.Generator
    ) -> tuple[AmortisedState, Info]:
        split = vae_of(target).split
        for _ in range(self.e_steps):
            _, gradient = self.bound_and_grad(target, state.w, batch, generator)
            move(state.encoder, state.w[..., :split], gradient[..., :split])
        value, gradient = self.bound_and_grad(target, state.w, batch, generator)
        move(state.encoder, state.w[..., :split], gradient[..., :split])
        move(state.decoder, state.w[..., split:], gradient[..., split:])
        return state, Info({"bound": value})

    def posterior(self, target: Target, state: AmortisedState, draws: Tensor | None = None) -> AmortisedPosterior:
        return AmortisedPosterior(target, state.w.reshape(-1, state.w.shape[-1])[0])

    def bound_and_grad(
        self, target: Target, w: Tensor, batch: Batch, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """The bound for all rows, estimated from the batch, and its gradient: (*B,), (*B, P)."""
        model, y = vae_of(target), batch[0]
        leaf, values = w.detach().requires_grad_(), []
        with torch.enable_grad():
            for one in leaf.reshape(-1, w.shape[-1]):
                noise = model.noise(len(y), self.samples, generator)
                function = model.elbo if self.bound == "elbo" else model.iwae
                values.append(target.factor(batch) * function(model.layout.constrain(one), y, noise).sum())
            total = torch.stack(values)
            (gradient,) = torch.autograd.grad(total.sum(), leaf)
        return total.detach().reshape(w.shape[:-1]), gradient


def move(adam: Adam, part: Tensor, gradient: Tensor) -> None:
    """Take one Adam step up the gradient; Adam's kernel needs contiguous memory."""
    moved = part.clone(memory_format=torch.contiguous_format)
    adam.descend(moved, -gradient)
    part.copy_(moved)


def vae_of(target: Target) -> VAE:
    """Return the target's model, which must be a VAE."""
    model = target.model
    require(has_encoder(model), "model", "AmortisedEM", "be a latent.VAE", type(model).__name__)
    assert has_encoder(model)
    return model
