"""Planted failures are named, and healthy fits are believed: the zoo of `benchmarks/check.py` at one seed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "_check_zoo.py"
spec = importlib.util.spec_from_file_location("check_zoo", FILE)
assert spec is not None
assert spec.loader is not None
zoo = sys.modules["check_zoo"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(zoo)

QUICK = ("mean-field on a correlated target", "Laplace on a skewed target", "stuck chain", "noise too small")


def marked(names):
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", marked(zoo.FAILURES))
def test_a_planted_failure_is_named(name):
    case = zoo.FAILURES[name]
    posterior, held_out = case.make(0)
    check = posterior.check(held_out)
    assert {item.name for item in check.failures} & set(case.failing), check
    assert not check.verdict.startswith("Believe it")


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.HEALTHY)
def test_a_healthy_fit_is_believed(name):
    case = zoo.HEALTHY[name]
    posterior, held_out = case.make(0)
    check = posterior.check(held_out)
    assert check.verdict.startswith(case.verdict), check


def test_a_check_is_a_picture():
    pytest.importorskip("matplotlib")
    posterior, held_out = zoo.FAILURES["noise too small"].make(0)
    figure = posterior.check(held_out).plot()
    titles = [ax.get_title(loc=where) for ax in figure.axes for where in ("left", "center")]
    assert any("Where targets lie" in title for title in titles)
    assert any("Importance ratios" in title for title in titles)
