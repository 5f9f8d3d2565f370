"""The callback of the Hugging Face Trainer: its hooks by hand, and a Trainer where transformers is installed."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import priory as pr
from priory.core.errors import InputError, MissingExtra
from priory.integrations import transformers


def installed() -> bool:
    try:
        importlib.import_module("transformers")
        importlib.import_module("accelerate")
    except ImportError:
        return False
    return True


needs_transformers = pytest.mark.skipif(not installed(), reason="transformers or accelerate is not installed")
TOKENS = torch.arange(48).reshape(16, 3) % 7
LABELS = (TOKENS.sum(1) % 2).long()


class Logits(nn.Module):
    """Tensors in, a tensor out."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, input_ids, attention_mask):
        return self.inner(input_ids=input_ids, attention_mask=attention_mask).logits


class Inner(nn.Module):
    """What a model of transformers looks like from outside."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 2), nn.Linear(2, 2)

    def forward(self, input_ids, attention_mask):
        mask = attention_mask[..., None].to(self.head.weight)
        return SimpleNamespace(logits=self.head((self.embedding(input_ids) * mask).mean(1)))


def rows():
    return TOKENS, torch.ones_like(TOKENS), LABELS


def test_the_hooks_collect_snapshots_in_the_last_part_of_the_training(monkeypatch, tmp_path):
    monkeypatch.setattr(transformers, "extra", lambda *_: None)
    inner = Inner()
    callback = transformers.SWAGCallback(pr.Model(Logits(inner), pr.Categorical()), rows(), rank=2, begin=0.5, every=1)
    state, first = SimpleNamespace(global_step=0, max_steps=8), inner.head.bias.detach().clone()
    callback.on_train_begin(None, state, None, model=inner, optimizer=None)
    for _ in range(8):
        with torch.no_grad():
            inner.head.bias.add_(1.0)
        state.global_step += 1
        callback.on_step_end(None, state, None, model=inner)
    callback.on_epoch_end(None, state, None, model=inner)
    assert callback.count == 4
    assert torch.allclose(callback.posterior.mean["inner.head.bias"], first + 6.5)  # of steps 5, 6, 7, 8
    assert callback.posterior.predict(rows()[:2], samples=4).probs.shape == (16, 2)


def test_snapshots_are_taken_at_the_end_of_each_epoch_by_default(monkeypatch):
    monkeypatch.setattr(transformers, "extra", lambda *_: None)
    callback = transformers.SWAGCallback(pr.Model(Logits(Inner()), pr.Categorical()), rows(), begin=0.5)
    state = SimpleNamespace(global_step=0, max_steps=16)
    for epoch in range(4):
        for _ in range(4):
            state.global_step += 1
            callback.on_step_end(None, state, None)
        callback.on_epoch_end(None, state, None)
        assert callback.count == max(0, epoch - 1)


def test_another_model_raises_an_error_before_the_training(monkeypatch):
    monkeypatch.setattr(transformers, "extra", lambda *_: None)
    callback = transformers.SWAGCallback(pr.Model(Logits(Inner()), pr.Categorical()), rows())
    expected = "The 'model' argument of SWAGCallback must be made from the network that is trained"
    with pytest.raises(InputError, match=expected):
        callback.on_train_begin(None, None, None, model=Inner())


@pytest.mark.skipif(installed(), reason="transformers is installed")
def test_without_transformers_the_error_says_what_to_install():
    with pytest.raises(MissingExtra, match=r"pip install 'priory\[transformers\]'"):
        transformers.SWAGCallback(pr.Model(Logits(Inner()), pr.Categorical()), rows())


@needs_transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}, {"bf16": True}], ids=str)
def test_a_trainer_gives_a_posterior_that_predicts_and_can_be_saved(options, tmp_path):
    peer = importlib.import_module("transformers")
    config = peer.BertConfig(
        vocab_size=7,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=4,
        num_labels=2,
    )
    bert = peer.BertForSequenceClassification(config)
    tokens, mask, labels = rows()
    data = [{"input_ids": t, "attention_mask": m, "labels": y} for t, m, y in zip(tokens, mask, labels, strict=True)]
    model = pr.Model(Logits(bert).eval(), pr.Categorical())
    callback = transformers.SWAGCallback(model, rows(), rank=4, begin=0.5, every=1)
    arguments = peer.TrainingArguments(
        output_dir=str(tmp_path),
        num_train_epochs=2,
        per_device_train_batch_size=4,
        lr_scheduler_type="constant",
        learning_rate=1e-2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    peer.Trainer(bert, arguments, train_dataset=data, callbacks=[callback]).train()
    assert callback.count == (2 if "gradient_accumulation_steps" in options else 4)
    posterior = callback.posterior
    weight = "inner.classifier.weight"
    assert not torch.equal(posterior.mean[weight], model.network.initial[-18:-2].reshape(2, 8))
    posterior.save(tmp_path / "bert.priory")
    again = pr.load(tmp_path / "bert.priory", model)
    assert torch.equal(
        again.predict((tokens, mask), samples=4).probs, posterior.predict((tokens, mask), samples=4).probs
    )
