"""Latent: a model with hidden variables, written as its E-step and its complete-data log-likelihood.

For data y, hidden z and parameters theta, and any distribution q of z, Jensen's inequality gives

    log p(y | theta)  =  L(q, theta) + KL(q || p(z | y, theta))  >=  L(q, theta)

    L(q, theta)       =  E_q[log p(y, z | theta)] + H(q)         =  Q + H

EM maximises L in turns (Dempster, Laird and Rubin, 1977; in this form Neal and Hinton, 1998). The E-step sets q to
p(z | y, theta), where L equals the log-likelihood; the M-step increases Q over theta. Q depends on the data only
through expected statistics S = E_q[sum_n s(y_n, z_n)], which are sums over rows:

    Q(theta, theta_t) = complete(theta, S(theta_t))

So a model consists of two equations, `e_step` (S and the bound, for a block of rows) and `complete` (Q from S). They
suffice for full passes, blocks streamed from disk, minibatches (S is averaged over steps), weighted rows (each row's
statistics are multiplied by its weight), missing values and known z. For a model without an `m_step`, L-BFGS maximises
Q, which is generalised EM. At q = p(z | y, theta) the KL divergence and its gradient are zero, so Fisher's identity
holds,

    d/dtheta log p(y | theta) = d/dtheta complete(theta, S)   with S computed at theta

A latent model that is bound to data also has a `Density` with z summed out, so MAP, Laplace and MCMC can fit it.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from priory.core.data import Batch, Data, WeightedBatch, check_weights, read_weights
from priory.core.errors import InputError, require, warn
from priory.core.flat import Param
from priory.core.streams import stream
from priory.latent.expectation import lbfgs_steps
from priory.latent.rows import Expectation, Generated, Rows, Theta
from priory.models.base import BaseModel, Capabilities
from priory.models.density import Density

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from typing_extensions import TypeIs

ROWS_PER_CHECK = 1 << 16  # rows that are checked together, so that data on disk are never in memory at once
CAPABILITIES = Capabilities(latent=True)
M_STEP_ITERATIONS = 20  # of L-BFGS in an M-step without a closed form


class Latent(BaseModel):
    """Base class of models with hidden variables z.

    A subclass implements `params`, `e_step` and `complete`. Its constructor takes the options; the shapes are set when
    the model is bound to data, which `fit` does.

    Attributes:
        parts: Names of the tensors that the data consist of.
        starts: Names of the ways to initialise theta, the default first.
        sample: Maximal number of rows that the shapes, the frame and the initialisation are computed from (about).
        whole: Parts that keep their own type, such as lengths and categories.
        missing: Whether NaN marks a missing value.
        labels: Whether the E-step uses known z, `rows.z`.
        weighs: Whether the E-step uses weights, `rows.weights`.
        tempers: Whether the E-step uses a temperature, `rows.temperature`.
        samples: Whether the E-step can replace q by draws, `rows.draws`.
        sequences: Whether a row is a sequence, of any length.
        block: Rows per call of `e_step`.
        exact: Whether the E- and M-step never decrease the bound.
        given: The parts that follow the model's parts in the data: "weights", one per row, or "z", integers, -1 where
            z is hidden.
        shapes: The shape of one row of each part; None before the model is bound to data.
        density: The density of theta with z summed out; None before the model is bound to data.
        frame: The tensors that `look` returned, such as centres and scales.
    """

    parts: ClassVar[tuple[str, ...]] = ("y",)
    starts: ClassVar[tuple[str, ...]] = ("random",)
    sample: ClassVar[int] = 1 << 14
    whole: ClassVar[tuple[str, ...]] = ()
    missing: ClassVar[bool] = False
    labels: ClassVar[bool] = False
    weighs: ClassVar[bool] = False
    tempers: ClassVar[bool] = False
    samples: ClassVar[bool] = False
    sequences: ClassVar[bool] = False

    block: int = 4096
    exact: bool = True
    given: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] | None = None
    density: Density | None = None
    frame: Mapping[str, Tensor]

    def __init__(self) -> None:
        """Make a model without options."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    # Methods that a subclass must implement.

    def params(self, *shapes: tuple[int, ...]) -> dict[str, Param]:
        """Declare theta: the shape and support of each parameter.

        Args:
            *shapes: The shape of one row of each part.

        Returns:
            The parameters by name.
        """
        raise NotImplementedError

    def e_step(self, theta: Theta, rows: Rows) -> Expectation:
        """Compute q(z) = p(z | y, theta) for a block of rows.

        Args:
            theta: The parameters by name.
            rows: The block of rows.

        Returns:
            The expected statistics of q, summed over rows, and log p(y_n | theta) per row.
        """
        raise NotImplementedError

    def complete(self, theta: Theta, statistics: Mapping[str, Tensor]) -> Tensor:
        """Return Q = E_q[log p(y, z | theta)], differentiable by autograd.

        Args:
            theta: The parameters by name.
            statistics: The expected statistics of q, as `e_step` returns them.

        Returns:
            Q, a scalar.
        """
        raise NotImplementedError

    # Methods that a subclass may override.

    def m_step(self, statistics: Mapping[str, Tensor], theta: Theta) -> Theta:
        """Return the theta that maximises `complete` plus `log_prior`, or one that increases it. Default: L-BFGS.

        Args:
            statistics: The expected statistics of q.
            theta: The current parameters.

        Returns:
            The new parameters.
        """
        return lbfgs_steps(self, statistics, theta, M_STEP_ITERATIONS)

    def log_prior(self, theta: Theta) -> Tensor:
        """Return the part of the bound that is not a sum over rows: log p(theta), or -KL(q(theta) || p(theta))."""
        return next(iter(theta.values())).new_zeros(())

    def begin(self, rows: Rows, how: str, generator: torch.Generator) -> Theta:
        """Initialise theta from some rows, in one of the ways listed in `starts`."""
        u = torch.rand(self.layout.size, generator=generator, dtype=self.dtype, device=self.device)
        return self.layout.constrain(2 * u - 1)

    def look(self, rows: Rows) -> dict[str, Tensor]:
        """Return the tensors that the model keeps of some rows before a fit, such as their centre and scale."""
        return {}

    def check_rows(self, rows: Rows) -> None:
        """Raise an error for rows that are impossible under the model."""

    def allows(self, theta: Theta) -> bool:
        """Whether theta satisfies the model's bounds, such as the floor of a variance."""
        return True

    def problems(self, theta: Theta, statistics: Mapping[str, Tensor]) -> list[str]:
        """Return problems of a fit that ended at theta, one sentence each, for warnings and the status."""
        return []

    def log_marginal(self, theta: Theta, rows: Rows) -> Tensor:
        """Return log p(y_n | theta) per row, (n,), differentiable by autograd."""
        return self.e_step(theta, rows).log_likelihood

    def responsibilities(self, theta: Theta, rows: Rows) -> Tensor:
        """Return q(z_n = k), (n, ..., K), for a categorical z."""
        raise InputError(f"{self!r} has no responsibilities: its z is not one of K components.")

    def most_likely(self, theta: Theta, rows: Rows) -> Tensor:
        """Return the most probable z of each row, (n, ...)."""
        return self.responsibilities(theta, rows).argmax(-1)

    def hidden(self, theta: Theta, rows: Rows) -> dict[str, Tensor]:
        """Return the posterior of z given y, as tensors by name; for mixtures the responsibilities."""
        return {"responsibilities": self.responsibilities(theta, rows)}

    def generate(self, theta: Theta, n: int, generator: torch.Generator, steps: int | None = None) -> Generated:
        """Draw n rows from p(y, z | theta); for sequences, `steps` is their length (default: that of the data)."""
        raise InputError(f"{self!r} can't make rows: it has no 'generate'.")

    def predictive(self, theta: Theta, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return p(y | x, theta) as a mixture of Gaussians: weights, means and variances, each (n, K)."""
        raise InputError(f"{self!r} has no inputs to predict from: use predict_labels or log_likelihood.")

    # Binding the model to data.

    def bind(
        self, data: Any, batch_size: int | None = None, weights: Any = None, num_data: int | None = None
    ) -> tuple[Self, Data]:
        """Bind the model to data: set its shapes and type, and convert the data.

        Args:
            data: The parts of the rows, as tensors, arrays, a Dataset or a DataLoader.
            batch_size: Rows per minibatch.
            weights: One weight >= 0 per row, (N,), which becomes a part of the rows as with `given="weights"`.
                Default: None, every row counts once.
            num_data: Number of rows, if it can't be read from the data. Default: None.

        Returns:
            The bound model, with its density, and the rows.
        """
        counts = None if weights is None else self._row_weights(weights, data)
        if counts is not None:
            model = copy.copy(self)
            model.given = (*self.given, "weights")
            return model.bind((*self.parts_of(data), counts), batch_size)
        rows = self.read(data, batch_size, num_data)
        model = self if self.density is not None else self.shaped(rows)
        return model, rows if rows is data else rows.prepared(model.prepare)

    def _row_weights(self, weights: Any, data: Any) -> Tensor | None:
        """Return the weights as a tensor (N,), or None if all are 1; raise an error if there can't be weights."""
        require(
            self.weighs, "weights", "fit", f"be left out for {self!r}, whose E-step reads none", type(weights).__name__
        )
        once = "weights" not in self.given
        require(once, "weights", "fit", "be left out for a model with given='weights', whose data hold them", "both")
        return read_weights(weights, self.read(self.parts_of(data)))

    def parts_of(self, data: Any) -> tuple[Any, ...]:
        """Return the parts of data in memory, before weights are appended."""
        if isinstance(data, TensorDataset):
            return data.tensors
        ok = data is not None and not isinstance(data, (Dataset, DataLoader, Data))
        must = f"be left out for {self!r} unless the data are tensors or arrays: give them as (*data, weights) instead"
        require(ok, "weights", "fit", f"{must}, with given='weights'", type(data).__name__)
        return tuple(data) if isinstance(data, (tuple, list)) else (data,)

    def meet(self, data: Any, batch_size: int | None = None) -> tuple[Self, Data]:
        """Bind the model to data; an alias of `bind`."""
        return self.bind(data, batch_size)

    def read(self, data: Any, batch_size: int | None = None, num_data: int | None = None) -> Data:
        """Read data in any supported form as rows."""
        require(data is not None, "data", "fit", "be given to a latent model", None)
        rows = Data.of(data, batch_size, check_values=False, num_data=num_data)
        unequal = rows.loader_rows is not None and rows.loader_rows.weights is not None
        must = f"read all rows equally often for {self!r}, whose E-step reads no weights"
        require(self.weighs or not unequal, "data", "fit", must, "a DataLoader that prefers some of them")
        return rows if rows is data else replace(rows, holes=self.missing)

    def blocks(self, data: Any) -> Iterator[Rows]:
        """Iterate over blocks of new data, in which weights and z may be left out."""
        rows, model = self.read(data), copy.copy(self)
        if len(rows.some(1)) == len(model.parts):
            model.given = ()
        for batch in rows.prepared(model.prepare).blocks(model.block):
            yield model.rows(batch)

    def shaped(self, data: Data) -> Self:
        """Return a copy of the model with the shapes, the type and the frame of some data."""
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
        """Return a copy of the model for rows of these shapes."""
        model = copy.copy(self)
        model.shapes = tuple(tuple(shape) for shape in shapes)
        model.frame = frame
        density = model.density = model.marginal(dtype, device)
        model.layout, model.prior, model.learnt = density.layout, density.prior, density.learnt
        model.dtype, model.device = density.dtype, density.device
        return model

    def marginal(self, dtype: torch.dtype, device: torch.device) -> Density:
        """Return the density log p(theta) + sum_n log p(y_n | theta), with z summed out."""
        assert self.shapes is not None
        return Density(
            params=self.params(*self.shapes),
            log_prior=self.log_prior,
            log_likelihood=self._pointwise_of,
            dtype=dtype,
            device=device,
        )

    def like(self, described: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> Self:
        """Return the model in the shapes that `describe` recorded; itself if it has shapes already."""
        if self.density is not None or "shapes" not in described:
            return self
        return self.in_shapes(described["shapes"], getattr(torch, described["type"]), torch.device("cpu"))

    def prepare(self, batch: Batch) -> Batch:
        """Check a batch and convert it to the model's type and device."""
        self._check_parts(batch)
        assert self.shapes is not None
        for name, t, shape in zip(self.parts, batch, self.shapes, strict=False):
            must, got = f"have rows of the shape {shape}", tuple(t.shape[1:])
            require(got == shape, name, repr(self), must, f"the shape {got}")
        if "weights" in self.given:
            check_weights(batch[len(self.parts) + self.given.index("weights")], len(batch[0]), repr(self))
        keep = [*self.whole, *self.given]
        names = [*self.parts, *self.given]
        batch = tuple(t.to(self.device, None if n in keep else self.dtype) for n, t in zip(names, batch, strict=True))
        rows = self.rows(batch)
        for start in range(0, len(rows), ROWS_PER_CHECK):
            part = rows.at(slice(start, start + ROWS_PER_CHECK))
            self._check_numbers(part, start)
            self.check_rows(part)
        return batch

    def rows(self, batch: Batch, **asked: Any) -> Rows:
        """Return a batch as `Rows`, with its parts by name."""
        own = len(self.parts)
        others = dict(zip(self.given, batch[own:], strict=True))
        weights = others.get("weights")
        weights = None if weights is None else weights.to(self.dtype)
        return Rows(dict(zip(self.parts, batch, strict=False)), weights, others.get("z"), **asked)

    def weighted_rows(self, batch: Batch, **asked: Any) -> Rows:
        """Return a batch as `Rows`, with the weights of the data multiplied into those of the rows."""
        rows = self.rows(batch, **asked)
        if not isinstance(batch, WeightedBatch):
            return rows
        weights = batch.weights.to(self.device, self.dtype)
        return replace(rows, weights=weights if rows.weights is None else rows.weights * weights)

    def z_shape(self, rows: Rows) -> tuple[tuple[int, ...], str]:
        """Return the shape of known z, and the noun for the unit that has one z: "row" or "step"."""
        return (len(rows),), "row"

    def _check_parts(self, batch: Batch) -> None:
        wanted = [*self.parts, *self.given]
        must = f"have {len(wanted)} part{'s' * (len(wanted) > 1)}: {', '.join(wanted)}"
        require(len(batch) == len(wanted), "data", repr(self), must, f"{len(batch)}")

    def _check_numbers(self, rows: Rows, first: int) -> None:
        for name, t in rows.parts.items():
            if t.is_floating_point() and not bool(torch.isfinite(t.sum())):  # the sum needs no copy of a large tensor
                wrong = t.isinf() if self.missing else ~torch.isfinite(t)
                must = "be finite, or NaN where a value is missing" if self.missing else "be finite"
                if bool(wrong.any()):
                    row = first + int(wrong.nonzero()[0, 0])
                    require(False, name, repr(self), must, f"{float(t[wrong][0])} in row {row}")
        if rows.z is not None:
            shape, each = self.z_shape(rows)
            whole_numbers = rows.z.shape == shape and not rows.z.is_floating_point() and rows.z.dtype != torch.bool
            require(whole_numbers, "z", repr(self), f"be integers, one per {each}, -1 where it is hidden", rows.z)

    # As a density, z summed out.

    def bound(self) -> Density:
        """Return the density of the bound model."""
        if self.density is None:
            raise InputError(f"{self!r} has no parameters before it is bound to data: fit it, or call bind(data).")
        return self.density

    @property
    def capabilities(self) -> Capabilities:
        """A model with hidden variables, which EM needs."""
        return CAPABILITIES

    def start(self, targets: Tensor | None, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Return starting vectors, (*shape, P): EM's initialisation, because at zero all components are often equal."""
        alone = targets is not None and len(self.parts) == 1 and not self.given
        rows = Rows({self.parts[0]: targets}) if alone and targets is not None else None
        if rows is None:
            some = self.bound().start(targets, shape or torch.Size([1]), generator)
            return some.reshape(*shape, self.layout.size)
        many = [self.begin(rows, self.starts[0], generator) for _ in range(shape.numel())]
        return torch.stack([self.layout.unconstrain(theta) for theta in many]).reshape(*shape, self.layout.size)

    def log_likelihood(self, w: Tensor, batch: Any, buffers: Mapping[str, Tensor]) -> Tensor:
        """Return log p(y_n | theta) for each row, times its weight: (*B, P) -> (*B, n)."""
        return self.bound().log_likelihood(w, batch, buffers)

    def log_likelihood_and_grad(
        self, w: Tensor, batch: Any, factor: float | Tensor, buffers: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return sum_n factor_n log p(y_n | theta) and its gradient: (*B, P) -> (*B,), (*B, P)."""
        return self.bound().log_likelihood_and_grad(w, batch, factor, buffers)

    def log_likelihood_sum(self, w: Tensor, batch: Any, weights: Tensor | None = None) -> Tensor:
        """Return sum_n weights_n log p(y_n | theta) for one vector (P,), differentiable by autograd."""
        return self.bound().log_likelihood_sum(w, batch, weights)

    def trial(self, w: Tensor) -> None:
        """Call `log_prior` once at w (P,), so that its errors surface."""
        self.bound().trial(w)

    def describe(self) -> dict[str, Any]:
        """Return the properties that must match those of a stored posterior."""
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


def warn_of_silent(count: int, owner: str, each: str = "row") -> None:
    """Warn about rows without any value."""
    if count:
        which = f"{count} {each}s have no value, and say" if count > 1 else f"1 {each} has no value, and says"
        warn(f"{which} nothing about {owner}.")
