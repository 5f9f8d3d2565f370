"""Warnings point at the line in the user's code."""

from __future__ import annotations

import warnings

import torch

from priory.core.errors import PrioryWarning, warn


def test_a_warning_points_at_the_first_line_outside_the_package() -> None:
    inside = {"__name__": "priory.somewhere.deep", "warn": warn}
    exec("def outer(): return inner()\ndef inner(): warn('Something.')", inside)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        inside["outer"]()
    assert [(w.filename, w.category, str(w.message)) for w in said] == [(__file__, PrioryWarning, "Something.")]


def test_frames_of_torch_are_skipped() -> None:
    inside = {"__name__": "priory.somewhere", "warn": warn, "torch": torch}
    exec("def inner(x):\n    warn('Something.')\n    return x\ndef outer(): torch.vmap(inner)(torch.ones(2))", inside)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        inside["outer"]()
    assert [w.filename for w in said] == [__file__]


def test_a_warning_without_a_caller_outside_the_package_points_at_the_outermost_line() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warn("Something.")
    assert said[0].filename == __file__
