"""Citations: every public method has entries, and they are BibTeX."""

import re

import pytest

import priory as pr
from priory import methods
from priory.methods.citations import ENTRIES, METHODS, cite, names_in

REQUIRED_FIELDS = {
    "inproceedings": {"author", "title", "booktitle", "year"},
    "article": {"author", "title", "journal", "year"},
    "incollection": {"author", "title", "booktitle", "publisher", "year"},
    "software": {"author", "title", "year"},
}


def parsed(text):
    """Return entries by key, with their type and fields; braces must be balanced."""
    found = {}
    for block in text.split("\n\n"):
        head, *lines, end = block.split("\n")
        kind, key = re.fullmatch(r"@(\w+)\{(\w+),", head).groups()
        assert end == "}"
        fields = dict(re.fullmatch(r"  (\w+) = \{(.*)\},", line).groups() for line in lines)
        for value in fields.values():
            depth = 0
            for letter in value:
                depth += {"{": 1, "}": -1}.get(letter, 0)
                assert depth >= 0
            assert depth == 0
        found[key] = (kind, fields)
    return found


def test_every_public_method_has_entries():
    assert [name for name in methods.__all__ if name not in METHODS] == []
    assert {key for keys in METHODS.values() for key in keys} == set(ENTRIES)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_the_entries_of_a_method_are_bibtex_with_their_required_fields(name, capsys):
    text = cite(type(name, (), {}))
    assert capsys.readouterr().out == text + "\n"
    entries = parsed(text)
    assert list(entries) == [*METHODS[name], "priory"]
    for key, (kind, fields) in entries.items():
        assert set(fields) >= REQUIRED_FIELDS[kind]
        assert re.fullmatch(r"(19|20)\d\d", fields["year"])
        assert key == "priory" or fields["year"] in key


def test_cite_without_a_method_cites_priory(capsys):
    assert list(parsed(pr.cite())) == ["priory"]
    assert "Priory" in capsys.readouterr().out


def test_an_ensemble_is_cited_with_the_method_of_its_members(capsys):
    entries = parsed(pr.cite(pr.Ensemble(pr.SWAG())))
    assert {"lakshminarayanan2017simple", "maddox2019simple"} <= set(entries)
    assert "chen2014stochastic" not in entries


def test_a_posterior_is_cited_by_its_method(capsys):
    density = pr.Density(lambda p: -p["x"].square(), {"x": pr.Param()})
    posterior = pr.fit(density, None, pr.Laplace(), progress=False)
    assert list(names_in(posterior)) == ["Laplace"]
    assert list(parsed(pr.cite(posterior))) == [*METHODS["Laplace"], "priory"]


def test_an_object_that_is_not_a_method_is_refused():
    with pytest.raises(pr.InputError, match="The 'method' argument of cite must be a method"):
        pr.cite("MAP")
