"""The two directions of the divergence: one seeks a mode, the other covers the mass.

    KL(q || p) = E_q[log q - log p]    is infinite if q has mass where p has none: q stays inside one mode
    KL(p || q) = E_p[log p - log q]    is infinite if p has mass where q has none: q covers all modes

Variational inference minimises the first, because an expectation over q can be estimated without knowing p's
normaliser. Over all Gaussians the second is lowest where mean and variance are those of p. For a factorised q and a
correlated Gaussian p of precision Lambda, the first gives the variances 1 / Lambda_ii, the conditional variances of a
coordinate given the others; the second gives the marginal variances of p.

python examples/kl_directions.py --out pictures
"""

from __future__ import annotations

from pathlib import Path

import torch
from drawing import BLUE, GREEN, GREY, INK, VERMILION, dress, ellipse, folder_for_pictures, legend, save, sheet
from torch import Tensor
from torch.distributions import Categorical, MixtureSameFamily, Normal

import priory as pr
from priory.constraints import gaussian_expectation
from priory.posteriors import DiagonalGaussian

WEIGHTS, MEANS, SCALES = (torch.tensor(v, dtype=torch.float64) for v in ((0.6, 0.4), (-2.5, 2.5), (0.6, 0.8)))
COVARIANCE = torch.tensor([[1.0, 0.85], [0.85, 1.0]], dtype=torch.float64)


def target() -> MixtureSameFamily:
    """0.6 N(-2.5, 0.6^2) + 0.4 N(2.5, 0.8^2)."""
    # vmap cannot run argument validation, which reads values.
    components = Normal(MEANS, SCALES, validate_args=False)
    return MixtureSameFamily(Categorical(WEIGHTS), components, validate_args=False)


def kl_q_p(q: Normal) -> Tensor:
    """KL(q || p), by quadrature over q."""
    p = target()
    return gaussian_expectation(lambda x: q.log_prob(x) - p.log_prob(x), q.loc, q.scale)


def kl_p_q(q: Normal) -> Tensor:
    """KL(p || q), by quadrature over each component of p."""
    p = target()
    return (WEIGHTS * gaussian_expectation(lambda x: p.log_prob(x) - q.log_prob(x), MEANS, SCALES)).sum()


def mass_covering() -> Normal:
    """The Gaussian of lowest KL(p || q): p's own mean and variance."""
    p = target()
    return Normal(p.mean, p.variance.sqrt())


def mode_seeking(start: float) -> Normal:
    """A Gaussian of locally lowest KL(q || p), by L-BFGS on the quadrature."""
    loc = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    log_scale = torch.tensor(-1.0, dtype=torch.float64, requires_grad=True)  # narrow: a wide q sees both modes
    options = {"max_iter": 200, "tolerance_grad": 1e-12, "tolerance_change": 0.0, "line_search_fn": "strong_wolfe"}
    optimiser = torch.optim.LBFGS([loc, log_scale], **options)

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = kl_q_p(Normal(loc, log_scale.exp()))
        loss.backward()
        return loss

    optimiser.step(closure)  # pyright: ignore[reportArgumentType] - a Tensor stands for a float here
    return Normal(loc.detach(), log_scale.detach().exp())


def fitted(start: float, steps: int = 600) -> Normal:
    """The Gaussian found by MeanField. The fit of a density starts at zero, so the density is shifted to the start."""
    p = target()
    density = pr.Density(lambda v: p.log_prob(start + v["x"]), {"x": pr.Param()})
    method = pr.MeanField(learning_rate=0.05, samples=8, estimator="sticking")
    q = pr.fit(density, None, method, steps=steps, progress=False)
    assert isinstance(q, DiagonalGaussian)
    return Normal(start + q.family.loc[0].double(), q.family.scale[0].double())


def factorised(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """The standard deviations of the best factorised Gaussian, by KL(q || p) and by KL(p || q)."""
    return torch.linalg.inv(covariance).diagonal().rsqrt(), covariance.diagonal().sqrt()


def draw(modes: list[Normal], cover: Normal, folder: Path) -> Path:
    """Draw the fits to a bimodal density, and to a correlated Gaussian in two dimensions."""
    figure, (ax, plane) = sheet(1, 2, 10.5, 4.4, width_ratios=[1.6, 1])
    dress(ax, "A Gaussian for two modes", "x", "density")
    x = torch.linspace(-6.5, 6.5, 800, dtype=torch.float64)
    ax.fill_between(x.tolist(), target().log_prob(x).exp().tolist(), color=GREY, alpha=0.35, linewidth=0, label="p")
    for q, colour, name in (
        (modes[0], BLUE, r"lowest KL$(q\,\Vert\,p)$ from the left"),
        (modes[1], GREEN, r"lowest KL$(q\,\Vert\,p)$ from the right"),
        (cover, VERMILION, r"lowest KL$(p\,\Vert\,q)$"),
    ):
        ax.plot(x.tolist(), q.log_prob(x).exp().tolist(), color=colour, linewidth=2, label=name)
    ax.set_ylim(0, 0.92)
    legend(ax, "upper right")

    dress(plane, "A factorised Gaussian for a correlation", "$w_1$", "$w_2$")
    centre, (seek, cover_scales) = torch.zeros(2, dtype=torch.float64), factorised(COVARIANCE)
    plane.fill(*ellipse(centre, COVARIANCE), color=GREY, alpha=0.35, linewidth=0)
    plane.plot(*ellipse(centre, seek.square().diag()), color=BLUE, linewidth=2)
    plane.plot(*ellipse(centre, cover_scales.square().diag()), color=VERMILION, linewidth=2)
    plane.text(-2.7, 2.3, r"KL$(p\,\Vert\,q)$: too wide across", color=VERMILION, fontsize=9)
    plane.text(-2.7, -2.6, r"KL$(q\,\Vert\,p)$: too narrow along", color=BLUE, fontsize=9)
    plane.text(1.3, 1.25, "p", color=INK, fontsize=10)
    plane.set_xlim(-2.8, 2.8)
    plane.set_ylim(-2.8, 2.8)
    plane.set_aspect("equal")
    return save(figure, folder, "kl_directions.png")


def main(folder: Path) -> None:
    """Print both divergences of each Gaussian and the result of MeanField, and draw them."""
    modes, cover = [mode_seeking(-3.0), mode_seeking(3.0)], mass_covering()
    print("                        mean      std   KL(q||p)   KL(p||q)")
    for name, q in (("seeks, from the left", modes[0]), ("seeks, from the right", modes[1]), ("covers", cover)):
        print(f"{name:21s}{q.loc:8.4f} {q.scale:8.4f} {kl_q_p(q):10.4f} {kl_p_q(q):10.4f}")
    for start in (-3.0, 3.0):
        q = fitted(start)
        print(f"MeanField from {start:+g}   {q.loc:8.4f} {q.scale:8.4f}")
    seek, covers = factorised(COVARIANCE)
    print(f"A correlation of 0.85 and scales of 1: KL(q||p) gives {seek[0]:.4f}, KL(p||q) gives {covers[0]:.4f}.")
    draw(modes, cover, folder)


if __name__ == "__main__":
    main(folder_for_pictures(__doc__))
