"""Sequences of unequal length as one tensor."""

import pytest
import torch

from priory.core.errors import InputError
from priory.latent.sequences import lengths, padded, seen

NAN = float("nan")


def test_padding_ends_short_sequences_with_nan():
    rows = padded([torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, NAN]])])
    expected = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[5.0, NAN], [NAN, NAN]]])
    torch.testing.assert_close(rows, expected, equal_nan=True)
    assert padded([[1, 2], [3]]).dtype == torch.float64


def test_a_sequence_ends_at_its_last_value_and_missing_values_before_it_count():
    y = torch.tensor([[1.0, NAN, 2.0, NAN], [NAN, NAN, NAN, NAN], [1.0, 1.0, 1.0, 1.0]])
    assert seen(y).tolist() == [[True, False, True, False], [False] * 4, [True] * 4]
    assert lengths(seen(y)).tolist() == [3, 0, 4]
    both = torch.stack([y, y.roll(1, 1)], 2)
    assert lengths(seen(both)).tolist() == [4, 0, 4]
    assert bool(seen(y[2:]).all())


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([], "The 'data' argument of fit must have at least one sequence, got none."),
        ([torch.ones(2, 1), torch.ones(2, 2)], "the same D in all"),
        ([torch.ones(2, 1, 1)], "be sequences of the shape (T,) or (T, D)"),
        (["words"], "Sequence 0 of the data must be numbers"),
        ([torch.tensor(1.0)], "Sequence 0 of the data must have rows"),
    ],
)
def test_invalid_sequences_raise_an_error(sequences, message):
    with pytest.raises(InputError) as caught:
        padded(sequences)
    assert message in str(caught.value)
