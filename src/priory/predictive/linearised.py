"""Predictions of a network linearised in its weights around a point, under a Gaussian posterior of the weights.

The outputs of the linearised network are Gaussian at each input (MacKay, 1992, "The evidence framework applied to
classification networks"),

    f ~ N(m, V),    m = f(x; w*),    V = J Sigma J'

With Gaussian noise, p(y | x, D) = N(y; m, V + noise^2) is exact. For labels, the integral of softmax(f) over N(m, V)
has no closed form. `link` selects one of these approximations:

    "samples"  the mixture over draws of f
    "probit"   softmax(m_c / sqrt(1 + pi V_cc / 8)), or sigmoid(m / sqrt(1 + pi V / 8)) for binary labels (MacKay, 1992;
               Gibbs, 1998, for several classes): each logit shrinks towards zero as its variance grows; exact at V = 0
    "extended" 1 / sum_l exp(-(m_c - m_l) / sqrt(1 + pi V_cl / 8)), normalised to sum to one, with V_cl the variance of
               f_c - f_l (Daunizeau, 2017; Lu, Ie and Sha, 2020): like the softmax it depends only on differences of
               logits, and for two classes it is the probit of their difference
    "bridge"   the mean of the Dirichlet whose Laplace approximation in the softmax basis has this mean and these
               variances (Hobbhahn, Kristiadi and Hennig, 2022, "Fast predictive uncertainty for classification with
               Bayesian deep networks"). f is first conditioned on sum_c f_c = 0, which changes no probability:

                   alpha_c = (1 - 2/K + exp(m_c) sum_l exp(-m_l) / K^2) / V_cc

               If f is the Laplace approximation of a Dirichlet, this is exactly that Dirichlet's mean. Where V_cc does
               not fall about as exp(-m_c), as it does for a Dirichlet, the error is larger than that of "probit"; and
               for two classes the result is sigmoid(m), whatever V is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
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
    """p(y | x, D) for outputs of the network that are Gaussian at each input. Make one with `Linearised.of`.

    There are three cases:

    - Gaussian noise whose scale is not an output of the network: everything except `samples` is exact, and `log_prob`
      is the joint density of the outputs of a row.
    - Labels and a `link` in closed form: the link gives the probabilities, and `log_prob` is the log of their product
      over the labels of a row. `epistemic` and `mutual_information` are the share of the link's variance or entropy
      that the draws of f attribute to the spread of f.
    - Otherwise: the mixture over draws of f.

    Draws are made when they are first needed.

    Args:
        likelihood: p(y | f).
        learnt: The likelihood's learnt parameters by name.
        event: Shape of one target.
        location: Mean m of the outputs, (n, *rest).
        covariance: Covariance V of the outputs, in one of the shapes that `Linearised.of` accepts.
        draws: Number of draws of f. Default: 64.
        link: "samples", or for labels one of `LINKS`. Default: "samples".
        seed: Seed of all draws. Default: 0.
        complete: Whether the draws of f count as all there are, as in `MixtureOfDraws`. Default: False.
    """

    likelihood: Likelihood
    learnt: dict[str, Tensor]
    event: torch.Size
    location: Tensor
    covariance: Tensor
    draws: int = 64
    link: str = "samples"
    seed: int = 0
    complete: bool = False

    def of_all_components(self) -> Linearised:
        return replace(self, complete=True)

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
        """Check mean and covariance of the outputs, and wrap them.

        A segmentation of 64 x 64 pixels into 10 classes needs 6.7 GB per row for the first shape of the covariance,
        1.6 MB for the second and 0.2 MB for the third, in float32.

        Args:
            likelihood: p(y | f).
            mean: Mean m of the outputs, (n, *rest).
            covariance: Covariance V in one of three shapes: (n, C, C) for all C outputs of a row; (n, *rest, rest[-1])
                for one block over the last dimension at each position (the classes of each pixel); or (n, *rest) for
                the variances only. Covariances outside of the blocks are zero.
            learnt: The likelihood's learnt parameters by name.
            event: Shape of one target.
            seed: Seed of all draws.
            samples: Number of draws of f.
            link: "samples", or for labels one of `LINKS`.

        Returns:
            The predictive distribution.

        Raises:
            InputError: If a shape, a value or the link is invalid.
        """
        require(is_integer(samples, 1), "samples", "Linearised", "be an integer >= 1", samples)
        known = ("samples", *LINKS)
        require(link in known, "link", "Linearised", f"be among {', '.join(known)}", repr(link))
        labels = link == "samples" or likelihood.classes
        require(labels, "link", "Linearised", f"be 'samples' for {likelihood!r}, whose targets are numbers", repr(link))
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
    def _slopes(self) -> Tensor | None:
        """dE[y | f]/df of each output, (n, *rest), where the mean is linear in f."""
        slope, m = self.likelihood.slope, self.location
        return None if slope is None else torch.as_tensor(slope, dtype=m.dtype, device=m.device).expand_as(m)

    @cached_property
    def _blocks(self) -> tuple[Tensor, Tensor]:
        """m and V as independent Gaussians, (n, *positions, B) and (n, *positions, B, B)."""
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
        return MixtureOfDraws(self.likelihood, self.outputs, self.learnt, self.event, self.seed, self.complete)

    @cached_property
    def _moderated(self) -> Tensor | None:
        """Outputs at which the likelihood's mean is E[y | x, D], (n, *rest); None without a closed form."""
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
        if self._slopes is not None:
            return self._slopes.square() * self._variances
        mixture_epistemic = self._mixture.epistemic
        # draws and closed form differ slightly, and total - epistemic must not be negative
        return (
            mixture_epistemic
            if self._moderated is None
            else torch.minimum(mixture_epistemic, self._total_variance(self._moderated))
        )

    @cached_property
    def aleatoric(self) -> Tensor:
        """E over f of Var[y | f]: the part of the variance that more data would not remove."""
        if self._moderated is None:
            return self._mixture.aleatoric
        total = self._total_variance(self._moderated)
        return total if self._exact else total - self.epistemic

    def _total_variance(self, outputs: Tensor) -> Tensor:
        return self.likelihood.variance(outputs, self.learnt)

    @property
    def mutual_information(self) -> Tensor:
        """H[E p] - E H[p], in nats, from 0 to the entropy.

        With a link in closed form it is the link's entropy, times the ratio of mutual information to entropy in the
        mixture over draws of f. The link's entropy minus the mean entropy of the draws would agree on average. But that
        difference is negative where the link's entropy is too low, and where f varies little its Monte Carlo noise is
        larger than its value.
        """
        mixture_information = self._mixture.mutual_information
        if self._moderated is None:
            return mixture_information
        mixture_entropy = self.likelihood.entropy(self._mixture.mean, len(self.event))
        share = torch.where(
            mixture_entropy > 0, mixture_information.clamp_min(0) / mixture_entropy, 0.0
        )  # negative only by rounding
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
        if self._slopes is not None:
            _, v = self._blocks
            lead = v.shape[:-1]
            noise = torch.diag_embed(self.aleatoric.reshape(lead))
            slopes = self._slopes.reshape(lead)
            v = slopes.unsqueeze(-1) * v * slopes.unsqueeze(-2)
            values = log_normal((targets - self.mean).reshape(lead), v + noise)
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
    """Return logits m / sqrt(1 + pi V / 8), because sigmoid(f) is close to Phi(f sqrt(pi / 8)), whose mean is known."""
    return prediction.location * torch.rsqrt(1 + math.pi / 8 * prediction._variances)


def extended(prediction: Linearised) -> Tensor:
    """Return logits -log sum_l exp(-(m_c - m_l) / sqrt(1 + pi V_cl / 8)); for binary labels, those of `probit`."""
    m = prediction.location
    if m.ndim == 1 + len(prediction.event):
        return probit(prediction)
    v = covariance_of_classes(m, prediction._blocks[1])
    variances = v.diagonal(dim1=-2, dim2=-1)
    difference_variances = variances.unsqueeze(-1) + variances.unsqueeze(-2) - 2 * v
    differences = (m.unsqueeze(-1) - m.unsqueeze(-2)) * torch.rsqrt(1 + math.pi / 8 * difference_variances.clamp_min(0))
    return -torch.logsumexp(-differences, -1)


def bridge(prediction: Linearised) -> Tensor:
    """Return logits log alpha of the Dirichlet, whose mean is their softmax; for binary labels, m."""
    m = prediction.location
    if m.ndim == 1 + len(prediction.event):
        return m
    v, classes = covariance_of_classes(m, prediction._blocks[1]), m.shape[-1]
    variances, row_sums = v.diagonal(dim1=-2, dim2=-1), v.sum(-1)  # V_cc and V 1
    trace, rounding = variances.sum(-1, keepdim=True), 100 * classes * torch.finfo(v.dtype).eps
    # Condition on sum_c f_c = 0. Where the variance of the sum is zero, subtract the mean of the logits instead.
    total = row_sums.sum(-1, keepdim=True)  # 1' V 1
    gain = torch.where(total > rounding * trace, row_sums / total, torch.full_like(row_sums, 1 / classes))
    centred, variances = m - gain * m.sum(-1, keepdim=True), variances - gain * row_sums
    certain = (
        variances.amax(-1, keepdim=True) <= rounding * trace
    )  # no variance in the probabilities: they are softmax(m)
    log_ratio = centred + torch.logsumexp(-centred, -1, keepdim=True) - 2 * math.log(classes)
    log_constant = torch.full_like(log_ratio, 1 - 2 / classes).log()
    log_alpha = torch.logaddexp(log_constant, log_ratio) - torch.maximum(variances, rounding * trace).log()
    return torch.where(certain, m, log_alpha)


LINKS: dict[str, Callable[[Linearised], Tensor]] = {"probit": probit, "extended": extended, "bridge": bridge}


def covariance_of_classes(m: Tensor, v: Tensor) -> Tensor:
    """Return the covariance of the K logits at each position, (n, *positions, K, K); m is (n, *positions, K)."""
    classes = m.shape[-1]
    if v.shape[-1] == 1 < classes:
        return torch.diag_embed(v.reshape(m.shape))
    blocks = v.unflatten(-1, (-1, classes)).unflatten(-3, (-1, classes))  # (n, ..., a, K, b, K)
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3).reshape(*m.shape, classes)


def factor_of(covariance: Tensor) -> Tensor:
    """Return lower triangular factors of covariances (..., B, B), which may be singular."""
    try:
        return cholesky(covariance, "covariance", semidefinite=True)
    except NotPositiveDefiniteError:
        require(False, "covariance", "Linearised", "be positive semi-definite", "a negative eigenvalue")
        raise


def log_normal(deviation: Tensor, covariance: Tensor) -> Tensor:
    """Return log N(deviation; 0, covariance), for (..., B) and (..., B, B): (...)."""
    factor = factor_of(covariance)
    z = torch.linalg.solve_triangular(factor, deviation.unsqueeze(-1), upper=False).squeeze(-1)
    log_det = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return -0.5 * (z.square().sum(-1) + log_det + deviation.shape[-1] * math.log(2 * math.pi))
