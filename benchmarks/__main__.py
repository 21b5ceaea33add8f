"""`python -m benchmarks [name…]`: all of them, or those named; `python -m benchmarks gpu` measures a card."""

from __future__ import annotations

import importlib
import sys
from typing import Annotated

import typer

from benchmarks import machine
from benchmarks.load_kind import LoadKind
from benchmarks.report import Report, wide_console

#: In this order: the generator's ceiling first, since it bounds what the next can show.
NAMES = (
    "generator",
    "offers",
    "startup",
    "garbage",
    "planner",
    "memory_model",
    "policy",
    "inputs",
    "publish",
    "jobs",
    "backends",
    "slurm_overhead",
    "fleet_restart",
    "fleet_scale",
    "native_training",
    "text_rules",
    "deadlines",
    "end_to_end",
    "sampling",
    "dashboard",
    "environments",
    "environments_tiny",
    "pictures",
)


def main(
    names: Annotated[list[str] | None, typer.Argument(help=f"Of: {', '.join(NAMES)}.")] = None,
    quick: Annotated[bool, typer.Option(help="Fewer, shorter rounds: for a look, not for a claim.")] = False,
    kind: Annotated[
        list[LoadKind] | None, typer.Option(help="Garbage of this kind; may be given more than once.")
    ] = None,
    cell: Annotated[
        list[str] | None,
        typer.Option(help="text_rules: cells like 'dpo-*' or '*-1'; may be given more than once."),
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(help="text_rules: this technique beside ours; may be given more than once."),
    ] = None,
    game: Annotated[
        list[str] | None,
        typer.Option(help="environments and environments_tiny: this game; may be given more than once."),
    ] = None,
    write: Annotated[bool, typer.Option(help="Also write benchmarks/results/<name>-<time>.json.")] = False,
) -> None:
    """Measure what is claimed, and print it as tables. Nothing here asserts a time."""
    wanted = names or list(NAMES)
    unknown = sorted(set(wanted) - set(NAMES))
    if unknown:
        raise typer.BadParameter(f"no benchmark is called {', '.join(unknown)}; there are {', '.join(NAMES)}")
    console = wide_console()
    facts = machine.facts()
    for name, value in facts.items():
        console.print(f"{name:12} {value}", highlight=False)
    console.print()
    for name in wanted:
        run = importlib.import_module(f"benchmarks.{name}").run
        more: tuple[object, ...] = ()
        if name == "garbage" and kind:
            more = (tuple(kind),)
        elif name == "text_rules":
            more = (tuple(cell or ()), tuple(variant or ()))
        elif name.startswith("environments"):
            more = (tuple(game or ()),)
        report: Report = run(quick, *more)
        report.show(console)
        if write:
            console.print(f"written to {report.write(name, facts)}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["gpu"]:  # it has options of its own, and runs where little is installed
        from benchmarks.gpu.wheels import use_wheels

        del sys.argv[1]
        use_wheels(sys.argv)
        from benchmarks.gpu.run import gpu

        typer.run(gpu)
    else:
        typer.run(main)
