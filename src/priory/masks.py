"""Which weights a dropped unit takes with it.

Noise on the inputs of a layer is noise on its weights: with one factor z_i for each input unit i

    (z * x) W' = x (W diag(z))'          (in the orientation of the lectures, diag(z) M)

so that dropping unit i is a factor on column i of W: of a linear layer, on the kernels of input channel i of a
convolution, on column i of each gate of a recurrent layer, where one factor holds for every time step (Gal and
Ghahramani 2016, "A Theoretically Grounded Application of Dropout in Recurrent Neural Networks").

`Units` says for each coordinate of the flat vector which unit's factor it takes. They come from the dropout that a
network has, as a module or as a function, or from its layers if it has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from priory.errors import InputError, require

if TYPE_CHECKING:
    from collections.abc import Sequence

    from priory.data import Batch
    from priory.network import Network

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
DROPOUTS = (
    *(functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d),
    *(functional.alpha_dropout, functional.feature_alpha_dropout),
)
ELEMENTWISE = (functional.dropout, functional.alpha_dropout)
# Through these a factor of zero or more on a unit passes unchanged; through the second line only one an element.
THROUGH = (functional.relu, torch.relu, Tensor.relu)
RESHAPES = (torch.flatten, Tensor.flatten, Tensor.view, Tensor.reshape)
PRODUCTS = (functional.linear, torch.conv1d, torch.conv2d, torch.conv3d)


@dataclass(frozen=True)
class Site:
    """A weight whose input units are dropped together, its parameter's name, and the rate that the network has."""

    parameter: str
    units: int
    rate: float | None = None


@dataclass(frozen=True, eq=False)
class Units:
    """For each of P coordinates its unit (P,), U where it has none; for each of U units its site (U,)."""

    sites: tuple[Site, ...]
    unit: Tensor
    site: Tensor

    @classmethod
    def of(cls, network: Network, sites: Sequence[Site], size: int) -> Units:
        """The units of some sites in a vector of `size` coordinates whose first are the network's."""
        count = sum(s.units for s in sites)
        unit = torch.full((size,), count, dtype=torch.int64, device=network.device)
        places = dict(zip(network.params, network.places, strict=True))
        start = 0
        for s in sites:
            shape = network.params[s.parameter].shape
            columns = torch.arange(shape[1]).view(1, -1, *[1] * (len(shape) - 2)).expand(shape)
            if s.units != shape[1]:  # a convolution in groups: each group of outputs has its own inputs
                groups = s.units // shape[1]
                block = torch.arange(shape[0]) // (shape[0] // groups)
                columns = columns + shape[1] * block.view(-1, *[1] * (len(shape) - 1))
            unit[places[s.parameter]] = (start + columns.reshape(-1)).to(unit.device)
            start += s.units
        site = torch.repeat_interleave(torch.tensor([s.units for s in sites])).to(unit.device)
        return cls(tuple(sites), unit, site)

    @property
    def masked(self) -> Tensor:
        """Whether a coordinate has a unit, (P,)."""
        return self.unit < len(self.site)

    def spread(self, factors: Tensor) -> Tensor:
        """The factor of each coordinate, (..., P), from those of the units (..., U); 1 for those that have none."""
        ones = factors.new_ones(*factors.shape[:-1], 1)
        return torch.cat([factors, ones], -1).index_select(-1, self.unit)


def by_layer(network: Network, inputs: bool) -> list[Site]:
    """A site for every weight of a linear, convolutional or recurrent layer; the first one only with `inputs`."""
    sites = []
    for name, module in network.skeleton.named_modules():
        prefix = f"{name}." if name else ""
        for key in weights_of(module):
            full = f"{prefix}{key}"
            if full in network.params:
                shape = network.params[full].shape
                sites.append(Site(full, shape[1] * getattr(module, "groups", 1)))
    if not sites:
        raise InputError("The network must have a linear, convolutional or recurrent layer whose units can be dropped.")
    return sites if inputs or len(sites) == 1 else sites[1:]


def weights_of(module: nn.Module) -> list[str]:
    """The names of the matrices that a layer multiplies its inputs or its states by."""
    if isinstance(module, LAYERS):
        return ["weight"]
    if isinstance(module, nn.RNNBase):
        return [key for key, _ in module.named_parameters(recurse=False) if key.startswith(("weight_ih", "weight_hh"))]
    return []


def in_network(network: Network, inputs: Batch) -> list[Site]:
    """The sites of the dropout that a network has of its own, with their rates; none if it has none."""
    names = {id(leaf): name for name, leaf in network.leaves.items()}
    look = Look(names)
    with torch.no_grad(), look:
        network(network.initial.clone(), inputs, {name: b.clone() for name, b in network.given.items()}, train=False)
    lost = [rate for tag, rate in look.rates.items() if tag not in look.reached and rate > 0]
    if lost:
        raise InputError(
            "The network's dropout must come right before a linear layer or a convolution, whose weights it masks. "
            f"Got {len(lost)} with rate {lost[0]:g} elsewhere: use Dropout(rate=...) without them."
        )
    return [Site(name, units, rate) for name, (units, rate) in look.found.items() if rate > 0]


class Look(TorchFunctionMode):
    """Watches a pass in evaluation mode: which products read what a dropout made."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.names = names
        self.rates: dict[int, float] = {}
        self.reached: set[int] = set()
        self.found: dict[str, tuple[int, float]] = {}
        self._tags: dict[int, tuple[Tensor, int]] = {}  # by the id of a tensor that is kept alive
        self._each: set[int] = set()  # the dropouts that drop elements, and not channels

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DROPOUTS:
            out = args[0].clone()
            tag = len(self.rates)
            self.rates[tag] = float(args[1] if len(args) > 1 else kwargs.get("p", 0.5))
            self._tags[id(out)] = (out, tag)
            self._each |= {tag} if func in ELEMENTWISE else set()
            return out
        if func in PRODUCTS:
            tagged = self._tags.get(id(args[0]))
            name = self.names.get(id(args[1] if len(args) > 1 else kwargs.get("weight")))
            if tagged is not None and name is not None:
                self.reached.add(tagged[1])
                wide = args[0].shape[-1] if func is functional.linear else args[0].shape[1]
                self.found[name] = (int(wide), self.rates[tagged[1]])
        out = func(*args, **kwargs)
        tagged = self._tags.get(id(args[0])) if func in (*THROUGH, *RESHAPES) else None
        if tagged is not None and (func in THROUGH or tagged[1] in self._each):
            self._tags[id(out)] = (out, tagged[1])
        return out


class Quiet(TorchFunctionMode):
    """Dropout as a function does nothing while this is on."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in DROPOUTS:
            return args[0]
        if func is functional.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = kwargs if len(args) > 4 else {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)


def check_rate(rate: Any, owner: str) -> None:
    """Refuse what isn't the probability of dropping a unit."""
    ok = isinstance(rate, (int, float)) and not isinstance(rate, bool) and 0 < rate < 1
    require(ok, "rate", owner, "lie between 0 and 1", repr(rate))
