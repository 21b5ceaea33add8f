"""Start the entry point of image tasks as a validator does, and measure it.

    python start.py [CACHE CHECKPOINTS] -- ARGUMENTS OF trainer.image

In a container /cache and /app/checkpoints are real. Outside one the two directories named stand for them.
The last line on stderr is a record: {"code", "seconds", "peak_bytes"}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def run_task(places: list[str], arguments: list[str]) -> int:
    import trainer.image
    from trainer.runner import command_line, image_files

    if places:
        command_line.CACHE, command_line.CHECKPOINTS = map(Path, places)
        image_files.CACHE = command_line.CACHE / "hf_cache"
    return trainer.image.main(arguments)


def main(arguments: list[str]) -> int:
    at = arguments.index("--")
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        code = 70
        try:
            code = run_task(arguments[:at], arguments[at + 1 :])
        finally:
            os._exit(code)
    _, status, usage = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    record = {"code": code, "seconds": time.monotonic() - began, "peak_bytes": usage.ru_maxrss * 1024}
    print(json.dumps(record), file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
