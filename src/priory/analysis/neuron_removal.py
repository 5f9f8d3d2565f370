"""Removing neurons from a sequence of layers without any change of its outputs.

In a chain ... W_l, b_l, phi, W_{l+1}, b_{l+1} ... a neuron j goes without any change of the network if

    its incoming weights W_l[j, :] are zero:   it is the constant c_j = phi(b_l[j]), and b_{l+1} takes W_{l+1}[:, j] c_j
    its outgoing weights W_{l+1}[:, j] are:    nothing sees it

A neuron is a row of a linear layer or an output channel of a convolution. With zeros around the image, a constant that
is not zero is no constant after the next convolution: such a channel stays. Removing a neuron may leave others without
use, so that this is done until nothing changes (Scardapane et al. 2017; Alvarez and Salzmann 2016).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from priory.core.errors import InputError, require

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
ELEMENTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid),
    *(nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Tanhshrink, nn.Softshrink, nn.Hardshrink),
    nn.LogSigmoid,
)
SILENT = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)  # in evaluation mode
MAXIMA = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)
MEANS = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
PADS = (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d)


@dataclass(frozen=True)
class SequentialLayers:
    """The layers with weights in their order, by name, and what lies between each and the next."""

    weighted: list[tuple[str, Any]]
    between: list[list[nn.Module]]  # between[i] follows weighted[i]; the last follows the last


def layers(net: nn.Sequential) -> SequentialLayers:
    """A sequence as layers with weights and what lies between them, or the sentence that says why not."""
    found = SequentialLayers([], [])
    for name, module in _leaves(net, ""):
        if isinstance(module, (nn.Linear, *CONVOLUTIONS)):
            plain = isinstance(module, nn.Linear) or module.groups == 1
            require(plain, "trained", "prune_neurons", "have no grouped convolutions", f"one at {name}")
            found.weighted.append((name, module))
            found.between.append([])
            continue
        known = isinstance(module, (*NORMS, *ELEMENTWISE, *SILENT, *MAXIMA, *MEANS, *PADS, nn.Flatten))
        must = "have linear layers, convolutions, batch normalisation, activations, pooling and Flatten only"
        require(known, "trained", "prune_neurons", must, f"{type(module).__name__} at {name}")
        flat = not isinstance(module, nn.Flatten) or (module.start_dim == 1 and module.end_dim == -1)
        require(flat, "trained", "prune_neurons", "flatten all but the rows", f"{module} at {name}")
        if found.weighted:  # what comes before the first is of the inputs, which stay
            found.between[-1].append(module)
    require(bool(found.weighted), "trained", "prune_neurons", "have a layer with weights", str(net))
    for i, (name, layer) in enumerate(found.weighted[:-1]):
        _check_meeting(name, layer, found.between[i], *found.weighted[i + 1])
    return found


def _check_meeting(name: str, layer: Any, between: Sequence[nn.Module], next_name: str, after: Any) -> None:
    """Refuse a pair of layers between which a neuron is not one column, one channel, or one run of columns."""
    size, linear = outputs(layer), isinstance(layer, nn.Linear)
    wrong = [type(m).__name__ for m in between if linear and isinstance(m, (*MAXIMA, *MEANS, *PADS))]
    require(not wrong, "trained", "prune_neurons", "pool channels only, not neurons", f"{wrong} after {name}")
    norms = all(m.num_features == size for m in between if isinstance(m, NORMS))
    require(norms, "trained", "prune_neurons", "normalise each neuron", f"another number than {size} after {name}")
    inputs = after.weight.shape[1]
    flattened = not linear and isinstance(after, nn.Linear) and any(isinstance(m, nn.Flatten) for m in between)
    meets = inputs % size == 0 if flattened else inputs == size and linear == isinstance(after, nn.Linear)
    must = "have each layer look at the neurons of the one before, after Flatten for those of a convolution"
    require(meets, "trained", "prune_neurons", must, f"{inputs} inputs of {next_name} after the {size} of {name}")


def _leaves(net: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    if not isinstance(net, nn.Sequential):
        return [(prefix, net)]
    return [leaf for name, child in net.named_children() for leaf in _leaves(child, f"{prefix}.{name}".lstrip("."))]


def shrink(chain: SequentialLayers, kept: dict[str, Tensor]) -> int:
    """Take out neurons until none is left to take; how many constant channels had to stay."""
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
                gone[0] = False  # a layer without neurons is none
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
    """How many neurons a layer has."""
    return layer.weight.shape[0]


def columns(layer: Any, count: int) -> Tensor:
    """The weights that leave each of `count` neurons of the layer before, (outputs, count, weights of each)."""
    return layer.weight.reshape(outputs(layer), count, -1)


def constants(layer: Any, between: Sequence[nn.Module]) -> Tensor:
    """What each neuron would give the next layer if its incoming weights were zero: phi(b), (neurons,)."""
    value = layer.weight.new_zeros(outputs(layer)) if layer.bias is None else layer.bias
    for module in between:
        if isinstance(module, NORMS):
            mean, variance = module.running_mean, module.running_var
            if mean is None or variance is None:
                raise InputError(
                    "The 'trained' argument of prune_neurons must have normalisations with running statistics."
                )
            value = nn.functional.batch_norm(value[None], mean, variance, module.weight, module.bias, eps=module.eps)[0]
        elif isinstance(module, ELEMENTWISE):
            value = module(value)
    return value  # the largest or the mean of equal numbers is the number


def _bordered(after: Any, between: Sequence[nn.Module]) -> bool:
    """Whether zeros lie around a constant image before the next layer has seen it."""
    own = isinstance(after, CONVOLUTIONS) and after.padding_mode == "zeros" and _pads(after.padding)
    means = any(isinstance(m, MEANS) and _pads(getattr(m, "padding", 0)) for m in between)
    return own or means or any(isinstance(m, PADS) for m in between)


def _pads(padding: Any) -> bool:
    return padding == "same" or (padding != "valid" and any(torch.as_tensor(padding).reshape(-1).tolist()))


def fold(after: Any, value: Tensor, gone: Tensor) -> None:
    """Put what constant neurons give to the next layer into its bias."""
    if not bool((value[gone] != 0).any()):
        return
    added = torch.einsum("ojk,j->o", columns(after, len(value))[:, gone], value[gone])
    after.bias = nn.Parameter(added if after.bias is None else after.bias + added)


def _keep(layer: Any, between: Sequence[nn.Module], after: Any, stay: Tensor) -> None:
    """Leave these neurons of a layer only, with their normalisation and their columns of the next."""
    seen = columns(after, len(stay))[:, stay]
    left = int(stay.sum())
    per_neuron = after.weight.shape[1] // len(stay)
    after.weight = nn.Parameter(seen.reshape(outputs(after), left * per_neuron, *after.weight.shape[2:]))
    layer.weight = nn.Parameter(layer.weight[stay])
    if layer.bias is not None:
        layer.bias = nn.Parameter(layer.bias[stay])
    for module in between:
        if isinstance(module, NORMS):
            _keep_norm(module, stay)
    named = ("in_features", "out_features") if isinstance(after, nn.Linear) else ("in_channels", "out_channels")
    setattr(after, named[0], left * per_neuron)
    setattr(layer, "out_features" if isinstance(layer, nn.Linear) else "out_channels", left)


def _keep_norm(norm: Any, stay: Tensor) -> None:
    norm.num_features = int(stay.sum())
    norm.running_mean, norm.running_var = norm.running_mean[stay], norm.running_var[stay]
    if norm.weight is not None:
        norm.weight, norm.bias = nn.Parameter(norm.weight[stay]), nn.Parameter(norm.bias[stay])
