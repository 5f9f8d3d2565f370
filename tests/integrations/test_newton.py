"""What VariationalOnlineNewton has learnt in a loop of one's own, as a posterior."""

import pytest
import torch
from torch import nn

import priory as pr
from priory.core.errors import InputError
from priory.core.streams import stream
from priory.integrations import posterior_of
from priory.optim import VariationalOnlineNewton


def test_the_posterior_has_the_optimizers_moments_and_its_bound_is_close_to_the_exact_evidence(tmp_path):
    generator = stream(0, "newton")
    X = torch.randn(50, 1, generator=generator, dtype=torch.float64)
    y = 2 * X[:, 0] + 0.5 * torch.randn(50, generator=generator, dtype=torch.float64)
    net = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    model = pr.Model(net, pr.Gaussian(0.5), prior=1.0)
    optimizer = VariationalOnlineNewton(net.parameters(), num_data=50, prior_precision=1.0, betas=(0.9, 0.99))
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1500)
    for _ in range(1500):
        with optimizer.sampled():
            (0.5 * nn.functional.mse_loss(net(X)[:, 0], y) / 0.25).backward()
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
    posterior = posterior_of(optimizer, model, (X, y))
    precision = 1 + float(X.square().sum()) / 0.25
    mean, scale = float(X[:, 0] @ y) / 0.25 / precision, precision**-0.5
    q = posterior.family
    assert float(q.loc) == float(net.weight.detach())
    assert float(q.scale) == pytest.approx(float(optimizer.std()[net.weight]), rel=1e-12)
    assert float(q.loc) == pytest.approx(mean, abs=0.2 * scale)
    posterior.save(tmp_path / "newton.priory")
    again = pr.load(tmp_path / "newton.priory", model)
    assert torch.equal(again.predict(X).mean, posterior.predict(X).mean)
    assert posterior.log_evidence.value == pytest.approx(exact_evidence(X, y), abs=0.1)


def exact_evidence(X, y):
    covariance = 0.25 * torch.eye(50, dtype=X.dtype) + X @ X.T
    return float(torch.distributions.MultivariateNormal(torch.zeros_like(y), covariance).log_prob(y))


def test_a_learnt_noise_is_a_point_estimate_from_the_held_out_rows():
    X = torch.linspace(-1, 1, 20, dtype=torch.float64)[:, None]
    y = X[:, 0] + 0.3 * torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(10)
    net = nn.Linear(1, 1, dtype=torch.float64)
    with torch.no_grad():
        net.weight.fill_(1.0)
        net.bias.zero_()
    optimizer = VariationalOnlineNewton(net.parameters(), num_data=20, prior_precision=1e8)
    posterior = posterior_of(optimizer, pr.Model(net, pr.Gaussian()), (X, y), held=(X, y))
    assert float(posterior.mean["likelihood.noise"]) == pytest.approx(0.3, rel=0.02)
    assert float(posterior.family.scale[-1]) == pytest.approx(1e-12)


def test_another_optimizer_or_other_parameters_raise_an_error():
    net, X = nn.Linear(1, 1), torch.ones(4, 1)
    model = pr.Model(net, pr.Gaussian(0.1))
    with pytest.raises(InputError, match="must be a VariationalOnlineNewton"):
        posterior_of(torch.optim.SGD(net.parameters(), lr=0.1), model, (X, X[:, 0]))
    partial = VariationalOnlineNewton([net.weight], num_data=4, prior_precision=1.0)
    with pytest.raises(InputError, match="have every trainable parameter of the model's network"):
        posterior_of(partial, model, (X, X[:, 0]))
