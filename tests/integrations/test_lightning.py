"""The callback of Lightning: its hooks by hand, and a Trainer where Lightning is installed."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import priory as pr
from priory.core.errors import InputError, MissingExtra
from priory.integrations import lightning, posterior_of
from priory.optim import VariationalOnlineNewton

X = torch.linspace(-1, 1, 32)[:, None]
Y = X[:, 0].sin()


def installed() -> bool:
    try:
        importlib.import_module("lightning.pytorch")
    except ImportError:
        return False
    return True


needs_lightning = pytest.mark.skipif(not installed(), reason="lightning is not installed")


class Module(nn.Module):
    """A network inside of another module, as a LightningModule has it."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(1, 1)


def moved(module, by):
    with torch.no_grad():
        module.net.weight.add_(by)


def test_the_hooks_collect_snapshots_in_the_last_part_of_the_training(monkeypatch):
    monkeypatch.setattr(lightning, "extra", lambda *_: None)
    module, trainer = Module(), SimpleNamespace(global_step=0, estimated_stepping_batches=8)
    first = float(module.net.weight.detach())
    callback = lightning.SWAGCallback(pr.Model(module.net, pr.Gaussian(0.1)), (X, Y), rank=2, begin=0.5, every=1)
    callback.on_fit_start(trainer, module)
    for batch in range(8):
        moved(module, 1.0)
        trainer.global_step += 1
        callback.on_train_batch_end(trainer, module, None, None, batch)
    callback.on_train_epoch_end(trainer, module)
    assert callback.count == 4
    assert float(callback.posterior.mean["weight"]) == pytest.approx(first + 6.5, abs=1e-5)  # of steps 5, 6, 7, 8


def test_snapshots_are_taken_at_the_end_of_each_epoch_by_default(monkeypatch):
    monkeypatch.setattr(lightning, "extra", lambda *_: None)
    module, trainer = Module(), SimpleNamespace(global_step=0, estimated_stepping_batches=16)
    callback = lightning.SWAGCallback(pr.Model(module.net, pr.Gaussian(0.1)), (X, Y), begin=0.5)
    for epoch in range(4):
        for batch in range(4):
            trainer.global_step += 1
            callback.on_train_batch_end(trainer, module, None, None, batch)
        callback.on_train_epoch_end(trainer, module)
        assert callback.count == max(0, epoch - 1)


def test_a_copy_of_the_network_raises_an_error_before_the_training(monkeypatch):
    monkeypatch.setattr(lightning, "extra", lambda *_: None)
    callback = lightning.SWAGCallback(pr.Model(Module().net, pr.Gaussian(0.1)), (X, Y))
    expected = "The 'model' argument of SWAGCallback must be made from the network that is trained"
    with pytest.raises(InputError, match=expected):
        callback.on_fit_start(None, Module())


@pytest.mark.skipif(installed(), reason="lightning is installed")
def test_without_lightning_the_error_says_what_to_install():
    with pytest.raises(MissingExtra, match=r"pip install 'priory\[lightning\]'"):
        lightning.SWAGCallback(pr.Model(nn.Linear(1, 1), pr.Gaussian(0.1)), (X, Y))


def fitted(optimizer_of, callbacks, epochs=6, **options):
    """A LightningModule after a Trainer."""
    peer = importlib.import_module("lightning.pytorch")

    class Regression(peer.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))

        def training_step(self, batch, _):
            x, y = batch
            return nn.functional.mse_loss(self.net(x)[:, 0], y)

        def configure_optimizers(self):
            return optimizer_of(self)

    module = Regression()
    loader = DataLoader(TensorDataset(X, Y), batch_size=8)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    found = callbacks(module)
    trainer = peer.Trainer(max_epochs=epochs, callbacks=found, enable_checkpointing=False, **quiet, **options)
    trainer.fit(module, loader)
    return module, found


@needs_lightning
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}], ids=str)
def test_a_trainer_gives_a_posterior_that_predicts_and_can_be_saved(options, tmp_path):
    def callbacks(module):
        model = pr.Model(module.net, pr.Gaussian(0.1))
        return [lightning.SWAGCallback(model, (X, Y), begin=0.5, every=2)]

    module, (callback,) = fitted(lambda m: torch.optim.Adam(m.parameters(), lr=0.02), callbacks, **options)
    steps = 6 * (2 if "accumulate_grad_batches" in options else 4)
    assert callback.count == steps // 4
    posterior = callback.posterior
    assert torch.equal(callback.outside.vector()[:4], module.net[0].weight.detach().reshape(-1))
    posterior.save(tmp_path / "lightning.priory")
    assert posterior.predict(X, samples=8).std.shape == (32,)


@needs_lightning
@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_of_the_trainer_includes_the_snapshots(tmp_path):
    def callbacks(module):
        return [lightning.SWAGCallback(pr.Model(module.net, pr.Gaussian(0.1)), (X, Y), begin=0.5, every=2)]

    module, (callback,) = fitted(lambda m: torch.optim.Adam(m.parameters(), lr=0.02), callbacks)
    module.trainer.save_checkpoint(tmp_path / "trainer.ckpt")
    kept = torch.load(tmp_path / "trainer.ckpt", weights_only=True)["callbacks"]["SWAGCallback"]
    (again,) = callbacks(module)
    again.load_state_dict(kept)
    assert again.count == callback.count == 6
    assert torch.equal(again.posterior.theta, callback.posterior.theta)


@needs_lightning
@pytest.mark.filterwarnings("ignore")
def test_a_trainer_runs_variational_online_newton_with_a_closure():
    kept = []

    def optimizer_of(module):
        kept.append(VariationalOnlineNewton(module.parameters(), num_data=32, prior_precision=1.0))
        return kept[0]

    module, _ = fitted(optimizer_of, lambda _: [])
    assert kept[0].draws == 24
    posterior = posterior_of(kept[0], pr.Model(module.net, pr.Gaussian(0.1)), (X, Y))
    assert float(posterior.family.scale.max()) > 0
    assert torch.equal(posterior.mean["0.weight"], module.net[0].weight.detach())
