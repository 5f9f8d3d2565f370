"""Products of the curvature with vectors, against independently computed dense matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import priory as pr
from priory.core.data import Data
from priory.core.errors import InputError
from priory.curvature import Full, Pass, product, products, select
from priory.fitting.prepare import make_target
from priory.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Poisson, StudentT
from priory.models.target import Target


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mix(x, x, x, need_weights=False)[0].mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def numbers(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def prepared(net: nn.Module, likelihood: Likelihood, x: Tensor, y: Tensor):
    model = pr.Model(net.double(), likelihood, prior=1.0)
    data = Data.of((x, y)).prepared(model.prepare)
    target = make_target(model, data)
    return target, data, model.start(y, torch.Size(), torch.Generator().manual_seed(0))


def mlp(width: int) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, width))


def problem(name: str):
    torch.manual_seed(1)
    classes, bits = torch.tensor([0, 1, 1, 0, 1]), torch.tensor([[0.0, 1], [1, 1], [0, 0], [1, 0], [1, 1]]).double()
    convolutions = nn.Sequential(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2)).eval()
    made = {
        "classes": lambda: (mlp(2), Categorical(), numbers(5, 3), classes),
        "a learnt noise": lambda: (mlp(2), Gaussian(), numbers(5, 3), numbers(5, 2)),
        "a noise from the network": lambda: (mlp(4), Gaussian("network"), numbers(5, 3), numbers(5, 2)),
        "bits": lambda: (mlp(2), Bernoulli(), numbers(5, 3), bits),
        "counts": lambda: (mlp(1), Poisson(), numbers(5, 3), torch.arange(5.0).double()),
        "heavy tails": lambda: (mlp(1), StudentT(3.0, 0.4), numbers(5, 3), numbers(5)),
        "convolutions": lambda: (convolutions, Categorical(), numbers(5, 1, 3, 3), classes),
        "attention": lambda: (Attention(), Categorical(), numbers(5, 3, 4), classes),
        "an lstm": lambda: (Recurrent(), Categorical(), numbers(5, 3, 2), classes),
        "a pixelwise label": lambda: (
            nn.Conv2d(1, 3, 3, padding=1),
            Categorical(),
            numbers(5, 1, 2, 2),
            torch.arange(20).reshape(5, 2, 2) % 3,
        ),
    }
    return prepared(*made[name]())


NAMES = [
    *("classes", "a learnt noise", "a noise from the network", "bits", "counts", "heavy tails"),
    *("convolutions", "attention", "an lstm", "a pixelwise label"),
]


@pytest.mark.parametrize("name", NAMES)
def test_products_with_the_ggn_equal_those_with_the_dense_matrix(name: str) -> None:
    target, data, w = problem(name)
    selection = select(target.model)
    matrix = Full.of(Pass(target, w, data, selection)).dense()  # from rows of the Jacobian
    v = numbers(3, selection.size, seed=7)
    torch.testing.assert_close(product(Pass(target, w, data), v), v @ matrix, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(product(Pass(target, w, data), v[0]), v[0] @ matrix, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["classes", "a learnt noise", "a noise from the network", "heavy tails"])
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_products_with_the_hessian_equal_those_with_the_matrix_of_torch(name: str) -> None:
    target, data, w = problem(name)
    selection = select(target.model)
    p = selection.size
    matrix = -torch.func.hessian(lambda u: target.model.log_likelihood_sum(u, data.tensors))(w)[:p, :p]
    v = numbers(3, p, seed=7)
    torch.testing.assert_close(product(Pass(target, w, data, kind="hessian"), v), v @ matrix, rtol=1e-9, atol=1e-9)


def test_products_over_a_selection_use_its_block() -> None:
    target, data, w = problem("classes")
    matrix = Full.of(Pass(target, w, data, select(target.model))).dense()
    for over in ("last", ["0.*"], torch.tensor([1, 4, 13])):
        selection = select(target.model, over)
        v = numbers(2, selection.size, seed=7)
        expected = v @ matrix[selection.places][:, selection.places]
        found = product(Pass(target, w, data, selection=selection), v)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def test_products_with_the_empirical_fisher_equal_those_with_its_matrix() -> None:
    target, data, w = problem("classes")
    matrix = Full.of(Pass(target, w, data, select(target.model), kind="empirical")).dense()
    v = numbers(2, len(matrix), seed=7)
    torch.testing.assert_close(product(Pass(target, w, data, kind="empirical"), v), v @ matrix, rtol=1e-9, atol=1e-10)


def test_a_sampled_fisher_uses_the_same_labels_for_all_vectors_and_calls() -> None:
    target, data, w = problem("classes")
    selection = select(target.model)

    def of(v: Tensor) -> Tensor:
        return product(
            Pass(
                target,
                w,
                data,
                selection=selection,
                kind="fisher",
                samples=2,
                generator=torch.Generator().manual_seed(3),
            ),
            v,
        )

    unit = torch.eye(selection.size, dtype=torch.float64)
    matrix = of(unit)
    torch.testing.assert_close(matrix, matrix.mT, rtol=1e-9, atol=1e-12)
    assert torch.linalg.matrix_rank(matrix) <= 2 * 5
    v = numbers(2, selection.size, seed=7)
    torch.testing.assert_close(of(v), v @ matrix, rtol=1e-9, atol=1e-10)
    same = Full.of(Pass(target, w, data, selection, "fisher", 2, torch.Generator().manual_seed(3))).dense()
    torch.testing.assert_close(matrix, same, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", ["ggn", "hessian"])
def test_products_do_not_depend_on_the_memory_limit(kind) -> None:
    target, data, w = problem("classes")
    v = numbers(3, select(target.model).size, seed=7)
    whole, few = (product(Pass(target, w, data, kind=kind, limit=m), v) for m in (1 << 29, 1))
    torch.testing.assert_close(whole, few, rtol=1e-10, atol=1e-12)


def test_vectors_are_multiplied_one_by_one_without_vmap_support(monkeypatch: pytest.MonkeyPatch) -> None:
    target, data, w = problem("classes")
    v = numbers(3, select(target.model).size, seed=7)
    expected, plain = product(Pass(target, w, data), v), torch.autograd.grad

    def without_batches(*args, is_grads_batched: bool = False, **options):
        if is_grads_batched:
            raise RuntimeError("Batching rule not implemented")
        return plain(*args, **options)

    monkeypatch.setattr(products.torch.autograd, "grad", without_batches)
    torch.testing.assert_close(product(Pass(target, w, data), v), expected, rtol=1e-12, atol=1e-13)


def test_products_of_half_of_the_rows_are_scaled_to_all() -> None:
    target, data, w = problem("classes")
    assert data.tensors is not None
    v = numbers(select(target.model).size, seed=7)
    part = Data.of(tuple(t[:2] for t in data.tensors))
    for kind in ("ggn", "hessian"):
        own = product(Pass(Target(target.model, 2), w, part, kind=kind), v)
        torch.testing.assert_close(product(Pass(target, w, part, kind=kind), v), 2.5 * own, rtol=1e-12, atol=0)


def test_products_of_a_model_that_is_linear_in_its_weights_are_exact() -> None:
    target, data, w = prepared(nn.Linear(3, 1, bias=False), Gaussian(0.5), numbers(5, 3), numbers(5))
    assert data.tensors is not None
    x, v = data.tensors[0], numbers(2, 3, seed=7)
    expected = v @ (x.mT @ x / 0.25)
    for kind in ("ggn", "hessian"):
        torch.testing.assert_close(product(Pass(target, w, data, kind=kind), v), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["ggn", "hessian"])
def test_the_network_runs_in_evaluation_mode_with_the_buffers_of_the_fit(kind) -> None:
    net = nn.Sequential(nn.Linear(3, 2, bias=False), nn.BatchNorm1d(2, affine=False))
    target, data, w = prepared(net, Gaussian(0.5), numbers(5, 3), numbers(5, 2))
    assert data.tensors is not None
    x, v = data.tensors[0], numbers(2, 6, seed=7)
    for variance in ([4.0, 9.0], [1.0, 1.0]):
        buffers = {} if variance == [1.0, 1.0] else {"1.running_var": torch.tensor(variance).double()}
        block = x.mT @ x / 0.25
        expected = torch.cat([v[:, 3 * i : 3 * i + 3] @ block / (variance[i] + 1e-5) for i in (0, 1)], -1)
        target.model.network.set_mode(train=True)
        found = product(Pass(target, w, data, kind=kind, buffers=buffers), v)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def test_invalid_vectors_and_kinds_are_refused() -> None:
    target, data, w = problem("classes")
    with pytest.raises(InputError, match=r"The 'v' argument of product must be \(20,\) or \(k, 20\), got \(3,\)"):
        product(Pass(target, w, data), torch.zeros(3))
    with pytest.raises(InputError, match="'curvature' argument of Laplace must be among"):
        product(Pass(target, w, data, kind="newton"), torch.zeros(20).double())  # pyright: ignore[reportArgumentType]
