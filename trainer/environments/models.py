"""Models that answer: an OpenAI-compatible endpoint, a model in a directory, a script."""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import SplitResult, urlsplit

from core.domain.errors import GodMinerError
from core.domain.tournament_rules import MATCH
from core.models.tool_parsers import ParserName
from trainer.environments.memory import Cut, cut_tokens, cut_words
from trainer.environments.tool_calls import (
    ToolCall,
    find_calls,
    flat_tools,
    parser_of_model,
    read_arguments,
    template_tools,
    without_thoughts,
)
from trainer.errors import BadModel

# — time limits

T = TypeVar("T")


def in_time(call: Callable[[], T], seconds: float) -> T:
    """Call in a thread of its own; raise `TimeoutError` if that takes too long.

    Python code, such as a template, is then ended by an exception. Native code cannot be: its thread goes on,
    but does not keep the process alive."""
    answer: Future[T] = Future()

    def work() -> None:
        try:
            answer.set_result(call())
        except Exception as error:  # noqa: BLE001 - the caller gets it
            answer.set_exception(error)
        except BaseException as error:  # noqa: BLE001 - a tokenizer's panic, or our SystemExit
            answer.set_exception(BadModel(f"{type(error).__name__}: {error}"[:500]))

    thread = threading.Thread(target=work, name="in-time", daemon=True)
    thread.start()
    try:
        return answer.result(seconds)
    except TimeoutError:
        if not answer.done():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
            )
        raise


Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
#: What waits this long for others to come before a batch begins.
_GATHER_S = 0.02
_BATCH = 32
_LONGEST_ANSWER = 16 << 20
_RETRY_S = 1.0
_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")


class ModelUnreachable(GodMinerError):
    """A server that does not answer at all, which is no fault of the model."""

    code = "model_unreachable"


class AnswerTimeout(GodMinerError):
    """An answer that takes longer than a turn has."""

    code = "answer_timeout"


class ContextOverflow(GodMinerError):
    """A prompt longer than the model's context."""

    code = "context_overflow"


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """A model's answer, as the evaluator reads it."""

    text: str | None
    calls: tuple[ToolCall, ...] = ()
    #: Cut off at `max_tokens`.
    cut_off: bool = False


class ChatModel(Protocol):
    """A model that plays. `answer` is called from many threads at once."""

    @property
    def cut(self) -> Cut:
        """Cut notes by this model's tokens."""
        ...

    def answer(self, messages: Messages, tools: Tools, *, max_tokens: int, seed: int) -> ChatAnswer:
        """Answer once, at temperature 0; raise one of this module's errors."""
        ...


@dataclass(frozen=True)
class ScriptedModel:
    """Answers by a function of messages and tools."""

    reply: Callable[[Messages, Tools], ChatAnswer]
    cut: Cut = cut_words

    def answer(self, messages: Messages, tools: Tools, *, max_tokens: int, seed: int) -> ChatAnswer:
        """Answer what the function says."""
        return self.reply(messages, tools)


class EndpointModel:
    """A server of the OpenAI protocol. Its address may end in #NAME, the model's name there; else it is asked
    for its first model."""

    def __init__(
        self, address: str, *, tokenizer: Path | None = None, turn_seconds: float = MATCH.turn_seconds
    ) -> None:
        self._address = urlsplit(address)
        if (
            self._address.scheme not in {"http", "https"}
            or not self._address.hostname
            or not _has_port(self._address)
        ):
            raise BadModel(f"{address!r} is not the address of a server: http://HOST:PORT/v1")
        self._turn_seconds = turn_seconds
        self.is_here = self._address.hostname in _THIS_MACHINE
        #: In the clear a key is sent to this machine alone.
        self._takes_key = self._address.scheme == "https" or self.is_here
        self.cut = cut_tokens(_load_tokenizer(tokenizer)) if tokenizer else cut_words
        self._name = self._address.fragment or self._first_model()

    def answer(self, messages: Messages, tools: Tools, *, max_tokens: int, seed: int) -> ChatAnswer:
        """Ask the server, once more where it fails."""
        body = {
            "model": self._name,
            "messages": messages,
            "temperature": 0.0,
            "seed": seed,
            "max_tokens": max_tokens,
            **({"tools": tools, "tool_choice": "auto"} if tools else {}),
        }
        until = time.monotonic() + self._turn_seconds
        try:
            status, text = self._request("POST", "/chat/completions", body, until)
        except ModelUnreachable:
            status, text = 0, ""
        if status == 0 or status >= 500:
            time.sleep(min(_RETRY_S, max(0.0, until - time.monotonic())))
            status, text = self._request("POST", "/chat/completions", body, until)
        if status == 400 and "context length" in text.lower():
            raise ContextOverflow(text[:300])
        if status != 200:
            raise ModelUnreachable(f"{self._address.netloc} answers with status {status}: {text[:300]}")
        return _read_answer(text)

    def _first_model(self) -> str:
        status, text = self._request("GET", "/models", None, time.monotonic() + self._turn_seconds)
        try:
            return str(json.loads(text)["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError, RecursionError):
            raise ModelUnreachable(
                f"{self._address.netloc} names no model (status {status}); add #NAME to its address"
            ) from None

    def _request(self, method: str, path: str, body: Any, until: float) -> tuple[int, str]:
        left = until - time.monotonic()
        if left <= 0:
            raise AnswerTimeout(f"no answer within {self._turn_seconds:g} s")
        # For a reviewer: `god-miner environments play` asks a server that its operator names, no training.
        kind = http.client.HTTPSConnection if self._address.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._address.hostname or "", self._address.port, timeout=left)
        expired = threading.Event()
        # The connection forgets its socket as soon as an answer begins.
        sockets: list[socket.socket] = []

        def expire() -> None:
            # A timeout of the socket restarts with every byte: a slow server would never reach it.
            expired.set()
            for opened in sockets:
                with suppress(OSError):
                    opened.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(left, expire)
        timer.daemon = True
        timer.start()
        headers = {"Content-Type": "application/json"}
        if (key := os.environ.get("OPENAI_API_KEY", "").strip()) and self._takes_key:
            headers["Authorization"] = f"Bearer {key}"
        try:
            connection.connect()
            sockets.append(connection.sock)
            sent = None if body is None else json.dumps(body).encode()
            connection.request(method, self._address.path.rstrip("/") + path, sent, headers)
            response = connection.getresponse()
            content = response.read(_LONGEST_ANSWER)
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
            if expired.is_set() or isinstance(error, TimeoutError):
                raise AnswerTimeout(f"no answer within {self._turn_seconds:g} s") from None
            raise ModelUnreachable(f"{self._address.netloc} cannot be reached: {error}") from None
        finally:
            timer.cancel()
            connection.close()
        if expired.is_set():
            raise AnswerTimeout(f"no answer within {self._turn_seconds:g} s")
        return response.status, content.decode("utf-8", "replace")


def _has_port(address: SplitResult) -> bool:
    """A number that can be a port, or none."""
    try:
        return address.port is None or address.port > 0
    except ValueError:
        return False


def _read_answer(text: str) -> ChatAnswer:
    """Read a completion; what is not one counts as an answer without a call."""
    try:
        choice = json.loads(text)["choices"][0]
        message = choice["message"]
        calls = [
            ToolCall(str(call["function"]["name"]), read_arguments(call["function"].get("arguments")))
            for call in message.get("tool_calls") or []
        ]
        content = message.get("content")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return ChatAnswer(text[:2000])
    shown = without_thoughts(content) if isinstance(content, str) else None
    return ChatAnswer(shown, tuple(calls), choice.get("finish_reason") == "length")


@dataclass(frozen=True, slots=True)
class _PendingAnswer:
    prompt: str
    max_tokens: int
    answer: Future[tuple[str, bool]]


class LocalModel:
    """A model or an adapter in a directory, run by transformers: greedy, many games' questions in a batch."""

    def __init__(
        self,
        folder: Path,
        *,
        base: Path | None = None,
        parser: ParserName | None = None,
        turn_seconds: float = MATCH.turn_seconds,
    ) -> None:
        import torch

        from trainer.inputs.model_loading import forbid_remote_code

        forbid_remote_code()
        self._torch = torch
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model, source = _load_model(folder, base, self._device)
        # The server takes the base's tokenizer and template, whatever an adapter brings.
        has_own = (source / "tokenizer_config.json").is_file()
        self._tokenizer = _load_tokenizer(source if has_own or base is None else base)
        self._tokenizer.padding_side = "left"
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        config = self._model.config
        self._parser = parser or parser_of_model(source.name, str(getattr(config, "model_type", "")))
        if self._parser is None:
            raise BadModel(
                f"{folder}: the evaluator knows no tool parser for {config.model_type}, every turn would be "
                f"forfeited; --parser names one of {', '.join(ParserName)}"
            )
        self._context = int(getattr(config, "max_position_embeddings", 0) or 1 << 30)
        self._turn_seconds = turn_seconds
        self.cut = cut_tokens(self._tokenizer)
        # Tokenizers of transformers are not safe in several threads.
        self._lock = threading.Lock()
        self._questions: queue.SimpleQueue[_PendingAnswer] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="model", daemon=True).start()

    def prompt(self, messages: Messages, tools: Tools) -> str:
        """Render a conversation as the evaluator's server does, with its second try for the tools."""
        for form in (template_tools(tools), flat_tools(tools)):
            try:
                return str(
                    self._tokenizer.apply_chat_template(
                        list(messages), tools=form or None, add_generation_prompt=True, tokenize=False
                    )
                )
            except Exception as error:  # noqa: BLE001 - a template raises what it likes
                failure = error
        raise BadModel(f"the chat template cannot show tools: {failure}")

    def answer(self, messages: Messages, tools: Tools, *, max_tokens: int, seed: int) -> ChatAnswer:
        """Answer in a batch with whatever else is asked now. Nothing is drawn, so the seed is not used."""

        def read() -> tuple[str, int]:
            with self._lock:
                prompt = self.prompt(messages, tools)
                return prompt, len(self._tokenizer.encode(prompt, add_special_tokens=False))

        try:
            prompt, tokens = in_time(read, self._turn_seconds)
        except TimeoutError:
            raise AnswerTimeout(f"no request is written within {self._turn_seconds:g} s") from None
        if tokens + max_tokens > self._context:
            raise ContextOverflow(f"{tokens} + {max_tokens} tokens, the context has {self._context}")
        question = _PendingAnswer(prompt, max_tokens, Future())
        self._questions.put(question)
        text, cut_off = question.answer.result()
        rest, calls = find_calls(text, self._parser, (tool["function"]["name"] for tool in tools))
        return ChatAnswer(without_thoughts(rest) or None, tuple(calls), cut_off)

    def _serve(self) -> None:
        while True:
            batch = [self._questions.get()]
            until = time.monotonic() + _GATHER_S
            while len(batch) < _BATCH and (left := until - time.monotonic()) > 0:
                try:
                    batch.append(self._questions.get(timeout=left))
                except queue.Empty:
                    break
            try:
                for question, result in zip(batch, self._generate(batch), strict=True):
                    if result is None:
                        question.answer.set_exception(
                            AnswerTimeout(f"no answer within {self._turn_seconds:g} s")
                        )
                    else:
                        question.answer.set_result(result)
            except Exception as error:  # noqa: BLE001 - whoever waits gets it
                failure = BadModel(f"the model fails to answer: {type(error).__name__}: {error}")
                for question in batch:
                    if not question.answer.done():
                        question.answer.set_exception(failure)

    def _generate(self, batch: Sequence[_PendingAnswer]) -> list[tuple[str, bool] | None]:
        """Answer all in one batch: text, and whether it was cut off. None for one that takes too long."""
        torch, tokenizer = self._torch, self._tokenizer
        if not self._lock.acquire(timeout=self._turn_seconds):
            raise BadModel("its tokenizer or chat template is still busy with an earlier question")
        try:
            read = tokenizer(
                [one.prompt for one in batch], return_tensors="pt", padding=True, add_special_tokens=False
            ).to(self._device)
        finally:
            self._lock.release()
        limit = max(one.max_tokens for one in batch)
        began = time.monotonic()
        with torch.inference_mode():
            made = self._model.generate(
                input_ids=read["input_ids"],
                attention_mask=read["attention_mask"],
                max_new_tokens=limit,
                max_time=self._turn_seconds,
                do_sample=False,
                # Here it would count the prompt's tokens too, which hold every legal move.
                repetition_penalty=1.0,
                pad_token_id=tokenizer.pad_token_id,
            )[:, read["input_ids"].shape[1] :].tolist()
        is_late = time.monotonic() - began >= self._turn_seconds
        ends = _end_tokens(self._model, tokenizer)
        results: list[tuple[str, bool] | None] = []
        for one, ids in zip(batch, made, strict=True):
            end = next((place for place, token in enumerate(ids) if token in ends), None)
            if is_late and end is None and len(ids) < one.max_tokens:
                results.append(None)
                continue
            kept = ids[: one.max_tokens] if end is None else ids[: min(end, one.max_tokens)]
            with self._lock:
                text = tokenizer.decode(kept, skip_special_tokens=False)
            results.append((text, end is None or end > one.max_tokens))
        return results


def _end_tokens(model: Any, tokenizer: Any) -> set[int]:
    ends = getattr(model.generation_config, "eos_token_id", None)
    found = set(ends) if isinstance(ends, (list, tuple)) else {ends}
    return {token for token in (*found, tokenizer.eos_token_id) if token is not None}


def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # damaged files fail with whatever they meet
        raise BadModel(f"{folder}: no tokenizer can be loaded: {type(error).__name__}: {error}") from error


def _load_model(folder: Path, base: Path | None, device: str) -> tuple[Any, Path]:
    """The model with its adapter, if it is one, and the directory of its base."""
    import torch
    from transformers import AutoModelForCausalLM

    source, adapter = folder, folder / "adapter_config.json"
    try:
        if adapter.is_file():
            named = json.loads(adapter.read_text("utf-8")).get("base_model_name_or_path")
            source = base or Path(str(named))
        if not (source / "config.json").is_file():
            raise BadModel(f"{source}: no config.json; --base names the directory of an adapter's base")
        # The evaluator serves in 16 bits; a CPU has no kernels for them.
        model = AutoModelForCausalLM.from_pretrained(
            str(source),
            dtype=torch.float16 if device == "cuda" else torch.float32,
            local_files_only=True,
        )
        if adapter.is_file():
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, str(folder))
        return model.to(device).eval(), source
    except BadModel:
        raise
    except Exception as error:  # files that are cut off or no model's fail with whatever they meet
        raise BadModel(f"{folder}: the model cannot be loaded: {type(error).__name__}: {error}") from error
