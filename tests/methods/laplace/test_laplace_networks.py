"""Laplace on common networks: with batch normalisation, with attention and with an LSTM."""

import warnings

import pytest
import torch
from torch import Tensor, nn

import priory as pr
from priory.core.errors import PrioryWarning

ROWS, CLASSES = 60, 3


class Residual(nn.Module):
    """A convolution, a residual block with batch normalisation, pooling and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.block = nn.Sequential(
            *[nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()],
            *[nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)],
        )
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        return self.head(torch.relu(h + self.block(h)).mean((-2, -1)))


class Transformer(nn.Module):
    """Tokens, one encoder layer, the mean over the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.tokens(x)).mean(1))


class Recurrent(nn.Module):
    """An LSTM whose last state is read."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 6, batch_first=True), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def inputs(kind: str, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Return inputs that depend on their class."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(rows) % CLASSES
    if kind == "tokens":
        x = torch.randint(3, 7, (rows, 5), generator=generator)
        x[:, 2] = y
        return x, y
    shape = (1, 6, 6) if kind == "images" else (5, 2)
    noise = 0.5 * torch.randn(rows, *shape, generator=generator)
    return noise + (y - 1.0).view(-1, *[1] * len(shape)), y


@pytest.mark.parametrize("structure", ["kron", "diag"])
@pytest.mark.parametrize(
    ("make", "kind"), [(Residual, "images"), (Transformer, "tokens"), (Recurrent, "series")], ids=lambda x: str(x)
)
def test_trained_networks_are_fitted_and_predict(make: type[nn.Module], kind: str, structure: str) -> None:
    torch.manual_seed(0)
    net, (X, y) = make(), inputs(kind)
    before = {name: p.clone() for name, p in net.state_dict().items()}
    model = pr.Model(net, pr.Categorical(), prior=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrioryWarning)  # a short training doesn't reach the mode
        posterior = pr.fit(model, (X, y), pr.Laplace(structure=structure), steps=300, batch_size=20, progress=False)
    prediction = posterior.predict(X)
    assert prediction.probs.shape == (ROWS, CLASSES)
    torch.testing.assert_close(prediction.probs.sum(-1), torch.ones(ROWS))
    outputs, covariance = posterior.outputs(X)  # pyright: ignore[reportAttributeAccessIssue]
    assert covariance.shape == (ROWS, CLASSES, CLASSES)
    assert float((outputs.argmax(-1) == y).float().mean()) > 0.9  # of the trained network
    right = float((prediction.probs.argmax(-1) == y).float().mean())
    assert right > 0.6 or structure == "diag"  # a diagonal is far too uncertain for hundreds of weights and 60 rows
    assert bool((prediction.mutual_information > 0).all())  # the draws disagree somewhere
    assert torch.isfinite(torch.tensor(posterior.log_evidence.value))
    sampled = posterior.predict(X[:4], samples=8, through="network").probs
    assert bool(torch.isfinite(sampled).all())
    assert all(torch.equal(p, before[name]) for name, p in net.state_dict().items())
    assert structure == "diag" or any("diagonal" in note or "block" in note for note in posterior.notes)
