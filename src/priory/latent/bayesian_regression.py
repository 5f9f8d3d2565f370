"""Bayesian linear regression with automatic relevance determination, by variational Bayes.

The model is that of MacKay (1994), Tipping (2001), and Bishop and Tipping (2000):

    y_n ~ N(w . x_n, 1 / tau),    w_d ~ N(0, 1 / alpha_d),    alpha_d ~ Gamma(c_0, d_0),    tau ~ Gamma(a_0, b_0)

Each weight has its own precision. If the data don't need an input, its alpha grows and its weight shrinks to zero. The
approximation is q(w) q(alpha) q(tau), and each factor has a closed form given the other two:

    q(w)       = N(m, V),            V^-1 = E[tau] sum_n x_n x_n' + diag E[alpha],      m = E[tau] V sum_n x_n y_n
    q(alpha_d) = Gamma(c_d, d_d),    c_d = c_0 + 1/2,      d_d = d_0 + E[w_d^2] / 2
    q(tau)     = Gamma(a, b),        a   = a_0 + N / 2,    b   = b_0 + E[sum_n (y_n - w . x_n)^2] / 2

Only the parameters are hidden. There is no intercept: append a column of ones to the inputs, or centre y.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.distributions import constraints as torch_constraints

from priory import constraints
from priory.core.errors import InputError, require
from priory.core.flat import Param
from priory.core.linalg import cholesky
from priory.latent.base import Expectation, Generated, Rows, Theta
from priory.latent.conjugate import LOG_TAU, Conjugate, Phi, gammas, kl_gamma, log_det, normals, positive

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_MEAN_TO_SPREAD = 1e4  # of an input; beyond it rounding removes the variance from the Gram matrix


class BayesianRegression(Conjugate):
    """Bayesian linear regression with automatic relevance determination, fitted by `VariationalEM`.

    Data are inputs (n, D) and targets (n,). The parameters are `weights` (D,), `relevance` alpha (D,), the precision of
    each weight, and `precision` tau, that of the noise.

    Args:
        shape: Shape a_0 of the Gamma prior of tau. Default: 0.01.
        rate: Rate b_0 of the Gamma prior of tau. Default: 0.01.
        relevance_shape: Shape c_0 of the Gamma prior of each alpha_d. Default: 0.01.
        relevance_rate: Rate d_0 of the Gamma prior of each alpha_d. Default: 0.0001.

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> BayesianRegression(shape=0.0)
        Traceback (most recent call last):
        ...
        priory.InputError: The 'shape' argument of BayesianRegression must be a positive number, got 0.0.
    """

    parts: ClassVar[tuple[str, ...]] = ("x", "y")
    starts: ClassVar[tuple[str, ...]] = ("prior", "random")

    def __init__(
        self, shape: float = 1e-2, rate: float = 1e-2, relevance_shape: float = 1e-2, relevance_rate: float = 1e-4
    ) -> None:
        name = "BayesianRegression"
        self.shape, self.rate = positive(shape, "shape", name), positive(rate, "rate", name)
        self.relevance_shape = positive(relevance_shape, "relevance_shape", name)
        self.relevance_rate = positive(relevance_rate, "relevance_rate", name)

    def __repr__(self) -> str:
        numbers = (self.shape, self.rate, self.relevance_shape, self.relevance_rate)
        return f"BayesianRegression({', '.join(f'{x:g}' for x in numbers)})"

    def params(self, *shapes: tuple[int, ...]) -> dict[str, Param]:
        """Weights, their precisions and the noise's."""
        x, y = shapes
        require(len(x) == 1, "x", repr(self), "be (n, D)", f"rows of the shape {x}")
        require(y == (), "y", repr(self), "be one column, (n,)", f"rows of the shape {y}")
        above = torch_constraints.positive
        return {"weights": Param(x), "relevance": Param(x, above), "precision": Param((), above)}

    def look(self, rows: Rows) -> dict[str, Tensor]:
        """Keep nothing; raise an error for inputs whose variance would be lost to rounding in their squares."""
        centre, spread = rows["x"].double().mean(0).abs(), rows["x"].double().std(0, correction=0)
        far = ((spread > 1e-12 * centre) & (centre > MAX_MEAN_TO_SPREAD * spread)).nonzero()[:, 0].tolist()
        must = f"have columns whose means are at most {MAX_MEAN_TO_SPREAD:g} times their spread: centre them"
        require(not far, "x", repr(self), must, f"means further than that in column {', '.join(map(str, far))}")
        return {}

    # Point estimates, for MAP and samplers.

    def log_prior(self, theta: Theta) -> Tensor:
        """log p(w | alpha) p(alpha) p(tau)."""
        w, alpha, tau = theta["weights"], theta["relevance"], theta["precision"]
        weights = 0.5 * (alpha.log() - LOG_TAU - alpha * w.square())
        relevance = log_gamma(alpha, *self.given_to(alpha, self.relevance_shape, self.relevance_rate))
        return (weights + relevance).sum(-1) + log_gamma(tau, *self.given_to(tau, self.shape, self.rate))

    def e_step(self, theta: Theta, rows: Rows) -> Expectation:
        """Return the sums over rows and the log-likelihood per row; there is no hidden z."""
        away = rows["y"] - rows["x"] @ theta["weights"]
        tau = theta["precision"]
        return Expectation(self.sums(rows), 0.5 * (tau.log() - LOG_TAU - tau * away.square()))

    def complete(self, theta: Theta, statistics: Mapping[str, Tensor]) -> Tensor:
        """log p(y | x, w, tau) from the sums."""
        n, tau = statistics["count"], theta["precision"]
        return 0.5 * (n * (tau.log() - LOG_TAU) - tau * squares(statistics, theta["weights"]))

    def sums(self, rows: Rows) -> dict[str, Tensor]:
        """N, sum_n x x', sum_n x y and sum_n y^2."""
        x, y = rows["x"], rows["y"]
        counted = rows.counted(x)
        return {
            "count": rows.counted(torch.ones_like(y)).sum(),
            "xx": counted.T @ x,
            "xy": counted.T @ y,
            "yy": rows.counted(y.square()).sum(),
        }

    # As q(w) q(alpha) q(tau).

    def params_q(self) -> dict[str, Param]:
        """m and V of q(w); c and d of q(alpha); a and b of q(tau)."""
        assert self.shapes is not None
        (d,) = self.shapes[0]
        one, each = Param((), torch_constraints.positive), Param((d,), torch_constraints.positive)
        return {
            "m": Param((d,)),
            "V": Param((d, d), constraints.positive_definite),
            "c": each,
            "d": each,
            "a": one,
            "b": one,
        }

    def begin_q(self, rows: Rows, how: str, generator: torch.Generator) -> Phi:
        """Initialise the precisions to one in the scale of the data, or randomly within about a factor of e of it."""
        assert self.shapes is not None
        one = torch.ones(self.shapes[0], dtype=self.dtype, device=self.device)
        spread = rows["y"].square().mean().clamp_min(torch.finfo(self.dtype).tiny)
        factor = torch.randn(one.shape, generator=generator).exp().to(one) if how == "random" else one
        return {"m": 0 * one, "V": one.diag(), "c": one, "d": factor, "a": one[0], "b": spread}

    def e_step_q(self, phi: Phi, rows: Rows) -> Expectation:
        """Return the sums over rows and E_q[log N(y_n; w . x_n, 1 / tau)] per row."""
        x, tau, log_tau = rows["x"], phi["a"] / phi["b"], phi["a"].digamma() - phi["b"].log()
        square = (rows["y"] - x @ phi["m"]).square() + ((x @ phi["V"]) * x).sum(1)
        return Expectation(self.sums(rows), 0.5 * (log_tau - LOG_TAU - tau * square))

    def m_step_q(self, statistics: Mapping[str, Tensor], phi: Phi) -> Phi:
        """q(w), then q(alpha) and q(tau) given it."""
        xx, xy, n = statistics["xx"], statistics["xy"], statistics["count"]
        tau, alpha = (phi["a"] / phi["b"]).to(xx), (phi["c"] / phi["d"]).to(xx)
        factor = cholesky(tau * xx + alpha.diag(), "precision of the weights", remedy="standardise the inputs")
        v = torch.cholesky_inverse(factor)
        m = tau * v @ xy
        return {
            "m": m,
            "V": v,
            "c": torch.full_like(m, self.relevance_shape + 0.5),
            "d": self.relevance_rate + 0.5 * (m.square() + v.diagonal()),
            "a": self.shape + 0.5 * n,
            "b": self.rate + 0.5 * (squares(statistics, m) + (v * xx).sum()),
        }

    def complete_q(self, phi: Phi, statistics: Mapping[str, Tensor]) -> Tensor:
        """E_q[log p(y | x, w, tau)] from the sums."""
        n, tau, log_tau = statistics["count"], phi["a"] / phi["b"], phi["a"].digamma() - phi["b"].log()
        square = squares(statistics, phi["m"]) + (phi["V"] * statistics["xx"]).sum()
        return 0.5 * (n * (log_tau - LOG_TAU) - tau * square)

    def kl_q(self, phi: Phi) -> Tensor:
        """E_q(alpha)[KL(q(w) || p(w | alpha))] + KL of the precisions."""
        m, v, c, d = phi["m"], phi["V"], phi["c"], phi["d"]
        alpha, log_alpha = c / d, c.digamma() - d.log()
        weights = 0.5 * (alpha * (m.square() + v.diagonal()) - 1 - log_alpha).sum() - 0.5 * log_det(v)
        relevance = kl_gamma(c, d, *self.given_to(c, self.relevance_shape, self.relevance_rate)).sum()
        return weights + relevance + kl_gamma(phi["a"], phi["b"], *self.given_to(phi["a"], self.shape, self.rate))

    def mean_q(self, phi: Phi) -> Theta:
        """E[w], E[alpha], E[tau]."""
        return {"weights": phi["m"], "relevance": phi["c"] / phi["d"], "precision": phi["a"] / phi["b"]}

    def sample_q(self, phi: Phi, n: int, generator: torch.Generator) -> Theta:
        """Draws of w, of alpha and of tau, independent."""
        noise = normals(phi["m"], n, generator)
        return {
            "weights": phi["m"] + noise @ cholesky(phi["V"], "covariance of the weights").mT,
            "relevance": gammas(phi["c"], phi["d"], n, generator),
            "precision": gammas(phi["a"], phi["b"], n, generator),
        }

    def generate_q(self, phi: Phi, n: int, generator: torch.Generator) -> Generated:
        """Raise an error, because the model has no density of x."""
        raise InputError(f"{self!r} can't make rows: it is a model of y given x only. Use predict.")

    def log_q(self, phi: Phi, theta: Theta) -> Tensor:
        """log q(w) + log q(alpha) + log q(tau)."""
        factor = cholesky(phi["V"], "covariance of the weights")
        away = (theta["weights"] - phi["m"])[..., None]
        white = torch.linalg.solve_triangular(factor.expand(*away.shape[:-2], *factor.shape), away, upper=False)
        weights = -0.5 * (white.square().sum((-2, -1)) + len(factor) * LOG_TAU + log_det(phi["V"]))
        relevance = log_gamma(theta["relevance"], phi["c"], phi["d"]).sum(-1)
        return weights + relevance + log_gamma(theta["precision"], phi["a"], phi["b"])

    def outputs(self, theta: Theta, x: Tensor) -> tuple[Tensor, Tensor]:
        """w . x (S, n) and the noise's standard deviation (S,), for S draws of theta."""
        return theta["weights"] @ x.T, theta["precision"].rsqrt()

    @staticmethod
    def given_to(like: Tensor, shape: float, rate: float) -> tuple[Tensor, Tensor]:
        """Return the shape and rate of a Gamma prior as tensors."""
        return torch.full_like(like, shape), torch.full_like(like, rate)


def squares(statistics: Mapping[str, Tensor], w: Tensor) -> Tensor:
    """sum_n (y_n - w . x_n)^2."""
    w = w.to(statistics["xx"].dtype)
    return statistics["yy"] - 2 * w @ statistics["xy"] + w @ statistics["xx"] @ w


def log_gamma(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """log Gamma(x; a, b)."""
    return a * b.log() - a.lgamma() + (a - 1) * x.log() - b * x
