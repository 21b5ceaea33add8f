"""Real clones by git: of paths, and of a web server that asks for a token."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from miner.tournament.checkout import CloneFailed, CloneTooSlow, clone_repository, is_local
from tests.miner.tournament.repositories import commit_files, git, make_repository

pytestmark = pytest.mark.process


TOKEN = "ghp_0123456789abcdef0123456789abcdef0123"


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    make_repository(tmp_path / "origin", {"a.txt": "one\n"})
    return tmp_path / "origin"


def test_a_clone_is_measured_and_stands_at_the_default_branch(origin: Path, tmp_path: Path) -> None:
    first = git(origin, "rev-parse", "HEAD")
    clone = clone_repository(str(origin), None, tmp_path / "clone")
    assert clone.commit == clone.default_head == first
    assert (clone.directory / "a.txt").read_text() == "one\n"
    assert clone.seconds > 0
    assert clone.size_bytes > 100


def test_an_earlier_commit_is_checked_out_and_the_head_is_known(origin: Path, tmp_path: Path) -> None:
    first = git(origin, "rev-parse", "HEAD")
    second = commit_files(origin, {"a.txt": "two\n"})
    clone = clone_repository(str(origin), first, tmp_path / "clone")
    assert (clone.commit, clone.default_head) == (first, second)
    assert (clone.directory / "a.txt").read_text() == "one\n"


def test_a_commit_that_no_branch_reaches_is_not_there(origin: Path, tmp_path: Path) -> None:
    """It is among the objects of the path all the same; a clone over a network would not have it."""
    lost = commit_files(origin, {"a.txt": "lost\n"})
    git(origin, "reset", "-q", "--hard", "HEAD~1")
    with pytest.raises(CloneFailed, match=f"{lost} is not in a clone of .*: no branch or tag"):
        clone_repository(str(origin), lost, tmp_path / "clone")


def test_what_cannot_be_cloned_is_named_and_a_directory_in_use_is_not_touched(
    origin: Path, tmp_path: Path
) -> None:
    with pytest.raises(CloneFailed, match=r"git clone: .*nothing-here"):
        clone_repository(str(tmp_path / "nothing-here"), None, tmp_path / "clone")
    (tmp_path / "empty").mkdir()
    git(tmp_path / "empty", "init", "-q")
    with pytest.raises(CloneFailed, match="has no commit"):
        clone_repository(str(tmp_path / "empty"), None, tmp_path / "clone")
    (tmp_path / "used").mkdir()
    (tmp_path / "used/mine.txt").write_text("mine")
    with pytest.raises(CloneFailed, match="not an empty directory"):
        clone_repository(str(origin), None, tmp_path / "used")
    assert (tmp_path / "used/mine.txt").read_text() == "mine"


def test_an_address_never_runs_a_command_or_is_taken_for_an_option(tmp_path: Path) -> None:
    made = tmp_path / "made"
    for source in (f"ext::touch {made}", f"--upload-pack=touch {made}"):
        with pytest.raises(CloneFailed):
            clone_repository(source, None, tmp_path / "clone")
    assert not made.exists()


@pytest.mark.parametrize(
    ("source", "local"),
    [
        ("/a/b", True),
        ("a/b", True),
        ("./a:b", True),
        ("https://example.com/a/b", False),
        ("git@example.com:a/b.git", False),
        ("ext::sh", False),
    ],
)
def test_addresses_are_distinguished_from_paths(source: str, local: bool) -> None:
    assert is_local(source) is local


class _Private(SimpleHTTPRequestHandler):
    """Files, for whoever brings the token."""

    def do_GET(self) -> None:
        given = self.headers.get("Authorization", "").removeprefix("Basic ")
        if base64.b64decode(given).decode() != f"x-access-token:{TOKEN}":
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="private"')
            self.end_headers()
            return
        super().do_GET()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(handler: Any) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def private(origin: Path, tmp_path: Path) -> Iterator[str]:
    """A repository on a server, as plain files."""
    bare = tmp_path / "served/miner.git"
    git(tmp_path, "clone", "-q", "--bare", str(origin), str(bare))
    git(bare, "update-server-info")

    def handler(*arguments: Any) -> _Private:
        return _Private(*arguments, directory=str(tmp_path / "served"))

    with serving(handler) as address:
        yield f"{address}/miner.git"


def test_a_token_opens_a_private_repository(private: str, tmp_path: Path) -> None:
    clone = clone_repository(private, None, tmp_path / "clone", token=TOKEN)
    assert (clone.directory / "a.txt").read_text() == "one\n"
    kept = [
        path for path in clone.directory.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()
    ]
    assert kept == []


def test_without_its_token_a_private_repository_is_refused_at_once(private: str, tmp_path: Path) -> None:
    for token in (None, "wrong-token"):
        with pytest.raises(CloneFailed, match="git clone") as caught:
            clone_repository(private, None, tmp_path / "clone", token=token)
        assert "wrong-token" not in str(caught.value)


def test_passwords_of_this_machine_open_nothing(
    private: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validators have no .netrc of ours: what it opens here is closed to them."""
    (tmp_path / ".netrc").write_text(f"machine 127.0.0.1 login x-access-token password {TOKEN}\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(CloneFailed, match="git clone"):
        clone_repository(private, None, tmp_path / "clone")


def test_an_address_with_a_token_in_it_is_refused_without_repeating_it(tmp_path: Path) -> None:
    with pytest.raises(CloneFailed, match="TRAINING_REPO") as caught:
        clone_repository(f"https://{TOKEN}@example.com/a/b", None, tmp_path / "clone")
    assert TOKEN not in str(caught.value)


def test_a_server_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    released = threading.Event()

    class Silent(_Private):
        def do_GET(self) -> None:
            released.wait(60)

    with serving(Silent) as address:
        try:
            with pytest.raises(CloneTooSlow, match=r"not done after 0\.2 s"):
                clone_repository(f"{address}/miner.git", None, tmp_path / "clone", limit_s=0.2)
        finally:
            released.set()


@pytest.mark.parametrize(
    ("complaint", "way_out"),
    [
        ("git clone: fatal: Authentication failed for 'http://x/'", "TRAINING_REPO_*_TOKEN"),
        ("git clone: fatal: could not read Username for 'https://x'", "TRAINING_REPO_*_TOKEN"),
        ("git clone: fatal: unable to access 'https://x/': Could not resolve host: x", "connection"),
    ],
)
def test_a_clone_that_fails_says_what_to_do(
    complaint: str, way_out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> str:
        raise CloneFailed(complaint)

    monkeypatch.setattr("miner.tournament.checkout._git", fails)
    with pytest.raises(CloneFailed) as raised:
        clone_repository("https://x", None, tmp_path / "clone")
    first, _, hint = str(raised.value).partition("\n→ ")
    assert first == complaint
    assert way_out in hint
