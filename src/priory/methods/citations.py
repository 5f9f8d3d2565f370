"""Citations: `pr.cite(method)` prints BibTeX entries for a method, for a posterior, or for Priory itself.

The papers of a method are those under "References:" in the docstring of its class, each as "Authors (year), Title.".
`priory.methods.bibliography` adds what a docstring leaves out, such as first names and the journal. A paper that it
doesn't have is cited as the docstring has it.
"""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from priory import methods
from priory.core.errors import require
from priory.methods.bibliography import ENTRIES, PRIORY
from priory.posteriors import Posterior

if TYPE_CHECKING:
    from collections.abc import Iterator

REFERENCES_SECTION = re.compile(r"^References:\n((?: {4}.*\n)+)", re.MULTILINE)
REFERENCE_TEXT = re.compile(r"(\S.*?) \((\d{4})\), (.*?)\.(?: |$)")


def cite(method: Any = None) -> str:
    """Print what to cite, as BibTeX, and return it.

    Args:
        method: A method or its class, or a posterior; the methods inside it, as of an `Ensemble`, are cited too.
            Default: None, Priory itself.

    Returns:
        The entries, separated by empty lines. Those of a method end with that of Priory.

    Raises:
        InputError: If the argument is neither a method nor a posterior.

    Example:
        >>> import priory as pr
        >>> text = pr.cite(pr.SGHMC())  # doctest: +ELLIPSIS
        @inproceedings{chen2014stochastic,
          author = {Chen, Tianqi and Fox, Emily and Guestrin, Carlos},
        ...
    """
    known = method is None or isinstance(method, (Posterior, type)) or hasattr(type(method), "posterior")
    require(known, "method", "cite", "be a method, its class or a posterior", repr(method))
    entries = {paper.key: paper.entry for found in classes_in(method) for paper in references_of(found)}
    text = "\n\n".join(bibtex(key, *entry) for key, entry in {**entries, "priory": PRIORY}.items())
    print(text)
    return text


class Reference(NamedTuple):
    """One line under "References:" in a docstring."""

    authors: str
    year: str
    title: str

    @property
    def key(self) -> str:
        """The key of the entry: the first author, the year, and the first word of the title, as in "hoffman2014no"."""
        author, *_ = re.findall(r"\w+", self.authors.lower())
        word = next(word for word in re.findall(r"\w+", self.title.lower()) if word not in ("a", "an", "the"))
        return author + self.year + word

    @property
    def entry(self) -> tuple[str, dict[str, str]]:
        """The BibTeX type and fields: those of `ENTRIES`, or the reference itself."""
        authors = " and ".join(re.split(r", | and ", self.authors.replace(" et al.", " and others")))
        return ENTRIES.get(self.key, ("misc", {"author": authors, "title": self.title, "year": self.year}))


def references_of(method: type) -> list[Reference]:
    """Return the references in the docstring of a class, or of its nearest base class that has some."""
    for found in method.__mro__:
        section = REFERENCES_SECTION.search(inspect.cleandoc(found.__doc__ or "") + "\n")
        if section:
            return [Reference(*groups) for groups in REFERENCE_TEXT.findall(" ".join(section[1].split()))]
    return []


def classes_in(method: Any) -> Iterator[type]:
    """Yield the class of a method, or of a posterior's method, and those of the methods inside it."""
    if isinstance(method, type):
        yield method
    elif method is not None:
        if not isinstance(method, Posterior):
            yield type(method)
        text = method.method if isinstance(method, Posterior) else repr(method)
        yield from (methods.by_name(name) for name in re.findall(r"\w+", text) if name in methods.__all__)


def bibtex(key: str, kind: str, fields: dict[str, str]) -> str:
    """Format one BibTeX entry."""
    lines = ",\n".join(f"  {name} = {{{value}}}" for name, value in fields.items())
    return f"@{kind}{{{key},\n{lines},\n}}"
