"""Weights whose input units are dropped at random, w = m * z: the posterior of dropout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from priory.core.errors import InputError
from priory.models.base import has_network
from priory.network.dropout_off import DropoutOff
from priory.network.dropout_sites import DropoutSite, DropoutUnits, places_of
from priory.posteriors.base import Evidence, Posterior

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from priory.models.target import Target
    from priory.predictive import Prediction


class Masked(Posterior):
    """The posterior of dropout: w_i = m_i z_u(i), with one factor z_u per unit, of mean one.

    "bernoulli": z = 0 with the rate p of the unit's site, else 1 / (1 - p). "gaussian": z ~ N(1, p / (1 - p)). There is
    no density, because there are fewer factors than weights.

    Args:
        target: Target of the fit.
        loc: Means m, (P,).
        rates: Rate of each site, (L,).
        units: The units that are dropped.
        noise: "bernoulli" or "gaussian". Default: "bernoulli".
        buffers: The network's buffers. Default: None, those of the model.
    """

    kind: ClassVar[str] = "masked"

    def __init__(
        self,
        target: Target,
        loc: Tensor,
        rates: Tensor,
        units: DropoutUnits,
        noise: str = "bernoulli",
        buffers: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__(target, buffers)
        self.loc, self._rates, self.units, self.noise = loc.detach().clone(), rates.detach().clone(), units, noise

    @property
    def rates(self) -> dict[str, float]:
        """The probability of dropping an input unit, by the name of the parameter that reads the units."""
        both = zip(self.units.sites, self._rates, strict=True)
        return {name: float(p) for site, p in both for name in site.parameters}

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        p = self._rates[self.units.site]
        return self.loc * self.units.spread(factors(p, torch.Size([n, len(p)]), self.noise, generator))

    @property
    def mean(self) -> dict[str, Tensor]:
        return self.model.layout.constrain(self.loc)  # factors have mean one, and only weights have factors

    def predict(self, x: Any, samples: int = 64, seed: int = 0) -> Prediction:
        """Predict the targets at new inputs, with one mask per draw; the network's own dropout is off.

        Args:
            x: New inputs: a tensor, an array, or a tuple for a network of several inputs.
            samples: Number of masks.
            seed: Seed of the draws.

        Returns:
            A `Prediction`.
        """
        with DropoutOff():
            return super().predict(x, samples=samples, seed=seed)

    def log_likelihood(self, data: Any = None, samples: int | None = None, seed: int = 0) -> Tensor:
        with DropoutOff():
            return super().log_likelihood(data, samples, seed)

    def evidence(self) -> Evidence:
        raise InputError(f"{self.method or 'Dropout'} gives no evidence: its masks have no density.")

    def tensors(self) -> dict[str, Tensor]:
        return {"loc": self.loc, "rates": self._rates, "unit": self.units.unit, "site": self.units.site}

    def to_json(self) -> dict[str, Any]:
        return {"noise": self.noise, "sites": [site_kept(site) for site in self.units.sites]}

    @classmethod
    def of_tensors(
        cls, target: Target, tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor], **options: Any
    ) -> Masked:
        sites = tuple(DropoutSite((name, *others), units) for name, units, *others in options["sites"])
        assert has_network(target.model)
        units = DropoutUnits(sites, tensors["unit"], tensors["site"], places_of(target.model.network, sites))
        return cls(target, tensors["loc"], tensors["rates"], units, options["noise"], buffers)


def site_kept(site: DropoutSite) -> list[str | int]:
    """Return a site as a file stores it: a weight, the number of its units, and the other weights that read them."""
    first, *others = site.parameters
    return [first, site.units, *others]


def factors(p: Tensor, shape: torch.Size, noise: str, generator: torch.Generator) -> Tensor:
    """Draw factors of mean one in a given shape, for rates p that broadcast to it."""
    if noise == "gaussian":
        z = torch.randn(shape, generator=generator, dtype=p.dtype, device=p.device)
        return 1 + (p / (1 - p)).sqrt() * z
    u = torch.rand(shape, generator=generator, dtype=p.dtype, device=p.device)
    return (u >= p) * (1 / (1 - p))
