"""What a Laplace approximation will need, before anything is allocated: memory and time, from shapes alone.

    diag      p numbers                    C backward passes
    full      p^2                          N C p^2 for the sum (N p^2 / 2 of one layer), p^3 / 3 for the factor
    kron      sum of in^2 + out^2          N T (in^2 + C out^2) a layer, 10 (in^3 + out^3) for its eigenvectors
    lowrank   p r                          4 r products with a vector

for p weights, N data, C outputs (sampled labels, for a sampled Fisher), T positions of a layer and the rank r. Where
the evidence tunes the prior or a noise, each of about 30 updates factorises Q anew and takes its variances: 4 p^3 / 3
for full and two matrices more, 6 p r^2 for lowrank; for diag and kron it is little beside the pass.
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
from priory.curvature.lowrank import EXTRA, RANK
from priory.models.base import has_network
from priory.models.model import Model
from priory.network.skeleton import tensors

if TYPE_CHECKING:
    from priory.core.data import Batch, Data
    from priory.models.base import BaseModel

DENSE = 1024  # coordinates of a layer without a Kronecker rule whose block is kept whole
RULED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
BYTES = 8  # of a number in double precision
UPDATES = 30  # that the evidence takes to settle, about


@dataclass(frozen=True)
class Need:
    """Memory, and time in epochs of plain training (a forward and a backward pass over the data)."""

    memory: int  # bytes
    epochs: float

    def __str__(self) -> str:
        return f"{in_bytes(self.memory)} and the time of {self.epochs:.2g} epochs"


@dataclass(frozen=True)
class Budget:
    """What each structure needs, by "structure" or "over/structure"; `chosen` is the method's, `advice` what to use.

    Estimates from shapes alone: memory of the curvature and its factors while the posterior is made. What the pass over
    the data holds comes on top, and stays under the 512 MiB that every pass keeps to.
    """

    needs: dict[str, Need]
    chosen: str
    limit: int

    @property
    def fits(self) -> bool:
        """Whether what was chosen stays under the limit."""
        return self.needs[self.chosen].memory <= self.limit

    @property
    def advice(self) -> str | None:
        """What was chosen, or else the first of the others that stays under the limit, if there is one."""
        within = [name for name, need in self.needs.items() if need.memory <= self.limit]
        return self.chosen if self.fits else next(iter(within), None)

    def __str__(self) -> str:
        return f"{', '.join(f'{name}: {need}' for name, need in self.needs.items())}; {self._use()}."

    def refuse(self) -> None:
        """Raise the sentence that says what is too much, and what isn't."""
        if not self.fits:
            needs = ", ".join(f"{name}: {in_bytes(need.memory)}" for name, need in self.needs.items())
            limit = in_bytes(self.limit)
            raise InputError(f"The curvature of Laplace must stay under {limit}, got {needs}; {self._use()}.")

    def _use(self) -> str:
        return f"use {self.advice}" if self.advice else "use fewer coordinates, or a higher limit"


def in_bytes(count: float) -> str:
    """A number of bytes as a person reads it.

    >>> in_bytes(12_345_678)
    '12 MB'
    """
    units = ("bytes", "kB", "MB", "GB", "TB", "PB")
    power = min(int(math.log10(max(count, 1)) // 3), len(units) - 1)
    value = count / 1000**power
    return f"{value:.1f} {units[power]}" if power and value < 9.95 else f"{value:,.0f} {units[power]}"


@dataclass(frozen=True)
class LayerShape:
    """What the cost of a layer depends on."""

    names: dict[str, int]  # how many coordinates each of its parameters has
    sides: tuple[int, int] | None = None  # of its two Kronecker factors, (in, out), where it has a rule
    groups: int = 1  # of a convolution, each with factors of its own
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
    """What a structure over some coordinates (a number, for a subnetwork) needs, and what else could be used."""
    if not has_network(model):
        size = model.layout.size
        dense = Need(4 * BYTES * size**2, 10.0 * size)  # a backward pass a row of each of about ten Hessians
        return Budget({"full": dense, "diag": dense}, structure, limit)
    inputs, rows = data.some(2)[:-1], data.num_data or 1
    layers, outputs = layer_shapes(model, inputs)
    columns = {"fisher": samples, "empirical": 1}.get(kind, outputs)
    work = sum(layer.count * layer.positions for layer in layers)

    def need(structure: str, layers: list[LayerShape], before: float = 0.0) -> Need:
        memory, operations = cost(structure, layers, columns, rows, work, kind, rank, UPDATES if tuned else 0)
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
    """The modules that hold weights, and how many outputs a datum has, as a pass of a row or two shows them."""
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
        own = {
            names.pop(id(p)): p.numel() for p in module.parameters(recurse=False) if id(p) in names
        }  # shared ones once
        if own and isinstance(module, RULED):
            out, groups = len(module.weight), getattr(module, "groups", 1)
            sides = (module.weight[0].numel() + (module.bias is not None), out // groups)
            found.append(LayerShape(own, sides, groups, max(1, made.get(id(module), 0) // (len(inputs[0]) * out))))
        elif own and isinstance(module, nn.Embedding):  # its first factor is diagonal
            found.append(LayerShape(own, (module.embedding_dim, 1)))
        elif own:
            found.append(LayerShape(own))
    return found, outputs[0].numel()


def within(layers: list[LayerShape], selection: Selection) -> list[LayerShape]:
    """The parts of layers that are selected."""
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
    """Bytes, and operations, of a curvature over some layers; a forward pass of a row takes 2 x `work` operations.

    A backward pass to the activations costs as much as a forward pass, and one to the weights as much again.
    """
    p = sum(layer.count for layer in layers)
    passes = 2.0 * rows * work * (1 + columns)
    if structure == "diag":
        return 3 * BYTES * p, passes + 2.0 * rows * columns * work
    if structure == "full":
        alone = len(layers) == 1 and layers[0].sides is not None and layers[0].positions == 1
        products = (1.0 if alone else 2.0 * columns) * rows * p**2  # one linear layer has a rule of its own
        if kind == "hessian":
            products = 12.0 * rows * work * p
        matrices = 4 if updates else 2
        return matrices * BYTES * p**2, passes + products + p**3 / 3 + updates * 4 * p**3 / 3
    if structure == "lowrank":
        columns = min(p, (rank or RANK) + EXTRA)
        return 3 * BYTES * p * columns, 4.0 * columns * 8 * rows * work + (10.0 + 6 * updates) * p * columns**2
    memory, products = 3 * BYTES * p, 0.0
    for layer in layers:
        if layer.sides is not None:
            a, b = layer.sides
            memory += 2 * BYTES * layer.groups * (a * a + b * b)
            each = 2.0 * rows * layer.positions * (a * a + columns * b * b) + 10.0 * (a**3 + b**3)
            products += layer.groups * each
        elif layer.count <= DENSE:
            memory += 2 * BYTES * layer.count**2
            products += 2.0 * rows * columns * layer.count**2 + updates * 4 * layer.count**3 / 3
    return memory, passes + products
