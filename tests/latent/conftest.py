"""Fixtures: fitting a latent model by EM, and a small data set."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from priory.fitting.prepare import make_target
from priory.fitting.run import Run
from priory.latent import Latent
from priory.methods.em.em import EM
from priory.posteriors.latent import LatentPoint


def fitted(
    model: Latent, data: Any, method: EM | None = None, steps: int = 200, seed: int = 0, batch_size: int | None = None
) -> LatentPoint:
    method = method or EM()
    model, rows = model.meet(data, batch_size)
    target = make_target(model, rows)
    run = Run(target, method, method.plan(target, rows, steps, seed), seed, None)
    run.run(False, [])
    posterior = run.posterior()
    assert isinstance(posterior, LatentPoint)
    return posterior


@pytest.fixture(scope="session")
def fit_by_em() -> Callable[..., LatentPoint]:
    return fitted


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(scope="session")
def clouds() -> Tensor:
    """Return 120 rows of three overlapping clusters in three columns with unequal means and scales."""
    centres = torch.tensor([[0.0, 0.0, 0.0], [2.0, 1.0, 0.0], [0.0, 2.0, 2.5]], dtype=torch.float64)
    mixing = randn(1, 3, 3, 3) / 2 + torch.eye(3)
    rows = (randn(2, 3, 40, 3) @ mixing + centres[:, None]).reshape(-1, 3)
    return rows * torch.tensor([1.0, 10.0, 0.1], dtype=torch.float64) + torch.tensor([50.0, -20.0, 3.0]).double()
