"""Dropout as variational inference (Gal and Ghahramani 2016, "Dropout as a Bayesian Approximation").

q drops input units of layers: w = m z, with z = 0 at the rate p and 1 / (1 - p) otherwise, one z for all weights of a
unit (see `priory.masks`). Under a prior N(m0, 1/lambda) over each weight the loss is

    -E_q[log p(D | w)] + sum_i lambda_i / 2 ((m_i - m0_i)^2 + m_i^2 a_i) - sum_u H(p_u),    a = p / (1 - p)

which is the bound up to a constant that depends on neither m nor p: weight decay divided by 1 - p, and the entropy of
the masks, H(p) = -p log p - (1 - p) log(1 - p). (In the lectures' form, without the factor 1 / (1 - p) on what is kept,
the decay is multiplied by 1 - p: the same number.) Every step draws one mask for the batch; predictions draw one each.

Rates are given; or `"learn"`ed with the weights through a relaxed mask (concrete dropout, Gal, Hron and Kendall 2017),
which the entropy keeps away from 0; or searched: several are fitted side by side and rows held out choose one.

With `noise="gaussian"` the factor is N(1, a) (Srivastava et al. 2014). Learnt, it is variational Gaussian dropout
(Kingma, Salimans and Welling 2015) with a factor a unit: the factors have the log-uniform prior 1/|z|, which is
**improper**, and the prior of the weights that they multiply is not used; the loss is then no bound on an evidence.

A noise that the likelihood learns is set on held-out rows, as in MAP. Cost of a step: one pass and O(P).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.distributions import Normal
from torch.nn.functional import softplus

from priory.distributions import LogUniform
from priory.divergences import kl
from priory.errors import InputError, require, warn, whole
from priory.masks import Quiet, Units, by_layer, drop_rate, in_network
from priory.methods.base import Info, Options, Plan
from priory.methods.held_out import HELD_ROWS, SETTLE_EVERY, fraction_held, learns, settled
from priory.methods.optimise import Adam, check_rate, default_steps, rates
from priory.model import Model
from priory.posteriors import Masked, Posterior
from priory.posteriors.masked import factors

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from priory.data import Batch, Data
    from priory.target import Target

RELAXED = 0.1  # the temperature of a relaxed mask, as in the paper
USUAL = 0.1  # the rate where neither the person nor the network names one
LOOKS = 16  # masks by which held-out rows are predicted
WIDEST = 0.0  # the logit of the largest rate that Gaussian noise may learn, a = 1, above which its KL has no slope


@dataclass
class State:
    """The means and the logits of the rates, led by those that are searched; Adam's moments."""

    theta: Tensor  # (*B, R, P + L)
    adam: Adam
    buffers: dict[str, Tensor]
    chosen: Tensor  # (*B,), which of the R rates the held-out rows have chosen
    units: Units = field(metadata={"fixed": True})
    held: Batch | None = field(metadata={"fixed": True})
    turn: int = field(metadata={"fixed": True})  # the step from which every row is seen


@dataclass(frozen=True)
class Dropout(Options):
    """Variational inference by dropping units.

    `rate` is the probability of dropping a unit; or "learn"; or several, of which held-out rows choose one. Unless
    given it is that of the network's own dropout, as modules or functions, which is then off during the fit; or 0.1. A
    network without dropout gets it in front of every linear, convolutional and recurrent layer but the first, and with
    `inputs` there too. `noise` is "bernoulli" or "gaussian". The other options are those of MAP and MeanField.

    >>> Dropout(rate=1.5)
    Traceback (most recent call last):
    ...
    priory.errors.InputError: The 'rate' of Dropout must lie between 0 and 1. Got 1.5 instead.
    """

    rate: float | str | tuple[float, ...] | None = None
    noise: str = "bernoulli"
    inputs: bool = False
    samples: int = 1
    learning_rate: float = 1e-2
    schedule: str | Callable[[Optimizer], LRScheduler] = "cosine"
    holdout: float | None = None
    start: Any = None

    reads: ClassVar[Literal["batch", "pass"]] = "batch"
    drops: ClassVar[bool] = True  # masks are drawn here: the network's own dropout is to be silent

    def __post_init__(self) -> None:
        if isinstance(self.rate, (list, tuple)):
            require(len(self.rate) > 1, "rate", "Dropout", "be two rates or more if it is a list", tuple(self.rate))
            object.__setattr__(self, "rate", tuple(drop_rate(rate, "Dropout") for rate in self.rate))
        elif self.rate is not None and not (isinstance(self.rate, str) and self.rate == "learn"):
            object.__setattr__(self, "rate", drop_rate(self.rate, "Dropout"))
        known = self.noise in ("bernoulli", "gaussian")
        require(known, "noise", "Dropout", "be 'bernoulli' or 'gaussian'", repr(self.noise))
        require(isinstance(self.inputs, bool), "inputs", "Dropout", "be True or False", repr(self.inputs))
        require(whole(self.samples, 1), "samples", "Dropout", "be a whole number from 1", repr(self.samples))
        ok = self.holdout is None or (isinstance(self.holdout, (int, float)) and 0 < self.holdout < 1)
        require(ok, "holdout", "Dropout", "lie between 0 and 1", self.holdout)
        check_rate(self.learning_rate, self.schedule, "Dropout")

    @property
    def learns_rates(self) -> bool:
        """Whether rates are moved with the weights."""
        return self.rate == "learn"

    @property
    def log_uniform(self) -> bool:
        """Whether the factors have the improper prior of variational Gaussian dropout."""
        return self.learns_rates and self.noise == "gaussian"

    def length(self, data: Data) -> int:
        return default_steps(data.steps_per_epoch, epochs=200, least=4_000, most=50_000)

    def plan(self, target: Target, data: Data, steps: int, seed: int) -> Plan:
        if not isinstance(target.model, Model):
            raise InputError("Dropout needs a Model: a Density has no units to drop.")
        if self.log_uniform:
            warn(
                "Learnt Gaussian dropout has an improper prior, 1/|z| over each factor: the prior of the weights that "
                "are multiplied is not used, and the loss bounds no evidence."
            )
        if not learns(target) and not isinstance(self.rate, tuple):
            return Plan(data, steps)
        early, held = data.split(self.holdout or fraction_held(data), seed)
        return Plan(data, steps, turn=max(1, 2 * steps // 3), early=early, held=held)

    def init(
        self,
        target: Target,
        plan: Plan,
        generator: torch.Generator,
        shape: torch.Size = torch.Size(),
        start: Posterior | None = None,
    ) -> State:
        model = target.model
        assert isinstance(model, Model)
        units, own = sites_of(model, plan.data.some(2)[:-1], self.inputs)
        searched = self.rate if isinstance(self.rate, tuple) else (self.rate,)
        p = torch.stack([rates_of(rate, own, model.network.initial) for rate in searched])  # (R, L)
        w = target.start(plan.data, shape, generator, start)
        lead = (*shape, len(searched))
        logits = torch.logit(p).clamp_max(WIDEST if self.log_uniform else math.inf)
        theta = torch.cat([w.unsqueeze(-2).expand(*lead, -1), logits.expand(*lead, -1)], -1).contiguous()
        adam = Adam.of(theta, rates(self.schedule, self.learning_rate, plan.steps, "Dropout"))
        held = None if plan.held is None else plan.held.some(HELD_ROWS)
        buffers = target.buffers(torch.Size(lead), start)
        return State(theta, adam, buffers, torch.zeros(shape, dtype=torch.int64), units, held, plan.turn)

    def step(self, target: Target, state: State, batch: Batch, generator: torch.Generator) -> tuple[State, Info]:
        self._look(target, state, generator)
        leaf = state.theta.detach().requires_grad_()
        with torch.enable_grad():
            loc, logits = leaf[..., : target.size], leaf[..., target.size :]
            logits = logits if self.learns_rates else logits.detach()
            w = loc * state.units.spread(self._factors(logits, state.units, generator))  # (S, *B, R, P)
            value, gradient = self._likelihood(target, w.detach(), batch, state.buffers)
            value, gradient = value.reshape(w.shape[:-1]), gradient.reshape(w.shape)
            cross, entropy = self._parts(target, loc, logits, state.units, w)
            penalty = target.prior_weight * cross - target.entropy_weight * entropy
            total = (penalty - torch.linalg.vecdot(gradient, w).mean(0)).sum()  # members don't meet
            (down,) = torch.autograd.grad(total, leaf)
        down[..., target.model.learnt.start : target.size] = 0  # set on held-out rows
        state.adam.descend(state.theta, down)
        if self.log_uniform:
            state.theta[..., target.size :].clamp_max_(WIDEST)
        nll = -value.mean(0)
        told = {"loss": nll + penalty.detach(), "nll": nll, "kl": (cross - entropy).detach()}
        return state, Info({name: at(number, state.chosen) for name, number in told.items()})

    def posterior(self, target: Target, state: State, draws: Tensor | None = None) -> Masked:
        theta = at(state.theta, state.chosen)
        loc, p = theta[: target.size], theta[target.size :].sigmoid()
        assert isinstance(target.model, Model)
        own = {name: at(b, state.chosen) for name, b in state.buffers.items()}
        return Masked(target, loc, p, state.units, self.noise, own)

    # The mathematics.

    def _likelihood(self, target: Target, w: Tensor, batch: Batch, buffers: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """log p(D | w) and its gradient at vectors (S, *B, R, P); a single one takes the way of one vector."""
        if w[..., 0].numel() > 1:
            return target.log_likelihood_and_grad(w, batch, buffers)
        assert isinstance(target.model, Model)
        return target.log_likelihood_and_grad(w.reshape(-1), batch, target.model.member(buffers, 0))

    def _factors(self, logits: Tensor, units: Units, generator: torch.Generator) -> Tensor:
        """Factors of the units, (S, *B, R, U), through which gradients reach rates that are learnt."""
        each = logits[..., units.site].expand(self.samples, *logits.shape[:-1], -1)
        if not self.learns_rates:
            return factors(each.sigmoid(), self.noise, generator)
        if self.noise == "gaussian":
            z = torch.randn(each.shape, generator=generator, dtype=each.dtype, device=each.device)
            return 1 + (0.5 * each).exp() * z
        u = torch.rand(each.shape, generator=generator, dtype=each.dtype, device=each.device)
        dropped = torch.sigmoid((each + torch.logit(u, eps=1e-6)) / RELAXED)
        return (1 - dropped) * (1 + each.exp())  # 1 / (1 - p) = 1 + p / (1 - p)

    def _parts(self, target: Target, loc: Tensor, logits: Tensor, units: Units, w: Tensor) -> tuple[Tensor, Tensor]:
        """-E_q[log p(w)] from the second moments, and the entropy of the factors up to a constant, (*B, R) each."""
        prior = target.model.prior
        spread = units.spread(logits.exp()[..., units.site]) * units.masked  # a of each coordinate, 0 where none
        precision = prior.precision * ~units.masked if self.log_uniform else prior.precision
        square = (loc - prior.loc).square() + loc.square() * spread
        cross = 0.5 * (precision * square).sum(-1) - prior.log_normaliser
        if prior.others:
            cross = cross - prior.log_prob_of_others(w).mean(0)
        counts = torch.bincount(units.site, minlength=logits.shape[-1]).to(logits)
        if self.log_uniform:  # with the factors' own prior
            each = -kl(Normal(torch.ones_like(logits), (0.5 * logits).exp()), LogUniform()).value
        elif self.noise == "gaussian":  # where rates are given, a constant
            each = torch.zeros_like(logits)
        else:
            each = softplus(logits) - logits.sigmoid() * logits  # H(p) at the logit of p
        return cross, (counts * each).sum(-1)

    # Held-out rows.

    def _look(self, target: Target, state: State, generator: torch.Generator) -> None:
        """Set a learnt noise on the held-out rows, until all rows are seen; then let them choose among rates."""
        step, model = state.adam.step, target.model
        if state.held is None or step > state.turn:
            return
        assert isinstance(model, Model)
        if learns(target) and step < state.turn and step % SETTLE_EVERY == 0:
            with Quiet():
                tail = settled(model, self._drawn(target, state, generator), state.held, state.buffers)
            state.theta[..., model.learnt] = tail
        if isinstance(self.rate, tuple) and step == state.turn:
            draws = self._drawn(target, state, generator)
            with Quiet():
                scores = target.pointwise(draws, state.held, state.buffers)  # (S, *B, R, n)
            best = (torch.logsumexp(scores, 0).sum(-1)).argmax(-1)
            state.chosen = best

    def _drawn(self, target: Target, state: State, generator: torch.Generator) -> Tensor:
        """Draws of the weights, (S, *B, R, P)."""
        loc, logits = state.theta[..., : target.size], state.theta[..., target.size :]
        p = logits.sigmoid()[..., state.units.site].expand(LOOKS, *logits.shape[:-1], -1)
        return loc * state.units.spread(factors(p, self.noise, generator))


def sites_of(model: Model, inputs: Batch, first: bool) -> tuple[Units, list[float | None]]:
    """The units that are dropped, and the rate that the network itself has for each site."""
    sites = in_network(model.network, inputs) or by_layer(model.network, first)
    return Units.of(model.network, sites, model.layout.size), [site.rate for site in sites]


def rates_of(rate: float | str | None, own: list[float | None], like: Tensor) -> Tensor:
    """The rate of each site to begin with, (L,): as given, else the network's own, else the usual one."""
    if isinstance(rate, float | int):
        return like.new_full((len(own),), float(rate))
    return like.new_tensor([USUAL if given is None else given for given in own])


def at(values: Tensor, chosen: Tensor) -> Tensor:
    """The entries (*B, ...) of values (*B, R, ...) at the chosen of the R."""
    lead = chosen.ndim
    index = chosen.reshape(*chosen.shape, 1, *[1] * (values.ndim - lead - 1)).to(values.device)
    return values.gather(lead, index.expand(*chosen.shape, 1, *values.shape[lead + 1 :])).squeeze(lead)
