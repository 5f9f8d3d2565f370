"""Time of `import priory` relative to `import torch`: medians of fresh interpreters, interleaved. The bound is 1.15.

python benchmarks/import_time.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

STATEMENTS = ("import torch", "import torch, priory", "import priory; priory.fit; priory.Model; priory.MeanField")


def main() -> None:
    taken: dict[str, list[float]] = {statement: [] for statement in STATEMENTS}
    for _ in range(9):
        for statement in STATEMENTS:
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", statement], check=True)
            taken[statement].append(time.perf_counter() - began)
    floor = statistics.median(taken["import torch"])
    for statement, times in taken.items():
        print(f"{statement:<60} {statistics.median(times):>7.3f} s {statistics.median(times) / floor:>6.2f}")


if __name__ == "__main__":
    main()
