"""Penalties on the variational distribution itself: r(mu, scale) replaces KL(q || p).

    loss = E_q[-log p(D|w)] + r(mu, scale)

The objective is Bayesian if r = KL(q || p) + K for some prior p, which `prior_from_penalty` finds or rules out. The
penalty has no value at a single w, so only mean-field variational inference can train with it; every other method
rejects it.
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
    """A penalty factor * r(mu, scale) on the means and scales of a mean-field posterior.

    It is accepted as the `prior` of a `Model`, for all parameters or for the ones matched by a pattern, and replaces
    KL(q || p) in the loss of `MeanField`. The posterior's `certificate` then states whether the objective is Bayesian.

    Args:
        function: Function of two tensors of the parameter's shape, the means and the scales. It returns a scalar, or
            one value per weight, which are summed. The scale is the standard deviation of a Gaussian, and the scale
            parameter of the other families of `MeanField`.
        factor: Positive number that multiplies the penalty. Default: 1.0.

    Example:
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
        """Return factor * r(mu, scale), a scalar or one value per weight.

        Args:
            mu: Means of a parameter's weights.
            scale: Scales of a parameter's weights.
        """
        return self.factor * self.function(mu, scale)

    def equivalence(self, family: str = "gaussian") -> Equivalence:
        """Return the prior of a weight for which the penalty is a KL, with its certificate.

        Args:
            family: Family of q, as in `prior_from_penalty`. Default: "gaussian".

        Raises:
            InputError: If the function returns a sum instead of one value per weight.
        """
        pair = torch.tensor([0.5, 1.0], dtype=torch.float64)
        value = self.function(pair, pair)
        single = isinstance(value, Tensor) and value.shape == pair.shape
        require(single, "function", "Variational", "return one value per weight to be certified", "their sum")
        return prior_from_penalty(self, family)

    def priors_of(self, net: nn.Module, dtype: torch.dtype) -> dict[str, VariationalTerm]:
        """Return the penalty of each trainable parameter, by name.

        Args:
            net: Network whose parameters are penalised.
            dtype: Data type of the parameters.
        """
        found = {}
        for name, parameter in describe_parameters(net).items():
            trial = torch.full(parameter.shape, 0.5, dtype=dtype)
            try:
                value = self.function(trial, trial)
            except Exception as error:
                reason = f"{type(error).__name__}: {str(error).strip()}".split("\n")[0]
                raise InputError(
                    f"The 'function' argument of Variational must accept the means and scales of '{name}', but it "
                    f"raised {reason}"
                ) from error
            ok = isinstance(value, Tensor) and tuple(value.shape) in ((), parameter.shape)
            got = f"the shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            require(ok, "function", "Variational", f"return a scalar or one value per weight of '{name}'", got)
            found[name] = VariationalTerm(self, parameter.shape)
        return found


class VariationalTerm(Distribution):
    """The penalty on q of one parameter, in the place of its prior; it has no density at a single w."""

    arg_constraints: ClassVar[dict[str, Any]] = {}  # pyright: ignore[reportIncompatibleMethodOverride]
    improper = True

    def __init__(self, penalty: Variational, shape: tuple[int, ...]) -> None:
        self.penalty = penalty
        super().__init__(torch.Size(), torch.Size(shape), validate_args=False)

    @property
    def support(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return constraints.independent(constraints.real, len(self.event_shape))

    def value(self, mu: Tensor, scale: Tensor) -> Tensor:
        """Return the penalty of locations and scales (*B, n), as (*B,)."""
        shape = self.event_shape
        mu, scale = (t.reshape((*t.shape[:-1], *shape)) for t in (mu, scale))
        return map_members(lambda m, s: self.penalty(m, s).sum(), shape, mu, scale)

    def log_prob(self, value: Tensor) -> Tensor:
        raise InputError(
            "A penalty r(mu, scale) on q has no density at a single w: only MeanField with reparameterised draws can "
            "train with it. If its certificate is valid, use the prior that it corresponds to."
        )


def with_unit_scale_penalties(prior: Prior) -> Prior:
    """Return the prior with each penalty on q replaced by the density e^{-r(w, 1)}.

    The result is not a meaningful prior. It has a value at each w that differs between penalties, by which stored files
    recognise the model of a posterior.
    """
    plain = copy.copy(prior)
    plain.others = [
        (block, _unit_scale_density(d) if isinstance(d, VariationalTerm) else d) for block, d in prior.others
    ]
    return plain


def _unit_scale_density(term: VariationalTerm) -> UnnormalisedDensity:
    """Return the density e^{-r(w, 1)} for a penalty on q."""
    return UnnormalisedDensity(lambda w: term.penalty(w, torch.ones_like(w)), 1.0, tuple(term.event_shape))
