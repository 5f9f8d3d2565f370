"""Accepted forms of a penalty: functions of tensors, of numbers, of the location only, and of torch."""

import math

import numpy as np
import pytest
import torch

from priory.penalties.equivalence.inputs import as_function

from .cases import d


@pytest.mark.parametrize(
    "r",
    [
        lambda mu, s: mu**2 + 0 * s,
        lambda mu: mu**2,
        lambda mu, s=1.0: mu**2,
        lambda *at: at[0] ** 2,
        lambda mu, s: math.pow(mu, 2),
        lambda mu, s: np.square(np.asarray(mu)),
        lambda mu, s: float(mu) ** 2 if mu > 0 else float(-mu) ** 2,
        torch.square,
    ],
)
def test_every_form_of_a_function_gives_the_same_values_in_the_broadcast_shape(r) -> None:
    mu, s = d([[0.5], [-2.0]]), d([1.0, 2.0, 3.0])
    found = as_function(r, 2)(mu, s)
    assert found.dtype == torch.float64
    assert torch.equal(found, (mu**2).expand(2, 3))


def test_a_constant_penalty_is_expanded_to_the_shape_of_the_inputs() -> None:
    assert as_function(lambda mu, s: 0, 2)(d([1.0, 2.0]), d(1.0)).tolist() == [0.0, 0.0]
