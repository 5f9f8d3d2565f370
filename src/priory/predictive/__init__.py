"""Predictions: what is known of new targets."""

from priory.predictive.prediction import Prediction, predict

__all__ = ["Prediction", "predict"]
