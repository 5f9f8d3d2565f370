"""Variational EM: coordinate ascent, stochastic steps, restarts, starts and errors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from priory.core.errors import DivergedError, InputError
from priory.fitting.fit import fit
from priory.fitting.prepare import make_target
from priory.fitting.run import Run
from priory.latent.base import Rows
from priory.latent.bayesian_mixture import BayesianGaussianMixture
from priory.latent.bayesian_regression import BayesianRegression
from priory.latent.gaussian_mixture import GaussianMixture
from priory.latent.normal_gamma import NormalGamma
from priory.likelihoods import Gaussian
from priory.methods.base import Method
from priory.methods.em.variational_em import VariationalEM
from priory.models.model import Model
from priory.posteriors.conjugate import ConjugatePosterior


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def two_clusters(rows: int = 40) -> Tensor:
    return torch.cat([randn(0, rows, 2), randn(1, rows, 2) + 5])


def make_run(model: Any, data: Any, method: VariationalEM, steps: int = 200, batch_size: int | None = None) -> Run:
    prepared, rows = model.meet(data, batch_size)
    target = make_target(prepared, rows)
    return Run(target, method, method.plan(target, rows, steps, 0), 0, None)


def fitted(model: Any, data: Any, method: VariationalEM | None = None, **options: Any) -> ConjugatePosterior:
    run = make_run(model, data, method or VariationalEM(), **options)
    run.run(False, [])
    posterior = run.posterior()
    assert isinstance(posterior, ConjugatePosterior)
    return posterior


def test_variational_em_is_a_method_that_reads_passes_or_batches():
    assert isinstance(VariationalEM(), Method)
    assert VariationalEM().traits.reads == "pass"
    assert VariationalEM(online=0.7).traits.reads == "batch"


def test_a_fit_stops_when_the_bound_has_converged_and_reports_it():
    posterior = fitted(BayesianGaussianMixture(2), two_clusters(), VariationalEM(tolerance=1e-8))
    assert posterior.converged
    assert len(posterior.history["bound"]) < 200
    assert posterior.method == "VariationalEM(tolerance=1e-08)"
    assert float(posterior.history["bound"][-1]) == posterior.log_evidence.value
    short = fitted(BayesianGaussianMixture(2), two_clusters(), VariationalEM(tolerance=0), steps=2)
    assert not short.converged


def test_the_restart_with_the_highest_bound_is_kept():
    y = torch.cat([randn(2, 25, 2) + 6 * torch.tensor([i % 2, i // 2]) for i in range(4)])
    method = VariationalEM(start="random", tolerance=1e-6)
    one_start = fitted(BayesianGaussianMixture(4), y, method)
    six_starts = fitted(BayesianGaussianMixture(4), y, VariationalEM(start="random", restarts=6, tolerance=1e-6))
    assert six_starts.bound >= one_start.bound  # the first of the six starts is that of `one_start`


def test_all_options_reach_the_same_bound():
    plain = fitted(BayesianGaussianMixture(2), two_clusters(), VariationalEM(tolerance=1e-12), steps=2000)
    accelerated = fitted(
        BayesianGaussianMixture(2), two_clusters(), VariationalEM(tolerance=1e-12, accelerate=True), steps=2000
    )
    annealed = fitted(
        BayesianGaussianMixture(2), two_clusters(), VariationalEM(tolerance=1e-12, annealing=(3.0, 2.0)), steps=2000
    )
    by_gradients = fitted(
        NormalGamma(), two_clusters()[:, 0], VariationalEM(tolerance=1e-13, gradient_steps=20), steps=500
    )
    for other in (accelerated, annealed):
        assert other.bound == pytest.approx(plain.bound, abs=1e-6)
    exact = fitted(NormalGamma(), two_clusters()[:, 0], VariationalEM(tolerance=1e-13))
    assert by_gradients.bound == pytest.approx(exact.bound, abs=1e-6)


def test_a_stochastic_step_follows_the_natural_gradient():
    # With all rows in the batch, natural parameters move by the fraction 2^-0.8 towards those of coordinate ascent.
    y, method = two_clusters(), VariationalEM(online=0.8)
    run = make_run(BayesianGaussianMixture(2), y, method, steps=2, batch_size=len(y))
    model = run.target.model
    assert isinstance(model, BayesianGaussianMixture)
    states: list[Any] = []
    run.run(False, [lambda progress: states.append(progress.posterior())])
    first, second = (posterior.phi for posterior in states)
    found = model.e_step_q(first, Rows({"y": y}))
    target = model.m_step_q(found.statistics, first)
    rate = 2**-0.8

    def natural_parameters(phi: dict[str, Tensor]) -> list[Tensor]:
        m, beta = phi["means"][..., None], phi["beta"][..., None, None]
        return [phi["alpha"], phi["beta"], phi["nu"], beta * m, phi["scatter"] + beta * m @ m.mT]

    for before, after, optimum in zip(
        natural_parameters(first), natural_parameters(second), natural_parameters(target), strict=True
    ):
        torch.testing.assert_close(after, (1 - rate) * before + rate * optimum, rtol=1e-9, atol=1e-9)


def test_stochastic_steps_approach_the_bound_of_coordinate_ascent():
    y = two_clusters(200)
    full_data = fitted(BayesianGaussianMixture(2), y)
    stochastic = fitted(BayesianGaussianMixture(2), y, VariationalEM(online=0.7), steps=80, batch_size=50)
    evaluated = fitted(BayesianGaussianMixture(2), y, VariationalEM(start=stochastic.phi, tolerance=0), steps=1)
    assert evaluated.bound == pytest.approx(full_data.bound, abs=0.5)
    counts = float(stochastic.phi["alpha"].sum()) - 2
    assert counts == pytest.approx(400, rel=1e-9)  # the statistics of each minibatch are scaled to all rows


def test_a_posterior_is_a_start_from_which_the_bound_does_not_change():
    y = two_clusters()
    before = fitted(BayesianGaussianMixture(2), y, VariationalEM(tolerance=1e-10))
    after = fit(before.latent, before.latent.meet(y)[1], VariationalEM(start=before), steps=5, progress=False)
    assert len(after.history["bound"]) == 1
    assert after.log_evidence.value == pytest.approx(before.bound, abs=1e-6)


def test_an_interrupted_fit_resumes_with_the_same_result(tmp_path: Path):
    model, rows = BayesianGaussianMixture(3).meet(two_clusters())
    options: dict[str, Any] = {"steps": 9, "progress": False}
    uninterrupted = fit(model, rows, VariationalEM(tolerance=0), **options)

    def interrupt(progress: Any) -> None:
        if progress.step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(model, rows, VariationalEM(tolerance=0), checkpoint=tmp_path / "c", callbacks=[interrupt], **options)
    resumed = fit(model, rows, VariationalEM(tolerance=0), checkpoint=tmp_path / "c", **options)
    assert torch.equal(resumed.history["bound"], uninterrupted.history["bound"])
    assert all(torch.equal(resumed.mean[name], t) for name, t in uninterrupted.mean.items())


@pytest.mark.parametrize(
    ("model", "data"),
    [
        (NormalGamma(), two_clusters()[:, 0]),
        (BayesianGaussianMixture(2), two_clusters()),
        (BayesianGaussianMixture(2, "diagonal"), two_clusters()),
        (BayesianRegression(), (two_clusters(), two_clusters()[:, 0] + randn(3, 80))),
    ],
)
def test_a_fit_of_float32_data_stays_in_float32(model: Any, data: Any):
    single = tuple(t.float() for t in data) if isinstance(data, tuple) else data.float()
    posterior = fitted(model, single)
    assert all(t.dtype == torch.float32 for t in posterior.phi.values())
    assert posterior.bound == pytest.approx(fitted(model, data).bound, rel=1e-3)


def test_a_falling_bound_raises_an_error_that_holds_the_posterior():
    class WrongDivergence(NormalGamma):
        def kl_q(self, phi: dict[str, Tensor]) -> Tensor:
            return 2 * super().kl_q(phi)

    with pytest.raises(DivergedError, match="The bound of VariationalEM fell by") as caught:
        fitted(WrongDivergence(rate=20.0), 5 + two_clusters(3)[:, 0])
    assert isinstance(caught.value.posterior, ConjugatePosterior)
    assert isinstance(caught.value.posterior.latent, WrongDivergence)


def test_unsupported_models_starts_and_options_raise_an_error():
    needs_conjugate_model = "The 'model' argument of VariationalEM must be a latent model with conjugate priors"
    with pytest.raises(InputError, match=needs_conjugate_model):
        fitted(GaussianMixture(2), two_clusters())
    with pytest.raises(InputError, match=needs_conjugate_model):
        fit(
            Model(nn.Linear(2, 1), Gaussian()),
            (two_clusters().float(), two_clusters()[:, 0].float()),
            VariationalEM(),
            steps=1,
        )
    with pytest.raises(InputError, match="The 'start' argument of VariationalEM must be one of k-means"):
        fitted(BayesianGaussianMixture(2), two_clusters(), VariationalEM(start="middle"))
    with pytest.raises(InputError, match="The 'annealing' argument of VariationalEM must be left out"):
        fitted(NormalGamma(), two_clusters()[:, 0], VariationalEM(annealing=(2.0,)))
    other = fitted(NormalGamma(), two_clusters()[:, 0])
    method = VariationalEM(start={**other.phi, "l": -other.phi["l"]})
    with pytest.raises(InputError, match="The 'start' argument of VariationalEM must hold parameters of NormalGamma"):
        fitted(NormalGamma(), two_clusters()[:, 0], method)
    with pytest.raises(InputError, match=r"The 'restarts' argument of VariationalEM must be an integer >= 1, got 0."):
        VariationalEM(restarts=0)
