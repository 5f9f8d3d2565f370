"""Parts of a self-contained HTML page: style, frame and figures. The page loads nothing from elsewhere."""

from __future__ import annotations

import base64
import io
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLE_SHEET = files("priory.reports").joinpath("style.css").read_text(encoding="utf-8")


def page(title: str, body: str) -> str:
    """A whole HTML page around a body; the title is escaped here, the body must already be escaped."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{escape(title)}</title>\n<link rel="icon" href="data:,">\n'
        f"<style>\n{STYLE_SHEET}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def picture(ax: Axes, alt: str, caption: str, wide: bool = False) -> str:
    """A figure embedded as SVG, which stays sharp on paper and on any screen, with its caption."""
    buffer = io.BytesIO()
    figure: Any = ax.figure
    if wide:
        figure.set_size_inches(9.6, 3.6)
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    source = base64.b64encode(buffer.getvalue()).decode("ascii")
    kind = ' class="wide"' if wide else ""
    image = f'<img alt="{escape(alt)}" src="data:image/svg+xml;base64,{source}">'
    return f"<figure{kind}>{image}<figcaption>{escape(caption)}</figcaption></figure>"


def number(value: str, name: str, reading: str) -> str:
    """A value with its name and its interpretation."""
    text = escape(reading).replace(" %", "&nbsp;%")  # keep a number and its unit on one line
    return f'<div class="number"><b>{escape(value)}</b><span>{escape(name)}</span><p>{text}</p></div>'


def definitions(pairs: dict[str, str]) -> str:
    """A list of terms with their descriptions; line breaks in a description are kept."""
    items = []
    for term, text in pairs.items():
        inner = f"<pre>{escape(text)}</pre>" if "\n" in text else escape(text)
        items.append(f"<dt>{escape(term)}</dt><dd>{inner}</dd>")
    return f"<dl>{''.join(items)}</dl>"
