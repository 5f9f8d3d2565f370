"""The KL divergence between two Gaussians, term by term, as it is written in lectures."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.distributions import Distribution, Independent, Normal

from priory.core.errors import require
from priory.core.tables import text_table
from priory.divergences.result import check_batches


@dataclass(frozen=True)
class GaussianKL:
    """The terms of KL(q || p) between Gaussians, in nats; print it to see each term with an explanation.

    Attributes:
        log_scales: Sum of log(s_p / s_q).
        variance: Sum of s_q^2 / (2 s_p^2).
        mean: Sum of (m_q - m_p)^2 / (2 s_p^2).
        constant: Sum of -1/2.
        entries: Number of pairs of Gaussians summed over.
    """

    log_scales: float
    variance: float
    mean: float
    constant: float
    entries: int

    @property
    def total(self) -> float:
        """The KL divergence in nats: the sum of the four terms."""
        return math.fsum((self.log_scales, self.variance, self.mean, self.constant))

    def __str__(self) -> str:
        rows = (
            ("log(s_p / s_q)", self.log_scales, "keeps q wide: it grows without bound as s_q goes to 0."),
            ("s_q^2 / (2 s_p^2)", self.variance, "keeps q narrow: it is q's variance in units of p's."),
            ("(m_q - m_p)^2 / (2 s_p^2)", self.mean, "pulls q's mean towards p's, like a squared penalty."),
            ("-1/2", self.constant, "makes the sum 0 where q equals p."),
        )
        sums = "" if self.entries == 1 else f", each term summed over {self.entries} entries"
        lines = [f"KL(q || p) of Gaussians, in nats{sums}"]
        cells = [[formula, f"{value:.6f}", reason] for formula, value, reason in rows]
        table = text_table([*cells, ["total", f"{self.total:.6f}", ""]], "lrl")
        return "\n".join([*lines, *(f"  {line}" for line in table)])


def explain_kl(q: Distribution, p: Distribution) -> GaussianKL:
    """Split KL(q || p) between two Gaussians into its four terms, each summed over all entries.

        KL(q || p) = sum [ log(s_p / s_q) + s_q^2 / (2 s_p^2) + (m_q - m_p)^2 / (2 s_p^2) - 1/2 ]

    Args:
        q: A `Normal`, or an `Independent` of one.
        p: A `Normal`, or an `Independent` of one, with the event shape of `q` and a batch shape that broadcasts.

    Returns:
        The terms in nats, which print as a table with an explanation of each.

    Raises:
        InputError: If either distribution is not Gaussian, or if their shapes do not match.

    Example:
        >>> one = torch.tensor(1.0, dtype=torch.float64)
        >>> print(explain_kl(Normal(0 * one, one), Normal(one, 2 * one)))
        KL(q || p) of Gaussians, in nats
          log(s_p / s_q)              0.693147  keeps q wide: it grows without bound as s_q goes to 0.
          s_q^2 / (2 s_p^2)           0.125000  keeps q narrow: it is q's variance in units of p's.
          (m_q - m_p)^2 / (2 s_p^2)   0.125000  pulls q's mean towards p's, like a squared penalty.
          -1/2                       -0.500000  makes the sum 0 where q equals p.
          total                       0.443147
    """
    bases = []
    for name, d in (("q", q), ("p", p)):
        base = d.base_dist if isinstance(d, Independent) else d
        require(isinstance(base, Normal), name, "explain_kl", "be a Normal, or an Independent of one", repr(d))
        assert isinstance(base, Normal)
        bases.append(base)
    shapes = (tuple(q.event_shape), tuple(p.event_shape))
    same = shapes[0] == shapes[1]
    require(same, "p", "explain_kl", "have the same event shape as q", shapes)
    check_batches("explain_kl", q, p)
    m_q, s_q, m_p, s_p = torch.broadcast_tensors(*(t.detach().double() for b in bases for t in (b.loc, b.scale)))
    terms = ((s_p / s_q).log(), 0.5 * (s_q / s_p).square(), 0.5 * ((m_q - m_p) / s_p).square())
    log_scales, variance, mean = (float(term.sum()) for term in terms)
    return GaussianKL(log_scales, variance, mean, -0.5 * m_q.numel(), m_q.numel())
