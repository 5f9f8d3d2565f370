"""Divergences between distributions: exact where a closed form is known, elsewhere numerical with an error estimate.

`kl`, `renyi` and `jensen_shannon` return a `Divergence`, which holds the value, how it was computed, and its error.
"""

from priory.divergences.explain import GaussianKL, explain_kl
from priory.divergences.jensen import jensen_shannon
from priory.divergences.kullback_leibler import kl
from priory.divergences.mixtures import Bounds, kl_bounds
from priory.divergences.ratios import KL, ForwardKL, JensenShannon, Ratio, Renyi
from priory.divergences.renyi_alpha import renyi
from priory.divergences.result import Divergence

__all__ = [
    "KL",
    "Bounds",
    "Divergence",
    "ForwardKL",
    "GaussianKL",
    "JensenShannon",
    "Ratio",
    "Renyi",
    "explain_kl",
    "jensen_shannon",
    "kl",
    "kl_bounds",
    "renyi",
]
