"""Models behind an endpoint answer as the evaluator's server does, also when it hangs, fails or lies."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.doubles.each import each
from trainer.environments import models, prompts
from trainer.environments.models import (
    AnswerTimeout,
    ChatAnswer,
    ContextOverflow,
    EndpointModel,
    ModelUnreachable,
)
from trainer.environments.tool_calls import game_action
from trainer.errors import BadModel

pytestmark = pytest.mark.process


MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
TOOLS = prompts.tools([1, 2])
#: A status, and a body or what writes one.
Reply = tuple[int, bytes | Callable[[Any], None]]


class Site:
    """A server that gives the replies in their order, and keeps what was asked."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.asked: list[tuple[str, Any]] = []
        self.keys: list[str | None] = []
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._reply(None)

            def do_POST(self) -> None:
                self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _reply(self, body: Any) -> None:
                site.asked.append((self.path, body))
                site.keys.append(self.headers["Authorization"])
                status, content = site.replies.pop(0)
                self.send_response(status)
                if callable(content):
                    self.end_headers()
                    content(self)
                    return
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(models, "_RETRY_S", 0.01)
    made = Site()
    yield made
    made.close()


def said(message: dict[str, Any], finish: str = "stop") -> Reply:
    return 200, json.dumps({"choices": [{"message": message, "finish_reason": finish}]}).encode()


def called(arguments: str) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "game_action", "arguments": arguments}}


def ask(site: Site, turn_seconds: float = 20.0) -> ChatAnswer:
    model = EndpointModel(f"{site.address}#base:tuned", turn_seconds=turn_seconds)
    return model.answer(MESSAGES, TOOLS, max_tokens=512, seed=7)


def test_a_turn_is_asked_as_the_evaluator_asks(site: Site) -> None:
    site.replies = [said({"content": "<think>so</think>Fine.", "tool_calls": [called('{"action_id": 2}')]})]
    assert ask(site) == ChatAnswer("Fine.", (game_action(2),))
    ((path, body),) = site.asked
    assert path == "/v1/chat/completions"
    assert body == {
        "model": "base:tuned",
        "messages": MESSAGES,
        "temperature": 0.0,
        "seed": 7,
        "max_tokens": 512,
        "tools": TOOLS,
        "tool_choice": "auto",
    }
    assert json.dumps(body["tools"]) == json.dumps(TOOLS)


def test_the_first_model_is_played_if_none_is_named(site: Site) -> None:
    site.replies = [(200, b'{"data": [{"id": "served"}]}'), said({"content": None}, "length")]
    answer = EndpointModel(site.address).answer(MESSAGES, [], max_tokens=5, seed=1)
    assert answer == ChatAnswer(None, (), cut_off=True)
    assert site.asked[1][1]["model"] == "served"
    assert "tools" not in site.asked[1][1]


def test_a_server_that_fails_is_asked_once_more(site: Site) -> None:
    site.replies = [(503, b"busy"), said({"content": "Fine."})]
    assert ask(site).text == "Fine."
    site.replies = [(503, b"busy"), (503, b"busy")]
    with pytest.raises(ModelUnreachable, match="status 503: busy"):
        ask(site)


def test_a_context_that_is_too_short_is_no_failure_of_the_server(site: Site) -> None:
    site.replies = [(400, b'{"message": "This model\'s maximum Context length is 2048 tokens."}')]
    with pytest.raises(ContextOverflow):
        ask(site)
    site.replies = [(400, b"no such model")]
    with pytest.raises(ModelUnreachable, match="no such model"):
        ask(site)


def drip(handler: Any) -> None:
    """A byte now and then, for ever."""
    stop = threading.Event()
    try:
        while not stop.wait(0.02):
            handler.wfile.write(b" ")
            handler.wfile.flush()
    except OSError:
        pass


def test_a_server_that_never_ends_its_answer_is_left(site: Site) -> None:
    site.replies = [(200, drip)]
    with pytest.raises(AnswerTimeout):
        ask(site, turn_seconds=0.3)


def test_a_server_that_does_not_answer_is_left() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/v1#name"
        with pytest.raises(AnswerTimeout):
            EndpointModel(address, turn_seconds=0.3).answer(MESSAGES, TOOLS, max_tokens=5, seed=1)


def test_nobody_there_is_told_from_a_slow_model(site: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ModelUnreachable, match=f"127.0.0.1:{port} cannot be reached"):
        EndpointModel(f"http://127.0.0.1:{port}/v1#x").answer(MESSAGES, TOOLS, max_tokens=5, seed=1)
    site.replies = [(200, b"{}")]
    with pytest.raises(ModelUnreachable, match="names no model"):
        EndpointModel(site.address)


@pytest.mark.parametrize(
    "body",
    [
        b"<html>",
        b'{"choices": []}',
        b'{"choices": [{"message": {"tool_calls": [{"function": 1}]}}]}',
        b'{"choices": [{"message": {"tool_calls": 7}}]}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_answer_has_no_call(site: Site, body: bytes) -> None:
    site.replies = [(200, body)]
    assert ask(site).calls == ()


@each("address", ["ftp://somewhere", "http://", "http://a:b/v1", "http://a:99999/v1"])
def test_an_address_is_checked(address: str) -> None:
    with pytest.raises(BadModel, match="not the address of a server"):
        EndpointModel(address)


def test_a_key_is_sent_to_this_machine_and_not_in_the_clear(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    site.replies = [said({"content": "Fine."})]
    ask(site)
    assert site.keys == ["Bearer secret"]
    keys = {
        address: EndpointModel(f"{address}/v1#name")._takes_key
        for address in ("http://example.com", "https://example.com", "http://localhost:1", "http://[::1]:1")
    }
    assert [address for address, takes in keys.items() if not takes] == ["http://example.com"]


def test_half_a_character_in_an_answer_is_replaced(site: Site) -> None:
    """JSON can write it, and no tokenizer or file takes it."""
    site.replies = [
        said({"content": "\ud800!", "tool_calls": [called('{"action_id": 2, "note": "\\ud800"}')]})
    ]
    answer = ask(site)
    assert answer.text == "?!"
    assert answer.calls[0].arguments == {"action_id": 2, "note": "?"}
