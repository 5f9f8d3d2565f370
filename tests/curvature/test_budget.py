"""Estimates of the memory and time of Laplace, and the error raised when they exceed the limit."""

import pytest
import torch
from torch import nn

import priory as pr
from priory.core.errors import InputError
from priory.curvature.budget import TUNING_UPDATES, Budget, Need, in_bytes
from priory.methods.laplace.laplace import Laplace, Subnetwork

# 784-400-400-10: too large for a dense curvature
WIDE_NET = nn.Sequential(nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 10))
P = 478_410
DATA = (torch.zeros(60, 784), torch.arange(60) % 10)


def wide():
    return pr.Model(WIDE_NET, pr.Categorical())


def test_a_wide_network_is_advised_to_use_kron():
    found = Laplace("full").plan(wide(), DATA)
    assert isinstance(found, Budget)
    assert found.needs["full"].memory == 16 * P**2
    factors = 785**2 + 400**2 + 401**2 + 400**2 + 401**2 + 10**2
    assert found.needs["kron"].memory == 16 * factors + 24 * P
    assert found.needs["last/full"].memory == 16 * 4010**2
    assert found.needs["diag"].memory == 24 * P
    assert not found.fits
    assert found.advice == "kron"
    assert str(found).startswith("kron: 32 MB and the time of ")
    assert str(found).endswith("; use kron.")


def test_fit_raises_before_allocating_more_than_the_limit():
    message = r"must stay under 4\.3 GB, got kron: 32 MB, full: 3\.7 TB, .*last/full: 257 MB; use kron\.$"
    start = pr.MAP()
    with pytest.raises(InputError, match=message):
        pr.fit(wide(), DATA, Laplace("full", at=start), steps=1, progress=False)


def test_a_limit_that_no_structure_fits_is_reported():
    found = Laplace(limit=10).plan(wide(), DATA)
    assert found.advice is None
    with pytest.raises(InputError, match="use fewer coordinates, or a higher limit"):
        found.refuse()


def test_plan_also_serves_the_driver():
    from priory.core.data import Data
    from priory.fitting.prepare import make_target

    model = wide()
    rows = Data.of(DATA).prepared(model.prepare)
    plan = Laplace().plan(make_target(model, rows), rows, 3, 0)
    assert (plan.data, plan.steps) == (rows, 3)
    with pytest.raises(InputError, match=r"'target' argument of plan must be a Model or a Density, got Linear"):
        Laplace().plan(nn.Linear(1, 1), DATA)


def test_data_that_do_not_fit_the_network_are_refused():
    with pytest.raises(InputError, match="'data' argument of plan must be inputs and targets"):
        Laplace().plan(wide(), None)
    with pytest.raises(InputError, match="The network must take the inputs"):
        Laplace().plan(wide(), (torch.zeros(5, 3), torch.arange(5)))


def test_time_is_counted_in_epochs_of_training():
    model, rows = wide(), 60
    found = Laplace("diag").plan(model, DATA).needs
    # Forward pass 2, ten backward passes 20, ten products of squares 20; one row of a training epoch costs 6.
    assert found["diag"].epochs == pytest.approx((2 + 20 + 20) / 6)
    work = 6 * rows * (P)
    assert found["full"].epochs == pytest.approx((2 + 20) / 6 + (2 * rows * 10 * P**2 + P**3 / 3) / work)
    sampled = Laplace("diag", curvature="fisher").plan(model, DATA).needs
    assert sampled["diag"].epochs == pytest.approx((2 + 2 + 2) / 6)
    assert Laplace("diag", curvature="empirical").plan(model, DATA).needs["diag"] == sampled["diag"]
    hessian = Laplace("full", curvature="hessian").plan(model, DATA).needs
    assert hessian["full"].epochs > 2 * P


def test_tuning_counts_a_factorisation_and_variances_per_update():
    model, work = wide(), 6 * 60 * P
    plain, tuned = (Laplace("full", tune=by).plan(model, DATA).needs for by in (None, "layer"))
    assert tuned["full"].epochs - plain["full"].epochs == pytest.approx(TUNING_UPDATES * 4 * P**3 / 3 / work)
    assert tuned["full"].memory == 2 * plain["full"].memory
    assert tuned["lowrank"].epochs - plain["lowrank"].epochs == pytest.approx(TUNING_UPDATES * 6 * P * 74**2 / work)
    assert tuned["diag"] == plain["diag"]
    learnt = pr.Model(nn.Linear(3, 1), pr.Gaussian())  # its noise is also set by the evidence
    data = (torch.zeros(5, 3), torch.zeros(5))
    assert Laplace("full", at="network").plan(learnt, data).needs["full"].memory == 4 * 8 * 16


def test_only_the_selected_part_of_a_network_is_counted():
    found = Laplace("full", over="last").plan(wide(), DATA)
    assert found.chosen == "last/full"
    assert found.needs[found.chosen].memory == 16 * 4010**2
    assert found.fits
    chosen = Laplace(over=Subnetwork(100)).plan(wide(), DATA)
    assert chosen.needs["subnetwork/full"].memory == 16 * 100**2
    assert chosen.needs["subnetwork/full"].epochs > chosen.needs["diag"].epochs
    named = Laplace("kron", over=["2.*"]).plan(wide(), DATA)
    assert named.needs["selected/kron"].memory == 16 * (401**2 + 400**2) + 24 * 401 * 400
    low = Laplace("lowrank", rank=5).plan(wide(), DATA)
    assert low.needs["lowrank"].memory == 24 * P * 15


def test_convolutions_embeddings_and_norms_have_the_right_factor_shapes():
    net = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.Flatten(), nn.LayerNorm(96), nn.Linear(96, 3))
    data = (torch.zeros(5, 4, 6, 6), torch.arange(5) % 3)
    kron = Laplace().plan(pr.Model(net, pr.Categorical()), data).needs["kron"]
    size = sum(p.numel() for p in net.parameters())
    convolution, norm, last = 2 * (19**2 + 3**2), 192**2, 97**2 + 3**2
    assert kron.memory == 16 * (convolution + norm + last) + 24 * size
    words = nn.Sequential(nn.Embedding(50, 8), nn.Flatten(), nn.Linear(24, 3))
    data = (torch.zeros(5, 3, dtype=torch.long), torch.arange(5) % 3)
    kron = Laplace().plan(pr.Model(words, pr.Categorical()), data).needs["kron"]
    assert kron.memory == 16 * (8**2 + 1 + 25**2 + 3**2) + 24 * (400 + 75)


def test_the_time_of_a_convolution_is_proportional_to_its_positions():
    times = []
    for side in (6, 10):
        net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 3))
        data = (torch.zeros(5, 1, side, side), torch.arange(5) % 3)
        times.append(Laplace().plan(pr.Model(net, pr.Categorical()), data).needs["kron"].epochs)
    assert times[0] != times[1]


def test_a_network_without_a_unique_last_layer_isnt_advised_to_use_it():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(2, 3), nn.Linear(2, 3)

        def forward(self, x):
            return self.one(x) + self.two(x)

    found = Laplace().plan(pr.Model(Two(), pr.Categorical()), (torch.zeros(4, 2), torch.arange(4) % 3))
    assert "last/full" not in found.needs


@pytest.mark.parametrize(
    ("count", "formatted"),
    [(0, "0 bytes"), (999, "999 bytes"), (1500, "1.5 kB"), (32e6, "32 MB"), (3.66e12, "3.7 TB"), (7e18, "7,000 PB")],
)
def test_bytes_are_formatted_with_units(count, formatted):
    assert in_bytes(count) == formatted


def test_an_estimate_prints_memory_and_time():
    assert str(Need(12_345_678, 3.21)) == "12 MB and the time of 3.2 epochs"
