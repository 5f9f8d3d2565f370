"""Random streams: the same for the same seed and names, unrelated otherwise."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from priory.core.streams import stream

NAMES = st.lists(st.one_of(st.text("abc", min_size=1, max_size=4), st.integers(0, 99)), max_size=3)


def draw(seed: int, *names: str | int) -> torch.Tensor:
    return torch.randn(8, generator=stream(seed, *names), dtype=torch.float64)


@given(seed=st.integers(-(2**70), 2**70), names=NAMES)
def test_the_same_seed_and_names_give_the_same_stream(seed: int, names: list[str | int]) -> None:
    assert torch.equal(draw(seed, *names), draw(seed, *names))


@given(a=st.integers(0, 2**70), b=st.integers(0, 2**70), names=NAMES)
def test_different_seeds_give_different_streams(a: int, b: int, names: list[str | int]) -> None:
    assert torch.equal(draw(a, *names), draw(b, *names)) == (a == b)


@given(seed=st.integers(0, 9), a=NAMES, b=NAMES)
def test_different_names_give_different_streams(seed: int, a: list[str | int], b: list[str | int]) -> None:
    assert torch.equal(draw(seed, *a), draw(seed, *b)) == ([*map(str, a)] == [*map(str, b)])


def test_names_and_seeds_are_separated_in_the_hash() -> None:
    keys = [
        (0, "noise", 1),
        (1, "noise", 0),
        (0, "noise1"),
        (0, "noise"),
        (0,),
        (1,),
        (0, 1),
        (1, 0),
        (10,),
        (0, "n", "oise"),
    ]
    for a, b in itertools.combinations(keys, 2):
        assert not torch.equal(draw(*a), draw(*b)), (a, b)


def test_seeds_beyond_32_bits_are_distinct() -> None:
    assert not torch.equal(draw(1), draw(1 + 2**32))
    assert not torch.equal(draw(1), draw(1 + 2**64))
    assert not torch.equal(draw(1), draw(-1))


def test_streams_of_neighbouring_seeds_are_uncorrelated() -> None:
    """Correlations of 1,000 pairs of streams of 1,000 draws; beyond 5.5 standard errors once in 25,000 such tests."""
    draws = torch.stack([torch.randn(1000, generator=stream(s, "noise"), dtype=torch.float64) for s in range(1001)])
    products = (draws[:-1] * draws[1:]).mean(1) * 1000**0.5
    assert float(products.abs().max()) < 5.5
    assert abs(float(draws.mean())) * draws.numel() ** 0.5 < 4.5  # once in 150,000


def test_a_stream_does_not_use_the_global_generator() -> None:
    before = torch.get_rng_state()
    first = draw(0, "noise")
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    assert torch.equal(draw(0, "noise"), first)
    torch.set_rng_state(before)


@pytest.mark.parametrize(("key", "seed"), [((0, "noise"), 8991745984374595890), ((7, "order", 3), 6099876426492485686)])
def test_streams_are_the_same_in_every_process_and_every_release(key: tuple[Any, ...], seed: int) -> None:
    """A hash of bytes, not Python's own, which changes with each process; a stored fit resumes with it."""
    assert stream(*key).initial_seed() == seed
