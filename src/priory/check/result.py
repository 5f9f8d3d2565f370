"""The result of a check: its items, and one sentence that says how far a posterior can be believed.

An item measures one thing and compares it with a threshold. An item that fails says what it speaks against:

    "mean"      the location of the posterior, and with it everything
    "spread"    its widths and intervals, not its location

The verdict follows from the items. An item that fails against the mean: believe nothing. One that fails against the
spread: believe the mean, not the spread. None fails, and none that is decisive was measured: cannot tell. Otherwise:
believe it. Decisive are the items that compare the posterior with something outside of the approximation: the joint
density, other chains, rows that were held out, another posterior.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any, Literal

from priory.core.errors import require
from priory.core.tables import text_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

Outcome = Literal["passed", "failed", "not known"]
Against = Literal["mean", "spread"]
COLUMNS = ("item", "value", "threshold", "verdict", "what to do")
MAX_NAMED_FINDINGS = 2  # in the verdict


@dataclass(frozen=True)
class Item:
    """One measurement of a check.

    Attributes:
        name: What is measured, such as "k-hat".
        group: "optimisation", "approximation", "chains", "model" or "reference".
        value: The measured value; None if it could not be measured.
        threshold: The rule for the value, such as "below 0.7".
        outcome: "passed", "failed" or "not known".
        finding: One sentence about a value that failed, or about why it isn't known; empty if it passed.
        advice: What to do if it failed; empty otherwise.
        against: What a failure speaks against: "mean" (and with it everything) or "spread".
        decisive: Whether it compares the posterior with something outside of the approximation.
        details: Numbers that plots are made of.
    """

    name: str
    group: str
    value: float | None
    threshold: str
    outcome: Outcome
    finding: str = ""
    advice: str = ""
    against: Against = "spread"
    decisive: bool = False
    details: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def passed(self) -> bool:
        """Whether the item was measured and passed."""
        return self.outcome == "passed"

    @property
    def failed(self) -> bool:
        """Whether the item was measured and failed."""
        return self.outcome == "failed"

    @property
    def cells(self) -> list[str]:
        """The item as a row of the table."""
        value = "" if self.value is None else f"{self.value:.3g}"
        remedy = self.advice if self.failed else self.finding if self.outcome == "not known" else ""
        return [self.name, value, self.threshold, self.outcome, remedy]

    def to_dict(self) -> dict[str, Any]:
        """Return the item as JSON."""
        value = self.value if self.value is None or math.isfinite(self.value) else str(self.value)
        return {
            "name": self.name,
            "group": self.group,
            "value": value,
            "threshold": self.threshold,
            "verdict": self.outcome,
            "finding": self.finding,
            "advice": self.advice,
            "against": self.against,
            "decisive": self.decisive,
        }


def judged(
    name: str,
    group: str,
    value: float,
    good: bool,
    threshold: str,
    finding: str,
    advice: str,
    *,
    against: Against = "spread",
    decisive: bool = False,
    details: dict[str, Any] | None = None,
) -> Item:
    """Return an item that passed if `good`, and otherwise failed with a finding and an advice."""
    return Item(
        name,
        group,
        value,
        threshold,
        "passed" if good else "failed",
        "" if good else finding,
        "" if good else advice,
        against,
        decisive,
        details or {},
    )


def unknown(name: str, group: str, threshold: str, why: str) -> Item:
    """Return an item that could not be measured, with the reason."""
    return Item(name, group, None, threshold, "not known", why)


@dataclass(frozen=True)
class Check:
    """The result of `posterior.check()`: print it for a table that ends in the verdict.

    Attributes:
        items: The items, in the order of the table.
        subject: What was checked, such as "MeanField, 442 rows".

    Example:
        >>> item = judged("k-hat", "approximation", 0.2, True, "below 0.7", "", "", decisive=True)
        >>> print(Check((item,), "MeanField"))
        Check of MeanField
        item   value  threshold  verdict  what to do
        --------------------------------------------
        k-hat  0.2    below 0.7  passed
        <BLANKLINE>
        Believe it: nothing speaks against this posterior.
    """

    items: tuple[Item, ...]
    subject: str = ""

    def __getitem__(self, name: str) -> Item:
        found = {item.name: item for item in self.items}
        require(name in found, "name", "Check", f"be among {', '.join(found)}", repr(name))
        return found[name]

    def __contains__(self, name: str) -> bool:
        return any(item.name == name for item in self.items)

    @property
    def failures(self) -> tuple[Item, ...]:
        """The items that failed, those against the mean first."""
        failed = [item for item in self.items if item.failed]
        return tuple(sorted(failed, key=lambda item: item.against != "mean"))

    @property
    def verdict(self) -> str:
        """One sentence that begins with "Believe it", "Believe the mean", "Believe nothing" or "Cannot tell"."""
        return verdict_of(self.items)

    def to_dict(self) -> dict[str, Any]:
        """Return the check as JSON: subject, verdict and items."""
        return {"subject": self.subject, "verdict": self.verdict, "items": [item.to_dict() for item in self.items]}

    def plot(self) -> Figure:
        """Draw one panel per item that has a picture (with the extra `plot`).

        Returns:
            The figure.
        """
        from priory.plot.check import check

        return check(self)

    @property
    def _rows(self) -> list[list[str]]:
        return [list(COLUMNS), *[item.cells for item in self.items]]

    def __str__(self) -> str:
        title = [f"Check of {self.subject}"] if self.subject else []
        return "\n".join([*title, *text_table(self._rows, "lllll", rule=True), "", self.verdict])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head, *rows = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in self._rows]
        body = "".join(f"<tr>{row}</tr>" for row in (head, *rows))
        return f"<table><caption>{escape(self.subject)}</caption>{body}</table><p>{escape(self.verdict)}</p>"


def verdict_of(items: Sequence[Item]) -> str:
    """The sentence that follows from the items."""
    failed = [item for item in items if item.failed]
    against_mean = [item for item in failed if item.against == "mean"]
    if against_mean:
        return f"Believe nothing: {reasons(against_mean)}"
    if failed:
        return f"Believe the mean, not the spread: {reasons(failed)}"
    if any(item.decisive and item.passed for item in items):
        return "Believe it: nothing speaks against this posterior."
    missing = [item for item in items if item.outcome == "not known"]
    why = missing[0].finding if missing else "nothing outside of the approximation was compared with it."
    return f"Cannot tell, because {why[0].lower()}{why[1:]}"


def reasons(failed: Sequence[Item]) -> str:
    """The findings of the first items, and how many more there are, as the rest of a sentence."""
    named = " ".join(item.finding for item in failed[:MAX_NAMED_FINDINGS])
    more = len(failed) - MAX_NAMED_FINDINGS
    rest = f" {more} more {'item fails' if more == 1 else 'items fail'}." if more > 0 else ""
    return f"{named[0].lower()}{named[1:]}{rest}"
