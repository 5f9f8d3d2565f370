"""A method is written in three places: its own file, methods/__init__.py and docs/api.md."""

import ast
import importlib
import importlib.util
import pkgutil
import re
from pathlib import Path

import priory as pr
import priory.methods
from priory.methods.base import Options
from priory.methods.citations import references_of

ROOT = Path(__file__).resolve().parents[2]
INIT = ROOT / "src" / "priory" / "methods" / "__init__.py"


def concrete_methods() -> dict[str, str]:
    """Return the methods without subclasses and their modules: `{"MAP": "point.map"}`."""
    for found in pkgutil.walk_packages(priory.methods.__path__, "priory.methods."):
        importlib.import_module(found.name)
    classes, new = set[type](), {Options}
    while new:
        new = {derived for base in new for derived in base.__subclasses__()} - classes
        classes |= new
    ours = {c for c in classes if c.__module__.startswith("priory.methods.")}
    bases = {base for c in ours for base in c.__bases__}
    return {c.__name__: c.__module__.removeprefix("priory.methods.") for c in ours - bases}


def imported_for_the_type_checker() -> dict[str, str]:
    """Return the names under TYPE_CHECKING in methods/__init__.py and their modules."""
    guard = next(node for node in ast.parse(INIT.read_text(encoding="utf-8")).body if isinstance(node, ast.If))
    imports = [node for node in guard.body if isinstance(node, ast.ImportFrom) and node.module]
    return {a.name: str(node.module).removeprefix("priory.methods.") for node in imports for a in node.names}


def has_references(name: str, module: str) -> bool:
    """Return whether the class exists and `pr.cite` finds papers in its docstring."""
    found = f"priory.methods.{module}"
    there = importlib.util.find_spec(found) is not None
    return there and bool(references_of(vars(importlib.import_module(found))[name]))


def missing(name: str, module: str) -> list[str]:
    """Return the missing entries of a method, one line per place."""
    api, init = (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), "src/priory/methods/__init__.py"
    file = f"src/priory/methods/{module.replace('.', '/')}.py"
    wanted = {
        f'{init}: "{name}" in __all__': name in priory.methods.__all__,
        f'{init}: "{name}": "{module}" in _MODULES': priory.methods._MODULES.get(name) == module,
        f"{init}: from priory.methods.{module} import {name}": imported_for_the_type_checker().get(name) == module,
        f'{file}: papers under "References:" in the docstring of {name}': has_references(name, module),
        f"docs/api.md: a row with `{name}(...)`": f"`{name}(" in api,
        f"docs/api.md: .. autoclass:: priory.{name}": re.search(rf":: priory\.{name}\b", api) is not None,
    }
    return [place for place, there in wanted.items() if not there]


def test_every_method_is_in_all_of_its_places():
    assert [line for name, module in sorted(concrete_methods().items()) for line in missing(name, module)] == []


def test_the_missing_entries_of_a_new_method_are_listed():
    lines = missing("NewMethod", "variational.new_method")
    assert len(lines) == 6
    assert all("NewMethod" in line for line in lines)
    assert len({line.split(":")[0] for line in lines}) == 3


def test_every_method_with_steps_is_in_the_table_of_the_readme():
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("## Methods")[1]
    names = [name for name in priory.methods.__all__ if hasattr(priory.methods.by_name(name), "step")]
    assert [name for name in names if f"`{name}`" not in table] == []


def test_the_type_checker_and_the_import_find_the_same_names():
    assert imported_for_the_type_checker() == priory.methods._MODULES
    assert set(priory.methods.__all__) <= set(pr.__all__)
    for name in priory.methods.__all__:
        assert getattr(pr, name) is getattr(priory.methods, name) is priory.methods.by_name(name)
