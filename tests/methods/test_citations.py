"""Citations: the papers in the docstring of every public method, as BibTeX."""

import re

import pytest

import priory as pr
from priory import methods
from priory.methods.bibliography import ENTRIES
from priory.methods.citations import cite, classes_in, references_of

REQUIRED_FIELDS = {
    "inproceedings": {"author", "title", "booktitle", "year"},
    "article": {"author", "title", "journal", "year"},
    "incollection": {"author", "title", "booktitle", "publisher", "year"},
    "phdthesis": {"author", "title", "school", "year"},
    "misc": {"author", "title", "year"},
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


def keys_of(name):
    return [paper.key for paper in references_of(methods.by_name(name))]


def test_every_entry_belongs_to_a_public_method():
    assert {key for name in methods.__all__ for key in keys_of(name)} >= set(ENTRIES)


@pytest.mark.parametrize("name", methods.__all__)
def test_the_entries_of_a_method_are_bibtex_with_their_required_fields(name, capsys):
    text = cite(methods.by_name(name))
    assert capsys.readouterr().out == text + "\n"
    entries = parsed(text)
    assert list(entries) == [*keys_of(name), "priory"]
    assert len(entries) > 1
    for key, (kind, fields) in entries.items():
        assert set(fields) >= REQUIRED_FIELDS[kind]
        assert re.fullmatch(r"(19|20)\d\d", fields["year"])
        assert key == "priory" or fields["year"] in key


@pytest.mark.parametrize("name", methods.__all__)
def test_an_entry_has_the_first_author_and_the_title_of_its_reference(name):
    def plain(title):
        return re.sub(r"\W+", " ", re.sub(r"[{}]", "", title)).lower().strip()

    for paper in references_of(methods.by_name(name)):
        _, fields = paper.entry
        assert fields["author"].lower().startswith(paper.authors.split()[0].strip(",").lower()[:4])
        assert plain(fields["title"]).startswith(plain(paper.title)), paper


class NewMethod(pr.MAP):
    """A method that is not among the entries.

    References:
        Doe, Roe and Poe (2031), The art of inference: a title
        over two lines.
        Doe et al. (2032), A sequel.
    """


class Derived(NewMethod):
    """A class that inherits the papers of its base class."""


@pytest.mark.parametrize("method", [NewMethod, NewMethod(), Derived()])
def test_a_paper_without_an_entry_is_cited_from_the_docstring(method, capsys):
    entries = parsed(pr.cite(method))
    title = "The art of inference: a title over two lines"
    first = ("misc", {"author": "Doe and Roe and Poe", "title": title, "year": "2031"})
    second = ("misc", {"author": "Doe and others", "title": "A sequel", "year": "2032"})
    assert {key: entries[key] for key in ("doe2031art", "doe2032sequel")} == {
        "doe2031art": first,
        "doe2032sequel": second,
    }
    assert list(entries) == ["doe2031art", "doe2032sequel", "priory"]


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
    assert list(classes_in(posterior)) == [pr.Laplace]
    assert list(parsed(pr.cite(posterior))) == [*keys_of("Laplace"), "priory"]


def test_an_object_that_is_not_a_method_is_refused():
    with pytest.raises(pr.InputError, match="The 'method' argument of cite must be a method"):
        pr.cite("MAP")
