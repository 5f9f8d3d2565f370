"""The last layer of a network as a generalised linear model on the features before it.

With the features phi = [h(x), 1] of the other layers, the outputs are f_k = theta_k' phi. Under a Gaussian prior
N(m, P^-1) over theta the log joint is concave wherever the log-likelihood is concave in f, and

    gradient   a sum_n s_n phi_n' - P (theta - m)           s_n = d log p(y_n | f_n) / df
    curvature  P + a sum_n F_n (x) phi_n phi_n'              F_n, the Fisher information in f_n;  a = 1/T

Fisher scoring (Newton's method with this curvature) finds the mode. With Gaussian noise one step is enough, and
N(mode, curvature^-1) is the exact posterior. Later rows need only this Gaussian, as their prior. Where minus the second
derivative of log p(y | f) depends on y (Student-t noise, or noise predicted by the network), it may exceed twice the
Fisher information, and Fisher scoring would oscillate. The steps then use the second derivative itself, and a step that
gains too little is halved.

Cost of a pass over n rows with D features and K outputs: the network's own, and n K^2 D^2; memory (K D)^2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from priory.core.data import weighted_sum
from priory.core.errors import InputError, require
from priory.core.linalg import eigh, try_cholesky
from priory.curvature.base import last_layer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from priory.core.data import Batch, Data
    from priory.likelihoods import Likelihood
    from priory.models.model import Model
    from priory.models.target import Target

BLOCK_ROWS = 1024  # rows read at a time
MAX_NEWTON_STEPS = 500
SUFFICIENT_GAIN = 1e-4  # share of the gain predicted by the slope, below which a step is halved
MIN_RELATIVE_CURVATURE = 1e-6  # floor of the eigenvalues, relative to the largest
RELATIVE_ROUNDING = 1e-9  # of the log joint
CONVERGED_DECREMENT_NATS = 1e-10  # Newton decrement, twice the remaining gain
OUTPUT_TOLERANCE = 1e-4  # between the outputs of the layer and of the network


@dataclass(frozen=True)
class OutputLayer:
    """The last linear layer: its module, and the coordinates of theta (K, D + 1) in the flat vector, row by row."""

    name: str
    module: nn.Linear
    places: Tensor  # (K (D + 1),)
    outputs: int
    biased: bool

    @classmethod
    def of(cls, model: Model, inputs: Batch) -> OutputLayer:
        """Find the linear layer whose output is that of the network."""
        try:
            names = last_layer(model, inputs)
        except InputError as error:
            reason = str(error).partition(": ")[2].partition(", got ")[0]
            raise InputError(f"LastLayer needs a network with one last layer: {reason}") from error
        name, _, key = names[0].rpartition(".")
        must = "train the weight of its last layer for LastLayer"
        require(key != "bias", "net", "Model", must, f"'{names[0]}' alone")
        module = model.network.skeleton.get_submodule(name)
        kind = f"{type(module).__name__} '{name}'"
        require(isinstance(module, nn.Linear), "net", "Model", "end in a linear layer for LastLayer", kind)
        assert isinstance(module, nn.Linear)
        block = model.layout[f"{name}.weight" if name else "weight"]
        index = torch.arange(block.start, block.stop, device=model.device).view(module.weight.shape)
        biased = len(names) > 1
        if biased:
            tail = model.layout[f"{name}.bias" if name else "bias"]
            index = torch.cat([index, torch.arange(tail.start, tail.stop, device=model.device)[:, None]], 1)
        layer = cls(name, module, index.reshape(-1), len(module.weight), biased)
        features, outputs = layer.features(model, model.network.initial, inputs, {})
        theta = model.network.initial[layer.places].view(layer.outputs, -1)
        bias = 0 if biased or module.bias is None else module.bias.detach()
        layer_outputs = features @ theta.T + bias
        same = outputs.shape == layer_outputs.shape and torch.allclose(
            layer_outputs, outputs, rtol=OUTPUT_TOLERANCE, atol=OUTPUT_TOLERANCE
        )
        require(same, "net", "Model", "return the output of its last linear layer unchanged for LastLayer", kind)
        return layer

    def features(self, model: Model, w: Tensor, inputs: Batch, buffers: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the features (n, D + 1), with a column of ones for the bias, and the outputs (n, K)."""
        seen: list[Tensor] = []
        handle = self.module.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach()))
        try:
            with torch.no_grad():
                outputs = model.network(w.detach().clone(), inputs, buffers, train=False)
        finally:
            handle.remove()
        h = seen[-1]
        must = "have rows of features before its last layer for LastLayer"
        require(h.ndim == 2, "net", "Model", must, tuple(h.shape))
        outputs = outputs[:, None] if outputs.shape == (len(h),) else outputs  # undo a squeeze of a single output
        return torch.cat([h, torch.ones_like(h[:, :1])], 1) if self.biased else h, outputs

    def order(self, likelihood: Likelihood, event: torch.Size) -> Tensor:
        """Return the layer output at each position of the arranged outputs of a datum, (K,)."""
        numbers = torch.arange(self.outputs, device=self.places.device)
        return likelihood.arrange(numbers[None], event).reshape(-1)


@dataclass(frozen=True)
class LastLayerGaussian:
    """N(mean, precision^-1) over theta, in the order of the layer's places, in double precision."""

    mean: Tensor  # (Q,)
    precision: Tensor  # (Q, Q)

    def log_prob(self, theta: Tensor) -> Tensor:
        """Return the log density at theta."""
        off, root = theta - self.mean, precision_root(self.precision)
        return root.diagonal().log().sum() - 0.5 * (off @ self.precision @ off + len(off) * math.log(2 * math.pi))


@dataclass(frozen=True)
class LayerDerivatives:
    """Log-likelihood at theta, its gradient and its curvature, from one pass over the data."""

    value: Tensor  # a log p(D | theta)
    gradient: Tensor  # (Q,)
    curvature: Tensor  # (Q, Q), of the Fisher information
    negative_hessian: Tensor  # (Q, Q), minus the second derivative; equal to the curvature for canonical links


def derivatives_at(
    target: Target, layer: OutputLayer, w: Tensor, moved: Tensor, data: Data, buffers: Mapping[str, Tensor]
) -> LayerDerivatives:
    """Compute the derivatives in one pass over the data, with theta moved by `moved`, (Q,), from w."""
    model = target.network_model("LastLayer")
    k, learnt, likelihood = layer.outputs, model.learnt_at(w), model.likelihood
    size = len(layer.places) // k
    value, gradient = moved.new_zeros(()), moved.new_zeros(k, size)
    curvature, negative_hessian, seen = moved.new_zeros(k * k, size * size), moved.new_zeros(k * k, size * size), 0
    for batch in data.blocks(BLOCK_ROWS):
        *inputs, y = batch
        weights = target.row_weights(batch)
        h, outputs = layer.features(model, w, tuple(inputs), buffers)
        phi, event = h.to(moved.dtype), y.shape[1:]
        back = layer.order(likelihood, event).argsort()  # from the arranged outputs to the layer's
        f = likelihood.arrange(outputs + phi @ moved.view(k, size).T, event)
        value = value + weighted_sum(likelihood.log_prob(f, y, learnt), weights)
        weighted = phi if weights is None else phi * weights[:, None]
        gradient += likelihood.score(f, y, learnt).reshape(len(phi), k)[:, back].T @ weighted
        squares = (weighted[:, :, None] * phi[:, None, :]).reshape(len(phi), -1)
        roots = likelihood.roots(f, learnt).reshape(-1, len(phi), k)[..., back].to(moved.dtype)
        curvature += torch.einsum("cnk,cnl->kln", roots, roots).reshape(k * k, -1) @ squares
        if not likelihood.canonical:
            seconds = second_derivatives(likelihood, f, y, learnt)[:, back][:, :, back]
            negative_hessian -= seconds.permute(1, 2, 0).reshape(k * k, -1).to(moved.dtype) @ squares
        seen += len(phi)
    factor = target.likelihood_power * target.scale(seen)
    in_blocks = lambda c: factor * c.view(k, k, size, size).permute(0, 2, 1, 3).reshape(k * size, k * size)  # noqa: E731
    fisher = in_blocks(curvature)
    observed = fisher if likelihood.canonical else in_blocks(negative_hessian)
    return LayerDerivatives(factor * value, factor * gradient.reshape(-1), fisher, observed)


def second_derivatives(likelihood: Likelihood, f: Tensor, y: Tensor, learnt: dict[str, Tensor]) -> Tensor:
    """Return d^2 log p(y | f) / df^2 of each datum, (n, K, K), at arranged outputs (n, ...)."""
    leaf = f.detach().requires_grad_()
    with torch.enable_grad():
        total = likelihood.log_prob(leaf, y, learnt).sum()  # data are independent
        (slope,) = torch.autograd.grad(total, leaf, create_graph=True)
        columns = slope.reshape(len(f), -1).sum(0)
        rows = [torch.autograd.grad(c, leaf, retain_graph=True)[0].reshape(len(f), -1) for c in columns]
    return torch.stack(rows, 1)


def newton(
    target: Target, layer: OutputLayer, w: Tensor, data: Data, prior: LastLayerGaussian, buffers: Mapping[str, Tensor]
) -> tuple[Tensor, LastLayerGaussian, float]:
    """Return the weights at the mode, the Gaussian there, and log p(D), by Newton's method with step halving.

    It runs in double precision for every network: a sum over many rows in single precision is less accurate than the
    last steps need.
    """
    likelihood = target.network_model("LastLayer").likelihood
    w, prior = w.detach().clone(), LastLayerGaussian(prior.mean.double(), prior.precision.double())
    first = w[layer.places].double()
    theta, stride, before, promised = first.clone(), torch.zeros_like(first), -math.inf, 0.0
    for _ in range(MAX_NEWTON_STEPS):
        found = derivatives_at(target, layer, w, theta - first, data, buffers)
        joint = float(found.value + prior.log_prob(theta))
        if not joint >= before + SUFFICIENT_GAIN * promised - RELATIVE_ROUNDING * abs(before):  # also true for NaN
            stride, promised = 0.5 * stride, 0.5 * promised
            theta -= stride
            continue
        precision = prior.precision + found.curvature
        slope = found.gradient - prior.precision @ (theta - prior.mean)
        root = precision_root(precision)
        stride = newton_step(prior.precision + found.negative_hessian, slope)
        promised = float(slope @ stride)
        if promised < CONVERGED_DECREMENT_NATS or (likelihood.slope is not None and before > -math.inf):
            log_evidence = joint + 0.5 * len(theta) * math.log(2 * math.pi) - float(root.diagonal().log().sum())
            w[layer.places] = theta.to(w.dtype)
            return w, LastLayerGaussian(w[layer.places].double(), precision), log_evidence
        before = joint
        theta += stride
    raise InputError(
        f"Newton's method for the last layer must converge, got no mode after {MAX_NEWTON_STEPS} steps under "
        f"{likelihood!r}: use Laplace(over='last')."
    )


def newton_step(negative_hessian: Tensor, slope: Tensor) -> Tensor:
    """Return the Newton step; where the log joint isn't concave, with the absolute eigenvalues of the Hessian.

    (Dauphin et al. 2014, "Identifying and attacking the saddle point problem in high-dimensional non-convex
    optimization".)
    """
    root, definite = try_cholesky(negative_hessian)
    if bool(definite):
        return torch.cholesky_solve(slope[:, None], root)[:, 0]
    values, vectors = eigh(negative_hessian)
    values = values.abs().clamp_min(MIN_RELATIVE_CURVATURE * values.abs().max())
    return vectors @ (vectors.T @ slope / values)


def precision_root(precision: Tensor) -> Tensor:
    """Return the lower Cholesky factor; raise InputError if there is none."""
    root, definite = try_cholesky(precision)
    if not bool(definite):
        raise InputError("The last layer must have a proper posterior: give its weights a prior that isn't flat.")
    return root
