"""Prediction: the mixture, over posterior draws, of the likelihood's distribution at new inputs.

    p(y | x, D) = E[p(y | x, w)] ~ (1/S) sum_s p(y | x, w_s)

Everything here is of that mixture: its variance is the variance of the means (epistemic: what more data would
remove) plus the mean of the variances (aleatoric: what they would not), and its quantiles are found on its
own distribution function, not on a Gaussian fitted to it.

`Linearised` is the same for a network that is linear in its weights around a point, under a Gaussian posterior of them
(MacKay, 1992, "The evidence framework applied to classification networks"): its outputs are Gaussian at each input,

    f ~ N(m, V),    m = f(x; w*),    V = J Sigma J'

With Gaussian noise p(y | x, D) = N(y; m, V + noise^2) exactly. For labels the integral of softmax(f) over N(m, V) has
no closed form, and `link` says what stands for it:

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
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from priory.core.data import check_finite, tensor_of
from priory.core.errors import InputError, require, whole
from priory.core.streams import stream
from priory.network.layer_chain import SharedInputs
from priory.network.skeleton import MEMORY_LIMIT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from priory.core.data import Batch
    from priory.likelihoods import Likelihood
    from priory.models.model import Buffers, Model

BISECTIONS = 60


@dataclass(frozen=True)
class Prediction:
    """What is known of y at n new inputs, from outputs (S, n, ...) and the likelihood's own parameters (S, ...)."""

    likelihood: Likelihood
    outputs: Tensor
    learnt: dict[str, Tensor]
    event: torch.Size
    prepare: Callable[[Tensor], Tensor]
    seed: int = 0

    def __repr__(self) -> str:
        return f"Prediction({self.outputs.shape[1]} rows, {self.outputs.shape[0]} draws, {self.likelihood!r})"

    @property
    def example(self) -> Tensor:
        """The outputs of one network, (n, ...)."""
        return self.outputs[0]

    @property
    def classes(self) -> bool:
        """Whether y is a label."""
        return self.likelihood.classes

    @cached_property
    def _means(self) -> Tensor:
        return self.likelihood.mean(self.outputs, self.learnt)  # (S, n, *event)

    # Moments.

    @cached_property
    def mean(self) -> Tensor:
        """E[y | x, D]; for classes the probabilities."""
        return self._means.mean(0)

    @cached_property
    def epistemic(self) -> Tensor:
        """Var over w of E[y | x, w]: the part of the variance that more data would remove."""
        return self._means.var(0, correction=0)

    @cached_property
    def aleatoric(self) -> Tensor:
        """E over w of Var[y | x, w]: the part that more data would not remove."""
        return self.likelihood.variance(self.outputs, self.learnt).mean(0)

    @cached_property
    def variance(self) -> Tensor:
        """Var[y | x, D] = epistemic + aleatoric."""
        return self.epistemic + self.aleatoric

    @property
    def std(self) -> Tensor:
        """The root of the total variance."""
        return self.variance.sqrt()

    # The mixture itself.

    def log_prob(self, y: Any) -> Tensor:
        """log p(y | x, D) a row, (n,)."""
        given = tensor_of(y, "The 'y' of log_prob")
        check_finite(given, "targets")
        targets = self.prepare(given)
        if self.event == () and targets.ndim == 2 and targets.shape[1] == 1:
            targets = targets.squeeze(1)
        shape = (len(self.example), *self.event)
        fits = tuple(targets.shape) == shape
        require(fits, "y", "log_prob", f"have the shape {shape}", f"the shape {tuple(targets.shape)}")
        self.likelihood.check(self.example, targets)
        return self._log_prob(targets)

    def _log_prob(self, targets: Tensor) -> Tensor:
        values = self.likelihood.log_prob(self.outputs, targets, self.learnt)  # (S, n)
        return torch.logsumexp(values, 0) - math.log(len(values))

    def quantile(self, q: float) -> Tensor:
        """The value below which y lies with probability q, (n, *event)."""
        require(isinstance(q, (int, float)) and 0 < q < 1, "q", "quantile", "lie between 0 and 1", q)
        if self.classes:
            raise InputError(f"{self.likelihood!r} is over labels: it has probabilities, and no quantiles.")
        return self._quantile(q)

    def _quantile(self, q: float) -> Tensor:
        """By bisection on the mixture's distribution function."""
        low, high = self._bracket(q)
        for _ in range(BISECTIONS):
            middle = 0.5 * (low + high)
            if self.likelihood.discrete:
                middle = middle.floor()
            below = self.cdf(middle) < q
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return high

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """The central interval that holds y with this probability."""
        require(
            isinstance(level, (int, float)) and 0 < level < 1,
            "level",
            "interval",
            "lie between 0 and 1",
            level,
        )
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def cdf(self, value: Tensor) -> Tensor:
        """P(y <= value | x, D), for values that broadcast to (n, *event)."""
        return self.likelihood.cdf(self.outputs, self.learnt, value).mean(0)

    def _bracket(self, q: float) -> tuple[Tensor, Tensor]:
        """Values on the two sides of the q-quantile, by doubling."""
        centre = self.mean if bool(torch.isfinite(self.mean).all()) else torch.zeros_like(self.mean)
        spread = self.std if bool(torch.isfinite(self.std).all()) else torch.ones_like(centre)
        low, high, step = centre - spread, centre + spread, spread + 1e-12
        if self.likelihood.discrete:
            low, high, step = torch.full_like(low, -1.0), high.ceil(), step.ceil()
        for _ in range(200):
            above, under = self.cdf(low) >= q, self.cdf(high) < q
            if self.likelihood.discrete:
                above = torch.zeros_like(above)
            if not bool(above.any() | under.any()):
                break
            low, high = torch.where(above, low - step, low), torch.where(under, high + step, high)
            step = 2 * step
        return low, high

    @cached_property
    def samples(self) -> Tensor:
        """A draw of y for each posterior draw, (S, n, *event)."""
        generator = stream(self.seed, "predictive", device=self.outputs.device)
        return self.likelihood.draw(self.outputs, self.learnt, generator)

    # Classes.

    @property
    def probs(self) -> Tensor:
        """p(y | x, D): a column a class, or for Bernoulli the probability of 1."""
        self._labels_only("probs")
        return self.mean

    @property
    def entropy(self) -> Tensor:
        """The entropy of y in nats, a row; for several labels, summed over them."""
        self._labels_only("entropy")
        return self.likelihood.entropy(self.mean, len(self.event))

    @property
    def mutual_information(self) -> Tensor:
        """H[E p] - E H[p]: how much of the entropy is disagreement between draws, in nats."""
        self._labels_only("mutual_information")
        within = self.likelihood.entropy(self._means, len(self.event)).mean(0)
        return self.likelihood.entropy(self._means.mean(0), len(self.event)) - within

    def _labels_only(self, name: str) -> None:
        if not self.classes:
            raise InputError(f"The '{name}' of a prediction needs labels: {self.likelihood!r} is over numbers.")


@dataclass(frozen=True, repr=False, kw_only=True)
class Linearised(Prediction):
    """What is known of y at n new inputs, where the network's outputs are Gaussian. `Linearised.of` makes one.

    With Gaussian noise that doesn't come from the network everything but `samples` is exact, and `log_prob` is of the
    outputs of a row together. With a closed `link` the probabilities are its own, `log_prob` is the logarithm of their
    product over the labels of a row, and what is asked of the spread of p (`epistemic`, `mutual_information`) is the
    link's variance or entropy, split as draws of f split theirs. Everything else is the mixture over those draws, which
    are made when first asked for.
    """

    # the draws of f, (S, n, *rest), which are worked out and not given
    outputs: Tensor = field(init=False, default=property(lambda self: self._draws))  # pyright: ignore
    location: Tensor
    covariance: Tensor
    draws: int = 64
    link: str = "samples"

    @classmethod
    def of(
        cls,
        likelihood: Likelihood,
        mean: Tensor,
        covariance: Tensor,
        learnt: dict[str, Tensor],
        event: torch.Size,
        prepare: Callable[[Tensor], Tensor],
        seed: int = 0,
        samples: int = 64,
        link: str = "samples",
    ) -> Linearised:
        """From the mean m (n, *rest) of arranged outputs and their covariance V, with the likelihood's own at a point.

        V is (n, C, C) over all C outputs of a row; or (n, *rest, rest[-1]), a block for the last dimension at each
        place before it (the classes of each pixel); or (n, *rest), variances alone. What is left out is taken as zero.
        A segmentation of 64 x 64 pixels into 10 classes needs 6.7 GB a row for the first, 1.6 MB for the second and
        0.2 MB for the third, in single precision.
        """
        require(whole(samples, 1), "samples", "Linearised", "be an integer >= 1", samples)
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
        given = {"location": mean, "covariance": covariance, "draws": int(samples), "link": link}
        return cls(likelihood, learnt, event, prepare, seed, **given)

    def __repr__(self) -> str:
        how = "exact" if self._exact else f"{self.draws} draws" if self.link == "samples" else self.link
        return f"Linearised({len(self.location)} rows, {how}, {self.likelihood!r})"

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
    def _draws(self) -> Tensor:
        """S draws of f, (S, n, *rest)."""
        m, v = self._blocks
        generator = stream(self.seed, "linearised", device=m.device)
        z = torch.randn((self.draws, *m.shape), dtype=m.dtype, device=m.device, generator=generator)
        drawn = m + torch.einsum("n...ij,sn...j->sn...i", cholesky(v), z)
        return drawn.reshape(self.draws, *self.location.shape)

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
        return super().mean if self._moderated is None else self.likelihood.mean(self._moderated, self.learnt)

    @cached_property
    def epistemic(self) -> Tensor:
        """Var over f of E[y | f]: the part of the variance that more data would remove."""
        if self.likelihood.slope is not None:
            return self.likelihood.slope**2 * self._variances
        found = super().epistemic
        # draws and a closed form differ a little, and the parts of a variance must not be negative
        return found if self._moderated is None else torch.minimum(found, self._total(self._moderated))

    @cached_property
    def aleatoric(self) -> Tensor:
        """E over f of Var[y | f]: the part that more data would not remove."""
        if self._moderated is None:
            return super().aleatoric
        total = self._total(self._moderated)
        return total if self._exact else total - self.epistemic

    def _total(self, outputs: Tensor) -> Tensor:
        return self.likelihood.variance(outputs, self.learnt)

    @property
    def mutual_information(self) -> Tensor:
        """H[E p] - E H[p], in nats, from 0 to `entropy`.

        With a closed link it is the link's entropy times the share that is disagreement in the entropy of the mixture
        over draws. The link's entropy less the draws' mean entropy would agree with it on average, but is below zero
        where the link is surer than the draws are, and noise of the order of the spread of f hides it where that is
        small.
        """
        found = super().mutual_information
        if self._moderated is None:
            return found
        whole = self.likelihood.entropy(self._means.mean(0), len(self.event))
        share = torch.where(whole > 0, found.clamp_min(0) / whole, 0.0)  # below zero by rounding alone
        return share * self.entropy

    # The distribution itself.

    def _log_prob(self, targets: Tensor) -> Tensor:
        if self.likelihood.slope is not None:
            _, v = self._blocks
            lead = v.shape[:-1]
            noise = torch.diag_embed(self.aleatoric.reshape(lead))
            values = log_normal((targets - self.mean).reshape(lead), self.likelihood.slope**2 * v + noise)
            return values.reshape(len(values), -1).sum(-1)
        if self._moderated is not None:
            return self.likelihood.log_prob(self._moderated, targets, self.learnt)
        return super()._log_prob(targets)

    def _quantile(self, q: float) -> Tensor:
        if not self._exact:
            return super()._quantile(q)
        return self.mean + self.std * torch.special.ndtri(torch.full_like(self.mean, q))

    def cdf(self, value: Tensor) -> Tensor:
        """P(y <= value | x, D), for values that broadcast to (n, *event)."""
        return torch.special.ndtr((value - self.mean) / self.std) if self._exact else super().cdf(value)


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


def cholesky(covariance: Tensor) -> Tensor:
    """Lower factors of (..., B, B); what is singular gets as little on its diagonal as makes it definite."""
    eps = torch.finfo(covariance.dtype).eps
    size = covariance.diagonal(dim1=-2, dim2=-1).abs().mean(-1).clamp_min(torch.finfo(covariance.dtype).tiny ** 0.5)
    factor, failed = torch.linalg.cholesky_ex(covariance)
    jitter, added = eps, torch.zeros_like(size)
    while bool(failed.any()) and jitter < math.sqrt(eps):
        added = torch.where(failed > 0, jitter * size, added)
        diagonal = torch.diag_embed(added[..., None].expand(covariance.shape[:-1]))
        factor, failed = torch.linalg.cholesky_ex(covariance + diagonal)
        jitter = 10 * jitter
    definite = not bool(failed.any())
    require(definite, "covariance", "Linearised", "be positive semi-definite", "a negative direction")
    return factor


def log_normal(deviation: Tensor, covariance: Tensor) -> Tensor:
    """log N(deviation; 0, covariance): (..., B) and (..., B, B) -> (...)."""
    factor = cholesky(covariance)
    z = torch.linalg.solve_triangular(factor, deviation.unsqueeze(-1), upper=False).squeeze(-1)
    log_det = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return -0.5 * (z.square().sum(-1) + log_det + deviation.shape[-1] * math.log(2 * math.pi))


def predict(
    model: Model,
    draws: Iterable[Tensor],
    inputs: Batch,
    buffers: Buffers,
    event: torch.Size,
    seed: int,
    limit: int = MEMORY_LIMIT,
    centre: Tensor | None = None,
) -> Prediction:
    """The mixture over vectors, (S, P) in one piece or several, at some inputs.

    A `centre` says that the second half of each piece, if it is even, mirrors the first around it.
    """
    outputs, learnt, shared = [], [], SharedInputs(centre)
    with torch.no_grad():
        for w in draws:
            outputs.append(model.outputs(w, inputs, buffers, event, limit, shared))
            learnt.append(model.learnt_at(w))
        own = {name: torch.cat([found[name] for found in learnt]) for name in learnt[0]}
        whole = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        return Prediction(model.likelihood, whole, own, event, model.prepare_targets, seed)
