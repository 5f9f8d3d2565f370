"""Tables from files and from scikit-learn: reading, dropped rows and columns, and errors."""

from pathlib import Path

import pytest
import torch
from sklearn import datasets

from priory.cli.tables import SHIPPED_DATA, read_table
from priory.core.errors import InputError


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
def test_semicolons_and_tabs_separate_columns_too(tmp_path: Path, separator: str) -> None:
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


def test_constant_columns_and_names_are_left_out_with_a_note(tmp_path: Path) -> None:
    rows = "\n".join(f"1,name{k},{k % 7},{k / 7}" for k in range(60))
    table = read_table(write(tmp_path, f"one,name,a,y\n{rows}\n"))
    assert table.columns == ["a"]
    assert "'one' is constant" in table.notes[0]
    assert "'name' holds 60 distinct texts" in table.notes[1]


def test_text_that_is_different_in_most_rows_is_left_out(tmp_path: Path) -> None:
    text = "who,a,y\n" + "".join(f"person {k},{k},{k / 7}\n" for k in range(1, 9))
    assert read_table(write(tmp_path, text)).columns == ["a"]


@pytest.mark.parametrize(("levels", "kept"), [(20, True), (21, False)])
def test_a_column_with_more_texts_than_a_tenth_of_the_rows_is_left_out(tmp_path: Path, levels: int, kept: bool) -> None:
    text = "kind,a,y\n" + "".join(f"k{k % levels},{k},{k / 7}\n" for k in range(200))
    table = read_table(write(tmp_path, text))
    assert len(table.columns) == (levels + 1 if kept else 1)
    if not kept:
        assert table.notes == ["The column 'kind' holds 21 distinct texts and was left out."]


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("{y}-{m:02}-{d:02}", "year-month-day"),
        ("{y}-{m:02}-{d:02}T00:00:00Z", "year-month-day"),
        ("{d:02}.{m:02}.{y}", "day.month.year"),
        ("{m}/{d}/{y}", "month/day/year"),
    ],
)
def test_dates_become_days_with_a_note(tmp_path: Path, form: str, words: str) -> None:
    days = [(2024, 1, 30), (2024, 2, 1), (2024, 3, 1), (2024, 1, 31), (2025, 1, 30), (2024, 1, 30)]
    rows = [f"{form.format(y=y, m=m, d=d)},{k / 7}" for k, (y, m, d) in enumerate(days)]
    table = read_table(write(tmp_path, "\n".join(["when,y", *rows])))
    assert table.x[:, 0].tolist() == [0, 2, 31, 1, 366, 0]
    assert table.notes == [f"The column 'when' holds dates ({words}) and was converted to days since 2024-01-30."]


def test_days_come_first_where_months_cannot(tmp_path: Path) -> None:
    text = "when,y\n" + "".join(f"{day}/02/2024,{day / 7}\n" for day in (11, 12, 13, 14, 15))
    assert read_table(write(tmp_path, text)).x[:, 0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("separator", [";", "\t"])
def test_decimal_commas_are_read_where_the_comma_is_not_the_separator(tmp_path: Path, separator: str) -> None:
    text = NUMBERS.replace(",", separator).replace(".", ",")
    table, plain = read_table(write(tmp_path, text)), read_table(write(tmp_path, NUMBERS))
    assert torch.equal(table.x, plain.x)
    assert torch.equal(table.y, plain.y)
    assert table.notes == ["2 columns with decimal commas: b, y."]


@pytest.mark.parametrize("replace", [(",", ","), (",", ";"), (".", ",")])
def test_a_file_without_names_keeps_its_first_row(tmp_path: Path, replace: tuple[str, str]) -> None:
    text = "\n".join(["1.5,1.5,0.1", *NUMBERS.splitlines()[1:]])
    text = text.replace(",", ";").replace(*replace) if replace[0] == "." else text.replace(*replace)
    table = read_table(write(tmp_path, text))
    assert table.columns == ["column_1", "column_2"]
    assert table.x[0].tolist() == [1.5, 1.5]
    assert len(table.x) == 7
    said = "The first line holds numbers, so it was read as a row; the columns are column_1, column_2, column_3."
    assert said in table.notes


def test_names_that_count_from_zero_are_names(tmp_path: Path) -> None:
    table = read_table(write(tmp_path, NUMBERS.replace("a,b,y", "0,1,2")))
    assert (table.columns, table.target, len(table.x)) == (["0", "1"], "2", 6)


def test_a_repeated_column_name_is_changed_with_a_note(tmp_path: Path) -> None:
    table = read_table(write(tmp_path, NUMBERS.replace("a,b,y", "a,a ,y")))
    assert table.columns == ["a", "a_2"]
    assert table.notes == ["The column name 'a' occurs more than once; column 2 was renamed 'a_2'."]


def test_one_row_and_one_column_are_named_in_the_singular(tmp_path: Path) -> None:
    rows = "".join(f"{'left' if k % 2 else 'right'},{k / 7}\n" for k in range(6))
    assert read_table(write(tmp_path, f"side,y\n{rows},9\n")).notes == [
        "1 of 7 rows has missing or infinite values and was left out.",
        "The column 'side' holds text and was encoded as 1 column of 0 and 1.",
    ]


def test_a_target_whose_texts_do_not_repeat_is_refused(tmp_path: Path) -> None:
    for rows in (126, 8):
        text = "a,y\n" + "".join(f"{k},name{k}\n" for k in range(rows))
        with pytest.raises(InputError, match=f"repeat its classes .*got 'y' with {rows} different values in {rows}"):
            read_table(write(tmp_path, text))


def test_integers_that_do_not_repeat_are_a_regression_target(tmp_path: Path) -> None:
    text = "a,y\n" + "".join(f"{k % 3},{k}\n" for k in range(6))
    assert read_table(write(tmp_path, text)).classes is None


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


@pytest.mark.parametrize("name", SHIPPED_DATA)
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
        ("", r"table.csv is empty; it must have a line of column names"),
        ("a,b,y\n", r"must have rows below its line of column names"),
        ("y\n1\n2\n3\n4\n5\n", r"must have a target and at least one other column"),
        (
            "a,y\n1,2\n2,2\n3,2\n4,2\n5,2\n6,2\n",
            r"must take at least two values, got the constant column 'y'",
        ),
        ("a,y\n1,1.5\n1,2.5\n1,3.5\n1,4.5\n1,5.5\n", r"at least one column that varies"),
        ("a,y\n,1\n,2\n,3\n", r"have rows without missing values \(see column 'a'\)"),
        ("a,y\n1,2.5\n2,3.5\n", r"at least 5 complete rows"),
        ('a,y\n1,2\n"3,4\n', r"can't be read as CSV: a quotation mark is opened and never closed\.$"),
        ("a,y\n1,2\n3,4,5\n6,7\n", r"table.csv has 3 values in line 3, but 2 columns in its first line\.$"),
        ("a,y\n1,2,3\n4,5,6\n", r"table.csv has 3 values in line 2, but 2 columns in its first line\.$"),
    ],
)
def test_an_unusable_file_raises_an_error(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        read_table(write(tmp_path, text))


def test_a_missing_file_an_unknown_column_and_a_wrong_task_raise_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"must be the path of a CSV file, or one of diabetes, .*got 'none.csv'"):
        read_table("none.csv")
    with pytest.raises(InputError, match=r"must be a column of .*\(a, b, y\), got 'z'"):
        read_table(write(tmp_path, NUMBERS), target="z")
    with pytest.raises(InputError, match="be auto, regression or classification"):
        read_table("iris", task="ranking")
    with pytest.raises(InputError, match="be a column of numbers for regression"):
        read_table("iris", task="regression")
    with pytest.raises(InputError, match="repeat its classes"):
        read_table("diabetes", task="classification")


def test_a_binary_file_raises_an_error(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    for content in (b"a,y\n\xff\0,1\n", "a,y\n1,2\n".encode("utf-16"), b"a,y\n\x81,1\n"):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"is not text in UTF-8 \(see line [12]\); save it as UTF-8\.$"):
            read_table(str(path))


def test_latin_1_is_read_with_a_note(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(NUMBERS.replace("a,b", "größe,b").encode("latin-1"))
    table = read_table(str(path))
    assert table.columns == ["größe", "b"]
    assert "Line 1 is not UTF-8" in table.notes[0]
    assert "save it as UTF-8" in table.notes[0]
