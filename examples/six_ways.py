"""Three problems six ways: maximum likelihood, MAP, Laplace, variational inference, NUTS, and exactly where known.

The coin and the regression have closed forms, the network has not. The picture shows each method's
parameters above and its predictions below. The first two methods plug in one value; the others average over the
posterior:

    plug-in  p(y | w*)        averaged  E[p(y | w)]  over the posterior

A plug-in prediction is overconfident where few data leave much uncertainty: about many heads in a row, about a line far
from its points, about a network away from its data. Not every average helps: a factorised Gaussian over the weights of
the network is nearly as confident far away as a point estimate.

python examples/six_ways.py --out pictures
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from drawing import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    VERMILION,
    dress,
    ellipse,
    folder_for_pictures,
    save,
    sheet,
)
from torch import Tensor, nn

import priory as pr
from priory.core.streams import stream
from priory.posteriors import Posterior
from priory.testing import Coin, LinearRegression

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS, AVERAGES = ("MLE", "MAP"), ("Laplace", "VI", "NUTS")
COLOURS = {"MLE": GREEN, "MAP": PURPLE, "Laplace": ORANGE, "VI": VERMILION, "NUTS": BLUE, "exact": GREY}
TOSSES = 5  # number of predicted tosses of the coin
NOISE = 0.3  # standard deviation of the noise of the network's rows

Fits = dict[str, Posterior]


@dataclass(frozen=True)
class Effort:
    """Lengths of the iterative methods: steps of an optimiser, and draws per chain."""

    steps: int = 1000
    draws: int = 80
    chains: int = 64


def six(model: pr.Model | pr.Density, flat: pr.Model | pr.Density, data: object, effort: Effort) -> Fits:
    """All five that are computed; maximum likelihood is MAP under a flat prior, and Laplace stands at the mode."""
    climb, steps = pr.MAP(learning_rate=0.03), effort.steps
    mode = pr.fit(model, data, climb, steps=steps, progress=False)
    at = (
        None if isinstance(model, pr.Density) else mode
    )  # of a density it finds the mode in unconstrained coordinates itself
    nuts = pr.NUTS(chains=effort.chains, warmup=80, max_depth=6, metric="diagonal")
    return {
        "MLE": pr.fit(flat, data, climb, steps=steps, progress=False),
        "MAP": mode,
        "Laplace": pr.fit(model, data, pr.Laplace(structure="full", at=at), progress=False),
        "VI": pr.fit(model, data, pr.MeanField(samples=4, learning_rate=0.03), steps=steps, progress=False),
        "NUTS": pr.fit(model, data, nuts, steps=effort.draws, progress=False),
    }


# The three problems.

COIN = Coin(heads=5, tails=1, a=2.0, b=2.0)


def coin(effort: Effort) -> Fits:
    """Five heads in six tosses, p ~ Beta(2, 2); a flat prior is Beta(1, 1). One number is found in fewer steps."""
    flat = Coin(COIN.heads, COIN.tails)
    return six(COIN.density(), flat.density(), COIN.data, replace(effort, steps=effort.steps // 2))


def line() -> LinearRegression:
    """Five points with x between 0.5 and 1.5, prior N(0, 1) on slope and intercept."""
    generator = stream(0, "six ways", "line")
    X = 0.5 + torch.rand(5, 1, generator=generator, dtype=torch.float64)
    y = 1.2 * X[:, 0] - 0.5 + 0.3 * torch.randn(5, generator=generator, dtype=torch.float64)
    return LinearRegression(X, y, noise=0.3, prior_scale=1.0, intercept=True)


def regression(effort: Effort) -> Fits:
    """The line; maximum likelihood is least squares."""
    problem = line()
    flat = LinearRegression(problem.X, problem.y, problem.noise, prior_scale=1e4, intercept=True)
    return six(problem.model(), flat.model(), problem.data, effort)


def wave() -> tuple[Tensor, Tensor]:
    """Twelve rows of a sine with noise, x in (-1.5, 1.5)."""
    generator = stream(0, "six ways", "wave")
    x = 3 * torch.rand(12, 1, generator=generator, dtype=torch.float64) - 1.5
    return x, torch.sin(2 * x[:, 0]) + NOISE * torch.randn(12, generator=generator, dtype=torch.float64)


def network(effort: Effort) -> Fits:
    """A network with four hidden units and fixed initial weights; torch's global random state is not changed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    model, flat = (pr.Model(net, pr.Gaussian(NOISE), prior=prior) for prior in (1.0, "flat"))
    return six(model, flat, wave(), effort)


# Predictions.


def heads_in_a_row(posterior: Posterior, tosses: int = TOSSES, samples: int = 4000) -> tuple[float, float]:
    """The probability of nothing but heads in the next tosses: by the mean of p plugged in, and averaged over p."""
    p = posterior.sample(samples, seed=0)["p"]
    plug = posterior.mean["p"] if posterior.kind == "point" else p.mean()
    return float(plug**tosses), float((p**tosses).mean())


def exact_heads_in_a_row(tosses: int = TOSSES) -> tuple[float, float]:
    """Both probabilities under Beta(a, b): E[p]^k, and E[p^k] = prod (a + i) / (a + b + i)."""
    a, b = COIN.posterior.concentration1, COIN.posterior.concentration0
    averaged = torch.stack([(a + i) / (a + b + i) for i in range(tosses)]).prod()
    return float((a / (a + b)) ** tosses), float(averaged)


def spread(posterior: Posterior, x: Tensor, samples: int = 1000) -> Tensor:
    """The standard deviation of y at x; for a point estimate it is the noise at every x."""
    return posterior.predict(x, samples=samples).std


def weights(posterior: Posterior, samples: int = 4000) -> Tensor:
    """Draws of (slope, intercept) of the line, (samples, 2)."""
    draws = posterior.sample(samples, seed=0)
    return torch.stack([draws["weight"][:, 0, 0], draws["bias"][:, 0]], 1)


# The picture.


def draw(fits: dict[str, Fits], folder: Path) -> Path:
    """Draw the parameters above and the predictions below, one column per problem."""
    figure, (p, w, f, heads, line_sd, network_sd) = sheet(2, 3, 13, 8)
    draw_coin(p, heads, fits["coin"])
    draw_line(w, line_sd, fits["regression"])
    draw_network(f, network_sd, fits["network"])
    names = [p.plot([], [], color=colour, linewidth=5)[0] for colour in COLOURS.values()]
    figure.legend(names, list(COLOURS), loc="outside lower center", ncols=len(names), frameon=False, fontsize=10)
    return save(figure, folder, "six_ways.png")


def style(name: str) -> dict[str, Any]:
    """The line style of a method: points dashed and on top; Laplace and the exact line wide, to stay visible."""
    wide = {"Laplace": 3.0, "exact": 8.0}.get(name, 1.7)
    look = {"color": COLOURS[name], "linewidth": wide, "linestyle": "--" if name in POINTS else "-"}
    return {**look, "zorder": 3 if name in POINTS else 2}


def draw_coin(ax: Axes, below: Axes, fits: Fits) -> None:
    """Densities over p, and the probability of five more heads."""
    grid = torch.linspace(0.005, 0.995, 200, dtype=torch.float64)
    dress(ax, "Coin, five heads in six tosses: what p may be", "p, the probability of heads", "density")
    ax.fill_between(grid.tolist(), COIN.posterior.log_prob(grid).exp().tolist(), color=GREY, alpha=0.4, linewidth=0)
    for name in POINTS:
        ax.axvline(float(fits[name].mean["p"]), **style(name))
    for name in ("Laplace", "VI"):
        density = torch.stack([fits[name].log_prob({"p": x}) for x in grid]).exp()
        ax.plot(grid.tolist(), density.tolist(), **{**style(name), "linewidth": 1.7})
    draws = fits["NUTS"].sample(4000, seed=0)["p"]
    ax.hist(draws.tolist(), bins=30, density=True, histtype="step", color=COLOURS["NUTS"], linewidth=1.2)
    found = {**{name: heads_in_a_row(fits[name]) for name in fits}, "exact": exact_heads_in_a_row()}
    dress(below, f"The next {TOSSES} all heads: plugged in (pale), averaged", "", "probability")
    for place, (name, (plug, averaged)) in enumerate(found.items()):
        beside = 0.0 if name in POINTS else 0.2
        below.bar(place - beside, plug, 0.38, color=COLOURS[name], alpha=0.4)
        if name not in POINTS:
            below.bar(place + beside, averaged, 0.38, color=COLOURS[name])
    below.axhline(found["exact"][1], color=INK, linewidth=1, linestyle=":")
    below.set_xticks(range(len(found)), list(found))


def draw_line(ax: Axes, below: Axes, fits: Fits) -> None:
    """Draw slope and intercept with two standard deviations, and the standard deviation of y at x."""
    exact = line().posterior
    dress(ax, "Regression, five points: slope and intercept, 2 sd", "slope", "intercept")
    ax.fill(*ellipse(exact.loc, exact.covariance_matrix), color=GREY, alpha=0.4, linewidth=0)
    for name in fits:
        draws = weights(fits[name], 2 if name in POINTS else 4000)
        if name in POINTS:
            ax.scatter(*draws[0].tolist(), s=60, color=COLOURS[name], marker="x", linewidths=2.5, zorder=3)
        else:
            ax.plot(*ellipse(draws.mean(0), draws.T.cov()), **style(name))
    x = torch.linspace(-2, 4, 100, dtype=torch.float64)[:, None]
    below.plot(x[:, 0].tolist(), line().predictive(x).stddev.tolist(), alpha=0.4, **style("exact"))
    draw_spread(below, fits, x, (0.5, 1.5), line().noise)


def draw_network(ax: Axes, below: Axes, fits: Fits) -> None:
    """Draw the means with the band of NUTS, and the standard deviation of y at x."""
    x = torch.linspace(-3, 3, 120, dtype=torch.float64)[:, None]
    dress(ax, "Network: mean curves, 90 % band of NUTS", "x", "y")
    low, high = fits["NUTS"].predict(x, samples=1000).interval(0.9)
    ax.fill_between(x[:, 0].tolist(), low.tolist(), high.tolist(), color=BLUE, alpha=0.15, linewidth=0)
    for name, posterior in fits.items():
        ax.plot(x[:, 0].tolist(), posterior.predict(x, samples=1000).mean.tolist(), **style(name))
    ax.scatter(*[part.reshape(-1).tolist() for part in wave()], s=16, color=INK, zorder=3)
    ax.set_ylim(-2.6, 2.6)
    draw_spread(below, fits, x, (-1.5, 1.5), NOISE)


def draw_spread(ax: Axes, fits: Fits, x: Tensor, data: tuple[float, float], noise: float) -> None:
    """The standard deviation of y along x, with the place of the data shaded."""
    dress(ax, "How unsure of y?", "x", "standard deviation of y")
    for name, posterior in fits.items():
        ax.plot(x[:, 0].tolist(), spread(posterior, x).tolist(), **style(name))
    ax.axvspan(*data, color=GREY, alpha=0.12, linewidth=0)
    ax.text(sum(data) / 2, 0.97, "data", ha="center", va="top", fontsize=9, transform=ax.get_xaxis_transform())
    ax.text(float(x[-1]), noise - 0.02, "plugged in: the noise alone", ha="right", va="top", fontsize=9)
    ax.set_ylim(0)


def main(folder: Path) -> None:
    """Fit everything, print each prediction plugged in and averaged, and draw it."""
    effort = Effort()
    fits = {"coin": coin(effort), "regression": regression(effort), "network": network(effort)}
    far, away = (torch.tensor([[x]], dtype=torch.float64) for x in (3.0, 2.5))
    print(f"          P({TOSSES} heads) plugged in, averaged    sd of y at x = 3, line    at x = 2.5, network")
    for name in (*POINTS, *AVERAGES):
        plug, averaged = heads_in_a_row(fits["coin"][name])
        sds = spread(fits["regression"][name], far).item(), spread(fits["network"][name], away).item()
        print(f"{name:8s}  {plug:17.3f} {averaged:15.3f} {sds[0]:20.3f} {sds[1]:22.3f}")
    plug, averaged = exact_heads_in_a_row()
    print(f"{'exact':8s}  {plug:17.3f} {averaged:15.3f} {line().predictive(far).stddev.item():20.3f} {'-':>22s}")
    draw(fits, folder)


if __name__ == "__main__":
    main(folder_for_pictures(__doc__))
