"""A parametric family of distributions over the flat vector: the posterior of variational inference.

Its bound on the evidence, and how close it is to the posterior, are estimated from many draws over all rows:

    log p(D) >= E_q[log r],    r = p(D, w) / q(w),    log p(D) = log E_q[r]

The k-hat of the ratios r (Vehtari et al. 2024) measures whether q covers the posterior: above 0.7 it does not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, LowRankMultivariateNormal, MultivariateNormal, Normal

from priory.core.data import Data
from priory.core.errors import InputError, is_integer, require
from priory.core.streams import stream
from priory.diagnostics import psis
from priory.diagnostics.importance import k_hat
from priory.estimators.evidence_bound import assemble
from priory.families import DiagonalFamily, Family, Form, FullRankFamily, LowRankFamily, form_of
from priory.models.base import has_network
from priory.penalties.as_prior.variational import VariationalTerm
from priory.posteriors.base import Evidence, Posterior
from priory.posteriors.status import Status, of_k_hat, worst

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from priory.models.target import Target
    from priory.penalties.equivalence.certificate import Certificate
    from priory.penalties.equivalence.result import Equivalence

ELBO_DRAWS = 256  # for log_evidence
K_HAT_DRAWS = 1024  # for k_hat of a network; each draw is a pass over the data
K_HAT_DRAWS_OF_DENSITY = 4096  # for k_hat of a density; with fewer, the k-hat of a funnel's neck varies by 0.2
MEAN_DRAWS = 4096  # for the mean of a parameter without a closed form
MAX_BLOCK_DRAWS = 4096  # draws evaluated together; fewer for many rows or many parameters


class Importance(NamedTuple):
    """Draws of q with their importance ratios.

    Attributes:
        draws: Draws in unconstrained parameters, (S, P).
        log_ratios: log p(D, w) - log q(w) at the draws, (S,).
    """

    draws: Tensor  # (S, P), in unconstrained coordinates
    log_ratios: Tensor  # log p(D, w) / q(w), (S,)

    @property
    def log_weights(self) -> Tensor:
        """Logarithms of the smoothed weights, which sum to one, (S,)."""
        return psis(self.log_ratios)[0]

    @property
    def k_hat(self) -> float:
        """Shape of the tail of the ratios: above 0.7 the weights are unreliable."""
        return k_hat(self.log_ratios)


class Variational(Posterior):
    """A variational posterior q(w) in unconstrained parameters.

    Args:
        target: Target of the fit.
        form: Form of the family, which maps `theta` to a distribution.
        theta: Variational parameters.
        buffers: The network's buffers. Default: None, those of the model.
    """

    kind: ClassVar[str] = "variational"

    def __init__(self, target: Target, form: Form, theta: Tensor, buffers: Mapping[str, Tensor] | None = None) -> None:
        super().__init__(target, buffers)
        self.form, self.theta = form, theta.detach().clone()
        self.family: Family = form.family(self.theta)
        self._k_hat: float | None = None
        self._ended_by_rule = False

    def end_by_rule(self, status: Status, rows: Data | None) -> None:
        """Take the status of a fit that ends by a rule of its own, in place of that from its history.

        Args:
            status: The status that the rule has found.
            rows: Data of the fit, from which k-hat is computed; None to leave that until it is asked for.
        """
        self._ended_by_rule = True
        if rows is None:
            self.know(status)
            return
        self.compute_k_hat(rows)
        if status.name == "doubtful":
            self.doubt(status.reason)
        else:
            self.know(status)

    def compute_status(self, history: Mapping[str, Tensor] | None = None) -> Status:
        """The status from the rule or the history of the fit, and from k-hat if it has been computed."""
        remedy = "q misses part of the posterior, so use a richer family or NUTS"
        known = self._given_status if self._ended_by_rule else None
        return worst([known or super().compute_status(history), of_k_hat(self._k_hat, remedy)])

    def quick_status(self) -> Status:
        return self.status if self._ended_by_rule else super().quick_status()

    def gaussian_coordinates(self) -> tuple[Tensor, Tensor] | None:
        if not isinstance(self.family, (DiagonalFamily, FullRankFamily, LowRankFamily)):
            return None
        mean, variance = self.family.moments()
        return mean, variance.sqrt()

    def gaussian_distribution(self) -> Distribution | None:
        q = self.family
        if isinstance(q, DiagonalFamily):
            return Independent(Normal(q.loc, q.scale), 1)
        if isinstance(q, FullRankFamily):
            return MultivariateNormal(q.loc, scale_tril=q.tril)
        if isinstance(q, LowRankFamily):
            return LowRankMultivariateNormal(q.loc, q.factor, (2 * q.log_diag).exp())
        return None

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        with torch.no_grad():
            return self.family.independent(n, generator)

    @property
    def mean(self) -> dict[str, Tensor]:
        moments, layout = self.family.moments(), self.model.layout
        exact = {} if moments is None else {b.name: b.free(moments[0]) for b in layout.blocks if b.bijector.identity}
        if len(exact) == len(layout.blocks):
            return exact
        draws = layout.constrain(self.draw(MEAN_DRAWS, stream(0, "mean", device=self.model.device)))
        return {name: exact.get(name, x.mean(0)) for name, x in draws.items()}

    def log_prob(self, params: Mapping[str, Tensor]) -> Tensor:
        self.model.layout.refuse_auxiliary("The posterior")
        w = self.model.layout.unconstrain(params)
        value = self.family.log_prob(w) - self.model.layout.log_det(w)
        return torch.where(torch.isnan(w).any(-1), -torch.inf, value)  # outside the support

    def elbo(self, data: Any = None, samples: int = ELBO_DRAWS, seed: int = 0) -> Evidence:
        """Evidence lower bound on log p(D), from many draws over all rows, with its standard error.

        Each draw gives log p(D|w) + log p(w) - log q(w), which hardly varies where q is close to the posterior. If q is
        symmetric around its centre m, draws come in antithetic pairs w, 2 m - w, whose odd errors cancel. It costs
        `samples` passes over the data.

        Args:
            data: Data of the fit. Default: None, those stored with the posterior.
            samples: Number of draws, an integer >= 4.
            seed: Seed of the draws.

        Returns:
            An `Evidence` with value, kind and standard error.
        """
        require(is_integer(samples, 4), "samples", "elbo", "be an integer >= 4", samples)
        samples -= samples % 2  # they may come in antithetic pairs
        rows, generator = self._rows(data, "elbo"), stream(seed, "elbo", device=self.model.device)
        values = torch.cat(list(self._bounds(rows, samples, generator)))
        error, draws = float(values.std() / len(values) ** 0.5), f"{samples} draws"
        kind = f"lower bound on log p(D) (ELBO, {draws})"
        if self.target.prior.improper:
            kind = f"ELBO with an improper prior, up to a constant ({draws})"
        if self.target.temperature != 1:
            kind = f"tempered ELBO, T = {self.target.temperature}, no bound on log p(D) ({draws})"
        return Evidence(float(values.mean()), kind, error)

    def importance(self, data: Any = None, samples: int = K_HAT_DRAWS, seed: int = 0) -> Importance:
        """Importance ratios p(D, w) / q(w) at draws of q, with smoothed weights and k-hat.

        It costs `samples` passes over the data.

        Args:
            data: Data of the fit. Default: None, those stored with the posterior.
            samples: Number of draws, an integer >= 4.
            seed: Seed of the draws.

        Returns:
            An `Importance` with draws, log ratios, smoothed log weights and k-hat.
        """
        require(is_integer(samples, 4), "samples", "importance", "be an integer >= 4", samples)
        return self._importance(self._rows(data, "importance"), samples, seed)

    def _importance(self, rows: Data, samples: int, seed: int) -> Importance:
        generator = stream(seed, "importance", device=self.model.device)
        found = [(w, self._ratios(w, rows)) for w in self._pieces(samples, generator)]
        return Importance(torch.cat([w for w, _ in found]), torch.cat([r for _, r in found]))

    @property
    def k_hat(self) -> float:
        """Pareto k-hat of the importance ratios: above 0.7, q misses part of the posterior.

        Minus infinity where the ratios hardly vary. A posterior from a file has no data: use
        `importance(data).k_hat`.
        """
        return self.compute_k_hat(self._rows(None, "importance")) if self._k_hat is None else self._k_hat

    def compute_k_hat(self, rows: Data) -> float:
        """Compute k-hat from the rows of the fit, and keep it."""
        samples = K_HAT_DRAWS if has_network(self.model) else K_HAT_DRAWS_OF_DENSITY
        self._k_hat = self._importance(rows, samples, 0).k_hat
        return self._k_hat

    @property
    def precisions(self) -> dict[str, Tensor]:
        """Precisions of a hierarchical prior under this q, by parameter name."""
        moments = self.family.moments()
        if moments is None or not has_network(self.model):
            raise InputError("The precisions need a network's prior, and a q whose variances are known.")
        return self.target.prior.precisions(*moments)

    @property
    def certificate(self) -> Certificate | None:
        """Whether the penalty r(mu, scale) on q corresponds to a prior, and if not, why; None if q had a prior."""
        found = self.equivalence
        return None if found is None else found.certificate

    @property
    def equivalence(self) -> Equivalence | None:
        """The prior that the penalty on q, T r at temperature T, corresponds to; None if q had a prior."""
        others = self.target.prior.others if has_network(self.model) else []
        penalties = {id(d.penalty): d.penalty for _, d in others if isinstance(d, VariationalTerm)}
        if not penalties:
            return None
        one = len(penalties) == 1
        require(one, "prior", "the model", "have one penalty on q, as a certificate needs", len(penalties))
        penalty = next(iter(penalties.values()))
        family = getattr(self.family, "base", "gaussian")  # only these families can be trained with a penalty
        return replace(penalty, factor=penalty.factor * self.target.temperature).equivalence(family)

    def evidence(self) -> Evidence:
        return self.elbo()

    def to_json(self) -> dict[str, Any]:
        return {"form": self.form.describe()}

    def tensors(self) -> dict[str, Tensor]:
        return {"theta": self.theta}

    def results(self) -> dict[str, Any]:
        return {**super().results(), "k_hat": self._k_hat, "ended_by_rule": self._ended_by_rule}

    def restore_results(self, results: Mapping[str, Any]) -> None:
        super().restore_results(results)
        self._k_hat = results.get("k_hat")
        self._ended_by_rule = bool(results.get("ended_by_rule", False))

    @classmethod
    def of_tensors(
        cls, target: Target, tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor], **options: Any
    ) -> Variational:
        return cls(target, form_of(options["form"], target.model.layout), tensors["theta"], buffers)

    # Draws, a few at a time.

    def _rows(self, data: Any, owner: str) -> Data:
        source = self.data if data is None else self.model.bind(data)[1]
        if source is None and self.num_data is None:
            source = Data.of(None)  # the data are inside the density
        if source is None:
            raise InputError(f"A posterior from a file has no data: call its {owner}(data), with those of the fit.")
        same = source.num_data == self.num_data
        require(same, "data", owner, f"have the {self.num_data} rows of the fit", source.num_data)
        return source

    def _pieces(self, samples: int, generator: torch.Generator) -> Iterator[Tensor]:
        block_size = max(
            1, min(MAX_BLOCK_DRAWS, (1 << 17) // (self.num_data or 1), (1 << 24) // self.model.layout.size)
        )
        for start in range(0, samples, block_size):
            yield self.draw(min(block_size, samples - start), generator)

    def _bounds(self, rows: Data, samples: int, generator: torch.Generator) -> Iterator[Tensor]:
        """The contributions of each draw, or of each antithetic pair, to the bound."""
        if self.centre is None:
            yield from (self._ratios(w, rows) for w in self._pieces(samples, generator))
            return
        for w in self._pieces(samples // 2, generator):
            yield 0.5 * (self._ratios(w, rows) + self._ratios(2 * self.centre - w, rows))

    def _ratios(self, w: Tensor, rows: Data) -> Tensor:
        """log p(D|w) + log p(w) - log q(w), tempered as the fit was, in double precision, (S,)."""
        with torch.no_grad():
            log_likelihood = self.target.log_likelihood(w, rows, self.buffers)
            cross, entropy = -self.target.with_empirical_precisions(self.family).log_prior(w), -self.family.log_prob(w)
            return assemble(self.target, log_likelihood, cross, entropy, self.model.layout.log_det(w)).value.double()
