"""Connections only to addresses that were checked, by the right name."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Sequence
from ipaddress import ip_network
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.domain.job_states import EndReason, StepFailed
from miner.inputs import connection
from miner.inputs.connection import AddressGuard, UrlOpener, checked_url, resolve_host
from tests.doubles.each import each
from tests.doubles.files import SIGNATURE, FileStore

pytestmark = pytest.mark.process


LOOPBACK = AddressGuard((ip_network("127.0.0.0/8"),))
TLS = Path(__file__).parents[2] / "data" / "tls_of_tests.pem"


def failure(opener: UrlOpener, url: str) -> StepFailed:
    with pytest.raises(StepFailed) as caught:
        opener.open(url, {})
    assert SIGNATURE not in str(caught.value)
    return caught.value


def test_a_reply_comes_with_the_name_as_host_and_nothing_resolved_twice(store: FileStore) -> None:
    resolved: list[str] = []

    def once(host: str, _port: int) -> Sequence[str]:
        """A name that is rebound after the first look."""
        resolved.append(host)
        return ["127.0.0.1"] if len(resolved) == 1 else ["169.254.169.254"]

    url = store.add("a", b"data").replace("127.0.0.1", "data.example.test")
    with UrlOpener(LOOPBACK, resolve=once).open(url, {}) as response:
        assert response.read() == b"data"
    assert resolved == ["data.example.test"]
    assert store.requests[0].headers["host"].startswith("data.example.test:")


@pytest.mark.parametrize("headers", [{}, {"Connection": "close"}, {"Connection": "keep-alive"}])
def test_a_connection_ends_with_its_reply(store: FileStore, headers: dict[str, str]) -> None:
    store.fail(headers=headers)
    with UrlOpener(LOOPBACK).open(store.add("a", b"data"), {}) as response:
        assert response.read() == b"data"


@pytest.mark.parametrize(
    "answers", [["127.0.0.1"], ["8.8.8.8", "10.0.0.1"], ["::ffff:169.254.169.254"], ["fd00::1"]]
)
def test_a_name_with_one_bad_address_is_refused_before_anything_is_sent(
    store: FileStore, answers: list[str]
) -> None:
    opener = UrlOpener(AddressGuard(), resolve=lambda _host, _port: answers)
    failed = failure(opener, store.add("a", b"data").replace("127.0.0.1", "data.example.test"))
    assert failed.reason is EndReason.URL_REFUSED
    assert "data.example.test" in str(failed)
    assert "ALLOW_PRIVATE_NETWORKS" in str(failed)
    assert store.requests == []


@each("host", ["127.1", "2130706433", "0x7f000001", "localhost", "[::1]", "[::ffff:7f00:1]"])
def test_odd_spellings_of_loopback_are_seen_through(host: str) -> None:
    assert failure(UrlOpener(AddressGuard()), f"http://{host}:9/").reason in (
        EndReason.URL_REFUSED,
        EndReason.NETWORK,
    )
    with contextlib.suppress(OSError):
        assert all(AddressGuard().refusal(address) for address in resolve_host(host.strip("[]"), 9))


def test_redirects_are_followed_and_each_is_checked(store: FileStore) -> None:
    target = store.add("b", b"data")
    store.fail("/bucket/a", status=302, headers={"Location": target}, times=None)
    start = store.add("a", b"")
    with UrlOpener(LOOPBACK).open(start, {}) as response:
        assert response.read() == b"data"
    store.fail("/bucket/b", status=307, headers={"Location": "http://169.254.169.254/latest/meta-data/"})
    failed = failure(UrlOpener(LOOPBACK), start)
    assert (failed.reason, "169.254.169.254" in str(failed)) == (EndReason.URL_REFUSED, True)
    store.fail("/bucket/c", status=301, headers={"Location": "/bucket/c"}, times=None)
    assert "redirects more than" in str(failure(UrlOpener(LOOPBACK), store.add("c", b"")))
    store.fail("/bucket/d", status=301, headers={"Location": "file:///etc/passwd"})
    assert failure(UrlOpener(LOOPBACK), store.add("d", b"")).reason is EndReason.URL_REFUSED


@each(
    "url",
    [
        "ftp://example.com/x",
        "file:///etc/passwd",
        "//example.com/x",
        "http://user:word@example.com/",
        "http://example.com:0/",
        "http://example.com:99999/",
        "http://exa mple.com/",
        "http://example.com/\r\nHost: other",
        "http://exämple.com/",
        "http://[::1",
        "http://example.com/" + "x" * 9000,
        "",
    ],
)
def test_what_is_no_plain_url_is_refused(url: str) -> None:
    with pytest.raises(StepFailed) as caught:
        checked_url(url)
    assert caught.value.reason is EndReason.URL_REFUSED


@given(st.text(max_size=80) | st.text(max_size=40).map(lambda text: f"http://{text}"))
def test_any_text_is_a_url_with_a_host_or_refused(text: str) -> None:
    try:
        parts = checked_url(text)
    except StepFailed as refused:
        if refused.reason is not EndReason.URL_REFUSED:
            raise
    else:
        assert parts.scheme in ("http", "https")
        assert parts.hostname
        assert parts.username is None


def test_nobody_listening_or_no_such_name_is_the_network(store: FileStore) -> None:
    def no_name(_host: str, _port: int) -> Sequence[str]:
        raise OSError("Name or service not known")

    failed = failure(UrlOpener(AddressGuard(), resolve=no_name), "http://data.example.test/secret?key=1")
    assert failed.reason is EndReason.NETWORK
    assert str(failed) == "http://data.example.test has no address: Name or service not known"
    assert failure(UrlOpener(LOOPBACK), "http://127.0.0.1:9/").reason is EndReason.NETWORK
    store.fail(no_reply=True)
    assert failure(UrlOpener(LOOPBACK), store.add("a", b"")).reason is EndReason.NETWORK
    store.fail(delay=5)
    assert failure(UrlOpener(LOOPBACK, timeout=0.1), store.add("a", b"")).reason is EndReason.NETWORK


@pytest.fixture
def asked_names(store: FileStore) -> list[str | None]:
    """The store speaks TLS; the names that clients asked for."""
    names: list[str | None] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS)
    context.sni_callback = lambda _socket, name, _context: names.append(name)
    store.speak_tls(context)
    return names


@pytest.fixture
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    trusting = ssl.create_default_context(cafile=str(TLS))
    monkeypatch.setattr(connection, "_context", lambda: trusting)


TLS_OPENER = UrlOpener(LOOPBACK, resolve=lambda _host, _port: ["127.0.0.1"])


def https(url: str, host: str = "data.example.test") -> str:
    return url.replace("http://127.0.0.1", f"https://{host}")


@pytest.mark.usefixtures("trusted")
def test_tls_asks_for_the_name_and_checks_it_though_the_address_is_dialled(
    store: FileStore, asked_names: list[str | None]
) -> None:
    url = store.add("a", b"data")
    with TLS_OPENER.open(https(url), {}) as response:
        assert response.read() == b"data"
    assert asked_names == ["data.example.test"]
    failed = failure(TLS_OPENER, https(url, "other.example.test"))
    assert failed.reason is EndReason.NETWORK
    assert "certificate" in str(failed)


@pytest.mark.usefixtures("trusted")
def test_https_is_not_left_for_http(store: FileStore, asked_names: list[str | None]) -> None:
    store.fail(status=302, headers={"Location": "http://data.example.test/"})
    assert failure(TLS_OPENER, https(store.add("a", b""))).reason is EndReason.URL_REFUSED
    assert asked_names


@pytest.mark.usefixtures("asked_names")
def test_without_a_known_authority_tls_fails(store: FileStore) -> None:
    assert failure(TLS_OPENER, https(store.add("a", b"data"))).reason is EndReason.NETWORK
    assert store.requests == []
