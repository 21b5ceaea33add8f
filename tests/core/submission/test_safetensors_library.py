"""Our reader of weights before the library that will load them."""

from __future__ import annotations

import random
from pathlib import Path

from core.submission.safetensors import BadHeader, read_header
from tests.core.submission.engine import asked
from tests.core.submission.folders import bf16, safetensors

_LOAD = """
import json, sys
from pathlib import Path
from safetensors import safe_open

def loads(path):
    try:
        with safe_open(path, "pt") as file:
            list(file.keys())
        return True
    except Exception:
        return False

folder = Path(sys.argv[1])
json.dump({path.name: loads(path) for path in sorted(folder.glob("*.safetensors"))}, sys.stdout)
"""


def is_read(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            read_header(file)
    except BadHeader:
        return False
    return True


def test_what_the_library_cannot_load_is_never_accepted(training_python: str, tmp_path: Path) -> None:
    good = safetensors(
        {"a": bf16(4, 2), "b": ("F16", [2, 2], b"\0" * 8), "c": ("I8", [3], b"abc")}, {"k": "v"}
    )
    (tmp_path / "good.safetensors").write_bytes(good)
    chance = random.Random(7)
    for number in range(400):
        content = bytearray(good)
        for _ in range(chance.randint(1, 3)):
            content[chance.randrange(len(content))] = chance.choice(b'0123456789[]{},:" \0abF')
        (tmp_path / f"{number}.safetensors").write_bytes(
            content[: len(content) - chance.choice([0, 0, 0, 1])]
        )
    theirs = asked(training_python, _LOAD, tmp_path)
    ours = {name: is_read(tmp_path / name) for name in theirs}
    assert ours["good.safetensors"]
    assert theirs["good.safetensors"]
    assert [name for name in theirs if ours[name] and not theirs[name]] == []
    assert [name for name in theirs if theirs[name] and not ours[name]] == []
