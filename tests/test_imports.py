"""The public names, the layers of the imports, the minimal install, and words about nothing else."""

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import priory as pr

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "priory"

# Each line may import from the lines above it and, without a cycle, from its own.
LAYERS = (
    ("core", "constraints"),
    ("distributions", "divergences", "families"),
    ("likelihoods", "priors", "penalties"),
    ("network",),
    ("models",),
    ("latent",),
    ("estimators", "curvature"),
    ("predictive",),
    ("diagnostics",),
    ("posteriors",),
    ("methods", "optim"),
    ("fitting",),
    ("evaluate", "analysis"),
    ("check",),
    ("__init__",),  # `import priory` itself: names of all the lines above, loaded when asked for
    ("plot", "reports", "sklearn", "integrations", "cli", "__main__"),
    ("testing",),
)
LINE = {unit: line for line, units in enumerate(LAYERS) for unit in units}
# Functions that lead upward when they are called: those of a posterior, draws of a prior that only a sampler can make,
# and the report of a comparison.
MAY_IMPORT_UPWARD = {
    ("posteriors", "save"),
    ("posteriors", "check"),
    ("check", "plot"),
    ("posteriors", "predictive"),
    ("methods", "from_prior"),
    ("posteriors", "to_arviz"),
    ("analysis", "report"),
    ("estimators", "plot"),
    ("analysis", "plot"),
}


@dataclass(frozen=True)
class Import:
    """One import of one of our modules by another, and the functions around it, outermost first."""

    importer: str
    imported: str
    line: int
    inside: tuple[str, ...]

    @property
    def units(self) -> tuple[str, str]:
        return unit(self.importer), unit(self.imported)

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def unit(module: str) -> str:
    """The entry of the layer table that a module belongs to: priory.methods.point.map -> methods."""
    return [*module.split("."), "__init__"][1]


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


def imported_modules(node: ast.Import | ast.ImportFrom, importer: str, is_package: bool) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "priory")
        return
    base = node.module or ""
    if node.level:
        parents = importer.split(".")[: len(importer.split(".")) - node.level + is_package]
        base = ".".join([*parents, *filter(None, [node.module])])
    if base.split(".")[0] != "priory":
        return
    for alias in node.names:
        longer = f"{base}.{alias.name}"
        yield longer if longer in MODULES else base


def imports_of(importer: str, path: Path) -> Iterator[Import]:
    """Every import that runs, at the top or inside functions; those for the type checker alone don't run."""

    def walk(node: ast.AST, inside: tuple[str, ...]) -> Iterator[Import]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                yield from walk(child, inside)
            return
        if isinstance(node, ast.Import | ast.ImportFrom):
            for name in imported_modules(node, importer, path.stem == "__init__"):
                yield Import(importer, name, node.lineno, inside)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = (*inside, node.name)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), ())


IMPORTS = [found for name, path in MODULES.items() for found in imports_of(name, path)]


def test_every_module_has_its_place_in_the_layers():
    assert {unit(name) for name in MODULES} <= set(LINE)


def test_each_layer_imports_only_from_those_above_it():
    def allowed(found: Import) -> bool:
        above = LINE[found.units[1]] <= LINE[found.units[0]]
        called = bool(MAY_IMPORT_UPWARD & {(found.units[0], name) for name in found.inside})
        return above or called

    assert [str(found) for found in IMPORTS if unit(found.importer) != "__init__" and not allowed(found)] == []


def test_no_two_modules_need_each_other_to_be_imported():
    needs: dict[str, set[str]] = {name: set() for name in MODULES}
    for found in IMPORTS:
        if not found.inside:
            needs[found.importer].add(found.imported)
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for other in sorted(needs.get(name, ())):
                visit(other, (*path, name))
            done.add(name)

    for name in needs:
        visit(name, ())


def test_a_method_imports_map_and_no_other_method():
    methods = {name for name in MODULES if unit(name) == "methods"}
    engine = "priory.methods.variational.base"  # what those with a family share: it has a step, and no form
    shared = {"priory.methods", "priory.methods.base", "priory.methods.point.map", engine}
    strays = [
        str(found)
        for found in IMPORTS
        if found.importer in methods - {"priory.methods"}
        and found.imported in methods - shared
        and not ("mcmc" in found.importer and "mcmc" in found.imported)
        and "default_start" not in found.inside  # which may be an ensemble of MAP
        and is_method(found.imported)
    ]
    assert strays == []


def is_method(name: str) -> bool:
    """Whether a module of methods/ defines a method: a class with `init`, `step` and `posterior`."""
    classes = [
        node for node in ast.parse(MODULES[name].read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)
    ]
    wanted = {"init", "step", "posterior"}
    return any(wanted <= {getattr(child, "name", None) for child in node.body} for node in classes)


def test_no_file_has_more_than_450_lines():
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in MODULES.items()}
    assert {name: count for name, count in lines.items() if count > 450} == {}


def test_all_names_what_is_exported_and_every_name_resolves():
    assert len(set(pr.__all__)) == len(pr.__all__)
    for name in pr.__all__:
        assert getattr(pr, name) is not None, name
    submodules = {module.name for module in pkgutil.iter_modules([str(SOURCE)])}
    exported = {name for name in dir(pr) if not name.startswith("_")} - (submodules - set(pr.__all__))
    assert exported == {name for name in pr.__all__ if not name.startswith("_")}
    with pytest.raises(AttributeError, match=r"^priory has no 'no_such_name'\.$"):
        _ = pr.no_such_name
    with pytest.raises(AttributeError, match=r"^priory has no 'MeanFeild'\. Did you mean 'MeanField'\?$"):
        _ = pr.MeanFeild


def test_no_export_turns_into_a_module_when_the_modules_are_imported():
    before = {name: isinstance(getattr(pr, name), types.ModuleType) for name in pr.__all__}
    for name in MODULES:
        if unit(name) != "__main__":
            importlib.import_module(name)
    assert {name: isinstance(getattr(pr, name), types.ModuleType) for name in pr.__all__} == before


MINIMAL = """
import sys

ALLOWED = set(sys.stdlib_module_names) | {
    "priory", "safetensors", "torch", "torchgen", "functorch",
    "filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "sympy", "typing_extensions",
}

class Only:
    def find_spec(self, name, path=None, target=None):
        package = name.split(".")[0]
        if package not in ALLOWED:
            raise ModuleNotFoundError(f"No module named {name!r}: not in a minimal install", name=package)

sys.meta_path.insert(0, Only())
import torch
from torch import nn
import priory as pr

generator = torch.Generator().manual_seed(0)
x = torch.randn(20, 3, generator=generator)
y = x[:, 0] + 0.1 * torch.randn(20, generator=generator)
for method in (pr.MAP(), pr.MeanField()):
    posterior = pr.fit(pr.Model(nn.Linear(3, 1), pr.Gaussian(0.1)), (x, y), method, steps=5, progress=False)
    prediction = posterior.predict(x, samples=4)
    assert prediction.mean.shape == (20,) and prediction.mean.isfinite().all()
    assert prediction.log_prob(y).shape == (20,)
posterior.save(sys.argv[1])
model = pr.Model(nn.Linear(3, 1), pr.Gaussian(0.1))
assert torch.equal(pr.load(sys.argv[1], model).mean["weight"], posterior.mean["weight"])
for name in ("numpy", "scipy", "sklearn", "matplotlib", "rich", "typer", "pandas", "tqdm"):
    assert name not in sys.modules, name
print("done")
"""


def test_torch_and_safetensors_are_enough_to_fit_predict_and_save(tmp_path: Path):
    command = [sys.executable, "-c", MINIMAL, str(tmp_path / "minimal.priory")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment(), check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("done\n")


def environment() -> dict[str, str]:
    """One thread, and this source tree in front, as the tests themselves see it."""
    return {"PYTHONPATH": str(SOURCE.parent), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


# The parts are joined here so that this file doesn't hold what it looks for.
FOREIGN = re.compile(
    "|".join(
        [
            r"(?<![\w.])/(?:wo" + r"rk|ro" + r"ot|op" + r"t/(?:wheels|pypi)|tm" + r"p/venv)\b",
            r"\b(?:py" + r"pi\.org|python" + r"hosted\.org|download\.py" + r"torch\.org)",
            r"\b(?:TO" + r"DO|FIX" + r"ME)\b",
        ]
    )
)


def text_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git checkout: there is no list of the project's own files")
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file() and b"\0" not in path.read_bytes()[:8192]]


def test_no_file_mentions_anything_outside_the_project():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match.group()}"
        for path in text_files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (match := FOREIGN.search(line))
    ]
    assert found == []


# Names that two classes share because both are public, with the two namespaces that export them.
SHARED = {
    "BayesianGaussianMixture": ("latent", "sklearn"),  # the estimator has scikit-learn's name for the same model
    "GaussianMixture": ("latent", "sklearn"),  # likewise
    "GroupLasso": ("distributions", "penalties"),  # the penalty, and the distribution whose log density is minus it
    "NormalGamma": ("latent", "testing"),  # the model, and the exact posterior that tests compare it with
    "SWAGCallback": ("integrations.lightning", "integrations.transformers"),  # one callback for each trainer
    "Variational": ("penalties", "posteriors"),  # a penalty on q, and the posterior that is a q
}


def test_no_two_classes_share_a_name() -> None:
    found: dict[str, list[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(path.name)
    assert {name: files for name, files in found.items() if len(files) > 1 and name not in SHARED} == {}


def test_the_names_that_two_classes_share_are_public_in_both_places() -> None:
    for name, places in SHARED.items():
        classes = {getattr(importlib.import_module(f"priory.{place}"), name) for place in places}
        assert len(classes) == 2, name
