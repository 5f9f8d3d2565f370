"""Variational inference of densities at its default length: it arrives, and says so."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Gamma, MultivariateNormal, Normal, StudentT, kl_divergence

import priory as pr
from priory import Param
from priory.core.data import Data
from priory.core.streams import stream
from priory.divergences import ForwardKL, JensenShannon
from priory.fitting.callbacks import FitProgress
from priory.fitting.prepare import make_target
from priory.methods.variational import arrival
from priory.methods.variational.gaussian_newton import GaussianQ, NewtonPoint, first_draws, matched_draws
from priory.posteriors import Posterior

DOUBLE = torch.float64
MEAN_FIELD = [pr.MeanField(), pr.NaturalGradient()]
FULL = [pr.FullRank(), pr.NaturalGradient(covariance="full")]


def gaussian(mean: Tensor, covariance: Tensor) -> pr.Density:
    precision = torch.linalg.inv(covariance)

    def log_prob(p: dict[str, Tensor]) -> Tensor:
        away = p["x"] - mean
        return -0.5 * (away * (away @ precision)).sum(-1)

    return pr.Density(log_prob, {"x": Param((len(mean),))})


def correlated(size: int, correlation: float) -> Tensor:
    places = torch.arange(size, dtype=DOUBLE)
    return correlation ** (places[:, None] - places).abs()


def two_modes() -> pr.Density:
    def log_prob(p: dict[str, Tensor]) -> Tensor:
        one, other = Normal(-6.0, 1.0).log_prob(p["x"]), Normal(6.0, 1.0).log_prob(p["x"])
        return torch.logaddexp(math.log(0.8) + one, math.log(0.2) + other)

    return pr.Density(log_prob, {"x": Param()})


def scales(posterior: Posterior) -> Tensor:
    found = posterior.gaussian_coordinates()
    assert found is not None
    return found[1]


PLACES = {
    "far": (torch.tensor([30.0, 1e6], dtype=DOUBLE), correlated(2, 0.5)),
    "narrow": (torch.tensor([1.0, 2.0], dtype=DOUBLE), 1e-12 * correlated(2, 0.5)),
    "wide": (torch.tensor([1e6, 2.0], dtype=DOUBLE), 1e12 * correlated(2, -0.5)),
    "scales": (torch.full((4,), 3.0, dtype=DOUBLE), torch.tensor([1e-12, 1e-4, 1e4, 1e12], dtype=DOUBLE).diag()),
    "correlated": (torch.tensor([5.0, -5.0], dtype=DOUBLE), correlated(2, 0.9999)),
    "many": (torch.linspace(-3, 3, 60, dtype=DOUBLE), correlated(60, 0.95)),
}


@pytest.mark.parametrize("method", MEAN_FIELD, ids=repr)
@pytest.mark.parametrize("place", PLACES)
def test_mean_field_has_the_exact_means_and_the_inverse_diagonal_of_the_precision(place, method):
    mean, covariance = PLACES[place]
    posterior = pr.fit(gaussian(mean, covariance), None, method, progress=False)
    exact = torch.linalg.inv(covariance).diagonal().rsqrt()
    assert float(((posterior.mean["x"] - mean) / exact).abs().max()) < 1e-3
    torch.testing.assert_close(scales(posterior), exact, rtol=1e-4, atol=0)


@pytest.mark.parametrize("method", FULL, ids=repr)
@pytest.mark.parametrize("place", PLACES)
def test_full_rank_is_a_gaussian_posterior_itself(place, method):
    mean, covariance = PLACES[place]
    posterior = pr.fit(gaussian(mean, covariance), None, method, progress=False)
    assert posterior.status.name == "converged"
    found = posterior.gaussian_distribution()
    assert found is not None
    assert float(kl_divergence(found, MultivariateNormal(mean, covariance))) < 1e-4
    assert posterior.log_evidence.value == pytest.approx(0.5 * float((2 * math.pi * covariance).logdet()), abs=1e-3)


def test_draws_have_exactly_the_moments_of_a_standard_normal():
    z = matched_draws(256, 10, seed=3)
    torch.testing.assert_close(z.mT @ z / 256, torch.eye(10, dtype=DOUBLE), rtol=0, atol=1e-12)
    torch.testing.assert_close(z[:128], -z[128:], rtol=0, atol=0)
    assert not bool((z[:, 0] == matched_draws(256, 10, seed=4)[:, 0]).any())
    few = matched_draws(8, 10, seed=3)
    torch.testing.assert_close(few.square().mean(0), torch.ones(10, dtype=DOUBLE), rtol=0, atol=1e-12)
    assert [first_draws(size) for size in (1, 128, 129, 1000)] == [512, 512, 1024, 4096]


def test_the_gap_of_a_gaussian_is_its_divergence_to_the_posterior():
    generator = stream(2, "gap")
    covariance = correlated(5, 0.6)
    posterior, precision = MultivariateNormal(torch.ones(5, dtype=DOUBLE), covariance), torch.linalg.inv(covariance)
    root = torch.linalg.cholesky(correlated(5, 0.2)) * 1.3
    q = GaussianQ(torch.randn(5, generator=generator, dtype=DOUBLE), root)
    joint = lambda w: (posterior.log_prob(w), -(w - posterior.loc) @ precision)  # noqa: E731
    here = NewtonPoint.at(joint, q, matched_draws(512, 5, 0))
    assert here is not None
    exact = kl_divergence(MultivariateNormal(q.loc, q.covariance()), posterior)
    assert here.gap == pytest.approx(float(exact), rel=1e-9)
    there = here.step(1.0)
    torch.testing.assert_close(there.loc, posterior.loc, rtol=0, atol=1e-10)
    torch.testing.assert_close(there.covariance(), covariance, rtol=0, atol=1e-10)


def test_a_step_of_mean_field_solves_for_all_means_together():
    covariance = correlated(3, 0.999)
    precision, mean = torch.linalg.inv(covariance), torch.tensor([1.0, 2.0, 3.0], dtype=DOUBLE)
    joint = lambda w: (-0.5 * ((w - mean) @ precision * (w - mean)).sum(-1), -(w - mean) @ precision)  # noqa: E731
    here = NewtonPoint.at(
        joint, GaussianQ(torch.zeros(3, dtype=DOUBLE), torch.full((3,), 0.1, dtype=DOUBLE)), matched_draws(512, 3, 0)
    )
    assert here is not None
    there = here.step(1.0)
    torch.testing.assert_close(there.loc, mean, rtol=0, atol=1e-8)
    expected = precision.diagonal().rsqrt().clamp(0.1 / 8, 0.1 * 8)  # a step stretches by at most 8
    torch.testing.assert_close(there.root, expected, rtol=1e-8, atol=0)


@pytest.mark.parametrize("method", [pr.MeanField(), pr.FullRank()], ids=repr)
def test_the_best_gaussian_for_a_student_t_is_that_of_quadrature(method):
    density = pr.Density(lambda p: StudentT(3.0, 1e3, 5.0).log_prob(p["x"]), {"x": Param()})
    posterior = pr.fit(density, None, method, progress=False)
    x, weights = (torch.as_tensor(a) for a in np.polynomial.hermite_e.hermegauss(200))
    weights = weights / weights.sum()
    grid = torch.linspace(-1, 1, 4001, dtype=DOUBLE).exp() * 5
    bound = (weights * StudentT(3.0, 0.0, 5.0).log_prob(grid[:, None] * x)).sum(-1) + grid.log()
    best = int(bound.argmax())
    assert "k-hat" in posterior.status.reason  # no Gaussian has the tails of a Student t
    assert float(posterior.mean["x"]) == pytest.approx(1e3, abs=0.05 * float(grid[best]))
    at = (weights * StudentT(3.0, 0.0, 5.0).log_prob(scales(posterior)[:, None] * x)).sum() + scales(posterior).log()
    assert 0 <= float(bound[best] - at) < 2e-3


@pytest.mark.parametrize("method", [*MEAN_FIELD, *FULL], ids=repr)
def test_a_mode_that_q_misses_is_reported_with_its_share(method):
    with pytest.warns(pr.PrioryWarning, match="another mode with about 20 % of the posterior"):
        posterior = pr.fit(two_modes(), None, method, progress=False)
    assert float(posterior.mean["x"]) == pytest.approx(-6, abs=0.01)  # the larger one
    assert posterior.k_hat == -math.inf  # draws of q can't see the other mode
    assert posterior.status.name == "doubtful"
    assert "MixtureOfGaussians(components=2)" in repr(posterior)


def test_k_hat_is_kept_and_makes_a_narrow_q_doubtful(tmp_path):
    density = gaussian(torch.zeros(2, dtype=DOUBLE), correlated(2, 0.99))
    posterior = pr.fit(density, None, pr.MeanField(), progress=False)
    assert posterior.status.name == "doubtful"
    assert "richer family" in posterior.status.reason
    posterior.save(tmp_path / "q.priory")
    loaded = pr.load(tmp_path / "q.priory", density)
    assert loaded.status == posterior.status
    full = pr.fit(density, None, pr.FullRank(), progress=False)
    full.save(tmp_path / "full.priory")
    assert pr.load(tmp_path / "full.priory", density).status.name == full.status.name == "converged"


def test_a_density_with_rows_and_a_temperature_has_the_conjugate_posterior():
    y = 40 + 3 * torch.randn(50, generator=stream(0, "rows"), dtype=DOUBLE)
    density = pr.Density(
        params={"m": Param()},
        log_prior=lambda p: Normal(0.0, 100.0).log_prob(p["m"]),
        log_likelihood=lambda p, y: Normal(p["m"], 3.0).log_prob(y),
    )
    for temperature in (1.0, 4.0):
        posterior = pr.fit(density, y, pr.MeanField(), temperature=temperature, progress=False)
        precision = 50 / 9 / temperature + 1e-4
        assert float(posterior.mean["m"]) == pytest.approx(float(y.sum()) / 9 / temperature / precision, abs=1e-6)
        assert float(scales(posterior)[0]) == pytest.approx(precision**-0.5, rel=1e-6)
        last = {name: float(values[-1]) for name, values in posterior.history.items()}
        exact = posterior.elbo(samples=4096)
        assert last["elbo"] == pytest.approx(exact.value, abs=1e-6 + 4 * exact.error)
        assert last["elbo"] == pytest.approx(-last["nll"] - temperature * last["kl"], abs=1e-8)
        assert last["loss"] == -last["elbo"]


def test_an_improper_density_is_reported():
    density = pr.Density(lambda p: Normal(2.0, 1.0).log_prob(p["x"][0]), {"x": Param((2,))})
    with pytest.warns(pr.PrioryWarning, match="seems to be improper"):
        posterior = pr.fit(density, None, pr.FullRank(), progress=False)
    assert posterior.status.name != "converged"


def test_a_given_number_of_steps_is_taken_exactly():
    density = gaussian(*PLACES["far"])
    for method in (*MEAN_FIELD, *FULL):
        assert len(pr.fit(density, None, method, steps=7, progress=False).history["elbo"]) == 7


def test_an_interrupted_fit_resumes_with_the_same_bits(tmp_path):
    density = pr.Density(lambda p: StudentT(3.0, 4.0, 5.0).log_prob(p["x"]).sum(), {"x": Param((2,))})
    whole = pr.fit(density, None, pr.FullRank(), progress=False)
    place = pr.Checkpoint(tmp_path / "fit", every=1)

    def interrupt(now: FitProgress) -> None:
        if now.step == 2:
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        pr.fit(density, None, pr.FullRank(), progress=False, checkpoint=place, callbacks=[interrupt])
    again = pr.fit(density, None, pr.FullRank(), progress=False, checkpoint=place)
    assert torch.equal(again.theta, whole.theta)
    assert torch.equal(again.history["elbo"], whole.history["elbo"])


def test_members_of_an_ensemble_arrive():
    posterior = pr.fit(gaussian(*PLACES["far"]), None, pr.Ensemble(pr.MeanField(), 2), progress=False)
    torch.testing.assert_close(posterior.mean["x"], PLACES["far"][0], rtol=1e-6, atol=1e-3)


def test_a_fit_can_start_from_another_posterior():
    density = gaussian(*PLACES["far"])
    first = pr.fit(density, None, pr.FullRank(), progress=False)
    again = pr.fit(density, None, pr.MeanField(start=first), progress=False)
    torch.testing.assert_close(again.mean["x"], PLACES["far"][0], rtol=1e-6, atol=1e-3)


def test_more_draws_are_taken_where_fresh_draws_disagree_and_the_rest_is_reported(monkeypatch):
    monkeypatch.setattr(arrival, "FRESH_GAP_NATS", 1e-9)
    density = pr.Density(lambda p: StudentT(3.0).log_prob(p["x"]), {"x": Param()})
    target = make_target(density, Data.of(None))
    state = arrival.begin_arrival(arrival.Search(target, Data.of(None), stream(0, "fit")), torch.Size(), full=False)
    while not state.ended:
        state.advance()
    assert (state.round, state.count) == (3, 64 * first_draws(1))
    assert state.status().name == "not_converged"
    assert "With 32,768 draws the bound is" in state.status().reason


# Other families.


@pytest.mark.parametrize("place", ["far", "scales", "correlated"])
def test_low_rank_of_enough_columns_is_a_gaussian_posterior_itself(place):
    mean, covariance = PLACES[place]
    posterior = pr.fit(gaussian(mean, covariance), None, pr.LowRank(rank=2), progress=False)
    assert posterior.status.name == "converged"
    assert posterior.log_evidence.value == pytest.approx(0.5 * float((2 * math.pi * covariance).logdet()), abs=0.02)
    assert float(((posterior.mean["x"] - mean) / covariance.diagonal().sqrt()).abs().max()) < 0.05


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_a_mixture_covers_both_modes_and_has_the_evidence(covariance):
    posterior = pr.fit(two_modes(), None, pr.MixtureOfGaussians(covariance=covariance), progress=False)
    assert posterior.status.name == "converged"
    assert posterior.log_evidence.value == pytest.approx(0.0, abs=0.01)
    assert float(posterior.mean["x"]) == pytest.approx(0.2 * 6 - 0.8 * 6, abs=0.05)


@pytest.mark.parametrize(("family", "variance"), [("laplace", 2.0), ("logistic", math.pi**2 / 3), ("uniform", 1 / 3)])
def test_a_factorised_family_has_the_scale_of_its_closed_form(family, variance):
    # E_q[log N(w; 1e4, 2^2)] + H(q) = -(v s^2 + (m - 1e4)^2) / 8 + log s is largest at m = 1e4, s = 2 / sqrt(v)
    density = pr.Density(lambda p: Normal(1e4, 2.0).log_prob(p["x"]).sum(), {"x": Param((2,))})
    posterior = pr.fit(density, None, pr.MeanField(family=family), progress=False)
    scale = posterior.family.scale  # pyright: ignore[reportAttributeAccessIssue]
    torch.testing.assert_close(scale, torch.full_like(scale, 2 * variance**-0.5), rtol=0.02, atol=0)
    torch.testing.assert_close(posterior.mean["x"], torch.full((2,), 1e4, dtype=DOUBLE), rtol=0, atol=0.1)


def test_a_flow_starts_from_the_best_gaussian_and_ends_when_the_bound_stops_rising():
    mean, covariance = PLACES["correlated"]
    posterior = pr.fit(gaussian(mean, covariance), None, pr.Flow(layers=2, hidden=4), progress=False)
    assert len(posterior.history["elbo"]) == 1000  # two windows of 250 steps, and 500 of decay
    assert posterior.status.name == "converged"
    assert posterior.log_evidence.value == pytest.approx(0.5 * float((2 * math.pi * covariance).logdet()), abs=0.01)
    assert float(posterior.history["elbo"][-100:].mean()) == pytest.approx(posterior.log_evidence.value, abs=0.01)


def test_a_dict_of_distributions_starts_where_the_mass_is():
    density = pr.Density(lambda p: Gamma(400.0, 4e-4).log_prob(p["x"]), {"x": Param((), pr.constraints.positive)})
    posterior = pr.fit(density, None, pr.MeanField(family={"x": Gamma}), progress=False)
    assert float(posterior.mean["x"]) == pytest.approx(1e6, rel=0.01)


def test_a_score_estimator_that_misses_the_optimum_says_so():
    density = pr.Density(lambda p: 1e6 + Normal(40.0, 1.0).log_prob(p["x"]).sum(), {"x": Param((5,))})
    with pytest.warns(pr.PrioryWarning, match="the estimator 'score' is too noisy"):
        posterior = pr.fit(density, None, pr.MeanField(estimator="score"), progress=False)
    assert posterior.status.name == "not_converged"
    fine = pr.fit(density, None, pr.MeanField(estimator="leave_one_out", samples=8), progress=False)
    assert fine.status.name == "converged"
    torch.testing.assert_close(fine.mean["x"], torch.full((5,), 40.0, dtype=DOUBLE), rtol=0, atol=0.1)


def test_an_estimator_of_full_rank_starts_from_the_best_gaussian():
    posterior = pr.fit(gaussian(*PLACES["far"]), None, pr.FullRank(learning_rate=0.05), progress=False)
    assert posterior.status.name == "converged"
    torch.testing.assert_close(posterior.mean["x"], PLACES["far"][0], rtol=1e-6, atol=1e-2)


@pytest.mark.parametrize("divergence", [JensenShannon(), ForwardKL()], ids=str)
def test_a_divergence_that_vanishes_at_one_draw_is_refused_with_too_few(divergence):
    density = pr.Density(
        params={"m": Param()},
        log_prior=lambda p: Normal(0.0, 1.0).log_prob(p["m"]),
        log_likelihood=lambda p, y: Normal(p["m"], 1.0).log_prob(y),
    )
    with pytest.raises(pr.InputError, match="'samples' of the method must be at least 16"):
        pr.fit(density, torch.ones(3), pr.MeanField(divergence=divergence), steps=2, progress=False)
    posterior = pr.fit(density, torch.ones(3), pr.MeanField(divergence=divergence, samples=32), steps=9, progress=False)
    assert set(posterior.history) == {"nll", "divergence", "loss"}
    assert bool((posterior.history["divergence"] > 0).all())
