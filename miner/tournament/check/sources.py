"""Rules 4 and 8: what may look obfuscated, and weights or data sets in the tree.

The validators' detector is a program without source: its verdict cannot be reproduced. What is looked for
here is what any such program would look for.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from miner.tournament.check.entry import CheckedEntry, FindingState, RuleFinding
from miner.tournament.checkout import read_inside

MOST_NAMED = 10
LARGE_FILE_BYTES = 1_000_000
#: Machine code and compiled Python: unreadable, which the rule forbids.
COMPILED = frozenset({".pyc", ".pyo", ".pyd", ".so", ".dll", ".dylib", ".exe", ".o", ".a", ".jar", ".wasm"})
ARCHIVES = frozenset({".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar", ".zst", ".whl", ".egg"})
WEIGHTS = frozenset(
    {
        *(".safetensors", ".ckpt", ".pt", ".pth", ".gguf", ".ggml", ".onnx", ".h5", ".npz", ".npy"),
        *(".tflite", ".msgpack", ".pkl", ".pickle", ".joblib"),
    }
)
DATA_SETS = frozenset({".parquet", ".arrow", ".feather", ".tfrecord", ".lance"})
TABLES = frozenset({".jsonl", ".ndjson", ".csv", ".tsv", ".json"})
PICTURES = frozenset({".png", ".jpg", ".jpeg", ".gif", ".webp", ".ico", ".pdf"})
_CODE = frozenset({".py", ".sh", ".bash", ".js", ".ts", ".mjs", ".dockerfile", ""})
#: The longest line of readable code; minified code has thousands on one.
LONGEST_LINE = 500
#: Patterns begin where a run begins and never backtrack: each letter is read a few times, whatever the text.
#: Otherwise 4 MB of 199 letters and a dash, repeated, take 11 s.
_RUN = r"(?<![A-Za-z0-9+/])[A-Za-z0-9+/]"
_BASE64 = re.compile(rf"{_RUN}{{200,}}|(?:{_RUN}{{60,}}+={{0,2}}+[\"'\\]*+\s++[\"']?+){{5,}}")
_ESCAPES = re.compile(r"(?<!\\x[0-9a-fA-F]{2})(?:\\x[0-9a-fA-F]{2}){40,}")
_RUNS_TEXT = frozenset({"exec", "eval", "compile", "__import__"})
_DECODES = frozenset(
    {
        *("b16decode", "b32decode", "b64decode", "b85decode", "a85decode", "urlsafe_b64decode"),
        *("standard_b64decode", "decodebytes", "unhexlify", "a2b_base64", "a2b_hex", "fromhex", "decompress"),
    }
)
#: Parsing a thousand files takes seconds; few of them name any of these.
_MAY_DECODE = re.compile("|".join([*_DECODES, "marshal", "codecs"]).encode())
#: Parsing a larger file takes seconds and gigabytes; nobody writes one by hand.
MOST_PARSED_BYTES = 2_000_000
LFS_POINTER = b"version https://git-lfs.github.com/"


def check_obfuscation(entry: CheckedEntry) -> RuleFinding:
    certain: list[str] = []
    suspicious: list[str] = []
    for name in entry.files():
        path = entry.tree / name
        if path.is_symlink() or not path.is_file():
            continue
        (certain if path.suffix.lower() in COMPILED else suspicious).extend(
            f"{name}: {what}" for what in _by_its_file(path)
        )
        if path.suffix == ".py":
            certain += [f"{name}: {what}" for what in _by_its_calls(path)]
    rule = "obfuscation"
    closed = "the validators' detector is a closed program: its verdict cannot be reproduced"
    if certain:
        to_do = "remove these: the validators' detector certainly looks for them"
        return RuleFinding(4, rule, FindingState.FAILED, certain[0], _few(certain[1:] + suspicious), to_do)
    if suspicious:
        text = f"{len(suspicious)} places may look obfuscated; {closed}"
        to_do = "look at each; keep what can be read, and take out what nothing needs"
        return RuleFinding(4, rule, FindingState.UNKNOWN, text, _few(suspicious), to_do)
    text = f"nothing that looks obfuscated; {closed}"
    return RuleFinding(4, rule, FindingState.UNKNOWN, text)


def check_weights(entry: CheckedEntry) -> RuleFinding:
    found: list[str] = []
    large: list[str] = []
    for name in entry.files():
        path = entry.tree / name
        if path.is_symlink() or not path.is_file():
            continue
        size, suffix = path.stat().st_size, path.suffix.lower()
        if suffix in WEIGHTS or suffix in DATA_SETS or (suffix == ".bin" and size > LARGE_FILE_BYTES):
            found.append(f"{name} ({_shown(size)})")
        elif suffix in TABLES and size > LARGE_FILE_BYTES:
            large.append(f"{name} ({_shown(size)})")
        elif size < 1000 and path.read_bytes().startswith(LFS_POINTER):
            found.append(f"{name}: a pointer to Git LFS, which a plain clone may leave as it is")
    rule = "no weights, no data sets"
    if found:
        to_do = "remove them, from the history too: models and data come with each task"
        return RuleFinding(8, rule, FindingState.FAILED, found[0], _few(found[1:] + large), to_do)
    if large:
        text = f"{len(large)} tables that may be data sets"
        return RuleFinding(
            8, rule, FindingState.UNKNOWN, text, _few(large), "keep them if no training reads them"
        )
    return RuleFinding(
        8, rule, FindingState.PASSED, "none in the tree; rule 13 is about what a build downloads"
    )


def _by_its_file(path: Path) -> Iterator[str]:
    suffix, size = path.suffix.lower(), path.stat().st_size
    if suffix in COMPILED:
        yield "compiled code"
        return
    if suffix in ARCHIVES:
        yield "an archive"
        return
    if size > LARGE_FILE_BYTES:
        yield f"{_shown(size)} large"
    if suffix in PICTURES:
        return
    content = read_inside(path.parent, path)
    if b"\0" in content[:4096]:
        yield "binary"
        return
    if suffix not in _CODE:
        return
    if suffix == ".py" and size > MOST_PARSED_BYTES:
        yield "too large to be searched for decoded text that it runs"
    text = content.decode("utf-8", "replace")
    longest = max(map(len, text.splitlines()), default=0)
    if longest > LONGEST_LINE:
        yield f"a line of {longest:,} characters"
    if looks_like_base64(text):
        yield "a block of base64"
    if _ESCAPES.search(text):
        yield "a block of escaped bytes"


def looks_like_base64(text: str) -> bool:
    return _BASE64.search(text) is not None


def _by_its_calls(path: Path) -> Iterator[str]:
    """Code that runs what it has decoded, in one expression or by way of a name."""
    content = read_inside(path.parent, path, MOST_PARSED_BYTES + 1)
    if len(content) > MOST_PARSED_BYTES or not _MAY_DECODE.search(content):
        return
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return  # of another Python, perhaps; the build compiles what matters
    decoded = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _holds_decoding(node.value, frozenset())
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name(node.func) in _RUNS_TEXT:
            arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
            if any(_holds_decoding(argument, decoded) for argument in arguments):
                yield f"line {node.lineno} runs decoded text by {_name(node.func)}"


def _holds_decoding(value: ast.expr, decoded: frozenset[str] | set[str]) -> bool:
    """Calls within it that run text are looked at by themselves."""
    left: list[ast.AST] = [value]
    while left:
        node = left.pop()
        if not (isinstance(node, ast.Call) and _name(node.func) in _RUNS_TEXT):
            left.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Call) and _last_name(node.func) in _DECODES:
            return True
        if isinstance(node, ast.Call) and _dotted(node.func) in ("marshal.loads", "codecs.decode"):
            return True
        if isinstance(node, ast.Name) and node.id in decoded:
            return True
    return False


def _name(function: ast.expr) -> str:
    """`exec` and `builtins.exec`; `re.compile` is another thing."""
    dotted = _dotted(function)
    return dotted.removeprefix("builtins.").removeprefix("__builtins__.")


def _last_name(function: ast.expr) -> str:
    return _dotted(function).rpartition(".")[2]


def _dotted(function: ast.expr) -> str:
    names: list[str] = []
    while isinstance(function, ast.Attribute):  # not by recursion: some code is deep to break its readers
        names.append(function.attr)
        function = function.value
    if isinstance(function, ast.Name):
        names.append(function.id)
    return ".".join(reversed(names))


def _few(places: list[str]) -> tuple[str, ...]:
    more = [f"and {len(places) - MOST_NAMED} more"] if len(places) > MOST_NAMED else []
    return (*places[:MOST_NAMED], *more)


def _shown(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 100_000 else f"{size / 1e3:.1f} kB"
