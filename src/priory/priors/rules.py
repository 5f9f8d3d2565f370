"""Priors by scale rule: the variance of an initialisation as the variance of a belief.

With P = fan-in, the number of inputs of a unit: "fan_in" is 1/P (the lectures' Glorot, after Graves 2011),
"glorot" is 2 / (in + out) (Glorot and Bengio 2010), "he" is 2/P (He 2015). The rules speak of weights;
biases, and whatever else is a vector, get N(0, 1), the scales of normalisation layers N(1, 1), embeddings
N(0, 1). A rule may also be a function of the two fans, such as an `EdgeOfChaos`, which has a variance for biases too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.distributions import Normal

Rule = Callable[[int, int], float]  # from fan-in and fan-out to the variance of a weight
RULES: dict[str, Rule] = {
    "fan_in": lambda fan_in, fan_out: 1 / fan_in,
    "glorot": lambda fan_in, fan_out: 2 / (fan_in + fan_out),
    "he": lambda fan_in, fan_out: 2 / fan_in,
}
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.RMSNorm)
TRANSPOSED = nn.modules.conv._ConvTransposeNd


def by_rule(rule: str | Rule, net: nn.Module, dtype: torch.dtype) -> dict[str, Normal]:
    """The prior of each trainable parameter under a rule.

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
    """Each trainable parameter: its name, the module that holds it, its name there, and itself."""
    for prefix, module in net.named_modules():
        for key, p in module.named_parameters(recurse=False):
            if p.requires_grad:
                yield (f"{prefix}.{key}" if prefix else key), module, key, p


def is_weight(module: nn.Module, key: str, p: torch.Tensor) -> bool:
    """Whether a parameter has a fan-in: a matrix or a window, and no bias, embedding or scale of a normalisation."""
    biases = isinstance(module, nn.MultiheadAttention) and key.startswith("bias_")  # kept as (1, 1, E)
    return p.ndim >= 2 and not biases and not isinstance(module, (*NORMS, nn.Embedding, nn.EmbeddingBag))


def _moments(rule: Rule, module: nn.Module, key: str, p: nn.Parameter) -> tuple[float, float]:
    if is_weight(module, key, p):
        return 0.0, rule(*fans(module, key, p))
    if isinstance(module, NORMS):
        return (1.0, 1.0) if key == "weight" else (0.0, 1.0)
    biases = "bias" in key and not isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    return 0.0, getattr(rule, "bias_variance", 1.0) if biases else 1.0


def fans(module: nn.Module, key: str, p: torch.Tensor) -> tuple[int, int]:
    """How many inputs a unit of this weight has, and how many outputs an input feeds.

    Of one group of a convolution, of one gate of a recurrent layer, of one projection of attention.
    """
    window, groups = p[0, 0].numel(), getattr(module, "groups", 1)
    if isinstance(module, TRANSPOSED):  # (in, out / groups, *window)
        return p.shape[0] // groups * window, p.shape[1] * window
    fan_in, fan_out = p.shape[1] * window, p.shape[0] // groups * window
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)) and not key.startswith("weight_hr"):
        return fan_in, module.hidden_size
    if isinstance(module, nn.MultiheadAttention) and p.shape[0] == 3 * module.embed_dim:
        return fan_in, module.embed_dim
    return fan_in, fan_out
