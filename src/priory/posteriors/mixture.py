"""A mixture of posteriors, q(w) = sum_k a_k q_k(w): ensembles, stacked posteriors, model averages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor

from priory.core.distributed import gather, world
from priory.core.errors import InputError, is_integer, require
from priory.core.streams import stream
from priory.models.base import has_network
from priory.posteriors.base import BLOCK_ELEMENTS, KINDS, Evidence, Posterior
from priory.posteriors.inputs import explain_input_errors
from priory.posteriors.point import Point
from priory.posteriors.pointwise import DEFAULT_DRAWS, rows_of
from priory.posteriors.prior_function import PriorFunction, predicted
from priory.posteriors.status import Status, of_members
from priory.predictive import Prediction, predict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from priory.models.base import BaseModel
    from priory.models.target import Target

BUFFER_PREFIX = "buffer."  # in files, of a member's buffers
WEIGHT_SUM_TOLERANCE = 1e-4  # of given weights


class Mixture(Posterior):
    """A weighted mixture of posteriors.

    Members may belong to different models that predict the same targets. Such a mixture predicts, but has no draws of
    parameters.

    Args:
        members: The posteriors.
        weights: Weights, (K,), which sum to one. Default: None, equal weights.
    """

    kind: ClassVar[str] = "mixture"

    def __init__(self, members: Sequence[Posterior], weights: Tensor | Sequence[float] | None = None) -> None:
        ok = len(members) > 0 and all(isinstance(member, Posterior) for member in members)
        require(ok, "members", "Mixture", "be one posterior or more", repr(members))
        super().__init__(members[0].target)
        self.members = list(members)
        given = [1 / len(members)] * len(members) if weights is None else weights
        a = torch.as_tensor(given, dtype=self.model.dtype, device=self.model.device).detach()
        got = [round(value, 6) for value in a.reshape(-1).tolist()]
        ok = a.shape == (len(members),) and bool((a >= 0).all()) and abs(float(a.sum()) - 1) < WEIGHT_SUM_TOLERANCE
        require(ok, "weights", "Mixture", f"be {len(members)} numbers >= 0 that add up to one", got)
        self.weights = a / a.sum()
        self.one_model = all(same(self.model, member.model) for member in members)

    def compute_status(self, history: Mapping[str, Tensor] | None = None) -> Status:
        """The worst status of the members; members that were fitted together share the history."""
        if self._given_status is not None:
            return self._given_status
        shared = history or self.history
        return of_members([m.status if m.history or not shared else m.compute_status(shared) for m in self.members])

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """Return n draws, (n, P), each from a member chosen by its weight."""
        return self._draw(torch.multinomial(self.weights, n, replacement=True, generator=generator), generator)

    def starts(self, n: int, generator: torch.Generator) -> Tensor:
        """Return n draws, (n, P); with equal weights, from the members in turn, in random order."""
        if not self._equal():
            return self.draw(n, generator)
        count, device = len(self.members), self.model.device
        order = torch.randperm(count, generator=generator, device=generator.device).to(device)
        return self._draw(order[torch.arange(n, device=device) % count], generator)

    def _draw(self, members_of_draws: Tensor, generator: torch.Generator) -> Tensor:
        """Return one draw from each of the members with the given indices (n,), as (n, P)."""
        self._of_one_model("draws")
        n = len(members_of_draws)
        w = torch.empty(n, self.target.size, dtype=self.model.dtype, device=self.model.device)
        for k, member in enumerate(self.members):
            own_draws = (members_of_draws == k).nonzero().squeeze(1)
            if len(own_draws):
                w[own_draws] = member.draw(len(own_draws), generator)
        return w

    def predict(self, x: Any, samples: int = 64, seed: int = 0) -> Prediction:
        """Predict the targets at new inputs: the weighted average of the members' predictions.

        Args:
            x: New inputs: a tensor, an array, or a tuple for a network of several inputs.
            samples: Number of draws of the weights, shared among the members.
            seed: Seed of the draws.

        Returns:
            A `Prediction`.
        """
        require(is_integer(samples, 1), "samples", "predict", "be an integer >= 1", repr(samples))
        if self._alike():
            return self._predict_points(x, seed)
        parts = []
        for k, (member, a) in enumerate(zip(self.members, self.weights.tolist(), strict=True)):
            if a > 0:
                parts.append(member.predict(x, samples=max(1, round(samples * a)), seed=seed + k))
        return Prediction.average(parts, self.weights[self.weights > 0])

    def log_likelihood(self, data: Any = None, samples: int | None = None, seed: int = 0) -> Tensor:
        """Pointwise log-likelihood at draws of the members, each chosen by its weight and with its own buffers.

        Args:
            data: Data in the form that `fit` takes. Default: None, the data of the fit.
            samples: Number of draws. Default: None, 1,000.
            seed: Seed of the draws.

        Returns:
            The values in nats, (draw, row).
        """
        ok = samples is None or is_integer(samples, 1)
        require(ok, "samples", "log_likelihood", "be an integer >= 1", repr(samples))
        rows = rows_of(self, data, "log_likelihood")
        generator = stream(seed, "log_likelihood", device=self.model.device)
        chosen = torch.multinomial(self.weights, samples or DEFAULT_DRAWS, replacement=True, generator=generator)
        counts = chosen.bincount(minlength=len(self.members)).tolist()
        found = []
        for member, count in zip(self.members, counts, strict=True):
            if count:
                drawn = member.log_likelihood(rows if data is None else data, count, seed + len(found))
                found.append(drawn.expand(count, -1))  # a point has one draw
        return torch.cat(found)

    def _alike(self) -> bool:
        """Whether the members are points of one network with equal weights."""
        first = type(self.members[0])
        points = first in (Point, PriorFunction) and all(type(m) is first and not m.buffers for m in self.members)
        return points and self.one_model and self._equal()

    def _equal(self) -> bool:
        """Whether all weights are equal."""
        return bool((self.weights == self.weights[0]).all())

    def _predict_points(self, x: Any, seed: int) -> Prediction:
        """Predict with members that are points, with as few calls of the network as possible."""
        require(is_integer(seed, -(2**63)), "seed", "predict", "be an integer", repr(seed))
        inputs, members, target = self._inputs(x), cast("Any", self.members), self.target
        block_size = max(1, BLOCK_ELEMENTS // target.size)
        groups = [members[start : start + block_size] for start in range(0, len(members), block_size)]
        w = (torch.stack([member.w for member in group]) for group in groups)
        if isinstance(members[0], PriorFunction):
            a = (torch.stack([member.a for member in group]) for group in groups)
            prediction = predicted(target, w, a, inputs, {}, seed)
        else:
            assert has_network(self.model)
            with explain_input_errors(inputs):
                prediction = predict(self.model, w, inputs, {}, target.event, seed)
        self._check_rows(inputs, len(prediction))
        return prediction.of_all_components()

    @property
    def mean(self) -> dict[str, Tensor]:
        self._of_one_model("mean")
        means = [member.mean for member in self.members]
        pairs = list(zip(self.weights, means, strict=True))
        return {name: sum((a * mean[name] for a, mean in pairs), torch.zeros_like(x)) for name, x in means[0].items()}

    def log_prob(self, params: Mapping[str, Tensor]) -> Tensor:
        self._of_one_model("density")
        each = torch.stack([member.log_prob(params) for member in self.members], -1)
        return torch.logsumexp(each + self.weights.log(), -1)

    def evidence(self) -> Evidence:
        raise InputError(f"{self.method or 'A mixture'} gives no evidence: use that of its members.")

    def tensors(self) -> dict[str, Tensor]:
        found = {"weights": self.weights}
        for k, member in enumerate(self.members):
            found |= {f"{k}.{name}": t for name, t in member.tensors().items()}
            found |= {f"{k}.{BUFFER_PREFIX}{name}": t for name, t in member.buffers.items()}
        return found

    def to_json(self) -> dict[str, Any]:
        self._of_one_model("file")
        methods = [member.method for member in self.members]
        return {"members": [[member.kind, member.to_json()] for member in self.members], "methods": methods}

    @classmethod
    def in_model_type(cls, tensors: Mapping[str, Tensor], options: Mapping[str, Any]) -> list[Tensor]:
        """The weights of the mixture, and the tensors of each member whose dtype must be the model's."""
        found = [tensors["weights"]]
        for k, (kind, member_options) in enumerate(options["members"]):
            member_tensors, member_buffers = of_member(tensors, k)
            found += [*KINDS[kind].in_model_type(member_tensors, member_options), *member_buffers.values()]
        return found

    @classmethod
    def of_tensors(
        cls, target: Target, tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor], **options: Any
    ) -> Mixture:
        members = []
        for k, (kind, member_options) in enumerate(options["members"]):
            member_tensors, member_buffers = of_member(tensors, k)
            members.append(KINDS[kind].of_tensors(target, member_tensors, member_buffers, **member_options))
        for member, method in zip(members, options.get("methods", []), strict=False):  # older files don't have them
            member.method = method
        return cls(members, tensors["weights"])

    def join(self) -> None:
        """Gather the members of all processes, in the order of the processes."""
        gathered = []
        for process in range(world()):
            for member in self.members:
                tensors = {name: gather(t[None])[process] for name, t in member.tensors().items()}
                buffers = {name: gather(t[None])[process] for name, t in member.buffers.items()}
                gathered.append(type(member).of_tensors(member.target, tensors, buffers, **member.to_json()))
                gathered[-1].method = member.method
        self.members = gathered
        self.weights = self.weights.repeat(world()) / world()

    def _of_one_model(self, what: str) -> None:
        if not self.one_model:
            raise InputError(
                f"A mixture over different models has no {what} of its own: use predict, or that of its 'members'."
            )

    def __repr__(self) -> str:
        return f"Mixture({len(self.members)} x {self.members[0]!r}{self._status_text()})"


def of_member(tensors: Mapping[str, Tensor], index: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors and the buffers of one member, from those of a file."""
    prefix = f"{index}."
    both = {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}
    buffers = {name[len(BUFFER_PREFIX) :]: both.pop(name) for name in list(both) if name.startswith(BUFFER_PREFIX)}
    return both, buffers


def same(model: BaseModel, other: BaseModel) -> bool:
    """Whether a parameter vector has the same meaning in both models: layout, likelihood, network, fixed tensors."""
    if model is other:
        return True
    if model.describe() != other.describe():
        return False
    first, second = (m.fixed() if has_network(m) else {} for m in (model, other))
    return first.keys() == second.keys() and all(torch.equal(t, second[name]) for name, t in first.items())
