"""Prune neurons that a group penalty has set to zero, and weights that a Gaussian posterior does not need.

`prune_neurons` removes neurons by `neuron_removal`, which leaves the outputs of the network unchanged.

`prune_weights` sets weights to zero. Each weight has a Gaussian posterior N(mu, sigma^2), and the weights least
distinguishable from zero are pruned first: by the signal-to-noise ratio |mu| / sigma (Blundell et al. 2015), or by the
density at zero (Graves 2011),

    log q(0) = -mu^2 / (2 sigma^2) - log sigma - log(2 pi) / 2,

which prunes a narrow weight before a broad one of the same |mu| / sigma.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from priory.analysis.neuron_removal import columns, layers, outputs, shrink
from priory.analysis.sweeps import SCORE_TITLES, scored
from priory.core.data import Data
from priory.core.errors import InputError, is_integer, require
from priory.core.streams import stream
from priory.core.tables import text_table
from priory.families import DiagonalFamily
from priory.families.full_rank import FullRankFamily
from priory.families.low_rank import LowRankFamily
from priory.models.base import has_network
from priory.models.model import Model
from priory.penalties.as_prior.parameters import describe_parameters
from priory.posteriors import Posterior, Variational
from priory.posteriors.laplace import LaplacePosterior
from priory.predictive import Prediction, predict

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure

DEFAULT_SHARES = (1.0, 0.75, 0.5, 0.35, 0.25, 0.15, 0.1, 0.05, 0.02)
By = Literal["signal_to_noise", "density_at_zero"]


# Neurons.


@dataclass(frozen=True)
class PrunedNetwork:
    """The result of `prune_neurons`: a smaller network that computes the same function.

    Attributes:
        network: The pruned network.
        kept: Indices of the neurons that were kept, by the layer's name.
        sizes: Number of neurons before and after, by the layer's name.
        weights: Number of parameters before and after.
        unused_inputs: Indices of the input columns or channels that the first layer ignores; they are not removed.
        stuck: Number of constant channels that could not be removed because of zero padding.
        before: Scores of the original network with their standard errors, by name; empty without test rows.
        after: Scores of the pruned network in the same form.
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
        """Number of neurons that were removed."""
        return sum(before - after for before, after in self.sizes.values())

    def __str__(self) -> str:
        sizes = [[name, str(before), str(after)] for name, (before, after) in self.sizes.items()]
        lines = text_table([["layer", "neurons", "kept"], *sizes])
        was, left = self.weights
        lines.append(f"{was:,} parameters before, {left:,} after ({100 * left / was:.1f} %).")
        lines += [
            f"{SCORE_TITLES[name]} {value:.4f} ± {error:.4f} before, {self.after[name][0]:.4f} after."
            for name, (value, error) in self.before.items()
        ]
        if len(self.unused_inputs):
            lines.append(f"{len(self.unused_inputs)} inputs are not used: {_few(self.unused_inputs.tolist())}.")
        if self.stuck:
            lines.append(
                f"{self.stuck} constant channels stay, because zero padding prevents folding them into the next bias."
            )
        return "\n".join(lines)


def prune_neurons(trained: Posterior | nn.Sequential, test: Any = None) -> PrunedNetwork:
    """Remove the neurons whose incoming or outgoing weights are all zero, in a copy of the network.

    The pruned network computes the same function in evaluation mode.

    Args:
        trained: A posterior, whose mean weights are used, such as that of `MAP` with `penalties.GroupLasso`; or a
            trained network. The network must be an `nn.Sequential`, which may be nested, of linear layers,
            convolutions, batch normalisation, activations, pooling and `Flatten`.
        test: A pair (X, y) to score the network on before and after pruning; only with a posterior. Default: None.

    Returns:
        The pruned network, the neurons that were kept and the scores.

    Raises:
        InputError: If the network has other layers, or test rows are given without a posterior.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        >>> _ = net[0].weight.data[1].zero_()
        >>> prune_neurons(net).network[0].weight.shape
        torch.Size([2, 2])

    References:
        Alvarez and Salzmann (2016), "Learning the Number of Neurons in Deep Networks".
        Scardapane et al. (2017), "Group Sparse Regularization for Deep Neural Networks".
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
        stuck = shrink(chain, kept)
    first = chain.weighted[0][1]
    unused = (columns(first, first.weight.shape[1]).abs().amax((0, 2)) == 0).nonzero().reshape(-1)
    sizes = {name: (outputs(layer), len(kept[name])) for name, layer in layers(whole_net).weighted}
    weights = (_count(whole_net), _count(small))
    before = after = {}
    if posterior is not None and test is not None:
        before, after = (scored(*through(posterior, net, test)) for net in (whole_net, small))
    small.train(whole_net.training)
    return PrunedNetwork(small, kept, sizes, weights, unused, stuck, before, after)


def at_mean(posterior: Posterior) -> nn.Module:
    """Return a copy of the network with the posterior's mean weights and the buffers written in training."""
    model = _model(posterior, "prune_neurons")
    net = copy.deepcopy(model.net)
    mean_weights = {name: value for name, value in posterior.mean.items() if name in model.network.params}
    net.load_state_dict({**mean_weights, **posterior.buffers}, strict=False)
    return net


def through(posterior: Posterior, net: nn.Module, test: Any) -> tuple[Prediction, Tensor]:
    """Return the prediction of one network under the posterior's likelihood, and the targets."""
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
    """The result of `prune_weights`: scores against the share of weights kept. Print it, plot it or take a network.

    Attributes:
        shares: The shares of weights kept, in decreasing order.
        scores: The scores by name, one value per share.
        errors: The standard errors of the scores over the test rows, in the same form.
        by: The criterion, "signal_to_noise" or "density_at_zero".
        order: The coordinates of the weights, most important first.
        posterior: The posterior that was pruned.
    """

    shares: tuple[float, ...]
    scores: dict[str, tuple[float, ...]]
    errors: dict[str, tuple[float, ...]]
    by: str
    order: Tensor = field(repr=False)
    posterior: Posterior = field(repr=False)

    @property
    def smallest(self) -> float:
        """The smallest share whose NLL is within one standard error of the lowest."""
        nll, errors = self.scores["nll"], self.errors["nll"]
        best = min(range(len(nll)), key=lambda i: nll[i])
        return min(s for s, value in zip(self.shares, nll, strict=True) if value <= nll[best] + errors[best])

    def mask(self, share: float) -> dict[str, Tensor]:
        """Return which weights are kept.

        Args:
            share: The share of weights to keep, between 0 and 1.

        Returns:
            Ones for the weights that are kept and zeros for those that are pruned, by the parameter's name.
        """
        require(0 <= share <= 1, "share", "PruningCurve", "lie between 0 and 1", share)
        model = _model(self.posterior, "PruningCurve")
        flags = keep_mask(model, self.order, share)
        return {block.name: block.free(flags) for block in model.layout.blocks if block.name in model.network.params}

    def network(self, share: float) -> nn.Module:
        """Return a copy of the network with the posterior's mean weights and the pruned weights set to zero.

        Args:
            share: The share of weights to keep, between 0 and 1.

        Returns:
            The pruned network.
        """
        net, masks = at_mean(self.posterior), self.mask(share)
        with torch.no_grad():
            for name, p in net.named_parameters():
                if name in masks:
                    p.mul_(masks[name])
        return net

    def plot(self, path: str | Path | None = None) -> Figure:
        """Plot every score against the share of weights kept.

        Args:
            path: A file to save the figure to. Default: None, which saves nothing.

        Returns:
            The matplotlib figure.
        """
        from priory.plot.sweeps import pruning

        figure = pruning(self)
        if path is not None:
            figure.savefig(path)
        return figure

    def __str__(self) -> str:
        lines = [["kept %", *(SCORE_TITLES[name] for name in self.scores)]]
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
    shares: Sequence[float] = DEFAULT_SHARES,
    samples: int = 64,
    seed: int = 0,
) -> PruningCurve:
    """Set more and more weights of a Gaussian posterior to zero and score the predictions at each level of sparsity.

    Draws of the posterior predict with the pruned weights set to zero. Only weights of layers are pruned; biases and
    normalisation parameters stay. Every share uses the same draws.

    Args:
        posterior: A Gaussian posterior of a Model, as those of `MeanField`, `Laplace` and `SWAG` are.
        test: A pair (X, y) to score the predictions on.
        by: The criterion: "signal_to_noise", |mu| / sigma, or "density_at_zero", log q(0). Default:
            "signal_to_noise".
        shares: Shares of the weights to keep, between 0 and 1. Default: nine shares from 1 to 0.02.
        samples: Posterior draws per prediction. Default: 64.
        seed: Seed of the draws. Default: 0.

    Returns:
        The scores at every share with their standard errors.

    Raises:
        InputError: If the posterior is not Gaussian or an argument is invalid.

    Example:
        >>> import torch
        >>> import priory as pr
        >>> X = torch.linspace(-1, 1, 50)[:, None]
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> model = pr.Model(net, pr.Gaussian(0.1))
        >>> posterior = pr.fit(model, (X, X[:, 0]), pr.MeanField(), steps=1000, progress=False)
        >>> curve = pr.prune_weights(posterior, (X, X[:, 0]), shares=(1.0, 0.5))
        >>> curve.mask(0.5)["0.weight"].shape
        torch.Size([8, 1])

    References:
        Blundell et al. (2015), "Weight Uncertainty in Neural Networks".
        Graves (2011), "Practical Variational Inference for Neural Networks".
    """
    owner = "prune_weights"
    model = _model(posterior, owner)
    require(by in ("signal_to_noise", "density_at_zero"), "by", owner, "be 'signal_to_noise' or 'density_at_zero'", by)
    pair = isinstance(test, (tuple, list)) and len(test) == 2
    require(pair, "test", owner, "be a pair (X, y)", test)
    require(is_integer(samples, 1), "samples", owner, "be an integer >= 1", samples)
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
    """Return the coordinates of the layers' weights, most important first."""
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
    """Return the mean and standard deviation of each coordinate of a Gaussian posterior, (P,) each."""
    if isinstance(posterior, LaplacePosterior):
        scale = torch.full_like(posterior.w, torch.finfo(posterior.w.dtype).tiny)  # coordinates that are not drawn
        scale[posterior.selection.places] = posterior.gaussian.variance().sqrt()
        return posterior.w, scale
    if isinstance(posterior, Variational) and isinstance(
        posterior.family, (DiagonalFamily, FullRankFamily, LowRankFamily)
    ):
        mean, variance = posterior.family.moments()
        return mean.detach(), variance.detach().sqrt()
    raise InputError(
        f"The 'posterior' argument of prune_weights must be Gaussian, as those of MeanField, Laplace and SWAG are, got "
        f"{type(posterior).__name__}."
    )


def keep_mask(model: Model, order: Tensor, share: float) -> Tensor:
    """Return a mask (P,): one for each coordinate that is kept, zero for each that is pruned."""
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
