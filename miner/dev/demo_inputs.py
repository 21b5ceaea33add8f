"""Inputs of the demo: a model and rows so small that a laptop trains them in seconds, and a web site on
loopback that serves them as the hub does. Nothing is downloaded; stdlib only.
"""

from __future__ import annotations

import hashlib
import json
import struct
import threading
from array import array
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import prod
from random import Random
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit

MODEL_ID = "god-miner/little-llama"

#: A million parameters: offers that state fewer are not believed.
_WIDTH, _INNER, _LAYERS, _HEADS, _SHARED = 128, 384, 5, 4, 2
_MARKS = ("<s>", "</s>", "<pad>")
_WORDS = ("red", "green", "blue", "one", "two", "three", "apple", "pear", "plum", "near", "far", "old", "new")


def model_files(seed: int = 0) -> dict[str, bytes]:
    """Return the files of the model's repository, by name."""
    vocabulary = {**{mark: number for number, mark in enumerate(_MARKS)}}
    for sign in _byte_signs():
        vocabulary[sign] = len(vocabulary)
    shapes = dict(_tensor_shapes(len(vocabulary)))
    return {
        "config.json": _json_bytes(_model_config(len(vocabulary))),
        "generation_config.json": _json_bytes({"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}),
        "tokenizer.json": _json_bytes(_tokenizer(vocabulary)),
        "tokenizer_config.json": _json_bytes(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": _MARKS[0],
                "eos_token": _MARKS[1],
                "pad_token": _MARKS[2],
                "model_max_length": 512,
            }
        ),
        "model.safetensors": _weights(shapes, Random(seed)),  # noqa: S311 - random weights, repeatable
    }


def model_params() -> int:
    return sum(prod(shape) for _, shape in _tensor_shapes(len(_MARKS) + 256))


def training_rows(count: int = 400, seed: int = 0) -> bytes:
    """Return a dataset as validators send it: one JSON array, every value a string."""
    random = Random(seed)  # noqa: S311 - example data
    made = []
    for _ in range(count):
        words = random.sample(_WORDS, 3)
        made.append({"instruct": f"Backwards: {' '.join(words)}. ", "output": " ".join(reversed(words))})
    return json.dumps(made).encode()


def _tensor_shapes(vocabulary: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    shared = _SHARED * _WIDTH // _HEADS
    yield "model.embed_tokens.weight", (vocabulary, _WIDTH)
    for layer in range(_LAYERS):
        name = f"model.layers.{layer}"
        yield f"{name}.self_attn.q_proj.weight", (_WIDTH, _WIDTH)
        yield f"{name}.self_attn.k_proj.weight", (shared, _WIDTH)
        yield f"{name}.self_attn.v_proj.weight", (shared, _WIDTH)
        yield f"{name}.self_attn.o_proj.weight", (_WIDTH, _WIDTH)
        yield f"{name}.mlp.gate_proj.weight", (_INNER, _WIDTH)
        yield f"{name}.mlp.up_proj.weight", (_INNER, _WIDTH)
        yield f"{name}.mlp.down_proj.weight", (_WIDTH, _INNER)
        yield f"{name}.input_layernorm.weight", (_WIDTH,)
        yield f"{name}.post_attention_layernorm.weight", (_WIDTH,)
    yield "model.norm.weight", (_WIDTH,)
    yield "lm_head.weight", (vocabulary, _WIDTH)


def _model_config(vocabulary: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": _WIDTH,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _SHARED,
        "head_dim": _WIDTH // _HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "dtype": "float32",
    }


def _byte_signs() -> list[str]:
    """Return the printable character for each byte in byte-level tokenizers: itself, or one beyond
    Latin-1.
    """
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    signs, others = [], 0
    for byte in range(256):
        signs.append(chr(byte) if byte in plain else chr(256 + others))
        others += byte not in plain
    return signs


def _tokenizer(vocabulary: dict[str, int]) -> dict[str, object]:
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": mark, **added} for number, mark in enumerate(_MARKS)],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": level,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }


def _weights(shapes: dict[str, tuple[int, ...]], random: Random) -> bytes:
    """Return a safetensors file in fp32: norms are one, everything else is small noise."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    content, at = bytearray(), 0
    for name, shape in shapes.items():
        size = prod(shape)
        values = [1.0] * size if len(shape) == 1 else [random.uniform(-0.06, 0.06) for _ in range(size)]
        content += array("f", values).tobytes()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + 4 * size]}
        at += 4 * size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + bytes(content)


def _json_bytes(value: dict[str, object]) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode()


_COMMIT = "0" * 40


class LoopbackSite:
    """Use as `with Site() as site`; then add what it is to answer."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}
        self._answers: dict[str, bytes] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _request_handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="site", daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def add_file(self, path: str, content: bytes) -> str:
        """Serve this file; return its address."""
        self._files[path] = content
        return f"{self.url}{path}"

    def add_model(self, model_id: str, files: dict[str, bytes]) -> None:
        siblings = []
        for name, content in files.items():
            siblings.append({"rfilename": name, "blobId": _blob_id(content), "size": len(content)})
            for revision in ("main", _COMMIT):
                self._files[f"/{model_id}/resolve/{revision}/{name}"] = content
        info: dict[str, object] = {
            "_id": "0" * 24,
            "id": model_id,
            "modelId": model_id,
            "author": model_id.partition("/")[0],
            "sha": _COMMIT,
            "private": False,
            "gated": False,
            "disabled": False,
            "tags": [],
            "siblings": siblings,
        }
        for path in (f"/api/models/{model_id}", f"/api/models/{model_id}/revision/main"):
            self._answers[path] = json.dumps(info).encode()

    def find(self, path: str) -> tuple[bytes, str] | None:
        """Return content and content type."""
        if path in self._answers:
            return self._answers[path], "application/json"
        found = self._files.get(path)
        return None if found is None else (found, "application/octet-stream")


def _blob_id(content: bytes) -> str:
    """Return git's blob id of this content, which the hub lists for small files."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _request_handler(site: LoopbackSite) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(body=True)

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def _answer(self, body: bool) -> None:
            found = site.find(unquote(urlsplit(self.path).path))
            content, kind = found or (b'{"error": "not found"}', "application/json")
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("X-Repo-Commit", _COMMIT)
            self.send_header("ETag", f'"{_blob_id(content)}"')
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
            """Stay silent: the daemon's log says what it fetched."""

    return Handler
