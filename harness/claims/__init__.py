"""The paper's claims beside what was measured: rows in, findings with a verdict out.

`evaluate` reads a folder of results; `model` has what it returns, `verdicts` the rule, `measures` each claim's measure,
`predictions` what the roofline says of a GPU without rows.
"""

from harness.claims.engine import evaluate, judge
from harness.claims.model import VERDICTS, Claim, ClaimResult, Finding, Prediction, RowRef
from harness.claims.paper import load_claims
from harness.claims.rows import lines_of
from harness.claims.verdicts import verdict

__all__ = [
    "VERDICTS",
    "Claim",
    "ClaimResult",
    "Finding",
    "Prediction",
    "RowRef",
    "evaluate",
    "judge",
    "lines_of",
    "load_claims",
    "verdict",
]
