"""Data: every row once per pass, an order that depends only on (seed, epoch), and no effect on global state."""

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import priory as pr
from priory.core.data import Data
from priory.core.errors import InputError
from priory.fitting.prepare import make_target

ROWS = 10
X = torch.stack([torch.arange(float(ROWS)), torch.arange(float(ROWS)) ** 2 / 10], 1)
Y = torch.arange(float(ROWS))


class Rows(Dataset[Any]):
    """Fetches one row at a time, with random noise on the inputs if requested."""

    def __init__(self, x: Any = X, y: Any = Y, shake: float = 0.0) -> None:
        self.x, self.y, self.shake = x, y, shake

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index] + self.shake * torch.randn(2) if self.shake else self.x[index], self.y[index]


def own() -> torch.Generator:
    return torch.Generator().manual_seed(3)


SOURCES: dict[str, Callable[[], Any]] = {
    "tensors": lambda: (X, Y),
    "arrays": lambda: (X.numpy(), Y.numpy()),
    "lists": lambda: (X.tolist(), Y.tolist()),
    "a list of two": lambda: [X, Y],
    "frames": lambda: (pd.DataFrame(X.numpy()), pd.Series(Y.numpy())),
    "frames of mixed widths": lambda: (
        pd.DataFrame({"a": range(ROWS), "b": X[:, 1].double().numpy()}),
        pd.Series(range(ROWS)),
    ),
    "a backward array": lambda: (X.numpy()[::-1], Y.numpy()[::-1]),
    "a read-only array": lambda: (np.frombuffer(X.numpy().tobytes(), dtype=np.float32).reshape(ROWS, 2), Y),
    "a transposed array": lambda: (np.asfortranarray(X.numpy()), Y),
    "a big-endian array": lambda: (X.numpy().astype(">f4"), Y),
    "tensors that require a gradient": lambda: (X.clone().requires_grad_(), Y),
    "a TensorDataset": lambda: TensorDataset(X, Y),
    "a Dataset": lambda: Rows(),
    "a Subset": lambda: Subset(TensorDataset(torch.cat([X + 99, X]), torch.cat([Y + 99, Y])), range(ROWS, 2 * ROWS)),
    "a ConcatDataset": lambda: ConcatDataset([Rows(X[:4], Y[:4]), Rows(X[4:], Y[4:])]),
    "a loader": lambda: DataLoader(Rows(), 4),
    "a shuffled loader": lambda: DataLoader(Rows(), 4, shuffle=True),
    "a loader with a generator": lambda: DataLoader(Rows(), 4, shuffle=True, generator=own()),
    "a loader with a sampler": lambda: DataLoader(Rows(), 4, sampler=RandomSampler(range(ROWS))),
    "a loader with a sampler with a generator": lambda: DataLoader(
        Rows(), 4, sampler=RandomSampler(range(ROWS), generator=own())
    ),
    "a loader with a batch sampler": lambda: DataLoader(
        Rows(), batch_sampler=BatchSampler(RandomSampler(range(ROWS)), 4, False)
    ),
    "a loader with a batch sampler with a generator": lambda: DataLoader(
        Rows(), batch_sampler=BatchSampler(RandomSampler(range(ROWS), generator=own()), 4, False)
    ),
    "a loader of random rows": lambda: DataLoader(Rows(shake=0.1), 4, shuffle=True),
    "a Dataset of random rows": lambda: Rows(shake=0.1),
}
LOADERS = [name for name in SOURCES if "loader" in name]


def data_of(source: Any, size: int = 4) -> Data:
    return Data.of(source, None if isinstance(source, DataLoader) else size)


def passed(data: Data, seed: int = 0, epoch: int = 0, skip: int = 0) -> list[tuple[Tensor, ...]]:
    return list(data.batches(seed, epoch, skip))


def alike(a: list[tuple[Tensor, ...]], b: list[tuple[Tensor, ...]]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(s, t) for p, q in zip(a, b, strict=True) for s, t in zip(p, q, strict=True)
    )


@pytest.mark.parametrize("name", SOURCES)
def test_a_pass_holds_every_row_once_with_inputs_and_targets_together(name: str) -> None:
    data = data_of(SOURCES[name]())
    assert data.num_data == ROWS
    assert data.steps_per_epoch == 3
    batches = passed(data)
    assert [len(y) for _, y in batches] == [4, 4, 2]
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert sorted(y.tolist()) == Y.tolist()
    torch.testing.assert_close(x.float(), X[y.long()], rtol=0, atol=0.6 if "random" in name else 1e-6)
    assert not x.requires_grad


@pytest.mark.parametrize("name", SOURCES)
def test_order_is_a_function_of_seed_and_epoch(name: str) -> None:
    data, again = data_of(SOURCES[name]()), data_of(SOURCES[name]())
    first = passed(data, 1, 2)
    torch.rand(3)  # whatever else draws from the global stream is no matter
    assert alike(passed(data, 1, 2), first)
    assert alike(passed(again, 1, 2), first)
    if "loader" not in name or "shuffled" in name or "generator" in name or "sampler" in name or "random" in name:
        assert not alike(passed(data, 1, 3), first)
        assert not alike(passed(data, 2, 2), first)


@pytest.mark.parametrize("name", SOURCES)
def test_skipped_batches_are_those_that_a_resumed_fit_has_seen(name: str) -> None:
    data = data_of(SOURCES[name]())
    whole = passed(data, 5, 1)
    for skip in (0, 1, 2, 3):
        assert alike(passed(data, 5, 1, skip), whole[skip:])


@pytest.mark.parametrize("name", SOURCES)
def test_the_global_generator_and_those_of_the_user_are_unchanged(name: str) -> None:
    source = SOURCES[name]()
    sampler = getattr(source, "sampler", None)
    batch_sampler = getattr(source, "batch_sampler", None)
    holders = [source, sampler, getattr(batch_sampler, "sampler", None)]
    generators = [g for g in (getattr(h, "generator", None) for h in holders) if g is not None]
    before, theirs = torch.get_rng_state(), [g.get_state() for g in generators]
    data = data_of(source)
    iterator = data.batches(0, 0)
    next(iterator)
    assert torch.equal(torch.get_rng_state(), before)  # also in the middle of a pass
    list(iterator)
    list(data.blocks(4))
    data.some(2)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(g.get_state(), state) for g, state in zip(generators, theirs, strict=True))


def test_a_dataset_that_raises_leaves_the_global_generator_unchanged() -> None:
    class Broken(Rows):
        def __getitem__(self, index: int) -> Any:
            torch.rand(2)
            if index == 7:
                raise OSError("row 7 can't be read")
            return super().__getitem__(index)

    for source in (DataLoader(Broken(), 4), Broken()):
        before = torch.get_rng_state()
        with pytest.raises(OSError, match="row 7"):
            passed(data_of(source))
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", [name for name in SOURCES if "loader" not in name])
def test_blocks_are_one_pass_in_order(name: str) -> None:
    y = torch.cat([y for _, y in data_of(SOURCES[name]()).blocks(3)])
    assert y.tolist() == (Y.flip(0) if "backward" in name else Y).tolist()


@given(rows=st.integers(1, 40), size=st.integers(1, 50), seed=st.integers(0, 2**40), epoch=st.integers(0, 5))
def test_any_number_of_rows_in_any_batches_is_covered_once(rows: int, size: int, seed: int, epoch: int) -> None:
    for source in ((torch.arange(rows), torch.arange(rows)), Rows(torch.arange(rows), torch.arange(rows))):
        data = Data.of(source, size)
        batches = passed(data, seed, epoch)
        assert len(batches) == data.steps_per_epoch == -(-rows // min(size, rows))
        assert sorted(torch.cat([y for _, y in batches]).tolist()) == list(range(rows))
        assert {len(y) for _, y in batches[:-1]} <= {min(size, rows)}


@given(rows=st.integers(2, 40), fraction=st.floats(0.01, 0.99), seed=st.integers(0, 9))
def test_a_split_is_two_disjoint_parts_with_a_row_in_each(rows: int, fraction: float, seed: int) -> None:
    early, held = Data.of((torch.arange(rows), torch.arange(rows))).split(fraction, seed)
    assert early.num_data is not None
    assert held.num_data is not None
    assert min(early.num_data, held.num_data) >= 1
    both = [int(y) for part in (early, held) for _, batch in part.blocks(7) for y in batch]
    assert sorted(both) == list(range(rows))


# How many rows there are.


NUMBERS: dict[str, tuple[Callable[[], Any], int, int]] = {
    "the last batch is dropped, another one each time": (
        lambda: DataLoader(Rows(), 4, shuffle=True, drop_last=True),
        10,
        2,
    ),
    "a subset": (lambda: DataLoader(Rows(), 4, sampler=SubsetRandomSampler([1, 3, 5, 7, 9])), 5, 2),
    "a subset in a batch sampler": (
        lambda: DataLoader(Rows(), batch_sampler=BatchSampler(SubsetRandomSampler([1, 3, 5, 7, 9]), 2, False)),
        5,
        3,
    ),
    "a Subset": (lambda: DataLoader(Subset(Rows(), [1, 3, 5]), 2), 3, 2),
    "a list of batches": (lambda: DataLoader(Rows(), batch_sampler=[[0, 1, 2], [3, 4], [5]]), 6, 3),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_the_number_of_rows_is_that_of_the_rows_in_one_pass(name: str) -> None:
    make, rows, steps = NUMBERS[name]
    data = Data.of(make())
    assert (data.num_data, data.steps_per_epoch) == (rows, steps)
    assert len(passed(data)) == steps


def test_holding_out_rows_of_a_loader_stays_within_its_subset() -> None:
    for sampler in (SubsetRandomSampler([5, 6, 7, 8, 9]), [5, 6, 7, 8, 9]):
        early, held = Data.of(DataLoader(Rows(), 2, sampler=sampler)).split(0.4, seed=0)
        rows = [float(v) for part in (early, held) for _, y in part.blocks(8) for v in y]
        assert sorted(rows) == [5.0, 6.0, 7.0, 8.0, 9.0]


def test_the_rows_of_a_batch_sampler_keep_its_batches_when_some_are_held_out() -> None:
    loader = DataLoader(Rows(), batch_sampler=BatchSampler(SequentialSampler(range(ROWS)), 4, False))
    early, held = Data.of(loader).split(0.2, seed=0)
    assert [len(y) for _, y in early.batches(0, 0)] == [4, 4]
    assert held.num_data == 2


def test_the_collate_function_of_a_loader_is_used_when_rows_are_held_out() -> None:
    def collate(items: list[Any]) -> Any:
        x, y = zip(*items, strict=True)
        return torch.stack(x) + 100, torch.stack(y)

    early, _ = Data.of(DataLoader(Rows(), 4, collate_fn=collate)).split(0.2, seed=0)
    assert all(bool((x >= 100).all()) for x, _ in early.batches(0, 0))


def test_a_row_that_is_drawn_eight_times_is_one_row() -> None:
    data = Data.of(DataLoader(Rows(), 4, sampler=WeightedRandomSampler([0.0] * 9 + [1.0], 8)))
    assert data.num_data == 1
    assert Counter(float(v) for _, y in passed(data) for v in y) == {9.0: 8}


def test_without_data_there_is_one_empty_batch() -> None:
    data = Data.of(None)
    assert data.num_data is None
    assert passed(data) == [()]
    assert list(data.blocks(5)) == [()]


def test_several_inputs_stay_in_their_order() -> None:
    data = Data.of((X, X[:, 0].long(), Y), 4)
    for a, b, y in data.batches(0, 0):
        assert torch.equal(a[:, 0], y)
        assert torch.equal(b, y.long())


def test_the_error_about_an_unreadable_part_names_it() -> None:
    with pytest.raises(InputError, match="Part 1 of the data must be numbers"):
        Data.of((X, pd.Series(["a"] * ROWS)))


# Fits from equal data are equal.


def fitted(source: Any, method: Any = None, likelihood: Any = None, **options: Any) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    model = pr.Model(net, likelihood or pr.Gaussian(0.5))
    return pr.fit(model, source, method or pr.MeanField(), progress=False, **({"steps": 7} | options))


def equal(a: Any, b: Any) -> bool:
    return all(torch.equal(a.mean[n], b.mean[n]) for n in a.mean) and all(
        torch.equal(a.history[n], b.history[n]) for n in a.history
    )


@pytest.mark.parametrize("method", [pr.MAP(), pr.MeanField()], ids=["MAP", "MeanField"])
@pytest.mark.parametrize("likelihood", [pr.Gaussian(0.5), pr.Gaussian()], ids=["a given noise", "a learnt noise"])
def test_a_tuple_an_array_and_a_dataset_give_the_same_fit(method: Any, likelihood: Any) -> None:
    first = fitted((X, Y), method, likelihood, batch_size=4)
    assert equal(fitted((X.numpy(), Y.numpy()), method, likelihood, batch_size=4), first)
    assert equal(fitted(TensorDataset(X, Y), method, likelihood, batch_size=4), first)
    assert equal(fitted(Rows(), method, likelihood, batch_size=4), first)
    assert first.num_data == ROWS


@pytest.mark.parametrize("likelihood", [pr.Gaussian(0.5), pr.Gaussian()], ids=["a given noise", "a learnt noise"])
def test_a_loader_of_one_whole_batch_gives_the_fit_of_the_tuple(likelihood: Any) -> None:
    whole = fitted((X, Y), pr.MeanField(), likelihood, batch_size=ROWS)
    assert equal(fitted(DataLoader(Rows(), ROWS), pr.MeanField(), likelihood), whole)


@pytest.mark.parametrize("name", [*LOADERS, "a Dataset of random rows"])
def test_a_fit_from_a_loader_is_reproducible_and_leaves_global_generators_unchanged(name: str) -> None:
    size = {} if "loader" in name else {"batch_size": 4}
    torch.manual_seed(1)
    first = fitted(SOURCES[name](), **size)
    torch.manual_seed(0)
    nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    after_building = torch.get_rng_state()
    second = fitted(SOURCES[name](), **size)
    assert torch.equal(torch.get_rng_state(), after_building)
    assert equal(first, second)


def test_an_unshuffled_loader_gives_the_fit_of_a_hand_written_loop() -> None:
    torch.manual_seed(0)
    net = nn.Linear(2, 1).double()
    x, y = X.double() / 10, Y.double() / 10
    method = pr.MAP(learning_rate=0.05, schedule="constant")
    loader = DataLoader(TensorDataset(x, y), 4)
    posterior = pr.fit(pr.Model(net, pr.Gaussian(0.5), "flat"), loader, method, epochs=2, progress=False)
    hand = copy.deepcopy(net)
    adam = torch.optim.Adam(hand.parameters(), lr=0.05)
    losses = []
    for a, b in [*loader, *loader]:  # 10 rows in batches of 4, 4 and 2, each weighted by its own size
        adam.zero_grad()
        loss = -torch.distributions.Normal(hand(a)[:, 0], 0.5).log_prob(b).sum() * (ROWS / len(b))
        loss.backward()
        adam.step()
        losses.append(float(loss.detach()))
    for name, p in hand.named_parameters():
        torch.testing.assert_close(posterior.mean[name], p.detach(), rtol=0, atol=1e-10)
    torch.testing.assert_close(posterior.history["nll"], torch.tensor(losses, dtype=torch.float64), rtol=1e-12, atol=0)


def test_the_log_likelihood_of_all_batches_averages_to_that_of_the_data() -> None:
    posterior = fitted((X, Y), batch_size=4)
    target, w = posterior.target, posterior.family.loc
    data = Data.of((X, Y), 4)
    whole = target.pointwise(w, (X, Y)).sum()
    weighted = sum(len(b[1]) / ROWS * target.log_likelihood_and_grad(w.clone(), b)[0] for b in data.batches(0, 0))
    torch.testing.assert_close(weighted, whole)
    torch.testing.assert_close(target.log_likelihood(w, data, rows=3), whole)


@pytest.mark.parametrize("size", [3, 4, 7])
def test_the_log_likelihood_of_a_loader_that_drops_rows_is_scaled_to_all_rows(size: int) -> None:
    """Ten copies of one row: whichever are dropped, log p(D | w) is ten times that of one row."""
    x, y = torch.tensor([[0.7, -1.2]]).double().expand(ROWS, -1), torch.full((ROWS,), 0.4).double()
    net = nn.Linear(2, 1).double()
    model = pr.Model(net, pr.Gaussian(0.5))
    data = Data.of(DataLoader(Rows(x, y), size, shuffle=True, drop_last=True)).prepared(model.prepare)
    target = make_target(model, data)
    assert sum(len(batch[0]) for batch in data.batches(0, 0)) == ROWS - ROWS % size  # some rows are missing
    w = torch.tensor([[0.3, -0.8, 0.1], [1.5, 0.2, -0.6]], dtype=torch.float64)
    means = w @ torch.tensor([0.7, -1.2, 1.0], dtype=torch.float32).double()
    wanted = ROWS * torch.distributions.Normal(means, 0.5).log_prob(y[0])
    torch.testing.assert_close(target.log_likelihood(w, data, rows=2), wanted, rtol=0, atol=1e-10)


def test_a_fit_from_a_loader_over_a_subset_reads_only_its_rows() -> None:
    """The other rows are NaN: reading one would raise an error."""
    x, y = X - 7, Y - 7
    x[:5], y[:5] = torch.nan, torch.nan
    for likelihood in (pr.Gaussian(0.5), pr.Gaussian()):
        posterior = fitted(DataLoader(Rows(x, y), 2, sampler=SubsetRandomSampler(range(5, 10))), pr.MAP(), likelihood)
        assert posterior.num_data == 5


def test_data_given_as_one_tensor_are_passed_to_a_density_as_one_tensor() -> None:
    kinds: set[type] = set()

    def log_likelihood(p: dict[str, Tensor], y: Any) -> Tensor:
        kinds.add(type(y))
        return -0.5 * (y - p["a"]).square()

    for source in (Y, Y.numpy(), pd.Series(Y.numpy())):
        model = pr.Density(
            params={"a": pr.Param()}, log_prior=lambda p: -0.5 * p["a"].square(), log_likelihood=log_likelihood
        )
        pr.fit(model, source, pr.MeanField(start=pr.MAP()), steps=3, batch_size=4, progress=False)
    assert kinds == {Tensor}


def test_an_invalid_row_of_a_dataset_is_named_by_its_index_in_any_order() -> None:
    y = Y.clone()
    y[7] = torch.nan
    model = pr.Model(nn.Linear(2, 1), pr.Gaussian(0.5))
    for seed in range(3):
        data = Data.of(Rows(X, y), 4).prepared(model.prepare)
        with pytest.raises(InputError, match=r"targets of the data must be finite, got NaN in row 7"):
            passed(data, seed)
