from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ConfigError
from miner.offers.offered import MAX_LINE, Known, Offered, from_lines, to_line
from miner.offers.stream import stream
from tests.doubles.each import each
from tests.miner.offers.builders import NOON, offer


def test_offers_come_back_from_their_lines_as_they_were() -> None:
    made = list(stream(3, days=2, per_day=30, start=NOON))
    assert from_lines(map(to_line, made), "x.jsonl") == made
    known = Offered(NOON, offer(), None, Known.FAILED)
    assert from_lines([to_line(known)], "x.jsonl") == [known]


def test_a_raw_offer_with_a_date_is_enough_and_order_does_not_matter() -> None:
    late, early = '"received_at": "2025-10-02T00:00:00"', '"received_at": "2025-10-01T12:00:00Z"'
    rest = '"model": "a/b-7b", "hours_to_complete": 2, "task_id": "t", "task_type": "DpoTask", "new_key": 1'
    found = from_lines([f"{{{late}, {rest}}}", "", f"{{{early}, {rest}}}"], "x.jsonl")
    assert [one.at for one in found] == [NOON, NOON + 12 * 3600]


@each(
    ("line", "said"),
    [
        ("{}", "received_at: Field required"),
        ("[1]", "object"),
        ("not json", "JSON"),
        (json.dumps({"model": "x" * MAX_LINE}), "longer than"),
        ('{"received_at": "yesterday"}', "received_at: Value error"),
        ('{"received_at": -1}', "received_at"),
        ('{"received_at": 1e300}', "received_at"),
    ],
)
def test_a_bad_line_is_told_with_its_number(line: str, said: str) -> None:
    good = to_line(Offered(NOON, offer()))
    with pytest.raises(ConfigError) as caught:
        from_lines([good, line], "mine.jsonl")
    (problem,) = caught.value.problems
    assert problem.where == "mine.jsonl:2"
    assert said in problem.rule


@given(
    st.text(max_size=200)
    | st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=5),
        lambda inner: st.dictionaries(st.sampled_from(["received_at", "model", "rows", "task_type"]), inner),
        max_leaves=5,
    ).map(json.dumps)
)
def test_any_line_is_an_offer_or_a_told_problem(line: str) -> None:
    with contextlib.suppress(ConfigError):
        assert len(from_lines([line], "x")) <= 1
