"""Generated quantities: the values, shapes, random numbers and blocks of a function mapped over draws."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Binomial, Exponential, Gamma, Normal

import priory as pr
from priory import constraints
from priory.core.errors import InputError, PrioryWarning
from priory.models.target import Target
from priory.network.map_draws import DrawMap
from priory.posteriors import Chains, Draws

DOUBLE = torch.float64
TARGET = Target(
    pr.Density(
        lambda p: -p["x"].square().sum() - p["s"], {"x": pr.Param((3,)), "s": pr.Param((), constraints.positive)}
    ),
    0,
)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def chains() -> Chains:
    return Chains(TARGET, normal(4, 25, 4))


def test_of_chains_all_draws_are_used_in_order_with_constrained_parameters() -> None:
    posterior = chains()
    found = pr.generate(lambda p, a: {"sum": p["x"].sum() + a, "scaled": p["s"] * p["x"]}, posterior, 2.0)
    torch.testing.assert_close(found["sum"], posterior.w[..., :3].sum(-1) + 2, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(found["scaled"], posterior.w[..., :3] * posterior.w[..., 3:].exp(), rtol=1e-14, atol=0)


@pytest.mark.parametrize("samples", [None, 7])
def test_a_posterior_generates_its_own_quantities(samples: int | None) -> None:
    posterior = chains()
    function = lambda p, a: {"replicate": Normal(p["x"] + a, p["s"]).sample()}  # noqa: E731
    mine = posterior.predictive(function, 2.0, samples=samples, seed=3)["replicate"]
    assert torch.equal(mine, pr.generate(function, posterior, 2.0, samples=samples, seed=3)["replicate"])
    with pytest.raises(InputError, match="The 'samples' argument of predictive must be an integer >= 1"):
        posterior.predictive(function, 2.0, samples=0)


def test_blocks_give_the_same_values_as_all_draws_together() -> None:
    posterior = chains()
    sizes = []

    def function(p: dict[str, Tensor]) -> Tensor:
        sizes.append(1)
        return torch.outer(p["x"], p["x"]).logdet().nan_to_num() + p["s"]

    whole = pr.generate(function, posterior)
    assert len(sizes) == 2  # a trial, and one block
    small = pr.generate(function, posterior, limit=4_000)
    assert len(sizes) > 6
    torch.testing.assert_close(small, whole, rtol=1e-14, atol=1e-14)


def test_the_size_of_a_block_counts_what_the_function_allocates() -> None:
    big = lambda p: (torch.ones(1_000, 1_000, dtype=DOUBLE) * p["x"]).sum()  # noqa: E731 - 16 MB in between
    one = {"x": torch.tensor(1.0, dtype=DOUBLE)}
    size = DrawMap(big, limit=1 << 29).block_size(one)
    assert 16 < size <= (1 << 29) // 16_000_000
    assert DrawMap(lambda p: p["x"] + 1, limit=1 << 20).block_size(one) > 10_000
    assert DrawMap(big, limit=1).block_size(one) == 1


def test_of_a_posterior_with_a_density_a_thousand_draws_are_used() -> None:
    X = normal(20, 1)
    posterior = pr.fit(
        pr.Model(nn.Linear(1, 1).double(), pr.Gaussian(0.3)), (X, X[:, 0]), pr.MAP(), steps=5, progress=False
    )
    line = lambda p, x: x @ p["weight"].T + p["bias"]  # noqa: E731
    assert pr.generate(line, posterior, X).shape == (1_000, 20, 1)
    found = pr.generate(line, posterior, X, samples=7)
    torch.testing.assert_close(found[3, :, 0], posterior.predict(X).mean, rtol=1e-12, atol=1e-12)


def test_of_a_set_of_draws_each_is_used_once() -> None:
    w = normal(50, 4)
    found = pr.generate(lambda p: p["x"], Draws(TARGET, w))
    assert sorted(found[:, 0].tolist()) == sorted(w[:, 0].tolist())
    some = pr.generate(lambda p: p["x"], chains(), samples=30)
    assert len({tuple(row) for row in some.tolist()}) == 30


def test_random_numbers_differ_between_draws_and_follow_the_seed() -> None:
    draws = {"mu": torch.linspace(-5, 5, 4_000, dtype=DOUBLE)}
    noisy = lambda p: Normal(p["mu"], 2.0).sample((2,))  # noqa: E731
    before = torch.random.get_rng_state()
    found = pr.generate(noisy, draws)
    assert torch.equal(before, torch.random.get_rng_state())
    z = (found - draws["mu"][:, None]) / 2
    # means of 4,000 independent products and squares within 5 standard errors: one false alarm in 400,000 seeds
    assert abs(float((z[:, 0] * z[:, 1]).mean())) < 5 / math.sqrt(4_000)
    assert abs(float((z[:-1, 0] * z[1:, 0]).mean())) < 5 / math.sqrt(4_000)
    assert abs(float(z.square().mean()) - 1) < 5 * math.sqrt(2 / 8_000)
    assert torch.equal(found, pr.generate(noisy, draws))
    assert not torch.equal(found, pr.generate(noisy, draws, seed=1))


def test_counts_and_gammas_are_drawn_without_a_warning() -> None:
    draws = {"p": torch.full((20_000,), 0.3, dtype=DOUBLE)}
    counts = pr.generate(lambda p: Binomial(5, p["p"]).sample(), draws)
    assert abs(float(counts.mean()) - 1.5) < 5 * math.sqrt(1.05 / 20_000)
    gammas = pr.generate(lambda p: Gamma(p["p"], 1.0).sample(), draws)
    assert abs(float(gammas.mean()) - 0.3) < 5 * math.sqrt(0.3 / 20_000)


def test_a_function_that_vmap_does_not_support_runs_in_a_loop_with_a_warning() -> None:
    draws = {"x": torch.tensor([1.0, -2.0, 3.0])}
    with pytest.warns(PrioryWarning, match="The function of generate can't be vectorised by vmap and runs in a loop"):
        found = pr.generate(lambda p: p["x"] if p["x"] > 0 else -p["x"], draws)
    assert found.tolist() == [1.0, 2.0, 3.0]
    with pytest.warns(PrioryWarning, match="runs in a loop"):
        waits = pr.generate(lambda p: Exponential(p["x"].abs()).sample(), draws)
    assert len(set(waits.tolist())) == 3


def test_prior_predictive_draws_have_the_moments_of_the_model() -> None:
    model = pr.Density(
        params={"mu": pr.Param(), "sigma": pr.Param((), constraints.positive)},
        log_prior={"mu": Normal(1.0, 2.0), "sigma": Gamma(4.0, 4.0)},
        log_likelihood=lambda p, batch: Normal(p["mu"], p["sigma"]).log_prob(batch[0]),
    )
    y = pr.generate(lambda p: Normal(p["mu"], p["sigma"]).sample((10,)), pr.prior_draws(model, 20_000))
    assert y.shape == (20_000, 10)
    variance = 4 + 1.25  # Var[mu] + E[sigma^2]
    assert abs(float(y[:, 0].mean()) - 1) < 5 * math.sqrt(variance / 20_000)
    assert abs(float(((y[:, 0] - 1) * (y[:, 1] - 1)).mean()) - 4) < 5 * math.sqrt((2 * 16 + variance**2) / 20_000)


@pytest.mark.parametrize(
    ("draws", "message"),
    [
        ({}, r"must hold tensors \(n, ...\) with n >= 1, got {}"),
        ({"x": torch.tensor(1.0)}, "must hold tensors"),
        ({"x": [1.0]}, "must hold tensors .* got {'x': 'list'}"),
        ({"x": torch.zeros(3), "y": torch.zeros(4)}, "the same number of draws of every parameter"),
        (3, "'draws' argument of generate must be a posterior or a dict of tensors, got int"),
    ],
)
def test_draws_that_are_none_are_refused(draws: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        pr.generate(lambda p: p["x"], draws)  # pyright: ignore[reportArgumentType]


def test_other_arguments_are_refused_by_name() -> None:
    draws = {"x": torch.zeros(3)}
    with pytest.raises(InputError, match=r"'function' argument of generate must return tensors, .* got float"):
        pr.generate(lambda p: 1.0, draws)
    with pytest.raises(InputError, match="'samples' argument of generate must be None for a dict"):
        pr.generate(lambda p: p["x"], draws, samples=2)
    with pytest.raises(InputError, match="'function' argument of generate must be a function"):
        pr.generate(3, draws)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ZeroDivisionError):
        pr.generate(lambda p: p["x"] / (1 / 0), draws)
