"""Each invalid input raises one sentence that names the argument, the rule and the value, and changes nothing."""

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import (
    Bernoulli,
    Beta,
    Categorical,
    HalfNormal,
    Laplace,
    LogNormal,
    MixtureSameFamily,
    MultivariateNormal,
    Normal,
    Poisson,
    StudentT,
    Uniform,
    constraints,
)
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import priory as pr
from priory.core.errors import DivergedError, InputError

ROWS = 20
NAN, INF = float("nan"), float("inf")


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


X, Y, LABELS = numbers(ROWS, 3), numbers(ROWS), torch.arange(ROWS) % 3


def with_value(t: Tensor, where: Any, value: Any) -> Tensor:
    t = t.clone()
    t[where] = value
    return t


def net(outputs: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4).eval(), nn.Tanh(), nn.Linear(4, outputs))


def fit(data: Any, likelihood: Any = None, outputs: int = 1, method: Any = None, **options: Any) -> Any:
    """Run a short fit, and check that the module and the global generator are unchanged even if it raises."""
    module = options.pop("net", None) or net(outputs)
    before = copy.deepcopy(module.state_dict())
    modes = [m.training for m in module.modules()]
    rng = torch.get_rng_state()
    try:
        model = pr.Model(module, likelihood or pr.Gaussian(0.5), options.pop("prior", "glorot"))
        steps = {} if "epochs" in options else {"steps": 3}
        return pr.fit(model, data, method or pr.MAP(), progress=False, **(steps | options))
    finally:
        after = module.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert all(p.grad is None for p in module.parameters())
        assert modes == [m.training for m in module.modules()]
        assert torch.equal(rng, torch.get_rng_state())


class Rows(Dataset[Any]):
    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return len(self.parts[0])

    def __getitem__(self, index: int) -> Any:
        return tuple(p[index] for p in self.parts)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(X, Y, strict=True))


class Unsized(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return X[index], Y[index]


def assert_input_error(text: str, call: Callable[[], Any]) -> str:
    """Assert that a call raises an InputError with this text in one line, and return the message."""
    with pytest.raises(InputError, match=f"(?s){text}") as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    return message


# Data.


NOT_FINITE: dict[str, tuple[Any, str]] = {
    "NaN in the inputs": ((with_value(X, (17, 1), NAN), Y), r"inputs of the data must be finite, got NaN in row 17"),
    "infinity in the inputs": (
        (with_value(X, (4, 0), INF), Y),
        r"inputs of the data must be finite, got infinity in row 4",
    ),
    "NaN in the targets": ((X, with_value(Y, 19, NAN)), r"targets of the data must be finite, got NaN in row 19"),
    "minus infinity in the targets": (
        (X, with_value(Y, 3, -INF)),
        r"targets of the data must be finite.*infinity in row 3",
    ),
    "both infinities": (
        (with_value(with_value(X, (5, 0), INF), (6, 0), -INF), Y),
        r"inputs.*infinity in row 5, and 1 more",
    ),
    "NaN in an array": (
        (with_value(X, (17, 1), NAN).numpy(), Y.numpy()),
        r"inputs of the data must be finite.*NaN in row 17",
    ),
    "NaN in a TensorDataset": (
        TensorDataset(X, with_value(Y, 19, NAN)),
        r"targets of the data must be finite.*NaN in row 19",
    ),
    "NaN in a Dataset": (Rows(with_value(X, (17, 1), NAN), Y), r"inputs of the data must be finite.*NaN in row 17"),
    "NaN in a DataLoader": (
        DataLoader(Rows(with_value(X, (17, 1), NAN), Y), 4),
        r"inputs of the data must be finite.*NaN.*row",
    ),
}


@pytest.mark.parametrize("name", NOT_FINITE)
def test_values_that_are_not_finite_are_refused_with_their_part_and_row(name: str) -> None:
    data, text = NOT_FINITE[name]
    assert_input_error(text, lambda: fit(data, epochs=1, **({} if isinstance(data, DataLoader) else {"batch_size": 4})))


def test_integer_inputs_are_converted_for_a_network_without_an_embedding() -> None:
    whole = torch.ones(4, 3, dtype=torch.int64)
    found = fit((whole, torch.zeros(4))).predict(whole).mean
    assert torch.equal(found, fit((whole.float(), torch.zeros(4))).predict(whole.float()).mean)


@pytest.mark.filterwarnings("ignore::priory.core.errors.PrioryWarning")
def test_large_inputs_whose_sum_overflows_are_accepted() -> None:
    big = torch.full((4, 3), 3e38)
    assert fit((big, torch.zeros(4))).num_data == 4


EMPTY: dict[str, Any] = {
    "tensors": (X[:0], Y[:0]),
    "arrays": (X[:0].numpy(), Y[:0].numpy()),
    "a TensorDataset": TensorDataset(X[:0], Y[:0]),
    "a Dataset": Rows(X[:0], Y[:0]),
    "a DataLoader": DataLoader(Rows(X[:0], Y[:0]), 4, sampler=[]),
    "a DataLoader that drops its only batch": DataLoader(Rows(X[:3], Y[:3]), 4, drop_last=True),
}


@pytest.mark.parametrize("name", EMPTY)
def test_data_without_a_row_is_refused(name: str) -> None:
    assert_input_error(r"The 'data' argument of fit must have at least one row, got none", lambda: fit(EMPTY[name]))


SHAPES: dict[str, tuple[Callable[[], Any], str]] = {
    "unequal numbers of rows": (
        lambda: fit((X, Y[:19])),
        r"'data' argument of fit must have the same number of rows.*\(20, "
        r"3\).*\(19,\)",
    ),
    "no targets": (
        lambda: fit((X,)),
        r"'data' argument of fit must be inputs and targets, such as \(X, y\), got "
        r"1 part",
    ),
    "one tensor": (lambda: fit(X), r"'data' argument of fit must be inputs and targets.*got 1 part"),
    "a number": (lambda: fit((X, torch.tensor(1.0))), r"Part 1 of the data must have rows, got a single number"),
    "no data": (lambda: fit(None), r"'data' argument of fit must be .*, got None"),
    "inputs too wide": (
        lambda: fit((numbers(ROWS, 4), Y)),
        r"network must take the inputs, got \(20, 4\).*(shape|size)",
    ),
    "inputs too many": (lambda: fit((X, X, Y)), r"network must take the inputs, got \(20, 3\).*\(20, 3\).*raised"),
    "targets too wide": (
        lambda: fit((X, numbers(ROWS, 2))),
        r"network's output must fit the targets of Gaussian, of shape \(rows, 2\), got \(rows, 1\)",
    ),
    "outputs too wide": (
        lambda: fit((X, Y), outputs=3),
        r"network's output must fit the targets of Gaussian, of shape \(rows,\), got \(rows, 3\)",
    ),
    "two outputs for one target": (
        lambda: fit((X, Y[:, None]), outputs=2),
        r"output must fit the targets of Gaussian, of shape \(rows, 1\), got \(rows, 2\)",
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_wrong_shapes_are_refused(name: str) -> None:
    call, text = SHAPES[name]
    assert_input_error(text, call)


def test_a_column_of_targets_fits_a_network_with_one_output_per_row() -> None:
    posterior = fit((X, Y[:, None]), net=nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)))
    assert posterior.predict(X).mean.shape == (ROWS, 1)
    assert fit((X, Y)).predict(X).mean.shape == (ROWS,)


TYPES: dict[str, tuple[Callable[[], Any], str]] = {
    "strings": (lambda: fit((np.array([["a"] * 3] * ROWS), Y)), r"Part 0 of the data must be numbers.*got <U1"),
    "a list of strings": (lambda: fit((X, ["a"] * ROWS)), r"Part 1 of the data must be numbers.*got list"),
    "objects": (lambda: fit((X, np.array([None] * ROWS))), r"Part 1 of the data must be numbers.*got object"),
    "a dict": (lambda: fit({"x": X}), r"Part 0 of the data must be numbers.*got dict"),
    "a Dataset of dicts": (
        lambda: fit(Rows([{"x": x} for x in X], Y)),
        r"Part 0 of the data must be numbers.*got dict",
    ),
    "complex inputs": (lambda: fit((X + 0j, Y)), r"network must take the inputs, got \(20, 3\) torch.complex64"),
    "complex targets": (lambda: fit((X, Y + 0j)), r"targets of Gaussian must be real numbers, got torch.complex64"),
    "sparse inputs": (
        lambda: fit((X.to_sparse(), Y)),
        r"Part 0 of the data must be a dense tensor, got torch.sparse_coo",
    ),
    "ragged lists": (lambda: fit(([[1.0, 2.0, 3.0], [1.0]], [1.0, 2.0])), r"Part 0 of the data must be numbers"),
}


@pytest.mark.parametrize("name", TYPES)
def test_wrong_types_are_refused(name: str) -> None:
    call, text = TYPES[name]
    assert_input_error(text, call)


# Targets outside the support of the likelihood.


def classes(labels: Any, **options: Any) -> Any:
    return fit((X, labels), pr.Categorical(), 3, **options)


TARGETS: dict[str, tuple[Callable[[], Any], str]] = {
    "float labels": (
        lambda: classes(LABELS.float()),
        r"'targets' argument of Categorical must be integer labels.*got torch.float32",
    ),
    "boolean labels": (
        lambda: classes(LABELS > 0),
        r"'targets' argument of Categorical must be integer labels.*got "
        r"torch.bool",
    ),
    "one-hot labels": (
        lambda: classes(torch.eye(3, dtype=torch.int64)[LABELS]),
        r"'targets' argument of Categorical must have one label per row \(use y.argmax\(1\) for one-hot labels\), "
        r"got the shape \(20, 3\)",
    ),
    "a label too large": (
        lambda: classes(with_value(LABELS, 19, 3)),
        r"'targets' argument of Categorical must be labels below 3, got 3",
    ),
    "a negative label": (
        lambda: classes(with_value(LABELS, 19, -1)),
        r"'targets' argument of Categorical must be labels >= 0, got -1",
    ),
    "a label of two": (
        lambda: fit((X, with_value(LABELS % 2, 19, 2)), pr.Bernoulli()),
        r"'targets' argument of Bernoulli must be 0 or 1, got \[2",
    ),
    "a soft label": (
        lambda: fit((X, 0.5 + 0 * Y), pr.Bernoulli()),
        r"'targets' argument of Bernoulli must be 0 or 1, got \[0.5",
    ),
    "a negative count": (
        lambda: fit((X, with_value(LABELS, 3, -2)), pr.Poisson()),
        r"'targets' argument of Poisson must be counts.*got \[-2",
    ),
    "a fractional count": (
        lambda: fit((X, LABELS + 0.5), pr.Poisson()),
        r"'targets' argument of Poisson must be counts.*got \[0.5",
    ),
    "complex counts": (lambda: fit((X, LABELS + 0j), pr.Poisson()), r"targets of Poisson must be real numbers"),
}
LATE_WRONG_LABEL = with_value(LABELS, 19, 7)
for kind, source in {
    "a TensorDataset": TensorDataset(X, LATE_WRONG_LABEL),
    "a Dataset": Rows(X, LATE_WRONG_LABEL),
    "a DataLoader": DataLoader(TensorDataset(X, LATE_WRONG_LABEL), 4),
}.items():
    TARGETS[f"a label too large in a later batch of {kind}"] = (
        lambda source=source: fit(
            source, pr.Categorical(), 3, epochs=1, **({} if isinstance(source, DataLoader) else {"batch_size": 4})
        ),
        r"'targets' argument of Categorical must be labels below 3, got 7",
    )
TARGETS["a label too large far down a Dataset"] = (
    lambda: fit(
        Rows(X.repeat(10, 1), with_value(LABELS.repeat(10), 199, 7)), pr.Categorical(), 3, epochs=1, batch_size=50
    ),
    r"'targets' argument of Categorical must be labels below 3, got 7",
)
TARGETS["NaN far down a Dataset"] = (
    lambda: fit(Rows(X.repeat(10, 1), with_value(Y.repeat(10), 180, NAN)), epochs=1, batch_size=50),
    r"targets of the data must be finite, got NaN in row 180",
)
TARGETS["a negative label in a later batch of a DataLoader"] = (
    lambda: fit(DataLoader(TensorDataset(X, with_value(LABELS, 19, -1)), 4), pr.Categorical(), 3, epochs=1),
    r"'targets' argument of Categorical must be labels >= 0, got -1",
)
TARGETS["a label too large in a batch of draws"] = (
    lambda: fit(
        DataLoader(TensorDataset(X, LATE_WRONG_LABEL), 4),
        pr.Categorical(),
        3,
        pr.MeanField(samples=2),
        net=nn.Linear(3, 3),
        epochs=1,
    ),
    r"'targets' argument of Categorical must be labels below 3, got 7",
)


@pytest.mark.parametrize("name", TARGETS)
def test_targets_outside_the_support_of_the_likelihood_are_refused(name: str) -> None:
    call, text = TARGETS[name]
    assert_input_error(text, call)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16])
def test_labels_may_be_integers_of_any_dtype(dtype: torch.dtype) -> None:
    assert torch.equal(classes(LABELS.to(dtype)).mean["0.weight"], classes(LABELS).mean["0.weight"])


# A network whose output doesn't fit its likelihood.


FIT: dict[str, tuple[Any, int, Tensor, str]] = {
    "Gaussian": (pr.Gaussian(), 2, Y, r"fit the targets of Gaussian, of shape \(rows,\), got \(rows, 2\)"),
    "Gaussian with the network's noise": (
        pr.Gaussian(noise="network"),
        1,
        Y,
        r"fit Gaussian\(noise='network'\): \(2,\) values per row.*got \(1,\)",
    ),
    "Gaussian with one noise per output": (
        pr.Gaussian(noise=torch.tensor([0.1, 0.2, 0.3])),
        2,
        numbers(ROWS, 2),
        r"'noise' argument of Gaussian must have one value for each output.*\(2,\), got 3",
    ),
    "StudentT": (pr.StudentT(4.0), 2, Y, r"fit the targets of StudentT, of shape \(rows,\), got \(rows, 2\)"),
    "StudentT with the network's scale": (
        pr.StudentT(4.0, scale="network"),
        3,
        Y,
        r"fit StudentT\(scale='network'\): \(2,\) values per row.*got \(3,\)",
    ),
    "Categorical": (pr.Categorical(), 1, LABELS, r"fit Categorical: \(rows, classes\).*got \(rows, 1\)"),
    "Bernoulli": (pr.Bernoulli(), 2, LABELS % 2, r"fit the targets of Bernoulli, of shape \(rows,\), got \(rows, 2\)"),
    "Poisson": (pr.Poisson(), 3, LABELS, r"fit the targets of Poisson, of shape \(rows,\), got \(rows, 3\)"),
}


@pytest.mark.parametrize("name", FIT)
def test_a_network_whose_output_does_not_fit_the_likelihood_is_refused(name: str) -> None:
    likelihood, outputs, targets, text = FIT[name]
    assert_input_error(text, lambda: fit((X, targets), likelihood, outputs))


def test_categorical_refuses_outputs_without_a_class_dimension() -> None:
    flat = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
    assert_input_error(r"fit Categorical.*got \(rows,\)", lambda: fit((X, LABELS), pr.Categorical(), net=flat))


def test_a_network_that_averages_its_rows_is_refused() -> None:
    class Mean(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).mean(0, keepdim=True)

    assert_input_error(
        r"'output' of the network must have a row for each of the 20 inputs.*\(1, 1\)",
        lambda: fit((X, Y), net=Mean(3, 1)),
    )


def test_a_network_that_gives_nan_later_diverges_with_its_step() -> None:
    class Later(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            self.passes = getattr(self, "passes", 0) + self.training
            return super().forward(input) * (NAN if self.passes == 6 else 1.0)

    with pytest.raises(DivergedError, match=r"not finite at step 5 of 10") as caught:
        fit((X, Y), net=Later(3, 1), steps=10)
    assert all(bool(torch.isfinite(t).all()) for t in caught.value.posterior.mean.values())


# Likelihoods.


LIKELIHOODS: dict[str, tuple[Callable[[], Any], str]] = {
    **{
        f"a noise of {str(value).split()}": (
            lambda value=value: pr.Gaussian(value),
            r"'noise' argument of Gaussian must be positive.*got",
        )
        for value in (0, 0.0, -1.0, NAN, INF, torch.tensor([0.1, 0.0]), torch.zeros(2, 2), torch.tensor([0.1, NAN]))
    },
    "a noise of None": (lambda: pr.Gaussian(None), r"'noise' argument of Gaussian must be .*got None"),
    "a noise of a dict": (lambda: pr.Gaussian({}), r"'noise' argument of Gaussian must be .*got \{\}"),
    "a noise by another name": (
        lambda: pr.Gaussian("learnt"),
        r"'noise' argument of Gaussian must be 'learn', 'network'.*got 'learnt'",
    ),
    "no outputs": (lambda: pr.Gaussian(outputs=0), r"'outputs' argument of Gaussian must be an integer >= 1, got 0"),
    "a fractional number of outputs": (
        lambda: pr.Gaussian(outputs=1.5),
        r"'outputs' argument of Gaussian must be an integer >= 1, got 1.5",
    ),
    **{
        f"{value} degrees of freedom": (
            lambda value=value: pr.StudentT(value),
            r"'df' argument of StudentT must be a positive number, got",
        )
        for value in (0.0, -1, NAN, INF, "3")
    },
    "a negative scale": (
        lambda: pr.StudentT(3.0, scale=-1.0),
        r"'scale' argument of StudentT must be "
        r"positive.*got -1.0",
    ),
    "a class": (
        lambda: pr.Model(net(), pr.Gaussian),
        r"'likelihood' argument of Model must be a likelihood.*got Gaussian itself",
    ),
    "a name": (lambda: pr.Model(net(), "gaussian"), r"'likelihood' argument of Model must be a likelihood.*got str"),
    "a distribution": (
        lambda: pr.Model(net(), Normal(0.0, 1.0)),
        r"'likelihood' argument of Model must be a likelihood.*got Normal",
    ),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_wrong_likelihoods_are_refused(name: str) -> None:
    call, text = LIKELIHOODS[name]
    assert_input_error(text, call)


# Priors.


def unchecked(loc: float, scale: float) -> Normal:
    return Normal(loc, scale, validate_args=False)


PRIORS: dict[str, tuple[Any, str]] = {
    "an unknown name": (
        {"first.weight": 1.0, "*": 1.0},
        r"'prior' argument of Model must use names of the network: 0.weight.*got 'first.weight'",
    ),
    "an unknown pattern": (
        {"head.*": 1.0, "*": 1.0},
        r"'prior' argument of Model must use names of the "
        r"network.*got 'head.\*'",
    ),
    "a pattern that is a number": ({0: 1.0}, r"'prior' argument of Model must use names of the network.*got 0"),
    "uncovered parameters": (
        {"*.weight": 1.0},
        r"'prior' argument of Model must cover every parameter.*got none "
        r"for .*0.bias",
    ),
    "no pattern": ({}, r"'prior' argument of Model must name at least one pattern, got \{\}"),
    "a scale of zero": (0.0, r"'prior' argument of Model must have a scale above zero, got 0.0"),
    "a negative scale": (-1.0, r"'prior' argument of Model must have a scale above zero, got -1.0"),
    "a scale that is not a number": (NAN, r"'prior' argument of Model must have a scale above zero, got nan"),
    "an infinite scale": (INF, r"'prior' argument of Model must have a scale above zero, got inf"),
    "a normal of scale zero": (
        unchecked(0.0, 0.0),
        r"'prior' argument of '0.weight' must have a scale above "
        r"zero, got 0.0",
    ),
    "a normal of negative scale": (
        unchecked(0.0, -1.0),
        r"'prior' argument of '0.weight' must have a scale above zero, got -1.0",
    ),
    "a normal of scale NaN": (
        unchecked(0.0, NAN),
        r"'prior' argument of '0.weight' must have a scale above "
        r"zero, got nan",
    ),
    "a normal of infinite scale": (unchecked(0.0, INF), r"'prior' argument of '0.weight' must have a .*scale.*got inf"),
    "a normal at NaN": (unchecked(NAN, 1.0), r"'prior' argument of '0.weight' must .*got nan"),
    "a zero scale in a dict": (
        {"*.weight": 0.0, "*": 1.0},
        r"'prior' argument of Model must have a scale above "
        r"zero, got 0.0",
    ),
    "coins": (Bernoulli(0.5), r"'prior' argument of Model must be over real numbers, got Bernoulli over integers"),
    "counts": (Poisson(1.0), r"'prior' argument of Model must be over real numbers, got Poisson over integers"),
    "a half-normal": (HalfNormal(1.0), r"'prior' argument of Model must be over the whole line.*got HalfNormal"),
    "a log-normal": (LogNormal(0.0, 1.0), r"'prior' argument of Model must be over the whole line.*got LogNormal"),
    "a beta": (Beta(1.0, 1.0), r"'prior' argument of Model must be over the whole line.*got Beta"),
    "an interval": (Uniform(-1.0, 1.0), r"'prior' argument of Model must be over the whole line.*got Uniform"),
    "a normal of another shape": (
        Normal(torch.zeros(7), 1.0),
        r"'prior' argument of '0.weight' must broadcast to its shape \(4, 3\).*\(7,\)",
    ),
    "a laplace of another shape": (
        Laplace(torch.zeros(7), 1.0),
        r"'prior' argument of '0.weight' must broadcast to its shape \(4, 3\).*\(7,\)",
    ),
    "a joint normal of another shape": (
        MultivariateNormal(torch.zeros(5), torch.eye(5)),
        r"'prior' argument of '0.weight' must broadcast to its shape \(4, 3\).*\(5,\)",
    ),
    "an unknown rule": (
        "glorrot",
        r"'prior' argument of Model must be .* one of 'fan_in', 'glorot', 'he', 'flat', got 'glorrot'",
    ),
    "an unknown rule in a dict": ({"*": "glorrot"}, r"'prior' argument of Model must be .*got 'glorrot'"),
    "None": (
        None,
        r"'prior' argument of Model must be a distribution, a number, a rule or a dict of them, got "
        r"NoneType",
    ),
    "a class": (Normal, r"'prior' argument of Model must be a distribution.*got type"),
    "True": (True, r"'prior' argument of Model must be a distribution.*got bool"),
    "a list": ([1.0], r"'prior' argument of Model must be a distribution.*got list"),
}


@pytest.mark.parametrize("name", PRIORS)
def test_wrong_priors_are_refused(name: str) -> None:
    prior, text = PRIORS[name]
    assert_input_error(text, lambda: fit((X, Y), prior=prior))


REAL_LINE_PRIORS: dict[str, Any] = {
    "a mixture of normals": MixtureSameFamily(
        Categorical(torch.ones(2)), Normal(torch.zeros(2), torch.tensor([1.0, 0.1]))
    ),
    "a laplace": Laplace(0.0, 1.0),
    "a student": StudentT(3.0),
    "an integer": 2,
    "flat": "flat",
}


@pytest.mark.parametrize("name", REAL_LINE_PRIORS)
def test_every_distribution_over_the_real_line_is_accepted_as_prior(name: str) -> None:
    for method in (pr.MAP(), pr.MeanField(), pr.MeanField(samples=2)):
        posterior = fit((X, Y), prior=REAL_LINE_PRIORS[name], method=method)
        assert bool(torch.isfinite(posterior.history["loss"]).all())


@pytest.mark.parametrize(("wd", "rows"), [(0.0, 5), (-1.0, 5), (NAN, 5), (INF, 5), ("1", 5), (0.1, 0), (0.1, 2.5)])
def test_wrong_weight_decays_are_refused(wd: Any, rows: Any) -> None:
    assert_input_error(
        r"'(wd|num_data)' argument of weight_decay must be an? (positive number|integer).*got",
        lambda: pr.priors.weight_decay(wd, rows),
    )


# Methods.


METHODS: dict[str, tuple[Callable[[], Any], str]] = {
    "an unknown option of MAP": (lambda: pr.MAP(lr=0.1), r"options of MAP must be among learning_rate, .*got 'lr'"),
    "an unknown option of MeanField": (
        lambda: pr.MeanField(draws=2),
        r"options of MeanField must be among .*samples.*got 'draws'",
    ),
    **{
        f"a learning rate of {value!r}": (
            lambda value=value: pr.MAP(learning_rate=value),
            r"'learning_rate' argument of MAP must be a positive number, got",
        )
        for value in (0.0, -1, NAN, INF, "fast", None)
    },
    **{
        f"{value!r} samples": (
            lambda value=value: pr.MeanField(samples=value),
            r"'samples' argument of MeanField must be an integer >= 1, got",
        )
        for value in (0, -1, 1.5, "two")
    },
    "a schedule without a name": (
        lambda: pr.MAP(schedule="linear"),
        r"'schedule' argument of MAP must be 'cosine', 'constant' or a function.*got linear",
    ),
    "a schedule that is a number": (
        lambda: pr.MeanField(schedule=3),
        r"'schedule' argument of MeanField must be "
        r".*got 3",
    ),
    "a schedule that wants a metric": (
        lambda: fit((X, Y), method=pr.MAP(schedule=torch.optim.lr_scheduler.ReduceLROnPlateau)),
        r"'schedule' argument of MAP must make a scheduler that needs no metric, got ReduceLROnPlateau",
    ),
    "a schedule that makes nothing": (
        lambda: fit((X, Y), method=pr.MAP(schedule=lambda optimizer: None)),
        r"'schedule' argument of MAP must make a scheduler.*got NoneType",
    ),
    "another family": (
        lambda: pr.MeanField(family="cauchy"),
        r"'family' argument of MeanField must be one of gaussian, laplace, logistic, uniform, or a dict .*, got "
        r"'cauchy'",
    ),
    **{
        f"an initial scale of {value!r}": (
            lambda value=value: pr.MeanField(initial_scale=value),
            r"'initial_scale' argument of MeanField must be a positive number, got",
        )
        for value in (0.0, -0.1, NAN, "small")
    },
    **{
        f"a holdout of {value!r}": (
            lambda value=value: pr.MAP(holdout=value),
            r"'holdout' argument of MAP must lie between 0 and 1, got",
        )
        for value in (0.0, 1.0, -0.5, NAN, "half")
    },
    "a class": (
        lambda: fit((X, Y), method=pr.MAP),
        r"'method' argument of fit must be a method such as MeanField\(\), got the class MAP: write MAP\(\)",
    ),
    "a name": (lambda: fit((X, Y), method="MAP"), r"'method' argument of fit must be a method.*got 'MAP'"),
    "a start of the wrong type": (
        lambda: fit((X, Y), method=pr.MAP(start="there")),
        r"'start' argument of MAP must be a method.*got 'there'",
    ),
    "a start of another model": (
        lambda: fit((X, Y), method=pr.MAP(start=fit((X, Y), net=nn.Linear(3, 1)))),
        r"'start' argument of MAP must .*model",
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_wrong_methods_are_refused(name: str) -> None:
    call, text = METHODS[name]
    assert_input_error(text, call)


def test_a_holdout_of_nearly_all_rows_leaves_one_row_to_fit() -> None:
    posterior = fit((X[:3], Y[:3]), pr.Gaussian(), method=pr.MAP(holdout=0.9))
    assert float(posterior.mean["likelihood.noise"]) > 0


# fit.


FITS: dict[str, tuple[Callable[[], Any], str]] = {
    "a bare network": (
        lambda: pr.fit(net(), (X, Y), pr.MAP()),
        r"'model' argument of fit must be a Model, a Density or a latent model, such as .*, got Sequential",
    ),
    "a stream": (
        lambda: fit(DataLoader(Stream(), 4)),
        r"'num_data' argument of fit must be given for an IterableDataset without a length, got None",
    ),
    "a bare stream": (lambda: fit(Stream()), r"'num_data' argument of fit must be given.*length.*got None"),
    "a Dataset without a length": (lambda: fit(Unsized()), r"'data' argument of fit must have a length, got Unsized"),
    "a loader without automatic batching": (
        lambda: fit(DataLoader(Rows(X, Y), batch_size=None)),
        r"'data' argument of fit must .*batch",
    ),
    "a batch size beside a loader": (
        lambda: fit(DataLoader(Rows(X, Y), 4), batch_size=4),
        r"'batch_size' argument of fit must be left out with a DataLoader.*got 4",
    ),
    "epochs and steps": (
        lambda: fit((X, Y), epochs=2, steps=3),
        r"'steps' argument of fit must be left out when epochs are given, got 3",
    ),
    **{
        f"{value!r} steps": (
            lambda value=value: fit((X, Y), steps=value),
            r"'steps' argument of fit must be an integer >= 1, got",
        )
        for value in (0, -1, 1.5, "3", True)
    },
    **{
        f"{value!r} epochs": (
            lambda value=value: fit((X, Y), epochs=value),
            r"'epochs' argument of fit must be an integer >= 1, got",
        )
        for value in (0, -1, 2.0)
    },
    **{
        f"{value!r} rows a batch": (
            lambda value=value: fit((X, Y), batch_size=value),
            r"'batch_size' argument of fit must be an integer >= 1, got",
        )
        for value in (0, -4, 2.5, "4")
    },
    **{
        f"a temperature of {value!r}": (
            lambda value=value: fit((X, Y), temperature=value),
            r"'temperature' argument of fit must be a positive number, got",
        )
        for value in (0, -1.0, NAN, INF, "cold", None)
    },
    "a temperature for the prior": (
        lambda: fit((X, Y), tempers="prior"),
        r"'tempers' argument of fit must be 'likelihood' or 'posterior', got 'prior'",
    ),
    "an unknown value of tempers": (
        lambda: fit((X, Y), tempers=None),
        r"'tempers' argument of fit must be 'likelihood' or 'posterior', got None",
    ),
    **{
        f"a seed of {value!r}": (
            lambda value=value: fit((X, Y), seed=value),
            r"'seed' argument of fit must be an integer, got",
        )
        for value in (1.5, "0", None)
    },
    "a callback that isn't callable": (lambda: fit((X, Y), callbacks=[3]), r"'callbacks' argument of fit must .*got"),
    "a callback outside a list": (lambda: fit((X, Y), callbacks=print), r"'callbacks' argument of fit must .*got"),
    "a checkpoint that isn't a path": (
        lambda: fit((X, Y), checkpoint=3),
        r"'checkpoint' argument of fit must be a path or a Checkpoint, got 3",
    ),
    "a checkpoint every zero steps": (
        lambda: pr.Checkpoint("fit", every=0),
        r"'every' argument of Checkpoint must be an integer >= 1, got 0",
    ),
    "an invalid patience": (
        lambda: pr.EarlyStop(patience=0),
        r"'patience' argument of EarlyStop must be an integer >= 1, got 0",
    ),
    "one row for a learnt noise": (
        lambda: fit((X[:1], Y[:1]), pr.Gaussian()),
        r"The noise is learnt from held-out rows, which needs at least 2 rows, got 1: give it, as in "
        r"Gaussian\(0\.1\)\.",
    ),
    "one row for a choice of rates": (
        lambda: fit((X[:1], Y[:1]), method=pr.Dropout(rate=(0.1, 0.2))),
        r"The rate is learnt from held-out rows, which needs at least 2 rows, got 1: give it, as in "
        r"Dropout\(rate=0\.1\)\.",
    ),
}


@pytest.mark.parametrize("name", FITS)
def test_wrong_arguments_of_fit_are_refused(name: str) -> None:
    call, text = FITS[name]
    assert_input_error(text, call)


def test_numpy_integers_are_accepted_as_integers() -> None:
    posterior = fit((X, Y), steps=np.int64(3), batch_size=np.int64(4), seed=np.int64(2))
    assert torch.equal(posterior.mean["0.weight"], fit((X, Y), steps=3, batch_size=4, seed=2).mean["0.weight"])


# Densities.


A = {"a": pr.Param()}


def density(log_prob: Any, params: Any = None, data: Any = None, **options: Any) -> Any:
    return pr.fit(
        pr.Density(log_prob, A if params is None else params), data, pr.MAP(), steps=3, progress=False, **options
    )


def density_with_rows(log_prior: Any, log_likelihood: Any, data: Any = Y) -> Any:
    model = pr.Density(params=A, log_prior=log_prior, log_likelihood=log_likelihood)
    return pr.fit(model, data, pr.MAP(), steps=3, progress=False)


def bowl(p: dict[str, Tensor]) -> Tensor:
    return -(p["a"] ** 2)


def row_log_likelihood(p: dict[str, Tensor], y: Tensor) -> Tensor:
    return -((y - p["a"]) ** 2)


DENSITIES: dict[str, tuple[Callable[[], Any], str]] = {
    "nothing": (lambda: pr.Density(), r"Density must have either log_prob, or log_prior and log_likelihood"),
    "a prior alone": (
        lambda: pr.Density(params=A, log_prior=bowl),
        r"Density must have either log_prob, or log_prior and",
    ),
    "a likelihood alone": (
        lambda: pr.Density(params=A, log_likelihood=row_log_likelihood),
        r"Density must have either log_prob, or",
    ),
    "everything": (
        lambda: pr.Density(bowl, A, log_prior=bowl, log_likelihood=row_log_likelihood),
        r"Density must have either log_prob, or",
    ),
    "no parameters": (
        lambda: pr.Density(bowl),
        r"'params' argument of Density must be a dict from names to "
        r"Param, got None",
    ),
    "an empty dict": (
        lambda: pr.Density(bowl, {}),
        r"'params' argument of Density must be a dict from names to Param, got \{\}",
    ),
    "shapes for parameters": (
        lambda: pr.Density(bowl, {"a": (3,)}),
        r"'params' argument of Density must be a dict from names to Param",
    ),
    "a shape below one": (lambda: pr.Param((0,)), r"'shape' argument of Param must hold positive integers, got \(0,\)"),
    "a shape of the wrong type": (
        lambda: pr.Param((1.5,)),
        r"'shape' argument of Param must hold positive integers, got \(1.5,\)",
    ),
    "integers": (
        lambda: density(bowl, {"a": pr.Param((), constraints.nonnegative_integer)}),
        r"'support' argument of Param must be continuous, got IntegerGreaterThan",
    ),
    "coins": (
        lambda: density(bowl, {"a": pr.Param((), constraints.boolean)}),
        r"'support' argument of Param must be continuous, got Boolean",
    ),
    "no function": (
        lambda: density(3.0),
        r"'log_prob' argument of Density must be a function of one dict of parameters, got 3\.0\.",
    ),
    "a function of the parameters themselves": (
        lambda: density(lambda a: -(a**2)),
        r"'log_prob' argument of Density must be a function of one dict of parameters, here with the key 'a'. It "
        r"raised TypeError",
    ),
    "a likelihood of the parameters alone": (
        lambda: density_with_rows(bowl, bowl),
        r"'log_likelihood' argument of Density must be a function of one dict of parameters and the rows",
    ),
    "a vector": (
        lambda: density(lambda p: p["a"] * torch.ones(2)),
        r"'log_prob' argument of Density must return a single number, got the shape \(2,\)",
    ),
    "a float": (lambda: density(lambda p: 1.0), r"'log_prob' argument of Density must return a tensor, got float"),
    "an error": (
        lambda: density(lambda p: p["b"]),
        r"'log_prob' argument of Density must be a function of one dict of parameters, here with the key 'a'. It "
        r"raised KeyError: 'b'",
    ),
    "NaN at the start": (
        lambda: density(lambda p: (-1 - p["a"].square()).sqrt()),
        r"'log_prob' argument of Density must be finite at the start \{'a': 0.0\}, got \[nan\]",
    ),
    "minus infinity at the start": (
        lambda: density(lambda p: (0 * p["a"]).log()),
        r"'log_prob' argument of Density must be finite at the start.*'a'",
    ),
    "no gradient": (
        lambda: density(lambda p: p["a"].detach() ** 2),
        r"density must be differentiable in its parameters",
    ),
    "a value without the parameters": (
        lambda: density(lambda p: torch.tensor(1.0)),
        r"density must be differentiable in its parameters",
    ),
    "one value for all data": (
        lambda: density_with_rows(bowl, lambda p, y: row_log_likelihood(p, y).sum()),
        r"'log_likelihood' argument of Density must return one value per row, \(20,\), got the shape \(\)",
    ),
    "a column of values": (
        lambda: density_with_rows(bowl, lambda p, y: row_log_likelihood(p, y)[:, None]),
        r"'log_likelihood' argument of Density must return one value per row, \(20,\), got the shape \(20, 1\)",
    ),
    "a likelihood of NaN": (
        lambda: density_with_rows(bowl, lambda p, y: row_log_likelihood(p, y) * NAN),
        r"'log_likelihood' argument of Density must be finite at the start",
    ),
    "a prior of a vector": (
        lambda: density_with_rows(lambda p: bowl(p)[None], row_log_likelihood),
        r"'log_prior' argument of Density must return a single number",
    ),
    "no data for a likelihood": (
        lambda: density_with_rows(bowl, row_log_likelihood, None),
        r"'data' argument of fit must be given to a Density with a log_likelihood, got None",
    ),
    "data for a log_prob": (
        lambda: density(bowl, data=(X, Y)),
        r"'data' argument of fit must be .*None.*log_prob, got 20 rows\.",
    ),
    "NaN in the data": (
        lambda: density_with_rows(bowl, row_log_likelihood, with_value(Y, 7, NAN)),
        r"of the data must be finite, got NaN in row 7",
    ),
    "NaN in a Dataset": (
        lambda: density_with_rows(bowl, lambda p, b: row_log_likelihood(p, b[0]), Rows(with_value(Y, 7, NAN))),
        r"of the data must be finite, got NaN in row 7",
    ),
    "a tempered log_prob without a likelihood": (
        lambda: density(bowl, temperature=0.5),
        r"'tempers' argument of fit must be 'posterior' for a Density that is one log_prob, got 'likelihood'",
    ),
}


@pytest.mark.parametrize("name", DENSITIES)
def test_wrong_densities_are_refused(name: str) -> None:
    call, text = DENSITIES[name]
    assert_input_error(text, call)


def test_a_posterior_over_a_density_does_not_predict() -> None:
    assert_input_error(
        r"posterior over a Density has no network.*predictive\(function\)", lambda: density(bowl).predict(X)
    )


# Posteriors and predictions.


@pytest.fixture(scope="module")
def posterior() -> Any:
    return fit((X, Y), method=pr.MeanField())


@pytest.fixture(scope="module")
def labelled() -> Any:
    return classes(LABELS)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(5, 2), nn.Linear(5, 1)

    def forward(self, x: Tensor, token: Tensor) -> Tensor:
        return self.layer(torch.cat([x, self.embed(token)], -1))


PREDICT: dict[str, tuple[Any, str]] = {
    "NaN": (with_value(X, (7, 0), NAN), r"The 'x' argument of predict must be finite, got NaN in row 7"),
    "infinity": (with_value(X, (7, 0), INF), r"The 'x' argument of predict must be finite, got infinity in row 7"),
    "nothing": (X[:0], r"'x' argument of predict must have one row or more.*got .*\(0, 3\)"),
    "no part": ((), r"'x' argument of predict must have one row or more"),
    "a number": (3.0, r"The 'x' argument of predict must have rows, got a single number"),
    "too wide": (numbers(5, 4), r"network must take the inputs, got \(5, 4\).*\(5x4 and 3x4\)"),
    "two inputs": ((X, X), r"network must take the inputs, got \(20, 3\).*\(20, 3\).*raised"),
    "unequal numbers of rows": (
        (X, X[:3]),
        r"'x' argument of predict must have one row or more, and equally many in each part, got .*\(20, "
        r"3\), \(3, 3\)",
    ),
    "strings": (np.array([["a"] * 3]), r"must be numbers in a tensor or an array, got <U1"),
    "None": (None, r"must be numbers in a tensor or an array, got NoneType"),
}


@pytest.mark.parametrize("name", PREDICT)
def test_wrong_inputs_of_predict_are_refused(name: str, posterior: Any) -> None:
    x, text = PREDICT[name]
    assert_input_error(text, lambda: posterior.predict(x))


def test_a_laplace_posterior_shows_the_shapes_of_wrong_inputs_too() -> None:
    with pytest.warns(pr.PrioryWarning):  # the network isn't trained
        found = fit((X, Y), method=pr.Laplace("diag", at="network"), net=nn.Linear(3, 1))
    assert_input_error(
        r"network must take the inputs, got \(5, 4\).*\(5x4 and 3x1\)", lambda: found.predict(numbers(5, 4))
    )


def test_a_token_beyond_the_embedding_is_refused() -> None:
    posterior = fit((X, LABELS, Y), net=TwoInputs())
    assert_input_error(r"network must take the inputs.*torch.int64.*raised", lambda: posterior.predict((X, LABELS + 5)))
    assert_input_error(r"network must take the inputs.*raised", lambda: posterior.predict(X))
    assert_input_error(
        r"network must take the inputs.*torch.int64.*raised", lambda: fit((X, LABELS + 5, Y), net=TwoInputs())
    )


@pytest.mark.parametrize("samples", [0, -1, 1.5, "many", None])
def test_wrong_numbers_of_samples_are_refused(samples: Any, posterior: Any) -> None:
    assert_input_error(
        r"'samples' argument of predict must be an integer >= "
        r"1, got",
        lambda: posterior.predict(X, samples=samples),
    )
    assert_input_error(r"'n' argument of sample must be an integer >= 1, got", lambda: posterior.sample(samples))


@pytest.mark.parametrize("level", [0, 1, 0.0, 1.0, -0.1, 1.5, NAN, "0.9", None])
def test_wrong_levels_are_refused(level: Any, posterior: Any) -> None:
    prediction = posterior.predict(X)
    assert_input_error(r"'q' argument of quantile must lie between 0 and 1, got", lambda: prediction.quantile(level))
    assert_input_error(
        r"'level' argument of interval must lie between 0 and 1, got", lambda: prediction.interval(level)
    )


LOG_PROB: dict[str, tuple[Any, str]] = {
    "too few": (Y[:5], r"'y' argument of log_prob must have the shape \(20,\), got the shape \(5,\)"),
    "too wide": (numbers(ROWS, 2), r"'y' argument of log_prob must have the shape \(20,\), got the shape \(20, 2\)"),
    "complex": (Y + 0j, r"targets of Gaussian must be real numbers, got torch.complex64"),
    "NaN": (with_value(Y, 7, NAN), r"(targets|'y').*must be finite, got NaN in row 7"),
    "strings": (np.array(["a"] * ROWS), r"must be numbers.*got <U1"),
    "None": (None, r"must be numbers.*got NoneType"),
}


@pytest.mark.parametrize("name", LOG_PROB)
def test_wrong_targets_of_log_prob_are_refused(name: str, posterior: Any) -> None:
    y, text = LOG_PROB[name]
    assert_input_error(text, lambda: posterior.predict(X).log_prob(y))


def test_targets_of_log_prob_may_be_an_array_a_list_or_a_column(posterior: Any) -> None:
    prediction = posterior.predict(X)
    for y in (Y.numpy(), Y.tolist(), Y[:, None], Y.double()):
        torch.testing.assert_close(prediction.log_prob(y), prediction.log_prob(Y))


def test_wrong_labels_of_log_prob_are_refused(labelled: Any) -> None:
    prediction = labelled.predict(X)
    assert_input_error(
        r"'targets' argument of Categorical must be labels below "
        r"3, got 3",
        lambda: prediction.log_prob(with_value(LABELS, 0, 3)),
    )
    assert_input_error(
        r"'targets' argument of Categorical must be labels >= 0, "
        r"got -1",
        lambda: prediction.log_prob(with_value(LABELS, 0, -1)),
    )
    assert_input_error(
        r"'targets' argument of Categorical must be integer labels.*got torch.float32", lambda: prediction.log_prob(Y)
    )
    assert_input_error(
        r"'y' argument of log_prob must have the shape \(20,\), got the shape "
        r"\(3,\)",
        lambda: prediction.log_prob(LABELS[:3]),
    )


def test_quantiles_are_refused_for_labels_and_probabilities_for_numbers(labelled: Any, posterior: Any) -> None:
    assert_input_error(
        r"targets of Categorical\(\) are labels: use 'probs', because labels have no quantiles",
        lambda: labelled.predict(X).quantile(0.5),
    )
    for name in ("probs", "entropy", "mutual_information"):
        assert_input_error(
            rf"'{name}' of a prediction needs labels: the targets of Gaussian.* are numbers",
            lambda name=name: getattr(posterior.predict(X), name),
        )


def test_a_point_has_neither_a_density_nor_evidence() -> None:
    point = fit((X, Y))
    assert_input_error(r"posterior of MAP\(\) has no density", lambda: point.log_prob(point.mean))
    assert_input_error(r"MAP\(\) gives no evidence", lambda: point.log_evidence)


def test_wrong_parameters_of_a_density_are_refused(posterior: Any) -> None:
    draws = posterior.sample(4)
    without = {name: t for name, t in draws.items() if name != "3.bias"}
    assert_input_error(
        r"'params' of the posterior must hold every parameter; missing \['3.bias'\]",
        lambda: posterior.log_prob(without),
    )
    wrong = draws | {"3.bias": torch.zeros(4, 2)}
    assert_input_error(
        r"'3.bias' argument of params must have the shape \(1,\).*got \(4, 2\)", lambda: posterior.log_prob(wrong)
    )
    assert_input_error(
        r"'params' of the posterior must share their leading dimensions",
        lambda: posterior.log_prob(draws | {"3.bias": torch.zeros(3, 1)}),
    )


# Divergence.


@pytest.mark.parametrize("method", [pr.MAP(learning_rate=1e30, schedule="constant"), pr.MeanField(learning_rate=1e30)])
def test_a_fit_that_diverges_names_the_step_and_carries_the_last_good_posterior(method: Any) -> None:
    with pytest.raises(DivergedError) as caught:
        fit((X, Y), method=method, steps=50)
    message = str(caught.value)
    step = re.search(r"was not finite at step (\d+) of 50", message)
    assert step is not None
    assert 1 <= int(step[1]) <= 5
    assert type(method).__name__ in message
    assert "learning_rate" in message
    kept = caught.value.posterior
    assert bool(torch.isfinite(kept.predict(X).mean).all())
    assert all(bool(torch.isfinite(values).all()) for values in kept.history.values())


class BreaksLate(nn.Linear):
    """Returns NaN once its bias has changed enough."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * (NAN if float(self.bias.detach()) > 2.5 else 1.0)


@pytest.mark.filterwarnings("ignore::priory.core.errors.PrioryWarning")
def test_a_fit_that_diverges_late_keeps_a_late_state() -> None:
    torch.manual_seed(0)
    net, method = BreaksLate(3, 1), pr.MAP(learning_rate=0.01, schedule="constant")
    text = r"not finite at step \d+ of 1000; the state of step 200 is in"  # the bias changes by 0.01 per step
    with pytest.raises(DivergedError, match=text) as caught:
        fit((X, 100 + Y), net=net, method=method, steps=1000, prior="flat")
    kept = caught.value.posterior
    assert len(kept.history["loss"]) == 200
    assert bool(torch.isfinite(kept.predict(X).mean).all())
