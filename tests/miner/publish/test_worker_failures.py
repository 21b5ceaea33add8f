from __future__ import annotations

import errno

import httpx2
import pytest
from huggingface_hub.errors import HfHubHTTPError

from core.submission.faults import BadSubmission
from miner.publish.messages import HubTrouble, PublishTrouble
from miner.publish.publisher import REASON_OF_TROUBLE, RETRIED_TROUBLES
from miner.publish.worker import failure_of
from tests.doubles.each import each


def answered(status: int, **headers: str) -> HfHubHTTPError:
    request = httpx2.Request("GET", "https://hub.example/x")
    return HfHubHTTPError("no", response=httpx2.Response(status, headers=headers, request=request))


@each(
    ("status", "trouble"),
    [
        (400, PublishTrouble.REFUSED),
        (401, PublishTrouble.TOKEN),
        (402, PublishTrouble.FORBIDDEN),
        (403, PublishTrouble.FORBIDDEN),
        (404, PublishTrouble.SERVER),
        (409, PublishTrouble.CONFLICT),
        (412, PublishTrouble.CONFLICT),
        (413, PublishTrouble.REFUSED),
        (429, PublishTrouble.RATE_LIMITED),
        (500, PublishTrouble.SERVER),
        (507, PublishTrouble.SERVER),
    ],
)
def test_every_answer_of_the_hub_has_its_meaning(status: int, trouble: PublishTrouble) -> None:
    assert failure_of(answered(status)).trouble is trouble


def test_what_happened_to_a_file_is_found_below_the_clients_wrapping() -> None:
    try:
        try:
            raise answered(429, **{"Retry-After": "12"})
        except HfHubHTTPError as error:
            raise RuntimeError("Error while uploading 'model.safetensors' to the Hub.") from error
    except RuntimeError as error:
        found = failure_of(error)
    assert (found.trouble, found.retry_after) == (PublishTrouble.RATE_LIMITED, 12)


@pytest.mark.parametrize(("given", "seconds"), [("soon", None), ("Fri, 01 Jan 2100 00:00:00 GMT", 3600)])
def test_no_pause_that_a_server_asks_for_is_longer_than_an_hour(given: str, seconds: float | None) -> None:
    assert failure_of(answered(429, **{"Retry-After": given})).retry_after == seconds


@each(
    ("error", "trouble"),
    [
        (httpx2.ConnectError("refused"), PublishTrouble.NETWORK),
        (httpx2.ReadTimeout("silent"), PublishTrouble.NETWORK),
        (ConnectionResetError(errno.ECONNRESET, "reset"), PublishTrouble.NETWORK),
        (OSError(errno.ENOSPC, "No space left on device"), PublishTrouble.DISK_FULL),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), PublishTrouble.DISK_FULL),
        (RuntimeError("CAS service error: connection closed"), PublishTrouble.NETWORK),
        (RuntimeError("IO error: No space left on device"), PublishTrouble.DISK_FULL),
        (BadSubmission("x", []), PublishTrouble.BAD_SUBMISSION),
        (HubTrouble(PublishTrouble.MISMATCH, "other"), PublishTrouble.MISMATCH),
        (KeyError("nobody foresaw"), PublishTrouble.CRASHED),
    ],
)
def test_every_other_failure_too(error: Exception, trouble: PublishTrouble) -> None:
    assert failure_of(error).trouble is trouble


def test_every_trouble_has_a_reason_and_a_refusal_is_not_repeated() -> None:
    assert REASON_OF_TROUBLE.keys() == set(PublishTrouble)
    assert not RETRIED_TROUBLES & {
        PublishTrouble.TOKEN,
        PublishTrouble.FORBIDDEN,
        PublishTrouble.BAD_SUBMISSION,
        PublishTrouble.DISK_FULL,
    }
