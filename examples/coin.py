"""The coin toss: a prior Beta(5, 3), 17 heads in 30 tosses, and two families of q.

The posterior is Beta(22, 16) and the evidence log B(22, 16) / B(5, 3) = -21.3972 nats, both in closed form. A q that is
a Beta contains the posterior, and reaches it: the ELBO is the evidence. A q that is Gaussian in the logit of p comes
close, and stays below. The gradients use the sticking-the-landing estimator, so their noise vanishes where q is the
posterior.

python examples/coin.py --out pictures
"""

from __future__ import annotations

from pathlib import Path

import torch
from drawing import BLUE, GREEN, GREY, VERMILION, dress, folder_for_pictures, legend, save, sheet
from torch import Tensor
from torch.distributions import Beta

import priory as pr
from priory.families.per_parameter import PerParameter
from priory.posteriors import Variational
from priory.testing import Coin

COIN = Coin(heads=17, tails=13, a=5.0, b=3.0)


def as_beta(steps: int = 600) -> Variational:
    """Fit a Beta distribution."""
    method = pr.MeanField(family={"p": Beta}, estimator="sticking", samples=4, learning_rate=0.1)
    q = pr.fit(COIN.density(), COIN.data, method, steps=steps, progress=False)
    assert isinstance(q, Variational)
    return q


def as_gaussian(steps: int = 1000) -> Variational:
    """Fit a Gaussian in u = log p / (1 - p), the default family of MeanField."""
    method = pr.MeanField(estimator="sticking", samples=8, learning_rate=0.05)
    q = pr.fit(COIN.density(), COIN.data, method, steps=steps, progress=False)
    assert isinstance(q, Variational)
    return q


def shapes(q: Variational) -> tuple[float, float]:
    """The two parameters of a fitted Beta."""
    assert isinstance(q.family, PerParameter)
    beta = q.family.distributions()["p"]
    assert isinstance(beta, Beta)
    return beta.concentration1.item(), beta.concentration0.item()


def density(q: Variational, p: Tensor) -> Tensor:
    """The density of q over p."""
    return torch.stack([q.log_prob({"p": x}) for x in p]).exp()


def draw(beta: Variational, gaussian: Variational, folder: Path) -> Path:
    """Draw the densities, and the difference of each q to the posterior."""
    figure, (ax, rest) = sheet(1, 2, 10.5, 4.0, width_ratios=[1.3, 1])
    p = torch.linspace(0.005, 0.995, 300, dtype=torch.float64)
    exact = COIN.posterior.log_prob(p).exp()
    one = torch.ones((), dtype=torch.float64)
    prior = Beta(COIN.a * one, COIN.b * one).log_prob(p).exp()
    dress(ax, "17 heads in 30 tosses", "p, the probability of heads", "density")
    ax.plot(p.tolist(), prior.tolist(), color=GREEN, linewidth=1.8, label="prior Beta(5, 3)")
    ax.fill_between(p.tolist(), exact.tolist(), color=GREY, alpha=0.35, linewidth=0, label="posterior Beta(22, 16)")
    dress(
        rest, "What is between q and the posterior", "p, the probability of heads", "density of q minus the posterior's"
    )
    for q, colour, style, name in (
        (beta, BLUE, "-", "q a Beta"),
        (gaussian, VERMILION, "--", "q Gaussian in the logit"),
    ):
        found = density(q, p)
        ax.plot(p.tolist(), found.tolist(), color=colour, linewidth=2, linestyle=style, label=name)
        rest.plot(p.tolist(), (found - exact).tolist(), color=colour, linewidth=2, linestyle=style, label=name)
    ax.set_ylim(0, 7.2)
    legend(ax, "upper left")
    legend(rest, "upper left")
    rest.set_ylim(-0.11, 0.16)
    return save(figure, folder, "coin.png")


def main(folder: Path) -> None:
    """Fit both, print the results beside the exact values, and draw them."""
    beta, gaussian = as_beta(), as_gaussian()
    best, (a, b) = COIN.best_gaussian(), shapes(beta)
    m, s = (part.item() for part in (gaussian.theta[0], gaussian.theta[1].exp()))
    print(f"exact posterior   Beta(22, 16)              log p(D) = {COIN.log_evidence:.4f}")
    print(f"q a Beta          Beta({a:.4f}, {b:.4f})    ELBO     = {beta.log_evidence.value:.4f}")
    bound = gaussian.elbo(samples=20_000)
    print(f"q a Gaussian      logit p ~ N({m:.4f}, {s:.4f}^2)  ELBO = {bound.value:.4f} +- {bound.error:.4f}")
    print(f"the best Gaussian logit p ~ N({best.loc:.4f}, {best.scale:.4f}^2)  ELBO = {best.elbo:.4f}")
    print(f"The best Gaussian is {COIN.log_evidence - best.elbo:.5f} nats below the evidence.")
    draw(beta, gaussian, folder)


if __name__ == "__main__":
    main(folder_for_pictures(__doc__))
