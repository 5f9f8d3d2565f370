"""Files: a saved posterior loads unchanged, and any other file is refused with the reason."""

import json
import os
import pickletools
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributions import constraints

import priory as pr
from priory.fitting import store
from priory.posteriors import KINDS, Posterior


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


X, Y = normal(20, 3), normal(20, seed=1)


def plain(outputs: int = 1, width: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, outputs)).double()


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()


def density() -> pr.Density:
    params = {"mean": pr.Param((2,)), "spread": pr.Param((), constraints.positive)}
    return pr.Density(lambda p: -p["mean"].square().sum() - (p["spread"] - 1).square(), params)


def autoencoder() -> pr.latent.VAE:
    torch.manual_seed(0)
    return pr.latent.VAE(nn.Linear(3, 2).double(), nn.Linear(1, 3).double(), 1, pr.Gaussian(0.5))


def network(net: Callable[[], nn.Module], method: object, **options: object) -> Posterior:
    model = pr.Model(net(), pr.Gaussian())
    return pr.fit(model, (X, Y), method, steps=6, batch_size=8, seed=5, progress=False, **options)


# One posterior of each kind, and a new model to load it with.
FITTED: dict[str, tuple[Callable[[], Posterior], Callable[[], pr.Model | pr.Density]]] = {
    "point": (lambda: network(plain, pr.MAP()), lambda: pr.Model(plain(), pr.Gaussian())),
    "point with buffers": (lambda: network(normed, pr.MAP()), lambda: pr.Model(normed(), pr.Gaussian())),
    "diagonal_gaussian": (lambda: network(plain, pr.MeanField()), lambda: pr.Model(plain(), pr.Gaussian())),
    "diagonal_gaussian with buffers": (
        lambda: network(normed, pr.MeanField(samples=2)),
        lambda: pr.Model(normed(), pr.Gaussian()),
    ),
    "diagonal_gaussian in float32": (
        lambda: network(lambda: plain().float(), pr.MeanField()),
        lambda: pr.Model(plain().float(), pr.Gaussian()),
    ),
    "variational of full rank": (
        lambda: network(plain, pr.FullRank(samples=2)),
        lambda: pr.Model(plain(), pr.Gaussian()),
    ),
    "variational flow with buffers": (
        lambda: network(normed, pr.Flow(layers=2, hidden=4, samples=2)),
        lambda: pr.Model(normed(), pr.Gaussian()),
    ),
    "masked by dropout": (lambda: network(plain, pr.Dropout()), lambda: pr.Model(plain(), pr.Gaussian())),
    "mixture with buffers": (
        lambda: network(normed, pr.Ensemble(pr.MeanField(), 2)),
        lambda: pr.Model(normed(), pr.Gaussian()),
    ),
    "last_layer of a network": (lambda: network(plain, pr.LastLayer()), lambda: pr.Model(plain(), pr.Gaussian())),
    "draws of a density": (lambda: pr.fit(density(), None, pr.Pathfinder(), progress=False), density),
    "laplace of a density": (lambda: pr.fit(density(), None, pr.Laplace(), progress=False), density),
    "chains of a density": (
        lambda: pr.fit(density(), None, pr.RandomWalk(chains=4, warmup=50), steps=30, progress=False),
        density,
    ),
    "latent density of a mixture": (
        lambda: pr.fit(pr.latent.GaussianMixture(2, covariance="tied"), X, pr.EM(), progress=False),
        lambda: pr.latent.GaussianMixture(2, covariance="tied"),
    ),
    "conjugate density of a normal": (
        lambda: pr.fit(pr.latent.NormalGamma(0.0, 1.0, 1.0, 1.0), Y, pr.VariationalEM(), progress=False),
        lambda: pr.latent.NormalGamma(0.0, 1.0, 1.0, 1.0),
    ),
    "amortised density of a network": (
        lambda: pr.fit(autoencoder(), X, pr.AmortisedEM(), steps=6, progress=False),
        autoencoder,
    ),
    "diagonal_gaussian that is tempered": (
        lambda: network(plain, pr.MeanField(), temperature=0.5, tempers="posterior"),
        lambda: pr.Model(plain(), pr.Gaussian()),
    ),
    "diagonal_gaussian of a density": (
        lambda: pr.fit(density(), None, pr.MeanField(), steps=6, progress=False),
        density,
    ),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.priory"
    network(plain, pr.MeanField()).save(path)
    return path


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


WITHOUT_PARAMETERS = {"prior_function"}  # they only predict: tests/posteriors/test_prior_function.py


def test_every_kind_of_posterior_is_tested_here() -> None:
    assert {name.split(" ")[0] for name in FITTED} == set(KINDS) - WITHOUT_PARAMETERS


@pytest.mark.parametrize("name", FITTED)
def test_a_loaded_posterior_equals_the_saved_one(name: str, tmp_path: Path) -> None:
    make, model = FITTED[name]
    saved, path = make(), tmp_path / "posterior.priory"
    saved.save(path)
    loaded = pr.load(path, model())
    assert type(loaded) is type(saved)
    assert same(loaded.tensors(), saved.tensors())
    assert same(loaded.buffers, saved.buffers)
    assert same(loaded.history, saved.history)
    assert list(loaded.history) == list(saved.history)
    assert same(loaded.mean, saved.mean)
    assert (loaded.seed, loaded.method, loaded.num_data) == (saved.seed, saved.method, saved.num_data)
    for field in ("temperature", "tempers", "event", "single", "num_data"):
        assert getattr(loaded.target, field) == getattr(saved.target, field)
    assert repr(loaded) == repr(saved)


@pytest.mark.parametrize("name", FITTED)
def test_a_loaded_posterior_gives_the_same_draws(name: str, tmp_path: Path) -> None:
    make, model = FITTED[name]
    saved, path = make(), tmp_path / "posterior.priory"
    saved.save(path)
    loaded = pr.load(path, model())
    for _ in range(2):
        assert same(loaded.sample(3), saved.sample(3))
    assert same(loaded.sample(3, seed=8), saved.sample(3, seed=8))


def parts(prediction):
    """Return the predictions of the members of a mixture, or the prediction itself."""
    return getattr(prediction.distribution, "parts", (prediction.distribution,))


@pytest.mark.parametrize("name", [name for name in FITTED if "density" not in name])
def test_a_loaded_posterior_gives_the_same_predictions(name: str, tmp_path: Path) -> None:
    make, model = FITTED[name]
    saved, path = make(), tmp_path / "posterior.priory"
    saved.save(path)
    before, after = saved.predict(X, samples=5, seed=2), pr.load(path, model()).predict(X, samples=5, seed=2)
    assert torch.equal(before.outputs, after.outputs)
    for one, other in zip(parts(before), parts(after), strict=True):
        assert same(one.learnt, other.learnt)
    assert torch.equal(before.samples, after.samples)
    assert torch.equal(before.log_prob(Y), after.log_prob(Y))
    assert before.mean.shape == after.mean.shape


@pytest.mark.parametrize("name", [name for name in FITTED if name.startswith("diagonal") and "buffers" not in name])
def test_computed_evidence_is_saved(name: str, tmp_path: Path) -> None:
    make, model = FITTED[name]
    saved, path = make(), tmp_path / "posterior.priory"
    evidence = saved.log_evidence
    saved.save(path)
    assert pr.load(path, model()).log_evidence == evidence


def test_evidence_that_was_not_computed_needs_the_data(file: Path) -> None:
    loaded = pr.load(file, pr.Model(plain(), pr.Gaussian()))
    with pytest.raises(pr.InputError, match="call its elbo"):
        loaded.log_evidence  # noqa: B018 - a property that raises
    first = network(plain, pr.MeanField())
    assert loaded.elbo((X, Y)) == first.elbo()


def test_saving_a_loaded_posterior_gives_the_same_file(file: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.priory"
    pr.load(file, pr.Model(plain(), pr.Gaussian())).save(again)
    assert again.read_bytes() == file.read_bytes()


def test_a_path_may_be_a_string_and_a_file_may_be_overwritten(file: Path) -> None:
    network(plain, pr.MAP()).save(str(file))
    assert pr.load(str(file), pr.Model(plain(), pr.Gaussian())).kind == "point"


# The format.


def test_a_file_holds_only_safetensors_and_json(file: Path) -> None:
    with safe_open(str(file), framework="pt") as opened:
        header = opened.metadata()
        names = set(opened.keys())
    assert header["format"] == "priory"
    assert {"posterior.loc", "posterior.log_scale", "history.elbo"} <= names
    assert json.loads(header["meta"])["kind"] == "diagonal_gaussian"
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    entries = json.loads(data[8 : 8 + length])
    held = sum(e["data_offsets"][1] - e["data_offsets"][0] for k, e in entries.items() if k != "__metadata__")
    assert len(data) == 8 + length + held  # a length, JSON and numbers, and nothing else
    with pytest.raises(Exception, match=r"opcode|pickle|exhausted|expected"):
        list(pickletools.genops(data))


def test_the_safetensors_package_reads_the_file(file: Path) -> None:
    tensors = load_file(str(file))
    posterior = pr.load(file, pr.Model(plain(), pr.Gaussian()))
    assert torch.equal(tensors["posterior.loc"], posterior.family.loc)
    assert torch.equal(tensors["history.elbo"], posterior.history["elbo"])


# Files that are refused.


def store_error(path: Path, model: pr.Model | pr.Density | None = None) -> str:
    with pytest.raises(pr.StoreError) as caught:
        pr.load(path, model or pr.Model(plain(), pr.Gaussian()))
    return str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert store_error(tmp_path / "none.priory") == f"There is no file {tmp_path / 'none.priory'}."
    assert "is a folder" in store_error(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"\0", b"hello", b"\xf1\x80\xe5\xa9\x13", bytes(range(256)) * 20, b"\xff" * 4096]
)
def test_a_file_of_another_format_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other.priory"
    path.write_bytes(content)
    assert "corrupt, or not a file of priory" in store_error(path)


def test_a_safetensors_file_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    save_file({"w": torch.zeros(3)}, str(path))
    assert "was not written by priory" in store_error(path)
    save_file({"w": torch.zeros(3)}, str(path), metadata={"format": "pt"})
    assert "was not written by priory" in store_error(path)


def test_a_file_truncated_anywhere_is_refused(file: Path) -> None:
    data = file.read_bytes()
    for length in [*range(0, 40), *range(40, len(data), 97), len(data) - 1]:
        file.write_bytes(data[:length])
        assert "corrupt" in store_error(file)
    file.write_bytes(data + b"\0")
    assert "corrupt" in store_error(file)


def test_a_flipped_bit_anywhere_is_refused(file: Path) -> None:
    data, model, taken = file.read_bytes(), pr.Model(plain(), pr.Gaussian()), []
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1 << (position % 8)
        file.write_bytes(changed)
        try:
            pr.load(file, model)
        except pr.StoreError:
            continue
        except Exception as error:
            taken.append((position, type(error).__name__))
        else:
            taken.append((position, "loaded"))
    assert taken == []


def with_header(path: Path, **changes: str | None) -> None:
    """Rewrite the file with other entries in its header."""
    with safe_open(str(path), framework="pt") as opened:
        header = opened.metadata()
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
    for key, value in changes.items():
        header.pop(key)
        if value is not None:
            header[key] = value
    path.write_bytes(store.safetensors(tensors, header))


def test_a_file_of_another_version_is_refused_with_its_number(file: Path) -> None:
    with_header(file, version="99")
    assert "is of version 99; this priory reads version 1" in store_error(file)


@pytest.mark.parametrize("key", ["format", "version", "what", "meta", "checksums", "seal"])
def test_a_file_without_a_part_of_its_header_is_refused(file: Path, key: str) -> None:
    with_header(file, **{key: None})
    store_error(file)


def test_swapped_tensors_are_refused(file: Path) -> None:
    with safe_open(str(file), framework="pt") as opened:
        header = opened.metadata()
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
    tensors["posterior.loc"], tensors["posterior.log_scale"] = tensors["posterior.log_scale"], tensors["posterior.loc"]
    file.write_bytes(store.safetensors(tensors, header))
    assert "don't match their checksums" in store_error(file)


def test_an_unknown_kind_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, path = network(plain, pr.MAP()), tmp_path / "new.priory"
    monkeypatch.setattr(type(posterior), "kind", "hologram")
    posterior.save(path)
    assert "'hologram'" in store_error(path)


def test_a_checkpoint_is_not_loaded_as_a_posterior_nor_the_reverse(tmp_path: Path, file: Path) -> None:
    path = tmp_path / "fit.checkpoint"
    network(plain, pr.MAP(), checkpoint=path)
    assert "holds a checkpoint, not a posterior" in store_error(path)
    with pytest.raises(pr.StoreError, match="holds a posterior, not a checkpoint"):
        network(plain, pr.MeanField(), checkpoint=file)


@pytest.mark.parametrize(
    ("net", "difference"),
    [
        (lambda: plain(width=5), r"'0.weight' has the shape \(4, 3\) there and the shape \(5, 3\) here"),
        (lambda: nn.Sequential(nn.Linear(3, 1)).double(), r"'0.weight' has the shape \(4, 3\) there"),
        (lambda: nn.Sequential(*plain(), nn.Linear(1, 1)).double(), r"'3.weight' has no place there and the shape"),
        (lambda: nn.Sequential(nn.Flatten(), *plain()).double(), r"'0.weight' has the shape \(4, 3\) there and no"),
    ],
)
def test_another_network_is_refused_with_the_difference(
    net: Callable[[], nn.Module], difference: str, file: Path
) -> None:
    with pytest.raises(pr.StoreError, match=f"belongs to another model: its parameter {difference}"):
        pr.load(file, pr.Model(net(), pr.Gaussian()))


def test_the_same_parameters_in_another_order_are_refused(tmp_path: Path) -> None:
    class Pair(nn.Module):
        def __init__(self, first: str, second: str) -> None:
            super().__init__()
            for name in (first, second):
                setattr(self, name, nn.Linear(3, 1).double())

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x)

    path = tmp_path / "pair.priory"
    pr.fit(pr.Model(Pair("a", "b"), pr.Gaussian()), (X, Y), pr.MAP(), steps=2, progress=False).save(path)
    assert "another order" in store_error(path, pr.Model(Pair("b", "a"), pr.Gaussian()))


@pytest.mark.parametrize("likelihood", [pr.Poisson(), pr.StudentT(3.0), pr.Bernoulli()])
def test_another_likelihood_is_refused_by_name(likelihood: object, file: Path) -> None:
    message = store_error(file, pr.Model(plain(), likelihood))
    assert f"its likelihood is Gaussian, this one's is {type(likelihood).__name__}" in message


def test_a_likelihood_with_other_learnt_parameters_is_refused(file: Path) -> None:
    assert "'likelihood.noise'" in store_error(file, pr.Model(plain(), pr.Gaussian(0.5)))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (pr.Gaussian(0.5), pr.Gaussian(0.7)),
        (pr.StudentT(3.0), pr.StudentT(4.0)),
        (pr.StudentT(3.0, 0.5), pr.StudentT(3.0, 0.7)),
    ],
    ids=str,
)
def test_a_likelihood_with_other_values_is_refused(theirs: object, ours: object, tmp_path: Path) -> None:
    path = tmp_path / "other.priory"
    pr.fit(pr.Model(plain(), theirs), (X, Y), pr.MAP(), steps=2, progress=False).save(path)
    assert "likelihood" in store_error(path, pr.Model(plain(), ours))


def test_another_dtype_is_refused(file: Path) -> None:
    message = store_error(file, pr.Model(plain().float(), pr.Gaussian()))
    assert "it is in torch.float64, this one in torch.float32" in message


def test_a_posterior_of_a_network_is_refused_for_a_density(file: Path, tmp_path: Path) -> None:
    assert "its likelihood is Gaussian, this one's is Density" in store_error(file, density())
    path = tmp_path / "density.priory"
    pr.fit(density(), None, pr.MeanField(), steps=2, progress=False).save(path)
    assert "its likelihood is Density" in store_error(path)


def test_a_model_argument_of_the_wrong_type_is_refused(file: Path) -> None:
    with pytest.raises(pr.InputError, match="The 'model' argument of load must be"):
        pr.load(file, plain())


# Writing.


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(pr.InputError, match=r"must lie in a folder that exists, got .*nowhere."):
        network(plain, pr.MAP()).save(tmp_path / "nowhere" / "x.priory")


@pytest.mark.parametrize("failing", ["replace", "fsync"])
def test_a_failed_write_leaves_the_old_file_and_no_other(
    file: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    before = file.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OSError, match="no space"):
        network(plain, pr.MAP()).save(file)
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]


def test_an_interrupted_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    posterior = network(plain, pr.MAP())

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        posterior.save(tmp_path / "new.priory")
    assert list(tmp_path.iterdir()) == []


def test_a_new_file_has_the_default_permissions(tmp_path: Path) -> None:
    beside, path = tmp_path / "beside", tmp_path / "new.priory"
    beside.write_bytes(b"")
    network(plain, pr.MAP()).save(path)
    assert path.stat().st_mode == beside.stat().st_mode


def test_a_posterior_with_a_penalty_on_q_is_saved_with_its_certificate(tmp_path):
    def model_with_penalty(factor):
        penalty = pr.penalties.Variational(lambda m, s: 0.5 * (m**2 + s**2 - 1) - s.log(), factor=factor)
        return pr.Model(plain(), pr.Gaussian(0.3), prior=penalty)

    posterior = pr.fit(model_with_penalty(1.0), (X, Y), pr.MeanField(), steps=6, progress=False)
    posterior.save(tmp_path / "q")
    loaded = pr.load(tmp_path / "q", model_with_penalty(1.0))
    assert loaded.certificate.valid
    with pytest.warns(pr.PrioryWarning, match="fitted with another prior"):
        pr.load(tmp_path / "q", model_with_penalty(2.0))


def test_the_certificate_of_a_posterior_includes_the_temperature():
    penalty = pr.penalties.Variational(lambda m, s: 0.5 * (m**2 + s**2 - 1) - s.log())
    model = pr.Model(plain(), pr.Gaussian(0.3), prior=penalty)
    posterior = pr.fit(model, (X, Y), pr.MeanField(), steps=6, temperature=0.5, progress=False)
    assert not posterior.certificate.valid
    assert posterior.certificate.temperature == pytest.approx(0.5, abs=1e-3)
