"""The interfaces of a variational family and of its parametrisation.

A `Family` is a distribution q over the flat vector w in R^P that holds its tensors and is differentiable in them. A
`Form` is the parametrisation of a family: the number of variational parameters theta, their initial values, and the
map from theta to q. It consists of a few plain values that can be stored in a file. An optimiser only sees theta.

    theta: (*B, K)  --form.family-->  q  --q.sample(n)-->  w: (n, *B, P)

Leading dimensions *B (restarts, ensemble members) come first, and members do not influence each other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from priory.core.errors import is_integer, require

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    from priory.core.flat import Layout
    from priory.models.density import DensityPrior
    from priory.priors import Prior

FORMS: dict[str, type[Form]] = {}  # by the kind stored in files


class Family(ABC):
    """Base class of distributions over the flat vector: frozen dataclasses of tensors with leading dimensions *B."""

    @property
    @abstractmethod
    def size(self) -> int:
        """The length P of a draw."""

    @abstractmethod
    def sample(self, n: int, generator: Any) -> Tensor:
        """Draw reparameterised values of w, through which gradients flow to the family's tensors.

        E_q[f(w)] is estimated by the average of f over the draws, weighted by `weights(n)` where that is not None.

        Args:
            n: Number of draws.
            generator: Source of randomness, a `torch.Generator` on the device of the family's tensors, or `FixedNoise`
                with n rows for families of Gaussians and factorised families.

        Returns:
            The draws, (n, *B, P).
        """

    def independent(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw n independent and equally weighted values of w, (n, *B, P)."""
        return self.sample(n, generator)

    def weights(self, n: int) -> Tensor | None:
        """Return the weights of the draws of `sample(n)`, (n, *B), which sum to 1 over n; None for equal weights."""
        return None

    @abstractmethod
    def log_prob(self, w: Tensor) -> Tensor:
        """Return log q(w): (..., *B, P) -> (..., *B)."""

    def entropy(self) -> Tensor | None:
        """Return the entropy H(q) in nats, (*B,), or None if there is no closed form."""
        return None

    def moments(self) -> tuple[Tensor, Tensor] | None:
        """Return the mean and the variance of each coordinate, (*B, P) each, or None if there is no closed form."""
        return None

    def cross_entropy(self, prior: Prior | DensityPrior) -> Tensor | None:
        """Return -E_q[log p(w)] over the coordinates with a Gaussian prior, (*B,), or None without moments.

        For every family it is the sum of lambda/2 (variance + (mean - m0)^2) over these coordinates, minus the log
        normaliser of the prior.

        Args:
            prior: Prior with location m0 and precision lambda per coordinate.
        """
        moments = self.moments()
        if moments is None:
            return None
        mean, variance = moments
        square = variance + (mean - prior.loc).square()
        return 0.5 * (prior.precision * square).sum(-1) - prior.log_normaliser

    def detached(self) -> Self:
        """Return this distribution with detached tensors, through which no gradient flows."""
        return replace(self, **{f.name: _detached(getattr(self, f.name)) for f in fields(self)})  # pyright: ignore[reportArgumentType] - every family is a dataclass


def _detached(value: Any) -> Any:
    """A field of a family without gradients: tensors and inner families are detached."""
    if isinstance(value, Tensor):
        return value.detach()
    return value.detached() if isinstance(value, Family) else value


@dataclass(frozen=True)
class Form(ABC):
    """Base class of parametrisations of a family: a frozen dataclass that can be stored as JSON.

    Args:
        size: Length P of the flat vector.
    """

    kind: ClassVar[str]  # the name stored in files
    size: int

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "kind" in vars(cls):
            FORMS[cls.kind] = cls

    def __post_init__(self) -> None:
        self.require_integer("size", 1)

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, ...]:
        """The number of entries of each part of theta, in order."""

    @property
    def length(self) -> int:
        """The number K of entries of theta."""
        return sum(self.sizes)

    @abstractmethod
    def initial(self, loc: Tensor, scale: Tensor, generator: torch.Generator) -> Tensor:
        """Return the initial theta, for which q has a given mean and given standard deviations.

        Args:
            loc: Mean of q, (*B, P).
            scale: Standard deviations of q, (P,).
            generator: Source of randomness, where the initial q is not determined by `loc` and `scale`.

        Returns:
            The initial theta, (*B, K).
        """

    @abstractmethod
    def family(self, theta: Tensor) -> Family:
        """Return the q with parameters theta (*B, K), differentiable in theta."""

    def moved(self, theta: Tensor, centre: Tensor, root: Tensor) -> Tensor | None:
        """Return the theta of centre + root v, where v has the q of `theta`; None if that is not of this form.

        Args:
            theta: Parameters of the q of v, (*B, K).
            centre: A vector, (P,).
            root: Scales of the coordinates, (P,), or a lower-triangular matrix, (P, P).
        """
        return None

    def describe(self) -> dict[str, Any]:
        """Return the kind and the fields, which are stored in files."""
        return {"kind": self.kind, **{f.name: getattr(self, f.name) for f in fields(self)}}

    @classmethod
    def of(cls, description: Mapping[str, Any], layout: Layout) -> Form:
        """Return the form with the fields that `describe` returned."""
        return cls(**description)

    # Helpers of subclasses.

    def split(self, theta: Tensor) -> tuple[Tensor, ...]:
        """Split theta (*B, K) into its parts, views (*B, sizes[i])."""
        ok = theta.ndim > 0 and theta.shape[-1] == self.length
        must = f"have {self.length} entries in its last dimension"
        require(ok, "theta", type(self).__name__, must, tuple(theta.shape))
        return torch.split(theta, list(self.sizes), -1)

    def expanded_scale(self, loc: Tensor, scale: Tensor) -> Tensor:
        """Check both arguments of `initial`, and return the standard deviations expanded to (*B, P)."""
        owner = type(self).__name__
        ok = loc.ndim > 0 and loc.shape[-1] == self.size
        require(ok, "loc", owner, f"have {self.size} entries in its last dimension", tuple(loc.shape))
        require(scale.shape == (self.size,), "scale", owner, f"have the shape ({self.size},)", tuple(scale.shape))
        low = float(scale.detach().min())
        require(low > 0, "scale", owner, "be positive", low)
        return scale.to(loc).expand_as(loc)

    def require_integer(self, name: str, least: int) -> None:
        """Raise an InputError unless a field is an integer >= `least`."""
        value = getattr(self, name)
        require(is_integer(value, least), name, type(self).__name__, f"be an integer >= {least}", value)


def form_of(description: Mapping[str, Any], layout: Layout) -> Form:
    """Return the form with a stored description.

    Args:
        description: What `Form.describe` returned.
        layout: Layout of the flat vector.

    Returns:
        The form.

    Raises:
        InputError: If the kind is unknown, or if the form does not have the size of the layout.
    """
    ok = isinstance(description, dict) and description.get("kind") in FORMS
    require(ok, "description", "form_of", f"name a kind among {', '.join(FORMS)}", description)
    values = {name: value for name, value in description.items() if name != "kind"}
    form = FORMS[description["kind"]].of(values, layout)
    require(form.size == layout.size, "description", "form_of", f"be of size {layout.size}", form.size)
    return form


class FixedNoise:
    """Noise that is the same whenever a family is sampled, in place of a generator.

    A family takes the columns that it needs, one after the other, from a matrix of uniform values or of normal draws.

    Args:
        uniform: Values in (0, 1), (n, columns).
        normal: Standard normal draws, (n, columns).
    """

    def __init__(self, uniform: Tensor, normal: Tensor) -> None:
        self.uniform, self.normal, self._taken = uniform, normal, 0

    def restarted(self) -> FixedNoise:
        """Return the same noise, from its first column."""
        return FixedNoise(self.uniform, self.normal)

    def take(self, source: Tensor, like: Tensor) -> Tensor:
        """Return the next columns of a matrix as noise of the shape (n, *like.shape)."""
        first, self._taken = self._taken, self._taken + like.numel()
        return source[:, first : self._taken].reshape(-1, *like.shape).to(like.dtype)


def normal_noise(n: int, like: Tensor, generator: torch.Generator | FixedNoise) -> Tensor:
    """Draw standard normal noise, (n, *like.shape)."""
    if isinstance(generator, FixedNoise):
        return generator.take(generator.normal, like)
    return torch.randn(n, *like.shape, generator=generator, dtype=like.dtype, device=like.device)
