"""The certificate of a penalty: whether it is the KL divergence to a prior, and the measurements behind the verdict.

A penalty r(mu, s) equals the KL to a prior plus a constant K if and only if

    (i)  A = -H(beta_s) - F^-1[F r / F mirrored beta_s] is the same function at every scale s, and
    (ii) kappa = int e^A is finite; then alpha = e^A / kappa and K = -log kappa

(Wolinski, Charpiat and Ollivier 2020, Theorem 2). Condition (i) is tested in the forward direction, which is
well-posed: smooth A again and compare with r. No constant is fitted, since A determines K. Regressed on log s, the
mean difference has slope 1 - T for T times a KL, and slope 1 for a penalty without its entropy term.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

KIND_VALID = "valid"
KIND_NEARLY_VALID = "nearly valid"
KIND_ENTROPY_MISSING = "entropy missing"
KIND_TEMPERED = "tempered"
KIND_NOT_INTEGRABLE = "not integrable"
KIND_NO_PRIOR = "no prior"
FLAT_TAIL_SLOPE = 5e-3  # tails with a smaller slope count as constant
NEARLY_VALID_FACTOR = 30  # multiple of the tolerance up to which a penalty counts as nearly valid


@dataclass(frozen=True)
class Certificate:
    """Verdict on whether a penalty is the KL divergence to some prior.

    Attributes:
        valid: Whether the penalty is a KL to a proper prior, plus a constant.
        kind: "valid", "nearly valid", "entropy missing", "tempered", "not integrable" or "no prior".
        verdict: The verdict in a sentence.
        round_trip: Largest difference in nats between r and the KL to the prior recovered from it.
        tails: Powers of |w| with which the density falls off to the left and to the right.
        kappa: Integral of e^A, the normalising constant.
        error: Largest estimated error of the log prior near its centre, in nats.
        missing_entropy: 1 - T: 0 for a KL, 1 for a penalty without its entropy term, None if not measured.
        semigroup: Root mean square difference in nats between each scale and the next one smoothed from it. Gaussian
            family only, otherwise None.
        heat: Smallest and largest residual of the heat equation. Gaussian family only, otherwise None.
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
        """T, if the penalty is T times a KL."""
        return None if self.missing_entropy is None else 1 - self.missing_entropy

    def __str__(self) -> str:
        return self.verdict


def classify(round_trip: float, tolerance: float, log_kappa: float, repaired_kind: str | None = None) -> str:
    """Return the kind of verdict; `repaired_kind` is the repair that turned the penalty into a KL, if any."""
    if round_trip <= tolerance:
        return KIND_VALID if log_kappa < math.inf else KIND_NOT_INTEGRABLE
    if repaired_kind is not None:
        return repaired_kind
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
    learnt: str = "scale",
) -> Certificate:
    """Return the certificate with its sentence.

    `learnt` names the quantity that is learnt beside the location, such as "scale"; "" if there is none.
    """
    kappa = math.exp(log_kappa) if log_kappa < 700 else math.inf
    if verdict is None:
        local = (
            "" if heat is None else f" The residual of the heat equation ranges from {heat[0]:.2f} to {heat[1]:.2f}."
        )
        verdict = _sentence(kind, f"{round_trip:.1e} nats", tails, log_kappa, missing_entropy or 0.0, local, learnt)
    valid = kind == KIND_VALID
    return Certificate(valid, kind, verdict, round_trip, tails, kappa, error, missing_entropy, semigroup, heat)


def _sentence(
    kind: str, off: str, tails: tuple[float, float], log_kappa: float, missing: float, local: str, learnt: str
) -> str:
    """Return the verdict in words."""
    improper = "" if log_kappa < math.inf else f" It is not integrable: the density {_describe_slow_tails(tails)}."
    alike = (
        f"every {learnt} gives the same log prior, with a round-trip error of at most {off}"
        if learnt
        else f"within {off}"
    )
    if kind == KIND_VALID:
        return (
            f"Valid: the penalty is the KL to a prior plus {format_constant(-log_kappa)} ({alike}). The prior's "
            f"density falls like {_describe_tails(tails)}."
        )
    if kind == KIND_NOT_INTEGRABLE:
        return (
            f"Not integrable: the penalty is a KL ({alike}), but to a density that {_describe_slow_tails(tails)}: "
            f"its integral is infinite, so there is no proper prior."
        )
    if kind == KIND_ENTROPY_MISSING:
        return (
            f"The entropy term is missing: nothing keeps a learnt {learnt} away from 0 (off by {off}; missing "
            f"{missing:.3f} of the entropy). With minus the family's entropy added, this is the KL to the prior given "
            f"here.{improper}"
        )
    if kind == KIND_TEMPERED:
        return (
            f"A tempered KL: T = {1 - missing:.4g} times the KL to the prior given here (1 - T = {missing:.3f}, off by "
            f"{off}). With a learnt {learnt} it is Bayesian for no prior: divide it by T, or fix the {learnt}."
            f"{improper}"
        )
    if kind == KIND_NEARLY_VALID:
        return f"Nearly valid: within {off} of the KL to a prior; the nearest prior is given here.{improper}"
    return (
        f"No prior exists for a learnt {learnt}: the log prior found at one {learnt} is off by {off} at another."
        f"{local} The prior given here belongs to the nearest Bayesian penalty."
    )


def format_constant(value: float) -> str:
    """Return K as text for a sentence, without a minus sign before zero."""
    return f"K = {round(value, 4) + 0.0:.4f}"


def _describe_slow_tails(tails: tuple[float, float]) -> str:
    """Describe tails that are too heavy for a finite integral."""
    return f"{'grows' if max(tails) > FLAT_TAIL_SLOPE else 'falls only'} like {_describe_tails(tails)}"


def _describe_tails(tails: tuple[float, float]) -> str:
    """Describe both tails, in one phrase if they agree."""
    left, right = (_describe_tail(t) for t in tails)
    return left if left == right else f"{left} to the left and {right} to the right"


def _describe_tail(slope: float) -> str:
    """Describe one tail by its power of |w|."""
    if abs(slope) > 50:
        return "an exponential or faster"
    return "a constant" if abs(slope) < FLAT_TAIL_SLOPE else f"|w|^{slope:.2f}"
