"""The driver: steps and epochs, callbacks, schedules, progress, history, stages, and fits that diverge."""

import math
import os
import pty
import re
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import constraints
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import priory as pr
from priory.fitting.callbacks import FitProgress
from priory.methods.optimise import rates
from priory.posteriors import Posterior

SOURCE = Path(pr.__file__).parents[1]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


X = normal(10, 3)
Y = X @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) + 0.3 * normal(10, seed=1)


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()


def fit(method: Any, data: Any = (X, Y), *, likelihood: Any = None, net: Any = plain, **options: Any) -> Posterior:
    model = pr.Model(net(), likelihood or pr.Gaussian(0.3))
    return pr.fit(model, data, method, progress=False, **options)


class Notes:
    """A callback that records the progress that it is given."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.seen: list[FitProgress] = []
        self.stop_at = stop_at

    def __call__(self, progress: FitProgress) -> Any:
        self.seen.append(progress)
        return progress.step == self.stop_at

    def __getattr__(self, name: str) -> list[Any]:
        return [getattr(progress, name) for progress in self.seen]


# Steps and epochs.


@pytest.mark.parametrize("method", [pr.MAP(), pr.MeanField(), pr.MeanField(samples=2)], ids=str)
@pytest.mark.parametrize(
    ("rows", "batch_size", "epochs", "steps"),
    [(10, 4, 3, 9), (10, 5, 3, 6), (10, 10, 3, 3), (10, 50, 3, 3), (10, None, 3, 3), (10, 1, 2, 20), (1, 1, 2, 2)],
)
def test_an_epoch_is_one_pass_over_the_rows(
    method: Any, rows: int, batch_size: int | None, epochs: int, steps: int
) -> None:
    posterior = fit(method, (X[:rows], Y[:rows]), batch_size=batch_size, epochs=epochs)
    assert {len(values) for values in posterior.history.values()} == {steps}


def test_a_fit_takes_the_given_number_of_steps() -> None:
    for steps in (1, 2, 7):
        assert len(fit(pr.MeanField(), steps=steps, batch_size=4).history["loss"]) == steps


@pytest.mark.parametrize("last", [False, True])
def test_an_epoch_of_a_loader_is_one_pass_over_its_batches(last: bool) -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True, drop_last=last)
    posterior = fit(pr.MeanField(), loader, epochs=3)
    assert len(posterior.history["loss"]) == 3 * (2 if last else 3)
    assert posterior.num_data == 10


def test_the_number_of_rows_is_taken_from_the_data() -> None:
    for data in ((X, Y), (X.numpy(), Y.numpy()), TensorDataset(X, Y), DataLoader(TensorDataset(X, Y), batch_size=3)):
        assert fit(pr.MAP(), data, steps=2).num_data == 10


def test_every_epoch_of_minibatches_reads_each_row_once() -> None:
    seen: list[Tensor] = []

    class RecordingNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(1, 1).double()

        def forward(self, x: Tensor) -> Tensor:
            seen.append(x[:, 0].clone())
            return self.inner(x)

    rows = torch.arange(10.0).double()
    model = pr.Model(RecordingNet(), pr.Gaussian(1.0))
    pr.fit(model, (rows[:, None], rows), pr.MAP(), epochs=2, batch_size=4, progress=False)
    last = seen[-6:]
    assert [len(batch) for batch in last] == [4, 4, 2, 4, 4, 2]
    first, second = torch.cat(last[:3]), torch.cat(last[3:])
    assert sorted(first.tolist()) == sorted(second.tolist()) == rows.tolist()
    assert first.tolist() != second.tolist()


def test_without_epochs_and_steps_the_method_chooses_the_length() -> None:
    class Short(pr.MAP):
        def length(self, data: Any) -> int:
            return 4 * data.steps_per_epoch

    assert len(fit(Short(), batch_size=4).history["loss"]) == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "The 'epochs' argument of fit must be an integer >= 1, got 0."),
        ({"steps": -1}, "The 'steps' argument of fit must be an integer >= 1, got -1."),
        ({"steps": 2.5}, "The 'steps' argument of fit must be an integer >= 1, got 2.5."),
        ({"epochs": True}, "The 'epochs' argument of fit must be an integer >= 1, got True."),
        ({"epochs": 2, "steps": 3}, "The 'steps' argument of fit must be left out when epochs are given, got 3."),
        ({"batch_size": 0}, "The 'batch_size' argument of fit must be an integer >= 1, got 0."),
        ({"seed": 0.5}, "The 'seed' argument of fit must be an integer, got 0.5."),
        ({"temperature": 0.0}, "The 'temperature' argument of fit must be a positive number, got 0.0."),
        ({"tempers": "prior"}, "The 'tempers' argument of fit must be 'likelihood' or 'posterior', got 'prior'."),
    ],
)
def test_invalid_options_are_refused_with_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(pr.InputError, match=re.escape(message)):
        fit(pr.MAP(), **options)


def test_objects_that_are_not_methods_or_models_are_refused() -> None:
    for wrong, said in ((pr.MAP, r"the class MAP: write MAP\(\)"), ("map", "'map'"), (None, "None")):
        with pytest.raises(pr.InputError, match=rf"be a method such as MeanField\(\), got {said}."):
            fit(wrong, steps=2)
    with pytest.raises(
        pr.InputError,
        match=r"The 'model' argument of fit must be a Model, a Density or a latent model, such as .*, got Sequential.",
    ):
        pr.fit(plain(), (X, Y), pr.MAP(), steps=2)


# History.


@pytest.mark.parametrize(
    ("method", "names"),
    [(pr.MAP(), ["loss", "nll", "log_prior"]), (pr.MeanField(samples=2), ["elbo", "nll", "kl", "loss"])],
)
def test_the_history_has_one_float64_value_per_step_and_metric(method: Any, names: list[str]) -> None:
    for net in (plain, lambda: plain().float()):
        history = fit(method, net=net, steps=7, batch_size=4).history
        assert list(history) == names
        for values in history.values():
            assert values.shape == (7,)
            assert values.dtype == torch.float64
            assert not values.requires_grad


def test_the_terms_of_the_loss_in_the_history_add_up() -> None:
    point = fit(pr.MAP(), steps=7, batch_size=4, temperature=0.5).history
    torch.testing.assert_close(point["loss"], point["nll"] - 0.5 * point["log_prior"], rtol=0, atol=1e-10)
    field = fit(pr.MeanField(), steps=7, batch_size=4, temperature=0.5).history
    torch.testing.assert_close(field["elbo"], -field["nll"] - 0.5 * field["kl"], rtol=0, atol=1e-10)
    assert torch.equal(field["loss"], -field["elbo"])


def test_the_first_loss_is_that_of_the_initial_weights() -> None:
    net = plain()
    history = fit(pr.MAP(), steps=2).history
    log_prob = torch.distributions.Normal(net(X)[:, 0], 0.3).log_prob(Y).sum()
    assert history["nll"][0].item() == pytest.approx(-log_prob.item(), abs=1e-10)


def test_the_mean_nll_of_an_epoch_weights_batches_by_their_rows() -> None:
    # The learning rate is so small that the weights stay, so batches of 4, 4 and 2 rows estimate one number.
    history = fit(pr.MAP(learning_rate=1e-300), epochs=1, batch_size=4).history["nll"]
    weights = torch.tensor([4.0, 4.0, 2.0], dtype=torch.float64) / 10
    whole = fit(pr.MAP(), steps=1).history["nll"][0]
    assert float(weights @ history) == pytest.approx(whole.item(), abs=1e-9)


# Callbacks.


@pytest.mark.parametrize("method", [pr.MAP(), pr.MeanField()], ids=str)
def test_callbacks_are_called_at_the_end_of_each_epoch(method: Any) -> None:
    notes = Notes()
    fit(method, epochs=3, batch_size=4, callbacks=[notes])
    assert notes.step == [3, 6, 9]
    assert notes.epoch == [1, 2, 3]
    assert notes.steps == [9, 9, 9]


def test_an_incomplete_last_epoch_calls_no_callback() -> None:
    notes = Notes()
    fit(pr.MeanField(), steps=8, batch_size=4, callbacks=[notes])
    assert notes.step == [3, 6]


@pytest.mark.parametrize("steps", [12, 20, 31])
def test_callbacks_see_consecutive_epochs_also_while_the_noise_is_estimated(steps: int) -> None:
    notes = Notes()
    fit(pr.MAP(holdout=0.25), steps=steps, batch_size=3, likelihood=pr.Gaussian(), callbacks=[notes])
    assert notes.epoch == list(range(1, len(notes.seen) + 1))
    assert notes.step == sorted(set(notes.step))


def test_a_callback_gets_the_mean_metrics_of_the_epoch() -> None:
    notes = Notes()
    history = fit(pr.MeanField(), epochs=3, batch_size=4, callbacks=[notes]).history
    for i, metrics in enumerate(notes.metrics):
        assert set(metrics) == {"elbo", "nll", "kl", "loss"}
        for name, value in metrics.items():
            assert value == pytest.approx(history[name][3 * i : 3 * i + 3].mean().item(), rel=1e-12)


def test_a_callback_gets_the_current_posterior() -> None:
    kept: list[Posterior] = []
    last = fit(
        pr.MeanField(schedule="constant"), epochs=3, batch_size=4, callbacks=[lambda m: kept.append(m.posterior())]
    )
    for epoch, posterior in enumerate(kept, start=1):
        alone = fit(pr.MeanField(schedule="constant"), epochs=epoch, batch_size=4)
        assert torch.equal(posterior.family.loc, alone.family.loc)
        assert torch.equal(posterior.history["elbo"], alone.history["elbo"])
    assert torch.equal(kept[-1].family.loc, last.family.loc)


def test_a_callback_that_predicts_does_not_change_the_fit() -> None:
    for net in (plain, normed):
        without_callback = fit(pr.MeanField(), net=net, epochs=3, batch_size=5)
        with_callback = fit(
            pr.MeanField(),
            net=net,
            epochs=3,
            batch_size=5,
            callbacks=[lambda m: m.posterior().predict(X, samples=3).mean],
        )
        assert torch.equal(without_callback.family.loc, with_callback.family.loc)


def test_a_callback_that_returns_true_stops_the_fit_after_all_callbacks_are_called() -> None:
    first, second = Notes(stop_at=6), Notes()
    posterior = fit(pr.MeanField(), epochs=5, batch_size=4, callbacks=[first, second])
    assert first.step == second.step == [3, 6]
    assert len(posterior.history["loss"]) == 6


def test_a_callback_that_returns_another_value_does_not_stop_the_fit() -> None:
    posterior = fit(
        pr.MeanField(), epochs=3, batch_size=4, callbacks=[lambda progress: "continue", lambda progress: None]
    )
    assert len(posterior.history["loss"]) == 9


@pytest.mark.parametrize("answer", [True, np.True_, torch.tensor(True)], ids=repr)
def test_a_callback_may_return_the_true_of_torch_or_numpy(answer: object) -> None:
    assert len(fit(pr.MeanField(), epochs=3, batch_size=4, callbacks=[lambda progress: answer]).history["loss"]) == 3


def test_an_error_in_a_callback_is_raised_unchanged() -> None:
    def fail(progress: FitProgress) -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        fit(pr.MeanField(), epochs=3, callbacks=[fail])


# EarlyStop.


def test_early_stop_without_data_counts_epochs_without_a_lower_mean_loss() -> None:
    stop, notes = pr.EarlyStop(patience=4), Notes()
    posterior = fit(pr.MeanField(learning_rate=0.05), epochs=500, batch_size=4, callbacks=[notes, stop])
    losses = [metrics["loss"] for metrics in notes.metrics]
    assert 4 < len(losses) < 500
    best = min(range(len(losses)), key=losses.__getitem__)
    assert len(losses) == best + 1 + 4
    assert stop.best == losses[best]
    assert len(posterior.history["loss"]) == 3 * len(losses)


def test_early_stop_with_data_monitors_the_predictive_density() -> None:
    held, scores = (normal(6, 3, seed=4), 3 * normal(6, seed=5)), []

    def score(progress: FitProgress) -> None:
        scores.append(-float(progress.posterior().predict(held[0], samples=16).log_prob(held[1]).mean()))

    stop = pr.EarlyStop(patience=5, data=held)
    fit(pr.MeanField(learning_rate=0.05), epochs=500, batch_size=4, callbacks=[score, stop])
    assert len(scores) < 500
    best = min(range(len(scores)), key=scores.__getitem__)
    assert stop.best == pytest.approx(scores[best], rel=1e-12)
    assert len(scores) == best + 1 + 5


def test_early_stop_takes_arrays() -> None:
    stop = pr.EarlyStop(patience=2, data=(X.numpy(), Y.numpy()))
    assert len(fit(pr.MAP(), epochs=5, callbacks=[stop]).history["loss"]) <= 5
    assert math.isfinite(stop.best)


def test_an_improvement_below_the_least_one_does_not_count() -> None:
    stop = pr.EarlyStop(patience=3, least=1e9)
    assert len(fit(pr.MeanField(), epochs=50, callbacks=[stop]).history["loss"]) == 4


def test_early_stop_is_reset_between_fits() -> None:
    stop = pr.EarlyStop(patience=3, least=1e9)
    lengths = [len(fit(pr.MeanField(), epochs=50, callbacks=[stop]).history["loss"]) for _ in range(2)]
    assert lengths == [4, 4]


def test_patience_must_be_an_integer_of_at_least_one() -> None:
    with pytest.raises(pr.InputError, match=r"The 'patience' argument of EarlyStop must be an integer >= 1, got 0"):
        pr.EarlyStop(patience=0)


# Learning rates.


def one_cycle(step: int, top: float, total: int, begin: float = 0.3) -> float:
    """Return the rate of torch's default one-cycle schedule: from top/25 up and down to top/25e4, by cosines."""
    low, end, turn = top / 25, top / 25 / 1e4, begin * total - 1
    cosine = lambda a, b, t: b + (a - b) / 2 * (1 + math.cos(math.pi * t))  # noqa: E731
    return cosine(low, top, step / turn) if step <= turn else cosine(top, end, (step - turn) / (total - 1 - turn))


def in_sequence(optimizer: Any) -> lr_scheduler.LRScheduler:
    warm = lr_scheduler.LinearLR(optimizer, start_factor=0.25, total_iters=3)
    return lr_scheduler.SequentialLR(optimizer, [warm, lr_scheduler.ExponentialLR(optimizer, 0.5)], milestones=[4])


SCHEDULES: dict[str, tuple[Any, Callable[[int], float]]] = {
    "constant": ("constant", lambda t: 0.1),
    "cosine": ("cosine", lambda t: 0.05 * (1 + math.cos(math.pi * t / 20))),
    "StepLR": (lambda o: lr_scheduler.StepLR(o, step_size=6, gamma=0.3), lambda t: 0.1 * 0.3 ** (t // 6)),
    "LambdaLR": (lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)), lambda t: 0.1 / (1 + t)),
    "MultiStepLR": (lambda o: lr_scheduler.MultiStepLR(o, [3, 9]), lambda t: 0.1 * 0.1 ** ((t >= 3) + (t >= 9))),
    "CosineAnnealingLR": (
        lambda o: lr_scheduler.CosineAnnealingLR(o, 20, eta_min=0.01),
        lambda t: 0.01 + 0.045 * (1 + math.cos(math.pi * t / 20)),
    ),
    "OneCycleLR": (lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=20), lambda t: one_cycle(t, 0.2, 20)),
    "SequentialLR": (in_sequence, lambda t: 0.1 * (0.25 + 0.25 * t) if t < 4 else 0.1 * 0.5 ** (t - 4)),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_gives_the_rates_of_its_formula(name: str) -> None:
    schedule, by_hand = SCHEDULES[name]
    found = rates(schedule, 0.1, 20, "MAP")
    assert found.tolist() == pytest.approx([by_hand(t) for t in range(20)], rel=1e-9)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if not isinstance(SCHEDULES[name][0], str)])
def test_a_fit_with_a_schedule_matches_torch_adam_with_that_schedule(name: str) -> None:
    schedule = SCHEDULES[name][0]
    posterior = pr.fit(
        pr.Model(plain(), pr.Gaussian(0.3), prior=0.7),
        (X, Y),
        pr.MAP(learning_rate=0.1, schedule=schedule),
        steps=20,
        progress=False,
    )
    net = plain()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    scheduler = schedule(optimizer)
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)  # OneCycleLR changes the momentum too
    for _ in range(20):
        optimizer.zero_grad()
        squares = sum(p.square().sum() for p in net.parameters())
        (((net(X)[:, 0] - Y).square().sum() / (2 * 0.09)) + squares / (2 * 0.49)).backward()
        optimizer.step()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("warnings.warn", lambda *a, **k: None)  # SequentialLR warns by itself
            scheduler.step()
        optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    for key, p in net.named_parameters():
        torch.testing.assert_close(posterior.mean[key], p.detach(), rtol=0, atol=1e-9)


def test_a_schedule_that_needs_a_metric_is_refused() -> None:
    for method in (pr.MAP, pr.MeanField):
        with pytest.raises(pr.InputError, match=r"needs no metric, got ReduceLROnPlateau."):
            fit(method(schedule=lambda o: lr_scheduler.ReduceLROnPlateau(o)), steps=3)
        with pytest.raises(pr.InputError, match="The 'schedule' argument of"):
            fit(method(schedule=lambda o: 0.1), steps=3)
        with pytest.raises(
            pr.InputError, match=f"The 'schedule' argument of {method.__name__} must be 'cosine', 'constant'"
        ):
            method(schedule="linear")


# Stages.


class Short(pr.MAP):
    """MAP with few steps, as a first stage."""

    def length(self, data: Any) -> int:
        return 40


def test_a_stage_is_fitted_first_and_the_method_starts_from_its_mode() -> None:
    mode = fit(Short(learning_rate=0.05), batch_size=4, seed=4)  # a stage has the next seed
    tiny = 1e-12
    staged = fit(pr.MeanField(start=Short(learning_rate=0.05), learning_rate=tiny), steps=1, batch_size=4, seed=3)
    torch.testing.assert_close(staged.family.loc, mode.w, rtol=0, atol=1e-10)
    given = fit(pr.MeanField(start=mode, learning_rate=tiny), steps=1, batch_size=4, seed=3)
    assert torch.equal(given.family.loc, staged.family.loc)
    assert len(staged.history["elbo"]) == 1


def test_a_posterior_that_a_fit_starts_from_is_not_changed() -> None:
    mode = fit(Short())
    before = mode.w.clone()
    fit(pr.MAP(start=mode), steps=10)
    fit(pr.MeanField(start=mode), steps=10)
    assert torch.equal(mode.w, before)


def test_a_better_start_gives_a_better_first_bound() -> None:
    cold = fit(pr.MeanField(), steps=1, likelihood=pr.Gaussian())
    warm = fit(pr.MeanField(start=Short(learning_rate=0.05)), steps=1, likelihood=pr.Gaussian())
    assert warm.history["nll"][0] < cold.history["nll"][0]


def test_a_fit_that_starts_from_a_posterior_uses_its_running_statistics() -> None:
    first = fit(pr.MAP(), net=normed, steps=30, batch_size=5)
    second = fit(pr.MAP(start=first, learning_rate=1e-300), net=normed, steps=1, batch_size=10)
    seen = (X @ first.mean["0.weight"].T + first.mean["0.bias"]).mean(0)
    expected = 0.9 * first.buffers["1.running_mean"] + 0.1 * seen
    torch.testing.assert_close(second.buffers["1.running_mean"], expected, rtol=0, atol=1e-10)
    assert second.buffers["1.num_batches_tracked"].item() == 31


def test_a_density_of_one_tensor_of_data_may_have_a_stage() -> None:
    params = {"mean": pr.Param(), "scale": pr.Param((), constraints.positive)}

    def log_likelihood(p: dict[str, Tensor], y: Tensor) -> Tensor:
        return torch.distributions.Normal(p["mean"], p["scale"]).log_prob(y)

    def log_prior(p: dict[str, Tensor]) -> Tensor:
        return -0.5 * p["mean"].square() - p["scale"]

    model = pr.Density(params=params, log_prior=log_prior, log_likelihood=log_likelihood)
    posterior = pr.fit(model, Y, pr.MeanField(start=Short()), steps=3, progress=False)
    assert posterior.num_data == 10


def test_a_start_of_another_model_is_refused() -> None:
    other = fit(Short(), net=lambda: nn.Linear(3, 1).double())
    for method in (pr.MAP, pr.MeanField):
        with pytest.raises(pr.InputError, match="start"):
            fit(method(start=other), steps=3)


def test_an_invalid_start_is_refused() -> None:
    with pytest.raises(pr.InputError, match=r"start|method"):
        fit(pr.MeanField(start="map"), steps=3)


# Divergence.


def spiked(at: int) -> Callable[[Any], Any]:
    """Return a schedule that is constant up to a step and huge afterwards."""
    return lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda t: 1.0 if t < at else 1e200)


@pytest.mark.parametrize("method", [pr.MAP, pr.MeanField], ids=lambda m: m.__name__)
def test_a_fit_that_diverges_keeps_its_last_good_state(method: Any) -> None:
    with pytest.raises(pr.DivergedError) as caught:
        fit(method(schedule=spiked(150)), steps=400, batch_size=4, seed=6)
    error = caught.value
    assert re.search(rf"of {method.__name__} was not finite at step 15\d of 400; the state of step 100", str(error))
    assert "smaller learning_rate" in str(error)
    alone = fit(method(schedule=spiked(150)), steps=100, batch_size=4, seed=6)
    kept = error.posterior
    for name, t in alone.tensors().items():
        assert torch.equal(kept.tensors()[name], t)
    for name, values in alone.history.items():
        assert torch.equal(kept.history[name], values)
    assert kept.seed == 6
    assert bool(torch.isfinite(kept.predict(X, samples=3).mean).all())
    assert kept.method == alone.method


def test_a_fit_that_diverges_at_the_first_step_keeps_its_start() -> None:
    with pytest.raises(pr.DivergedError) as caught:
        fit(pr.MAP(learning_rate=1e200), steps=3)
    weights = torch.cat([p.detach().flatten() for p in plain().parameters()])
    assert torch.equal(caught.value.posterior.w, weights)
    assert {len(values) for values in caught.value.posterior.history.values()} == {0}


def test_a_fit_that_diverges_writes_no_checkpoint_with_nan(tmp_path: Path) -> None:
    path = tmp_path / "fit.checkpoint"
    with pytest.raises(pr.DivergedError):
        fit(pr.MeanField(schedule=spiked(15)), steps=40, batch_size=4, checkpoint=pr.Checkpoint(path, every=10))
    kept = fit(pr.MeanField(schedule=spiked(15)), steps=10, batch_size=4)
    with pytest.raises(pr.DivergedError) as caught:
        fit(pr.MeanField(schedule=spiked(15)), steps=40, batch_size=4, checkpoint=pr.Checkpoint(path, every=10))
    assert torch.equal(caught.value.posterior.family.loc, kept.family.loc)


def test_the_users_network_is_unchanged_after_a_divergence() -> None:
    net = plain()
    before = [p.clone() for p in net.parameters()]
    with pytest.raises(pr.DivergedError):
        pr.fit(pr.Model(net, pr.Gaussian(0.3)), (X, Y), pr.MAP(learning_rate=1e200), steps=3, progress=False)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


# Progress.

SCRIPT = """
import sys
for blocked in sys.argv[2:]:
    sys.modules[blocked] = None
import torch
from torch import nn
import priory as pr
import priory.fitting.progress
priory.fitting.progress.REFRESH_SECONDS = 0.0
torch.set_num_threads(1)
X = torch.linspace(-1, 1, 20)[:, None]
model = pr.Model(nn.Linear(1, 1), pr.Gaussian(0.1))
method = pr.MeanField() if sys.argv[1] != "MAP" else pr.MAP()
pr.fit(model, (X, 2 * X[:, 0]), method, steps=60, progress=sys.argv[1] != "quiet")
print("done")
"""


def output_on_a_terminal(*arguments: str) -> str:
    """Return what a fit prints to standard error when it is a pseudo-terminal."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "TERM": "xterm-256color", "COLUMNS": "160", "LINES": "40"}
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *arguments], stdout=subprocess.PIPE, stderr=theirs, env=environment
    )
    os.close(theirs)
    drawn = b""
    while True:
        if select.select([ours], [], [], 0.1)[0]:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            drawn += piece
        elif child.poll() is not None:
            break
    out, _ = child.communicate()
    os.close(ours)
    assert child.returncode == 0, drawn.decode()
    assert out == b"done\n"
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn.decode())


@pytest.mark.parametrize("blocked", [(), ("rich",)], ids=["with rich", "without rich"])
def test_the_progress_bar_shows_the_bound_its_terms_and_the_time_left(blocked: tuple[str, ...]) -> None:
    drawn = output_on_a_terminal("MeanField", *blocked)
    assert "MeanField()" in drawn
    assert "60/60" in drawn
    for name in ("elbo", "nll", "kl"):
        assert re.search(rf"\b{name} -?[\d,]+\.\d", drawn), name
    assert not re.search(r"\bloss ", drawn)  # the loss is minus the bound and isn't shown twice
    assert re.search(r"\d+ s left" if blocked else r"\d:\d\d:\d\d", drawn)
    assert drawn.endswith("\n")


@pytest.mark.parametrize("blocked", [(), ("rich",)], ids=["with rich", "without rich"])
def test_the_progress_of_map_shows_its_loss(blocked: tuple[str, ...]) -> None:
    drawn = output_on_a_terminal("MAP", *blocked)
    assert re.search(r"\bloss -?[\d,]+\.\d", drawn)
    assert re.search(r"\bnll -?[\d,]+\.\d", drawn)
    assert "60/60" in drawn


@pytest.mark.parametrize("blocked", [(), ("rich",)], ids=["with rich", "without rich"])
def test_progress_false_prints_nothing(blocked: tuple[str, ...]) -> None:
    assert output_on_a_terminal("quiet", *blocked) == ""


def test_nothing_is_printed_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    model = pr.Model(plain(), pr.Gaussian(0.3))
    pr.fit(model, (X, Y), pr.MeanField(start=Short()), steps=60)
    assert capfd.readouterr() == ("", "")


def noisy(x_scale: float = 1.0, y_scale: float = 1.0, shift: float = 0.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 3, generator=generator), torch.randn(40, generator=generator)
    return x_scale * x, y_scale * y + shift


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (noisy(y_scale=1e3), "The targets have mean .* and standard deviation"),
        (noisy(shift=1e3), "The targets have mean 1e\\+03"),
        (noisy(y_scale=1e-4), "The targets have mean"),
        (noisy(x_scale=1e4), "The inputs, column 0, have mean"),
    ],
)
@pytest.mark.parametrize("start", [None, pr.MAP()], ids=["alone", "after a stage"])
def test_data_far_from_unit_scale_give_one_warning(data: tuple[Tensor, Tensor], said: str, start: object) -> None:
    model = pr.Model(nn.Linear(3, 1), pr.Gaussian(0.5))
    with pytest.warns(pr.PrioryWarning, match=said) as caught:
        pr.fit(model, data, pr.MeanField(start=start), steps=1, progress=False)
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_counts_indicators_and_labels_give_no_scale_warning() -> None:
    x, _ = noisy()
    rare = torch.cat([x, torch.zeros(40, 1)], 1)
    rare[0, 3] = 1.0
    counts = torch.arange(40.0) * 100
    pr.fit(pr.Model(nn.Linear(4, 1), pr.Poisson()), (rare, counts), pr.MAP(), steps=1, progress=False)
    pr.fit(pr.Model(nn.Linear(4, 3), pr.Categorical()), (rare, torch.arange(40) % 3), pr.MAP(), steps=1, progress=False)
