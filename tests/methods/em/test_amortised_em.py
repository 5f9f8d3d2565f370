"""Amortised EM of a linear autoencoder, which is PPCA and has an exact likelihood and posterior, and of networks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, Normal, kl_divergence

from priory.core.errors import InputError
from priory.core.streams import stream
from priory.fitting.checkpoint import Checkpoint
from priory.fitting.fit import fit
from priory.fitting.prepare import make_target
from priory.latent import NormalGamma
from priory.latent.factor_analysis import principal
from priory.latent.vae import VAE
from priory.likelihoods import Bernoulli
from priory.methods.base import Method, Plan
from priory.methods.em.amortised_em import AmortisedEM
from priory.posteriors.amortised import AmortisedPosterior
from priory.testing import assert_mean_close


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows(n: int = 200) -> Tensor:
    """Draw n rows of four columns from a model with two factors and noise."""
    loading = torch.tensor([[2.0, 0.0], [0.0, 1.5], [1.0, 0.5], [-1.0, 1.0]], dtype=torch.float64)
    return randn(0, n, 2) @ loading.T + 0.5 * randn(1, n, 4) + 1


def linear_vae() -> VAE:
    """A linear encoder and a linear decoder with one noise scale, which is PPCA."""
    torch.manual_seed(0)
    return VAE(nn.Linear(4, 4).double(), nn.Linear(2, 4).double(), latent=2)


def fitted(model: VAE, y: Tensor, method: AmortisedEM, **options: Any) -> AmortisedPosterior:
    prepared, data = model.meet(y, options.pop("batch_size", None))
    posterior = fit(prepared, data, method, progress=False, **options)
    assert isinstance(posterior, AmortisedPosterior)
    return posterior


def exact_log_likelihood(theta: dict[str, Tensor], y: Tensor) -> Tensor:
    """Return log p(y_n | theta), (n,), where y ~ N(b, W W' + v I)."""
    w, noise = theta["decoder.weight"], theta["likelihood.noise"].square()
    return MultivariateNormal(theta["decoder.bias"], w @ w.T + noise * torch.eye(4)).log_prob(y)


def divergence(theta: dict[str, Tensor], model: VAE, y: Tensor) -> Tensor:
    """Return KL(q(z | y) || p(z | y, theta)), (n,), where p has the precision I + W'W / v."""
    w, noise = theta["decoder.weight"], theta["likelihood.noise"].square()
    precision = torch.eye(2) + w.T @ w / noise
    centre = (y - theta["decoder.bias"]) @ w / noise @ precision.inverse()
    mean, log_std = model.encode(theta, y)
    q = MultivariateNormal(mean, torch.diag_embed((2 * log_std).exp()))
    return kl_divergence(q, MultivariateNormal(centre, precision.inverse()))


def max_log_likelihood(y: Tensor) -> Tensor:
    """The maximum of the log-likelihood, in closed form (Tipping and Bishop, 1999)."""
    loading, noise = principal(y.T.cov(correction=0), 2)
    return MultivariateNormal(y.mean(0), loading @ loading.T + noise * torch.eye(4)).log_prob(y).sum()


def test_the_elbo_is_the_exact_log_likelihood_minus_the_divergence_at_any_theta():
    y = rows(6)
    model = linear_vae().meet(y)[0]
    theta = model.begin(model.rows((y,)), "", stream(0, "test"))
    for _ in range(2):
        weights = model.log_weights(theta, y, randn(5, 20_000, 6, 2))
        wanted = exact_log_likelihood(theta, y) - divergence(theta, model, y)
        assert_mean_close(weights, wanted)  # 6 comparisons (false alarms: 3e-6)
        theta = {name: t + 0.2 for name, t in theta.items()}


def test_iwae_lies_between_the_elbo_of_the_same_draws_and_the_log_likelihood():
    y = rows(6)
    model = linear_vae().meet(y)[0]
    theta = model.begin(model.rows((y,)), "", stream(0, "test"))
    for seed in range(20):
        noise = randn(seed, 5, 6, 2)
        assert bool((model.iwae(theta, y, noise) >= model.elbo(theta, y, noise)).all())
    log_weights = model.log_weights(theta, y, randn(30, 40_000, 6, 2))
    one, five, fifty = (log_weights.unflatten(0, (-1, s)).logsumexp(1) - torch.tensor(s).log() for s in (1, 5, 50))
    truth = exact_log_likelihood(theta, y)
    for lower, higher in ((one, five), (five, fifty)):
        assert bool((lower.mean(0) < higher.mean(0)).all())
    error = fifty.std(0) / len(fifty) ** 0.5
    assert bool((fifty.mean(0) < truth + 4 * error).all())  # 6 comparisons (false alarms: 2e-4)


def test_gradient_steps_close_the_gap_and_reach_the_maximum_of_ppca():
    y = rows()
    posterior = fitted(linear_vae(), y, AmortisedEM(learning_rate=0.03, samples=4), steps=900, batch_size=100)
    value, maximum = posterior.log_evidence.value, float(max_log_likelihood(y))
    assert maximum - 4.0 < value < maximum  # 0.02 nats per row
    assert float(divergence(posterior.mean, posterior.latent, y).mean()) < 0.05
    assert value <= float(exact_log_likelihood(posterior.mean, y).sum())
    assert posterior.log_evidence.kind == "lower bound of the log-likelihood at theta"


def test_e_steps_update_only_the_encoder():
    y = rows(50)
    model, data = linear_vae().meet(y)
    target, method = make_target(model, data), AmortisedEM(learning_rate=0.01, e_steps=3, schedule="constant")
    state = method.init(target, Plan(data, 10), stream(0, "test"))
    before = state.w.clone()
    state, _ = method.step(target, state, (y,), stream(1, "test"))
    change = (state.w - before).abs()
    decoder_change = change[model.split :]
    torch.testing.assert_close(
        decoder_change, torch.full_like(decoder_change, 0.01), rtol=1e-4, atol=0
    )  # the first step of Adam has the size of the learning rate
    assert 0.015 < float(change[: model.split].max()) <= 0.0401


def test_the_bound_of_a_minibatch_is_scaled_to_all_rows():
    y = rows()
    no_learning = AmortisedEM(learning_rate=1e-12, samples=64)
    full_data = fitted(linear_vae(), y, no_learning, steps=1, batch_size=200).history["bound"]
    minibatches = fitted(linear_vae(), y, no_learning, steps=10, batch_size=20).history["bound"]
    assert float(minibatches.mean()) == pytest.approx(
        float(full_data[0]), rel=0.02
    )  # ten batches are one pass, so only the draws of z differ


@pytest.mark.parametrize("bound", ["elbo", "iwae"])
def test_the_step_follows_the_gradient_of_its_bound(bound: Any):
    y = rows(20)
    model, data = linear_vae().meet(y)
    target, method = make_target(model, data), AmortisedEM(bound, samples=3)
    w = method.init(target, Plan(data, 1), stream(0, "test")).w.requires_grad_()
    value, gradient = method.bound_and_grad(target, w.detach(), (y[:10],), stream(1, "test"))
    noise = model.noise(10, 3, stream(1, "test"))
    function = model.elbo if bound == "elbo" else model.iwae
    wanted = 2 * function(model.layout.constrain(w), y[:10], noise).sum()
    torch.testing.assert_close(value, wanted.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted, w)[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("bound", ["elbo", "iwae"])
def test_the_bound_of_a_network_with_binary_rows_rises(bound: Any):
    y = (rows(100) > 1).double()
    torch.manual_seed(0)
    encoder, decoder = (
        nn.Sequential(nn.Linear(a, 8), nn.Tanh(), nn.Linear(8, b)).double() for a, b in ((4, 4), (2, 4))
    )
    before = [p.clone() for p in encoder.parameters()]
    method = AmortisedEM(bound, samples=2, learning_rate=0.02)
    posterior = fitted(VAE(encoder, decoder, 2, Bernoulli()), y, method, steps=300, batch_size=50)
    history = posterior.history["bound"]
    assert float(history[-50:].mean()) > float(history[:5].mean()) + 20
    assert all(torch.equal(a, b) for a, b in zip(before, encoder.parameters(), strict=True))
    generated, z = posterior.generate(9)
    assert set(generated.unique().tolist()) <= {0.0, 1.0}
    assert z.shape == (9, 2)


def test_generated_rows_have_the_moments_of_the_model():
    y = rows(50)
    posterior = fitted(linear_vae(), y, AmortisedEM(), steps=1)
    generated, z = posterior.generate(20_000)
    theta = posterior.mean
    residual = generated - z @ theta["decoder.weight"].T - theta["decoder.bias"]
    assert_mean_close(residual, 0.0)
    assert_mean_close(residual.square(), theta["likelihood.noise"].square())
    assert_mean_close(Normal(0.0, 1.0).cdf(z), 0.5)


def test_an_interrupted_fit_resumes_with_the_same_result(tmp_path: Path):
    y = rows(40)
    model, data = linear_vae().meet(y, 10)
    method = AmortisedEM(samples=2, e_steps=1)
    uninterrupted = fit(model, data, method, steps=9, progress=False)
    checkpoint = Checkpoint(tmp_path / "fit", every=2)

    def interrupt(progress: Any) -> None:
        if progress.step >= 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(model, data, method, steps=9, progress=False, checkpoint=checkpoint, callbacks=[interrupt])
    resumed = fit(model, data, method, steps=9, progress=False, checkpoint=checkpoint)
    for name, t in resumed.mean.items():
        assert torch.equal(t, uninterrupted.mean[name]), name


def test_invalid_options_and_unsupported_models_raise_an_error():
    assert isinstance(AmortisedEM(), Method)
    invalid: dict[str, Any] = {"samples": 0, "e_steps": -1, "bound": "kl", "learning_rate": 0.0, "schedule": "linear"}
    for name, value in invalid.items():
        with pytest.raises(InputError, match=f"The '{name}' argument of AmortisedEM must be"):
            AmortisedEM(**{name: value})
    prepared, data = NormalGamma().meet(rows(9)[:, 0])
    with pytest.raises(InputError, match=r"The 'model' argument of AmortisedEM must be a latent.VAE"):
        fit(prepared, data, AmortisedEM(), steps=1, progress=False)
    prepared, data = linear_vae().meet(rows(9))
    with pytest.raises(InputError, match="The 'temperature' argument of AmortisedEM must be 1"):
        fit(prepared, data, AmortisedEM(), steps=1, temperature=2.0, progress=False)
    with pytest.raises(InputError, match=r"The 'n' argument of generate must be an integer >= 1, got 0."):
        fit(prepared, data, AmortisedEM(), steps=1, progress=False).generate(0)
