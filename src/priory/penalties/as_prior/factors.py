"""What the factor of a penalty should be, layer by layer, and what the one that a person has means.

A penalty lambda_l r(w_l) is the prior e^{-lambda_l r(w_l)} / Z; it believes of the weights what their initialisation
says when its variance is the initialisation's (Wolinski, Charpiat and Ollivier 2020, "An Equivalence between Bayesian
Priors and Penalties in Variational Inference"). With P = fan-in and the variance 1 / P:

    L2  P / 2        L1  sqrt(2 P)        GroupLasso  sqrt(P (P + 1))        ReverseGroupLasso  sqrt(P (n_out k^2 + 1))

These are in nats for the whole data. In a mean loss over N rows they are divided by N, which is the global factor, and
PyTorch's `weight_decay`, which multiplies w itself, is 2 lambda_l / N.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from priory.core.errors import InputError, require, whole
from priory.penalties.as_prior.base import Regulariser, is_positive, variance_rule
from priory.penalties.as_prior.norms import L2, PENALTIES_BY_NAME
from priory.penalties.as_prior.parameters import describe_parameters

if TYPE_CHECKING:
    from collections.abc import Callable


def layer_factors(
    net: nn.Module, penalty: Any, variance: str | Callable[[int, int], float] = "glorot"
) -> dict[str, float]:
    """lambda of each weight of a layer, by its name, at which the prior's variance is the initialisation's.

    `penalty` is one such as L1(), its class, or its name: "l2", "l1", "group_lasso", "reverse_group_lasso",
    "elastic_net". `variance` is "glorot" (2 / (in + out)), "fan_in" (1 / P), "he" (2 / P), or `edge_of_chaos(...)`.
    Biases, embeddings and normalisations have no fan-in and are left out. `L1(layer_factors(net, "l1"))` is a prior.

    >>> layer_factors(nn.Conv2d(64, 128, 3), "l2", "fan_in")
    {'weight': 288.0}
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
    """A penalty from itself, its class, or its name."""
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
    """Refuse what has no layers."""
    require(isinstance(net, nn.Module), "net", owner, "be a torch.nn.Module", type(net).__name__)


@dataclass(frozen=True)
class LayerRow:
    """One layer: its factor, the standard deviation of the prior that it is, and of the initialisation."""

    name: str
    shape: tuple[int, ...]
    factor: float
    prior_sd: float
    initial_sd: float

    @property
    def ratio(self) -> float:
        """How many times wider the prior is than the initialisation."""
        return self.prior_sd / self.initial_sd


@dataclass(frozen=True)
class Explanation:
    """What a penalty says of each layer; `print` it, or read its `rows`."""

    penalty: str
    initialisation: str
    rows: tuple[LayerRow, ...]
    num_data: int | None
    decay: bool  # whether the penalty is a sum of squares, which optimisers know as weight decay
    own: str  # what the person called it

    @property
    def table(self) -> list[dict[str, Any]]:
        """The rows as dicts, with the factors of a mean loss where the number of data is known."""
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
        """What the factor means, in words."""
        ratios = sorted(row.ratio for row in self.rows)
        low, high = ratios[0], ratios[-1]
        if abs(math.log(low)) < 0.005 and abs(math.log(high)) < 0.005:
            return f"{self.own} is a prior as wide as the initialisation ({self.initialisation}) in every layer."
        if high / low < 1.05:
            return f"{self.own} is a prior {_times(math.sqrt(low * high))} than the initialisation."
        between = f"{_times(low)} ({self._layer(low)}) to {_times(high)} ({self._layer(high)})"
        return f"{self.own} is a prior {between} than the initialisation."

    def _layer(self, ratio: float) -> str:
        return next(row.name for row in self.rows if row.ratio == ratio)

    def __str__(self) -> str:
        heads = ["layer", "shape", "lambda", "prior sd", "initial sd", "ratio"]
        heads += [] if self.num_data is None else ["lambda / N", *(["weight decay"] if self.decay else [])]
        lines = [heads]
        for entry in self.table:
            name, shape, *numbers = entry.values()
            lines.append([name, "x".join(str(s) for s in shape), *(f"{number:.4g}" for number in numbers)])
        widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
        text = []
        for line in lines:
            cells = [c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))]
            text.append("  ".join(cells).rstrip())
        return "\n".join([f"{self.penalty}, initialisation {self.initialisation}", *text, self.sentence])


def explain(
    net: nn.Module,
    penalty: Any,
    num_data: int | None = None,
    variance: str | Callable[[int, int], float] = "glorot",
) -> Explanation:
    """What a penalty says of the weights of each layer, beside the initialisation of variance `variance`.

    A number as `penalty` is a weight decay in PyTorch's convention, which needs `num_data`. The factor of a penalty is
    in nats for the whole data: who adds lam r(w) to a mean loss over N rows explains L1(lam * N). With `num_data` the
    factors of a mean loss, and for L2 the weight decay of each layer, are there too.

    >>> print(explain(nn.Conv2d(64, 64, 3), 2e-4, num_data=50_000).sentence)
    Your weight decay of 0.0002 over 50,000 rows is a prior 7.6 times wider than the initialisation.
    """
    require_network(net, "explain")
    rule = variance_rule(variance, "variance", "explain")
    ok = num_data is None or whole(num_data, 1)
    require(ok, "num_data", "explain", "be an integer >= 1", repr(num_data))
    if isinstance(penalty, (int, float)) and not isinstance(penalty, bool):
        require(is_positive(penalty), "penalty", "explain", "be a positive weight decay", penalty)
        require(num_data is not None, "num_data", "explain", "be given for a weight decay, which is one a row", None)
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
    by = max(ratio, 1 / ratio)
    return f"{by:.{1 if by < 10 else 0}f} times {'wider' if ratio >= 1 else 'narrower'}"
