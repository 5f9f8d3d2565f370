"""Posteriors as files: safetensors for the numbers, JSON for the rest, no pickle.

A file records its format, version and kind, the model it belongs to (names and shapes of the parameters, the
likelihood), and a checksum of every tensor. Loading a file that is corrupt, of another version or of another network
raises an error with the reason. Writing is atomic: a reader sees the old file or the new one, never a partial file.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import secrets
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from priory.core.errors import StoreError, require, warn
from priory.core.streams import stream
from priory.models.base import BaseModel
from priory.models.target import Target
from priory.posteriors import KINDS, Posterior

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

FORMAT, VERSION = "priory", 1
PRIOR_TOLERANCE = 1e-6  # relative difference of log p(w), in nats, up to which two priors are the same
SAFETENSORS_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def save(posterior: Posterior, path: str | PathLike[str]) -> None:
    """Write a posterior to a file.

    Args:
        posterior: The posterior.
        path: The file to write; its folder must exist. An existing file is replaced.

    Raises:
        InputError: If the path can't be written.
    """
    target = posterior.target
    meta = {
        "kind": posterior.kind,
        "model": posterior.model.describe(),
        "method": posterior.method,
        "seed": posterior.seed,
        "num_data": target.num_data,
        "temperature": target.temperature,
        "tempers": target.tempers,
        "event": list(target.event),
        "single": target.single,
        "fixed": {n: s for n, s in fixed(posterior.model).items() if n not in posterior.buffers},
        "prior": prior_fingerprint(posterior.model),
        "own": posterior.to_json(),
        **posterior.results(),
        "status": posterior.stored_status(),
    }
    tensors = {f"posterior.{name}": t for name, t in posterior.tensors().items()}
    tensors |= {f"buffer.{name}": t for name, t in posterior.buffers.items()}
    tensors |= {f"history.{name}": t for name, t in posterior.history.items()}
    tensors |= {f"bound.{name}": t for name, t in posterior.model.bound_tensors().items()}
    write(path, "posterior", tensors, meta)


def load(path: str | PathLike[str], model: BaseModel) -> Posterior:
    """Read a posterior from a file.

    Args:
        path: A file that `save` has written.
        model: A model with the same network and likelihood as the one that was fitted.

    Returns:
        The posterior. Its predictions equal those of the posterior that was saved.

    Raises:
        StoreError: If the file is missing or corrupt, or belongs to another model or version.

    Example:
        >>> import torch
        >>> import priory as pr
        >>> X = torch.linspace(-1, 1, 50)[:, None]
        >>> model = pr.Model(torch.nn.Linear(1, 1), pr.Gaussian(0.1))
        >>> posterior = pr.fit(model, (X, X[:, 0]), pr.MAP(), steps=10, progress=False)
        >>> posterior.save("line.priory")  # doctest: +SKIP
        >>> posterior = pr.load("line.priory", model)  # doctest: +SKIP
    """
    known = isinstance(model, BaseModel)
    require(known, "model", "load", "be a Model, a Density or a latent model", type(model).__name__)
    tensors, meta = read(path, "posterior")
    part = lambda prefix: {k[len(prefix) :]: t for k, t in tensors.items() if k.startswith(prefix)}  # noqa: E731
    model = model.like(meta["model"], part("bound."))  # with the shapes and the units of the data of the fit
    wanted, found = model.describe(), meta["model"]
    if found != wanted:
        raise StoreError(f"{os.fspath(path)} belongs to another model: {_difference(found, wanted)}.")
    if meta["kind"] not in KINDS:
        raise StoreError(
            f"{os.fspath(path)} holds a posterior of the kind {meta['kind']!r}, which this version doesn't know."
        )
    target = Target(
        model,
        meta["num_data"],
        meta["temperature"],
        meta["tempers"],
        torch.Size(meta["event"]),
        meta["single"],
    )
    own_tensors = {name: t.to(model.device) for name, t in part("posterior.").items()}
    kind = KINDS[meta["kind"]]
    wrong = [
        t.dtype
        for t in kind.in_model_type(own_tensors, meta["own"])
        if t.is_floating_point() and t.dtype != model.dtype
    ]
    if wrong:
        raise StoreError(f"{os.fspath(path)} belongs to another model: it is in {wrong[0]}, this one in {model.dtype}.")
    if not same_prior(prior_fingerprint(model), meta["prior"]):
        warn(
            f"{os.fspath(path)} was fitted with another prior: predictions use the stored posterior, bounds the prior "
            "of this model."
        )
    here = fixed(model)
    for name, digest in meta["fixed"].items():
        if here.get(name) != digest:
            raise StoreError(
                f"{os.fspath(path)} belongs to another model: '{name}', which no fit changes, has other values."
            )
    buffers = {name: t.to(model.device) for name, t in part("buffer.").items()}
    posterior = kind.of_tensors(target, own_tensors, buffers, **meta["own"])
    posterior.history, posterior.method, posterior.seed = part("history."), meta["method"], meta["seed"]
    posterior.restore_results(meta)
    posterior.load_status(meta.get("status"), has_status="status" in meta)  # older files don't have it
    return posterior


def fixed(model: BaseModel) -> dict[str, str]:
    """Return checksums of tensors that predictions need and a posterior doesn't keep, such as frozen parameters."""
    return {name: checksum(t.detach().cpu().contiguous()) for name, t in model.fixed().items()}


def prior_fingerprint(model: BaseModel) -> list[float]:
    """Return log p(w) at zero and at a fixed vector; priors that agree at both count as the same."""
    size = model.layout.size
    vectors = torch.stack([torch.zeros(size), 0.1 * torch.randn(size, generator=stream(0, "identity"))])
    with torch.no_grad():
        return model.prior_as_given().log_prob(vectors.to(model.device, model.dtype)).tolist()


def same_prior(here: list[float], there: list[float]) -> bool:
    """Whether two priors agree up to rounding, which depends on the processor and the version of torch."""
    return all(
        math.isclose(a, b, rel_tol=PRIOR_TOLERANCE, abs_tol=PRIOR_TOLERANCE) for a, b in zip(here, there, strict=True)
    )


def write(path: str | PathLike[str], what: str, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Write tensors and JSON to a file, all or nothing."""
    whole = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    header = {
        "format": FORMAT,
        "version": str(VERSION),
        "what": what,
        "meta": json.dumps(meta),
        "checksums": json.dumps({name: checksum(t) for name, t in whole.items()}),
    }
    header["seal"] = header_hash(header)
    check_folder(path, "save" if what == "posterior" else what)
    goal = Path(path)
    draft = goal.with_name(f".{goal.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with open(draft, "xb") as file:
            file.write(safetensors(whole, header))
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, goal)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def check_folder(path: str | PathLike[str], what: str) -> None:
    """Raise an error for a path that can't be written: not a path, a folder, or in a folder that doesn't exist."""
    require(isinstance(path, (str, os.PathLike)), "path", what, "be a path", repr(path))
    require(not Path(path).is_dir(), "path", what, "be a file", f"the folder {os.fspath(path)}")
    folder = Path(path).parent
    require(folder.is_dir(), "path", what, "lie in a folder that exists", str(folder))


def safetensors(tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> bytes:
    """Serialise tensors in the safetensors format: the length of a JSON header, the header, the bytes.

    The writer of the safetensors package needs numpy, which is not a dependency of the core.
    """
    entries: dict[str, Any] = {"__metadata__": dict(header)}
    start = 0
    for name, t in tensors.items():
        stop = start + t.numel() * t.element_size()
        entries[name] = {"dtype": SAFETENSORS_TYPES[t.dtype], "shape": list(t.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of eight bytes
    return struct.pack("<Q", len(text)) + text + b"".join(raw(t) for t in tensors.values())


def read(path: str | PathLike[str], what: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read tensors and JSON from a file, or raise an error with the reason."""
    text = os.fspath(path)
    if not Path(path).is_file():
        raise StoreError(f"{text} is a folder, not a file." if Path(path).is_dir() else f"There is no file {text}.")
    try:
        with safe_open(text, framework="pt") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise StoreError(f"{text} is a safetensors file, but was not written by priory.")
            if header.get("version") != str(VERSION):
                raise StoreError(f"{text} is of version {header.get('version')}; this priory reads version {VERSION}.")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError, struct.error, UnicodeDecodeError) as error:
        raise StoreError(f"{text} is corrupt, or not a file of priory ({str(error).strip()}).") from error
    whole = header.get("seal") == header_hash(header)
    sums: dict[str, str] = json.loads(header["checksums"]) if whole else {}
    if not whole or {name: checksum(t) for name, t in tensors.items()} != sums:
        raise StoreError(f"{text} is corrupt: its contents don't match their checksums.")
    if header["what"] != what:
        raise StoreError(f"{text} holds a {header['what']}, not a {what}.")
    return {name: tensors[name] for name in sums}, json.loads(header["meta"])


def header_hash(header: Mapping[str, str]) -> str:
    """Return a hash of the whole header."""
    text = json.dumps([header.get(key) for key in ("format", "version", "what", "meta", "checksums")])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def checksum(t: Tensor) -> str:
    """Return a hash of a contiguous CPU tensor's type, shape and bytes."""
    hasher = hashlib.blake2b(f"{t.dtype}{tuple(t.shape)}".encode(), digest_size=16)
    hasher.update(raw(t))
    return hasher.hexdigest()


def raw(t: Tensor) -> bytes:
    """Return the bytes of a contiguous CPU tensor."""
    return ctypes.string_at(t.data_ptr(), t.numel() * t.element_size()) if t.numel() else b""


def _difference(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    stored, current = found["likelihood"], wanted["likelihood"]
    if stored.split("(")[0] != current.split("(")[0]:
        return f"its likelihood is {stored.split('(')[0]}, this one's is {current.split('(')[0]}"
    stored_shapes, model_shapes = ({name: tuple(shape) for name, shape in d["layout"]} for d in (found, wanted))
    for name in [*stored_shapes, *model_shapes]:
        if stored_shapes.get(name) != model_shapes.get(name):
            described = lambda shapes: f"the shape {shapes[name]}" if name in shapes else "no place"  # noqa: B023, E731
            return f"its parameter '{name}' has {described(stored_shapes)} there and {described(model_shapes)} here"
    if list(stored_shapes) != list(model_shapes):
        return "its parameters come in another order"
    if found["network"] != wanted["network"]:
        return "its network has other layers, or other options in them"
    if found.get("standardise") != wanted.get("standardise"):
        there = "was" if found.get("standardise") else "wasn't"
        return f"it {there} made with standardise=True"
    return f"its likelihood is {stored}, this one's is {current}"
