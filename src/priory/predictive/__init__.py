"""Predictions: what is known of new targets."""
