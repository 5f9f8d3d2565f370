"""Dropout as variational inference (Gal and Ghahramani 2016, "Dropout as a Bayesian Approximation").

q drops input units of layers: w = m z, with z = 0 at the rate p and 1 / (1 - p) otherwise, one z for all weights of a
unit (see `priory.network.dropout_sites`). Under a prior N(m0, 1/lambda) over each weight the loss is

    -E_q[log p(D | w)] + sum_i lambda_i / 2 ((m_i - m0_i)^2 + m_i^2 a_i) - sum_u H(p_u),    a = p / (1 - p)

which is the negative bound, up to a constant that doesn't depend on m and p: weight decay divided by 1 - p, and the
entropy of the masks, H(p) = -p log p - (1 - p) log(1 - p). (In the lectures' form, without the factor 1 / (1 - p) on
the kept units, the decay is multiplied by 1 - p, which gives the same number.) In training, each row has its own masks
where a layer allows it (`priory.network.row_masks`); in predictions, each draw of the weights has one mask.

Rates are given; or learnt with the weights (`rate="learn"`) through a relaxed mask (concrete dropout, Gal, Hron and
Kendall 2017), where the entropy keeps them away from 0; or searched: several rates are fitted side by side, and
held-out rows select one.

With `noise="gaussian"` the factor is N(1, a) (Srivastava et al. 2014). With learnt rates it is variational Gaussian
dropout (Kingma, Salimans and Welling 2015) with one factor per unit: the factors have the log-uniform prior 1/|z|,
which is **improper**, and the prior of the weights that they multiply is not used; the loss is then not a bound on an
evidence.

A noise scale that the likelihood learns is set on held-out rows, as in MAP. Cost of a step: one pass and O(P).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import Normal
from torch.nn.functional import softplus

from priory.core.data import weighted_sum
from priory.core.errors import InputError, is_integer, require, warn
from priory.core.streams import stream
from priory.distributions import LogUniform
from priory.divergences import kl
from priory.methods.base import Info, Options, Plan, Traits
from priory.methods.optimise import Adam, check_rate, default_steps, rates
from priory.methods.point.held_out import (
    HELD_ROWS,
    check_holdout,
    learn_from_held_out,
    learns,
    plan_with_held_rows,
    updates_noise,
)
from priory.models.base import has_network
from priory.models.model import Model
from priory.network.dropout_off import DropoutOff
from priory.network.dropout_sites import DropoutUnits, drop_rate, sites_by_layer
from priory.network.row_masks import RowMasks
from priory.network.traced_dropout import sites_in_network
from priory.posteriors import Masked, Posterior
from priory.posteriors.masked import factors

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from priory.core.data import Batch, Data
    from priory.models.target import Target

MASK_TEMPERATURE = 0.1  # of a relaxed mask, as in Gal, Hron and Kendall (2017)
DEFAULT_RATE = 0.1  # where neither the user nor the network gives one
HELD_OUT_MASKS = 16  # masks for the prediction of held-out rows
MAX_GAUSSIAN_LOGIT = 0.0  # logit of the largest learnt rate of Gaussian noise, a = 1; above it the KL is constant


@dataclass
class DropoutState:
    """The means and the logits of the rates, one set per searched rate, and Adam's moments."""

    theta: Tensor  # (*B, R, P + L)
    adam: Adam
    buffers: dict[str, Tensor]
    chosen: Tensor  # (*B,), the index of the rate that the held-out rows selected
    masks: RowMasks = field(metadata={"fixed": True})
    held: Batch | None = field(metadata={"fixed": True})
    turn: int = field(metadata={"fixed": True})  # the step from which all rows are used


@dataclass(frozen=True)
class Dropout(Options):
    """Variational inference by dropout of units.

    A network without dropout gets it in front of every linear, convolutional and recurrent layer except the first.
    Dropout that the network already has, as modules or functions, defines the units instead, and is switched off during
    the fit.

    Args:
        rate: Probability of dropping a unit; "learn" to learn the rates with the weights; or a tuple of rates, of which
            held-out rows select one. Default: None, the rate of the network's own dropout, or 0.1.
        noise: Distribution of the factors: "bernoulli" (default) or "gaussian".
        inputs: Whether to drop the network's inputs too. Has no effect where a network has its own dropout. Default:
            False.
        samples: Number of masks per step. Default: 1.
        learning_rate: Learning rate of Adam. Default: 0.01.
        schedule: Schedule of the learning rate: "cosine" (default), "constant", or a function from an optimiser to a
            `torch.optim` scheduler.
        holdout: Share of rows, between 0 and 1, held out to set a learnt noise scale or to select a rate. Default:
            None, chosen from the size of the data.
        start: A method such as `MAP()` or a fitted posterior to start from. Default: None, the network's
            initialisation.

    Example:
        >>> import torch
        >>> import priory as pr
        >>> X = torch.linspace(-1, 1, 50)[:, None]
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> model = pr.Model(net, pr.Gaussian(0.1))
        >>> posterior = pr.fit(model, (X, X[:, 0]), pr.Dropout(0.1), steps=1000, progress=False)
        >>> {name: round(rate, 3) for name, rate in posterior.rates.items()}
        {'2.weight': 0.1}

    References:
        Gal and Ghahramani (2016), Dropout as a Bayesian approximation.
        Gal, Hron and Kendall (2017), Concrete dropout.
        Kingma, Salimans and Welling (2015), Variational dropout and the local reparameterization trick.
    """

    rate: float | str | tuple[float, ...] | None = None
    noise: str = "bernoulli"
    inputs: bool = False
    samples: int = 1
    learning_rate: float = 1e-2
    schedule: str | Callable[[Optimizer], LRScheduler] = "cosine"
    holdout: float | None = None
    start: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.rate, (list, tuple)):
            require(len(self.rate) > 1, "rate", "Dropout", "be two rates or more if it is a list", tuple(self.rate))
            object.__setattr__(self, "rate", tuple(drop_rate(rate, "Dropout") for rate in self.rate))
        elif self.rate is not None and not (isinstance(self.rate, str) and self.rate == "learn"):
            object.__setattr__(self, "rate", drop_rate(self.rate, "Dropout"))
        known = self.noise in ("bernoulli", "gaussian")
        require(known, "noise", "Dropout", "be 'bernoulli' or 'gaussian'", repr(self.noise))
        require(isinstance(self.inputs, bool), "inputs", "Dropout", "be True or False", repr(self.inputs))
        require(is_integer(self.samples, 1), "samples", "Dropout", "be an integer >= 1", repr(self.samples))
        check_holdout(self.holdout, "Dropout")
        check_rate(self.learning_rate, self.schedule, "Dropout")

    @property
    def traits(self) -> Traits:
        return Traits(draws_masks=True, learns_rates=self.learns_rates)

    @property
    def learns_rates(self) -> bool:
        """Whether the rates are learnt with the weights."""
        return self.rate == "learn"

    @property
    def log_uniform(self) -> bool:
        """Whether the factors have the improper prior of variational Gaussian dropout."""
        return self.learns_rates and self.noise == "gaussian"

    def length(self, data: Data) -> int:
        return default_steps(data.steps_per_epoch, epochs=200, least=4_000, most=50_000)

    def plan(self, target: Target, data: Data, steps: int, seed: int) -> Plan:
        if not has_network(target.model):
            raise InputError(f"Dropout needs a Model: a {type(target.model).__name__} has no units to drop.")
        if self.log_uniform:
            warn(
                "Learnt Gaussian dropout has an improper prior, 1/|z| over each factor: the prior of the weights that "
                "are multiplied is not used, and the loss bounds no evidence."
            )
        if not learns(target) and not isinstance(self.rate, tuple):
            return Plan(data, steps)
        named = ("noise", "as in Gaussian(0.1)") if learns(target) else ("rate", "as in Dropout(rate=0.1)")
        return plan_with_held_rows(data, steps, self.holdout, seed, *named)

    def init(
        self,
        target: Target,
        plan: Plan,
        generator: torch.Generator,
        shape: torch.Size = torch.Size(),
        start: Posterior | None = None,
    ) -> DropoutState:
        model = target.model
        assert has_network(model)
        some = plan.data.some(2)[:-1]
        units, own = sites_of(model, some, self.inputs)
        searched = self.rate if isinstance(self.rate, tuple) else (self.rate,)
        p = torch.stack([rates_of(rate, own, model.network.initial) for rate in searched])  # (R, L)
        w = target.start(plan.data, shape, generator, start)
        lead = (*shape, len(searched))
        logits = torch.logit(p).clamp_max(MAX_GAUSSIAN_LOGIT if self.log_uniform else math.inf)
        theta = torch.cat([w.unsqueeze(-2).expand(*lead, -1), logits.expand(*lead, -1)], -1).contiguous()
        adam = Adam.of(theta, rates(self.schedule, self.learning_rate, plan.steps, "Dropout"))
        held = None if plan.held is None else plan.held.some(HELD_ROWS)
        buffers = target.buffers(torch.Size(lead), start)
        masks = RowMasks(model.evaluation, units, some, model.buffers())
        return DropoutState(theta, adam, buffers, torch.zeros(shape, dtype=torch.int64), masks, held, plan.turn)

    def step(
        self, target: Target, state: DropoutState, batch: Batch, generator: torch.Generator
    ) -> tuple[DropoutState, Info]:
        self._use_held_rows(target, state, generator)
        units, size = state.masks.units, target.size
        loc, logits = state.theta[..., :size], state.theta[..., size:]
        with torch.set_grad_enabled(self.learns_rates):
            logits = logits.detach().requires_grad_(self.learns_rates)
            z = self._factors(logits, units, len(batch[0]), generator)  # (S, *B, R, U, n)
            value, toward, along = self._likelihood(target, state, loc, z.detach(), batch)
            cross, entropy = self._parts(target, loc, logits, units)
            penalty = target.prior_weight * cross - target.entropy_weight * entropy
            down = torch.zeros_like(state.theta)
            down[..., :size] = self._decay(target, loc, logits.detach(), units).mul_(target.prior_weight)
            down[..., :size] -= toward.mean(0)
            if along is not None:
                total = penalty.sum() - (along * z).sum() / self.samples  # members are independent
                down[..., size:] = torch.autograd.grad(total, logits, retain_graph=True)[0]
        if target.prior.others:
            others = self._others(target, loc, logits, z, units, down)
            cross, penalty = cross - others, penalty - target.prior_weight * others
        down[..., target.model.learnt.start : size] = 0  # set on held-out rows
        state.adam.descend(state.theta, down)
        if self.log_uniform:
            state.theta[..., size:].clamp_max_(MAX_GAUSSIAN_LOGIT)
        nll = -value.mean(0)
        metrics = {"loss": nll + penalty.detach(), "nll": nll, "kl": (cross - entropy).detach()}
        return state, Info({name: at(number, state.chosen) for name, number in metrics.items()})

    def posterior(self, target: Target, state: DropoutState, draws: Tensor | None = None) -> Masked:
        chosen = state.chosen
        if isinstance(self.rate, tuple) and state.adam.step <= state.turn:  # no rate is selected yet
            chosen = self._best(target, state, stream(0, "dropout", device=target.model.device))
        theta = at(state.theta, chosen)
        loc, p = theta[: target.size], theta[target.size :].sigmoid()
        assert has_network(target.model)
        own = {name: at(b, chosen) for name, b in state.buffers.items()}
        return Masked(target, loc, p, state.masks.units, self.noise, own)

    # The mathematics.

    def _likelihood(
        self, target: Target, state: DropoutState, loc: Tensor, z: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """log p(D | w) of each draw, (S, *B, R), and its gradients in the means and, if rates are learnt, in z."""
        means = loc.expand(self.samples, *loc.shape)
        value, toward, along = state.masks.log_likelihood_and_grads(
            means.reshape(-1, target.size),
            z.reshape(-1, *z.shape[-2:]),
            batch,
            target.factor(batch),
            state.buffers,
            along=self.learns_rates,
        )
        return value.view(z.shape[:-2]), toward.view(means.shape), None if along is None else along.view(z.shape)

    def _factors(self, logits: Tensor, units: DropoutUnits, rows: int, generator: torch.Generator) -> Tensor:
        """Factors of the units for each row, (S, *B, R, U, n), differentiable in rates that are learnt."""
        each = logits[..., units.site, None]
        shape = torch.Size([self.samples, *each.shape[:-1], rows])
        if not self.learns_rates:
            return factors(each.sigmoid(), shape, self.noise, generator)
        if self.noise == "gaussian":
            z = torch.randn(shape, generator=generator, dtype=each.dtype, device=each.device)
            return 1 + (0.5 * each).exp() * z
        u = torch.rand(shape, generator=generator, dtype=each.dtype, device=each.device)
        dropped = torch.sigmoid((each + torch.logit(u, eps=1e-6)) / MASK_TEMPERATURE)
        return (1 - dropped) * (1 + each.exp())  # 1 / (1 - p) = 1 + p / (1 - p)

    def _precision(self, target: Target, units: DropoutUnits) -> Tensor:
        """Precisions of the Gaussian priors, (P,); zero for weights whose factors have a prior instead."""
        precision = target.prior.precision
        return precision * ~units.masked if self.log_uniform else precision

    def _parts(self, target: Target, loc: Tensor, logits: Tensor, units: DropoutUnits) -> tuple[Tensor, Tensor]:
        """-E_q[log p(w)] of the Gaussian priors, and the entropy of the factors up to a constant, (*B, R) each."""
        prior, precision = target.prior, self._precision(target, units)
        spread = (logits.exp() * units.sums(precision * loc.square())).sum(-1)  # a is exp(logit)
        cross = 0.5 * ((precision * (loc - prior.loc).square()).sum(-1) + spread) - prior.log_normaliser
        if self.log_uniform:  # the KL to the prior of the factors
            each = -kl(Normal(torch.ones_like(logits), (0.5 * logits).exp()), LogUniform()).value
        elif self.noise == "gaussian":  # constant for given rates
            each = torch.zeros_like(logits)
        else:
            each = softplus(logits) - logits.sigmoid() * logits  # H(p) at the logit of p
        return cross, (each * each.new_tensor(units.counts)).sum(-1)

    def _decay(self, target: Target, loc: Tensor, logits: Tensor, units: DropoutUnits) -> Tensor:
        """The gradient of -E_q[log p(w)] of the Gaussian priors in the means, (*B, R, P)."""
        precision = self._precision(target, units)
        down, a = precision * (loc - target.prior.loc), logits.exp()
        for i, places in enumerate(units.places):
            for place in places:
                down[..., place] += a[..., i, None] * precision[..., place] * loc[..., place]
        return down

    def _others(
        self, target: Target, loc: Tensor, logits: Tensor, z: Tensor, units: DropoutUnits, down: Tensor
    ) -> Tensor:
        """E_q[log p(w)] of priors that are not Gaussian, (*B, R), from draws of the first row; adds its gradient."""
        with torch.enable_grad():
            leaf = loc.detach().requires_grad_()
            others = target.prior.log_prob_of_others(leaf * units.spread(z[..., 0])).mean(0)
            into = (leaf, logits) if self.learns_rates else (leaf,)
            gradients = torch.autograd.grad(others.sum(), into, allow_unused=True)
        for gradient, place in zip(gradients, (slice(0, target.size), slice(target.size, None)), strict=False):
            if gradient is not None:
                down[..., place].sub_(gradient, alpha=target.prior_weight)
        return others.detach()

    # Held-out rows.

    def _use_held_rows(self, target: Target, state: DropoutState, generator: torch.Generator) -> None:
        """Set a learnt noise scale on the held-out rows until all rows are used; then select a rate by them."""
        step, model = state.adam.step, target.model
        if state.held is None or step > state.turn:
            return
        assert has_network(model)
        if learns(target) and updates_noise(step, state.turn):
            with DropoutOff():
                tail = learn_from_held_out(target, self._drawn(target, state, generator), state.held, state.buffers)
            state.theta[..., model.learnt] = tail
        if isinstance(self.rate, tuple) and step == state.turn:
            state.chosen = self._best(target, state, generator)

    def _best(self, target: Target, state: DropoutState, generator: torch.Generator) -> Tensor:
        """The index of the rate that predicts the held-out rows best, (*B,)."""
        assert state.held is not None
        draws = self._drawn(target, state, generator)
        with DropoutOff():
            scores = target.pointwise(draws, state.held, state.buffers)  # (S, *B, R, n)
        weights = target.row_weights(state.held)
        return weighted_sum(torch.logsumexp(scores, 0), weights).argmax(-1)

    def _drawn(self, target: Target, state: DropoutState, generator: torch.Generator) -> Tensor:
        """Draws of the weights, (S, *B, R, P)."""
        loc, logits = state.theta[..., : target.size], state.theta[..., target.size :]
        units, p = state.masks.units, logits.sigmoid()[..., state.masks.units.site]
        return loc * units.spread(factors(p, torch.Size([HELD_OUT_MASKS, *p.shape]), self.noise, generator))


def sites_of(model: Model, inputs: Batch, first: bool) -> tuple[DropoutUnits, list[float | None]]:
    """The units that are dropped, and the network's own rate at each site."""
    sites = sites_in_network(model.network, inputs) or sites_by_layer(model.network, first, inputs)
    return DropoutUnits.of(model.network, sites, model.layout.size), [site.rate for site in sites]


def rates_of(rate: float | str | None, own: list[float | None], like: Tensor) -> Tensor:
    """The initial rate of each site, (L,): as given, else the network's own, else the default."""
    if isinstance(rate, float | int):
        return like.new_full((len(own),), float(rate))
    return like.new_tensor([DEFAULT_RATE if given is None else given for given in own])


def at(values: Tensor, chosen: Tensor) -> Tensor:
    """The entries (*B, ...) of values (*B, R, ...) at the index `chosen` (*B,)."""
    lead = chosen.ndim
    index = chosen.reshape(*chosen.shape, 1, *[1] * (values.ndim - lead - 1)).to(values.device)
    return values.gather(lead, index.expand(*chosen.shape, 1, *values.shape[lead + 1 :])).squeeze(lead)
