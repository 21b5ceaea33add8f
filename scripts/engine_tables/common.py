"""Helpers of the table scripts: writing a table, and the commit of a checkout."""

import json
import os
import pathlib
import subprocess


def one_key_per_line(table: dict) -> str:
    """Write a table with one key per line, so that a schema change is a readable diff."""
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in table.items() if key != "objects"]
    lines.append(' "objects": {')
    names = list(table["objects"])
    for name in names:
        rows = [f"   {json.dumps(key)}: {json.dumps(value)}" for key, value in table["objects"][name].items()]
        body = "\n" + ",\n".join(rows) + "\n  " if rows else ""
        lines.append(f"  {json.dumps(name)}: {{{body}}}{',' if name != names[-1] else ''}")
    lines.append(" }")
    return "{\n" + "\n".join(lines) + "\n}\n"


def commit_of(checkout: pathlib.Path) -> str:
    """The commit of a checkout: from git, or from ENGINE_COMMIT for an unpacked archive."""
    if "ENGINE_COMMIT" in os.environ:
        return os.environ["ENGINE_COMMIT"]
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
