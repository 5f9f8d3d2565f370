"""Statuses: methods report whether they converged, and posteriors, files and warnings show it."""

import dataclasses
import functools
import math

import pytest
import torch
from torch import nn
from torch.distributions import constraints

import priory as pr
from priory.core.streams import stream
from priory.fitting.store import read, write
from priory.models.target import Target
from priory.posteriors import Chains, Draws, Mixture, Point
from priory.posteriors.status import (
    CONVERGED,
    NOT_IN_FILE,
    STUDENT_T,
    UNKNOWN,
    Status,
    of_ascent,
    of_history,
    of_members,
    remaining,
    worst,
)

DOUBLE = torch.float64
POSITIVE = constraints.positive


def rows():
    generator = stream(0, "rows")
    x = torch.linspace(-1, 1, 60, dtype=DOUBLE)[:, None]
    return x, 2 * x[:, 0] + 0.3 * torch.randn(60, generator=generator, dtype=DOUBLE)


def points():
    """Return two overlapping clusters, on which EM takes many iterations."""
    y = torch.randn(200, 2, generator=stream(0, "points"), dtype=DOUBLE)
    y[:100] += 2
    return y


@functools.cache
def network():
    torch.manual_seed(1)
    return pr.Model(nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double(), pr.Gaussian(0.3))


@functools.cache
def line():
    return pr.Model(nn.Linear(1, 1).double(), pr.Gaussian(0.3))


@functools.cache
def density():
    def log_prob(p):
        return -0.5 * (p["x"] - 3).square().sum() - 0.1 * p["x"][0] ** 4 - p["s"]

    return pr.Density(log_prob, {"x": pr.Param((2,)), "s": pr.Param((), POSITIVE)})


MIXTURE, BAYESIAN = pr.latent.GaussianMixture(2), pr.latent.BayesianGaussianMixture(2)
NOT_CONVERGED = "not_converged"
# method, model, data, a number of steps that is too small, the status after it, a number of steps that is sufficient
TABLE = {
    "MAP": (pr.MAP(), network, rows, 20, NOT_CONVERGED, 1500),
    "MeanField": (pr.MeanField(), network, rows, 20, NOT_CONVERGED, 1500),
    "FullRank": (pr.FullRank(), line, rows, 20, NOT_CONVERGED, 1500),
    "LowRank": (pr.LowRank(rank=1), network, rows, 20, NOT_CONVERGED, 1500),
    "NaturalGradient": (pr.NaturalGradient(), network, rows, 20, NOT_CONVERGED, 1500),
    "MixtureOfGaussians": (pr.MixtureOfGaussians(2), line, rows, 20, NOT_CONVERGED, 1500),
    "Flow": (pr.Flow(), line, rows, 20, NOT_CONVERGED, 800),
    "Dropout": (pr.Dropout(0.1), network, rows, 20, NOT_CONVERGED, 1500),
    "Ensemble": (pr.Ensemble(pr.MAP(), 3), network, rows, 20, NOT_CONVERGED, 1500),
    "LastLayer": (pr.LastLayer(), network, rows, 20, "doubtful", 1500),
    "SWAG": (pr.SWAG(snapshots=60, every=1), network, rows, 20, NOT_CONVERGED, 1500),
    "Laplace of a density": (pr.Laplace(), density, None, 1, NOT_CONVERGED, 100),
    "Pathfinder": (pr.Pathfinder(), density, None, 1, NOT_CONVERGED, 100),
    "SVGD": (pr.SVGD(particles=8), line, rows, 20, NOT_CONVERGED, 1500),
    "EM": (pr.EM(accelerate=True, tolerance=1e-9), lambda: MIXTURE, points, 3, NOT_CONVERGED, 2000),
    "VariationalEM": (pr.VariationalEM(tolerance=1e-9), lambda: BAYESIAN, points, 3, NOT_CONVERGED, 5000),
    "RandomWalk": (pr.RandomWalk(chains=16), density, None, 3, NOT_CONVERGED, 4000),
    "NUTS": (pr.NUTS(chains=16), density, None, 3, NOT_CONVERGED, 500),
    "SGLD": (pr.SGLD(chains=4), line, rows, 6, NOT_CONVERGED, 12000),
}


def fit(name, steps):
    method, model, data, *_ = TABLE[name]
    return pr.fit(model(), None if data is None else data(), method, steps=steps, progress=False)


@pytest.mark.filterwarnings("ignore::priory.PrioryWarning")
@pytest.mark.parametrize("name", TABLE)
def test_a_method_with_too_few_steps_reports_that_it_has_not_converged(name):
    *_, few, wanted, _ = TABLE[name]
    status = fit(name, few).status
    assert status.name == wanted
    assert status.reason.endswith((".", ")"))
    assert len(status.reason) > 40


@pytest.mark.parametrize("name", TABLE)
def test_a_method_with_enough_steps_has_converged(name):
    posterior = fit(name, TABLE[name][-1])
    if name == "SWAG":  # all rows are one batch, whose gradients have no noise that could spread the snapshots
        assert posterior.status.name == "doubtful"
        assert "give a smaller batch_size" in posterior.status.reason
        return
    assert posterior.status == CONVERGED, posterior.status
    assert posterior.status.reason == ""


def test_laplace_around_a_point_that_is_not_a_mode_has_not_converged():
    with pytest.warns(pr.PrioryWarning, match="where Laplace expects a mode"):
        posterior = pr.fit(network(), rows(), pr.Laplace(), steps=5, progress=False)
    assert posterior.status.name == NOT_CONVERGED
    assert "give the fit that found it more steps" in posterior.status.reason
    assert pr.fit(network(), rows(), pr.Laplace(), steps=1500, progress=False).status == CONVERGED


def test_a_mode_at_the_edge_of_a_support_is_doubtful():
    edge = pr.Density(lambda p: -p["s"].log() - p["s"], {"s": pr.Param((), POSITIVE)})  # exp(-s) / s, so -s in log s
    posterior = pr.fit(edge, None, pr.Laplace(), progress=False)
    assert posterior.status.name == "doubtful"
    assert "The mode of 's' lies at the edge of its support, where no Gaussian fits it" in posterior.status.reason
    wide = pr.Density(lambda p: -1e-12 * p["s"], {"s": pr.Param((), POSITIVE)})  # its mode in log s is 12 log 10
    posterior = pr.fit(wide, None, pr.Laplace(), progress=False)
    assert posterior.status == CONVERGED
    assert float(posterior.w) == pytest.approx(12 * math.log(10), abs=1e-8)


# The history of an objective.


def test_about_one_converged_loss_in_a_thousand_is_called_not_converged():
    generator, alarms, fits, steps = stream(0, "alarms"), 0, 2000, 960
    noise = torch.randn(fits, steps, generator=generator, dtype=DOUBLE)
    for t in range(1, steps):  # autocorrelation time of three steps
        noise[:, t] = 0.5 * noise[:, t - 1] + noise[:, t]
    for values in noise:
        alarms += of_history({"loss": 1000 + 10 * values}).name == NOT_CONVERGED
    assert alarms <= 10  # Poisson with mean 2 (false alarms: 8e-6)


@pytest.mark.parametrize("name", ["loss", "bound", "elbo"])
def test_a_significant_trend_in_the_improving_direction_is_not_converged(name):
    noise = torch.randn(600, generator=stream(0, "trend"), dtype=DOUBLE)
    falls = torch.linspace(100, 0, 600, dtype=DOUBLE)
    up, down = {name: noise - falls}, {name: noise + falls}
    better, worse = (down, up) if name == "loss" else (up, down)
    assert of_history(better).name == NOT_CONVERGED
    assert of_history(worse).name == "converged"
    assert f"The {name} was still {'falling' if name == 'loss' else 'rising'}" in of_history(better).reason


def test_gains_below_a_tenth_of_a_nat_or_one_percent_of_the_total_are_ignored():
    small = torch.linspace(0.2, 0, 600, dtype=DOUBLE)  # 0.033 nats per sixth of the history
    assert of_history({"loss": small}) == CONVERGED
    start = torch.cat([torch.full((100,), 1e4, dtype=DOUBLE), torch.linspace(100, 0, 500, dtype=DOUBLE)])
    assert of_history({"loss": start}) == CONVERGED  # 20 nats per sixth, after a gain of 10,000


def test_the_status_of_a_history_depends_on_its_objective():
    falling = torch.linspace(100, 0, 600, dtype=DOUBLE)
    assert of_history({"elbo": -falling, "loss": torch.zeros(600)}) == CONVERGED
    assert of_history({"nll": falling}) is UNKNOWN
    assert of_history({}) is UNKNOWN
    assert of_history({"loss": torch.tensor([1.0, torch.nan])}).name == NOT_CONVERGED


def test_the_quantile_of_student_t_matches_the_stated_false_alarm_rate():
    scipy = pytest.importorskip("scipy.stats")
    assert abs(scipy.t.ppf(0.999, 12) - STUDENT_T) < 1e-3


@pytest.mark.parametrize("steps", [1, 2, 40])
def test_few_steps_without_a_gain_are_doubtful(steps):
    status = of_history({"loss": torch.ones(steps)})
    assert status.name == "doubtful"
    assert "too few to tell whether the loss has converged" in status.reason


def test_the_remaining_gain_of_linear_convergence_is_exact():
    bound = -10 * 0.9 ** torch.arange(50, dtype=DOUBLE)
    torch.testing.assert_close(remaining(bound), float(-bound[-1]), rtol=1e-8, atol=0)
    found = of_ascent(True, {"bound": bound[:30], "gap": bound[:30]})
    assert found.name == "doubtful"
    assert "about 0.47 nats of gains are still to come" in found.reason
    assert of_ascent(True, {"bound": -10 * 0.5 ** torch.arange(30.0), "gap": torch.zeros(30)}) == CONVERGED


# Statuses of members, draws and chains.


def test_the_status_of_members_is_the_worst_with_a_count():
    doubtful, short = Status("doubtful", "Why?"), Status(NOT_CONVERGED, "More steps.")
    assert worst([CONVERGED, short, doubtful]) is short
    assert of_members([CONVERGED, short, short]) == Status(
        NOT_CONVERGED, "2 of 3 members are not converged. More steps."
    )
    assert of_members([CONVERGED, doubtful]) == Status("doubtful", "1 of 2 members is doubtful. Why?")
    assert of_members([CONVERGED, CONVERGED]) is CONVERGED
    assert of_members([UNKNOWN, UNKNOWN]) is UNKNOWN


def test_a_mixture_has_the_worst_status_of_its_members():
    short, whole = fit("MAP", 20), fit("MAP", 1500)
    status = Mixture([whole, short]).status
    assert status == Status(NOT_CONVERGED, f"1 of 2 members is not converged. {short.status.reason}")
    assert Mixture([whole, whole]).status == CONVERGED


def test_draws_with_heavy_tailed_weights_are_doubtful():
    target = Target(density(), None)
    draws = Draws(target, torch.zeros(5, 3, dtype=DOUBLE), k_hat=0.9)
    draws.know(CONVERGED)
    assert draws.status.name == "doubtful"
    assert "k-hat of the importance weights is 0.90" in draws.status.reason


def test_a_computed_k_hat_changes_the_status():
    posterior = fit("MeanField", 1500)
    posterior._k_hat = 0.8
    assert posterior.status.name == "doubtful"


def test_chains_of_a_network_are_doubtful_and_those_of_a_density_not_converged():
    w = torch.randn(4, 200, 13, generator=stream(0, "w"), dtype=DOUBLE)
    w[0] += 3
    assert Chains(Target(network(), 60), w).status.name == "doubtful"
    assert Chains(Target(density(), None), w[..., :3]).status.name == NOT_CONVERGED


def test_draws_that_diverged_are_doubtful_and_chains_that_never_moved_not_converged():
    w = torch.randn(4, 1000, 3, generator=stream(0, "w"), dtype=DOUBLE)
    divergent = torch.zeros(4, 1000, dtype=torch.bool)
    divergent[0, 0] = True
    assert Chains(Target(density(), None), w).status == CONVERGED
    status = Chains(Target(density(), None), w, statistics={"divergent": divergent}).status
    assert (status.name, status.reason[:15]) == ("doubtful", "1 draws diverge")
    assert Chains(Target(density(), None), torch.ones(4, 10, 3, dtype=DOUBLE)).status.name == NOT_CONVERGED


def test_the_status_of_many_coordinates_is_computed_from_some_of_them(monkeypatch):
    from priory.posteriors import chains

    w = torch.randn(4, 1000, 3, generator=stream(0, "w"), dtype=DOUBLE)
    w[0, :, 2] += 5
    monkeypatch.setattr(chains, "STATUS_CHECK_ELEMENTS", 8000)
    status = Chains(Target(density(), None), w).status
    assert status.name == NOT_CONVERGED
    assert "for s: the chains disagree" in status.reason


def test_a_posterior_that_was_not_fitted_has_an_unknown_status():
    point = Point(Target(density(), None), torch.zeros(3, dtype=DOUBLE))
    assert point.status is UNKNOWN
    assert repr(point).endswith("by )")


def test_a_fit_that_a_callback_stops_is_doubtful():
    stopped = pr.fit(network(), rows(), pr.MAP(), steps=1500, progress=False, callbacks=[lambda now: now.step >= 1200])
    assert stopped.status.name == "doubtful"
    assert "A callback ended the fit at step 1,200 of 1,500" in stopped.status.reason


def test_the_last_good_state_of_a_diverged_fit_has_not_converged():
    broken = pr.Density(lambda p: -((p["x"] - 1e3) ** 2) * p["x"].sqrt(), {"x": pr.Param()})
    with pytest.raises(pr.DivergedError) as error:
        pr.fit(broken, None, pr.MAP(learning_rate=10.0), steps=300, progress=False)
    assert error.value.posterior.status.name == NOT_CONVERGED
    assert "was not finite at step" in error.value.posterior.status.reason


# Where it is shown.


def test_fit_warns_once_with_the_default_length_and_not_with_a_given_length():
    @dataclasses.dataclass(frozen=True)
    class Brief(pr.MAP):
        def length(self, data):
            return 60

    with pytest.warns(pr.PrioryWarning, match="has not converged. The loss was still falling") as said:
        pr.fit(network(), rows(), Brief(learning_rate=1e-3), progress=False)
    assert len(said) == 1
    assert pr.fit(network(), rows(), Brief(learning_rate=1e-3), steps=60, progress=False).status.name == NOT_CONVERGED


def test_repr_and_summary_end_with_the_status():
    short, whole = fit("MAP", 20), fit("MAP", 1500)
    assert repr(whole).endswith("by MAP(), converged)")
    assert f"by MAP(), not converged: {short.status.reason})" in repr(short)
    assert str(whole.summary()).endswith("Status: converged")
    assert str(short.summary()).endswith(f"Status: not converged: {short.status.reason}")
    both = Mixture([whole, short])
    assert repr(both).endswith(f"{both.status})")


@pytest.mark.parametrize("name", ["MAP", "MeanField", "LastLayer", "Pathfinder", "SVGD", "EM", "NUTS", "Ensemble"])
@pytest.mark.filterwarnings("ignore::priory.PrioryWarning")
def test_a_file_stores_the_status(name, tmp_path):
    posterior = fit(name, TABLE[name][3])
    posterior.save(tmp_path / "posterior")
    assert pr.load(tmp_path / "posterior", TABLE[name][1]()).status == posterior.status


def test_the_status_of_an_old_file_is_computed_from_its_contents(tmp_path):
    def without(posterior, path):
        posterior.save(path)
        tensors, meta = read(path, "posterior")
        assert meta.pop("status") is not None
        write(path, "posterior", tensors, meta)
        return pr.load(path, posterior.model)

    assert without(fit("MAP", 20), tmp_path / "a").status.name == NOT_CONVERGED
    assert without(fit("MAP", 1500), tmp_path / "a").status == CONVERGED
    laplace = pr.fit(network(), rows(), pr.Laplace(), steps=1500, progress=False)
    assert without(laplace, tmp_path / "a").status == NOT_IN_FILE


def test_a_status_has_one_of_three_names_and_a_reason_unless_it_converged():
    with pytest.raises(pr.InputError, match="The 'name' argument of Status must be among converged"):
        Status("fine")
    with pytest.raises(pr.InputError, match="The 'reason' argument of Status must be a sentence"):
        Status("doubtful")


def test_laplace_inherits_the_status_of_the_fit_of_its_mode():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 1, generator=generator, dtype=torch.float64)
    model = pr.Model(nn.Linear(1, 1).double(), pr.Gaussian(1.0))
    mode = pr.fit(model, (x, x[:, 0]), pr.MAP(), steps=1000, progress=False)
    assert pr.fit(model, (x, x[:, 0]), pr.Laplace(at=mode), progress=False).status.name == "converged"
    mode.know(Status("not_converged", "The loss was still falling."))
    taken = pr.fit(model, (x, x[:, 0]), pr.Laplace(at=mode), progress=False).status
    assert taken.name == "doubtful"
    assert "The mode comes from a fit that is not converged" in taken.reason
