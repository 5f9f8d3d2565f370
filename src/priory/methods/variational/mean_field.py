"""Mean-field variational inference: the closest factorised distribution.

After Graves (2011), Kingma and Welling (2014) and Blundell et al. (2015).

    q(w) = prod_i N(w_i; m_i, s_i^2),   maximise   elbo = E_q[log p(D|w)] - T KL(q || p)

With w = m + s eps, eps ~ N(0, I), and g = d log p(D|w) / dw at the draw, the loss -elbo has the gradients

    d/dm_i     = -g_i + T lambda_i (m_i - m0_i)
    d/dlog s_i = -g_i eps_i s_i + T (lambda_i s_i^2 - 1)

for a Gaussian prior of location m0 and precision lambda. Laplace priors and penalties on q have closed forms as well
(`estimators.expected`); other priors are evaluated at the draw, like the likelihood. Sticking the landing (Roeder 2017)
evaluates the prior and log q at the draw too: with G_i = g_i - T lambda_i (w_i - m0_i) + T eps_i / s_i the gradients
are -G_i and -G_i eps_i s_i, and both vanish where q is the posterior.

For these two estimators, and for noise at the layers (`network.layer_noise`), the step works in place on one (2, *B, P)
tensor of means and log standard deviations, with no autograd through the sampling. It is tested against the definition
`estimators.elbo`. Other estimators, objectives and families use the step of `VariationalMethod`. Cost of a step:
`samples` passes of the network and O(samples P).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from priory.core.errors import InputError, PrioryWarning, require
from priory.estimators.expected import NORMAL_ENTROPY, Expected, check, expected
from priory.estimators.gradients import LAYER_ESTIMATORS
from priory.families import DiagonalFamily, DiagonalForm, FactorisedForm, PerParameterForm
from priory.families.factorised import BASE_DISTRIBUTIONS
from priory.methods.base import Info
from priory.methods.optimise import Adam, rates
from priory.methods.variational.arrival import ArrivalState, arrives, best_gaussian
from priory.methods.variational.base import VariationalMethod, VariationalState, inner, parts
from priory.methods.variational.fixed_draws import begin_fixed_draws
from priory.methods.variational.frame import Frame
from priory.models.base import has_network
from priory.network.layer_noise import LayerNoise
from priory.posteriors import DiagonalGaussian, Posterior, Variational

if TYPE_CHECKING:
    from priory.core.data import Batch
    from priory.estimators.gradients import Estimate
    from priory.families import Form
    from priory.methods.base import Plan
    from priory.methods.variational.arrival import Search
    from priory.models.target import Target

TRIAL_ROWS = 32  # in the trial passes that find layers without a noise rule
PER_PARAMETER_SCALE = 0.5  # initial scale for a dict: a narrow Beta or Gamma has large arguments, and learns slowly


@dataclass
class MeanFieldState:
    """Variational parameters, Adam's moments, and work tensors that every step overwrites."""

    variational: Tensor = field(metadata={"lead": 1})  # (2, *B, P): means, log standard deviations
    adam: Adam = field(metadata={"lead": 1})
    buffers: dict[str, Tensor]
    kept: Tensor | None = field(metadata={"lead": 1})  # (S, *B, P), the noise that the next step mirrors
    base: Tensor | None = field(metadata={"lead": 1})  # (S, *B, P), flipout's eps for two batches, each with its signs
    layers: LayerNoise | None = field(metadata={"fixed": True})
    expected: Expected | None = field(metadata={"fixed": True})  # terms of the loss that need no draws
    noise: Tensor = field(metadata={"scratch": True})  # (S, *B, P), as drawn
    w: Tensor = field(metadata={"scratch": True})  # (S, *B, P)
    scale: Tensor = field(metadata={"scratch": True})  # (*B, P)
    gradient: Tensor = field(metadata={"scratch": True})  # (2, *B, P), of the loss


@dataclass(frozen=True)
class MeanField(VariationalMethod):
    """Mean-field variational inference: the closest fully factorised distribution.

    Maximises the evidence lower bound (ELBO)

        elbo = E_q[log p(D|w)] - T KL(q || p),    q(w) = prod_i N(w_i; mean_i, scale_i^2)

    with reparameterised draws w = mean + scale eps. Underestimates the variances of correlated parameters; use
    `FullRank`, `LowRank` or `Laplace` where that matters. A step costs `samples` passes and O(samples P).

    A Gaussian q of a `Density` is fitted by Newton steps with fixed draws until it has converged, unless the user gives
    `steps`, `epochs`, or options of the stochastic steps.

    Args:
        family: Distribution of every coordinate: "gaussian", "laplace", "logistic" or "uniform"; or, for a `Density`, a
            dict from parameter names to classes of `torch.distributions` on their supports, such as {"p": Beta}.
            Parameters missing from the dict are Gaussian in unconstrained coordinates. Default: "gaussian".
        estimator: Gradient estimator, one of `priory.estimators.ESTIMATORS`: "pathwise", "sticking", "local",
            "flipout", "score", "score_baseline", "leave_one_out" or "vargrad"; "pathwise" or "doubly" for the
            objective "iwae". Default: None, "pathwise" ("sticking" for a dict of distributions).
        antithetic: Whether draws come in pairs eps, -eps, whose odd errors cancel. With an odd number of samples the
            next step mirrors this step's draws. Default: None, pairs where `samples` is even.
        initial_scale: Initial standard deviations of q, in standard deviations of the prior. Default: None, 0.02, so
            that noise doesn't hide the network in the first steps; 0.5 for a dict of distributions.

    Example:
        >>> import torch
        >>> import priory as pr
        >>> X = torch.linspace(-1, 1, 50)[:, None]
        >>> model = pr.Model(torch.nn.Linear(1, 1), pr.Gaussian(0.1))
        >>> posterior = pr.fit(model, (X, X[:, 0]), pr.MeanField(), steps=1000, progress=False)
        >>> round(posterior.mean["weight"].item(), 1)
        1.0
        >>> low, high = posterior.predict(X).interval(0.95)
        >>> bool(((low < X[:, 0]) & (X[:, 0] < high)).all())
        True

    References:
        Graves (2011), Practical variational inference for neural networks.
        Kingma and Welling (2014), Auto-encoding variational Bayes.
        Blundell et al. (2015), Weight uncertainty in neural networks.
        Roeder, Wu and Duvenaud (2017), Sticking the landing: simple, lower-variance gradient estimators for variational
        inference.
    """

    family: Any = "gaussian"

    layered: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        known = ("gaussian", *BASE_DISTRIBUTIONS)
        ok = isinstance(self.family, dict) or self.family in known
        must = f"be one of {', '.join(known)}, or a dict from parameters to distributions"
        require(ok, "family", "MeanField", must, repr(self.family))
        plain = self.family == "gaussian" or self.estimator not in LAYER_ESTIMATORS
        require(plain, "family", "MeanField", f"be 'gaussian' for the estimator {self.estimator!r}", repr(self.family))
        # the support of a uniform depends on its scale, so its score doesn't have the mean zero that others rely on
        usable = self.family != "uniform" or self.bound.estimator == "pathwise"
        require(usable, "estimator", "MeanField", "be 'pathwise' for the family 'uniform'", repr(self.estimator))

    @property
    def usual(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] - depends on the family
        return "sticking" if isinstance(self.family, dict) else "pathwise"

    @property
    def lean(self) -> bool:
        """Whether the in-place step applies."""
        lean = self.bound.estimator in ("pathwise", "sticking", *LAYER_ESTIMATORS)
        return self.family == "gaussian" and lean and self.objective == "elbo" and self.divergence is None

    @property
    def gaussian(self) -> str | None:
        return "diagonal" if self.family == "gaussian" else None

    def begin_fixed(self, target: Target, search: Search, generator: torch.Generator, shape: torch.Size) -> Any:
        if isinstance(self.family, dict):
            return None
        best, form = best_gaussian(search, full=False), self.form(target)
        frame, zero = Frame(best.q.loc, best.q.root), torch.zeros_like(best.q.loc)
        theta = form.initial(zero, torch.ones_like(zero), generator)
        return begin_fixed_draws(form, theta, frame, search, target.size, shape, best.status_of_rivals())

    def form(self, target: Target) -> Form:
        if isinstance(self.family, dict):
            if has_network(target.model):
                raise InputError(
                    "The 'family' argument of MeanField must be one for every weight of a network, got a dict."
                )
            names = {name: getattr(made, "__name__", made) for name, made in self.family.items()}
            return PerParameterForm(names, target.model.layout)
        return DiagonalForm(target.size) if self.family == "gaussian" else FactorisedForm(target.size, self.family)

    def first_scale(self, target: Target) -> Tensor:
        if isinstance(self.family, dict) and self.initial_scale is None:
            return PER_PARAMETER_SCALE * target.prior.typical_scale()
        return super().first_scale(target)

    def init(
        self,
        target: Target,
        plan: Plan,
        generator: torch.Generator,
        shape: torch.Size = torch.Size(),
        start: Posterior | None = None,
    ) -> MeanFieldState | VariationalState | ArrivalState:
        check(target, self)
        # noise at the layers, and draws that are mirrored over two steps, are taken by the steps in place alone
        in_place = self.estimator in LAYER_ESTIMATORS or (self.adjusted and self.antithetic and self.samples % 2)
        if not self.lean or (arrives(target, plan) and not in_place):
            return super().init(target, plan, generator, shape, start)
        loc = target.start(plan.data, shape, generator, start)
        variational = torch.stack([loc, torch.empty_like(loc)])
        variational[1] = torch.log(self.first_scale(target))
        learning = rates(self.schedule, self.learning_rate, plan.steps, "MeanField")
        work = loc.new_empty(self.samples, *loc.shape)
        return MeanFieldState(
            variational,
            Adam.of(variational, learning),
            target.buffers(shape, start),
            kept=torch.zeros_like(work) if self.antithetic and self.samples % 2 else None,
            base=torch.zeros_like(work) if self.estimator == "flipout" else None,
            layers=self._layers(target, plan),
            expected=expected(target, NORMAL_ENTROPY, closed=self.estimator != "sticking"),
            noise=work,
            w=torch.empty_like(work),
            scale=torch.empty_like(loc),
            gradient=torch.empty_like(variational),
        )

    def _layers(self, target: Target, plan: Plan) -> LayerNoise | None:
        """Prepare noise at the layers, with a warning where some layers have no rule for it."""
        if self.estimator not in LAYER_ESTIMATORS:
            return None
        model = target.model
        needs = f"a Model for the estimator {self.estimator!r}"
        require(has_network(model), "model", "MeanField", f"be {needs}", type(model).__name__)
        assert has_network(model)
        noise = LayerNoise(model.network, self.estimator)  # pyright: ignore[reportArgumentType] - one of the two
        noise.examine(tuple(plan.data.some(TRIAL_ROWS)[:-1]), model.buffers())
        if noise.fallbacks:
            warnings.warn(noise.note, PrioryWarning, stacklevel=5)
        return noise

    def step(self, target: Target, state: Any, batch: Batch, generator: torch.Generator) -> tuple[Any, Info]:
        if not isinstance(state, MeanFieldState):
            return super().step(target, state, batch, generator)
        if state.layers is not None:
            return self._step_at_layers(target, state, batch, generator)
        w = self.draw(state, generator)
        value, gradient = target.log_likelihood_and_grad(w, batch, state.buffers)
        return self.update(target, state, w, value, gradient)

    def posterior(self, target: Target, state: Any, draws: Tensor | None = None) -> Variational:
        if isinstance(state, MeanFieldState):
            gaussian = DiagonalGaussian(target, DiagonalFamily(*state.variational), state.buffers)
            self.warn_if_flat(gaussian)
            return gaussian
        found = super().posterior(target, state, draws)
        if isinstance(found, DiagonalGaussian) or not isinstance(found.family, DiagonalFamily):
            return found
        return DiagonalGaussian.of(found)

    def estimate(self, target: Target, family: Any, batch: Batch, state: Any, generator: torch.Generator) -> Estimate:
        other = isinstance(self.family, str) and self.family != "gaussian"
        known = expected(target, BASE_DISTRIBUTIONS[self.family].entropy if other else NORMAL_ENTROPY, closed=False)
        if known is None:
            return super().estimate(target, family, batch, state, generator)
        return known.joined(
            target, family, super().estimate(known.without_closed_forms(target), family, batch, state, generator)
        )

    # The two halves of a step, for custom training loops.

    def draw(self, state: MeanFieldState, generator: torch.Generator) -> Tensor:
        """Draw w = m + s eps, (*B, P), or (S, *B, P) for several samples; valid until the next draw."""
        m, log_s = state.variational
        torch.exp(log_s, out=state.scale)
        if state.kept is not None:
            if state.adam.step % 2:
                torch.neg(state.kept, out=state.noise)
            else:
                state.kept.copy_(state.noise.normal_(generator=generator))
        elif self.samples % 2 or self.antithetic is False:
            state.noise.normal_(generator=generator)
        else:
            half = state.noise[: self.samples // 2].normal_(generator=generator)
            torch.neg(half, out=state.noise[self.samples // 2 :])
        torch.addcmul(m, state.noise, state.scale, out=state.w)
        return state.w[0] if self.samples == 1 else state.w

    def update(
        self, target: Target, state: MeanFieldState, w: Tensor, value: Tensor, gradient: Tensor
    ) -> tuple[MeanFieldState, Info]:
        """Descend the loss, given log p(D|w) and its gradient at the draws that `draw` returned."""
        if target.empirical:
            target = target.with_empirical_precisions(DiagonalFamily(*state.variational))
        if state.expected is not None:
            target = state.expected.without_closed_forms(target)
        value, gradient, others, volume = self._add_priors_at_draws(target, w, value, gradient)
        if self.estimator == "sticking":
            square = self._sticking_descent(target, state, gradient)
        else:
            push = gradient
            if self.samples > 1:
                push, gradient = (gradient * state.noise).mean(0), gradient.mean(0)
            square = self._descent(target, state, gradient, push, None if self.samples > 1 else state.noise[0])
        others = self._add_closed_forms(target, state, others)
        metrics = parts(target, value, square, state.variational[1].sum(-1), others, volume)
        state.adam.descend(state.variational, state.gradient)
        return state, Info(metrics)

    def _add_priors_at_draws(
        self, target: Target, w: Tensor, value: Tensor, gradient: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Add the prior terms evaluated at the draws to the gradient; average the values over draws."""
        a, t, others, volume = target.prior_weight, target.entropy_weight, None, None
        if target.prior.others:
            others, others_gradient = target.others_and_grad(w)
            gradient = gradient.add(others_gradient, alpha=a)
        if a != t and target.model.layout.constrained:
            volume, volume_gradient = target.volume_and_grad(w)
            gradient = gradient.add(volume_gradient, alpha=t - a)
        if self.samples > 1:
            value = value.mean(0)
            others, volume = (None if part is None else part.mean(0) for part in (others, volume))
        return value, gradient, others, volume

    def _descent(
        self, target: Target, state: MeanFieldState, gradient: Tensor, push: Tensor, noise: Tensor | None
    ) -> Tensor:
        """Write the gradient of the loss from g and from g eps (`push`, to be multiplied by `noise` if given).

        Returns sum_i lambda_i ((m - m0)^2 + s^2), which the closed form of the bound needs.
        """
        prior, a, t = target.prior, target.prior_weight, target.entropy_weight
        m = state.variational[0]
        toward, spread = state.gradient[0], state.gradient[1]  # in the means, in the log standard deviations
        deviation = m if prior.centred else m - prior.loc
        torch.mul(deviation, prior.precision, out=toward)
        torch.mul(state.scale, prior.precision, out=spread)
        square = inner(toward, deviation) + inner(spread, state.scale)
        if a != 1:
            state.gradient.mul_(a)
        toward.sub_(gradient)
        spread = spread.sub_(push) if noise is None else spread.addcmul_(push, noise, value=-1)
        spread.mul_(state.scale).sub_(t)
        return square

    def _add_closed_forms(self, target: Target, state: MeanFieldState, others: Tensor | None) -> Tensor | None:
        """Add the gradient of terms that need no draws; return E_q[log p] of the non-Gaussian priors with them."""
        if state.expected is None:
            return others
        known = state.expected.descend(target.prior_weight, state.variational[0], state.scale, state.gradient)
        return -known if others is None else others - known

    def _sticking_descent(self, target: Target, state: MeanFieldState, gradient: Tensor) -> Tensor:
        """Write the sticking-the-landing gradient of the loss: prior and log q at the draws, q fixed inside log q."""
        prior, a, t = target.prior, target.prior_weight, target.entropy_weight
        m = state.variational[0]
        toward, spread = state.gradient
        deviation = m if prior.centred else m - prior.loc
        torch.mul(deviation, prior.precision, out=toward)
        torch.mul(state.scale, prior.precision, out=spread)
        square = inner(toward, deviation) + inner(spread, state.scale)
        # lambda (w - m0) = toward + spread eps, so that -G = a toward - g + (a spread - t / s) eps
        torch.reciprocal(state.scale, out=state.w[0])
        slope = torch.sub(spread.mul_(a) if a != 1 else spread, state.w[0], alpha=t, out=state.w[0])
        if a != 1:
            toward.mul_(a)
        if self.samples == 1:
            toward.sub_(gradient).addcmul_(slope, state.noise[0])
            torch.mul(toward, state.noise[0], out=spread)
        else:
            each = (toward - gradient).addcmul_(slope, state.noise)
            torch.mean(each, 0, out=toward)
            torch.mean(each.mul_(state.noise), 0, out=spread)
        spread.mul_(state.scale)
        return square

    def _step_at_layers(
        self, target: Target, state: MeanFieldState, batch: Batch, generator: torch.Generator
    ) -> tuple[MeanFieldState, Info]:
        """Take a step with noise at the layers: gradients in m and s, averaged over samples, one member at a time."""
        m, log_s = state.variational
        torch.exp(log_s, out=state.scale)
        if target.empirical:
            target = target.with_empirical_precisions(DiagonalFamily(m, log_s))
        if state.expected is not None:
            target = state.expected.without_closed_forms(target)
        noise = None
        if state.base is not None and state.adam.step % 2 == 0:
            state.base.normal_(generator=generator)
        if m.ndim == 1 and self.samples == 1:
            value, gradient, push, noise = self._noisy_pass(target, state, m, state.scale, batch, generator, 0, 0)
        else:
            size, found = m.shape[-1], []
            for i, (loc, scale) in enumerate(zip(m.reshape(-1, size), state.scale.reshape(-1, size), strict=True)):
                passes = (
                    self._noisy_pass(target, state, loc, scale, batch, generator, i, s) for s in range(self.samples)
                )
                each = [(v, g.clone(), s.clone() if e is None else s * e) for v, g, s, e in passes]
                found.append([torch.stack(part).mean(0) for part in zip(*each, strict=True)])
            value, gradient, push = (torch.stack(part) for part in zip(*found, strict=True))
            value, gradient, push = value.reshape(m.shape[:-1]), gradient.view_as(m), push.view_as(m)
        others, volume = None, None
        if target.prior.others or (target.prior_weight != target.entropy_weight):
            w = self.draw(state, generator)  # a prior without a closed form is evaluated at plain draws
            _, extra, others, volume = self._add_priors_at_draws(
                target, w, torch.zeros_like(w[..., 0]), torch.zeros_like(w)
            )
            push, noise = (push, None) if noise is None else (push * noise, None)
            along = extra * (state.noise if self.samples > 1 else state.noise[0])
            gradient = gradient + (extra.mean(0) if self.samples > 1 else extra)
            push = push + (along.mean(0) if self.samples > 1 else along)
        square = self._descent(target, state, gradient, push, noise)
        others = self._add_closed_forms(target, state, others)
        metrics = parts(target, value, square, log_s.sum(-1), others, volume)
        state.adam.descend(state.variational, state.gradient)
        return state, Info(metrics)

    def _noisy_pass(
        self,
        target: Target,
        state: MeanFieldState,
        loc: Tensor,
        scale: Tensor,
        batch: Batch,
        generator: torch.Generator,
        member: int,
        sample: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return log p(D|w) of one noisy pass and its gradients in the means and in the scales.

        The gradient in the scales may come as two factors. The next pass overwrites these tensors.
        """
        model = target.model
        assert has_network(model)
        assert state.layers is not None
        buffers = model.member(state.buffers, member)
        noise = None if state.base is None else state.base.view(self.samples, -1, loc.shape[-1])[sample, member]
        return state.layers.in_parts(
            model.evaluation, loc, scale, batch, target.factor(batch), buffers, generator, noise
        )
