"""Expectations of a latent model over data: the E-step over many rows, Fisher's score, and M-steps by L-BFGS."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from priory.core.data import Batch, Data
from priory.latent.rows import Expectation, Theta

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from priory.latent.base import Latent


def expect(
    model: Latent, thetas: Sequence[Theta], batches: Iterable[Batch], factor: float = 1.0, **asked: Any
) -> list[Expectation]:
    """Run the E-step at each theta over some batches, which are read once.

    Args:
        model: A latent model that is bound to data.
        thetas: The parameters, one dict per E-step.
        batches: The batches of rows.
        factor: The number of rows that each row stands for. Default: 1.
        **asked: Further fields of `Rows`, such as `temperature` or `draws`.

    Returns:
        For each theta the statistics and the bound, in float64, with log p(theta) included in the bound.
    """
    sums: list[dict[str, Tensor]] = [{} for _ in thetas]
    bounds, gaps = [0.0] * len(thetas), [0.0] * len(thetas)
    with torch.no_grad():
        for batch in batches:
            rows = model.weighted_rows(batch, **asked)
            for i, theta in enumerate(thetas):
                found = model.e_step(theta, rows)
                bounds[i] += float(rows.counted(found.bound.double()).sum())
                gaps[i] += 0.0 if found.gap is None else float(rows.counted(found.gap.double()).sum())
                for name, t in found.statistics.items():
                    sums[i][name] = sums[i][name] + t.double() if name in sums[i] else t.double()
        priors = [float(model.log_prior(theta)) for theta in thetas]
    number = lambda x: torch.tensor(x, dtype=torch.float64)  # noqa: E731
    return [
        Expectation(
            {name: factor * t for name, t in sums[i].items()},
            number(factor * bounds[i] + priors[i]),
            number(factor * gaps[i]),
        )
        for i in range(len(thetas))
    ]


def score(model: Latent, theta: Theta, data: Data) -> Tensor:
    """Return the gradient of log p(y | theta) p(theta) in unconstrained coordinates, by one E-step.

    Fisher's identity makes it the gradient of Q.

    Args:
        model: A latent model that is bound to data.
        theta: The parameters by name.
        data: The rows.

    Returns:
        The gradient, (P,).
    """
    (found,) = expect(model, [theta], data.blocks(model.block))
    return _slope(model, found.statistics, model.layout.unconstrain(theta))[1]


def lbfgs_steps(model: Latent, statistics: Mapping[str, Tensor], theta: Theta, steps: int) -> Theta:
    """Increase Q by `steps` iterations of L-BFGS in unconstrained coordinates; the first is along the gradient."""
    begin = model.layout.unconstrain(theta).double()
    u = begin.clone().requires_grad_()
    scale = 1 / max(1.0, float(_slope(model, statistics, begin)[1].abs().max()))  # Q grows with N, L-BFGS expects unit
    optimizer = torch.optim.LBFGS(
        [u],
        max_iter=steps,
        max_eval=25 * steps,
        tolerance_grad=1e-12,
        tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        value, gradient = _slope(model, statistics, u.detach())
        u.grad = -scale * gradient
        return -scale * value

    optimizer.step(closure)
    reached = {name: t.to(model.dtype) for name, t in model.layout.constrain(u.detach()).items()}
    risen = _slope(model, statistics, u)[0] > _slope(model, statistics, begin)[0]
    return reached if bool(risen) and model.allows(reached) else theta


def _slope(model: Latent, statistics: Mapping[str, Tensor], u: Tensor) -> tuple[Tensor, Tensor]:
    """Return Q + log p(theta) and its gradient at unconstrained coordinates u (P,)."""
    leaf = u.detach().requires_grad_()
    with torch.enable_grad():
        theta = model.layout.constrain(leaf)
        value = model.complete(theta, statistics) + model.log_prior(theta)
        (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), gradient
