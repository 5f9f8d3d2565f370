"""Density: any log density over named, constrained parameters.

    log p(x, D) = log_prob(x)        or        log_prior(x) + sum_n log_likelihood(x, datum n)

Methods work on unconstrained coordinates u with x = f(u) and the density p(f(u)) |det df/du|. Only MAP leaves the
determinant out, because the user wants the mode of the density over x.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from priory.core.data import Batch, Data, check_finite, weighted_sum
from priory.core.errors import InputError, require
from priory.core.flat import Layout, Param
from priory.core.tables import counted
from priory.models.base import BaseModel, Capabilities
from priory.models.named_prior import NamedPrior
from priory.models.supports import evaluated_distributions, refuse_narrower_support
from priory.network.failures import EVALUATION_ERRORS
from priory.network.vectorise import Vectorised, value_and_grad

if TYPE_CHECKING:
    from types import FrameType

Params = dict[str, Tensor]
MAX_TRIAL_STARTS = 64  # points that are tried if the density is zero at the origin
SAME_VALUE = 1e-6  # relative difference of two evaluations that counts as rounding
SIGNATURES = {  # what each function of a density must be, for messages
    "log_prob": "function of one dict of parameters",
    "log_prior": "function of one dict of parameters",
    "log_likelihood": "function of one dict of parameters and the rows",
}


class Density(BaseModel):
    """A model given by its log density, a function of named parameters.

    Give either `log_prob`, which contains its data, or `log_prior` and `log_likelihood`, which allow minibatches. The
    functions get a dict of constrained tensors, one draw at a time, and are vectorised by `vmap`.

    Args:
        log_prob: The log joint density log p(x, D) up to a constant: takes the parameters, returns a scalar tensor.
        params: The parameters by name, with their shapes and supports.
        log_prior: The log prior density: takes the parameters, returns a scalar tensor. Or a dict with a distribution
            of `torch.distributions` for each parameter, or a function of the parameters before it that returns one;
            then `prior_draws` is exact.
        log_likelihood: The log-likelihood of each row: takes the parameters and a batch, returns one value per row,
            (n,).
        batched: Whether the functions accept leading dimensions (*B, ...) and need no `vmap`. Default: False.
        dtype: The floating type of the parameters. Default: None, which is float64, or float32 if the functions raise
            an error with float64.
        device: The device of the parameters. Default: "cpu".

    Raises:
        InputError: If the functions are neither `log_prob` nor both `log_prior` and `log_likelihood`, or if `params`
            is not a dict of `Param`.

    Example:
        >>> from torch.distributions import constraints
        >>> chance = Param((), constraints.unit_interval)
        >>> coin = Density(lambda p: 3 * p["p"].log() + torch.log1p(-p["p"]), {"p": chance})
        >>> coin.layout.names
        ('p',)
    """

    def __init__(
        self,
        log_prob: Callable[[Params], Tensor] | None = None,
        params: Mapping[str, Param] | None = None,
        *,
        log_prior: Callable[[Params], Tensor] | Mapping[str, Any] | None = None,
        log_likelihood: Callable[[Params, Any], Tensor] | None = None,
        batched: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        whole = log_prob is not None and log_prior is None and log_likelihood is None
        parts = log_prob is None and log_prior is not None and log_likelihood is not None
        if not (whole or parts):
            raise InputError(
                "A Density must have either log_prob, or log_prior and log_likelihood, got another combination."
            )
        functions = {"log_prob": log_prob, "log_prior": log_prior, "log_likelihood": log_likelihood}
        for name, function in functions.items():
            ok = function is None or callable(function) or (name == "log_prior" and isinstance(function, Mapping))
            require(ok, name, "Density", f"be a {SIGNATURES[name]}", function)
        ok = isinstance(params, Mapping) and len(params) > 0 and all(isinstance(p, Param) for p in params.values())
        require(ok, "params", "Density", "be a dict from names to Param", params)
        assert params is not None
        self.params, self.layout = dict(params), Layout(params)
        if isinstance(log_prior, Mapping):
            log_prior = NamedPrior(log_prior, self.layout, dtype or torch.float64, device)
        self.log_prob, self.log_prior, self.log_likelihood_of = log_prob, log_prior, log_likelihood
        self.batched, self.device = batched, torch.device(device)
        self.dtype = dtype or self._dtype_that_works()
        self.prior = DensityPrior(self)
        self.learnt = slice(self.layout.size, self.layout.size)
        self._sum = Vectorised(self._factored, "This density")
        self._pointwise = Vectorised(self._values, "This density")
        self.origin = self.layout.start(self.dtype, self.device)  # the start of one vector
        self.no_slope = ""  # the reason if there is no gradient

    def __repr__(self) -> str:
        return f"Density({', '.join(f'{b.name}: {b.shape}' for b in self.layout.blocks)})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to pickle a lambda or a local function, except by picklers that store code; `copy` takes any."""
        functions = {"log_prob": self.log_prob, "log_prior": self.log_prior, "log_likelihood": self.log_likelihood_of}
        for name, function in functions.items():
            ok = "<" not in getattr(function, "__qualname__", "") or stores_code()
            must = "be defined by def at the top level of a module to be pickled"
            require(ok, name, "Density", must, "a lambda or a local function")
        return super().__reduce_ex__(protocol)

    def _dtype_that_works(self) -> torch.dtype:
        function = self.log_prob if self.log_prob is not None else self.log_prior
        assert function is not None
        for dtype in (torch.float64, torch.float32):
            try:
                function(self.layout.constrain(self.layout.start(dtype, self.device)))
            except Exception:
                continue
            return dtype
        return torch.float64

    @property
    def capabilities(self) -> Capabilities:
        """Whether the likelihood is separate from the prior, and whether the functions accept leading dimensions."""
        return Capabilities(separate_likelihood=self.log_prob is None, batched=self.batched)

    # Data.

    def prepare(self, batch: Batch) -> Batch:
        """Convert a batch to the density's floating type and device."""
        for i, t in enumerate(batch):
            check_finite(t, f"part {i}")
        return tuple(t.to(self.device, self.dtype if t.is_floating_point() else None) for t in batch)

    def check(self, batch: Any, data: Data | None = None, drops: bool = False) -> None:
        """Evaluate the functions at the start of a fit: shapes, finite values, and whether there is a gradient.

        The density may be zero at the origin, or fail there; then random starts of chains are tried, one of which must
        have a finite density.

        Raises:
            InputError: If a function fails or is not finite at every start, returns another shape, or differs between
                two calls; or if a parameter was declared with a wider support than that of its distribution.
        """
        none = isinstance(batch, tuple) and not batch
        got = "data" if data is None else counted(data.num_data or 0, "row")
        require(self.log_prob is None or none, "data", "fit", "be None for a Density that is one log_prob", got)
        require(
            self.log_prob is not None or not none, "data", "fit", "be given to a Density with a log_likelihood", None
        )
        zero = self.layout.start(self.dtype, self.device)
        self._refuse_narrower_support(zero, batch)
        origin = self._first_start(zero, batch)
        self._refuse_randomness(origin, batch)
        self.origin = origin
        own = lambda u: self._factored(u, batch, 1.0) + self.prior.log_prob_of_others(u, jacobian=False)  # noqa: E731
        try:
            value_and_grad(own, origin)  # without the volume element, which always has a slope
            self.no_slope = ""
        except RuntimeError as error:
            self.no_slope = str(error).strip().split("\n")[0]

    def _tried(self, w: Tensor, batch: Any) -> dict[str, Tensor]:
        """Return the values of the functions at w; raise an error if one fails or returns another shape."""
        params, values = self.layout.constrain(w), {}
        parts: dict[str, tuple[Callable[..., Tensor] | None, tuple[Any, ...]]] = {
            "log_prob": (self.log_prob, (params,)),
            "log_prior": (self.log_prior, (params,)),
            "log_likelihood": (self.log_likelihood_of, (params, batch)),
        }
        for name, (function, arguments) in parts.items():
            if function is None:
                continue
            try:
                value = function(*arguments)
            except Exception as error:
                reason = f"{type(error).__name__}: {str(error).strip()}".split("\n")[0]
                keys = f"the key{'s' * (len(params) > 1)} {', '.join(map(repr, params))}"
                must = f"The '{name}' argument of Density must be a {SIGNATURES[name]}, here with {keys}."
                raise InputError(f"{must} It raised {reason}") from error
            require(isinstance(value, Tensor), name, "Density", "return a tensor", type(value).__name__)
            shape, must = (), "return a single number"
            if name == "log_likelihood":
                shape = (len(batch) if isinstance(batch, Tensor) else len(next(iter(batch))),)
                must = f"return one value per row, {shape}"
            require(value.shape == shape, name, "Density", must, f"the shape {tuple(value.shape)}")
            values[name] = value.detach()
        return values

    def _first_start(self, zero: Tensor, batch: Any) -> Tensor:
        """Return the origin, or else the first of several random starts, where the density is finite."""
        starts = self.start(None, torch.Size([MAX_TRIAL_STARTS]), torch.Generator(self.device).manual_seed(0))
        problem: InputError | None = None
        for w in (zero, *starts):
            try:
                values = self._tried(w, batch)
                wrong = next((name for name, value in values.items() if not bool(torch.isfinite(value).all())), None)
                if wrong is None:
                    return w
                value = values[wrong].flatten()
                where = {n: x.tolist() if x.numel() < 6 else "..." for n, x in self.layout.constrain(w).items()}
                got = value[~torch.isfinite(value)][:1].tolist()
                require(False, wrong, "Density", f"be finite at the start {where}", got)
            except InputError as error:
                if error.__cause__ is not None and not isinstance(error.__cause__, EVALUATION_ERRORS):
                    raise
                problem = problem or error
        assert problem is not None
        raise problem

    def _refuse_narrower_support(self, w: Tensor, batch: Any) -> None:
        """Raise an error for a parameter that was declared with a wider support than that of its distribution."""
        params = self.layout.constrain(
            w.clone().requires_grad_()
        )  # so that bounds which are parameters can be told apart
        with evaluated_distributions() as found, suppress(Exception):  # errors are reported by the trial evaluation
            for function, *more in ((self.log_prob,), (self.log_prior,), (self.log_likelihood_of, batch)):
                if function is not None:
                    function(params, *more)
        refuse_narrower_support(self.params, params, found)

    def _refuse_randomness(self, w: Tensor, batch: Any) -> None:
        """Raise an error if a function returns two values at the same parameters."""
        first, second = self._tried(w, batch), self._tried(w, batch)
        for name, value in first.items():
            same = torch.isclose(value, second[name], rtol=SAME_VALUE, atol=SAME_VALUE, equal_nan=True)
            if not bool(same.all()):
                pair = " and ".join(f"{float(v[~same][0]):g}" for v in (value, second[name]))
                raise InputError(
                    f"The '{name}' argument of Density must be a function without randomness, got {pair} at the same "
                    "parameters: draw random numbers once, outside of it."
                )

    # Initialisation.

    def start(self, targets: Tensor | None, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Return starting points in unconstrained coordinates, (*shape, P).

        For shape () this is the origin, or a point of positive density if the origin has none. Otherwise the points
        are uniform on (-2, 2), as in Stan.
        """
        if shape == ():
            return self.origin.clone()
        u = torch.rand(*shape, self.layout.size, generator=generator, dtype=self.dtype, device=self.device)
        return 4 * u - 2

    def buffers(self) -> dict[str, Tensor]:
        """Return an empty dict, because a density has no running statistics."""
        return {}

    # log p(D | x), per row or summed.

    def log_likelihood(self, w: Tensor, batch: Any, buffers: Mapping[str, Tensor]) -> Tensor:
        """Return log p(datum | x) per row, (*B, P) -> (*B, n); n = 1 for a density that contains its data."""
        with torch.no_grad():
            if self.batched:
                return self._values(w, batch)
            if w.ndim == 1:
                return self._values(w, batch)
            values = self._pointwise.values(w.reshape(-1, w.shape[-1]), batch)
        return values.reshape(*w.shape[:-1], -1)

    def log_likelihood_and_grad(
        self, w: Tensor, batch: Any, factor: float | Tensor, buffers: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return sum_n factor_n log p(datum n | x) and its gradient, (*B, P) -> (*B,), (*B, P)."""
        self.refuse_without_slope()
        return self.many(self._sum, w, batch, factor)

    def log_likelihood_sum(self, w: Tensor, batch: Any, weights: Tensor | None = None) -> Tensor:
        """Return sum_n weights_n log p(datum n | x) for one vector (P,), differentiable by autograd."""
        self.refuse_without_slope()
        return self._factored(w, batch, 1.0 if weights is None else weights)

    def refuse_without_slope(self) -> None:
        """Raise an error if the density has no gradient."""
        if self.no_slope:
            raise InputError(
                f"The density must be differentiable in its parameters, except for RandomWalk. Got: {self.no_slope}"
            )

    def many(self, function: Vectorised, w: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        """Return values and gradients of one of the density's functions, for any leading dimensions."""
        if w.ndim == 1:
            return value_and_grad(function.fn, w, *arguments)
        if self.batched:
            leaf = w.detach().requires_grad_()
            with torch.enable_grad():
                values = function.fn(leaf, *arguments)
                (gradient,) = torch.autograd.grad(values.sum(), leaf)
            return values.detach(), gradient
        values, gradients = function.values_and_grads(w.reshape(-1, w.shape[-1]), *arguments)
        return values.reshape(w.shape[:-1]), gradients.reshape(w.shape)

    def trial(self, w: Tensor) -> None:
        """Call log_prob, or else log_prior, once at w (P,), so that its errors surface."""
        function = self.log_prob if self.log_prob is not None else self.log_prior
        assert function is not None
        function(self.layout.constrain(w))

    def values_only(self) -> Density:
        """Return the density itself, or a copy with a gradient of zero if it has no gradient."""
        return ValuesOnly(self) if self.no_slope else self

    def _values(self, w: Tensor, batch: Any) -> Tensor:
        params = self.layout.constrain(w)
        if self.log_prob is not None:
            return self.log_prob(params).unsqueeze(-1)
        assert self.log_likelihood_of is not None
        return self.log_likelihood_of(params, batch)

    def _factored(self, w: Tensor, batch: Any, factor: float | Tensor) -> Tensor:
        return weighted_sum(self._values(w, batch), factor)

    def describe(self) -> dict[str, Any]:
        """Return the properties that must match those of a stored posterior."""
        return {"layout": self.layout.signature(), "likelihood": "Density", "network": ""}


def stores_code() -> bool:
    """Whether `copy`, or a pickler that stores the code of functions and not their names, is among the callers."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__", "").split(".")[0] in ("copy", "cloudpickle", "dill"):
            return True
        frame = frame.f_back
    return False


class DensityPrior:
    """The prior of a density in unconstrained coordinates: log_prior(f(u)) + log |det df/du|.

    No part of it has a closed form. If the density is given by `log_prob`, everything belongs to the likelihood and
    the prior is the log-determinant alone.
    """

    def __init__(self, density: Density) -> None:
        self.density = density
        size, dtype, device = density.layout.size, density.dtype, density.device
        self.loc = torch.zeros(size, dtype=dtype, device=device)
        self.precision = torch.zeros(size, dtype=dtype, device=device)
        self.others = density.log_prior is not None or bool(density.layout.constrained)
        self.improper, self.centred, self.log_normaliser = False, True, 0.0
        self.factors: dict[str, Tensor] = {}  # no precisions that the evidence could scale
        self._each = Vectorised(self._log_prior, "This density")

    def log_prob(self, w: Tensor) -> Tensor:
        """Return log p(u), (*B,)."""
        return self.log_prob_of_others(w)

    def log_prob_of_others(self, w: Tensor, jacobian: bool = True) -> Tensor:
        """Return log p(u), because no part is Gaussian; without `jacobian`, the log density over x, (*B,)."""
        if self.density.log_prior is None:
            log_prior = w.new_zeros(w.shape[:-1])
        elif w.ndim == 1 or self.density.batched:
            log_prior = self._log_prior(w)
        else:
            log_prior = self._each.values(w.reshape(-1, w.shape[-1])).reshape(w.shape[:-1])
        return log_prior + self.density.layout.log_det(w) if jacobian else log_prior

    def typical_scale(self) -> Tensor:
        """Return a scale of one for every coordinate, (P,)."""
        return torch.ones_like(self.loc)

    def _log_prior(self, w: Tensor) -> Tensor:
        assert self.density.log_prior is not None
        return self.density.log_prior(self.density.layout.constrain(w))


class ValuesOnly(Density):
    """A density whose gradient is zero, for methods that need no gradient and functions that have none."""

    def __init__(self, density: Density) -> None:
        vars(self).update(vars(density))
        self.prior = ValuesOnlyPrior(self)

    def log_likelihood_and_grad(
        self, w: Tensor, batch: Any, factor: float | Tensor, buffers: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        return weighted_sum(self.log_likelihood(w, batch, buffers), factor), torch.zeros_like(w)


class ValuesOnlyPrior(DensityPrior):
    """The prior of `ValuesOnly`, evaluated without autograd."""

    def log_prob_of_others(self, w: Tensor, jacobian: bool = True) -> Tensor:
        with torch.no_grad():
            return super().log_prob_of_others(w.detach(), jacobian)
