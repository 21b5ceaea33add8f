"""What a validator concludes from a miner's reply, malformed ones included.

Their client is lenient in some places and fatal in others. The one that costs a whole task's miners is a
start answered 200 with a body that is not JSON: it ends the validator's loop, and every miner of the task
gets its start again, with a new repository name. The readings here are theirs, not what would be sensible.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import ValidationError

from core.wire import MinerSubmission, MinerTaskResponse, TrainingRepoResponse

_FULL_COMMIT = re.compile(r"[0-9a-fA-F]{40}")


class Outcome(StrEnum):
    """What happens next on the validator's side."""

    ACCEPTED = "accepted"
    NOT_ACCEPTED = "not accepted"
    START_NOTED = "start noted"
    START_IGNORED = "start ignored"
    STARTS_RESENT = "all starts resent"
    SUBMISSION = "submission"
    NO_SUBMISSION = "no submission"
    SUBMISSION_REJECTED = "submission rejected"
    ENTERED = "entered"
    NOT_ENTERED = "not entered"
    ALIVE = "alive"
    NOT_ALIVE = "not alive"


@dataclass(frozen=True)
class Conclusion:
    outcome: Outcome
    reason: str

    def __str__(self) -> str:
        return f"{self.outcome}: {self.reason}" if self.reason else str(self.outcome)


@dataclass(frozen=True)
class Reply:
    """An answer as it came off the wire. That there was none at all is written as None instead."""

    status: int
    body: bytes

    def json(self) -> Any:
        """The body's JSON; `ValueError` for anything that is not JSON."""
        try:
            return json.loads(self.body)
        except RecursionError:
            raise ValueError("JSON nested too deeply") from None


def read_offer(reply: Reply | None) -> Conclusion:
    """Anything but 200, a JSON object, a text and a clear yes is a no."""
    if reply is None or reply.status != 200:
        return Conclusion(Outcome.NOT_ACCEPTED, _unanswered(reply))
    try:
        answer = reply.json()
    except ValueError:
        return Conclusion(Outcome.NOT_ACCEPTED, "200, but the body is not JSON")
    if not isinstance(answer, dict):
        return Conclusion(Outcome.NOT_ACCEPTED, f"a JSON object was needed, not {_shown(answer)}")
    try:
        read = MinerTaskResponse(
            message=answer.get("message", "No message given"), accepted=answer.get("accepted", False)
        )
    except ValidationError as error:
        return Conclusion(Outcome.NOT_ACCEPTED, f"unusable {_fields(error)}")
    outcome = Outcome.ACCEPTED if read.accepted else Outcome.NOT_ACCEPTED
    if not isinstance(answer.get("accepted"), bool):
        return Conclusion(outcome, f"accepted is {_shown(answer.get('accepted'))}, not a JSON boolean")
    return Conclusion(outcome, read.message)


def read_start(reply: Reply | None) -> Conclusion:
    """The miner stays assigned whatever it says; only a 200 without JSON does harm, and to everybody."""
    if reply is None or reply.status != 200:
        return Conclusion(Outcome.START_IGNORED, f"{_unanswered(reply)}; logged, and still assigned")
    try:
        reply.json()
    except ValueError:
        return Conclusion(
            Outcome.STARTS_RESENT,
            "200, but the body is not JSON: every miner of the task is told again, with new names",
        )
    return Conclusion(Outcome.START_NOTED, "")


def read_submission(reply: Reply | None, expected_repo_name: str | None = None) -> Conclusion:
    """With the name the validator expects, the checks it makes before it downloads anything as well."""
    if reply is None or reply.status != 200:
        return Conclusion(Outcome.NO_SUBMISSION, _unanswered(reply))
    try:
        submission = submission_of(reply.json())
    except ValidationError as error:
        return Conclusion(Outcome.NO_SUBMISSION, f"unusable {_fields(error)}")
    except ValueError:
        return Conclusion(Outcome.NO_SUBMISSION, "200, but the body is not JSON")
    if submission is None:
        return Conclusion(Outcome.NO_SUBMISSION, "the reply names no repository")
    if "/" not in submission.repo:
        return Conclusion(
            Outcome.SUBMISSION_REJECTED, f"{_shown(submission.repo)} is not of the form owner/name"
        )
    if expected_repo_name is not None and submission.repo.split("/")[-1] != expected_repo_name:
        return Conclusion(
            Outcome.SUBMISSION_REJECTED,
            f"repository name mismatch: {_shown(submission.repo)} does not end in {expected_repo_name!r}",
        )
    proof = "its hash will be verified" if submission.model_hash is not None else "no hash to verify"
    return Conclusion(Outcome.SUBMISSION, f"{submission.repo}, {proof}")


def submission_of(answer: Any) -> MinerSubmission | None:
    """Older miners sent the repository as a bare string, so any JSON that is no object is spelled out."""
    if isinstance(answer, dict) and "repo" in answer:
        return MinerSubmission(repo=answer["repo"], model_hash=answer.get("model_hash"))
    repo = str(answer)
    return None if repo == "None" else MinerSubmission(repo=repo)


def read_training_repo(reply: Reply | None) -> Conclusion:
    """Not entered on anything unusual. The newer validators also insist on a full commit hash."""
    if reply is None or reply.status != 200:
        return Conclusion(Outcome.NOT_ENTERED, _unanswered(reply))
    try:
        answer = reply.json()
    except ValueError:
        return Conclusion(Outcome.NOT_ENTERED, "200, but the body is not JSON")
    if not isinstance(answer, dict):
        return Conclusion(Outcome.NOT_ENTERED, f"a JSON object was needed, not {_shown(answer)}")
    try:
        repo = TrainingRepoResponse.model_validate(answer)
    except ValidationError as error:
        return Conclusion(Outcome.NOT_ENTERED, f"unusable {_fields(error)}")
    if not _FULL_COMMIT.fullmatch(repo.commit_hash):
        return Conclusion(
            Outcome.NOT_ENTERED, f"commit_hash {_shown(repo.commit_hash)} is not a full 40-digit hash"
        )
    return Conclusion(Outcome.ENTERED, f"{repo.github_repo} at {repo.commit_hash[:12]}")


def read_health(reply: Reply | None) -> Conclusion:
    """No validator asks this; supervisors and the demo do."""
    if reply is None or reply.status != 200:
        return Conclusion(Outcome.NOT_ALIVE, _unanswered(reply))
    try:
        answer = reply.json()
    except ValueError:
        return Conclusion(Outcome.NOT_ALIVE, "200, but the body is not JSON")
    if not isinstance(answer, dict) or answer.get("status") != "ok":
        return Conclusion(Outcome.NOT_ALIVE, f"status 'ok' was needed, not {_shown(answer)}")
    return Conclusion(Outcome.ALIVE, "")


def _unanswered(reply: Reply | None) -> str:
    if reply is None:
        return "no reply"
    kind = " (a redirect, not followed)" if 300 <= reply.status < 400 else ""
    return f"HTTP {reply.status}{kind}"


def _fields(error: ValidationError) -> str:
    wrong = [f"{'.'.join(map(str, one['loc']))}={_shown(one['input'])}" for one in error.errors()]
    return ", ".join(wrong)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
