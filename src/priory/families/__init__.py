"""Variational families: distributions q over the flat vector, and the forms that map parameters theta to q."""

from priory.families.base import FORMS, Family, Form, form_of
from priory.families.diagonal import Diagonal, DiagonalForm
from priory.families.factorised import Factorised, FactorisedForm
from priory.families.flow import Flow, FlowForm
from priory.families.full_rank import FullRank, FullRankForm
from priory.families.low_rank import LowRank, LowRankForm
from priory.families.mixture import Mixture, MixtureForm
from priory.families.per_parameter import PerParameter, PerParameterForm

__all__ = [
    "FORMS",
    "Diagonal",
    "DiagonalForm",
    "Factorised",
    "FactorisedForm",
    "Family",
    "Flow",
    "FlowForm",
    "Form",
    "FullRank",
    "FullRankForm",
    "LowRank",
    "LowRankForm",
    "Mixture",
    "MixtureForm",
    "PerParameter",
    "PerParameterForm",
    "form_of",
]
