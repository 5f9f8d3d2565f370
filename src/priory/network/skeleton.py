"""Runs a torch module at a flat vector of weights, without ever changing the module.

`Network` keeps a skeleton of the module: a deep copy in which the data of each trainable parameter are a view of the
vector that is bound. The skeleton has its own hooks, buffers and dicts, so nothing that happens here changes the user's
module, even if an exception is raised.

    network = Network(net)
    outputs = network(w, inputs, buffers, train=False)          one vector: bind it and run the skeleton
    network.collect_gradients_in(gradient)                      backward passes then write to one flat buffer
    outputs = network.functional(w, inputs, buffers)            a pure function, for vmap and autograd

`priory.network.evaluation` chooses how many vectors are evaluated.
"""

from __future__ import annotations

import copy
import itertools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from priory.core.errors import InputError, require
from priory.core.flat import Param
from priory.network.dropout_off import DropoutOff
from priory.network.faster_layers import hooked, pool_by_maxima, use_inplace_relu

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

DENSE_LAYERS = (
    nn.Linear,
    nn.Bilinear,
    nn.Identity,
    nn.Flatten,
    nn.Unflatten,
    nn.LayerNorm,
    nn.Softmax,
    nn.LogSoftmax,
)
ACTIVATION_LAYERS = tuple(
    getattr(nn.modules.activation, name) for name in nn.modules.activation.__all__ if name != "MultiheadAttention"
)
ELEMENTWISE_LAYERS = (
    *(nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish),
)
MEMORY_LIMIT = 1 << 29  # bytes of activations held at a time: 512 MiB
MAX_VMAP_WORK = 1 << 17  # rows x parameters up to which vmap computes outputs faster than a loop
MAX_BATCHED_WORK = 1 << 22  # rows x parameters per vector above which the overhead of a loop is negligible


class Network:
    """The skeleton of a module and the vector that its parameters are views of.

    Args:
        net: The module. It is deep-copied in its current state; parameters with `requires_grad=False` stay constant.

    Attributes:
        skeleton: The copy that is run.
        params: Shape of each trainable parameter by name, in the order of the flat vector.
        size: The number of trainable weights.
        initial: The weights of the module when the network was built, (size,).
        layers: The modules without children.
        layer_chain: The layers of a plain sequence of linear maps and elementwise activations, else empty.
        dense: Whether every layer works row by row on small matrices, so that vmap is worthwhile.
        written: Names of the buffers that a pass in training mode writes, once `try_once` has run.

    Raises:
        InputError: If the module cannot be copied, has lazy or no trainable parameters, or mixes dtypes or devices.
    """

    def __init__(self, net: nn.Module) -> None:
        require(isinstance(net, nn.Module), "net", "Model", "be a torch.nn.Module", type(net).__name__)
        if any(
            isinstance(p, (UninitializedParameter, UninitializedBuffer)) for p in (*net.parameters(), *net.buffers())
        ):
            raise InputError(
                "The 'net' argument of Model must have its shapes, got lazy layers; run one batch through it first."
            )
        named = net.named_parameters()  # a shared parameter occurs once
        trainable = {name: p for name, p in named if p.requires_grad and p.numel()}
        require(bool(trainable), "net", "Model", "have a parameter that requires a gradient", "none")
        kinds = {(p.dtype, p.device) for p in trainable.values()}
        require(len(kinds) == 1, "net", "Model", "keep its trainable parameters in one dtype on one device", kinds)
        self.dtype, self.device = kinds.pop()
        require(
            self.dtype in (torch.float32, torch.float64),
            "net",
            "Model",
            "be in float32 or float64",
            self.dtype,
        )

        hooked_names = [name for name, p in trainable.items() if p._backward_hooks]
        require(
            not hooked_names, "net", "Model", "have no hooks on its parameters, which a copy would lose", hooked_names
        )
        self.params: dict[str, Param] = {name: Param(tuple(p.shape)) for name, p in trainable.items()}
        self.size = sum(p.numel() for p in trainable.values())
        self.initial = torch.cat([p.detach().reshape(-1) for p in trainable.values()])
        self._leaves = {name: nn.Parameter(torch.empty_like(p)) for name, p in trainable.items()}
        stops = list(itertools.accumulate(leaf.numel() for leaf in self._leaves.values()))
        slices = (slice(stop - leaf.numel(), stop) for leaf, stop in zip(self._leaves.values(), stops, strict=True))
        self.drawn = {id(leaf) for leaf in self._leaves.values()}
        self._places = list(zip(self._leaves.values(), slices, strict=True))  # slice of each parameter in the vector
        try:
            self.skeleton = copy.deepcopy(net, {id(p): self._leaves[name] for name, p in trainable.items()})
        except Exception as error:
            reason = str(error).strip().split("\n")[0]
            raise InputError(
                f"The 'net' argument of Model must allow copy.deepcopy, got {type(error).__name__} ({reason})."
            ) from error
        self._refuse_copies_that_share(net)
        self.modes = {name: module.training for name, module in self.skeleton.named_modules()}
        self.layers = [m for m in self.skeleton.modules() if next(m.children(), None) is None]
        self.dense = all(isinstance(m, (*DENSE_LAYERS, *ACTIVATION_LAYERS)) for m in self.layers)
        self.layer_chain = self._find_layer_chain()
        if not self.dense:
            use_inplace_relu(self.skeleton)
            pool_by_maxima(self.skeleton)
        plain = type(self.skeleton).__module__.startswith("torch.nn")
        self.takes_numbers = plain and not any(isinstance(m, (nn.Embedding, nn.EmbeddingBag)) for m in self.layers)
        self._bound: tuple[int, torch.Size] | None = None
        self._grads: Tensor | None = None
        self.given = {name: buffer.detach().clone() for name, buffer in self.skeleton.named_buffers()}
        self.written: tuple[str, ...] = ()  # buffers that a pass in training mode writes, set by `try_once`
        self._in_use: dict[str, Tensor] = {}
        self._mode: bool | None = None
        self.silent = self.quiet = False  # whether dropout modules and dropout functions are disabled
        self._counted: dict[tuple[torch.Size, ...], int] = {}
        self.set_mode(train=False)

    def _refuse_copies_that_share(self, net: nn.Module) -> None:
        """Refuse a copy that still reads the user's parameters: a fit would train nothing, or change them."""
        ours = {id(leaf) for leaf in self._leaves.values()}
        reads = {id(p) for p in self.skeleton.parameters() if p.requires_grad and p.numel()}
        shared = {id(m) for m in net.modules()} & {id(m) for m in self.skeleton.modules()}
        sharing = f"{type(net).__name__}, whose copy shares its parameters"
        require(reads == ours and not shared, "net", "Model", "allow copy.deepcopy", sharing)
        for module in self.skeleton.modules():
            for key, value in vars(module).items():
                inside = (
                    value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
                )
                if not key.startswith("_") and any(id(item) in ours for item in inside):
                    raise InputError(
                        f"The 'net' argument of Model must keep its parameters in modules, got them in '{key}', a "
                        f"{type(value).__name__}; use nn.ParameterList or nn.ParameterDict."
                    )

    @property
    def leaves(self) -> dict[str, nn.Parameter]:
        """The skeleton's own parameters by name."""
        return self._leaves

    @property
    def places(self) -> list[slice]:
        """The slice of the flat vector that holds each parameter, in the order of `params`."""
        return [place for _, place in self._places]

    @property
    def place_of(self) -> dict[str, slice]:
        """The slice of the flat vector that holds each parameter, by name."""
        return dict(zip(self._leaves, self.places, strict=True))

    # One vector: the skeleton's parameters are views of it.

    def bind(self, w: Tensor) -> None:
        """Make the skeleton's parameters views of w, a contiguous vector (>= size,) that begins with the weights.

        The views keep w's memory alive, so an equal address means that w is already bound.
        """
        key = (w.data_ptr(), w.shape)
        if key == self._bound:
            return
        for leaf, place in self._places:
            leaf.data = w[place].view(leaf.shape)
        self._bound = key

    def collect_gradients_in(self, grads: Tensor) -> None:
        """Make the parameters' gradients views of this flat buffer, to which backward passes add."""
        if grads is self._grads:
            return
        for leaf, place in self._places:
            leaf.grad = grads[place].view(leaf.shape)
        self._grads = grads

    def clear_gradients(self) -> None:
        """Clear the parameters' gradients, so that a backward pass allocates new ones."""
        for leaf, _ in self._places:
            leaf.grad = None
        self._grads = None

    def __call__(self, w: Tensor, inputs: tuple[Tensor, ...], buffers: Mapping[str, Tensor], train: bool) -> Tensor:
        """The outputs (n, ...) at one vector; with `train`, each module runs in the mode the user set."""
        self.bind(w)
        if torch.is_autocast_enabled(self.device.type):
            torch.clear_autocast_cache()  # it caches casts of parameters and does not notice a new vector
        if buffers or self._in_use:
            self.use_buffers(buffers)
        self.set_mode(train)
        try:
            outputs = self._run(inputs) if self.quiet else self.skeleton(*inputs)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            must = "Batch normalisation must have more than 1 value per channel in every batch"
            raise InputError(f"{must}, got a batch of one row; change batch_size.") from error
        if train and self.written:
            self._put_back()
        return checked(outputs)

    # Many vectors.

    def batches_well(self, rows: int) -> bool:
        """Whether one batched pass is faster than a loop: a dense network with little work per vector."""
        return self.dense and rows * self.size <= MAX_BATCHED_WORK

    def _find_layer_chain(self) -> tuple[nn.Module, ...]:
        """The layers of a plain sequence of linear maps and elementwise activations; empty for any other network."""
        net = self.skeleton
        layers = tuple(net) if type(net) is nn.Sequential else (net,)
        known = all(type(m) in (nn.Linear, *ELEMENTWISE_LAYERS) for m in layers)
        return layers if known and not hooked(*net.modules()) and type(layers[-1]) is nn.Linear else ()

    def of_each(self, w: Tensor, parameter: Tensor) -> Tensor:
        """A parameter of the skeleton at each of the vectors (S, P), (S, *shape); a frozen one is expanded."""
        for leaf, place in self._places:
            if leaf is parameter:
                return w[:, place].view(len(w), *leaf.shape)
        return parameter.detach().expand(len(w), *parameter.shape)

    def cut(self, w: Tensor) -> dict[int, Tensor]:
        """The parameters at vectors (S, P), each (S, *shape), by the id of the skeleton's parameter.

        The vectors are split in one operation, whose backward pass fills the gradient once instead of once per slice.
        """
        pieces = w.split([*(leaf.numel() for leaf, _ in self._places), w.shape[-1] - self.size], -1)
        return {id(leaf): t.view(len(w), *leaf.shape) for (leaf, _), t in zip(self._places, pieces, strict=False)}

    def functional(self, w: Tensor, inputs: tuple[Tensor, ...], buffers: Mapping[str, Tensor]) -> Tensor:
        """The outputs (n, ...) at one vector as a pure function, for vmap; in the current mode."""
        views = {n: w[place].view(leaf.shape) for n, (leaf, place) in zip(self._leaves, self._places, strict=True)}
        named = {**buffers, **views}
        if not (self.quiet and self._mode):
            return checked(functional_call(self.skeleton, named, inputs))
        with DropoutOff():
            return checked(functional_call(self.skeleton, named, inputs))

    # Buffers and modes.

    def try_once(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """One pass in training mode on copies of the buffers, which sets `written`.

        A buffer may be replaced, written without a change in value, or written without a new version number.
        """
        trial = {name: buffer.clone() for name, buffer in self.given.items()}
        versions = {name: buffer._version for name, buffer in trial.items()}
        self.written = ()
        try:
            return self(self.initial, inputs, trial, train=True)
        finally:
            now = dict(self.skeleton.named_buffers())
            self.written = tuple(
                name
                for name, b in trial.items()
                if now.get(name) is not b or b._version != versions[name] or not torch.equal(b, self.given[name])
            )
            self._in_use = dict(trial)
            self.use_buffers({})

    def own_buffers(self) -> dict[str, Tensor]:
        """A copy of the buffers that training writes, as they were in the user's module."""
        return {name: self.given[name].clone() for name in self.written}

    def fixed(self) -> dict[str, Tensor]:
        """The tensors that no fit changes: frozen parameters, and the buffers in their original state."""
        frozen = {name: p.detach() for name, p in self.skeleton.named_parameters() if not p.requires_grad}
        return {**frozen, **self.given}

    def member(self, buffers: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
        """The buffers of one member, by its index in the flattened leading shape; draws of a member share them."""
        member_buffers = {}
        for name, b in buffers.items():
            shape = self.given[name].shape
            flat = b.reshape((-1, *shape)) if b.ndim > len(shape) else b[None]
            member_buffers[name] = flat[index % len(flat)]
        return member_buffers

    def use_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Let the skeleton read, and in training mode write, these buffers; all other buffers are reset."""
        for name in self._in_use.keys() - buffers.keys():
            self._place(name, self.given[name].clone())
            del self._in_use[name]
        for name, buffer in buffers.items():
            if self._in_use.get(name) is not buffer:
                self._place(name, buffer)
                self._in_use[name] = buffer

    def _put_back(self) -> None:
        """Copy buffers that a module replaced, instead of writing to them in place, into the bound buffers."""
        now = dict(self.skeleton.named_buffers())
        for name in self.written:
            bound_buffer, new_buffer = self._in_use.get(name), now.get(name)
            if bound_buffer is not None and new_buffer is not None and new_buffer is not bound_buffer:
                bound_buffer.copy_(new_buffer.detach())
                self._place(name, bound_buffer)

    def _place(self, name: str, buffer: Tensor) -> None:
        owner, _, key = name.rpartition(".")
        self.skeleton.get_submodule(owner)._buffers[key] = buffer

    def set_mode(self, train: bool) -> None:
        """Set training mode, in which each module keeps the mode the user set, or evaluation mode."""
        if self._mode is train:
            return
        for name, module in self.skeleton.named_modules():
            module.training = train and self.modes[name] and not (self.silent and drops(module))
        self._mode = train

    def disable_dropout(self, modules: bool, functions: bool = False) -> None:
        """Disable dropout of modules and of functions in training mode too, or restore it."""
        self.silent, self.quiet, self._mode = modules, functions, None
        self.set_mode(train=False)

    def _run(self, inputs: tuple[Tensor, ...]) -> Any:
        """The skeleton's output, with dropout functions disabled in training mode."""
        if not self._mode:
            return self.skeleton(*inputs)
        with DropoutOff():
            return self.skeleton(*inputs)

    # New starting points.

    def fresh(self, generator: torch.Generator) -> Tensor:
        """A new starting vector (size,): each module's own initialisation, seeded from the generator.

        A module without `reset_parameters` keeps its values, perturbed by a tenth of their root mean square.
        """
        seed = int(torch.randint(2**31, (), generator=generator, device=generator.device))
        self.bind(self.initial.clone())
        touched: set[int] = set()
        ours = {id(leaf) for leaf in self._leaves.values()}
        with (
            torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []),
            torch.no_grad(),
        ):
            torch.manual_seed(seed)
            for module in self.skeleton.modules():
                reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
                if callable(reset):
                    kept = [t for t in (*module.parameters(), *module.buffers()) if id(t) not in ours]
                    saved = [t.clone() for t in kept]
                    reset()
                    for t, value in zip(kept, saved, strict=True):
                        t.copy_(value)
                    touched |= {id(p) for p in module.parameters()}
            for leaf in self._leaves.values():
                if id(leaf) not in touched:
                    size = leaf.detach().square().mean().sqrt()
                    leaf.add_(0.1 * size * torch.randn_like(leaf))
            w = torch.cat([leaf.detach().reshape(-1) for leaf in self._leaves.values()])
        self._bound = None
        return w

    def activations(self, inputs: tuple[Tensor, ...], buffers: Mapping[str, Tensor]) -> int:
        """The number of activations per row, counted once per input shape on at most two rows."""
        key = tuple(x.shape[1:] for x in inputs)
        if key not in self._counted:
            counted: list[int] = []

            def count(_module: nn.Module, _args: object, output: object) -> None:
                counted.extend(t.numel() for t in tensors(output))

            handles = [layer.register_forward_hook(count) for layer in self.layers]
            try:
                self.at_two_rows(self.initial, inputs, buffers)
            finally:
                for handle in handles:
                    handle.remove()
            self._counted[key] = math.ceil(sum(counted) / max(1, min(2, len(inputs[0]))))
        return self._counted[key]

    def at_two_rows(self, w: Tensor, inputs: tuple[Tensor, ...], buffers: Mapping[str, Tensor]) -> Tensor:
        """The outputs for the first two rows, in evaluation mode and without gradient."""
        with torch.no_grad():
            try:
                return self(w, tuple(x[:2] for x in inputs), buffers, train=False)
            except Exception:
                self(w, inputs, buffers, train=False)  # fails too, with the shapes of the given inputs in its message
                raise


def tensors(value: object) -> Iterator[Tensor]:
    """The tensors inside a layer's output."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)


def drops(module: nn.Module) -> bool:
    """Whether a module applies dropout in training mode."""
    rate = getattr(module, "dropout", None)  # a number in recurrent and attention layers; elsewhere often a module
    return isinstance(module, nn.modules.dropout._DropoutNd) or (isinstance(rate, (int, float)) and rate > 0)


def checked(outputs: object) -> Tensor:
    """Check that the output of a network is one tensor, and return it."""
    if not isinstance(outputs, Tensor):
        raise InputError(f"The network's output must be one tensor, got {type(outputs).__name__}.")
    return outputs
