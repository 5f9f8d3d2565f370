"""Ctrl-C during a fit: the posterior so far, a warning, and a checkpoint to resume from."""

import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import priory as pr

X = torch.linspace(-1, 1, 20)[:, None]
Y = 2 * X[:, 0]


def model() -> pr.Model:
    torch.manual_seed(0)
    return pr.Model(nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 1)), pr.Gaussian(0.1))


def normal() -> pr.Density:
    return pr.Density(lambda p: -0.5 * p["a"].square(), {"a": pr.Param()})


class PressCtrlC:
    """A callback that sends SIGINT to the process after a step, `times` times."""

    def __init__(self, step: int, times: int = 1) -> None:
        self.step, self.times = step, times

    def __call__(self, progress: Any) -> None:
        if progress.step == self.step:
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)


def interrupted(method: Any, step: int, **options: Any) -> Any:
    with pytest.warns(pr.PrioryWarning, match="was interrupted") as caught:
        posterior = pr.fit(model(), (X, Y), method, progress=False, callbacks=[PressCtrlC(step)], **options)
    assert len(caught) == 1
    return posterior


@pytest.mark.parametrize("method", [pr.MAP(), pr.MeanField(), pr.Ensemble(pr.MAP(), 2)])
def test_ctrl_c_returns_the_posterior_of_the_last_step(method: Any) -> None:
    found = interrupted(method, 7)
    stopped = pr.fit(model(), (X, Y), method, progress=False, callbacks=[lambda p: p.step == 7])
    assert len(found.history["loss"]) == 7
    assert all(torch.equal(found.mean[name], stopped.mean[name]) for name in found.mean)
    assert found.status.name == "not_converged"
    assert "stopped by Ctrl-C after step 7 of" in found.status.reason


def test_ctrl_c_returns_the_best_point_of_a_search_for_the_mode() -> None:
    banana = lambda p: -((1 - p["x"][0]) ** 2) - 100 * (p["x"][1] - p["x"][0] ** 2) ** 2  # noqa: E731
    density = pr.Density(banana, {"x": pr.Param((2,))})
    with pytest.warns(pr.PrioryWarning, match="was interrupted") as caught:
        found = pr.fit(density, None, pr.MAP(), progress=False, callbacks=[PressCtrlC(3)])
    assert len(caught) == 1
    assert len(found.history["loss"]) == 3
    assert "stopped by Ctrl-C after step 3 of" in found.status.reason


def test_a_fit_whose_length_was_given_warns_of_ctrl_c_too() -> None:
    assert interrupted(pr.MAP(), 7, steps=50).status.name == "not_converged"


def test_a_latent_model_has_its_parameters_so_far() -> None:
    rows = torch.randn(50, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with pytest.warns(pr.PrioryWarning, match=r"The fit by EM\(.*was interrupted") as caught:
        found = pr.fit(
            pr.latent.GaussianMixture(2), rows, pr.EM(tolerance=0.0), progress=False, callbacks=[PressCtrlC(3)]
        )
    assert len(caught) == 1
    assert len(found.history["bound"]) == 3
    assert found.status.name == "not_converged"


def test_the_handler_of_ctrl_c_is_restored() -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    interrupted(pr.MAP(), 3)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_raises_keyboard_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt):
        pr.fit(model(), (X, Y), pr.MAP(), progress=False, callbacks=[PressCtrlC(3, times=2)])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_program_is_left_alone() -> None:
    received = []
    before = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        posterior = pr.fit(model(), (X, Y), pr.MAP(), steps=10, progress=False, callbacks=[PressCtrlC(3)])
    finally:
        signal.signal(signal.SIGINT, before)
    assert received == [signal.SIGINT]
    assert len(posterior.history["loss"]) == 10


def test_an_interrupted_fit_resumes_from_its_checkpoint_with_the_same_bits(tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 40, "progress": False}
    whole = pr.fit(model(), (X, Y), pr.MeanField(), **options)
    interrupted(pr.MeanField(), 12, steps=40, checkpoint=tmp_path / "fit")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed = pr.fit(model(), (X, Y), pr.MeanField(), checkpoint=tmp_path / "fit", **options)
    assert torch.equal(resumed.mean["0.weight"], whole.mean["0.weight"])
    assert resumed.status == whole.status


def test_a_sampler_returns_the_draws_so_far() -> None:
    method = pr.NUTS(chains=4, warmup=50)
    with pytest.warns(pr.PrioryWarning, match="was interrupted"):
        found = pr.fit(normal(), None, method, steps=100, progress=False, callbacks=[PressCtrlC(80)])
    assert found.draws["a"].shape == (4, 30)
    assert found.status.name == "not_converged"


def test_a_sampler_without_a_draw_raises_keyboard_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt):
        pr.fit(normal(), None, pr.NUTS(chains=4, warmup=50), steps=100, progress=False, callbacks=[PressCtrlC(20)])
