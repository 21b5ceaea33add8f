from __future__ import annotations

from pathlib import Path

from core.domain.job_states import END_MEANINGS, EndReason
from tests.doubles.each import each

PAGE = (Path(__file__).parents[3] / "docs/jobs.md").read_text()


@each("reason", EndReason)
def test_every_end_reason_is_documented_with_the_operator_s_text(reason: EndReason) -> None:
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{reason}` |")]
    assert line.endswith(f"| {END_MEANINGS[reason].operator} |")
