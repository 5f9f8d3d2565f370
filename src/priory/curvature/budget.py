"""Memory and time of a Laplace approximation, estimated from shapes before anything is allocated.

    diag      p numbers                    C backward passes
    full      p^2                          N C p^2 for the sum (N p^2 / 2 of one layer), p^3 / 3 for the factor
    kron      sum of in^2 + out^2          N T (in^2 + C out^2) per layer, 10 (in^3 + out^3) for its eigenvectors
    lowrank   p r                          4 r products with a vector

for p weights, N data, C outputs (sampled labels for a sampled Fisher), T positions of a layer and the rank r. If the
evidence tunes the prior or a noise, each of about 30 updates factorises Q and computes its variances: 4 p^3 / 3 and two
more matrices for full, 6 p r^2 for lowrank; for diag and kron this is small compared with the pass.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from priory.core.errors import InputError
from priory.curvature import Selection, select
from priory.curvature.lowrank import DEFAULT_RANK, EXTRA_DIRECTIONS
from priory.models.base import has_network
from priory.models.model import Model
from priory.network.skeleton import tensors

if TYPE_CHECKING:
    from priory.core.data import Batch, Data
    from priory.models.base import BaseModel

MAX_DENSE_BLOCK = 1024  # coordinates of a layer without a Kronecker rule, up to which its exact block is kept
KRONECKER_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
FLOAT64_BYTES = 8
TUNING_UPDATES = 30  # typical number until the evidence converges


@dataclass(frozen=True)
class Need:
    """Memory and time of one structure.

    Attributes:
        memory: Memory, in bytes.
        epochs: Time, in epochs of plain training (a forward and a backward pass over the data).
    """

    memory: int
    epochs: float

    def __str__(self) -> str:
        return f"{in_bytes(self.memory)} and the time of {self.epochs:.2g} epochs"


@dataclass(frozen=True)
class Budget:
    """Estimated memory and time of each structure, from shapes alone; made by `Laplace.plan`.

    The memory is that of the curvature and its factors while the posterior is computed. The pass over the data needs up
    to 512 MiB in addition.

    Attributes:
        needs: The `Need` of each structure, by "structure" or "over/structure".
        chosen: The key of the structure that the method uses.
        limit: Limit on the memory, in bytes.
    """

    needs: dict[str, Need]
    chosen: str
    limit: int

    @property
    def fits(self) -> bool:
        """Whether the chosen structure stays under the limit."""
        return self.needs[self.chosen].memory <= self.limit

    @property
    def advice(self) -> str | None:
        """The chosen structure if it fits, otherwise the first one that does, or None."""
        within = [name for name, need in self.needs.items() if need.memory <= self.limit]
        return self.chosen if self.fits else next(iter(within), None)

    def __str__(self) -> str:
        return f"{', '.join(f'{name}: {need}' for name, need in self.needs.items())}; {self._use()}."

    def refuse(self) -> None:
        """Raise InputError if the chosen structure exceeds the limit, with the needs of all structures."""
        if not self.fits:
            needs = ", ".join(f"{name}: {in_bytes(need.memory)}" for name, need in self.needs.items())
            limit = in_bytes(self.limit)
            raise InputError(f"The curvature of Laplace must stay under {limit}, got {needs}; {self._use()}.")

    def _use(self) -> str:
        return f"use {self.advice}" if self.advice else "use fewer coordinates, or a higher limit"


def in_bytes(count: float) -> str:
    """Format a number of bytes for display.

    >>> in_bytes(12_345_678)
    '12 MB'
    """
    units = ("bytes", "kB", "MB", "GB", "TB", "PB")
    power = min(int(math.log10(max(count, 1)) // 3), len(units) - 1)
    value = count / 1000**power
    return f"{value:.1f} {units[power]}" if power and value < 9.95 else f"{value:,.0f} {units[power]}"


@dataclass(frozen=True)
class LayerShape:
    """The sizes of a layer that determine its cost."""

    names: dict[str, int]  # number of coordinates of each parameter
    sides: tuple[int, int] | None = None  # of its two Kronecker factors, (in, out), if it has a rule
    groups: int = 1  # of a convolution, each with separate factors
    positions: int = 1  # pixels, tokens

    @property
    def count(self) -> int:
        return sum(self.names.values())


def budget(
    model: BaseModel,
    data: Data,
    structure: str,
    over: Any,
    kind: str,
    samples: int,
    rank: int | None,
    limit: int,
    tuned: bool = False,
) -> Budget:
    """Estimate the needs of a structure over some coordinates (or a number of them), and of the alternatives."""
    if not has_network(model):
        size = model.layout.size
        dense = Need(
            4 * FLOAT64_BYTES * size**2, 10.0 * size
        )  # one backward pass per row of each of about ten Hessians
        return Budget({"full": dense, "diag": dense}, structure, limit)
    inputs, rows = data.some(2)[:-1], data.num_data or 1
    layers, outputs = layer_shapes(model, inputs)
    columns = {"fisher": samples, "empirical": 1}.get(kind, outputs)
    work = sum(layer.count * layer.positions for layer in layers)

    def need(structure: str, layers: list[LayerShape], before: float = 0.0) -> Need:
        memory, operations = cost(structure, layers, columns, rows, work, kind, rank, TUNING_UPDATES if tuned else 0)
        return Need(memory, before + operations / (6 * rows * work))

    needs = {name: need(name, layers) for name in ("kron", "full", "lowrank", "diag")}
    chosen = structure
    if isinstance(over, int):
        chosen = f"subnetwork/{structure}"
        needs[chosen] = need(structure, [LayerShape({"": over})], needs["diag"].epochs)
    elif not (isinstance(over, str) and over == "all"):
        chosen = f"{'last' if isinstance(over, str) else 'selected'}/{structure}"
        needs[chosen] = need(structure, within(layers, select(model, over, inputs)))
    with contextlib.suppress(InputError):  # a network without one last layer
        needs.setdefault("last/full", need("full", within(layers, select(model, "last", inputs))))
    return Budget(needs, chosen, limit)


def layer_shapes(model: Model, inputs: Batch) -> tuple[list[LayerShape], int]:
    """Run a row or two to find the shapes of the modules with weights, and the number of outputs per datum."""
    network, found, made = model.network, [], {}
    names = {id(p): name for name, p in network.skeleton.named_parameters() if name in network.params}
    hook = lambda module, _args, out: made.update({id(module): sum(t.numel() for t in tensors(out))})  # noqa: E731
    handles = [module.register_forward_hook(hook) for module in network.skeleton.modules()]
    try:
        with torch.no_grad():
            outputs = network(network.initial, inputs, {}, train=False)
    finally:
        for handle in handles:
            handle.remove()
    for module in network.skeleton.modules():
        param_sizes = {
            names.pop(id(p)): p.numel() for p in module.parameters(recurse=False) if id(p) in names
        }  # shared ones once
        if param_sizes and isinstance(module, KRONECKER_LAYERS):
            out, groups = len(module.weight), getattr(module, "groups", 1)
            sides = (module.weight[0].numel() + (module.bias is not None), out // groups)
            found.append(
                LayerShape(param_sizes, sides, groups, max(1, made.get(id(module), 0) // (len(inputs[0]) * out)))
            )
        elif param_sizes and isinstance(module, nn.Embedding):  # its first factor is diagonal
            found.append(LayerShape(param_sizes, (module.embedding_dim, 1)))
        elif param_sizes:
            found.append(LayerShape(param_sizes))
    return found, outputs[0].numel()


def within(layers: list[LayerShape], selection: Selection) -> list[LayerShape]:
    """Return the selected parts of the layers."""
    sizes = dict(zip(selection.names, selection.sizes, strict=True))
    parts = [replace(layer, names={n: sizes[n] for n in layer.names if n in sizes}) for layer in layers]
    return [part for part in parts if part.names]


def cost(
    structure: str,
    layers: list[LayerShape],
    columns: int,
    rows: int,
    work: int,
    kind: str,
    rank: int | None,
    updates: int = 0,
) -> tuple[int, float]:
    """Return bytes and operations of a curvature over some layers; a forward pass takes 2 x `work` operations per row.

    A backward pass to the activations costs as much as a forward pass, and one to the weights as much again.
    """
    p = sum(layer.count for layer in layers)
    passes = 2.0 * rows * work * (1 + columns)
    if structure == "diag":
        return 3 * FLOAT64_BYTES * p, passes + 2.0 * rows * columns * work
    if structure == "full":
        alone = len(layers) == 1 and layers[0].sides is not None and layers[0].positions == 1
        products = (1.0 if alone else 2.0 * columns) * rows * p**2  # a single linear layer has a cheaper rule
        if kind == "hessian":
            products = 12.0 * rows * work * p
        matrices = 4 if updates else 2
        return matrices * FLOAT64_BYTES * p**2, passes + products + p**3 / 3 + updates * 4 * p**3 / 3
    if structure == "lowrank":
        columns = min(p, (rank or DEFAULT_RANK) + EXTRA_DIRECTIONS)
        return 3 * FLOAT64_BYTES * p * columns, 4.0 * columns * 8 * rows * work + (10.0 + 6 * updates) * p * columns**2
    memory, products = 3 * FLOAT64_BYTES * p, 0.0
    for layer in layers:
        if layer.sides is not None:
            a, b = layer.sides
            memory += 2 * FLOAT64_BYTES * layer.groups * (a * a + b * b)
            each = 2.0 * rows * layer.positions * (a * a + columns * b * b) + 10.0 * (a**3 + b**3)
            products += layer.groups * each
        elif layer.count <= MAX_DENSE_BLOCK:
            memory += 2 * FLOAT64_BYTES * layer.count**2
            products += 2.0 * rows * columns * layer.count**2 + updates * 4 * layer.count**3 / 3
    return memory, passes + products
