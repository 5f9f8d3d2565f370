"""Density: any log density over named, constrained parameters.

    log p(x, D) = log_prob(x)        or        log_prior(x) + sum_n log_likelihood(x, datum n)

Methods work on unconstrained coordinates u with x = f(u) and the density p(f(u)) |det df/du|. MAP alone leaves the
determinant out, because the mode that a person asks for is the one in their own parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from priory.core.data import Batch, Data, check_finite, weighted_sum
from priory.core.errors import InputError, require
from priory.core.flat import Layout, Param
from priory.models.base import BaseModel, Capabilities
from priory.network.vectorise import Vectorised, value_and_grad

Params = dict[str, Tensor]
TRIES = 64  # starts of chains that are tried where there is no density in the origin


class Density(BaseModel):
    """A log density as a function of a dict of constrained tensors, one draw at a time.

    Draws are vectorised by `vmap`; with `batched=True` the functions take leading dimensions themselves.
    `log_prob` has its data inside. With `log_prior` and `log_likelihood(params, batch)`, which returns one
    value a datum, minibatches work. The default type is float64, or float32 where only that fits the
    functions.

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
        log_prior: Callable[[Params], Tensor] | None = None,
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
        ok = isinstance(params, Mapping) and len(params) > 0 and all(isinstance(p, Param) for p in params.values())
        require(ok, "params", "Density", "be a dict from names to Param", params)
        assert params is not None
        self.layout = Layout(params)
        self.log_prob, self.log_prior, self.log_likelihood_of = log_prob, log_prior, log_likelihood
        self.batched, self.device = batched, torch.device(device)
        self.dtype = dtype or self._dtype_that_works()
        self.prior = DensityPrior(self)
        self.learnt = slice(self.layout.size, self.layout.size)
        self._sum = Vectorised(self._factored, "This density")
        self._pointwise = Vectorised(self._values, "This density")
        self.origin = torch.zeros(self.layout.size, dtype=self.dtype, device=self.device)  # where one vector begins
        self.no_slope = ""  # why it has no gradient, if it has none

    def __repr__(self) -> str:
        return f"Density({', '.join(f'{b.name}: {b.shape}' for b in self.layout.blocks)})"

    def _dtype_that_works(self) -> torch.dtype:
        function = self.log_prob if self.log_prob is not None else self.log_prior
        assert function is not None
        for dtype in (torch.float64, torch.float32):
            try:
                function(self.layout.constrain(torch.zeros(self.layout.size, dtype=dtype, device=self.device)))
            except Exception:
                continue
            return dtype
        return torch.float64

    @property
    def capabilities(self) -> Capabilities:
        """Whether its likelihood is apart from its prior, and whether its functions take leading dimensions."""
        return Capabilities(separate_likelihood=self.log_prob is None, batched=self.batched)

    # What comes in.

    def prepare(self, batch: Batch) -> Batch:
        """A batch in the density's floating type, on its device."""
        for i, t in enumerate(batch):
            check_finite(t, f"part {i}")
        return tuple(t.to(self.device, self.dtype if t.is_floating_point() else None) for t in batch)

    def check(self, batch: Any, data: Data | None = None, drops: bool = False) -> None:
        """One trial evaluation where a fit starts: scalar and finite; one value a datum; whether it has a gradient.

        A density may be zero in the origin, so that others of the places that chains start from are tried. Somewhere
        it must be positive, and nowhere without a number: that is what a support is for.
        """
        none = isinstance(batch, tuple) and not batch
        require(self.log_prob is None or none, "data", "fit", "be None for a Density that is one log_prob", "some")
        require(
            self.log_prob is not None or not none, "data", "fit", "be given to a Density with a log_likelihood", None
        )
        zero = torch.zeros(self.layout.size, dtype=self.dtype, device=self.device)
        values = self._tried(zero, batch)
        wrong = next((name for name, value in values.items() if not bool(torch.isfinite(value).all())), None)
        origin = zero if wrong is None else self._elsewhere(batch)
        if wrong is not None and origin is None:
            value = values[wrong].flatten()
            where = {n: x.tolist() if x.numel() < 6 else "..." for n, x in self.layout.constrain(zero).items()}
            got = value[~torch.isfinite(value)][:1].tolist()
            require(False, wrong, "Density", f"be finite at the start {where}", got)
        assert origin is not None
        self.origin = origin
        own = lambda u: self._factored(u, batch, 1.0) + self.prior.log_prob_of_others(u, jacobian=False)  # noqa: E731
        try:
            value_and_grad(own, origin)  # without the volume element, which always has a slope
            self.no_slope = ""
        except RuntimeError as error:
            self.no_slope = str(error).strip().split("\n")[0]

    def _tried(self, w: Tensor, batch: Any) -> dict[str, Tensor]:
        """The values of the functions at w, or the sentence that says what is wrong with one."""
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
                names = ", ".join(params)
                raise InputError(
                    f"The '{name}' argument of Density must be a function of its parameters {names}. It raised {reason}"
                ) from error
            require(isinstance(value, Tensor), name, "Density", "return a tensor", type(value).__name__)
            shape, must = (), "return a single number"
            if name == "log_likelihood":
                shape = (len(batch) if isinstance(batch, Tensor) else len(next(iter(batch))),)
                must = f"return one value a datum, {shape}"
            require(value.shape == shape, name, "Density", must, f"the shape {tuple(value.shape)}")
            values[name] = value.detach()
        return values

    def _elsewhere(self, batch: Any) -> Tensor | None:
        """The first of some starts of chains that has a density, unless one of them has no number."""
        first = None
        for w in self.start(None, torch.Size([TRIES]), torch.Generator(self.device).manual_seed(0)):
            try:
                value = torch.cat([value.reshape(-1) for value in self._tried(w, batch).values()])
            except InputError:
                return None
            if bool(torch.isnan(value).any()):
                return None
            first = w if first is None and bool(torch.isfinite(value).all()) else first
        return first

    # Where a fit begins.

    def start(self, targets: Tensor | None, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Zero in unconstrained coordinates for shape (), or a place that has a density; else uniform on (-2, 2), as
        Stan does, (*shape, P).
        """
        if shape == ():
            return self.origin.clone()
        u = torch.rand(*shape, self.layout.size, generator=generator, dtype=self.dtype, device=self.device)
        return 4 * u - 2

    def buffers(self) -> dict[str, Tensor]:
        """None: a density has no running statistics."""
        return {}

    # log p(D | x), a datum or summed.

    def log_likelihood(self, w: Tensor, batch: Any, buffers: Mapping[str, Tensor]) -> Tensor:
        """log p(datum | x) a datum, (*B, P) -> (*B, n); a density with its data inside has one value."""
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
        """sum_n factor_n log p(datum n | x) and its gradient, (*B, P) -> (*B,), (*B, P)."""
        self.refuse_without_slope()
        return self.many(self._sum, w, batch, factor)

    def log_likelihood_sum(self, w: Tensor, batch: Any, weights: Tensor | None = None) -> Tensor:
        """sum_n weights_n log p(datum n | x) for one vector, through which autograd goes."""
        self.refuse_without_slope()
        return self._factored(w, batch, 1.0 if weights is None else weights)

    def refuse_without_slope(self) -> None:
        """Say that a method that asks for a gradient gets none."""
        if self.no_slope:
            raise InputError(
                f"The density must be differentiable in its parameters, but for RandomWalk. Got: {self.no_slope}"
            )

    def many(self, function: Vectorised, w: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        """Values and gradients of one of the density's functions, over any leading dimensions."""
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
        """Call log_prob, or else log_prior, once at w (P,), for what it raises."""
        function = self.log_prob if self.log_prob is not None else self.log_prior
        assert function is not None
        function(self.layout.constrain(w))

    def values_only(self) -> Density:
        """The density with a gradient of zero, if it has none of its own."""
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
        """What a stored posterior must agree with."""
        return {"layout": self.layout.signature(), "likelihood": "Density", "network": ""}


class DensityPrior:
    """The prior of a density in unconstrained coordinates: log_prior(f(u)) + log |det df/du|, none of it in closed
    form.

    A density that is one `log_prob` keeps everything in its likelihood, so that its prior is the volume
    element alone.
    """

    def __init__(self, density: Density) -> None:
        self.density = density
        size, dtype, device = density.layout.size, density.dtype, density.device
        self.loc = torch.zeros(size, dtype=dtype, device=device)
        self.precision = torch.zeros(size, dtype=dtype, device=device)
        self.others = density.log_prior is not None or bool(density.layout.constrained)
        self.improper, self.centred, self.log_normaliser = False, True, 0.0
        self.factors: dict[str, Tensor] = {}  # nothing that the evidence could multiply
        self._each = Vectorised(self._log_prior, "This density")

    def log_prob(self, w: Tensor) -> Tensor:
        """log p(u), (*B,)."""
        return self.log_prob_of_others(w)

    def log_prob_of_others(self, w: Tensor, jacobian: bool = True) -> Tensor:
        """All of it, as nothing is Gaussian in closed form; without `jacobian`, as a density over x itself."""
        if self.density.log_prior is None:
            own = w.new_zeros(w.shape[:-1])
        elif w.ndim == 1 or self.density.batched:
            own = self._log_prior(w)
        else:
            own = self._each.values(w.reshape(-1, w.shape[-1])).reshape(w.shape[:-1])
        return own + self.density.layout.log_det(w) if jacobian else own

    def typical_scale(self) -> Tensor:
        """One for every coordinate, (P,)."""
        return torch.ones_like(self.loc)

    def _log_prior(self, w: Tensor) -> Tensor:
        assert self.density.log_prior is not None
        return self.density.log_prior(self.density.layout.constrain(w))


class ValuesOnly(Density):
    """A density whose gradient is zero, for methods that need none; its functions need not be differentiable."""

    def __init__(self, density: Density) -> None:
        vars(self).update(vars(density))
        self.prior = ValuesOnlyPrior(self)

    def log_likelihood_and_grad(
        self, w: Tensor, batch: Any, factor: float | Tensor, buffers: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        return weighted_sum(self.log_likelihood(w, batch, buffers), factor), torch.zeros_like(w)


class ValuesOnlyPrior(DensityPrior):
    """Its prior, which autograd doesn't see."""

    def log_prob_of_others(self, w: Tensor, jacobian: bool = True) -> Tensor:
        with torch.no_grad():
            return super().log_prob_of_others(w.detach(), jacobian)
