"""Scale rules: Gaussian priors whose variance is that of a common initialisation.

With P = fan-in, the number of inputs of a unit, the variance of a weight is

    "fan_in"   1 / P             (the lectures' Glorot, after Graves 2011)
    "glorot"   2 / (in + out)    (Glorot and Bengio 2010)
    "he"       2 / P             (He et al. 2015)

The rules apply to weights. Biases, other vectors and embeddings have the prior N(0, 1), and the scales of normalisation
layers N(1, 1). A rule may also be a function of fan-in and fan-out, such as an `EdgeOfChaos`, which sets the variance
of the biases too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.distributions import Normal

Rule = Callable[[int, int], float]  # (fan-in, fan-out) -> variance of a weight
RULES: dict[str, Rule] = {
    "fan_in": lambda fan_in, fan_out: 1 / fan_in,
    "glorot": lambda fan_in, fan_out: 2 / (fan_in + fan_out),
    "he": lambda fan_in, fan_out: 2 / fan_in,
}
NORMALISATION_LAYERS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.RMSNorm)
TRANSPOSED_CONVOLUTION = nn.modules.conv._ConvTransposeNd


def by_rule(rule: str | Rule, net: nn.Module, dtype: torch.dtype) -> dict[str, Normal]:
    """Return the prior of each trainable parameter under a rule, by name.

    >>> by_rule("fan_in", nn.Linear(4, 3), torch.float64)["weight"].variance.item()
    0.25
    """
    priors: dict[str, Normal] = {}
    for name, module, key, p in trainable(net):
        loc, variance = _moments(RULES[rule] if isinstance(rule, str) else rule, module, key, p)
        value = torch.tensor([loc, variance], dtype=dtype)
        priors[name] = Normal(value[0], value[1].sqrt())
    return priors


def trainable(net: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield the name, the module, the name within the module, and the tensor of each trainable parameter."""
    for prefix, module in net.named_modules():
        for key, p in module.named_parameters(recurse=False):
            if p.requires_grad:
                yield (f"{prefix}.{key}" if prefix else key), module, key, p


def is_weight(module: nn.Module, key: str, p: torch.Tensor) -> bool:
    """Return whether a parameter is a matrix or a convolution kernel; biases, embeddings and normalisations are not."""
    attention_bias = isinstance(module, nn.MultiheadAttention) and key.startswith(
        "bias_"
    )  # stored with the shape (1, 1, E)
    return (
        p.ndim >= 2
        and not attention_bias
        and not isinstance(module, (*NORMALISATION_LAYERS, nn.Embedding, nn.EmbeddingBag))
    )


def _moments(rule: Rule, module: nn.Module, key: str, p: nn.Parameter) -> tuple[float, float]:
    """Return the mean and the variance of a parameter's prior."""
    if is_weight(module, key, p):
        return 0.0, rule(*fans(module, key, p))
    if isinstance(module, NORMALISATION_LAYERS):
        return (1.0, 1.0) if key == "weight" else (0.0, 1.0)
    is_bias = "bias" in key and not isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    return 0.0, getattr(rule, "bias_variance", 1.0) if is_bias else 1.0


def fans(module: nn.Module, key: str, p: torch.Tensor) -> tuple[int, int]:
    """Return the fan-in and the fan-out of a weight.

    They refer to one group of a convolution, one gate of a recurrent layer, or one projection of an attention layer.
    """
    window, groups = p[0, 0].numel(), getattr(module, "groups", 1)
    if isinstance(module, TRANSPOSED_CONVOLUTION):  # (in, out / groups, *window)
        return p.shape[0] // groups * window, p.shape[1] * window
    fan_in, fan_out = p.shape[1] * window, p.shape[0] // groups * window
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)) and not key.startswith("weight_hr"):
        return fan_in, module.hidden_size
    if isinstance(module, nn.MultiheadAttention) and p.shape[0] == 3 * module.embed_dim:
        return fan_in, module.embed_dim
    return fan_in, fan_out
