"""Variational families: distributions q over the flat vector, and the forms that map parameters theta to q."""

from priory.families.base import FORMS, Family, Form, form_of
from priory.families.diagonal import DiagonalFamily, DiagonalForm
from priory.families.factorised import Factorised, FactorisedForm
from priory.families.flow import FlowFamily, FlowForm
from priory.families.full_rank import FullRankFamily, FullRankForm
from priory.families.low_rank import LowRankFamily, LowRankForm
from priory.families.mixture import MixtureFamily, MixtureForm
from priory.families.per_parameter import PerParameter, PerParameterForm

__all__ = [
    "FORMS",
    "DiagonalFamily",
    "DiagonalForm",
    "Factorised",
    "FactorisedForm",
    "Family",
    "FlowFamily",
    "FlowForm",
    "Form",
    "FullRankFamily",
    "FullRankForm",
    "LowRankFamily",
    "LowRankForm",
    "MixtureFamily",
    "MixtureForm",
    "PerParameter",
    "PerParameterForm",
    "form_of",
]
