"""The Fisher information in a network's outputs, as roots, and the score: against autograd and quadrature."""

import math

import numpy as np
import pytest
import torch
from scipy.special import gammaln
from torch import Tensor
from torch.func import jacrev

import priory as pr
from priory.core.streams import stream
from priory.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Poisson, StudentT
from priory.testing import assert_covariance_close

ROWS = 3
DF = 4.5
EXACT = {"rtol": 0, "atol": 1e-10}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


Case = tuple[Likelihood, Tensor, dict[str, Tensor]]
NOISE = torch.tensor([0.5, 0.9, 1.7], dtype=torch.float64)

# Likelihoods whose second derivative does not depend on y. Outputs are (n, *rest).
CANONICAL: dict[str, Case] = {
    "gaussian": (Gaussian(0.7), normal(ROWS), {}),
    "gaussian, one noise per output": (Gaussian(NOISE), normal(ROWS, 2, 3), {}),
    "gaussian, learnt": (Gaussian(), normal(ROWS, 2), {"noise": NOISE[0]}),
    "gaussian, learnt an output": (Gaussian(outputs=3), normal(ROWS, 3), {"noise": NOISE}),
    "bernoulli": (Bernoulli(), normal(ROWS), {}),
    "bernoulli, several": (Bernoulli(), 2 * normal(ROWS, 4), {}),
    "poisson": (Poisson(), normal(ROWS), {}),
    "poisson, an image": (Poisson(), normal(ROWS, 1, 2, 2), {}),
    "categorical": (Categorical(), normal(ROWS, 4), {}),
    "categorical, a signal": (Categorical(), normal(ROWS, 3, 2), {}),
    "categorical, an image": (Categorical(), 2 * normal(ROWS, 2, 3, 4), {}),
}
# Likelihoods whose second derivative depends on y: only its expectation is minus the Fisher information.
EXPECTED: dict[str, Case] = {
    "gaussian, network": (Gaussian("network"), normal(ROWS, 2), {}),
    "gaussian, network, several": (Gaussian("network"), normal(ROWS, 3, 2), {}),
    "student": (StudentT(DF, 0.7), normal(ROWS), {}),
    "student, learnt an output": (StudentT(DF, outputs=3), normal(ROWS, 3), {"scale": NOISE}),
    "student, network": (StudentT(DF, "network"), normal(ROWS, 2), {}),
    "student, network, several": (StudentT(DF, "network"), normal(ROWS, 3, 2), {}),
}
ALL = CANONICAL | EXPECTED


def observed(case: Case, targets: Tensor) -> Tensor:
    """Minus the second derivative at each datum by autograd, (n, C, C)."""
    likelihood, outputs, learnt = case

    def one(f: Tensor, y: Tensor) -> Tensor:
        return likelihood.log_prob(f[None], y[None], learnt).sum()

    size = outputs[0].numel()
    return torch.stack([-jacrev(jacrev(one))(f, y).reshape(size, size) for f, y in zip(outputs, targets, strict=True)])


def information(case: Case) -> Tensor:
    """What the roots add up to, (n, C, C)."""
    likelihood, outputs, learnt = case
    columns = likelihood.roots(outputs, learnt)
    assert columns.shape == (outputs[0].numel(), *outputs.shape)
    flat = columns.flatten(2) if columns.ndim > 2 else columns[..., None]
    return torch.einsum("cni,cnj->nij", flat, flat)


def standard_nodes(likelihood: Likelihood) -> tuple[np.ndarray, np.ndarray]:
    """A quadrature for y's distribution at location 0 and scale 1."""
    if isinstance(likelihood, Gaussian):
        nodes, weights = np.polynomial.hermite_e.hermegauss(20)
        return nodes, weights / math.sqrt(2 * math.pi)
    angles, weights = np.polynomial.legendre.leggauss(60)
    angles, weights = angles * math.pi / 2, weights * math.pi / 2
    constant = math.exp(gammaln((DF + 1) / 2) - gammaln(DF / 2)) / math.sqrt(math.pi)
    return math.sqrt(DF) * np.tan(angles), constant * weights * np.cos(angles) ** (DF - 1)


@pytest.mark.parametrize("name", CANONICAL)
def test_the_roots_add_up_to_minus_the_second_derivative_for_every_y(name: str) -> None:
    likelihood, outputs, learnt = case = CANONICAL[name]
    for seed in range(2):
        targets = likelihood.draw(outputs, learnt, stream(seed, "y"))
        torch.testing.assert_close(information(case), observed(case, targets), **EXACT)


@pytest.mark.parametrize("name", ALL)
def test_canonical_is_true_where_the_second_derivative_does_not_depend_on_y(name: str) -> None:
    likelihood, outputs, learnt = case = ALL[name]
    one, other = (observed(case, likelihood.draw(outputs, learnt, stream(seed, "y"))) for seed in (0, 1))
    assert torch.allclose(one, other, **EXACT) == likelihood.canonical


@pytest.mark.parametrize("name", EXPECTED)
def test_the_roots_add_up_to_the_expected_second_derivative_by_quadrature(name: str) -> None:
    likelihood, outputs, learnt = case = EXPECTED[name]
    location, scale = likelihood.location_and_scale(outputs, learnt)  # pyright: ignore[reportAttributeAccessIssue]
    expected = torch.zeros_like(information(case))
    # Outputs are independent, so all of them can share the quadrature points.
    for z, weight in zip(*standard_nodes(likelihood), strict=True):
        expected += weight * observed(case, location + z * scale)
    torch.testing.assert_close(information(case), expected, **EXACT)


@pytest.mark.parametrize("name", ["categorical", "bernoulli", "poisson"])
def test_the_roots_add_up_to_the_second_moment_of_the_score(name: str) -> None:
    likelihood, outputs, learnt = case = CANONICAL[name]
    labels = torch.arange({"categorical": 4, "bernoulli": 2, "poisson": 80}[name])
    expected = torch.zeros_like(information(case))
    for label in labels:
        y = label.expand(ROWS) if name == "categorical" else label.expand(ROWS).double()
        p = likelihood.log_prob(outputs, y, learnt).exp()
        s = likelihood.score(outputs, y, learnt).reshape(ROWS, -1)
        expected += torch.einsum("n,ni,nj->nij", p, s, s)
    torch.testing.assert_close(information(case), expected, **EXACT)


@pytest.mark.parametrize("name", ["gaussian, network", "student, network", "categorical", "bernoulli", "poisson"])
def test_the_score_at_drawn_targets_has_the_information_as_its_covariance(name: str) -> None:
    likelihood, outputs, learnt = case = ALL[name]
    draws = 1000  # 5 cases of at most 3 x 10 comparisons, at five standard errors: false alarm below 1e-4
    many = outputs.expand(draws, *outputs.shape)
    own = {key: value.expand(draws, *value.shape) for key, value in learnt.items()}
    targets = likelihood.draw(many, own, stream(0, "y"))
    scores = torch.stack([likelihood.score(outputs, y, learnt) for y in targets]).reshape(draws, ROWS, -1)
    for row in range(ROWS):
        assert_covariance_close(scores[:, row], information(case)[row])


def test_the_scores_agree_with_their_formulas() -> None:
    f = normal(ROWS, 3)
    y = torch.tensor([2, 0, 1])
    one_hot = torch.nn.functional.one_hot(y, 3).double()
    torch.testing.assert_close(Categorical().score(f, y, {}), one_hot - f.softmax(-1), **EXACT)
    torch.testing.assert_close(Bernoulli().score(f, one_hot, {}), one_hot - f.sigmoid(), **EXACT)
    torch.testing.assert_close(Poisson().score(f, one_hot, {}), one_hot - f.exp(), **EXACT)
    torch.testing.assert_close(Gaussian(NOISE).score(f, one_hot, {}), (one_hot - f) / NOISE.square(), **EXACT)


def test_a_score_works_without_gradient_mode_and_needs_no_gradient_itself() -> None:
    f, y = normal(ROWS), torch.ones(ROWS, dtype=torch.float64)
    with torch.no_grad():
        s = Bernoulli().score(f, y, {})
    assert not s.requires_grad
    assert not f.requires_grad
    assert f.grad is None


@pytest.mark.parametrize("name", ALL)
def test_roots_and_scores_keep_single_precision(name: str) -> None:
    likelihood, outputs, learnt = ALL[name]
    single, own = outputs.float(), {key: value.float() for key, value in learnt.items()}
    columns = likelihood.roots(single, own)
    assert columns.dtype == torch.float32
    torch.testing.assert_close(columns.double(), likelihood.roots(outputs, learnt), rtol=1e-5, atol=1e-5)
    y = likelihood.draw(single, own, stream(0, "y"))
    assert likelihood.score(single, y, own).dtype == torch.float32


def test_roots_stay_finite_at_large_logits() -> None:
    for likelihood, outputs in ((Bernoulli(), torch.tensor([800.0, -800.0])), (Categorical(), normal(2, 3) * 1e3)):
        assert bool(torch.isfinite(likelihood.roots(outputs, {})).all())


def test_a_likelihood_without_roots_raises_an_error() -> None:
    class Own(Bernoulli):
        roots = Likelihood.roots

    with pytest.raises(pr.InputError, match="Own does not define the Fisher information of its outputs"):
        Own().roots(normal(3), {})
