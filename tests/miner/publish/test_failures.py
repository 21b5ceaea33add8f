from __future__ import annotations

import errno

import httpx2
import pytest
from huggingface_hub.errors import HfHubHTTPError

from core.submission.faults import BadSubmission
from miner.publish.failures import failure_of
from miner.publish.publisher import PASSING, REASON
from miner.publish.words import HubTrouble, Trouble
from tests.doubles.each import each


def answered(status: int, **headers: str) -> HfHubHTTPError:
    request = httpx2.Request("GET", "https://hub.example/x")
    return HfHubHTTPError("no", response=httpx2.Response(status, headers=headers, request=request))


@each(
    ("status", "trouble"),
    [
        (400, Trouble.REFUSED),
        (401, Trouble.TOKEN),
        (402, Trouble.FORBIDDEN),
        (403, Trouble.FORBIDDEN),
        (404, Trouble.SERVER),
        (409, Trouble.CONFLICT),
        (412, Trouble.CONFLICT),
        (413, Trouble.REFUSED),
        (429, Trouble.RATE_LIMITED),
        (500, Trouble.SERVER),
        (507, Trouble.SERVER),
    ],
)
def test_every_answer_of_the_hub_has_its_meaning(status: int, trouble: Trouble) -> None:
    assert failure_of(answered(status)).trouble is trouble


def test_what_happened_to_a_file_is_found_below_the_clients_wrapping() -> None:
    try:
        try:
            raise answered(429, **{"Retry-After": "12"})
        except HfHubHTTPError as error:
            raise RuntimeError("Error while uploading 'model.safetensors' to the Hub.") from error
    except RuntimeError as error:
        found = failure_of(error)
    assert (found.trouble, found.retry_after) == (Trouble.RATE_LIMITED, 12)


@pytest.mark.parametrize("given", ["soon", "Wed, 21 Oct 2026 07:28:00 GMT", ""])
def test_a_retry_after_that_is_no_number_is_passed_over(given: str) -> None:
    assert failure_of(answered(429, **{"Retry-After": given})).retry_after is None


@each(
    ("error", "trouble"),
    [
        (httpx2.ConnectError("refused"), Trouble.NETWORK),
        (httpx2.ReadTimeout("silent"), Trouble.NETWORK),
        (ConnectionResetError(errno.ECONNRESET, "reset"), Trouble.NETWORK),
        (OSError(errno.ENOSPC, "No space left on device"), Trouble.DISK_FULL),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), Trouble.DISK_FULL),
        (RuntimeError("CAS service error: connection closed"), Trouble.NETWORK),
        (RuntimeError("IO error: No space left on device"), Trouble.DISK_FULL),
        (BadSubmission("x", []), Trouble.BAD_SUBMISSION),
        (HubTrouble(Trouble.MISMATCH, "other"), Trouble.MISMATCH),
        (KeyError("nobody foresaw"), Trouble.CRASHED),
    ],
)
def test_every_other_failure_too(error: Exception, trouble: Trouble) -> None:
    assert failure_of(error).trouble is trouble


def test_every_trouble_has_a_reason_and_a_refusal_is_not_repeated() -> None:
    assert REASON.keys() == set(Trouble)
    assert not PASSING & {Trouble.TOKEN, Trouble.FORBIDDEN, Trouble.BAD_SUBMISSION, Trouble.DISK_FULL}
