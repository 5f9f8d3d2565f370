"""What every other room uses, and what knows nothing of inference."""
