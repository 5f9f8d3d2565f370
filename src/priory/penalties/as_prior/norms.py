"""The penalties that people use, each with the prior that it is.

    penalty                 r(w)                        prior                          variance of a weight
    L2                      sum w^2                     N(0, 1 / (2 lambda))           1 / (2 lambda)
    L1                      sum |w|                     Laplace(0, 1 / lambda)         2 / lambda^2
    GroupLasso              sum over neurons ||w_in||   e^{-lambda ||w||}, n = fan-in  (n + 1) / lambda^2
    ReverseGroupLasso       sum over inputs ||w_out||   the same, n = fan-out          (n + 1) / lambda^2
    Bridge(p)               sum |w|^p                   generalised Gaussian           lambda^{-2/p} G(3/p) / G(1/p)
    ElasticNet              a sum |w| + (1-a) sum w^2   e^{-lambda (a|w| + (1-a)w^2)}  no power of lambda

Tibshirani 1996 (the lasso), Frank and Friedman 1993 (bridge), Zou and Hastie 2005 (elastic net), Yuan and Lin 2006
(groups), Scardapane et al. 2017 and Wolinski et al. 2020 (groups of a network: neurons by their incoming or outgoing
weights). G is the Gamma function. Every constant is known, so that evidence and bounds are in nats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.distributions import Laplace, Normal

from priory.core.errors import InputError, require
from priory.distributions import GeneralisedGaussian
from priory.penalties.as_prior.base import Homogeneous, Regulariser, is_function, is_positive
from priory.penalties.as_prior.densities import ElasticNetDensity, GroupNormDensity, UnnormalisedDensity

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.distributions import Distribution

    from priory.penalties.as_prior.base import Factor
    from priory.penalties.as_prior.parameters import ParameterInfo, WeightGroups


@dataclass(frozen=True)
class L2(Homogeneous):
    """sum w^2, a Gaussian prior of precision 2 lambda. PyTorch's weight decay is 2 lambda / N.

    >>> from torch import nn
    >>> L2("fan_in").factors(nn.Linear(100, 10))  # P / 2
    {'weight': 50.0}
    """

    @property
    def degree(self) -> float:
        return 2.0

    def unit_variance(self, parameter: ParameterInfo) -> float:
        return 0.5

    def prior(self, factor: float, parameter: ParameterInfo, dtype: torch.dtype) -> Distribution:
        scale = torch.tensor((2 * factor) ** -0.5, dtype=dtype)
        return Normal(torch.zeros_like(scale), scale)


@dataclass(frozen=True)
class L1(Homogeneous):
    """sum |w|, a Laplace prior; its mode has exact zeros.

    >>> from torch import nn
    >>> L1("fan_in").factors(nn.Linear(50, 10))  # sqrt(2 P)
    {'weight': 10.0}
    """

    kinked: ClassVar[bool] = True

    @property
    def degree(self) -> float:
        return 1.0

    def unit_variance(self, parameter: ParameterInfo) -> float:
        return 2.0

    def prior(self, factor: float, parameter: ParameterInfo, dtype: torch.dtype) -> Distribution:
        return laplace_prior(factor, dtype)


@dataclass(frozen=True)
class GroupLasso(Homogeneous):
    """sum over neurons of the length of their incoming weights; its mode has whole neurons at zero.

    A neuron is a row of a linear layer, an output channel of a convolution. Biases and other vectors, where a number
    penalises them too, are groups of one.
    """

    kinked: ClassVar[bool] = True
    incoming: ClassVar[bool] = True

    def groups(self, parameter: ParameterInfo) -> WeightGroups:
        """The groups of one parameter."""
        return parameter.groups(self.incoming)

    @property
    def degree(self) -> float:
        return 1.0

    def unit_variance(self, parameter: ParameterInfo) -> float:
        return self.groups(parameter).size + 1.0

    def prior(self, factor: float, parameter: ParameterInfo, dtype: torch.dtype) -> Distribution:
        groups = self.groups(parameter)
        return laplace_prior(factor, dtype) if groups.size == 1 else GroupNormDensity(factor, groups)


@dataclass(frozen=True)
class ReverseGroupLasso(GroupLasso):
    """sum over inputs of a layer of the length of their outgoing weights; its mode leaves out whole inputs.

    An input is a column of a linear layer, an input channel of a convolution.
    """

    incoming: ClassVar[bool] = False


@dataclass(frozen=True, init=False)
class Bridge(Homogeneous):
    """sum |w|^p, a generalised Gaussian prior: the lasso at p = 1, ridge at p = 2.

    Below 1 the slope at zero is infinite and every zero is a mode: a fit finds one of many.

    >>> Bridge(p=0.0)
    Traceback (most recent call last):
    ...
    priory.InputError: The 'p' argument of Bridge must be a number above 0, up to 20, got 0.0.
    """

    p: float = 1.5

    def __init__(self, p: float, factor: Factor = 1.0) -> None:
        object.__setattr__(self, "p", p)
        object.__setattr__(self, "factor", factor)
        ok = is_positive(p) and p <= 20
        require(ok, "p", "Bridge", "be a number above 0, up to 20", p)
        self.__post_init__()

    @property
    def degree(self) -> float:
        return float(self.p)

    def unit_variance(self, parameter: ParameterInfo) -> float:
        return math.exp(math.lgamma(3 / self.p) - math.lgamma(1 / self.p))

    def prior(self, factor: float, parameter: ParameterInfo, dtype: torch.dtype) -> Distribution:
        if self.p == 1:
            return laplace_prior(factor, dtype)
        if self.p == 2:
            return L2().prior(factor, parameter, dtype)
        power = torch.tensor(float(self.p), dtype=dtype)
        return GeneralisedGaussian(factor ** (-1 / power), power)


@dataclass(frozen=True)
class ElasticNet(Regulariser):
    """l1_ratio sum |w| + (1 - l1_ratio) sum w^2, with no half in front of the square; its mode has exact zeros."""

    l1_ratio: float = 0.5

    kinked: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        ok = is_positive(self.l1_ratio) and self.l1_ratio < 1
        require(ok, "l1_ratio", "ElasticNet", "lie between 0 and 1: use L1 or L2 at the ends", self.l1_ratio)

    def prior(self, factor: float, parameter: ParameterInfo, dtype: torch.dtype) -> Distribution:
        l1, l2 = (torch.tensor(factor * share, dtype=dtype) for share in (self.l1_ratio, 1 - self.l1_ratio))
        return ElasticNetDensity(l1, l2)

    def variance(self, factor: float, parameter: ParameterInfo) -> float:
        return float(self.prior(factor, parameter, torch.float64).variance)

    def factor_for(self, variance: float, parameter: ParameterInfo) -> float:
        low, high = -80.0, 80.0  # of log lambda; the variance falls with it
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if self.variance(math.exp(middle), parameter) > variance else (low, middle)
        return math.exp((low + high) / 2)


@dataclass(frozen=True, init=False, repr=False)
class Penalty(Regulariser):
    """Any function r of a parameter's tensor, which returns a number or a value for each weight, to be summed.

    Its constant is unknown: modes, draws and bounds are right, evidence is up to a constant. With `factor` as a number
    every parameter is penalised; a dict names the ones that are. A variance as factor is refused, since the variance
    behind a function is not known.

    >>> Penalty(lambda w: w.square().log1p(), factor=0.5)
    Penalty(<lambda>, factor=0.5)
    """

    function: Any = None

    def __init__(self, function: Callable[[Tensor], Tensor], factor: Factor = 1.0) -> None:
        object.__setattr__(self, "function", function)
        object.__setattr__(self, "factor", factor)
        require(is_function(function), "function", "Penalty", "be a function of a parameter's tensor", repr(function))
        self.__post_init__()

    def __repr__(self) -> str:
        return f"Penalty({getattr(self.function, '__name__', repr(self.function))}, factor={self.factor!r})"

    def prior(self, factor: float, parameter: ParameterInfo, dtype: torch.dtype) -> Distribution:
        trial = torch.full(parameter.shape, 0.5, dtype=dtype)
        try:
            found = self.function(trial)
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).strip()}".split("\n")[0]
            raise InputError(
                f"The 'function' argument of Penalty must take '{parameter.name}'. It raised {reason}"
            ) from error
        ok = isinstance(found, torch.Tensor) and tuple(found.shape) in ((), parameter.shape)
        got = f"the shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
        require(ok, "function", "Penalty", f"return a number, or one for each weight of '{parameter.name}'", got)
        return UnnormalisedDensity(self.function, factor, parameter.shape)


def laplace_prior(factor: float, dtype: torch.dtype) -> Laplace:
    """e^{-factor |w|} factor / 2."""
    scale = torch.tensor(1 / factor, dtype=dtype)
    return Laplace(torch.zeros_like(scale), scale)


PENALTIES_BY_NAME: dict[str, type[Regulariser]] = {
    "l2": L2,
    "l1": L1,
    "group_lasso": GroupLasso,
    "reverse_group_lasso": ReverseGroupLasso,
    "elastic_net": ElasticNet,
}
