"""A function of one vector, evaluated at many by tracing or by a loop, gives the values and gradients of each alone."""

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Distribution, HalfCauchy, Normal

import priory as pr
from priory.core.errors import PrioryWarning
from priory.network.vectorise import MAX_TRACES, Vectorised, unchecked, value_and_grad

F64 = torch.float64
P = 4


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def smooth(w: Tensor, batch: tuple[Tensor, ...], factor: float) -> Tensor:
    x, y = batch
    return factor * (torch.tanh(x @ w) - y).square().sum() + torch.logsumexp(w, 0)


def one_at_a_time(w: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    pairs = []
    for row in w:
        leaf = row.clone().requires_grad_()
        value = smooth(leaf, *args)
        pairs.append((value.detach(), torch.autograd.grad(value, leaf)[0]))
    return torch.stack([v for v, _ in pairs]), torch.stack([g for _, g in pairs])


def assert_pairs_close(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_traced_gradients_equal_those_of_autograd() -> None:
    function = Vectorised(smooth, "This")
    for rows, draws, factor in ((5, 3, 1.0), (5, 3, 2.5), (2, 3, 1.0), (5, 7, 1.0), (1, 1, 1.0)):
        for seed in (1, 2):  # the second seed runs the recorded graph on new numbers
            batch, w = (randn(rows, P, seed=seed), randn(rows, seed=seed + 9)), randn(draws, P, seed=seed + 99)
            assert_pairs_close(function.values_and_grads(w, batch, factor), one_at_a_time(w, batch, factor))
            values = torch.stack([smooth(row, batch, factor) for row in w])
            torch.testing.assert_close(function.values(w, batch, factor), values, rtol=1e-12, atol=1e-12)
    assert not function.loop


def test_each_vector_may_have_its_own_extra_tensors() -> None:
    shifted = lambda w, batch, factor, shift: smooth(w + shift, batch, factor)  # noqa: E731
    batch, w, shift = (randn(5, P, seed=1), randn(5, seed=2)), randn(3, P, seed=3), randn(3, P, seed=4)
    wanted = one_at_a_time(w + shift, batch, 2.0)
    for loop in (False, True):
        function = Vectorised(shifted, "This", loop=loop)
        for _ in range(2):
            assert_pairs_close(function.values_and_grads(w, batch, 2.0, each=(shift,)), wanted)


@given(rows=st.integers(1, 6), draws=st.integers(1, 5), seed=st.integers(0, 10**6))
def test_the_loop_and_the_batched_pass_agree(rows: int, draws: int, seed: int) -> None:
    batch, w = (randn(rows, P, seed=seed), randn(rows, seed=seed + 1)), randn(draws, P, seed=seed + 2)
    looped = Vectorised(smooth, "This", loop=True)
    assert_pairs_close(looped.values_and_grads(w, batch, 1.5), one_at_a_time(w, batch, 1.5))
    torch.testing.assert_close(
        VECTORISED_SMOOTH.values(w, batch, 1.5), looped.values(w, batch, 1.5), rtol=1e-12, atol=1e-12
    )


VECTORISED_SMOOTH = Vectorised(smooth, "This")


def test_results_carry_no_graph_when_the_function_closes_over_a_leaf() -> None:
    leaf = torch.ones(P, dtype=F64, requires_grad=True)
    for loop in (False, True):
        function = Vectorised(lambda w: (leaf * w * w).sum(), "This", loop=loop)
        for _ in range(2):
            value, gradient = function.values_and_grads(randn(3, P))
            assert not value.requires_grad
            assert not gradient.requires_grad
            torch.testing.assert_close(gradient, 2 * randn(3, P))
    assert leaf.grad is None


def test_gradients_are_the_same_inside_no_grad() -> None:
    batch, w = (randn(5, P), randn(5)), randn(3, P)
    with torch.no_grad():
        for loop in (False, True):
            assert_pairs_close(Vectorised(smooth, "This", loop=loop).values_and_grads(w, batch, 1.0), EXPECTED_PAIR)


EXPECTED_PAIR = one_at_a_time(randn(3, P), (randn(5, P), randn(5)), 1.0)


def branching(w: Tensor, x: Tensor) -> Tensor:
    """Branches on the value of the vector, which vmap doesn't support."""
    return (x * w).sum() if float(w[0].detach()) > 0 else (x * w * w).sum()


def test_functions_that_vmap_refuses_run_in_a_loop_with_one_warning_and_equal_values() -> None:
    function, x, w = Vectorised(branching, "This density"), randn(P), randn(6, P, seed=3)
    assert {bool(v > 0) for v in w[:, 0]} == {True, False}
    wanted = [value_and_grad(branching, row, x) for row in w]
    with pytest.warns(
        PrioryWarning, match=r"This density can't be vectorised.*runs in a loop.*slower \(.+\)"
    ) as caught:
        found = function.values_and_grads(w, x)
    assert len(caught) == 1
    assert_pairs_close(found, (torch.stack([v for v, _ in wanted]), torch.stack([g for _, g in wanted])))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_pairs_close(
            function.values_and_grads(w + 1, x), Vectorised(branching, "", loop=True).values_and_grads(w + 1, x)
        )
        torch.testing.assert_close(function.values(w, x), found[0])


def test_values_without_gradients_also_fall_back_to_a_loop() -> None:
    function, x, w = Vectorised(branching, "This density"), randn(P), randn(6, P, seed=3)
    with pytest.warns(PrioryWarning, match="runs in a loop"):
        values = function.values(w, x)
    torch.testing.assert_close(values, torch.stack([branching(row, x) for row in w]))


def test_a_branch_on_the_data_is_evaluated_for_each_batch() -> None:
    """A recorded graph would repeat the branch of the first batch."""

    def function(w: Tensor, x: Tensor) -> Tensor:
        return (x * w).sum() if float(x.sum()) > 0 else (x * w * w).sum()

    w, x = randn(3, P), randn(P).abs()
    vectorised = Vectorised(function, "This density")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrioryWarning)
        for batch in (x, -x):
            wanted = [value_and_grad(function, row, batch) for row in w]
            assert_pairs_close(
                vectorised.values_and_grads(w, batch),
                (torch.stack([v for v, _ in wanted]), torch.stack([g for _, g in wanted])),
            )


def test_an_error_in_the_function_is_raised_unchanged() -> None:
    def wrong_shape(w: Tensor) -> Tensor:
        return (w @ torch.zeros(P + 1, dtype=F64)).sum()

    for call in (Vectorised(wrong_shape, "This").values, Vectorised(wrong_shape, "This").values_and_grads):
        with pytest.raises(RuntimeError, match="size"):
            call(randn(2, P))

    def undefined_name(w: Tensor) -> Tensor:
        raise KeyError("b")

    with pytest.raises(KeyError, match="b"):
        Vectorised(undefined_name, "This").values_and_grads(randn(2, P))


def test_at_most_max_traces_graphs_are_kept() -> None:
    function = Vectorised(lambda w: (w * w).sum(), "This")
    for draws in [*range(1, MAX_TRACES + 4), 1]:
        value, gradient = function.values_and_grads(torch.ones(draws, 2, dtype=F64))
        assert value.tolist() == [2.0] * draws
        assert gradient.shape == (draws, 2)
    assert len(function._traces) <= MAX_TRACES


def test_each_dtype_has_its_own_trace() -> None:
    function = Vectorised(lambda w, x: (x * w).sum(), "This")
    for dtype in (torch.float32, torch.float64, torch.float32):
        value, gradient = function.values_and_grads(torch.ones(2, 3, dtype=dtype), torch.ones(3, dtype=dtype))
        assert value.dtype == gradient.dtype == dtype


def test_the_given_vector_is_not_changed() -> None:
    w = randn(3, P)
    copy_before = w.clone()
    Vectorised(smooth, "This").values_and_grads(w, (randn(5, P), randn(5)), 1.0)
    value_and_grad(smooth, w[0], (randn(5, P), randn(5)), 1.0)
    assert torch.equal(w, copy_before)
    assert not w.requires_grad
    assert w.grad is None


def test_a_density_that_vmap_refuses_warns_once_and_gives_the_same_fit() -> None:
    def log_prob(p: dict[str, Tensor]) -> Tensor:
        a = p["a"]
        return -0.5 * (a - 1).square() if float(a.detach()) > 0 else -0.5 * (a - 1).square() + 0 * a

    def plain(p: dict[str, Tensor]) -> Tensor:
        return -0.5 * (p["a"] - 1).square()

    params = {"a": pr.Param()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        looped = pr.fit(pr.Density(log_prob, params), None, pr.MeanField(samples=4), steps=30, progress=False)
    assert [w.category for w in caught] == [PrioryWarning]
    assert "runs in a loop" in str(caught[0].message)
    batched = pr.fit(pr.Density(plain, params), None, pr.MeanField(samples=4), steps=30, progress=False)
    torch.testing.assert_close(looped.mean["a"], batched.mean["a"], rtol=1e-12, atol=1e-12)


def test_a_density_that_handles_leading_dimensions_gives_the_same_fit() -> None:
    def batched(p: dict[str, Tensor]) -> Tensor:
        return -0.5 * (p["a"] - 1).square().sum(-1) - p["b"]

    params = {"a": pr.Param((2,)), "b": pr.Param((), pr.constraints.positive)}
    posteriors = [
        pr.fit(pr.Density(batched, params, batched=flag), None, pr.MeanField(samples=4), steps=30, progress=False)
        for flag in (True, False)
    ]
    for name in params:
        torch.testing.assert_close(posteriors[0].mean[name], posteriors[1].mean[name], rtol=1e-12, atol=1e-12)


def test_argument_validation_of_distributions_is_off_while_vectorised_and_on_afterwards() -> None:
    """Validation converts a batched condition to one bool, which vmap refuses; a fallback would warn, and fail here."""

    def log_prob(w: Tensor) -> Tensor:
        scale = HalfCauchy(torch.tensor(2.0, dtype=F64)).log_prob(w[0].exp())
        return scale + Normal(w[1], w[0].exp()).log_prob(w[2:]).sum()

    before = Distribution._validate_args
    w = randn(5, P)
    vectorised = Vectorised(log_prob, "the test")
    value, gradient = vectorised.values_and_grads(w)
    torch.testing.assert_close(vectorised.values(w), value, rtol=1e-12, atol=0)
    assert not vectorised.loop
    assert Distribution._validate_args == before
    each = [value_and_grad(log_prob, row) for row in w]
    assert_pairs_close((value, gradient), (torch.stack([v for v, _ in each]), torch.stack([g for _, g in each])))
    with pytest.raises(ValueError, match="found invalid values"):
        Normal(0.0, -1.0)


def test_argument_validation_is_restored_after_an_error() -> None:
    before = Distribution._validate_args
    with pytest.raises(KeyError), unchecked():
        raise KeyError
    assert Distribution._validate_args == before
