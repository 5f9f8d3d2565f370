"""Variational online Newton as a `torch.optim.Optimizer`, for use in any training loop.

    optimizer = VariationalOnlineNewton(net.parameters(), num_data=len(train), prior_precision=100.0)
    for x, y in loader:
        with optimizer.sampled():
            cross_entropy(net(x), y).backward()  # a mean over rows
        optimizer.step()
        optimizer.zero_grad()

The equations are those of `priory.methods.variational.natural`, with diagonal covariance. A loss that is a mean over
rows has the gradient d = -g / N, so with N = `num_data`, at a draw w = m + s eps, s = S^(-1/2),

    F = (mean of N d eps / s + T lambda) / T,  S <- (S + X^2 / S) / 2,   X = beta2 S + (1 - beta2) F
    M <- beta1 M + (1 - beta1) mean of d,      m <- m - lr clip((N M / (1 - beta1^k) + T lambda m) / (T S))

where the means are over the `sampled()` blocks since the last step, with equal weights, and over the processes of
`torch.distributed`; k is the number of steps. Outside the blocks the parameters hold the mean m. Blocks are averaged
here, so gradient accumulation must not divide the loss by the number of blocks, as other optimizers require.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, distributed
from torch.optim import Optimizer

from priory.core.distributed import rank, world
from priory.core.errors import DivergedError, InputError, is_integer, require
from priory.core.streams import stream
from priory.methods.variational.natural import keep_positive, number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

CLASS_NAME = "VariationalOnlineNewton"
GROUP_OPTIONS = (
    "lr",
    "betas",
    "prior_precision",
    "initial_scale",
    "clip",
)  # options that a parameter group may override
TORCH_GROUP_KEYS = ("params", "name", "initial_lr")  # other keys that torch and its schedulers store in a group
HALF_TYPES = (torch.float16, torch.bfloat16)  # types in which a small step of the mean would be rounded away


class VariationalOnlineNewton(Optimizer):
    """Variational online Newton: learns a Gaussian N(m, diag(s^2)) over the parameters instead of a point.

    The mean and precision of parameters without a gradient are left unchanged. Parameters in half precision have a mean
    and a precision in single precision. Parameter groups may override `lr`, `betas`, `prior_precision`, `initial_scale`
    and `clip`.

    With `torch.distributed`, every process draws its own noise, and all end with identical parameters if they started
    with identical ones. Gradients are averaged here, after their product with the noise. DistributedDataParallel
    averages before that product, so it must run in its `no_sync()` context.

    Args:
        params: Parameters, or parameter groups, to optimise.
        num_data: Number of training rows N. Required; the loss is a mean over rows.
        lr: Learning rate of the mean. Default: 0.3.
        prior_precision: Precision lambda of the prior N(0, 1 / lambda). Give this or `weight_decay`. Default: None.
        weight_decay: The prior as a weight decay wd: lambda = N wd. Default: None.
        betas: Decay rates of the averages of the gradient and of the precision, each in [0, 1). Default: (0.9, 0.9995).
        initial_scale: Standard deviation s at the start. Default: a tenth of the prior's standard deviation.
        clip: Largest step of the mean, in units of `lr`. Default: a tenth of the prior's standard deviation.
        temperature: Temperature T of the tempered posterior, proportional to p(D | w)^(1/T) p(w). Default: 1.0.
        seed: Seed of the noise. Default: 0.

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> net = torch.nn.Linear(3, 1)
        >>> optimizer = VariationalOnlineNewton(net.parameters(), num_data=100, prior_precision=1.0)
        >>> with optimizer.sampled():
        ...     net(torch.ones(4, 3)).square().mean().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Iterable[Any],
        num_data: int | None = None,
        lr: float = 0.3,
        prior_precision: float | None = None,
        weight_decay: float | None = None,
        betas: tuple[float, float] = (0.9, 0.9995),
        initial_scale: float | None = None,
        clip: float | None = None,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> None:
        ok = num_data is not None and is_integer(num_data, 1)
        require(ok, "num_data", CLASS_NAME, "be the number of rows, an integer >= 1", num_data)
        assert num_data is not None
        require(positive(temperature), "temperature", CLASS_NAME, "be a positive number", temperature)
        require(is_integer(seed, -(2**63)), "seed", CLASS_NAME, "be an integer", seed)
        one = (prior_precision is None) != (weight_decay is None)
        both = (prior_precision, weight_decay)
        require(one, "prior_precision", CLASS_NAME, "be given, or else weight_decay: one of the two", both)
        if weight_decay is not None:
            require(positive(weight_decay), "weight_decay", CLASS_NAME, "be a positive number", weight_decay)
            prior_precision = num_data * weight_decay
        self.num_data, self.temperature, self.seed = int(num_data), float(temperature), int(seed)
        self.draws = 0  # index of the next draw
        self._blocks = 0  # number of blocks since the last step
        self._inside = False
        self._products: dict[Tensor, Tensor] = {}  # the sum over blocks of d eps, in units of the mean loss
        defaults = {
            "lr": lr,
            "betas": betas,
            "prior_precision": prior_precision,
            "initial_scale": initial_scale,
            "clip": clip,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group.

        Args:
            param_group: The parameters under "params", and the options that differ from the defaults.

        Raises:
            InputError: If an option is unknown or invalid.
        """
        require(
            "weight_decay" not in param_group, "group", CLASS_NAME, "have a prior_precision, N wd", "a weight_decay"
        )
        unknown = ", ".join(str(name) for name in param_group if name not in (*GROUP_OPTIONS, *TORCH_GROUP_KEYS))
        require(not unknown, "group", CLASS_NAME, f"have only the options {', '.join(GROUP_OPTIONS)}", unknown)
        options = {**self.defaults, **param_group}
        for name in ("lr", "prior_precision"):
            require(positive(options[name]), name, CLASS_NAME, "be a positive number", options[name])
        for name in ("initial_scale", "clip"):
            ok = options[name] is None or positive(options[name])
            require(ok, name, CLASS_NAME, "be a positive number or None", options[name])
        betas = options["betas"]
        pair = isinstance(betas, (tuple, list)) and len(betas) == 2
        ok = pair and all(number(beta) and 0 <= beta < 1 for beta in betas)
        require(ok, "betas", CLASS_NAME, "be two numbers in [0, 1)", betas)
        super().add_param_group(param_group)

    # Draws.

    @contextmanager
    def sampled(self, train: bool = True, scaler: Any = None) -> Iterator[None]:
        """A context in which the parameters hold a draw of w; afterwards they hold the mean again, bit for bit.

        The mean is restored also when an exception is raised. The backward pass of a loss that is a mean over rows must
        run inside the block. Several blocks before a step are averaged with equal weights, so their losses must not be
        divided by the number of blocks.

        Args:
            train: Whether gradients count towards the next step; False for predictions.
            scaler: The `torch.amp.GradScaler` that scales the loss, if any.

        Raises:
            InputError: If blocks are nested, gradients are sparse, or no parameter has a gradient at the end of the
                block.
        """
        if self._inside:
            raise InputError("The sampled() blocks of VariationalOnlineNewton must not be nested.")
        groups = {p: group for group in self.param_groups for p in group["params"] if p.requires_grad}
        for p, group in groups.items():
            self._state(p, group)
        if train and all(p.grad is None for p in groups):
            self._discard()  # gradients were cleared by the module's zero_grad
        counts = self._blocks > 0 or not train  # gradients from before the first block are not part of the step
        before = {p: p.grad if counts else None for p in groups}
        means = {p: p.detach().clone() for p in groups}
        self._inside = True
        try:
            noise = self._perturb(groups)
            for p in groups:
                p.grad = None
            yield
            if train:
                self._collect(noise, scaler)
        except BaseException:
            for p in groups:
                p.grad = None  # a block that raised leaves no valid gradient
            raise
        finally:
            with torch.no_grad():
                for p, mean in means.items():
                    p.copy_(mean)
                    p.grad = add(before[p], p.grad) if train else before[p]
            self._inside = False

    @torch.no_grad()
    def _perturb(self, groups: Iterable[Tensor]) -> dict[Tensor, Tensor]:
        """Add s eps to each parameter; the noise is a function of (seed, process, number of the draw)."""
        noise: dict[Tensor, Tensor] = {}
        generators: dict[torch.device, torch.Generator] = {}
        for p in groups:
            if p.device not in generators:
                generators[p.device] = stream(self.seed, "optim", rank(), self.draws, device=p.device)
            state = self.state[p]
            eps = torch.empty_like(state["precision"]).normal_(generator=generators[p.device])
            p.copy_(torch.addcmul(state.get("mean", p), eps, state["precision"].rsqrt()))
            noise[p] = eps
        self.draws += 1
        return noise

    @torch.no_grad()
    def _collect(self, noise: dict[Tensor, Tensor], scaler: Any) -> None:
        """Add d eps of this block to the sum over blocks."""
        scale = 1.0 if scaler is None else float(scaler.get_scale())
        used = [(p, p.grad, eps) for p, eps in noise.items() if p.grad is not None]
        if any(gradient.is_sparse for _, gradient, _ in used):
            raise InputError("The gradients of VariationalOnlineNewton must be dense, got a sparse one.")
        if not used and world() == 1:  # another process may have used other parameters
            raise InputError(
                "The sampled() block of VariationalOnlineNewton must contain the backward pass, but no parameter has a "
                "gradient at its end; use sampled(train=False) for predictions."
            )
        for p, gradient, eps in used:
            product = eps.mul_(gradient).div_(scale)
            self._products[p] = product if p not in self._products else self._products[p].add_(product)
        self._blocks += 1

    # A step.

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], Any]) -> Any: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the mean and the precision from the blocks since the last step.

        Args:
            closure: Function that computes the loss and its gradients; it is called once, in its own `sampled()` block.

        Returns:
            The result of `closure`, or None.

        Raises:
            InputError: If no block preceded the step, or the gradients were cleared.
            DivergedError: If a gradient is not finite.
        """
        if self._inside:
            raise InputError(
                "The step() of VariationalOnlineNewton must come after the sampled() block, not inside it."
            )
        loss = None
        if closure is not None:
            with torch.enable_grad(), self.sampled():
                loss = closure()
        if self._blocks == 0:
            raise InputError("The step() of VariationalOnlineNewton must follow a block 'with optimizer.sampled():'.")
        found = self._averages()
        refuse_cleared([(gradient, product) for _, gradient, product in found.values()])
        refuse_nonfinite([(gradient, product) for _, gradient, product in found.values()])
        for p, (group, gradient, product) in found.items():
            self._update(p, group, gradient, product)
        self._discard()
        return loss

    def _averages(self) -> dict[Tensor, tuple[dict[str, Any], Tensor, Tensor]]:
        """The means of d and of d eps over blocks and processes, for each parameter that was used."""
        found: dict[Tensor, tuple[dict[str, Any], Tensor, bool]] = {}
        for group in self.param_groups:
            for p in group["params"]:
                like, gradient, product = self._state(p, group)["precision"], p.grad, self._products.get(p)
                if gradient is not None and product is not None:
                    found[p] = group, torch.stack([gradient.to(like), product]).div_(self._blocks), True
                elif world() > 1 and p.requires_grad:  # another process may have used it
                    found[p] = group, like.new_zeros(2, *like.shape), False
        if world() > 1:
            for p, (group, pair, used) in found.items():
                everywhere = torch.full((1,), float(used), device=p.device)
                distributed.all_reduce(everywhere)
                distributed.all_reduce(pair)
                found[p] = group, pair.div_(world()), bool(everywhere)
        return {p: (group, pair[0], pair[1]) for p, (group, pair, used) in found.items() if used}

    def _update(self, p: Tensor, group: dict[str, Any], gradient: Tensor, product: Tensor) -> None:
        """Apply the equations of the module's docstring to one parameter, in place."""
        state, prior, weight = self._state(p, group), group["prior_precision"], self.num_data / self.temperature
        mean, precision, momentum = state.get("mean", p), state["precision"], state["momentum"]
        beta1, beta2 = group["betas"]
        state["step"] += 1
        scale = precision.rsqrt()
        spread = torch.mul(scale, prior).add_(product, alpha=weight)  # F s
        keep_positive(precision, spread, scale, 1 - beta2)
        momentum.lerp_(gradient, 1 - beta1)
        move = torch.mul(mean, prior, out=spread).add_(momentum, alpha=weight / (1 - beta1 ** state["step"]))
        reach = group["clip"] or 0.1 * prior**-0.5
        mean.sub_(move.div_(precision).clamp_(-reach, reach), alpha=group["lr"])
        if mean is not p:
            p.copy_(mean)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and discard the blocks since the last step."""
        super().zero_grad(set_to_none)
        self._discard()

    def _discard(self) -> None:
        self._blocks = 0
        self._products.clear()

    # State.

    def _state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """The precision, the average gradient and, in half precision, the mean of a parameter."""
        state = self.state[p]
        if not state:
            kind = torch.float32 if p.dtype in HALF_TYPES else p.dtype
            scale = group["initial_scale"] or 0.1 * group["prior_precision"] ** -0.5
            state["step"] = 0
            state["precision"] = torch.full_like(p, scale**-2, dtype=kind)
            state["momentum"] = torch.zeros_like(p, dtype=kind)
        if p.dtype in HALF_TYPES and not self._inside:
            same = "mean" in state and torch.equal(state["mean"].to(p.dtype), p)
            if not same:  # at the start, or if the user has changed the parameter
                state["mean"] = p.detach().to(torch.float32)
        return state

    def mean(self) -> dict[Tensor, Tensor]:
        """The mean of each parameter, in the dtype of the state."""
        if self._inside:
            raise InputError("The mean() of VariationalOnlineNewton must be called outside the sampled() block.")
        return {p: self._state(p, g).get("mean", p).detach().clone() for g in self.param_groups for p in g["params"]}

    def std(self) -> dict[Tensor, Tensor]:
        """The standard deviation of each parameter."""
        return {p: self._state(p, g)["precision"].rsqrt() for g in self.param_groups for p in g["params"]}

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer including the position in the noise, so a resumed run is identical bit for bit."""
        return {**super().state_dict(), "seed": self.seed, "draws": self.draws}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state from `state_dict`, bit for bit; load the parameters first."""
        keys = state_dict.keys() if hasattr(state_dict, "keys") else ()
        has_keys = {"state", "param_groups", "seed", "draws"} <= set(keys)
        has_keys = has_keys and all(name in group for group in state_dict["param_groups"] for name in GROUP_OPTIONS)
        require(
            has_keys,
            "state_dict",
            CLASS_NAME,
            "come from VariationalOnlineNewton.state_dict()",
            f"another with {', '.join(map(str, keys))}",
        )
        super().load_state_dict(dict(state_dict))
        # torch casts a state to its parameter's dtype, which would round the state of half-precision parameters
        kept = [index for group in state_dict["param_groups"] for index in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for index, p in zip(kept, params, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                self.state[p][name] = value.to(p.device, copy=True) if isinstance(value, Tensor) else value
        self.seed, self.draws = int(state_dict["seed"]), int(state_dict["draws"])
        self._discard()


def add(before: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    """The sum of two gradients, either of which may be missing."""
    return gradient if before is None else before if gradient is None else before.add_(gradient)


def refuse_cleared(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Raise an error if the gradients of the blocks were cleared, while their products with the noise remain."""
    gone = not any(bool(gradient.any()) for gradient, _ in pairs)
    if gone and (not pairs or any(bool(product.any()) for _, product in pairs)):
        raise InputError(
            "The step() of VariationalOnlineNewton must come before the gradients of its blocks are cleared, but no "
            "gradient is left; call zero_grad() after step()."
        )


def refuse_nonfinite(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Raise an error before a step that would make the parameters NaN."""
    for gradient, product in pairs:
        if not math.isfinite(float(gradient.sum() + product.sum())):
            raise DivergedError(
                f"The gradient of a parameter of shape {tuple(gradient.shape)} is not finite, so the step of "
                "VariationalOnlineNewton was not taken; try a lower lr, or a GradScaler in half precision."
            )


def positive(value: object) -> bool:
    """Whether a value is a positive number."""
    return number(value) and 0 < float(value) < math.inf  # pyright: ignore[reportArgumentType] - it is a number
