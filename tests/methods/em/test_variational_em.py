"""Variational EM: coordinate ascent, stochastic steps, restarts, starts, and what it refuses."""

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


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def clouds(rows: int = 40) -> Tensor:
    return torch.cat([random(0, rows, 2), random(1, rows, 2) + 5])


def started(model: Any, data: Any, method: VariationalEM, steps: int = 200, batch_size: int | None = None) -> Run:
    met, rows = model.meet(data, batch_size)
    target = make_target(met, rows)
    return Run(target, method, method.plan(target, rows, steps, 0), 0, None)


def fitted(model: Any, data: Any, method: VariationalEM | None = None, **options: Any) -> ConjugatePosterior:
    run = started(model, data, method or VariationalEM(), **options)
    run.run(False, [])
    posterior = run.posterior()
    assert isinstance(posterior, ConjugatePosterior)
    return posterior


def test_it_is_a_method():
    assert isinstance(VariationalEM(), Method)
    assert VariationalEM().traits.reads == "pass"
    assert VariationalEM(online=0.7).traits.reads == "batch"


def test_a_run_ends_when_the_bound_has_settled_and_says_so():
    posterior = fitted(BayesianGaussianMixture(2), clouds(), VariationalEM(tolerance=1e-8))
    assert posterior.converged
    assert len(posterior.history["bound"]) < 200
    assert posterior.method == "VariationalEM(tolerance=1e-08)"
    assert float(posterior.history["bound"][-1]) == posterior.log_evidence.value
    short = fitted(BayesianGaussianMixture(2), clouds(), VariationalEM(tolerance=0), steps=2)
    assert not short.converged


def test_the_best_of_several_restarts_is_kept():
    y = torch.cat([random(2, 25, 2) + 6 * torch.tensor([i % 2, i // 2]) for i in range(4)])
    method = VariationalEM(start="random", tolerance=1e-6)
    alone = fitted(BayesianGaussianMixture(4), y, method)
    many = fitted(BayesianGaussianMixture(4), y, VariationalEM(start="random", restarts=6, tolerance=1e-6))
    assert many.bound >= alone.bound  # the first start is the same


def test_every_way_ends_at_the_same_bound():
    plain = fitted(BayesianGaussianMixture(2), clouds(), VariationalEM(tolerance=1e-12), steps=2000)
    fast = fitted(BayesianGaussianMixture(2), clouds(), VariationalEM(tolerance=1e-12, accelerate=True), steps=2000)
    warm = fitted(
        BayesianGaussianMixture(2), clouds(), VariationalEM(tolerance=1e-12, annealing=(3.0, 2.0)), steps=2000
    )
    slow = fitted(NormalGamma(), clouds()[:, 0], VariationalEM(tolerance=1e-13, gradient_steps=20), steps=500)
    for other in (fast, warm):
        assert other.bound == pytest.approx(plain.bound, abs=1e-6)
    exact = fitted(NormalGamma(), clouds()[:, 0], VariationalEM(tolerance=1e-13))
    assert slow.bound == pytest.approx(exact.bound, abs=1e-6)


def test_a_stochastic_step_goes_along_the_natural_gradient():
    # a minibatch of all rows: natural parameters go a share r = 2^-0.8 of the way to those of coordinate ascent
    y, method = clouds(), VariationalEM(online=0.8)
    run = started(BayesianGaussianMixture(2), y, method, steps=2, batch_size=len(y))
    model = run.target.model
    assert isinstance(model, BayesianGaussianMixture)
    states: list[Any] = []
    run.run(False, [lambda moment: states.append(moment.posterior())])
    first, second = (posterior.phi for posterior in states)
    found = model.e_step_q(first, Rows({"y": y}))
    target = model.m_step_q(found.statistics, first)
    rate = 2**-0.8

    def natural(phi: dict[str, Tensor]) -> list[Tensor]:
        m, beta = phi["means"][..., None], phi["beta"][..., None, None]
        return [phi["alpha"], phi["beta"], phi["nu"], beta * m, phi["scatter"] + beta * m @ m.mT]

    for before, after, there in zip(natural(first), natural(second), natural(target), strict=True):
        torch.testing.assert_close(after, (1 - rate) * before + rate * there, rtol=1e-9, atol=1e-9)


def test_stochastic_inference_comes_near_the_bound_of_all_rows():
    y = clouds(200)
    whole = fitted(BayesianGaussianMixture(2), y)
    some = fitted(BayesianGaussianMixture(2), y, VariationalEM(online=0.7), steps=80, batch_size=50)
    again = fitted(BayesianGaussianMixture(2), y, VariationalEM(start=some.phi, tolerance=0), steps=1)
    assert again.bound == pytest.approx(whole.bound, abs=0.5)
    counts = float(some.phi["alpha"].sum()) - 2
    assert counts == pytest.approx(400, rel=1e-9)  # each minibatch stands for all rows


def test_it_begins_where_another_posterior_ended():
    y = clouds()
    before = fitted(BayesianGaussianMixture(2), y, VariationalEM(tolerance=1e-10))
    after = fit(before.latent, before.latent.meet(y)[1], VariationalEM(start=before), steps=5, progress=False)
    assert len(after.history["bound"]) == 1
    assert after.log_evidence.value == pytest.approx(before.bound, abs=1e-6)


def test_a_fit_that_was_stopped_goes_on(tmp_path: Path):
    model, rows = BayesianGaussianMixture(3).meet(clouds())
    options: dict[str, Any] = {"steps": 9, "progress": False}
    straight = fit(model, rows, VariationalEM(tolerance=0), **options)

    def stop(moment: Any) -> None:
        if moment.step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(model, rows, VariationalEM(tolerance=0), checkpoint=tmp_path / "c", callbacks=[stop], **options)
    resumed = fit(model, rows, VariationalEM(tolerance=0), checkpoint=tmp_path / "c", **options)
    assert torch.equal(resumed.history["bound"], straight.history["bound"])
    assert all(torch.equal(resumed.mean[name], t) for name, t in straight.mean.items())


@pytest.mark.parametrize(
    ("model", "data"),
    [
        (NormalGamma(), clouds()[:, 0]),
        (BayesianGaussianMixture(2), clouds()),
        (BayesianGaussianMixture(2, "diagonal"), clouds()),
        (BayesianRegression(), (clouds(), clouds()[:, 0] + random(3, 80))),
    ],
)
def test_single_precision_stays_single(model: Any, data: Any):
    single = tuple(t.float() for t in data) if isinstance(data, tuple) else data.float()
    posterior = fitted(model, single)
    assert all(t.dtype == torch.float32 for t in posterior.phi.values())
    assert posterior.bound == pytest.approx(fitted(model, data).bound, rel=1e-3)


def test_a_bound_that_falls_stops_the_fit():
    class Wrong(NormalGamma):
        def kl_q(self, phi: dict[str, Tensor]) -> Tensor:
            return 2 * super().kl_q(phi)

    with pytest.raises(DivergedError, match="The bound of VariationalEM fell by") as caught:
        fitted(Wrong(rate=20.0), 5 + clouds(3)[:, 0])
    assert isinstance(caught.value.posterior, ConjugatePosterior)
    assert isinstance(caught.value.posterior.latent, Wrong)


def test_what_it_cannot_fit_is_refused_in_one_sentence():
    must = "The 'model' argument of VariationalEM must be a latent model with conjugate priors"
    with pytest.raises(InputError, match=must):
        fitted(GaussianMixture(2), clouds())
    with pytest.raises(InputError, match=must):
        fit(Model(nn.Linear(2, 1), Gaussian()), (clouds().float(), clouds()[:, 0].float()), VariationalEM(), steps=1)
    with pytest.raises(InputError, match="The 'start' argument of VariationalEM must be one of k-means"):
        fitted(BayesianGaussianMixture(2), clouds(), VariationalEM(start="middle"))
    with pytest.raises(InputError, match="The 'annealing' argument of VariationalEM must be left out"):
        fitted(NormalGamma(), clouds()[:, 0], VariationalEM(annealing=(2.0,)))
    other = fitted(NormalGamma(), clouds()[:, 0])
    method = VariationalEM(start={**other.phi, "l": -other.phi["l"]})
    with pytest.raises(InputError, match="The 'start' argument of VariationalEM must hold parameters of NormalGamma"):
        fitted(NormalGamma(), clouds()[:, 0], method)
    with pytest.raises(InputError, match=r"The 'restarts' argument of VariationalEM must be an integer >= 1, got 0."):
        VariationalEM(restarts=0)
