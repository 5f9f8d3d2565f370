"""Experiments on the open questions of the lecture on priors and penalties, on one small problem.

    python experiments/questions.py --out pictures

1. Which temperature predicts best, and what does it mean (the cold posterior effect, Wenzel et al. 2020)?
2. How wide is the best prior, compared with the initialisation?
3. Is the edge of chaos a better variance than Glorot's in a deep network?
4. Which prior corresponds to one penalty, for different families of q?

The data are scikit-learn's digits, 8 x 8 pixels, with 1,000 training rows and 797 test rows. Scores are the NLL in nats
per row, with its standard error over the test rows.
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

TEMPERATURE_GRID = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
PRIOR_WIDTHS = (0.3, 1.0, 1.8, 3.2, 5.6, 10.0, 18.0)  # width of the prior / width of the initialisation
POSTERIOR_FAMILIES = ("dirac", "gaussian", "laplace", "uniform")
EDGE_SIGMA_B = 0.05  # sigma_b at the edge of chaos
Rows = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Setup:
    """Data and settings shared by all fits."""

    train: Rows
    test: Rows
    steps: int = 2_000
    batch_size: int = 100
    samples: int = 64

    def options(self, seed: int = 0) -> dict[str, Any]:
        """Return the arguments of `fit`."""
        return {"steps": self.steps, "batch_size": self.batch_size, "seed": seed, "progress": False}


def digits(rows: int = 1_000) -> tuple[Rows, Rows]:
    """Return training and test rows, standardised by the training rows."""
    found: Any = load_digits()
    x, y = torch.as_tensor(found.data, dtype=torch.float32), torch.as_tensor(found.target)
    order = torch.randperm(len(x), generator=stream(0, "digits"))
    x, y = x[order], y[order]
    x = (x - x[:rows].mean()) / x[:rows].std()
    return (x[:rows], y[:rows]), (x[rows:], y[rows:])


def network(depth: int, width: int, variance: Any, seed: int = 0) -> nn.Sequential:
    """Return a tanh network initialised with the variance of a rule; biases are zero except at the edge of chaos."""
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
            bias_sd = getattr(rule, "sigma_b", 0.0)
            sd = rule(parameter.fan_in, parameter.fan_out) ** 0.5 if parameter.is_weight else bias_sd
            p.normal_(generator=generator).mul_(sd)
    return net


# The four questions.


def best_temperature(setup: Setup, grid: Sequence[float] = TEMPERATURE_GRID) -> TemperatureSweep:
    """1. Score mean-field inference by temperature, under the prior with Glorot's variance."""
    model = pr.Model(network(1, 50, "glorot"), pr.Categorical(), prior="glorot")
    options: dict[str, Any] = {"steps": setup.steps, "batch_size": setup.batch_size, "samples": setup.samples}
    return temperature_sweep(model, setup.train, pr.MeanField(), grid, test=setup.test, **options)


def best_width(setup: Setup, widths: Sequence[float] = PRIOR_WIDTHS) -> dict[str, list[tuple[float, float]]]:
    """2. Return the NLL and its error by width of a Gaussian prior, for MAP and for mean-field inference at T = 1."""
    found: dict[str, list[tuple[float, float]]] = {}
    net = network(1, 50, "glorot")
    for method in (pr.MAP(), pr.MeanField()):
        scores = []
        for width in widths:
            factors = {name: factor / width**2 for name, factor in penalties.layer_factors(net, "l2").items()}
            model = pr.Model(net, pr.Categorical(), prior=penalties.L2(factors))
            posterior = pr.fit(model, setup.train, method, **setup.options())
            scores.append(scored(posterior.predict(setup.test[0], samples=setup.samples), setup.test[1])["nll"])
        found[type(method).__name__] = scores
    return found


def best_variance(setup: Setup, depth: int = 12, width: int = 30, seeds: int = 3) -> dict[str, list[dict[str, float]]]:
    """3. Return the scores of a deep tanh network by seed, for Glorot's variance and for the edge of chaos."""
    found: dict[str, list[dict[str, float]]] = {}
    for name, variance in (("glorot", "glorot"), ("edge of chaos", priors.edge_of_chaos("tanh", EDGE_SIGMA_B))):
        found[name] = []
        for seed in range(seeds):
            model = pr.Model(network(depth, width, variance, seed), pr.Categorical(), prior=variance)
            posterior = pr.fit(model, setup.train, pr.MAP(learning_rate=3e-3), **setup.options(seed))
            scores = scored(posterior.predict(setup.test[0]), setup.test[1])
            found[name].append({key: value for key, (value, _) in scores.items()})
    return found


def penalise_locations(mu: Tensor, s: Tensor) -> Tensor:
    """Return mu^2 / 2, weight decay on the locations."""
    return 0.5 * mu.square() + 0 * s


def kl_to_standard_normal(mu: Tensor, s: Tensor) -> Tensor:
    """Return (mu^2 + s^2 - 1) / 2 - log s, the KL of a Gaussian to N(0, 1)."""
    return 0.5 * (mu.square() + s.square() - 1) - s.log()


def at_scale_one(r: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the penalty as a function of the location only, at scale 1."""
    return lambda mu: r(mu, torch.ones_like(mu))


def compare_families() -> list[tuple[str, str, penalties.Certificate]]:
    """4. Certify two penalties under four families, with learnt scales and with the scale fixed at 1."""
    found = []
    for name, r in (("mu^2/2", penalise_locations), ("(mu^2+s^2-1)/2 - log s", kl_to_standard_normal)):
        for family in POSTERIOR_FAMILIES:
            given = at_scale_one(r) if family == "dirac" else r
            found.append((name, family, penalties.prior_from_penalty(given, family).certificate))
        fixed = penalties.prior_from_penalty(r, "gaussian", scale=1.0).certificate
        found.append((name, "gaussian, scale 1", fixed))
    return found


# Output.


def mean_and_spread(values: Sequence[float]) -> str:
    """Format the mean +- standard deviation."""
    t = torch.tensor(values, dtype=torch.float64)
    return f"{t.mean():.4f}" + (f" +- {t.std():.4f}" if len(t) > 1 else "")


def main(setup: Setup, out: Path | None = None) -> None:
    """Run all experiments and print their results; save the plot of scores against temperature to `out`."""
    print("1. Temperature, mean field, 64-50-10, tanh")
    sweep = best_temperature(setup)
    print(sweep, end="\n\n", flush=True)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        sweep.plot(out / "temperature.png")
    print("2. NLL by width of a Gaussian prior, relative to the initialisation (Glorot)")
    found = best_width(setup)
    print(f"{'width':<8}" + "".join(f"{name:>20}" for name in found))
    for i, width in enumerate(PRIOR_WIDTHS):
        print(f"{width:<8g}" + "".join(f"{value[i][0]:>11.4f} ± {value[i][1]:.4f}" for value in found.values()))
    for name, values in found.items():
        best = PRIOR_WIDTHS[min(range(len(PRIOR_WIDTHS)), key=lambda i: values[i][0])]
        print(f"{name}: best at {best:g} times the width of the initialisation, {best**2:.3g} times its variance")
    print("\n3. Twelve hidden layers of 30, tanh, MAP, three seeds", flush=True)
    for name, scores in best_variance(setup).items():
        parts = [f"{key} {mean_and_spread([s[key] for s in scores])}" for key in ("nll", "accuracy")]
        print(f"{name:<16}" + "   ".join(parts), flush=True)
    print("\n4. One penalty under several families")
    for name, family, certificate in compare_families():
        print(f"{name:<24}{family:<20}{certificate.kind}, off by {certificate.round_trip:.1g} nats")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=Setup.steps, help="number of steps per fit")
    parser.add_argument("--out", type=Path, help="folder for the plot")
    chosen = parser.parse_args()
    main(Setup(*digits(), steps=chosen.steps), chosen.out)
