"""Variational inference with a normalising flow: a Gaussian bent by a chain of couplings (Rezende and Mohamed 2015;
Dinh, Sohl-Dickstein and Bengio 2017).

    w = m + s f_K(... f_1(z)),   z ~ N(0, I),   log q(w) = log N(z) - sum_k log |det df_k| - sum_i log s_i

Each coupling scales and shifts half of the coordinates by functions of the other half, so that its inverse and its
determinant cost no more than itself. Curved and skewed posteriors are within reach. Cost of a step: `samples` passes
and O(samples layers hidden P).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from priory.core.errors import require, whole
from priory.families.flow import FlowForm
from priory.methods.variational.base import VariationalMethod

if TYPE_CHECKING:
    from priory.models.target import Target


@dataclass(frozen=True)
class Flow(VariationalMethod):
    """Variational inference with real NVP: `layers` couplings of `hidden` units; other options as in `MeanField`.

    >>> Flow(layers=0)
    Traceback (most recent call last):
    ...
    priory.InputError: The 'layers' argument of Flow must be an integer >= 1, got 0.
    """

    layers: int = 6
    hidden: int = 32
    samples: int = 16
    learning_rate: float = 5e-3

    narrow: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("layers", "hidden"):
            number = getattr(self, name)
            require(whole(number, 1), name, "Flow", "be an integer >= 1", number)

    def form(self, target: Target) -> FlowForm:
        return FlowForm(target.size, self.layers, self.hidden)
