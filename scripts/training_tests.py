"""Run the trainer's tests in the training environment: PYTHON scripts/training_tests.py FOLDER [arguments].

That environment may be in use elsewhere and is not changed. What the tests need beside it is installed once
into FOLDER, which comes last on the path.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, from anywhere
from scripts.install import locked

ROOT = Path(__file__).resolve().parents[1]
#: Imported names of the packages in requirements/test.txt.
NEEDED = ("pytest", "pytest_asyncio", "xdist", "hypothesis")
#: Warnings of the training stack are ignored; the project's own setting makes each an error.
OPTIONS = ["-W", "ignore", "-p", "no:cacheprovider", "-p", "tests.trainer.workers"]

#: A test launches trainings, several of them one after the other, at a low priority.
LIMIT_S = "3000"


def is_there(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def main(folder: Path, arguments: list[str]) -> int:
    sys.path.append(str(folder))
    if not all(map(is_there, NEEDED)):
        install = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        target = ["--target", str(folder), *locked("test")]
        done = subprocess.run([*install, *target], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"the tests' own packages cannot be installed into {folder}:\n{done.stderr}")
        importlib.invalidate_caches()
    os.environ.setdefault("GOD_MINER_TEST_LIMIT_S", LIMIT_S)
    pytest = importlib.import_module("pytest")
    return int(pytest.main([*OPTIONS, *(arguments or [str(ROOT / "tests" / "trainer")])]))


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), sys.argv[2:]))
