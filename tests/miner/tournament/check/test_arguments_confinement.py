"""What a hostile entry point can reach while its arguments are parsed: nothing of the operator's."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from miner.backends.sandbox import Sandbox
from miner.tournament.check.arguments import find_sandbox, run_confined
from tests.doubles.required import missing

pytestmark = pytest.mark.process


#: Prints what of each attempt came out; `report` is the last line.
HOSTILE = """
import json, os, socket, sys
order = json.loads(sys.stdin.read())
found = {}
def attempt(name, action):
    try:
        found[name] = str(action())
    except BaseException as error:
        found[name] = type(error).__name__
attempt("write_home", lambda: open(os.path.join(order["home"], "new"), "w").write("x"))
attempt("read_secret", lambda: open(order["secret"]).read())
attempt("write_tree", lambda: open(os.path.join(sys.argv[1], "new"), "w").write("x"))
attempt("write_packages", lambda: open(os.path.dirname(json.__file__) + "/new.py", "w").write("x"))
attempt("connect", lambda: socket.create_connection(("127.0.0.1", order["port"]), 2))
attempt("variables", lambda: sorted(os.environ.get(name) for name in ("HTTPS_PROXY", "HF_TOKEN", "MADE_UP")))
attempt("kill", lambda: os.kill(order["pid"], 0))
def fill():
    with open(os.path.join(os.environ["HOME"], "large"), "wb") as file:
        for _ in range(200):
            file.write(bytes(1 << 20))
attempt("fill", fill)
attempt("fill_input", lambda: os.write(0, bytes(1 << 20)))
attempt("reopen_input", lambda: os.write(os.open("/proc/self/fd/0", os.O_RDWR), b"x"))
def bomb():
    started = 0
    try:
        while started < 5000:
            if os.fork() == 0:
                import time
                time.sleep(60)
                os._exit(0)
            started += 1
    except OSError:
        return "refused"
    return started
attempt("bomb", bomb)
attempt("memory", lambda: len(bytearray(8 << 30)))
print(json.dumps(found), flush=True)
"""


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Sandbox:
    found = find_sandbox(tmp_path_factory.mktemp("sandbox"))
    return missing(found) if isinstance(found, str) else found


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tree").mkdir()
    return tmp_path / "tree"


def test_a_hostile_entry_point_reaches_nothing(
    tmp_path: Path, tree: Path, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MADE_UP", "secret")
    secret = tmp_path / "secret"
    secret.write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        order = {
            "home": str(Path.home()),
            "secret": str(secret),
            "port": server.getsockname()[1],
            "pid": os.getpid(),
        }
        done = run_confined(HOSTILE, tree, json.dumps(order), sandbox)
    found = json.loads(done.text.splitlines()[-1])
    assert found.pop("reopen_input") == "PermissionError"
    assert found.pop("write_home") in ("FileNotFoundError", "PermissionError", "OSError")
    assert found == {
        "read_secret": "FileNotFoundError",
        "write_tree": "OSError",
        "write_packages": "OSError",
        "connect": "ConnectionRefusedError",
        "variables": "TypeError",
        "kill": "ProcessLookupError",
        "fill": "OSError",
        "fill_input": "PermissionError",
        "bomb": "refused",
        "memory": "MemoryError",
    }
    assert list(tree.iterdir()) == []


def test_a_flood_of_output_is_cut_off(tree: Path, sandbox: Sandbox) -> None:
    flood = "import os\nwhile True: os.write(1, b'x' * 65536)"
    done = run_confined(flood, tree, "", sandbox, most_output=1_000_000)
    assert len(done.text) == 1_000_000
    assert done.ending == "it printed more than 1 MB: ended"


@pytest.mark.parametrize("closes", [False, True])
def test_what_hangs_is_ended(tree: Path, sandbox: Sandbox, closes: bool) -> None:
    hangs = "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    hangs += "os.close(1), os.close(2)\n" if closes else ""
    done = run_confined(f"{hangs}while True: time.sleep(9)", tree, "", sandbox, limit_s=1)
    assert done.ending == "not done after 1 s: ended"


def test_what_it_leaves_behind_ends_with_it(tree: Path, sandbox: Sandbox) -> None:
    """The pipe closes, so no process of the sandbox is left that could hold it."""
    leaves = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\nprint('done')"
    done = run_confined(leaves, tree, "", sandbox)
    assert (done.text.strip(), done.ending) == ("done", "exit code 0")


def test_without_a_sandbox_time_and_output_are_limited_all_the_same(tree: Path) -> None:
    assert run_confined("while True: pass", tree, "", None, limit_s=1).ending.startswith("not done")
    flood = "while True: print('x' * 1000)"
    assert "more than" in run_confined(flood, tree, "", None, most_output=10_000).ending
