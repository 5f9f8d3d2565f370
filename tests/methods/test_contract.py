"""One table with every public method, and the clauses of the contract that it is excluded from, with the reason."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import priory as pr
from priory import latent, methods
from priory.core.streams import stream
from priory.likelihoods import Bernoulli
from priory.methods.base import Method
from priory.testing.contract import CLAUSES, NEEDS_A_DENSITY, NEEDS_A_NETWORK, Problem, classification


@dataclass(frozen=True)
class Entry:
    """A method with options that make it fast, and the clauses that don't apply to it."""

    method: Any
    exact: Any = None  # the same method for the clauses that need an accurate posterior; `method` unless given
    exact_steps: int | None = None  # the steps of those clauses; the method's own default unless given
    problem: Problem = classification
    excluded: Mapping[str, str] = field(default_factory=dict)  # the name of a clause -> why it doesn't apply


def rows_of_two_groups() -> Any:
    y = torch.randn(20, 2, generator=stream(0, "contract", "rows"), dtype=torch.float64)
    y[::2] += 3.0
    return y


def gaussian_mixture() -> tuple[Any, Any]:
    return latent.GaussianMixture(2), rows_of_two_groups()


def bayesian_mixture() -> tuple[Any, Any]:
    return latent.BayesianGaussianMixture(2), rows_of_two_groups()


def auto_encoder() -> tuple[Any, Any]:
    torch.manual_seed(0)
    y = (rows_of_two_groups() > 1).double()
    return latent.VAE(nn.Linear(2, 2).double(), nn.Linear(1, 2).double(), 1, Bernoulli()), y


FOLLOWS = {"records_one_value_per_step": "the user's steps are those of MAP"}
NO_DENSITY = dict.fromkeys(NEEDS_A_DENSITY, "it needs a network")
OWN_START = {"keeps_members_apart": "it starts from the rows, and not where the target does"}
NO_NETWORK = dict.fromkeys((*NEEDS_A_NETWORK, *NEEDS_A_DENSITY), "it fits latent-variable models")
QUICK: dict[str, Any] = {"exact_steps": 500}

TABLE = {
    "MAP": Entry(pr.MAP()),
    "MAP by evidence": Entry(pr.MAP(evidence_every=1, structure="diag"), excluded=NO_DENSITY),
    "MeanField": Entry(pr.MeanField(samples=4)),
    "MeanField, one sample": Entry(pr.MeanField()),
    "NaturalGradient": Entry(pr.NaturalGradient()),
    "NaturalGradient, full": Entry(pr.NaturalGradient(covariance="full", samples=4)),
    "FullRank": Entry(pr.FullRank(), **QUICK),
    "LowRank": Entry(pr.LowRank(learning_rate=0.05), **QUICK),
    "MixtureOfGaussians": Entry(pr.MixtureOfGaussians(samples=2, learning_rate=0.05), **QUICK),
    "Flow": Entry(pr.Flow(layers=2, hidden=4, samples=2, learning_rate=0.05), **QUICK),
    "Pathfinder": Entry(pr.Pathfinder(paths=4, draws=3000)),
    "SVGD": Entry(pr.SVGD(particles=16, learning_rate=0.05), **QUICK),
    "Laplace": Entry(pr.Laplace(), excluded=FOLLOWS),
    "Laplace, diagonal": Entry(pr.Laplace("diag"), excluded=FOLLOWS),
    "LastLayer": Entry(pr.LastLayer(), excluded=FOLLOWS | NO_DENSITY),
    "Dropout": Entry(pr.Dropout(), excluded=NO_DENSITY),
    "Dropout, learnt": Entry(pr.Dropout("learn", samples=2), excluded=NO_DENSITY),
    "SWAG": Entry(pr.SWAG(snapshots=20), excluded=FOLLOWS),
    "Ensemble": Entry(pr.Ensemble(pr.MAP(), 3)),
    "NUTS": Entry(pr.NUTS(chains=16, max_depth=4, warmup=60, accept=0.95), exact=pr.NUTS(chains=16, warmup=60)),
    "HMC": Entry(pr.HMC(chains=16, accept=0.99, warmup=20), exact=pr.HMC(chains=16, warmup=60)),
    "MALA": Entry(pr.MALA(chains=16, warmup=100)),
    "RandomWalk": Entry(pr.RandomWalk(chains=16, warmup=100)),
    "SGLD": Entry(pr.SGLD()),
    "SGHMC": Entry(pr.SGHMC()),
    "EM": Entry(pr.EM(tolerance=0.0), problem=gaussian_mixture, excluded=NO_NETWORK | OWN_START),
    "VariationalEM": Entry(pr.VariationalEM(tolerance=0.0), problem=bayesian_mixture, excluded=NO_NETWORK | OWN_START),
    "AmortisedEM": Entry(pr.AmortisedEM(), problem=auto_encoder, excluded=NO_NETWORK | OWN_START),
}
PUBLIC = [name for name in methods.__all__ if hasattr(methods.by_name(name), "step")]
# a method without an entry runs through the whole contract with its default options
TABLE |= {name: Entry(methods.by_name(name)()) for name in PUBLIC if name not in TABLE}
APPLICABLE = [
    (name, clause) for name, entry in TABLE.items() for clause in CLAUSES if clause.__name__ not in entry.excluded
]


@pytest.mark.filterwarnings("ignore:The gradient of the log joint")
@pytest.mark.parametrize(
    ("name", "clause"), APPLICABLE, ids=[f"{name}-{clause.__name__}" for name, clause in APPLICABLE]
)
def test_every_method_satisfies_the_contract(name, clause):
    entry = TABLE[name]
    options: dict[str, Any] = {}
    if "problem" in inspect.signature(clause).parameters:
        options["problem"] = entry.problem
    if "steps" in inspect.signature(clause).parameters:
        options["steps"] = entry.exact_steps
    exact = entry.exact is not None and clause.__name__ in NEEDS_A_DENSITY
    clause(entry.exact if exact else entry.method, **options)


def test_every_public_method_is_in_the_table_under_its_name():
    assert {name for name in PUBLIC if type(TABLE[name].method).__name__ != name} == set()
    assert all(isinstance(entry.method, Method) for entry in TABLE.values())


def test_excluded_names_are_clauses():
    names = {clause.__name__ for clause in CLAUSES}
    assert {name for entry in TABLE.values() for name in entry.excluded} <= names
