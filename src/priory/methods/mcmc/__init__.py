"""Markov chain Monte Carlo: all chains run as one batch, with draws that are exact in the limit.

`HMC`, `NUTS`, `MALA` and `RandomWalk` correct every step by Metropolis' rule. The stochastic-gradient samplers (`sgld`,
`sghmc`) read minibatches and have a discretisation error instead.
"""

from priory.methods.mcmc.hmc import HMC
from priory.methods.mcmc.mala import MALA
from priory.methods.mcmc.nuts import NUTS
from priory.methods.mcmc.random_walk import RandomWalk

__all__ = ["HMC", "MALA", "NUTS", "RandomWalk"]
