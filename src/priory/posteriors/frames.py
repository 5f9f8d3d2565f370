"""Draws of a posterior as a pandas DataFrame."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from priory.core.errors import extra
from priory.diagnostics.summary import labels
from priory.posteriors.summaries import varying

if TYPE_CHECKING:
    from torch import Tensor

    from priory.core.flat import Layout


def frame_of(layout: Layout, w: Tensor, chains: int | None = None) -> Any:
    """Return a DataFrame of draws w (S, P): one row per draw, one column per entry of the constrained parameters.

    Entries that a support keeps constant are left out. With `chains`, the draws are those of so many chains, one after
    the other, and the index is (chain, draw).
    """
    pandas = extra("pandas", "plot")
    drawn, columns = layout.constrain(w), {}
    for block in layout.blocks:
        x, varies = drawn[block.name], varying(block.bijector).tolist()
        values = x.detach().cpu().reshape(len(x), -1).numpy()
        names = labels(block.name, x.shape[1:])
        columns |= {name: values[:, i] for i, name in enumerate(names) if varies[i]}
    if chains is None:
        return pandas.DataFrame(columns, index=pandas.RangeIndex(len(w), name="draw"))
    index = pandas.MultiIndex.from_product([range(chains), range(len(w) // chains)], names=["chain", "draw"])
    return pandas.DataFrame(columns, index=index)
