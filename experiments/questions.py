"""The questions that the lecture on priors and penalties leaves open, asked of one small problem.

    python experiments/questions.py --out pictures

1. Which temperature predicts best, and what does it mean (the cold posterior effect, Wenzel et al. 2020)?
2. How wide is the best prior, over the initialisation's width?
3. Is the edge of chaos a better variance than Glorot's in a deep network?
4. Which prior is one and the same penalty, for different families of q?

The data are scikit-learn's digits, 8 x 8 pixels: 1,000 rows to fit and 797 to score. Scores are NLL in nats a row, with
the standard error over those rows.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import priory as pr
from priory import penalties, priors
from priory.analysis.sweeps import TemperatureSweep, scored, temperature_sweep
from priory.core.streams import stream
from priory.penalties.as_prior.parameters import describe_parameters
from priory.priors.rules import RULES

TEMPERATURES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
WIDTHS = (0.3, 1.0, 1.8, 3.2, 5.6, 10.0, 18.0)  # of the prior, over the initialisation's
FAMILIES = ("dirac", "gaussian", "laplace", "uniform")
BIAS = 0.05  # sigma_b at the edge of chaos
Rows = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Asking:
    """How every fit is done."""

    train: Rows
    test: Rows
    steps: int = 2_000
    batch_size: int = 100
    samples: int = 64

    def options(self, seed: int = 0) -> dict[str, Any]:
        """What `fit` is told."""
        return {"steps": self.steps, "batch_size": self.batch_size, "seed": seed, "progress": False}


def digits(rows: int = 1_000) -> tuple[Rows, Rows]:
    """Rows to fit and rows to score, standardised by the first."""
    found: Any = load_digits()
    x, y = torch.as_tensor(found.data, dtype=torch.float32), torch.as_tensor(found.target)
    order = torch.randperm(len(x), generator=stream(0, "digits"))
    x, y = x[order], y[order]
    x = (x - x[:rows].mean()) / x[:rows].std()
    return (x[:rows], y[:rows]), (x[rows:], y[rows:])


def network(depth: int, width: int, variance: Any, seed: int = 0) -> nn.Sequential:
    """A tanh network whose weights begin with the variance of a rule, and its biases at the edge's or at zero."""
    sizes = [64, *[width] * depth, 10]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.Tanh()]
    net = nn.Sequential(*layers[:-1])
    rule: Any = RULES.get(variance, variance)
    generator, found = stream(seed, "weights"), describe_parameters(net)
    with torch.no_grad():
        for name, p in net.named_parameters():
            parameter = found[name]
            size = (
                rule(parameter.fan_in, parameter.fan_out) ** 0.5
                if parameter.is_weight
                else getattr(rule, "sigma_b", 0.0)
            )
            p.normal_(generator=generator).mul_(size)
    return net


# The questions.


def best_temperature(asking: Asking, grid: Sequence[float] = TEMPERATURES) -> TemperatureSweep:
    """1. The temperature of mean-field inference, with the prior that has Glorot's variance."""
    model = pr.Model(network(1, 50, "glorot"), pr.Categorical(), prior="glorot")
    options: dict[str, Any] = {"steps": asking.steps, "batch_size": asking.batch_size, "samples": asking.samples}
    return temperature_sweep(model, asking.train, pr.MeanField(), grid, test=asking.test, **options)


def best_width(asking: Asking, widths: Sequence[float] = WIDTHS) -> dict[str, list[tuple[float, float]]]:
    """2. NLL and its error by width of a Gaussian prior, for a point and for mean-field inference at T = 1."""
    found: dict[str, list[tuple[float, float]]] = {}
    net = network(1, 50, "glorot")
    for method in (pr.MAP(), pr.MeanField()):
        scores = []
        for width in widths:
            factors = {name: factor / width**2 for name, factor in penalties.layer_factors(net, "l2").items()}
            model = pr.Model(net, pr.Categorical(), prior=penalties.L2(factors))
            posterior = pr.fit(model, asking.train, method, **asking.options())
            scores.append(scored(posterior.predict(asking.test[0], samples=asking.samples), asking.test[1])["nll"])
        found[type(method).__name__] = scores
    return found


def best_variance(
    asking: Asking, depth: int = 12, width: int = 30, seeds: int = 3
) -> dict[str, list[dict[str, float]]]:
    """3. Scores of a deep tanh network by seed, where prior and initialisation are Glorot's or at the edge of chaos."""
    found: dict[str, list[dict[str, float]]] = {}
    for name, variance in (("glorot", "glorot"), ("edge of chaos", priors.edge_of_chaos("tanh", BIAS))):
        found[name] = []
        for seed in range(seeds):
            model = pr.Model(network(depth, width, variance, seed), pr.Categorical(), prior=variance)
            posterior = pr.fit(model, asking.train, pr.MAP(learning_rate=3e-3), **asking.options(seed))
            scores = scored(posterior.predict(asking.test[0]), asking.test[1])
            found[name].append({key: value for key, (value, _) in scores.items()})
    return found


def plain(mu: Tensor, s: Tensor) -> Tensor:
    """mu^2 / 2: weight decay on the locations."""
    return 0.5 * mu.square() + 0 * s


def whole(mu: Tensor, s: Tensor) -> Tensor:
    """(mu^2 + s^2 - 1) / 2 - log s, the KL of a Gaussian to N(0, 1)."""
    return 0.5 * (mu.square() + s.square() - 1) - s.log()


def at_a_point(r: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The penalty as a function of the location alone."""
    return lambda mu: r(mu, torch.ones_like(mu))


def one_penalty() -> list[tuple[str, str, penalties.Certificate]]:
    """4. Two penalties under four families, with learnt scales, and with the scale fixed at one."""
    found = []
    for name, r in (("mu^2/2", plain), ("(mu^2+s^2-1)/2 - log s", whole)):
        for family in FAMILIES:
            given = at_a_point(r) if family == "dirac" else r
            found.append((name, family, penalties.prior_from_penalty(given, family).certificate))
        fixed = penalties.prior_from_penalty(r, "gaussian", scale=1.0).certificate
        found.append((name, "gaussian, scale 1", fixed))
    return found


# In words.


def mean_and_spread(values: Sequence[float]) -> str:
    """Mean +- standard deviation."""
    t = torch.tensor(values, dtype=torch.float64)
    return f"{t.mean():.4f}" + (f" +- {t.std():.4f}" if len(t) > 1 else "")


def main(asking: Asking, out: Path | None = None) -> None:
    """Ask every question and print what comes; draw the scores against temperature into a folder."""
    print("1. Temperature, mean field, 64-50-10, tanh")
    sweep = best_temperature(asking)
    print(sweep, end="\n\n", flush=True)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        sweep.plot(out / "temperature.png")
    print("2. Width of a Gaussian prior over the initialisation's (Glorot), NLL")
    found = best_width(asking)
    print(f"{'width':<8}" + "".join(f"{name:>20}" for name in found))
    for i, width in enumerate(WIDTHS):
        print(f"{width:<8g}" + "".join(f"{value[i][0]:>11.4f} ± {value[i][1]:.4f}" for value in found.values()))
    for name, values in found.items():
        best = min(range(len(WIDTHS)), key=lambda i: values[i][0])
        print(f"{name}: best at {WIDTHS[best]:g} times the initialisation, {WIDTHS[best] ** 2:.3g} times its variance")
    print("\n3. Twelve hidden layers of 30, tanh, MAP, three seeds", flush=True)
    for name, scores in best_variance(asking).items():
        parts = [f"{key} {mean_and_spread([s[key] for s in scores])}" for key in ("nll", "accuracy")]
        print(f"{name:<16}" + "   ".join(parts), flush=True)
    print("\n4. One penalty under several families")
    for name, family, certificate in one_penalty():
        print(f"{name:<24}{family:<20}{certificate.kind}, off by {certificate.round_trip:.1g} nats")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=Asking.steps, help="of every fit")
    parser.add_argument("--out", type=Path, help="the folder that the picture goes to")
    chosen = parser.parse_args()
    main(Asking(*digits(), steps=chosen.steps), chosen.out)
