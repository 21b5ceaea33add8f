"""What an exception of the hub's client means: whom it concerns, and whether trying again can help."""

from __future__ import annotations

import errno
from collections.abc import Iterator

from core.submission.faults import BadSubmission
from miner.publish.words import Failed, HubTrouble, Trouble

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_OF_STATUS = {
    401: Trouble.TOKEN,
    402: Trouble.FORBIDDEN,
    403: Trouble.FORBIDDEN,
    # Of what was made a moment ago: not every server of the hub knows it yet.
    404: Trouble.SERVER,
    408: Trouble.SERVER,
    409: Trouble.CONFLICT,
    412: Trouble.CONFLICT,
    425: Trouble.SERVER,
    429: Trouble.RATE_LIMITED,
}
_WAY_OUT = {
    Trouble.TOKEN: "the hub does not know HF_TOKEN (any more): make a new one with write permission",
    Trouble.FORBIDDEN: "HF_TOKEN may not write there, or the account's quota is used up: see its permissions "
    "and HF_USER",
}


def failure_of(error: BaseException) -> Failed:
    """By the innermost cause that says something: the client wraps what happened to a file."""
    if isinstance(error, HubTrouble):
        return Failed(trouble=error.trouble, text=str(error), retry_after=error.retry_after)
    if isinstance(error, BadSubmission):
        return Failed(trouble=Trouble.BAD_SUBMISSION, text=str(error))
    chain = list(_chain(error))
    for one in reversed(chain):
        found = _known(one)
        if found is not None:
            return found
    return Failed(trouble=Trouble.CRASHED, text=_text(error))


def _known(error: BaseException) -> Failed | None:
    import httpx2

    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    if isinstance(status, int) and status >= 400:
        return _answered(error, status, response.headers if response is not None else {})
    if isinstance(error, httpx2.TransportError):
        return Failed(trouble=Trouble.NETWORK, text=f"the hub can't be reached: {_text(error)}")
    if isinstance(error, OSError) and error.errno in _FULL:
        return Failed(trouble=Trouble.DISK_FULL, text=f"no room on the disk: {error}")
    if isinstance(error, (ConnectionError, TimeoutError)):
        return Failed(trouble=Trouble.NETWORK, text=f"the hub can't be reached: {_text(error)}")
    return _of_xet(error)


def _of_xet(error: BaseException) -> Failed | None:
    """The deduplicating transfer has its own exceptions, and says with some only by words what they are."""
    if type(error).__name__ == "XetAuthenticationError":
        return Failed(trouble=Trouble.TOKEN, text=f"{_text(error)}; {_WAY_OUT[Trouble.TOKEN]}")
    if type(error).__module__ in ("builtins", "hf_xet") and isinstance(error, RuntimeError):
        low = str(error).lower()
        if "no space" in low or "os error 28" in low:
            return Failed(trouble=Trouble.DISK_FULL, text=_text(error))
        if any(word in low for word in ("cas", "xet", "request", "network", "connection", "timeout", "http")):
            return Failed(trouble=Trouble.NETWORK, text=_text(error))
    return None


def _answered(error: BaseException, status: int, headers: object) -> Failed:
    trouble = _OF_STATUS.get(status) or (Trouble.SERVER if status >= 500 else Trouble.REFUSED)
    text = f"the hub answers {status}: {_text(error)}"
    if trouble in _WAY_OUT:
        text = f"{text}; {_WAY_OUT[trouble]}"
    return Failed(trouble=trouble, text=text, retry_after=_retry_after(headers))


def _retry_after(headers: object) -> float | None:
    get = getattr(headers, "get", None)
    given = get("retry-after") if get else None
    try:
        return min(max(0.0, float(given)), 3600.0) if given is not None else None
    except ValueError:
        return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or one.__context__


def _text(error: BaseException) -> str:
    said = getattr(error, "server_message", None) or str(error) or type(error).__name__
    return " ".join(str(said).split())[:1000]
