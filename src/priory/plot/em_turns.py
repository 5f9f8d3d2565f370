"""Iterations of EM along one or two entries of theta, for the plots of `priory.plot.em`.

Along entries u of theta, with all other parameters fixed, the log-likelihood is a curve or a surface. A turn is one
E-step and one M-step on it:

    E-step   q_t = p(z | y, theta(u_t)):  Q(theta(u), theta(u_t)) + H(q_t) touches log p(y | theta(u)) at u_t
    M-step   u_{t+1} maximises the bound; the log-likelihood there is at least as high as the bound

References:
    Neal and Hinton (1998), A view of the EM algorithm that justifies incremental, sparse, and other variants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from priory.core.errors import is_integer, require
from priory.latent import Latent, expect
from priory.latent.base import has_latent

if TYPE_CHECKING:
    from priory.latent.base import Theta

Entry = tuple[str, int | tuple[int, ...]]
GRID_POINTS = {1: 201, 2: 31}  # per dimension of u, by the number of dimensions
SIMPLEX_PARAMETERS = ("weights", "initial", "transitions", "probs")  # parameters whose last dimension sums to one


@dataclass(frozen=True)
class Turn:
    """One E-step and one M-step along one or two entries u of theta.

    Attributes:
        here: u_t, (1,) or (2,).
        after: u_{t+1}, which maximises the bound.
        grids: Grid values of each entry of u.
        log_likelihood: Log-likelihood on the grid in nats, (G,) or (G, G) with the first entry along the first
            dimension.
        bound: Bound on the grid in nats, in the shape of `log_likelihood`.
        at_here: Log-likelihood at u_t, which equals the bound there.
        at_after: Log-likelihood at u_{t+1}.
        top: Bound at u_{t+1}.
    """

    here: Tensor
    after: Tensor
    grids: tuple[Tensor, ...]
    log_likelihood: Tensor
    bound: Tensor
    at_here: float
    at_after: float
    top: float


def entries(theta: Mapping[str, Any], *which: Entry) -> Callable[[Tensor], Theta]:
    """Return theta as a function of one or two of its entries, with all other parameters fixed.

    In parameters that sum to one, the other entries are rescaled in proportion.

    Args:
        theta: Parameters of a latent model by name.
        which: One or two entries as (name, index), such as ("means", 0) or ("means", (0, 1)).

    Returns:
        A function from u, (1,) or (2,), to theta.

    Raises:
        InputError: If there are not one or two entries, or if theta has no such entry.
    """
    require(len(which) in (1, 2), "which", "entries", "be one entry or two", f"{len(which)}")
    held = {name: torch.as_tensor(t, dtype=torch.float64) for name, t in theta.items()}
    for name, index in which:
        try:
            inside = name in held and held[name][index].ndim == 0
        except (IndexError, TypeError):
            inside = False
        require(inside, "which", "entries", f"be entries of {', '.join(held)}, such as ('means', 0)", (name, index))

    def along(u: Tensor) -> Theta:
        changed = dict(held)
        for value, (name, index) in zip(u.to(torch.float64), which, strict=True):
            chosen = torch.zeros_like(held[name], dtype=torch.bool)
            chosen[index] = True
            rest = changed[name]
            if name in SIMPLEX_PARAMETERS:
                shares = chosen.any(-1, keepdim=True)  # the simplex that contains the entry
                left = (1 - value) / (1 - (rest * chosen).sum(-1, keepdim=True))
                rest = torch.where(shares, rest * left, rest)
            changed[name] = torch.where(chosen, value, rest)
        return changed

    return along


def turns(
    model: Latent,
    data: Any,
    along: Callable[[Tensor], Theta],
    start: Sequence[float],
    span: Sequence[tuple[float, float]],
    count: int = 3,
) -> list[Turn]:
    """Compute iterations of EM restricted to theta = `along(u)`, together with log-likelihood and bound on a grid.

    Args:
        model: A latent model of `priory.latent`.
        data: Data, as for `fit`.
        along: A function from u, (1,) or (2,), to parameters of the model, such as `entries` returns.
        start: Initial u, one or two numbers.
        span: A pair (low, high) for each entry of u, the ends of the grid. The bound must have its maximum inside.
        count: Number of iterations. Default: 3.

    Returns:
        One `Turn` per iteration.

    Raises:
        InputError: If an argument is invalid, or if the bound has its maximum at the edge of the grid.
    """
    require(has_latent(model), "model", "turns", "be a latent model", type(model).__name__)
    require(is_integer(count, 1), "count", "turns", "be an integer >= 1", repr(count))
    here = torch.as_tensor(start, dtype=torch.float64).reshape(-1)
    require(len(here) in (1, 2), "start", "turns", "be one number or two", start)
    ok = len(span) == len(here) and all(low < u < high for (low, high), u in zip(span, here.tolist(), strict=True))
    require(ok, "span", "turns", "be one pair (low, high) per entry of u, with the start between them", span)
    model, rows = model.bind(data)
    size = GRID_POINTS[len(here)]
    grids = tuple(torch.linspace(low, high, size, dtype=torch.float64) for low, high in span)
    points = torch.cartesian_prod(*grids).reshape(-1, len(here))

    def log_likelihood(u: Tensor) -> Tensor:
        try:
            return torch.stack([e.bound for e in expect(model, [along(one) for one in u], rows.blocks(model.block))])
        except RuntimeError:  # a covariance that is not positive definite
            return torch.full((len(u),), torch.nan)

    curve = log_likelihood(points).reshape([size] * len(here))
    inside = bool(torch.isfinite(curve).all())
    require(inside, "span", "turns", "contain only values at which theta is valid", span)
    found = []
    for _ in range(int(count)):
        turn = _turn(model, rows.blocks(model.block), along, here, grids, points, curve, log_likelihood)
        found.append(turn)
        here = turn.after
    return found


def _turn(
    model: Latent,
    blocks: Any,
    along: Callable[[Tensor], Theta],
    here: Tensor,
    grids: tuple[Tensor, ...],
    points: Tensor,
    curve: Tensor,
    log_likelihood: Callable[[Tensor], Tensor],
) -> Turn:
    """One iteration: the E-step at u_t, the bound on the grid, and its maximum."""
    (found,) = expect(model, [along(here)], blocks)

    def objective(u: Tensor) -> Tensor:
        theta = along(u)
        return model.complete(theta, found.statistics) + model.log_prior(theta)

    with torch.no_grad():
        entropy = found.bound - objective(here)
        bound = torch.stack([objective(u) for u in points]) + entropy
    best = int(bound.argmax())
    inside = all(grid[0] < u < grid[-1] for grid, u in zip(grids, points[best], strict=True))
    must = "extend to both sides of the maximum of the bound"
    require(inside, "span", "turns", must, f"a bound with its maximum at the edge, {points[best].tolist()}")
    after = summit(objective, points[best])
    top, risen = float(objective(after) + entropy), float(log_likelihood(after[None])[0])
    return Turn(here, after, grids, curve, bound.reshape(curve.shape), float(found.bound), risen, top)


def summit(objective: Callable[[Tensor], Tensor], near: Tensor) -> Tensor:
    """Return the maximum of a smooth function of a few variables, by L-BFGS from a nearby point."""
    u = near.clone().requires_grad_()
    scale = max(1.0, abs(float(objective(near))))
    optimizer = torch.optim.LBFGS(
        [u], max_iter=100, tolerance_grad=1e-14, tolerance_change=1e-16, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = -objective(u) / scale
        loss.backward()
        return loss

    optimizer.step(closure)
    return u.detach()
