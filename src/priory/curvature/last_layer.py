"""The last layer of a network as a generalised linear model on the features before it.

With the features phi = [h(x), 1] that the other layers give, the outputs are f_k = theta_k' phi. Under a Gaussian prior
N(m, P^-1) over theta the log joint is concave wherever the likelihood is in f, and

    gradient   a sum_n s_n phi_n' - P (theta - m)           s_n = d log p(y_n | f_n) / df
    curvature  P + a sum_n F_n (x) phi_n phi_n'              F_n, the Fisher information in f_n;  a = 1/T

Newton's steps with it (Fisher scoring) reach the mode; with Gaussian noise one step does, and N(mode, curvature^-1) is
the exact posterior. Rows that come later need only this Gaussian, which is their prior.

Cost of a pass over n rows with D features and K outputs: the network's own, and n K^2 D^2; memory (K D)^2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from priory.curvature.base import last_layer
from priory.errors import InputError, require

if TYPE_CHECKING:
    from collections.abc import Mapping

    from priory.data import Batch, Data
    from priory.model import Model

ROWS = 1024  # of a pass at a time
STEPS = 100
SMALL = 1e-10  # of the Newton decrement, in nats: half of it is what is left to gain
AGREES = 1e-4  # relative, of the layer's output and the network's


@dataclass(frozen=True)
class Layer:
    """The last linear layer: its module, and where theta (K, D + 1) lies in the flat vector, row by row."""

    name: str
    module: nn.Linear
    places: Tensor  # (K (D + 1),)
    outputs: int
    biased: bool

    @classmethod
    def of(cls, model: Model, inputs: Batch) -> Layer:
        """The layer whose output is the network's."""
        names = last_layer(model, inputs)
        name = names[0].rpartition(".")[0]
        module = model.network.skeleton.get_submodule(name)
        kind = f"{type(module).__name__} '{name}'"
        require(isinstance(module, nn.Linear), "net", "LastLayer", "end in a linear layer", kind)
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
        same = outputs.ndim == 2 and torch.allclose(features @ theta.T + bias, outputs, rtol=AGREES, atol=AGREES)
        require(same, "net", "LastLayer", "give the output of its last linear layer as its own", kind)
        return layer

    def features(self, model: Model, w: Tensor, inputs: Batch, buffers: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The features (n, D + 1) in front of the layer, with a column of ones for its bias, and the outputs (n, K)."""
        seen: list[Tensor] = []
        handle = self.module.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach()))
        try:
            with torch.no_grad():
                outputs = model.network(w.detach().clone(), inputs, buffers, train=False)
        finally:
            handle.remove()
        h = seen[-1]
        require(h.ndim == 2, "net", "LastLayer", "have rows of features before its last layer", tuple(h.shape))
        return torch.cat([h, torch.ones_like(h[:, :1])], 1) if self.biased else h, outputs


@dataclass(frozen=True)
class Belief:
    """N(mean, precision^-1) over theta, in the order of the layer's places."""

    mean: Tensor  # (Q,)
    precision: Tensor  # (Q, Q)

    def log_prob(self, theta: Tensor) -> Tensor:
        """Its log density."""
        off, root = theta - self.mean, cholesky(self.precision)
        return root.diagonal().log().sum() - 0.5 * (off @ self.precision @ off + len(off) * math.log(2 * math.pi))


@dataclass(frozen=True)
class Look:
    """What one pass finds at theta: a log-likelihood, its gradient, and the curvature that it adds."""

    value: Tensor  # a log p(D | theta)
    gradient: Tensor  # (Q,)
    curvature: Tensor  # (Q, Q)


def look(
    model: Model,
    layer: Layer,
    w: Tensor,
    moved: Tensor,
    data: Data,
    buffers: Mapping[str, Tensor],
    power: float,
    rows: int | None,
) -> Look:
    """One pass over the data where theta is `moved` from w (Q,); `power` is a = 1/T, `rows` what they stand for."""
    k, learnt = layer.outputs, model.learnt_at(w)
    size = len(layer.places) // k
    value, gradient = moved.new_zeros(()), moved.new_zeros(k, size)
    curvature, seen = moved.new_zeros(k * k, size * size), 0
    for *inputs, y in data.blocks(ROWS):
        h, outputs = layer.features(model, w, tuple(inputs), buffers)
        phi = h.to(moved.dtype)
        f = model.likelihood.arrange(outputs + phi @ moved.view(k, size).T, y.shape[1:])
        value = value + model.likelihood.log_prob(f, y, learnt).sum()
        gradient += model.likelihood.score(f, y, learnt).reshape(len(phi), k).T @ phi
        roots = model.likelihood.roots(f, learnt).reshape(-1, len(phi), k).to(moved.dtype)
        fisher = torch.einsum("cnk,cnl->kln", roots, roots).reshape(k * k, -1)
        curvature += fisher @ (phi[:, :, None] * phi[:, None, :]).reshape(len(phi), -1)
        seen += len(phi)
    factor = power if rows is None else power * rows / seen
    blocks = curvature.view(k, k, size, size).permute(0, 2, 1, 3).reshape(k * size, k * size)
    return Look(factor * value, factor * gradient.reshape(-1), factor * blocks)


def newton(
    model: Model,
    layer: Layer,
    w: Tensor,
    data: Data,
    prior: Belief,
    buffers: Mapping[str, Tensor],
    power: float = 1.0,
) -> tuple[Tensor, Belief, float]:
    """The mode, the Gaussian there, and log p(D) under it: Newton's steps, halved where they go too far.

    All in double precision, whatever the network's: a sum over many rows in single precision is coarser than the last
    steps are.
    """
    w, prior = w.detach().clone(), Belief(prior.mean.double(), prior.precision.double())
    first = w[layer.places].double()
    theta, stride, before = first.clone(), torch.zeros_like(first), -math.inf
    for _ in range(STEPS):
        found = look(model, layer, w, theta - first, data, buffers, power, data.num_data)
        joint = float(found.value + prior.log_prob(theta))
        if not math.isfinite(joint) or joint < before - 1e-9 * abs(before):
            stride = 0.5 * stride
            theta -= stride
            continue
        precision = prior.precision + found.curvature
        slope = found.gradient - prior.precision @ (theta - prior.mean)
        root = cholesky(precision)
        stride = torch.cholesky_solve(slope[:, None], root)[:, 0]
        if float(slope @ stride) < SMALL or (model.likelihood.slope is not None and before > -math.inf):
            log_evidence = joint + 0.5 * len(theta) * math.log(2 * math.pi) - float(root.diagonal().log().sum())
            w[layer.places] = theta.to(w.dtype)
            return w, Belief(w[layer.places], precision.to(w.dtype)), log_evidence
        before = joint
        theta += stride
    raise InputError(f"Newton's steps for the last layer must end. Got {STEPS} of them without: is the prior flat?")


def cholesky(precision: Tensor) -> Tensor:
    """The lower factor, or a sentence where there is none."""
    root, failed = torch.linalg.cholesky_ex(precision)
    if int(failed):
        raise InputError("The last layer must have a proper posterior: give its weights a prior that isn't flat.")
    return root
