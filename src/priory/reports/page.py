"""One self-contained HTML page: its style, its frame, its pictures. Nothing in it is loaded from anywhere."""

from __future__ import annotations

import base64
import io
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLE = files("priory.reports").joinpath("style.css").read_text(encoding="utf-8")


def page(title: str, body: str) -> str:
    """Put a whole HTML page around its body; the title is escaped here, the body must already be."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{escape(title)}</title>\n<link rel="icon" href="data:,">\n'
        f"<style>\n{STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def picture(ax: Axes, alt: str, caption: str, wide: bool = False) -> str:
    """Frame a picture inside the page: as drawn shapes, which stay sharp on paper and on any screen."""
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
    """Show a value with its name and what it means in plain words."""
    text = escape(reading).replace(" %", "&nbsp;%")  # a number keeps its unit at the end of a line
    return f'<div class="number"><b>{escape(value)}</b><span>{escape(name)}</span><p>{text}</p></div>'


def definitions(pairs: dict[str, str]) -> str:
    """List terms with their texts; text of several lines keeps its lines."""
    items = []
    for term, text in pairs.items():
        inner = f"<pre>{escape(text)}</pre>" if "\n" in text else escape(text)
        items.append(f"<dt>{escape(term)}</dt><dd>{inner}</dd>")
    return f"<dl>{''.join(items)}</dl>"
