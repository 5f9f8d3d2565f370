import pytest

import priory as pr
from priory.testing.contract import CLAUSES

METHODS = {
    "MAP": pr.MAP(),
    "MeanField": pr.MeanField(samples=4),
    "MeanField with one sample": pr.MeanField(),
}


@pytest.mark.parametrize("clause", CLAUSES, ids=lambda clause: clause.__name__)
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_every_method_keeps_the_contract(method, clause):
    clause(method)
