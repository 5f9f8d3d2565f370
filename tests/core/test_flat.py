"""The flat vector: names, shapes and leading dimensions there and back."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import constraints

from priory.constraints import lower_cholesky, ordered
from priory.core.errors import InputError
from priory.core.flat import Layout, Param

F64 = torch.float64
SHAPES = st.lists(st.integers(1, 4), max_size=3).map(tuple)
LEADS = st.lists(st.integers(1, 3), max_size=3).map(tuple)
SUPPORTS = {
    "real": constraints.real,
    "positive": constraints.positive,
    "unit": constraints.unit_interval,
    "between": constraints.interval(-2.0, 5.0),
    "above": constraints.greater_than(3.0),
    "below": constraints.less_than(-1.0),
}
PARAMS = st.dictionaries(
    st.text("abc.", min_size=1, max_size=5),
    st.builds(lambda shape, support: Param(shape, SUPPORTS[support]), SHAPES, st.sampled_from(sorted(SUPPORTS))),
    min_size=1,
    max_size=5,
)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(len(shape)))


@given(params=PARAMS, lead=LEADS)
def test_constrain_and_unconstrain_are_inverses(params: dict[str, Param], lead: tuple[int, ...]) -> None:
    layout = Layout(params)
    assert layout.size == sum(math.prod(p.shape) for p in params.values())
    assert layout.names == tuple(params)
    w = randn(*lead, layout.size)
    named = layout.constrain(w)
    assert {name: tuple(t.shape) for name, t in named.items()} == {n: (*lead, *p.shape) for n, p in params.items()}
    for name, t in named.items():
        assert bool(params[name].support.check(t).all())
    torch.testing.assert_close(layout.unconstrain(named), w, rtol=1e-9, atol=1e-9)


@given(params=PARAMS, lead=LEADS)
def test_leading_dimensions_do_not_change_values(params: dict[str, Param], lead: tuple[int, ...]) -> None:
    layout = Layout(params)
    w = randn(*lead, layout.size)
    flat = w.reshape(-1, layout.size)
    named, log_det = layout.constrain(w), layout.log_det(w)
    assert log_det.shape == lead
    for i, row in enumerate(flat):
        torch.testing.assert_close(log_det.reshape(-1)[i], layout.log_det(row), rtol=1e-12, atol=1e-12)
        for name, t in layout.constrain(row).items():
            assert torch.equal(named[name].reshape(-1, *params[name].shape)[i], t)


@given(params=PARAMS)
def test_the_log_determinant_is_that_of_the_jacobian(params: dict[str, Param]) -> None:
    layout = Layout(params)
    w = 0.5 * randn(layout.size)

    def whole(v: Tensor) -> Tensor:
        return torch.cat([t.reshape(-1) for t in layout.constrain(v).values()])

    jacobian = torch.autograd.functional.jacobian(whole, w)
    torch.testing.assert_close(layout.log_det(w), torch.linalg.slogdet(jacobian)[1], rtol=1e-9, atol=1e-9)


def test_blocks_are_contiguous_and_in_the_order_of_the_names() -> None:
    layout = Layout({"b": Param((2, 3)), "a": Param(), "c": Param((2,), constraints.positive)})
    assert [(b.name, b.start, b.stop) for b in layout.blocks] == [("b", 0, 6), ("a", 6, 7), ("c", 7, 9)]
    named = layout.constrain(torch.arange(9.0))
    assert named["b"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert named["a"].item() == 6
    torch.testing.assert_close(named["c"], torch.tensor([7.0, 8.0]).exp())
    assert layout["c"].shape == (2,)
    assert [b.name for b in layout.constrained] == ["c"]


def test_an_unconstrained_parameter_is_a_view_of_the_vector() -> None:
    layout = Layout({"a": Param((2, 2)), "b": Param((3,))})
    for w in (torch.zeros(7), torch.zeros(5, 7)):
        layout.constrain(w)["a"].fill_(1.0)
        assert bool((w[..., :4] == 1).all())
        assert bool((w[..., 4:] == 0).all())


def test_supports_may_have_fewer_unconstrained_coordinates_than_entries() -> None:
    layout = Layout(
        {"p": Param((3,), constraints.simplex), "L": Param((3, 3), lower_cholesky), "t": Param((4,), ordered)}
    )
    assert [b.stop - b.start for b in layout.blocks] == [2, 6, 4]
    w = randn(2, 5, layout.size)
    named = layout.constrain(w)
    assert {n: tuple(t.shape) for n, t in named.items()} == {"p": (2, 5, 3), "L": (2, 5, 3, 3), "t": (2, 5, 4)}
    torch.testing.assert_close(named["p"].sum(-1), torch.ones(2, 5, dtype=F64))
    assert bool((named["t"].diff(dim=-1) > 0).all())
    torch.testing.assert_close(layout.unconstrain(named), w, rtol=1e-8, atol=1e-8)


def test_gradients_flow_through_named_tensors() -> None:
    layout = Layout({"a": Param((2,)), "b": Param((), constraints.positive)})
    w = torch.zeros(3, dtype=F64, requires_grad=True)
    named = layout.constrain(w)
    (named["a"].sum() * 2 + named["b"] * 3).backward()
    assert w.grad is not None
    assert w.grad.tolist() == [2.0, 2.0, 3.0]


def test_a_shape_may_be_a_single_number() -> None:
    assert Param(3).shape == (3,)  # pyright: ignore[reportArgumentType]
    assert Param([2, 3]).shape == (2, 3)  # pyright: ignore[reportArgumentType]
    assert Param(torch.Size((2,))).shape == (2,)


def test_the_signature_of_a_layout_holds_names_and_shapes() -> None:
    first = Layout({"a": Param((2,)), "b": Param()})
    assert first.signature() == [["a", [2]], ["b", []]]
    assert first.signature() != Layout({"b": Param(), "a": Param((2,))}).signature()


def test_parameters_that_do_not_fit_a_layout_raise_an_error() -> None:
    layout = Layout({"a": Param((2,)), "b": Param((), constraints.positive)})
    with pytest.raises(InputError, match=r"must hold every parameter; missing \['b'\]"):
        layout.unconstrain({"a": torch.zeros(2)})
    for wrong in (torch.zeros(3), torch.zeros(()), torch.zeros(5, 3)):
        with pytest.raises(InputError, match=r"'a' argument of params must have the shape \(2,\).*got"):
            layout.unconstrain({"a": wrong, "b": torch.ones(())})
    with pytest.raises(InputError, match="leading"):
        layout.unconstrain({"a": torch.zeros(5, 2), "b": torch.ones(4)})
    with pytest.raises(InputError, match="at least one parameter"):
        Layout({})
    for shape in ((0,), (-1,), (1.5,), ("a",)):
        with pytest.raises(InputError, match="'shape' argument of Param must hold positive integers"):
            Param(shape)  # pyright: ignore[reportArgumentType]


def test_a_value_outside_its_support_has_no_finite_coordinates() -> None:
    layout = Layout({"b": Param((), constraints.positive)})
    try:
        w = layout.unconstrain({"b": torch.tensor(-1.0)})
    except InputError:
        return
    assert not bool(torch.isfinite(w).all())
