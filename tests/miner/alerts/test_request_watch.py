"""What is remembered of validators' requests."""

from __future__ import annotations

from miner.alerts.request_watch import MAX_NEW_FIELDS, RequestWatch


def test_of_made_up_fields_the_newest_are_remembered() -> None:
    watch = RequestWatch()
    for number in range(MAX_NEW_FIELDS + 10):
        watch.note_new_fields("key", [f"field{number}"], float(number))
    ((hotkey, newest, names),) = watch.new_fields(0.0)
    assert (hotkey, newest, len(names)) == ("key", MAX_NEW_FIELDS + 9.0, MAX_NEW_FIELDS)
    assert "field9" not in names
