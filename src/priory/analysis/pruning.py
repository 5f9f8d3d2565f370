"""Pruning: neurons that a group penalty has put at zero, and weights that a Gaussian posterior would not miss.

Neurons. In a chain ... W_l, b_l, phi, W_{l+1}, b_{l+1} ... a neuron j goes without any change of the network if

    its incoming weights W_l[j, :] are zero:   it is the constant c_j = phi(b_l[j]), and b_{l+1} takes W_{l+1}[:, j] c_j
    its outgoing weights W_{l+1}[:, j] are:    nothing sees it

A neuron is a row of a linear layer or an output channel of a convolution. With zeros around the image, a constant that
is not zero is no constant after the next convolution: such a channel stays. Removing a neuron may leave others without
use, so that this is done until nothing changes (Scardapane et al. 2017; Alvarez and Salzmann 2016).

Weights. Of a Gaussian posterior N(mu, sigma^2) of each weight those are set to zero that are least told from it: by the
signal-to-noise ratio |mu| / sigma (Blundell et al. 2015) or by the density at zero (Graves 2011),

    log q(0) = -mu^2 / (2 sigma^2) - log sigma - log(2 pi) / 2,

where a narrow weight at zero goes before a broad one at the same |mu| / sigma.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from priory.analysis.sweeps import TITLES, scored
from priory.core.data import Data
from priory.core.errors import InputError, require, whole
from priory.core.streams import stream
from priory.core.tables import text_table
from priory.families import Diagonal
from priory.families.full_rank import FullRank
from priory.families.low_rank import LowRank
from priory.models.base import has_network
from priory.models.model import Model
from priory.penalties.as_prior.parameters import describe_parameters
from priory.posteriors import Posterior, Variational
from priory.posteriors.laplace import LaplacePosterior
from priory.predictive import Prediction, predict

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
ELEMENTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid),
    *(nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Tanhshrink, nn.Softshrink, nn.Hardshrink),
    nn.LogSigmoid,
)
SILENT = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)  # in evaluation mode
MAXIMA = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)
MEANS = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
PADS = (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d)
SHARES = (1.0, 0.75, 0.5, 0.35, 0.25, 0.15, 0.1, 0.05, 0.02)
By = Literal["signal_to_noise", "density_at_zero"]


# Neurons.


@dataclass(frozen=True)
class PrunedNetwork:
    """A smaller network that computes the same, with what was removed.

    `kept` has the neurons of each layer that are left, by the layer's name; `sizes` how many there were and are;
    `before` and `after` the scores, each with its standard error, where test rows were given. `unused_inputs` are the
    columns or channels of the input that the first layer does not look at; they are not removed. `stuck` counts
    constant channels that zero padding keeps in.
    """

    network: nn.Sequential
    kept: dict[str, Tensor]
    sizes: dict[str, tuple[int, int]]
    weights: tuple[int, int]
    unused_inputs: Tensor
    stuck: int = 0
    before: dict[str, tuple[float, float]] = field(default_factory=dict)
    after: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def removed(self) -> int:
        """How many neurons are gone."""
        return sum(before - after for before, after in self.sizes.values())

    def __str__(self) -> str:
        sizes = [[name, str(before), str(after)] for name, (before, after) in self.sizes.items()]
        lines = text_table([["layer", "neurons", "kept"], *sizes])
        was, left = self.weights
        lines.append(f"{was:,} parameters before, {left:,} after ({100 * left / was:.1f} %).")
        lines += [
            f"{TITLES[name]} {value:.4f} ± {error:.4f} before, {self.after[name][0]:.4f} after."
            for name, (value, error) in self.before.items()
        ]
        if len(self.unused_inputs):
            lines.append(f"{len(self.unused_inputs)} inputs are not used: {_few(self.unused_inputs.tolist())}.")
        if self.stuck:
            lines.append(f"{self.stuck} constant channels stay: zeros around the image keep them from being folded.")
        return "\n".join(lines)


def prune_neurons(trained: Posterior | nn.Sequential, test: Any = None) -> PrunedNetwork:
    """Remove the neurons whose incoming or outgoing weights are all zero, from a copy of the network.

    `trained` is a posterior, whose mean weights are taken, such as MAP's with `penalties.GroupLasso`; or a network as
    it is. The network is an `nn.Sequential` (of such, too) of linear layers, convolutions, batch normalisation,
    activations, pooling and `Flatten`. With a posterior, `test=(X, y)` scores the network before and after.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    >>> _ = net[0].weight.data[1].zero_()
    >>> prune_neurons(net).network[0].weight.shape
    torch.Size([2, 2])
    """
    posterior = trained if isinstance(trained, Posterior) else None
    ok = test is None or (isinstance(test, (tuple, list)) and len(test) == 2)
    require(ok, "test", "prune_neurons", "be a pair (X, y)", test)
    needs = "be a posterior where there are test rows: a network has no likelihood"
    require(test is None or posterior is not None, "trained", "prune_neurons", needs, type(trained).__name__)
    whole_net = at_mean(posterior) if posterior is not None else copy.deepcopy(trained)
    sequence = isinstance(whole_net, nn.Sequential)
    require(sequence, "trained", "prune_neurons", "be or have an nn.Sequential", type(whole_net).__name__)
    assert isinstance(whole_net, nn.Sequential)
    small = copy.deepcopy(whole_net).eval()
    chain = layers(small)
    kept = {name: torch.arange(outputs(layer)) for name, layer in chain.weighted}
    with torch.no_grad():
        stuck = _shrink(chain, kept)
    first = chain.weighted[0][1]
    unused = (columns(first, first.weight.shape[1]).abs().amax((0, 2)) == 0).nonzero().reshape(-1)
    sizes = {name: (outputs(layer), len(kept[name])) for name, layer in layers(whole_net).weighted}
    weights = (_count(whole_net), _count(small))
    before = after = {}
    if posterior is not None and test is not None:
        before, after = (scored(*through(posterior, net, test)) for net in (whole_net, small))
    small.train(whole_net.training)
    return PrunedNetwork(small, kept, sizes, weights, unused, stuck, before, after)


@dataclass(frozen=True)
class Layers:
    """The layers with weights in their order, by name, and what lies between each and the next."""

    weighted: list[tuple[str, Any]]
    between: list[list[nn.Module]]  # between[i] follows weighted[i]; the last follows the last


def layers(net: nn.Sequential) -> Layers:
    """A sequence as layers with weights and what lies between them, or the sentence that says why not."""
    found = Layers([], [])
    for name, module in _leaves(net, ""):
        if isinstance(module, (nn.Linear, *CONVOLUTIONS)):
            plain = isinstance(module, nn.Linear) or module.groups == 1
            require(plain, "trained", "prune_neurons", "have no grouped convolutions", f"one at {name}")
            found.weighted.append((name, module))
            found.between.append([])
            continue
        known = isinstance(module, (*NORMS, *ELEMENTWISE, *SILENT, *MAXIMA, *MEANS, *PADS, nn.Flatten))
        must = "have linear layers, convolutions, batch normalisation, activations, pooling and Flatten only"
        require(known, "trained", "prune_neurons", must, f"{type(module).__name__} at {name}")
        flat = not isinstance(module, nn.Flatten) or (module.start_dim == 1 and module.end_dim == -1)
        require(flat, "trained", "prune_neurons", "flatten all but the rows", f"{module} at {name}")
        if found.weighted:  # what comes before the first is of the inputs, which stay
            found.between[-1].append(module)
    require(bool(found.weighted), "trained", "prune_neurons", "have a layer with weights", str(net))
    for i, (name, layer) in enumerate(found.weighted[:-1]):
        _check_meeting(name, layer, found.between[i], *found.weighted[i + 1])
    return found


def _check_meeting(name: str, layer: Any, between: Sequence[nn.Module], next_name: str, after: Any) -> None:
    """Refuse a pair of layers between which a neuron is not one column, one channel, or one run of columns."""
    size, linear = outputs(layer), isinstance(layer, nn.Linear)
    wrong = [type(m).__name__ for m in between if linear and isinstance(m, (*MAXIMA, *MEANS, *PADS))]
    require(not wrong, "trained", "prune_neurons", "pool channels only, not neurons", f"{wrong} after {name}")
    norms = all(m.num_features == size for m in between if isinstance(m, NORMS))
    require(norms, "trained", "prune_neurons", "normalise each neuron", f"another number than {size} after {name}")
    inputs = after.weight.shape[1]
    flattened = not linear and isinstance(after, nn.Linear) and any(isinstance(m, nn.Flatten) for m in between)
    meets = inputs % size == 0 if flattened else inputs == size and linear == isinstance(after, nn.Linear)
    must = "have each layer look at the neurons of the one before, after Flatten for those of a convolution"
    require(meets, "trained", "prune_neurons", must, f"{inputs} inputs of {next_name} after the {size} of {name}")


def _leaves(net: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    if not isinstance(net, nn.Sequential):
        return [(prefix, net)]
    return [leaf for name, child in net.named_children() for leaf in _leaves(child, f"{prefix}.{name}".lstrip("."))]


def _shrink(chain: Layers, kept: dict[str, Tensor]) -> int:
    """Take out neurons until none is left to take; how many constant channels had to stay."""
    while True:
        changed, stuck = False, 0
        for i, ((name, layer), (_, after)) in enumerate(zip(chain.weighted, chain.weighted[1:], strict=False)):
            incoming = layer.weight.flatten(1).abs().amax(1) == 0
            outgoing = columns(after, outputs(layer)).abs().amax((0, 2)) == 0
            value = constants(layer, chain.between[i])
            folds = (value == 0) | (not _bordered(after, chain.between[i]))
            gone = outgoing | (incoming & folds)
            stuck += int((incoming & ~gone).sum())
            if bool(gone.all()):
                gone[0] = False  # a layer without neurons is none
                if len(gone) == 1:
                    continue
            if not bool(gone.any()):
                continue
            fold(after, value, gone & ~outgoing)
            _keep(layer, chain.between[i], after, ~gone)
            kept[name] = kept[name][~gone.cpu()]
            changed = True
        if not changed:
            return stuck


def outputs(layer: Any) -> int:
    """How many neurons a layer has."""
    return layer.weight.shape[0]


def columns(layer: Any, count: int) -> Tensor:
    """The weights that leave each of `count` neurons of the layer before, (outputs, count, weights of each)."""
    return layer.weight.reshape(outputs(layer), count, -1)


def constants(layer: Any, between: Sequence[nn.Module]) -> Tensor:
    """What each neuron would give the next layer if its incoming weights were zero: phi(b), (neurons,)."""
    value = layer.weight.new_zeros(outputs(layer)) if layer.bias is None else layer.bias
    for module in between:
        if isinstance(module, NORMS):
            mean, variance = module.running_mean, module.running_var
            if mean is None or variance is None:
                raise InputError(
                    "The 'trained' argument of prune_neurons must have normalisations with running statistics."
                )
            value = nn.functional.batch_norm(value[None], mean, variance, module.weight, module.bias, eps=module.eps)[0]
        elif isinstance(module, ELEMENTWISE):
            value = module(value)
    return value  # the largest or the mean of equal numbers is the number


def _bordered(after: Any, between: Sequence[nn.Module]) -> bool:
    """Whether zeros lie around a constant image before the next layer has seen it."""
    own = isinstance(after, CONVOLUTIONS) and after.padding_mode == "zeros" and _pads(after.padding)
    means = any(isinstance(m, MEANS) and _pads(getattr(m, "padding", 0)) for m in between)
    return own or means or any(isinstance(m, PADS) for m in between)


def _pads(padding: Any) -> bool:
    return padding == "same" or (padding != "valid" and any(torch.as_tensor(padding).reshape(-1).tolist()))


def fold(after: Any, value: Tensor, gone: Tensor) -> None:
    """Put what constant neurons give to the next layer into its bias."""
    if not bool((value[gone] != 0).any()):
        return
    added = torch.einsum("ojk,j->o", columns(after, len(value))[:, gone], value[gone])
    after.bias = nn.Parameter(added if after.bias is None else after.bias + added)


def _keep(layer: Any, between: Sequence[nn.Module], after: Any, stay: Tensor) -> None:
    """Leave these neurons of a layer only, with their normalisation and their columns of the next."""
    seen = columns(after, len(stay))[:, stay]
    left = int(stay.sum())
    per_neuron = after.weight.shape[1] // len(stay)
    after.weight = nn.Parameter(seen.reshape(outputs(after), left * per_neuron, *after.weight.shape[2:]))
    layer.weight = nn.Parameter(layer.weight[stay])
    if layer.bias is not None:
        layer.bias = nn.Parameter(layer.bias[stay])
    for module in between:
        if isinstance(module, NORMS):
            _keep_norm(module, stay)
    named = ("in_features", "out_features") if isinstance(after, nn.Linear) else ("in_channels", "out_channels")
    setattr(after, named[0], left * per_neuron)
    setattr(layer, "out_features" if isinstance(layer, nn.Linear) else "out_channels", left)


def _keep_norm(norm: Any, stay: Tensor) -> None:
    norm.num_features = int(stay.sum())
    norm.running_mean, norm.running_var = norm.running_mean[stay], norm.running_var[stay]
    if norm.weight is not None:
        norm.weight, norm.bias = nn.Parameter(norm.weight[stay]), nn.Parameter(norm.bias[stay])


def at_mean(posterior: Posterior) -> nn.Module:
    """A copy of the network with the posterior's mean weights, and the buffers that training wrote."""
    model = _model(posterior, "prune_neurons")
    net = copy.deepcopy(model.net)
    own = {name: value for name, value in posterior.mean.items() if name in model.network.params}
    net.load_state_dict({**own, **posterior.buffers}, strict=False)
    return net


def through(posterior: Posterior, net: nn.Module, test: Any) -> tuple[Prediction, Tensor]:
    """The prediction of one network under the posterior's likelihood, and the targets."""
    model = _model(posterior, "prune_neurons")
    (x, y) = next(iter(Data.of(tuple(test)).prepared(model.prepare).blocks(len(test[1]))))
    event = posterior.target.event
    with torch.no_grad():
        arranged = model.likelihood.arrange(net.eval()(x), event)
    tail = {name: value[None] for name, value in posterior.mean.items()}
    learnt = {name: tail[f"likelihood.{name}"] for name in model.likelihood.declared}
    return Prediction.of_draws(model.likelihood, arranged[None], learnt, event, model.prepare_targets), y


# Weights.


@dataclass(frozen=True)
class PruningCurve:
    """Scores against the share of weights that is kept, from all to few; print it, plot it, or take a network.

    `scores` and `errors` are by name, in the order of `shares`. `order` has the coordinates of the weights, the first
    to be kept first.
    """

    shares: tuple[float, ...]
    scores: dict[str, tuple[float, ...]]
    errors: dict[str, tuple[float, ...]]
    by: str
    order: Tensor = field(repr=False)
    posterior: Posterior = field(repr=False)

    @property
    def smallest(self) -> float:
        """The smallest share whose NLL is within a standard error of the lowest."""
        nll, errors = self.scores["nll"], self.errors["nll"]
        best = min(range(len(nll)), key=lambda i: nll[i])
        return min(s for s, value in zip(self.shares, nll, strict=True) if value <= nll[best] + errors[best])

    def mask(self, share: float) -> dict[str, Tensor]:
        """Which weights are kept, by parameter."""
        require(0 <= share <= 1, "share", "PruningCurve", "lie between 0 and 1", share)
        model = _model(self.posterior, "PruningCurve")
        flags = keep_mask(model, self.order, share)
        return {block.name: block.free(flags) for block in model.layout.blocks if block.name in model.network.params}

    def network(self, share: float) -> nn.Module:
        """A copy of the network with the posterior's means where weights are kept, and zero where they are not."""
        net, masks = at_mean(self.posterior), self.mask(share)
        with torch.no_grad():
            for name, p in net.named_parameters():
                if name in masks:
                    p.mul_(masks[name])
        return net

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw every score against the share of weights kept; with a `path`, write the figure there."""
        from priory.plot.sweeps import pruning

        figure = pruning(self)
        if path is not None:
            figure.savefig(path)
        return figure

    def __str__(self) -> str:
        lines = [["kept %", *(TITLES[name] for name in self.scores)]]
        for i, share in enumerate(self.shares):
            cells = [f"{values[i]:.4f} ± {self.errors[name][i]:.4f}" for name, values in self.scores.items()]
            lines.append([f"{100 * share:g}", *cells])
        best = f"{100 * self.smallest:g} % of {len(self.order):,} weights predict as well as the best share does, "
        best += f"within a standard error. Pruned by {self.by.replace('_', ' ')}."
        return "\n".join([*text_table(lines, "r"), best])


def prune_weights(
    posterior: Posterior,
    test: Any,
    *,
    by: By = "signal_to_noise",
    shares: Sequence[float] = SHARES,
    samples: int = 64,
    seed: int = 0,
) -> PruningCurve:
    """Set the weights of layers that a Gaussian posterior can miss to zero, more and more of them, and score the rest.

    Draws of the posterior predict with the pruned weights at zero; biases and normalisations stay. `by` is
    "signal_to_noise", |mu| / sigma, or "density_at_zero". The same draws serve every share.
    """
    owner = "prune_weights"
    model = _model(posterior, owner)
    require(by in ("signal_to_noise", "density_at_zero"), "by", owner, "be 'signal_to_noise' or 'density_at_zero'", by)
    pair = isinstance(test, (tuple, list)) and len(test) == 2
    require(pair, "test", owner, "be a pair (X, y)", test)
    require(whole(samples, 1), "samples", owner, "be an integer, at least 1", samples)
    many = isinstance(shares, Sequence) and not isinstance(shares, str) and len(shares) > 0
    require(many, "shares", owner, "be shares, such as (1.0, 0.5, 0.1)", shares)
    numbers = all(isinstance(s, (int, float)) and 0 <= s <= 1 for s in shares)
    require(numbers, "shares", owner, "lie between 0 and 1", list(shares))

    wanted = tuple(sorted((float(s) for s in shares), reverse=True))
    order = weight_order(posterior, by)
    (x, y) = next(iter(Data.of(tuple(test)).prepared(model.prepare).blocks(len(test[1]))))
    draws = posterior.draw_for_prediction(samples, stream(seed, "predict", device=model.device))
    found = []
    for share in wanted:
        masked = draws * keep_mask(model, order, share)
        found.append(scored(predict(model, [masked], (x,), posterior.buffers, posterior.target.event, seed), y))
    scores, errors = ({name: tuple(one[name][part] for one in found) for name in found[0]} for part in (0, 1))
    return PruningCurve(wanted, scores, errors, by, order, posterior)


def weight_order(posterior: Posterior, by: By) -> Tensor:
    """The coordinates of the layers' weights, those to be kept longest first."""
    model, (mean, scale) = _model(posterior, "prune_weights"), moments(posterior)
    found = describe_parameters(model.network.skeleton)
    where = torch.cat(
        [
            torch.arange(block.start, block.stop, device=mean.device)
            for block in model.layout.blocks
            if block.name in found and found[block.name].is_weight
        ]
    )
    m, s = mean[where].double(), scale[where].double()
    value = m.abs() / s
    if by == "density_at_zero":
        value = 0.5 * value.square() + s.log() + 0.5 * math.log(2 * math.pi)  # minus the log density
    return where[value.argsort(descending=True, stable=True)]


def moments(posterior: Posterior) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each coordinate of a Gaussian posterior, (P,) both."""
    if isinstance(posterior, LaplacePosterior):
        scale = torch.full_like(posterior.w, torch.finfo(posterior.w.dtype).tiny)  # coordinates that are not drawn
        scale[posterior.selection.places] = posterior.gaussian.variance().sqrt()
        return posterior.w, scale
    if isinstance(posterior, Variational) and isinstance(posterior.family, (Diagonal, FullRank, LowRank)):
        mean, variance = posterior.family.moments()
        return mean.detach(), variance.detach().sqrt()
    raise InputError(
        f"The 'posterior' argument of prune_weights must be Gaussian, as those of MeanField, Laplace and SWAG are, got "
        f"{type(posterior).__name__}."
    )


def keep_mask(model: Model, order: Tensor, share: float) -> Tensor:
    """One for each coordinate that is kept and zero for the others, (P,)."""
    mask = torch.ones(model.layout.size, dtype=model.dtype, device=order.device)
    mask[order[round(share * len(order)) :]] = 0
    return mask


def _model(posterior: Posterior, owner: str) -> Model:
    ok = isinstance(posterior, Posterior) and has_network(posterior.model)
    require(ok, "posterior", owner, "be the posterior of a Model", type(posterior).__name__)
    assert has_network(posterior.model)
    return posterior.model


def _count(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def _few(numbers: Sequence[int], most: int = 8) -> str:
    text = ", ".join(str(n) for n in numbers[:most])
    return text if len(numbers) <= most else f"{text}, ..."
