"""Strength of a penalty per layer: the factors at which it matches an initialisation, and what a given factor means.

A penalty lambda_l r(w_l) is the prior e^{-lambda_l r(w_l)} / Z. It agrees with the initialisation of the weights if it
has the same variance (Wolinski, Charpiat and Ollivier 2020, "An Equivalence between Bayesian Priors and Penalties in
Variational Inference"). With P = fan-in and the variance 1 / P:

    L2  P / 2        L1  sqrt(2 P)        GroupLasso  sqrt(P (P + 1))        ReverseGroupLasso  sqrt(P (n_out k^2 + 1))

These factors are in nats for the whole data set. In a mean loss over N rows they are divided by N, the global factor.
PyTorch's `weight_decay`, which multiplies w itself, is 2 lambda_l / N.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from priory.core.errors import InputError, is_integer, require
from priory.core.tables import text_table
from priory.penalties.as_prior.base import Regulariser, is_positive, variance_rule
from priory.penalties.as_prior.norms import L2, PENALTIES_BY_NAME
from priory.penalties.as_prior.parameters import describe_parameters

if TYPE_CHECKING:
    from collections.abc import Callable


def layer_factors(
    net: nn.Module, penalty: Any, variance: str | Callable[[int, int], float] = "glorot"
) -> dict[str, float]:
    """Return the factor lambda of each layer's weight at which the prior has the variance of the initialisation.

    Biases, embeddings and normalisation layers have no fan-in and are left out. The result can be used as the factor of
    a penalty: `L1(layer_factors(net, "l1"))` is a prior.

    Args:
        net: Network whose weights are penalised.
        penalty: A penalty such as `L1()`, its class, or its name: "l2", "l1", "group_lasso", "reverse_group_lasso" or
            "elastic_net".
        variance: Variance of a weight at initialisation: "glorot" (2 / (in + out), the default), "fan_in" (1 / P), "he"
            (2 / P), an `edge_of_chaos(...)`, or a function of fan-in and fan-out.

    Returns:
        A dict from the names of the weights to their factors.

    Raises:
        InputError: If the variance of a weight under the penalty is not known.

    Example:
        >>> layer_factors(nn.Conv2d(64, 128, 3), "l2", "fan_in")
        {'weight': 288.0}

    References:
        Wolinski, Charpiat and Ollivier (2020), An equivalence between Bayesian priors and penalties in variational
        inference.
    """
    require_network(net, "layer_factors")
    rule = variance_rule(variance, "variance", "layer_factors")
    kind = read_penalty(penalty, "layer_factors")
    found = describe_parameters(net)
    return {
        name: kind.factor_for(rule(parameter.fan_in, parameter.fan_out), parameter)
        for name, parameter in found.items()
        if parameter.is_weight
    }


def read_penalty(penalty: Any, owner: str) -> Regulariser:
    """Return a penalty given itself, its class, or its name."""
    if isinstance(penalty, str):
        known = penalty in PENALTIES_BY_NAME
        require(known, "penalty", owner, f"be a penalty or one of {', '.join(PENALTIES_BY_NAME)}", repr(penalty))
        return PENALTIES_BY_NAME[penalty]()
    if isinstance(penalty, type) and penalty in PENALTIES_BY_NAME.values():
        return penalty()
    if isinstance(penalty, Regulariser):
        return penalty
    known = f"be a penalty or one of {', '.join(PENALTIES_BY_NAME)}"
    raise InputError(f"The 'penalty' argument of {owner} must {known}, got {penalty!r}.")


def require_network(net: Any, owner: str) -> None:
    """Raise an InputError unless `net` is a torch.nn.Module."""
    require(isinstance(net, nn.Module), "net", owner, "be a torch.nn.Module", type(net).__name__)


@dataclass(frozen=True)
class LayerRow:
    """One layer of an `Explanation`.

    Attributes:
        name: Name of the weight.
        shape: Shape of the weight.
        factor: Strength lambda of its penalty.
        prior_sd: Standard deviation of a weight under the prior that the penalty corresponds to.
        initial_sd: Standard deviation of a weight at initialisation.
    """

    name: str
    shape: tuple[int, ...]
    factor: float
    prior_sd: float
    initial_sd: float

    @property
    def ratio(self) -> float:
        """Width of the prior divided by the width of the initialisation."""
        return self.prior_sd / self.initial_sd


@dataclass(frozen=True)
class Explanation:
    """The prior that a penalty implies for each layer, compared with the initialisation; see `explain`.

    `print` shows it as a table.

    Attributes:
        penalty: The penalty, as text.
        initialisation: The rule for the variance of the initialisation, as text.
        rows: One `LayerRow` per penalised weight.
        num_data: Number of rows N of the data set, if known.
        decay: Whether the penalty is a sum of squares, which optimisers call weight decay.
        own: The user's description of the penalty, with which `sentence` starts.
    """

    penalty: str
    initialisation: str
    rows: tuple[LayerRow, ...]
    num_data: int | None
    decay: bool
    own: str

    @property
    def table(self) -> list[dict[str, Any]]:
        """The rows as dicts, including the factors of a mean loss if `num_data` is known."""
        found = []
        for row in self.rows:
            entry: dict[str, Any] = {"layer": row.name, "shape": row.shape, "factor": row.factor}
            entry |= {"prior_sd": row.prior_sd, "initial_sd": row.initial_sd, "ratio": row.ratio}
            if self.num_data is not None:
                entry["mean_loss_factor"] = row.factor / self.num_data
                if self.decay:
                    entry["weight_decay"] = 2 * row.factor / self.num_data
            found.append(entry)
        return found

    @property
    def sentence(self) -> str:
        """The meaning of the factor, in one sentence."""
        ratios = sorted(row.ratio for row in self.rows)
        low, high = ratios[0], ratios[-1]
        if abs(math.log(low)) < 0.005 and abs(math.log(high)) < 0.005:
            return f"{self.own} is a prior as wide as the initialisation ({self.initialisation}) in every layer."
        if high / low < 1.05:
            return f"{self.own} is a prior {_times(math.sqrt(low * high))} than the initialisation."
        between = f"{_times(low)} ({self._layer(low)}) to {_times(high)} ({self._layer(high)})"
        return f"{self.own} is a prior {between} than the initialisation."

    def _layer(self, ratio: float) -> str:
        """Return the name of the layer with this ratio."""
        return next(row.name for row in self.rows if row.ratio == ratio)

    def __str__(self) -> str:
        heads = ["layer", "shape", "lambda", "prior sd", "initial sd", "ratio"]
        heads += [] if self.num_data is None else ["lambda / N", *(["weight decay"] if self.decay else [])]
        lines = [heads]
        for entry in self.table:
            name, shape, *numbers = entry.values()
            lines.append([name, "x".join(str(s) for s in shape), *(f"{number:.4g}" for number in numbers)])
        title = f"{self.penalty}, initialisation {self.initialisation}"
        return "\n".join([title, *text_table(lines, "llr"), self.sentence])


def explain(
    net: nn.Module,
    penalty: Any,
    num_data: int | None = None,
    variance: str | Callable[[int, int], float] = "glorot",
) -> Explanation:
    """Explain a penalty: compare the prior that it implies for each layer with the initialisation.

    The factor of a penalty is in nats for the whole data set. If your code adds lam r(w) to a mean loss over N rows,
    explain `L1(lam * N)`.

    Args:
        net: Network whose weights are penalised.
        penalty: A penalty such as `L1(3.0)`, its class, its name, or a number, which is read as a weight decay in
            PyTorch's convention and needs `num_data`.
        num_data: Number of rows N of the data set. If given, the table includes the factors of a mean loss and, for
            `L2`, the weight decay of each layer. Default: None.
        variance: Variance of a weight at initialisation: "glorot" (the default), "fan_in", "he", an
            `edge_of_chaos(...)`, or a function of fan-in and fan-out.

    Returns:
        An `Explanation`, with a `sentence`, a `table` and one row per layer.

    Example:
        >>> print(explain(nn.Conv2d(64, 64, 3), 2e-4, num_data=50_000).sentence)
        Your weight decay of 0.0002 over 50,000 rows is a prior 7.6 times wider than the initialisation.
    """
    require_network(net, "explain")
    rule = variance_rule(variance, "variance", "explain")
    ok = num_data is None or is_integer(num_data, 1)
    require(ok, "num_data", "explain", "be an integer >= 1", repr(num_data))
    if isinstance(penalty, (int, float)) and not isinstance(penalty, bool):
        require(is_positive(penalty), "penalty", "explain", "be a positive weight decay", penalty)
        require(
            num_data is not None,
            "num_data",
            "explain",
            "be given for a weight decay, which refers to a mean loss",
            None,
        )
        assert num_data is not None
        kind: Regulariser = L2(0.5 * penalty * num_data)
        own = f"Your weight decay of {penalty:g} over {num_data:,} rows"
    else:
        kind = read_penalty(penalty, "explain")
        own = f"Your {kind!r}"
    found, factors = describe_parameters(net), kind.factors(net)
    rows = tuple(
        LayerRow(
            name,
            found[name].shape,
            factor,
            math.sqrt(kind.variance(factor, found[name])),
            math.sqrt(rule(found[name].fan_in, found[name].fan_out)),
        )
        for name, factor in factors.items()
        if found[name].is_weight
    )
    require(bool(rows), "net", "explain", "have a penalised layer with weights", type(net).__name__)
    initialisation = variance if isinstance(variance, str) else repr(variance)
    return Explanation(repr(kind), initialisation, rows, num_data, isinstance(kind, L2), own)


def _times(ratio: float) -> str:
    """Return a ratio of widths in words, such as '7.6 times wider'."""
    by = max(ratio, 1 / ratio)
    return f"{by:.{1 if by < 10 else 0}f} times {'wider' if ratio >= 1 else 'narrower'}"
