"""The maps from unconstrained coordinates: determinants against autograd, round trips, transforms, means, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate
from torch import Tensor
from torch.distributions import biject_to
from torch.distributions import constraints as torch_constraints
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from priory import constraints
from priory.constraints import Bijector, bijector, gaussian_expectation, gaussian_mean
from priory.core.errors import InputError

BOUNDS = torch.tensor([-1.0, 0.5, 3.0], dtype=torch.float64)

# name -> support, shape of one draw, free shape
CASES: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...]]] = {
    "real scalar": (constraints.real, (), ()),
    "real matrix": (constraints.real, (2, 3), (2, 3)),
    "real_vector": (constraints.real_vector, (3,), (3,)),
    "positive scalar": (constraints.positive, (), ()),
    "positive vector": (constraints.positive, (4,), (4,)),
    "nonnegative": (constraints.nonnegative, (2,), (2,)),
    "greater_than": (constraints.greater_than(2.5), (3,), (3,)),
    "greater_than tensor": (constraints.greater_than(BOUNDS), (2, 3), (2, 3)),
    "less_than": (constraints.less_than(-1.0), (3,), (3,)),
    "less_than tensor": (constraints.less_than(BOUNDS), (3,), (3,)),
    "unit_interval scalar": (constraints.unit_interval, (), ()),
    "interval": (constraints.interval(-2.0, 5.0), (3,), (3,)),
    "interval tensor": (constraints.interval(BOUNDS - 1, BOUNDS + 2), (2, 3), (2, 3)),
    "interval mixed": (constraints.interval(-2.0, BOUNDS), (3,), (3,)),
    "half_open_interval": (constraints.half_open_interval(1.0, 1.5), (2,), (2,)),
    "independent positive": (constraints.independent(constraints.positive, 1), (3,), (3,)),
    "simplex": (constraints.simplex, (5,), (4,)),
    "simplex of two": (constraints.simplex, (2,), (1,)),
    "simplex copies": (constraints.simplex, (3, 4), (3, 3)),
    "independent simplex": (constraints.independent(constraints.simplex, 1), (3, 4), (3, 3)),
    "ordered": (constraints.ordered, (4,), (4,)),
    "ordered copies": (constraints.ordered, (2, 3), (2, 3)),
    "positive_ordered": (constraints.positive_ordered, (4,), (4,)),
    "positive_ordered copies": (constraints.positive_ordered, (2, 3), (2, 3)),
    "lower_triangular": (constraints.lower_triangular, (3, 3), (6,)),
    "lower_triangular copies": (constraints.lower_triangular, (2, 3, 3), (2, 6)),
    "lower_cholesky": (constraints.lower_cholesky, (3, 3), (6,)),
    "lower_cholesky copies": (constraints.lower_cholesky, (2, 2, 2), (2, 3)),
    "positive_definite": (constraints.positive_definite, (3, 3), (6,)),
    "positive_definite of one": (constraints.positive_definite, (1, 1), (1,)),
    "positive_definite copies": (constraints.positive_definite, (2, 2, 2), (2, 3)),
    "corr_cholesky": (constraints.corr_cholesky, (4, 4), (6,)),
    "corr_cholesky copies": (constraints.corr_cholesky, (2, 3, 3), (2, 3)),
    "corr_matrix": (constraints.corr_matrix, (4, 4), (6,)),
    "corr_matrix copies": (constraints.corr_matrix, (2, 3, 3), (2, 3)),
    "zero_sum": (constraints.zero_sum, (5,), (4,)),
    "zero_sum of two": (constraints.zero_sum, (2,), (1,)),
    "zero_sum copies": (constraints.zero_sum, (3, 4), (3, 3)),
    "unit_vector": (constraints.unit_vector, (4,), (4,)),
    "unit_vector of two": (constraints.unit_vector, (2,), (2,)),
    "unit_vector copies": (constraints.unit_vector, (2, 3), (2, 3)),
}
ELEMENTWISE = (
    "real",
    "positive ",
    "nonnegative",
    "greater",
    "less",
    "unit_interval",
    "interval",
    "half",
    "independent p",
)

every = pytest.mark.parametrize("case", CASES)
every_bijection = pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("unit_vector")])


def build(case: str) -> Bijector:
    support, shape, _ = CASES[case]
    return bijector(support, shape)


def free_draws(b: Bijector, *lead: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((*lead, *b.free_shape), generator=generator, dtype=torch.float64).to(dtype)


def free_entries(case: str, x: Tensor) -> Tensor:
    """The entries of x that the unconstrained coordinates determine one to one, flattened."""
    support, shape, _ = CASES[case]
    base = support.base_constraint if isinstance(support, constraints.independent) else support
    if base is constraints.simplex:
        return x[..., :-1].flatten()
    if base.event_dim == 2:
        offset = -1 if base in (constraints.corr_cholesky, constraints.corr_matrix) else 0
        rows, columns = torch.tril_indices(shape[-1], shape[-1], offset)
        return x[..., rows, columns].flatten()
    return x.flatten()


def slogdet_by_autograd(case: str, b: Bijector, u: Tensor) -> Tensor:
    """log sqrt(det J'J), which is log |det J| where J is square."""
    jacobian: Any = torch.autograd.functional.jacobian(lambda v: free_entries(case, b.forward(v)), u)
    jacobian = jacobian.reshape(-1, math.prod(b.free_shape))
    if jacobian.shape[0] == jacobian.shape[1]:
        return torch.linalg.slogdet(jacobian).logabsdet
    return 0.5 * torch.linalg.slogdet(jacobian.mT @ jacobian).logabsdet


@every
def test_a_value_has_the_requested_shape_and_a_minimal_number_of_coordinates(case: str) -> None:
    b, (_, shape, free_shape) = build(case), CASES[case]
    u = free_draws(b, 7, 2)
    x = b.forward(u)
    assert (b.shape, b.free_shape) == (shape, free_shape)
    assert x.shape == (7, 2, *shape)
    assert b.inverse(x).shape == u.shape
    assert b.log_det(u, x).shape == (7, 2)
    assert b.elementwise == case.startswith(ELEMENTWISE)
    assert b.identity == case.startswith("real")
    assert b.exponential == case.startswith(("positive scalar", "positive vector", "nonneg", "independent p"))


@every_bijection
@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0])
def test_log_det_is_that_of_the_jacobian_in_minimal_coordinates(case: str, spread: float) -> None:
    b = build(case)
    for seed in range(3):
        u = spread * free_draws(b, seed=seed)
        torch.testing.assert_close(b.log_det(u, b.forward(u)), slogdet_by_autograd(case, b, u), rtol=1e-10, atol=1e-10)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_lie_in_their_support(case: str, dtype: torch.dtype) -> None:
    b = build(case)
    x = b.forward(2 * free_draws(b, 50, dtype=dtype))
    assert x.dtype == dtype
    assert bool(CASES[case][0].check(x).all())


@every_bijection
def test_inverse_undoes_forward(case: str) -> None:
    b = build(case)
    u = free_draws(b, 20)
    torch.testing.assert_close(b.inverse(b.forward(u)), u, rtol=1e-10, atol=1e-10)


@every
def test_leading_dimensions_are_independent_copies(case: str) -> None:
    b = build(case)
    u = free_draws(b, 3)
    x = b.forward(u)
    for i in range(3):
        torch.testing.assert_close(x[i], b.forward(u[i]), rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(b.log_det(u, x)[i], b.log_det(u[i], x[i]), rtol=1e-13, atol=1e-13)


def objective(b: Bijector) -> Any:
    """A scalar that uses all three functions."""

    def value(u: Tensor) -> Tensor:
        x = b.forward(u)
        return x.square().sum() + x.sin().sum() + b.log_det(u, x) + (b.inverse(x) * u).sum()

    return value


@every
def test_vmap_of_grad_equals_a_loop(case: str) -> None:
    b = build(case)
    u, value = free_draws(b, 4), objective(b)
    looped = []
    for row in u:
        leaf = row.clone().requires_grad_()
        looped.append(torch.autograd.grad(value(leaf), leaf)[0])
    torch.testing.assert_close(vmap(grad(value))(u), torch.stack(looped), rtol=1e-11, atol=1e-11)


@every
def test_a_traced_gradient_is_valid_for_other_values(case: str) -> None:
    b = build(case)
    u, gradient = free_draws(b, 4), vmap(grad(objective(b)))
    traced = make_fx(gradient)(u)
    other = free_draws(b, 4, seed=1)
    torch.testing.assert_close(traced(other), gradient(other), rtol=1e-12, atol=1e-12)


@every
def test_forward_does_not_change_its_input(case: str) -> None:
    b = build(case)
    u = free_draws(b, 2)
    before, x = u.clone(), b.forward(u)
    x_before = x.clone()
    b.log_det(u, x)
    b.inverse(x)
    assert torch.equal(u, before)
    assert torch.equal(x, x_before)


@pytest.mark.parametrize(
    ("support", "shape", "size"),
    [
        (torch_constraints.positive, (3,), 3),
        (torch_constraints.unit_interval, (3,), 3),
        (torch_constraints.interval(-1.0, 4.0), (3,), 3),
        (torch_constraints.less_than(2.0), (3,), 3),
        (torch_constraints.simplex, (4,), 3),
        (torch_constraints.corr_cholesky, (3, 3), 3),
    ],
)
def test_maps_agree_with_torch_where_torch_has_them(support: Any, shape: tuple[int, ...], size: int) -> None:
    u = torch.randn(5, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours, theirs = bijector(support, shape), biject_to(support)
    expected: Tensor = theirs(u)  # pyright: ignore[reportAssignmentType]
    torch.testing.assert_close(ours.forward(u), expected, rtol=1e-12, atol=1e-12)
    log_det = theirs.log_abs_det_jacobian(u, expected)
    log_det = log_det.sum(-1) if log_det.ndim == 2 else log_det
    torch.testing.assert_close(ours.log_det(u, expected), log_det, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("far", [-1e4, -800.0, -40.0, 40.0, 800.0, 1e4])
@pytest.mark.parametrize(
    ("support", "shape"),
    [
        (constraints.unit_interval, ()),
        (constraints.interval(1000.0, 1001.0), ()),
        (constraints.interval(-3.0, 0.0), ()),
        (constraints.interval(torch.tensor([0.0, 5.0]), 7.0), (2,)),
    ],
)
def test_values_stay_inside_an_interval_for_extreme_u(support: Any, shape: Any, far: float, dtype: Any) -> None:
    b = bijector(support, shape)
    u = torch.full(shape, far, dtype=dtype)
    x = b.forward(u)
    assert bool(((x > support.lower_bound) & (x < support.upper_bound)).all())
    assert bool(b.log_det(u, x).isfinite())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_log_density_at_extreme_u_has_a_finite_gradient(dtype: torch.dtype) -> None:
    for case in ("positive scalar", "unit_interval scalar", "simplex", "positive_ordered"):
        b = build(case)
        for far in (-1e3, -50.0):

            def value(u: Tensor, b: Bijector = b) -> Tensor:
                x = b.forward(u)
                return x.log().sum() + b.log_det(u, x)

            gradient = grad(value)(torch.full(b.free_shape, far, dtype=dtype))
            assert bool(gradient.isfinite().all()), case


def test_simplex_inverse_does_not_cancel() -> None:
    u = torch.tensor([30.0, 0.0, 1.0], dtype=torch.float64)
    b = bijector(constraints.simplex, (4,))
    torch.testing.assert_close(b.inverse(b.forward(u)), u, rtol=1e-12, atol=1e-12)


def test_correlation_log_det_is_exact_where_tanh_rounds_to_one() -> None:
    u = torch.tensor([-400.0, 300.0, 20.0], dtype=torch.float64)
    b = bijector(constraints.corr_cholesky, (3, 3))
    log_sech2 = 2 * (math.log(2) - u.abs())  # to within e^-40
    expected = log_sech2.sum() + 0.5 * log_sech2[1]  # L_32 alone has an entry before it in its row
    torch.testing.assert_close(b.log_det(u, b.forward(u)), expected, rtol=1e-14, atol=0)


def test_zero_is_the_centre_of_a_simplex_and_the_identity_correlation() -> None:
    zeros = torch.zeros(3, dtype=torch.float64)
    centre = bijector(constraints.simplex, (4,)).forward(zeros)
    torch.testing.assert_close(centre, torch.full((4,), 0.25, dtype=torch.float64), rtol=1e-14, atol=0)
    assert torch.equal(bijector(constraints.corr_cholesky, (3, 3)).forward(zeros), torch.eye(3, dtype=torch.float64))


@pytest.mark.parametrize(
    ("support", "shape", "only"),
    [
        (constraints.simplex, (1,), [1.0]),
        (constraints.corr_cholesky, (1, 1), [[1.0]]),
        (constraints.corr_matrix, (1, 1), [[1.0]]),
        (constraints.zero_sum, (1,), [0.0]),
    ],
)
def test_a_support_of_one_point_has_no_coordinates(support: Any, shape: Any, only: Any) -> None:
    b = bijector(support, shape)
    u = torch.zeros(2, 0, dtype=torch.float64)
    assert b.free_shape == (0,)
    x = b.forward(u)
    assert x.tolist() == [only, only]
    assert b.inverse(x).shape == (2, 0)
    assert b.log_det(u, x).tolist() == [0.0, 0.0]


def test_the_mass_of_an_unnormalised_density_is_preserved_by_the_map() -> None:
    b = bijector(constraints.simplex, (3,))
    target = torch.distributions.Dirichlet(torch.tensor([2.0, 1.5, 3.0], dtype=torch.float64))
    grid = torch.linspace(-25, 25, 1001, dtype=torch.float64)
    u = torch.cartesian_prod(grid, grid)
    x = b.forward(u)
    density = (target.log_prob(x / x.sum(-1, keepdim=True)) + b.log_det(u, x)).exp()
    assert float(density.sum() * (grid[1] - grid[0]) ** 2) == pytest.approx(1.0, abs=1e-9)


def test_the_mass_of_a_wishart_is_preserved_by_the_map() -> None:
    b = bijector(constraints.positive_definite, (2, 2))
    target = torch.distributions.Wishart(
        torch.tensor(4.0, dtype=torch.float64), torch.eye(2, dtype=torch.float64), validate_args=False
    )
    diagonal = torch.linspace(-12, 4, 97, dtype=torch.float64)
    below = torch.linspace(-9, 9, 73, dtype=torch.float64)
    u = torch.cartesian_prod(diagonal, below, diagonal)
    x = b.forward(u)
    cell = float(diagonal[1] - diagonal[0]) ** 2 * float(below[1] - below[0])
    mass = float((target.log_prob(x) + b.log_det(u, x)).exp().sum()) * cell
    assert mass == pytest.approx(1.0, abs=1e-8)


def test_the_mass_of_correlation_matrices_is_preserved_by_the_map() -> None:
    b = bijector(constraints.corr_matrix, (3, 3))
    grid = torch.linspace(-12, 12, 97, dtype=torch.float64)
    u = torch.cartesian_prod(grid, grid, grid)
    mass = float(b.log_det(u, b.forward(u)).exp().sum()) * float(grid[1] - grid[0]) ** 3
    assert mass == pytest.approx(math.pi**2 / 2, abs=1e-8)  # the volume of 3 x 3 correlation matrices


def test_a_correlation_matrix_is_exactly_symmetric_with_an_exact_unit_diagonal() -> None:
    b = bijector(constraints.corr_matrix, (4, 4))
    x = b.forward(2 * free_draws(b, 50))
    assert torch.equal(x, x.mT)
    assert torch.equal(x.diagonal(0, -2, -1), torch.ones(50, 4, dtype=torch.float64))
    factor = bijector(constraints.corr_cholesky, (4, 4)).forward(2 * free_draws(b, 50))
    torch.testing.assert_close(x, factor @ factor.mT, rtol=1e-14, atol=1e-14)


def test_the_map_onto_zero_sums_preserves_lengths() -> None:
    b = bijector(constraints.zero_sum, (6,))
    u = free_draws(b, 20)
    x = b.forward(u)
    torch.testing.assert_close(x.norm(dim=-1), u.norm(dim=-1), rtol=1e-13, atol=0)
    torch.testing.assert_close(x.sum(-1), torch.zeros(20, dtype=torch.float64), rtol=0, atol=1e-13)
    assert not bool(constraints.zero_sum.check(x + 1e-3).any())


@pytest.mark.parametrize("size", [2, 3, 7])
def test_the_auxiliary_length_of_a_unit_vector_has_mass_one_on_every_ray(size: int) -> None:
    b = bijector(constraints.unit_vector, (size,))
    direction = b.forward(free_draws(b))

    def density(r: float) -> float:  # of u = r x, times the area r^(K-1) of the sphere on which it lies
        return math.exp(float(b.log_det(r * direction, direction))) * r ** (size - 1)

    mass, _ = integrate.quad(density, 0, 30, epsabs=1e-12, epsrel=1e-12, limit=200)
    assert mass == pytest.approx(1.0, abs=1e-9)


def test_the_inverse_of_a_unit_vector_keeps_its_direction_at_the_most_probable_length() -> None:
    b = bijector(constraints.unit_vector, (4,))
    assert not b.one_to_one
    x = b.forward(free_draws(b, 20))
    u = b.inverse(x)
    torch.testing.assert_close(b.forward(u), x, rtol=1e-14, atol=1e-14)
    slope = grad(lambda v: b.log_det(v, b.forward(v)))(u[0])
    torch.testing.assert_close(slope, torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-13)
    assert not bool(constraints.unit_vector.check(1.001 * x).any())


@every
def test_a_fit_starts_at_finite_values_inside_the_support(case: str) -> None:
    b = build(case)
    u = b.start(torch.float64)
    x = b.forward(u)
    assert u.shape == b.free_shape
    assert bool(CASES[case][0].check(x).all())
    assert bool(b.log_det(u, x).isfinite())


numbers = st.floats(-6, 6, allow_nan=False)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(case for case in CASES if not case.startswith("unit_vector"))),
    st.lists(numbers, min_size=6, max_size=12),
)
def test_any_unconstrained_point_is_recovered_from_its_image(case: str, values: list[float]) -> None:
    b = build(case)
    size = math.prod(b.free_shape)
    u = torch.tensor((values * (size // len(values) + 1))[:size], dtype=torch.float64).reshape(b.free_shape)
    x = b.forward(u)
    assert bool(CASES[case][0].check(x).all())
    # cancellation: an entry of x may be e^12 times a distance that u is the logarithm of
    torch.testing.assert_close(b.inverse(x), u, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(b.forward(b.inverse(x)), x, rtol=1e-9, atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(st.lists(numbers, min_size=2, max_size=6))
def test_ordered_differences_are_the_exponentials(values: list[float]) -> None:
    u = torch.tensor(values, dtype=torch.float64)
    x = bijector(constraints.ordered, u.shape).forward(u)
    torch.testing.assert_close(x.diff(), u[1:].exp(), rtol=1e-9, atol=1e-12)
    assert bool(constraints.ordered.check(x))
    assert not bool(constraints.ordered.check(x.flip(0)))
    assert bool(constraints.positive_ordered.check(x)) == (values[0] > 0)


# Means under a Gaussian


@pytest.mark.parametrize("scale", [0.0, 0.3, 2.0, 8.0, 15.0])
@pytest.mark.parametrize("loc", [-4.0, 0.3])
def test_the_mean_of_a_sigmoid_agrees_with_adaptive_quadrature(loc: float, scale: float) -> None:
    def integrand(z: float) -> float:
        return math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi) / (1 + math.exp(-loc - scale * z))

    turn = min(max(-loc / scale, -11.0), 11.0) if scale else 0.0  # quad needs to know where the sigmoid turns
    expected = sum(
        integrate.quad(integrand, low, high, epsabs=1e-14, epsrel=1e-12, limit=400)[0]
        for low, high in [(-12.0, turn), (turn, 12.0)]
    )
    b = bijector(constraints.interval(-1.0, 3.0), ())
    tensors = (torch.tensor(v, dtype=torch.float64) for v in (loc, scale))
    assert float(gaussian_mean(b, *tensors)) == pytest.approx(-1.0 + 4.0 * expected, abs=4e-12)


@every
def test_the_mean_at_scale_zero_is_the_image_of_the_location(case: str) -> None:
    b = build(case)
    loc = free_draws(b, 2)
    torch.testing.assert_close(gaussian_mean(b, loc, torch.zeros_like(loc)), b.forward(loc), rtol=1e-12, atol=1e-12)


@every
def test_the_mean_agrees_with_that_of_draws(case: str) -> None:
    b = build(case)
    loc, scale = 0.5 * free_draws(b, seed=2), 0.2 + 0.5 * free_draws(b, seed=3).sigmoid()
    noise = free_draws(b, 200_000, seed=4)
    draws = torch.cat([b.forward(loc + scale * noise), b.forward(loc - scale * noise)])
    draws = 0.5 * (draws[:200_000] + draws[200_000:])  # antithetic pairs, independent of one another
    mean, error = draws.mean(0), draws.std(0) / math.sqrt(len(draws))
    # 5 standard errors for at most 18 entries in each of 41 cases: a false alarm once in 2,400 seeds
    assert bool(((gaussian_mean(b, loc, scale) - mean).abs() <= 5 * error + 1e-12).all())


@pytest.mark.parametrize(
    ("support", "shape"),
    [
        (constraints.simplex, (3,)),
        (constraints.ordered, (2,)),
        (constraints.positive_ordered, (2,)),
        (constraints.zero_sum, (3,)),
    ],
)
def test_the_mean_of_a_map_of_two_coordinates_agrees_with_a_grid(support: Any, shape: tuple[int, ...]) -> None:
    b = bijector(support, shape)
    loc, scale = torch.tensor([0.4, -1.1], dtype=torch.float64), torch.tensor([0.7, 1.3], dtype=torch.float64)
    z = torch.linspace(-10, 10, 401, dtype=torch.float64)
    grid = torch.cartesian_prod(z, z)
    weights = (-0.5 * grid.square().sum(-1)).exp()
    expected = (weights[:, None] * b.forward(loc + scale * grid)).sum(0) / weights.sum()
    torch.testing.assert_close(gaussian_mean(b, loc, scale), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("support", [constraints.lower_cholesky, constraints.positive_definite])
def test_the_mean_of_a_triangle_of_three_coordinates_agrees_with_a_grid(support: Any) -> None:
    b = bijector(support, (2, 2))
    loc = torch.tensor([0.4, -1.1, -0.2], dtype=torch.float64)
    scale = torch.tensor([0.5, 1.3, 0.3], dtype=torch.float64)
    z = torch.linspace(-9.5, 9.5, 77, dtype=torch.float64)
    grid = torch.cartesian_prod(z, z, z)
    weights = (-0.5 * grid.square().sum(-1)).exp()
    expected = (weights[:, None, None] * b.forward(loc + scale * grid)).sum(0) / weights.sum()
    torch.testing.assert_close(gaussian_mean(b, loc, scale), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("support", [constraints.corr_cholesky, constraints.corr_matrix])
def test_the_mean_of_a_correlation_of_three_agrees_with_a_grid(support: Any) -> None:
    b = bijector(support, (3, 3))
    loc = torch.tensor([0.4, -1.1, -0.2], dtype=torch.float64)
    scale = torch.tensor([0.5, 0.8, 0.3], dtype=torch.float64)
    z = torch.linspace(-9.5, 9.5, 77, dtype=torch.float64)
    grid = torch.cartesian_prod(z, z, z)
    weights = (-0.5 * grid.square().sum(-1)).exp()
    expected = (weights[:, None, None] * b.forward(loc + scale * grid)).sum(0) / weights.sum()
    torch.testing.assert_close(gaussian_mean(b, loc, scale), expected, rtol=1e-10, atol=1e-10)


def test_the_mean_of_a_unit_vector_agrees_with_a_grid() -> None:
    b = bijector(constraints.unit_vector, (2,))
    loc, scale = torch.tensor([0.9, -1.4], dtype=torch.float64), torch.tensor([0.4, 0.2], dtype=torch.float64)
    z = torch.linspace(-6.5, 6.5, 401, dtype=torch.float64)  # the origin, where x jumps, is seven deviations away
    inner = torch.cartesian_prod(z, z)
    weights = (-0.5 * inner.square().sum(-1)).exp()
    expected = (weights[:, None] * b.forward(loc + scale * inner)).sum(0) / weights.sum()
    torch.testing.assert_close(gaussian_mean(b, loc, scale), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scale", [0.3, 3.0, 300.0])
def test_the_mean_of_a_unit_vector_with_equal_scales_agrees_with_its_closed_form(scale: float) -> None:
    b = bijector(constraints.unit_vector, (3,))
    loc = torch.tensor([0.6, -0.0, 0.8], dtype=torch.float64)

    def expected(m: float) -> float:  # E[cos angle] of an isotropic normal in three dimensions, m its mean over its sd
        return math.erf(m / math.sqrt(2)) * (1 - 1 / m**2) + math.sqrt(2 / math.pi) * math.exp(-m * m / 2) / m

    found = gaussian_mean(b, loc, torch.full_like(loc, scale))
    torch.testing.assert_close(found, loc * expected(1 / scale), rtol=1e-9, atol=1e-9)


def test_the_mean_of_a_log_normal_is_in_closed_form() -> None:
    loc, scale = torch.tensor(-0.3, dtype=torch.float64), torch.tensor(1.7, dtype=torch.float64)
    assert float(gaussian_mean(bijector(constraints.positive), loc, scale)) == pytest.approx(
        math.exp(-0.3 + 0.5 * 1.7**2), rel=1e-14
    )


@pytest.mark.parametrize("power", range(9))
def test_expectations_of_powers_are_the_moments(power: int) -> None:
    moment = math.prod(range(power - 1, 0, -2)) if power % 2 == 0 else 0
    one = torch.ones((), dtype=torch.float64)
    assert float(gaussian_expectation(lambda u: u**power, 0 * one, one)) == pytest.approx(moment, abs=1e-11)


def test_a_bijector_without_a_registered_mean_raises_an_error() -> None:
    class Shifted(Bijector):
        def forward(self, u: Tensor) -> Tensor:
            return u + 1

        def inverse(self, x: Tensor) -> Tensor:
            return x - 1

        def log_det(self, u: Tensor, x: Tensor) -> Tensor:
            return torch.zeros_like(u)

    with pytest.raises(NotImplementedError, match="is not implemented for Shifted"):
        gaussian_mean(Shifted(()), torch.zeros(()), torch.ones(()))


# Errors


def test_a_sphere_of_one_dimension_raises_an_error() -> None:
    with pytest.raises(InputError, match="two entries or more for the support unit_vector, got \\(1,\\)"):
        bijector(constraints.unit_vector, (1,))


@pytest.mark.parametrize(
    ("support", "got"),
    [
        (torch_constraints.boolean, "Boolean()"),
        (torch_constraints.nonnegative_integer, "IntegerGreaterThan(lower_bound=0)"),
        (torch_constraints.integer_interval(0, 3), "IntegerInterval(lower_bound=0, upper_bound=3)"),
        (torch_constraints.one_hot, "OneHot()"),
        (torch_constraints.independent(torch_constraints.boolean, 1), "Boolean()"),
    ],
)
def test_a_discrete_support_raises_an_error(support: Any, got: str) -> None:
    with pytest.raises(InputError) as error:
        bijector(support, (2,))
    assert str(error.value) == f"The 'support' argument of Param must be continuous, got {got}."


@pytest.mark.parametrize(
    ("support", "got"),
    [
        (torch_constraints.dependent, "Dependent()"),
        (torch_constraints.square, "Square()"),
        (torch_constraints.cat([torch_constraints.real]), "Cat()"),
        (None, "None"),
    ],
)
def test_an_unknown_support_raises_an_error_that_lists_the_known_ones(support: Any, got: str) -> None:
    with pytest.raises(InputError) as error:
        bijector(support, (2, 2))
    sentence = str(error.value)
    assert sentence.startswith("The 'support' argument of Param must be real, positive, nonnegative, ")
    assert sentence.endswith(f"corr_cholesky, or independent of these, got {got}.")


def test_the_name_of_a_support_raises_an_error_that_shows_the_constraint() -> None:
    sentence = r"must be a constraint, such as constraints\.positive, not its name, got 'positive'\."
    with pytest.raises(InputError, match=sentence):
        bijector("positive")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("support", "shape", "sentence"),
    [
        (
            constraints.simplex,
            (),
            "The 'shape' argument of Param must end in a vector for the support Simplex(), got ().",
        ),
        (
            constraints.ordered,
            (),
            "The 'shape' argument of Param must end in a vector for the support Ordered(), got ().",
        ),
        (
            constraints.lower_cholesky,
            (2, 3),
            "The 'shape' argument of Param must end in a square matrix for the support LowerCholesky(), got (2, 3).",
        ),
        (
            constraints.positive_definite,
            (3,),
            "The 'shape' argument of Param must end in a square matrix for the support PositiveDefinite(), got (3,).",
        ),
        (
            constraints.real_vector,
            (),
            "The 'shape' argument of Param must have at least the 1 dimensions of its support, got ().",
        ),
        (
            constraints.interval(1.0, 0.0),
            (),
            "The 'support' argument of Param must have a lower bound below its upper bound, "
            "got Interval(lower_bound=1.0, upper_bound=0.0).",
        ),
        (
            constraints.greater_than(torch.zeros(3)),
            (2,),
            "The 'support' argument of Param must have bounds that broadcast to the shape (2,), "
            "got bounds of shape (3,).",
        ),
    ],
)
def test_a_shape_or_bound_that_does_not_fit_raises_an_error(
    support: Any, shape: tuple[int, ...], sentence: str
) -> None:
    with pytest.raises(InputError) as error:
        bijector(support, shape)
    assert str(error.value) == sentence


def test_every_exported_name_exists_and_constraints_of_torch_are_reexported() -> None:
    for name in constraints.__all__:
        assert hasattr(constraints, name)
    for name in ("positive", "simplex", "lower_triangular", "lower_cholesky", "positive_definite"):
        assert getattr(constraints, name) is getattr(torch_constraints, name)
