"""The report of a search for modes: the distance to the mode, its condition number, and the number of modes."""

from __future__ import annotations

from dataclasses import dataclass

from priory.core.tables import counted


@dataclass(frozen=True)
class Mode:
    """How the mode of a posterior was found.

    Attributes:
        distance: Distance to the mode in standard deviations, |H^-1/2 g|, with g the gradient of the log joint and H
            minus its Hessian.
        gradient_norm: Norm of g, in unconstrained coordinates.
        condition_number: Condition number of H, scaled to a unit diagonal, so that it doesn't depend on the units of
            the parameters; infinite if H is singular or not positive definite.
        modes: Number of different modes that the starts reached.
        starts: Number of starts.
        next_mode_nats: How much lower the log density is at the second highest mode; None if there is only one.
        corners: Number of coordinates that lie on a corner of the log density, as at the zero of a Laplace prior; the
            gradient and the condition number are those of the other coordinates.

    Example:
        >>> print(Mode(1e-9, 1e-8, 25.0, 2, 8, 1.5))
        gradient 1e-09 sd from zero, condition number 25, the best of 2 modes from 8 starts
    """

    distance: float
    gradient_norm: float
    condition_number: float
    modes: int = 1
    starts: int = 1
    next_mode_nats: float | None = None
    corners: int = 0

    def __str__(self) -> str:
        found = f"gradient {self.distance:.1g} sd from zero, condition number {self.condition_number:.3g}"
        if self.modes > 1:
            found += f", the best of {counted(self.modes, 'mode')} from {counted(self.starts, 'start')}"
        if self.corners:
            found += f", {counted(self.corners, 'coordinate')} on a corner"
        return found
