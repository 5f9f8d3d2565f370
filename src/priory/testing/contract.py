"""The contract of a method, as clauses that a test runs one by one.

    @pytest.mark.parametrize("clause", CLAUSES, ids=lambda clause: clause.__name__)
    def test_my_method_keeps_the_contract(clause):
        clause(MyMethod())

Each clause is a function of a method that raises AssertionError if the method breaks the contract. The problems are
small: all clauses together take seconds. A clause with a `problem` argument can be run on another model and data than
the default network, for example for methods that fit latent-variable models.
"""

from __future__ import annotations

import copy
import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from priory.core.data import Data
from priory.core.errors import InputError
from priory.core.streams import stream
from priory.fitting.checkpoint import Checkpoint
from priory.fitting.fit import fit
from priory.fitting.prepare import make_target
from priory.fitting.run import Run
from priory.fitting.store import load
from priory.likelihoods import Categorical, Gaussian
from priory.methods.base import Info, Method, Plan, Traits
from priory.models.model import Model
from priory.models.target import Target
from priory.posteriors import Mixture, Posterior
from priory.testing.exact import Coin, GaussianMean

MEMBER_SHAPES = (torch.Size(), torch.Size([3]), torch.Size([2, 3]))
FIT_STEPS = 12
BATCH_SIZE = 7  # rows; of 20, so that the last batch is smaller


# The small problems.


def classification() -> tuple[Model, tuple[Tensor, Tensor]]:
    """Return a network for three classes in two dimensions, and 20 rows."""
    generator = stream(0, "contract")
    X = torch.randn(20, 2, generator=generator)
    y = torch.arange(20) % 3
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))
    seeded(net, generator)
    return Model(net, Categorical(), prior="fan_in"), (X + y[:, None], y)


def batch_normalised() -> tuple[Model, tuple[Tensor, Tensor]]:
    """Return a network whose batch normalisation writes buffers in training, and the rows of `classification`."""
    _, data = classification()
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))
    seeded(net, stream(2, "contract"))
    return Model(net, Categorical(), prior="fan_in"), data


def regression(dtype: torch.dtype) -> tuple[Model, tuple[Tensor, Tensor]]:
    """Return a network with one output and a learnt noise scale, and 20 rows."""
    generator = stream(1, "contract")
    X = torch.randn(20, 2, generator=generator, dtype=dtype)
    y = X[:, 0] - X[:, 1] + 0.1 * torch.randn(20, generator=generator, dtype=dtype)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).to(dtype)
    seeded(net, generator)
    return Model(net, Gaussian(), prior=1.0), (X, y)


def seeded(net: nn.Module, generator: torch.Generator) -> None:
    """Draw the weights from a given generator, so that a clause doesn't depend on the global one."""
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=generator, dtype=p.dtype))


Problem = Callable[[], tuple[Any, Any]]


# The clauses.


def is_a_frozen_dataclass_of_options(method: Method[Any]) -> None:
    """Hyperparameters can't change during a fit, and an unknown one raises an error that names it."""
    assert isinstance(method, Method), f"{type(method).__name__} lacks a member of Method."
    assert dataclasses.is_dataclass(method), f"{type(method).__name__} is not a dataclass."
    assert type(method).__dataclass_params__.frozen, f"{type(method).__name__} is not frozen."  # pyright: ignore
    refusal = ""
    try:
        type(method)(**{"no_such_option": 1})
    except InputError as error:
        refusal = str(error)
    assert "no_such_option" in refusal, "An unknown option was not refused by name."


def keeps_what_its_traits_declare(method: Method[Any], problem: Problem = classification) -> None:
    """Methods that declare chains return draws, and methods that follow another have a default start."""
    traits, name = method.traits, type(method).__name__
    assert isinstance(traits, Traits), f"The traits of {name} are not of the class Traits."
    assert traits == method.traits, f"The traits of {name} change from call to call."
    target, plan = prepared(method, *problem())
    taken = Run(target, method, plan, 0)
    taken.run()
    draws = len(taken.draws)
    assert (draws > 0) == traits.chains, f"{name} declares chains={traits.chains}, and gave {draws} draws."
    assert traits.spread or not traits.chains, f"The chains of {name} must run on every process: declare spread=True."
    named, wanted = method.default_start(target.model), traits.follows and not traits.fixed_start
    assert (named is not None) == wanted, f"{name} declares follows={traits.follows}, and starts from {named!r}."


def trains_or_refuses_buffers(method: Method[Any]) -> None:
    """The posterior has the statistics of batch normalisation, or the network is rejected with an error."""
    model, data = batch_normalised()
    if not method.traits.trains_buffers:
        refusal = ""
        try:
            fit(model, data, method, steps=FIT_STEPS, progress=False)
        except InputError as error:
            refusal = str(error)
        assert "buffers that training writes" in refusal, "A network with batch normalisation was not refused."
        return
    before = {name: b.clone() for name, b in model.net.named_buffers()}
    posterior = fit(model, data, method, steps=FIT_STEPS, progress=False)
    for member in posterior.members if isinstance(posterior, Mixture) else [posterior]:
        trained = [name for name, b in member.buffers.items() if not torch.equal(b, before[name])]
        assert trained, "The buffers of the network were not trained."
    for name, b in model.net.named_buffers():
        assert torch.equal(b, before[name]), f"The buffer '{name}' of the network changed."


def leads_its_metrics_with_the_shape(method: Method[Any], problem: Problem = classification) -> None:
    """Every chain and member has its own metrics, in a leading shape."""
    for shape in MEMBER_SHAPES:
        _, infos = run(method, *problem(), shape)
        for name, value in numbers(infos[-1]).items():
            assert value.shape == shape, f"'{name}' has the shape {tuple(value.shape)} for members {tuple(shape)}."
            assert bool(torch.isfinite(value).all()), f"'{name}' is not finite."


def keeps_members_apart(method: Method[Any], problem: Problem = classification) -> None:
    """A member with NaN doesn't change the other members."""
    model, data = problem()
    _, whole = run(method, model, data, torch.Size([3]))
    _, broken = run(method, model, data, torch.Size([3]), poison=1)
    for sound, poisoned in zip(whole, broken, strict=True):
        for name, value in numbers(sound).items():
            same = torch.allclose(value[[0, 2]], numbers(poisoned)[name][[0, 2]], rtol=1e-5, atol=1e-5)
            assert same, f"'{name}' of a member changed because another member has NaN."


def gives_the_same_bits_for_the_same_seed(method: Method[Any], problem: Problem = classification) -> None:
    """Two fits with the same seed give identical posteriors."""
    model, data = problem()
    first, second = (
        fit(model, data, method, steps=FIT_STEPS, batch_size=BATCH_SIZE, seed=3, progress=False) for _ in range(2)
    )
    same(first, second)


def resumes_with_the_same_bits(method: Method[Any], problem: Problem = classification) -> None:
    """A fit that was interrupted and resumed gives the same posterior as one that was not interrupted."""
    model, data = problem()
    options: dict[str, Any] = {"steps": FIT_STEPS, "batch_size": BATCH_SIZE, "progress": False}
    whole = fit(model, data, method, **options)
    with tempfile.TemporaryDirectory() as folder:
        keep = Checkpoint(Path(folder) / "fit", every=5)

        def interrupt(progress: Any) -> None:
            if progress.step >= FIT_STEPS // 2:
                raise KeyboardInterrupt

        try:
            fit(model, data, method, checkpoint=keep, callbacks=[interrupt], **options)
        except KeyboardInterrupt:
            same(whole, fit(model, data, method, checkpoint=keep, **options))
        else:
            raise AssertionError("The fit was not interrupted.")


def leaves_the_module_alone(method: Method[Any]) -> None:
    """A fit doesn't change the user's network."""
    model, data = classification()
    before = copy.deepcopy(model.net.state_dict())
    fit(model, data, method, steps=FIT_STEPS, progress=False).predict(data[0])
    for name, value in model.net.state_dict().items():
        assert torch.equal(value, before[name]), f"'{name}' of the network changed."
    assert all(p.grad is None for p in model.net.parameters()), "A gradient was left on the network."


def names_and_shapes_its_draws(method: Method[Any]) -> None:
    """Draws and means have the names, shapes and type of the network's parameters, and include learnt parameters."""
    for dtype in (torch.float32, torch.float64):
        model, data = regression(dtype)
        posterior = fit(model, data, method, steps=FIT_STEPS, progress=False)
        draws, mean = posterior.sample(5), posterior.mean
        wanted = {**{n: tuple(p.shape) for n, p in model.net.named_parameters()}, "likelihood.noise": ()}
        assert {n: tuple(t.shape) for n, t in draws.items()} == {n: (5, *s) for n, s in wanted.items()}
        assert {n: tuple(t.shape) for n, t in mean.items()} == wanted
        assert all(t.dtype == dtype for t in (*draws.values(), *mean.values())), "The type changed."
        assert bool((draws["likelihood.noise"] > 0).all()), "A noise was not positive."


def predicts_in_the_shape_of_the_targets(method: Method[Any]) -> None:
    """Predictions have the shape of the targets, and their variance is the sum of its two parts."""
    model, data = regression(torch.float64)
    for y in (data[1], data[1][:, None]):
        prediction = fit(model, (data[0], y), method, steps=FIT_STEPS, progress=False).predict(data[0], samples=8)
        assert prediction.mean.shape == y.shape
        assert torch.equal(prediction.variance, prediction.epistemic + prediction.aleatoric)
        assert prediction.log_prob(y).shape == (len(y),)


def survives_a_round_trip_through_a_file(method: Method[Any], problem: Problem = classification) -> None:
    """A loaded posterior is identical to the one that was saved."""
    model, data = problem()
    posterior = fit(model, data, method, steps=FIT_STEPS, progress=False)
    with tempfile.TemporaryDirectory() as folder:
        posterior.save(Path(folder) / "posterior")
        same(posterior, load(Path(folder) / "posterior", model))


def records_one_value_per_step(method: Method[Any], problem: Problem = classification) -> None:
    """The history has one finite value per step for each metric, among them the method's objective."""
    steps = prepared(method, *problem())[1].steps  # with those of a warm-up
    model, data = problem()
    history = fit(model, data, method, steps=FIT_STEPS, progress=False).history
    assert {"loss", "bound", "acceptance"} & history.keys(), f"The history has only {list(history)}."
    for name, values in history.items():
        assert values.shape == (steps,), f"'{name}' has the shape {tuple(values.shape)} after {steps} steps."
        assert bool(torch.isfinite(values).all()), f"'{name}' is not finite."


def finds_the_mean_of_a_gaussian(method: Method[Any], steps: int | None = None) -> None:
    """For the mean of a Gaussian, the posterior mean is exact to a tenth of the posterior standard deviation."""
    exact = GaussianMean.make(0)
    found = fit(exact.density(), exact.data, method, steps=steps, progress=False).mean
    off = abs(float(next(iter(found.values()))) - float(exact.posterior.mean)) / float(exact.posterior.stddev)
    assert off < 0.1, f"The mean is {off:.3f} posterior standard deviations away."


def stays_inside_the_support(method: Method[Any]) -> None:
    """Draws of a constrained parameter lie in its support."""
    exact = Coin.make(0)
    p = fit(exact.density(), exact.data, method, steps=FIT_STEPS, progress=False).sample(50)["p"]
    assert bool(((p > 0) & (p < 1)).all())


CLAUSES: tuple[Callable[..., None], ...] = (
    is_a_frozen_dataclass_of_options,
    keeps_what_its_traits_declare,
    leads_its_metrics_with_the_shape,
    keeps_members_apart,
    gives_the_same_bits_for_the_same_seed,
    resumes_with_the_same_bits,
    leaves_the_module_alone,
    trains_or_refuses_buffers,
    names_and_shapes_its_draws,
    predicts_in_the_shape_of_the_targets,
    survives_a_round_trip_through_a_file,
    records_one_value_per_step,
    finds_the_mean_of_a_gaussian,
    stays_inside_the_support,
)
NEEDS_A_NETWORK = (
    "leaves_the_module_alone",
    "trains_or_refuses_buffers",
    "names_and_shapes_its_draws",
    "predicts_in_the_shape_of_the_targets",
)
NEEDS_A_DENSITY = ("finds_the_mean_of_a_gaussian", "stays_inside_the_support")


def check_method(method: Method[Any]) -> None:
    """Run every clause of the contract on a method.

    Args:
        method: The method to check.

    Raises:
        AssertionError: If the method breaks a clause.
    """
    for clause in CLAUSES:
        clause(method)


# Helpers of the clauses.


def prepared(method: Method[Any], model: Any, data: Any) -> tuple[Target, Plan]:
    """Return the target of a small problem, and the method's plan for it."""
    model, rows = model.bind(data, BATCH_SIZE)
    target = make_target(model, rows, drops=method.traits.draws_masks)
    return target, method.plan(target, rows, FIT_STEPS, 0)


def run(
    method: Method[Any], model: Any, data: Any, shape: torch.Size, poison: int | None = None
) -> tuple[Any, list[Info]]:
    """Take a few steps without `fit`; with `poison`, that member starts at NaN."""
    target, plan = prepared(method, model, data)
    rows = plan.data
    if poison is not None:
        target = Poisoned(**{f.name: getattr(target, f.name) for f in dataclasses.fields(target)}, member=poison)
    generator = stream(0, "contract", "noise")
    state = method.init(target, plan, generator, shape)
    infos: list[Info] = []
    while len(infos) < FIT_STEPS:
        for batch in [rows] if method.traits.reads == "pass" else rows.batches(0, len(infos)):
            state, info = method.step(target, state, batch, generator)
            infos.append(info)
    return state, infos


@dataclasses.dataclass(frozen=True)
class Poisoned(Target):
    """A target that starts one member at NaN."""

    member: int = 0

    def start(
        self, data: Data, shape: torch.Size, generator: torch.Generator, posterior: Posterior | None = None
    ) -> Tensor:
        w = super().start(data, shape, generator, posterior)
        w[self.member] = float("nan")
        return w


def numbers(info: Info) -> dict[str, Tensor]:
    """Return the metrics of a step as tensors."""
    return {name: torch.as_tensor(value) for name, value in info.metrics.items()}


def same(first: Posterior, second: Posterior) -> None:
    """Assert that two posteriors are identical."""
    for name, value in first.tensors().items():
        assert torch.equal(value, second.tensors()[name]), f"'{name}' differs."
    for name, value in first.history.items():
        assert torch.equal(value, second.history[name]), f"The history of '{name}' differs."
    for name, value in first.buffers.items():
        assert torch.equal(value, second.buffers[name]), f"The buffer '{name}' differs."
