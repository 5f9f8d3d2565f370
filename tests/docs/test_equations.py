"""Equations of the pages become MathML, and pages load nothing from a network."""

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token
from mdit_py_plugins.dollarmath import dollarmath_plugin

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def module(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


mathml = module(DOCS / "_ext" / "mathml.py").mathml


def formulas(tokens: list[Token]) -> Iterator[tuple[str, bool]]:
    """Each formula of a page, and whether it has a line of its own."""
    for token in tokens:
        if token.type.startswith("math"):
            yield token.content, token.type.startswith("math_block")
        yield from formulas(token.children or [])


def parsed(page: Path) -> list[tuple[str, bool]]:
    reader = MarkdownIt("commonmark").enable("table").use(dollarmath_plugin)
    return list(formulas(reader.parse(page.read_text(encoding="utf-8"))))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_formula_of_the_page_becomes_mathml(page: Path):
    for tex, block in parsed(page):
        text = mathml(tex, block)
        assert text.startswith("<math ")
        assert "http" not in text


def test_the_pages_have_formulas_within_lines_and_on_their_own():
    found = [block for page in PAGES for _, block in parsed(page)]
    assert found.count(False) > 100
    assert found.count(True) > 10


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_page_loads_no_script_style_or_image_from_a_network(page: Path):
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"!\[[^\]]*\]\(\s*<?(?:https?:)?//", text) == []
    assert re.findall(r"<(?:script|link|img|iframe)\b[^>]*(?:https?:)?//", text) == []


def test_equations_are_rendered_by_the_extension_and_no_file_is_loaded_from_a_network(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(sys, "path", list(sys.path))
    conf = (DOCS / "conf.py").read_text(encoding="utf-8")
    names = module(DOCS / "conf.py").__dict__
    assert names["html_math_renderer"] == "mathml"
    assert "mathml" in names["extensions"]
    assert not {"sphinx.ext.mathjax", "sphinx.ext.imgmath"} & set(names["extensions"])
    assert not re.search(r"https?://", conf)
    styles = [DOCS / folder / name for folder in names["html_static_path"] for name in names["html_css_files"]]
    assert [style.name for style in styles if re.search("//|@import", style.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("tex", [r"\unknown x", r"\frac{1", r"\frac1", "x^", r"\left(x", "{x", "x}", r"\mathfrak N"])
def test_a_formula_that_cannot_be_translated_is_an_error(tex: str):
    with pytest.raises(ValueError, match=r"formula|character"):
        mathml(tex)


def tags(text: str) -> str:
    """MathML without its outer element and without attributes other than those of spaces and signs."""
    inner = re.sub(r"^<math[^>]*>|</math>$", "", text)
    return re.sub(r' (?:stretchy|fence)="[^"]*"', "", inner)


def test_a_fraction_of_two_digits_has_one_in_each_part():
    assert "<mfrac><mn>1</mn><mn>2</mn></mfrac><mi>λ</mi>" in mathml(r"\frac12\lambda")


def test_script_letters_are_characters():
    assert "<mi>\U0001d4a9</mi>" in mathml(r"\mathcal N")
    assert "<mi>\u2112</mi>" in mathml(r"\mathcal L")
    assert 'mathvariant="script"' not in mathml(r"\mathcal{QF}")


def test_a_thin_space_parts_a_name_from_a_letter_and_not_from_a_bracket():
    thin = '<mspace width="0.167em"></mspace>'
    assert f"<mi>T</mi>{thin}<mi>log</mi>{thin}<mi>p</mi>" in mathml(r"T\log p")
    assert "<mi>log</mi><mo>(</mo>" in tags(mathml(r"\log(p)"))


def test_a_minus_without_a_value_on_its_left_is_a_sign():
    sign, difference = '<mo form="prefix">\u2212</mo>', "<mo>\u2212</mo>"
    assert sign in mathml("a=-b")
    assert sign in mathml("(-b)")
    assert difference in mathml("a-b")
    assert difference in mathml("(a)-b")
    assert difference in mathml("(a)^2-b")


def test_the_limit_of_a_displayed_maximum_is_below_it():
    assert "<munder>" in mathml(r"\arg\max_\theta f", block=True)
    assert "<munder>" not in mathml(r"\arg\max_\theta f")


def test_bars_open_and_close():
    text = tags(mathml(r"\lvert\mu\rvert/\sigma"))
    assert '<mo form="prefix">|</mo><mi>μ</mi><mo form="postfix">|</mo>' in text


def test_a_slash_has_no_space_around_it():
    assert '<mn>1</mn><mo lspace="0" rspace="0">/</mo><mi>N</mi>' in mathml("1/N")


def test_a_tilde_and_a_semicolon_are_operators():
    assert "<mi>w</mi><mo>\u223c</mo><mi>q</mi>" in mathml(r"w\sim q")
    assert "<mi>w</mi><mo>;</mo><mn>0</mn>" in mathml("w;0")


def test_greek_capitals_are_upright_and_small_letters_are_not():
    assert '<mi mathvariant="normal">Λ</mi>' in mathml(r"\Lambda")
    assert "<mi>λ</mi>" in mathml(r"\lambda")


def test_the_source_of_a_formula_is_its_alternative_text():
    assert r'alttext="a&lt;\beta"' in mathml(r"a<\beta")
