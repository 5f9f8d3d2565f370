"""Thirteen posteriors with reference draws, by NUTS and by HMC: means, standard deviations, R-hat and divergences.

Of 105 parameters in all every mean and every standard deviation is compared, at 4 combined standard errors: were both
sets of draws drawn anew, one of the 210 comparisons would fail by chance in 1.3 % of the runs of a sampler. Seeds are
fixed. Of the thirteen only the centred eight schools is known for divergences.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import priory as pr
from priory.core.errors import PrioryWarning
from priory.diagnostics import mcse_mean, mcse_sd, r_hat
from priory.methods.mcmc.sampler import Sampler
from priory.posteriors import Chains

pytestmark = [pytest.mark.reference, pytest.mark.slow]

spec = importlib.util.spec_from_file_location("posteriordb", Path(__file__).parents[2] / "posteriordb.py")
assert spec is not None
assert spec.loader is not None
posteriordb = sys.modules["posteriordb"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(posteriordb)

FUNNEL = "eight_schools-eight_schools_centered"
# Small steps, for the neck of the funnel, and short trajectories: beyond a length of 1 a transition brings tau hardly
# any further. Its autocorrelation time is about 40 transitions, and R-hat is below 1.01 where half a chain is worth 50
# independent draws: so few chains, and about ten thousand transitions of each. The smallest tau stay out of reach, and
# its mean is a little too large, within the standard errors.
IN_THE_NECK: dict[str, Any] = {"chains": 16, "warmup": 1000, "accept": 0.99}
HIERARCHY = "eight_schools-eight_schools_noncentered"  # no normal fits it, so that it starts from its own starts
SIGMAS = 4.0
REFERENCE = (10, 1000)  # chains and draws


def apart(found: Tensor, known: Tensor) -> Tensor:
    """How many combined standard errors the means and the standard deviations of two sets of chains are apart."""
    pairs = []
    for value, error in ((lambda x: x.mean(0), mcse_mean), (lambda x: x.std(0), mcse_sd)):
        combined = (error(found).square() + error(known).square()).sqrt()
        pairs.append((value(found.flatten(0, 1)) - value(known.flatten(0, 1))).abs() / combined)
    return torch.stack(pairs)


def fitted(density: pr.Density, method: Sampler, draws: int) -> Chains:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*diverged", PrioryWarning)  # divergences are counted below
        posterior = pr.fit(density, None, method, steps=draws, progress=False)
    assert isinstance(posterior, Chains)
    return posterior


def is_the_reference(name: str, method: Sampler, draws: int, folder: Path) -> None:
    known = posteriordb.problem(name, folder)
    posterior = fitted(known.density, method, draws)
    found = known.named(posterior.draws)
    assert found.keys() == known.draws.keys()
    for parameter, reference in known.draws.items():
        far = apart(found[parameter], reference.unflatten(0, REFERENCE))
        assert float(far.max()) < SIGMAS, f"{parameter}: {far.tolist()} standard errors"
        assert float(r_hat(found[parameter]).max()) < 1.01, parameter
    assert name == FUNNEL or len(posterior.divergences) == 0


@pytest.mark.parametrize("name", posteriordb.NAMES)
def test_nuts_has_the_means_and_standard_deviations_of_the_reference(name: str, shared_data: Path) -> None:
    short = pr.NUTS(chains=32, max_depth=6, start=pr.Pathfinder())
    method, draws = (pr.NUTS(chains=64, max_depth=6), 400) if name == HIERARCHY else (short, 250)
    if name == FUNNEL:
        method, draws = pr.NUTS(**IN_THE_NECK, max_depth=5, thin=8), 1000
    is_the_reference(name, method, draws, shared_data)


@pytest.mark.parametrize("name", posteriordb.NAMES)
def test_hmc_has_the_means_and_standard_deviations_of_the_reference(name: str, shared_data: Path) -> None:
    short = pr.HMC(chains=32, start=pr.Pathfinder())
    method, draws = (pr.HMC(chains=64), 500) if name == HIERARCHY else (short, 250)
    if name == FUNNEL:
        method, draws = pr.HMC(**IN_THE_NECK, trajectory=1.0, integrator="leapfrog", thin=10), 1000
    is_the_reference(name, method, draws, shared_data)
