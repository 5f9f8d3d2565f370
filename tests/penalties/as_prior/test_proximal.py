"""Proximal steps against the optimality conditions of their minimum."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Independent, Laplace, Normal

import priory as pr
from priory.distributions import GroupLasso as GroupDistribution
from priory.penalties import L1, ElasticNet, GroupLasso, ReverseGroupLasso
from priory.penalties.as_prior.proximal import group_soft_threshold, proximal_blocks

F64 = torch.float64


def draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def stepped(prior: object, shape: tuple[int, int] = (4, 3), lead: tuple[int, ...] = ()) -> tuple[Tensor, ...]:
    """Return u, the strides and prox(u) for the weight of a linear layer, with the penalty multiplied by 0.7."""
    model = pr.Model(nn.Linear(shape[1], shape[0], bias=False).to(F64), pr.Gaussian(1.0), prior=prior)
    (block,) = proximal_blocks(model.prior)
    u = draws(*lead, *shape)
    u[..., 0, :] *= 0.05  # a row and a column that the step sets to zero
    u[..., 0] *= 0.05
    u = u.reshape(*lead, -1)
    stride = draws(*lead, math.prod(shape), seed=1).exp() * 0.2
    x = u.clone()
    block.step(x, stride, 0.7)
    return tuple(t.reshape(*lead, *shape) for t in (u, stride, x))


def objective(x: Tensor, u: Tensor, stride: Tensor, r: Tensor) -> Tensor:
    return ((x - u).square() / (2 * stride)).sum() + r


PENALTY_CASES = {
    "L1": (L1(2.0), lambda x: 2.0 * x.abs().sum()),
    "ElasticNet": (ElasticNet(2.0, l1_ratio=0.6), lambda x: 1.2 * x.abs().sum() + 0.8 * x.square().sum()),
    "GroupLasso": (GroupLasso(2.0), lambda x: 2.0 * x.square().sum(1).sqrt().sum()),
    "ReverseGroupLasso": (ReverseGroupLasso(2.0), lambda x: 2.0 * x.square().sum(0).sqrt().sum()),
}


@pytest.mark.parametrize("name", PENALTY_CASES)
def test_no_other_point_has_a_lower_objective_than_the_proximal_point(name: str) -> None:
    penalty, r = PENALTY_CASES[name]
    u, stride, x = stepped(penalty)
    best = objective(x, u, stride, 0.7 * r(x))
    assert bool((x == 0).any())
    assert bool((x != 0).any())
    for seed in range(20):
        for size in (1e-4, 1e-2, 1.0):
            y = x + size * draws(4, 3, seed=seed)
            assert objective(y, u, stride, 0.7 * r(y)) >= best
    there = x.clone().requires_grad_()  # where the objective is smooth, its gradient is zero
    (slope,) = torch.autograd.grad(objective(there, u, stride, 0.7 * r(there)), there)
    torch.testing.assert_close(slope[x != 0], torch.zeros_like(slope[x != 0]), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", PENALTY_CASES)
def test_a_batch_of_members_takes_the_same_steps_as_each_member_alone(name: str) -> None:
    penalty, r = PENALTY_CASES[name]
    u, stride, x = stepped(penalty, lead=(2, 3))
    for i in range(2):
        for j in range(3):
            here, best = x[i, j], objective(x[i, j], u[i, j], stride[i, j], 0.7 * r(x[i, j]))
            for seed in range(5):
                y = here + 1e-3 * draws(4, 3, seed=seed)
                assert objective(y, u[i, j], stride[i, j], 0.7 * r(y)) >= best


def test_the_prior_behind_a_penalty_takes_the_same_steps() -> None:
    zero, scale = torch.zeros((), dtype=F64), torch.tensor(0.5, dtype=F64)
    joint = Independent(Laplace(torch.zeros(3, dtype=F64), 0.5 * torch.ones(3, dtype=F64)), 1)
    for prior in (Laplace(zero, scale), joint):
        torch.testing.assert_close(stepped(prior), stepped(L1(2.0)), rtol=0, atol=0)
    rows = GroupDistribution(torch.tensor(2.0, dtype=F64), 3)
    torch.testing.assert_close(stepped(rows), stepped(GroupLasso(2.0)), rtol=0, atol=1e-12)


def test_the_proximal_step_of_a_shifted_laplace_prior_moves_towards_its_location() -> None:
    there = Laplace(torch.tensor(5.0, dtype=F64), torch.tensor(1e-3, dtype=F64))
    assert bool((stepped(there)[2] == 5).all())


def test_the_length_of_a_group_is_found_for_strides_over_many_decades() -> None:
    u, stride = 3 * draws(500, 7), (4 * draws(500, 7, seed=1)).exp()
    x = group_soft_threshold(u, stride, 1.0)
    kept = (x != 0).any(-1)
    assert 0 < int(kept.sum()) < 500
    assert bool((torch.linalg.vector_norm(u / stride, dim=-1) > 1).eq(kept).all())
    x, u, stride = x[kept], u[kept], stride[kept]
    wanted = u - stride * x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    torch.testing.assert_close(x, wanted, rtol=1e-8, atol=1e-8)


def test_a_smooth_prior_has_no_proximal_step() -> None:
    model = pr.Model(nn.Linear(3, 1).to(F64), pr.Gaussian(1.0), prior=Normal(0.0, 1.0))
    assert proximal_blocks(model.prior) == []
