import math

import numpy as np
import pytest
import scipy.stats
import torch

from priory.core.errors import InputError
from priory.core.special import incomplete_beta
from priory.core.streams import stream
from priory.diagnostics import (
    bfmi,
    convergence,
    ess_bulk,
    ess_mean,
    ess_quantile,
    ess_sd,
    ess_tail,
    mcse_mean,
    mcse_quantile,
    mcse_sd,
    nested_r_hat,
    quantile,
    r_hat,
)
from priory.diagnostics.chain_statistics import beta_quantile

DOUBLE = torch.float64
MEASURES = {
    "r_hat": r_hat,
    "ess_bulk": ess_bulk,
    "ess_tail": ess_tail,
    "ess_mean": ess_mean,
    "ess_sd": ess_sd,
    "ess_quantile": lambda x: ess_quantile(x, 0.3),
    "mcse_mean": mcse_mean,
    "mcse_sd": mcse_sd,
    "mcse_quantile": lambda x: mcse_quantile(x, 0.3),
    "bfmi": lambda x: bfmi(x)[0],
}


def formula(kind: str, chains: int, n: int) -> torch.Tensor:
    """Chains without a generator: x_t = phi x_(t-1) + u_t - 1/2, u the fractional parts of multiples of sqrt(2)."""
    phi = {"sticky": 0.9, "mixed": 0.3, "anti": -0.6}.get(kind, 0.5)
    rows = []
    for c in range(chains):
        x, row = 0.0, []
        for t in range(n):
            x = phi * x + (math.sqrt(2) * (1000 * c + t + 1) * (1 + t % 7)) % 1.0 - 0.5
            changed = {
                "heavy": math.tan(3 * x),
                "apart": x + 0.4 * c,
                "spread": x * (1 + c),
                "tied": float(round(4 * x)),
            }
            row.append(changed.get(kind, x))
        rows.append(row)
    return torch.tensor(rows, dtype=DOUBLE)


# arviz 0.23.4, in the order of MEASURES
ARVIZ = {
    ("sticky", 4, 100): (
        1.14518434852, 23.3105941649, 116.671282741, 23.2144624468, 103.280723292,
        51.4365919799, 0.105601090954, 0.0353884037302, 0.0941234959261, 0.366901330264,
    ),
    ("mixed", 4, 101): (
        1.00327045398, 265.146640044, 312.738616229, 275.369062418, 356.890622232,
        315.857065252, 0.017928522104, 0.00810950152551, 0.0284050158255, 1.51744178876,
    ),
    ("anti", 2, 60): (
        1.00394857443, 249.501749526, 138.485649315, 249.501749526, 72.3109438512,
        185.508035958, 0.0229625012188, 0.0223983904062, 0.0317598090962, 3.24221372317,
    ),
    ("heavy", 4, 100): (
        0.994245173417, 374.804448257, 415.16036646, 416.619703746, 417.270599214,
        355.2202222, 4.12449226128, 39.0270307997, 0.0747979974961, 2.02183721621,
    ),
    ("apart", 3, 50): (
        1.56786630681, 5.93855382337, 62.160449435, 5.8903082376, 48.9884137032,
        8.54093713894, 0.191658775194, 0.0418207091203, 0.224174228441, 1.04348026817,
    ),
    ("spread", 4, 100): (
        1.21713438544, 225.774571802, 177.559580753, 212.929462344, 22.2998282493,
        309.454853594, 0.0603545579387, 0.153881062907, 0.0581952498683, 1.12544032176,
    ),
    ("tied", 4, 100): (
        1.00568948613, 217.777052285, 211.804033319, 220.595707482, 320.234306812,
        288.038239655, 0.0885169100315, 0.0438650103354, 0.0, 1.14761334258,
    ),
    ("mixed", 2, 9): (
        1.04753029304, 19.2659197225, 19.2659197225, 19.2659197225, 19.2659197225,
        19.2659197225, 0.0530631529013, 0.0267284235915, 0.078626938433, 1.83469555004,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ARVIZ, ids=str)
def test_every_measure_is_that_of_arviz_as_it_was_written_down(case):
    x = formula(*case)
    for (name, measure), published in zip(MEASURES.items(), ARVIZ[case], strict=True):
        assert abs(float(measure(x)) - published) <= 1e-8 * max(1, abs(published)), name


def test_every_measure_is_that_of_the_arviz_that_is_installed():
    import arviz as az

    if tuple(map(int, az.__version__.split(".")[:2])) < (0, 23):
        pytest.skip(f"arviz {az.__version__} has other formulas")
    theirs = {
        "r_hat": az.rhat,
        "ess_bulk": az.ess,
        "ess_tail": lambda x: az.ess(x, method="tail", prob=(0.05, 0.95)),
        "ess_mean": lambda x: az.ess(x, method="mean"),
        "ess_sd": lambda x: az.ess(x, method="sd"),
        "ess_quantile": lambda x: az.ess(x, method="quantile", prob=0.3),
        "mcse_mean": az.mcse,
        "mcse_sd": lambda x: az.mcse(x, method="sd"),
        "mcse_quantile": lambda x: az.mcse(x, method="quantile", prob=0.3),
        "bfmi": lambda x: np.ravel(az.bfmi(x))[0],
    }
    generator = stream(0, "arviz")
    for chains, n in [(2, 4), (2, 5), (3, 7), (4, 50), (2, 201), (8, 100)]:
        x = torch.randn(chains, n, generator=generator, dtype=DOUBLE).cumsum(1) * 0.3
        x = x + torch.randn(chains, n, generator=generator, dtype=DOUBLE)
        for name, measure in MEASURES.items():
            found, published = float(measure(x)), float(theirs[name](x.numpy()))
            assert abs(found - published) <= 1e-8 * max(1, abs(published)), (name, chains, n)


# Against mathematics.


def test_r_hat_of_two_chains_apart_is_the_formula_written_out():
    """Four halves of two draws: ranks 1 to 8, their normal scores, and W and B by hand."""
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]], dtype=DOUBLE)
    z = scipy.stats.norm.ppf((np.arange(1, 9) - 0.375) / 8.25).reshape(4, 2)
    within, between = z.var(1, ddof=1).mean(), 2 * z.mean(1).var(ddof=1)
    assert abs(float(r_hat(x)) - math.sqrt((within / 2 + between / 2) / within)) < 1e-12


def test_chains_that_differ_in_spread_alone_are_seen_by_the_folded_r_hat():
    x = torch.randn(4, 1000, generator=stream(0, "spread"), dtype=DOUBLE)
    assert float(r_hat(x)) < 1.01
    assert float(r_hat(x * torch.tensor([1.0, 1.0, 1.0, 3.0], dtype=DOUBLE)[:, None])) > 1.05


def test_one_chain_that_drifts_differs_from_itself():
    drift = torch.randn(1, 1000, generator=stream(0, "drift"), dtype=DOUBLE) + torch.linspace(0, 3, 1000)
    assert float(r_hat(drift)) > 1.2


@pytest.mark.parametrize("phi", [0.0, 0.7, 0.9, -0.5])
def test_the_effective_size_of_an_autoregression_is_the_known_one(phi):
    """tau = (1 + phi) / (1 - phi); over 64 quantities the estimates' mean is within 5 % of it."""
    chains, n, quantities = 4, 4000, 64
    e = torch.randn(n, chains, quantities, generator=stream(0, "ar"), dtype=DOUBLE)
    x, rows = e[0] / math.sqrt(1 - phi**2), []
    for t in range(n):
        x = phi * x + e[t]
        rows.append(x)
    draws = torch.stack(rows, 1)
    wanted = chains * n * (1 - phi) / (1 + phi)
    assert abs(float(ess_mean(draws).mean()) / wanted - 1) < 0.05
    # sd / sqrt(ESS) is how far means lie from zero: the ratio's mean square is 1 within 5 standard errors, 6e-7
    off = (draws.mean((0, 1)) / mcse_mean(draws)).square()
    assert abs(float(off.mean()) - 1) < 5 * math.sqrt(2 / quantities)


def test_standard_errors_of_independent_draws_are_the_textbook_ones():
    """Of S normal draws: the mean's 1 / sqrt(S), the sd's 1 / sqrt(2 S), the median's sqrt(pi / 2 S); each to 10 %."""
    x = torch.randn(4, 2500, 20, generator=stream(0, "errors"), dtype=DOUBLE)
    S = 10_000
    assert abs(float(mcse_mean(x).mean()) * math.sqrt(S) - 1) < 0.1
    assert abs(float(mcse_sd(x).mean()) * math.sqrt(2 * S) - 1) < 0.1
    assert abs(float(mcse_quantile(x, 0.5).mean()) * math.sqrt(2 * S / math.pi) - 1) < 0.1


def test_the_nested_r_hat_is_the_papers_written_out_in_numpy():
    x = formula("apart", 6, 5)
    grouped = x.numpy().reshape(3, 2, 5)
    within = grouped.var(2, ddof=1).mean(1)
    between = grouped.mean(2).var(1, ddof=1)
    apart = grouped.mean((1, 2)).var(ddof=1)
    assert abs(float(nested_r_hat(x, 3)) - math.sqrt(1 + apart / (within + between).mean())) < 1e-12


# arviz 1.3.0, rhat_nested with method="identity": chains by `formula`, groups, value
NESTED = [
    (("sticky", 4, 100), 2, 1.0225993666768176),
    (("apart", 6, 50), 3, 2.0238206273220225),
    (("spread", 8, 20), 4, 1.0563182949950365),
    (("mixed", 8, 9), 2, 1.0004256900733979),
]


@pytest.mark.parametrize(("case", "groups", "published"), NESTED, ids=str)
def test_the_nested_r_hat_is_that_of_arviz_as_it_was_written_down(case, groups, published):
    assert abs(float(nested_r_hat(formula(*case), groups)) - published) < 1e-10


def test_one_draw_a_chain_is_enough_for_the_nested_r_hat():
    """16 groups of 64 chains: sqrt(1 + 1/64) where they have converged; B has the standard error sqrt(2/15) of it."""
    x = torch.randn(1024, 1, generator=stream(0, "nested"), dtype=DOUBLE)
    excess = float(nested_r_hat(x, 16)) ** 2 - 1
    assert abs(excess * 64 - 1) < 5 * math.sqrt(2 / 15)
    apart = x + torch.arange(16, dtype=DOUBLE).repeat_interleave(64)[:, None]
    assert float(nested_r_hat(apart, 16)) > 3


def test_one_chain_a_group_has_the_variance_within_alone():
    x = formula("apart", 4, 20)
    expected = (1 + x.mean(1).var() / x.var(1).mean()).sqrt()
    assert abs(float(nested_r_hat(x, 4)) - float(expected)) < 1e-12


def test_bfmi_of_independent_energies_is_two_and_of_a_random_walk_is_nearly_none():
    e = torch.randn(3, 20_000, generator=stream(0, "energy"), dtype=DOUBLE)
    assert bool(((bfmi(e) - 2).abs() < 0.1).all())
    assert bool((bfmi(e.cumsum(1)) < 0.01).all())


@pytest.mark.parametrize("a", [1.0, 1.5, 20.0, 3e4])
@pytest.mark.parametrize("b", [1.0, 7.3, 4e3])
def test_the_quantiles_of_a_beta_distribution_are_those_of_scipy(a, b):
    shapes = torch.tensor([[a], [b]], dtype=DOUBLE)
    for p in (0.02, 0.1586553, 0.5, 0.8413447):
        found = beta_quantile(p, *shapes)
        assert abs(float(found) - scipy.stats.beta.ppf(p, a, b)) < 1e-10
        assert abs(float(incomplete_beta(*shapes, found)) - scipy.stats.beta.cdf(float(found), a, b)) < 1e-10


def test_a_quantile_is_linear_between_two_draws():
    x = torch.tensor([[3.0, 1.0], [4.0, 2.0]], dtype=DOUBLE)
    assert abs(float(quantile(x, 0.5)) - 2.5) < 1e-12
    assert abs(float(quantile(x, 0.1)) - 1.3) < 1e-12


# Shapes and edges.


@pytest.mark.parametrize("name", [name for name in MEASURES if name != "bfmi"])
def test_quantities_are_worked_on_apart_and_some_at_a_time(name, monkeypatch):
    x = torch.stack([formula(kind, 4, 40) for kind in ("sticky", "heavy", "apart", "tied", "anti", "mixed")], -1)
    one_by_one = torch.stack([MEASURES[name](x[..., i]) for i in range(6)])
    together = MEASURES[name](x.reshape(4, 40, 2, 3))
    assert together.shape == (2, 3)
    torch.testing.assert_close(together, one_by_one.reshape(2, 3), rtol=1e-12, atol=0)
    monkeypatch.setattr(convergence, "BLOCK_NUMBERS", 320)  # two at a time
    torch.testing.assert_close(MEASURES[name](x.reshape(4, 40, 2, 3)), together, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", [name for name in MEASURES if name != "bfmi"])
def test_nothing_is_said_where_there_is_nothing_to_say(name):
    x = torch.stack([formula("mixed", 3, 20)] * 4, -1)
    x[:, :, 1] = 0.1  # never varies
    x[1, 3, 2] = math.nan
    x[1, 3, 3] = math.inf
    found = MEASURES[name](x)
    assert torch.isnan(found).tolist() == [False, True, True, True]
    assert bool(torch.isnan(MEASURES[name](formula("mixed", 3, 3))))
    assert math.isfinite(float(MEASURES[name](formula("mixed", 1, 20))))  # one chain has two halves
    assert math.isfinite(float(MEASURES[name](formula("mixed", 2, 4))))


def test_chains_that_stand_still_apart_have_no_finite_r_hat_and_hardly_a_draw():
    x = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=DOUBLE)[:, None].expand(4, 100)
    assert not float(r_hat(x)) < 100
    assert float(ess_bulk(x)) < 10


def test_the_tail_of_a_discrete_quantity_is_that_of_the_side_that_varies():
    x = (formula("mixed", 4, 100) > 0).double()
    assert float(ess_tail(x)) == pytest.approx(float(ess_quantile(x, 0.05)), rel=1e-12)
    assert float(ess_quantile(x, 0.95)) == 400  # x <= 1 always


def test_no_column_gives_an_empty_result():
    assert r_hat(torch.zeros(2, 10, 0)).shape == (0,)


def test_float32_is_worked_on_in_float64():
    x = formula("mixed", 4, 100)
    assert r_hat(x.float()).dtype == DOUBLE
    torch.testing.assert_close(ess_bulk(x.float()), ess_bulk(x), rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize("x", [torch.zeros(5), [0.0], torch.zeros(0, 5), torch.zeros(5, 0)])
def test_what_are_no_draws_is_refused(name, x):
    if name == "bfmi" and isinstance(x, torch.Tensor) and x.ndim == 2:
        return
    with pytest.raises(InputError, match=r"must be a tensor \(chain, draw"):
        MEASURES[name](x)


@pytest.mark.parametrize("q", [0, 1, -0.1, "half"])
@pytest.mark.parametrize("measure", [ess_quantile, mcse_quantile, quantile])
def test_what_is_no_probability_is_refused(measure, q):
    with pytest.raises(InputError, match=f"The 'q' argument of {measure.__name__} must lie between 0 and 1"):
        measure(torch.zeros(2, 10), q)


@pytest.mark.parametrize(("groups", "shape"), [(1, (4, 5)), (3, (4, 5)), (4, (4, 1)), (2.0, (4, 5))])
def test_groups_that_do_not_divide_the_chains_are_refused(groups, shape):
    with pytest.raises(InputError, match="The 'groups' argument of nested_r_hat must be an integer >= 2 that divides"):
        nested_r_hat(torch.zeros(shape), groups)
