"""MAP with updates of prior and noise by the evidence, against the maximum of the exact evidence."""

import math
import warnings

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import nn
from torch.distributions import MultivariateNormal

import priory as pr
from priory.core.data import Data
from priory.core.streams import stream
from priory.curvature import STRUCTURES, Pass, select
from priory.curvature.tuning import tune
from priory.fitting.checkpoint import Checkpoint
from priory.fitting.prepare import make_target

F64 = torch.float64
ROWS, INPUTS, SCALE = 40, 4, 2.0


def line(seed=0, likelihood=None, dtype=F64):
    generator = stream(seed, "line")
    X = torch.randn(ROWS, INPUTS, generator=generator, dtype=F64)
    true = 0.6 * torch.randn(INPUTS, generator=generator, dtype=F64)
    y = X @ true + 0.3 + 0.5 * torch.randn(ROWS, generator=generator, dtype=F64)
    net = nn.Linear(INPUTS, 1).to(dtype)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator, dtype=F64))
    return pr.Model(net, likelihood or pr.Gaussian(), prior=SCALE), (X.to(dtype), y.to(dtype))


def best(data, noise=None):
    """Return the prior precision and the noise that maximise log p(y), by SciPy."""
    X, y = data
    design = torch.cat([X, torch.ones(ROWS, 1, dtype=F64)], 1)

    def minus(theta):
        square = math.exp(theta[1]) if noise is None else noise**2
        covariance = square * torch.eye(ROWS, dtype=F64) + design @ design.T / math.exp(theta[0])
        return -float(MultivariateNormal(torch.zeros(ROWS, dtype=F64), covariance).log_prob(y))

    found = minimize(minus, np.zeros(2), method="Nelder-Mead", options={"xatol": 1e-8, "fatol": 1e-12})
    return math.exp(found.x[0]), math.exp(0.5 * found.x[1])


def precision_of(posterior):
    return float(posterior.target.prior.precision[0])


@pytest.mark.parametrize(("structure", "batch_size"), [("full", 10**6), ("kron", 10**6)])
def test_prior_and_noise_converge_to_type_two_maximum_likelihood(structure, batch_size):
    model, data = line()
    tau, noise = best(data)
    method = pr.MAP(evidence_every=25, structure=structure, learning_rate=0.05)
    posterior = pr.fit(model, data, method, steps=800, batch_size=batch_size, progress=False)
    assert precision_of(posterior) == pytest.approx(tau, rel=0.01)
    assert float(posterior.mean["likelihood.noise"]) == pytest.approx(noise, rel=0.01)
    assert abs(math.log(tau * SCALE**2)) > 0.5  # far from the given prior

    rows = Data.of(data, 10**6).prepared(model.prepare)
    curvature = STRUCTURES[structure].of(Pass(posterior.target, posterior.w, rows, select(model)))
    rested = tune(posterior.target, posterior.w, curvature, rows, by="layer")
    assert float(rested.factors["weight"]) == pytest.approx(1, rel=0.01)
    assert float(rested.noise["likelihood.noise"]) == pytest.approx(noise, rel=0.01)


def test_a_given_noise_is_kept_and_the_prior_is_found():
    model, data = line(likelihood=pr.Gaussian(0.8))
    tau, _ = best(data, noise=0.8)
    method = pr.MAP(evidence_every=25, structure="full", learning_rate=0.05)
    posterior = pr.fit(model, data, method, steps=800, batch_size=10**6, progress=False)
    assert precision_of(posterior) == pytest.approx(tau, rel=0.01)


def test_minibatches_find_the_same_prior_within_their_noise():
    """The curvature is over all rows; an extra factor N/n would be 4 here."""
    model, data = line()
    tau, noise = best(data)
    method = pr.MAP(evidence_every=5, structure="full", learning_rate=0.05)
    posterior = pr.fit(model, data, method, epochs=200, batch_size=10, progress=False)
    assert precision_of(posterior) == pytest.approx(tau, rel=0.05)
    assert float(posterior.mean["likelihood.noise"]) == pytest.approx(noise, rel=0.02)


def test_no_rows_are_held_out_and_nothing_is_tuned_during_the_burn_in():
    model, data = line()
    method = pr.MAP(evidence_every=1, structure="full")
    rows = Data.of(data, 10).prepared(model.prepare)
    target = make_target(model, rows)
    plan = method.plan(target, rows, 400, seed=0)
    assert plan.held is None
    assert plan.rows(0) is rows
    early = pr.fit(model, data, method, steps=400, batch_size=10, progress=False, callbacks=[lambda m: m.step >= 40])
    later = pr.fit(model, data, method, steps=400, batch_size=10, progress=False, callbacks=[lambda m: m.step >= 44])
    assert precision_of(early) == SCALE**-2
    assert precision_of(later) != SCALE**-2


def network(likelihood, outputs=1):
    generator = stream(0, "network")
    X = torch.randn(30, 2, generator=generator, dtype=F64)
    f = torch.sin(X[:, :1]) + X[:, 1:]
    net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, outputs)).to(F64)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=generator, dtype=F64))
    if isinstance(likelihood, pr.Categorical):
        y = (f[:, 0] > 0).long()
    else:
        y = f + 0.2 * torch.randn(30, outputs, generator=generator, dtype=F64)
        y = y[:, 0] if outputs == 1 else y
    return pr.Model(net, likelihood), (X, y)


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
@pytest.mark.parametrize(
    ("likelihood", "outputs"),
    [(pr.Gaussian(), 1), (pr.Gaussian(outputs=2), 2), (pr.StudentT(4.0), 1), (pr.Categorical(), 2)],
)
def test_every_structure_gives_one_factor_per_layer(structure, likelihood, outputs):
    model, data = network(likelihood, outputs)
    method = pr.MAP(evidence_every=20, structure=structure)
    posterior = pr.fit(model, data, method, steps=100, batch_size=30, progress=False)
    factors = posterior.target.prior.factors
    assert set(factors) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert float(factors["0.weight"]) == float(factors["0.bias"]) != float(factors["2.weight"])
    assert bool(torch.isfinite(posterior.w).all())


def test_each_member_has_the_prior_of_a_single_fit():
    model, data = network(pr.Gaussian())
    rows = Data.of(data, 30).prepared(model.prepare)
    target, method = make_target(model, rows), pr.MAP(evidence_every=3, structure="full")
    plan = method.plan(target, rows, 20, seed=0)

    def run(state):
        for _ in range(20):
            state, _ = method.step(target, state, rows.tensors, stream(0))
        return method.posterior(target, state)

    together = method.init(target, plan, stream(7), torch.Size([2]))
    starts = together.w.clone()
    both = run(together)
    assert both.target.prior.factors["0.weight"].shape == (2, 1)
    for i in range(2):
        alone = method.init(target, plan, stream(7), torch.Size())
        alone.w.copy_(starts[i])
        single = run(alone)
        torch.testing.assert_close(both.w[i], single.w, rtol=0, atol=1e-9)
        torch.testing.assert_close(both.target.prior.precision[i], single.target.prior.precision, rtol=1e-8, atol=0)


def test_a_file_stores_the_tuned_prior(tmp_path):
    model, data = network(pr.Gaussian())
    posterior = pr.fit(model, data, pr.MAP(evidence_every=20, structure="full"), steps=60, progress=False)
    posterior.save(tmp_path / "found")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        back = pr.load(tmp_path / "found", model)
    assert torch.equal(back.w, posterior.w)
    for one in (back.target.prior, back.model.prior):
        assert torch.equal(one.precision, posterior.target.prior.precision)
        assert one.log_normaliser == posterior.target.prior.log_normaliser
    assert model.prior.factors == {}


def test_a_fit_interrupted_between_two_updates_resumes_with_the_same_result(tmp_path):
    model, data = network(pr.Gaussian())
    method, options = pr.MAP(evidence_every=3, structure="full"), {"steps": 30, "batch_size": 15, "progress": False}
    whole = pr.fit(model, data, method, **options)

    def interrupt(progress):
        if progress.step >= 16:
            raise KeyboardInterrupt

    checkpoint = Checkpoint(tmp_path / "fit", every=5)
    with pytest.raises(KeyboardInterrupt):
        pr.fit(model, data, method, checkpoint=checkpoint, callbacks=[interrupt], **options)
    resumed = pr.fit(model, data, method, checkpoint=checkpoint, **options)
    assert torch.equal(resumed.w, whole.w)
    assert torch.equal(resumed.target.prior.precision, whole.target.prior.precision)
    assert not torch.equal(whole.target.prior.precision, model.prior.precision)


def test_invalid_arguments_are_refused():
    for bad in (0, 1.5, True, "often"):
        with pytest.raises(
            pr.InputError, match="The 'evidence_every' argument of MAP must be an integer >= 1, or None"
        ):
            pr.MAP(evidence_every=bad)
    with pytest.raises(pr.InputError, match="The 'structure' argument of MAP must be 'kron', 'diag' or 'full'"):
        pr.MAP(evidence_every=1, structure="lowrank")
    with pytest.raises(
        pr.InputError, match="The 'holdout' argument of MAP must be left out when the evidence sets the noise"
    ):
        pr.MAP(evidence_every=1, holdout=0.2)
    density = pr.Density(lambda x: -x["a"].square(), {"a": pr.Param()})
    with pytest.raises(pr.InputError, match="'evidence_every' argument of MAP needs a Model"):
        pr.fit(density, None, pr.MAP(evidence_every=1), steps=2, progress=False)
    X, y = network(pr.Categorical(), 2)[1]
    flat = pr.Model(nn.Linear(2, 2).to(F64), pr.Categorical(), prior="flat")
    with pytest.raises(pr.InputError, match="must have a Gaussian prior or a noise to set"):
        pr.fit(flat, (X, y), pr.MAP(evidence_every=1), steps=2, progress=False)
