"""Predictions of a network that is linear in its weights around a point, under a Gaussian posterior of them.

(MacKay, 1992, "The evidence framework applied to classification networks".) Its outputs are Gaussian at each input,

    f ~ N(m, V),    m = f(x; w*),    V = J Sigma J'

With Gaussian noise p(y | x, D) = N(y; m, V + noise^2) exactly. For labels the integral of softmax(f) over N(m, V) has
no closed form, and `link` chooses its approximation:

    "samples"  the mixture over draws of f
    "probit"   softmax(m_c / sqrt(1 + pi V_cc / 8)), for yes or no sigmoid(m / sqrt(1 + pi V / 8)) (MacKay, 1992; Gibbs,
               1998, for classes): each logit is drawn to zero as its variance grows; exact at V = 0
    "extended" 1 / sum_l exp(-(m_c - m_l) / sqrt(1 + pi V_cl / 8)), made to add up to one, with V_cl the variance of
               f_c - f_l (Daunizeau, 2017; Lu, Ie and Sha, 2020): like the softmax it depends on differences alone, and
               for two classes it is the probit of their difference
    "bridge"   the mean of a Dirichlet whose Laplace approximation in the softmax's basis has this mean and these
               variances (Hobbhahn, Kristiadi and Hennig, 2022, "Fast predictive uncertainty for classification with
               Bayesian deep networks"), with f first conditioned on sum_c f_c = 0, which no probability depends on:

                   alpha_c = (1 - 2/K + exp(m_c) sum_l exp(-m_l) / K^2) / V_cc

               It recovers a Dirichlet's own mean. Where V is not about a Dirichlet's (V_cc falling as exp(-m_c)) it is
               further from the integral than "probit", and for two classes it is sigmoid(m) whatever V is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from priory.core.errors import is_integer, require
from priory.core.linalg import NotPositiveDefiniteError, cholesky
from priory.core.streams import stream
from priory.predictive.distribution import Normals, PredictiveDistribution
from priory.predictive.draws import MixtureOfDraws

if TYPE_CHECKING:
    from collections.abc import Callable

    from priory.likelihoods import Likelihood


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class Linearised(PredictiveDistribution):
    """p(y | x, D) where the network's outputs are Gaussian at each input. `Linearised.of` checks and makes one.

    With Gaussian noise that doesn't come from the network everything but `samples` is exact, and `log_prob` is the
    joint density of the outputs of a row. With a closed `link` the probabilities are its own, `log_prob` is the
    logarithm of their product over the labels of a row, and the spread of p (`epistemic`, `mutual_information`) is the
    link's variance or entropy, split in the proportions of draws of f. Everything else is the mixture over those draws,
    which are made when first needed.
    """

    likelihood: Likelihood
    learnt: dict[str, Tensor]
    event: torch.Size
    location: Tensor
    covariance: Tensor
    draws: int = 64
    link: str = "samples"
    seed: int = 0

    @classmethod
    def of(
        cls,
        likelihood: Likelihood,
        mean: Tensor,
        covariance: Tensor,
        learnt: dict[str, Tensor],
        event: torch.Size,
        seed: int = 0,
        samples: int = 64,
        link: str = "samples",
    ) -> Linearised:
        """Make one from the moments of the arranged outputs and the likelihood's own parameters at a point.

        A segmentation of 64 x 64 pixels into 10 classes needs 6.7 GB per row for the first form of the covariance,
        1.6 MB for the second and 0.2 MB for the third, in single precision.

        Args:
            likelihood: p(y | f).
            mean: Mean m of the outputs, (n, *rest).
            covariance: Covariance V: (n, C, C) over all C outputs of a row; or (n, *rest, rest[-1]), one block for the
                last dimension at each place before it (the classes of each pixel); or (n, *rest), variances alone.
                Covariances that are left out are taken as zero.
            learnt: The likelihood's learnt parameters by name.
            event: Shape of one target.
            seed: Seed of all draws.
            samples: Number of draws of f.
            link: "samples", or for labels one of `LINKS`.

        Raises:
            InputError: If a shape, number or link can't be used.
        """
        require(is_integer(samples, 1), "samples", "Linearised", "be an integer >= 1", samples)
        known = ("samples", *LINKS)
        require(link in known, "link", "Linearised", f"be among {', '.join(known)}", repr(link))
        labels = link == "samples" or likelihood.classes
        require(labels, "link", "Linearised", f"be 'samples' for {likelihood!r}, which is over numbers", repr(link))
        rest = tuple(mean.shape[1:])
        shapes = [(len(mean), *shape) for shape in ((math.prod(rest),) * 2, (*rest, *rest[-1:]), rest)]
        fits = tuple(covariance.shape) in shapes
        must = f"have the shape {' or '.join(map(str, dict.fromkeys(shapes)))}"
        require(fits, "covariance", "Linearised", must, f"the shape {tuple(covariance.shape)}")
        for name, value in (("mean", mean), ("covariance", covariance)):
            require(bool(torch.isfinite(value).all()), name, "Linearised", "be finite", "NaN or infinity")
        return cls(
            likelihood=likelihood,
            learnt=learnt,
            event=event,
            location=mean,
            covariance=covariance,
            draws=int(samples),
            link=link,
            seed=seed,
        )

    def describe(self) -> str:
        return "exact" if self._exact else f"{self.draws} draws" if self.link == "samples" else self.link

    @property
    def example(self) -> Tensor:
        """The outputs at the mean of the weights, (n, *rest)."""
        return self.location

    @property
    def _exact(self) -> bool:
        return self.likelihood.slope is not None

    @cached_property
    def _blocks(self) -> tuple[Tensor, Tensor]:
        """m and V as independent Gaussians (n, *places, B) and (n, *places, B, B)."""
        m, v = self.location, self.covariance
        if v.shape == m.shape:
            return m.unsqueeze(-1), v[..., None, None]
        if v.ndim == 3:
            return m.reshape(len(m), -1), v
        return m, v

    @cached_property
    def _variances(self) -> Tensor:
        """Var[f], (n, *rest)."""
        return self._blocks[1].diagonal(dim1=-2, dim2=-1).reshape(self.location.shape)

    @cached_property
    def outputs(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """S draws of f, (S, n, *rest)."""
        m, v = self._blocks
        generator = stream(self.seed, "linearised", device=m.device)
        z = torch.randn((self.draws, *m.shape), dtype=m.dtype, device=m.device, generator=generator)
        drawn = m + torch.einsum("n...ij,sn...j->sn...i", factor_of(v), z)
        return drawn.reshape(self.draws, *self.location.shape)

    @cached_property
    def _mixture(self) -> MixtureOfDraws:
        """The mixture over draws of f."""
        return MixtureOfDraws(self.likelihood, self.outputs, self.learnt, self.event, self.seed)

    @cached_property
    def _moderated(self) -> Tensor | None:
        """Outputs at which the likelihood has the predictive's mean, (n, *rest), if they have a closed form."""
        if self._exact:
            return self.location
        return None if self.link == "samples" else LINKS[self.link](self)

    # Moments.

    @cached_property
    def mean(self) -> Tensor:
        """E[y | x, D]; for classes the probabilities."""
        return self._mixture.mean if self._moderated is None else self.likelihood.mean(self._moderated, self.learnt)

    @cached_property
    def epistemic(self) -> Tensor:
        """Var over f of E[y | f]: the part of the variance that more data would remove."""
        if self.likelihood.slope is not None:
            return self.likelihood.slope**2 * self._variances
        found = self._mixture.epistemic
        # draws and a closed form differ a little, and the parts of a variance must not be negative
        return found if self._moderated is None else torch.minimum(found, self._total(self._moderated))

    @cached_property
    def aleatoric(self) -> Tensor:
        """E over f of Var[y | f]: the part that more data would not remove."""
        if self._moderated is None:
            return self._mixture.aleatoric
        total = self._total(self._moderated)
        return total if self._exact else total - self.epistemic

    def _total(self, outputs: Tensor) -> Tensor:
        return self.likelihood.variance(outputs, self.learnt)

    @property
    def mutual_information(self) -> Tensor:
        """H[E p] - E H[p], in nats, from 0 to the entropy.

        With a closed link it is the link's entropy times the share that is disagreement in the entropy of the mixture
        over draws. The link's entropy less the draws' mean entropy would agree with it on average, but is below zero
        where the link is surer than the draws are, and noise of the order of the spread of f hides it where that is
        small.
        """
        found = self._mixture.mutual_information
        if self._moderated is None:
            return found
        whole = self.likelihood.entropy(self._mixture.mean, len(self.event))
        share = torch.where(whole > 0, found.clamp_min(0) / whole, 0.0)  # below zero by rounding alone
        return share * self.entropy

    @cached_property
    def samples(self) -> Tensor:
        return self._mixture.samples

    def normals(self) -> Normals | None:
        return Normals(self.mean[None], self._std[None]) if self._exact else self._mixture.normals()

    @cached_property
    def _std(self) -> Tensor:
        return (self.epistemic + self.aleatoric).sqrt()

    # The distribution itself.

    def log_prob(self, targets: Tensor) -> Tensor:
        if self.likelihood.slope is not None:
            _, v = self._blocks
            lead = v.shape[:-1]
            noise = torch.diag_embed(self.aleatoric.reshape(lead))
            values = log_normal((targets - self.mean).reshape(lead), self.likelihood.slope**2 * v + noise)
            return values.reshape(len(values), -1).sum(-1)
        if self._moderated is not None:
            return self.likelihood.log_prob(self._moderated, targets, self.learnt)
        return self._mixture.log_prob(targets)

    def quantile(self, q: float) -> Tensor | None:
        if not self._exact:
            return None
        return self.mean + self._std * torch.special.ndtri(torch.full_like(self.mean, q))

    def cdf(self, value: Tensor) -> Tensor:
        """P(y <= value | x, D), for values that broadcast to (n, *event)."""
        return torch.special.ndtr((value - self.mean) / self._std) if self._exact else self._mixture.cdf(value)


def probit(prediction: Linearised) -> Tensor:
    """Logits m / sqrt(1 + pi V / 8): sigmoid(f) is close to the probit Phi(f sqrt(pi / 8)), whose mean is known."""
    return prediction.location * torch.rsqrt(1 + math.pi / 8 * prediction._variances)


def extended(prediction: Linearised) -> Tensor:
    """Logits -log sum_l exp(-(m_c - m_l) / sqrt(1 + pi V_cl / 8)); for yes or no, the probit."""
    m = prediction.location
    if m.ndim == 1 + len(prediction.event):
        return probit(prediction)
    v = covariance_of_classes(m, prediction._blocks[1])
    variances = v.diagonal(dim1=-2, dim2=-1)
    apart = variances.unsqueeze(-1) + variances.unsqueeze(-2) - 2 * v
    differences = (m.unsqueeze(-1) - m.unsqueeze(-2)) * torch.rsqrt(1 + math.pi / 8 * apart.clamp_min(0))
    return -torch.logsumexp(-differences, -1)


def bridge(prediction: Linearised) -> Tensor:
    """Logits log alpha of the Dirichlet, whose mean is their softmax; for yes or no, m itself."""
    m = prediction.location
    if m.ndim == 1 + len(prediction.event):
        return m
    v, classes = covariance_of_classes(m, prediction._blocks[1]), m.shape[-1]
    variances, ones = v.diagonal(dim1=-2, dim2=-1), v.sum(-1)  # V_cc and V 1
    size, rounding = variances.sum(-1, keepdim=True), 100 * classes * torch.finfo(v.dtype).eps
    # Condition on sum_c f_c = 0. Where that is known already, or nothing is known of it, the mean is moved evenly.
    total = ones.sum(-1, keepdim=True)  # 1' V 1
    gain = torch.where(total > rounding * size, ones / total, torch.full_like(ones, 1 / classes))
    centred, variances = m - gain * m.sum(-1, keepdim=True), variances - gain * ones
    known = variances.amax(-1, keepdim=True) <= rounding * size  # no spread in the probabilities: they are softmax(m)
    share = centred + torch.logsumexp(-centred, -1, keepdim=True) - 2 * math.log(classes)
    rest = torch.full_like(share, 1 - 2 / classes).log()
    log_alpha = torch.logaddexp(rest, share) - torch.maximum(variances, rounding * size).log()
    return torch.where(known, m, log_alpha)


LINKS: dict[str, Callable[[Linearised], Tensor]] = {"probit": probit, "extended": extended, "bridge": bridge}


def covariance_of_classes(m: Tensor, v: Tensor) -> Tensor:
    """The covariance of the K logits at each place, (n, *places, K, K), for logits m (n, *places, K)."""
    classes = m.shape[-1]
    if v.shape[-1] == 1 < classes:
        return torch.diag_embed(v.reshape(m.shape))
    places = v.unflatten(-1, (-1, classes)).unflatten(-3, (-1, classes))  # (n, ..., a, K, b, K)
    return places.diagonal(dim1=-4, dim2=-2).movedim(-1, -3).reshape(*m.shape, classes)


def factor_of(covariance: Tensor) -> Tensor:
    """Lower factors of covariances (..., B, B) that may be singular."""
    try:
        return cholesky(covariance, "covariance", semidefinite=True)
    except NotPositiveDefiniteError:
        require(False, "covariance", "Linearised", "be positive semi-definite", "a negative direction")
        raise


def log_normal(deviation: Tensor, covariance: Tensor) -> Tensor:
    """log N(deviation; 0, covariance): (..., B) and (..., B, B) -> (...)."""
    factor = factor_of(covariance)
    z = torch.linalg.solve_triangular(factor, deviation.unsqueeze(-1), upper=False).squeeze(-1)
    log_det = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return -0.5 * (z.square().sum(-1) + log_det + deviation.shape[-1] * math.log(2 * math.pi))
