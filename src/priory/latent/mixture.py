"""Mixtures: each row comes from one of K components, and z is the index of the component.

    p(y | theta) = sum_k pi_k p(y | theta_k),      p(y | theta_k) = h(y) exp(eta(theta_k) . T(y))

A component belongs to an exponential family: its log density is linear in features T(y), of which the last is 1. For n
rows the K log densities are then one matrix product, and so are the expected statistics:

    log p(y_n, z_n = k) = [eta T']_kn + log h(y_n),      S = q T,      Q = sum_kf S_kf eta_kf + sum_n log h(y_n)

with eta (K, F) and log pi_k added to its last column, T' (F, n) and q (K, n) the responsibilities. Features lie in
rows, (F, n), so that sums over components and products of features run along memory.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.distributions import constraints

from priory.core.errors import InputError, is_integer, require, warn
from priory.core.flat import Param
from priory.latent.base import Expectation, Generated, Latent, Rows, Theta, warn_of_silent
from priory.latent.starts import clusters

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

EMPTY_COMPONENT_ROWS = 1e-10  # sum of responsibilities below which a component has no rows


class MixtureModel(Latent):
    """Base class of mixtures of K components from an exponential family, with weights pi.

    A subclass implements `components`, `features`, `natural`, `maximise` and `coordinates`.

    Args:
        k: Number of components K.
        given: The parts that follow the rows in the data: "weights", one per row; "z", the known component of each row,
            -1 where it is hidden; or both. Default: ().
    """

    weighs: ClassVar[bool] = True
    starts: ClassVar[tuple[str, ...]] = ("k-means++", "random")
    labels: ClassVar[bool] = True
    tempers: ClassVar[bool] = True
    samples: ClassVar[bool] = True
    soft: ClassVar[float] = 0.0  # share of each row that is spread over all components at initialisation
    shared: tuple[str, ...] = ()  # parameters that the components have in common
    warns_about_rows: bool = True  # whether it warns about its rows; a hidden Markov model warns about its steps itself

    def __init__(self, k: int, given: str | Sequence[str] = ()) -> None:
        name = type(self).__name__
        require(is_integer(k, 1), "k", name, "be an integer >= 1", repr(k))
        self.k, self.given = int(k), named_parts(given, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.k})"

    # The exponential family.

    @abstractmethod
    def components(self, *shapes: tuple[int, ...]) -> dict[str, Param]:
        """Declare the parameters of the components."""

    @abstractmethod
    def features(self, rows: Rows) -> Tensor:
        """Return the features T(y), (F, n), the last row 1. The next call may overwrite the tensor."""

    @abstractmethod
    def natural(self, theta: Theta) -> Tensor:
        """Return the natural parameters eta, (K, F), without the weights."""

    @abstractmethod
    def maximise(self, sums: Tensor, theta: Theta) -> Theta:
        """Return the components' parameters that maximise Q, from S (K, F)."""

    @abstractmethod
    def coordinates(self, rows: Rows) -> Tensor:
        """Return the rows as points (n, d) without NaN, for k-means."""

    def emit(self, theta: Theta, z: Tensor, generator: torch.Generator) -> Tensor:
        """Draw y (n, ...) from the component of each z (n,)."""
        raise InputError(f"{self!r} can't make rows: it is a model of y given x only. Use predict.")

    def base(self, rows: Rows) -> Tensor | None:
        """Return log h(y), (n,); None if it is zero."""
        return None

    def narrow_components(self, theta: Theta) -> Tensor:
        """Return the indices of components so narrow that the sum over features loses digits."""
        return torch.empty(0, dtype=torch.long)

    def direct(self, theta: Theta, rows: Rows, which: Tensor) -> Tensor:
        """Return log p(y_n | theta_k) / h(y_n) of narrow components, without features, (len(which), n)."""
        raise NotImplementedError

    # The equations.

    def params(self, *shapes: tuple[int, ...]) -> dict[str, Param]:
        """Declare the weights and the parameters of the components."""
        return {"weights": Param((self.k,), constraints.simplex), **self.components(*shapes)}

    def weighted(self, theta: Theta) -> Tensor:
        """Return eta with log pi_k added to its last column, (K, F)."""
        eta = self.natural(theta)
        return torch.cat([eta[:, :-1], eta[:, -1:] + log_weights(theta)[:, None]], 1)

    def e_step(self, theta: Theta, rows: Rows) -> Expectation:
        """Compute the responsibilities and their statistics by two matrix products."""
        features = self.features(rows)
        logits = self.weighted(theta).to(features.dtype) @ features
        which = self.narrow_components(theta)
        if len(which):
            logits[which] = self.direct(theta, rows, which) + log_weights(theta)[which, None]
        found = assigned(logits, rows)
        sums = found.q_counted(rows) @ features.mT
        base = self.base(rows)
        if base is None:
            return Expectation({"sums": sums, "base": sums.new_zeros(())}, found.bound, found.gap)
        return Expectation({"sums": sums, "base": rows.counted(base).sum()}, found.bound + base, found.gap)

    def complete(self, theta: Theta, statistics: Mapping[str, Tensor]) -> Tensor:
        """Return Q = sum_kf S_kf eta_kf + sum_n log h(y_n)."""
        return (statistics["sums"] * self.weighted(theta)).sum() + statistics["base"]

    def m_step(self, statistics: Mapping[str, Tensor], theta: Theta) -> Theta:
        """Maximise Q: the weights are the components' shares, and a component without rows stays unchanged."""
        sums = statistics["sums"]
        counts = sums[:, -1]
        there = counts > EMPTY_COMPONENT_ROWS
        fresh = self.maximise(sums, theta)
        for name, t in fresh.items():
            if name not in self.shared:
                fresh[name] = torch.where(there.reshape(-1, *[1] * (t.ndim - 1)), t, theta[name].to(t.dtype))
        fresh["weights"] = torch.where(there, counts, 0.0) / counts[there].sum().clamp_min(EMPTY_COMPONENT_ROWS)
        return {name: fresh[name].to(self.dtype) for name in self.layout.names}

    def log_joint(self, theta: Theta, rows: Rows, careful: bool = False) -> Tensor:
        """Return log p(y_n, z_n = k | theta), (K, n), differentiable by autograd.

        With `careful`, narrow components are evaluated without features, as in the E-step; this supports neither
        autograd nor several theta at once.
        """
        features = self.features(rows)
        values = self.weighted(theta).to(features.dtype) @ features.clone()
        which = self.narrow_components(theta) if careful else None
        if which is not None and len(which):
            values[which] = self.direct(theta, rows, which) + log_weights(theta)[which, None]
        base = self.base(rows)
        return values if base is None else values + base

    def log_marginal(self, theta: Theta, rows: Rows) -> Tensor:
        """Return log p(y_n | theta), or log p(y_n, z_n | theta) where z is known, (n,)."""
        return restricted(self.log_joint(theta, rows), rows.z).logsumexp(0)

    def responsibilities(self, theta: Theta, rows: Rows) -> Tensor:
        """Return q(z_n = k) = p(z_n = k | y_n, theta), (n, K)."""
        return restricted(self.log_joint(theta, rows, careful=True), rows.z).softmax(0).T

    def generate(self, theta: Theta, n: int, generator: torch.Generator, steps: int | None = None) -> Generated:
        """Draw z from the weights, and y from component z."""
        z = torch.multinomial(theta["weights"], n, replacement=True, generator=generator)
        return Generated(self.emit(theta, z, generator), z)

    def begin(self, rows: Rows, how: str, generator: torch.Generator) -> Theta:
        """Initialise by clustering the rows and taking the M-step of the clusters."""
        labels = clusters(self.coordinates(rows), self.k, how, generator, rows.weights, rows.z)
        return self.begin_from(labels, rows)

    def begin_from(self, labels: Tensor, rows: Rows) -> Theta:
        """Return the M-step of a hard assignment of rows to components."""
        sums = self.split(labels, rows)
        return self.m_step({"sums": sums}, self.layout.constrain(sums.new_zeros(self.layout.size)))

    def split(self, labels: Tensor, rows: Rows) -> Tensor:
        """Return S of a hard assignment, softened by `soft`; a component without rows gets the average of all."""
        q = torch.nn.functional.one_hot(labels, self.k).T.to(self.dtype)
        q = (1 - self.soft) * q + self.soft / self.k
        sums = self.split_statistics(q * (1 if rows.weights is None else rows.weights), rows).double()
        average = sums.sum(0, keepdim=True) / self.k
        return torch.where(sums[:, -1:] > EMPTY_COMPONENT_ROWS, sums, average)

    def split_statistics(self, q: Tensor, rows: Rows) -> Tensor:
        """Return S = q T (K, F) of given responsibilities q (K, n)."""
        blocks = [slice(i, i + self.block) for i in range(0, len(rows), self.block)]
        return torch.stack([q[:, block] @ self.features(rows.at(block)).mT for block in blocks]).sum(0)

    def warn_of(self, rows: int, silent: int = 0) -> None:
        """Warn about rows without a value, and if there are fewer rows than components."""
        if not self.warns_about_rows:
            return
        warn_of_silent(silent, f"the components of {self!r}")
        if rows < self.k:
            warn(f"{self!r} has more components than there are rows, {rows}: some will be unused or equal.")

    def check_rows(self, rows: Rows) -> None:
        """Check that known z are indices of components."""
        check_known(rows.z, self.k, repr(self))

    def problems(self, theta: Theta, statistics: Mapping[str, Tensor]) -> list[str]:
        """Warn about components without rows."""
        empty = (theta["weights"] <= EMPTY_COMPONENT_ROWS).nonzero()[:, 0].tolist()
        if not empty:
            return []
        have = "have" if len(empty) > 1 else "has"
        return [f"{self.named_components(empty)} {have} no rows: fewer components give the same density."]

    def named_components(self, indices: Sequence[int]) -> str:
        """Return the subject of a sentence about some components, such as "Components 0, 2 of GaussianMixture(3)"."""
        return f"Component{'s' * (len(indices) > 1)} {', '.join(map(str, indices))} of {self!r}"


def named_parts(given: str | Sequence[str], owner: str) -> tuple[str, ...]:
    """Read the `given` argument of a mixture or a hidden Markov model as a tuple."""
    named = (given,) if isinstance(given, str) else tuple(given)
    ok = all(word in ("weights", "z") for word in named) and len(set(named)) == len(named)
    require(ok, "given", owner, "be 'weights', 'z' or both", repr(given))
    return named


def check_known(z: Tensor | None, k: int, owner: str) -> None:
    """Raise an error unless known z are indices of components."""
    if z is not None:
        ok = bool((z >= -1).all()) and bool((z < k).all())
        must = f"be from 0 to {k - 1}, or -1 where it is hidden"
        require(ok, "z", owner, must, f"from {int(z.min())} to {int(z.max())}")


def log_weights(theta: Theta) -> Tensor:
    """Return log pi, (K,), which is finite also for a component without rows."""
    return theta["weights"].clamp_min(torch.finfo(theta["weights"].dtype).tiny).log()


class Assigned:
    """Responsibilities q (K, n), with the bound and its gap to the log-likelihood, (n,)."""

    def __init__(self, q: Tensor, bound: Tensor, gap: Tensor | None) -> None:
        self.q, self.bound, self.gap = q, bound, gap

    def q_counted(self, rows: Rows) -> Tensor:
        """Return q times the rows' weights; if draws are requested, the shares of draws from q replace q."""
        q = self.q
        if rows.draws:
            drawn = torch.multinomial(q.T.double(), rows.draws, replacement=True, generator=rows.generator)  # (n, M)
            q = torch.zeros_like(q).scatter_add_(0, drawn.T, torch.full_like(drawn.T, 1 / rows.draws, dtype=q.dtype))
        return q if rows.weights is None else q * rows.weights


def assigned(logits: Tensor, rows: Rows) -> Assigned:
    """Compute q from log p(y, z = k), (K, n), which is overwritten."""
    logits = restricted(logits, rows.z)
    if rows.temperature != 1:
        return tempered(logits, rows.temperature)
    top = logits.amax(0)
    q = logits.sub_(top).exp_()
    total = q.sum(0)
    return Assigned(q.div_(total), total.log().add_(top), None)


def tempered(logits: Tensor, temperature: float) -> Assigned:
    """Compute q proportional to p(y, z = k)^(1/T); its bound is below log p(y) by KL(q || p(z | y))."""
    q = (logits / temperature).softmax(0)
    bound = (torch.where(q > 0, q * logits, 0.0) - torch.xlogy(q, q)).sum(0)
    return Assigned(q, bound, logits.logsumexp(0) - bound)


def restricted(logits: Tensor, z: Tensor | None) -> Tensor:
    """Set log p(y, z = k) (K, n) to minus infinity for every k other than a known z."""
    if z is None:
        return logits
    other = torch.arange(len(logits), device=logits.device)[:, None] != z
    return logits.masked_fill(other & (z >= 0), -torch.inf)


def bounds(model: MixtureModel, theta: Theta, rows: Rows, q: Tensor) -> dict[str, Tensor]:
    """Return the bound L(q, theta) for any responsibilities in its three textbook forms, which agree.

    "joint"     sum_n  E_q[log p(y_n, z | theta)] + H(q_n)
    "prior"     sum_n  E_q[log p(y_n | z, theta)] - KL(q_n || p(z | theta))
    "posterior" sum_n  log p(y_n | theta) - KL(q_n || p(z | y_n, theta))

    Args:
        model: A mixture that is bound to data.
        theta: The parameters by name.
        rows: The rows.
        q: The responsibilities, (n, K).

    Returns:
        The three values by name.
    """
    joint = model.log_joint(theta, rows).T  # (n, K)
    prior = theta["weights"].log()
    evidence = joint.logsumexp(1)
    entropy = -torch.xlogy(q, q).sum(1)
    mean = lambda values: torch.where(q > 0, q * values, 0.0).sum(1)  # noqa: E731
    return {
        "joint": rows.counted(mean(joint) + entropy).sum(),
        "prior": rows.counted(mean(joint - prior) - (mean(q.log() - prior))).sum(),
        "posterior": rows.counted(evidence - mean(q.log() - (joint - evidence[:, None]))).sum(),
    }
