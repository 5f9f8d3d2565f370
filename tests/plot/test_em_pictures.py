"""Pictures of EM: the numbers that they draw, for one and two parameters of several models."""

import io
import math
from collections.abc import Callable
from functools import cache

import pytest
import torch
from matplotlib.axes import Axes

import priory as pr
from priory import latent
from priory.core.errors import InputError
from priory.latent import Latent
from priory.plot import em
from priory.plot.em import Turn


def rows(n: int = 60, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(n, generator=generator, dtype=torch.float64)
    return noise + 4.0 * (torch.arange(n) % 3 == 0)


THETA = {"weights": [0.6, 0.4], "means": [0.0, 4.0], "covariances": [1.0, 1.5]}
STEPS = rows(40).reshape(4, 10)
HMM = {
    "initial": [0.5, 0.5],
    "transitions": [[0.8, 0.2], [0.3, 0.7]],
    "means": [0.0, 3.0],
    "covariances": [1.0, 2.0],
}
SLICES: dict[str, Callable[[], list[Turn]]] = {
    "a mean": lambda: turned(latent.GaussianMixture(2), rows(), THETA, [("means", 0)], [2.5], [(-4, 7)]),
    "a weight": lambda: turned(latent.GaussianMixture(2), rows(), THETA, [("weights", 0)], [0.1], [(0.02, 0.98)]),
    "a variance": lambda: turned(latent.GaussianMixture(2), rows(), THETA, [("covariances", 1)], [6.0], [(0.2, 12)]),
    "a chain's mean": lambda: turned(latent.HiddenMarkov(2), STEPS, HMM, [("means", 1)], [1.0], [(-3, 8)]),
    "a transition": lambda: turned(
        latent.HiddenMarkov(2), STEPS, HMM, [("transitions", (0, 1))], [0.9], [(0.02, 0.98)]
    ),
    "two means": lambda: turned(
        latent.GaussianMixture(2), rows(), THETA, [("means", 0), ("means", 1)], [1.0, 3.0], [(-4, 7), (-3, 8)], 2
    ),
    "a mean and a weight": lambda: turned(
        latent.GaussianMixture(2), rows(), THETA, [("means", 1), ("weights", 1)], [2.0, 0.7], [(-2, 8), (0.02, 0.98)], 2
    ),
    "a Bayesian mean": lambda: turned(
        latent.BayesianGaussianMixture(2), rows(), THETA, [("means", 0)], [2.5], [(-4, 7)], 2
    ),
}


def turned(
    model: Latent,
    data: torch.Tensor,
    theta: dict,
    which: list,
    start: list[float],
    span: list[tuple[float, float]],
    count: int = 3,
) -> list[Turn]:
    return em.turns(model, data, em.entries(theta, *which), start, span, count)


@cache
def sliced(name: str) -> list[Turn]:
    return SLICES[name]()


def line(ax: Axes, label: str) -> tuple[list[float], list[float]]:
    found = next(one for one in ax.get_lines() if one.get_label() == label)
    return list(found.get_xdata()), list(found.get_ydata())


@pytest.mark.parametrize("name", SLICES)
def test_the_bound_is_below_touches_at_theta_t_and_is_highest_at_the_next_theta(name: str):
    found = sliced(name)
    for turn, following in zip(found, [*found[1:], None], strict=True):
        size = abs(turn.at_here)
        gap = turn.log_likelihood - turn.bound
        assert float(gap.min()) > -1e-10 * size
        points = torch.cartesian_prod(*turn.grids).reshape(*turn.bound.shape, -1)
        width = torch.stack([grid[-1] - grid[0] for grid in turn.grids])
        near = ((points - turn.here) / width).square().sum(-1)
        assert float(gap.flatten()[near.argmin()]) < 0.05 * float(gap.max())
        assert float(turn.bound.max()) <= turn.top + 1e-10 * size  # no point of the grid is above the maximum
        step = torch.stack([grid[1] - grid[0] for grid in turn.grids])
        highest = points.reshape(-1, len(turn.here))[turn.bound.argmax()]
        assert bool(((highest - turn.after).abs() <= 2 * step).all())
        assert turn.at_here <= turn.top + 1e-10 * size <= turn.at_after + 2e-10 * size
        assert following is None or (torch.equal(following.here, turn.after) and following.at_here == turn.at_after)


def test_the_curves_are_the_models_log_likelihood_and_the_bound_of_q_at_theta_t():
    along = em.entries(THETA, ("means", 0))
    (turn,) = em.turns(latent.GaussianMixture(2), rows(), along, [2.5], [(-4, 7)], 1)
    model, _ = latent.GaussianMixture(2).meet(rows())
    y = model.rows((rows(),))
    q = model.responsibilities(along(turn.here), y)
    for i in (0, 60, 140, 200):
        theta = along(turn.grids[0][i : i + 1])
        forms = latent.bounds(model, theta, y, q)
        assert float(turn.bound[i]) == pytest.approx(float(forms["joint"]), rel=1e-11)
        assert float(turn.log_likelihood[i]) == pytest.approx(float(model.log_marginal(theta, y).sum()), rel=1e-11)
    # the M-step of a mean does not depend on the other parameters
    assert float(turn.after) == pytest.approx(float((q[:, 0] @ rows()) / q[:, 0].sum()), rel=1e-7)
    forms = latent.bounds(model, along(turn.after), y, q)
    assert turn.at_after - turn.top == pytest.approx(
        float(model.log_marginal(along(turn.after), y).sum() - forms["joint"]), abs=1e-9
    )


def test_a_slice_may_be_any_function_of_one_number():
    def both(u: torch.Tensor) -> dict[str, torch.Tensor]:
        held = {name: torch.tensor(t, dtype=torch.float64) for name, t in THETA.items()}
        return {**held, "means": torch.cat([u, u + 4])}

    found = em.turns(latent.GaussianMixture(2), rows(), both, [-2.0], [(-6, 6)], 20)
    assert abs(float(found[-1].after - found[-1].here)) < 1e-4
    highest = float(found[0].log_likelihood.max())
    assert found[-1].at_after == pytest.approx(highest, abs=0.05)


def test_entries_of_a_simplex_rescale_the_others_in_proportion():
    theta = em.entries({"weights": [0.5, 0.3, 0.2], "transitions": [[0.5, 0.5], [0.1, 0.9]]}, ("weights", 0))(
        torch.tensor([0.8])
    )
    torch.testing.assert_close(
        theta["weights"], torch.tensor([0.8, 0.12, 0.08], dtype=torch.float64), rtol=1e-7, atol=0
    )
    moved = em.entries({"transitions": [[0.5, 0.5], [0.1, 0.9]]}, ("transitions", (1, 0)))(torch.tensor([0.4]))
    expected = torch.tensor([[0.5, 0.5], [0.4, 0.6]], dtype=torch.float64)
    torch.testing.assert_close(moved["transitions"], expected, rtol=1e-7, atol=0)


def test_the_plot_of_a_turn_shows_its_values():
    (turn,) = sliced("a mean")[:1]
    ax = em.bound(turn, ["the first mean"])
    assert line(ax, em.LIKELIHOOD_LABEL) == (turn.grids[0].tolist(), turn.log_likelihood.tolist())
    assert line(ax, em.BOUND_LABEL) == (turn.grids[0].tolist(), turn.bound.tolist())
    assert line(ax, em.CURRENT_LABEL) == ([float(turn.here)], [turn.at_here])
    assert line(ax, em.NEXT_LABEL) == ([float(turn.after)], [turn.at_after])
    assert line(ax, em.GAP_LABEL)[1] == [turn.top, turn.at_after]
    flat = em.bound(sliced("two means")[0], ["first", "second"])
    assert line(flat, em.CURRENT_LABEL) == ([1.0], [3.0])


def test_frames_have_one_panel_per_turn():
    found = sliced("a mean")
    figure = em.frames(found, ["mean"], columns=2)
    assert len(figure.axes) == 3
    assert figure.axes[0].get_title(loc="left") == f"Turn 1: up by {found[0].at_after - found[0].at_here:.1f} nats"
    assert len(figure.legends) == 1


@pytest.mark.parametrize(("values", "weights"), [((0.3, 3.2), (0.55, 0.45)), ((0.5, 1.0, 4.0), (0.2, 0.5, 0.3))])
def test_the_plotted_gap_is_that_of_jensens_inequality(values: tuple[float, ...], weights: tuple[float, ...]):
    ax = em.jensen(values, weights)
    mean = sum(q * x for q, x in zip(weights, values, strict=True))
    inside = sum(q * math.log(x) for q, x in zip(weights, values, strict=True))
    assert line(ax, "log E[x]")[1] == [pytest.approx(math.log(mean))]
    assert line(ax, "E[log x]")[1] == [pytest.approx(inside)]
    assert ax.texts[0].get_text() == f"gap {math.log(mean) - inside:.3g}"


def test_jensens_gap_is_zero_where_all_values_are_equal():
    ax = em.jensen((2.0, 2.0), (0.5, 0.5))
    assert line(ax, "log E[x]")[1] == pytest.approx(line(ax, "E[log x]")[1], abs=1e-12)


@pytest.mark.parametrize("kind", ["full", "tied", "diagonal", "spherical"])
def test_ellipses_show_the_components_and_colours_the_responsibilities(kind: str):
    y = torch.stack([rows(), rows(seed=1) * 0.5 + 1], 1)
    posterior = pr.fit(latent.GaussianMixture(2, kind), y, pr.EM(), progress=False)
    ax = em.components(posterior, y)
    spread = em.covariances(posterior.latent, posterior.mean)
    for k in range(2):
        for deviations, drawn in zip((1, 2), ax.get_lines()[2 * k : 2 * k + 2], strict=True):
            outline = torch.tensor(drawn.get_xydata()) - posterior.mean["means"][k]
            distance = (outline * torch.linalg.solve(spread[k], outline.T).T).sum(1)
            torch.testing.assert_close(distance, torch.full_like(distance, deviations**2), rtol=1e-9, atol=0)
    assert [text.get_text() for text in ax.texts] == [f"{w:.2f}" for w in posterior.mean["weights"].tolist()]
    q = posterior.responsibilities(y)
    colours = torch.tensor(ax.collections[0].get_facecolors()[:, :3])
    torch.testing.assert_close(colours, torch.tensor(em.blended(q), dtype=colours.dtype), rtol=0, atol=1e-12)
    pure = torch.tensor(em.blended(torch.eye(2, dtype=torch.float64)))
    torch.testing.assert_close(pure[0], torch.tensor([0x00, 0x72, 0xB2]) / 255, rtol=1e-6, atol=1e-6)


def test_factor_models_have_ellipses():
    y = torch.stack([rows(), 0.8 * rows() + 0.3 * rows(seed=1), rows(seed=2)], 1)
    posterior = pr.fit(latent.FactorAnalysisMixture(2, 1), y, pr.EM(), steps=50, progress=False)
    theta = posterior.mean
    spread = theta["loadings"] @ theta["loadings"].mT + theta["variances"].diag_embed()
    torch.testing.assert_close(em.covariances(posterior.latent, theta), spread, rtol=1e-9, atol=1e-12)
    assert len(em.components(posterior, y).get_lines()) == 4


def test_a_row_with_a_missing_value_is_left_out_of_the_plot():
    y = torch.stack([rows(), rows(seed=1), rows(seed=2)], 1)
    y[3, 2] = torch.nan
    posterior = pr.fit(latent.GaussianMixture(2, "diagonal"), y, pr.EM(), progress=False)
    assert len(em.components(posterior, y, (0, 2)).collections[0].get_offsets()) == 59
    assert len(em.components(posterior, y, (0, 1)).collections[0].get_offsets()) == 60


def test_along_one_column_the_densities_of_the_components_add_up():
    posterior = pr.fit(latent.GaussianMixture(2), rows(), pr.EM(), progress=False)
    ax = em.components(posterior, rows())
    first, second, both = (torch.tensor(one.get_ydata()) for one in ax.get_lines())
    torch.testing.assert_close(first + second, both)
    grid = torch.tensor(ax.get_lines()[0].get_xdata())
    torch.testing.assert_close(both, posterior.log_likelihood(grid).exp(), rtol=1e-8, atol=1e-12)


def test_the_highest_bound_is_marked():
    y = torch.cat([rows(), rows(seed=3) + 20])
    fits = {k: pr.fit(latent.BayesianGaussianMixture(k), y, pr.VariationalEM(), progress=False) for k in (3, 1, 2)}
    ax = em.evidence(fits)
    values = {k: one.log_evidence_of_labels.value for k, one in fits.items()}
    best = max(values, key=values.__getitem__)
    drawn, mark = ax.get_lines()
    assert list(drawn.get_xdata()) == [1, 2, 3]
    assert list(drawn.get_ydata()) == [values[k] for k in (1, 2, 3)]
    assert list(mark.get_xdata()) == [best]
    assert f"highest with {best} component" in ax.get_title(loc="left")


def test_every_plot_has_a_title_and_labels_and_can_be_saved():
    posterior = pr.fit(latent.GaussianMixture(2), rows(), pr.EM(), progress=False)
    for ax in (em.jensen(), em.components(posterior, rows()), em.bound(sliced("a mean")[0])):
        assert ax.get_title(loc="left")
        assert ax.get_xlabel()
        assert ax.get_ylabel()
        buffer = io.BytesIO()
        ax.get_figure().savefig(buffer, format="png")
        assert buffer.getvalue().startswith(b"\x89PNG")


def test_invalid_arguments_raise_an_error_that_names_them():
    along, mixture = em.entries(THETA, ("means", 0)), latent.GaussianMixture(2)
    cases = [
        (lambda: em.entries(THETA), "The 'which' argument of entries must be one entry or two, got 0."),
        (lambda: em.entries(THETA, ("mean", 0)), "The 'which' argument of entries must be entries of weights, means"),
        (lambda: em.entries(THETA, ("means", 9)), "The 'which' argument of entries must be entries of weights, means"),
        (
            lambda: em.turns(mixture, rows(), em.entries(THETA, ("covariances", 0)), [1.0], [(-1, 4)]),
            "The 'span' argument of turns must contain only values at which theta is valid",
        ),
        (
            lambda: em.turns(None, rows(), along, [0.0], [(-1, 1)]),
            "The 'model' argument of turns must be a latent model",
        ),  # pyright: ignore
        (
            lambda: em.turns(mixture, rows(), along, [0.0], [(-1, 1)], 0),
            "The 'count' argument of turns must be an integer",
        ),
        (lambda: em.turns(mixture, rows(), along, [], []), "The 'start' argument of turns must be one number or two"),
        (lambda: em.turns(mixture, rows(), along, [3.0], [(-1, 1)]), "The 'span' argument of turns must be one pair"),
        (
            lambda: em.turns(mixture, rows(), along, [3.0], [(2, 5)]),
            "The 'span' argument of turns must extend to both sides",
        ),
        (
            lambda: em.bound(sliced("a mean")[0], ["a", "b"]),
            "The 'names' argument of plot.em.bound must be 1, one per entry of u",
        ),
        (lambda: em.frames([]), "The 'found' argument of plot.em.frames must hold at least one turn, got none."),
        (
            lambda: em.jensen((1.0,), (1.0,)),
            "The 'values' argument of plot.em.jensen must be at least two positive numbers",
        ),
        (
            lambda: em.jensen((1.0, 2.0), (0.5, 0.6)),
            "The 'weights' argument of plot.em.jensen must be one per value, >= 0",
        ),
        (
            lambda: em.components(None, rows()),
            "The 'posterior' argument of plot.em.components must be of a Gaussian mixture",
        ),
        (lambda: em.evidence({}), "The 'posteriors' argument of plot.em.evidence must be of VariationalEM"),
    ]
    for call, sentence in cases:
        with pytest.raises(InputError) as caught:
            call()
        assert str(caught.value).startswith(sentence)
    y = torch.stack([rows(), rows(seed=1)], 1)
    posterior = pr.fit(mixture, y, pr.EM(), progress=False)
    with pytest.raises(
        InputError, match=r"The 'columns' argument of plot.em.components must be two different integers from 0 to 1"
    ):
        em.components(posterior, y, (0, 2))
