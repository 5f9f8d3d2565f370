"""Finds the dropout that a network contains and the weights that it masks.

One pass is traced: `DropoutTrace` records the dropped unit of each entry of a tensor. A weight that reads the same
units at every position takes their factors. Dropout of single entries of a sequence is not a factor on weights, so its
units share one factor over all positions, with a warning. Dropout whose output goes into anything but a layer, or into
a weight that is also used elsewhere, raises an error.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from priory.core.errors import InputError, warn
from priory.network.dropout_off import ALPHA_DROPOUT, CHANNEL_DROPOUT, DROPOUT_FUNCTIONS, without_dropout
from priory.network.dropout_sites import DropoutSite

if TYPE_CHECKING:
    from collections.abc import Mapping

    from priory.core.data import Batch
    from priory.network.skeleton import Network

BATCHED_NDIM = {
    functional.dropout1d: 3,
    functional.dropout3d: 5,
}  # dimensions of a batch; with fewer, torch takes the rows for channels
PRODUCT_FUNCTIONS = (functional.linear, torch.conv1d, torch.conv2d, torch.conv3d)
RECURRENT_FUNCTIONS = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
# f(z x) = z f(x) for a factor z of zero or more on each entry
HOMOGENEOUS_FUNCTIONS = (
    *(functional.relu, torch.relu, Tensor.relu, torch.relu_, Tensor.relu_, functional.leaky_relu),
    *(Tensor.clone, Tensor.detach, Tensor.to),
)
# functions that only move entries
RESHAPING_FUNCTIONS = (
    *(torch.flatten, Tensor.flatten, Tensor.view, torch.reshape, Tensor.reshape, Tensor.contiguous, Tensor.__getitem__),
    *(torch.transpose, Tensor.transpose, torch.permute, Tensor.permute, torch.movedim, Tensor.movedim),
    *(torch.squeeze, Tensor.squeeze, torch.unsqueeze, Tensor.unsqueeze),
)
# functions that combine entries of one channel, which belong to one unit if channels are dropped
POOLING_FUNCTIONS = (
    *(functional.max_pool1d, functional.max_pool2d, functional.max_pool3d),
    *(torch.max_pool1d, torch.max_pool2d, torch.max_pool3d),
    *(functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d),
    *(functional.adaptive_avg_pool1d, functional.adaptive_avg_pool2d, functional.adaptive_avg_pool3d),
    *(functional.adaptive_max_pool1d, functional.adaptive_max_pool2d, functional.adaptive_max_pool3d),
)
REDUCING_FUNCTIONS = (torch.mean, Tensor.mean, torch.sum, Tensor.sum, torch.amax, Tensor.amax)


def sites_in_network(network: Network, inputs: Batch) -> list[DropoutSite]:
    """The sites and rates of the dropout that a network contains; empty if it contains none."""
    trace = DropoutTrace({id(leaf): name for name, leaf in network.leaves.items()}, len(inputs[0]))
    before = network.silent, network.quiet
    network.disable_dropout(modules=True)  # dropout functions are caught by the trace itself
    buffers = {name: b.clone() for name, b in network.given.items()}
    try:
        with torch.enable_grad(), trace:
            outputs = network(network.initial.clone(), inputs, buffers, train=True)
    finally:
        network.disable_dropout(*before)
    return trace.sites(outputs)


@dataclass
class DropoutCall:
    """One call of dropout in a pass: its rate, and for each weight that reads it the unit of each input."""

    rate: float
    reads: dict[str, Tensor] = field(default_factory=dict)
    ways: set[int] = field(
        default_factory=set
    )  # 0, or the number of inputs that share their factors over all positions


@dataclass(frozen=True, eq=False)
class DroppedTensor:
    """An output of dropout and the unit of each entry; the tensor is kept alive so that its id stays unique."""

    tensor: Tensor
    call: DropoutCall
    unit: Tensor


class DropoutTrace(TorchFunctionMode):
    """Follows the outputs of dropout through a pass: which weights read them, and whether anything else does."""

    def __init__(self, names: Mapping[int, str], rows: int) -> None:
        super().__init__()
        self.names, self.rows = names, rows
        self.calls: list[DropoutCall] = []
        self.attention = False
        self._dropped: dict[int, DroppedTensor] = {}  # by the id of the tensor
        self._uses: dict[str, set[int | None]] = defaultdict(
            set
        )  # ids of the calls that each parameter reads; None for a use without dropout

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DROPOUT_FUNCTIONS:
            return self._drop(func, *args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            self.attention |= bool(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))
            args, kwargs = without_dropout(args, kwargs)
        elif func is functional.multi_head_attention_forward:
            self.attention |= bool(args[10] if len(args) > 10 else kwargs["dropout_p"])
        out = func(*args, **kwargs)
        if not any(isinstance(t, Tensor) for t in tree_leaves(out)):
            return out  # a shape or a dtype: no value was read
        followed = self._follow(func, args, kwargs, out)
        for t in tree_leaves((args, kwargs)):
            if id(t) in followed:
                continue
            if id(t) in self._dropped:
                raise untraceable(self._dropped[id(t)].call.rate, f"'{func.__name__.strip('_')}'")
            if id(t) in self.names:
                self._uses[self.names[id(t)]].add(None)
        return out

    def sites(self, outputs: Tensor) -> list[DropoutSite]:
        """The sites found, once the pass has returned its outputs."""
        if id(outputs) in self._dropped:
            raise untraceable(self._dropped[id(outputs)].call.rate, "the network's output")
        for call in self.calls:
            if not call.reads:
                raise untraceable(call.rate, "nothing that can be followed")
            for name in call.reads:
                if len(self._uses[name]) > 1:
                    raise conflicting_reads(name)
        if any(call.ways != {0} for call in self.calls):
            warn(
                "The network's dropout drops different entries at each position of a sequence. A mask of weights drops "
                "the same units at all positions, so the fit uses that instead."
            )
        if self.attention:
            warn("The network's dropout of attention weights is disabled: it cannot be written as a mask of weights.")
        return [site_of(call) for call in self.calls]

    def _drop(self, func: Any, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Record the unit of each entry of a dropout's output, and return the output with nothing dropped."""
        if p == 0:
            return x
        must = "The network's dropout must"
        if func in ALPHA_DROPOUT:
            raise InputError(
                f"{must} set units to zero, as Dropout, Dropout1d, Dropout2d and Dropout3d do, got alpha dropout, "
                "which also shifts them and so is not a mask of weights."
            )
        check_own_rate(p)
        if x.ndim != BATCHED_NDIM.get(func, x.ndim):
            raise InputError(f"{must} drop units of every row, got {func.__name__} of {x.ndim} dimensions.")
        if id(x) in self._dropped:
            raise untraceable(self._dropped[id(x)].call.rate, "another dropout")
        call, out = DropoutCall(float(p)), x if inplace else x.clone()
        self.calls.append(call)
        self._dropped[id(out)] = DroppedTensor(out, call, units_of_entries(x, func in CHANNEL_DROPOUT, self.rows))
        return out

    def _follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> set[int]:
        """Follow dropped units through a function; returns the ids of the arguments that it may read."""
        if func in RECURRENT_FUNCTIONS:
            return self._recurrent(args)
        x, *rest = args if args else (kwargs.get("input"),)
        seen = self._dropped.get(id(x))
        if seen is None:
            return set()
        if func in PRODUCT_FUNCTIONS:
            return self._product(func, seen, rest[0] if rest else kwargs["weight"])
        unit = units_after(func, seen.unit, rest, {k: v for k, v in kwargs.items() if k != "input"}, out)
        if unit is None:
            return set()
        self._dropped[id(out)] = DroppedTensor(out, seen.call, unit)
        return {id(x)}

    def _product(self, func: Any, seen: DroppedTensor, weight: Tensor) -> set[int]:
        """Record that a weight reads dropped units, in the last dimension or in the channels."""
        name, unit = self.names.get(id(weight)), seen.unit
        if name is None or (func is not functional.linear and unit.ndim != weight.ndim):
            return set()
        if func is not functional.linear:
            if not torch.equal(unit, first_of_channels(unit).expand_as(unit)):
                raise InputError(
                    f"The network's dropout before a convolution must drop whole channels, got one that drops entries "
                    f"before '{name}', which is not a mask of weights; use nn.Dropout{unit.ndim - 2}d."
                )
            unit = unit.movedim(1, -1)
        self._read(seen.call, name, unit.reshape(-1, unit.shape[-1]))
        return {id(seen.tensor), id(weight)}

    def _recurrent(self, args: Any) -> set[int]:
        """Record the reads of recurrent layers: the first reads the input, the others the dropout between layers."""
        place = max(i for i, arg in enumerate(args) if isinstance(arg, (list, tuple)))
        weights, layers, rate, both = args[place], args[place + 2], args[place + 3], args[place + 5]
        followed, seen = set(), self._dropped.get(id(args[0]))
        for level in range(layers):
            key = re.compile(rf"(.*\.)?weight_ih_l{level}(_reverse)?")
            reads = [t for t in weights if key.fullmatch(self.names.get(id(t), ""))]
            trained = len(reads) == (2 if both else 1)
            if level == 0 and seen is not None and trained:
                call, unit = seen.call, seen.unit.reshape(-1, seen.unit.shape[-1])
                followed.add(id(args[0]))
            elif level > 0 and rate > 0:
                check_own_rate(rate)
                if not trained:
                    raise untraceable(rate, "a recurrent layer that isn't trained")
                call, steps = DropoutCall(float(rate)), 2  # each step of a sequence has its own entries
                unit = torch.arange(steps * reads[0].shape[1]).view(steps, -1)
                self.calls.append(call)
            else:
                continue
            for weight in reads:
                self._read(call, self.names[id(weight)], unit)
                followed.add(id(weight))
        return followed

    def _read(self, call: DropoutCall, name: str, unit: Tensor) -> None:
        """Record that a weight reads units (positions, inputs): the same units at each position, or shared factors."""
        inputs = unit.shape[-1]
        way, columns = 0, unit[0]
        if not torch.equal(unit, unit[:1].expand_as(unit)):
            way, columns = inputs, torch.arange(inputs)
            if bool((unit.sort(-1).values.diff(dim=-1) == 0).any()):  # a unit twice at one position
                raise untraceable(call.rate, f"'{name}', which doesn't read the units that it drops")
        call.ways.add(way)
        if len(call.ways) > 1 or not torch.equal(call.reads.get(name, columns), columns):
            raise conflicting_reads(name)
        call.reads[name] = columns
        self._uses[name].add(id(call))


def check_own_rate(rate: float) -> None:
    """Raise an error unless a dropout rate of the network lies between 0 and 1."""
    if not 0 < rate < 1:
        raise InputError(f"The network's dropout must have a rate below 1, got {float(rate):g}.")


def untraceable(rate: float, where: str) -> InputError:
    """The error for dropout that cannot be written as a mask of weights."""
    return InputError(
        "The network's dropout must come right before linear, convolutional or recurrent layers that are trained "
        "without a parametrisation, and go nowhere else, "
        f"got one of rate {rate:g} that goes into {where}; move it, or set every p to 0 to let Dropout place its masks "
        "by layer."
    )


def conflicting_reads(name: str) -> InputError:
    """The error for a weight that reads different dropped units in one pass."""
    return InputError(
        f"A layer behind the network's dropout must always read the same dropped units, got '{name}', which is also "
        "used with other dropout or without dropout; use two layers, or set every p to 0 to let Dropout place its "
        "masks by layer."
    )


def site_of(call: DropoutCall) -> DropoutSite:
    """The site of one dropout call: the units that weights read, numbered from zero."""
    read = torch.cat(list(call.reads.values())).unique()
    columns = tuple(torch.searchsorted(read, unit.contiguous()) for unit in call.reads.values())
    return DropoutSite(tuple(call.reads), len(read), call.rate, columns)


def units_of_entries(x: Tensor, channels: bool, rows: int) -> Tensor:
    """The unit of each entry of x that a dropout drops, the same for every row."""
    lead = x.shape[:2] if channels else x.shape
    count = math.prod(lead)
    each = count // rows if len(x) % rows == 0 else count
    unit = torch.arange(count, device=x.device) % each
    return unit.view(*lead, *[1] * (x.ndim - len(lead))).expand(x.shape).contiguous()


def first_of_channels(unit: Tensor) -> Tensor:
    """The unit of the first entry of each channel, (n, C, 1, ...)."""
    return unit.flatten(2)[..., :1].view(*unit.shape[:2], *[1] * (unit.ndim - 2)) if unit.ndim > 2 else unit


def units_after(func: Any, unit: Tensor, args: Any, kwargs: Any, out: Any) -> Tensor | None:
    """The unit of each entry of a function's output, or None if a unit's factor does not pass through it."""
    if func in HOMOGENEOUS_FUNCTIONS:
        return unit
    if func in RESHAPING_FUNCTIONS:
        return (Tensor.reshape if func is Tensor.view else func)(unit, *args, **kwargs)
    if func in POOLING_FUNCTIONS and isinstance(out, Tensor) and unit.ndim > 2 and out.shape[:2] == unit.shape[:2]:
        first = first_of_channels(unit)
        return first.expand(out.shape).contiguous() if torch.equal(unit, first.expand_as(unit)) else None
    if func in REDUCING_FUNCTIONS and kwargs.keys() <= {"dim", "keepdim"}:
        low, high = unit.amin(*args, **kwargs), unit.amax(*args, **kwargs)
        return high if torch.equal(low, high) else None
    return None
