"""Common penalties, each with the prior that it corresponds to.

    penalty                 r(w)                        prior                          variance of a weight
    L2                      sum w^2                     N(0, 1 / (2 lambda))           1 / (2 lambda)
    L1                      sum |w|                     Laplace(0, 1 / lambda)         2 / lambda^2
    GroupLasso              sum over neurons ||w_in||   e^{-lambda ||w||}, n = fan-in  (n + 1) / lambda^2
    ReverseGroupLasso       sum over inputs ||w_out||   e^{-lambda ||w||}, n = fan-out (n + 1) / lambda^2
    Bridge(p)               sum |w|^p                   generalised Gaussian           lambda^{-2/p} G(3/p) / G(1/p)
    ElasticNet              a sum |w| + (1-a) sum w^2   e^{-lambda (a|w| + (1-a)w^2)}  no power of lambda

G is the Gamma function. Every normalising constant is known, so the evidence and its bounds are in nats.

References:
    Tibshirani (1996), Regression shrinkage and selection via the lasso.
    Frank and Friedman (1993), A statistical view of some chemometrics regression tools (bridge).
    Zou and Hastie (2005), Regularization and variable selection via the elastic net.
    Yuan and Lin (2006), Model selection and estimation in regression with grouped variables.
    Scardapane et al. (2017), Group sparse regularization for deep neural networks.
    Wolinski, Charpiat and Ollivier (2020), An equivalence between Bayesian priors and penalties in variational
    inference.
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
    """The sum of squares, r(w) = sum w^2: a Gaussian prior of precision 2 lambda.

    PyTorch's weight decay corresponds to 2 lambda / N.

    Args:
        factor: Strength lambda: a number (default 1.0), a dict from parameter names to numbers, or a variance
            ("glorot", "fan_in", "he", an `edge_of_chaos(...)`). See `Regulariser`.

    Example:
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
    """The lasso, r(w) = sum |w|: a Laplace prior, whose mode has exact zeros.

    Args:
        factor: Strength lambda: a number (default 1.0), a dict from parameter names to numbers, or a variance
            ("glorot", "fan_in", "he", an `edge_of_chaos(...)`). See `Regulariser`.

    Example:
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
    """The group lasso: the sum over neurons of the norm of their incoming weights.

    The mode sets all incoming weights of a neuron to zero together. A neuron is a row of a linear layer or an output
    channel of a convolution. If `factor` is a number, biases and other vectors are penalised as groups of one entry.

    Args:
        factor: Strength lambda: a number (default 1.0), a dict from parameter names to numbers, or a variance
            ("glorot", "fan_in", "he", an `edge_of_chaos(...)`). See `Regulariser`.

    Example:
        >>> from torch import nn
        >>> round(GroupLasso("fan_in").factors(nn.Linear(8, 10))["weight"] ** 2, 6)  # P (P + 1)
        72.0
    """

    kinked: ClassVar[bool] = True
    incoming: ClassVar[bool] = True

    def groups(self, parameter: ParameterInfo) -> WeightGroups:
        """Return the groups of one parameter.

        Args:
            parameter: Shape, fans and blocks of the parameter.
        """
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
    """The reverse group lasso: the sum over inputs of a layer of the norm of their outgoing weights.

    The mode sets all outgoing weights of an input to zero together. An input is a column of a linear layer or an input
    channel of a convolution.

    Args:
        factor: Strength lambda: a number (default 1.0), a dict from parameter names to numbers, or a variance
            ("glorot", "fan_in", "he", an `edge_of_chaos(...)`). See `Regulariser`.

    Example:
        >>> from torch import nn
        >>> ReverseGroupLasso("fan_in").factors(nn.Linear(8, 17))["weight"]  # sqrt(P (n_out + 1))
        12.0
    """

    incoming: ClassVar[bool] = False


@dataclass(frozen=True, init=False)
class Bridge(Homogeneous):
    """The bridge penalty, r(w) = sum |w|^p: a generalised Gaussian prior.

    It is the lasso at p = 1 and ridge at p = 2. For p < 1 the slope at zero is infinite and every point with a zero is
    a local mode, so a fit finds one of many.

    Args:
        p: Exponent, above 0 and at most 20.
        factor: Strength lambda: a number (default 1.0), a dict from parameter names to numbers, or a variance
            ("glorot", "fan_in", "he", an `edge_of_chaos(...)`). See `Regulariser`.

    Example:
        >>> Bridge(p=0.0)
        Traceback (most recent call last):
        ...
        priory.InputError: The 'p' argument of Bridge must be a number above 0 and at most 20, got 0.0.
    """

    p: float = 1.5

    def __init__(self, p: float, factor: Factor = 1.0) -> None:
        object.__setattr__(self, "p", p)
        object.__setattr__(self, "factor", factor)
        ok = is_positive(p) and p <= 20
        require(ok, "p", "Bridge", "be a number above 0 and at most 20", p)
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
    """The elastic net, r(w) = l1_ratio sum |w| + (1 - l1_ratio) sum w^2, whose mode has exact zeros.

    There is no factor 1/2 in front of the squares.

    Args:
        factor: Strength lambda: a number (default 1.0), a dict from parameter names to numbers, or a variance
            ("glorot", "fan_in", "he", an `edge_of_chaos(...)`). See `Regulariser`.
        l1_ratio: Share of the L1 term, strictly between 0 and 1. Default: 0.5.

    Example:
        >>> ElasticNet(2.0, l1_ratio=0.9)
        ElasticNet(factor=2.0, l1_ratio=0.9)
    """

    l1_ratio: float = 0.5

    kinked: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        ok = is_positive(self.l1_ratio) and self.l1_ratio < 1
        require(ok, "l1_ratio", "ElasticNet", "lie strictly between 0 and 1 (use L1 or L2 at the ends)", self.l1_ratio)

    def prior(self, factor: float, parameter: ParameterInfo, dtype: torch.dtype) -> Distribution:
        l1, l2 = (torch.tensor(factor * share, dtype=dtype) for share in (self.l1_ratio, 1 - self.l1_ratio))
        return ElasticNetDensity(l1, l2)

    def variance(self, factor: float, parameter: ParameterInfo) -> float:
        return float(self.prior(factor, parameter, torch.float64).variance)

    def factor_for(self, variance: float, parameter: ParameterInfo) -> float:
        low, high = -80.0, 80.0  # bisect log lambda: the variance decreases with it
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if self.variance(math.exp(middle), parameter) > variance else (low, middle)
        return math.exp((low + high) / 2)


@dataclass(frozen=True, init=False, repr=False)
class Penalty(Regulariser):
    """A user-defined penalty: any function r of a parameter's tensor.

    The normalising constant is unknown. Modes, draws and gradients of bounds are exact; the evidence is known up to a
    constant. The variance of a weight is unknown too, so a variance is not accepted as `factor`.

    Args:
        function: Function of a parameter's tensor that returns a scalar, or one value per weight, which are summed.
        factor: Strength lambda: a number (default 1.0), which penalises every parameter, or a dict from the names of
            the penalised parameters to numbers.

    Example:
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
                f"The 'function' argument of Penalty must accept the tensor of '{parameter.name}', but it raised "
                f"{reason}"
            ) from error
        ok = isinstance(found, torch.Tensor) and tuple(found.shape) in ((), parameter.shape)
        got = f"the shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
        require(ok, "function", "Penalty", f"return a scalar or one value per weight of '{parameter.name}'", got)
        return UnnormalisedDensity(self.function, factor, parameter.shape)


def laplace_prior(factor: float, dtype: torch.dtype) -> Laplace:
    """Return the Laplace density factor / 2 e^{-factor |w|}."""
    scale = torch.tensor(1 / factor, dtype=dtype)
    return Laplace(torch.zeros_like(scale), scale)


PENALTIES_BY_NAME: dict[str, type[Regulariser]] = {
    "l2": L2,
    "l1": L1,
    "group_lasso": GroupLasso,
    "reverse_group_lasso": ReverseGroupLasso,
    "elastic_net": ElasticNet,
}
