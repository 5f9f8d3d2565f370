"""What was found out about a penalty, and what it means in words.

A penalty r(mu, s) is the KL to a prior, plus a constant K, if and only if

    (i)  A = -H(beta_s) - F^-1[F r / F mirrored beta_s] is the same function at every scale s,
    (ii) kappa = int e^A is finite; then alpha = e^A / kappa and K = -log kappa

(Wolinski, Charpiat and Ollivier, 2020, Theorem 2). Condition (i) is tested forward, where nothing is ill-posed: smooth
A again and compare with r. No constant is fitted: K is known once A is. The mean difference against log s has the slope
1 - T for T times a KL, and 1 for a penalty without its entropy term.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

KIND_VALID, KIND_NEARLY_VALID, KIND_ENTROPY_MISSING, KIND_TEMPERED, KIND_NOT_INTEGRABLE, KIND_NO_PRIOR = (
    "valid",
    "nearly valid",
    "entropy missing",
    "tempered",
    "not integrable",
    "no prior",
)
FLAT_TAIL_SLOPE = 5e-3  # a slope of the tails that is none
NEARLY_VALID_FACTOR = 30  # times the tolerance, up to which a penalty is nearly valid


@dataclass(frozen=True)
class Certificate:
    """Whether a penalty is a KL to some prior, the numbers that say so, and a sentence.

    `kind` is "valid", "nearly valid", "entropy missing", "tempered", "not integrable" or "no prior". The numbers, in
    nats: `round_trip`, the largest difference between r and the KL that its own log prior gives; `semigroup`, the root
    mean square between one scale and the next, smoothed from it, and `heat`, the least and largest residual of the heat
    equation (both for the Gaussian family); `missing_entropy`, 1 - T; `tails`, the powers of |w| that the density
    falls with to the left and to the right; `kappa`; `error`, the largest of the log prior's, in the middle.
    """

    valid: bool
    kind: str
    verdict: str
    round_trip: float
    tails: tuple[float, float]
    kappa: float
    error: float
    missing_entropy: float | None = None
    semigroup: float | None = None
    heat: tuple[float, float] | None = None

    @property
    def temperature(self) -> float | None:
        """T, where the penalty is T times a KL."""
        return None if self.missing_entropy is None else 1 - self.missing_entropy

    def __str__(self) -> str:
        return self.verdict


def classify(round_trip: float, tolerance: float, log_kappa: float, mended: str | None = None) -> str:
    """The kind of verdict, from the numbers and from what would mend the penalty."""
    if round_trip <= tolerance:
        return KIND_VALID if log_kappa < math.inf else KIND_NOT_INTEGRABLE
    if mended is not None:
        return mended
    return KIND_NEARLY_VALID if round_trip <= NEARLY_VALID_FACTOR * tolerance else KIND_NO_PRIOR


def make_certificate(
    kind: str,
    round_trip: float,
    tails: tuple[float, float],
    log_kappa: float,
    error: float,
    *,
    missing_entropy: float | None = None,
    semigroup: float | None = None,
    heat: tuple[float, float] | None = None,
    verdict: str | None = None,
    what: str = "scale",
) -> Certificate:
    """A certificate with its sentence, in which `what` is learnt beside the location, "" for nothing."""
    kappa = math.exp(log_kappa) if log_kappa < 700 else math.inf
    if verdict is None:
        local = "" if heat is None else f" The residual of the heat equation goes from {heat[0]:.2f} to {heat[1]:.2f}."
        verdict = _sentence(kind, f"{round_trip:.1e} nats", tails, log_kappa, missing_entropy or 0.0, local, what)
    valid = kind == KIND_VALID
    return Certificate(valid, kind, verdict, round_trip, tails, kappa, error, missing_entropy, semigroup, heat)


def _sentence(
    kind: str, off: str, tails: tuple[float, float], log_kappa: float, missing: float, local: str, what: str
) -> str:
    improper = "" if log_kappa < math.inf else f" It is not integrable: the density {_slowly(tails)}."
    alike = (
        f"every {what} gives the same log prior, and the round trip is off by {off} at most" if what else f"to {off}"
    )
    if kind == KIND_VALID:
        return (
            f"Valid: the penalty is the KL to a prior plus {format_constant(-log_kappa)} ({alike}). The prior's "
            f"density falls like {_powers(tails)}."
        )
    if kind == KIND_NOT_INTEGRABLE:
        return (
            f"Not integrable: the penalty is a KL ({alike}), but to a density that {_slowly(tails)}: "
            f"its integral is infinite, and there is no prior."
        )
    if kind == KIND_ENTROPY_MISSING:
        return (
            f"The entropy term is missing: nothing holds a learnt {what} away from 0 (off by {off}; missing "
            f"{missing:.3f} of the entropy). With minus the family's entropy added, this is the KL to the prior given "
            f"here.{improper}"
        )
    if kind == KIND_TEMPERED:
        return (
            f"A tempered KL: T = {1 - missing:.4g} times the KL to the prior given here (1 - T = {missing:.3f}, off by "
            f"{off}). With a learnt {what} it is Bayesian for no prior: divide it by T, or fix the {what}.{improper}"
        )
    if kind == KIND_NEARLY_VALID:
        return f"Nearly valid: off by {off} at most from the KL to a prior; the nearest is given here.{improper}"
    return (
        f"No prior exists for a learnt {what}: the log prior that one {what} gives is off by {off} at another.{local} "
        f"The prior given here is that of the nearest Bayesian penalty."
    )


def format_constant(value: float) -> str:
    """K in a sentence, without a minus before zero."""
    return f"K = {round(value, 4) + 0.0:.4f}"


def _slowly(tails: tuple[float, float]) -> str:
    return f"{'grows' if max(tails) > FLAT_TAIL_SLOPE else 'falls only'} like {_powers(tails)}"


def _powers(tails: tuple[float, float]) -> str:
    left, right = (_power(t) for t in tails)
    return left if left == right else f"{left} to the left and {right} to the right"


def _power(slope: float) -> str:
    if abs(slope) > 50:
        return "an exponential or faster"
    return "a constant" if abs(slope) < FLAT_TAIL_SLOPE else f"|w|^{slope:.2f}"
