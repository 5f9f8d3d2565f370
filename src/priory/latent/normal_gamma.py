"""The univariate normal with unknown mean and precision, the simplest model for variational EM.

    p(y_n | mu, tau) = N(mu, 1 / tau),      p(mu | tau) = N(mu_0, 1 / (lambda_0 tau)),      p(tau) = Gamma(a_0, b_0)

The exact posterior is a Normal-Gamma, in which mu and tau are dependent. Under the approximation q(mu) q(tau) they are
independent, and each factor has a closed form given the other (MacKay, 2003; Bishop, 2006, section 10.1.3):

    q(mu)  = N(m, 1 / l),      m = (lambda_0 mu_0 + sum_n y_n) / (lambda_0 + N),      l = (lambda_0 + N) E[tau]
    q(tau) = Gamma(a, b),      a = a_0 + (N + 1) / 2
                               b = b_0 + E_q(mu)[ sum_n (y_n - mu)^2 + lambda_0 (mu - mu_0)^2 ] / 2

Only the parameters are hidden. `exact_posterior` returns the posterior without the approximation.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.distributions import constraints

from priory.core.errors import require
from priory.core.flat import Param
from priory.latent.base import Expectation, Generated, Rows, Theta
from priory.latent.conjugate import LOG_TAU, Conjugate, Phi, gammas, normals, positive

if TYPE_CHECKING:
    from collections.abc import Mapping


class NormalGamma(Conjugate):
    """A normal distribution with unknown mean and precision and a Normal-Gamma prior.

    Data are one column, (n,). The parameters are `mean` mu and `precision` tau.

    Args:
        mean: Prior mean mu_0. Default: 0.0.
        strength: Weight lambda_0 of the prior mean, in rows. Default: 1.0.
        shape: Shape a_0 of the Gamma prior of tau. Default: 1.0.
        rate: Rate b_0 of the Gamma prior of tau. Default: 1.0.

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> NormalGamma(rate=0)
        Traceback (most recent call last):
        ...
        priory.InputError: The 'rate' argument of NormalGamma must be a positive number, got 0.
    """

    starts: ClassVar[tuple[str, ...]] = ("prior", "random")

    def __init__(self, mean: float = 0.0, strength: float = 1.0, shape: float = 1.0, rate: float = 1.0) -> None:
        ok = isinstance(mean, (int, float)) and not isinstance(mean, bool) and math.isfinite(mean)
        require(ok, "mean", "NormalGamma", "be a finite number", repr(mean))
        self.mu0, self.strength = float(mean), positive(strength, "strength", "NormalGamma")
        self.shape, self.rate = positive(shape, "shape", "NormalGamma"), positive(rate, "rate", "NormalGamma")

    def __repr__(self) -> str:
        return f"NormalGamma({self.mu0:g}, {self.strength:g}, {self.shape:g}, {self.rate:g})"

    def params(self, *shapes: tuple[int, ...]) -> dict[str, Param]:
        """The mean and the precision."""
        require(shapes[0] == (), "y", repr(self), "be one column, (n,)", f"rows of the shape {shapes[0]}")
        return {"mean": Param(), "precision": Param((), constraints.positive)}

    # Point estimates, for EM, MAP and samplers.

    def log_prior(self, theta: Theta) -> Tensor:
        """log p(mu | tau) p(tau)."""
        mu, tau = theta["mean"], theta["precision"]
        return (
            0.5 * (math.log(self.strength) + tau.log() - LOG_TAU - self.strength * tau * (mu - self.mu0).square())
            + self.shape * math.log(self.rate)
            - math.lgamma(self.shape)
            + (self.shape - 1) * tau.log()
            - self.rate * tau
        )

    def e_step(self, theta: Theta, rows: Rows) -> Expectation:
        """Return the sums over rows of y - mu_0 and the log-likelihood per row; there is no hidden z."""
        mu, tau = theta["mean"], theta["precision"]
        return Expectation(self.sums(rows), 0.5 * (tau.log() - LOG_TAU - tau * (rows["y"] - mu).square()))

    def complete(self, theta: Theta, statistics: Mapping[str, Tensor]) -> Tensor:
        """log p(y | mu, tau) from the sums."""
        n, tau = statistics["count"], theta["precision"]
        return 0.5 * (n * (tau.log() - LOG_TAU) - tau * self.squares(statistics, theta["mean"]))

    def sums(self, rows: Rows) -> dict[str, Tensor]:
        """N, sum_n (y_n - mu_0) and sum_n (y_n - mu_0)^2."""
        away = rows["y"] - self.mu0
        values = {"count": torch.ones_like(away), "sum": away, "square": away.square()}
        return {name: rows.counted(t).sum() for name, t in values.items()}

    def squares(self, statistics: Mapping[str, Tensor], mu: Tensor) -> Tensor:
        """sum_n (y_n - mu)^2."""
        away = mu - self.mu0
        return statistics["square"] - 2 * away * statistics["sum"] + statistics["count"] * away.square()

    # As q(mu) q(tau).

    def params_q(self) -> dict[str, Param]:
        """The mean and precision of q(mu), the shape and rate of q(tau)."""
        positive = Param((), constraints.positive)
        return {"m": Param(), "l": positive, "a": positive, "b": positive}

    def begin_q(self, rows: Rows, how: str, generator: torch.Generator) -> Phi:
        """Initialise E[tau] to its prior mean, or randomly within about a factor of e of it."""
        one = torch.ones((), dtype=self.dtype, device=self.device)
        factor = torch.randn((), generator=generator).exp().to(one) if how == "random" else one
        m, a, b = self.mu0 * one, self.shape * one, self.rate * one / factor
        return {"m": m, "l": self.strength * a / b, "a": a, "b": b}

    def e_step_q(self, phi: Phi, rows: Rows) -> Expectation:
        """Return the sums over rows and E_q[log N(y_n; mu, 1 / tau)] per row."""
        tau, log_tau = phi["a"] / phi["b"], phi["a"].digamma() - phi["b"].log()
        square = (rows["y"] - phi["m"]).square() + 1 / phi["l"]
        return Expectation(self.sums(rows), 0.5 * (log_tau - LOG_TAU - tau * square))

    def m_step_q(self, statistics: Mapping[str, Tensor], phi: Phi) -> Phi:
        """q(mu) given q(tau), and then q(tau) given q(mu)."""
        n, tau = statistics["count"], (phi["a"] / phi["b"]).double()
        m = self.mu0 + statistics["sum"] / (self.strength + n)
        l = (self.strength + n) * tau  # noqa: E741 - as the equation has it
        a = self.shape + 0.5 * (n + 1)
        square = self.squares(statistics, m) + n / l
        prior = self.strength * ((m - self.mu0).square() + 1 / l)
        return {"m": m, "l": l, "a": a, "b": self.rate + 0.5 * (square + prior)}

    def complete_q(self, phi: Phi, statistics: Mapping[str, Tensor]) -> Tensor:
        """E_q[log p(y | mu, tau)] from the sums."""
        n, tau, log_tau = statistics["count"], phi["a"] / phi["b"], phi["a"].digamma() - phi["b"].log()
        return 0.5 * (n * (log_tau - LOG_TAU) - tau * (self.squares(statistics, phi["m"]) + n / phi["l"]))

    def kl_q(self, phi: Phi) -> Tensor:
        """-H(q(mu)) - H(q(tau)) - E_q[log p(mu | tau) p(tau)]."""
        m, l, a, b = phi["m"], phi["l"], phi["a"], phi["b"]  # noqa: E741
        tau, log_tau = a / b, a.digamma() - b.log()
        entropy_mu = 0.5 * (1 + LOG_TAU - l.log())
        entropy_tau = a - b.log() + a.lgamma() + (1 - a) * a.digamma()
        square = (m - self.mu0).square() + 1 / l
        prior_mu = 0.5 * (math.log(self.strength) + log_tau - LOG_TAU - self.strength * tau * square)
        prior_tau = self.shape * math.log(self.rate) - math.lgamma(self.shape)
        prior_tau = prior_tau + (self.shape - 1) * log_tau - self.rate * tau
        return -entropy_mu - entropy_tau - prior_mu - prior_tau

    def mean_q(self, phi: Phi) -> Theta:
        """E[mu] and E[tau]."""
        return {"mean": phi["m"], "precision": phi["a"] / phi["b"]}

    def sample_q(self, phi: Phi, n: int, generator: torch.Generator) -> Theta:
        """Draws of mu and of tau, independent."""
        mu = phi["m"] + normals(phi["m"], n, generator) / phi["l"].sqrt()
        return {"mean": mu, "precision": gammas(phi["a"], phi["b"], n, generator)}

    def generate_q(self, phi: Phi, n: int, generator: torch.Generator) -> Generated:
        """Draw y ~ N(mu, 1 / tau), each with its own draw (mu, tau), which is returned as z, (n, 2)."""
        drawn = self.sample_q(phi, n, generator)
        mu, tau = drawn["mean"], drawn["precision"]
        return Generated(mu + normals(phi["m"], n, generator) / tau.sqrt(), torch.stack([mu, tau], 1))

    def log_q(self, phi: Phi, theta: Theta) -> Tensor:
        """log q(mu) + log q(tau)."""
        m, l, a, b = phi["m"], phi["l"], phi["a"], phi["b"]  # noqa: E741
        mu, tau = theta["mean"], theta["precision"]
        normal = 0.5 * (l.log() - LOG_TAU - l * (mu - m).square())
        return normal + a * b.log() - a.lgamma() + (a - 1) * tau.log() - b * tau

    # Without the approximation.

    def exact_posterior(self, y: Tensor) -> dict[str, float]:
        """Return the exact Normal-Gamma posterior.

        Args:
            y: The data, (n,).

        Returns:
            The parameters `mean`, `strength`, `shape` and `rate` of the posterior, and the `log_evidence` in nats.
        """
        y = y.double()
        n = len(y)
        strength, shape = self.strength + n, self.shape + 0.5 * n
        away = float(y.mean()) - self.mu0
        around = float((y - y.mean()).square().sum())
        rate = self.rate + 0.5 * (around + self.strength * n / strength * away**2)
        evidence = (
            math.lgamma(shape)
            - math.lgamma(self.shape)
            + self.shape * math.log(self.rate)
            - shape * math.log(rate)
            + 0.5 * (math.log(self.strength) - math.log(strength) - n * LOG_TAU)
        )
        mean = self.mu0 + n * away / strength
        return {"mean": mean, "strength": strength, "shape": shape, "rate": rate, "log_evidence": evidence}
