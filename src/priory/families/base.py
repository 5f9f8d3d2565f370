"""What a family of q is, and how a flat vector of numbers becomes one.

A `Family` is a distribution over the flat vector w in R^P that holds its tensors and is differentiable in them. A
`Form` is its shape in a few plain numbers, enough to write into a file: it says how many numbers theta describe a
member of the family, where they start, and how theta becomes the family. An optimiser then knows one thing, theta.

    theta: (*B, K)  --form.family-->  q  --q.sample(n)-->  w: (n, *B, P)

Leading dimensions *B (restarts, ensemble members) stay in front, and members never touch each other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from priory.core.errors import require, whole

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    from priory.core.flat import Layout
    from priory.models.density import DensityPrior
    from priory.priors import Prior

FORMS: dict[str, type[Form]] = {}  # by the name that a file has for each


class Family(ABC):
    """A distribution over the flat vector: a frozen dataclass of tensors, (*B, ...) each."""

    @property
    @abstractmethod
    def size(self) -> int:
        """P, the length of a draw."""

    @abstractmethod
    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Draws as a function of the family's tensors and of noise, so that gradients flow: (n, *B, P).

        E_q[f(w)] is the average of f over them, weighted by `weights(n)` where that is not None.
        """

    def independent(self, n: int, generator: torch.Generator) -> Tensor:
        """n independent draws that count equally, (n, *B, P): what a person who asks for draws should get."""
        return self.sample(n, generator)

    def weights(self, n: int) -> Tensor | None:
        """How much each draw of `sample(n)` counts, (n, *B) with the sum 1 over n; None for equally."""
        return None

    @abstractmethod
    def log_prob(self, w: Tensor) -> Tensor:
        """log q(w): (..., *B, P) -> (..., *B)."""

    def entropy(self) -> Tensor | None:
        """H(q) in nats, (*B,), or None where there is no closed form."""
        return None

    def moments(self) -> tuple[Tensor, Tensor] | None:
        """The mean and the variance of each coordinate, (*B, P) both, or None where there is no closed form."""
        return None

    def cross_entropy(self, prior: Prior | DensityPrior) -> Tensor | None:
        """-E_q[log p(w)] over the coordinates whose prior is Gaussian, (*B,), or None without the moments.

        It is lambda/2 (variance + (mean - m0)^2) for each coordinate, whatever the family, and the prior's constant.
        """
        moments = self.moments()
        if moments is None:
            return None
        mean, variance = moments
        square = variance + (mean - prior.loc).square()
        return 0.5 * (prior.precision * square).sum(-1) - prior.log_normaliser

    def detached(self) -> Self:
        """The same distribution, through whose tensors no gradient flows."""
        return replace(self, **{f.name: _detached(getattr(self, f.name)) for f in fields(self)})  # pyright: ignore[reportArgumentType] - every family is a dataclass


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    return value.detached() if isinstance(value, Family) else value


@dataclass(frozen=True)
class Form(ABC):
    """The shape of a family over vectors of `size` numbers: a frozen dataclass that JSON can hold."""

    kind: ClassVar[str]  # how a file calls it
    size: int

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "kind" in vars(cls):
            FORMS[cls.kind] = cls

    def __post_init__(self) -> None:
        self.must_be_whole("size", 1)

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, ...]:
        """How many numbers each part of theta has, in order."""

    @property
    def length(self) -> int:
        """K, how many numbers theta has."""
        return sum(self.sizes)

    @abstractmethod
    def initial(self, loc: Tensor, scale: Tensor, generator: torch.Generator) -> Tensor:
        """The theta, (*B, K), of a q with the mean loc (*B, P) and the standard deviations scale (P,)."""

    @abstractmethod
    def family(self, theta: Tensor) -> Family:
        """The q that theta (*B, K) describes, differentiable in it."""

    def describe(self) -> dict[str, Any]:
        """What a file keeps: the kind and the fields."""
        return {"kind": self.kind, **{f.name: getattr(self, f.name) for f in fields(self)}}

    @classmethod
    def of(cls, description: Mapping[str, Any], layout: Layout) -> Form:
        """The form that `describe` described, without its kind."""
        return cls(**description)

    # What the forms share.

    def split(self, theta: Tensor) -> tuple[Tensor, ...]:
        """The parts of theta as views, (*B, sizes[i]) each."""
        ok = theta.ndim > 0 and theta.shape[-1] == self.length
        require(ok, "theta", type(self).__name__, f"end in {self.length} numbers", tuple(theta.shape))
        return torch.split(theta, list(self.sizes), -1)

    def spread(self, loc: Tensor, scale: Tensor) -> Tensor:
        """The starting standard deviations as (*B, P), after a look at both arguments of `initial`."""
        owner = type(self).__name__
        ok = loc.ndim > 0 and loc.shape[-1] == self.size
        require(ok, "loc", owner, f"end in {self.size} coordinates", tuple(loc.shape))
        require(scale.shape == (self.size,), "scale", owner, f"have the shape ({self.size},)", tuple(scale.shape))
        low = float(scale.detach().min())
        require(low > 0, "scale", owner, "be above zero", low)
        return scale.to(loc).expand_as(loc)

    def must_be_whole(self, name: str, least: int) -> None:
        """Refuse a field that isn't an integer from `least`."""
        value = getattr(self, name)
        require(whole(value, least), name, type(self).__name__, f"be an integer >= {least}", value)


def form_of(description: Mapping[str, Any], layout: Layout) -> Form:
    """The form that `Form.describe` described, over the vectors of this layout."""
    ok = isinstance(description, dict) and description.get("kind") in FORMS
    require(ok, "description", "form_of", f"name a kind among {', '.join(FORMS)}", description)
    values = {name: value for name, value in description.items() if name != "kind"}
    form = FORMS[description["kind"]].of(values, layout)
    require(form.size == layout.size, "description", "form_of", f"be of size {layout.size}", form.size)
    return form


def normal_noise(n: int, like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal numbers, (n, *like.shape)."""
    return torch.randn(n, *like.shape, generator=generator, dtype=like.dtype, device=like.device)
