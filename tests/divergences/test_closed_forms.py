"""Every closed form against an integral that shares no code with it, at 1e-10, and its gradients."""

import math
from collections.abc import Callable
from itertools import pairwise

import mpmath
import numpy
import pytest
import torch
from scipy import integrate, special
from torch import Tensor
from torch.distributions import (
    Categorical,
    Distribution,
    Independent,
    Laplace,
    LowRankMultivariateNormal,
    MixtureSameFamily,
    MultivariateNormal,
    Normal,
    StudentT,
    Uniform,
)

import priory as pr
from priory.distributions import (
    GeneralisedGaussian,
    GroupLasso,
    Horseshoe,
    Logistic,
    LogUniform,
    ScaleMixture,
    SpikeAndSlab,
)
from priory.divergences.norms import expected_norm


def double(value: object) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


Side = tuple[Distribution, Callable[[float], float]]
LOG_2PI = math.log(2 * math.pi)


def normal(m: float, s: float) -> Side:
    return Normal(double(m), double(s)), lambda x: -0.5 * ((x - m) / s) ** 2 - math.log(s) - 0.5 * LOG_2PI


def laplace(m: float, b: float) -> Side:
    return Laplace(double(m), double(b)), lambda x: -abs(x - m) / b - math.log(2 * b)


def uniform(low: float, high: float) -> Side:
    return Uniform(double(low), double(high)), lambda x: -math.log(high - low) if low <= x <= high else -math.inf


def logistic(m: float, s: float) -> Side:
    def logpdf(x: float) -> float:
        z = abs(x - m) / s
        return -z - 2 * math.log1p(math.exp(-z)) - math.log(s)

    return Logistic(double(m), double(s)), logpdf


def student(df: float, m: float, s: float) -> Side:
    constant = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(df * math.pi) - math.log(s)
    density = lambda x: constant - (df + 1) / 2 * math.log1p(((x - m) / s) ** 2 / df)  # noqa: E731
    return StudentT(double(df), double(m), double(s)), density


def bridge(a: float, p: float) -> Side:
    constant = -math.log(2 * a * math.gamma(1 + 1 / p))
    return GeneralisedGaussian(double(a), double(p)), lambda x: constant - abs(x / a) ** p


def log_uniform() -> Side:
    return LogUniform(), lambda x: -math.log(abs(x))


def scale_mixture(pi: float, s1: float, s2: float) -> Side:
    wide, narrow = normal(0, s1)[1], normal(0, s2)[1]

    def logpdf(x: float) -> float:
        one, two = math.log(pi) + wide(x), math.log(1 - pi) + narrow(x)
        return max(one, two) + math.log1p(math.exp(-abs(one - two)))

    return ScaleMixture(double(pi), double(s1), double(s2)), logpdf


def horseshoe(s: float) -> Side:
    def logpdf(x: float) -> float:
        u = 0.5 * (x / s) ** 2
        # hyperu(1, 1, u) = e^u E1(u)
        scaled = special.exp1(u) * math.exp(u) if u < 500 else float(mpmath.hyperu(1, 1, u))
        return math.log(scaled) - math.log(s) - 0.5 * math.log(2 * math.pi**3)

    return Horseshoe(double(s)), logpdf


def integral(log_q: Callable[[float], float], log_p: Callable[[float], float], corners: list[float]) -> float:
    """int q (log q - log p), by scipy, in pieces that end at the corners and shrink towards them."""

    def integrand(x: float) -> float:
        a = float(log_q(x))
        return math.exp(a) * (a - float(log_p(x))) if a > -700 else 0.0

    steps = [10.0**k for k in range(-9, 1)] + [2.0, 4.0, 8.0, 16.0, 40.0, 200.0, 2e3, 2e4, 2e6, 2e9]
    edges = sorted({c + sign * s for c in corners for s in steps for sign in (-1, 1)} | set(corners))
    return math.fsum(
        integrate.quad(integrand, a, b, epsabs=1e-14, epsrel=1e-12, limit=100)[0] for a, b in pairwise(edges)
    )


CLOSED = {
    "Gaussian to Gaussian": (normal(1.3, 0.6), normal(0.0, 1.7)),
    "Gaussian to Laplace": (normal(1.3, 0.6), laplace(-0.5, 1.1)),
    "Gaussian to Laplace, far": (normal(0.01, 2.0), laplace(0.0, 0.3)),
    "Gaussian to p = 0.5": (normal(0.4, 0.6), bridge(0.7, 0.5)),
    "Gaussian to p = 1": (normal(0.4, 0.6), bridge(0.7, 1.0)),
    "Gaussian to p = 1.5": (normal(3.0, 0.3), bridge(0.7, 1.5)),
    "Gaussian to p = 2": (normal(0.4, 0.6), bridge(0.7, 2.0)),
    "Gaussian to p = 3.3": (normal(-1.4, 0.6), bridge(1.7, 3.3)),
    "Gaussian to log-uniform": (normal(0.4, 0.6), log_uniform()),
    "Gaussian to log-uniform, sharp": (normal(3.0, 0.2), log_uniform()),
    "Laplace to Laplace": (laplace(0.3, 0.5), laplace(-1.0, 2.0)),
    "Laplace to Gaussian": (laplace(0.3, 0.5), normal(-1.0, 2.0)),
    "uniform to Gaussian": (uniform(-0.5, 1.5), normal(0.2, 0.8)),
    "uniform around to Laplace": (uniform(-0.5, 1.5), laplace(0.2, 0.8)),
    "uniform aside to Laplace": (uniform(1.5, 2.5), laplace(0.2, 0.8)),
}
ON_A_LINE = {
    "Gaussian to Student": (normal(0.4, 0.6), student(3.0, 1.0, 0.5)),
    "Gaussian to logistic": (normal(0.4, 0.6), logistic(-1.0, 0.3)),
    "Gaussian to scale mixture": (normal(0.04, 0.05), scale_mixture(0.25, 1.0, 0.0025)),
    "Gaussian to horseshoe": (normal(0.4, 0.6), horseshoe(0.2)),
    "logistic to logistic": (logistic(0.4, 0.6), logistic(-1.0, 2.0)),
    "logistic to Laplace": (logistic(0.4, 0.6), laplace(-1.0, 2.0)),
    "Student to Student": (student(4.0, 0.0, 1.0), student(2.0, 1.0, 0.5)),
    "Laplace to p = 0.5": (laplace(0.3, 0.5), bridge(0.7, 0.5)),
    "uniform to logistic": (uniform(-0.5, 1.5), logistic(0.2, 0.8)),
    "p = 1.5 to Gaussian": (bridge(0.7, 1.5), normal(1.0, 1.0)),
    "scale mixture to Gaussian": (scale_mixture(0.25, 1.0, 0.05), normal(0.0, 1.0)),
}


def corners(*pair: Distribution) -> list[float]:
    found: list[float] = []
    for d in pair:
        found += [d.low.item(), d.high.item()] if isinstance(d, Uniform) else [float(getattr(d, "loc", 0.0))]
    return found


@pytest.mark.parametrize("name", CLOSED)
def test_a_closed_form_equals_its_integral(name: str) -> None:
    (q, log_q), (p, log_p) = CLOSED[name]
    found = pr.kl(q, p)
    assert (found.kind, found.error.item()) == ("exact", 0.0)
    assert float(found) == pytest.approx(integral(log_q, log_p, corners(q, p)), abs=1e-10)


@pytest.mark.parametrize("name", ON_A_LINE)
def test_a_quadrature_agrees_with_scipy_within_its_stated_error(name: str) -> None:
    (q, log_q), (p, log_p) = ON_A_LINE[name]
    found = pr.kl(q, p)
    expected = integral(log_q, log_p, corners(q, p))
    assert found.kind == "quadrature"
    assert float(found) == pytest.approx(expected, abs=1e-10)
    assert float(found.error) < 1e-10
    assert abs(float(found) - expected) < float(found.error) + 1e-11  # scipy's own error


def parameters(q: Distribution) -> list[Tensor]:
    return [v for k, v in vars(q).items() if k in q.arg_constraints]


@pytest.mark.parametrize("name", [*CLOSED, *ON_A_LINE])
def test_gradients_agree_with_finite_differences_in_every_parameter(name: str) -> None:
    q, p = (side[0] for side in {**CLOSED, **ON_A_LINE}[name])
    values = [t.clone().requires_grad_() for t in (*parameters(q), *parameters(p))]
    split = len(parameters(q))
    names = [[k for k in d.arg_constraints if k in vars(d)] for d in (q, p)]

    def value(*numbers: Tensor) -> Tensor:
        sides = numbers[:split], numbers[split:]
        one, two = (type(d)(**dict(zip(n, side, strict=True))) for d, n, side in zip((q, p), names, sides, strict=True))
        return pr.kl(one, two).value

    gradients = torch.autograd.grad(value(*values), values)
    for i, gradient in enumerate(gradients):
        h = 1e-4 * max(1e-2, abs(values[i].item()))
        moved = [[t.detach() + s * h * (i == j) for j, t in enumerate(values)] for s in (-2, -1, 1, 2)]
        a, b, c, d = (float(value(*m)) for m in moved)
        assert gradient.item() == pytest.approx((a - 8 * b + 8 * c - d) / (12 * h), rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("power", [0.5, 1.0, 1.5, 4.0])
@pytest.mark.parametrize("distance", [0.0, 1e-3, 1.0, 8.9, 9.0, 1e3, 1e6])
def test_the_bridge_and_its_gradient_are_accurate_from_the_centre_to_a_million_deviations(
    power: float, distance: float
) -> None:
    m, s = double(distance * 0.01).requires_grad_(), double(0.01).requires_grad_()
    value = pr.kl(Normal(m, s), GeneralisedGaussian(double(1.0), double(power))).value
    gradients = torch.autograd.grad(value, (m, s))
    with mpmath.workdps(40):
        p, mu, sigma = mpmath.mpf(power), mpmath.mpf(m.item()), mpmath.mpf(s.item())
        factor = 2 ** (p / 2) * mpmath.gamma((p + 1) / 2) / mpmath.sqrt(mpmath.pi)
        x = mu**2 / (2 * sigma**2)
        moment = sigma**p * factor * mpmath.hyp1f1(-p / 2, 0.5, -x)
        rest = mpmath.log(2 * mpmath.gamma(1 + 1 / p)) - mpmath.log(2 * mpmath.pi * mpmath.e * sigma**2) / 2
        slope = sigma**p * factor * p * mpmath.hyp1f1(1 - p / 2, 1.5, -x)
        in_m, in_s = slope * mu / sigma**2, p * moment / sigma - slope * mu**2 / sigma**3 - 1 / sigma
    assert value.item() == pytest.approx(float(moment + rest), rel=1e-12)
    assert gradients[0].item() == pytest.approx(float(in_m), rel=1e-12)
    assert gradients[1].item() == pytest.approx(float(in_s), rel=1e-12)


def test_a_bridge_of_power_one_or_two_is_the_laplace_and_the_gaussian() -> None:
    q = Normal(double([0.0, 0.3, -5.0]), double([1.0, 0.2, 3.0]))
    one, two = GeneralisedGaussian(double(0.7), double(1.0)), GeneralisedGaussian(double(0.7), double(2.0))
    torch.testing.assert_close(pr.kl(q, one).value, pr.kl(q, Laplace(double(0.0), double(0.7))).value)
    torch.testing.assert_close(pr.kl(q, two).value, pr.kl(q, Normal(double(0.0), double(0.7 / 2**0.5))).value)


def test_the_log_uniform_divergence_depends_on_the_ratio_of_mean_and_deviation_alone() -> None:
    s = double([0.1, 1.0, 7.0])
    value = pr.kl(Normal(2 * s, s), LogUniform()).value
    torch.testing.assert_close(value, value[:1].expand(3), rtol=1e-13, atol=0)


def gaussians(n: int) -> dict[str, Distribution]:
    g = torch.Generator().manual_seed(n)
    m, d = torch.randn(n, generator=g).double(), torch.rand(n, generator=g).double() + 0.3
    root = torch.randn(n, n, generator=g).double()
    return {
        "independent": Independent(Normal(m, d), 1),
        "joint": MultivariateNormal(m.flip(0), root @ root.T + torch.eye(n)),
        "low rank": LowRankMultivariateNormal(m + 1, root[:, :2], d),
    }


def dense(d: Distribution) -> tuple[Tensor, Tensor]:
    return d.mean, torch.diag(d.variance) if isinstance(d, Independent) else d.covariance_matrix


@pytest.mark.parametrize("one", ["independent", "joint", "low rank"])
@pytest.mark.parametrize("two", ["independent", "joint", "low rank"])
def test_gaussian_vectors_of_every_kind_have_one_formula(one: str, two: str) -> None:
    q, p = gaussians(4)[one], gaussians(4)[two]
    (m_q, s_q), (m_p, s_p) = dense(q), dense(p)
    m_p = m_p + 0.0
    precision, gap = torch.linalg.inv(s_p), m_q - m_p
    expected = torch.trace(precision @ s_q) + gap @ precision @ gap - 4 + torch.logdet(s_p) - torch.logdet(s_q)
    found = pr.kl(q, p)
    assert found.kind == "exact"
    torch.testing.assert_close(found.value, 0.5 * expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("n", [1, 2, 3, 8, 500])
@pytest.mark.parametrize("distance", [0.0, 0.5, 3.0, 40.0])
def test_the_expected_norm_of_an_isotropic_vector_is_kummers_function(n: int, distance: float) -> None:
    m = torch.zeros(n, dtype=torch.float64)
    m[0] = 0.7 * distance
    m.requires_grad_()
    found, error = expected_norm(Independent(Normal(m, double(0.7).expand(n)), 1))
    (gradient,) = torch.autograd.grad(found, m)
    with mpmath.workdps(40):
        b, x = mpmath.mpf(n) / 2, mpmath.mpf(distance) ** 2 / 2
        factor = mpmath.sqrt(2) * mpmath.gamma(b + 0.5) / mpmath.gamma(b)
        expected = 0.7 * factor * mpmath.hyp1f1(-0.5, b, -x)
        slope = factor / (2 * b) * mpmath.hyp1f1(0.5, b + 1, -x) * distance
    assert found.item() == pytest.approx(float(expected), rel=1e-13)
    assert gradient[0].item() == pytest.approx(float(slope), rel=1e-12, abs=1e-15)
    assert error.item() < 1e-8 * found.item()


def by_polar_integral(q: Distribution, rate: float) -> float:
    """KL to a group lasso in the plane in polar coordinates: Gauss-Legendre in r, the trapezoid rule in the angle."""
    points, weights = (torch.from_numpy(a) for a in numpy.polynomial.legendre.leggauss(200))
    r, angle = 6 * (points + 1), torch.arange(400, dtype=torch.float64) * (2 * math.pi / 400)
    w = r[:, None, None] * torch.stack([angle.cos(), angle.sin()], -1)
    per_radius = q.log_prob(w).exp().sum(-1) * (2 * math.pi / 400)
    length = float((6 * weights * r.square() * per_radius).sum())
    return rate * length + math.log(2 * math.pi / rate**2) - float(q.entropy())


def test_group_lasso_is_exact_for_an_isotropic_vector_and_an_integral_otherwise() -> None:
    p = GroupLasso(double(1.7), 2)
    round_one = MultivariateNormal(double([0.5, -0.3]), 0.49 * torch.eye(2).double())
    same = Independent(Normal(double([0.5, -0.3]), double([0.7, 0.7])), 1)
    found = pr.kl(round_one, p)
    assert found.kind == pr.kl(same, p).kind == "exact"
    torch.testing.assert_close(found.value, pr.kl(same, p).value, rtol=1e-12, atol=0)
    assert float(found) == pytest.approx(by_polar_integral(round_one, 1.7), abs=1e-10)
    skew = MultivariateNormal(double([0.5, -0.3]), double([[0.5, 0.2], [0.2, 0.3]]))
    found = pr.kl(skew, p)
    assert found.kind == "quadrature"
    assert float(found.error) < 1e-8
    assert float(found) == pytest.approx(by_polar_integral(skew, 1.7), abs=1e-10)


def test_group_lasso_takes_batches_and_gradients_of_a_covariance() -> None:
    root = double([[0.7, 0.0], [0.3, 0.4]]).requires_grad_()
    m = double([[0.5, -0.3], [0.0, 2.0]])
    rate = double([1.0, 2.0])

    def value(root: Tensor) -> Tensor:
        return pr.kl(MultivariateNormal(m, scale_tril=root), GroupLasso(rate, 2)).value

    assert value(root).shape == (2,)
    one = pr.kl(MultivariateNormal(m[1], scale_tril=root), GroupLasso(rate[1], 2)).value
    torch.testing.assert_close(value(root)[1], one)
    assert torch.autograd.gradcheck(lambda r: value(torch.tril(r)), root)


def test_entries_and_their_errors_add_up() -> None:
    q = Normal(torch.zeros(2, 3).double(), double([0.5, 1.0, 2.0]))
    for p in (GeneralisedGaussian(double(1.0), double(1.5)), Logistic(double(0.0), double(1.0))):
        each = pr.kl(q, p)
        whole = pr.kl(Independent(q, 1), Independent(p.expand((2, 3)), 1))
        assert whole.kind == each.kind
        torch.testing.assert_close(whole.value, each.value.sum(-1))
        torch.testing.assert_close(whole.error, each.error.sum(-1))


def test_kl_of_spike_and_slab_is_that_of_the_weights_plus_that_of_the_slabs() -> None:
    slab_q, slab_p = Normal(double(1.0), double(0.5)), Laplace(double(0.0), double(1.0))
    q, p = SpikeAndSlab(double(0.2), slab_q), SpikeAndSlab(double(0.6), slab_p)
    coin = 0.2 * math.log(0.2 / 0.6) + 0.8 * math.log(0.8 / 0.4)
    found = pr.kl(q, p)
    assert found.kind == "exact"
    assert float(found) == pytest.approx(coin + 0.2 * float(pr.kl(slab_q, slab_p)), abs=1e-12)
    # a density gives the spike no mass; an atom has none under a density
    assert float(pr.kl(slab_q, p)) == pytest.approx(float(pr.kl(slab_q, slab_p)) - math.log(0.6), abs=1e-12)
    assert float(pr.kl(q, slab_p)) == math.inf
    certain = SpikeAndSlab(double([0.0, 1.0]), slab_q)
    assert pr.kl(certain, certain).value.tolist() == [0.0, 0.0]
    integrated = pr.kl(q, SpikeAndSlab(double(0.6), Logistic(double(0.0), double(1.0))))
    assert integrated.kind == "quadrature"
    assert float(integrated.error) > 0


def test_float32_parameters_give_a_float32_divergence() -> None:
    for group in (CLOSED, ON_A_LINE):
        for (q, _), (p, _) in group.values():
            small = [type(d)(**{k: v.float() for k, v in vars(d).items() if k in d.arg_constraints}) for d in (q, p)]
            found = pr.kl(small[0], small[1])
            assert found.value.dtype == found.error.dtype == torch.float32
            torch.testing.assert_close(found.value.double(), pr.kl(q, p).value, rtol=1e-5, atol=1e-5)


def test_a_narrow_peak_far_away_and_many_peaks_are_found() -> None:
    weights, locs, scales = [0.3, 0.5, 0.2], [-50.0, 0.0, 400.0], [0.01, 1.0, 3.0]
    q = MixtureSameFamily(Categorical(double(weights)), Normal(double(locs), double(scales)))
    p = Normal(double(0.0), double(100.0))
    # the peaks are apart: each adds w (log w - entropy), and the cross-entropy is a second moment
    entropy = sum(
        -w * math.log(w) + w * 0.5 * math.log(2 * math.pi * math.e * s * s)
        for w, s in zip(weights, scales, strict=True)
    )
    square = sum(w * (m * m + s * s) for w, m, s in zip(weights, locs, scales, strict=True))
    expected = -entropy + 0.5 * math.log(2 * math.pi * 1e4) + square / 2e4
    assert float(pr.kl(q, p)) == pytest.approx(expected, abs=1e-10)
