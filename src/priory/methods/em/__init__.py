"""Expectation maximisation (EM), variational EM and amortised EM for latent-variable models."""
