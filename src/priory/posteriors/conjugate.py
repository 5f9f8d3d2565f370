"""The posterior of variational EM: q(theta) in closed form, and q(z) for any data, of a conjugate model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from priory.core.data import as_batch, check_finite
from priory.core.errors import InputError, is_integer, require
from priory.core.streams import stream
from priory.latent.conjugate import has_conjugate_prior
from priory.likelihoods import Gaussian
from priory.posteriors.base import Evidence
from priory.posteriors.latent import FRAME_PREFIX, LatentPosterior, with_prefix, without_prefix
from priory.predictive import Prediction

if TYPE_CHECKING:
    from collections.abc import Mapping

    from priory.latent.base import Generated, Rows
    from priory.latent.conjugate import Phi
    from priory.models.target import Target

PHI_PREFIX = "q."  # in files, of the parameters of q


class ConjugatePosterior(LatentPosterior):
    """A closed-form q(theta) of a conjugate latent-variable model.

    Args:
        target: Target of the fit, whose model has conjugate priors.
        phi: Parameters of q(theta) by name.
        bound: The bound of the data of the fit; None if it is computed when first needed or saved.
        converged: Whether the fit converged.
    """

    kind: ClassVar[str] = "conjugate"

    def __init__(self, target: Target, phi: Phi, bound: float | None, converged: bool) -> None:
        super().__init__(target, converged)
        model = target.model
        assert has_conjugate_prior(model)
        self.latent = model
        self.phi = {name: t.detach().clone() for name, t in phi.items()}
        self._bound = bound

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        return self.latent.layout.unconstrain(self.latent.sample_q(self.phi, n, generator))

    def sample(self, n: int = 1, seed: int | None = None) -> dict[str, Tensor]:
        """Draw parameters by name, directly from q.

        Args:
            n: Number of draws.
            seed: Seed of the draws. Default: None, every call continues the posterior's own stream.

        Returns:
            Parameters by name, each (n, *shape).
        """
        require(is_integer(n, 1), "n", "sample", "be an integer >= 1", n)
        if seed is None and self._generator is None:
            self._generator = stream(self.seed, "sample", device=self.model.device)
        generator = self._generator if seed is None else stream(seed, "sample", device=self.model.device)
        assert generator is not None
        return self.latent.sample_q(self.phi, n, generator)

    @property
    def mean(self) -> dict[str, Tensor]:
        return {name: t.clone() for name, t in self.latent.mean_q(self.phi).items()}

    def log_prob(self, params: Mapping[str, Tensor]) -> Tensor:
        """log q(theta) at named parameters."""
        self.latent.layout.unconstrain(params)  # raises an error for names and shapes that are not the model's
        return self.latent.log_q(self.phi, dict(params))

    @property
    def bound(self) -> float:
        """The bound L(q) of all rows of the fit."""
        if self._bound is None:
            self._bound = self.bound_of_data(self.latent.view, self.phi)
        return self._bound

    def evidence(self) -> Evidence:
        """The bound L(q): log p(y) exceeds it by KL(q || p(z, theta | y))."""
        return Evidence(self.bound, "lower bound")

    @property
    def log_evidence_of_labels(self) -> Evidence:
        """The bound plus the log of the number of equivalent relabellings: k! for a mixture of k components.

        q is close to one of the relabelled modes. A mixture over all of them approximates the posterior equally well
        around each, and its bound is higher by exactly this term if they don't overlap (Bishop 2006, section 10.2.4).
        Use it to compare numbers of components.
        """
        return Evidence(self.bound + self.latent.symmetry(self.phi), "lower bound with all exchanges of labels")

    # Functions of data, computed in blocks of rows.

    def responsibilities(self, data: Any) -> Tensor:
        """Return q(z_n = k) for each row of some data, (n, K)."""
        function = getattr(self.latent, "responsibilities_q", None)
        if function is None:
            raise InputError(f"{self.latent!r} has no responsibilities: its z is not one of K components.")
        with torch.no_grad():
            return torch.cat([function(self.phi, rows) for rows in self.latent.blocks(data)])

    def predict_labels(self, data: Any) -> Tensor:
        """Return the most probable component of each row, (n,)."""
        return self.responsibilities(data).argmax(1)

    def hidden(self, data: Any) -> dict[str, Tensor]:
        """Return the distribution of z for each row of some data, by name: for mixtures the responsibilities."""
        return {"responsibilities": self.responsibilities(data)}

    def generate(self, n: int, seed: int = 0) -> Generated:
        """Draw n rows of the predictive density, and the z of each: `y, z = posterior.generate(100)`.

        Each row has its own draw of theta.
        """
        require(is_integer(n, 1), "n", "generate", "be an integer >= 1", repr(n))
        with torch.no_grad():
            return self.latent.generate_q(self.phi, int(n), stream(seed, "generate", device=self.model.device))

    def log_predictive(self, data: Any, samples: int = 256, seed: int = 0) -> Tensor:
        """Return the log predictive density of each row, log E_q[p(y_n | theta)], in closed form or from draws.

        Args:
            data: Rows of data.
            samples: Number of draws of theta, where there is no closed form.
            seed: Seed of the draws.

        Returns:
            Log densities, (n,).
        """
        require(is_integer(samples, 1), "samples", "log_predictive", "be an integer >= 1", repr(samples))
        with torch.no_grad():
            return torch.cat([self._predictive(rows, int(samples), seed) for rows in self.latent.blocks(data)])

    def predict(self, x: Any, samples: int = 64, seed: int = 0) -> Prediction:
        """Predict y at new inputs, for a regression.

        Args:
            x: New inputs, (n, ...).
            samples: Number of draws of theta.
            seed: Seed of the draws.

        Returns:
            A `Prediction`.
        """
        function = getattr(self.latent, "outputs", None)
        if function is None:
            raise InputError(f"{self.latent!r} has no inputs to predict from: use log_predictive or sample.")
        require(is_integer(samples, 1), "samples", "predict", "be an integer >= 1", repr(samples))
        assert self.latent.shapes is not None
        (inputs,) = as_batch((x,), "of x")
        must, got = f"have rows of the shape {self.latent.shapes[0]}", f"the shape {tuple(inputs.shape)}"
        require(tuple(inputs.shape[1:]) == self.latent.shapes[0] and len(inputs) > 0, "x", "predict", must, got)
        check_finite(inputs, "inputs")
        draws = self.latent.sample_q(self.phi, int(samples), stream(seed, "predict", device=self.model.device))
        model = self.latent
        outputs, noise = function(draws, inputs.to(model.device, model.dtype))
        likelihood = Gaussian()
        prepare = lambda y: likelihood.prepare(y, model.dtype).to(model.device)  # noqa: E731
        return Prediction.of_draws(likelihood, outputs, {"noise": noise}, torch.Size(), prepare, int(seed))

    def _predictive(self, rows: Rows, samples: int, seed: int) -> Tensor:
        exact = self.latent.predictive_q(self.phi, rows)
        if exact is not None:
            return exact
        draws = self.latent.sample_q(self.phi, samples, stream(seed, "predict", device=self.model.device))
        each = [self.latent.log_marginal({name: t[i] for name, t in draws.items()}, rows) for i in range(samples)]
        return torch.stack(each).logsumexp(0) - torch.tensor(float(samples)).log()

    # Files.

    def tensors(self) -> dict[str, Tensor]:
        return {**with_prefix(self.phi, PHI_PREFIX), **with_prefix(self.latent.frame, FRAME_PREFIX)}

    def to_json(self) -> dict[str, Any]:
        return {"bound": self._bound if self.data is None else self.bound, "converged": self.converged}

    @classmethod
    def of_tensors(
        cls, target: Target, tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor], **options: Any
    ) -> ConjugatePosterior:
        return cls(
            cls.framed(target, tensors), without_prefix(tensors, PHI_PREFIX), options["bound"], options["converged"]
        )
