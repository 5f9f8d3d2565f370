"""The weights that dropping a unit sets to zero.

Noise on the inputs of a layer is noise on its weights: with one factor z_i for each input unit i

    (z * x) W' = x (W diag(z))'

so dropping unit i multiplies column i of W by a factor. In a convolution the factor applies to the kernels of input
channel i. In a recurrent layer it applies to column i of each gate, and one factor holds for every time step.

`DropoutUnits` maps each coordinate of the flat vector to the unit whose factor it takes. The units come from the
dropout that a network contains, as a module or as a function (`priory.network.traced_dropout`), or from its layers if
it contains none.

**Why weights, and not only activations.** The loss of dropout as variational inference needs the map from units to
weights: its penalty adds p / (1 - p) to the decay of the weights that read a dropped unit, and learnt rates need
the gradient in a unit's factor. So the map (this file and `traced_dropout`, 455 lines) is needed in a fit, not only for
`sample()`. Fits already mask activations, one mask per row (`priory.network.row_masks`); predictions draw weights,
because many weight vectors go through a chain of layers together and dropout modules run once per draw:

    smallest CPU time, one thread                     13-50-50-2     784-400-400-10
    likelihood and gradient, row masks                  458 us             5.4 ms
    likelihood and gradient, torch's modules            345 us             4.7 ms
    likelihood and gradient, one draw of weights        434 us             5.0 ms
    64 draws at 1000 rows, draws of weights              20 ms             0.76 s
    64 passes with torch's dropout modules               56 ms             1.06 s

Torch's modules also draw from the global random state, so a fit could not be reproduced from its seed.

References:
    Gal and Ghahramani (2016), Dropout as a Bayesian approximation.
    Gal and Ghahramani (2016), A theoretically grounded application of dropout in recurrent neural networks.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from priory.core.errors import InputError, require

if TYPE_CHECKING:
    from collections.abc import Sequence

    from priory.network.skeleton import Network

MASKABLE_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True, eq=False)
class DropoutSite:
    """Units that are dropped at one rate, and the weights that read them.

    Attributes:
        parameters: Names of the weights that read the units.
        units: Number of units.
        rate: The dropout rate in the network, or None if the network has no dropout here.
        columns: The unit of each input, one tensor per weight. If empty, input i is unit i.
    """

    parameters: tuple[str, ...]
    units: int
    rate: float | None = None
    columns: tuple[Tensor, ...] = ()


@dataclass(frozen=True, eq=False)
class DropoutUnits:
    """Maps the P coordinates of the flat vector to the U units that can be dropped, and the units to their sites.

    Attributes:
        sites: The dropout sites.
        unit: The unit of each coordinate, (P,); U for coordinates without a unit.
        site: The site of each unit, (U,).
        places: For each site, the slices of the flat vector that hold its weights.
    """

    sites: tuple[DropoutSite, ...]
    unit: Tensor
    site: Tensor
    places: tuple[tuple[slice, ...], ...]

    @classmethod
    def of(cls, network: Network, sites: Sequence[DropoutSite], size: int) -> DropoutUnits:
        """The units of `sites` in a vector of `size` coordinates that begins with the network's weights."""
        count = sum(s.units for s in sites)
        unit = torch.full((size,), count, dtype=torch.int64, device=network.device)
        places = network.place_of
        start = 0
        for s in sites:
            for i, name in enumerate(s.parameters):
                shape = network.params[name].shape
                inputs = s.columns[i].cpu() if s.columns else torch.arange(s.units)
                groups = inputs.view(-1, shape[1])  # in a convolution each group of outputs has its own inputs
                each = groups.repeat_interleave(shape[0] // len(groups), 0)  # (outputs, inputs)
                each = each.view(*shape[:2], *[1] * (len(shape) - 2)).expand(shape)
                unit[places[name]] = (start + each.reshape(-1)).to(unit.device)
            start += s.units
        site = torch.repeat_interleave(torch.tensor([s.units for s in sites])).to(unit.device)
        return cls(tuple(sites), unit, site, places_of(network, sites))

    @property
    def masked(self) -> Tensor:
        """Whether a coordinate has a unit, (P,)."""
        return self.unit < len(self.site)

    @property
    def counts(self) -> list[int]:
        """The number of units of each site."""
        return [s.units for s in self.sites]

    def sums(self, values: Tensor) -> Tensor:
        """The sum over the weights of each site, (..., L), of values (..., P)."""
        return torch.stack([torch.cat([values[..., at] for at in places], -1).sum(-1) for places in self.places], -1)

    def spread(self, factors: Tensor) -> Tensor:
        """The factor of each coordinate, (..., P), from those of the units, (..., U); 1 if it has no unit."""
        ones = factors.new_ones(*factors.shape[:-1], 1)
        return torch.cat([factors, ones], -1).index_select(-1, self.unit)


def places_of(network: Network, sites: Sequence[DropoutSite]) -> tuple[tuple[slice, ...], ...]:
    """Return the slices of the flat vector that hold the weights of each site."""
    return tuple(tuple(network.place_of[name] for name in site.parameters) for site in sites)


def sites_by_layer(network: Network, inputs: bool, some: tuple[Tensor, ...] | None = None) -> list[DropoutSite]:
    """One site per trained weight of a linear, convolutional or recurrent layer.

    The first layer is included only if `inputs` is true. It is the one that a pass over the rows `some` calls first;
    without rows, the first one registered. A network of a single layer has its inputs dropped in either case.
    """
    found = []  # one entry per weight of every layer; None if it cannot be masked
    for name, module in in_order(network, some):
        prefix = f"{name}." if name else ""
        for key in weights_of(module):
            full = f"{prefix}{key}"
            shape = network.params[full].shape if full in network.params else ()
            found.append(DropoutSite((full,), shape[1] * getattr(module, "groups", 1)) if shape else None)
    sites = [site for site in (found if inputs or len(found) == 1 else found[1:]) if site is not None]
    if not sites:
        raise InputError(
            "The network must have, after its first layer, a linear, convolutional or recurrent layer with trained "
            "weights and no parametrisation, got none; use Dropout(inputs=True) to drop the inputs of the first layer "
            "too."
        )
    return sites


def in_order(network: Network, some: tuple[Tensor, ...] | None) -> list[tuple[str, nn.Module]]:
    """The modules with their names, in the order in which a pass over the rows `some` calls them.

    Modules that are not called come last. Without rows, the order is that of registration.
    """
    modules = list(network.skeleton.named_modules())
    if some is None:
        return modules
    called: dict[nn.Module, int] = {}

    def note(module: nn.Module, _: Any) -> None:
        called.setdefault(module, len(called))

    handles = [module.register_forward_pre_hook(note) for _, module in modules]
    try:
        with torch.no_grad():
            network(network.initial, some, {}, train=False)
    finally:
        for handle in handles:
            handle.remove()
    return sorted(modules, key=lambda named: called.get(named[1], len(called)))


def weights_of(module: nn.Module) -> list[str]:
    """The names of the matrices by which a layer multiplies its inputs or its states."""
    if isinstance(module, MASKABLE_LAYERS):
        return ["weight"]
    if isinstance(module, nn.RNNBase):
        return [key for key in module._flat_weights_names if key.startswith(("weight_ih", "weight_hh"))]
    return []


def drop_rate(rate: Any, owner: str) -> float:
    """Check a dropout rate, and return it as a float."""
    number = isinstance(rate, Real) and not isinstance(rate, bool)
    require(number, "rate", owner, "be a number, a sequence of numbers, or 'learn'", repr(rate))
    require(0 < float(rate) < 1, "rate", owner, "lie between 0 and 1", repr(rate))
    return float(rate)
