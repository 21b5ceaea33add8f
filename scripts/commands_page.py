"""Print docs/commands.md from the command line's own help (make docs)."""

from __future__ import annotations

from collections.abc import Iterator

import typer.main
from typer.core import TyperCommand, TyperGroup

from miner.__main__ import PANELS, app, panel_of


def commands(group: TyperGroup, prefix: str) -> Iterator[tuple[str, TyperCommand | TyperGroup]]:
    for name, command in group.commands.items():
        path = f"{prefix} {name}".lstrip()
        if isinstance(command, TyperGroup):
            yield from commands(command, path)
            if command.invoke_without_command:
                yield path, command
        elif isinstance(command, TyperCommand):
            yield path, command


def page() -> str:
    root = typer.main.get_group(app)
    lines = [
        "# Commands",
        "",
        "`god-miner` stands before each. Options are in each command's `--help`. Commands that print facts",
        "take `--json`. Without a command it says in ten lines how things stand, and what to do next.",
        "",
    ]
    for panel in PANELS:
        lines += [f"## {panel}", ""]
        for path, command in commands(root, ""):
            if panel_of(root.commands[path.split()[0]]) == panel:
                text = " ".join((command.help or command.short_help or "").split("\n\n")[0].split())
                lines.append(f"- `{path}`: {text}")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(), end="")
