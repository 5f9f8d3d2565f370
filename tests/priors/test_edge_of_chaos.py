"""The edge of chaos against closed forms, published values and measured random networks."""

import functools
import math

import pytest
import torch
from scipy.integrate import quad
from torch import Tensor, nn

import priory as pr
from priory.priors import EdgeOfChaos, edge_of_chaos, propagation
from priory.priors.edge_of_chaos import _find_slope_jumps, _moments

F64 = torch.float64
NETWORK_WIDTH = 200
SIGMA_B_GRID = (0.05, 0.1, 0.2, math.sqrt(0.05), 0.3)
SIGMA_W_TABLE = {
    "tanh": (1.1225, 1.1934, 1.3041, 1.3270, 1.3956),
    "erf": (0.9937, 1.0556, 1.1528, 1.1730, 1.2337),
    "elu": (1.1319, 1.1761, 1.2293, 1.2384, 1.2631),
    "softsign": (1.3611, 1.5129, 1.7296, 1.7724, 1.8975),
}


@pytest.mark.parametrize("name", SIGMA_W_TABLE)
def test_the_curve_matches_the_table_to_four_digits(name: str) -> None:
    found = [edge_of_chaos(name, bias=b).sigma_w for b in SIGMA_B_GRID]
    assert found == [pytest.approx(value, abs=6e-5) for value in SIGMA_W_TABLE[name]]


def test_the_critical_point_of_tanh_is_the_published_one() -> None:
    point = edge_of_chaos("tanh", bias=math.sqrt(0.05))
    assert point.sigma_w**2 == pytest.approx(1.761, abs=5e-4)
    assert point.q == pytest.approx(0.570, abs=5e-4)


@pytest.mark.parametrize(("name", "slope"), [("tanh", 0.54), ("erf", 0.52), ("elu", 0.86), ("softsign", 0.52)])
def test_the_variance_is_stable_at_the_edge(name: str, slope: float) -> None:
    assert edge_of_chaos(name, bias=0.2).slope == pytest.approx(slope, abs=0.005)


def test_erf_agrees_with_its_closed_form() -> None:
    point = edge_of_chaos("erf", bias=0.2)
    assert point.sigma_w**2 == pytest.approx(math.pi / 4 * math.sqrt(1 + 4 * point.q), rel=1e-10)
    second = 2 / math.pi * math.asin(2 * point.q / (1 + 2 * point.q))
    assert point.q == pytest.approx(point.sigma_w**2 * second + 0.04, rel=1e-10)


def test_any_function_is_accepted_and_agrees_with_quadrature() -> None:
    point = edge_of_chaos(lambda x: torch.atan(x) + 0.1 * x, bias=0.15)

    def mean(f) -> float:
        value = quad(lambda z: f(math.sqrt(point.q) * z) * math.exp(-z * z / 2), -12, 12, epsabs=1e-13)[0]
        return value / math.sqrt(2 * math.pi)

    assert point.sigma_w**2 * mean(lambda x: (1 / (1 + x * x) + 0.1) ** 2) == pytest.approx(1, abs=1e-9)
    second = mean(lambda x: (math.atan(x) + 0.1 * x) ** 2)
    assert point.q == pytest.approx(point.sigma_w**2 * second + 0.15**2, abs=1e-9)


@pytest.mark.parametrize("q", [0.1, 0.512, 3.0])
def test_corners_away_from_zero_are_integrated_exactly(q: float) -> None:
    """For a hard tanh, E[phi'^2] = P(|u| < 1), and E[phi^2] follows by parts."""
    jumps = _find_slope_jumps(nn.functional.hardtanh)
    assert jumps.tolist() == pytest.approx([-1, 1], abs=1e-12)
    t = 1 / math.sqrt(q)
    inside, edge = math.erf(t / math.sqrt(2)), 2 * t * math.exp(-t * t / 2) / math.sqrt(2 * math.pi)
    found = [float(m) for m in _moments(nn.functional.hardtanh, q, jumps)]
    assert found == pytest.approx([q * (inside - edge) + 1 - inside, inside, inside - edge], abs=1e-12)


@pytest.mark.parametrize("phi", [torch.tanh, nn.functional.relu, nn.functional.elu, lambda x: torch.sin(30 * x)])
def test_slopes_without_other_jumps_add_no_panels(phi) -> None:
    assert len(_find_slope_jumps(phi)) == 0


@pytest.mark.parametrize("activation", ["swish", "gelu", lambda x: x**3], ids=["swish", "gelu", "cube"])
def test_an_unstable_start_of_the_curve_is_rejected(activation) -> None:
    with pytest.raises(pr.InputError, match="must have a stable variance q at the edge"):
        edge_of_chaos(activation, bias=0)


def test_an_activation_without_a_slope_has_no_edge() -> None:
    with pytest.raises(pr.InputError, match="be a value that the edge of chaos of sign reaches"):
        edge_of_chaos(torch.sign, bias=0)


def test_a_module_is_accepted_as_activation() -> None:
    assert edge_of_chaos(nn.Tanh(), bias=0.2).sigma_w == edge_of_chaos("tanh", bias=0.2).sigma_w


def test_relu_has_a_single_point_which_is_the_prior_he() -> None:
    point = edge_of_chaos("relu")
    assert (point.sigma_w**2, point.sigma_b) == (pytest.approx(2, rel=1e-12), 0.0)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)).to(F64)
    w = torch.randn(21, generator=torch.Generator().manual_seed(0), dtype=F64)
    ours, his = (pr.Model(net, pr.Gaussian(1.0), prior=prior).prior for prior in (point, "he"))
    torch.testing.assert_close(ours.log_prob(w), his.log_prob(w), rtol=0, atol=1e-9)


@pytest.mark.parametrize(("name", "start"), [("tanh", 1.0), ("erf", math.sqrt(math.pi) / 2)])
def test_the_curve_starts_where_small_inputs_keep_their_variance(name: str, start: float) -> None:
    point = edge_of_chaos(name, bias=0)
    assert point.sigma_w == pytest.approx(start, abs=1e-7)
    assert point.sigma_b == 0


def test_an_edge_of_chaos_as_prior_sets_the_variances_of_weights_and_biases() -> None:
    point = edge_of_chaos("tanh", bias=0.2)
    net = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 2), nn.LayerNorm(2)).to(F64)
    prior = pr.Model(net, pr.Categorical(), prior=point).prior
    wanted = {"0.weight": point.sigma_w**2 / 12, "0.bias": 0.04, "3.weight": point.sigma_w**2 / 16, "3.bias": 0.04}
    for name, variance in {**wanted, "4.weight": 1.0, "4.bias": 1.0}.items():
        block = prior.layout[name]
        assert (1 / prior.precision[block.start : block.stop]).tolist() == pytest.approx(
            [variance] * (block.stop - block.start)
        )


# Random networks.


@functools.cache
def tanh() -> EdgeOfChaos:
    return edge_of_chaos("tanh", bias=0.2)


def propagated(factor: float, depth: int, pair: float, width: int = NETWORK_WIDTH) -> tuple[Tensor, Tensor]:
    """Return variances and squared distances of two inputs per layer of 32 random tanh networks, (depth, 32)."""
    point, generator = tanh(), torch.Generator().manual_seed(0)
    lengths, distances = [], []
    x = torch.randn(32, 2, width, generator=generator) * math.sqrt(point.q)
    x[:, 1] = pair * x[:, 0] + math.sqrt(1 - pair**2) * x[:, 1]
    for _ in range(depth):
        weights = torch.randn(32, width, width, generator=generator) * point.sigma_w * math.sqrt(factor / width)
        biases = 0.2 * torch.randn(32, 1, width, generator=generator)
        x = torch.tanh(x) @ weights + biases
        lengths.append(x.square().mean((-1, -2)))
        distances.append((x[:, 0] - x[:, 1]).square().mean(-1))
    return torch.stack(lengths).double(), torch.stack(distances).double()


@pytest.mark.parametrize("factor", [0.7, 1.0, 1.4])
def test_a_difference_in_a_random_network_is_multiplied_by_chi_per_layer(factor: float) -> None:
    """For neighbours, the slope at correlation 1 matters; the variance converges in the first five layers."""
    point = tanh()
    chi = propagation("tanh", point.sigma_w * math.sqrt(factor), 0.2).chi
    _, distances = propagated(factor, depth=25, pair=1 - 1e-6)
    rates = (distances[-1] / distances[5]).log() / 19
    allowed = 5 * float(rates.std() / math.sqrt(32)) + 2 / NETWORK_WIDTH  # and the effect of a finite width
    assert float(rates.mean()) == pytest.approx(math.log(chi), abs=allowed)  # Student's t of 31: 2e-5
    assert abs(math.log(chi)) < 1e-6 or abs(math.log(chi)) > 2 * allowed  # the test has power


def test_the_variance_in_a_deep_random_network_is_q() -> None:
    lengths, _ = propagated(1.0, depth=25, pair=0.5)
    last = lengths[10:].mean(0)
    allowed = 5 * float(last.std()) / 32**0.5 + 5e-3  # Student's t of 31: 2e-5
    assert float(last.mean()) == pytest.approx(tanh().q, abs=allowed)
    assert allowed < 0.05


def test_the_depth_follows_from_chi_in_the_ordered_phase_and_is_infinite_on_the_edge() -> None:
    found = propagation("tanh", 1.0, 0.3)
    assert found.chi < 1
    assert found.correlation == 1
    assert found.correlation_depth == pytest.approx(-1 / math.log(found.chi), rel=1e-12)
    edge = tanh()
    assert propagation("tanh", edge.sigma_w, 0.2).correlation_depth > 1e6
    assert propagation("tanh", edge.sigma_w, 0.2).q == pytest.approx(edge.q, rel=1e-9)


def test_correlations_in_the_chaotic_phase_converge_below_one_as_measured() -> None:
    point = tanh()
    found = propagation("tanh", point.sigma_w * math.sqrt(2), 0.2)
    assert found.chi > 1
    assert 0 < found.correlation < 1
    lengths, distances = propagated(2.0, depth=30, pair=0.9, width=300)
    measured = (1 - distances[-5:] / (2 * lengths[-5:])).mean(0)
    allowed = 5 * float(measured.std()) / 32**0.5 + 0.01  # Student's t of 31: 2e-5
    assert float(measured.mean()) == pytest.approx(found.correlation, abs=allowed)
    assert allowed < 0.12


# Invalid arguments.


@pytest.mark.parametrize("name", ["swish", "gelu"])
@pytest.mark.parametrize("bias", [None, 0.2])
def test_an_activation_with_unstable_variance_is_rejected(name: str, bias: float | None) -> None:
    with pytest.raises(
        pr.InputError, match=rf"got {name}: at bias .* multiplies a deviation from q = .* by 1\.(04|06|10)"
    ):
        edge_of_chaos(name, bias=bias)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: edge_of_chaos("sin"), "The 'activation' argument of edge_of_chaos must be one of relu, tanh"),
        (lambda: edge_of_chaos(nn.Tanh), "The 'activation' argument of edge_of_chaos must be one of relu, tanh"),
        (lambda: edge_of_chaos(torch.sum), "must map a tensor to a finite tensor of the same shape"),
        (
            lambda: edge_of_chaos("tanh", bias=-1),
            "The 'bias' argument of edge_of_chaos must be a standard deviation >= 0",
        ),
        (lambda: edge_of_chaos("relu", bias=0.1), "The 'bias' argument of edge_of_chaos must be 0 for relu"),
        (
            lambda: propagation("tanh", 0.0, 0.1),
            "The 'sigma_w' argument of propagation must be a standard deviation > 0",
        ),
        (
            lambda: propagation("tanh", 1.0, -0.1),
            "The 'sigma_b' argument of propagation must be a standard deviation >= 0",
        ),
        (
            lambda: propagation("relu", 2.0, 0.1),
            "The 'sigma_w' argument of propagation must keep the variance of relu networks finite",
        ),
    ],
)
def test_invalid_arguments_are_rejected_in_a_sentence(make, says: str) -> None:
    with pytest.raises(pr.InputError) as error:
        make()
    assert says in str(error.value)
