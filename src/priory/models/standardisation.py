"""The units of a model's inputs and targets, estimated from the rows of a fit.

A model with `standardise=True` gets them when it is bound to data. Inputs are standardised as they are prepared; the
likelihood takes targets in the user's units (`Likelihood.in_units`), so densities contain the Jacobian of the scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from priory.core.data import WeightedBatch, check_finite, part
from priory.core.errors import require, warn
from priory.core.tables import counted
from priory.core.units import CONSTANT_SPREAD, RunningMoments, Units

if TYPE_CHECKING:
    from collections.abc import Mapping

    from priory.core.data import Batch, Data
    from priory.network.skeleton import Network

BLOCK_ROWS = 4096  # rows whose moments are computed together
TRIAL_ROWS = 2048  # first rows of a Dataset or a DataLoader whose scale is looked at
MAX_MEAN_SPREADS = 3.0  # |mean| over standard deviation beyond which an optimiser at unit scale has far to go
UNIT_REACH = 1.0  # a mean up to this size is within reach of a prior at unit scale, whatever the spread
SPREAD_RANGE = (0.1, 10.0)  # standard deviations that count as unit scale
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Standardisation:
    """The units of each input and of the targets; None where numbers stay as they are, as tokens and labels.

    Args:
        inputs: Units of each input.
        targets: Units of the targets.
    """

    inputs: tuple[Units | None, ...]
    targets: Units | None

    @classmethod
    def of(cls, data: Data, network: Network, with_targets: bool) -> Standardisation:
        """Estimate the units by one pass over the rows, each with its weight.

        Columns of a table, channels of images and features of a sequence have units of their own. A target of one
        dimension has units per output, one of more dimensions has one pair for all of its entries.

        Args:
            data: Rows in the user's units.
            network: The network that takes the inputs.
            with_targets: Whether the targets have units.

        Returns:
            The units of inputs and targets.

        Raises:
            InputError: If a value is not finite.
        """
        require(data.num_data is not None, "data", "fit", "be inputs and targets, such as (X, y)", None)
        moments: list[RunningMoments | None] = []
        first: Batch = ()
        for batch in data.blocks(BLOCK_ROWS):
            if not moments:
                require(len(batch) >= 2, "data", "fit", "be inputs and targets, such as (X, y)", f"{len(batch)} part")
                first = batch
                moments = [
                    RunningMoments(feature_dim(x, network)) if has_units(x, network) else None for x in batch[:-1]
                ]
                real = with_targets and not batch[-1].is_complex()
                moments.append(RunningMoments(1 if batch[-1].ndim == 2 else None) if real else None)
            weights = batch.weights if isinstance(batch, WeightedBatch) else None
            for i, (t, moment) in enumerate(zip(batch, moments, strict=True)):
                if moment is not None:
                    check_finite(t, part(i, len(batch)))
                    moment.add(t, weights)
        units = [
            None if moment is None else moment.units(0 if moment.dim is None else t.ndim - 1 - moment.dim)
            for t, moment in zip(first, moments, strict=True)
        ]
        return cls(tuple(units[:-1]), units[-1])

    def standard_inputs(self, inputs: Batch, dtype: torch.dtype) -> Batch:
        """Standardise inputs in their own precision, or in that of `dtype` if it is higher."""
        must = f"have {counted(len(self.inputs), 'part')} of inputs, as the rows of the fit"
        require(len(inputs) == len(self.inputs), "x", "the model", must, len(inputs))
        found = []
        for x, units in zip(inputs, self.inputs, strict=True):
            wide = torch.promote_types(x.dtype, dtype) if x.is_floating_point() else torch.float64
            found.append(x if units is None else units.standard(x.to(wide)))
        return tuple(found)

    def original_inputs(self, inputs: Batch) -> Batch:
        """Return standardised inputs in the user's units, in float64."""
        pairs = zip(inputs, self.inputs, strict=True)
        return tuple(x if units is None else units.restore(x.double()) for x, units in pairs)

    def tensors(self) -> dict[str, Tensor]:
        """Return the units by name, for a file."""
        named = {f"input.{i}": units for i, units in enumerate(self.inputs)} | {"targets": self.targets}
        found = {f"{name}.{key}": t for name, u in named.items() if u is not None for key, t in u.tensors().items()}
        return found | {"inputs": torch.tensor(len(self.inputs))}

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor]) -> Standardisation:
        """Restore what `tensors` returned."""

        def units(name: str) -> Units | None:
            own = {key: tensors[f"{name}.{key}"] for key in ("shift", "scale") if f"{name}.{key}" in tensors}
            return Units.of_tensors(own) if own else None

        return cls(tuple(units(f"input.{i}") for i in range(int(tensors["inputs"]))), units("targets"))

    def __str__(self) -> str:
        """Describe the units: those of targets in full, those of inputs if they are few."""
        texts = ["inputs" if len(self.inputs) == 1 else f"inputs {i}" for i in range(len(self.inputs))]
        named = [*zip(texts, self.inputs, strict=True), ("targets", self.targets)]
        return ", ".join(f"{name} {written(units)}" for name, units in named if units is not None)


def has_units(x: Tensor, network: Network) -> bool:
    """Whether an input holds numbers rather than indices: floats, or integers that the network takes as numbers."""
    return x.is_floating_point() or (network.takes_numbers and not x.is_complex() and x.dtype != torch.bool)


def feature_dim(x: Tensor, network: Network) -> int | None:
    """Return the dimension of the columns of a table, of the channels of images, or of the features of a sequence.

    Channels come second, and so do those of three dimensions that a convolution reads; other features come last.
    """
    if x.ndim < 2:
        return None
    convolved = any(isinstance(layer, CONVOLUTIONS) for layer in network.layers)
    return 1 if x.ndim == 2 or x.ndim > 3 or convolved else x.ndim - 1


def written(units: Units) -> str:
    """Write units as "35.8 +- 16.7", or by the number of their columns.

    >>> written(Units(torch.tensor(35.8), torch.tensor(16.7)))
    '35.8 +- 16.7'
    >>> written(Units(torch.zeros(8), torch.ones(8)))
    'in 8 columns'
    """
    if units.scale.numel() > 1:
        return f"in {units.scale.numel()} columns"
    return f"{float(units.shift):.3g} +- {float(units.scale):.3g}"


def warn_of_scale(data: Data, network: Network, with_targets: bool) -> None:
    """Warn of the first input, or of targets, whose mean or spread is far from unit scale, in the first rows."""
    if data.num_data is None:
        return
    batch = data.in_memory() or data.some(TRIAL_ROWS)
    counted_rows = batch.weights > 0 if isinstance(batch, WeightedBatch) else None
    for i, t in enumerate(batch):
        target = i == len(batch) - 1
        if len(t) < 2 or not (with_targets if target else has_units(t, network) and t.is_floating_point()):
            continue
        dim = (1 if t.ndim == 2 else None) if target else feature_dim(t, network)
        columns = (t if counted_rows is None else t[counted_rows.to(t.device)]).detach().double()
        columns = columns.reshape(-1, 1) if dim is None else columns.movedim(dim, -1).reshape(-1, columns.shape[dim])
        place = odd_column(columns)
        if place is not None:
            where = f", column {place}," if columns.shape[1] > 1 else ""
            mean, spread = float(columns[:, place].mean()), float(columns[:, place].std(correction=0))
            warn(
                f"The {part(i, len(batch))}{where} have mean {mean:.3g} and standard deviation {spread:.3g}, but "
                "priors and learning rates assume unit scale: use Model(..., standardise=True)."
            )


def odd_column(columns: Tensor) -> int | None:
    """Return the first of the columns (n, D) that is far from unit scale, or None.

    The spread of a column of rare indicators is small, but its values are at unit scale. So is that of a column that is
    mostly one value, such as a pixel at the edge of an image, because it rarely varies. A constant counts as a column
    of spread 1.

    >>> odd_column(torch.tensor([[0.0, 30.0], [1.0, 31.0]]))
    1
    >>> odd_column(torch.tensor([[0.0], [0.0], [0.01]]))
    """
    mean, spread = columns.mean(0), columns.std(0, correction=0)
    constant = spread <= CONSTANT_SPREAD * mean.abs()
    low, high = SPREAD_RANGE
    mostly_one_value = (columns == columns.median(0).values).double().mean(0) > 0.5
    small = (spread < low) & ((columns - mean).abs().amax(0) < UNIT_REACH / 2) & ~mostly_one_value
    far = mean.abs() > torch.where(constant, MAX_MEAN_SPREADS, (MAX_MEAN_SPREADS * spread).clamp_min(UNIT_REACH))
    odd = far | (~constant & (small | (spread > high)))
    return int(odd.nonzero()[0]) if bool(odd.any()) else None
