"""NUTS at its defaults: few gradients on raw scales, and an honest status where the posterior can't be sampled."""

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributions import HalfCauchy, Normal

import priory as pr
from priory import Param
from priory.core.streams import stream
from priory.diagnostics import mcse_mean, mcse_sd
from priory.models.target import Target
from priory.posteriors import Chains

DOUBLE = torch.float64
ROWS = 60


def covariate_near_100() -> tuple[Tensor, Tensor]:
    noise = torch.randn(2, ROWS, generator=stream(0, "raw"), dtype=DOUBLE)
    x = 100 + 15 * noise[0]
    return torch.stack([torch.ones_like(x), x], -1), 25 + 0.6 * x + 18 * noise[1]


def response_near_20000() -> tuple[Tensor, Tensor]:
    noise = torch.randn(2, ROWS, generator=stream(1, "raw"), dtype=DOUBLE)
    return torch.stack([torch.ones_like(noise[0]), noise[0]], -1), 20_000 + 3_000 * noise[0] + 5_000 * noise[1]


def years() -> tuple[Tensor, Tensor]:
    """An intercept and a slope over calendar years, with a correlation of -0.99998."""
    noise = torch.randn(ROWS, generator=stream(2, "raw"), dtype=DOUBLE)
    x = torch.linspace(1980, 2020, ROWS, dtype=DOUBLE)
    return torch.stack([torch.ones_like(x), x], -1), 10 + 0.02 * (x - 2000) + 0.3 * noise


@pytest.mark.parametrize("made", [covariate_near_100, response_near_20000, years])
def test_regressions_on_raw_scales_arrive_in_100_gradients_and_are_done_in_400(
    made: Callable[[], tuple[Tensor, Tensor]],
):
    """With flat priors of beta and log sigma, beta has a Student-t posterior around the least-squares solution.

    Twelve comparisons in all at 5 standard errors: false alarms at 7e-6.
    """
    X, y = made()

    def log_prob(p: dict[str, Tensor]) -> Tensor:
        residual = (y - p["beta"] @ X.T) * (-p["log_sigma"]).exp()[..., None]
        return -0.5 * residual.square().sum(-1) - ROWS * p["log_sigma"]

    density = pr.Density(log_prob, {"beta": Param((2,)), "log_sigma": Param()}, batched=True)
    posterior = pr.fit(density, None, pr.NUTS(), progress=False)
    assert posterior.status.name == "converged", posterior.status.reason
    gradients = posterior.history["gradients"]
    assert float(gradients[0]) < 100  # the ascent and the first transition
    assert float(gradients.sum()) < 400
    best = torch.linalg.lstsq(X, y[:, None]).solution[:, 0]
    square = (y - X @ best).square().sum() / (ROWS - 2)
    sd = (square * torch.linalg.inv(X.T @ X).diagonal() * (ROWS - 2) / (ROWS - 4)).sqrt()
    beta = posterior.draws["beta"]
    assert bool(((beta.mean((0, 1)) - best).abs() < 5 * mcse_mean(beta)).all())
    assert bool(((beta.flatten(0, 1).std(0) - sd).abs() < 5 * mcse_sd(beta)).all())


def funnel(p: dict[str, Tensor]) -> Tensor:
    """v ~ N(0, 3^2), and 9 coordinates ~ N(0, exp(v)): the neck is e^-9 times as wide as the mouth."""
    return Normal(0.0, 3.0).log_prob(p["v"]) + Normal(0.0, (p["v"] / 2).exp()).log_prob(p["x"]).sum()


def centred_schools(p: dict[str, Tensor]) -> Tensor:
    y = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0], dtype=DOUBLE)
    error = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0], dtype=DOUBLE)
    prior = Normal(0.0, 5.0).log_prob(p["mu"]) + HalfCauchy(5.0).log_prob(p["tau"])
    return prior + Normal(p["mu"], p["tau"]).log_prob(p["theta"]).sum() + Normal(p["theta"], error).log_prob(y).sum()


HARD = {
    "funnel": pr.Density(funnel, {"v": Param(), "x": Param((9,))}),
    "centred schools": pr.Density(
        centred_schools, {"mu": Param(), "tau": Param((), pr.constraints.positive), "theta": Param((8,))}
    ),
}


@pytest.mark.parametrize("name", HARD)
def test_a_neck_too_narrow_for_the_steps_is_not_called_converged(name: str):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pr.PrioryWarning)
        posterior = pr.fit(HARD[name], None, pr.NUTS(), progress=False)
    assert posterior.status.name in ("not_converged", "doubtful")
    assert any(word in posterior.status.reason for word in ("diverged", "R-hat", "ESS", "E-BFMI"))
    assert math.isfinite(float(posterior.w.sum()))


def test_divergences_are_told_beside_chains_that_disagree():
    target = Target(pr.Density(lambda p: -p["x"].square(), {"x": Param()}), None)
    w = torch.randn(4, 100, 1, generator=stream(3, "apart"), dtype=DOUBLE) + torch.arange(4.0)[:, None, None]
    divergent = torch.zeros(4, 100, dtype=torch.bool)
    divergent[1, 5] = divergent[2, 7] = True
    status = Chains(target, w, {}, {"divergent": divergent}).status
    assert status.name == "not_converged"
    assert "R-hat" in status.reason
    assert "2 draws diverged" in status.reason
