"""Target alone scales by N/n and by 1/T, and a target under another prior is a replaced field."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import priory as pr
from priory.models.target import Target

SOURCE = Path(pr.__file__).parent
ROOMS = ("curvature", "estimators", "methods", "posteriors", "diagnostics", "fitting")  # those that are given a target
SCALING = re.compile(
    r"num_data(?:\s+or\s+\w+)?\)?\s*/(?!/)|(?<!/)/\s*\(?(?:self\.|target\.)*(?:num_data|temperature)\b"
)


def test_no_file_that_is_given_a_target_divides_by_rows_or_temperatures_itself():
    files = [path for room in ROOMS for path in (SOURCE / room).rglob("*.py")]
    assert len(files) > 50
    found = [f"{path.name}: {line.strip()}" for path in files for line in code(path) if SCALING.search(line)]
    assert found == []


def code(path):
    """The lines of a file that are neither docstrings nor comments."""
    text = re.sub(r'""".*?"""', "", path.read_text(), flags=re.S)
    return [line.split("  # ")[0] for line in text.splitlines()]


def linear(prior=1.0):
    return pr.Model(nn.Linear(2, 1).double(), pr.Gaussian(0.5), prior=prior)


def test_a_replaced_prior_changes_the_target_and_not_the_model():
    model, other = linear(), linear(3.0)
    target = Target(model, 4)
    w = torch.ones(3, dtype=torch.float64)
    wider = replace(target, prior=other.prior)
    assert target.prior is model.prior
    torch.testing.assert_close(wider.log_prior(w), other.prior.log_prob(w))
    torch.testing.assert_close(wider.log_prior_and_grad(w)[0], other.prior.log_prob(w))
    torch.testing.assert_close(target.log_prior(w), model.prior.log_prob(w))
    assert wider.model is model
    assert wider.model_with_prior().prior is other.prior
    assert target.model_with_prior() is model


def test_a_scaled_target_has_the_scaled_prior():
    target = Target(linear(), 4)
    found = target.scaled({"weight": torch.tensor(4.0)})
    assert found.prior.precision[:2].tolist() == [4.0, 4.0]
    assert target.scaled({}) is target


@pytest.mark.parametrize(
    ("tempers", "powers", "weights"), [("likelihood", (0.25, 1.0), (4.0, 4.0)), ("posterior", (0.25, 0.25), (1.0, 4.0))]
)
def test_powers_and_weights_of_a_tempered_target(tempers, powers, weights):
    target = Target(linear(), 6, temperature=4.0, tempers=tempers)
    assert (target.likelihood_power, target.prior_power) == powers
    assert (target.prior_weight, target.entropy_weight) == weights
    assert target.scale(3) == 2.0
    w = torch.ones(3, dtype=torch.float64)
    log_likelihood, log_prior = torch.tensor(-8.0), torch.tensor(-2.0)
    joint = target.log_joint(w, log_likelihood, log_prior)
    assert float(joint) == pytest.approx(powers[0] * -8 + powers[1] * -2)
    assert float(target.loss(joint)) == pytest.approx(8 + weights[0] * 2)


def test_what_needs_a_network_is_refused_in_one_sentence():
    density = pr.Density(lambda p: -p["a"].square(), {"a": pr.Param()})
    with pytest.raises(pr.InputError, match=r"LastLayer needs a Model: a Density has no network\."):
        Target(density, None).network_model("LastLayer")
