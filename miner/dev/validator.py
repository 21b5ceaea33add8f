"""A validator's client: signs, posts and waits as theirs does, and says what it would conclude from the
reply, malformed ones included.

One request at a time, no retries, redirects not followed, the reference's time limits: httpx's, per phase
(connect, write, read), so a reply that trickles in may take longer. Their reading is lenient in some places
and fatal in others: a start answered 200 with a body that is not JSON ends the validator's loop, and every
miner of the task gets its start again, with a new repository name.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, Self
from urllib.parse import quote

import httpx
from bittensor_core import Keypair
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from core.domain.wire import MinerSubmission, MinerTaskResponse, TournamentType, TrainingRepoResponse
from miner.chain.fiber import Signer, sign_headers
from miner.dev.samples import SampleTask

_FULL_COMMIT = re.compile(r"[0-9a-fA-F]{40}")
#: The field of a reply that holds a secret, and its value in the reply's text.
_TOKEN = "github_token"  # noqa: S105 - its name
_TOKEN_VALUE = re.compile(rb'("github_token"\s*:\s*")(?:[^"\\]|\\.)+')


class ValidatorOutcome(StrEnum):
    """The validator's next step."""

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
class ValidatorConclusion:
    outcome: ValidatorOutcome
    reason: str

    def __str__(self) -> str:
        return f"{self.outcome}: {self.reason}" if self.reason else str(self.outcome)


@dataclass(frozen=True)
class MinerReply:
    """A reply as it came off the wire; None is used where there was none."""

    status: int
    body: bytes

    def json(self) -> Any:
        """Return the body's JSON; raise `ValueError` for anything else."""
        try:
            return json.loads(self.body)
        except RecursionError:
            raise ValueError("JSON nested too deeply") from None


def read_offer(reply: MinerReply | None) -> ValidatorConclusion:
    """Read an answer to an offer: anything but 200, a JSON object, a text and a clear yes is a no."""
    try:
        answer = _json_object(reply)
        read = MinerTaskResponse(
            message=answer.get("message", "No message given"), accepted=answer.get("accepted", False)
        )
    except ValueError as error:
        return ValidatorConclusion(ValidatorOutcome.NOT_ACCEPTED, _why_unusable(error))
    outcome = ValidatorOutcome.ACCEPTED if read.accepted else ValidatorOutcome.NOT_ACCEPTED
    if not isinstance(answer.get("accepted"), bool):
        return ValidatorConclusion(
            outcome, f"accepted is {_short_repr(answer.get('accepted'))}, not a JSON boolean"
        )
    return ValidatorConclusion(outcome, read.message)


def read_start(reply: MinerReply | None) -> ValidatorConclusion:
    """Read an answer to a start: the miner stays assigned whatever it says; a 200 without JSON harms
    everybody.
    """
    if reply is None or reply.status != 200:
        return ValidatorConclusion(
            ValidatorOutcome.START_IGNORED, f"{_unanswered(reply)}; logged, and still assigned"
        )
    try:
        reply.json()
    except ValueError:
        return ValidatorConclusion(
            ValidatorOutcome.STARTS_RESENT,
            "200, but the body is not JSON: all miners of the task get the start again, with new names",
        )
    return ValidatorConclusion(ValidatorOutcome.START_NOTED, "")


def read_submission(reply: MinerReply | None, expected_repo_name: str | None = None) -> ValidatorConclusion:
    """Read a submission; given the expected name, also check what the validator checks before a download."""
    try:
        submission = submission_of(_json_of(reply))
    except ValueError as error:
        return ValidatorConclusion(ValidatorOutcome.NO_SUBMISSION, _why_unusable(error))
    if submission is None:
        return ValidatorConclusion(ValidatorOutcome.NO_SUBMISSION, "the reply names no repository")
    if "/" not in submission.repo:
        return ValidatorConclusion(
            ValidatorOutcome.SUBMISSION_REJECTED,
            f"{_short_repr(submission.repo)} is not of the form owner/name",
        )
    if expected_repo_name is not None and submission.repo.split("/")[-1] != expected_repo_name:
        return ValidatorConclusion(
            ValidatorOutcome.SUBMISSION_REJECTED,
            f"repository name mismatch: {_short_repr(submission.repo)} does not end in "
            f"{expected_repo_name!r}",
        )
    proof = "its hash will be verified" if submission.model_hash is not None else "no hash to verify"
    return ValidatorConclusion(ValidatorOutcome.SUBMISSION, f"{submission.repo}, {proof}")


def submission_of(answer: Any) -> MinerSubmission | None:
    """Accept a bare string too: older miners sent the repository like that."""
    if isinstance(answer, dict) and "repo" in answer:
        return MinerSubmission(repo=answer["repo"], model_hash=answer.get("model_hash"))
    repo = str(answer)
    return None if repo == "None" else MinerSubmission(repo=repo)


def read_training_repo(reply: MinerReply | None) -> ValidatorConclusion:
    """Read a repository: anything unusual means not entered, for newer validators also a short commit."""
    try:
        repo = TrainingRepoResponse.model_validate(_json_object(reply))
    except ValueError as error:
        return ValidatorConclusion(ValidatorOutcome.NOT_ENTERED, _why_unusable(error))
    if not _FULL_COMMIT.fullmatch(repo.commit_hash):
        return ValidatorConclusion(
            ValidatorOutcome.NOT_ENTERED,
            f"commit_hash {_short_repr(repo.commit_hash)} is not a full 40-digit hash",
        )
    return ValidatorConclusion(ValidatorOutcome.ENTERED, f"{repo.github_repo} at {repo.commit_hash[:12]}")


def read_health(reply: MinerReply | None) -> ValidatorConclusion:
    """Read `/healthz`: no validator asks for it, supervisors and the demo do."""
    try:
        answer = _json_object(reply)
    except ValueError as error:
        return ValidatorConclusion(ValidatorOutcome.NOT_ALIVE, _why_unusable(error))
    if answer.get("status") != "ok":
        return ValidatorConclusion(
            ValidatorOutcome.NOT_ALIVE, f"status 'ok' was needed, not {_short_repr(answer)}"
        )
    return ValidatorConclusion(ValidatorOutcome.ALIVE, "")


def _json_of(reply: MinerReply | None) -> Any:
    """Return the JSON of a reply with status 200; raise `ValueError` with the reason if there is none."""
    if reply is None or reply.status != 200:
        raise ValueError(_unanswered(reply))
    try:
        return reply.json()
    except ValueError:
        raise ValueError("200, but the body is not JSON") from None


def _json_object(reply: MinerReply | None) -> dict[str, object]:
    answer = _json_of(reply)
    if not isinstance(answer, dict):
        raise ValueError(f"a JSON object was needed, not {_short_repr(answer)}")
    return answer


def _unanswered(reply: MinerReply | None) -> str:
    if reply is None:
        return "no reply"
    kind = " (a redirect, not followed)" if 300 <= reply.status < 400 else ""
    return f"HTTP {reply.status}{kind}"


def _why_unusable(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    return ", ".join(_what_is_wrong(".".join(map(str, one["loc"])), one) for one in error.errors())


def _what_is_wrong(field: str, error: ErrorDetails) -> str:
    if error["type"] == "missing":  # the input is the whole reply, with its token
        return f"{field} is missing"
    return f"unusable {field}" if field == _TOKEN else f"unusable {field}={_short_repr(error['input'])}"


def _short_repr(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


OFFER_LIMIT_S = 3.0
OTHER_LIMIT_S = 10.0
_SHOWN_BYTES = 2000


@dataclass(frozen=True)
class Exchange:
    """One request and its reply. `reply` is None if there was none; then `failure` says why."""

    call: str
    method: str
    path: str
    latency_s: float
    reply: MinerReply | None
    failure: str | None
    conclusion: ValidatorConclusion

    @property
    def text(self) -> str:
        """Return the reply as text, at most 2,000 bytes of it, without a token."""
        if self.reply is None:
            return self.failure or ""
        shown = _TOKEN_VALUE.sub(rb"\1***", self.reply.body)
        return shown[:_SHOWN_BYTES].decode("utf-8", "backslashreplace")

    def as_json(self) -> dict[str, object]:
        return {
            "call": self.call,
            "request": f"{self.method} {self.path}",
            "status": None if self.reply is None else self.reply.status,
            "reply": self.text,
            "failure": self.failure,
            "latency_ms": round(self.latency_s * 1000, 3),
            "outcome": self.conclusion.outcome.value,
            "reason": self.conclusion.reason,
        }


class ValidatorClient:
    """Talk to one miner as one validator hotkey. Use as `async with`."""

    def __init__(
        self,
        url: str,
        signer: Signer,
        miner_hotkey: str,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = url
        self.signer = signer
        self.miner_hotkey = miner_hotkey
        self._http = httpx.AsyncClient(
            base_url=self.url, transport=transport, trust_env=False, follow_redirects=False
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self._http.aclose()

    async def offer(self, task: SampleTask) -> Exchange:
        return await self.post("offer", task.offer_path, task.offer(), read_offer, OFFER_LIMIT_S)

    async def start(self, task: SampleTask) -> Exchange:
        return await self.post("start", task.start_path, task.start(), read_start, OTHER_LIMIT_S)

    async def submission(self, task_id: str, expected_repo_name: str | None = None) -> Exchange:
        path = f"/get_latest_model_submission/{quote(task_id, safe='')}"
        return await self.get(
            "submission", path, partial(read_submission, expected_repo_name=expected_repo_name)
        )

    async def training_repo(self, kind: TournamentType) -> Exchange:
        return await self.get("training repo", f"/training_repo/{kind.value}", read_training_repo)

    async def health(self) -> Exchange:
        """Ask without a signature, as a supervisor does."""
        return await self._send("health", self._request("GET", "/healthz", {}), OTHER_LIMIT_S, read_health)

    async def post(
        self,
        call: str,
        path: str,
        payload: dict[str, object],
        read: Callable[[MinerReply | None], ValidatorConclusion],
        limit_s: float,
    ) -> Exchange:
        body = json.dumps(payload).encode()
        headers = sign_headers(self.signer, self.miner_hotkey, body)
        return await self._send(call, self._request("POST", path, headers, body), limit_s, read)

    async def get(
        self, call: str, path: str, read: Callable[[MinerReply | None], ValidatorConclusion]
    ) -> Exchange:
        headers = sign_headers(self.signer, self.miner_hotkey, None)
        return await self._send(call, self._request("GET", path, headers), OTHER_LIMIT_S, read)

    def _request(
        self, method: str, path: str, headers: dict[str, str], body: bytes | None = None
    ) -> httpx.Request:
        headers = {"Content-Type": "application/json", **headers}
        return self._http.build_request(method, path, headers=headers, content=body)

    async def _send(
        self,
        call: str,
        request: httpx.Request,
        limit_s: float,
        read: Callable[[MinerReply | None], ValidatorConclusion],
    ) -> Exchange:
        reply: MinerReply | None = None
        failure: str | None = None
        request.extensions["timeout"] = httpx.Timeout(limit_s).as_dict()
        began = time.perf_counter()
        try:
            response = await self._http.send(request)
            reply = MinerReply(response.status_code, response.content)
        except httpx.TimeoutException:
            failure = f"no answer within {limit_s:g} s"
        except httpx.HTTPError as error:
            failure = f"{type(error).__name__}: {error}"
        latency, path = time.perf_counter() - began, request.url.raw_path.decode()
        return Exchange(call, request.method, path, latency, reply, failure, read(reply))


class ForgedSigner:
    """Claim to be one key and sign with another: a miner must refuse it."""

    def __init__(self, claimed: Signer) -> None:
        self.ss58_address = claimed.ss58_address
        self._own = Keypair.from_seed(secrets.token_bytes(32))

    def sign(self, message: bytes, /) -> bytes:
        signature: bytes = self._own.sign(message)
        return signature
