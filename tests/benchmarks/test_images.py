"""Images are read as they are, and turned and corrupted as MNIST-C does it."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from priory.testing import assert_mean_close


@pytest.fixture(scope="module")
def images(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("_images")


@pytest.fixture(scope="module")
def tool(shared_data: Path) -> ModuleType:
    """The readers and shifts that lie beside the reference data, in NumPy."""
    spec = importlib.util.spec_from_file_location("load", shared_data / "tools" / "load.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def grey(level: float) -> Tensor:
    return torch.full((100, 28, 28), level, dtype=torch.float64)


def test_a_quarter_turn_is_rot90(images: ModuleType):
    pixels = torch.rand(5, 28, 28, dtype=torch.float64, generator=generator())
    assert torch.allclose(images.rotated(pixels, 90), torch.rot90(pixels, 1, (1, 2)), atol=1e-12)
    assert torch.allclose(images.rotated(pixels, 180), pixels.flip(1, 2), atol=1e-12)
    assert torch.allclose(images.rotated(pixels, 0), pixels, atol=1e-12)


def test_corners_that_turn_in_from_outside_are_black(images: ModuleType):
    turned = images.rotated(torch.ones(1, 28, 28, dtype=torch.float64), 45)[0]
    assert turned[0, 0] == 0
    assert turned[14, 14] == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("kind", ["gaussian", "shot", "impulse", "speckle", "contrast"])
def test_severity_zero_leaves_images_alone(images: ModuleType, kind: str):
    assert torch.equal(images.corrupted(grey(0.3), kind, 0, generator()), grey(0.3))


@pytest.mark.parametrize(
    ("kind", "severity", "variance"),
    [("gaussian", 1, 0.08**2), ("speckle", 1, (0.15 * 0.5) ** 2), ("shot", 1, 0.5 / 60)],
)
def test_noise_has_the_variance_of_its_level(images: ModuleType, kind: str, severity: int, variance: float):
    """Half-way grey at severity 1 is five standard deviations from being cut off. False alarms: 1 in 10^6 each."""
    noisy = images.corrupted(grey(0.5), kind, severity, generator()).flatten()
    assert_mean_close(noisy, 0.5)
    assert_mean_close((noisy - 0.5).square(), variance)


def test_impulse_noise_turns_its_fraction_of_pixels_black_or_white(images: ModuleType):
    noisy = images.corrupted(grey(0.5), "impulse", 4, generator()).flatten()
    for value, share in ((0.0, 0.085), (1.0, 0.085), (0.5, 0.83)):
        assert_mean_close((noisy == value).double(), share)


def test_contrast_shrinks_towards_the_mean_of_each_image(images: ModuleType):
    pixels = torch.rand(3, 28, 28, dtype=torch.float64, generator=generator())
    lost = images.corrupted(pixels, "contrast", 5, generator())
    assert torch.allclose(lost.mean((1, 2)), pixels.mean((1, 2)), atol=1e-12)
    assert torch.allclose(lost.std((1, 2)), 0.05 * pixels.std((1, 2)), atol=1e-12)


def test_auroc_is_the_probability_of_ranking_above_with_ties_as_half(images: ModuleType):
    low, high = (torch.randint(6, (n,), generator=generator()) for n in (40, 70))
    pairs = (high[:, None] > low).double() + 0.5 * (high[:, None] == low)
    assert images.auroc(low, high) == pytest.approx(float(pairs.mean()), abs=1e-12)
    assert images.auroc(torch.zeros(3), torch.ones(4)) == 1


@pytest.mark.reference
def test_files_hold_ten_thousand_test_images_a_thousand_of_each_label(
    images: ModuleType, tool: ModuleType, shared_data: Path
):
    pixels, labels = images.read(shared_data / "fashion-mnist", "t10k")
    assert pixels.shape == (10_000, 28, 28)
    assert labels.bincount().tolist() == [1000] * 10
    assert np.array_equal((255 * pixels).round().numpy(), tool.images("fashion-mnist")[0])


@pytest.mark.reference
@pytest.mark.parametrize("degrees", [15, 60, 150])
def test_turns_are_those_of_the_reference(images: ModuleType, tool: ModuleType, degrees: int):
    pixels = torch.rand(5, 28, 28, dtype=torch.float64, generator=generator())
    expected = tool.rotate(pixels.numpy(), degrees)  # in single precision
    assert np.allclose(images.rotated(pixels, degrees).numpy(), expected, atol=2e-6)


@pytest.mark.reference
def test_severities_are_those_of_the_reference(images: ModuleType, tool: ModuleType):
    named = {kind if kind == "contrast" else f"{kind}_noise": levels for kind, levels in images.LEVELS.items()}
    assert named == tool.LEVELS["mnist"]
