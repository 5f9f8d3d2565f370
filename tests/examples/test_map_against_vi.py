"""The terms of the two objectives are those of the library, and each fit ends at its own minimum."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.distributions import Bernoulli, Normal, kl_divergence
from torch.nn.functional import softplus

import priory as pr


@pytest.fixture(scope="module")
def example(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("map_against_vi")


@pytest.fixture(scope="module")
def fitted(example: ModuleType):
    return example.fitted()


def test_the_loss_is_minus_the_log_likelihood(example: ModuleType):
    x, y = example.data()
    w = torch.tensor([-0.7, 2.0], dtype=torch.float64)
    exact = -Bernoulli(logits=w[:, None] * x[:, 0]).log_prob(y).sum(-1)
    torch.testing.assert_close(example.loss(w), exact, rtol=0, atol=1e-10)


def test_without_its_penalty_the_loss_falls_for_ever(example: ModuleType):
    values = example.loss(torch.tensor([1.0, 10.0, 100.0, 1000.0], dtype=torch.float64))
    assert values.diff().max() < 0


def test_the_terms_in_m_and_s_are_the_divergence_up_to_its_constant(example: ModuleType):
    m, s = (torch.tensor(v, dtype=torch.float64) for v in ([0.3, 2.0], [0.5, 3.0]))
    terms = example.vi_terms(m, s)
    found = example.total({name: value for name, value in terms.items() if name != "E loss"})
    zero, scale = torch.zeros((), dtype=torch.float64), torch.tensor(example.PRECISION).double().rsqrt()
    constant = 0.5 + 0.5 * torch.tensor(example.PRECISION).double().log()
    exact = kl_divergence(Normal(m, s), Normal(zero, scale))
    torch.testing.assert_close(found - constant, exact, rtol=0, atol=1e-12)


def test_the_expected_loss_is_the_integral(example: ModuleType):
    integrate = pytest.importorskip("scipy.integrate")
    m, s = (torch.tensor(v, dtype=torch.float64) for v in (1.3, 0.9))
    x, y = example.data()
    margin = (2 * y - 1) * x[:, 0]

    def integrand(w: float) -> float:
        at = torch.tensor(w, dtype=torch.float64)
        return (Normal(m, s).log_prob(at).exp() * softplus(-at * margin).sum()).item()

    exact = integrate.quad(integrand, 1.3 - 9, 1.3 + 9)[0]
    assert example.vi_terms(m, s)["E loss"].item() == pytest.approx(exact, abs=1e-8)


def test_at_the_minima_the_slopes_are_zero(example: ModuleType):
    w, q = example.minima()
    assert abs(torch.func.grad(lambda v: example.total(example.map_terms(v)))(w).item()) < 1e-10
    assert torch.func.grad(lambda v: example.total(example.vi_terms(v[0], v[1])))(q).abs().max() < 1e-10
    assert q[0] > w + 0.3  # the loss is steeper below than above, so that its mean over q is lowest further up
    assert q[1] < example.PRECISION**-0.5


def test_the_fits_end_at_the_minima(example: ModuleType, fitted):
    (w, q), (w_fit, q_fit) = example.minima(), fitted
    assert w_fit.item() == pytest.approx(w.item(), abs=1e-3)
    assert q_fit.tolist() == pytest.approx(q.tolist(), abs=0.06)  # a twentieth of s


def test_the_loss_that_map_reports_is_the_sum_of_its_terms(example: ModuleType):
    model = example.model()
    history = pr.fit(model, example.data(), pr.MAP(), steps=1, progress=False).history
    zero = torch.zeros((), dtype=torch.float64)
    assert history["nll"][0].item() == pytest.approx(example.map_terms(zero)["loss(w)"].item(), abs=1e-10)


def test_the_script_prints_the_terms_and_draws_them(
    example: ModuleType,
    fitted,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(example, "fitted", lambda: fitted)
    example.main(tmp_path)
    printed = capsys.readouterr().out
    assert "MAP minimises at w = 2.1650" in printed
    assert "VI minimises at m = 2.5411, s = 1.2045" in printed
    assert 5_000 < (tmp_path / "map_against_vi.png").stat().st_size < 80_000
