import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from miner.dev.validator import (
    MinerReply,
    ValidatorOutcome,
    read_health,
    read_offer,
    read_start,
    read_submission,
    read_training_repo,
)
from tests.doubles.each import each

COMMIT = "0123456789abcdef0123456789abcdef01234567"
START_IGNORED, STARTS_RESENT = ValidatorOutcome.START_IGNORED, ValidatorOutcome.STARTS_RESENT
START_NOTED, REJECTED = ValidatorOutcome.START_NOTED, ValidatorOutcome.SUBMISSION_REJECTED
SUBMISSION, NO_SUBMISSION = ValidatorOutcome.SUBMISSION, ValidatorOutcome.NO_SUBMISSION
READERS = (read_offer, read_start, read_submission, read_training_repo, read_health)


def answered(value: Any, status: int = 200) -> MinerReply:
    return MinerReply(status, json.dumps(value).encode())


@each("yes", [True, 1, "true", "yes", "on", "1"])
def test_a_yes_in_any_spelling_of_pydantics_is_a_yes_and_no_boolean_is_pointed_out(
    yes: object,
) -> None:
    read = read_offer(answered({"message": "ok", "accepted": yes}))
    assert read.outcome is ValidatorOutcome.ACCEPTED
    assert (read.reason == "ok") is (yes is True)


@each(
    "reply",
    [
        None,
        answered({"message": "ok", "accepted": True}, status=201),
        answered({"message": "ok", "accepted": True}, status=307),
        answered({"detail": "no"}, status=403),
        MinerReply(200, b"yes"),
        MinerReply(200, b""),
        MinerReply(200, b"\xff\xfe\x00"),
        MinerReply(200, b"[" * 100_000),
        answered([{"message": "ok", "accepted": True}]),
        answered(True),
        answered({}),
        answered({"message": "ok"}),
        answered({"message": "ok", "accepted": None}),
        answered({"message": "ok", "accepted": 2}),
        answered({"message": "ok", "accepted": "perhaps"}),
        answered({"message": None, "accepted": True}),
        answered({"message": ["ok"], "accepted": True}),
        answered({"message": "no", "accepted": False}),
    ],
)
def test_everything_else_is_a_no(reply: MinerReply | None) -> None:
    assert read_offer(reply).outcome is ValidatorOutcome.NOT_ACCEPTED


def test_an_offer_accepted_without_a_message_still_counts() -> None:
    read = read_offer(answered({"accepted": True}))
    assert (read.outcome, read.reason) == (ValidatorOutcome.ACCEPTED, "No message given")


@each(
    ("reply", "outcome"),
    [
        *((reply, START_IGNORED) for reply in (None, answered({}, status=400), MinerReply(500, b"oops"))),
        *((MinerReply(200, body), STARTS_RESENT) for body in (b"", b"ok", b"<html>", b"{", b"\xff")),
        *((answered(value), START_NOTED) for value in ({}, {"message": "ok"}, [], None, 1)),
    ],
)
def test_a_start_is_noted_with_any_json_and_without_json_all_miners_get_it_again(
    reply: MinerReply | None, outcome: ValidatorOutcome
) -> None:
    assert read_start(reply).outcome is outcome


def test_a_submission_counts_with_the_expected_name_and_with_or_without_a_hash() -> None:
    bare = read_submission(answered({"repo": "me/model-1"}), "model-1")
    hashed = read_submission(answered({"repo": "me/model-1", "model_hash": "ab"}), "model-1")
    assert bare.outcome is hashed.outcome is ValidatorOutcome.SUBMISSION
    assert "no hash" in bare.reason
    assert "will be verified" in hashed.reason


@each(
    ("reply", "outcome"),
    [
        (answered("me/model-1"), SUBMISSION),  # as older miners said it
        *((reply, NO_SUBMISSION) for reply in (None, answered({}, 404), MinerReply(200, b"me/m"))),
        *((answered(value), NO_SUBMISSION) for value in (None, "None", {"repo": None}, {"repo": 7})),
        (answered({"repo": "me/m", "model_hash": 7}), NO_SUBMISSION),
        *(
            (answered(value), REJECTED)
            for value in ({"repo": "model-1"}, {"error": "none"}, 42, ["me/other"])
        ),
        (answered({"repo": "me/model-2"}), REJECTED),
    ],
)
def test_a_submission_names_the_expected_repository(
    reply: MinerReply | None, outcome: ValidatorOutcome
) -> None:
    assert read_submission(reply, "model-1").outcome is outcome


def test_a_training_repository_needs_a_url_and_a_full_commit() -> None:
    entered = read_training_repo(answered({"github_repo": "https://x/y", "commit_hash": COMMIT}))
    assert entered.outcome is ValidatorOutcome.ENTERED
    both_eras = {
        "github_repo": "u",
        "commit_hash": COMMIT,
        "github_token": None,
        "requested_datasets": None,
    }
    assert read_training_repo(answered(both_eras)).outcome is ValidatorOutcome.ENTERED


@each(
    "reply",
    [
        None,
        answered({"error": "x"}, 404),
        MinerReply(200, b"no"),
        answered([]),
        answered({"github_repo": "u"}),
        answered({"github_repo": None, "commit_hash": COMMIT}),
        answered({"github_repo": "u", "commit_hash": "main"}),
        answered({"github_repo": "u", "commit_hash": COMMIT[:12]}),
    ],
)
def test_anything_unusual_means_not_entered(reply: MinerReply | None) -> None:
    assert read_training_repo(reply).outcome is ValidatorOutcome.NOT_ENTERED


def test_health_is_alive_only_with_status_ok() -> None:
    assert read_health(answered({"status": "ok", "version": "1"})).outcome is ValidatorOutcome.ALIVE
    for reply in (None, answered({"status": "ok"}, 503), answered({"status": "starting"}), answered("ok")):
        assert read_health(reply).outcome is ValidatorOutcome.NOT_ALIVE
    assert read_health(MinerReply(200, b"ok")).outcome is ValidatorOutcome.NOT_ALIVE


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
named = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(
        ("message", "accepted", "repo", "model_hash", "github_repo", "commit_hash", "status"), json_values
    ),
)


@given(
    st.sampled_from(READERS),
    st.sampled_from((200, 204, 307, 404, 500)),
    st.binary(max_size=30) | (json_values | named).map(lambda value: json.dumps(value).encode()),
)
def test_no_reply_whatsoever_breaks_a_reader(reader: Any, status: int, body: bytes) -> None:
    read = reader(MinerReply(status, body))
    assert isinstance(read.outcome, ValidatorOutcome)
    assert len(read.reason) < 2000
    assert str(read).startswith(str(read.outcome))
