"""How a table is written down, the same for every engine."""

import json


def one_key_per_line(found: dict) -> str:
    """One key per line: a schema change then shows as a readable diff."""
    lines = []
    for key, value in found.items():
        if key == "objects":
            continue
        lines.append(f" {json.dumps(key)}: {json.dumps(value)},")
    lines.append(' "objects": {')
    names = list(found["objects"])
    for name in names:
        fields = found["objects"][name]
        rows = [f"   {json.dumps(key)}: {json.dumps(value)}" for key, value in fields.items()]
        body = "\n" + ",\n".join(rows) + "\n  " if rows else ""
        lines.append(f"  {json.dumps(name)}: {{{body}}}{',' if name != names[-1] else ''}")
    lines.append(" }")
    return "{\n" + "\n".join(lines) + "\n}\n"
