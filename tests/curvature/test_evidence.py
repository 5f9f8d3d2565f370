"""The evidence against its closed form for linear regression, and its maximum against SciPy's optimiser."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import nn
from torch.distributions import Laplace, MultivariateNormal, Normal, StudentT

import priory as pr
from priory.core.data import Data
from priory.core.streams import stream
from priory.curvature import Pass, select
from priory.curvature.evidence import log_evidence, prior_precision
from priory.curvature.full import Full
from priory.curvature.tuning import tune
from priory.fitting.prepare import make_target
from priory.priors import Hierarchical

F64 = torch.float64


class Line:
    """Linear regression with separate priors on weight and bias; the design matrix includes a column of ones."""

    def __init__(self, likelihood=None, prior=None, rows=30, inputs=3, outputs=1, noise=0.7, seed=0, **options):
        generator = stream(seed, "line")
        self.X = torch.randn(rows, inputs, generator=generator, dtype=F64)
        true = torch.randn(outputs, inputs, generator=generator, dtype=F64)
        spread = noise * (1 + torch.arange(outputs, dtype=F64))
        y = self.X @ true.T + 0.5 + spread * torch.randn(rows, outputs, generator=generator, dtype=F64)
        self.y = y[:, 0] if outputs == 1 else y
        prior = {"weight": 0.8, "bias": 1.5} if prior is None else prior
        self.model = pr.Model(nn.Linear(inputs, outputs).to(F64), likelihood or pr.Gaussian(noise), prior=prior)
        self.data = Data.of((self.X, self.y), 10).prepared(self.model.prepare)
        self.target = make_target(self.model, self.data, **options)
        self.selection = select(self.model)
        self.design = torch.cat([self.X, torch.ones(rows, 1, dtype=F64)], 1)
        self.start = self.target.start(self.data, torch.Size(), generator)

    def curvature(self, w, **options):
        return Full.of(Pass(self.target, w, self.data, self.selection, **options))

    def mode(self, precision, square, w=None):
        """Return w with its weights at the mode for these prior precisions (p,) and this noise variance."""
        w = self.start.clone() if w is None else w.clone()
        q = self.design.T @ self.design / square + torch.diag(precision)
        w[: len(precision)] = torch.linalg.solve(q, self.design.T @ self.y / square)
        if self.model.layout.size > len(precision):
            w[-1] = 0.5 * math.log(square)
        return w

    def exact(self, precision, square):
        """Return log p(y) with the weights integrated out."""
        covariance = (
            square * torch.eye(len(self.y), dtype=F64) + self.design @ torch.diag(1 / precision) @ self.design.T
        )
        return float(MultivariateNormal(torch.zeros_like(self.y), covariance).log_prob(self.y))


PRECISION = torch.tensor([0.8**-2] * 3 + [1.5**-2], dtype=F64)


def evidence_at(line, w, curvature=None, **options):
    curvature = curvature or line.curvature(w, **options)
    a, b = line.target.likelihood_power, line.target.prior_power
    gaussian = curvature.gaussian(b * prior_precision(line.target, w)[curvature.selection.places], a)
    value = line.target.log_likelihood(w, line.data)
    return float(log_evidence(line.target, w, gaussian, value, curvature.selection))


def test_the_evidence_of_linear_regression_is_exact():
    line = Line()
    w = line.mode(PRECISION, 0.49)
    assert evidence_at(line, w) == pytest.approx(line.exact(PRECISION, 0.49), abs=1e-8)


def test_the_evidence_is_conditional_on_a_learnt_noise_without_its_prior():
    line = Line(pr.Gaussian())
    w = line.mode(PRECISION, 0.36)
    assert evidence_at(line, w) == pytest.approx(line.exact(PRECISION, 0.36), abs=1e-8)


def test_the_evidence_is_conditional_on_weights_outside_the_selection():
    """With a fixed bias, it is the evidence of y minus that bias."""
    line = Line()
    line.selection = select(line.model, ["weight"])
    bias, tau = 0.3, PRECISION[:3]
    residual = line.y - bias
    q = line.X.T @ line.X / 0.49 + torch.diag(tau)
    w = torch.cat([torch.linalg.solve(q, line.X.T @ residual / 0.49), torch.tensor([bias], dtype=F64)])
    covariance = 0.49 * torch.eye(30, dtype=F64) + line.X @ torch.diag(1 / tau) @ line.X.T
    wanted = MultivariateNormal(torch.zeros(30, dtype=F64), covariance).log_prob(residual)
    assert evidence_at(line, w) == pytest.approx(float(wanted), abs=1e-8)


@pytest.mark.parametrize("temperature", [0.25, 4.0])
def test_a_tempered_likelihood_has_the_evidence_of_a_wider_noise_up_to_its_constant(temperature):
    line = Line(temperature=temperature)
    w = line.mode(PRECISION, 0.49 * temperature)
    constant = 15 * (math.log(2 * math.pi * 0.49 * temperature) - math.log(2 * math.pi * 0.49) / temperature)
    wanted = line.exact(PRECISION, 0.49 * temperature) + constant
    assert evidence_at(line, w) == pytest.approx(wanted, abs=1e-8)


def test_the_evidence_of_a_tempered_posterior_integrates_the_joint_to_the_power_one_over_t():
    """The integral over one weight is computed by quadrature."""
    generator = stream(0, "x")
    X = torch.randn(6, 1, generator=generator, dtype=F64)
    y = 0.5 * X[:, 0] + 0.3
    model = pr.Model(nn.Linear(1, 1, bias=False).to(F64), pr.Gaussian(0.7), prior=1.2)
    data = Data.of((X, y), 10).prepared(model.prepare)
    target = make_target(model, data, 3.0, "posterior")
    tau, H = 1.2**-2, float(X.square().sum()) / 0.49
    w = torch.tensor([float(X[:, 0] @ y) / 0.49 / (H + tau)], dtype=F64)
    selection = select(model)
    gaussian = Full.of(Pass(target, w, data, selection)).gaussian(prior_precision(target, w) / 3, 1 / 3)
    found = log_evidence(target, w, gaussian, target.log_likelihood(w, data), selection)
    grid = torch.linspace(-30, 30, 200_001, dtype=F64)[:, None]
    joint = (target.log_likelihood(grid, data) + target.log_prior(grid)) / 3
    wanted = torch.logsumexp(joint, 0) + math.log(60 / 200_000)
    assert float(found) == pytest.approx(float(wanted), abs=1e-8)


# The prior's precision.


def test_the_precision_of_a_prior_is_minus_its_second_derivative():
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).to(F64)
    prior = {"0.weight": StudentT(5.0, 0.0, 0.4), "0.bias": "flat", "1.weight": Normal(0.2, 0.5), "*": Hierarchical()}
    model = pr.Model(net, pr.Gaussian(), prior=prior)
    target = make_target(model, Data.of((torch.randn(4, 2, dtype=F64), torch.randn(4, dtype=F64))))
    w = torch.randn(target.size, generator=stream(0, "w"), dtype=F64)
    wanted = -torch.autograd.functional.hessian(target.log_prior, w).diagonal()
    found = prior_precision(target, w)[:13]
    torch.testing.assert_close(found, wanted[:13].clamp_min(0), rtol=0, atol=1e-10)
    assert bool((wanted[:6] < 0).any())  # Student's t is convex in its tails, where its precision counts as zero


def test_a_laplace_prior_has_no_precision_and_a_joint_prior_is_refused():
    net = nn.Linear(2, 1, bias=False).to(F64)
    rows = Data.of((torch.randn(4, 2, dtype=F64), torch.randn(4, dtype=F64)))
    target = make_target(pr.Model(net, pr.Gaussian(1.0), prior=Laplace(0.0, 1.0)), rows)
    assert prior_precision(target, torch.ones(2, dtype=F64)).tolist() == [0.0, 0.0]
    joint = MultivariateNormal(torch.zeros(2, dtype=F64), torch.eye(2, dtype=F64))
    target = make_target(pr.Model(net, pr.Gaussian(1.0), prior=joint), rows)
    with pytest.raises(pr.InputError, match="product over single weights"):
        prior_precision(target, torch.ones(2, dtype=F64))


# Type-II maximum likelihood.


def search(line, free_noise=True, groups=(0, 0, 0, 0)):
    """Return factors on PRECISION and the noise variance that maximise the exact evidence, by SciPy."""
    index = np.array(groups)
    count = index.max() + 1

    def minus(theta):
        square = math.exp(theta[-1]) if free_noise else 0.49
        return -line.exact(PRECISION * torch.as_tensor(np.exp(theta[:count][index])), square)

    start = np.zeros(count + free_noise)
    found = minimize(minus, start, method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-13, "maxiter": 20_000})
    return np.exp(found.x[:count]), math.exp(found.x[-1]) if free_noise else 0.49, -found.fun


def alternate(line, by, rounds=60, **options):
    """Alternate between computing the mode and `tune` until both converge."""
    factors, square = torch.ones(4, dtype=F64), 0.49
    for _ in range(rounds):
        w = line.mode(PRECISION * factors, square)
        target = line.target.scaled({"weight": factors[:3], "bias": factors[3]})
        found = tune(target, w, line.curvature(w), line.data, by=by, **options)
        for name, places in (("weight", slice(0, 3)), ("bias", slice(3, 4))):
            factors[places] *= found.factors[name]
        if found.noise:
            square = float(found.noise["likelihood.noise"]) ** 2
    return factors, square, found


def test_prior_and_noise_converge_to_the_maximum_of_the_exact_evidence():
    line = Line(pr.Gaussian())
    wanted, square, top = search(line)
    factors, found, tuned = alternate(line, "scalar")
    np.testing.assert_allclose(factors.numpy(), np.repeat(wanted, 4), rtol=1e-4)
    assert found == pytest.approx(square, rel=1e-4)
    assert tuned.log_evidence == pytest.approx(top, abs=1e-7)


def test_the_maximum_of_the_evidence_is_a_fixed_point_of_tune():
    line = Line(pr.Gaussian())
    factor, square, _ = search(line)
    w = line.mode(PRECISION * float(factor[0]), square)
    target = line.target.scaled({"weight": torch.tensor(factor[0]), "bias": torch.tensor(factor[0])})
    found = tune(target, w, line.curvature(w), line.data)
    assert float(found.factors["weight"]) == pytest.approx(1, rel=1e-5)
    assert float(found.noise["likelihood.noise"]) == pytest.approx(square**0.5, rel=1e-5)


def test_one_factor_per_parameter_reaches_the_maximum_and_keeps_a_given_noise():
    line = Line()
    wanted, _, top = search(line, free_noise=False, groups=(0, 1, 2, 3))
    factors, _, tuned = alternate(line, "parameter")
    np.testing.assert_allclose(factors.numpy(), wanted, rtol=1e-3)
    assert tuned.log_evidence == pytest.approx(top, abs=1e-6)
    assert tuned.noise == {}


def net(outputs=1, dtype=F64):
    generator = stream(1, "net")
    built = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs)).to(dtype)
    with torch.no_grad():
        for p in built.parameters():
            p.copy_(0.7 * torch.randn(p.shape, generator=generator, dtype=dtype))
    return built


def problem(likelihood, outputs=1, prior="glorot", dtype=F64, rows=25, **options):
    """Return the target of a small network, weights that roughly fit the data, and the data."""
    generator = stream(2, "problem")
    X = torch.randn(rows, 2, generator=generator, dtype=dtype)
    model = pr.Model(net(outputs, dtype), likelihood, prior=prior)
    f = model.net(X).detach()
    y = f + 0.4 * torch.randn(f.shape, generator=generator, dtype=dtype) * (1 + torch.arange(outputs, dtype=dtype))
    y = y[:, 0] if outputs == 1 else y
    data = Data.of((X, y), 10).prepared(model.prepare)
    target = make_target(model, data, **options)
    return target, target.start(data, torch.Size(), generator), data


def assert_stationary(found, data, kind="ggn", structure=Full, step=1e-4):
    """Assert that the derivatives of the evidence with respect to each factor and each noise are zero."""
    target, w, selection = found.target, found.w, found.curvature.selection

    def value(target, w):
        a, b = target.likelihood_power, target.prior_power
        precision = b * prior_precision(target, w)[selection.places]
        gaussian = structure.of(Pass(target, w, data, selection, kind=kind)).gaussian(precision, a)
        return float(log_evidence(target, w, gaussian, target.log_likelihood(w, data), selection))

    assert found.log_evidence == pytest.approx(value(target, w), abs=1e-7)
    modules = {name.rpartition(".")[0] for name in found.factors}
    for module in modules:
        names = [name for name in found.factors if name.rpartition(".")[0] == module]
        up, down = (value(target.scaled(dict.fromkeys(names, math.exp(s))), w) for s in (step, -step))
        assert abs(up - down) / (2 * step) < 1e-4
    for name in found.noise:
        block = target.model.layout[name]
        for place in range(block.start, block.stop):
            move = torch.zeros_like(w)
            move[place] = step
            assert abs(value(target, w + move) - value(target, w - move)) / (2 * step) < 1e-4


@pytest.mark.parametrize(
    ("likelihood", "kind", "options"),
    [
        (pr.Gaussian(), "ggn", {}),
        (pr.Gaussian(), "empirical", {}),
        (pr.Gaussian(), "ggn", {"temperature": 2.0}),
        (pr.Gaussian(), "ggn", {"temperature": 0.5, "tempers": "posterior"}),
        (pr.StudentT(4.0), "ggn", {}),
    ],
)
def test_one_factor_per_layer_and_the_noise_reach_a_stationary_point_of_the_evidence(likelihood, kind, options):
    target, w, data = problem(likelihood, **options)
    curvature = Full.of(Pass(target, w, data, select(target.model), kind=kind))
    found = tune(target, w, curvature, data, by="layer", kind=kind, steps=1_000)
    assert set(found.factors) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert found.factors["0.weight"] == found.factors["0.bias"] != found.factors["2.bias"]
    assert_stationary(found, data, kind)
    assert all(later >= earlier - 1e-9 for earlier, later in zip(found.trace, found.trace[1:], strict=False))
    assert found.trace[-1] > found.trace[0] + 0.02
    assert bool((found.w[:-1] == w[:-1]).all())


@pytest.mark.parametrize("likelihood", [pr.Gaussian(outputs=2), pr.StudentT(4.0, outputs=2)])
def test_one_noise_per_output_reaches_a_stationary_point_of_the_evidence(likelihood):
    target, w, data = problem(likelihood, outputs=2)
    again = lambda v: Full.of(Pass(target, v, data, select(target.model)))  # noqa: E731
    found = tune(target, w, again(w), data, by="layer", again=again, steps=300)
    (noise,) = found.noise.values()
    assert noise[1] > noise[0]
    assert_stationary(found, data)


def test_without_recomputing_the_curvature_one_noise_per_output_is_kept_with_a_note():
    target, w, data = problem(pr.Gaussian(outputs=2), outputs=2)
    found = tune(target, w, Full.of(Pass(target, w, data, select(target.model))), data)
    assert found.noise == {}
    assert torch.equal(found.w, w)
    assert found.notes == ["likelihood.noise: left unchanged, because one noise per output needs `again`."]


def test_a_curvature_that_does_not_scale_with_the_noise_keeps_it_with_a_note():
    target, w, data = problem(pr.StudentT(4.0))
    curvature = Full.of(Pass(target, w, data, select(target.model), kind="empirical"))
    found = tune(target, w, curvature, data, kind="empirical")
    assert torch.equal(found.w, w)
    assert "likelihood.scale: left unchanged" in found.notes[0]


def test_the_prior_and_the_noise_are_kept_unless_they_are_tuned():
    target, w, data = problem(pr.Gaussian())
    curvature = Full.of(Pass(target, w, data, select(target.model)))
    found = tune(target, w, curvature, data, by=None)
    assert found.factors == {}
    assert found.target is target
    assert_stationary(found, data)
    still = tune(target, w, curvature, data, noise=False)
    assert torch.equal(still.w, w)
    assert set(still.factors) == set(target.model.layout.names[:-1])
    nothing = tune(target, w, curvature, data, by=None, noise=False)
    assert len(nothing.trace) == 1


def test_the_gaussian_is_that_of_the_scaled_target_with_the_tuned_noise():
    target, w, data = problem(pr.Gaussian())
    selection = select(target.model)
    found = tune(target, w, Full.of(Pass(target, w, data, selection)), data, by="layer")
    direct = Full.of(Pass(found.target, found.w, data, selection)).gaussian(found.target.prior.precision[:17])
    torch.testing.assert_close(found.gaussian.log_det, direct.log_det, rtol=0, atol=1e-8)
    torch.testing.assert_close(found.gaussian.variance(), direct.variance(), rtol=1e-8, atol=0)
    again = found.curvature.gaussian(found.precision, found.scale)
    assert torch.equal(again.variance(), found.gaussian.variance())


def test_only_the_selected_coordinates_are_scaled():
    target, w, data = problem(pr.Gaussian(0.4))
    curvature = Full.of(Pass(target, w, data, select(target.model, torch.tensor([1, 2, 13]))))
    found = tune(target, w, curvature, data)
    before, after = target.prior.precision, found.target.prior.precision
    changed = (before != after).nonzero()[:, 0]
    assert changed.tolist() == [1, 2, 13]
    torch.testing.assert_close((after / before)[changed].std(), torch.zeros((), dtype=F64), rtol=0, atol=1e-12)
    a_and_b = curvature.gaussian(found.precision, found.scale)
    assert float(log_evidence(found.target, w, a_and_b, target.log_likelihood(w, data), curvature.selection)) == (
        pytest.approx(found.log_evidence, abs=1e-9)
    )


def test_a_learnt_prior_precision_is_tuned_through_its_coordinate():
    plain, w, data = problem(pr.Gaussian(0.4), prior=2.0)
    wanted = tune(plain, w, Full.of(Pass(plain, w, data, select(plain.model))), data)
    target, v, _ = problem(pr.Gaussian(0.4), prior=Hierarchical(shape=1.0, rate=4.0))  # precision 1/4, as a scale of 2
    found = tune(target, v, Full.of(Pass(target, v, data, select(target.model))), data)
    assert found.factors == {}
    tau = 0.25 * float(wanted.factors["0.weight"])
    torch.testing.assert_close(found.w[17:].exp(), torch.full((4,), tau, dtype=F64), rtol=1e-6, atol=0)
    assert found.log_evidence == pytest.approx(wanted.log_evidence, abs=1e-8)


def test_factors_and_noise_stay_within_bounds_for_zero_weights_and_a_perfect_fit():
    target, w, data = problem(pr.Gaussian())
    w[:12] = 0
    curvature = Full.of(Pass(target, w, data, select(target.model)))
    found = tune(target, w, curvature, data, by="layer")
    assert float(found.factors["0.weight"]) == pytest.approx(1e8, rel=1e-6)
    exact = Data.of((data.tensors[0], target.model.net(data.tensors[0]).detach()[:, 0]), 10).prepared(
        target.model.prepare
    )
    _, w, _ = problem(pr.Gaussian())
    found = tune(target, w, Full.of(Pass(target, w, exact, select(target.model))), exact)
    assert 1e-4 * float(w[-1].exp()) * 0.999 < float(found.noise["likelihood.noise"]) < 1e-2
    assert math.isfinite(found.log_evidence)


def test_tune_works_in_float32():
    (target, w, data), (target_32, w_32, data_32) = (problem(pr.Gaussian(), dtype=t) for t in (F64, torch.float32))
    wanted = tune(target, w, Full.of(Pass(target, w, data, select(target.model))), data)
    found = tune(target_32, w_32, Full.of(Pass(target_32, w_32, data_32, select(target_32.model))), data_32)
    assert found.w.dtype == found.factors["0.weight"].dtype == torch.float32
    assert found.log_evidence > wanted.log_evidence - 20  # the float32 data are other draws
    assert all(later >= earlier - 1e-4 for earlier, later in zip(found.trace, found.trace[1:], strict=False))


def test_invalid_arguments_of_tune_are_refused():
    target, w, data = problem(pr.Gaussian())
    curvature = Full.of(Pass(target, w, data, select(target.model)))
    with pytest.raises(
        pr.InputError, match="The 'tune' argument of Laplace must be None or among scalar, layer, parameter"
    ):
        tune(target, w, curvature, data, by="module")
    with pytest.raises(pr.InputError, match="The 'steps' argument of tune must be an integer >= 1"):
        tune(target, w, curvature, data, steps=0)
    flat, w, data = problem(pr.Gaussian(), prior={"0.weight": 1.0, "*": "flat"})
    curvature = Full.of(Pass(flat, w, data, select(flat.model, ["2.*"])))
    with pytest.raises(pr.InputError, match="must have a Gaussian prior to scale"):
        tune(flat, w, curvature, data)
    density = pr.Density(lambda x: -x["a"].square(), {"a": pr.Param()})
    rows = Data.of(None)
    with pytest.raises(pr.InputError, match="a Density has its prior inside"):
        tune(make_target(density, rows), torch.zeros(1), curvature, rows)


@pytest.mark.parametrize("likelihood", [pr.Gaussian(), pr.Gaussian(outputs=2)])
def test_scaled_rows_give_the_same_result_as_repeated_rows(likelihood):
    """As with a loader that drops rows: N/n scales the curvature, the residuals and the number of rows."""
    outputs = len(likelihood.start(torch.randn(6, 2))["noise"].reshape(-1))
    target, w, data = problem(likelihood, outputs=outputs)
    assert data.tensors is not None
    twice = Data.of(tuple(torch.cat([t, t]) for t in data.tensors), 10).prepared(target.model.prepare)
    found = []
    for rows in (data, twice):
        double = replace(target, num_data=50)
        again = lambda v, rows=rows, double=double: Full.of(Pass(double, v, rows, select(double.model)))  # noqa: E731
        found.append(tune(double, w, again(w), rows, by="layer", again=again, steps=20))
    assert found[0].log_evidence == pytest.approx(found[1].log_evidence, abs=1e-8)
    torch.testing.assert_close(found[0].w, found[1].w, rtol=0, atol=1e-8)
    torch.testing.assert_close(found[0].precision, found[1].precision, rtol=1e-8, atol=0)
