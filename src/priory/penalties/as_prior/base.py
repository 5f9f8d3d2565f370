"""Base classes of penalties that act as priors.

A penalty is the negative logarithm of a prior, up to a constant. In nats for the whole data set,

    loss = -log p(D|w) + sum_l lambda_l r(w_l)     <=>     p(w_l) = e^{-lambda_l r(w_l)} / Z_l

Dividing by N gives the mean loss with the penalty (1/N) sum_l lambda_l r(w_l). The global factor of a penalty that is
a prior is therefore 1/N, and adding lam r(w) to a mean loss corresponds to lambda = lam N.

The layers' factors lambda_l follow from a variance v for their weights. If r is homogeneous of degree p, the variance
at lambda is lambda^{-2/p} times the variance at 1, hence lambda = (Var_1 / v)^{p/2}.
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
    """Return whether a value is a positive, finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def is_function(value: object) -> bool:
    """Return whether a value is callable and not a class."""
    return callable(value) and not isinstance(value, type)


def variance_rule(variance: Any, name: str, owner: str) -> Any:
    """Return the function from (fan_in, fan_out) to a weight's variance, given its name or itself."""
    rule = RULES.get(variance) if isinstance(variance, str) else variance
    require(is_function(rule), name, owner, f"be one of {', '.join(RULES)}, or an edge_of_chaos(...)", repr(variance))
    return rule


@dataclass(frozen=True)
class Regulariser:
    """Base class of penalties that act as priors.

    Args:
        factor: Strength lambda of the penalty, in nats for the whole data set. Default: 1.0. One of

            - a number, which penalises every parameter;
            - a dict from parameter names to numbers, such as the result of `layer_factors`;
            - a variance ("glorot", "fan_in", "he" or an `edge_of_chaos(...)`). Each weight then gets the factor at
              which its prior has this variance.

            With a dict or a variance, the remaining parameters keep the Gaussian prior of the scale rules: N(0, 1) for
            biases (sigma_b^2 at an edge of chaos) and embeddings, N(1, 1) for the scale of a normalisation layer.
    """

    factor: Factor = 1.0

    kinked: ClassVar[bool] = False  # whether the kink of r at zero leads to exact zeros

    def __post_init__(self) -> None:
        owner = type(self).__name__
        if isinstance(self.factor, Mapping):
            wrong = [name for name, value in self.factor.items() if not is_positive(value)]
            require(bool(self.factor), "factor", owner, "name at least one parameter", dict(self.factor))
            require(not wrong, "factor", owner, "be positive for every parameter", f"other values for {wrong}")
        elif isinstance(self.factor, (int, float)):
            require(is_positive(self.factor), "factor", owner, "be a positive number", self.factor)
        else:
            variance_rule(self.factor, "factor", owner)

    def factors(self, net: nn.Module) -> dict[str, float]:
        """Return lambda for each penalised parameter, by name.

        Args:
            net: Network whose parameters are penalised.
        """
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

    def priors_of(self, net: nn.Module, dtype: torch.dtype) -> dict[str, Distribution]:
        """Return the prior of each trainable parameter, by name.

        Args:
            net: Network whose parameters are penalised.
            dtype: Data type of the priors' tensors.
        """
        factors, named = self.factors(net), isinstance(self.factor, (Mapping, int, float))
        rest = by_rule("fan_in" if named else self.factor, net, dtype)  # pyright: ignore[reportArgumentType] - a rule
        return {
            name: self.prior(factors[name], parameter, dtype) if name in factors else rest[name]
            for name, parameter in describe_parameters(net).items()
        }

    # Implemented by subclasses.

    def prior(self, factor: float, parameter: ParameterInfo, dtype: torch.dtype) -> Distribution:
        """Return the prior e^{-factor r} / Z of one parameter.

        Args:
            factor: Strength lambda.
            parameter: Shape, fans and groups of the parameter.
            dtype: Data type of the prior's tensors.
        """
        raise NotImplementedError

    def variance(self, factor: float, parameter: ParameterInfo) -> float:
        """Return the variance of a weight under the prior with this factor.

        Args:
            factor: Strength lambda.
            parameter: Shape, fans and groups of the parameter.
        """
        raise InputError(
            f"The variance of a weight under {type(self).__name__} is not known; use a number or a dict as its factor."
        )

    def factor_for(self, variance: float, parameter: ParameterInfo) -> float:
        """Return the factor at which a weight has this variance under the prior.

        Args:
            variance: Variance of one weight.
            parameter: Shape, fans and groups of the parameter.
        """
        raise InputError(
            f"The variance of a weight under {type(self).__name__} is not known; use a number or a dict as its factor."
        )


@dataclass(frozen=True)
class Homogeneous(Regulariser):
    """A homogeneous penalty: r(c w) = c^p r(w) for c > 0."""

    @property
    def degree(self) -> float:
        """Degree p of homogeneity."""
        raise NotImplementedError

    def unit_variance(self, parameter: ParameterInfo) -> float:
        """Return the variance of a weight at factor 1."""
        raise NotImplementedError

    def variance(self, factor: float, parameter: ParameterInfo) -> float:
        return factor ** (-2 / self.degree) * self.unit_variance(parameter)

    def factor_for(self, variance: float, parameter: ParameterInfo) -> float:
        return (self.unit_variance(parameter) / variance) ** (self.degree / 2)
