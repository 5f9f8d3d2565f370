"""Compare methods on one model and one data set.

Every method is fitted to the same rows and scored on the same held-out rows, and the scores form one table. If a method
fails, the error message replaces the scores in its row and the other methods are not affected.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from priory import evaluate
from priory.analysis.comparison_table import Comparison, standard_error
from priory.analysis.stacking import is_density_of_rows, log_densities
from priory.core.data import Data
from priory.core.errors import is_integer, require
from priory.fitting.fit import fit
from priory.fitting.identity import repr_of
from priory.methods.base import Method


def compare(
    model: Any,
    data: Any,
    methods: Sequence[Any] | Mapping[str, Any],
    test: Any = 0.2,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    samples: int = 64,
    seed: int = 0,
    temperature: float = 1.0,
    tempers: str = "likelihood",
    progress: bool = True,
) -> Comparison:
    """Fit each method to the same rows and score it on the same held-out rows.

    A density has no predictions: its score is the log pointwise predictive density of the held-out rows,
    log 1/S sum_s p(y_i | w_s) over draws w_s of the posterior, and the table has no RMSE and no calibration.

    Args:
        model: A model with a likelihood, or a density with a `log_likelihood`.
        data: Inputs and targets, such as (X, y), or the data of the density.
        methods: A list of methods, or a dict from names of your choice to methods.
        test: A pair (X, y), data of the density, or the fraction of the rows of `data` to hold out. Default: 0.2.
        epochs: Passes over the data, as in `fit`. Default: None, the length of each method.
        steps: Optimiser steps, as in `fit`; give either `epochs` or `steps`. Default: None.
        batch_size: Rows per minibatch, as in `fit`. Default: None, chosen from the data.
        samples: Posterior draws per prediction. Default: 64.
        seed: Seed of the split, of every fit and of the predictions. Default: 0.
        temperature: Temperature T of every fit. Default: 1.0.
        tempers: "likelihood" or "posterior", the density that the temperature applies to. Default: "likelihood".
        progress: Whether to show progress bars. Default: True.

    Returns:
        The scores, posteriors and predictions of all methods. A method that raises an error has the message in its
        row and no posterior.

    Raises:
        InputError: If an argument is invalid. Errors of a method are recorded instead.

    Example:
        >>> import torch
        >>> import priory as pr
        >>> X = torch.linspace(-1, 1, 50)[:, None]
        >>> model = pr.Model(torch.nn.Linear(1, 1), pr.Gaussian(0.1))
        >>> methods = [pr.MAP(), pr.Laplace()]
        >>> table = pr.compare(model, (X, X[:, 0]), methods, steps=1000, progress=False)
        >>> [row["method"] for row in table.rows], table.columns
        (['MAP', 'Laplace'], ['method', 'nll', 'rmse', 'calibration', 'fit_seconds', 'predict_seconds', 'status'])
    """
    named = _named(methods)
    density = is_density_of_rows(model)
    known = density or hasattr(model, "likelihood")
    must = "be a Model, with a likelihood, or a Density with a log_likelihood"
    require(known, "model", "compare", must, type(model).__name__)
    require(
        is_integer(samples, 1),
        "samples",
        "compare",
        "be an integer >= 1",
        samples,
    )
    for name, value in (("epochs", epochs), ("steps", steps), ("batch_size", batch_size)):
        ok = value is None or is_integer(value, 1)
        require(ok, name, "compare", "be an integer >= 1", value)
    require(epochs is None or steps is None, "steps", "compare", "be left out when epochs are given", steps)
    rows_to_fit, (inputs, targets) = (split_density if density else split_rows)(data, test, seed, batch_size)

    options: dict[str, Any] = {"epochs": epochs, "steps": steps, "seed": seed}
    options |= {"temperature": temperature, "tempers": tempers, "progress": progress}
    rows, posteriors, predictions, pointwise = [], {}, {}, {}
    for name, method in named.items():
        row: dict[str, Any] = {"method": name, "error": None}
        rows.append(row)
        try:
            began = time.perf_counter()
            posteriors[name] = posterior = fit(model, rows_to_fit, method, **options)
            row["fit_seconds"] = time.perf_counter() - began
            began = time.perf_counter()
            if density:
                losses = -log_densities(posterior, inputs, samples, seed).cpu()
                row["predict_seconds"] = time.perf_counter() - began
                row |= {"nll": losses.mean().item(), "nll_error": standard_error(losses)}
                row["status"] = posterior.status.name
                pointwise[name] = losses
                continue
            prediction = posterior.predict(inputs, samples=samples, seed=seed)
            row["predict_seconds"] = time.perf_counter() - began
            row["status"] = posterior.status.name
            row |= _scores(prediction, targets)
        except Exception as error:
            row["error"] = str(error).strip() or type(error).__name__
            continue
        predictions[name] = prediction
        pointwise[name] = -prediction.log_prob(targets).detach().double().cpu()
    about = _about(model, rows_to_fit, inputs, targets, posteriors, options, samples)
    baseline = None if density else _baseline(model, rows_to_fit, targets)
    return Comparison(rows, posteriors, predictions, inputs, targets, about, baseline, pointwise, not density)


def _named(methods: Any) -> dict[str, Any]:
    """Return the methods by name: the dict's names, or class names with the options needed to distinguish them."""
    many = isinstance(methods, Sequence | Mapping) and not isinstance(methods, str)
    require(many, "methods", "compare", "be a list of methods, or a dict from names to methods", methods)
    require(len(methods) > 0, "methods", "compare", "hold at least one method", methods)
    for method in methods.values() if isinstance(methods, Mapping) else methods:
        kind = isinstance(method, type)
        require(not kind, "methods", "compare", "hold methods, not classes: MAP(), not MAP", method)
        require(isinstance(method, Method), "methods", "compare", "hold methods such as MAP() and MeanField()", method)
    if isinstance(methods, Mapping):
        for name in methods:
            require(isinstance(name, str), "methods", "compare", "have text as names", name)
        return dict(methods)
    named: dict[str, Any] = {}
    members: list[Any] = list(methods)
    classes = [type(method).__name__ for method in members]
    for method, name in zip(members, classes, strict=True):
        label = name if classes.count(name) == 1 else repr_of(method).removesuffix("()")
        copies = sum(other == label or other.startswith(f"{label} #") for other in named)
        named[f"{label} #{copies + 1}" if copies else label] = method
    return named


def split_rows(data: Any, test: Any, seed: int, batch_size: int | None = None) -> tuple[Data, tuple[Any, Tensor]]:
    """Split the rows into those to fit and those held out: `test` itself, or a random fraction of `data`."""
    require(data is not None, "data", "compare", "be given", data)
    rows = Data.of(data, batch_size)
    if isinstance(test, tuple | list):
        require(len(test) >= 2, "test", "compare", "be inputs and targets, (X, y)", f"{len(test)} part")
        return rows, _inputs_and_targets(Data.of(tuple(test)))
    fraction = isinstance(test, float) and 0 < test < 1
    require(fraction, "test", "compare", "be a pair (X, y), or a fraction between 0 and 1", test)
    enough = 1 <= round(test * (rows.num_data or 0)) < (rows.num_data or 0)
    require(enough, "test", "compare", f"hold out at least one of the {rows.num_data} rows and leave one", test)
    kept, held = rows.split(test, seed)
    return kept, _inputs_and_targets(held)


def split_density(data: Any, test: Any, seed: int, batch_size: int | None = None) -> tuple[Data, tuple[Any, Tensor]]:
    """Split the rows of a density into those to fit and those held out, in the form in which the data were given.

    The held-out rows come with their last part, which has one entry per row.
    """
    require(data is not None, "data", "compare", "be given", data)
    rows = Data.of(data, batch_size)
    if isinstance(test, float):
        enough = 0 < test < 1 and 1 <= round(test * (rows.num_data or 0)) < (rows.num_data or 0)
        require(enough, "test", "compare", f"hold out at least one of the {rows.num_data} rows and leave one", test)
        rows, held = rows.split(test, seed)
    else:
        must = "be data of the density, or a fraction between 0 and 1"
        require(test is not None and not isinstance(test, int), "test", "compare", must, test)
        held = Data.of(test)
    parts = next(iter(held.blocks(held.num_data or 1)))
    return rows, (parts[0] if held.single else tuple(parts), parts[-1])


def _inputs_and_targets(held: Data) -> tuple[Any, Tensor]:
    *inputs, targets = next(iter(held.blocks(held.num_data or 1)))
    return inputs[0] if len(inputs) == 1 else tuple(inputs), targets


def _scores(prediction: Any, targets: Tensor) -> dict[str, float]:
    """Compute the numbers of one row of the table."""
    losses = -prediction.log_prob(targets).detach().double().cpu()
    quality = "accuracy" if prediction.classes else "rmse"
    return {
        "nll": losses.mean().item(),
        "nll_error": standard_error(losses),
        quality: getattr(evaluate, quality)(prediction, targets),
        "calibration": evaluate.calibration_error(prediction, targets),
    }


def _baseline(model: Any, data: Data, targets: Tensor) -> dict[str, Any] | None:
    """Score a prediction that ignores the inputs: the frequencies of the targets, or their mean and deviation."""
    if data.tensors is None or targets.ndim != 1:
        return None
    seen = data.tensors[-1].double().cpu()
    targets = targets.cpu()
    row: dict[str, Any] = {"method": "(no inputs)", "error": None}
    if model.likelihood.classes:
        count = int(max(seen.max(), targets.max())) + 1
        frequency = (torch.bincount(seen.long(), minlength=max(2, count)) + 1.0).double()  # one more of each: no zeros
        frequency /= frequency.sum()
        losses = -frequency.log()[targets.long()]
        row["accuracy"] = (targets.long() == frequency.argmax()).double().mean().item()
    elif getattr(model.likelihood, "discrete", False):
        return None
    else:
        guess = torch.distributions.Normal(seen.mean(), seen.std(unbiased=False).clamp_min(1e-12))
        losses = -guess.log_prob(targets.double())
        row["rmse"] = math.sqrt((targets.double() - seen.mean()).square().mean().item())
    return row | {"nll": losses.mean().item(), "nll_error": standard_error(losses)}


def _about(
    model: Any,
    data: Data,
    inputs: Any,
    targets: Tensor,
    posteriors: dict[str, Any],
    options: dict[str, Any],
    samples: int,
) -> dict[str, str]:
    """Describe the settings of the comparison, as text by name."""
    about = {"rows to fit": str(data.num_data), "rows held out": str(len(targets))}
    if isinstance(inputs, Tensor):
        about["columns"] = " x ".join(map(str, inputs.shape[1:])) or "1"
    about["network"] = str(getattr(model, "net", type(model).__name__))
    about["model"] = str(model)
    lengths = {name: max(map(len, one.history.values()), default=0) for name, one in posteriors.items()}
    about["steps"] = ", ".join(f"{name}: {steps}" for name, steps in lengths.items())
    about["batch size"] = str(data.batch_size)
    about["temperature"] = f"{options['temperature']:g} (tempers the {options['tempers']})"
    about["samples of the posterior"] = str(samples)
    about["seed"] = str(options["seed"])
    about["versions"] = f"priory {_version('priory')}, torch {torch.__version__}, Python {platform.python_version()}"
    return about


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(from source)"
