"""Laplace's approximation and its last-layer form."""
