"""What `posterior.check()` says of 23 planted failures and 20 healthy fits: misses and false alarms.

    python benchmarks/check.py [--seeds 5] [--only NAME ...]

The zoo is in `_check_zoo.py`. A miss is a planted failure of which no named item failed. A false alarm is a healthy fit
that is not believed. The cost of a check of a large mean-field posterior is printed in forward passes over the data.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter

import torch
from _check_zoo import FAILURES, HEALTHY, Case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="fits of each case")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of cases, or parts of names")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for title, cases in (("planted failure", FAILURES), ("healthy fit", HEALTHY)):
        chosen = {n: c for n, c in cases.items() if not options.only or any(part in n for part in options.only)}
        wrong = [line(name, case, options.seeds) for name, case in chosen.items()]
        if chosen:
            rate = sum(wrong) / (options.seeds * len(chosen))
            print(f"== {title}s: {'missed' if title.startswith('planted') else 'not believed'} {100 * rate:.1f} %\n")
    cost()


def line(name: str, case: Case, seeds: int) -> int:
    """Check the fits of a case at all seeds, print what was said, and return how often it was wrong."""
    said, failing, wrong, seconds = Counter(), Counter(), 0, 0.0
    for seed in range(seeds):
        posterior, held_out = case.make(seed)
        began = time.process_time()
        check = posterior.check(held_out)
        seconds += time.process_time() - began
        failed = {item.name for item in check.failures}
        said[check.verdict.split(":")[0].split(",")[0]] += 1
        failing.update(failed)
        wrong += not failed & set(case.failing) if case.failing else not check.verdict.startswith(case.verdict)
    items = ", ".join(f"{n} {count}" for n, count in failing.most_common(4))
    print(
        f"{name:40} wrong {wrong}/{seeds}  {dict(said)}  failed: {items or 'none'}  {seconds / seeds:.2f} s", flush=True
    )
    return wrong


def cost() -> None:
    """Print the cost of a check of a mean-field posterior of 100,000 weights on 10,000 rows, in forward passes."""
    import priory as pr

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(200, 490), torch.nn.ReLU(), torch.nn.Linear(490, 2))
    x, y = torch.randn(10_000, 200), torch.randint(2, (10_000,))
    posterior = pr.fit(pr.Model(net, pr.Categorical()), (x, y), pr.MeanField(), steps=5, progress=False)
    times = []
    for call in (lambda: net(x), lambda: posterior.check((x, y))):
        best = min(timed(call) for _ in range(5))
        times.append(best)
    print(f"check() of 100,000 weights on 10,000 rows: {times[1] / times[0]:.1f} forward passes")


def timed(call) -> float:
    began = time.process_time()
    with torch.no_grad():
        call()
    return time.process_time() - began


if __name__ == "__main__":
    main()
