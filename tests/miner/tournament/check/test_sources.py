"""What looks obfuscated or is too large for an entry, and what is not."""

from __future__ import annotations

import base64
import time
from pathlib import Path

import pytest

from miner.tournament.check.entry import FindingState
from miner.tournament.check.sources import MOST_PARSED_BYTES, check_obfuscation, check_weights
from tests.miner.tournament.entries import open_small

pytestmark = pytest.mark.process


TEXT = base64.b64encode(bytes(range(256))).decode()


@pytest.mark.parametrize(
    ("files", "what"),
    [
        ({"trainer/fast.so": b"\x7fELF"}, "trainer/fast.so: compiled code"),
        ({"a.pyc": b"\0"}, "a.pyc: compiled code"),
        ({"a.py": "import base64\nexec(base64.b64decode('cGFzcw=='))\n"}, "line 2 runs decoded text by exec"),
        (
            {"a.py": "import zlib, base64\ntext = zlib.decompress(data)\neval(compile(text, '', 'eval'))\n"},
            "line 3 runs decoded text by",
        ),
        ({"a.py": "import marshal, builtins\nbuiltins.exec(marshal.loads(b''))\n"}, "by exec"),
        ({"a.py": "exec(bytes.fromhex('70617373'))\n"}, "line 1 runs decoded text by exec"),
    ],
)
def test_what_nobody_can_read_fails(files: dict[str, str | bytes], what: str, tmp_path: Path) -> None:
    found = check_obfuscation(open_small(tmp_path, files))
    assert found.state is FindingState.FAILED
    assert any(what in line for line in (found.text, *found.notes))


@pytest.mark.parametrize(
    ("files", "what"),
    [
        ({"a.zip": b"PK"}, "an archive"),
        ({"data.txt": "x " * 600_000}, "1.2 MB large"),
        ({"blob": b"ab\0cd"}, "binary"),
        ({"a.js": "var a=1;" * 100}, "a line of 800 characters"),
        ({"a.py": f"KEY = '{TEXT}'\n"}, "a block of base64"),
        ({"a.py": "KEY = b'" + "\\x41" * 60 + "'\n"}, "a block of escaped bytes"),
    ],
)
def test_what_only_may_look_so_is_for_a_person(
    files: dict[str, str | bytes], what: str, tmp_path: Path
) -> None:
    found = check_obfuscation(open_small(tmp_path, files))
    assert found.state is FindingState.UNKNOWN
    assert any(what in note for note in found.notes)
    assert "cannot be reproduced" in found.text


def test_readable_code_raises_no_suspicion(tmp_path: Path) -> None:
    files = {
        "rewards.py": "import re\nword = re.compile('a')\nexec(compile(source, 'reward', 'exec'), space)\n",
        "images.py": "import base64\npicture = base64.b64decode(field)\nshow(picture)\n",
        "page.png": b"\x89PNG\0\0",
        "table.json": '{"all": "' + "x" * 5000 + '"}',
        "key.pem": "\n".join([TEXT[:64]] * 20),
        "notes.md": "x" * 3000,
        "old.py": "print 'a Python of its own'\n",
    }
    found = check_obfuscation(open_small(tmp_path, files))
    assert (found.state, found.notes) == (FindingState.UNKNOWN, ())


def cost(content: str, folder: Path) -> float:
    """Seconds of the processor, without others' share of it."""
    entry = open_small(folder, {"a.py": content})
    took = []
    for _ in range(3):
        began = time.process_time()
        check_obfuscation(entry)
        took.append(time.process_time() - began)
    return min(took)


@pytest.mark.parametrize(
    "piece",
    [
        *("A" * 199 + "-", ("A" * 199 + "\n") * 4 + "-\n", "A" * 199 + " " * 1000 + "-"),
        *("A" * 60 + "=\\'" * 100, "\\x41" * 39 + "-", "\\", "\n"),
    ],
)
def test_no_text_costs_many_times_what_another_of_its_size_does(piece: str, tmp_path: Path) -> None:
    size = 500_000
    plain = cost(("x = [1, 2, 3]\n" * size)[:size], tmp_path / "plain")
    once = cost((piece * size)[:size], tmp_path / "once")
    twice = cost((piece * size)[: 2 * size], tmp_path / "twice")
    assert once < 8 * plain
    assert twice < 4 * once + plain


def test_calls_in_calls_are_each_looked_at_once(tmp_path: Path) -> None:
    nested = "eval(" * 90 + "b64decode(a)" + ")" * 90
    found = check_obfuscation(open_small(tmp_path, {"a.py": f"{nested}\n"}))
    assert found.text == "a.py: line 1 runs decoded text by eval"
    assert not any("runs decoded" in note for note in found.notes)


def test_a_python_file_that_is_too_large_to_be_parsed_is_for_a_person(tmp_path: Path) -> None:
    content = "exec(b64decode(a))\n" + "x = 1\n" * (MOST_PARSED_BYTES // 6)
    found = check_obfuscation(open_small(tmp_path, {"a.py": content}))
    assert found.state is FindingState.UNKNOWN
    assert "a.py: too large to be searched for decoded text that it runs" in found.notes


@pytest.mark.parametrize(
    "files",
    [
        {"models/a.safetensors": b"\0"},
        {"a.gguf": b"x"},
        {"rows.parquet": b"PAR1"},
        {"a.bin": b"\1" * 1_000_001},
        {"a.dat": "version https://git-lfs.github.com/spec/v1\noid sha256:00\n"},
    ],
)
def test_weights_and_data_sets_fail(files: dict[str, str | bytes], tmp_path: Path) -> None:
    found = check_weights(open_small(tmp_path, files))
    assert found.state is FindingState.FAILED
    assert next(iter(files)) in found.text


def test_a_large_table_is_for_a_person_and_a_small_one_is_not(tmp_path: Path) -> None:
    rows = '{"a": 1}\n' * 150_000
    assert check_weights(open_small(tmp_path / "1", {"a.jsonl": rows})).state is FindingState.UNKNOWN
    assert check_weights(open_small(tmp_path / "2", {"a.jsonl": "{}"})).state is FindingState.PASSED
