"""The code that the process with the hotkey loads."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import bittensor_core
import pytest

from miner.chain import hotkey_worker
from miner.chain.identity import create_temporary_hotkey, opened_hotkey
from tests.miner.chain.test_identity import Wallets

pytestmark = pytest.mark.process


#: All that it imports besides the standard library: each further package could take the key.
THIRD_PARTY = ["bittensor_core"]
SITE = Path(bittensor_core.__file__).parents[1]
LIST = """
import json, runpy, sys
runpy.run_path(sys.argv[2])
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def test_it_imports_the_standard_library_and_the_bindings_alone() -> None:
    flags = ["-I", "-S", "-c", f"import sys; sys.path.append(sys.argv[1]){LIST}"]
    command = [sys.executable, *flags, str(SITE), hotkey_worker.__file__]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    modules = set(json.loads(done.stdout))
    assert sorted(modules - sys.stdlib_module_names - {"__main__"}) == THIRD_PARTY
    # What runs `.pth` files.
    assert "site" not in modules


def children() -> set[str]:
    return set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())


def test_while_it_runs_it_has_no_other_library_of_the_environment_open(tmp_path: Path) -> None:
    wallets = Wallets(tmp_path)
    create_temporary_hotkey(wallets.wallet_path, wallets.wallet_name)
    before = children()
    with opened_hotkey(wallets) as hotkey:
        assert hotkey.sign(b"offer")
        [child] = children() - before
        maps = Path(f"/proc/{child}/maps").read_text()
        variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
    assert set(re.findall(rf"{re.escape(str(SITE))}/([\w.-]+)", maps)) == set(THIRD_PARTY)
    assert {entry.partition(b"=")[0] for entry in variables if entry} <= {b"LD_LIBRARY_PATH"}


def test_it_ends_with_the_socket(tmp_path: Path) -> None:
    wallets = Wallets(tmp_path)
    create_temporary_hotkey(wallets.wallet_path, wallets.wallet_name)
    command = [sys.executable, "-I", "-S", "-B", hotkey_worker.__file__, str(SITE)]
    order = {"path": str(tmp_path / "miner/hotkeys/default"), "password": None}
    done = subprocess.run(
        command, input=json.dumps(order) + "\n", capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert set(json.loads(done.stdout)) == {"address", "public_key", "crypto_type"}
