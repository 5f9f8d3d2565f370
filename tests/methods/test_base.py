"""Options that methods share are documented once, by their base class, and shown for each method."""

import ast
import inspect
from dataclasses import dataclass, fields

import pytest

import priory.methods
from priory.methods.base import Options, documented_options


@dataclass(frozen=True)
class Shared(Options):
    """The base class.

    Args:
        first: A number,
            over two lines.
        second: Another number.
    """

    first: int = 0
    second: int = 0


@dataclass(frozen=True)
class Derived(Shared):
    r"""The derived class, with a \backslash.

    Args:
        second: Its own description.
        third: A third number.

    Example:
        >>> Derived(1)
        Derived(first=1, second=0, third=0)
    """

    third: int = 0


@dataclass(frozen=True)
class Undescribed(Shared):
    """A class without a section for its options."""


def test_the_options_of_a_base_class_are_shown_after_those_of_the_class_itself():
    assert documented_options(Derived.__doc__) == {
        "second": "    second: Its own description.\n",
        "third": "    third: A third number.\n",
        "first": "    first: A number,\n        over two lines.\n",
    }


def test_the_rest_of_the_docstring_stays_as_it_is():
    doc = str(Derived.__doc__)
    assert doc.startswith("The derived class, with a \\backslash.\n\nArgs:\n    second:")
    assert "        over two lines.\n\nExample:\n    >>> Derived(1)\n" in doc
    assert Undescribed.__doc__ == "A class without a section for its options."


@pytest.mark.parametrize("name", priory.methods.__all__)
def test_every_option_of_every_method_is_documented_exactly_once(name):
    method = priory.methods.by_name(name)
    lines = [line.split(":")[0].strip() for line in str(method.__doc__).splitlines()]
    assert set(documented_options(method.__doc__)) == {f.name for f in fields(method) if f.init}
    assert [f.name for f in fields(method) if lines.count(f.name) > 1] == []


@pytest.mark.parametrize("name", priory.methods.__all__)
def test_no_method_writes_again_what_its_base_class_documents(name):
    method = priory.methods.by_name(name)
    (definition,) = ast.parse(inspect.getsource(method)).body
    assert isinstance(definition, ast.ClassDef)
    written = ast.get_docstring(definition)
    own, inherited = documented_options(written), documented_options(method.__base__.__doc__)
    assert [option for option, text in own.items() if inherited.get(option) == text] == []
