"""Reports: one page that is whole, valid and offline, and that escapes what people write."""

import base64
import re
import sys
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import priory as pr
from priory.analysis.comparison import Comparison, compare
from priory.core.errors import InputError
from priory.reports import comparison_page, write_comparison

EMPTY_ELEMENTS = {"meta", "link", "img", "br", "hr"}


@dataclass(frozen=True)
class Broken(pr.MAP):
    """A method that raises when it starts."""

    def init(self, *arguments: Any, **options: Any) -> Any:
        raise RuntimeError("a < b & c")


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=generator)
    return x, x[:, 0] + 0.3 * torch.randn(60, generator=generator)


@pytest.fixture(scope="module")
def numbers() -> Comparison:
    torch.manual_seed(0)
    model = pr.Model(nn.Linear(3, 1), pr.Gaussian(0.3))
    methods = {"<b>MAP</b>": pr.MAP(), "MeanField": pr.MeanField(), "Broken": Broken()}
    return compare(model, rows(), methods, steps=60, samples=8, progress=False)


@pytest.fixture(scope="module")
def classes() -> Comparison:
    torch.manual_seed(0)
    x, y = rows()
    model = pr.Model(nn.Linear(3, 2), pr.Categorical())
    return compare(model, (x, (y > 0).long()), [pr.MAP(), pr.MeanField()], steps=60, samples=8, progress=False)


class Page(HTMLParser):
    """An HTML parser that fails if elements aren't nested."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in EMPTY_ELEMENTS:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.mark.parametrize("kind", ["numbers", "classes"])
def test_a_report_is_a_whole_page_whose_elements_nest(kind: str, request: pytest.FixtureRequest) -> None:
    text = comparison_page(request.getfixturevalue(kind))
    page = Page(text)
    assert text.startswith("<!DOCTYPE html>")
    assert page.all("html") == [{"lang": "en"}]
    assert {"charset": "utf-8"} in page.all("meta")
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = [str(link["href"]).removeprefix("#") for link in page.all("a")]
    assert set(targets) <= set(ids)


@pytest.mark.parametrize("kind", ["numbers", "classes"])
def test_a_report_loads_nothing_from_elsewhere(kind: str, request: pytest.FixtureRequest) -> None:
    text = comparison_page(request.getfixturevalue(kind))
    page = Page(text)
    assert page.all("script") == []
    sources = [
        str(attributes.get(name)) for _, attributes in page.elements for name in ("src", "href") if name in attributes
    ]
    assert all(source.startswith(("data:", "#")) for source in sources)
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style


@pytest.mark.parametrize(("kind", "count"), [("numbers", 7), ("classes", 7)])
def test_every_picture_is_inside_the_page_drawn_and_described(
    kind: str, count: int, request: pytest.FixtureRequest
) -> None:
    pictures = Page(comparison_page(request.getfixturevalue(kind))).all("img")
    assert len(pictures) == count  # one of all fits, and three for each of the two methods that were scored
    for picture in pictures:
        head, source = str(picture["src"]).split(",", 1)
        assert head == "data:image/svg+xml;base64"
        assert ElementTree.fromstring(base64.b64decode(source)).tag.endswith("svg")
        assert len(str(picture["alt"])) > 20


def test_text_from_the_user_is_escaped(numbers: Comparison) -> None:
    text = comparison_page(numbers, title="<script>alert(1)</script>")
    assert "<script>" not in text
    assert "<b>MAP</b>" not in text
    assert "a &lt; b &amp; c" in text
    page = Page(text)
    assert "<script>alert(1)</script>" in page.text
    assert "This method failed: a < b & c" in page.text


def test_a_report_describes_the_settings_and_explains_the_scores(numbers: Comparison, classes: Comparison) -> None:
    text = Page(comparison_page(numbers)).text
    for words in (
        numbers.verdict,
        "rows to fit 48",
        "rows held out 12",
        "Linear(in_features=3, out_features=1, bias=True)",
        "seed 0",
        f"torch {torch.__version__}",
        "lower is better",
        "Glossary",
        "Root of the mean squared distance",
    ):
        assert words in text
    text = Page(comparison_page(classes)).text
    assert "Fraction of the rows whose most probable class is correct" in text
    assert "Root of the mean squared distance" not in text


@pytest.mark.parametrize(
    ("noise", "reading"), [(5.0, "the model is underconfident."), (0.01, "the model is overconfident.")]
)
def test_a_calibration_error_is_called_overconfident_or_underconfident(noise: float, reading: str) -> None:
    torch.manual_seed(0)
    model = pr.Model(nn.Linear(3, 1), pr.Gaussian(noise))
    comparison = compare(model, rows(), [pr.MAP()], test=0.5, steps=300, progress=False)
    text = Page(comparison_page(comparison)).text.replace("\xa0", " ")
    assert f"so this is more than chance: {reading} The 90 % intervals hold" in text
    assert "about right" not in text


def test_a_confident_model_that_is_often_wrong_is_called_overconfident() -> None:
    torch.manual_seed(0)
    x, y = rows()
    labels = (y > 0).long()
    model = pr.Model(nn.Linear(3, 2), pr.Categorical(), "flat")
    comparison = compare(model, (x, labels), [pr.MAP()], test=(x, 1 - labels), steps=300, progress=False)
    assert "more than chance: the model is overconfident." in Page(comparison_page(comparison)).text


@pytest.mark.parametrize(("noise", "count"), [("learn", 1), (0.3, 0)])
def test_the_curve_of_a_mode_with_learnt_noise_notes_when_rows_are_added(noise: Any, count: int) -> None:
    torch.manual_seed(0)
    model = pr.Model(nn.Linear(3, 1), pr.Gaussian(noise))
    comparison = compare(model, rows(), [pr.MAP(), pr.MeanField()], steps=30, samples=8, progress=False)
    assert Page(comparison_page(comparison)).text.count("are added after two thirds of the steps") == count


def test_the_table_of_the_report_is_that_of_the_comparison(numbers: Comparison) -> None:
    text = Page(comparison_page(numbers)).text
    for row in numbers.cells()[:2]:
        for cell in row:
            assert cell in text


def test_a_report_is_written_to_its_path_and_the_path_is_returned(numbers: Comparison, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    assert numbers.report(path, title="Two methods") == path
    assert path.read_text(encoding="utf-8").count("<title>Two methods</title>") == 1


def test_a_path_that_cannot_be_written_raises_an_error(numbers: Comparison, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"'path' argument of report must lie in a folder that exists"):
        write_comparison(numbers, tmp_path / "none" / "report.html")
    with pytest.raises(InputError, match=r"'path' argument of report must be the name of a file"):
        write_comparison(numbers, tmp_path)


def test_without_matplotlib_the_error_says_what_to_install(
    numbers: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"needs 'matplotlib': pip install 'priory\[plot\]'"):
        numbers.report(tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_a_penalty_on_q_is_drawn_with_its_equivalent_prior_and_the_verdict() -> None:
    penalty = pr.penalties.Variational(lambda mu, scale: 0.5 * (mu**2 + scale**2))  # the entropy forgotten
    model = pr.Model(nn.Linear(3, 1), pr.Gaussian(0.3), prior=penalty)
    page = comparison_page(compare(model, rows(), [pr.MeanField()], steps=40, samples=8, progress=False))
    Page(page)
    assert "The penalty that MeanField was trained with, and the equivalent prior. The entropy term is missing" in page
