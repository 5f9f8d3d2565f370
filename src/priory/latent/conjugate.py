"""Latent models with a prior over theta and a q(theta) in closed form, for variational EM.

    log p(y) = L(q) + KL(q || p(z, theta | y)),      L(q) = E_q[log p(y, z, theta) - log q(z) q(theta)]

With q(z, theta) = q(z) q(theta) and conjugate priors each factor has a closed form given the other (Attias, 1999;
Beal, 2003; Bishop, 2006, section 10.4). The bound is a sum over rows minus the KL divergence of the parameters:

    L(q) = sum_n L_n - KL(q(theta) || p(theta)),      L_n = E_q[log p(y_n, z_n | theta)] + H(q(z_n))

The parameters of q(theta) are a dict `phi`. As in EM, the data are needed only through expected statistics S, which are
sums over rows: `e_step_q` returns S and L_n at phi, and `m_step_q` returns the phi that maximises L given S. Every
constant is included, so bounds of different models of the same data can be compared.
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from priory.core.errors import InputError, require
from priory.core.flat import Layout, Param
from priory.latent.base import Expectation, Generated, Latent, Rows, Theta
from priory.models.base import BaseModel, Capabilities
from priory.models.density import DensityPrior

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from typing_extensions import TypeIs

Phi = dict[str, Tensor]
CAPABILITIES = Capabilities(latent=True, conjugate=True)
LOG_TAU = math.log(2 * math.pi)


class Conjugate(Latent):
    """Base class of latent models with a prior over theta and a q(theta) with parameters phi.

    A subclass implements the methods of `Latent` and those ending in `_q`.

    Attributes:
        view: The model over phi that variational EM fits, once the model is bound to data.
    """

    view: VariationalView

    # Methods that a subclass must implement.

    def params_q(self) -> dict[str, Param]:
        """Declare phi: the shape and support of each parameter of q."""
        raise NotImplementedError

    def begin_q(self, rows: Rows, how: str, generator: torch.Generator) -> Phi:
        """Initialise phi from some rows, in one of the ways listed in `starts`."""
        raise NotImplementedError

    def e_step_q(self, phi: Phi, rows: Rows) -> Expectation:
        """Compute q(z) given q(theta): its expected statistics, and L_n per row."""
        raise NotImplementedError

    def m_step_q(self, statistics: Mapping[str, Tensor], phi: Phi) -> Phi:
        """Compute q(theta) given the statistics of q(z), one factor after the other."""
        raise NotImplementedError

    def complete_q(self, phi: Phi, statistics: Mapping[str, Tensor]) -> Tensor:
        """Return E_q[log p(y, z | theta)] from the statistics of q(z)."""
        raise NotImplementedError

    def kl_q(self, phi: Phi) -> Tensor:
        """Return KL(q(theta) || p(theta))."""
        raise NotImplementedError

    def mean_q(self, phi: Phi) -> Theta:
        """Return E_q[theta]."""
        raise NotImplementedError

    def sample_q(self, phi: Phi, n: int, generator: torch.Generator) -> Theta:
        """Draw n theta from q, each (n, ...)."""
        raise NotImplementedError

    def log_q(self, phi: Phi, theta: Theta) -> Tensor:
        """Return log q(theta), for theta with any leading dimensions."""
        raise NotImplementedError

    # Methods that a subclass may override.

    def predictive_q(self, phi: Phi, rows: Rows) -> Tensor | None:
        """Return log E_q[p(y_n | theta)] per row, (n,); None if it has no closed form."""
        return None

    def generate_q(self, phi: Phi, n: int, generator: torch.Generator) -> Generated:
        """Draw n rows, each with its own theta from q, and their hidden z."""
        raise InputError(f"{self!r} can't make rows: it has no 'generate_q'.")

    def problems_q(self, phi: Phi, statistics: Mapping[str, Tensor]) -> list[str]:
        """Return problems of a fit that ended at this q, one sentence each, for warnings and the status."""
        return []

    def symmetry(self, phi: Phi) -> float:
        """Return the log number of equivalent labellings of q in the posterior; 0 if there is one."""
        return 0.0

    def neutral(self) -> dict[str, Tensor]:
        """Return the frame of data with zero mean and unit scale."""
        return {}

    # A prior that takes its scale from the data counts as the same prior in a file for any data.

    def in_shapes(
        self, shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device, **frame: Tensor
    ) -> Self:
        """Return a copy of the model for rows of these shapes."""
        model = super().in_shapes(shapes, dtype, device, **frame)
        model.frame = model.frame or model.neutral()
        model.view = VariationalView(model)
        return model

    def prior_as_given(self) -> DensityPrior:
        """Return the prior for data with zero mean and unit scale."""
        given = copy.copy(self)
        given.frame = given.neutral()
        return given.marginal(self.dtype, self.device).prior

    @property
    def capabilities(self) -> Capabilities:
        """A model with hidden variables and a q(theta) in closed form, which variational EM needs."""
        return CAPABILITIES


def has_conjugate_prior(model: object) -> TypeIs[Conjugate]:
    """Whether this is a model with a q(theta) in closed form, as it declares."""
    return isinstance(model, BaseModel) and model.capabilities.conjugate


class VariationalView(Latent):
    """A view of a conjugate model with the parameters phi and the log prior -KL(q(theta) || p(theta)).

    EM on this view is variational EM on the conjugate model.
    """

    def __init__(self, model: Conjugate) -> None:
        self.model, self.layout = model, Layout(model.params_q())
        self.dtype, self.device, self.given, self.shapes = model.dtype, model.device, model.given, model.shapes
        for name in ("parts", "starts", "block", "sample", "exact", "missing", "labels", "tempers", "samples"):
            setattr(self, name, getattr(model, name))

    def __repr__(self) -> str:
        return repr(self.model)

    def begin(self, rows: Rows, how: str, generator: torch.Generator) -> Phi:
        """Initialise phi."""
        return self.model.begin_q(rows, how, generator)

    def e_step(self, theta: Phi, rows: Rows) -> Expectation:
        """q(z) given q(theta)."""
        return self.model.e_step_q(theta, rows)

    def m_step(self, statistics: Mapping[str, Tensor], theta: Phi) -> Phi:
        """q(theta) given q(z)."""
        return {name: t.to(self.dtype) for name, t in self.model.m_step_q(statistics, theta).items()}

    def complete(self, theta: Phi, statistics: Mapping[str, Tensor]) -> Tensor:
        """E_q[log p(y, z | theta)]."""
        return self.model.complete_q(theta, statistics)

    def log_prior(self, theta: Phi) -> Tensor:
        """Return -KL(q(theta) || p(theta))."""
        return -self.model.kl_q(theta)

    def problems(self, theta: Phi, statistics: Mapping[str, Tensor]) -> list[str]:
        """Return the problems that the model finds in this q."""
        return self.model.problems_q(theta, statistics)


# KL(q || p) of the conjugate families with every constant, their expectations and draws.


def kl_normal(mean: Tensor, variance: Tensor, mean0: Tensor, variance0: Tensor) -> Tensor:
    """KL of univariate normals."""
    ratio = variance / variance0
    return 0.5 * (ratio + (mean - mean0).square() / variance0 - 1 - ratio.log())


def kl_gamma(a: Tensor, b: Tensor, a0: Tensor, b0: Tensor) -> Tensor:
    """KL of Gamma distributions of shapes a and rates b."""
    shape_terms = (a - a0) * a.digamma() - a.lgamma() + a0.lgamma()
    return shape_terms + a0 * (b.log() - b0.log()) + a * (b0 - b) / b


def kl_dirichlet(a: Tensor, a0: Tensor) -> Tensor:
    """KL of Dirichlet distributions over the last dimension."""
    normalisers = log_beta(a0) - log_beta(a)
    return normalisers + ((a - a0) * log_dirichlet(a)).sum(-1)


def log_beta(a: Tensor) -> Tensor:
    """Return the log of the multivariate beta function over the last dimension, the normaliser of a Dirichlet."""
    return a.lgamma().sum(-1) - a.sum(-1).lgamma()


def log_dirichlet(a: Tensor) -> Tensor:
    """E[log pi] under a Dirichlet."""
    return a.digamma() - a.sum(-1, keepdim=True).digamma()


def kl_wishart(nu: Tensor, scatter: Tensor, nu0: Tensor, scatter0: Tensor) -> Tensor:
    """KL of Wishart distributions of precisions, nu degrees of freedom and the inverse scale `scatter` (*, d, d)."""
    d = scatter.shape[-1]
    trace = torch.linalg.solve(scatter, scatter0.expand_as(scatter)).diagonal(dim1=-2, dim2=-1).sum(-1)
    normalisers = log_wishart(nu, log_det(scatter), d) - log_wishart(nu0, log_det(scatter0), d)
    return normalisers + 0.5 * (nu - nu0) * log_precision(nu, scatter) + 0.5 * nu * (trace - d)


def log_wishart(nu: Tensor, log_scatter: Tensor, d: int) -> Tensor:
    """Return log B(W, nu), the log normalising factor of a Wishart (Bishop, B.79)."""
    return 0.5 * nu * (log_scatter - d * math.log(2)) - torch.mvlgamma(0.5 * nu, d)


def log_precision(nu: Tensor, scatter: Tensor) -> Tensor:
    """E[log |Lambda|] under a Wishart (Bishop, B.81)."""
    d = scatter.shape[-1]
    halves = 0.5 * (nu[..., None] - torch.arange(d, device=nu.device))
    return halves.digamma().sum(-1) + d * math.log(2) - log_det(scatter)


def log_det(matrix: Tensor) -> Tensor:
    """log |A| of positive definite matrices."""
    return 2 * torch.linalg.cholesky(matrix).diagonal(dim1=-2, dim2=-1).log().sum(-1)


def gammas(a: Tensor, b: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """n draws of Gamma(a, b), (n, *a.shape)."""
    shape = torch.broadcast_shapes(a.shape, b.shape)
    standard = torch._standard_gamma  # pyright: ignore[reportPrivateImportUsage] - takes a generator, as Gamma does not
    drawn = standard(a.expand(n, *shape).contiguous(), generator=generator)
    return (drawn / b).clamp_min(torch.finfo(a.dtype).tiny)


def normals(like: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """n standard normal draws of a tensor's shape."""
    return torch.randn(n, *like.shape, generator=generator, dtype=like.dtype, device=like.device)


def positive(value: object, name: str, owner: str) -> float:
    """Return a positive number as a float; raise an error for anything else."""
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
    require(ok, name, owner, "be a positive number", repr(value))
    return float(value)  # pyright: ignore[reportArgumentType] - checked above
