"""The code of every page runs, from the first block to the last, in an empty folder."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

import priory as pr

DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MODULES = (
    "posteriors",
    "predictive.prediction",
    "analysis.comparison",
    "fitting.callbacks",
    "analysis.sweeps",
    "analysis.pruning",
    "evaluate",
)
HOMES = ("priory", *(f"priory.{name}" for name in MODULES))
NAMES = [
    name
    for line in (DOCS / "api.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| `")
    for name in re.findall(r"`([^`]+)`", line.split(" | ")[0])
]
PAGES = [
    page
    for page in (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md")))
    if BLOCK.search(page.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_the_page_runs_in_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    names: dict[str, object] = {"__name__": "__page__"}
    for block in BLOCK.finditer(text):
        above = text.count("\n", 0, block.start(1))  # so that a traceback shows the page's own line
        exec(compile("\n" * above + block.group(1), str(page), "exec"), names)


def test_every_public_name_stands_in_the_reference():
    reference = (DOCS / "api.md").read_text(encoding="utf-8")
    assert [name for name in pr.__all__ if name != "__version__" and not re.search(rf"\b{name}\b", reference)] == []


def home(name: str) -> object:
    """Return the public object of this name from whichever module defines it."""
    return next(getattr(module, name) for module in map(importlib.import_module, HOMES) if hasattr(module, name))


@pytest.mark.parametrize("signature", [name for name in NAMES if name.endswith(")")], ids=lambda s: s.split("(")[0])
def test_a_signature_of_the_reference_is_that_of_the_code(signature: str):
    dotted, _, rest = signature.partition("(")
    first, *others = dotted.split(".")
    found = home(first)
    for name in others:
        found = getattr(found, name)
    assert callable(found)
    method = inspect.isclass(home(first)) and bool(others)
    code = list(inspect.signature(found).parameters.values())[int(method) :]
    (function,) = ast.parse(f"def f({rest}: ...").body
    assert isinstance(function, ast.FunctionDef)
    given = function.args
    assert [a.arg for a in given.args] == [p.name for p in code if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [a.arg for a in given.kwonlyargs] == [p.name for p in code if p.kind is p.KEYWORD_ONLY]
    defaults = [d for d in (*given.defaults, *given.kw_defaults) if d is not None]
    named = [p for p in code if p.default is not p.empty]
    assert len(defaults) == len(named)
    for default, parameter in zip(defaults, named, strict=True):
        if not isinstance(default, ast.Attribute):  # constraints.real is made by a factory
            assert ast.literal_eval(default) == parameter.default, parameter.name


@pytest.mark.parametrize("attribute", [name for name in NAMES if not name.endswith(")")])
def test_an_attribute_of_the_reference_is_one_of_the_code(attribute: str):
    owner, _, name = attribute.partition(".")
    found = home(owner)
    assert inspect.isclass(found)
    known = hasattr(found, name) or name in getattr(found, "__dataclass_fields__", {})
    inits = [vars(base)["__init__"] for base in found.__mro__[:-1] if "__init__" in vars(base)]
    assert known or any(f"self.{name}" in inspect.getsource(init) for init in inits)


def test_the_reference_has_a_signature_for_each_public_class_and_function():
    called = {name.partition("(")[0] for name in NAMES}
    wanted = {name for name in pr.__all__ if callable(getattr(pr, name)) and not name.endswith(("Error", "Warning"))}
    assert wanted <= called


def test_there_are_pages_with_code():
    assert {"README.md", "index.md", "tutorial.md", "examples.md"} <= {page.name for page in PAGES}


def test_every_file_that_the_architecture_names_exists():
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)+\.py)`", text))
    source = DOCS.parent / "src" / "priory"
    assert len(named) > 40
    assert [
        name for name in sorted(named) if not (source / name).is_file() and not (DOCS.parent / name).is_file()
    ] == []


def test_the_picture_of_the_rooms_has_every_room():
    picture = (DOCS / "images" / "rooms.svg").read_text(encoding="utf-8")
    rooms = [path.parent.name for path in (DOCS.parent / "src" / "priory").glob("*/__init__.py")]
    assert len(rooms) > 20
    assert [room for room in sorted(rooms) if f">{room}</text>" not in picture] == []
