"""The report of `posteriordb.py`: a line per run, a table over seeds, and the criteria one by one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Result = dict[str, Any]
SAMPLER_NAMES = ("ours", "numpyro", "nutpie")
MAX_STANDARD_ERRORS, MAX_R_HAT = 4.0, 1.01
MAX_RATIO, MIN_FASTER, MAX_GEOMETRIC_MEAN = 2.0, 20, 0.3
RAW_SCALES, MAX_RAW_GRADIENTS = ("raw_covariate", "raw_response", "collinear", "years"), 400
HARD_POSTERIORS = (
    "eight_schools-eight_schools_centered",
    "funnel",
    "bimodal",
)  # no default can sample them: the status says so


def told(name: str, who: str, found: Result) -> str:
    """One line about one run."""
    if "failed" in found:
        return f"{name:40} {who:10} {found['failed']}"
    rest = f"z {found['z_mean']:.2f} ({found['worst_mean']}) {found['z_sd']:.2f} ({found['worst_sd']})"
    ess = f"ESS {found['ess_bulk']:,.0f} {found['ess_tail']:,.0f}"
    status = f"{found['status']}: {found['reason']}" if found.get("reason") else found.get("status", "")
    times = f"{found['wall']:6.1f} s wall {found['cpu']:6.1f} s CPU"
    return f"{name:40} {who:10} {times}  {ess}  R-hat {agreement(found):.3f}  {rest}  {status}"


def agreement(found: Result) -> float:
    """Nested R-hat, or R-hat where there are no superchains."""
    nested = found.get("nested_r_hat")
    return found["r_hat"] if nested is None else nested


def seconds(runs: Sequence[Result], clock: str) -> float | None:
    """The median seconds of runs, those that were stopped included; None without any."""
    found = [r[clock] for r in runs if clock in r]
    return statistics.median(found) if found else None


def ratio(result: dict[str, list[Result]], clock: str) -> float | None:
    """Our seconds divided by NumPyro's; None unless both have run."""
    ours, peers = seconds(result["ours"], clock), seconds(result["numpyro"], clock)
    return None if ours is None or peers is None else ours / peers


def table(results: Mapping[str, dict[str, list[Result]]], clock: str) -> list[str]:
    """One line per posterior: medians of seconds, the worst of everything else over seeds."""
    from priory.core.tables import text_table

    heads = ["posterior", "ours s", "NumPyro s", "ratio", "bulk ESS", "tail ESS", "NumPyro's", "R-hat", "gradients"]
    heads += ["divergent", "z mean", "z sd", "NumPyro's z"]
    extra = any(result.get("nutpie") for result in results.values())
    rows = [[*heads, *(["nutpie s", "nutpie's ESS"] if extra else []), "status"]]
    for name, result in results.items():
        ours, peers, others = ([r for r in result.get(who, []) if "failed" not in r] for who in SAMPLER_NAMES)
        quotient = ratio(result, clock)
        counts = [r.get("status", "failed") for r in result["ours"]]
        status = ", ".join(f"{counts.count(s)} {s}" for s in dict.fromkeys(counts))
        cells = [name, shown(result["ours"], clock), shown(result["numpyro"], clock)]
        cells += ["-" if quotient is None else f"{quotient:.2f}"]
        cells += [worst(ours, "ess_bulk", min), worst(ours, "ess_tail", min), worst(peers, "ess_bulk", min)]
        cells += [f"{max(map(agreement, ours)):.3f}" if ours else "-", worst(ours, "gradients", max)]
        cells += [worst(ours, "divergences", max), worst(ours, "z_mean", max, ".1f"), worst(ours, "z_sd", max, ".1f")]
        cells += [f"{worst(peers, 'z_mean', max, '.1f')} {worst(peers, 'z_sd', max, '.1f')}"]
        cells += [shown(result.get("nutpie", []), clock), worst(others, "ess_bulk", min)] if extra else []
        rows.append([*cells, status])
    lines = text_table(rows, "l" + "r" * (len(rows[0]) - 2) + "l", rule=True)
    for name, result in results.items():
        reasons = [r.get("failed") or r.get("reason") for r in result["ours"]]
        lines += [f"{name}: {reason}" for reason in dict.fromkeys(reasons) if reason]
        for who in SAMPLER_NAMES[1:]:
            lines += [f"{name}, {who}: {r['failed']}" for r in result.get(who, []) if "failed" in r]
    return lines


def worst(runs: Sequence[Result], key: str, pick: Callable[..., float], form: str = ",.0f") -> str:
    """The smallest or largest value of runs, as text."""
    return format(pick(r[key] for r in runs), form) if runs else "-"


def shown(runs: Sequence[Result], clock: str) -> str:
    """The median seconds of runs, as text: with a ">" if one was stopped, and whether they come from a cache."""
    found = seconds(runs, clock)
    if found is None:
        return "-"
    stopped, cached = any("failed" in r for r in runs), any(r.get("cached") for r in runs)
    return f"{'>' if stopped else ''}{found:.1f}{' cached' if cached else ''}"


def criteria(results: Mapping[str, dict[str, list[Result]]], clock: str) -> list[str]:
    """What must hold, one line each, with the posteriors for which it doesn't."""
    ran = {name: result["ours"] for name, result in results.items() if result["ours"]}
    plain = {name: runs for name, runs in ran.items() if name not in HARD_POSTERIORS}
    failing = lambda runs, bad: sum(1 for r in runs if "failed" in r or bad(r))  # noqa: E731
    ratios = {name: q for name, result in results.items() if (q := ratio(result, clock)) is not None}

    def by_seed(title: str, chosen: Mapping[str, list[Result]], bad: Callable[[Result], bool]) -> str:
        wrong = {name: failing(runs, bad) for name, runs in chosen.items()}
        where = [f"{name} ({count} of {len(chosen[name])})" for name, count in wrong.items() if count]
        return verdict(title, not where if chosen else None, ", ".join(where))

    slow = [f"{name} ({q:.2f})" for name, q in ratios.items() if q > MAX_RATIO]
    faster = sum(q < 1 for q in ratios.values())
    mean = math.exp(statistics.fmean(math.log(q) for q in ratios.values())) if ratios else math.nan
    enough = faster >= MIN_FASTER if len(ratios) >= MIN_FASTER else None
    raw = {name: runs for name, runs in ran.items() if name in RAW_SCALES}
    hard = {name: runs for name, runs in ran.items() if name in HARD_POSTERIORS}
    return [
        by_seed("means within 4 standard errors", plain, lambda r: not r["z_mean"] < MAX_STANDARD_ERRORS),
        by_seed("sds within 4 standard errors", plain, lambda r: not r["z_sd"] < MAX_STANDARD_ERRORS),
        by_seed("nested R-hat below 1.01", plain, lambda r: not agreement(r) < MAX_R_HAT),
        by_seed("status converged where it can be sampled", plain, lambda r: r["status"] != "converged"),
        verdict("time at most twice NumPyro's", not slow if ratios else None, ", ".join(slow)),
        verdict(f"below NumPyro's on at least {MIN_FASTER}", enough, f"{faster} of {len(ratios)}"),
        verdict("geometric mean of ratios at most 0.3", mean <= MAX_GEOMETRIC_MEAN if ratios else None, f"{mean:.3f}"),
        by_seed("not_converged or doubtful where it can't be sampled", hard, lambda r: r["status"] == "converged"),
        by_seed("raw scales within 400 gradients per chain", raw, lambda r: r["gradients"] > MAX_RAW_GRADIENTS),
    ]


def verdict(title: str, holds: bool | None, detail: str) -> str:
    """One line: whether a criterion holds; None where too few have run."""
    word = "not run" if holds is None else "pass" if holds else "FAIL"
    return f"{word:8} {title}" + (f": {detail}" if detail and holds is not None else "")
