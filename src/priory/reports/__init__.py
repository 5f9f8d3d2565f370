"""HTML reports of a comparison: one self-contained page with the scores, figures, settings and a glossary."""

from __future__ import annotations

import math
import re
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from priory import evaluate, plot
from priory.analysis.comparison_table import Comparison, table_html
from priory.core.errors import extra, require
from priory.core.tables import counted
from priory.plot.penalties import equivalence
from priory.reports.page import definitions, number, page, picture

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["comparison_page", "write_comparison"]

INTERVAL_LEVEL = 0.9
GLOSSARY = {
    "NLL": "Negative log predictive density of the held-out targets, averaged over the rows, in nats. It "
    "rewards predictions that are accurate and have the right uncertainty; lower is better. Only differences matter: "
    "0.1 nats less is a probability 1.1 times as high.",
    "RMSE": "Root of the mean squared distance between predicted mean and target, in the target's units. It "
    "measures the mean only, not the uncertainty; lower is better.",
    "accuracy": "Fraction of the rows whose most probable class is correct; higher is better.",
    "calibration": "For regression: the distance between the level of a central interval and the fraction of targets "
    "inside it, averaged over the levels 10 % to 90 %. For classification: the expected calibration error, the "
    "distance between confidence and accuracy. 0 is perfect.",
    "± after a score": "One standard error: how much the score would vary with other held-out rows.",
    "epistemic": "Uncertainty about the weights. More data would shrink it.",
    "aleatoric": "Noise in the targets themselves. More data would not shrink it. The total variance is the "
    "sum of the two.",
    "ELBO": "Evidence lower bound: the objective of variational methods. It can't exceed the log probability of "
    "the data under the model.",
    "(no inputs)": "A baseline that ignores the inputs: the mean and standard deviation, or the class "
    "frequencies, of the training rows. A method that is not clearly better has learnt nothing.",
    "nat": "Unit of information for natural logarithms; one nat is 1.44 bits.",
}


def write_comparison(comparison: Comparison, path: str | Path, title: str = "Comparison of methods") -> Path:
    """Write the HTML page of a comparison to a file.

    Args:
        comparison: The result of `priory.compare`.
        path: The file to write, in an existing folder.
        title: Title of the page.

    Returns:
        The path of the file.

    Raises:
        InputError: If `path` is a folder, or lies in a folder that does not exist.
        MissingExtra: If matplotlib is not installed.
    """
    extra("matplotlib.figure", "plot")
    path = Path(path)
    require(not path.is_dir(), "path", "report", "be the name of a file", f"the folder {path}")
    require(path.parent.is_dir(), "path", "report", "lie in a folder that exists", str(path))
    path.write_text(comparison_page(comparison, title), encoding="utf-8")
    return path


def comparison_page(comparison: Comparison, title: str = "Comparison of methods") -> str:
    """The HTML page of a comparison: header, table of scores, one section per method, settings and glossary.

    Args:
        comparison: The result of `priory.compare`.
        title: Title of the page.

    Returns:
        The page as text.
    """
    names = [row["method"] for row in comparison.rows]
    links = ", ".join(f'<a href="#{_anchor(place)}">{escape(name)}</a>' for place, name in enumerate(names))
    parts = [
        f"<header><h1>{escape(title)}</h1>",
        f'<p class="lead">{escape(f"{comparison.verdict} {comparison.worse_than_baseline}".strip())}</p>',
        f'<p class="soft">In detail: {links}, '
        '<a href="#done">what was done</a>, <a href="#glossary">glossary</a>.</p></header>',
        "<main>",
        f'<h2 id="scores">Scores on the held-out rows</h2><div class="scroll">{table_html(comparison)}</div>',
        f'<p class="soft">{escape(_key(comparison))}</p>',
        _histories(comparison),
    ]
    parts += [_method(comparison, row, place) for place, row in enumerate(comparison.rows)]
    known = {term: text for term, text in GLOSSARY.items() if _used(term, comparison)}
    parts += [
        f'<h2 id="done">What was done</h2>{definitions(comparison.about)}',
        f'<h2 id="glossary">Glossary</h2>{definitions(known)}',
        f"</main><footer>Written by Priory. {escape(comparison.about.get('versions', ''))}.</footer>",
    ]
    return page(title, "\n".join(parts))


def _anchor(place: int) -> str:
    return f"method-{place + 1}"


def _key(comparison: Comparison) -> str:
    exception = " (accuracy: higher)" if "accuracy" in comparison.columns else ""
    text = f"The best value of each column is in bold; lower is better{exception}. "
    text += "NLL is in nats per row, ± one standard error."
    if comparison.baseline:
        text += " The last row is a baseline that ignores the inputs."
    return text


def _used(term: str, comparison: Comparison) -> bool:
    """Whether a term of the glossary applies to this comparison."""
    scores = {"RMSE": "rmse", "accuracy": "accuracy", "calibration": "calibration"}
    return scores.get(term, "nll") in comparison.columns and (term != "(no inputs)" or comparison.baseline is not None)


def _histories(comparison: Comparison) -> str:
    """The curves of all fits in one figure; empty unless at least two fits have one."""
    shared = [set(one.history) for one in comparison.posteriors.values() if one.history]
    if len(shared) < 2 or len(shared) < len(comparison.posteriors) or "nll" not in set.intersection(*shared):
        return ""
    ax = plot.history(comparison.posteriors, "nll")
    alt = f"Negative log-likelihood of the fitted rows, step by step, for {', '.join(comparison.posteriors)}."
    caption = "Fit to the training rows, step by step. A curve that still falls at its end needs more epochs."
    return f'<h3>How the fits went</h3><div class="figures">{picture(ax, alt, caption, wide=True)}</div>'


def _method(comparison: Comparison, row: dict[str, Any], place: int) -> str:
    name = row["method"]
    head = f'<section><h2 id="{_anchor(place)}">{escape(name)}</h2>'
    if row["error"] is not None:
        return f'{head}<p class="failed-note">This method failed: {escape(row["error"])}</p></section>'
    prediction, y = comparison.predictions.get(name), comparison.targets
    numbers = f'<div class="numbers">{"".join(_numbers(comparison, row, prediction, y))}</div>'
    figures = f'<div class="figures">{"".join(_figures(comparison, name, prediction, y))}</div>'
    status = f'<p class="soft">Status: {escape(str(comparison.posteriors[name].status))}</p>'
    return f"{head}{status}{numbers}{figures}</section>"


def _numbers(comparison: Comparison, row: dict[str, Any], prediction: Any, y: Tensor) -> list[str]:
    """One card per score, with its interpretation."""
    base = comparison.baseline or {}
    text = dict(zip(comparison.columns, comparison.cells()[comparison.rows.index(row)], strict=True))
    cards = [number(text["nll"], "NLL, nats per row; lower is better", _against_baseline(row, base))]
    seconds = f"and {row['predict_seconds']:.2g} s to predict {counted(len(y), 'row')}"
    times = number(f"{row['fit_seconds']:.3g} s", "to fit", seconds)
    if prediction is None:
        return [*cards, times]
    if prediction.classes:
        wrong = round((1 - row["accuracy"]) * y.numel())
        reading = f"Wrong on {wrong} of {counted(y.numel(), 'row')}"
        reading += (
            f"; always predicting the most frequent class: correct on {100 * base['accuracy']:.0f} %." if base else "."
        )
        cards.append(number(f"{100 * row['accuracy']:.1f} %", "accuracy; higher is better", reading))
    else:
        reading = f"Typical distance from prediction to target. The targets' own spread is {y.double().std():.4g}."
        cards.append(number(text["rmse"], "RMSE, in the target's units; lower is better", reading))
    cards.append(
        number(
            f"{row['calibration']:.3f}",
            "calibration error; 0 is perfect",
            _calibration_text(row, prediction, y),
        )
    )
    return [*cards, times]


def _against_baseline(row: dict[str, Any], base: dict[str, Any]) -> str:
    if not base:
        return "Rewards predictions that are accurate and have the right uncertainty."
    gain = base["nll"] - row["nll"]
    if not gain > row["nll_error"]:
        return f"Not clearly better than a baseline that ignores the inputs ({base['nll']:.4g})."
    factor = f"{math.exp(min(gain, 50)):.3g} times as probable"
    return f"{gain:.3g} less than a baseline that ignores the inputs: a typical target is {factor}."


def _calibration_text(row: dict[str, Any], prediction: Any, y: Tensor) -> str:
    """Compare the calibration error with the error that a perfect model would show by chance on as many rows."""
    chance, error = _chance_error(prediction, y), row["calibration"]
    text = f"With {counted(len(y), 'row')} a perfect model would show about {chance:.3f}, so this is "
    if error <= 1.5 * chance:
        text += "no more than chance."
    else:
        lean = _overconfidence(prediction, y)
        both = "overconfident in places, underconfident in others"
        way = "overconfident" if lean > 0.5 * error else "underconfident" if lean < -0.5 * error else both
        text += f"more than chance: the model is {way}."
    if prediction.classes:
        return text
    inside = float(evaluate.coverage(prediction, y, [INTERVAL_LEVEL]))
    return f"{text} The {100 * INTERVAL_LEVEL:.0f} % intervals hold {100 * inside:.0f} % of the targets."


def _overconfidence(prediction: Any, y: Tensor) -> float:
    """Mean difference between stated and observed frequencies: positive if overconfident."""
    if not prediction.classes:
        inside = evaluate.coverage(prediction, y).cpu()
        return sum(evaluate.LEVELS) / len(evaluate.LEVELS) - inside.mean().item()
    curve = evaluate.reliability(prediction, y)
    full = curve.count > 0
    gap = (curve.confidence - curve.frequency)[full] * curve.count[full]
    return float(gap.sum() / curve.count.sum())


def _chance_error(prediction: Any, y: Tensor) -> float:
    """Calibration error of a perfect model: the average of sqrt(2 p (1 - p) / (pi n)), a frequency's mean error."""
    if not prediction.classes:
        levels = evaluate.LEVELS
        return sum(math.sqrt(2 * p * (1 - p) / (math.pi * y.numel())) for p in levels) / len(levels)
    curve = evaluate.reliability(prediction, y)
    full = curve.count > 0
    p, rows = curve.confidence[full], curve.count[full]
    return float((rows * (2 * p * (1 - p) / (math.pi * rows)).sqrt()).sum() / rows.sum())


def _figures(comparison: Comparison, name: str, prediction: Any, y: Tensor) -> list[str]:
    figures = []
    posterior = comparison.posteriors[name]
    if posterior.history:
        alt = f"Curve of the fit of {name}, step by step."
        caption = f"Every step (faint) and the running mean; far outliers are cut off.{_jump_note(posterior)}"
        figures.append(picture(plot.history(posterior), alt, caption))
    if prediction is None:
        return figures
    ax = plot.calibration(prediction, y)
    caption = "The dashed line is perfect calibration; the grey band is the sampling error of these rows. "
    caption += "Below: overconfident. Above: underconfident."
    figures.append(picture(ax, f"Calibration of {name}: {_words(ax.get_title(loc='left'))}.", caption))
    ax = plot.predictive(prediction, comparison.inputs, y, level=INTERVAL_LEVEL)
    if prediction.classes:
        caption = "Wrong rows should lie to the left, where the confidence is low."
    else:
        caption = "Dark: epistemic uncertainty alone. Light: with the noise of the targets."
    figures.append(picture(ax, f"Predictions of {name}: {_words(ax.get_title(loc='left'))}.", caption, wide=True))
    found = getattr(posterior, "equivalence", None)
    if found is not None:
        caption = f"The penalty that {name} was trained with, and the equivalent prior. {found.certificate.verdict}"
        figures.append(picture(equivalence(found).axes[0], "A penalty and its prior.", caption, wide=True))
    return figures


def _jump_note(posterior: Any) -> str:
    """Explain the jump in the curve of a point estimate whose noise was fitted on held-out rows."""
    learnt = posterior.model.learnt
    if not posterior.point or learnt.start == learnt.stop:
        return ""
    return " The rows held out to fit the noise are added after two thirds of the steps, so the curve may jump there."


def _words(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()
