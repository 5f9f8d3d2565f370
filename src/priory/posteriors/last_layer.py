"""A Gaussian over the last layer, given the features of the other layers: exact with Gaussian noise, and updatable.

    f(x) ~ N(theta' phi, phi' S phi),    phi = [h(x), 1]

The other layers stay fixed. `update` returns the posterior after more rows, and doesn't need the earlier rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from priory.core.errors import is_integer, require
from priory.curvature.last_layer import LastLayerGaussian, OutputLayer, newton, precision_root
from priory.models.base import has_network
from priory.models.model import rows_given
from priory.posteriors.base import Evidence, Posterior
from priory.posteriors.inputs import explain_input_errors
from priory.posteriors.status import UNKNOWN, Status
from priory.predictive import LINKS, Linearised, Prediction

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from priory.models.target import Target

PRECISION_KEY = "curvature.precision"  # in files


class LastLayerPosterior(Posterior):
    """A Gaussian N(mean, precision^-1) over the weights and bias of the last layer.

    Args:
        target: Target of the fit.
        w: All parameters, unconstrained, (P,).
        belief: Mean and precision of the last layer, in the order of `layer.places`.
        layer: The last layer and its coordinates.
        log_evidence: The evidence of the last layer.
        buffers: The network's buffers. Default: None, those of the model.
    """

    kind: ClassVar[str] = "last_layer"

    def __init__(
        self,
        target: Target,
        w: Tensor,
        belief: LastLayerGaussian,
        layer: OutputLayer,
        log_evidence: float,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__(target, buffers)
        self.w, self.belief, self.layer, self._value = w.detach().clone(), belief, layer, log_evidence
        self.root = precision_root(belief.precision)
        self.covariance = torch.cholesky_inverse(self.root)

    def compute_status(self, history: Mapping[str, Tensor] | None = None) -> Status:
        """Return the method's status: Newton's method reaches the mode, so only the other layers may be unconverged."""
        return self._given_status or UNKNOWN

    def gaussian_coordinates(self) -> tuple[Tensor, Tensor]:
        scale = torch.zeros_like(self.w)
        scale[self.layer.places] = self.covariance.diagonal().sqrt().to(scale.dtype)
        return self.w, scale

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        mean = self.belief.mean
        z = torch.randn(n, len(mean), generator=generator, dtype=mean.dtype, device=mean.device)
        off = torch.linalg.solve_triangular(self.root.T, z.T, upper=True).T  # with covariance (L L')^-1
        w = self.w.repeat(n, 1)
        w[:, self.layer.places] = (mean + off).to(w.dtype)
        return w

    @property
    def mean(self) -> dict[str, Tensor]:
        return self.model.layout.constrain(self.w)

    def predict(self, x: Any, samples: int = 64, seed: int = 0, link: str = "samples") -> Prediction:
        """Predict the targets at new inputs; the outputs are Gaussian.

        Args:
            x: New inputs: a tensor, an array, or a tuple for a network of several inputs.
            samples: Number of draws of the outputs, where there is no closed form.
            seed: Seed of the draws.
            link: For labels, "samples" (default) or one of the closed forms "probit", "extended" and "bridge".

        Returns:
            A `Prediction`.
        """
        require(is_integer(samples, 1), "samples", "predict", "be an integer >= 1", repr(samples))
        require(is_integer(seed, -(2**63)), "seed", "predict", "be an integer", repr(seed))
        require(link in ("samples", *LINKS), "link", "predict", f"be among samples, {', '.join(LINKS)}", repr(link))
        inputs, model = self._inputs(x), self.model
        assert has_network(model)
        labels = link == "samples" or model.likelihood.classes
        require(labels, "link", "predict", f"be 'samples' for {model.likelihood!r}", repr(link))
        with explain_input_errors(inputs):
            phi, outputs = self.layer.features(model, self.w, inputs, self.buffers)
        k = self.layer.outputs
        s = self.covariance.view(k, -1, k, phi.shape[1])
        event = self.target.event
        order = self.layer.order(model.likelihood, event)
        phi = phi.to(s.dtype)
        v = torch.einsum("nd,kdle,ne->nkl", phi, s, phi)[:, order][:, :, order].to(outputs.dtype)
        f = model.likelihood.arrange(outputs, event)
        learnt = model.learnt_at(self.w)
        found = Linearised.of(model.likelihood, f, v, learnt, event, int(seed), int(samples), link)
        return Prediction.of(found, model.prepare_targets)

    def update(self, data: Any) -> LastLayerPosterior:
        """Return the posterior after more rows, with the same features; exact with Gaussian noise.

        Args:
            data: The new rows.

        Returns:
            A new `LastLayerPosterior`.
        """
        model = self.model
        assert has_network(model)
        rows = rows_given(data, "update").prepared(model.prepare)
        with explain_input_errors(inputs := rows.some(1)[:-1]):
            self.layer.features(model, self.w, inputs, self.buffers)
        new = replace(self.target, num_data=rows.num_data)
        w, belief, gained = newton(new, self.layer, self.w, rows, self.belief, self.buffers)
        target = replace(self.target, num_data=(self.num_data or 0) + (rows.num_data or 0))
        found = LastLayerPosterior(target, w, belief, self.layer, self._value + gained, self.buffers)
        found.method, found.seed, found._given_status = self.method, self.seed, self._given_status
        return found

    def evidence(self) -> Evidence:
        assert has_network(self.model)
        exact = self.model.likelihood.slope is not None
        t = self.target.temperature
        what = "log p(D)" if t == 1 else f"the tempered log p(D), T = {t:g}, which is not log p(D),"
        kind = f"{what} of the last layer" if exact else f"Laplace estimate of {what} of the last layer"
        return Evidence(self._value, f"{kind}, given the other layers")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the reference to the layer, in the unpickled network."""
        vars(self).update(state)
        network: Any = self.target.network_model("LastLayer").network
        self.layer = replace(self.layer, module=network.skeleton.get_submodule(self.layer.name))

    def tensors(self) -> dict[str, Tensor]:
        return {"w": self.w, PRECISION_KEY: self.belief.precision, "places": self.layer.places}

    def to_json(self) -> dict[str, Any]:
        layer = self.layer
        return {"layer": layer.name, "outputs": layer.outputs, "biased": layer.biased, "log_evidence": self._value}

    @classmethod
    def in_model_type(cls, tensors: Mapping[str, Tensor], options: Mapping[str, Any]) -> list[Tensor]:
        """Return the weights; the precision is in float64 whatever the model's dtype."""
        return [tensors["w"]]

    @classmethod
    def of_tensors(
        cls, target: Target, tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor], **options: Any
    ) -> LastLayerPosterior:
        assert has_network(target.model)
        module: Any = target.model.network.skeleton.get_submodule(options["layer"])
        layer = OutputLayer(options["layer"], module, tensors["places"], options["outputs"], options["biased"])
        belief = LastLayerGaussian(tensors["w"][layer.places].double(), tensors[PRECISION_KEY])
        return cls(target, tensors["w"], belief, layer, options["log_evidence"], buffers)
