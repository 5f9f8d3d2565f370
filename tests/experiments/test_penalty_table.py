"""The experiment of the published table: factors, search and table, on a problem that takes seconds."""

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from priory import penalties

EXPERIMENTS_FOLDER = Path(__file__).resolve().parents[2] / "experiments"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXPERIMENTS_FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their types here
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def table() -> ModuleType:
    return load("penalty_table")


@pytest.fixture(scope="module")
def problem(table: ModuleType) -> Any:
    """Return images of vertical and horizontal bars in noise."""
    generator = torch.Generator().manual_seed(0)

    def rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = torch.randn(count, 1, 8, 8, generator=generator), torch.arange(count) % 2
        x[y == 0, :, 3] += 1.5
        x[y == 1, :, :, 3] += 1.5
        return x, y

    return table.Problem(rows(60), rows(40), rows(50))


def test_the_usual_factors_are_one_and_for_groups_the_square_root_of_their_size(table: ModuleType):
    net = nn.Sequential(nn.Conv2d(3, 8, 5), nn.Flatten(), nn.Linear(32, 10))
    usual = {name: table.layer_factors(net, name, "usual", "fan_in") for name in table.PENALTIES}
    assert usual["l2"] == usual["l1"] == {"0.weight": 1.0, "2.weight": 1.0}
    assert usual["group"] == pytest.approx({"0.weight": math.sqrt(75), "2.weight": math.sqrt(32)})
    assert usual["reverse"] == pytest.approx({"0.weight": math.sqrt(200), "2.weight": math.sqrt(10)})


def test_the_bayesian_factors_at_lambda_th_have_the_variance_of_the_initialisation(table: ModuleType):
    net = nn.Sequential(nn.Conv2d(3, 8, 5), nn.Flatten(), nn.Linear(32, 10))
    assert table.layer_factors(net, "l2", "Bayesian", "fan_in") == {"0.weight": 37.5, "2.weight": 16.0}
    for name in table.PENALTIES:
        assert table.widths(net, table.Fit(name, "Bayesian", 0.0, 0), "fan_in") == pytest.approx((1.0, 1.0))
        # a lambda 100 times smaller gives a prior 10 times as wide for squares, 100 times for norms
        wide = 10.0 if name == "l2" else 100.0
        assert table.widths(net, table.Fit(name, "Bayesian", -2.0, 0), "fan_in") == pytest.approx((wide, wide))


def test_the_factor_in_nats_is_lambda_times_the_rows_times_that_of_the_layer(table: ModuleType):
    net = nn.Sequential(nn.Linear(32, 10))
    penalty = table.regulariser(net, table.Fit("l2", "Bayesian", 1.0, 0), "fan_in")
    assert isinstance(penalty, penalties.L2)
    assert penalty.factors(net) == pytest.approx({"0.weight": 160.0})


def test_the_network_is_initialised_with_the_variance_of_the_rule_and_reproducibly_by_seed(
    table: ModuleType, problem: Any
):
    training = table.Training(width=8)
    one, same, other = (table.network(problem, training, seed) for seed in (0, 0, 1))
    assert torch.equal(one[5].weight, same[5].weight)
    assert not torch.equal(one[5].weight, other[5].weight)
    weights = one[5].weight  # (32, 64): the variance of 2,048 numbers has a standard error of 3 %, and 5 are allowed
    assert weights.var().item() * weights.shape[1] == pytest.approx(1.0, abs=0.16)
    assert one[5].bias.abs().max().item() == 0


def test_vgg19_has_sixteen_convolutions_and_accepts_small_images(table: ModuleType):
    net = table.vgg19(torch.Size((1, 28, 28)), 10, 0)
    convolutions = [m for m in net if isinstance(m, nn.Conv2d)]
    assert [m.out_channels for m in convolutions] == [n for n in table.VGG19_CHANNELS if n]
    assert len(convolutions) == 16
    with torch.no_grad():
        assert net.eval()(torch.zeros(1, 1, 28, 28)).shape == (1, 10)


class FakeRun:
    """Stand-in for a fit, whose score has a single maximum over the decades of lambda."""

    def __init__(self, table: ModuleType, top: float) -> None:
        self.table, self.top = table, top
        self.asked: list[Any] = []

    def __call__(self, fit: Any) -> Any:
        self.asked.append(fit)
        value = 0.9 - 0.01 * abs(fit.decades - self.top)
        return self.table.Score(value, value, 0.0)


@pytest.mark.parametrize("top", [-1.0, -3.0, 1.5])
def test_the_search_finds_the_maximum_and_extends_the_grid_if_needed(table: ModuleType, top: float):
    fake_run = FakeRun(table, top)
    results = table.Results(fake_run, lambda _: None)
    assert table.search(results, "l2", "Bayesian", [-2.0, -1.5, -1.0, -0.5, 0.0], range(2)) == top
    assert len(fake_run.asked) == len(set(fake_run.asked))  # no fit is run twice


def test_the_search_stops_if_smaller_is_always_better(table: ModuleType):
    results = table.Results(FakeRun(table, -100.0), lambda _: None)
    best = table.search(results, "l2", "usual", [-0.5, 0.0], range(1))
    assert best == -0.5 - table.MAX_GRID_EXTENSIONS * table.GRID_STEP_DECADES


def test_a_diverged_fit_is_never_the_best(table: ModuleType):
    def run(fit: Any) -> Any:
        value = math.nan if fit.decades > -1 else 0.5 + 0.1 * fit.decades
        return table.Score(value, value, 0.0)

    assert table.search(table.Results(run, lambda _: None), "l2", "usual", [-2.0, -1.5, -1.0, -0.5], range(1)) == -1.0


def test_the_table_of_a_small_problem_has_every_row(table: ModuleType, problem: Any):
    training = table.Training(width=2, epochs=4, batch_size=20, learning_rate=1e-2)
    said: list[str] = []
    columns = table.tabulate(problem, training, ["l2", "group"], [-1.5, -1.0, -0.5], 2, 1, said.append)
    text = table.table(columns, problem.rows)
    for row in (
        "usual, best lambda",
        "Bayesian, best lambda",
        "Bayesian, lambda_Th",
        "lambda_Th / lambda*",
        "prior sd",
    ):
        assert row in text
    assert [column.penalty for column in columns] == ["l2", "group"]
    assert all(len(column.theory) == 2 and max(column.theory) <= 1 for column in columns)
    for column, p in zip(columns, (2, 1), strict=True):
        wanted = 10 ** (-column.best_bayesian / p)
        assert column.widths_bayesian == pytest.approx((wanted, wanted))
    assert text in said[-1]


def test_binary_batches_and_png_files_give_the_same_images(table: ModuleType, tmp_path: Path):
    image = pytest.importorskip("PIL.Image")
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (6, 3, 32, 32), generator=generator, dtype=torch.uint8)
    labels = torch.tensor([3, 1, 4, 1, 5, 9], dtype=torch.uint8)
    binary, png = tmp_path / "binary", tmp_path / "png"
    binary.mkdir()
    png.mkdir()
    rows = torch.cat([labels[:, None], pixels.reshape(6, -1)], 1)
    (binary / "data_batch_1.bin").write_bytes(bytes(rows.flatten().tolist()))
    flat = bytes(pixels.permute(0, 2, 3, 1).flatten().tolist())
    image.frombytes("RGB", (1024, 6), flat).save(png / "data_batch_1.png")
    (png / "train_lables.json").write_text(json.dumps(labels.tolist()))
    for folder in (binary, png):
        x, y = table.cifar(folder, "train")
        assert torch.equal(x, pixels.float() / 255)
        assert y.tolist() == labels.tolist()
    with pytest.raises(SystemExit, match="No CIFAR-10"):
        table.cifar(tmp_path, "train")


@pytest.fixture(scope="module")
def questions() -> ModuleType:
    pytest.importorskip("sklearn")
    return load("questions")


def test_one_penalty_has_a_prior_for_some_families_only(questions: ModuleType):
    found = {(name, family): certificate.valid for name, family, certificate in questions.compare_families()}
    plain, whole = ({f: v for (n, f), v in found.items() if n == name} for name in dict.fromkeys(n for n, _ in found))
    assert plain == {"dirac": True, "gaussian": False, "laplace": False, "uniform": False, "gaussian, scale 1": True}
    assert whole == {"dirac": True, "gaussian": True, "laplace": False, "uniform": False, "gaussian, scale 1": True}


def test_the_questions_use_separate_training_and_test_rows(questions: ModuleType):
    (x, y), (away, labels) = questions.digits()
    assert (len(x), len(y), len(away), len(labels)) == (1000, 1000, 797, 797)
    setup = questions.Setup((x, y), (away, labels), steps=5, samples=2)
    assert questions.best_temperature(setup, (1.0,)).temperatures == (1.0,)
    assert set(questions.best_width(setup, (1.0,))) == {"MAP", "MeanField"}
    scores = questions.best_variance(setup, depth=2, width=5, seeds=1)
    assert list(scores) == ["glorot", "edge of chaos"]
