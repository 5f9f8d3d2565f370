"""A Bayesian last layer on the features of a trained network, as in Bayesian linear regression.

`at` trains the layers before the last. The posterior over the last layer is that of a generalised linear model on their
features (`priory.curvature.last_layer`). With Gaussian noise it is conjugate and exact (Bishop 2006, 3.3); for labels
and counts it is the Laplace approximation at the exact mode (4.5). `posterior.update` adds later rows without access to
the earlier ones (recursive least squares, for Gaussian noise).

Snoek et al. 2015, "Scalable Bayesian Optimization Using Deep Neural Networks"; Kristiadi et al. 2020, "Being Bayesian,
Even Just a Bit, Fixes Overconfidence in ReLU Networks".

Cost: a few passes of the network over the data, and n K^2 D^2 for D features and K outputs; memory (K D)^2.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from priory.core.data import Data
from priory.core.errors import InputError, require
from priory.curvature import Pass, select
from priory.curvature.full import Full
from priory.curvature.last_layer import LastLayerGaussian, OutputLayer, newton
from priory.curvature.tuning import tune
from priory.methods.base import Info, Options, Plan, Traits, centre_of, factors_of
from priory.methods.point.held_out import learns
from priory.methods.point.map import MAP
from priory.posteriors import LastLayerPosterior, Posterior
from priory.posteriors.status import CONVERGED, Status, of_start

if TYPE_CHECKING:
    from torch import Tensor

    from priory.models.target import Target

MEMORY_LIMIT_BYTES = 1 << 32
MATRICES_HELD = 5  # of (K D)^2 numbers: the prior precision, the curvature twice, their sum and its factor
FLOAT64_BYTES = 8
NOISE_ROUNDS = 3  # alternating updates of the last layer and the noise


@dataclass
class LastLayerState:
    """Weights with the last layer at its mode, the precision there, and log p(D), for every member."""

    w: Tensor  # (*B, P)
    precision: Tensor  # (*B, Q, Q), in double
    value: Tensor  # (*B,), in double
    buffers: dict[str, Tensor]
    layer: OutputLayer = field(metadata={"fixed": True})
    factors: dict[str, Tensor] = field(
        metadata={"fixed": True}
    )  # on the precisions of the prior that the features were trained under
    begun: Status = field(default=CONVERGED, metadata={"fixed": True})  # of the fit that trained the features


@dataclass(frozen=True)
class LastLayer(Options):
    """Bayesian inference for the last linear layer of a network, given the layers before it.

    The outputs are f_k = theta_k' phi with the features phi = [h(x), 1] of the layers before. With a Gaussian prior and
    Gaussian noise the posterior over theta is exact; for other likelihoods it is the Laplace approximation at the
    mode. Needs a Gaussian prior on the last layer. Costs a few passes over the data and n K^2 D^2 for n rows, D
    features and K outputs; memory (K D)^2.

    Args:
        at: What gives the features: a method, a posterior around one point, or "network" for the weights of a network
            that is already trained. With "network" a learnt noise is set by the evidence; otherwise it is the one that
            `at` found. Default: None, `MAP()`.

    Example:
        >>> import torch
        >>> import priory as pr
        >>> X = torch.linspace(-1, 1, 50)[:, None]
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> model = pr.Model(net, pr.Gaussian(0.1))
        >>> posterior = pr.fit(model, (X, X[:, 0]), pr.LastLayer(), steps=1000, progress=False)
        >>> posterior = posterior.update((X, X[:, 0]))  # the same rows once more
        >>> abs(posterior.predict(X[:1]).mean.item() + 1) < 0.2
        True

    References:
        Snoek et al. (2015), Scalable Bayesian optimization using deep neural networks.
        Kristiadi et al. (2020), Being Bayesian, even just a bit, fixes overconfidence in ReLU networks.
    """

    at: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.at, str) and self.at != "network":
            raise InputError(
                f"The 'at' argument of LastLayer must be a method, a posterior, or 'network', got {self.at!r}."
            )

    @property
    def traits(self) -> Traits:
        return Traits(reads="pass", follows=True, fixed_start=isinstance(self.at, str))

    @property
    def start(self) -> Any:
        """The method or posterior that gives the features; None for the default or for "network"."""
        return None if isinstance(self.at, str) else self.at

    def default_start(self, model: Any) -> MAP | None:
        """Return MAP, unless the network is already trained."""
        return None if self.at == "network" else MAP()

    def length(self, data: Data) -> int:
        return 1

    def plan(self, target: Target, data: Data, steps: int, seed: int) -> Plan:
        model = target.network_model("LastLayer", "has no layers")
        layer = OutputLayer.of(model, data.some(2)[:-1])
        wanted = MATRICES_HELD * len(layer.places) ** 2 * FLOAT64_BYTES
        got = f"{len(layer.places):,} weights, {wanted / 2**30:.1f} GiB: use Laplace('kron', over='last')"
        must = f"have a last layer that fits into {MEMORY_LIMIT_BYTES / 2**30:.0f} GiB for LastLayer"
        require(wanted <= MEMORY_LIMIT_BYTES, "net", "Model", must, got)
        prior_of(target, layer)
        return Plan(data, steps)

    def init(
        self,
        target: Target,
        plan: Plan,
        generator: torch.Generator,
        shape: torch.Size = torch.Size(),
        start: Posterior | None = None,
    ) -> LastLayerState:
        model = target.network_model("LastLayer")
        layer = OutputLayer.of(model, plan.data.some(2)[:-1])
        begun = target.start(plan.data, shape, generator) if start is None else centre_of(start, "LastLayer")
        w, size = begun.expand(*shape, -1).clone(), len(layer.places)
        precision = w.new_zeros(*shape, size, size, dtype=torch.float64)
        buffers = target.buffers(shape, start)
        value = torch.zeros_like(precision[..., 0, 0])
        begun = CONVERGED if start is None else of_start(start.status, "The layers before the last come")
        state = LastLayerState(w, precision, value, buffers, layer, factors_of(start), begun)
        if start is None and learns(target):
            self._set_noise(target, plan, generator, state)
        return state

    def _set_noise(self, target: Target, plan: Plan, generator: torch.Generator, state: LastLayerState) -> None:
        """Set the noise to maximise the evidence of the last layer, alternating with the mode of the layer."""
        model, data = target.network_model("LastLayer"), plan.data
        last = select(model, "last", data.some(2)[:-1])
        for _ in range(NOISE_ROUNDS):
            self.step(target, state, data, generator)
            for i, w in enumerate(state.w.view(-1, target.size)):
                member_buffers = model.member(state.buffers, i)
                of = lambda v, b=member_buffers: Full.of(Pass(target, v, data, last, buffers=b))  # noqa: E731
                w.copy_(tune(target, w, of(w), data, member_buffers, None, kind="ggn", again=of).w)

    def step(
        self, target: Target, state: LastLayerState, batch: Data, generator: torch.Generator
    ) -> tuple[LastLayerState, Info]:
        must = "be all rows as one Data, plan.rows(step), not a minibatch"
        require(isinstance(batch, Data), "batch", "LastLayer.step", must, type(batch).__name__)
        target = target.scaled(state.factors)
        model, prior = target.network_model("LastLayer"), prior_of(target, state.layer)
        size, q = target.size, len(state.layer.places)
        members = zip(state.w.view(-1, size), state.precision.view(-1, q, q), state.value.view(-1), strict=True)
        for i, (w, precision, value) in enumerate(members):
            if not bool(torch.isfinite(w).all()):
                value.fill_(float("nan"))
                continue  # the driver reports the divergence
            member_buffers = model.member(state.buffers, i)
            found, belief, log_evidence = newton(target, state.layer, w, batch, prior, member_buffers)
            w.copy_(found)
            precision.copy_(belief.precision)
            value.fill_(log_evidence)
        return state, Info({"bound": state.value.clone()}, done=True)

    def posterior(self, target: Target, state: LastLayerState, draws: Tensor | None = None) -> LastLayerPosterior:
        belief = LastLayerGaussian(state.w[state.layer.places].double(), state.precision)
        target = target.scaled(state.factors)
        found = LastLayerPosterior(target, state.w, belief, state.layer, float(state.value), state.buffers)
        found.know(state.begun)
        return found


def prior_of(target: Target, layer: OutputLayer) -> LastLayerGaussian:
    """Return the prior of the layer, tempered where the whole posterior is."""
    prior = target.prior
    precision = prior.precision[..., layer.places]
    gaussian = precision.ndim == 1 and bool((precision > 0).all())
    if not gaussian:
        raise InputError("LastLayer needs a Gaussian prior over every weight of the last layer, such as prior=1.0.")
    return LastLayerGaussian(prior.loc[layer.places], torch.diag(target.prior_power * precision))
