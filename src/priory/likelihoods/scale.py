"""Location-scale likelihoods, whose scale is learnt, given, or predicted by the network.

A network that predicts the scale gives d locations and then d raw scales in its last dimension, scale = softplus(raw).

A model that standardises its targets gives the likelihood their units. The network's outputs, a learnt scale and the
network's own scales are then at unit scale, y = shift + unit (f + scale eps); targets, moments, draws, densities and a
given scale are in the user's units.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor
from torch.distributions import LogNormal, constraints
from torch.nn.functional import softplus

from priory.core.errors import InputError, require
from priory.core.flat import Param
from priory.likelihoods.base import Declared, Likelihood, as_float, diagonal_roots, lift, squeeze_last

if TYPE_CHECKING:
    from torch.distributions import Distribution

    from priory.core.units import Units

MIN_NETWORK_SCALE = 1e-6  # added to softplus, which can underflow to a scale of 0


class LocationScale(Likelihood):
    """Base class of Gaussian and StudentT: where the scale comes from, and how it broadcasts with the outputs."""

    unit_scale: ClassVar[bool] = True
    units: Units | None = None  # of the targets; None at unit scale

    def __init__(self, scale: float | str | Tensor, name: str, outputs: int, prior: Distribution | None) -> None:
        owner = type(self).__name__
        require(isinstance(outputs, int) and outputs >= 1, "outputs", owner, "be an integer >= 1", outputs)
        self._name, self._outputs = name, outputs
        self._prior = LogNormal(0.0, 3.0) if prior is None else prior
        support = getattr(self._prior, "support", None)
        ok = isinstance(support, (constraints.greater_than, constraints.greater_than_eq)) and support.lower_bound == 0
        require(ok, "prior", owner, "be a distribution over positive numbers", self._prior)
        self._given: Tensor | None = None
        self._source = scale if isinstance(scale, str) else "given"
        if isinstance(scale, str):
            require(
                scale in ("learn", "network"),
                name,
                owner,
                "be 'learn', 'network', a number or a tensor",
                repr(scale),
            )
            return
        number = isinstance(scale, (int, float, Tensor)) or hasattr(scale, "__array__")
        number = number and not isinstance(scale, bool)
        require(number, name, owner, "be 'learn', 'network', a number or a tensor", scale)
        given = scale if isinstance(scale, Tensor) else torch.as_tensor(scale, dtype=torch.float64)
        positive = given.is_floating_point() and given.ndim <= 1 and bool((torch.isfinite(given) & (given > 0)).all())
        require(positive, name, owner, "be positive: one number, or one per output", scale)
        self._given = given.detach().clone()
        self._outputs = 1 if given.ndim == 0 else len(given)

    def __repr__(self) -> str:
        value = repr(self._source) if self._given is None else self._given.tolist()
        return f"{type(self).__name__}({self._name}={value})"

    @property
    def declared(self) -> dict[str, Declared]:
        if self._source != "learn":
            return {}
        shape = () if self._outputs == 1 else (self._outputs,)
        return {self._name: Declared(Param(shape, constraints.positive), self._prior)}

    def in_units(self, units: Units | None) -> Self:
        likelihood = copy.copy(self)
        likelihood.units = units
        return likelihood

    def start(self, targets: Tensor) -> dict[str, Tensor]:
        if self._source != "learn":
            return {}
        columns = self.standard(targets.double()).reshape(-1, self._outputs)
        # Below the spread of the targets, so that training first fits the network instead of explaining everything as
        # noise; but not far below the first errors, which are of the size of the targets.
        scale = torch.maximum(0.3 * columns.std(0, unbiased=False), 0.1 * columns.mean(0).abs()).clamp_min(1e-3)
        return {self._name: (scale[0] if self._outputs == 1 else scale).to(targets.dtype)}

    def prepare(self, targets: Tensor, dtype: torch.dtype) -> Tensor:
        return as_float(targets, dtype, type(self).__name__)

    def arrange(self, outputs: Tensor, event: torch.Size) -> Tensor:
        owner = type(self).__name__
        if self._outputs > 1 and (len(event) == 0 or event[-1] != self._outputs):
            raise InputError(
                f"The '{self._name}' argument of {owner} must have one value for each output of the targets "
                f"{tuple(event)}, "
                f"got {self._outputs}."
            )
        if self._source != "network":
            return squeeze_last(outputs, event, owner)
        wanted = (2,) if len(event) == 0 else (*event[:-1], 2 * event[-1])
        if tuple(outputs.shape[1:]) != wanted:
            raise InputError(
                f"The network's output must fit {owner}({self._name}='network'): {wanted} values per row, locations "
                f"and then scales, got {tuple(outputs.shape[1:])}."
            )
        return outputs if len(event) == 0 else outputs.unflatten(-1, (2, event[-1])).transpose(-1, -2)  # (n, *event, 2)

    @property
    @abstractmethod
    def information(self) -> tuple[float, float]:
        """The Fisher information of the location at scale 1, and that of the log scale."""

    def roots(self, outputs: Tensor, learnt: dict[str, Tensor]) -> Tensor:
        of_location, of_log_scale = self.information
        location, scale = self.at_unit_scale(outputs, learnt)
        root = math.sqrt(of_location) / scale
        if self._source == "network":  # diagonal: the location's score is odd in y - location, the scale's is even
            slope = torch.sigmoid(outputs[..., 1])  # d scale / d raw
            return diagonal_roots(torch.stack([root, math.sqrt(of_log_scale) * slope / scale], -1))
        return diagonal_roots(root.expand_as(location))

    def standard(self, targets: Tensor) -> Tensor:
        """Return the targets at the scale of the network's outputs."""
        return targets if self.units is None else self.units.standard(targets)

    def at_unit_scale(self, outputs: Tensor, learnt: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the location and the scale of standardised targets, which broadcast to (*B, n, *event)."""
        if self._source == "network":
            location, raw = outputs.unbind(-1)
            return location, softplus(raw) + MIN_NETWORK_SCALE
        if self._given is not None:
            given = self._given.to(outputs)
            return outputs, given if self.units is None else given / self.units.pair(outputs)[1]
        return outputs, lift(learnt[self._name], int(self._outputs > 1), outputs)

    def location_and_scale(self, outputs: Tensor, learnt: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the location and the scale of the targets, which broadcast to (*B, n, *event)."""
        location, scale = self.at_unit_scale(outputs, learnt)
        if self.units is None:
            return location, scale
        return self.units.restore(location), scale * self.units.pair(location)[1]

    def residuals(self, outputs: Tensor, targets: Tensor, learnt: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return (targets - location) / scale, and the log scale in the user's units."""
        location, scale = self.at_unit_scale(outputs, learnt)
        z = (self.standard(targets) - location) / scale
        return z, torch.log(scale if self.units is None else scale * self.units.pair(location)[1])
