r"""Equations as MathML, so that pages show them without scripts, fonts or a network.

`latex2mathml` translates TeX; `mathml` then corrects what browsers read differently from TeX:

    script letters      MathML Core has no `mathvariant` but "normal": \mathcal N is the character U+1D4A9
    names               TeX sets a thin space between \log and a letter, and puts the limit of a displayed \max below it
    relations           \sim is one, and a semicolon is punctuation
    capitals            TeX sets those of the Greek upright
    signs               a minus after `=` or `(` is a sign and not a difference
    bars, slashes       \lvert opens and \rvert closes; there is no space around /

A formula that can't be translated is a warning of the build.
"""

from __future__ import annotations

import re
import unicodedata
from xml.etree import ElementTree

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.util import logging
from sphinx.util.math import get_node_equation_number

THIN_SPACE_WIDTH = "0.167em"
SCRIPT_TAGS = ("msub", "msup", "msubsup", "munder", "munderover")
CHILD_COUNTS = {"mfrac": 2, "mroot": 2, "msub": 2, "msup": 2, "munder": 2, "mover": 2, "msubsup": 3, "munderover": 3}
TEX_REPLACEMENTS = {r"\\arg\b": r"\\operatorname{arg}", r"\\lvert\b": r"\\left|", r"\\rvert\b": r"\\right|"}
UNICODE_STYLES = {"script": "SCRIPT", "bold": "BOLD", "double-struck": "DOUBLE-STRUCK"}
CLOSING_BRACKETS = {")", "]", "}", "|", "!", "\u2026"}
SIGN_CHARACTERS = {"+", "-", "\u2212"}
OPERATOR_CHARACTERS = {";": ";", "~": "\u223c", "\u27fa": "\u27fa"}
TIGHT_OPERATORS = {"/", ".", "\u2026"}
NO_SPACE = {"lspace": "0", "rspace": "0"}


def mathml(tex: str, block: bool = False) -> str:
    """A `<math>` element for a formula in TeX. Raises ValueError for one that can't be translated."""
    source = tex
    for pattern, replacement in TEX_REPLACEMENTS.items():
        source = re.sub(pattern, replacement, source)
    try:
        text = convert(source, display="block" if block else "inline")
        math = ElementTree.fromstring(re.sub(r' xmlns="[^"]*"', "", text, count=1))
    except Exception as error:
        raise ValueError(f"{type(error).__name__} in the formula {tex}") from error
    if source.replace(r"\{", "").count("{") != source.replace(r"\}", "").count("}"):
        raise ValueError(f"unbalanced braces in the formula {tex}")
    for element in math.iter():
        if "\\" in (element.text or ""):
            raise ValueError(f"unknown command {element.text} in the formula {tex}")
        if len(element) != CHILD_COUNTS.get(element.tag, len(element)):
            raise ValueError(f"an argument is missing in the formula {tex}")
        style = element.attrib.get("mathvariant", "normal")
        if style != "normal":
            element.text = "".join(styled(letter, style) for letter in element.text or "")
            del element.attrib["mathvariant"]
        elif element.tag == "mi" and element.text in OPERATOR_CHARACTERS:
            element.tag, element.text = "mo", OPERATOR_CHARACTERS[element.text]
        elif element.tag == "mi" and re.fullmatch("[\u0391-\u03a9]", element.text or ""):
            element.set("mathvariant", "normal")
    for element in list(math.iter()):
        if element.tag == "msub" and block and is_name(element) and element[0].tag == "mo":
            element.tag = "munder"
        if element.tag in ("math", "mrow", "mstyle", "msqrt", "mtd"):
            space(element)
    math.set("alttext", tex)
    return ElementTree.tostring(math, encoding="unicode", short_empty_elements=False)


def styled(letter: str, style: str) -> str:
    """The character for a letter in script, bold or double-struck."""
    if style not in UNICODE_STYLES or not letter.isascii() or not letter.isalpha():
        raise ValueError(f"no character for '{letter}' in {style}")
    name = f"{UNICODE_STYLES[style]} {'CAPITAL' if letter.isupper() else 'SMALL'} {letter.upper()}"
    try:
        return unicodedata.lookup(f"MATHEMATICAL {name}")
    except KeyError:  # those that Unicode had before, such as the script L
        return unicodedata.lookup(name)


def core(element: ElementTree.Element) -> ElementTree.Element:
    """The element that the scripts, if any, belong to."""
    return core(element[0]) if element.tag in SCRIPT_TAGS else element


def is_name(element: ElementTree.Element) -> bool:
    """Whether it is the name of a function, such as log or max."""
    text = core(element).text or ""
    return core(element).tag in ("mi", "mo") and len(text) > 1 and text.isascii() and text.isalpha()


def is_operand(element: ElementTree.Element) -> bool:
    """Whether it is a value: neither a name, nor a space, nor an operator other than a closing bracket."""
    operator = core(element).tag in ("mo", "mspace") and core(element).text not in CLOSING_BRACKETS
    return not operator and not is_name(element)


def space(row: ElementTree.Element) -> None:
    """Put TeX's spaces around the names in a row, and make signs of operators without an operand on their left."""
    children = list(row)
    row[:] = []
    for before, element in zip([None, *children], children, strict=False):
        value = before is not None and is_operand(before)
        name = before is not None and is_name(before)
        if core(element).tag == "mo" and (is_name(element) or core(element).text in TIGHT_OPERATORS):
            core(element).attrib.update(NO_SPACE)
        spaced = core(element).tag in ("mo", "mspace") and not is_name(element)
        if (name and not spaced) or (value and is_name(element)):
            row.append(ElementTree.Element("mspace", width=THIN_SPACE_WIDTH))
        if element.text in SIGN_CHARACTERS and not value:
            element.set("form", "prefix")
        row.append(element)


def translated(translator, node: nodes.Element, block: bool) -> str:
    """The formula of a node; where there is none, a warning and the TeX itself."""
    try:
        return mathml(node.astext().strip(), block)
    except ValueError as error:
        logging.getLogger(__name__).warning("equation: %s", error, location=node)
        return f"<code>{translator.encode(node.astext())}</code>"


def visit_inline(translator, node: nodes.math) -> None:
    """Write a formula within a line."""
    translator.body.append(translator.starttag(node, "span", "", CLASS="math notranslate nohighlight"))
    translator.body.append(translated(translator, node, block=False) + "</span>")
    raise nodes.SkipNode


def visit_block(translator, node: nodes.math_block) -> None:
    """Write a formula on a line of its own, with its number if it has one."""
    translator.body.append(translator.starttag(node, "div", CLASS="math notranslate nohighlight"))
    if node["number"]:
        translator.body.append(f'<span class="eqno">({get_node_equation_number(translator, node)})')
        translator.add_permalink_ref(node, "Link to this equation")
        translator.body.append("</span>")
    translator.body.append(translated(translator, node, block=True) + "</div>\n")
    raise nodes.SkipNode


def setup(app) -> dict[str, bool]:
    """Offer the renderer as `html_math_renderer = "mathml"`."""
    app.add_html_math_renderer("mathml", inline_renderers=(visit_inline, None), block_renderers=(visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
