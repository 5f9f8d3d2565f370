"""The check of a posterior: which items apply to it, and in which order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from priory.check.approximation import approximation_items
from priory.check.chains import chain_items
from priory.check.optimisation import convergence, optimisation_items
from priory.check.predictions import prediction_items
from priory.check.reference import reference_items
from priory.check.result import Check, Item, judged
from priory.core.errors import is_integer, require
from priory.core.tables import counted
from priory.fitting.fit import fit
from priory.methods.mcmc.nuts import NUTS
from priory.models.base import has_network
from priory.posteriors.chains import Chains
from priory.posteriors.pointwise import rows_of

if TYPE_CHECKING:
    from priory.core.data import Data
    from priory.posteriors import Posterior

MAX_NUTS_COORDINATES = 1000


def check(
    posterior: Posterior,
    data: Any = None,
    *,
    against: Posterior | None = None,
    reference: str | None = None,
    seed: int = 0,
) -> Check:
    """Check whether a posterior may be believed: see `Posterior.check`."""
    require(is_integer(seed, -(2**63)), "seed", "check", "be an integer", repr(seed))
    require(reference in (None, "nuts"), "reference", "check", "be 'nuts' or None", repr(reference))
    both = against is not None and reference is not None
    require(not both, "reference", "check", "be left out when 'against' is given", repr(reference))
    held_out = None if data is None else rows_of(posterior, data, "check")
    items = own_items(posterior, held_out, seed)
    if reference == "nuts":
        against = by_nuts(posterior, seed)
    if against is not None:
        items += reference_items(posterior, against, held_out, seed)
    rows = "" if posterior.num_data is None else f", {counted(posterior.num_data, 'row')}"
    return Check(tuple(items), f"{posterior.method or type(posterior).__name__}{rows}")


def own_items(posterior: Posterior, held_out: Data | None, seed: int) -> list[Item]:
    """The items that need no other posterior."""
    if isinstance(posterior, Chains):
        return [
            *chain_items(posterior),
            convergence(posterior),
            *target_items(posterior),
            *prediction_items(posterior, held_out, seed),
        ]
    spread = [no_spread(posterior)] if posterior.point else approximation_items(posterior, seed)
    k_hat_known = any(item.name == "k-hat" and item.outcome != "not known" for item in spread)
    items = [*optimisation_items(posterior, k_hat_known), *target_items(posterior), *spread]
    return [*items, *prediction_items(posterior, held_out, seed)]


def target_items(posterior: Posterior) -> list[Item]:
    """Whether the target of the fit is the posterior itself: its temperature, and its number of rows."""
    items, t, n = [], posterior.temperature, posterior.num_data
    if t != 1:
        items.append(
            judged(
                "temperature",
                "model",
                t,
                False,
                "1",
                f"The posterior is tempered, T = {t:g}: its spread is not that of the Bayesian posterior.",
                "fit with temperature=1, or rely on calibration with held-out rows alone",
            )
        )
    rows = None if posterior.data is None or posterior.data.tensors is None else len(posterior.data.tensors[0])
    if rows is not None and n is not None:
        share = n / rows
        items.append(
            judged(
                "rows",
                "model",
                share,
                share == 1,
                "N / rows, 1",
                f"The likelihood counts {n:,} rows, and the data have {rows:,}.",
                "see num_data",
            )
        )
    return items


def no_spread(posterior: Posterior) -> Item:
    """A point says nothing about uncertainty."""
    remedy = "use Laplace(at=posterior), or an Ensemble" if has_network(posterior.model) else "use Laplace or NUTS"
    return judged(
        "spread", "approximation", 0.0, False, "above 0", "A point has no spread over its parameters.", remedy
    )


def by_nuts(posterior: Posterior, seed: int) -> Posterior:
    """Draws of NUTS from the same model and data."""
    size = posterior.model.layout.size
    must = f"be None for more than {MAX_NUTS_COORDINATES:,} parameters, here {size:,}: NUTS would take too long"
    require(size <= MAX_NUTS_COORDINATES, "reference", "check", must, "'nuts'")
    known = posterior.data is not None or posterior.num_data is None
    require(known, "reference", "check", "be None for a posterior without the data of its fit", "'nuts'")
    target = posterior.target
    return fit(
        posterior.model,
        posterior.data,
        NUTS(),
        seed=seed,
        temperature=target.temperature,
        tempers=target.tempers,
        progress=False,
    )
