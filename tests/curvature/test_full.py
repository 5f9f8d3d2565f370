"""The dense curvature against double loops of autograd, and its Gaussian against linear algebra."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.func import hessian

import priory as pr
from priory.core.data import Data
from priory.core.errors import InputError, PrioryWarning
from priory.curvature import Full, Pass, select
from priory.curvature.full import factorise
from priory.curvature.jacobian_parts import JacobianRows
from priory.curvature.layer_jacobians import jacobian_rows
from priory.fitting.prepare import make_target
from priory.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Poisson, StudentT
from priory.models.target import Target
from priory.testing import assert_covariance_close, assert_mean_close

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch.func.hessian loads it


def prepared(net: nn.Module, likelihood: Likelihood, *batch: Tensor, batch_size: int | None = None):
    model = pr.Model(net.double().eval(), likelihood, prior=1.0)
    data = Data.of(batch, batch_size).prepared(model.prepare)
    target = make_target(model, data)
    assert data.tensors is not None
    w = model.start(data.tensors[-1], torch.Size(), torch.Generator().manual_seed(0))
    return target, data, w


def jacobian_by_loop(target: Target, w: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Return outputs (n, C) and their derivatives (n, C, P), with one backward pass per output."""
    leaf = w.clone().requires_grad_()
    with torch.enable_grad():
        outputs = target.model.likelihood.arrange(target.model.network.functional(leaf, inputs, {}), target.event)
        flat = outputs.reshape(len(outputs), -1)
        rows = [
            [torch.autograd.grad(f, leaf, retain_graph=True, materialize_grads=True)[0] for f in datum]
            for datum in flat
        ]
    return outputs.detach(), torch.stack([torch.stack(r) for r in rows])


def information(target: Target, outputs: Tensor, targets: Tensor, learnt: dict[str, Tensor]) -> Tensor:
    """Return the Fisher information in the outputs of each row, (n, C, C), without the likelihood's roots."""
    likelihood, n = target.model.likelihood, len(outputs)
    if getattr(likelihood, "_source", None) == "network":
        _, scale = likelihood.location_and_scale(outputs, learnt)
        slope = torch.sigmoid(outputs[..., 1])
        return torch.diag_embed(torch.stack([scale**-2, 2 * (slope / scale) ** 2], -1).reshape(n, -1))
    if isinstance(likelihood, StudentT):
        _, scale = likelihood.location_and_scale(outputs, learnt)
        value = (likelihood.df + 1) / (likelihood.df + 3) / scale**2
        return torch.diag_embed(value.expand_as(outputs).reshape(n, -1))

    def negative(f: Tensor, y: Tensor) -> Tensor:
        return -likelihood.log_prob(f.reshape(1, *outputs.shape[1:]), y[None], learnt).sum()

    rows = zip(outputs.reshape(n, -1), targets, strict=True)
    return torch.stack([hessian(lambda f, y=y: negative(f, y))(f) for f, y in rows])


def ggn_by_loop(target: Target, w: Tensor, data: Data) -> Tensor:
    assert data.tensors is not None
    *inputs, targets = data.tensors
    target.model.network.set_mode(train=False)
    outputs, jacobian = jacobian_by_loop(target, w, tuple(inputs))
    inner = information(target, outputs, targets, target.model.learnt_at(w))
    size = target.model.network.size
    jacobian = jacobian[..., :size]
    return torch.einsum("ncp,ncd,ndq->pq", jacobian, inner, jacobian)


def labels(kind: str, n: int, *event: int) -> Tensor:
    g = torch.Generator().manual_seed(1)
    if kind == "class":
        return torch.randint(0, 3, (n, *event), generator=g)
    if kind == "bit":
        return torch.randint(0, 2, (n, *event), generator=g).double()
    if kind == "count":
        return torch.randint(0, 5, (n, *event), generator=g).double()
    return torch.randn(n, *event, generator=g, dtype=torch.float64)


LIKELIHOODS = {
    "a given noise": (Gaussian(0.3), "number", (), 1),
    "a learnt noise": (Gaussian(), "number", (2,), 2),
    "a noise per output": (Gaussian(torch.tensor([0.3, 1.5])), "number", (2,), 2),
    "a learnt noise per output": (Gaussian(outputs=2), "number", (2,), 2),
    "a noise from the network": (Gaussian("network"), "number", (2,), 4),
    "classes": (Categorical(), "class", (), 3),
    "a binary label": (Bernoulli(), "bit", (), 1),
    "several binary labels": (Bernoulli(), "bit", (3,), 3),
    "counts": (Poisson(), "count", (), 1),
    "heavy tails": (StudentT(4.0, 0.5), "number", (2,), 2),
    "heavy tails with a learnt scale": (StudentT(4.0), "number", (), 1),
    "a pixelwise class": (Categorical(), "class", (2, 2), 3),
    "an image": (Gaussian(0.3), "number", (2, 2, 2), 2),
    "pixelwise binary labels": (Bernoulli(), "bit", (3, 2, 2), 3),
}


def problem(name: str, n: int = 6, hidden: int = 3):
    likelihood, kind, event, width = LIKELIHOODS[name]
    torch.manual_seed(2)
    if len(event) > 1:
        net = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, width, 1))
        return prepared(net, likelihood, numbers(n, 1, 2, 2), labels(kind, n, *event))
    net = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, width))
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return prepared(net, likelihood, x, labels(kind, n, *event))


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_the_ggn_equals_a_double_loop_of_autograd_for_every_likelihood(name: str) -> None:
    target, data, w = problem(name)
    curvature = Full.of(Pass(target, w, data, select(target.model)))
    torch.testing.assert_close(curvature.dense(), ggn_by_loop(target, w, data), rtol=1e-8, atol=1e-10)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mix(x, x, x, need_weights=False)[0].mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 3, batch_first=True)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Shared(nn.Module):
    """One layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(torch.tanh(self.inner(x)))))


class Tied(nn.Module):
    """An embedding whose weight is also that of the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(5, 2), nn.Linear(2, 5, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.embed(x).sum(1)))[:, :2]


class Adapted(nn.Module):
    """A frozen layer with a trainable low-rank layer in parallel."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(3, 2).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(1, 3)), nn.Parameter(torch.randn(2, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + torch.tanh(x @ self.down.mT) @ self.up.mT


def normed() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))
    for name, buffer in net.named_buffers():
        if buffer.is_floating_point():
            buffer.copy_(0.5 + torch.rand(buffer.shape) if "var" in name else torch.randn(buffer.shape))
    return net


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, 5, shape, generator=torch.Generator().manual_seed(5))


MODULES = {
    "linear": (lambda: nn.Linear(3, 2), lambda: numbers(4, 3)),
    "conv1d": (
        lambda: nn.Sequential(nn.Conv1d(2, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(6, 2)),
        lambda: numbers(4, 2, 4),
    ),
    "conv2d with a relu in place": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2)),
        lambda: numbers(4, 1, 3, 3),
    ),
    "conv2d in groups": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 2, groups=2, padding=1, stride=2), nn.Flatten(), nn.Linear(16, 2)),
        lambda: numbers(4, 2, 3, 3),
    ),
    "conv3d": (
        lambda: nn.Sequential(nn.Conv3d(1, 2, 2), nn.Flatten(), nn.Linear(2, 2)),
        lambda: numbers(4, 1, 2, 2, 2),
    ),
    "embedding": (lambda: nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(6, 2)), lambda: tokens(4, 3)),
    "layer norm": (lambda: nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 2)), lambda: numbers(4, 3)),
    "batch norm": (normed, lambda: numbers(4, 1, 3, 3)),
    "attention": (Attention, lambda: numbers(4, 3, 4)),
    "lstm": (Recurrent, lambda: numbers(4, 3, 2)),
    "a layer called twice": (Shared, lambda: numbers(4, 3)),
    "tied weights": (Tied, lambda: tokens(4, 3)),
    "an adapter": (Adapted, lambda: numbers(4, 3)),
}


def module_problem(name: str, likelihood: Likelihood | None = None):
    torch.manual_seed(4)
    make, inputs = MODULES[name]
    return prepared(make(), likelihood or Categorical(), inputs(), torch.tensor([0, 1, 1, 0]))


@pytest.mark.parametrize("name", MODULES)
def test_the_ggn_equals_a_double_loop_of_autograd_for_every_module(name: str) -> None:
    target, data, w = module_problem(name)
    curvature = Full.of(Pass(target, w, data, select(target.model)))
    torch.testing.assert_close(curvature.dense(), ggn_by_loop(target, w, data), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", MODULES)
def test_the_hessian_equals_double_autograd_for_every_module(name: str) -> None:
    target, data, w = module_problem(name)
    curvature = Full.of(Pass(target, w, data, select(target.model), kind="hessian"))
    assert data.tensors is not None
    *inputs, y = data.tensors
    model, p = target.model, target.model.network.size

    def loss(v: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model.network.functional(v, tuple(inputs), {}), y, reduction="sum")

    model.network.set_mode(train=False)
    leaf = w[:p].clone().requires_grad_()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        slope = torch.autograd.grad(loss(leaf), leaf, create_graph=True)[0]
        rows = [torch.autograd.grad(s, leaf, retain_graph=True, materialize_grads=True)[0] for s in slope]
    torch.testing.assert_close(curvature.dense(), torch.stack(rows), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ["a learnt noise", "a noise from the network", "counts", "heavy tails"])
def test_the_hessian_equals_torch_func_hessian_of_the_log_likelihood(name: str) -> None:
    target, data, w = problem(name)
    p = target.model.network.size
    found = Full.of(Pass(target, w, data, select(target.model), kind="hessian")).dense()
    expected = -hessian(lambda v: target.model.log_likelihood_sum(v, data.tensors))(w)[:p, :p]
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    "name", ["a given noise", "a learnt noise per output", "classes", "several binary labels", "counts"]
)
def test_the_hessian_is_the_ggn_of_a_linear_model(name: str) -> None:
    likelihood, kind, event, width = LIKELIHOODS[name]
    torch.manual_seed(0)
    target, data, w = prepared(nn.Linear(3, width), likelihood, numbers(7, 3), labels(kind, 7, *event))
    ggn, full = (Full.of(Pass(target, w, data, select(target.model), kind=k)).dense() for k in ("ggn", "hessian"))
    torch.testing.assert_close(ggn, full, rtol=1e-8, atol=1e-10)


def test_the_empirical_fisher_is_the_sum_of_outer_products_of_gradients() -> None:
    target, data, w = problem("classes")
    assert data.tensors is not None
    p, expected = target.model.network.size, 0.0
    for x, y in zip(*data.tensors, strict=True):
        leaf = w.clone().requires_grad_()
        value = target.model.log_likelihood_sum(leaf, (x[None], y[None]))
        g = torch.autograd.grad(value, leaf)[0][:p]
        expected = expected + torch.outer(g, g)
    found = Full.of(Pass(target, w, data, select(target.model), kind="empirical")).dense()
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ["classes", "a noise from the network", "heavy tails"])
def test_the_mean_of_the_sampled_fisher_is_the_ggn(name: str) -> None:
    target, data, w = problem(name, n=3, hidden=2)
    selection, generator = select(target.model, ["2.*"]), torch.Generator().manual_seed(8)
    few = [Full.of(Pass(target, w, data, selection, "fisher", 8, generator)).dense() for _ in range(100)]
    exact = Full.of(Pass(target, w, data, selection)).dense()
    # 5 standard errors, about 100 entries: false alarm below 1e-4
    assert_mean_close(torch.stack(few).flatten(1), exact.flatten(), sigmas=5)


def test_samples_of_the_fisher_are_averaged() -> None:
    target, data, w = problem("classes", n=3, hidden=2)
    selection, generator = select(target.model, ["2.*"]), torch.Generator().manual_seed(8)
    many = Full.of(Pass(target, w, data, selection, "fisher", 1000, generator)).dense()
    exact = Full.of(Pass(target, w, data, selection)).dense()
    assert (many - exact).norm() < 0.1 * exact.norm()


def test_the_curvature_of_a_selection_is_a_block_of_the_whole() -> None:
    target, data, w = problem("classes")
    every = Full.of(Pass(target, w, data, select(target.model))).dense()
    for over in ("last", ["0.bias", "2.weight"], torch.tensor([8, 0, 5, 13])):
        selection = select(target.model, over)
        found = Full.of(Pass(target, w, data, selection))
        expected = every[selection.places][:, selection.places]
        torch.testing.assert_close(found.dense(), expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(found.diagonal(), expected.diagonal(), rtol=1e-10, atol=1e-12)
        twice = Full.of(Pass(target, w, data, selection, kind="hessian")).dense()
        assert twice.shape == expected.shape


@pytest.mark.parametrize("kind", ["ggn", "hessian", "empirical"])
def test_the_result_does_not_depend_on_the_memory_limit(kind: str) -> None:
    target, data, w = problem("classes")
    whole, few = (
        Full.of(Pass(target, w, data, select(target.model), kind=kind, limit=m)).dense() for m in (1 << 29, 1)
    )
    torch.testing.assert_close(whole, few, rtol=1e-10, atol=1e-12)


def test_the_jacobian_of_all_the_data_is_never_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    target, data, w = problem("classes", n=50)
    held: list[int] = []
    plain = JacobianRows.dense

    def counted(rows: JacobianRows) -> Tensor:
        found = plain(rows)
        held.append(found.numel() * found.element_size())
        return found

    monkeypatch.setattr(JacobianRows, "dense", counted)
    Full.of(Pass(target, w, data, select(target.model), limit=20_000))
    assert sum(held) == 50 * 3 * 21 * 8
    assert max(held) <= 20_000 / 3


@pytest.mark.parametrize("kind", ["ggn", "empirical"])
def test_the_curvature_of_one_layer_is_a_block_of_the_whole(kind: str) -> None:
    """One layer uses the rule of its type; the whole network uses rows of the Jacobian."""
    target, data, w = problem("classes")
    whole = select(target.model)
    for layer in (["0.*"], ["2.*"]):
        some = select(target.model, layer)
        block = Full.of(Pass(target, w, data, whole, kind=kind)).dense()[some.places[:, None], some.places]
        torch.testing.assert_close(
            Full.of(Pass(target, w, data, some, kind=kind)).dense(), block, rtol=1e-10, atol=1e-12
        )


def test_the_rows_of_a_loader_that_drops_some_are_scaled_to_all() -> None:
    target, data, w = problem("classes")
    assert data.tensors is not None
    part = Data.of(tuple(t[:4] for t in data.tensors))
    expected = 6 / 4 * Full.of(Pass(Target(target.model, 4), w, part, select(target.model))).dense()
    torch.testing.assert_close(
        Full.of(Pass(target, w, part, select(target.model))).dense(), expected, rtol=1e-12, atol=0
    )
    twice = [
        Full.of(Pass(t, w, part, select(target.model), kind="hessian")).dense()
        for t in (Target(target.model, 4), target)
    ]
    torch.testing.assert_close(twice[1], 6 / 4 * twice[0], rtol=1e-12, atol=0)


def test_the_buffers_of_a_fit_are_used() -> None:
    target, data, w = module_problem("batch norm")
    buffers = {"1.running_var": torch.tensor([4.0, 0.25], dtype=torch.float64)}
    plain, moved = (Full.of(Pass(target, w, data, select(target.model), buffers=b)).dense() for b in (None, buffers))
    scale = ((plain[:8, :8].diagonal() + 1e-12) / (moved[:8, :8].diagonal() + 1e-12)).sqrt()
    assert not torch.allclose(scale, torch.ones_like(scale), atol=1e-3)
    again = Full.of(Pass(target, w, data, select(target.model))).dense()
    assert torch.equal(plain, again)


def test_a_network_that_squeezes_a_batch_of_one_is_supported() -> None:
    class Squeezed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.layer(x)).squeeze()

    target, data, w = prepared(Squeezed(), Gaussian(0.5), numbers(5, 3), numbers(5))
    found = Full.of(Pass(target, w, data, select(target.model))).dense()
    torch.testing.assert_close(found, ggn_by_loop(target, w, data), rtol=1e-8, atol=1e-10)


def test_a_network_in_float32_has_a_curvature_without_negative_eigenvalues() -> None:
    torch.manual_seed(0)
    model = pr.Model(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)), Categorical(), prior=1.0)
    data = Data.of((torch.randn(9, 3), torch.arange(9) % 2)).prepared(model.prepare)
    target = make_target(model, data)
    curvature = Full.of(Pass(target, model.network.initial, data, select(model)))
    values = torch.linalg.eigvalsh(curvature.dense())
    assert curvature.dense().dtype == torch.float64
    assert values[0] > -1e-14 * values[-1]
    gaussian = curvature.gaussian(torch.ones(len(values)))
    assert gaussian.draw(3, torch.Generator()).dtype == gaussian.variance().dtype == torch.float32
    assert gaussian.log_det.dtype == torch.float64


# The Gaussian.


def curved(name: str = "classes"):
    target, data, w = problem(name)
    curvature = Full.of(Pass(target, w, data, select(target.model)))
    precision = 0.5 + torch.rand(target.model.network.size, generator=torch.Generator().manual_seed(6)).double()
    return curvature, precision


def test_the_precision_of_the_gaussian_is_scale_times_h_plus_the_prior_precision() -> None:
    curvature, precision = curved()
    gaussian = curvature.gaussian(precision, scale=0.25)
    matrix = 0.25 * curvature.dense() + torch.diag(precision)
    inverse, p = torch.linalg.inv(matrix), len(precision)
    torch.testing.assert_close(gaussian.log_det, torch.logdet(matrix), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gaussian.variance(), inverse.diagonal(), rtol=1e-10, atol=0)
    v = numbers(2, 3, p)
    torch.testing.assert_close(gaussian.solve(v), v @ inverse, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(gaussian.quadratic(v), torch.einsum("abp,pq,abq->ab", v, matrix, v), rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    "name", ["conv2d with a relu in place", "embedding", "batch norm", "attention", "lstm", "an adapter"]
)
@pytest.mark.parametrize("over", ["all", "some"])
def test_the_covariance_of_outputs_equals_that_with_the_dense_jacobian(name: str, over: str) -> None:
    target, data, w = module_problem(name)
    assert data.tensors is not None
    selection = select(target.model, "all" if over == "all" else torch.arange(0, target.model.network.size, 2))
    curvature = Full.of(Pass(target, w, data, selection))
    precision = 0.5 + numbers(selection.size).square()
    inverse = torch.linalg.inv(curvature.dense() + torch.diag(precision))
    inputs = data.tensors[:-1]
    jacobian = jacobian_by_loop(target, w, inputs)[1][..., selection.places]
    gaussian = curvature.gaussian(precision)
    found = torch.cat(
        [gaussian.output_covariance(part) for part in jacobian_rows(target, w, inputs, selection, limit=2000)]
    )
    torch.testing.assert_close(found, jacobian @ inverse @ jacobian.mT, rtol=1e-8, atol=1e-10)


def test_draws_have_the_covariance_of_the_gaussian() -> None:
    curvature, precision = curved("a given noise")
    gaussian = curvature.gaussian(precision)
    draws = gaussian.draw(20_000, torch.Generator().manual_seed(9))
    inverse = torch.linalg.inv(curvature.dense() + torch.diag(precision))
    assert_mean_close(draws, torch.zeros_like(precision), sigmas=5)  # 13 means: false alarm below 1e-5
    assert_covariance_close(draws, inverse, sigmas=6)  # 91 entries: false alarm below 1e-6


def test_a_saved_curvature_loads_unchanged() -> None:
    curvature, precision = curved()
    again = Full.of_tensors(curvature.selection, curvature.tensors(), **curvature.to_json())
    assert torch.equal(again.gaussian(precision).variance(), curvature.gaussian(precision).variance())
    assert again.kind == curvature.kind
    assert curvature.notes() == []


def test_weights_that_are_not_finite_are_refused() -> None:
    target, data, w = problem("classes")
    curvature = Full.of(Pass(target, torch.full_like(w, torch.nan), data, select(target.model)))
    with pytest.raises(
        InputError,
        match=r"'curvature' argument of Laplace must be finite at the weights, got "
        r"NaN or infinity",
    ):
        curvature.gaussian(torch.ones(21).double())


def test_an_indefinite_hessian_is_refused_with_its_smallest_eigenvalue() -> None:
    curvature, precision = curved()
    low = Full(curvature.selection, torch.diag(torch.linspace(-2.0, 5.0, len(precision)).double()), "hessian")
    with pytest.raises(InputError, match=r"'hessian' .* positive definite, got a smallest eigenvalue of -1.9"):
        low.gaussian(torch.full_like(precision, 0.1))
    assert math.isfinite(float(low.gaussian(torch.full_like(precision, 2.1)).log_det))


def test_a_flat_prior_over_unidentified_directions_is_refused() -> None:
    curvature, precision = curved()  # softmax doesn't change when all logits are shifted
    with pytest.raises(InputError, match=r"above zero where the curvature is zero, got zero .* singular in \d+ of 21"):
        curvature.gaussian(torch.zeros_like(precision))


def test_a_numerically_singular_curvature_is_refused_under_a_flat_prior() -> None:
    matrix = torch.tensor([[1.0, 1.0 - 2**-52], [1.0 - 2**-52, 1.0]], dtype=torch.float64)
    assert int(torch.linalg.cholesky_ex(matrix)[1]) == 0
    with pytest.raises(InputError, match="singular in 1 of 2 directions"):
        factorise(matrix, torch.zeros(2).double(), "ggn")


def test_a_flat_prior_over_identified_directions_is_accepted() -> None:
    target, data, w = prepared(nn.Linear(2, 1), Gaussian(0.5), numbers(9, 2), numbers(9))
    curvature = Full.of(Pass(target, w, data, select(target.model)))
    gaussian = curvature.gaussian(torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(gaussian.log_det, torch.logdet(curvature.dense()), rtol=1e-10, atol=0)


def test_jitter_is_added_to_a_numerically_singular_precision_with_a_warning() -> None:
    v = numbers(6)
    matrix = 1e18 * torch.outer(v, v) + 1e-3 * torch.eye(6, dtype=torch.float64)
    matrix -= 10 * torch.eye(6, dtype=torch.float64)  # a rounding error of float64 at this magnitude
    with pytest.warns(PrioryWarning, match="singular to rounding, so .* was added"):
        root = factorise(matrix, torch.full((6,), 1e-3, dtype=torch.float64), "ggn")
    assert torch.isfinite(root).all()


@pytest.mark.parametrize(
    ("precision", "scale", "message"),
    [
        (torch.ones(3), 1.0, r"'precision' argument of Full must be a tensor of 21 numbers, got \(3,\)"),
        (1.0, 1.0, "'precision' argument of Full must be a tensor of 21 numbers, got float"),
        (-torch.ones(21), 1.0, "'precision' argument of Full must hold finite numbers >= 0, got -1.0"),
        (torch.full((21,), math.nan), 1.0, "'precision' argument of Full must hold finite numbers >= 0"),
        (torch.ones(21), 0.0, "'scale' argument of Full must be a positive number, got 0.0"),
    ],
)
def test_invalid_arguments_of_the_gaussian_are_refused(precision, scale, message) -> None:
    curvature, _ = curved()
    with pytest.raises(InputError, match=message):
        curvature.gaussian(precision, scale)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"kind": "newton"},
            "'curvature' argument of Laplace must be among ggn, fisher, empirical, hessian, got 'newton'",
        ),
        (
            {"kind": "fisher", "samples": 0, "generator": torch.Generator()},
            "'samples' argument of Laplace must be an integer",
        ),
        (
            {"kind": "fisher"},
            "'generator' argument of Laplace must be a torch.Generator for the sampled Fisher, got None",
        ),
    ],
)
def test_invalid_options_are_refused(options, message) -> None:
    target, data, w = problem("classes")
    with pytest.raises(InputError, match=message):
        Full.of(Pass(target, w, data, **options))
