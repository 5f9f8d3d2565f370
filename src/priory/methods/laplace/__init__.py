"""The Laplace approximation, and exact inference for the last layer of a network."""
