"""Export of chains to ArviZ."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from priory.core.errors import extra
from priory.core.streams import stream
from priory.models.base import has_network

if TYPE_CHECKING:
    from torch import Tensor

    from priory.core.data import Data
    from priory.posteriors.chains import Chains

BLOCK_ELEMENTS = 1 << 24  # replicates that are drawn together
ARVIZ_NAMES = {"divergent": "diverging", "acceptance": "acceptance_rate", "steps": "n_steps"}


def exported(posterior: Chains, data: Any = None) -> Any:
    """Convert chains to ArviZ, as `Chains.to_arviz` documents."""
    az = extra("arviz", "plot")
    groups = {"posterior": {name: as_array(x) for name, x in posterior.draws.items()}}
    if posterior.statistics:
        groups["sample_stats"] = {ARVIZ_NAMES.get(n, n): as_array(t) for n, t in posterior.statistics.items()}
    rows = posterior.data if data is None else posterior.model.bind(data)[1]
    if rows is not None and rows.num_data is not None:
        replicates = replicated(posterior, rows) if has_network(posterior.model) else {}
        values = {"log_likelihood": posterior.log_likelihood(rows), **replicates}
        groups |= {name: {"y": as_array(t)} for name, t in values.items()}
    options = {}
    if posterior.superchains is not None:
        groups["constant_data"] = {"superchain": as_array(posterior.superchains)}
        options = {"dims": {"superchain": ["chain"]}}
    # from version 1 on, ArviZ takes all groups as one dict
    one = int(az.__version__.split(".")[0]) >= 1
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "More chains")  # than draws: many short chains are intended
        return az.from_dict(groups, **options) if one else az.from_dict(**groups, **options)


def replicated(posterior: Chains, rows: Data) -> dict[str, Tensor]:
    """Return the targets of the rows, (row, ...), and one replicate of them per draw, (chain, draw, row, ...)."""
    w, model = posterior.stored_w, posterior.model
    generator = stream(posterior.seed, "replicated", device=w.device)
    assert has_network(model)
    observed, drawn = [], []
    for *inputs, targets in rows.blocks(max(1, BLOCK_ELEMENTS // len(w))):
        with torch.no_grad():
            outputs = model.outputs(w, tuple(inputs), posterior.buffers, posterior.target.event)
            drawn.append(model.likelihood.draw(outputs, model.learnt_at(w), generator))
        observed.append(targets)
    replicates = torch.cat(drawn, 1).unflatten(0, posterior.w.shape[:2])
    return {"posterior_predictive": replicates, "observed_data": torch.cat(observed)}


def as_array(t: Tensor) -> Any:
    """Convert a tensor on any device to a numpy array."""
    return t.detach().cpu().numpy()
