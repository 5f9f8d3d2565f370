"""Base class of latent models: a user's model, Fisher's identity, statistics over batches and checks of data."""

import pytest
import torch
from torch import Tensor
from torch.distributions import constraints
from torch.utils.data import DataLoader, Dataset, TensorDataset

from priory.core.data import Data
from priory.core.errors import DivergedError, InputError
from priory.core.flat import Param
from priory.core.streams import stream
from priory.latent import Expectation, GaussianMixture, Latent, PoissonMixture, Rows, expect, score
from priory.latent.base import Theta
from priory.methods.em.em import EM

# A user's model, zero-inflated Poisson: a count is zero with probability `off`, and Poisson otherwise.


class ZeroInflated(Latent):
    def params(self, *shapes):
        return {"off": Param((), constraints.unit_interval), "rate": Param((), constraints.positive)}

    def e_step(self, theta: Theta, rows: Rows) -> Expectation:
        y = rows["y"]
        on = torch.log1p(-theta["off"]) + y * theta["rate"].log() - theta["rate"] - torch.lgamma(y + 1)
        off = torch.where(y == 0, theta["off"].log(), -torch.inf)
        q = rows.counted(torch.sigmoid(off - on))  # q(row is off)
        left = rows.counted(torch.ones_like(y)) - q
        sums = {"off": q.sum(), "on": left.sum(), "total": (left * y).sum()}
        return Expectation(sums | {"base": -rows.counted(torch.lgamma(y + 1)).sum()}, torch.logaddexp(on, off))

    def complete(self, theta: Theta, statistics) -> Tensor:
        s = statistics
        off, on = s["off"] * theta["off"].log(), s["on"] * (torch.log1p(-theta["off"]) - theta["rate"])
        return off + on + s["total"] * theta["rate"].log() + s["base"]


class WithClosedForm(ZeroInflated):
    def m_step(self, statistics, theta):
        s = statistics
        return {"off": s["off"] / (s["off"] + s["on"]), "rate": s["total"] / s["on"]}


class WrongMStep(ZeroInflated):
    def m_step(self, statistics, theta):
        s = statistics
        return {"off": s["off"] / (s["off"] + s["on"]), "rate": 1.5 * s["total"] / s["on"]}


COUNTS = torch.tensor([0.0] * 12 + [1, 2, 2, 3, 3, 3, 4, 5, 7], dtype=torch.float64)


def test_a_user_model_reaches_the_maximum_with_and_without_a_closed_m_step(fit_by_em):
    for model in (ZeroInflated(), WithClosedForm()):
        posterior = fit_by_em(model, COUNTS, EM(tolerance=1e-14), steps=400)
        off, rate = posterior.mean["off"], posterior.mean["rate"]
        # At the maximum, rate / (1 - exp(-rate)) is the mean of the positive counts and p(0) the fraction of zeros.
        assert float(rate / (1 - (-rate).exp())) == pytest.approx(30 / 9, rel=1e-6)
        assert float(off + (1 - off) * (-rate).exp()) == pytest.approx(12 / 21, rel=1e-6)
        assert float(posterior.history["bound"].diff().min()) > -1e-9


def test_a_wrong_m_step_raises_an_error_that_holds_the_last_good_posterior(fit_by_em):
    with pytest.raises(DivergedError, match=r"bound of EM fell by .* of WrongMStep\(\) don't agree") as caught:
        fit_by_em(WrongMStep(), COUNTS)
    assert set(caught.value.posterior.mean) == {"off", "rate"}


def test_a_gradient_m_step_reaches_the_closed_form():
    model, rows = WithClosedForm().meet(COUNTS)
    theta = {"off": torch.tensor(0.3).double(), "rate": torch.tensor(1.5).double()}
    (found,) = expect(model, [theta], rows.blocks(7))
    closed, by_gradients = model.m_step(found.statistics, theta), ZeroInflated.m_step(model, found.statistics, theta)
    for name in closed:
        torch.testing.assert_close(by_gradients[name], closed[name], rtol=1e-6, atol=1e-8)


def test_fishers_identity_is_the_gradient_of_the_log_likelihood():
    model, rows = ZeroInflated().meet(COUNTS)
    theta = {"off": torch.tensor(0.3).double(), "rate": torch.tensor(1.5).double()}
    u = model.layout.unconstrain(theta).requires_grad_()
    model.log_marginal(model.layout.constrain(u), model.rows((COUNTS,))).sum().backward()
    torch.testing.assert_close(score(model, theta, rows), u.grad, rtol=1e-10, atol=1e-10)


def test_statistics_and_bounds_do_not_depend_on_the_batches(clouds):
    model, rows = GaussianMixture(2).meet(clouds)
    theta = model.begin(model.rows((clouds,)), "k-means++", stream(0, "test"))
    (whole,) = expect(model, [theta], rows.blocks(1000))
    loader = DataLoader(TensorDataset(clouds), batch_size=11)
    for batches in (rows.blocks(7), Data.of(loader).blocks(7), Data.of(RowDataset(clouds)).blocks(50)):
        (parts,) = expect(model, [theta], batches)
        torch.testing.assert_close(parts.bound, whole.bound, rtol=1e-12, atol=0)
        torch.testing.assert_close(parts.statistics["sums"], whole.statistics["sums"], rtol=1e-10, atol=1e-10)


class RowDataset(torch.utils.data.Dataset):
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Tensor:
        return self.x[i]


def test_the_mean_of_scaled_minibatch_statistics_is_that_of_all_rows(clouds):
    model, rows = GaussianMixture(2).meet(clouds)
    theta = model.begin(model.rows((clouds,)), "random", stream(0, "test"))
    (whole,) = expect(model, [theta], rows.blocks(1000))
    parts = [expect(model, [theta], [batch], 4.0)[0] for batch in rows.blocks(30)]
    mean = torch.stack([p.statistics["sums"] for p in parts]).mean(0)
    torch.testing.assert_close(mean, whole.statistics["sums"], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(torch.stack([p.bound for p in parts]).mean(0), whole.bound, rtol=1e-12, atol=0)


def test_meet_returns_a_copy_with_the_dtype_and_shapes_of_the_data(clouds):
    model = GaussianMixture(2)
    single, _ = model.meet(clouds.float())
    double, _ = model.meet(clouds[:, :2])
    assert model.shapes is None
    assert (single.dtype, single.layout["means"].shape) == (torch.float32, (2, 3))
    assert (double.dtype, double.layout["means"].shape) == (torch.float64, (2, 2))
    assert PoissonMixture(2).meet(torch.arange(5))[0].dtype == torch.float64


def test_random_rows_are_all_of_few_rows_and_a_uniform_sample_of_many():
    few = torch.arange(10.0)
    assert torch.equal(Data.of(few).random_rows(10, 4, stream(0, "test"))[0], few)
    (many,) = Data.of(torch.arange(50_000.0)).random_rows(1000, 999, stream(0, "test"))
    assert 850 < len(many) < 1150  # five standard deviations: false alarms below 1e-6
    assert abs(float(many.mean()) - 25_000) < 5 * 50_000 / (12 * 850) ** 0.5


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        (GaussianMixture(2), None, "The 'data' argument of fit must be given to a latent model, got None."),
        (GaussianMixture(2, given="weights"), torch.ones(4, 1), "must have 2 parts: y, weights, got 1."),
        (GaussianMixture(2), (torch.ones(4, 1), torch.ones(4)), "must have 1 part: y, got 2."),
        (GaussianMixture(2), (torch.ones(4, 1), torch.ones(3)), "the same number of rows in each part"),
        (
            GaussianMixture(2),
            torch.tensor([1.0, torch.inf]),
            "be finite, or NaN where a value is missing, got inf in row 1",
        ),
        (
            ZeroInflated(),
            torch.tensor([1.0, torch.nan]),
            "The 'y' argument of ZeroInflated() must be finite, got nan in row 1",
        ),
        (
            GaussianMixture(2, given="weights"),
            (torch.ones(2, 1), torch.tensor([1.0, -1.0])),
            "finite numbers >= 0, got -1",
        ),
        (GaussianMixture(2, given="weights"), (torch.ones(2, 1), torch.zeros(2)), "be above 0 for some row"),
        (GaussianMixture(2, given="z"), (torch.ones(2, 1), torch.tensor([0.0, 1.0])), "be integers, one per row"),
        (GaussianMixture(2, given="z"), (torch.ones(2, 1), torch.tensor([0, 2])), "be from 0 to 1, or -1"),
    ],
)
def test_invalid_data_raise_an_error(model, data, message):
    with pytest.raises(InputError) as caught:
        model.meet(data)
    assert message in str(caught.value)


def test_rows_of_another_shape_than_those_of_meet_are_refused(clouds):
    model, _ = GaussianMixture(2).meet(clouds)
    with pytest.raises(InputError, match=r"must have rows of the shape \(3,\), got the shape \(2,\)"):
        model.meet(clouds[:, :2])


class Table(Dataset[Tensor]):
    def __init__(self, y: Tensor) -> None:
        self.y = y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> Tensor:
        return self.y[index]


def test_data_sets_and_loaders_may_have_missing_values_if_the_model_supports_them(fit_by_em):
    y = torch.randn(40, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y[::3, 0] = torch.nan
    for data in (Table(y), TensorDataset(y), DataLoader(TensorDataset(y), batch_size=7)):
        posterior = fit_by_em(GaussianMixture(2), data, EM(start="random"), steps=5)
        torch.testing.assert_close(posterior.log_likelihood(data), posterior.log_likelihood(y), rtol=1e-12, atol=1e-12)
    whole = fit_by_em(GaussianMixture(2), y, steps=5)
    assert fit_by_em(GaussianMixture(2), Table(y), steps=5).log_evidence == whole.log_evidence
    with pytest.raises(InputError, match=r"must be finite, got NaN in row 0"):
        fit_by_em(ZeroInflated(), Table(y[:, 0]))
    y[5, 1] = torch.inf
    with pytest.raises(InputError, match=r"must be finite, got infinity in row 5"):
        fit_by_em(GaussianMixture(2), Table(y))
