"""Markov chain Monte Carlo: many chains as one batch, exact draws where exactness is promised."""

from priory.methods.mcmc.hmc import HMC
from priory.methods.mcmc.mala import MALA
from priory.methods.mcmc.nuts import NUTS
from priory.methods.mcmc.random_walk import RandomWalk

__all__ = ["HMC", "MALA", "NUTS", "RandomWalk"]
