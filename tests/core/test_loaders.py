"""DataLoaders: N is the number of rows, whatever the sampler, and rows that are drawn unequally are weighted for it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import priory as pr
from priory import latent
from priory.core.data import Data, WeightedBatch
from priory.core.errors import InputError, PrioryWarning
from priory.fitting.prepare import make_target

N = 50
Y = torch.randn(N, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 1.5
ODDS = torch.linspace(0.2, 3.0, N, dtype=torch.float64)


def rows() -> TensorDataset:
    return TensorDataset(torch.arange(N), Y)


class Listed(Sampler[int]):
    """A sampler of one's own: fixed indices, shuffled if wanted."""

    def __init__(self, indices: list[int], shuffled: bool = False) -> None:
        self.indices, self.shuffled = indices, shuffled

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(len(self.indices)) if self.shuffled else torch.arange(len(self.indices))
        return iter([self.indices[i] for i in order])


class Some(Sampler[int]):
    """A sampler of one's own that reads ten other rows in each epoch."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(N)[:10].tolist())


class Stream(IterableDataset[Any]):
    """A stream of rows without a length, or without an end."""

    def __init__(self, count: int | None = N) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        index = 0
        while self.count is None or index < self.count:
            yield torch.tensor(index % N), Y[index % N]
            index += 1


class SizedStream(Stream):
    def __len__(self) -> int:
        return N


# The number of rows, and what a pass reads.


KNOWN: dict[str, tuple[Callable[[], Any], int]] = {
    "in order": (lambda: DataLoader(rows(), 16), N),
    "shuffled": (lambda: DataLoader(rows(), 16, shuffle=True), N),
    "shuffled, the last batch dropped": (lambda: DataLoader(rows(), 16, shuffle=True, drop_last=True), N),
    "200 draws with replacement": (lambda: DataLoader(rows(), 16, sampler=RandomSampler(rows(), True, 200)), N),
    "200 draws of permutations": (lambda: DataLoader(rows(), 16, sampler=RandomSampler(rows(), False, 200)), N),
    "10 rows per epoch": (lambda: DataLoader(rows(), 5, sampler=RandomSampler(rows(), num_samples=10)), N),
    "10 rows per epoch in a batch sampler": (
        lambda: DataLoader(rows(), batch_sampler=BatchSampler(RandomSampler(rows(), num_samples=10), 5, False)),
        N,
    ),
    "a subset": (lambda: DataLoader(rows(), 16, sampler=SubsetRandomSampler(range(20))), 20),
    "a subset, the last batch dropped": (
        lambda: DataLoader(rows(), 16, sampler=SubsetRandomSampler(range(20)), drop_last=True),
        20,
    ),
    "equal weights": (lambda: DataLoader(rows(), 16, sampler=WeightedRandomSampler([2.0] * N, 200)), N),
    "weights without replacement": (
        lambda: DataLoader(rows(), 16, sampler=WeightedRandomSampler(ODDS.tolist(), N, False)),
        N,
    ),
    "a quarter per process": (lambda: DataLoader(rows(), 5, sampler=DistributedSampler(rows(), 4, 1)), N),
    "one process": (lambda: DataLoader(rows(), 5, sampler=DistributedSampler(rows(), 1, 0)), N),
    "a sampler of one's own": (lambda: DataLoader(rows(), 16, sampler=Listed(list(range(30)), True)), 30),
    "one's own, the last batch dropped": (
        lambda: DataLoader(rows(), 16, sampler=Listed(list(range(N)), True), drop_last=True),
        N,
    ),
    "batches of one's own": (lambda: DataLoader(rows(), batch_sampler=[[0, 1, 2], [3, 4], [5]]), 6),
    "a stream with a length": (lambda: DataLoader(SizedStream(), 16), N),
}


@pytest.mark.parametrize("name", KNOWN)
def test_n_is_the_number_of_rows_and_a_pass_reads_each_of_them_once(name: str) -> None:
    make, expected = KNOWN[name]
    data = Data.of(make())
    assert data.num_data == expected
    read = Counter(int(i) for indices, _ in data.blocks(7) for i in indices)
    assert read == dict.fromkeys(range(expected), 1)


UNEQUAL: dict[str, tuple[Callable[[], Any], Tensor]] = {
    "more draws than rows": (lambda: DataLoader(rows(), 16, sampler=WeightedRandomSampler(ODDS.tolist(), 200)), ODDS),
    "fewer draws than rows": (lambda: DataLoader(rows(), 5, sampler=WeightedRandomSampler(ODDS.tolist(), 10)), ODDS),
    "rows of weight 0": (
        lambda: DataLoader(rows(), 16, sampler=WeightedRandomSampler((ODDS * (ODDS > 1)).tolist(), 100)),
        ODDS * (ODDS > 1),
    ),
    "two processes": (
        lambda: DataLoader(rows(), 16, sampler=WeightedRandomSampler(ODDS.tolist(), 100), num_workers=2),
        ODDS,
    ),
    "repeated indices": (
        lambda: DataLoader(rows(), 16, sampler=SubsetRandomSampler([*range(N), *[3] * 10, *[7] * 20])),
        1.0 + torch.bincount(torch.tensor([3] * 10 + [7] * 20), minlength=N).double(),
    ),
    "a sampler of one's own with repeated indices": (
        lambda: DataLoader(rows(), 16, sampler=Listed([*range(N), *[3] * 10], True)),
        1.0 + torch.bincount(torch.tensor([3] * 10), minlength=N).double(),
    ),
}


@pytest.mark.parametrize("name", UNEQUAL)
def test_rows_that_are_read_unequally_have_importance_weights(name: str) -> None:
    make, often = UNEQUAL[name]
    with pytest.warns(PrioryWarning, match=r"Each row is weighted by 1 / \(N p\)"):
        data = Data.of(make())
    count = int((often > 0).sum())
    assert data.num_data == count
    expected = often.sum() / (count * often)
    for batch in data.batches(0, 0):
        assert isinstance(batch, WeightedBatch)
        indices, y = batch
        torch.testing.assert_close(y, Y[indices], rtol=0, atol=0)
        torch.testing.assert_close(batch.weights, expected[indices], rtol=1e-12, atol=0)
    read = Counter(int(i) for indices, _ in data.blocks(7) for i in indices)
    assert read == dict.fromkeys((often > 0).nonzero()[:, 0].tolist(), 1)


def test_batches_after_a_resume_have_the_weights_of_their_rows() -> None:
    with pytest.warns(PrioryWarning, match="weighted"):
        data = Data.of(UNEQUAL["more draws than rows"][0]())
    whole, rest = list(data.batches(3, 2)), list(data.batches(3, 2, skip=5))
    for a, b in zip(whole[5:], rest, strict=True):
        assert isinstance(a, WeightedBatch)
        assert isinstance(b, WeightedBatch)
        assert torch.equal(a[0], b[0])
        assert torch.equal(a.weights, b.weights)


def density() -> pr.Density:
    """The mean of a Gaussian with known noise under a wide prior, whose posterior is in closed form."""
    normal = torch.distributions.Normal
    return pr.Density(
        params={"m": pr.Param()},
        log_prior=lambda p: normal(0.0, 10.0).log_prob(p["m"]),
        log_likelihood=lambda p, batch: normal(p["m"], 1.0).log_prob(batch[1]),
        dtype=torch.float64,
    )


@pytest.mark.parametrize("draws", [10, 200])
def test_the_log_likelihood_of_weighted_draws_is_unbiased(draws: int) -> None:
    """400 epochs; within 4.5 standard errors (false alarms: 7e-6)."""
    model = density()
    with pytest.warns(PrioryWarning, match="weighted"):
        _, data = model.bind(DataLoader(rows(), 10, sampler=WeightedRandomSampler(ODDS.tolist(), draws)))
    target, w = make_target(model, data), torch.tensor([0.3], dtype=torch.float64)
    found = torch.stack([target.log_likelihood_of(w, b) for e in range(400) for b in data.batches(0, e)])
    exact = torch.distributions.Normal(w[0], 1.0).log_prob(Y).sum()
    assert abs(float(found.mean() - exact)) < 4.5 * float(found.std()) / len(found) ** 0.5
    torch.testing.assert_close(target.log_likelihood(w, data), exact, rtol=1e-12, atol=0)


SAME_POSTERIOR: dict[str, Callable[[], Any]] = {
    "more draws": lambda: DataLoader(rows(), 25, sampler=WeightedRandomSampler([1.0] * N, 200)),
    "fewer draws": lambda: DataLoader(rows(), 5, sampler=RandomSampler(rows(), num_samples=10)),
    "unequal draws": lambda: DataLoader(rows(), 50, sampler=WeightedRandomSampler(ODDS.tolist(), 200)),
}


@pytest.mark.parametrize("name", SAME_POSTERIOR)
def test_over_and_undersampling_leave_the_posterior_as_it_is(name: str) -> None:
    """Halved and 2.2 times the standard deviation, if N were the number of draws."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrioryWarning)
        posterior = pr.fit(density(), SAME_POSTERIOR[name](), pr.Laplace(), progress=False)
    assert posterior.num_data == N
    precision = N + 0.01
    assert float(posterior.gaussian.variance()) == pytest.approx(1 / precision, rel=1e-9)


def test_em_over_a_resampling_loader_reads_all_rows() -> None:
    x = torch.cat([Y - 4, Y + 4])[:, None]
    loader = DataLoader(TensorDataset(x), 10, sampler=RandomSampler(range(2 * N), replacement=True, num_samples=30))
    start = {
        "weights": torch.tensor([0.5, 0.5]),
        "means": torch.tensor([[-3.0], [6.0]]),
        "covariances": torch.ones(2, 1, 1),
    }
    found = [pr.fit(latent.GaussianMixture(2), source, pr.EM(start=start), progress=False) for source in (loader, x)]
    for name in ("weights", "means", "covariances"):
        torch.testing.assert_close(found[0].mean[name], found[1].mean[name], rtol=1e-10, atol=1e-12)


# Rows that are never read.


@pytest.mark.parametrize("sampler", [None, Listed(list(range(N)))])
def test_rows_that_drop_last_never_reads_do_not_count(sampler: Any) -> None:
    loader = DataLoader(rows(), 16, sampler=sampler, drop_last=True)
    with pytest.warns(PrioryWarning, match="never reads 2 rows.*shuffle=True or drop_last=False"):
        data = Data.of(loader)
    assert data.num_data == 48
    assert sorted(int(i) for indices, _ in data.blocks(7) for i in indices) == list(range(48))


# What can't be known.


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "other rows in each epoch": (
        lambda: DataLoader(rows(), 5, sampler=Some()),
        r"sampler reads the same rows in every epoch, got Some.*fit\(\.\.\., num_data=N\).*WeightedRandomSampler",
    ),
    "some rows without replacement": (
        lambda: DataLoader(rows(), 5, sampler=WeightedRandomSampler(ODDS.tolist(), 10, False)),
        r"draw with replacement.*got 10 of 50 rows per epoch",
    ),
    "a share in order": (
        lambda: DataLoader(rows(), 5, sampler=DistributedSampler(rows(), 4, 1, shuffle=False)),
        r"read all rows on every process.*shuffle=True.*got a DistributedSampler with shuffle=False",
    ),
    "a stream": (lambda: DataLoader(Stream(), 5), r"'num_data' argument of fit must be given.*num_data=N"),
    "a bare stream": (Stream, r"'num_data' argument of fit must be given.*num_data=N"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_loader_whose_rows_cannot_be_known_is_refused_with_the_remedy(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(InputError, match=message):
        Data.of(make())


@pytest.mark.parametrize("count", [N, 30, None])
def test_a_stream_is_fitted_with_num_data(count: int | None) -> None:
    """As long as it says, shorter (then read again), or without an end."""
    posterior = pr.fit(density(), Stream(count), pr.MAP(), num_data=N, batch_size=10, steps=40, progress=False)
    assert posterior.num_data == N
    data = Data.of(DataLoader(Stream(count), 10), num_data=N)
    assert data.steps_per_epoch == len(list(data.batches(0, 0))) == 5
    assert [int(i) for b in data.batches(0, 0, skip=3) for i in b[0]][:1] == [30 if count != 30 else 0]


def test_num_data_says_that_the_rows_of_an_unknown_sampler_are_equally_likely() -> None:
    posterior = pr.fit(density(), DataLoader(rows(), 5, sampler=Some()), pr.Laplace(), num_data=N, progress=False)
    assert float(posterior.gaussian.variance()) == pytest.approx(1 / (N + 0.01), rel=1e-9)


@pytest.mark.parametrize("source", [(Y,), rows(), DataLoader(rows(), 5)], ids=["tensors", "a Dataset", "a loader"])
def test_num_data_must_agree_with_data_that_know_it(source: Any) -> None:
    assert Data.of(source, num_data=N).num_data == N
    with pytest.raises(InputError, match=r"'num_data' argument of fit must be left out .* 50, got 60"):
        Data.of(source, num_data=60)
    with pytest.raises(InputError, match=r"'num_data' argument of fit must be an integer >= 1, got 0"):
        Data.of(source, num_data=0)


def test_an_empty_stream_is_refused() -> None:
    data = Data.of(DataLoader(Stream(0), 10), num_data=N)
    with pytest.raises(InputError, match="must yield batches in every epoch, got none"):
        list(data.batches(0, 0))


class Keyed(Dataset[Any]):
    def __getitem__(self, index: Any) -> Any:
        return torch.tensor(ord(index)), Y[0]

    def __len__(self) -> int:
        return 3


def test_rows_may_have_names_in_place_of_indices() -> None:
    data = Data.of(DataLoader(Keyed(), 2, sampler=["a", "b", "c"]))  # pyright: ignore[reportArgumentType]
    assert data.num_data == 3
    assert [int(i) for b in data.blocks(2) for i in b[0]] == [97, 98, 99]


def test_a_sampler_with_set_epoch_is_told_the_epoch_and_left_as_it_was() -> None:
    sampler = DistributedSampler(rows(), 2, 0, seed=5)
    sampler.set_epoch(11)
    data = Data.of(DataLoader(rows(), 25, sampler=sampler))
    first, second = (next(iter(data.batches(0, epoch)))[0] for epoch in (0, 1))
    assert not torch.equal(first.sort().values, second.sort().values)
    assert sampler.epoch == 11
