"""The picture of an equivalence: penalty, prior and verdict."""

import io
from collections.abc import Callable

import pytest
import torch

from priory.core.errors import InputError
from priory.penalties.equivalence.from_penalty import Equivalence, prior_from_penalty
from priory.plot.penalties import equivalence


def gaussian(mu: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return 0.5 * (mu**2 + s**2 - 1) - s.log()


def coin(mu: torch.Tensor, s: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return p * p.log() + (1 - p) * (1 - p).log() + p * gaussian(mu, s)


MAKE: dict[str, Callable[[], Equivalence]] = {
    "valid": lambda: prior_from_penalty(gaussian),
    "missing": lambda: prior_from_penalty(lambda mu, s: 0.5 * (mu**2 + s**2)),
    "dirac": lambda: prior_from_penalty(torch.square, "dirac"),
    "dropout": lambda: prior_from_penalty(lambda m: m**2, "dropout", scale=0.5),
    "fixed": lambda: prior_from_penalty(lambda m: m.abs(), "gaussian", scale=0.4),
    "spike": lambda: prior_from_penalty(coin, "spike_slab"),
}


@pytest.mark.parametrize("name", MAKE)
def test_the_penalty_is_on_the_left_the_prior_on_the_right_and_the_verdict_below(name: str) -> None:
    found = MAKE[name]()
    figure = equivalence(found)
    left, right = figure.axes
    assert left.get_xlabel() == "location"
    assert right.get_ylabel() == "density"
    w, density = right.get_lines()[0].get_xdata(), right.get_lines()[0].get_ydata()
    assert torch.allclose(
        torch.tensor(density), found.log_prior(torch.tensor(w, dtype=torch.float64)).exp(), atol=1e-12
    )
    said = " ".join(text.get_text().replace("\n", " ") for text in figure.texts)
    head, _, rest = found.certificate.verdict.partition(": ")
    assert head in said
    assert rest[1:] in said
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    assert buffer.getvalue().startswith(b"\x89PNG")


def test_the_nearest_penalty_is_dashed_where_the_penalty_is_not_bayesian() -> None:
    left, _ = equivalence(MAKE["missing"]()).axes
    assert any(line.get_linestyle() == "--" for line in left.get_lines())
    left, _ = equivalence(MAKE["valid"]()).axes
    assert not any(line.get_linestyle() == "--" for line in left.get_lines())


def test_only_an_equivalence_can_be_plotted() -> None:
    with pytest.raises(InputError, match=r"The 'found' argument of plot.penalties.equivalence must be an Equivalence"):
        equivalence(3)  # pyright: ignore[reportArgumentType]
