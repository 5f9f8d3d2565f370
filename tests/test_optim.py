"""The optimizer against the method and hand-derived steps, and what goes wrong in people's own loops."""

import copy
import io
import socket
import warnings

import pytest
import torch
from torch import multiprocessing, nn
from torch.nn.functional import mse_loss

import priory as pr
from priory.core.data import Data
from priory.core.errors import DivergedError
from priory.core.streams import stream
from priory.fitting.prepare import make_target
from priory.methods.base import Plan
from priory.methods.variational.natural import NaturalGradient
from priory.optim import VariationalOnlineNewton
from priory.testing import LinearRegression

F64 = torch.float64


def regression(dtype=torch.float32):
    generator = stream(0, "rows")
    X = torch.randn(24, 3, generator=generator)
    return X.to(dtype), (X[:, :1] - 2 * X[:, 1:2] + 0.1 * torch.randn(24, 1, generator=generator)).to(dtype)


def network(dtype=torch.float32):
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=stream(p.numel(), "start")))
    return net.to(dtype)


def optimizer_of(net, **options):
    return VariationalOnlineNewton(net.parameters(), **{"num_data": 24, "prior_precision": 1.0, **options})


def train(net, optimizer, steps, blocks=1):
    X, y = regression(next(net.parameters()).dtype)
    for _ in range(steps):
        for _ in range(blocks):
            with optimizer.sampled():
                mse_loss(net(X), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def bits(net):
    return [p.detach().clone() for p in net.parameters()]


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# The mathematics.


@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("samples", [1, 3])
def test_it_takes_the_steps_of_the_method_at_the_same_noise(temperature, samples):
    exact = LinearRegression.make(0)
    model = exact.model()
    data = Data.of(exact.data, 10**6).prepared(model.prepare)
    target = make_target(model, data, temperature)
    method = NaturalGradient(samples=samples, schedule="constant", hessian_rate=0.01)
    state = method.init(target, Plan(data, 10), stream(0, "init"))
    net, (X, y) = copy.deepcopy(model.net), exact.data
    options = {"betas": (0.9, 0.99), "temperature": temperature, "prior_precision": exact.prior_scale**-2}
    optimizer = optimizer_of(net, num_data=len(y), **options)
    for _ in range(4):
        method.draw(state, stream(0, "unused"))
        for i in range(samples):
            with optimizer.sampled():
                w = torch.cat([p.detach().flatten() for p in net.parameters()])
                state.w[i].copy_(w)
                state.noise[i].copy_((w - state.loc) * state.precision.sqrt())
                (mse_loss(net(X)[:, 0], y) / (2 * exact.noise**2)).backward()
        w = state.w[0] if samples == 1 else state.w
        method.update(target, state, w, *target.log_likelihood_and_grad(w, data.tensors))
        optimizer.step()
        optimizer.zero_grad()
        mean, std = (torch.cat([t.flatten() for t in found().values()]) for found in (optimizer.mean, optimizer.std))
        torch.testing.assert_close(mean, state.loc, rtol=0, atol=1e-8)
        torch.testing.assert_close(std, state.precision.rsqrt(), rtol=0, atol=1e-8)


def test_one_step_is_the_one_derived_by_hand():
    p = nn.Parameter(torch.tensor([0.5, -1.0], dtype=F64))
    options = {"initial_scale": 0.2, "clip": 0.3, "lr": 0.5, "betas": (0.8, 0.9), "prior_precision": 4.0}
    optimizer = VariationalOnlineNewton([p], 10, temperature=2.0, **options)
    slope = torch.tensor([1.0, -3.0], dtype=F64)
    with optimizer.sampled():
        noise = (p.detach() - torch.tensor([0.5, -1.0], dtype=F64)) / 0.2
        (slope * p).sum().backward()
    optimizer.step()
    S = torch.full((2,), 25.0, dtype=F64)
    change = (10 * slope * noise / 0.2 + 2 * 4.0) / 2 - S
    S = S + 0.1 * change + 0.1**2 / 2 * change**2 / S
    m = torch.tensor([0.5, -1.0], dtype=F64)
    move = (10 * slope + 2 * 4.0 * m) / (2 * S)
    torch.testing.assert_close(optimizer.std()[p], S.rsqrt(), rtol=0, atol=1e-10)
    torch.testing.assert_close(p.detach(), m - 0.5 * move.clamp(-0.3, 0.3), rtol=0, atol=1e-10)


def test_weight_decay_is_a_precision_of_num_data_times_it():
    nets = network(), network()
    train(nets[0], optimizer_of(nets[0], weight_decay=0.125, prior_precision=None), 3)
    train(nets[1], optimizer_of(nets[1], prior_precision=3.0), 3)
    assert same(bits(nets[0]), bits(nets[1]))


def test_draws_have_the_standard_deviations_that_std_returns():
    """4,000 draws; 5 standard errors of a standard deviation (false alarms: 6e-7 per entry)."""
    p = nn.Parameter(torch.zeros(3))
    optimizer = VariationalOnlineNewton([p], 10, prior_precision=1.0, initial_scale=0.7)
    found = []
    for _ in range(4_000):
        with optimizer.sampled(train=False):
            found.append(p.detach().clone())
    spread = torch.stack(found).std(0)
    assert float((spread / 0.7 - 1).abs().max()) < 5 / (2 * 4_000) ** 0.5


# Loops as people write them.


def test_the_mean_is_restored_exactly_after_a_block_and_after_an_exception():
    net = network()
    optimizer, (X, y) = optimizer_of(net), regression()
    train(net, optimizer, 2)
    before, state = bits(net), copy.deepcopy(optimizer.state_dict()["state"])
    with optimizer.sampled():
        mse_loss(net(X), y).backward()
        assert not same(before, bits(net))
    assert same(before, bits(net))
    gradients = [p.grad.clone() for p in net.parameters()]

    def broken():
        with optimizer.sampled():
            mse_loss(net(X), y).backward()
            raise KeyError

    with pytest.raises(KeyError):
        broken()
    assert same(before, bits(net))
    assert same(gradients, [p.grad for p in net.parameters()])  # nothing of the broken block remains
    for index, kept in optimizer.state_dict()["state"].items():
        assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(state[index][k])) for k, v in kept.items())
    optimizer.step()


def test_blocks_before_a_step_are_averaged_whether_rows_come_together_or_apart():
    """With a tiny standard deviation all blocks evaluate the same network."""
    (X, y), found = regression(F64), []
    for parts in (1, 3):
        net = network(F64)
        optimizer = optimizer_of(net, initial_scale=1e-9, clip=1e9, betas=(0.9, 0.9999999))
        for rows, targets in zip(X.chunk(parts), y.chunk(parts), strict=True):
            with optimizer.sampled():
                mse_loss(net(rows), targets).backward()
        optimizer.step()
        found.append([optimizer.state[p]["momentum"] for p in net.parameters()])
    for together, apart in zip(*found, strict=True):
        torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-7)


def test_gradients_from_before_the_first_block_do_not_count():
    nets = network(), network()
    X, y = regression()
    for net, clears in zip(nets, (True, False), strict=True):
        optimizer = optimizer_of(net)
        for _ in range(3):
            with optimizer.sampled():
                mse_loss(net(X), y).backward()
            optimizer.step()
            if clears:
                net.zero_grad()
    assert same(bits(nets[0]), bits(nets[1]))


def test_unused_and_frozen_parameters_keep_their_mean_and_their_state():
    net = network()
    unused, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = VariationalOnlineNewton([*net.parameters(), unused, frozen], 24, prior_precision=1.0)
    std = optimizer.std()[unused].clone()
    X, y = regression()
    with optimizer.sampled():
        assert not torch.equal(unused, torch.ones(2))
        assert torch.equal(frozen, torch.ones(2))
        mse_loss(net(X), y).backward()
    optimizer.step()
    assert torch.equal(unused, torch.ones(2))
    assert torch.equal(optimizer.std()[unused], std)
    assert optimizer.state[unused]["step"] == 0
    assert optimizer.state[next(net.parameters())]["step"] == 1


def test_groups_have_their_own_rates_and_priors_and_may_be_added():
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = VariationalOnlineNewton([{"params": [first], "lr": 1e-3}], 10, prior_precision=1.0)
    optimizer.add_param_group({"params": [second], "prior_precision": 100.0})
    assert float(optimizer.std()[first][0]) == pytest.approx(0.1)
    assert float(optimizer.std()[second][0]) == pytest.approx(0.01)
    with optimizer.sampled():
        ((first + second) * 1e6).sum().backward()
    optimizer.step()  # both are clipped: a learning rate of a tenth of the prior's standard deviation
    torch.testing.assert_close(first.detach(), torch.full((2,), -1e-4))
    torch.testing.assert_close(second.detach(), torch.full((2,), -0.3 * 0.01))


def test_a_closure_is_called_once_in_its_own_block():
    nets = network(), network()
    X, y = regression()
    train(nets[0], optimizer_of(nets[0]), 1)
    optimizer, calls = optimizer_of(nets[1]), []

    def closure():
        optimizer.zero_grad()
        loss = mse_loss(nets[1](X), y)
        loss.backward()
        calls.append(loss)
        return loss

    assert optimizer.step(closure) is calls[0]
    assert len(calls) == 1
    assert same(bits(nets[0]), bits(nets[1]))


def test_a_scheduler_of_torch_sets_its_rate():
    net = network()
    optimizer = optimizer_of(net, lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train(net, optimizer, 1)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_a_block_that_does_not_train_leaves_gradients_alone():
    net = network()
    optimizer, (X, y) = optimizer_of(net), regression()
    with optimizer.sampled():
        mse_loss(net(X), y).backward()
    gradients = [p.grad.clone() for p in net.parameters()]
    with optimizer.sampled(train=False):
        net(X).sum().backward()
    assert same(gradients, [p.grad for p in net.parameters()])
    optimizer.step()
    nets = network(), net
    train(nets[0], optimizer_of(nets[0]), 1)
    assert same(bits(nets[0]), bits(nets[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, F64])
def test_a_restored_state_continues_with_the_same_result(dtype):
    whole, halves = network(dtype), network(dtype)
    optimizer = optimizer_of(whole)
    train(whole, optimizer, 6)
    first = optimizer_of(halves)
    train(halves, first, 3)
    file = io.BytesIO()
    torch.save([halves.state_dict(), first.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    halves = network(dtype)
    halves.load_state_dict(weights)
    second = optimizer_of(halves, seed=5)
    second.load_state_dict(state)
    train(halves, second, 3)
    assert same(bits(whole), bits(halves))
    assert same(optimizer.std().values(), second.std().values())
    assert same(optimizer.mean().values(), second.mean().values())


# Mixed precision.


def test_half_precision_parameters_have_a_state_in_single_precision_that_small_steps_reach():
    p = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = VariationalOnlineNewton([p], 10, prior_precision=1.0, lr=1e-3)
    for _ in range(100):
        with optimizer.sampled():
            (1e4 * p).sum().backward()  # clipped: 1e-4 a step, which a bfloat16 near 1 can't take
        optimizer.step()
        optimizer.zero_grad()
    assert float(optimizer.mean()[p]) == pytest.approx(0.99, abs=1e-5)
    assert float(p.detach()) == pytest.approx(0.99, abs=4e-3)
    assert optimizer.state[p]["precision"].dtype == torch.float32
    with torch.no_grad():
        p.fill_(3.0)  # a value set by the user counts
    assert float(optimizer.mean()[p]) == 3.0


def test_it_trains_under_autocast():
    net = network()
    optimizer, (X, y) = optimizer_of(net, lr=1.0), regression()
    before = float(mse_loss(net(X), y).detach())
    for _ in range(100):
        with optimizer.sampled(), torch.autocast("cpu", dtype=torch.bfloat16):
            mse_loss(net(X).float(), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(p.dtype == torch.float32 and bool(p.isfinite().all()) for p in net.parameters())
    assert float(mse_loss(net(X), y).detach()) < 0.5 * before


def test_a_gradient_scaler_changes_nothing_and_skips_steps_that_are_not_finite():
    nets = network(F64), network(F64)
    X, y = regression(F64)
    optimizers = [optimizer_of(net) for net in nets]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10**6)
    for step in range(4):
        for net, optimizer, scales in zip(nets, optimizers, (False, True), strict=True):
            with optimizer.sampled(scaler=scaler if scales else None):
                loss = mse_loss(net(X), y) * (float("inf") if step == 1 else 1.0)
                (scaler.scale(loss) if scales else loss).backward()
            if scales:
                before = bits(net)
                scaler.step(optimizer)
                scaler.update()
                assert same(before, bits(net)) == (step == 1)
            elif step != 1:
                optimizer.step()
            optimizer.zero_grad()
    for scaled, plain in zip(bits(nets[1]), bits(nets[0]), strict=True):
        torch.testing.assert_close(scaled, plain, rtol=1e-10, atol=1e-12)
    for scaled, plain in zip(optimizers[1].std().values(), optimizers[0].std().values(), strict=True):
        torch.testing.assert_close(scaled, plain, rtol=1e-10, atol=0)


# Several processes.


def worker(rank, port, queue):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        net, (X, y) = network(F64), regression(F64)
        rare = nn.Parameter(torch.ones(1, dtype=F64))  # used by the second process alone
        idle = nn.Parameter(torch.ones(1, dtype=F64))
        options = {"prior_precision": 1.0, "betas": (0.0, 0.9), "clip": 1e9}
        optimizer = VariationalOnlineNewton([*net.parameters(), rare, idle], 24, **options)
        kept = []
        for _ in range(3):
            weight = net[0].weight
            mean, std = weight.detach().clone(), optimizer.std()[weight]
            with optimizer.sampled():
                noise = (weight.detach() - mean) / std
                loss = mse_loss(net(X[rank::2]), y[rank::2])
                (loss + rare.sum() if rank else loss).backward()
            kept.append((noise.numpy().copy(), weight.grad.numpy().copy()))
            optimizer.step()
            optimizer.zero_grad()
            kept[-1] += (
                optimizer.state[weight]["precision"].numpy().copy(),
                optimizer.state[weight]["momentum"].numpy().copy(),
            )
        final = [p.detach().numpy().copy() for p in (*net.parameters(), rare, idle)]
        queue.put((rank, kept, final))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_processes_draw_their_own_noise_average_products_and_end_with_the_same_state():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        processes = multiprocessing.spawn(worker, (port, queue), nprocs=2, join=False)
        found = {rank: rest for rank, *rest in (queue.get(), queue.get())}
        while not processes.join():
            pass
    (kept, final), (kept_other, final_other) = found[0], found[1]
    for mine, other in zip(final, final_other, strict=True):
        assert mine.tobytes() == other.tobytes()
    assert final[-2][0] != 1.0
    assert final[-1][0] == 1.0
    S = torch.full((4, 3), 100.0, dtype=F64)
    for mine, other in zip(kept, kept_other, strict=True):
        eps, d, precision, momentum = (torch.tensor(t) for t in mine)
        eps_other, d_other, *_ = (torch.tensor(t) for t in other)
        assert not torch.allclose(eps, eps_other)
        torch.testing.assert_close(momentum, (d + d_other) / 2, rtol=0, atol=1e-10)
        change = 24 * (d * eps + d_other * eps_other) / 2 * S.sqrt() + 1.0 - S
        S = S + 0.1 * change + 0.1**2 / 2 * change**2 / S
        torch.testing.assert_close(precision, S, rtol=1e-8, atol=0)


# Misuse.


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_data": None}, "'num_data' argument of VariationalOnlineNewton must be the number of rows"),
        ({"num_data": 0}, "'num_data' argument of VariationalOnlineNewton must be the number of rows"),
        ({"lr": 0.0}, "'lr' argument of VariationalOnlineNewton must be a positive number"),
        ({"prior_precision": None}, "must be given, or else weight_decay"),
        ({"weight_decay": 1.0}, "must be given, or else weight_decay"),
        (
            {"prior_precision": None, "weight_decay": -1.0},
            "'weight_decay' argument of VariationalOnlineNewton must be a positive",
        ),
        ({"prior_precision": -1.0}, "'prior_precision' argument of VariationalOnlineNewton must be a positive number"),
        ({"betas": (0.9, 1.0)}, r"'betas' argument of VariationalOnlineNewton must be two numbers in \[0, 1\)"),
        ({"betas": 0.9}, r"'betas' argument of VariationalOnlineNewton must be two numbers in \[0, 1\)"),
        (
            {"initial_scale": 0.0},
            "'initial_scale' argument of VariationalOnlineNewton must be a positive number or None",
        ),
        ({"clip": -1.0}, "'clip' argument of VariationalOnlineNewton must be a positive number or None"),
        ({"temperature": 0.0}, "'temperature' argument of VariationalOnlineNewton must be a positive number"),
        ({"seed": 0.5}, "'seed' argument of VariationalOnlineNewton must be an integer"),
    ],
)
def test_invalid_options_are_refused(options, sentence):
    with pytest.raises(pr.InputError, match=sentence):
        optimizer_of(network(), **options)


def test_a_step_without_a_block_a_step_inside_one_and_nested_blocks_are_refused():
    net = network()
    optimizer, (X, y) = optimizer_of(net), regression()
    mse_loss(net(X), y).backward()
    with pytest.raises(pr.InputError, match=r"must follow a block 'with optimizer.sampled\(\):'"):
        optimizer.step()
    with optimizer.sampled(train=False):
        with pytest.raises(pr.InputError, match="must not be nested"), optimizer.sampled():
            pass
        with pytest.raises(pr.InputError, match=r"must come after the sampled\(\) block"):
            optimizer.step()
        with pytest.raises(pr.InputError, match=r"outside the sampled\(\) block"):
            optimizer.mean()


def test_a_block_without_a_backward_pass_is_an_error_and_leaves_the_mean():
    net = network()
    optimizer, (X, y), before = optimizer_of(net), regression(), bits(net)
    with pytest.raises(pr.InputError, match="must contain the backward pass"), optimizer.sampled():
        mse_loss(net(X), y)  # whose backward pass would come after the block
    with pytest.raises(pr.InputError, match="must contain the backward pass"), optimizer.sampled():
        (mse_loss(net(X), y).backward(), net.zero_grad())
    with pytest.raises(pr.InputError, match="must contain the backward pass"):
        optimizer.step(lambda: mse_loss(net(X), y))
    assert same(before, bits(net))
    train(net, optimizer, 1)  # training continues


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_cleared_before_the_step_raise_an_error(set_to_none):
    net = network()
    optimizer, (X, y), before = optimizer_of(net), regression(), bits(net)
    with optimizer.sampled():
        mse_loss(net(X), y).backward()
    net.zero_grad(set_to_none)
    with pytest.raises(pr.InputError, match="must come before the gradients of its blocks are cleared"):
        optimizer.step()
    assert same(before, bits(net))


def test_a_gradient_that_is_not_finite_raises_an_error_before_the_step():
    net = network()
    optimizer, (X, y), before = optimizer_of(net), regression(), bits(net)
    with optimizer.sampled():
        (mse_loss(net(X), y) * torch.nan).backward()
    with pytest.raises(DivergedError, match=r"parameter of shape \(4, 3\) is not finite, so the step"):
        optimizer.step()
    assert same(before, bits(net))
    assert all(bool(torch.isfinite(s).all()) for s in optimizer.std().values())
    optimizer.zero_grad()
    train(net, optimizer, 1)


def test_a_state_of_another_optimizer_is_refused():
    net = network()
    optimizer = optimizer_of(net)
    other = torch.optim.Adam(net.parameters()).state_dict()
    sentence = (
        r"The 'state_dict' argument of VariationalOnlineNewton must come from "
        r"VariationalOnlineNewton.state_dict\(\), got another with"
    )
    with pytest.raises(pr.InputError, match=sentence):
        optimizer.load_state_dict(other)
    with pytest.raises(pr.InputError, match=sentence):
        optimizer.load_state_dict({**other, "seed": 0, "draws": 0})


def test_an_option_that_a_group_does_not_have_is_refused():
    net, group = network(), {"params": [nn.Parameter(torch.zeros(1))], "learning_rate": 0.1}
    with pytest.raises(pr.InputError, match=r"must have only the options lr, betas, .*clip, got learning_rate"):
        optimizer_of(net).add_param_group(group)
    with pytest.raises(pr.InputError, match="got prior_precison"):
        VariationalOnlineNewton([{"params": net.parameters(), "prior_precison": 3.0}], 24, prior_precision=1.0)


def test_a_group_gives_its_prior_as_a_precision():
    optimizer = optimizer_of(network())
    with pytest.raises(pr.InputError, match="'group' argument of VariationalOnlineNewton must have a prior_precision"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "weight_decay": 0.1})
