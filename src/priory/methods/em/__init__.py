"""EM, variational EM and amortised EM."""
