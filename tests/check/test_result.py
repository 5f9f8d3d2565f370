"""The verdict of a check follows from its items."""

import json

import pytest

import priory as pr
from priory.check.result import Check, Item, judged, unknown, verdict_of


def item(good, against="spread", decisive=True, finding="The value is off."):
    return judged("value", "model", 1.0, good, "below 2", finding, "do this", against=against, decisive=decisive)


PASSED, NARROW, WRONG = item(True), item(False), item(False, "mean", finding="The mean is off.")
UNKNOWN = unknown("k-hat", "approximation", "below 0.7", "The data are missing.")


@pytest.mark.parametrize(
    ("items", "begins"),
    [
        ([PASSED], "Believe it: "),
        ([PASSED, UNKNOWN], "Believe it: "),
        ([PASSED, NARROW], "Believe the mean, not the spread: the value is off."),
        ([NARROW, WRONG, PASSED], "Believe nothing: the mean is off."),
        ([item(True, decisive=False)], "Cannot tell, because nothing outside"),
        ([item(True, decisive=False), UNKNOWN], "Cannot tell, because the data are missing."),
        ([], "Cannot tell, because "),
    ],
)
def test_the_verdict_is_one_of_four_sentences(items, begins):
    assert verdict_of(items).startswith(begins)


def test_findings_beyond_two_are_counted():
    assert verdict_of([NARROW] * 3).endswith("1 more item fails.")
    assert verdict_of([NARROW] * 5).endswith("3 more items fail.")


def test_a_check_is_a_table_a_dict_and_a_lookup():
    check = Check((PASSED, UNKNOWN, WRONG), "MeanField, 5 rows")
    lines = str(check).split("\n")
    assert lines[0] == "Check of MeanField, 5 rows"
    assert lines[1].split() == ["item", "value", "threshold", "verdict", "what", "to", "do"]
    assert lines[-1] == check.verdict
    assert "do this" in str(check)
    found = json.loads(json.dumps(check.to_dict()))
    assert found["verdict"] == check.verdict
    assert [i["verdict"] for i in found["items"]] == ["passed", "not known", "failed"]
    assert check["k-hat"] is UNKNOWN
    assert "k-hat" in check
    assert check.failures == (WRONG,)
    assert "<table>" in check._repr_html_()
    with pytest.raises(pr.InputError, match="The 'name' argument of Check must be among value, k-hat"):
        check["R-hat"]


def test_an_infinite_value_is_json():
    text = json.dumps(Item("k-hat", "approximation", float("-inf"), "below 0.7", "passed").to_dict(), allow_nan=False)
    assert '"-inf"' in text
