"""Sweep the temperature T: how do the scores of predictions depend on it, and which T is best?

    tempers="likelihood"   p(D|w)^(1/T) p(w)        variational loss E_q[-log p(D|w)] + T KL(q || p)
    tempers="posterior"    (p(D|w) p(w))^(1/T)      variational loss E_q[-log p(D|w) - log p(w)] - T H(q)

A posterior at T < 1 is called cold. Cold posteriors often predict better, which is the cold posterior effect (Wenzel et
al. 2020, "How good is the Bayes posterior in deep neural networks really?"). The meaning of T depends on the parameters
of q that the method learns. With learnt scales, the penalty at T other than 1 is not the KL divergence to any prior:
its heat residual is rho = 1 - T everywhere. With fixed scales, or at a point, T (-log p) = -log p^T, which is only a
wider prior. `penalties.prior_from_penalty` certifies both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.distributions import Normal

from priory import evaluate
from priory.analysis.comparison import split_rows
from priory.analysis.comparison_table import standard_error
from priory.core.errors import is_integer, require
from priory.core.streams import stream
from priory.core.tables import counted, text_table
from priory.evaluate.scores import matched, top_class
from priory.fitting.fit import fit
from priory.fitting.identity import repr_of
from priory.methods.base import check_method
from priory.models.base import has_network
from priory.models.model import Model
from priory.penalties import Certificate, penalty_from_prior, prior_from_penalty
from priory.posteriors import Mixture, Posterior, Variational
from priory.posteriors.masked import Masked

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure

    from priory.predictive import Prediction

DEFAULT_TEMPERATURES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
FUNCTION_NAME = "temperature_sweep"
BOOTSTRAP_SETS = 200  # for the standard error of a calibration error
SCORE_TITLES = {"nll": "NLL", "accuracy": "accuracy", "ece": "ECE", "rmse": "RMSE"}
Learnt = Literal["scales", "rates", "point", "draws"]


@dataclass(frozen=True)
class TemperatureSweep:
    """The result of `temperature_sweep`: scores against temperature. Print it or plot it.

    Attributes:
        temperatures: The temperatures in increasing order.
        scores: The scores by name ("nll" with "accuracy" and "ece", or with "rmse"), one value per temperature, NaN
            where the fit failed. Also available as tensors: `nll`, `accuracy`, `ece` and `rmse`.
        errors: The standard errors of the scores over the held-out rows, in the same form.
        tempers: "likelihood" or "posterior", the density that the temperature applies to.
        learnt: The part of the posterior that the method learns: "scales" of q, "rates" of dropout, a "point", or
            "draws" for samplers and for Gaussians around a mode.
        family: The family of q, as `prior_from_penalty` calls it.
        about: One line with the method, the numbers of rows and the seed.
        failures: Error messages of the fits that failed, by temperature.
        posteriors: The fitted posteriors by temperature.
        pointwise: The negative log predictive density of each held-out row, (n,), by temperature.
    """

    temperatures: tuple[float, ...]
    scores: dict[str, tuple[float, ...]]
    errors: dict[str, tuple[float, ...]]
    tempers: str
    learnt: Learnt
    family: str
    about: str
    failures: dict[float, str] = field(default_factory=dict)
    posteriors: dict[float, Posterior] = field(default_factory=dict, repr=False)
    pointwise: dict[float, Tensor] = field(default_factory=dict, repr=False)

    @property
    def T(self) -> Tensor:
        """The temperatures in increasing order."""
        return torch.tensor(self.temperatures, dtype=torch.float64)

    @property
    def nll(self) -> Tensor:
        """Mean negative log predictive density of the held-out rows, in nats per row."""
        return self._score("nll")

    @property
    def accuracy(self) -> Tensor:
        """Share of the held-out rows whose most probable class is correct."""
        return self._score("accuracy")

    @property
    def ece(self) -> Tensor:
        """Expected calibration error."""
        return self._score("ece")

    @property
    def rmse(self) -> Tensor:
        """Root mean squared error, for numeric targets."""
        return self._score("rmse")

    def _score(self, name: str) -> Tensor:
        require(name in self.scores, name, "TemperatureSweep", f"be one of {', '.join(self.scores)}", name)
        return torch.tensor(self.scores[name], dtype=torch.float64)

    @property
    def best(self) -> float:
        """T*, the temperature with the lowest NLL; NaN if every fit failed."""
        scored = [(nll, t) for nll, t in zip(self.scores["nll"], self.temperatures, strict=True) if math.isfinite(nll)]
        return min(scored)[1] if scored else math.nan

    def difference(self, first: float, second: float) -> tuple[float, float]:
        """Return the NLL at one temperature minus the NLL at another, with the standard error of the difference.

        Args:
            first: A temperature that was scored.
            second: The temperature to subtract.

        Returns:
            The mean difference over the held-out rows, taken row by row, and its standard error, in nats per row.
        """
        for t in (first, second):
            require(t in self.pointwise, "temperatures", "difference", f"be among {sorted(self.pointwise)}", t)
        gap = self.pointwise[first] - self.pointwise[second]
        return gap.mean().item(), standard_error(gap)

    @property
    def verdict(self) -> str:
        """One sentence with T* that says whether its lead over T = 1 exceeds the noise of the held-out rows."""
        if math.isnan(self.best):
            return "No temperature could be scored."
        named = f"T* = {self.best:g}"
        if self.best in (self.temperatures[0], self.temperatures[-1]) and len(self.temperatures) > 1:
            named += ", at the end of the grid: the best may lie beyond"
        if self.best == 1:
            return f"{named}: no other temperature of the grid predicts better than the untempered posterior."
        if 1.0 not in self.pointwise:
            return f"{named}."
        gap, error = self.difference(1.0, self.best)
        clear = "more than these rows' noise" if gap > 2 * error else "within these rows' noise"
        return f"{named}. It lies {gap:.4f} ± {error:.4f} nats per row below T = 1, {clear}."

    @cached_property
    def certificate(self) -> Certificate | None:
        """The certificate of the penalty at T* for a standard normal prior; None where rates or draws are learnt."""
        if self.learnt in ("rates", "draws") or math.isnan(self.best):
            return None
        return tempered_certificate(self.best, self.family if self.learnt == "scales" else "dirac", self.tempers)

    @property
    def statement(self) -> str:
        """Whether the objective at T* is Bayesian, and for which prior."""
        return statement(self.best, self.learnt, self.tempers, self.certificate)

    def plot(self, path: str | Path | None = None) -> Figure:
        """Plot every score against T with bands of two standard errors, T* and the statement.

        Args:
            path: A file to save the figure to. Default: None, which saves nothing.

        Returns:
            The matplotlib figure.
        """
        from priory.plot.sweeps import temperatures

        figure = temperatures(self)
        if path is not None:
            figure.savefig(path)
        return figure

    def __str__(self) -> str:
        lines = [["T", *(SCORE_TITLES[name] for name in self.scores)]]
        for i, t in enumerate(self.temperatures):
            cells = [
                f"{values[i]:.4f} ± {self.errors[name][i]:.4f}" if math.isfinite(values[i]) else "failed"
                for name, values in self.scores.items()
            ]
            lines.append([f"{t:g}{' *' if t == self.best else '  '}", *cells])
        failed = [f"T = {t:g} failed: {why}" for t, why in self.failures.items()]
        return "\n".join([self.about, "", *text_table(lines, "r"), "", *failed, self.verdict, self.statement])


def temperature_sweep(
    model: Model,
    data: Any,
    method: Any,
    grid: Sequence[float] = DEFAULT_TEMPERATURES,
    test: Any = 0.2,
    *,
    tempers: Literal["likelihood", "posterior"] = "likelihood",
    epochs: int | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    samples: int = 64,
    seed: int = 0,
    progress: bool = False,
) -> TemperatureSweep:
    """Fit a method at each temperature of the grid and score it on the same held-out rows.

    Args:
        model: A model with a network and a likelihood.
        data: Inputs and targets, such as (X, y).
        method: The method to fit at every temperature.
        grid: Positive temperatures, each once. Default: 0.001 to 3, about two per decade.
        test: A pair (X, y), or the fraction of the rows of `data` to hold out. Default: 0.2.
        tempers: "likelihood" for p(D|w)^(1/T) p(w), or "posterior" for (p(D|w) p(w))^(1/T). Default: "likelihood".
        epochs: Passes over the data, as in `fit`. Default: None, the length of the method.
        steps: Optimiser steps, as in `fit`; give either `epochs` or `steps`. Default: None.
        batch_size: Rows per minibatch, as in `fit`. Default: None, chosen from the data.
        samples: Posterior draws per prediction. Default: 64.
        seed: Seed of the split, of every fit and of the predictions. Default: 0.
        progress: Whether to show progress bars. Default: False.

    Returns:
        The scores at every temperature with their standard errors over the held-out rows. The errors don't include
        the variation between seeds. A fit that diverges is recorded as a failure at its temperature.

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> import torch
        >>> import priory as pr
        >>> X = torch.linspace(-1, 1, 50)[:, None]
        >>> model = pr.Model(torch.nn.Linear(1, 1), pr.Gaussian(0.1))
        >>> sweep = pr.temperature_sweep(model, (X, X[:, 0]), pr.MAP(), (0.1, 1.0), steps=1000)
        >>> sweep.temperatures, sweep.nll.shape
        ((0.1, 1.0), torch.Size([2]))
    """
    require(has_network(model), "model", FUNCTION_NAME, "be a Model, with a likelihood", type(model).__name__)
    check_method(method, "method", FUNCTION_NAME)
    numbers = _temperatures(grid)
    pair = isinstance(test, (tuple, list)) and len(test) >= 2
    fraction = isinstance(test, float) and 0 < test < 1
    require(pair or fraction, "test", FUNCTION_NAME, "be a pair (X, y), or a fraction between 0 and 1", test)
    require(data is not None, "data", FUNCTION_NAME, "be given", data)
    require(is_integer(samples, 1), "samples", FUNCTION_NAME, "be an integer >= 1", samples)
    known = tempers in ("likelihood", "posterior")
    require(known, "tempers", FUNCTION_NAME, "be 'likelihood' or 'posterior'", repr(tempers))

    rows, (inputs, targets) = split_rows(data, test, seed, batch_size)
    options: dict[str, Any] = {"epochs": epochs, "steps": steps, "seed": seed, "tempers": tempers, "progress": progress}
    found: dict[float, dict[str, tuple[float, float]]] = {}
    failures: dict[float, str] = {}
    posteriors: dict[float, Posterior] = {}
    pointwise: dict[float, Tensor] = {}
    for t in numbers:
        try:
            posterior = fit(model, rows, method, temperature=t, **options)
            prediction = posterior.predict(inputs, samples=samples, seed=seed)
            found[t] = scored(prediction, targets)
        except RuntimeError as error:  # the fit diverged; an InputError, which the user has to fix, is raised
            failures[t] = str(error).strip()
            continue
        posteriors[t] = posterior
        pointwise[t] = -prediction.log_prob(targets).detach().double().cpu()
    names = list(next(iter(found.values()), {"nll": None}))
    missing = (math.nan, math.nan)
    scores, errors = (
        {name: tuple(found.get(t, {}).get(name, missing)[part] for t in numbers) for name in names} for part in (0, 1)
    )
    learnt, family = learns(method, next(iter(posteriors.values()), None))
    about = (
        f"{repr_of(method)}, {counted(int(rows.num_data or 0), 'row')} to fit, {len(targets)} held out, seed {seed}, "
        f"T tempers the {tempers}"
    )
    return TemperatureSweep(numbers, scores, errors, tempers, learnt, family, about, failures, posteriors, pointwise)


def _temperatures(grid: Any) -> tuple[float, ...]:
    many = isinstance(grid, (Sequence, Tensor)) and not isinstance(grid, str) and len(grid) > 0
    require(many, "grid", FUNCTION_NAME, "be temperatures, such as (0.1, 0.3, 1.0)", grid)
    values = grid.tolist() if isinstance(grid, Tensor) else list(grid)
    numbers = all(isinstance(t, (int, float)) and not isinstance(t, bool) and 0 < t < math.inf for t in values)
    require(numbers, "grid", FUNCTION_NAME, "hold positive numbers", values)
    require(len(set(values)) == len(values), "grid", FUNCTION_NAME, "hold each temperature once", values)
    return tuple(sorted(float(t) for t in values))


# The meaning of a temperature.


def learns(method: Any, posterior: Posterior | None) -> tuple[Learnt, str]:
    """Return the part of the posterior that a method learns (scales, rates, a point or draws), and the family of q."""
    while isinstance(posterior, Mixture):
        posterior = posterior.members[0]
    if posterior is not None and method.traits.learns_rates:
        return "rates", "dirac"
    if posterior is None or posterior.point or isinstance(posterior, Masked) or method.traits.fixed_scales:
        return "point", "dirac"
    if isinstance(posterior, Variational):
        return "scales", getattr(posterior.family, "base", "gaussian")
    return "draws", "dirac"


def tempered_certificate(temperature: float, family: str, tempers: str = "likelihood") -> Certificate:
    """Certify the term that a tempered objective adds to E_q[-log p(D|w)], for a standard normal prior.

    The term is T KL(q || p), or -E_q[log p] - T H(q), which is T times the KL divergence to p^(1/T).

    >>> tempered_certificate(0.1, "gaussian").kind, tempered_certificate(0.1, "dirac").valid
    ('tempered', True)
    """
    one = torch.ones((), dtype=torch.float64)
    kept = 1.0 if tempers == "likelihood" else temperature
    penalty: Any = penalty_from_prior(Normal(0 * one, kept**0.5 * one), family)
    return prior_from_penalty(lambda *at: temperature * penalty(*at), family).certificate


def statement(temperature: float, learnt: Learnt, tempers: str, certificate: Certificate | None = None) -> str:
    """Explain in words what the certificate says about the objective at T."""
    if math.isnan(temperature):
        return ""
    cold = f"T = {temperature:g}"
    if learnt == "point" and tempers == "posterior":
        return "Certificate: a point that tempers the whole posterior does not depend on T: the mode is the same."
    if learnt == "point":
        by = temperature**-0.5
        width = f"a Gaussian prior {max(by, 1 / by):.2g} times {'wider' if by >= 1 else 'narrower'}"
        return (
            f"Certificate: at a point, or with fixed scales, T (-log p) is minus the log of the prior p^T, so that "
            f"any T is Bayesian: {cold} is {width if temperature != 1 else 'the prior itself'}. With learnt scales it "
            f"would be Bayesian for no prior."
        )
    if learnt == "rates":
        fixed = "only be a wider prior" if tempers == "likelihood" else "change nothing"
        return (
            f"Certificate: with learnt rates T multiplies the entropy of the masks too, which no prior can: {cold} is "
            f"Bayesian{'' if temperature == 1 else ' for no prior'}. With fixed rates it would {fixed}."
        )
    if learnt == "draws":
        return (
            f"Certificate: draws of a tempered posterior count each row 1/T times ({1 / temperature:.3g} at {cold}), "
            f"which no prior that is chosen before the data can do. At a point T would only be a wider prior."
        )
    if temperature == 1:
        return (
            "Certificate: T = 1 is Bayesian. With learnt scales any other T is so for no prior (rho = 1 - T); with "
            "fixed scales, or at a point, it would only be a wider prior."
        )
    verdict = "" if certificate is None else f" {certificate.verdict}"
    return (
        f"Certificate: with learnt scales {cold} is Bayesian for no prior: the heat residual is rho = 1 - T = "
        f"{1 - temperature:.3g}, everywhere.{verdict} With fixed scales, or at a point, it would only be a wider prior."
    )


# Scores with their standard errors.


def scored(prediction: Prediction, targets: Tensor) -> dict[str, tuple[float, float]]:
    """Return the NLL, and accuracy and calibration error or RMSE, each with its standard error over the rows."""
    losses = -prediction.log_prob(targets).detach().double().cpu()
    found = {"nll": (losses.mean().item(), standard_error(losses))}
    if prediction.classes:
        confidence, correct = (part.double().cpu() for part in top_class(prediction, targets, FUNCTION_NAME))
        found["accuracy"] = (correct.mean().item(), standard_error(correct))
        ece = evaluate.expected_calibration_error(prediction, targets)
        found["ece"] = (ece, resampled_error(confidence, correct))
    else:
        y = matched(targets, prediction.mean, FUNCTION_NAME)
        squares = (prediction.mean.double() - y.double()).square().reshape(len(y), -1).mean(-1).cpu()
        rmse = squares.mean().sqrt().item()
        found["rmse"] = (rmse, standard_error(squares) / (2 * rmse) if rmse > 0 else 0.0)
    return found


def resampled_error(confidence: Tensor, correct: Tensor, bins: int = 15) -> float:
    """Return the bootstrap standard error of an expected calibration error."""
    generator, count = stream(0, "resampled"), len(confidence)
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)
    place = torch.bucketize(confidence, edges[1:-1])
    gap = correct - confidence
    values = []
    for _ in range(BOOTSTRAP_SETS):
        rows = torch.randint(count, (count,), generator=generator)
        values.append(torch.bincount(place[rows], weights=gap[rows], minlength=bins).abs().sum() / count)
    return torch.stack(values).std().item()
