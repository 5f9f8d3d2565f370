"""Penalties on the variational distribution itself: r(mu, scale) in the place of KL(q || p).

    loss = E_q[-log p(D|w)] + r(mu, scale)

It is Bayesian if r is KL(q || p) + K for some prior p, which `prior_from_penalty` finds, or says to be missing. It has
no value at a single w, so that only mean-field inference can train with it: every other method refuses it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints

from priory.core.errors import InputError, require
from priory.penalties.as_prior.base import is_function, is_positive
from priory.penalties.as_prior.densities import UnnormalisedDensity, map_members
from priory.penalties.as_prior.parameters import describe_parameters
from priory.penalties.equivalence.from_penalty import prior_from_penalty

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from priory.penalties.equivalence.result import Equivalence
    from priory.priors import Prior


@dataclass(frozen=True, repr=False)
class Variational:
    """factor r(mu, scale), for a function of the means and scales of one parameter's weights.

    The function takes two tensors of the parameter's shape, and returns a number or a value for each weight, to be
    summed; `scale` is the standard deviation of a Gaussian, and the scale of the other families of `MeanField`. It is
    the `prior` of a Model, for every parameter, or for those of a pattern. A posterior that was trained with it has its
    `certificate`.

    >>> Variational(lambda mu, scale: mu.square() + scale.square(), factor=2.0)
    Variational(<lambda>, factor=2.0)
    """

    function: Callable[[Tensor, Tensor], Tensor]
    factor: float = 1.0

    def __post_init__(self) -> None:
        ok = is_function(self.function)
        require(ok, "function", "Variational", "be a function of means and scales", repr(self.function))
        require(is_positive(self.factor), "factor", "Variational", "be a positive number", self.factor)

    def __repr__(self) -> str:
        name = getattr(self.function, "__name__", repr(self.function))
        return f"Variational({name}, factor={self.factor!r})"

    def __call__(self, mu: Tensor, scale: Tensor) -> Tensor:
        """factor r(mu, scale), as the function returns it."""
        return self.factor * self.function(mu, scale)

    def equivalence(self, family: str = "gaussian") -> Equivalence:
        """The prior of a weight that the penalty is for this family of q, with its certificate."""
        pair = torch.tensor([0.5, 1.0], dtype=torch.float64)
        value = self.function(pair, pair)
        single = isinstance(value, Tensor) and value.shape == pair.shape
        require(single, "function", "Variational", "return a value for each weight to be certified", "their sum")
        return prior_from_penalty(self, family)

    def beliefs(self, net: nn.Module, dtype: torch.dtype) -> dict[str, VariationalTerm]:
        """The penalty of each trainable parameter."""
        found = {}
        for name, parameter in describe_parameters(net).items():
            trial = torch.full(parameter.shape, 0.5, dtype=dtype)
            try:
                value = self.function(trial, trial)
            except Exception as error:
                reason = f"{type(error).__name__}: {str(error).strip()}".split("\n")[0]
                raise InputError(
                    f"The 'function' argument of Variational must take the means and scales of '{name}'. It "
                    f"raised {reason}"
                ) from error
            ok = isinstance(value, Tensor) and tuple(value.shape) in ((), parameter.shape)
            got = f"the shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            require(ok, "function", "Variational", f"return a number, or one for each weight of '{name}'", got)
            found[name] = VariationalTerm(self, parameter.shape)
        return found


class VariationalTerm(Distribution):
    """A penalty on q where a prior is expected: it has no density at one w, and says so."""

    arg_constraints: ClassVar[dict[str, Any]] = {}  # pyright: ignore[reportIncompatibleMethodOverride]
    improper = True

    def __init__(self, penalty: Variational, shape: tuple[int, ...]) -> None:
        self.penalty = penalty
        super().__init__(torch.Size(), torch.Size(shape), validate_args=False)

    @property
    def support(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return constraints.independent(constraints.real, len(self.event_shape))

    def value(self, mu: Tensor, scale: Tensor) -> Tensor:
        """The penalty of locations and scales (*B, n): (*B,)."""
        shape = self.event_shape
        mu, scale = (t.reshape((*t.shape[:-1], *shape)) for t in (mu, scale))
        return map_members(lambda m, s: self.penalty(m, s).sum(), shape, mu, scale)

    def log_prob(self, value: Tensor) -> Tensor:
        raise InputError(
            "A penalty r(mu, scale) has no density at one w: only MeanField, with draws that follow q, trains with it. "
            "Where its certificate names a prior, use that prior."
        )


def with_unit_scale_penalties(prior: Prior) -> Prior:
    """The prior with e^{-r(w, 1)} for each penalty on q: no belief, but a number at each w that tells penalties apart.

    Files keep such numbers, to know a posterior's model again.
    """
    plain = copy.copy(prior)
    plain.others = [
        (block, _unit_scale_density(d) if isinstance(d, VariationalTerm) else d) for block, d in prior.others
    ]
    return plain


def _unit_scale_density(believed: VariationalTerm) -> UnnormalisedDensity:
    return UnnormalisedDensity(lambda w: believed.penalty(w, torch.ones_like(w)), 1.0, tuple(believed.event_shape))
