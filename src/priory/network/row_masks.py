"""Dropout with one mask per row: the log-likelihood and its gradients in the means and in the factors.

One draw of w = m z for a whole batch makes the errors of all rows correlated. But sum_n log p(y_n | x_n, w) is a sum
over rows, so its expectation under q depends only on the distribution of each row's pass. A factor on the inputs of a
layer is a factor on its weights (`priory.network.dropout_sites`). So row n may have its own factors, z_n x_n in front
of the layer, and value and gradients stay unbiased.

Some layers do not allow this: recurrences, weights that are read elsewhere, and layers that do not act on one row per
input. Their weights take the factors of the first row for all rows. Cost: one pass per vector, and a product with the
factors in front of each masked layer. Vectors of a chain of layers are evaluated together
(`priory.network.layer_chain`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from priory.core.data import weighted_sum
from priory.network.layer_chain import chain_outputs
from priory.network.layer_noise import LayerNoise

if TYPE_CHECKING:
    from collections.abc import Mapping

    from priory.core.data import Batch
    from priory.network.dropout_sites import DropoutUnits
    from priory.network.evaluation import Evaluation
    from priory.network.noisy_layers import NoisyLayer


class RowMasks:
    """Passes of a network with one dropout mask per row; a trial pass over `inputs` finds the layers that allow it."""

    def __init__(
        self, evaluation: Evaluation, units: DropoutUnits, inputs: Batch, buffers: Mapping[str, Tensor]
    ) -> None:
        self.evaluation, self.units = evaluation, units
        network = evaluation.network
        self._noise = LayerNoise(network, "flipout")
        if not network.layer_chain:
            self._noise.examine(inputs, buffers)
        ruled = set(network.params) - set(self._noise.fallbacks)
        self._columns: dict[int, slice | Tensor] = {}  # by the identity of a weight: the unit of each of its inputs
        self.once = torch.zeros(len(units.site), dtype=torch.bool, device=network.device)
        start = 0
        for site in units.sites:
            rule = ruled.issuperset(site.parameters)
            self.once[start : start + site.units] = not rule
            for i, name in enumerate(site.parameters if rule else ()):
                at: slice | Tensor = slice(start, start + site.units)
                if site.columns and not torch.equal(site.columns[i].cpu(), torch.arange(site.units)):
                    at = (start + site.columns[i]).to(network.device)
                self._columns[id(network.leaves[name])] = at
            start += site.units
        self._shares = bool(self.once.any())
        self._together = bool(network.layer_chain) and not self._shares

    def log_likelihood_and_grads(
        self, m: Tensor, z: Tensor, batch: Batch, factor: float | Tensor, buffers: Mapping[str, Tensor], along: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """sum_n factor_n log p(y_n | x_n, m z_n) and its gradients, for means (V, P) and factors (V, U, n).

        The gradient in the factors is None unless `along` is true.
        """
        if self._together and len(m) > 1 and self.evaluation.is_chain(batch[:-1]):
            self.evaluation.network.set_mode(train=True)
            return self._chain(m, z, batch, factor, along)
        found = [
            self._one(m[i], z[i], batch, factor, self.evaluation.network.member(buffers, i), along)
            for i in range(len(m))
        ]
        values, toward, slopes = zip(*found, strict=True)
        return torch.stack(values), torch.stack(toward), torch.stack(slopes) if along else None

    def _chain(
        self, m: Tensor, z: Tensor, batch: Batch, factor: float | Tensor, along: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """All vectors together, one batched product per layer."""
        evaluation = self.evaluation
        m, z = m.detach().requires_grad_(), z.detach().requires_grad_(along)
        with torch.enable_grad():
            factors = {weight: z[:, at] for weight, at in self._columns.items()}
            outputs = chain_outputs(evaluation.network, m, batch[0], factors)
            values = weighted_sum(evaluation.log_prob(outputs, batch[-1], m[:, evaluation.learnt], None), factor)
            gradients = torch.autograd.grad(
                values.sum(), (m, z) if along else (m,)
            )  # each value depends on its own vector alone
        return values.detach(), gradients[0], gradients[1] if along else None

    def _one(
        self, m: Tensor, z: Tensor, batch: Batch, factor: float | Tensor, buffers: Mapping[str, Tensor], along: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Value and gradients at one vector (P,) and its factors (U, n)."""
        z = z.detach().requires_grad_(along)
        w, shared = m, None
        if self._shares:
            with torch.enable_grad():
                shared = self.units.spread(torch.where(self.once, z[:, 0], 1.0))
                w = m * shared
        with self._noise.installed(lambda layer, x: self._act(layer, x, z)):
            value, gradient = self.evaluation.values_and_grads(w.detach(), batch, factor, buffers)
        if shared is not None and along:
            w.backward(gradient)
        toward = gradient.clone() if shared is None else gradient * shared.detach()
        return value, toward, torch.zeros_like(z) if z.grad is None else z.grad

    def _act(self, layer: NoisyLayer, x: Tensor, z: Tensor) -> Tensor:
        """The output of a layer at its masked inputs: one factor per row and channel, the same at every position."""
        at = self._columns.get(id(layer.weight))
        if at is not None:
            rows = z[at].mT  # (n, inputs)
            rows = rows if len(rows) == len(x) else rows[:1]
            ones = [1] * (x.ndim - 2)
            x = x * (rows.view(len(rows), *ones, -1) if layer.is_linear else rows.reshape(len(rows), -1, *ones))
        return layer.act(x, layer.weight, layer.bias)
