"""Tables from files and from scikit-learn: what is read, what is left out and said so, what is refused."""

from pathlib import Path

import pytest
import torch
from sklearn import datasets

from priory.cli.tables import SHIPPED, read_table
from priory.errors import InputError


def write(folder: Path, text: str) -> str:
    path = folder / "table.csv"
    path.write_text(text, encoding="utf-8")
    return str(path)


NUMBERS = "a,b,y\n1,2.5,0.1\n2,1.5,0.7\n3,0.5,1.9\n4,0.25,2.5\n5,0.75,3.5\n6,8,4.5\n"


def test_the_last_column_is_the_target_unless_one_is_named(tmp_path: Path) -> None:
    table = read_table(write(tmp_path, NUMBERS))
    assert (table.target, table.columns, table.classes) == ("y", ["a", "b"], None)
    assert table.x[0].tolist() == [1.0, 2.5]
    assert table.y.tolist() == [0.1, 0.7, 1.9, 2.5, 3.5, 4.5]
    other = read_table(write(tmp_path, NUMBERS), target="b")
    assert (other.target, other.columns) == ("b", ["a", "y"])


@pytest.mark.parametrize("separator", [";", "\t"])
def test_semicolons_and_tabs_part_columns_too(tmp_path: Path, separator: str) -> None:
    table = read_table(write(tmp_path, NUMBERS.replace(",", separator)))
    assert torch.equal(table.x, read_table(write(tmp_path, NUMBERS)).x)


def test_text_becomes_columns_of_zero_and_one(tmp_path: Path) -> None:
    rows = [
        "red,left,1,0.1",
        "green,right,2,0.2",
        "blue,left,3,0.3",
        "red,right,4,0.4",
        "blue,left,5,0.5",
        "red,left,6,0.6",
    ]
    text = "\n".join(["kind,side,a,y", *rows])
    table = read_table(write(tmp_path, text))
    assert table.columns == ["kind=blue", "kind=green", "kind=red", "side=right", "a"]
    assert table.x[0].tolist() == [0, 0, 1, 0, 1]
    assert len(table.notes) == 2


def test_rows_with_missing_or_infinite_values_are_left_out_and_counted(tmp_path: Path) -> None:
    table = read_table(write(tmp_path, NUMBERS + "7,,5.5\n8,inf,6.5\n"))
    assert len(table.x) == 6
    assert table.notes == ["2 of 8 rows have missing or infinite values and were left out."]


def test_constant_columns_and_names_are_left_out_and_said_so(tmp_path: Path) -> None:
    rows = "\n".join(f"1,name{k},{k % 7},{k / 7}" for k in range(60))
    table = read_table(write(tmp_path, f"one,name,a,y\n{rows}\n"))
    assert table.columns == ["a"]
    assert "'one' is constant" in table.notes[0]
    assert "'name' holds 60 different texts" in table.notes[1]


def test_text_that_is_different_in_most_rows_is_left_out(tmp_path: Path) -> None:
    text = "when,a,y\n" + "".join(f"2024-01-0{k},{k},{k / 7}\n" for k in range(1, 9))
    assert read_table(write(tmp_path, text)).columns == ["a"]


def test_the_target_decides_the_task(tmp_path: Path) -> None:
    amounts = "a,y\n" + "".join(f"{k},{k / 3}\n" for k in range(20))
    few = "a,y\n" + "".join(f"{k},{k % 3 + 4}\n" for k in range(20))
    words = "a,y\n" + "".join(f"{k},{'no' if k % 2 else 'yes'}\n" for k in range(20))
    assert read_table(write(tmp_path, amounts)).classes is None
    classes = read_table(write(tmp_path, few))
    assert classes.classes == ["4", "5", "6"]
    assert classes.y.tolist()[:4] == [0, 1, 2, 0]
    assert "--task regression" in classes.notes[0]
    assert read_table(write(tmp_path, few), task="regression").classes is None
    assert read_table(write(tmp_path, words)).classes == ["no", "yes"]


@pytest.mark.parametrize("name", SHIPPED)
def test_data_sets_that_ship_with_scikit_learn_are_known_by_name(name: str) -> None:
    table, bunch = read_table(name), getattr(datasets, f"load_{name}")()
    assert len(table.x) == len(bunch.data)
    assert (table.classes is None) == (name == "diabetes")
    if table.classes is not None:
        assert len(table.classes) == len(set(bunch.target))
    assert table.x.isfinite().all()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", r"table.csv is empty: it must have a line of column names"),
        ("a,b,y\n", r"must have rows below its line of column names"),
        ("y\n1\n2\n3\n4\n5\n", r"must have a target and at least one other column"),
        (
            "a,y\n1,2\n2,2\n3,2\n4,2\n5,2\n6,2\n",
            r"must take at least two values\. Got the constant column 'y'",
        ),
        ("a,y\n1,1.5\n1,2.5\n1,3.5\n1,4.5\n1,5.5\n", r"at least one column that varies"),
        ("a,y\n,1\n,2\n,3\n", r"have rows with no value missing \(see column 'a'\)"),
        ("a,y\n1,2.5\n2,3.5\n", r"at least 5 complete rows"),
        ('a,y\n1,2\n"3,4\n', r"can't be read as CSV"),
    ],
)
def test_a_file_that_can_not_be_used_gets_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        read_table(write(tmp_path, text))


def test_a_missing_file_an_unknown_column_and_a_wrong_task_get_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"must be the path of a CSV file, or one of diabetes, .*Got 'none.csv'"):
        read_table("none.csv")
    with pytest.raises(InputError, match=r"must be a column of .*\(a, b, y\)\. Got 'z' instead"):
        read_table(write(tmp_path, NUMBERS), target="z")
    with pytest.raises(InputError, match="be auto, regression or classification"):
        read_table("iris", task="ranking")
    with pytest.raises(InputError, match="be a column of numbers for regression"):
        read_table("iris", task="regression")
    with pytest.raises(InputError, match="repeat its classes"):
        read_table("diabetes", task="classification")


def test_bytes_that_are_no_text_get_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(b"a,y\n\xff\xfe,1\n")
    with pytest.raises(InputError, match="can't be read as CSV"):
        read_table(str(path))
