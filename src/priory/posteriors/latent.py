"""A point in theta and, for any data, q(z): what EM leaves of a latent-variable model."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Normal

from priory.core.data import check_finite, tensor_of
from priory.core.errors import require, whole
from priory.core.streams import stream
from priory.latent.base import Latent
from priory.latent.sequences import SequenceModel
from priory.posteriors.base import Evidence, Posterior
from priory.posteriors.status import Status, of_ascent, worst

if TYPE_CHECKING:
    from collections.abc import Mapping

    from priory.latent.base import Generated, Theta
    from priory.models.target import Target

BISECTIONS = 60
FRAME = "frame."  # what a file puts before the names of what the model keeps of its data


@dataclass(frozen=True)
class MixturePrediction:
    """A mixture of Gaussians for y at each of n inputs: weights, means and variances, each (n, K)."""

    weights: Tensor
    means: Tensor
    variances: Tensor

    @property
    def mean(self) -> Tensor:
        """E[y | x], (n,)."""
        return (self.weights * self.means).sum(1)

    @property
    def aleatoric(self) -> Tensor:
        """Var[y | x], within components and between them, (n,)."""
        return (self.weights * (self.variances + (self.means - self.mean[:, None]).square())).sum(1)

    @property
    def epistemic(self) -> Tensor:
        """Zero: a point has no doubt about theta."""
        return torch.zeros_like(self.mean)

    @property
    def variance(self) -> Tensor:
        """The whole of it: epistemic + aleatoric."""
        return self.epistemic + self.aleatoric

    @property
    def std(self) -> Tensor:
        """The root of the variance."""
        return self.variance.sqrt()

    def log_prob(self, y: Any) -> Tensor:
        """log p(y | x) a row, (n,)."""
        given = tensor_of(y, "The 'y' of log_prob").to(self.means)
        must = f"have the shape {tuple(self.mean.shape)}"
        require(given.shape == self.mean.shape, "y", "log_prob", must, tuple(given.shape))
        each = Normal(self.means, self.variances.sqrt()).log_prob(given[:, None])
        return (each + self.weights.log()).logsumexp(1)

    def quantile(self, q: float) -> Tensor:
        """Where a share q of y lies below, (n,), by bisection."""
        require(isinstance(q, Real) and 0 < q < 1, "q", "quantile", "lie between 0 and 1", repr(q))
        components = Normal(self.means, self.variances.sqrt())
        ends = components.icdf(torch.as_tensor(q, dtype=self.means.dtype))
        low, high = ends.amin(1), ends.amax(1)  # the mixture's quantile lies among its components'
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            below = (self.weights * components.cdf(middle[:, None])).sum(1) < q
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return (low + high) / 2

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """The ends between which y lies with this probability, as much outside on each side."""
        require(isinstance(level, Real) and 0 < level < 1, "level", "interval", "lie between 0 and 1", repr(level))
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)


class LatentPoint(Posterior):
    """delta(theta - theta*), with q(z) = p(z | y, theta*) for whatever y is asked of."""

    kind: ClassVar[str] = "latent"
    point: ClassVar[bool] = True

    def __init__(self, target: Target, theta: Theta, log_likelihood: float, converged: bool) -> None:
        super().__init__(target)
        model = target.model
        assert isinstance(model, Latent)
        self.latent = model
        self.theta = {name: t.detach().clone() for name, t in theta.items()}
        self.log_likelihood_at_theta, self.converged = log_likelihood, converged

    def judged(self, history: Mapping[str, Tensor] | None = None) -> Status:
        """Whether the bound has settled within the tolerance, and what the model thinks of where."""
        found = of_ascent(self.converged, self.history if history is None else history)
        return found if self._known is None else worst([found, self._known])

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        return self.latent.layout.unconstrain(self.theta).expand(n, -1)

    def sample(self, n: int = 1, seed: int | None = None) -> dict[str, Tensor]:
        """n times theta, by name: a point has no other draws. Exactly theta, also at the edge of its support."""
        require(whole(n, 1), "n", "sample", "be an integer >= 1", n)
        return {name: t.expand(n, *t.shape).clone() for name, t in self.theta.items()}

    @property
    def mean(self) -> dict[str, Tensor]:
        return {name: t.clone() for name, t in self.theta.items()}

    def evidence(self) -> Evidence:
        """log p(y | theta*) of the data of the fit: higher than log p(y), as theta was chosen by it."""
        return Evidence(self.log_likelihood_at_theta, "log-likelihood at theta")

    def predict(self, x: Any, samples: int = 64, seed: int = 0) -> MixturePrediction:  # pyright: ignore
        """p(y | x, theta*) at new inputs, for a model of y given x; exact, so that nothing is sampled."""
        inputs = tensor_of(x, "The 'x' argument of predict").to(self.latent.device, self.latent.dtype)
        check_finite(inputs, "inputs")
        if self.latent.parts[0] == "x" and self.latent.shapes is not None:
            shape = self.latent.shapes[0]
            got = tuple(inputs.shape[1:])
            require(got == shape, "x", "predict", f"have rows of the shape {shape}", f"the shape {got}")
        with torch.no_grad():
            return MixturePrediction(*self.latent.predictive(self.theta, inputs))

    # Of data, in blocks.

    def responsibilities(self, data: Any) -> Tensor:
        """q(z_n = k) for each row of some data, (n, ..., K)."""
        with torch.no_grad():
            return torch.cat([self.latent.responsibilities(self.theta, rows) for rows in self.latent.blocks(data)])

    def predict_labels(self, data: Any) -> Tensor:
        """The z of each row that is most likely: for mixtures the component, (n,)."""
        with torch.no_grad():
            return torch.cat([self.latent.most_likely(self.theta, rows) for rows in self.latent.blocks(data)])

    def log_likelihood(self, data: Any) -> Tensor:
        """log p(y_n | theta*) for each row of some data, (n,)."""
        with torch.no_grad():
            return torch.cat([self.latent.e_step(self.theta, rows).log_likelihood for rows in self.latent.blocks(data)])

    def hidden(self, data: Any) -> dict[str, Tensor]:
        """What is known of z for each row of some data, by name, such as the mean and covariance of factors."""
        with torch.no_grad():
            found = [self.latent.hidden(self.theta, rows) for rows in self.latent.blocks(data)]
        return {name: torch.cat([part[name] for part in found]) for name in found[0]}

    def generate(self, n: int, seed: int = 0, steps: int | None = None) -> Generated:
        """n rows from the model at theta*, and the z that each came from: `y, z = posterior.generate(100)`.

        Sequences have so many `steps`, or as many as those of the fit had.
        """
        require(whole(n, 1), "n", "generate", "be an integer >= 1", repr(n))
        able = isinstance(self.latent, SequenceModel)
        must = "be an integer >= 1" if able else f"be left out for {self.latent!r}"
        require(steps is None or (able and whole(steps, 1)), "steps", "generate", must, repr(steps))
        with torch.no_grad():
            return self.latent.generate(self.theta, n, stream(seed, "generate", device=self.model.device), steps)

    # Files.

    def tensors(self) -> dict[str, Tensor]:
        return {**self.theta, **{FRAME + name: t for name, t in self.latent.frame.items()}}

    def own(self) -> dict[str, Any]:
        return {"log_likelihood": self.log_likelihood_at_theta, "converged": self.converged}

    @classmethod
    def of_tensors(
        cls, target: Target, tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor], **own: Any
    ) -> LatentPoint:
        model = target.model
        assert isinstance(model, Latent)
        assert model.shapes is not None
        frame = {name.removeprefix(FRAME): t for name, t in tensors.items() if name.startswith(FRAME)}
        theta = {name: t for name, t in tensors.items() if not name.startswith(FRAME)}
        same = model.in_shapes(model.shapes, model.dtype, model.device, **frame)
        return cls(target.of_model(same), theta, own["log_likelihood"], own["converged"])
