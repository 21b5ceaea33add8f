"""Entries that try something, one row each, and the rule that must name it."""

from __future__ import annotations

import base64
import json
import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from core.domain.wire import TournamentType
from miner.tournament.check.arguments import check_arguments, find_sandbox
from miner.tournament.check.dockerfiles import check_dockerfiles
from miner.tournament.check.entry import CheckedEntry, FindingState, RuleFinding
from miner.tournament.check.licence import check_licence
from miner.tournament.check.review.rule import check_review
from miner.tournament.check.sources import check_obfuscation, check_weights
from tests.doubles.required import missing
from tests.miner.tournament.entries import open_small
from tests.miner.tournament.repositories import git

pytestmark = pytest.mark.process

CHECKS: Mapping[int, Callable[[CheckedEntry], RuleFinding]] = {
    2: check_licence,
    4: check_obfuscation,
    7: check_dockerfiles,
    8: check_weights,
    9: check_arguments,
    13: check_review,
}
LICENCE, NOTICE = b"Some Licence\n\n1. Terms.\n", b"Notice\n"
DOCKERFILE = "dockerfiles/standalone-text-trainer.dockerfile"
BUILD = f"""\
FROM python:3.12@sha256:{"0" * 64}
COPY trainer /app/trainer
COPY data /app/data
RUN pip install --require-hashes -r /app/trainer/requirements.txt && python -m compileall -q /app
ENTRYPOINT ["python", "-m", "trainer.text"]
"""
#: What a trainer does that a careless reader would ask about.
TRAINER = '''\
"""Train a text model."""
import argparse, os, socket, time
from datasets import load_dataset
from transformers import AutoModelForCausalLM
from trainer import load
from trainer.runner import command_line

CACHE = "/cache"

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--task-id")
    parser.add_argument("--hours-to-complete", type=float)
    args, _ = parser.parse_known_args()
    deadline = time.time() + args.hours_to_complete * 3600
    data = f"{CACHE}/datasets/{args.task_id}_train_data.json"
    if not args.task_id or not os.path.isfile(data):
        raise SystemExit(f"no data at {data}; see https://example.com")
    rows = load_dataset("json", data_files=data)
    model = AutoModelForCausalLM.from_pretrained(load.place(CACHE), local_files_only=True)
    while time.time() < deadline - 180:
        model.train(rows)
'''
#: As the validator's own argument lines are parsed, so far as rule 9 looks at it.
PARSER = """
import json
from types import SimpleNamespace
def text_run(arguments):
    given = dict(zip(arguments[::2], arguments[1::2]))
    return SimpleNamespace(model_dump_json=lambda: json.dumps({"task_id": given["--task-id"]}))
image_run = text_run
"""
HONEST: Mapping[str, str | bytes] = {
    "LICENSE.md": LICENCE,
    "NOTICE": NOTICE,
    DOCKERFILE: BUILD,
    "trainer/__init__.py": "",
    "trainer/text.py": TRAINER,
    "trainer/load.py": "def place(cache):\n    return cache + '/models'\n",
    "trainer/requirements.txt": "torch==2.13.0 \\\n    --hash=sha256:" + "0" * 64 + "\n",
    "trainer/runner/__init__.py": "",
    "trainer/runner/command_line.py": PARSER,
    "data/base.yaml": "learning_rate: 1e-4\n",
}


class Trick(NamedTuple):
    rule: int
    #: What the finding says of it.
    says: str
    files: Mapping[str, str | bytes]
    state: FindingState = FindingState.FAILED


FAILED, ASKED = FindingState.FAILED, FindingState.UNKNOWN


def code(lines: str, says: str, state: FindingState = FAILED, rule: int = 13) -> Trick:
    return Trick(rule, says, {"trainer/text.py": f"{TRAINER}\n{lines}\n"}, state)


def build(line: str, says: str, state: FindingState = FAILED, rule: int = 13) -> Trick:
    return Trick(rule, says, {DOCKERFILE: BUILD.replace("ENTRYPOINT", f"{line}\nENTRYPOINT")}, state)


def random_bytes(count: int) -> bytes:
    return random.Random(0).randbytes(count)


ENCODED = base64.b64encode(b"print('hidden')" * 20).decode()
ROW = json.dumps({"instruct": "a", "output": "b"})
HUB = "https://huggingface.co/someone/weights/resolve/main/model.safetensors"

#: The report's, as far as a tree shows them; loops, fork bombs and what they reach are test_arguments's.
REPORTED = {
    "licence with an empty line more": Trick(2, "empty lines at the end", {"LICENSE.md": LICENCE + b"\n"}),
    "licence with a byte order mark": Trick(2, "byte order mark", {"LICENSE.md": b"\xef\xbb\xbf" + LICENCE}),
    "licence that is a folder": Trick(2, "LICENSE.md cannot be read", {"LICENSE.md": b""}),
    "licence that is no UTF-8": Trick(2, "not UTF-8", {"LICENSE.md": LICENCE + b"\xff"}),
    "licence with a form feed": Trick(
        2, "LICENSE.md differs", {"LICENSE.md": LICENCE.replace(b"1.", b"1\f.")}
    ),
    "no licence": Trick(2, "there is no licence", {"LICENSE.md": b""}),
    "no notice": Trick(2, "there is no notice", {"NOTICE": b""}),
    "no Dockerfile": Trick(7, "there is no", {DOCKERFILE: b""}),
    "argument without a value": build("ARG WHAT\nRUN echo $WHAT", "WHAT is used and has no value", rule=7),
    "mount of BuildKit": build("RUN --mount=type=cache,target=/x true", "--mount needs BuildKit", rule=7),
    "here-document": build("RUN <<END\nEND", "here-document needs BuildKit", rule=7),
    "linked copy": build("COPY --link trainer /x", "--link needs BuildKit", rule=7),
    "entry point of a shell": Trick(
        7,
        "drops the task's arguments",
        {DOCKERFILE: BUILD.replace('["python", "-m", "trainer.text"]', "python x")},
    ),
    "copy of what is not there": build("COPY missing /x", "missing is not there", rule=7),
    "copy of what is left out": Trick(7, "trainer is not there", {".dockerignore": "trainer\n"}),
    "another Dockerfile first": Trick(
        7, "it has no FROM", {f"ops/docker/{Path(DOCKERFILE).name}": "RUN true\n"}
    ),
    "user who cannot save": build("USER 1000", "USER 1000 can save nothing", rule=7),
    "user by an argument": build("ARG WHO=trainer\nUSER ${WHO}", "USER trainer can save nothing", rule=7),
    "compiled Python": Trick(4, "compiled code", {"trainer/fast.pyc": b"\0"}),
    "exec of base64": code(
        f"import base64\nexec(base64.b64decode('{ENCODED}'))", "runs decoded text", rule=4
    ),
    "exec of base64 by a lambda": code(
        "import base64\nrun = lambda text: exec(base64.b64decode(text))", "runs decoded text by exec", rule=4
    ),
    "weights": Trick(8, "model.safetensors", {"trainer/model.safetensors": b"0" * 100}),
    "pointer to Git LFS": Trick(
        8,
        "a pointer to Git LFS",
        {"trainer/a.dat": "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"},
    ),
    "arguments taken otherwise": Trick(9, "model_path is None", {}),
    "parser that does not parse": Trick(9, "SyntaxError", {"trainer/runner/command_line.py": "def ("}),
    "parser that exits with 0": Trick(
        9, "exit code 0", {"trainer/runner/command_line.py": "raise SystemExit(0)"}
    ),
    "parser that answers in depth": Trick(
        9,
        "no answer",
        {"trainer/runner/command_line.py": "print('answer ' + '[' * 99_999)\nraise SystemExit"},
    ),
    "parser that floods": Trick(
        9, "it printed more than", {"trainer/runner/command_line.py": "while True: print('x' * 60_000)"}
    ),
    "minified code": Trick(4, "a line of 6,000 characters", {"trainer/a.py": "a=1;" * 1500}, ASKED),
    "noise in a file": Trick(13, "bytes that are no text", {"data/table.dat": random_bytes(5000)}, ASKED),
    "rows below a megabyte": Trick(13, "60,001 lines", {"data/rows.jsonl": '{"a": 1}\n' * 60_000}, ASKED),
    "getattr of a name in pieces": code(
        "import base64\nrun = getattr(base64, 'b64' + 'decode')", "'b64decode' is put together from pieces"
    ),
    "submodule": Trick(13, "a submodule", {"trainer/other": b""}, ASKED),
    "link out of the tree": Trick(13, "a link to /etc/passwd", {"data/words.txt": b""}, ASKED),
    "licence that links out": Trick(2, "LICENSE.md cannot be read", {"LICENSE.md": b""}),
    "snapshot_download in the build": build(
        "RUN python -c \"from huggingface_hub import snapshot_download; snapshot_download('a/b')\"",
        "fetches a model: snapshot_download",
    ),
    "curl of weights": build("RUN curl -LO https://host.io/w.safetensors", "fetches: curl -LO"),
}
#: For the review of round 2.
REVIEWED = {
    "curl whose name is broken up": build(f"RUN c''ur\\l -o /w {HUB}", "fetches: curl"),
    "curl in a shell": build(f"RUN bash -c 'cd /x && curl -o w {HUB}'", "fetches: curl"),
    "wget by an argument": build(
        f"ARG FROM_WHERE={HUB}\nRUN wget ${{FROM_WHERE}}", "weights, would be flagged"
    ),
    "the hub's own command": build("RUN hf download someone/weights", "fetches from the hub"),
    "ADD of an address": build(f"ADD {HUB} /w", "ADD fetches https://huggingface.co"),
    "ADD of rows": build("ADD https://host.io/rows.parquet /d", "data, would be flagged"),
    "clone from the hub": build(
        "RUN git clone https://huggingface.co/someone/weights", "fetches a repository"
    ),
    "clone of a branch": build("RUN git clone https://github.com/a/b", "fetched code, asked", ASKED),
    "package from a branch": build("RUN pip install git+https://github.com/a/b@main", "not a commit", ASKED),
    "wheel from anywhere": build("RUN pip install https://host.io/a.whl", "names https://host.io", ASKED),
    "index of somebody's own": build(
        "RUN pip install -i https://host.io/x a", "names https://host.io", ASKED
    ),
    "install script": build("RUN curl -s https://host.io/i | sh", "runs what it fetches", ASKED),
    "base with something in it": Trick(
        13, "is built on someone/base", {DOCKERFILE: BUILD.replace("python:3.12@", "someone/base@")}, ASKED
    ),
    "files of another image": build("COPY --from=someone/image /w /w", "copies files from the image", ASKED),
    "large files of Git LFS": build("RUN git lfs pull", "fetches the large files of Git LFS"),
    "bucket": build("RUN aws s3 cp s3://bucket/w /w", "weights, would be flagged"),
    "decoded in a shell": build("RUN base64 -d /app/data/x > /x.py", "decodes what it runs"),
    "script of the build": Trick(
        13,
        "trainer/setup.sh:3 fetches: wget",
        {
            DOCKERFILE: BUILD.replace("ENTRYPOINT", "RUN sh /app/trainer/setup.sh\nENTRYPOINT"),
            "trainer/setup.sh": f"#!/bin/sh\n# weights\nwget -q \\\n    {HUB}\n",
        },
    ),
    "script of the build in Python": Trick(
        13,
        "trainer/fetch.py:2 uses hf_hub_download",
        {
            DOCKERFILE: BUILD.replace("ENTRYPOINT", "RUN python -m trainer.fetch\nENTRYPOINT"),
            "trainer/fetch.py": "from huggingface_hub import hf_hub_download as get\nget('a/b', 'm.bin')\n",
        },
    ),
    "downloader under another name": code(
        "import huggingface_hub as h\nh.snapshot_download('a/b')", "uses snap", ASKED
    ),
    "torch hub": code("import torch\ntorch.hub.load('a/b', 'c')", "uses load", ASKED),
    "model of the hub": code("AutoModelForCausalLM.from_pretrained('a/b')", "from_pretrained of a/b", ASKED),
    "data set of the hub": code("load_dataset('someone/rows')", "load_dataset fetches someone/rows"),
    "rows from an address": code(
        "load_dataset('json', data_files='https://host.io/a')", "fetches https://host.io"
    ),
    "benchmark": code("NAME = 'openai/gsm8k'", "names gsm8k", ASKED),
    "configuration with data": Trick(
        13, "path: someone/rows", {"data/base.yaml": "path: someone/rows\n"}, ASKED
    ),
    "table of digests": Trick(
        13,
        "a table whose keys are digests",
        {"data/lrs.json": json.dumps({f"{number:016x}": {"lr": 1e-4} for number in range(9)}, indent=1)},
        ASKED,
    ),
    "rows in the code": code(f"ROWS = {list(range(1500))}", "a literal of 1,500 items", ASKED),
    "bytes in the code": code(f"BLOB = {random_bytes(3000)!r}", "3,000 bytes in the code", ASKED),
    "one task": code("def f(args):\n    return args.task_id == '0d63e5c4'", "task_id is compared"),
    "tasks in a table": code(
        "T = {'0d63e5c4': 1}\ndef f(task_id):\n    return T.get(task_id)", "task_id is comp"
    ),
    "task by a variable": code(
        "if os.environ['TASK_ID'].startswith('0d63'):\n    pass", "TASK_ID is compared"
    ),
    "one miner": code("def f(hotkey):\n    return hotkey in ('5Grwva', '5FHneW')", "hotkey is compared"),
    "task in a shell": Trick(
        13,
        "compares the task's or miner's name",
        {
            "trainer/run.sh": '[ "$TASK_ID" = 0d63e5c4 ] && echo\n',
            DOCKERFILE: f"{BUILD}# run.sh\n".replace("RUN pip", "RUN sh /app/trainer/run.sh && pip"),
        },
    ),
    "data set's name": code(
        "def f(dataset_name):\n    return 'alpaca' in dataset_name", "dataset_name is", ASKED
    ),
    "host's name": code("if socket.gethostname() == 'validator':\n    pass", "compares the host's name"),
    "host's name, only read": code("NAME = socket.gethostname()", "uses socket.gethostname", ASKED),
    "date": code("if time.time() > 1_790_000_000:\n    pass", "compares the date"),
    "weekday": code(
        "import datetime\nif datetime.datetime.now().weekday() == 0:\n    pass", "compares the date"
    ),
    "day": code(
        "from datetime import datetime as d\nif d.now() > d(2026, 9, 1):\n    pass", "compares the date"
    ),
    "address of the cloud": code("URL = 'http://169.254.169.254/latest'", "names 169.254.169.254"),
    "Docker's socket": code("S = '/var/run/docker.sock'", "names docker.sock"),
    "first process": code("open('/proc/1/environ')", "names /proc/1/environ"),
    "other processes": code(
        "def f(pid):\n    return open(f'/proc/{pid}/environ')", "looks into another", ASKED
    ),
    "others' data": code("os.listdir(CACHE + '/datasets')", "lists /cache/datasets", ASKED),
    "evaluator's rows": code("PLACE = '/cache/x_test_data.json'", "names test_data", ASKED),
    "evaluator's code": code("import validator.scoring", "imports validator.scoring", ASKED),
    "request": code(
        "import requests\nrequests.post('http://10.0.0.1', data='x')", "uses requests.post", ASKED
    ),
    "name from numbers": code(
        "import builtins\nrun = getattr(builtins, ''.join(map(chr, [101, 120, 101, 99])))",
        "'exec' is put together",
    ),
    "name turned round": code("import os\nrun = getattr(os, 'metsys'[::-1])", "'system' is put together"),
    "import in pieces": code("run = __import__('base' + '64')", "'base64' is put together"),
    "marshal": code("import marshal\nrun = marshal.loads(b'x')", "runs compiled code by loads"),
    "pickle in the code": code(
        "import pickle\npickle.loads(b'cos\\nsystem\\n')", "runs what the pickle says"
    ),
    "pickle from a file": code(
        "import pickle\npickle.load(open('x', 'rb'))", "runs what the pickle says", ASKED
    ),
    "rot13": code("import codecs\nX = codecs.decode('rkrp', 'rot13')", "a text in rot13"),
    "exec of a text": code("exec(open('/app/data/x').read())", "runs a text by exec", ASKED),
    "command": code(f"import subprocess\nsubprocess.run(['curl', '-O', '{HUB}'])", "fetches: curl", ASKED),
    "command by os": code("os.system('git clone https://huggingface.co/a/b')", "fetches a repository", ASKED),
    "script without an ending": Trick(
        13, "trainer/setup:1 fetches: curl", {"trainer/setup": f"curl -o /w {HUB}\n"}
    ),
    "Python under another name": build(
        "RUN python /app/data/x.txt", "whose name hides that it is code", ASKED
    ),
    "anonymous model": code("def f(m):\n    return m == '0123456789abcdef'", "anonymous name", ASKED),
    "date in a constant": code(
        "import datetime as d\nEND = d.datetime(2026, 9, 1)\nif d.datetime.now() > END:\n    pass",
        "compares the date",
    ),
    "rows in a docstring": code(f'def f():\n    """{"row " * 6000}"""', "characters in the code", ASKED),
    "no Python": Trick(13, "cannot be parsed", {"trainer/load.py": "def ("}, ASKED),
}


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> CheckedEntry:
    folder = tmp_path_factory.mktemp("honest")
    upstream = folder / "upstream"
    upstream.mkdir()
    (upstream / "LICENSE.md").write_bytes(LICENCE)
    (upstream / "NOTICE").write_bytes(NOTICE)
    return open_small(folder, HONEST, upstream=upstream, kinds=(TournamentType.TEXT,))


def changed(honest: CheckedEntry, folder: Path, name: str, trick: Trick) -> CheckedEntry:
    """The honest entry with a trick in its tree. Empty files are none; links and submodules go by name."""
    tree = folder / "tree"
    for path, text in {**HONEST, **trick.files}.items():
        if text or path.endswith(".py"):
            file = tree / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(text if isinstance(text, bytes) else text.encode())
    if "folder" in name:
        (tree / "LICENSE.md").mkdir()
    if "links out" in name or "link out" in name:
        os.symlink("/etc/passwd", tree / next(iter(trick.files)))
    git(tree, "init", "-q")
    git(tree, "add", "-A", "-f")
    if name == "submodule":
        (tree / "trainer/other").mkdir()
        git(tree, "update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},trainer/other")
    return replace(honest, clone=replace(honest.clone, directory=tree), head=tree)


@pytest.mark.parametrize("name", [*REPORTED, *REVIEWED])
def test_each_trick_is_named(
    name: str, honest: CheckedEntry, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    trick = {**REPORTED, **REVIEWED}[name]
    if trick.rule == 9 and isinstance(problem := find_sandbox(tmp_path_factory.mktemp("sandbox")), str):
        missing(problem)
    found = CHECKS[trick.rule](changed(honest, tmp_path, name, trick))
    said = "\n".join((found.text, *found.notes))
    assert trick.says in said
    assert found.state is trick.state, said


def test_an_honest_trainer_is_not_asked_about(honest: CheckedEntry) -> None:
    states = {number: CHECKS[number](honest).state for number in (2, 7, 8, 13)}
    assert set(states.values()) == {FindingState.PASSED}, states
    assert [place["concern"] for place in check_review(honest).places] == ["packages", "packages"]


@pytest.mark.parametrize(
    ("comment", "state"),
    [
        ("", FAILED),
        ("# weights\n", FAILED),
        ("# The tokenizer of the task's family\n", ASKED),
        ("# For a reviewer: a tokenizer, as the cache has none.\n", FindingState.PASSED),
    ],
)
def test_what_stands_beside_a_download_answers_for_it(
    comment: str, state: FindingState, honest: CheckedEntry, tmp_path: Path
) -> None:
    entry = changed(honest, tmp_path, "explained", build(f"{comment}ARG X=1\nRUN curl -o /w {HUB}", ""))
    assert check_review(entry).state is state


def test_no_comment_answers_for_a_special_case(honest: CheckedEntry, tmp_path: Path) -> None:
    trick = code("def f(task_id):\n    # For a reviewer: no reason.\n    return task_id == '0d63e5c4'", "")
    assert check_review(changed(honest, tmp_path, "special", trick)).state is FAILED


PIECES = (
    *("curl ", "ls ", "$(date ", "git -a ", "-", "\n", "a", "a.", "/cache", "https://a", "'a'+", "a[0]"),
    *("$…hotkey", "ssh x\n", "# a\n"),
)


@pytest.mark.parametrize("piece", PIECES)
def test_no_text_keeps_the_reviewer_busy(piece: str, honest: CheckedEntry, tmp_path: Path) -> None:
    def cost(size: int) -> float:
        once, _, again = piece.rpartition("…")
        text = (once + again * size)[:size]
        files: dict[str, str | bytes] = {
            "data/a.yaml": text,
            "trainer/a.sh": text,
            "trainer/a.py": f"x = {text[: size // 50]}0",
        }
        entry = changed(honest, tmp_path / str(size), "busy", Trick(13, "", files))
        began = time.process_time()
        check_review(entry)
        return time.process_time() - began

    half = cost(50_000)
    assert cost(100_000) < 3 * half + 0.3


BOMBS = {
    "texts of texts": code(
        f"X = '{'A' * 100_000}'\nY = f'{'{X}' * 30_000}'", "so much is put together", FAILED
    ),
    "a name of thousands": code(f"{'a' + '.b' * 1500}\n" * 100, "so much is put together", FAILED),
    "a sum without end": code(
        f"import datetime as d\nif d.datetime.now().hour + {'+'.join('1' * 900)} == 3:\n    pass",
        "a comparison too deep to be shown",
        FAILED,
    ),
    "a directory without end": code(
        f"import os\nos.listdir('{'cachedata' * 300}!')", "lists cachedatacache", ASKED
    ),
    "a long docstring": code(
        'class A:\n    """' + "x " * 9000 + '"""\n' + "    requests.get(a)\n" * 500,
        "uses requests.get",
        ASKED,
    ),
    "values of values": build(
        "ENV A=x" + "\nENV A=$A$A" * 60 + "\nRUN curl $A$B", "fetches an address", ASKED
    ),
    "a list in lists": build("CMD " + "[" * 100_000, "", FindingState.PASSED),
    "a file without end": Trick(13, "are read at most", {"data/a.yaml": "a: 1\n" * 500_000}, ASKED),
    "a script without end": Trick(13, "are read at most", {"trainer/a.sh": "ä" * 1_500_000}, FAILED),
}


@pytest.mark.parametrize("name", BOMBS)
def test_no_bomb_goes_off(name: str, honest: CheckedEntry, tmp_path: Path) -> None:
    entry = changed(honest, tmp_path, name, BOMBS[name])
    check_dockerfiles(entry)
    found = check_review(entry)
    said = "\n".join((found.text, *found.notes))
    assert BOMBS[name].says in said
    assert found.state is BOMBS[name].state, said[:1000]


def test_what_no_image_gets_is_not_read(honest: CheckedEntry, tmp_path: Path) -> None:
    trick = Trick(13, "", {"tools/fetch.py": "import huggingface_hub as h\nh.snapshot_download('a/b')\n"})
    assert check_review(changed(honest, tmp_path, "tools", trick)).state is FindingState.PASSED
