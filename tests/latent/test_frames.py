"""The centre and the scale by which a model standardises its data."""

import pytest
import torch

from priory.core.errors import InputError
from priory.latent import (
    BayesianGaussianMixture,
    FactorAnalysis,
    GaussianMixture,
    HiddenMarkov,
    LinearGaussian,
    PrincipalComponents,
    RegressionMixture,
)
from priory.latent.frames import frame

Y = torch.randn(20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * torch.tensor([1.0, 9.0, 0.1])


def test_the_frame_is_the_mean_and_the_standard_deviation_of_the_observed_values():
    y = Y.clone()
    y[::4, 1] = torch.nan
    centre, scale = frame(y, None, "y", "it", torch.float64)
    torch.testing.assert_close(centre, y.nanmean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(scale.square(), (y - y.nanmean(0)).square().nanmean(0), rtol=1e-12, atol=0)
    _, one = frame(y, None, "y", "it", torch.float64, together=True)
    torch.testing.assert_close(one.square(), scale.square().mean().expand(3), rtol=1e-12, atol=0)


def test_a_row_weight_equals_that_many_repetitions_and_a_weight_of_zero_removes_a_row():
    y, weights = Y.clone(), torch.arange(20) % 3
    y[0] = 1e6  # a row of weight 0
    y[1, 2] = torch.nan
    weighted_fit, repeated = frame(y, weights, "y", "it", torch.float64), y.repeat_interleave(weights, 0)
    for found, wanted in zip(weighted_fit, frame(repeated, None, "y", "it", torch.float64), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_the_scale_of_a_constant_column_is_its_magnitude():
    y = torch.tensor([[0.0, 1e6, -0.1]]).double().expand(5, 3)
    centre, scale = frame(y, None, "y", "it", torch.float64)
    torch.testing.assert_close(centre, y[0])
    assert scale.tolist() == [1.0, 1e6, 1.0]


@pytest.mark.parametrize(("factor", "dtype"), [(1e200, "float64"), (1e-200, "float64"), (1e25, "float32")])
def test_a_scale_whose_square_overflows_or_underflows_is_refused(factor: float, dtype: str):
    y = (Y * factor).to(getattr(torch, dtype))
    models = [GaussianMixture(2), GaussianMixture(2, "diagonal"), BayesianGaussianMixture(2), FactorAnalysis(1)]
    for model in [*models, PrincipalComponents(1)]:
        with pytest.raises(InputError, match=r"must have columns that spread by .*: measure in other units, got "):
            model.meet(y)
    for model in (HiddenMarkov(2), LinearGaussian(1)):
        with pytest.raises(InputError, match="measure in other units"):
            model.meet(y[None])
    with pytest.raises(InputError, match=r"The 'y' argument of RegressionMixture.* measure in other units"):
        RegressionMixture(2).meet((Y.to(y.dtype), y[:, 0]))


def test_a_scale_just_inside_the_limits_is_accepted():
    for factor in (1e140, 1e-140):
        model, _ = GaussianMixture(2).meet(Y * factor)
        assert bool(torch.isfinite(model.frame["scale"].square()).all())
        assert bool((model.frame["scale"].square() * model.floor > 0).all())


def test_a_column_without_weighted_values_is_refused():
    y, weights = Y.clone(), torch.ones(20)
    y[:10, 1], weights[10:] = torch.nan, 0.0
    with pytest.raises(InputError, match="got only NaN and rows of weight 0 in column 1"):
        GaussianMixture(2, given="weights").meet((y, weights))
