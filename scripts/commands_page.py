"""Print docs/commands.md from the command line's own help (make docs)."""

from __future__ import annotations

from collections.abc import Iterator

import typer.main
from typer.core import TyperCommand, TyperGroup

from miner.__main__ import app


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
        "take `--json`.",
        "",
    ]
    for path, command in commands(root, ""):
        text = " ".join((command.help or command.short_help or "").split("\n\n")[0].split())
        lines.append(f"- `{path}`: {text}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
