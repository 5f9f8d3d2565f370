"""Eight schools, twice: the same posterior in two sets of coordinates, and a sampler for which they differ.

Eight schools report the effect of coaching, y_j with a known error s_j (Rubin 1981). Their true effects theta_j share a
mean mu and a spread tau, which are learnt too:

    y_j ~ N(theta_j, s_j),    theta_j ~ N(mu, tau),    mu ~ N(0, 5),    tau ~ half-Cauchy(5)

In this centred form the theta_j concentrate where tau is small: a funnel, too narrow at its end for the step size that
fits its mouth. Trajectories that enter it diverge, and NUTS warns about them. In the non-centred form, theta_j = mu +
tau z_j with z_j ~ N(0, 1), the same posterior has no funnel, and no trajectory diverges.

python examples/eight_schools.py --out pictures
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from drawing import BLUE, VERMILION, dress, folder_for_pictures, legend, save, sheet
from torch import Tensor
from torch.distributions import HalfCauchy, Normal

import priory as pr
from priory.posteriors import Chains

Y = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0], dtype=torch.float64)
S = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0], dtype=torch.float64)
Form = Literal["centred", "non-centred"]


def centred(p: dict[str, Tensor]) -> Tensor:
    """The log joint density in the centred form."""
    mu, tau, theta = p["mu"], p["tau"], p["theta"]
    prior = Normal(0.0, 5.0).log_prob(mu) + HalfCauchy(5.0).log_prob(tau)
    return prior + Normal(mu, tau).log_prob(theta).sum() + Normal(theta, S).log_prob(Y).sum()


def non_centred(p: dict[str, Tensor]) -> Tensor:
    """The log joint density in the non-centred form, with z_j = (theta_j - mu) / tau as coordinates."""
    mu, tau, z = p["mu"], p["tau"], p["z"]
    prior = Normal(0.0, 5.0).log_prob(mu) + HalfCauchy(5.0).log_prob(tau)
    return prior + Normal(0.0, 1.0).log_prob(z).sum() + Normal(mu + tau * z, S).log_prob(Y).sum()


def density(form: Form) -> pr.Density:
    """The density in one of the two forms."""
    shared = {"mu": pr.Param(), "tau": pr.Param((), pr.constraints.positive)}
    if form == "centred":
        return pr.Density(centred, {**shared, "theta": pr.Param((8,))})
    return pr.Density(non_centred, {**shared, "z": pr.Param((8,))})


def fit(form: Form, chains: int = 32, draws: int = 150, warmup: int = 150) -> Chains:
    """Sample by NUTS, which warns about divergences in the centred form."""
    posterior = pr.fit(
        density(form),
        None,
        pr.NUTS(chains=chains, warmup=warmup, accept=0.9, max_depth=6),
        steps=draws,
        progress=False,
    )
    assert isinstance(posterior, Chains)
    return posterior


def effects(posterior: Chains) -> Tensor:
    """The effects theta of every draw, (chain, draw, 8)."""
    draws = posterior.draws
    return draws["theta"] if "theta" in draws else draws["mu"][..., None] + draws["tau"][..., None] * draws["z"]


def diverged(posterior: Chains) -> Tensor:
    """Whether a draw comes from a trajectory that diverged, (chain, draw)."""
    return posterior.statistics["divergent"].bool()


def draw(fits: dict[str, Chains], folder: Path) -> Path:
    """log tau against the first school's effect, with the draws whose trajectories diverged on top."""
    figure, panels = sheet(1, 2, 10.5, 4.4, sharex=True, sharey=True)
    for ax, (name, posterior) in zip(panels, fits.items(), strict=True):
        theta, log_tau, bad = effects(posterior)[..., 0], posterior.draws["tau"].log(), diverged(posterior)
        count = int(bad.sum())
        dress(ax, f"{name}: {count} of {bad.numel():,} trajectories diverged", "effect of the first school", "log tau")
        some = slice(None, None, max(1, bad.numel() // 4000))  # more points would overlap completely
        ax.scatter(
            *(x[~bad][some].tolist() for x in (theta, log_tau)),
            s=3,
            color=BLUE,
            alpha=0.35,
            linewidths=0,
            label="draws",
        )
        ax.scatter(
            *(x[bad].tolist() for x in (theta, log_tau)),
            s=60,
            color=VERMILION,
            linewidths=0,
            label="after a divergence",
        )
        ax.set_xlim(-25, 45)
        ax.set_ylim(-5, 4)
    panels[0].text(10, -3.5, "no chain gets here:\nthe neck is missing", ha="center", fontsize=10, color=VERMILION)
    panels[1].text(24, -3.5, "the neck of the funnel:\ntau near 0, all schools alike", ha="center", fontsize=10)
    legend(panels[0], "upper left")
    return save(figure, folder, "eight_schools.png")


def main(folder: Path) -> None:
    """Fit both forms, print their summaries, and draw them."""
    fits: dict[str, Chains] = {form: fit(form) for form in ("centred", "non-centred")}
    for name, posterior in fits.items():
        print(f"\n{name}\n{posterior.summary()}")
        low = (posterior.draws["tau"] < 0.5).double().mean()
        print(f"{100 * low:.1f} % of the draws have tau below 0.5, the end of the funnel.")
    draw(fits, folder)


if __name__ == "__main__":
    main(folder_for_pictures(__doc__))
