"""Text tables align their columns."""

import pytest

from priory.core.tables import text_table


def test_the_first_column_is_on_the_left_and_numbers_on_the_right():
    assert text_table([["", "mean", "sd"], ["weight", "-1.50", "0.2"], ["b", "10.25", "1.25"]]) == [
        "         mean    sd",
        "weight  -1.50   0.2",
        "b       10.25  1.25",
    ]


def test_the_last_letter_of_the_alignment_serves_for_all_further_columns():
    rows = [["a", "b", "c", "d"], ["11", "22", "33", "44"]]
    assert text_table(rows, "llr")[0] == "a   b    c   d"
    assert text_table(rows, "r")[0] == " a   b   c   d"
    assert text_table(rows, "lrl", gap=1)[0] == "a   b c  d"


def test_a_rule_is_as_wide_as_the_table_and_lines_have_no_trailing_spaces():
    lines = text_table([["name", "note"], ["x", ""], ["y", "long note"]], "l", gap=3, rule=True)
    assert lines == ["name   note", "-" * 16, "x", "y      long note"]


def test_rows_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="argument"):
        text_table([["a", "b"], ["c"]])
