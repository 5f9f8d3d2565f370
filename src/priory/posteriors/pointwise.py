"""The log-likelihood of each row at each draw of a posterior, which LOO, WAIC and comparisons of models are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from priory.core.errors import InputError, is_integer, require

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from priory.core.data import Data
    from priory.models.target import Target
    from priory.posteriors.base import Posterior

BLOCK_ELEMENTS = 1 << 24  # likelihoods that are computed together
DEFAULT_DRAWS = 1000  # of a posterior that stores none


def pointwise(target: Target, w: Tensor, rows: Data, buffers: Mapping[str, Tensor]) -> Tensor:
    """Return log p(y_n | x_n, w) of every row at every vector w (S, P), in blocks of rows: (S, n)."""
    size = max(1, BLOCK_ELEMENTS // len(w))
    return torch.cat([target.pointwise(w, batch, buffers) for batch in rows.blocks(size)], -1)


def rows_of(posterior: Posterior, data: Any, owner: str) -> Data:
    """Return the rows of the given data, or those of the fit, in the model's types.

    Raises:
        InputError: If there are no data, or if the model's likelihood has no terms per row.
    """
    if not posterior.model.capabilities.separate_likelihood:
        raise InputError(
            f"{owner} needs a log-likelihood of each row, and a Density that is one log_prob has none: make it with "
            "'log_prior' and 'log_likelihood'."
        )
    if data is None:
        must = "be given: this posterior does not hold the data of its fit"
        require(posterior.data is not None, "data", owner, must, None)
        assert posterior.data is not None
        return posterior.data
    try:
        rows = posterior.model.bind(data)[1]
    except InputError as error:
        raise InputError(str(error).replace(" of fit ", f" of {owner} ", 1)) from error
    require(rows.num_data is not None, "data", owner, "have rows", None)
    return rows


def draws_of(posterior: Posterior, samples: int | None, generator: torch.Generator, owner: str) -> Tensor:
    """Return draws of the flat vector, (S, P): all stored ones in their order, or as many as are asked for."""
    require(samples is None or is_integer(samples, 1), "samples", owner, "be an integer >= 1", repr(samples))
    if posterior.point:
        return posterior.draw(1, generator)
    stored = posterior.stored_w
    if samples is None and stored is not None:
        return stored
    return posterior.draw(samples or DEFAULT_DRAWS, generator)
