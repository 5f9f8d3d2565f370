"""How the documents are built: Markdown through MyST, and the reference from the docstrings."""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = "Priory"
author = copyright = "Priory developers"
version = release = PROJECT["version"]

sys.path.insert(0, str(ROOT / "docs" / "_ext"))
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "mathml"]
napoleon_numpy_docstring = False
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["math.css"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"Priory {release}"
exclude_patterns = ["_build"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
add_module_names = False
python_use_unqualified_type_names = True
# Names that two modules have: which one an annotation means.
autodoc_type_aliases = {"Variational": "priory.posteriors.Variational"}

# Docstrings are plain text with `code`, equations indented by four, doctests and Google's sections.
# No other markup is read.
default_role = "literal"
MARKUP_PATTERN = re.compile(r"(`[^`]*`)|([*|\\]|_(?=\W|$))")
SECTION_PATTERN = re.compile(
    r"(Args|Attributes|Example|Examples|Note|Notes|Raises|References|Returns|Warns|Yields):\s*$"
)


def plain(app, what, name, obj, options, lines: list[str]) -> None:
    """Keep every character of a docstring's prose as written, and its indented equations as they stand.

    Runs before napoleon, which turns the sections into field lists.
    """
    shown: list[str] = []
    margin = 0  # of the prose: four inside a section
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if line.strip() and indent == 0:
            margin = 4 if SECTION_PATTERN.match(line) else 0
        equation = indent >= margin + 4 and bool(line.strip())
        if equation and shown and not shown[-1].strip():
            shown[-1:] = ["", " " * margin + "::", ""]
        doctest = line.lstrip().startswith((">>>", "..."))
        shown.append(line if equation or doctest else MARKUP_PATTERN.sub(lambda m: m[1] or "\\" + m[2], line))
    lines[:] = shown


def setup(app) -> None:
    """Have docstrings pass through `plain`, before napoleon reads them."""
    app.connect("autodoc-process-docstring", plain, priority=400)
