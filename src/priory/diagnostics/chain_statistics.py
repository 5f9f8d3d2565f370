"""The computations behind R-hat and effective sample sizes: normal scores, autocovariances, quantiles.

Tensors are (quantity, chain, draw) in float64, so that the draws of a chain are contiguous. The equations are in
`priory.diagnostics.convergence`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from priory.core.special import incomplete_beta


class Halves:
    """The halves of each chain, sorted once for all rank statistics."""

    def __init__(self, draws: Tensor) -> None:
        self.halves = split(draws)
        self.ordered, self.order = sort(self.halves.flatten(1))
        self.scores = normal_scores(self.ordered, self.order).reshape(self.halves.shape)

    def effective(self) -> tuple[Tensor, Tensor]:
        """The effective sample size of the bulk, and the one without the variance between chains, (quantity,) both."""
        covariance = mean_autocovariance(self.scores)
        return effective(self.scores, covariance), effective(self.scores, covariance, between=False)

    def reduction(self) -> Tensor:
        """R-hat, (quantity,): the larger of the bulk's and that of the distances from the median."""
        middle = self.ordered.shape[1] // 2  # the number of draws is even
        median = 0.5 * (self.ordered[:, middle - 1] + self.ordered[:, middle])
        folded = (self.halves.flatten(1) - median[:, None]).abs()
        spread = normal_scores(*sort(folded)).reshape(self.halves.shape)
        return torch.maximum(potential_reduction(self.scores), potential_reduction(spread))


def split(x: Tensor) -> Tensor:
    """Split each chain in half, so that drift is detected; of an odd number of draws the middle one is dropped."""
    half = x.shape[2] // 2
    return torch.cat([x[..., :half], x[..., x.shape[2] - half :]], 1)


def sort(flat: Tensor) -> tuple[Tensor, Tensor]:
    """The values (quantity, S) in ascending order and their indices, (quantity, S) both.

    The bits of a double, reversed for negative numbers, have the same order as integers, and torch sorts a vector of
    integers by radix, five times as fast as it compares doubles.
    """
    bits = (flat + 0.0).view(torch.int64)  # -0.0 becomes 0.0
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFFFFFFFFFF, bits)
    order = torch.stack([row.sort().indices for row in keys])
    return flat.gather(1, order), order


def normal_scores(ordered: Tensor, order: Tensor) -> Tensor:
    """Phi^-1((rank - 3/8) / (S + 1/4)) of the draws in their original order; equal draws share their mean rank."""
    size = ordered.shape[1]
    score = lambda rank: torch.special.ndtri((rank - 0.375) / (size + 0.25))  # noqa: E731
    scores = score(torch.arange(1.0, size + 1, dtype=ordered.dtype, device=ordered.device)).expand_as(ordered)
    equal = ordered[:, 1:] == ordered[:, :-1]
    rows = equal.any(1).nonzero()[:, 0].tolist()
    scores = scores.clone() if rows else scores
    for i in rows:
        tied = torch.nn.functional.pad(equal[i], (1, 0)) | torch.nn.functional.pad(equal[i], (0, 1))
        values = ordered[i][tied]
        first, after = torch.searchsorted(ordered[i], values), torch.searchsorted(ordered[i], values, right=True)
        scores[i, tied] = score(0.5 * (1.0 + first.double() + after))
    return torch.empty_like(ordered).scatter_(1, order, scores)


def potential_reduction(x: Tensor) -> Tensor:
    """Return R-hat of the draws as they are, without splitting or ranking them, (quantity,)."""
    n, within = x.shape[2], x.var(2).mean(1)
    return ((n - 1) / n + x.mean(2).var(1) / within).sqrt()


def mean_autocovariance(x: Tensor) -> Tensor:
    """The autocovariance at every lag, divided by n and averaged over the chains: (quantity, lag).

    Spectra are averaged before the inverse transform, which is then needed once per quantity instead of once per chain.
    """
    n = x.shape[2]
    size = 1 << (2 * n - 1).bit_length()  # zero padding avoids circular correlation
    spectrum = torch.view_as_real(torch.fft.rfft(x - x.mean(2, keepdim=True), size))
    power = spectrum.square().flatten(-2).mean(1).unflatten(-1, (-1, 2)).sum(-1)
    return torch.fft.irfft(power, size)[:, :n] / n


def effective(x: Tensor, covariance: Tensor | None = None, between: bool = True) -> Tensor:
    """S / tau by Geyer's initial monotone sequence over all chains, (quantity,).

    Without `between`, the autocorrelations are those around each chain's own mean, so that chains may disagree.
    """
    chains, n = x.shape[1:]
    covariance = mean_autocovariance(x) if covariance is None else covariance  # (quantity, lag)
    within = covariance[:, 0] * (n / (n - 1) if between else 1.0)
    total = covariance[:, 0] + (x.mean(2).var(1) if chains > 1 and between else 0.0)
    rho = 1 - (within[:, None] - covariance) / total[:, None]
    rho[:, 0] = 1
    pairs = max(1, (n - 1) // 2)  # the last two lags average too few products
    even, sums = rho[:, 0 : 2 * pairs : 2], rho[:, : 2 * pairs].unflatten(1, (pairs, 2)).sum(2)
    place = torch.arange(pairs, device=x.device)
    last = torch.where(sums > 0, pairs - 1, place).amin(1)  # the first pair that is not positive, or the last of all
    before = torch.where(place < last[:, None], sums.cummin(1).values, 0.0).sum(1)
    edge, edge_sum = even.gather(1, last[:, None])[:, 0], sums.gather(1, last[:, None])[:, 0]
    # the first term of the last pair may still be positive, and including it reduces the variance
    tau = 2 * before - 1 + torch.where((edge > 0) | (edge_sum >= 0), edge, 0.0)
    # the effective size of anticorrelated chains exceeds the number of draws; it is bounded
    size = chains * n / tau.clamp(min=1 / math.log10(chains * n))
    # an indicator that is always 1, such as x <= the largest value of a discrete x, has no error
    return torch.where((x == x[:, :1, :1]).flatten(1).all(1), float(chains * n), size)


def effective_below(x: Tensor, q: float) -> Tensor:
    """The effective sample size of the indicator x <= quantile."""
    return effective(split((x <= quantile_of(x, q)[:, None, None]).double()))


def standard_error(x: Tensor) -> Tensor:
    """sd / sqrt(ESS of the mean)."""
    return x.flatten(1).std(1) / effective(split(x)).sqrt()


def squared_deviations(x: Tensor) -> Tensor:
    """(x - mean)^2, with the mean over all chains."""
    return (x - x.mean((1, 2), keepdim=True)).square()


def quantile_of(x: Tensor, q: float) -> Tensor:
    """The quantile q of all chains together: (quantity,)."""
    return quantile_of_sorted(sort(x.flatten(1))[0], q)


def quantile_of_sorted(ordered: Tensor, q: float) -> Tensor:
    """The quantile q of values in ascending order, (quantity, S): (quantity,)."""
    place = q * (ordered.shape[1] - 1)
    low = math.floor(place)
    high = min(low + 1, ordered.shape[1] - 1)
    return ordered[:, low] + (place - low) * (ordered[:, high] - ordered[:, low])


def beta_quantile(p: float, a: Tensor, b: Tensor) -> Tensor:
    """The quantile p of Beta(a, b), for a and b >= 1.

    Newton's method on logit x, started at the normal distribution with the mean and variance of the logit.
    """
    spread = (torch.polygamma(1, a) + torch.polygamma(1, b)).sqrt()
    centre = torch.digamma(a) - torch.digamma(b)
    t = centre + math.sqrt(2) * float(torch.erfinv(torch.tensor(2 * p - 1, dtype=torch.float64))) * spread
    log_scale = torch.lgamma(a + b) - torch.lgamma(a) - torch.lgamma(b)
    for _ in range(50):
        slope = (log_scale + a * torch.nn.functional.logsigmoid(t) + b * torch.nn.functional.logsigmoid(-t)).exp()
        step = ((incomplete_beta(a, b, t.sigmoid(), (-t).sigmoid()) - p) / slope).clamp(-spread, spread)
        t = t - step
        if not bool((step.abs() > 1e-13 * (1 + t.abs())).any()):
            break
    return t.sigmoid()
