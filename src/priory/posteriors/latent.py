"""The posterior of EM: a point theta of a latent-variable model, and q(z) for any data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from priory.core.data import check_finite, tensor_of
from priory.core.errors import InputError, is_integer, require
from priory.core.streams import stream
from priory.latent.base import has_latent
from priory.latent.expectation import expect
from priory.posteriors.base import Evidence, Posterior
from priory.posteriors.status import Status, of_ascent, worst
from priory.predictive import GaussianComponents, Prediction

if TYPE_CHECKING:
    from collections.abc import Mapping

    from priory.latent.base import Generated, Latent, Theta
    from priory.models.target import Target

FRAME_PREFIX = "frame."  # in files, of values that the model derives from its data


class LatentPosterior(Posterior):
    """What the posteriors of EM and of variational EM share: the status of an ascent, and the model's frame in files.

    Args:
        target: Target of the fit, whose model is a latent-variable model.
        converged: Whether the fit converged.
    """

    def __init__(self, target: Target, converged: bool) -> None:
        super().__init__(target)
        self.converged = converged

    def compute_status(self, history: Mapping[str, Tensor] | None = None) -> Status:
        """Return the status: whether the bound converged within the tolerance, and problems with the solution."""
        found = of_ascent(self.converged, self.history if history is None else history)
        return found if self._given_status is None else worst([found, self._given_status])

    def bound_of_data(self, model: Latent, theta: Theta) -> float:
        """Return the bound L(q, theta) + log p(theta) over all rows of the fit, for a model or its variational view."""
        if self.data is None:
            raise InputError("The evidence needs the data of the fit, and this posterior was made without them.")
        (found,) = expect(model, [theta], self.data.blocks(model.block))
        return float(found.bound)

    def quick_status(self) -> Status:
        """Return the status, which is quick: whether the fit reached its tolerance before its cap on iterations."""
        return self.status

    @staticmethod
    def framed(target: Target, tensors: Mapping[str, Tensor]) -> Target:
        """Return the target of a file, whose model has the frame that the file stores."""
        model = target.model
        assert has_latent(model)
        assert model.shapes is not None
        same = model.in_shapes(model.shapes, model.dtype, model.device, **without_prefix(tensors, FRAME_PREFIX))
        return target.of_model(same)


def with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return tensors with a prefix before each name."""
    return {prefix + name: t for name, t in tensors.items()}


def without_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names have a prefix, by the rest of the name."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


class LatentPoint(LatentPosterior):
    """A point estimate, delta(theta - theta*), with q(z) = p(z | y, theta*) for any y.

    Args:
        target: Target of the fit, whose model is a latent-variable model.
        theta: Parameters by name.
        log_likelihood: log p(y | theta*) of the data of the fit; None if it is computed when first needed or saved.
        converged: Whether the fit converged.
    """

    kind: ClassVar[str] = "latent"
    point: ClassVar[bool] = True

    def __init__(self, target: Target, theta: Theta, log_likelihood: float | None, converged: bool) -> None:
        super().__init__(target, converged)
        model = target.model
        assert has_latent(model)
        self.latent = model
        self.theta = {name: t.detach().clone() for name, t in theta.items()}
        self._log_likelihood = log_likelihood

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        return self.latent.layout.unconstrain(self.theta).expand(n, -1)

    def sample(self, n: int = 1, seed: int | None = None) -> dict[str, Tensor]:
        """Return theta by name, repeated n times: all draws of a point are equal."""
        require(is_integer(n, 1), "n", "sample", "be an integer >= 1", n)
        return {name: t.expand(n, *t.shape).clone() for name, t in self.theta.items()}

    @property
    def mean(self) -> dict[str, Tensor]:
        return {name: t.clone() for name, t in self.theta.items()}

    @property
    def log_likelihood_at_theta(self) -> float:
        """log p(y | theta*) of all rows of the fit."""
        if self._log_likelihood is None:
            with torch.no_grad():
                prior = float(self.latent.log_prior(self.theta))
            self._log_likelihood = self.bound_of_data(self.latent, self.theta) - prior
        return self._log_likelihood

    def evidence(self) -> Evidence:
        """log p(y | theta*) of the data of the fit. It exceeds log p(y), because theta was fitted to the same data."""
        return Evidence(self.log_likelihood_at_theta, "log-likelihood at theta")

    def predict(self, x: Any, samples: int = 64, seed: int = 0) -> Prediction:
        """Predict y at new inputs by p(y | x, theta*), for a model of y given x.

        Args:
            x: New inputs, (n, ...).
            samples: Number of draws of y; everything else is exact.
            seed: Seed of the draws.

        Returns:
            A `Prediction`.
        """
        require(is_integer(samples, 1), "samples", "predict", "be an integer >= 1", repr(samples))
        inputs = tensor_of(x, "The 'x' argument of predict").to(self.latent.device, self.latent.dtype)
        check_finite(inputs, "inputs")
        if self.latent.parts[0] == "x" and self.latent.shapes is not None:
            shape = self.latent.shapes[0]
            got = tuple(inputs.shape[1:])
            require(got == shape, "x", "predict", f"have rows of the shape {shape}", f"the shape {got}")
        with torch.no_grad():
            weights, means, variances = self.latent.predictive(self.theta, inputs)
        components = GaussianComponents(weights, means, variances, int(samples), int(seed))
        prepare = lambda y: components.likelihood.prepare(y, means.dtype).to(means.device)  # noqa: E731
        return Prediction.of(components, prepare)

    # Functions of data, computed in blocks of rows.

    def responsibilities(self, data: Any) -> Tensor:
        """q(z_n = k) for each row of some data, (n, ..., K)."""
        with torch.no_grad():
            return torch.cat([self.latent.responsibilities(self.theta, rows) for rows in self.latent.blocks(data)])

    def predict_labels(self, data: Any) -> Tensor:
        """The most probable z of each row: for mixtures the component, (n,)."""
        with torch.no_grad():
            return torch.cat([self.latent.most_likely(self.theta, rows) for rows in self.latent.blocks(data)])

    def log_likelihood(self, data: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride] - of a point
        """log p(y_n | theta*) for each row of some data, (n,)."""
        with torch.no_grad():
            return torch.cat([self.latent.e_step(self.theta, rows).log_likelihood for rows in self.latent.blocks(data)])

    def hidden(self, data: Any) -> dict[str, Tensor]:
        """The distribution of z for each row of some data, by name, such as the mean and covariance of factors."""
        with torch.no_grad():
            found = [self.latent.hidden(self.theta, rows) for rows in self.latent.blocks(data)]
        return {name: torch.cat([part[name] for part in found]) for name in found[0]}

    def generate(self, n: int, seed: int = 0, steps: int | None = None) -> Generated:
        """Draw rows from the model at theta*.

        Args:
            n: Number of rows or sequences.
            seed: Seed of the draws.
            steps: Length of sequences. Default: None, that of the data of the fit.

        Returns:
            The rows and their latent variables: `y, z = posterior.generate(100)`.
        """
        require(is_integer(n, 1), "n", "generate", "be an integer >= 1", repr(n))
        able = self.latent.sequences
        must = "be an integer >= 1" if able else f"be left out for {self.latent!r}"
        require(steps is None or (able and is_integer(steps, 1)), "steps", "generate", must, repr(steps))
        with torch.no_grad():
            return self.latent.generate(self.theta, n, stream(seed, "generate", device=self.model.device), steps)

    # Files.

    def tensors(self) -> dict[str, Tensor]:
        return {**self.theta, **with_prefix(self.latent.frame, FRAME_PREFIX)}

    def to_json(self) -> dict[str, Any]:
        known = self._log_likelihood if self.data is None else self.log_likelihood_at_theta
        return {"log_likelihood": known, "converged": self.converged}

    @classmethod
    def of_tensors(
        cls, target: Target, tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor], **options: Any
    ) -> LatentPoint:
        theta = {name: t for name, t in tensors.items() if not name.startswith(FRAME_PREFIX)}
        return cls(cls.framed(target, tensors), theta, options["log_likelihood"], options["converged"])
