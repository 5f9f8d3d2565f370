"""Latent: a model with hidden variables, written as its E-step and its complete-data log-likelihood.

For data y, hidden z and parameters theta, and any distribution q of z, Jensen's inequality gives

    log p(y | theta)  =  L(q, theta) + KL(q || p(z | y, theta))  >=  L(q, theta)

    L(q, theta)       =  E_q[log p(y, z | theta)] + H(q)         =  Q + H

EM climbs L in turns (Dempster, Laird and Rubin, 1977; the bound is Neal and Hinton's, 1998): the E-step sets q to
p(z | y, theta), where L touches the log-likelihood; the M-step raises Q over theta. Q needs the data only through
expected statistics S = E_q[sum_n s(y_n, z_n)], which add up over rows:

    Q(theta, theta_t) = complete(theta, S(theta_t))

So a model is two equations, `e_step` (S and the bound, for a block of rows) and `complete` (Q from S). One mechanism
then does full passes, blocks streamed from disk, minibatches (S is averaged over steps), weighted rows (each row of S
counts so often), missing values and known z (q is narrower there). Without an `m_step` of its own a model has Q climbed
by L-BFGS: generalised EM. And because p(z | y, theta) makes KL zero and flat, Fisher's identity holds,

    d/dtheta log p(y | theta) = d/dtheta complete(theta, S)   at the theta that S is of

A latent model that has met data has a `Density` with z summed out, so that MAP, Laplace and MCMC fit it as well.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from priory.core.data import Batch, Data, WeightedBatch, tensor_of
from priory.core.errors import InputError, require, warn
from priory.core.flat import Param
from priory.core.streams import stream
from priory.latent.rows import Expectation, Generated, Rows, Theta
from priory.models.base import BaseModel, Capabilities
from priory.models.density import Density

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from typing_extensions import TypeIs

CHECKED = 1 << 16  # rows that are looked at together, so that data on disk are never in memory whole
CAPABILITIES = Capabilities(latent=True)
CLIMBS = 20  # iterations of L-BFGS in an M-step without a closed form


class Latent(BaseModel):
    """A model of data with hidden variables. A person's own says `params`, `e_step` and `complete`.

    A model knows its options when it is made, and its shapes when it has met data: `fit` lets it. `given` names what
    the data hold after the model's own parts: "weights", one a row, or "z", integers, -1 where it is hidden.
    """

    parts: ClassVar[tuple[str, ...]] = ("y",)  # what a row of the data consists of
    starts: ClassVar[tuple[str, ...]] = ("random",)  # the ways to begin, the usual one first
    sample: ClassVar[int] = 1 << 14  # rows that the model is shaped by and a fit begins from, about, at most
    whole: ClassVar[tuple[str, ...]] = ()  # parts that stay in their own type, as lengths and categories do
    missing: ClassVar[bool] = False  # whether NaN in the data is a value that wasn't seen
    labels: ClassVar[bool] = False  # whether the E-step reads `rows.z`
    weighs: ClassVar[bool] = False  # whether it reads `rows.weights`
    tempers: ClassVar[bool] = False  # whether it reads `rows.temperature`
    samples: ClassVar[bool] = False  # whether it reads `rows.draws`
    sequences: ClassVar[bool] = False  # whether a row is a sequence, of any length

    block: int = 4096  # rows that an E-step is given at a time
    exact: bool = True  # whether E- and M-step never let the bound fall
    given: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] | None = None  # of one row of each part, once the model has met data
    density: Density | None = None  # of theta, z summed out, once the model has met data
    frame: Mapping[str, Tensor]  # what `look` found

    def __init__(self) -> None:
        """A model without options."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    # What an author writes.

    def params(self, *shapes: tuple[int, ...]) -> dict[str, Param]:
        """Theta: each parameter's shape and support, for rows of these shapes, one of each part."""
        raise NotImplementedError

    def e_step(self, theta: Theta, rows: Rows) -> Expectation:
        """q(z) = p(z | y, theta): its expected statistics, and log p(y_n | theta) a row."""
        raise NotImplementedError

    def complete(self, theta: Theta, statistics: Mapping[str, Tensor]) -> Tensor:
        """Q: E_q[log p(y, z | theta)] from the statistics of q. Autograd goes through it."""
        raise NotImplementedError

    # What an author may write.

    def m_step(self, statistics: Mapping[str, Tensor], theta: Theta) -> Theta:
        """The theta where `complete` and `log_prior` are highest together, or at least higher than at this one."""
        return climbed(self, statistics, theta, CLIMBS)

    def log_prior(self, theta: Theta) -> Tensor:
        """What the bound has beside its rows: log p(theta), or -KL(q(theta) || p(theta)) where theta is of a q."""
        return next(iter(theta.values())).new_zeros(())

    def begin(self, rows: Rows, how: str, generator: torch.Generator) -> Theta:
        """A theta to begin from, by one of the ways in `starts`, from some rows."""
        u = torch.rand(self.layout.size, generator=generator, dtype=self.dtype, device=self.device)
        return self.layout.constrain(2 * u - 1)

    def look(self, rows: Rows) -> dict[str, Tensor]:
        """What a model keeps of some rows before a fit, such as their centre and scale."""
        return {}

    def check_rows(self, rows: Rows) -> None:
        """Refuse, in one sentence, rows that the model can't have made."""

    def allows(self, theta: Theta) -> bool:
        """Whether theta lies where M-steps may lead: a bound on parameters makes others unreachable."""
        return True

    def doubts(self, theta: Theta, statistics: Mapping[str, Tensor]) -> list[str]:
        """What a person should be warned of when theta is the end of a fit, a sentence each."""
        return []

    def log_marginal(self, theta: Theta, rows: Rows) -> Tensor:
        """log p(y_n | theta) a row, (n,), as a function that autograd goes through."""
        return self.e_step(theta, rows).log_likelihood

    def responsibilities(self, theta: Theta, rows: Rows) -> Tensor:
        """q(z_n = k), (n, ..., K), where z is one of K."""
        raise InputError(f"{self!r} has no responsibilities: its z is not one of K components.")

    def most_likely(self, theta: Theta, rows: Rows) -> Tensor:
        """The z of each row that is most likely, (n, ...)."""
        return self.responsibilities(theta, rows).argmax(-1)

    def hidden(self, theta: Theta, rows: Rows) -> dict[str, Tensor]:
        """What is known of z given y, by name: for mixtures the responsibilities."""
        return {"responsibilities": self.responsibilities(theta, rows)}

    def generate(self, theta: Theta, n: int, generator: torch.Generator, steps: int | None = None) -> Generated:
        """n rows from p(y, z | theta); sequences of so many steps, or as many as those of the fit had."""
        raise InputError(f"{self!r} can't make rows: it has no 'generate'.")

    def predictive(self, theta: Theta, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """p(y | x, theta) as a mixture of Gaussians: weights, means and variances, each (n, K)."""
        raise InputError(f"{self!r} has no inputs to predict from.")

    # Meeting the data.

    def bind(self, data: Any, batch_size: int | None = None, weights: Any = None) -> tuple[Self, Data]:
        """The model in the data's shapes and type, with its density, and the data as it reads them.

        `weights` become a part of the rows, which is what `given="weights"` says of them.
        """
        if weights is not None and not self._all_one(weights):
            model = copy.copy(self)
            model.given = (*self.given, "weights")
            return model.bind((*self.parts_of(data), weights), batch_size)
        rows = self.read(data, batch_size)
        model = self if self.density is not None else self.shaped(rows)
        return model, rows if rows is data else rows.prepared(model.prepare)

    def _all_one(self, weights: Any) -> bool:
        """Whether weights change nothing; refuses them where the model or its data can't have them."""
        require(self.weighs, "weights", "fit", f"be left out for {self!r}, whose E-step reads none", "some")
        once = "weights" not in self.given
        require(once, "weights", "fit", "be left out for a model with given='weights', whose data hold them", "both")
        return bool((tensor_of(weights, "The 'weights' argument of fit") == 1).all())

    def parts_of(self, data: Any) -> tuple[Any, ...]:
        """The parts of data in memory, before weights are put behind them."""
        if isinstance(data, TensorDataset):
            return data.tensors
        ok = data is not None and not isinstance(data, (Dataset, DataLoader, Data))
        must = f"be left out for {self!r} unless the data are tensors or arrays: give them as (*data, weights) instead"
        require(ok, "weights", "fit", f"{must}, with given='weights'", type(data).__name__)
        return tuple(data) if isinstance(data, (tuple, list)) else (data,)

    def meet(self, data: Any, batch_size: int | None = None) -> tuple[Self, Data]:
        """The same as `bind`."""
        return self.bind(data, batch_size)

    def read(self, data: Any, batch_size: int | None = None) -> Data:
        """Data in whatever form the user has them, as rows."""
        require(data is not None, "data", "fit", "be given to a latent model", None)
        rows = Data.of(data, batch_size, check_values=False)
        return rows if rows is data else replace(rows, holes=self.missing)

    def blocks(self, data: Any) -> Iterator[Rows]:
        """Rows of other data than those of the fit, whose weights and z may be left out."""
        rows, model = self.read(data), copy.copy(self)
        if len(rows.some(1)) == len(model.parts):
            model.given = ()
        for batch in rows.prepared(model.prepare).blocks(model.block):
            yield model.rows(batch)

    def shaped(self, data: Data) -> Self:
        """A copy of the model in the shapes, the type and the frame of some data."""
        require(data.num_data is not None, "data", "fit", "be given to a latent model", None)
        batch = data.random_rows(self.sample, self.block, stream(0, "frame"))
        self._check_parts(batch)
        shapes = tuple(tuple(t.shape[1:]) for t in batch[: len(self.parts)])
        types = [t.dtype for t in batch[: len(self.parts)] if t.is_floating_point()]
        single = bool(types) and all(dtype == torch.float32 for dtype in types)
        model = self.in_shapes(shapes, torch.float32 if single else torch.float64, batch[0].device)
        rows = model.rows(model.prepare(batch))
        some_weight = rows.weights is None or bool(rows.weights.sum() > 0)
        require(some_weight, "weights", repr(self), "be above 0 for some row", "only zeros")
        model.frame = model.look(rows)
        return model

    def in_shapes(
        self, shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device, **frame: Tensor
    ) -> Self:
        """A copy of the model for rows of these shapes."""
        model = copy.copy(self)
        model.shapes = tuple(tuple(shape) for shape in shapes)
        model.frame = frame
        density = model.density = model.marginal(dtype, device)
        model.layout, model.prior, model.learnt = density.layout, density.prior, density.learnt
        model.dtype, model.device = density.dtype, density.device
        return model

    def marginal(self, dtype: torch.dtype, device: torch.device) -> Density:
        """log p(theta) + sum_n log p(y_n | theta): the density of a model that has shapes, z summed out."""
        assert self.shapes is not None
        return Density(
            params=self.params(*self.shapes),
            log_prior=self.log_prior,
            log_likelihood=self._pointwise_of,
            dtype=dtype,
            device=device,
        )

    def like(self, described: Mapping[str, Any]) -> Self:
        """The model in the shapes that `describe` wrote; itself, if it has shapes."""
        if self.density is not None or "shapes" not in described:
            return self
        return self.in_shapes(described["shapes"], getattr(torch, described["type"]), torch.device("cpu"))

    def prepare(self, batch: Batch) -> Batch:
        """A batch in the model's type, on its device, with its checks."""
        self._check_parts(batch)
        assert self.shapes is not None
        for name, t, shape in zip(self.parts, batch, self.shapes, strict=False):
            must, got = f"have rows of the shape {shape}", tuple(t.shape[1:])
            require(got == shape, name, repr(self), must, f"the shape {got}")
        keep = [*self.whole, *self.given]
        names = [*self.parts, *self.given]
        batch = tuple(t.to(self.device, None if n in keep else self.dtype) for n, t in zip(names, batch, strict=True))
        rows = self.rows(batch)
        for start in range(0, len(rows), CHECKED):
            part = rows.at(slice(start, start + CHECKED))
            self._check_numbers(part, start)
            self.check_rows(part)
        return batch

    def rows(self, batch: Batch, **asked: Any) -> Rows:
        """A batch by the names of its parts."""
        own = len(self.parts)
        others = dict(zip(self.given, batch[own:], strict=True))
        weights = others.get("weights")
        weights = None if weights is None else weights.to(self.dtype)
        return Rows(dict(zip(self.parts, batch, strict=False)), weights, others.get("z"), **asked)

    def weighted_rows(self, batch: Batch, **asked: Any) -> Rows:
        """A batch by the names of its parts, each row counted as often as the data's own weights say too."""
        rows = self.rows(batch, **asked)
        if not isinstance(batch, WeightedBatch):
            return rows
        weights = batch.weights.to(self.device, self.dtype)
        return replace(rows, weights=weights if rows.weights is None else rows.weights * weights)

    def z_shape(self, rows: Rows) -> tuple[tuple[int, ...], str]:
        """The shape of known z, and what has one of them."""
        return (len(rows),), "row"

    def _check_parts(self, batch: Batch) -> None:
        wanted = [*self.parts, *self.given]
        must = f"have {len(wanted)} part{'s' * (len(wanted) > 1)}: {', '.join(wanted)}"
        require(len(batch) == len(wanted), "data", repr(self), must, f"{len(batch)}")

    def _check_numbers(self, rows: Rows, first: int) -> None:
        for name, t in rows.parts.items():
            if t.is_floating_point() and not bool(torch.isfinite(t.sum())):  # the sum: no copy of what is large
                wrong = t.isinf() if self.missing else ~torch.isfinite(t)
                must = "be finite, or NaN where a value is missing" if self.missing else "be finite"
                if bool(wrong.any()):
                    row = first + int(wrong.nonzero()[0, 0])
                    require(False, name, repr(self), must, f"{float(t[wrong][0])} in row {row}")
        n = (len(rows),)
        if rows.weights is not None:
            ok = (
                rows.weights.shape == n and bool(torch.isfinite(rows.weights).all()) and bool((rows.weights >= 0).all())
            )
            require(ok, "weights", repr(self), "be finite numbers from 0, one a row", rows.weights)
        if rows.z is not None:
            shape, each = self.z_shape(rows)
            whole_numbers = rows.z.shape == shape and not rows.z.is_floating_point() and rows.z.dtype != torch.bool
            require(whole_numbers, "z", repr(self), f"be integers, one a {each}, -1 where it is hidden", rows.z)

    # As a density, z summed out.

    def bound(self) -> Density:
        """The density that was made when the model met data."""
        if self.density is None:
            raise InputError(f"{self!r} has no parameters before it has met data: fit it, or call bind(data).")
        return self.density

    @property
    def capabilities(self) -> Capabilities:
        """Hidden variables, which EM needs."""
        return CAPABILITIES

    def start(self, targets: Tensor | None, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Where EM would begin, (*shape, P), as zero is often where all components are the same."""
        alone = targets is not None and len(self.parts) == 1 and not self.given
        rows = Rows({self.parts[0]: targets}) if alone and targets is not None else None
        if rows is None:
            some = self.bound().start(targets, shape or torch.Size([1]), generator)
            return some.reshape(*shape, self.layout.size)
        many = [self.begin(rows, self.starts[0], generator) for _ in range(shape.numel())]
        return torch.stack([self.layout.unconstrain(theta) for theta in many]).reshape(*shape, self.layout.size)

    def log_likelihood(self, w: Tensor, batch: Any, buffers: Mapping[str, Tensor]) -> Tensor:
        """log p(y_n | theta) for each row, times its weight: (*B, P) -> (*B, n)."""
        return self.bound().log_likelihood(w, batch, buffers)

    def log_likelihood_and_grad(
        self, w: Tensor, batch: Any, factor: float | Tensor, buffers: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """sum_n factor_n log p(y_n | theta) and its gradient: (*B, P) -> (*B,), (*B, P)."""
        return self.bound().log_likelihood_and_grad(w, batch, factor, buffers)

    def log_likelihood_sum(self, w: Tensor, batch: Any, weights: Tensor | None = None) -> Tensor:
        """sum_n weights_n log p(y_n | theta) for one vector (P,), differentiable by autograd."""
        return self.bound().log_likelihood_sum(w, batch, weights)

    def trial(self, w: Tensor) -> None:
        """Call `log_prior` once at w (P,), for what it raises."""
        self.bound().trial(w)

    def describe(self) -> dict[str, Any]:
        """What a stored posterior must agree with."""
        return {
            "layout": self.layout.signature(),
            "likelihood": repr(self),
            "network": "",
            "shapes": [list(shape) for shape in self.shapes or ()],
            "type": str(self.dtype).removeprefix("torch."),
        }

    def _pointwise_of(self, theta: Theta, batch: Any) -> Tensor:
        rows = self.rows(batch if isinstance(batch, tuple) else (batch,))
        return rows.counted(self.log_marginal(theta, rows))


def has_latent(model: object) -> TypeIs[Latent]:
    """Whether this is a model with hidden variables, as it declares."""
    return isinstance(model, BaseModel) and model.capabilities.latent


# Over all of the data.


def expect(
    model: Latent, thetas: Sequence[Theta], batches: Iterable[Batch], factor: float = 1.0, **asked: Any
) -> list[Expectation]:
    """The E-step at each theta over some batches, read once: S and the bound in float64, log p(theta) included.

    `factor` is how many rows each row stands for.
    """
    sums: list[dict[str, Tensor]] = [{} for _ in thetas]
    bounds, gaps = [0.0] * len(thetas), [0.0] * len(thetas)
    with torch.no_grad():
        for batch in batches:
            rows = model.weighted_rows(batch, **asked)
            for i, theta in enumerate(thetas):
                found = model.e_step(theta, rows)
                bounds[i] += float(rows.counted(found.bound.double()).sum())
                gaps[i] += 0.0 if found.gap is None else float(rows.counted(found.gap.double()).sum())
                for name, t in found.statistics.items():
                    sums[i][name] = sums[i][name] + t.double() if name in sums[i] else t.double()
        priors = [float(model.log_prior(theta)) for theta in thetas]
    number = lambda x: torch.tensor(x, dtype=torch.float64)  # noqa: E731
    return [
        Expectation(
            {name: factor * t for name, t in sums[i].items()},
            number(factor * bounds[i] + priors[i]),
            number(factor * gaps[i]),
        )
        for i in range(len(thetas))
    ]


def score(model: Latent, theta: Theta, data: Data) -> Tensor:
    """The gradient of log p(y | theta) p(theta) in unconstrained coordinates, (P,), by Fisher's identity: one "
    "E-step.
    """
    (found,) = expect(model, [theta], data.blocks(model.block))
    return _slope(model, found.statistics, model.layout.unconstrain(theta))[1]


def climbed(model: Latent, statistics: Mapping[str, Tensor], theta: Theta, steps: int) -> Theta:
    """A theta where Q is higher, by so many iterations of L-BFGS in unconstrained coordinates; the first is "
    "along the score.
    """
    begin = model.layout.unconstrain(theta).double()
    u = begin.clone().requires_grad_()
    scale = 1 / max(1.0, float(_slope(model, statistics, begin)[1].abs().max()))  # Q grows with N, L-BFGS expects unit
    optimizer = torch.optim.LBFGS(
        [u],
        max_iter=steps,
        max_eval=25 * steps,
        tolerance_grad=1e-12,
        tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        value, gradient = _slope(model, statistics, u.detach())
        u.grad = -scale * gradient
        return -scale * value

    optimizer.step(closure)
    reached = {name: t.to(model.dtype) for name, t in model.layout.constrain(u.detach()).items()}
    risen = _slope(model, statistics, u)[0] > _slope(model, statistics, begin)[0]
    return reached if bool(risen) and model.allows(reached) else theta


def _slope(model: Latent, statistics: Mapping[str, Tensor], u: Tensor) -> tuple[Tensor, Tensor]:
    """Q + log p(theta) and its gradient at unconstrained coordinates u (P,)."""
    leaf = u.detach().requires_grad_()
    with torch.enable_grad():
        theta = model.layout.constrain(leaf)
        value = model.complete(theta, statistics) + model.log_prior(theta)
        (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), gradient


def warn_of_silent(count: int, owner: str, each: str = "row") -> None:
    """Say how many rows have no value at all."""
    if count:
        which = f"{count} {each}s have no value, and say" if count > 1 else f"1 {each} has no value, and says"
        warn(f"{which} nothing of {owner}.")
