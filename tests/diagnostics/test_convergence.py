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
    hdi,
    mcse_mean,
    mcse_quantile,
    mcse_sd,
    measures,
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


def test_the_folded_r_hat_detects_chains_that_differ_only_in_scale():
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


def superchains(count: int, chains: int) -> torch.Tensor:
    """Ids of neighbouring chains: 0, 0, ..., 1, 1, ..."""
    return torch.arange(chains) // (chains // count)


def nested_by_loops(x: np.ndarray, ids: list[int]) -> float:
    """Equations 15 to 19 of Margossian et al. (2024) for draws (chain, draw), one superchain at a time."""
    centres, spreads = [], []
    for name in dict.fromkeys(ids):
        own = [x[c] for c in range(len(ids)) if ids[c] == name]
        means = [sum(chain) / len(chain) for chain in own]
        centre = sum(means) / len(own)
        between = sum((m - centre) ** 2 for m in means) / (len(own) - 1) if len(own) > 1 else 0.0
        within = 0.0
        for chain, m in zip(own, means, strict=True):
            within += sum((v - m) ** 2 for v in chain) / (len(chain) - 1) / len(own) if len(chain) > 1 else 0.0
        centres.append(centre)
        spreads.append(between + within)
    middle = sum(centres) / len(centres)
    apart = sum((c - middle) ** 2 for c in centres) / (len(centres) - 1)
    return math.sqrt(1 + apart / (sum(spreads) / len(spreads)))


@pytest.mark.parametrize(
    ("case", "ids"),
    [
        (("apart", 6, 5), [0, 0, 1, 1, 2, 2]),
        (("apart", 6, 5), [7, -1, 3, 3, -1, 7]),
        (("spread", 8, 1), [0, 1, 0, 1, 0, 1, 0, 1]),
        (("heavy", 4, 20), [3, 1, 0, 2]),
        (("sticky", 9, 2), [2, 0, 1, 1, 2, 0, 0, 1, 2]),
    ],
)
def test_the_nested_r_hat_is_the_papers_written_as_loops(case, ids):
    x = formula(*case)
    assert abs(float(nested_r_hat(x, ids)) - nested_by_loops(x.numpy(), ids)) < 1e-12
    assert torch.equal(nested_r_hat(x, torch.tensor(ids)), nested_r_hat(x, ids))


@pytest.mark.parametrize(
    ("x", "ids", "square"),
    [
        ([[0.0], [2.0], [4.0], [6.0]], [0, 0, 1, 1], 5.0),  # means 1 and 5: B = 8; W = 2 between chains alone
        ([[0.0], [4.0], [2.0], [6.0]], [0, 0, 1, 1], 1.25),  # means 2 and 4: B = 2; W = 8
        ([[0.0], [4.0], [2.0], [6.0]], [5, 2, 5, 2], 5.0),  # the first case in another order
        ([[0.0, 2.0], [4.0, 6.0]], [0, 1], 5.0),  # one chain each: B = 8; W = 2 within chains alone
        ([[0.0, 2.0], [2.0, 4.0], [4.0, 6.0], [6.0, 8.0]], [0, 0, 1, 1], 3.0),  # B = 8; W = 2 + 2
    ],
)
def test_the_nested_r_hat_of_small_numbers_is_the_one_by_hand(x, ids, square):
    assert abs(float(nested_r_hat(torch.tensor(x, dtype=DOUBLE), ids)) ** 2 - square) < 1e-12


# arviz 1.3.0, rhat_nested with method="identity": chains by `formula`, superchains, value
NESTED = [
    (("sticky", 4, 100), 2, 1.0225993666768176),
    (("apart", 6, 50), 3, 2.0238206273220225),
    (("spread", 8, 20), 4, 1.0563182949950365),
    (("mixed", 8, 9), 2, 1.0004256900733979),
]


@pytest.mark.parametrize(("case", "count", "published"), NESTED, ids=str)
def test_the_nested_r_hat_is_that_of_arviz_as_it_was_written_down(case, count, published):
    assert abs(float(nested_r_hat(formula(*case), superchains(count, case[1]))) - published) < 1e-10


@pytest.mark.parametrize(("size", "draws"), [(16, 1), (4, 6), (1, 40)])
def test_the_nested_r_hat_of_independent_draws_has_an_f_distribution(size, draws):
    """(nested R-hat^2 - 1) M N = M N B / W is F(K - 1, K (M N - 1)) for M = 1 or N = 1: W is the pooled variance then.

    Otherwise W has the mean 1 + 1 / N, as the means of chains are counted too, and the mean of the ratio is tested.
    """
    count, quantities = 8, 2000
    x = torch.randn(count * size, draws, quantities, generator=stream(0, "nested law"), dtype=DOUBLE)
    within = 1 + (1 / draws if size > 1 and draws > 1 else 0.0)
    ratio = (nested_r_hat(x, superchains(count, count * size)).square() - 1) * size * draws * within
    if within == 1:
        law = scipy.stats.f(count - 1, count * (size * draws - 1))
        assert scipy.stats.kstest(ratio.numpy(), law.cdf).pvalue > 1e-5  # false alarms at 1e-5
    else:
        # E[1/W] exceeds 1/E[W] by Var W / E[W]^2 < 1 / 80 of it; 5 standard errors, 6e-7
        error = math.sqrt(2 / (count - 1) / quantities)
        assert -5 * error < float(ratio.mean()) - 1 < 1 / 80 + 5 * error


def test_one_draw_per_chain_is_enough_for_the_nested_r_hat():
    """16 superchains of 64 chains: sqrt(1 + 1/64) if they have converged; B has the standard error sqrt(2/15) of it."""
    x, ids = torch.randn(1024, 1, generator=stream(0, "nested"), dtype=DOUBLE), superchains(16, 1024)
    excess = float(nested_r_hat(x, ids)) ** 2 - 1
    assert abs(excess * 64 - 1) < 5 * math.sqrt(2 / 15)
    assert float(nested_r_hat(x + ids[:, None], ids)) > 3


def test_the_nested_r_hat_of_several_quantities_is_that_of_each(monkeypatch):
    x, ids = torch.stack([formula(k, 4, 40) for k in ("sticky", "heavy", "apart", "tied")], -1), [1, 0, 0, 1]
    x = torch.cat([x, x[..., :2]], -1)
    x[2, 3, 4], x[..., 5] = math.inf, 0.1
    apart = torch.stack([nested_r_hat(x[..., i], ids) for i in range(6)]).reshape(2, 3)
    assert apart.isnan().tolist() == [[False, False, False], [False, True, True]]
    torch.testing.assert_close(nested_r_hat(x.reshape(4, 40, 2, 3), ids), apart, rtol=1e-12, atol=0, equal_nan=True)
    monkeypatch.setattr(convergence, "BLOCK_ELEMENTS", 80)  # two at a time
    torch.testing.assert_close(nested_r_hat(x.reshape(4, 40, 2, 3), ids), apart, rtol=1e-12, atol=0, equal_nan=True)
    assert nested_r_hat(x[..., :0], ids).shape == (0,)
    assert nested_r_hat(x.float(), ids).dtype == DOUBLE


def test_superchains_that_stand_still_apart_have_an_infinite_nested_r_hat():
    x = torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=DOUBLE)[:, None].expand(4, 10)
    assert float(nested_r_hat(x, [0, 0, 1, 1])) == math.inf


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


def test_the_effective_size_within_chains_ignores_that_they_disagree():
    """Independent draws around different means: each chain is worth its draws, all of them together a few."""
    x = torch.randn(8, 500, 4, generator=stream(0, "within"), dtype=DOUBLE)
    apart = measures(x + 3 * torch.arange(8, dtype=DOUBLE)[:, None, None])
    assert bool((apart.ess_bulk < 40).all())
    assert bool((apart.ess_within > 2000).all())
    # chains that agree have nearly the same of both
    torch.testing.assert_close(measures(x).ess_within, ess_bulk(x), rtol=0.1, atol=0)


@pytest.mark.parametrize("level", [0.1, 0.5, 0.9, 0.94])
def test_the_highest_density_interval_is_the_shortest_of_all(level):
    x = torch.stack([formula(kind, 3, 33) for kind in ("mixed", "heavy", "tied", "apart")], -1)
    found = hdi(x, level)
    assert found.shape == (4, 2)
    for i in range(4):
        ordered, inside = sorted(x[..., i].flatten().tolist()), math.floor(level * 99)
        intervals = [(ordered[j], ordered[j + inside]) for j in range(99 - inside)]
        assert tuple(found[i].tolist()) == min(intervals, key=lambda ends: ends[1] - ends[0])


def test_the_highest_density_interval_is_that_of_the_arviz_that_is_installed():
    import arviz as az

    x = formula("heavy", 4, 50)
    for level in (0.5, 0.8, 0.95):
        theirs = az.hdi(x.numpy().flatten(), level)
        np.testing.assert_allclose(hdi(x, level).numpy(), theirs, rtol=1e-12)


def test_the_highest_density_interval_of_an_exponential_begins_at_zero():
    """The shortest interval with 80 % is (0, log 5); the error of its end is near sqrt(0.8 * 0.2 / S) / 0.2 = 0.006."""
    x = torch.empty(4, 25_000, dtype=DOUBLE).exponential_(generator=stream(0, "hdi"))
    low, high = hdi(x, 0.8).tolist()
    assert 0 <= low < 0.05
    assert abs(high - low - math.log(5)) < 5 * 0.0064  # false alarms at 6e-7


@pytest.mark.parametrize("level", [0, 1, 1.5, "most"])
def test_invalid_levels_are_refused(level):
    with pytest.raises(InputError, match="The 'level' argument of hdi must lie between 0 and 1"):
        hdi(torch.zeros(2, 10), level)


# Shapes and edges.


@pytest.mark.parametrize("name", [name for name in MEASURES if name != "bfmi"])
def test_quantities_are_worked_on_apart_and_some_at_a_time(name, monkeypatch):
    x = torch.stack([formula(kind, 4, 40) for kind in ("sticky", "heavy", "apart", "tied", "anti", "mixed")], -1)
    one_by_one = torch.stack([MEASURES[name](x[..., i]) for i in range(6)])
    together = MEASURES[name](x.reshape(4, 40, 2, 3))
    assert together.shape == (2, 3)
    torch.testing.assert_close(together, one_by_one.reshape(2, 3), rtol=1e-12, atol=0)
    monkeypatch.setattr(convergence, "BLOCK_ELEMENTS", 320)  # two at a time
    torch.testing.assert_close(MEASURES[name](x.reshape(4, 40, 2, 3)), together, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", [name for name in MEASURES if name != "bfmi"])
def test_diagnostics_are_nan_where_they_are_undefined(name):
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
def test_invalid_draws_are_refused(name, x):
    if name == "bfmi" and isinstance(x, torch.Tensor) and x.ndim == 2:
        return
    with pytest.raises(InputError, match=r"must be a tensor \(chain, draw"):
        MEASURES[name](x)


@pytest.mark.parametrize("q", [0, 1, -0.1, "half"])
@pytest.mark.parametrize("measure", [ess_quantile, mcse_quantile, quantile])
def test_invalid_probabilities_are_refused(measure, q):
    with pytest.raises(InputError, match=f"The 'q' argument of {measure.__name__} must lie between 0 and 1"):
        measure(torch.zeros(2, 10), q)


@pytest.mark.parametrize("ids", [[0, 1, 0], [0.0, 0.0, 1.0, 1.0], [[0, 0, 1, 1]], 2])
def test_invalid_superchains_are_refused(ids):
    with pytest.raises(
        InputError, match="The 'superchains' argument of nested_r_hat must be 4 integers, one per chain"
    ):
        nested_r_hat(torch.zeros(4, 5), ids)


@pytest.mark.parametrize("ids", [[0, 0, 0, 0], [0, 0, 0, 1]])
def test_superchains_of_different_sizes_are_refused(ids):
    with pytest.raises(InputError, match="must be two or more superchains of the same number of chains, got"):
        nested_r_hat(torch.zeros(4, 5), ids)


def test_a_superchain_of_a_single_draw_is_refused():
    with pytest.raises(InputError, match="The 'x' argument of nested_r_hat must have two draws or more in each of"):
        nested_r_hat(torch.zeros(4, 1), [0, 1, 2, 3])
