"""The variational autoencoder with a linear decoder, for which probabilistic PCA is the exact solution."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

from priory.core.errors import InputError
from priory.fitting.fit import fit
from priory.fitting.prepare import make_target
from priory.fitting.store import load
from priory.latent.base import Rows
from priory.latent.vae import VAE
from priory.likelihoods import Gaussian
from priory.methods.em.amortised_em import AmortisedEM
from priory.methods.em.em import EM
from priory.models.target import Target
from priory.posteriors.amortised import AmortisedPosterior
from priory.testing import assert_mean_close


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows(n: int = 200) -> Tensor:
    """Draw n rows of four columns from a model with two factors and noise."""
    loading = torch.tensor([[2.0, 0.0], [0.0, 1.5], [1.0, 0.5], [-1.0, 1.0]], dtype=torch.float64)
    return randn(0, n, 2) @ loading.T + 0.5 * randn(1, n, 4) + 1


def exact_ppca(y: Tensor, k: int = 2) -> tuple[dict[str, Tensor], Tensor]:
    """Return PPCA at its maximum (Tipping and Bishop, 1999) as parameters of a linear VAE, and log p(y) per row."""
    centre = y.mean(0)
    values, vectors = torch.linalg.eigh((y - centre).T @ (y - centre) / len(y))
    values, vectors = values.flip(0), vectors.flip(1)
    noise = values[k:].mean()
    loading = vectors[:, :k] * (values[:k] - noise).sqrt()
    inner = values[:k]  # W'W + noise I, which is diagonal
    projection = loading.T / inner[:, None]
    theta = {
        "encoder.weight": torch.cat([projection, torch.zeros_like(projection)]),
        "encoder.bias": torch.cat([-projection @ centre, 0.5 * (noise / inner).log()]),
        "decoder.weight": loading,
        "decoder.bias": centre,
        "likelihood.noise": noise.sqrt(),
    }
    exact = MultivariateNormal(centre, loading @ loading.T + noise * torch.eye(y.shape[1]).double()).log_prob(y)
    return theta, exact


def linear_vae(seed: int = 0) -> VAE:
    torch.manual_seed(seed)
    return VAE(nn.Linear(4, 4).double(), nn.Linear(2, 4).double(), latent=2)


def fitted(model: VAE, y: Tensor, method: AmortisedEM, **options: Any) -> AmortisedPosterior:
    prepared, data = model.meet(y, options.pop("batch_size", None))
    posterior = fit(prepared, data, method, progress=False, **options)
    assert isinstance(posterior, AmortisedPosterior)
    return posterior


def test_both_bounds_equal_the_log_likelihood_at_the_exact_q():
    y = rows(20)
    model, (theta, exact) = linear_vae().meet(y)[0], exact_ppca(y)
    for draws in (1, 3):
        noise = randn(draws, draws, 20, 2)
        torch.testing.assert_close(model.elbo(theta, y, noise), exact, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(model.iwae(theta, y, noise), exact, rtol=1e-10, atol=1e-10)


def test_at_another_q_the_elbo_is_lower_by_the_divergence_and_iwae_lies_between():
    y = rows(5)
    model, (theta, exact) = linear_vae().meet(y)[0], exact_ppca(y)
    perturbed = {**theta, "encoder.bias": theta["encoder.bias"] + torch.tensor([0.3, -0.2, 0.4, 0.1]).double()}
    shift, stretch = torch.tensor([0.3, -0.2]).double(), torch.tensor([0.4, 0.1]).double()
    std = theta["encoder.bias"][2:].exp()
    gap = 0.5 * ((2 * stretch).exp() + (shift / std).square() - 1 - 2 * stretch).sum()  # KL(q || p) of two normals
    noise = randn(3, 4000, 5, 2)
    assert_mean_close(model.log_weights(perturbed, y, noise), exact - gap)  # 5 comparisons (false alarms: 3e-6)
    iwae = torch.stack([model.iwae(perturbed, y, randn(100 + i, 20, 5, 2)) for i in range(200)]).mean(0)
    assert bool((iwae > exact - 0.5 * gap).all())
    assert bool((iwae < exact).all())


def test_the_gradient_of_the_bound_is_zero_at_the_exact_solution():
    # Fisher's identity: KL(q || p) and its gradient are zero at the exact q, and so is the gradient at PPCA's maximum.
    y = rows(50)
    model, (theta, _) = linear_vae().meet(y)[0], exact_ppca(y)
    noise = randn(5, 400, 50, 2)
    total = lambda w: model.log_weights(model.layout.constrain(w), y, noise).sum(1)  # noqa: E731
    gradients = torch.autograd.functional.jacobian(total, model.layout.unconstrain(theta))  # one row per draw
    assert isinstance(gradients, Tensor)
    assert_mean_close(gradients, 0.0)  # 33 comparisons (false alarms: 2e-5)


def test_amortised_em_reaches_the_maximum_of_ppca():
    y = rows()
    _, exact = exact_ppca(y)
    method = AmortisedEM(learning_rate=0.03, samples=4)
    posterior = fitted(linear_vae(), y, method, steps=900, batch_size=100)
    assert posterior.log_evidence.value == pytest.approx(float(exact.sum()), abs=4.0)  # 0.02 nats per row
    assert posterior.log_evidence.value < float(exact.sum())
    noise = exact_ppca(y)[0]["likelihood.noise"]
    assert float(posterior.mean["likelihood.noise"]) == pytest.approx(float(noise), rel=0.1)
    mean, std = posterior.encode(y[:7])
    assert mean.shape == std.shape == (7, 2)
    assert posterior.generate(5).y.shape == (5, 4)


def test_e_steps_alone_bring_q_to_the_exact_posterior():
    y = rows()
    theta, exact = exact_ppca(y)
    model, data = linear_vae().meet(y)
    zero_encoder = {**theta, "encoder.weight": 0 * theta["encoder.weight"], "encoder.bias": 0 * theta["encoder.bias"]}
    first = AmortisedPosterior(make_target(model, data), model.layout.unconstrain(zero_encoder))
    method = AmortisedEM(learning_rate=0.03, samples=2, e_steps=300, start=first)
    posterior = fit(model, data, method, steps=1, progress=False)
    assert isinstance(posterior, AmortisedPosterior)
    assert float((exact - first.log_likelihood(y, samples=1)).mean()) > 1.0
    assert abs(float((exact - posterior.log_likelihood(y, samples=1)).mean())) < 0.1


def test_a_saved_posterior_loads_unchanged(tmp_path: Path):
    y = rows(30)
    posterior = fitted(linear_vae(), y, AmortisedEM(), steps=3)
    posterior.save(tmp_path / "vae.priory")
    loaded = load(tmp_path / "vae.priory", linear_vae().meet(y[:3])[0])
    assert isinstance(loaded, AmortisedPosterior)
    assert torch.equal(loaded.log_likelihood(y), posterior.log_likelihood(y))
    with pytest.raises(InputError, match="A posterior from a file has no data"):
        _ = loaded.log_evidence


def test_the_e_step_returns_the_elbo_per_row():
    y = rows(10)
    model, (theta, exact) = linear_vae().meet(y)[0], exact_ppca(y)
    torch.testing.assert_close(model.e_step(theta, Rows({"y": y})).bound, exact, rtol=1e-10, atol=1e-10)


def test_invalid_input_raises_an_error_that_names_it():
    net = nn.Linear(4, 4).double()
    with pytest.raises(InputError, match=r"The 'encoder' argument of VAE must be an nn.Module, got int."):
        VAE(3, net, 2)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="The 'decoder' argument of VAE must have no buffers"):
        VAE(net, nn.BatchNorm1d(2), 2)
    with pytest.raises(InputError, match=r"The 'likelihood' argument of VAE must be a likelihood, got str."):
        VAE(net, net, 2, "gaussian")  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        InputError,
        match=r"The 'encoder' argument of VAE must give \(1, 6\) for one row, got "
        r"\(1, 4\).",
    ):
        fitted(VAE(net, nn.Linear(3, 4).double(), 3, Gaussian()), rows(9), AmortisedEM(), steps=1)
    with pytest.raises(InputError, match=r"The 'decoder' argument of VAE must take \(1, 2\). It raised: "):
        fitted(VAE(net, nn.Linear(3, 4).double(), 2), rows(9), AmortisedEM(), steps=1)
    prepared, data = linear_vae().meet(rows(9))
    with pytest.raises(InputError, match="has no closed M-step: fit it by AmortisedEM"):
        fit(prepared, data, EM(), steps=1, progress=False)


def test_the_error_of_the_evidence_is_its_standard_deviation_over_seeds():
    y = rows(15)
    model, (theta, _) = linear_vae().meet(y)[0], exact_ppca(y)
    theta["encoder.bias"] = theta["encoder.bias"] + torch.tensor([0.3, -0.2, 0.2, 0.1]).double()
    posterior = AmortisedPosterior(Target(model, None), model.layout.unconstrain(theta))
    posterior.data = model.meet(y)[1]
    totals = torch.stack([posterior.log_likelihood(y, seed=seed).sum() for seed in range(300)])
    assert posterior.evidence().error == pytest.approx(
        float(totals.std()), rel=0.25
    )  # both have an error of 5% (false alarms: 1e-4)
    assert posterior.evidence().value == pytest.approx(float(totals[0]), rel=1e-12)
