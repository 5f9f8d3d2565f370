"""The text form of a method."""

import pytest

import priory as pr
from priory.fitting.identity import repr_of


@pytest.mark.parametrize(
    ("method", "text"),
    [
        (pr.Ensemble(pr.MeanField()), "Ensemble(method=MeanField())"),
        (pr.Ensemble(pr.MAP(learning_rate=0.1), 3), "Ensemble(method=MAP(learning_rate=0.1), size=3)"),
        (pr.Laplace(at=pr.MAP()), "Laplace(at=MAP())"),
        (pr.NUTS(start=pr.Pathfinder(paths=2)), "NUTS(start=Pathfinder(paths=2))"),
    ],
)
def test_the_text_of_a_method_leaves_out_the_defaults_of_the_method_inside_it(method, text):
    assert repr_of(method) == text
