import math

import pytest
import torch

import priory as pr
from priory.core.streams import stream
from priory.models.target import Target
from priory.posteriors import Evidence
from priory.posteriors.draws import Draws
from priory.testing import assert_mean_close

DENSITY = pr.Density(
    lambda p: -p["x"].square().sum() - p["s"], {"x": pr.Param((2,)), "s": pr.Param((), pr.constraints.positive)}
)
TARGET = Target(DENSITY, None)


def vectors(n: int) -> torch.Tensor:
    return torch.arange(3.0 * n, dtype=torch.float64).reshape(n, 3) / n


def test_sampling_all_draws_returns_a_permutation():
    w = vectors(50)
    drawn = Draws(TARGET, w).draw(50, stream(0))
    assert not torch.equal(drawn, w)
    assert torch.equal(drawn[drawn[:, 0].argsort()], w)


def test_fewer_draws_than_are_stored_are_all_different():
    assert len(Draws(TARGET, vectors(50)).draw(30, stream(0)).unique(dim=0)) == 30


def test_sampling_more_draws_than_stored_repeats_them_evenly():
    w = vectors(50)
    drawn = Draws(TARGET, w).draw(20_000, stream(0))
    assert_mean_close(drawn, w.mean(0))  # 3 comparisons: false alarms at 2e-6
    assert len(drawn.unique(dim=0)) == 50


def test_the_mean_is_over_the_constrained_parameters():
    w = torch.tensor([[1.0, 2.0, math.log(2)], [3.0, 6.0, math.log(4)]], dtype=torch.float64)
    mean = Draws(TARGET, w).mean
    torch.testing.assert_close(mean["x"], torch.tensor([2.0, 4.0], dtype=torch.float64), rtol=0, atol=1e-12)
    assert abs(float(mean["s"]) - 3.0) < 1e-12


@pytest.mark.parametrize("k_hat", [None, 0.3, -math.inf])
def test_a_file_stores_the_draws_and_their_k_hat(k_hat, tmp_path):
    posterior = Draws(TARGET, vectors(5), k_hat=k_hat, evidence=Evidence(-1.5, "a test's", 0.1))
    posterior.save(tmp_path / "draws")
    loaded = pr.load(tmp_path / "draws", DENSITY)
    assert isinstance(loaded, Draws)
    assert torch.equal(loaded.w, posterior.w)
    assert loaded.k_hat == k_hat
    assert loaded.log_evidence == posterior.log_evidence


def test_draws_have_no_density():
    posterior = Draws(TARGET, vectors(5))
    with pytest.raises(pr.InputError, match="The posterior of Draws has no density"):
        posterior.log_prob(posterior.mean)


def test_draws_have_no_evidence():
    with pytest.raises(pr.InputError, match="A set of draws gives no evidence: its draws have no density"):
        _ = Draws(TARGET, vectors(5)).log_evidence


@pytest.mark.parametrize("w", [torch.zeros(3), torch.zeros(0, 3), torch.zeros(5, 4)])
def test_draws_of_another_shape_are_refused(w):
    with pytest.raises(pr.InputError, match="The 'w' argument of Draws must be one draw or more of 3 coordinates"):
        Draws(TARGET, w)


def test_draws_that_are_not_finite_are_refused():
    with pytest.raises(pr.InputError, match="The 'w' argument of Draws must be finite"):
        Draws(TARGET, torch.full((2, 3), math.nan))
