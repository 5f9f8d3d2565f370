"""The command `priory`: compare methods on a table from a shell.

`priory compare --data diabetes --report report.html` fits the methods, scores them on held-out
rows, prints a table and writes an HTML page. The command needs the extra `cli`; without it, an error names the extra to
install.
"""

from __future__ import annotations

import sys

from priory.core.errors import MissingExtra, extra

__all__ = ["main"]


def main() -> None:
    """Run the command. The exit status is 0, or 1 after an error message that says what to change."""
    try:
        for module in ("typer", "rich", "pandas"):
            extra(module, "cli")
    except MissingExtra as error:
        print(f"The command 'priory' is an extra. {error}", file=sys.stderr)
        raise SystemExit(1) from None
    from priory.cli.app import app

    app()
