"""The memory model's benchmark, on a few of its cases."""

from __future__ import annotations

import pytest

from benchmarks import memory_model


def test_the_cases_cover_shapes_methods_ranks_and_checkpointing() -> None:
    cases = list(memory_model.cases())
    assert {name for name, _ in cases} == set(memory_model.MODELS)
    assert {case["method"] for _, case in cases} == {"full", "lora"}
    assert {case["rank"] for _, case in cases} >= {0, 16, 128, 512}
    assert {case["checkpointing"] for _, case in cases} == {True, False}
    assert len(cases) > 250


def test_without_a_training_environment_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(memory_model.VARIABLE, raising=False)
    report = memory_model.run(quick=True)
    assert report.rows == []
    assert memory_model.VARIABLE in report.notes[0]


@pytest.mark.thorough
@pytest.mark.training
def test_the_model_holds_against_torchs_own_bookkeeping(training_python: str) -> None:
    picked = list(memory_model.cases())[5::37]
    rows = memory_model.compare(picked, training_python)
    assert len(rows) == len(picked) >= 7
    assert all(row.holds for row in rows), [memory_model.shown(row) for row in rows]
    assert sum(abs(row.error) for row in rows) / len(rows) < 0.08
