"""z observed gives the closed forms, z hidden comes near them, and the bound touches the curve where it says."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from priory.testing import assert_mean_close


@pytest.fixture(scope="module")
def example(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("two_gaussians")


@pytest.fixture(scope="module")
def rows(example: ModuleType):
    return example.made()


@pytest.fixture(scope="module")
def hidden(example: ModuleType, rows):
    return example.hidden(rows[0])


@pytest.fixture(scope="module")
def theta(example: ModuleType, hidden):
    return example.ordered(hidden.mean)


@pytest.fixture(scope="module")
def frames(example: ModuleType, rows, theta):
    return example.iterations(rows[0], theta)


def test_the_rows_are_drawn_by_their_z_first(example: ModuleType):
    y, z = example.made(20_000)  # five comparisons at 5 standard errors: false alarms below 3e-6
    assert_mean_close(z.double(), example.PI)
    for k in range(2):
        assert_mean_close(y[z == k], example.MEANS[k])
        assert_mean_close((y[z == k] - example.MEANS[k]).square(), example.SCALES[k] ** 2)


def test_with_z_observed_the_fit_is_the_means_variances_and_shares_of_the_groups(example: ModuleType, rows):
    fitted, by_hand = example.observed(*rows).mean, example.by_hand(*rows)
    for name, t in by_hand.items():
        torch.testing.assert_close(fitted[name], t, rtol=1e-10, atol=0)


def test_with_z_hidden_the_fit_is_a_fixed_point_near_what_made_the_rows(example: ModuleType, rows, hidden, theta):
    y, _ = rows
    density = torch.distributions.Normal(theta["means"], theta["covariances"].sqrt()).log_prob(y[:, None])
    q = (density + theta["weights"].log()).softmax(1)  # the lectures' responsibilities, and its M-step below
    order = hidden.mean["means"].argsort()
    torch.testing.assert_close(hidden.responsibilities(y)[:, order], q, rtol=1e-9, atol=1e-12)
    shares = q.sum(0)
    torch.testing.assert_close(theta["weights"], shares / len(y), rtol=1e-4, atol=0)
    torch.testing.assert_close(theta["means"], q.T @ y / shares, rtol=1e-4, atol=0)
    # 4 standard errors of 80 rows, twice as wide for what hidden z cost
    assert (theta["means"] - torch.tensor(example.MEANS)).abs().max() < 8 * max(example.SCALES) / 80**0.5


def test_the_bound_lies_below_the_curve_and_touches_it_at_theta_t(frames):
    for frame in frames:
        below = frame.log_likelihood - frame.bound
        assert float(below.min()) > -1e-9
        away = (frame.grids[0] - frame.here).abs()
        assert bool((below <= 1e-9 + 8 * away.square())[away < 1].all())  # it touches, with the same slope
        assert float(below[away > 10].min()) > 1


def test_the_next_mean_is_the_bounds_maximum_and_the_next_place_to_touch(frames):
    assert [round(float(frame.here), 1) for frame in frames] == [78.0, 73.6, 62.3]
    for frame, following in zip(frames, [*frames[1:], None], strict=True):
        grid = frame.grids[0]
        assert float(grid[frame.bound.argmax()]) == pytest.approx(float(frame.after), abs=float(grid[1] - grid[0]))
        assert following is None or following.here == frame.after


def test_every_iteration_rises_at_least_as_much_as_the_bound_says(frames):
    for frame in frames:
        assert frame.at_after - frame.at_here > frame.top - frame.at_here > 20


def test_the_script_prints_both_answers_and_draws_them(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    example.main(tmp_path)
    by_hand, observed = (line.split("pi =")[1] for line in capsys.readouterr().out.splitlines()[1:3])
    assert by_hand == observed
    assert 10_000 < (tmp_path / "two_gaussians.png").stat().st_size < 120_000
