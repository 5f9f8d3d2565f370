"""May this posterior be believed? `posterior.check(data)` answers in words, numbers and pictures.

optimisation.py     did the fit converge?
approximation.py    draws of q against the joint density
chains.py           R-hat, effective sample sizes, divergences, separate modes
predictions.py      calibration and patterns of the predictions of a network, and the prior
reference.py        the posterior against another one
result.py           items, and the verdict that follows from them
"""

from priory.check.checking import check
from priory.check.result import Check, Item

__all__ = ["Check", "Item", "check"]
