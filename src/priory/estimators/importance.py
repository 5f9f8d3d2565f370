"""The importance-weighted bound (Burda 2016), and the doubly-reparameterised estimator of its gradient (Tucker 2019).

    L_S = E[ log mean_s r_s ],   r_s = p(D, w_s) / q(w_s),   elbo = L_1 <= L_S <= log p(D)

With normalised weights v_s = r_s / sum r, its gradient is E[sum_s v_s d log r_s]. The part through log q at fixed w has
the mean of sum_s (v_s^2 - v_s) d log r_s along the path, so sum_s v_s^2 d log r_s along the path alone is unbiased. Its
signal-to-noise ratio does not fall as S grows. The ratios are those of the whole data, so minibatches can't be used.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from priory.core.errors import InputError, require
from priory.estimators.gradients import Estimate, at_draws, whole

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from priory.core.data import Batch
    from priory.families import Family
    from priory.models.target import Target


def importance_weighted(
    target: Target,
    family: Family,
    batch: Batch,
    buffers: Mapping[str, Tensor],
    generator: torch.Generator,
    samples: int,
    estimator: str = "doubly",
) -> Estimate:
    """Estimate minus the importance-weighted bound L_S and its gradient from fresh draws of q.

        L_S = E[log mean_s r_s],    r_s = p(D, w_s) / q(w_s)

    Args:
        target: The target of the fit, at temperature 1.
        family: The distribution q; the loss is differentiable in its tensors.
        batch: All rows of the data.
        buffers: Buffers of the network, by name.
        generator: Generator of the draws.
        samples: Number of draws, S.
        estimator: "doubly" or "pathwise". Default: "doubly".

    Returns:
        The estimate; its `weighted` is the bound.

    Raises:
        InputError: If the temperature is not 1, or the batch is only a part of the data.

    References:
        Burda, Grosse and Salakhutdinov (2016), Importance weighted autoencoders.
        Tucker et al. (2019), Doubly reparameterized gradient estimators for Monte Carlo objectives.
    """
    require(
        estimator in ("pathwise", "doubly"), "estimator", "the 'iwae' objective", "be 'pathwise' or 'doubly'", estimator
    )
    require(target.temperature == 1, "temperature", "the 'iwae' objective", "be 1", target.temperature)
    if batch and target.scale(len(batch[0])) != 1:
        raise InputError(
            "The importance-weighted bound needs every row at each step, "
            f"got {len(batch[0])} of {target.num_data} rows: set batch_size to the number of rows."
        )
    target = target.with_empirical_precisions(family.detached())
    w = family.sample(samples, generator)
    weights = family.weights(samples)
    plain = weights is None or estimator == "pathwise"
    require(plain, "estimator", "the 'iwae' objective", "be 'pathwise' for draws that are weighted", estimator)
    terms = at_draws(target, w, weights, batch, buffers, gradients=True)
    log_q = family.log_prob(w) if estimator == "pathwise" else family.detached().log_prob(w)
    ratios = terms.joint(target) - log_q  # log r, (S, *B)
    parts = -math.log(samples) if weights is None else weights.log()
    weighted = torch.logsumexp(ratios + parts, 0)
    if estimator == "doubly":
        share = torch.softmax(ratios + parts, 0).detach()
        loss = -(share.square() * ratios).sum(0)
    else:
        loss = -weighted
    found = whole(target, terms, log_q.detach())
    return replace(found, loss=loss, weighted=weighted.detach())
