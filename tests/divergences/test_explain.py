"""The Gaussian KL term by term."""

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Independent, Laplace, Normal

import priory as pr
from priory.divergences import explain_kl


def double(value: object) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def test_the_terms_are_those_of_the_formula_and_add_up_to_the_divergence() -> None:
    q, p = Normal(double(0.5), double(0.2)), Normal(double(-1.0), double(3.0))
    terms = explain_kl(q, p)
    assert terms.log_scales == pytest.approx(math.log(3 / 0.2))
    assert terms.variance == pytest.approx(0.04 / 18)
    assert terms.mean == pytest.approx(2.25 / 18)
    assert terms.constant == -0.5
    assert terms.total == pytest.approx(float(pr.kl(q, p)), abs=1e-12)


def test_factorised_gaussians_are_summed_by_term() -> None:
    q = Independent(Normal(torch.zeros(2, 3).double(), double([0.5, 1.0, 2.0])), 1)
    p = Independent(Normal(torch.ones(3).double(), double(2.0)), 1)
    terms = explain_kl(q, p)
    assert terms.entries == 6
    assert terms.constant == -3
    assert terms.mean == pytest.approx(6 / 8)
    assert terms.total == pytest.approx(float(pr.kl(q, p).value.sum()), abs=1e-12)
    assert "summed over 6 entries" in str(terms)


def test_every_term_is_printed_with_its_formula_and_an_explanation() -> None:
    text = str(explain_kl(Normal(0.0, 1.0), Normal(1.0, 2.0)))
    for words in (
        "log(s_p / s_q)",
        "s_q^2 / (2 s_p^2)",
        "(m_q - m_p)^2 / (2 s_p^2)",
        "-1/2",
        "0.443147",
        "keeps q wide",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("sides", "sentence"),
    [
        (
            (Laplace(0.0, 1.0), Normal(0.0, 1.0)),
            "The 'q' argument of explain_kl must be a Normal, or an Independent of one",
        ),
        ((Normal(0.0, 1.0), 2.0), "The 'p' argument of explain_kl must be a Normal"),
        (
            (Normal(0.0, 1.0), Independent(Normal(torch.zeros(2), 1.0), 1)),
            "The 'p' argument of explain_kl must have the same event shape as q",
        ),
    ],
)
def test_distributions_other_than_gaussians_raise_an_error(sides: tuple[object, object], sentence: str) -> None:
    with pytest.raises(pr.InputError, match=sentence):
        explain_kl(*sides)
