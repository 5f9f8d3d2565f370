"""Location-scale families: entropies, moments and expectations, against torch and scipy."""

from itertools import pairwise

import pytest
import torch
from scipy import integrate

from priory.core.errors import InputError
from priory.penalties.equivalence.families import FAMILIES, check_family

F64 = torch.float64


@pytest.mark.parametrize("name", FAMILIES)
def test_the_entropy_and_the_mean_match_those_of_the_distribution(name: str) -> None:
    family = FAMILIES[name]
    scale = torch.tensor([0.3, 2.0], dtype=F64)
    member = family.member(torch.zeros_like(scale), scale)
    assert torch.allclose(family.entropy(scale), member.entropy(), atol=1e-14)
    assert torch.allclose(family.mean * scale, member.mean, atol=1e-14)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_quadrature_integrates_the_density_and_its_first_two_moments(name: str) -> None:
    family = FAMILIES[name]
    z, weights = family.quadrature
    member = family.member(torch.zeros((), dtype=F64), torch.ones((), dtype=F64))
    assert float(weights.sum()) == pytest.approx(1, abs=1e-13)
    assert float(weights @ z) == pytest.approx(float(member.mean), abs=1e-12)
    assert float(weights @ (z - member.mean) ** 2) == pytest.approx(float(member.variance), abs=1e-11)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("loc", [0.0, 0.31, 50.0])
def test_expectations_of_functions_with_a_corner_match_scipy(name: str, loc: float) -> None:
    family, scale, corner = FAMILIES[name], 0.8, 0.2
    found = family.expectation(
        lambda w: (w - corner).abs() ** 1.5, torch.tensor(loc, dtype=F64), torch.tensor(scale, dtype=F64), [corner]
    )

    def integrand(z: float) -> float:
        return abs(loc + scale * z - corner) ** 1.5 * float(family.density(torch.tensor(z, dtype=F64)))

    marks = sorted({family.edges[0], 0.0, (corner - loc) / scale, family.edges[-1]})
    marks = [m for m in marks if family.edges[0] <= m <= family.edges[-1]]
    pieces = [integrate.quad(integrand, a, b, epsabs=1e-13, limit=200)[0] for a, b in pairwise(marks)]
    assert float(found) == pytest.approx(sum(pieces), rel=1e-10)


def test_locations_near_and_far_from_a_corner_can_share_a_batch() -> None:
    family = FAMILIES["gaussian"]
    loc, scale = torch.tensor([[0.1, 30.0], [-40.0, 2.0]], dtype=F64), torch.full((2, 2), 0.5, dtype=F64)
    found = family.expectation(torch.abs, loc, scale, [0.0])
    x = loc / scale
    exact = scale * (2 / torch.pi) ** 0.5 * torch.exp(-(x**2) / 2) + loc * torch.erf(x / 2**0.5)
    assert torch.allclose(found, exact, rtol=1e-12)


def test_an_unknown_family_is_rejected_with_the_list_of_known_names() -> None:
    with pytest.raises(
        InputError, match=r"The 'family' argument of here must be one of gaussian, laplace.*got 'cauchy'"
    ):
        check_family("cauchy", "here")
