"""The mixture of experts: K linear regressions, and a gate that weights them given x (Jacobs et al., 1991).

    p(y | x) = sum_k g_k(x) N(y; b_k . (x, 1), v_k),      g(x) = softmax(f(x; w))

f is linear, or a network. The experts' M-step is weighted least squares. The gate's M-step has no closed form: its part
of Q, sum_n q_n . log g(x_n; w), is a classification of x with the responsibilities as labels. A quadratic function
bounds it from below, given by its gradient s at w_t and a matrix H that bounds its curvature (Boehning, 1992),

    Q(w)  >=  Q(w_t) + s'(w - w_t) - (w - w_t)' H (w - w_t) / 2,      H = sum_n J_n' (I - 11'/K) J_n / 2,    J = df/dw

which is a sum over rows like every other statistic, so blocks, minibatches and weights work as in every model. The
M-step maximises this quadratic bound: generalised EM. For a linear f the inequality holds everywhere and the bound
never decreases. For a network it holds only where f is approximately linear in w. Steps are therefore damped, but the
bound may still decrease, and a fit with a tolerance then ends.

H is a square matrix with one row per parameter of the gate, so gates must be small networks.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from priory.core.errors import InputError, is_integer, require
from priory.core.flat import Param
from priory.latent.base import Expectation, Latent, Rows, Theta
from priory.latent.gaussian_mixture import columns
from priory.latent.mixture import EMPTY_COMPONENT_ROWS, assigned, restricted
from priory.latent.regression_mixture import RegressionMixture

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

GATE_PREFIX = "gate."  # of the names of the gate's parameters
MAX_JACOBIAN_ENTRIES = 1 << 22  # in memory at a time
LINEAR_DAMPING = 1e-8  # of the mean curvature, because softmax has directions without curvature
NETWORK_DAMPING = 0.1  # of the mean curvature, because the quadratic bound of a network holds near w_t only


class MixtureOfExperts(Latent):
    """A mixture of K linear experts whose weights depend on x through a gate.

    Data are inputs (n, D) or (n,) and targets (n,). The parameters are `coefficients` (K, D), `intercepts` (K,) and
    `variances` (K,) of the experts, and those of the gate, named `gate.weight` and so on.

    Args:
        k: Number of experts K, an integer >= 2.
        gate: A module that maps x (n, D), centred and scaled, to K logits per row. Default: None, a linear gate.
        floor: Smallest variance of an expert, as a fraction of the variance of y. Default: 1e-6.
        given: The parts that follow the rows in the data: "weights", one per row; "z", the known expert of each row,
            -1 where it is hidden; or both. Default: ().

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> MixtureOfExperts(2, gate="linear")
        Traceback (most recent call last):
        ...
        priory.InputError: The 'gate' argument of MixtureOfExperts must be a torch.nn.Module, or None, got 'linear'.
    """

    weighs: ClassVar[bool] = True
    parts: ClassVar[tuple[str, ...]] = ("x", "y")
    labels: ClassVar[bool] = True
    tempers: ClassVar[bool] = True
    samples: ClassVar[bool] = True
    gate: nn.Module  # set when the model is bound to data

    def __init__(
        self, k: int, gate: nn.Module | None = None, floor: float = 1e-6, given: str | Sequence[str] = ()
    ) -> None:
        require(is_integer(k, 2), "k", "MixtureOfExperts", "be an integer >= 2", repr(k))
        ok = gate is None or isinstance(gate, nn.Module)
        require(ok, "gate", "MixtureOfExperts", "be a torch.nn.Module, or None", repr(gate))
        ok = gate is None or any(p.requires_grad for p in gate.parameters())
        require(ok, "gate", "MixtureOfExperts", "have parameters", repr(gate))
        self.experts = RegressionMixture(k, floor, given)
        self.k, self.net, self.given = int(k), copy.deepcopy(gate), self.experts.given
        self.exact = gate is None

    def __repr__(self) -> str:
        return f"MixtureOfExperts({self.k}{'' if self.net is None else f', gate={type(self.net).__name__}'})"

    # Binding the model to data.

    def in_shapes(
        self, shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device, **frame: Tensor
    ) -> Self:
        """Return a copy of the model for rows of these shapes, with the gate in their type."""
        model = copy.copy(self)
        model.experts = self.experts.in_shapes(shapes, dtype, device, **frame)
        wide = shapes[0][0] if shapes[0] else 1
        net = flat_gate(wide, self.k) if self.net is None else copy.deepcopy(self.net)
        model.gate = net.to(device, dtype).eval()
        self._check_gate(model.gate, torch.zeros(2, wide, dtype=dtype, device=device))
        return super(MixtureOfExperts, model).in_shapes(shapes, dtype, device, **frame)

    def _check_gate(self, gate: nn.Module, x: Tensor) -> None:
        try:
            with torch.no_grad():
                shape = tuple(gate(x).shape)
        except (RuntimeError, TypeError, ValueError) as error:
            reason = str(error).strip().split("\n")[0]
            raise InputError(
                f"The 'gate' argument of MixtureOfExperts must take rows of {x.shape[1]} numbers, got an error: "
                f"{reason}"
            ) from error
        must = f"return {self.k} numbers per row"
        require(shape == (2, self.k), "gate", "MixtureOfExperts", must, f"the shape {shape} for 2 rows")

    def params(self, *shapes: tuple[int, ...]) -> dict[str, Param]:
        """The gate's parameters and the experts'."""
        gate = {
            GATE_PREFIX + name: Param(tuple(p.shape)) for name, p in self.gate.named_parameters() if p.requires_grad
        }
        return gate | self.experts.components(*shapes)

    def look(self, rows: Rows) -> dict[str, Tensor]:
        """The centres and scales of x and y."""
        self.experts.frame = self.experts.look(rows)
        return dict(self.experts.frame)

    def check_rows(self, rows: Rows) -> None:
        """Check that known z are indices of experts."""
        self.experts.check_rows(rows)

    # The gate.

    def weights(self, theta: Theta) -> dict[str, Tensor]:
        """The gate's parameters by the names that its module has for them."""
        return {name.removeprefix(GATE_PREFIX): t for name, t in theta.items() if name.startswith(GATE_PREFIX)}

    def log_gate(self, theta: Theta, rows: Rows) -> Tensor:
        """log g_k(x_n), (K, n)."""
        x = self.experts.framed(rows, "x")
        return functional_call(self.gate, self.weights(theta), (x,)).log_softmax(1).mT

    def parabola(self, theta: Theta, rows: Rows, q: Tensor) -> dict[str, Tensor]:
        """Return the coefficients of the lower bound c + l'w - w'H w / 2 of the gate's Q, for weighted q (K, n)."""
        named = self.weights(theta)
        w = torch.cat([t.reshape(-1) for t in named.values()])
        x, log_g = self.experts.framed(rows, "x"), self.log_gate(theta, rows)
        counts = q.sum(0)
        value, surplus = (q * log_g).sum(), q - counts * log_g.exp()  # and dQ/df, (K, n)
        each = vmap(jacrev(lambda named, row: functional_call(self.gate, named, (row[None],))[0]), (None, 0))
        slope, curvature = torch.zeros_like(w), w.new_zeros(len(w), len(w))
        many = max(1, MAX_JACOBIAN_ENTRIES // (self.k * len(w)))
        for part, some, count in zip(x.split(many), surplus.split(many, 1), counts.split(many), strict=True):
            jacobian = torch.cat([t.flatten(2) for t in each(named, part).values()], 2)  # (m, K, P)
            slope += torch.einsum("km,mkp->p", some, jacobian)
            centred = jacobian - jacobian.mean(1, keepdim=True)
            curvature += 0.5 * (centred * count[:, None, None]).flatten(0, 1).mT @ centred.flatten(0, 1)
        turned = curvature @ w
        constant = value - slope @ w - 0.5 * turned @ w
        return {"gate": constant, "gate_slope": slope + turned, "gate_curvature": curvature}

    # The equations.

    def e_step(self, theta: Theta, rows: Rows) -> Expectation:
        """Compute the responsibilities, the experts' statistics and the gate's quadratic bound."""
        features = self.experts.features(rows)
        logits = self.experts.natural(theta) @ features
        which = self.experts.narrow_components(theta)
        if len(which):
            logits[which] = self.experts.direct(theta, rows, which)
        found = assigned(logits + self.log_gate(theta, rows), rows)
        q = found.q_counted(rows)
        return Expectation({"sums": q @ features.mT, **self.parabola(theta, rows, q)}, found.bound, found.gap)

    def complete(self, theta: Theta, statistics: Mapping[str, Tensor]) -> Tensor:
        """Q = sum_kf S_kf eta_kf + c + l'w - w'H w / 2."""
        s = statistics
        w = torch.cat([t.reshape(-1) for t in self.weights(theta).values()]).to(s["gate_slope"].dtype)
        gate = s["gate"] + s["gate_slope"] @ w - 0.5 * w @ s["gate_curvature"] @ w
        return (s["sums"] * self.experts.natural(theta)).sum() + gate

    def m_step(self, statistics: Mapping[str, Tensor], theta: Theta) -> Theta:
        """Solve weighted least squares for the experts, and maximise the gate's quadratic bound."""
        fresh = self.experts.m_step({"sums": statistics["sums"]}, theta)
        old = {name: t.to(statistics["gate_slope"].dtype) for name, t in theta.items() if name.startswith(GATE_PREFIX)}
        w = torch.cat([t.reshape(-1) for t in old.values()])
        curvature = statistics["gate_curvature"]
        damping = (LINEAR_DAMPING if self.net is None else NETWORK_DAMPING) * curvature.diagonal().mean().clamp_min(
            EMPTY_COMPONENT_ROWS
        )
        slope = statistics["gate_slope"] - curvature @ w
        step = torch.linalg.solve(curvature + damping * torch.eye(len(w), dtype=w.dtype, device=w.device), slope)
        sizes = [t.numel() for t in old.values()]
        for (name, t), part in zip(old.items(), step.split(sizes), strict=True):
            fresh[name] = t + part.reshape(t.shape)
        return {name: fresh[name].to(self.dtype) for name in self.layout.names}

    def log_joint(self, theta: Theta, rows: Rows) -> Tensor:
        """log p(y_n, z_n = k | x_n, theta), (K, n)."""
        return self.experts.natural(theta) @ self.experts.features(rows) + self.log_gate(theta, rows)

    def log_marginal(self, theta: Theta, rows: Rows) -> Tensor:
        """Return log p(y_n | x_n, theta), (n,), differentiable by autograd."""
        return restricted(self.log_joint(theta, rows), rows.z).logsumexp(0)

    def responsibilities(self, theta: Theta, rows: Rows) -> Tensor:
        """q(z_n = k) = p(z_n = k | x_n, y_n, theta), (n, K)."""
        return restricted(self.log_joint(theta, rows), rows.z).softmax(0).mT

    def predictive(self, theta: Theta, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of y at new x (n, D): the gate's weights, the experts' means and their variances, each (n, K)."""
        x = columns(x)
        means = x @ theta["coefficients"].mT + theta["intercepts"]
        return self.log_gate(theta, Rows({"x": x})).exp().mT, means, theta["variances"].expand_as(means)

    # Initialisation and warnings.

    def begin(self, rows: Rows, how: str, generator: torch.Generator) -> Theta:
        """Initialise the experts as a mixture of regressions, and the gate with its module's parameters."""
        gate_params = {GATE_PREFIX + name: p.detach().clone() for name, p in self.gate.named_parameters()}
        found = gate_params | self.experts.begin(rows, how, generator)
        return {name: found[name] for name in self.layout.names}

    def allows(self, theta: Theta) -> bool:
        """Whether all variances are above the floor."""
        return self.experts.allows(theta)

    def problems(self, theta: Theta, statistics: Mapping[str, Tensor]) -> list[str]:
        """Warn about experts without rows, and about experts whose variance is at the floor."""
        counts = statistics["sums"][:, -1]
        sentences = self.experts.problems(
            theta | {"weights": torch.where(counts > EMPTY_COMPONENT_ROWS, counts, 0.0)}, statistics
        )
        return [sentence.replace(repr(self.experts), repr(self)) for sentence in sentences]


def flat_gate(wide: int, k: int) -> nn.Linear:
    """Return a linear gate with zero parameters, which weights all experts equally."""
    gate = nn.Linear(wide, k, device="meta").to_empty(device="cpu")  # draws nothing from the global stream
    nn.init.zeros_(gate.weight)
    nn.init.zeros_(gate.bias)
    return gate
