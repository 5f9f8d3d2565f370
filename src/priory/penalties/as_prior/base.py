"""A penalty as a prior: minus the logarithm of what a network's weights are believed to be.

    loss = -log p(D|w) + sum_l lambda_l r(w_l)   in nats for the whole data   <=>   p(w_l) = e^{-lambda_l r(w_l)} / Z_l

Divided by N it is the mean loss with the penalty (1/N) sum_l lambda_l r(w_l): the global factor of a penalty that is a
prior is 1/N, and a person who adds lam r(w) to a mean loss has lambda = lam N. The layers' factors lambda_l follow from
a variance v for their weights: if r is homogeneous of degree p, the variance at lambda is lambda^{-2/p} times the one
at 1, so that lambda = (Var_1 / v)^{p/2}.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from priory.core.errors import InputError, require
from priory.penalties.as_prior.parameters import describe_parameters
from priory.priors.rules import RULES, by_rule

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributions import Distribution

    from priory.penalties.as_prior.parameters import ParameterInfo

Factor = float | str | Mapping[str, float] | Callable[[int, int], float]


def is_positive(value: object) -> bool:
    """Whether a value is a positive, finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def is_function(value: object) -> bool:
    """Whether a value can be called, and is not a class."""
    return callable(value) and not isinstance(value, type)


def variance_rule(variance: Any, name: str, owner: str) -> Any:
    """The variance of a weight from its fans: "glorot", "fan_in", "he", or a function such as an edge of chaos."""
    rule = RULES.get(variance) if isinstance(variance, str) else variance
    require(is_function(rule), name, owner, f"be one of {', '.join(RULES)}, or an edge_of_chaos(...)", repr(variance))
    return rule


@dataclass(frozen=True)
class Regulariser:
    """What every penalty has: a factor, and the prior of each parameter that it is.

    `factor` is a number, which penalises every parameter with it; a dict from names to factors, as `layer_factors`
    gives it; or a variance ("glorot", "fan_in", "he", an `edge_of_chaos`) that the prior of each weight is to have.
    With the last two, what is not named, or is no weight of a layer, keeps the Gaussian of the scale rules: N(0, 1) for
    biases (sigma_b^2 at an edge of chaos) and embeddings, N(1, 1) for the scale of a normalisation.
    """

    factor: Factor = 1.0

    kinked: ClassVar[bool] = False  # whether it has a corner at zero that makes exact zeros

    def __post_init__(self) -> None:
        owner = type(self).__name__
        if isinstance(self.factor, Mapping):
            wrong = [name for name, value in self.factor.items() if not is_positive(value)]
            require(bool(self.factor), "factor", owner, "name at least one parameter", dict(self.factor))
            require(not wrong, "factor", owner, "have positive numbers", f"{wrong} with others")
        elif isinstance(self.factor, (int, float)):
            require(is_positive(self.factor), "factor", owner, "be a positive number", self.factor)
        else:
            variance_rule(self.factor, "factor", owner)

    def factors(self, net: nn.Module) -> dict[str, float]:
        """lambda of each parameter that is penalised, by its name."""
        found = describe_parameters(net)
        if isinstance(self.factor, Mapping):
            unknown = [name for name in self.factor if name not in found]
            known = f"be among the parameters {', '.join(found)}"
            require(not unknown, "factor", type(self).__name__, known, unknown)
            return {name: float(self.factor[name]) for name in found if name in self.factor}
        if isinstance(self.factor, (int, float)):
            return dict.fromkeys(found, float(self.factor))
        rule = variance_rule(self.factor, "factor", type(self).__name__)
        return {
            name: self.factor_for(rule(parameter.fan_in, parameter.fan_out), parameter)
            for name, parameter in found.items()
            if parameter.is_weight
        }

    def beliefs(self, net: nn.Module, dtype: torch.dtype) -> dict[str, Distribution]:
        """The prior of each trainable parameter."""
        factors, named = self.factors(net), isinstance(self.factor, (Mapping, int, float))
        rest = by_rule("fan_in" if named else self.factor, net, dtype)  # pyright: ignore[reportArgumentType] - a rule
        return {
            name: self.prior(factors[name], parameter, dtype) if name in factors else rest[name]
            for name, parameter in describe_parameters(net).items()
        }

    # What a penalty says of itself.

    def prior(self, factor: float, parameter: ParameterInfo, dtype: torch.dtype) -> Distribution:
        """e^{-factor r} / Z over one parameter."""
        raise NotImplementedError

    def variance(self, factor: float, parameter: ParameterInfo) -> float:
        """The variance of a weight under that prior."""
        raise InputError(f"The variance of a {type(self).__name__} must be known for this, and it is not.")

    def factor_for(self, variance: float, parameter: ParameterInfo) -> float:
        """The factor at which a weight has this variance."""
        raise InputError(f"The variance of a {type(self).__name__} must be known for this, and it is not.")


@dataclass(frozen=True)
class Homogeneous(Regulariser):
    """A penalty with r(c w) = c^p r(w) for c > 0."""

    @property
    def degree(self) -> float:
        """p."""
        raise NotImplementedError

    def unit_variance(self, parameter: ParameterInfo) -> float:
        """The variance of a weight at factor one."""
        raise NotImplementedError

    def variance(self, factor: float, parameter: ParameterInfo) -> float:
        return factor ** (-2 / self.degree) * self.unit_variance(parameter)

    def factor_for(self, variance: float, parameter: ParameterInfo) -> float:
        return (self.unit_variance(parameter) / variance) ** (self.degree / 2)
