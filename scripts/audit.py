"""Ask PyPI for known vulnerabilities of all that requirements/ names: python scripts/audit.py

Ends with 0 if there is none but the known exceptions, with 1 if there is one, with 2 if PyPI has no answer.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, from anywhere
from scripts import pins
from scripts.pins import FOLDER
from scripts.tools import program

#: Known vulnerabilities that do not affect us: identifier -> reason and date.
EXCEPTIONS: dict[str, str] = {}


def pinned() -> list[list[str]]:
    """Return `name==version` of all packages, in lists that name no package twice."""
    versions: dict[str, list[str]] = {}
    for path in sorted(FOLDER.glob("*.txt")):
        for pin in pins.read(path):
            # A build's suffix is not part of the release's version.
            version = pin.version.partition("+")[0]
            known = versions.setdefault(pin.name, [])
            if version not in known:
                known.append(version)
    most = max(len(known) for known in versions.values())
    return [
        [f"{name}=={known[index]}" for name, known in sorted(versions.items()) if index < len(known)]
        for index in range(most)
    ]


def ask(pip_audit: Path, lines: list[str]) -> list[dict[str, Any]]:
    """Ask PyPI about these versions; raise `NoAnswer` if there is no answer."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pinned.txt"
        file.write_text("\n".join(lines) + "\n")
        command = [str(pip_audit), "--no-deps", "--disable-pip", "--progress-spinner", "off", "-f", "json"]
        command += [word for name in EXCEPTIONS for word in ("--ignore-vuln", name)]
        done = subprocess.run([*command, "-r", str(file)], capture_output=True, text=True, check=False)
    try:
        answers: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        raise NoAnswer(done.stderr.strip()[-2000:]) from None
    return answers


class NoAnswer(Exception):
    """The error of pip-audit."""


def verdict(answers: list[dict[str, Any]]) -> int:
    found = [(one, hole) for one in answers for hole in one.get("vulns", [])]
    for one, hole in found:
        fixed = ", ".join(hole.get("fix_versions", [])) or "no version"
        print(f"{one['name']} {one['version']}: {hole['id']}, fixed in {fixed}", file=sys.stderr)
    skipped = [one["name"] for one in answers if "skip_reason" in one]
    if skipped:
        names = ", ".join(skipped[:5]) + (", …" if len(skipped) > 5 else "")
        which = f"{len(skipped)} of {len(answers)} packages, which were not audited"
        print(f"PyPI said nothing about {which}: {names}", file=sys.stderr)
    print(f"{len(answers) - len(skipped)} packages audited, {len(found)} vulnerabilities")
    return 1 if found else 2 if skipped else 0


def main() -> int:
    pip_audit = program("pip-audit", "audit")
    try:
        return verdict([one for lines in pinned() for one in ask(pip_audit, lines)])
    except NoAnswer as problem:
        print(f"pip-audit had no answer from PyPI, nothing was audited:\n{problem}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
