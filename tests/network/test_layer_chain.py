"""Batched gradients through a chain of layers equal those of the network at each vector."""

import pytest
import torch
from torch import nn

import priory as pr
from priory.network.layer_chain import chain_outputs

F64 = torch.float64


def tied() -> nn.Module:
    first = nn.Linear(3, 3)
    return nn.Sequential(first, nn.Tanh(), first, nn.Linear(3, 2))


def frozen() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 4), nn.SiLU(), nn.Linear(4, 2))
    net[0].requires_grad_(False)
    net[2].bias.requires_grad_(False)
    return net


CHAINS = {
    "one layer": lambda: nn.Linear(3, 2),
    "three layers": lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)),
    "no bias": lambda: nn.Sequential(nn.Linear(3, 4, bias=False), nn.ELU(), nn.Linear(4, 2, bias=False)),
    "an activation first": lambda: nn.Sequential(nn.Sigmoid(), nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)),
    "in place": lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)),
    "tied": tied,
    "frozen": frozen,
}


@pytest.mark.parametrize("learnt", [False, True])
@pytest.mark.parametrize("name", CHAINS)
def test_outputs_and_gradients_of_many_vectors_equal_those_of_each(name: str, learnt: bool) -> None:
    torch.manual_seed(0)
    model = pr.Model(CHAINS[name]().double(), pr.Gaussian() if learnt else pr.Gaussian(0.5))
    assert model.network.layer_chain
    x, weight = torch.randn(7, 3, dtype=F64), torch.randn(4, 7, 2, dtype=F64)
    w = torch.randn(4, model.layout.size, dtype=F64).requires_grad_()
    outputs = chain_outputs(model.network, w, x)
    each = torch.stack([model.network.functional(v, (x,), {}) for v in w])
    torch.testing.assert_close(outputs, each, rtol=1e-12, atol=1e-12)
    found, wanted = (torch.autograd.grad((weight * t).sum(), w)[0] for t in (outputs, each))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
