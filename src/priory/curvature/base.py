"""Curvature of the log-likelihood at one vector w, and the Gaussian that it gives with the precision of a prior.

    H = sum_n J_n' L_n J_n          p x p, in nats for all the data, without temperature or prior
    Q = scale H + diag(precision),  the Gaussian is N(0, Q^-1)

J_n (C, p) is the Jacobian of the C outputs at datum n and L_n (C, C) the Fisher information of the likelihood in the
outputs. There are four kinds of H:

    ggn          the generalised Gauss-Newton matrix above (Schraudolph 2002)
    fisher       with labels drawn from the model; its mean is "ggn" (Martens 2020, "New Insights and Perspectives on
                 the Natural Gradient Method")
    empirical    with the observed labels; not a Fisher information (Kunstner et al. 2019)
    hessian      -d2 log p(D|w) / dw2, the only one that may be indefinite

The other files of this package each implement one structure of H.
"""

from __future__ import annotations

import fnmatch
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from priory.core.errors import InputError, is_integer, require
from priory.models.base import has_network
from priory.models.model import Model
from priory.network.skeleton import MEMORY_LIMIT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import nn

    from priory.core.data import Batch, Data
    from priory.curvature.jacobian_parts import JacobianRows
    from priory.models.base import BaseModel
    from priory.models.target import Target

Kind = Literal["ggn", "fisher", "empirical", "hessian"]
KINDS: tuple[Kind, ...] = ("ggn", "fisher", "empirical", "hessian")
STRUCTURES: dict[str, type[Curvature]] = {}  # by name, such as "kron"
BLOCK_ROWS = 1024  # rows read at a time


# Which coordinates.


@dataclass(frozen=True, eq=False)
class Selection:
    """The p coordinates of w that a curvature is over.

    Attributes:
        names: The parameters with selected coordinates, in the order of the layout.
        places: The coordinates of w, ascending, (p,), long.
        whole: Whether every coordinate of each of these parameters is selected.
        sizes: The number of selected coordinates of each parameter.
    """

    names: tuple[str, ...]
    places: Tensor
    whole: bool
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of coordinates, p."""
        return len(self.places)

    def spans(self) -> dict[str, slice]:
        """Return the slice of each parameter among the p coordinates."""
        found, start = {}, 0
        for name, size in zip(self.names, self.sizes, strict=True):
            found[name] = slice(start, start + size)
            start += size
        return found


def select(model: BaseModel, over: Any = "all", inputs: Batch | None = None) -> Selection:
    """Select coordinates of a model's parameter vector; for a `Model`, of its network.

    Args:
        model: The model.
        over: "all", "last" (the last layer), a list of names or patterns of names, or a LongTensor of coordinates.
            Default: "all".
        inputs: Inputs on which "last" runs the network to find the layer called last; not needed for a plain sequence
            of layers. Default: None.

    Returns:
        The `Selection`.

    Raises:
        InputError: If a name matches no parameter, or the network has no single last layer.

    Example:
        >>> from torch import nn
        >>> from priory.likelihoods import Gaussian
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        >>> select(Model(net, Gaussian()), "last").names
        ('2.weight', '2.bias')
    """
    names = tuple(model.network.params) if has_network(model) else model.layout.names
    if isinstance(over, Tensor):
        return _of_places(model, names, over)
    if isinstance(over, str) and over == "last":
        if not has_network(model):
            raise InputError(
                "The 'over' argument of Laplace must be 'all' or names for a Density, which has no layers."
            )
        return _of_names(model, last_layer(model, inputs))
    if isinstance(over, str) and over == "all":
        return _of_names(model, names)
    strings = isinstance(over, (list, tuple)) and len(over) > 0 and all(isinstance(name, str) for name in over)
    must = "be 'all', 'last', a list of names or patterns of them, or a LongTensor of coordinates"
    require(strings, "over", "Laplace", must, repr(over))
    unmatched = [pattern for pattern in over if not fnmatch.filter(names, pattern)]
    require(not unmatched, "over", "Laplace", f"match parameters among {', '.join(names)}", unmatched)
    return _of_names(model, [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in over)])


def _of_names(model: BaseModel, names: tuple[str, ...] | list[str]) -> Selection:
    wanted = set(names)
    blocks = [block for block in model.layout.blocks if block.name in wanted]
    places = torch.cat([torch.arange(block.start, block.stop, device=model.device) for block in blocks])
    sizes = tuple(block.stop - block.start for block in blocks)
    return Selection(tuple(block.name for block in blocks), places, True, sizes)


def _of_places(model: BaseModel, names: tuple[str, ...], over: Tensor) -> Selection:
    top = model.layout[names[-1]].stop
    ok = over.dtype == torch.long and over.ndim == 1 and over.numel() > 0
    ok = ok and int(over.min()) >= 0 and int(over.max()) < top
    require(ok, "over", "Laplace", f"hold integers from 0 to {top - 1} as a LongTensor of coordinates", over)
    places = over.unique().to(model.device)  # sorted
    require(len(places) == len(over), "over", "Laplace", "name each coordinate once", f"{len(over)} with repetitions")
    blocks = [model.layout[name] for name in names]
    counts = {b.name: int(((places >= b.start) & (places < b.stop)).sum()) for b in blocks}
    touched = [b for b in blocks if counts[b.name]]
    whole_ones = all(counts[b.name] == b.stop - b.start for b in touched)
    sizes = tuple(counts[b.name] for b in touched)
    return Selection(tuple(b.name for b in touched), places, whole_ones, sizes)


# The last layer.


def last_layer(model: Model, inputs: Batch | None = None) -> list[str]:
    """Return the parameters of the last layer: the module called last, through which all others reach the output."""
    skeleton = model.network.skeleton
    names = {id(p): name for name, p in skeleton.named_parameters() if p.requires_grad and p.numel()}
    if inputs is None:
        layers = list(_sequence(skeleton))
        last = next((m for m in reversed(layers) if any(id(p) in names for p in m.parameters())), None)
        if last is None or next(last.children(), None) is not None:
            raise InputError(
                "The 'over' argument of Laplace must be names of parameters for a network that is not a plain "
                "sequence of layers, unless inputs show which layer it calls last, got 'last' without inputs."
            )
        return [names[id(p)] for p in last.parameters() if id(p) in names]
    return _seen_last(model, tuple(x[:2] for x in inputs), names)


def _sequence(net: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of a plain, possibly nested sequence, in the order in which they run."""
    if type(net) is torch.nn.Sequential:
        for layer in net:
            yield from _sequence(layer)
    else:
        yield net


def _seen_last(model: Model, inputs: Batch, names: Mapping[int, str]) -> list[str]:
    """Find the last layer by two runs: one records the order of the modules, one detaches the last module's output."""
    network = model.network
    called: list[nn.Module] = []
    _watch(model, inputs, network.skeleton.modules(), lambda module, _args, _out: called.append(module))
    params_of = _owners(network.skeleton, set(called), names)
    owners = [module for module in called if params_of.get(module)]
    if not owners:
        raise InputError("The 'over' argument of Laplace must be names of parameters: no layer of the network has any.")
    last, last_params = owners[-1], params_of[owners[-1]]
    inside = [m for m in owners if m is not last and m in set(last.modules())]
    cut = lambda _module, _args, out: tree_map_only(Tensor, lambda t: t.detach().clone(), out)  # noqa: E731
    outputs = _watch(model, inputs, [last], cut)
    others = {
        name: p for name, p in network.skeleton.named_parameters() if name in network.params and name not in last_params
    }
    reached: list[str] = [name for m in inside for name in params_of[m]]
    if outputs.requires_grad and others:
        found = torch.autograd.grad(outputs.sum(), list(others.values()), allow_unused=True)
        reached += [name for name, g in zip(others, found, strict=True) if g is not None]
    if reached:
        raise InputError(
            "The 'over' argument of Laplace must be names of parameters for a network without one last layer: "
            f"its output comes from {', '.join(last_params)}, but also from {', '.join(reached)} beside it, got 'last'."
        )
    return last_params


def _owners(root: nn.Module, called: set[nn.Module], names: Mapping[int, str]) -> dict[nn.Module, list[str]]:
    """Return the parameters of each module; a module that is never called counts to its nearest called parent."""
    params_of: dict[nn.Module, list[str]] = {}

    def visit(module: nn.Module, around: nn.Module) -> None:
        around = module if module in called else around
        names_here = params_of.setdefault(around, [])
        names_here += [
            name for p in module._parameters.values() if (name := names.get(id(p))) and name not in names_here
        ]
        for child in module.children():
            visit(child, around)

    visit(root, root)
    return params_of


def _watch(model: Model, inputs: Batch, modules: Any, hook: Callable[..., Any]) -> Tensor:
    """Run one pass in evaluation mode with a hook on some modules, and return the outputs."""
    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        with torch.enable_grad():
            return model.network(model.network.initial, inputs, {}, train=False)
    finally:
        for handle in handles:
            handle.remove()


# One pass over the data.


def check_kind(kind: str, samples: int, generator: torch.Generator | None) -> None:
    """Check the kind of curvature, the number of samples and the generator."""
    require(kind in KINDS, "curvature", "Laplace", f"be among {', '.join(KINDS)}", repr(kind))
    require(is_integer(samples, 1), "samples", "Laplace", "be an integer >= 1", repr(samples))
    need = kind == "fisher" and generator is None
    require(not need, "generator", "Laplace", "be a torch.Generator for the sampled Fisher", None)


def check_curvature(values: Tensor) -> None:
    """Raise InputError for a curvature with NaN or infinity."""
    finite = bool(torch.isfinite(values).all())
    require(finite, "curvature", "Laplace", "be finite at the weights", "NaN or infinity: the fit may have diverged")


@dataclass(frozen=True, eq=False)
class Pass:
    """The inputs from which a pass over the data computes H at w, with the network in evaluation mode.

    Args:
        target: The target, whose log-likelihood is differentiated.
        w: The vector, (P,).
        data: The rows.
        selection: The p coordinates that H is over. Default: all of the network's.
        kind: "ggn", "fisher", "empirical" or "hessian". Default: "ggn".
        samples: Labels drawn per row for "fisher". Default: 1.
        generator: Generator of these labels. Default: None.
        buffers: Buffers that training wrote, such as running means. Default: None.
        limit: Bytes held at a time; rows are read in chunks of this size. Default: 512 MiB.
    """

    target: Target
    w: Tensor
    data: Data
    selection: Selection = None  # pyright: ignore[reportAssignmentType] - set below
    kind: Kind = "ggn"
    samples: int = 1
    generator: torch.Generator | None = None
    buffers: Mapping[str, Tensor] | None = None
    limit: int = MEMORY_LIMIT

    def __post_init__(self) -> None:
        check_kind(self.kind, self.samples, self.generator)
        self.target.network_model("Curvature")
        if self.selection is None:
            object.__setattr__(self, "selection", select(self.target.model))

    def roots(self) -> Roots:
        """Return the columns whose outer products sum to H."""
        return Roots(self.target, self.w, self.kind, self.samples, self.generator)


@dataclass(frozen=True, eq=False)
class Roots:
    """The columns s_c of one kind of curvature: H = sum_n sum_c (J_n' s_cn)(J_n' s_cn)'.

    They are the exact roots of L_n, or the scores at drawn or observed labels, times the square root of the weight of
    the row.
    """

    target: Target
    w: Tensor
    kind: Kind
    samples: int = 1
    generator: torch.Generator | None = None

    def count(self, rest: torch.Size) -> int:
        """Return C, the largest number of columns for a datum with outputs of this shape."""
        return {"ggn": rest.numel(), "fisher": self.samples, "empirical": 1}[self.kind]

    def __call__(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the columns (C, n, *rest) at arranged outputs (n, *rest) of rows with these weights (n,)."""
        columns = self._unweighted(outputs, targets)
        return columns if weights is None else columns * weights.sqrt().view(-1, *[1] * (outputs.ndim - 1))

    def _unweighted(self, outputs: Tensor, targets: Tensor) -> Tensor:
        model = self.target.network_model("Curvature")
        likelihood, learnt = model.likelihood, model.learnt_at(self.w)
        if self.kind == "ggn":
            return likelihood.roots(outputs, learnt)
        if self.kind == "empirical":
            return likelihood.score(outputs, targets, learnt)[None]
        assert self.generator is not None
        drawn = [likelihood.draw(outputs, learnt, self.generator) for _ in range(self.samples)]
        return torch.stack([likelihood.score(outputs, y, learnt) for y in drawn]) / math.sqrt(self.samples)


# The interface of a structure.


class Curvature(ABC):
    """H over the p coordinates of a selection, in one structure."""

    structure: ClassVar[str]  # the name that selects it, such as "kron"
    selection: Selection

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "structure" in vars(cls):
            STRUCTURES[cls.structure] = cls

    @classmethod
    @abstractmethod
    def of(cls, given: Pass) -> Curvature:
        """Compute H in one or a few passes over the data; subclasses may take further options."""

    @abstractmethod
    def gaussian(self, precision: Tensor, scale: float = 1.0) -> PrecisionGaussian:
        """Return N(0, (scale H + diag(precision))^-1) for a precision (p,)."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """Return the diagonal of H, (p,)."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Return H as a matrix, (p, p), for small problems."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to store in a file."""

    def to_json(self) -> dict[str, Any]:
        """Return JSON options to store beside the tensors, which `of_tensors` receives."""
        return {}

    @classmethod
    @abstractmethod
    def of_tensors(cls, selection: Selection, tensors: Mapping[str, Tensor], **options: Any) -> Curvature:
        """Restore the curvature from stored tensors and options."""

    def notes(self) -> list[str]:
        """Return notes on parts that are approximated more coarsely than the structure suggests."""
        return []

    def checked(self, precision: Tensor, scale: float) -> tuple[Tensor, float]:
        """Check the arguments of `gaussian`, and return them."""
        p, owner = self.selection.size, type(self).__name__
        shaped = isinstance(precision, Tensor) and tuple(precision.shape) == (p,)
        got = tuple(precision.shape) if isinstance(precision, Tensor) else type(precision).__name__
        require(shaped, "precision", owner, f"be a tensor of {p} numbers", got)
        low = float(precision.min())
        finite = math.isfinite(float(precision.sum())) and low >= 0
        require(finite, "precision", owner, "hold finite numbers >= 0", low)
        require(0 < scale < math.inf, "scale", owner, "be a positive number", scale)
        return precision, float(scale)


class PrecisionGaussian(ABC):
    """N(0, Q^-1) over p coordinates, given by its precision Q."""

    log_det: Tensor  # log det Q, float64, ()

    @abstractmethod
    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """Return n draws, (n, p)."""

    @abstractmethod
    def variance(self) -> Tensor:
        """Return the diagonal of Q^-1, (p,)."""

    @abstractmethod
    def solve(self, v: Tensor) -> Tensor:
        """Return Q^-1 v for v (..., p)."""

    @abstractmethod
    def quadratic(self, v: Tensor) -> Tensor:
        """Return v' Q v for v (..., p), (...)."""

    @abstractmethod
    def output_covariance(self, rows: JacobianRows) -> Tensor:
        """Return J Q^-1 J' for each datum, (n, C, C)."""
