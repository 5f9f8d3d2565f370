"""Reference means and standard deviations for the models of practice, by methods that are not Markov chains of ours.

The densities are written again here, batched, in coordinates of their own.

- Regressions: the coefficients are Gaussian given sigma, and sigma is integrated by quadrature.
- Models of up to ten coordinates: importance sampling from a Student-t that is fitted to the posterior.
- Hierarchical models and latent states: importance sampling of the other parameters. The effects or states are
  integrated out, exactly in a linear Gaussian model and by quadrature in a logistic one, and their moments follow from
  their conditional means and variances.
- The horseshoe: a Gibbs sampler. NUTS on its scales alone, with the coefficients integrated out in closed form, agrees:
  44 comparisons of means and sds within 2.9 standard errors.
- The funnel and the bimodal density: closed forms.

References:
    Makalic and Schmidt (2016), A simple sampler for the horseshoe estimator.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from _practice import PRACTICE, REGRESSION_PRIORS, SIR_DAYS, SIR_PEOPLE, SIR_SUBSTEPS, Data, index, tensor
from torch import Tensor

from priory.diagnostics import k_hat, mcse_mean, mcse_sd

Moments = dict[str, Tensor]
Found = dict[str, dict[str, Any]]
LogDensity = Callable[[Tensor], Tensor]
MAX_K_HAT = 0.5  # below it the standard errors of the weighted means can be trusted
PROPOSAL_DF = 6.0


def reference(name: str) -> Found:
    """Mean, sd and their standard errors of each quantity of a model of practice."""
    return REFERENCES[name](PRACTICE[name][0]())


def entry(mean: Tensor, sd: Tensor, mcse_mean: Tensor | None = None, mcse_sd: Tensor | None = None) -> dict[str, Any]:
    """The values as they are stored; an exact value has a standard error of zero."""
    zero = torch.zeros_like(mean)
    parts = {"mean": mean, "sd": sd, "mcse_mean": mcse_mean, "mcse_sd": mcse_sd}
    return {key: (zero if x is None else x).tolist() for key, x in parts.items()}


# Linear regressions, by quadrature over log sigma.


def regression(data: Data, coefficient_sds: list[float], sigma_scale: float) -> Found:
    """Moments of beta and sigma, exact but for rounding."""
    X, y, sds = tensor(data["X"]), tensor(data["y"]), tensor(coefficient_sds)
    best = torch.linalg.lstsq(X, y[:, None]).solution[:, 0]
    centre = ((y - X @ best).square().sum() / len(y)).sqrt().log()
    log_sigma = centre + torch.linspace(-12, 12, 4001, dtype=torch.float64) / math.sqrt(len(y))
    sigma = log_sigma.exp()
    # least squares of the rows and of the prior's rows, by QR, about the least-squares solution
    stacked = torch.cat([X / sigma[:, None, None], torch.diag(1 / sds).expand(len(sigma), -1, -1)], 1)
    target = torch.cat([(y - X @ best) / sigma[:, None], (-best / sds).expand(len(sigma), -1)], 1)
    basis, root = torch.linalg.qr(stacked)
    shift = torch.linalg.solve_triangular(root, basis.mT @ target[..., None], upper=True)
    left = (target - (stacked @ shift)[..., 0]).square().sum(-1)
    log_weight = -len(y) * log_sigma - root.diagonal(dim1=1, dim2=2).abs().log().sum(-1) - 0.5 * left
    log_weight = log_weight - 0.5 * (sigma / sigma_scale).square() + log_sigma
    weight = log_weight.softmax(0)
    inverse = torch.linalg.solve_triangular(root, torch.eye(len(sds), dtype=root.dtype).expand_as(root), upper=True)
    given, variance = shift[..., 0], inverse.square().sum(-1)
    moved = weight @ given
    spread = (weight @ (variance + (given - moved).square())).sqrt()
    mean = weight @ sigma
    return {
        "beta": entry(best + moved, spread),
        "sigma": entry(mean, (weight @ (sigma - mean).square()).sqrt()),
    }


# Importance sampling.


def importance(
    log_density: LogDensity,
    start: list[float],
    moments: Callable[[Tensor], tuple[Moments, Moments]],
    draws: int = 400_000,
    block: int = 10_000,
    seed: int = 0,
) -> Found:
    """Weighted moments under exp(log_density(u)) for u (n, d), by a Student-t that is refitted five times.

    `moments(u)` gives for each quantity its conditional mean given u and its conditional variance (zero where the
    quantity is a function of u).
    """
    generator = torch.Generator().manual_seed(seed)
    centre, root = laplace(log_density, tensor(start))
    for _ in range(5):
        u, log_weight = proposed(log_density, centre, root, 20_000, min(block, 20_000), generator)
        weight = log_weight.softmax(0)
        centre = weight @ u
        root = torch.linalg.cholesky((u - centre).mT @ (weight[:, None] * (u - centre)))
    u, log_weight = proposed(log_density, centre, root, draws, block, generator)
    reliability = float(k_hat(log_weight))
    if not reliability < MAX_K_HAT:
        raise RuntimeError(f"k-hat is {reliability:.2f}: the proposal does not cover the posterior.")
    weight = log_weight.softmax(0)
    print(f"    importance sampling: k-hat {reliability:.2f}, effective draws {1 / float(weight.square().sum()):,.0f}")
    parts = [moments(some) for some in u.split(block)]
    found = {}
    for name in parts[0][0]:
        given, variance = (torch.cat([part[i][name] for part in parts]) for i in (0, 1))
        w = weight.reshape(-1, *[1] * (given.ndim - 1))
        mean = (w * given).sum(0)
        square = (given - mean).square() + variance
        total = (w * square).sum(0)
        error = lambda x, w=w: (w * x).square().sum(0).sqrt()  # noqa: E731
        found[name] = entry(mean, total.sqrt(), error(given - mean), error(square - total) / (2 * total.sqrt()))
    return found


def proposed(
    log_density: LogDensity, centre: Tensor, root: Tensor, draws: int, block: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draws of a Student-t (n, d), and their log weights (n,)."""
    size = len(centre)
    z = torch.randn(draws, size, generator=generator, dtype=torch.float64)
    chi = torch.randn(draws, int(PROPOSAL_DF), generator=generator, dtype=torch.float64).square().sum(1)
    t = z * (PROPOSAL_DF / chi).sqrt()[:, None]
    u = centre + t @ root.mT
    log_proposal = -(PROPOSAL_DF + size) / 2 * torch.log1p(t.square().sum(1) / PROPOSAL_DF)
    value = torch.cat([log_density(some) for some in u.split(block)]) - log_proposal
    return u, torch.where(torch.isfinite(value), value, -torch.inf)


def laplace(log_density: LogDensity, start: Tensor) -> tuple[Tensor, Tensor]:
    """The mode, and a root of the inverse of the negative Hessian there."""
    u = start.clone().requires_grad_()
    optimiser = torch.optim.LBFGS([u], max_iter=500, line_search_fn="strong_wolfe", tolerance_grad=1e-6)

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = -log_density(u[None])[0]
        loss.backward()
        return loss

    optimiser.step(closure)
    one = lambda v: -log_density(v[None])[0]  # noqa: E731
    hessian: Any = torch.autograd.functional.hessian(one, u.detach())
    return u.detach(), torch.linalg.cholesky(torch.linalg.inv(hessian))


def exactly(values: Moments) -> tuple[Moments, Moments]:
    """The moments of functions of u."""
    return values, {name: torch.zeros_like(x) for name, x in values.items()}


def normal(x: Any, mean: Any, sd: Any) -> Tensor:
    """log Normal(x; mean, sd), up to a constant."""
    sd = torch.as_tensor(sd, dtype=torch.float64)
    return -0.5 * ((x - mean) / sd).square() - sd.log()


# Models of a few coordinates. Each has a log density of coordinates u (n, d), with the Jacobian, and its parameters.


def zero_inflated_poisson(data: Data) -> Found:
    x, y = tensor(data["x"]), tensor(data["y"])

    def log_density(u: Tensor) -> Tensor:
        log_rate, gate = u[:, :1] + u[:, 1:2] * x, torch.sigmoid(u[:, 2:3] + u[:, 3:4] * x)
        poisson = y * log_rate - log_rate.exp() - torch.lgamma(y + 1)
        mixed = ((y == 0) * gate + (1 - gate) * poisson.exp()).log()
        return mixed.sum(1) + normal(u, 0, 2).sum(1)

    return importance(log_density, [0.0] * 4, lambda u: exactly({"rate": u[:, :2], "zero": u[:, 2:]}))


def censored_weibull(data: Data) -> Found:
    X, time, event = tensor(data["X"]), tensor(data["time"]), tensor(data["event"])

    def log_density(u: Tensor) -> Tensor:
        shape, scale = u[:, 3:].exp(), (u[:, :1] + u[:, 1:3] @ X.T).exp()
        ratio = time / scale
        log_pdf = (shape / scale).log() + (shape - 1) * ratio.log() - ratio**shape
        rows = torch.where(event > 0, log_pdf, -(ratio**shape))
        return rows.sum(1) + normal(u[:, 0], 0, 5) + normal(u[:, 1:3], 0, 2).sum(1) + normal(u[:, 3], 0, 1)

    return importance(
        log_density,
        [1.0, 0.0, 0.0, 0.0],
        lambda u: exactly({"alpha": u[:, 0], "beta": u[:, 1:3], "shape": u[:, 3].exp()}),
    )


def ordered_mixture(data: Data) -> Found:
    y = tensor(data["y"])

    def parts(u: Tensor) -> Moments:
        mu = torch.stack([u[:, 0], u[:, 0] + u[:, 1].exp()], 1)
        return {"mu": mu, "sigma": u[:, 2:4].exp(), "theta": torch.sigmoid(u[:, 4])}

    def log_density(u: Tensor) -> Tensor:
        p = parts(u)
        weight = torch.stack([p["theta"], 1 - p["theta"]], 1)
        each = normal(y, p["mu"][..., None], p["sigma"][..., None]).exp() * weight[..., None]  # (n, 2, rows)
        prior = normal(p["mu"], 0, 3).sum(1) - p["sigma"].square().sum(1) / 8 + weight.log().sum(1)
        return each.sum(1).log().sum(1) + prior + u[:, 1:4].sum(1) + weight.log().sum(1)

    return importance(log_density, [-0.5, 1.0, 0.0, 0.0, 0.0], lambda u: exactly(parts(u)))


def gp_cholesky(data: Data) -> Found:
    x, y = tensor(data["x"]), tensor(data["y"])
    squares, eye = (x[:, None] - x).square(), torch.eye(len(x), dtype=torch.float64)

    def log_density(u: Tensor) -> Tensor:
        length, amplitude, noise = (v[:, None, None] for v in u.exp().T)
        K = amplitude.square() * torch.exp(-squares / (2 * length.square())) + noise.square() * eye
        root, failed = torch.linalg.cholesky_ex(K)
        white = torch.linalg.solve_triangular(root, y[:, None].expand(len(u), -1, 1), upper=False)[..., 0]
        value = -0.5 * white.square().sum(1) - root.diagonal(dim1=1, dim2=2).log().sum(1)
        length, amplitude, noise = u.exp().T
        prior = -6 * length.log() - 5 / length - amplitude.square() / 8 - noise.square() / 2
        return torch.where(failed > 0, -torch.inf, value + prior + u.sum(1))

    names = ("length", "amplitude", "noise")
    parts = lambda u: exactly(dict(zip(names, u.exp().T, strict=True)))  # noqa: E731
    return importance(log_density, [0.0, 0.0, -1.0], parts, draws=200_000, block=2_000)


def sir_rk4(data: Data) -> Found:
    y = tensor(data["y"])

    def log_density(u: Tensor) -> Tensor:
        beta, gamma, phi = u.exp().T

        def slope(s: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
            new = beta * s * i / SIR_PEOPLE
            return -new, new - gamma * i

        h, s, i, rows = 1 / SIR_SUBSTEPS, torch.full_like(beta, SIR_PEOPLE - 1.0), torch.ones_like(beta), []
        for step in range(SIR_DAYS * SIR_SUBSTEPS):
            a = slope(s, i)
            b = slope(s + h / 2 * a[0], i + h / 2 * a[1])
            c = slope(s + h / 2 * b[0], i + h / 2 * b[1])
            d = slope(s + h * c[0], i + h * c[1])
            s = s + h / 6 * (a[0] + 2 * b[0] + 2 * c[0] + d[0])
            i = i + h / 6 * (a[1] + 2 * b[1] + 2 * c[1] + d[1])
            if (step + 1) % SIR_SUBSTEPS == 0:
                rows.append(i)
        mean, phi = torch.stack(rows, 1), phi[:, None]
        counts = torch.lgamma(y + phi) - torch.lgamma(phi) + phi * (phi / (phi + mean)).log()
        counts = (counts + y * (mean / (phi + mean)).log()).sum(1)
        return counts + normal(u[:, 0], 0, 1) + normal(u[:, 1], -1, 1) - 0.2 * phi[:, 0] + u[:, 2]

    names = ("beta", "gamma", "phi")
    parts = lambda u: exactly(dict(zip(names, u.exp().T, strict=True)))  # noqa: E731
    return importance(log_density, [0.5, -0.8, 2.0], parts)


def hmm_forward(data: Data) -> Found:
    y = tensor(data["y"])

    def parts(u: Tensor) -> Moments:
        mu = torch.stack([u[:, 0], u[:, 0] + u[:, 1].exp(), u[:, 0] + u[:, 1].exp() + u[:, 2].exp()], 1)
        logits = torch.cat([u[:, 4:].unflatten(1, (3, 2)), torch.zeros(len(u), 3, 1, dtype=u.dtype)], 2)
        return {"mu": mu, "sigma": u[:, 3].exp(), "moves": logits.softmax(2)}

    def log_density(u: Tensor) -> Tensor:
        p = parts(u)
        emission = normal(y[:, None, None], p["mu"], p["sigma"][:, None]).exp()  # (500, n, 3)
        forward, total = emission[0], torch.zeros(len(u), dtype=u.dtype)
        for t in range(1, len(y)):
            forward = (forward[:, None] @ p["moves"])[:, 0] * emission[t]
            scale = forward.sum(1, keepdim=True)
            forward, total = forward / scale, total + scale[:, 0].log()
        prior = normal(p["mu"], 0, 3).sum(1) - p["sigma"].square() / 8 + p["moves"].log().sum((1, 2))
        return total + prior + u[:, 1:4].sum(1) + p["moves"].log().sum((1, 2))

    start = [-2.0, 0.9, 0.9, 0.0, 3.5, 1.0, 0.0, 2.0, -1.0, 0.0]
    return importance(log_density, start, lambda u: exactly(parts(u)), draws=200_000)


# Groups and states integrated out.


def hierarchical_logit(data: Data) -> Found:
    """Coordinates (mu, log tau, beta); the effect of each group by Gauss-Hermite quadrature with 32 nodes."""
    X, y = tensor(data["X"]).unflatten(0, (200, 10)), tensor(data["y"]).reshape(200, 10)
    assert np.array_equal(data["group"], np.repeat(np.arange(200), 10))
    nodes, weights = (tensor(v) for v in np.polynomial.hermite_e.hermegauss(32))

    def by_node(u: Tensor, groups: slice = slice(None)) -> Tensor:
        """log p(y_group | u, z at a node) + log of the node's weight, (n, groups, 32)."""
        fixed = u[:, None, None, :1] + (X[groups] @ u[:, 2:].T).permute(2, 0, 1)[..., None]  # (n, groups, 10, 1)
        eta = fixed + u[:, 1].exp()[:, None, None, None] * nodes
        return (y[groups][..., None] * eta - torch.nn.functional.softplus(eta)).sum(2) + weights.log()

    def log_density(u: Tensor) -> Tensor:
        value = by_node(u).logsumexp(2).sum(1)
        prior = normal(u[:, 0], 0, 2) - u[:, 1].exp().square() / 2 + u[:, 1] + normal(u[:, 2:], 0, 1).sum(1)
        return value + prior

    def moments(u: Tensor) -> tuple[Moments, Moments]:
        tau, chance = u[:, 1].exp(), by_node(u, slice(0, 10)).softmax(2)
        mean = chance @ nodes
        variance = chance @ nodes.square() - mean.square()
        given, spread = exactly({"mu": u[:, 0], "tau": tau, "beta": u[:, 2:]})
        return {**given, "effect": tau[:, None] * mean}, {**spread, "effect": tau.square()[:, None] * variance}

    return importance(log_density, [0.0, -0.3, 0.0, 0.0, 0.0], moments, draws=50_000, block=100)


def lkj_slopes(data: Data) -> Found:
    """Coordinates (beta, log tau, atanh of the correlation, log sigma); groups are Gaussian given these."""
    x, y = tensor(data["x"]).reshape(30, 10), tensor(data["y"]).reshape(30, 10)
    assert np.array_equal(index(data["group"]), np.repeat(np.arange(30), 10))
    design = torch.stack([torch.ones_like(x), x], 2)  # (30, 10, 2)

    def parts(u: Tensor) -> tuple[Moments, Tensor, Tensor, Tensor]:
        """The parameters, the precision and mean of every group's effects, and the squares that they leave."""
        tau, rho, sigma = u[:, 2:4].exp(), u[:, 4].tanh(), u[:, 5].exp()
        cov = torch.diag_embed(tau.square())
        off = torch.zeros_like(cov)
        off[:, 0, 1] = off[:, 1, 0] = rho * tau[:, 0] * tau[:, 1]
        noise = sigma.square()[:, None, None, None]
        precision = torch.linalg.inv(cov + off)[:, None] + design.mT @ design / noise
        residual = y - u[:, None, :1] - u[:, None, 1:2] * x  # (n, 30, 10)
        pull = (design.mT @ residual[..., None]) / noise
        effect = torch.linalg.solve(precision, pull)[..., 0]
        given = {"beta": u[:, :2], "tau": tau, "sigma": sigma, "correlation": rho}
        return (
            given,
            precision,
            effect,
            (residual.square().sum((1, 2)) / sigma.square() - (pull[..., 0] * effect).sum((1, 2))),
        )

    def log_density(u: Tensor) -> Tensor:
        p, precision, _, square = parts(u)
        log_cov = 2 * p["tau"].log().sum(1) + torch.log1p(-p["correlation"].square())
        value = -300 * u[:, 5] - 15 * log_cov - 0.5 * torch.linalg.slogdet(precision)[1].sum(1) - 0.5 * square
        prior = normal(p["beta"], 0, 2).sum(1) - p["tau"].square().sum(1) / 2 - p["sigma"].square() / 2
        # LKJ(2) of a correlation: (1 - rho^2), and the Jacobian of tanh is the same once more
        return value + prior + 2 * torch.log1p(-p["correlation"].square()) + u[:, 2:4].sum(1) + u[:, 5]

    def moments(u: Tensor) -> tuple[Moments, Moments]:
        p, precision, effect, _ = parts(u)
        given, spread = exactly(p)
        variance = torch.linalg.inv(precision[:, :5]).diagonal(dim1=2, dim2=3)
        return {**given, "effect": effect[:, :5]}, {**spread, "effect": variance}

    return importance(log_density, [1.0, -0.5, -0.3, -0.5, -0.4, -0.3], moments, draws=200_000, block=2_000)


def ar2_states(data: Data) -> Found:
    """Coordinates (phi, log sigma, log tau); the states are Gaussian given these, with a banded precision."""
    y = tensor(data["y"])
    one = torch.eye(100, dtype=torch.float64)

    def given(u: Tensor) -> tuple[Tensor, Tensor]:
        """The Cholesky factor of the states' precision given y, and the log determinant of the prior's root."""
        innovations = one.expand(
            len(u), -1, -1
        ).clone()  # innovations x has independent entries with these standard deviations
        innovations[:, range(2, 100), range(1, 99)] = -u[:, :1].expand(-1, 98)
        innovations[:, range(2, 100), range(98)] = -u[:, 1:2].expand(-1, 98)
        sd = torch.cat([torch.full((len(u), 2), 2.0, dtype=u.dtype), u[:, 2:3].exp().expand(-1, 98)], 1)
        innovations = innovations / sd[..., None]
        return torch.linalg.cholesky(
            innovations.mT @ innovations + one * (-2 * u[:, 3]).exp()[:, None, None]
        ), -sd.log().sum(1)

    def log_density(u: Tensor) -> Tensor:
        root, log_det = given(u)
        pull = y * (-2 * u[:, 3:]).exp()
        white = torch.linalg.solve_triangular(root, pull[..., None], upper=False)[..., 0]
        value = log_det - 100 * u[:, 3] - root.diagonal(dim1=1, dim2=2).log().sum(1)
        value = value - 0.5 * (y * pull).sum(1) + 0.5 * white.square().sum(1)
        prior = normal(u[:, :2], 0, 0.5).sum(1) - (2 * u[:, 2]).exp() / 2 + u[:, 2] + normal(u[:, 3], -1, 0.5)
        return value + prior

    def moments(u: Tensor) -> tuple[Moments, Moments]:
        root, _ = given(u)
        mean = torch.cholesky_solve((y * (-2 * u[:, 3:]).exp())[..., None], root)[..., 0]
        variance = torch.linalg.solve_triangular(root, one.expand_as(root), upper=False).square().sum(1)
        known, spread = exactly({"phi": u[:, :2], "sigma": u[:, 2].exp(), "tau": u[:, 3].exp()})
        return {**known, "x": mean[:, ::10]}, {**spread, "x": variance[:, ::10]}

    return importance(log_density, [0.4, 0.3, -0.2, -0.8], moments, draws=60_000, block=1_000)


# The horseshoe by Gibbs sampling.


def horseshoe(data: Data, chains: int = 64, warmup: int = 2_000, sweeps: int = 8_000, thin: int = 4) -> Found:
    """Half-Cauchy scales as mixtures of inverse gamma distributions, all conditionals in closed form."""
    X, y, rng = np.asarray(data["X"]), np.asarray(data["y"]), np.random.default_rng(0)
    rows, columns = X.shape
    gram, pull = X.T @ X, X.T @ y
    inverse_gamma = lambda shape, rate: rate / rng.standard_gamma(shape, np.shape(rate))  # noqa: E731
    local, local_help = np.ones((chains, columns)), np.ones((chains, columns))
    tau, tau_help, noise, noise_help = (np.ones((chains, 1)) for _ in range(4))  # tau and noise are variances
    kept: dict[str, list[Any]] = {name: [] for name in ("beta", "log_lambda", "log_tau", "sigma")}
    for sweep in range(warmup + sweeps):
        precision = gram / noise[..., None] + np.einsum("kp,pq->kpq", 1 / (local * tau), np.eye(columns))
        root = np.linalg.cholesky(precision)
        white = np.linalg.solve(root, np.broadcast_to((pull / noise)[..., None], (chains, columns, 1)))
        white = white + rng.normal(size=white.shape)
        beta = np.linalg.solve(root.transpose(0, 2, 1), white)[..., 0]
        square = beta**2
        local = inverse_gamma(1.0, 1 / local_help + square / (2 * tau))
        local_help = inverse_gamma(1.0, 1 + 1 / local)
        tau = inverse_gamma((columns + 1) / 2, 1 / tau_help + (square / local).sum(1, keepdims=True) / 2)
        tau_help = inverse_gamma(1.0, 100 + 1 / tau)  # tau ~ half-Cauchy(0.1): 1 / 0.1^2
        left = ((y - beta @ X.T) ** 2).sum(1, keepdims=True)
        noise = inverse_gamma((rows + 1) / 2, 1 / noise_help + left / 2)
        noise_help = inverse_gamma(1.0, 1 + 1 / noise)
        if sweep >= warmup and sweep % thin == 0:
            logs = 0.5 * np.log(local[:, :10]), 0.5 * np.log(tau[:, 0]), np.sqrt(noise[:, 0])
            for name, value in zip(kept, (beta[:, :10], *logs), strict=True):
                kept[name].append(value)
    found = {name: torch.from_numpy(np.stack(values, 1)) for name, values in kept.items()}
    return {n: entry(x.mean((0, 1)), x.flatten(0, 1).std(0), mcse_mean(x), mcse_sd(x)) for n, x in found.items()}


def _regression(name: str) -> Callable[[Data], Found]:
    return lambda data: regression(data, *REGRESSION_PRIORS[name])


REFERENCES: dict[str, Callable[[Data], Found]] = {
    **{name: _regression(name) for name in REGRESSION_PRIORS},
    "zero_inflated_poisson": zero_inflated_poisson,
    "censored_weibull": censored_weibull,
    "ordered_mixture": ordered_mixture,
    "gp_cholesky": gp_cholesky,
    "sir_rk4": sir_rk4,
    "hmm_forward": hmm_forward,
    "hierarchical_logit": hierarchical_logit,
    "lkj_slopes": lkj_slopes,
    "ar2_states": ar2_states,
    "horseshoe": horseshoe,
    "funnel": lambda data: {"v": entry(tensor(0.0), tensor(3.0))},
    "bimodal": lambda data: {"x": entry(tensor([4.0, 4.0]), tensor([1 + 84.0] * 2).sqrt())},
}
