"""The centre and the scale that a model reads its data by."""

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


def test_the_frame_is_the_mean_and_the_root_of_the_variance_of_what_was_seen():
    y = Y.clone()
    y[::4, 1] = torch.nan
    centre, scale = frame(y, None, "y", "it", torch.float64)
    torch.testing.assert_close(centre, y.nanmean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(scale.square(), (y - y.nanmean(0)).square().nanmean(0), rtol=1e-12, atol=0)
    _, one = frame(y, None, "y", "it", torch.float64, together=True)
    torch.testing.assert_close(one.square(), scale.square().mean().expand(3), rtol=1e-12, atol=0)


def test_a_weight_is_a_repetition_and_a_row_that_counts_nothing_is_not_there():
    y, weights = Y.clone(), torch.arange(20) % 3
    y[0] = 1e6  # counts 0 times
    y[1, 2] = torch.nan
    counted, repeated = frame(y, weights, "y", "it", torch.float64), y.repeat_interleave(weights, 0)
    for found, wanted in zip(counted, frame(repeated, None, "y", "it", torch.float64), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_a_column_that_stands_still_has_its_own_size():
    y = torch.tensor([[0.0, 1e6, -0.1]]).double().expand(5, 3)
    centre, scale = frame(y, None, "y", "it", torch.float64)
    torch.testing.assert_close(centre, y[0])
    assert scale.tolist() == [1.0, 1e6, 1.0]


@pytest.mark.parametrize(("times", "dtype"), [(1e200, "float64"), (1e-200, "float64"), (1e25, "float32")])
def test_a_spread_whose_square_is_no_number_is_refused(times: float, dtype: str):
    y = (Y * times).to(getattr(torch, dtype))
    models = [GaussianMixture(2), GaussianMixture(2, "diagonal"), BayesianGaussianMixture(2), FactorAnalysis(1)]
    for model in [*models, PrincipalComponents(1)]:
        with pytest.raises(InputError, match=r"must have columns that spread by .*: measure in other units, got "):
            model.meet(y)
    for model in (HiddenMarkov(2), LinearGaussian(1)):
        with pytest.raises(InputError, match="measure in other units"):
            model.meet(y[None])
    with pytest.raises(InputError, match=r"The 'y' argument of RegressionMixture.* measure in other units"):
        RegressionMixture(2).meet((Y.to(y.dtype), y[:, 0]))


def test_a_spread_just_inside_is_taken():
    for times in (1e140, 1e-140):
        model, _ = GaussianMixture(2).meet(Y * times)
        assert bool(torch.isfinite(model.frame["scale"].square()).all())
        assert bool((model.frame["scale"].square() * model.floor > 0).all())


def test_a_column_that_nothing_counts_in_is_refused():
    y, weights = Y.clone(), torch.ones(20)
    y[:10, 1], weights[10:] = torch.nan, 0.0
    with pytest.raises(InputError, match="got only NaN and rows that count 0 times in column 1"):
        GaussianMixture(2, given="weights").meet((y, weights))
