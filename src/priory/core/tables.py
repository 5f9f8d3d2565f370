"""Text tables: every table that the library prints is laid out here."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def counted(count: int, noun: str) -> str:
    """Return a count with its noun in the singular or the plural.

    Example:
        >>> counted(1, "row"), counted(2000, "row")
        ('1 row', '2,000 rows')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def text_table(rows: Sequence[Sequence[str]], align: str = "lr", *, gap: int = 2, rule: bool = False) -> list[str]:
    r"""Lay out cells in columns.

    Args:
        rows: Rows with the same number of cells, usually with the column heads first.
        align: One letter per column, "l" for left and "r" for right; the last letter serves for all further columns.
        gap: Number of spaces between columns.
        rule: Whether to draw a line under the first row.

    Returns:
        One line per row, without trailing spaces.

    Example:
        >>> print(*text_table([["method", "nll"], ["MAP", "1.25"], ["MeanField", "0.75"]], rule=True), sep="\n")
        method      nll
        ---------------
        MAP        1.25
        MeanField  0.75
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = align.ljust(len(widths), align[-1])
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if side == "l" else cell.rjust(width)
            for cell, width, side in zip(row, widths, sides, strict=False)
        ]
        lines.append((" " * gap).join(cells).rstrip())
    if rule:
        lines.insert(1, "-" * (sum(widths) + gap * (len(widths) - 1)))
    return lines
