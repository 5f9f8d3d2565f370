"""Three penalties of a Gaussian with learnt means and standard deviations, and the prior that each is, or is not.

    a divergence            0.5 (mu^2 + sigma^2 - 1) - log sigma      the KL to N(0, 1)
    the entropy forgotten   0.5 (mu^2 + sigma^2)                      weight decay on both: nothing keeps sigma from 0
    a cold divergence       a tenth of the first                      Bayesian for no prior while sigma is learnt

A penalty is Bayesian if it is a KL to some prior, plus a constant. `prior_from_penalty` looks for that prior and
reports the result; each picture has the penalty on the left, the prior on the right, and the verdict below.

python examples/penalties_and_priors.py --out pictures
"""

from __future__ import annotations

from pathlib import Path

from drawing import folder_for_pictures, save
from torch import Tensor

import priory as pr
from priory.plot.penalties import equivalence

COLD = 0.1


def divergence(mu: Tensor, sigma: Tensor) -> Tensor:
    """KL(N(mu, sigma^2) || N(0, 1))."""
    return 0.5 * (mu**2 + sigma**2 - 1) - sigma.log()


PENALTIES = {
    "a divergence": divergence,
    "the entropy forgotten": lambda mu, sigma: 0.5 * (mu**2 + sigma**2),
    "a cold divergence": lambda mu, sigma: COLD * divergence(mu, sigma),
}


def priors() -> dict[str, pr.Equivalence]:
    """The equivalence of each penalty."""
    return {name: pr.prior_from_penalty(penalty, "gaussian") for name, penalty in PENALTIES.items()}


def draw(found: dict[str, pr.Equivalence], folder: Path) -> list[Path]:
    """Draw one picture per penalty."""
    names = (name.replace(" ", "_") for name in found)
    pictures = (equivalence(one, title=f"The penalty: {name}") for name, one in found.items())
    return [save(picture, folder, f"penalty_{name}.png") for name, picture in zip(names, pictures, strict=True)]


def main(folder: Path) -> None:
    """Print the verdicts and draw the pictures."""
    found = priors()
    for name, one in found.items():
        scores = one.certificate
        print(f"{name}: {scores.kind}; round trip {scores.round_trip:.1e} nats, 1 - T = {scores.missing_entropy:.3f}")
        print(f"    {scores.verdict}")
    draw(found, folder)


if __name__ == "__main__":
    main(folder_for_pictures(__doc__))
