"""Remove neurons from a sequence of layers without changing its outputs.

In a chain ... W_l, b_l, phi, W_{l+1}, b_{l+1} ... neuron j can be removed if

    its incoming weights W_l[j, :] are zero:       it is the constant c_j = phi(b_l[j]), and W_{l+1}[:, j] c_j is added
                                                   to b_{l+1}
    its outgoing weights W_{l+1}[:, j] are zero:   no later layer depends on it

A neuron is a row of a linear layer or an output channel of a convolution. Zero padding makes a nonzero constant channel
vary at the border of the image, so such a channel stays. Removing a neuron may make further neurons removable, so the
rules are applied until nothing changes (Scardapane et al. 2017; Alvarez and Salzmann 2016).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from priory.core.errors import InputError, require

CONVOLUTION_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMALISATION_LAYERS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
ELEMENTWISE_LAYERS = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid),
    *(nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Tanhshrink, nn.Softshrink, nn.Hardshrink),
    nn.LogSigmoid,
)
IDENTITY_LAYERS = (
    nn.Identity,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
)  # in evaluation mode
MAX_POOLING_LAYERS = (
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
    nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d,
    nn.AdaptiveMaxPool3d,
)
MEAN_POOLING_LAYERS = (
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AvgPool3d,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d,
)
PADDING_LAYERS = (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d)


@dataclass(frozen=True)
class SequentialLayers:
    """The layers with weights in order, with their names, and the modules between each layer and the next."""

    weighted: list[tuple[str, Any]]
    between: list[list[nn.Module]]  # between[i] follows weighted[i]


def layers(net: nn.Sequential) -> SequentialLayers:
    """Split a sequence into layers with weights and the modules between them; raise an error if it has others."""
    found = SequentialLayers([], [])
    for name, module in _leaves(net, ""):
        if isinstance(module, (nn.Linear, *CONVOLUTION_LAYERS)):
            plain = isinstance(module, nn.Linear) or module.groups == 1
            require(plain, "trained", "prune_neurons", "have no grouped convolutions", f"one at {name}")
            found.weighted.append((name, module))
            found.between.append([])
            continue
        known = isinstance(
            module,
            (
                *NORMALISATION_LAYERS,
                *ELEMENTWISE_LAYERS,
                *IDENTITY_LAYERS,
                *MAX_POOLING_LAYERS,
                *MEAN_POOLING_LAYERS,
                *PADDING_LAYERS,
                nn.Flatten,
            ),
        )
        must = "have linear layers, convolutions, batch normalisation, activations, pooling and Flatten only"
        require(known, "trained", "prune_neurons", must, f"{type(module).__name__} at {name}")
        flat = not isinstance(module, nn.Flatten) or (module.start_dim == 1 and module.end_dim == -1)
        require(flat, "trained", "prune_neurons", "flatten all but the rows", f"{module} at {name}")
        if found.weighted:  # modules before the first layer act on the inputs, which stay
            found.between[-1].append(module)
    require(bool(found.weighted), "trained", "prune_neurons", "have a layer with weights", str(net))
    for i, (name, layer) in enumerate(found.weighted[:-1]):
        _check_adjacent(name, layer, found.between[i], *found.weighted[i + 1])
    return found


def _check_adjacent(name: str, layer: Any, between: Sequence[nn.Module], next_name: str, after: Any) -> None:
    """Raise an error unless each neuron is one column, one channel or one block of columns of the next layer."""
    size, linear = outputs(layer), isinstance(layer, nn.Linear)
    wrong = [
        type(m).__name__
        for m in between
        if linear and isinstance(m, (*MAX_POOLING_LAYERS, *MEAN_POOLING_LAYERS, *PADDING_LAYERS))
    ]
    require(not wrong, "trained", "prune_neurons", "pool channels only, not neurons", f"{wrong} after {name}")
    norms = all(m.num_features == size for m in between if isinstance(m, NORMALISATION_LAYERS))
    require(norms, "trained", "prune_neurons", "normalise each neuron", f"another number than {size} after {name}")
    inputs = after.weight.shape[1]
    flattened = not linear and isinstance(after, nn.Linear) and any(isinstance(m, nn.Flatten) for m in between)
    meets = inputs % size == 0 if flattened else inputs == size and linear == isinstance(after, nn.Linear)
    must = "have layers that read the neurons of the layer before, after Flatten for those of a convolution"
    require(meets, "trained", "prune_neurons", must, f"{inputs} inputs of {next_name} after the {size} of {name}")


def _leaves(net: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    if not isinstance(net, nn.Sequential):
        return [(prefix, net)]
    return [leaf for name, child in net.named_children() for leaf in _leaves(child, f"{prefix}.{name}".lstrip("."))]


def shrink(chain: SequentialLayers, kept: dict[str, Tensor]) -> int:
    """Remove neurons until none can be removed; return how many constant channels had to stay."""
    while True:
        changed, stuck = False, 0
        for i, ((name, layer), (_, after)) in enumerate(zip(chain.weighted, chain.weighted[1:], strict=False)):
            incoming = layer.weight.flatten(1).abs().amax(1) == 0
            outgoing = columns(after, outputs(layer)).abs().amax((0, 2)) == 0
            value = constants(layer, chain.between[i])
            folds = (value == 0) | (not _bordered(after, chain.between[i]))
            gone = outgoing | (incoming & folds)
            stuck += int((incoming & ~gone).sum())
            if bool(gone.all()):
                gone[0] = False  # a layer needs at least one neuron
                if len(gone) == 1:
                    continue
            if not bool(gone.any()):
                continue
            fold(after, value, gone & ~outgoing)
            _keep(layer, chain.between[i], after, ~gone)
            kept[name] = kept[name][~gone.cpu()]
            changed = True
        if not changed:
            return stuck


def outputs(layer: Any) -> int:
    """Return the number of neurons of a layer."""
    return layer.weight.shape[0]


def columns(layer: Any, count: int) -> Tensor:
    """Return a layer's weights by the `count` neurons of the previous layer, (outputs, count, weights of each)."""
    return layer.weight.reshape(outputs(layer), count, -1)


def constants(layer: Any, between: Sequence[nn.Module]) -> Tensor:
    """Return the output phi(b) of each neuron if its incoming weights were zero, (neurons,)."""
    value = layer.weight.new_zeros(outputs(layer)) if layer.bias is None else layer.bias
    for module in between:
        if isinstance(module, NORMALISATION_LAYERS):
            mean, variance = module.running_mean, module.running_var
            if mean is None or variance is None:
                raise InputError(
                    "The 'trained' argument of prune_neurons must have normalisations with running statistics."
                )
            value = nn.functional.batch_norm(value[None], mean, variance, module.weight, module.bias, eps=module.eps)[0]
        elif isinstance(module, ELEMENTWISE_LAYERS):
            value = module(value)
    return value  # pooling leaves a constant unchanged


def _bordered(after: Any, between: Sequence[nn.Module]) -> bool:
    """Whether zero padding is applied between a layer and the sum over its neurons in the next layer."""
    own = isinstance(after, CONVOLUTION_LAYERS) and after.padding_mode == "zeros" and _pads(after.padding)
    means = any(isinstance(m, MEAN_POOLING_LAYERS) and _pads(getattr(m, "padding", 0)) for m in between)
    return own or means or any(isinstance(m, PADDING_LAYERS) for m in between)


def _pads(padding: Any) -> bool:
    return padding == "same" or (padding != "valid" and any(torch.as_tensor(padding).reshape(-1).tolist()))


def fold(after: Any, value: Tensor, gone: Tensor) -> None:
    """Add the contribution of constant neurons to the bias of the next layer."""
    if not bool((value[gone] != 0).any()):
        return
    added = torch.einsum("ojk,j->o", columns(after, len(value))[:, gone], value[gone])
    after.bias = nn.Parameter(added if after.bias is None else after.bias + added)


def _keep(layer: Any, between: Sequence[nn.Module], after: Any, stay: Tensor) -> None:
    """Keep only these neurons of a layer, with their normalisation and their columns of the next layer."""
    seen = columns(after, len(stay))[:, stay]
    left = int(stay.sum())
    per_neuron = after.weight.shape[1] // len(stay)
    after.weight = nn.Parameter(seen.reshape(outputs(after), left * per_neuron, *after.weight.shape[2:]))
    layer.weight = nn.Parameter(layer.weight[stay])
    if layer.bias is not None:
        layer.bias = nn.Parameter(layer.bias[stay])
    for module in between:
        if isinstance(module, NORMALISATION_LAYERS):
            _keep_norm(module, stay)
    named = ("in_features", "out_features") if isinstance(after, nn.Linear) else ("in_channels", "out_channels")
    setattr(after, named[0], left * per_neuron)
    setattr(layer, "out_features" if isinstance(layer, nn.Linear) else "out_channels", left)


def _keep_norm(norm: Any, stay: Tensor) -> None:
    norm.num_features = int(stay.sum())
    norm.running_mean, norm.running_var = norm.running_mean[stay], norm.running_var[stay]
    if norm.weight is not None:
        norm.weight, norm.bias = nn.Parameter(norm.weight[stay]), nn.Parameter(norm.bias[stay])
