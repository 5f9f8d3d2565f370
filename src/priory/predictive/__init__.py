"""Predictions: the distribution of targets at new inputs under a posterior."""

from priory.predictive.averaged import Averaged
from priory.predictive.components import GaussianComponents
from priory.predictive.distribution import PredictiveDistribution
from priory.predictive.draws import MixtureOfDraws
from priory.predictive.linearised import LINKS, Linearised
from priory.predictive.prediction import ClassPrediction, CountPrediction, Prediction, RegressionPrediction, predict

__all__ = [
    "LINKS",
    "Averaged",
    "ClassPrediction",
    "CountPrediction",
    "GaussianComponents",
    "Linearised",
    "MixtureOfDraws",
    "Prediction",
    "PredictiveDistribution",
    "RegressionPrediction",
    "predict",
]
