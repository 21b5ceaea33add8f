"""Configuration: profiles, policies and alert rules as they are in force, and an editor for one's own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any
from urllib.parse import quote

from nicegui import ui

from miner.api.config_files import (
    ConfigFile,
    ConfigFileList,
    ConfigFileText,
    ConfigKey,
    FileKind,
    TextCheck,
    TextProblem,
    TextToCheck,
    TextToSave,
)
from miner.dashboard.daemons import SLOW_TIMEOUT_SECONDS, DaemonTrouble
from miner.dashboard.effects import EffectsView
from miner.dashboard.layout import PageView, Question, page, page_head
from miner.dashboard.parts import Column, KeyedRows, Link, Table, Text, Tone, box, empty, panel, set_visible
from miner.dashboard.yaml_text import insert_key

_KINDS = {
    FileKind.PROFILES: "Profiles",
    FileKind.POLICIES: "Policies",
    FileKind.ALERTS: "Alert rules",
}
_NOTES = {
    FileKind.PROFILES: "how tasks are trained",
    FileKind.POLICIES: "which offers are accepted",
    FileKind.ALERTS: "when an alert is raised, and what is done about it",
}
#: After so long without a key the text is checked.
_PAUSE_MS = 700
_MAX_KEYS = 8
#: The daemon checks one text at a time.
_BUSY, _BUSY_SECONDS = 429, 0.5


@page("/config", "Configuration", place=60)
async def config_page(view: PageView) -> None:
    page_head("Configuration")
    try:
        answer = await view.get("/config", ConfigFileList)
    except DaemonTrouble as error:
        view.explain(error, "/config")
        return
    for problem in filter(None, (answer.in_force.policy_problem, answer.in_force.profile_problem)):
        Text(f"What is edited is not in force: {problem}", "trouble", "p").props('role="alert"')
    for kind, title in _KINDS.items():
        files = [one for one in answer.files if one.kind == kind]
        if files:
            with panel(title, note=f"{_NOTES[kind]}; yours are in {answer.directories[kind]}"):
                _file_table(view, title).show(files)


def _file_table(view: PageView, title: str) -> Table[ConfigFile]:
    def file_page(file: ConfigFile) -> str:
        return _href(view, file.kind, file.name)

    return Table(
        title,
        [
            Column("Name", "name", href=file_page),
            Column("", _use, classes="states"),
            Column("Whose", _whose),
            Column("Made for", _made_for, classes="wide-only nowrap"),
            Column("What it is", _description, classes="why wide-only"),
        ],
        key=attrgetter("name"),
    )


def _href(view: PageView, kind: FileKind, name: str, **query: str) -> str:
    return view.href(f"/config/{kind}/{name}", **query)


def _whose(file: ConfigFile) -> str:
    return "yours" if file.own else "shipped"


def _made_for(file: ConfigFile) -> str:
    return file.hardware or "any"


def _use(file: ConfigFile) -> tuple[str, Tone]:
    if file.problem:
        return "has mistakes", "bad"
    if file.in_force:
        return "in force", "good"
    return ("extended", "live") if file.used_by else ("not in force", "muted")


def _description(file: ConfigFile) -> tuple[str, Tone]:
    if file.problem:
        return file.problem, "bad"
    return (f"{file.used_by} extends it. " if file.used_by else "") + file.description, ""


@page("/config/{kind}/{name}", "Configuration file")
async def config_file_page(view: PageView, kind: FileKind, name: str, copy_of: str = "") -> None:
    heading, _ = page_head(name)
    path = f"/config/{quote(kind, safe='')}/{quote(copy_of or name, safe='')}"
    if problem := copy_of and _name_problem(name):
        Text(f"{name!r} is no name for a file: {problem}.", "trouble", "p").props('role="alert"')
        return
    try:
        found = await view.get(path, ConfigFileText)
    except DaemonTrouble as error:
        view.explain(error, "/config")
        Link("All files", view.href("/config"))
        return
    if copy_of and copy_of != name:
        draft = f"description: My {name}\nextends: {copy_of}\n"
        own = {"own": False, "digest": "", "draft": draft, "name": name, "in_force": False, "used_by": None}
        found = found.model_copy(update=own)
    heading.show(f"{_KINDS[kind].removesuffix('s').replace('icie', 'icy')}: {name}")
    _ConfigFilePage(view, kind, name, found, is_new=bool(copy_of))


class _ConfigFilePage:
    """One file: its text or an editor, what is wrong with it, and what an edit changes."""

    def __init__(
        self, view: PageView, kind: FileKind, name: str, found: ConfigFileText, *, is_new: bool
    ) -> None:
        self._view, self._kind, self._name, self._found = view, kind, name, found
        self._editing = found.own or is_new
        self._saved: str = found.text if found.own else ""
        self._asked = 0
        self._checking = asyncio.Lock()
        with box("row").style("margin-top:-10px"):
            self._state = Text("", "state strong")
            self._where = Text("", "small muted")
        with box("grid"):
            with box("stack w7").style("gap:16px"):
                with panel("Text"):
                    self._build_editor()
                self._build_changes()
            with box("stack w5").style("gap:16px"):
                self._build_keys()
                self._build_effective()
        self._show_state()

    @property
    def _path(self) -> str:
        return f"/config/{quote(self._kind, safe='')}/{quote(self._name, safe='')}"

    # The editor

    def _build_editor(self) -> None:
        found = self._found
        with box("row") as self._shipped:
            Text("This file is shipped and stays as it is. A file of yours that extends it changes it.")
            _button("Change it by a file of yours", self._begin_own).classes("primary")
            if self._kind is not FileKind.ALERTS:
                self._copy_name = (
                    ui.input("Name of a copy", validation=_name_problem)
                    .props("outlined dense")
                    .style("width:170px")
                )
                _button("Copy", self._copy)
        self._editor = ui.codemirror(
            (found.draft or "") if self._editing and not found.own else found.text,
            language="YAML",
            theme="basicLight",
            indent="  ",
            keymap={"Mod-s": lambda _: self._save()},
        ).classes("editor")
        arguments = (
            f"{json.dumps(f'Text of {self._name}')}, {json.dumps([key.model_dump() for key in found.keys])}"
        )
        ui.run_javascript(
            "import('/static/yaml_editor.js')"
            f".then(one => one.attach(getElement({self._editor.id}), {arguments}))"
        )
        self._editor.on("update:value", self._on_edit, throttle=_PAUSE_MS / 1000, leading_events=False)
        self._verdict = Text("checked as you write", "state muted").props('role="status"')
        self._problems: KeyedRows[TextProblem] = KeyedRows(box("rows problems"), self._make_problem)
        with box("row") as self._buttons:
            _button("Save", self._save).classes("primary")
            _button("What does it change?", self._compare)
            Text("Ctrl-Space completes keys and values.", "small muted wide-only")

    def _show_state(self) -> None:
        found = self._found
        if self._editing and not found.own:
            self._state.show("not saved yet", "warn")
        else:
            self._state.show(*_use(found))
        used = f"{found.used_by} extends it; " if found.used_by else ""
        self._where.show(f"{used}{'yours' if found.own else 'shipped'}: {found.file}")
        self._editor.set_enabled(self._editing)
        set_visible(self._shipped, not self._editing)
        set_visible(self._buttons, self._editing)
        set_visible(self._verdict, self._editing)
        set_visible(self._keys, self._editing)
        set_visible(self._changes, self._editing)

    def _begin_own(self) -> None:
        self._editing = True
        self._editor.value = self._found.draft or ""
        self._show_state()

    def _copy(self) -> None:
        if self._copy_name.validate() and self._copy_name.value:
            ui.navigate.to(_href(self._view, self._kind, self._copy_name.value, copy_of=self._name))

    async def _on_edit(self) -> None:
        if self._editing:
            await self._check(effects=False)

    async def _check(self, *, effects: bool) -> TextCheck | None:
        """Have the text checked and show the result. Return None if a later check took its place, or if it
        failed."""
        self._asked += 1
        asked = self._asked
        self._verdict.show("checking", "live")
        async with self._checking:
            checked = await self._ask_check(asked, effects)
        if checked is None or asked != self._asked or self._view.client.is_deleted:
            return None
        self._show_check(checked)
        return checked

    async def _ask_check(self, asked: int, effects: bool) -> TextCheck | None:
        """Ask the daemon, again while it checks for another page. Return None without an answer, or if it is
        not wanted any more."""
        while asked == self._asked:
            wanted = TextToCheck(text=self._editor.value, effects=effects)
            try:
                return await self._view.link.request(
                    "POST", f"{self._path}/check", TextCheck, wanted, timeout_s=SLOW_TIMEOUT_SECONDS
                )
            except DaemonTrouble as error:
                if error.status != _BUSY:
                    self._verdict.show(str(error), "warn")
                    return None
                await asyncio.sleep(_BUSY_SECONDS)
        return None

    def _show_check(self, checked: TextCheck) -> None:
        problems = checked.problems
        errors = [one for one in problems if one.level == "error"]
        warnings = [one for one in problems if one.level != "error" and one.line is not None]
        said = f"{len(errors)} mistake{'s' if len(errors) != 1 else ''}" if errors else "valid"
        self._verdict.show(said, "bad" if errors else "good")
        self._problems.show((index, one) for index, one in enumerate([*errors, *warnings][:20]))
        lines = {one.line: one for one in reversed([*errors, *warnings]) if one.line is not None}
        self._editor.decorations = [
            {"kind": "line", "line": line, "class": f"line-{one.level}"} for line, one in lines.items()
        ]
        self._editor.line_tooltips = {line: one.text for line, one in lines.items()}
        self._diff.show(checked.diff)
        self._effects.show(checked.effects)

    def _make_problem(self, _problem: TextProblem) -> Callable[[TextProblem], None]:
        line: int | None = None

        def go() -> None:
            if line is not None:
                self._editor.reveal_line(line)

        with box("row").style("align-items:baseline"):
            place = ui.button("", color=None, on_click=go).props("flat no-caps dense").classes("plain quiet")
            text = Text("")

        def show(one: TextProblem) -> None:
            nonlocal line
            line = one.line
            place.text = f"line {line}, column {one.column}" if line is not None else "elsewhere"
            key = f"{one.key}: " if one.key else ""
            text.show(f"{key}{one.text}", "bad" if one.level == "error" else "warn")

        return show

    async def _compare(self) -> None:
        self._effects.wait()
        if await self._check(effects=True) is None:
            self._effects.show(None)

    async def _save(self) -> None:
        if not self._editing:
            return
        checked = await self._check(effects=False)
        if checked is None or not checked.valid:
            return
        edited = [one.path for one in checked.edited]
        values = ", ".join(edited[:6]) + (f" and {len(edited) - 6} more" if len(edited) > 6 else "")
        question = Question(
            f"Save {self._name}.yaml?",
            "Save",
            text=f"It is in force within seconds where it is used. Edited: {values or 'no value'}. "
            "What it was is kept beside it, as .bak.",
        )
        wanted = TextToSave(text=self._editor.value, digest=self._found.digest)
        saved = await self._view.act("PUT", self._path, ConfigFileText, question, wanted)
        if saved is None:
            return
        self._found = saved
        self._saved = saved.text
        self._show_state()
        self._show_effective(saved)
        self._diff.show("")
        ui.notify(f"{self._name}.yaml is saved.", type="positive")

    # Beside and below it

    def _build_changes(self) -> None:
        with box("stack").style("gap:16px") as self._changes:
            with panel("Difference from what is saved"):
                self._diff = _Diff()
            with panel("What the edit changes"):
                self._effects = EffectsView()

    def _build_keys(self) -> None:
        with panel("Keys", note=f"{len(self._found.keys)} that this file may have") as self._keys:
            search = (
                ui.input("Search by name or meaning", on_change=lambda event: self._find_keys(event.value))
                .props("outlined dense clearable debounce=200")
                .style("width:100%")
            )
            search.props["aria-label"] = "Search the keys"
            self._found_keys: KeyedRows[ConfigKey] = KeyedRows(box("rows"), self._make_key)
            self._no_key = empty("No matching key.")
        self._find_keys("")

    def _find_keys(self, words: str | None) -> None:
        wanted = (words or "").lower().split()
        found = [
            one
            for one in self._found.keys
            if all(word in f"{one.path} {one.description}".lower() for word in wanted)
        ]
        # A key itself before those that only speak of it.
        found.sort(key=lambda one: not all(word in one.path.lower() for word in wanted))
        shown = self._found_keys.show((one.path, one) for one in found[:_MAX_KEYS])
        set_visible(self._no_key, shown == 0)

    def _make_key(self, key: ConfigKey) -> Callable[[ConfigKey], None]:
        with box("stack"):
            with box("row").style("gap:2px 10px"):
                Text(key.path, "mono strong").style("overflow-wrap:anywhere")
                default = f", default {key.default}" if key.default else ""
                Text(f"{key.value}{default}", "small muted")
                insert = _button("Insert", lambda: self._insert(key.path)).classes("quiet")
                insert.props["aria-label"] = f"Insert {key.path}"
            Text(key.description, "small")
        return lambda _: None

    async def _insert(self, path: str) -> None:
        text, line = insert_key(self._editor.value, path)
        self._editor.value = text
        self._editor.reveal_line(line)
        await self._check(effects=False)

    def _build_effective(self) -> None:
        with panel("Effective values", note="with all that it extends, each with its origin"):
            if self._found.subjects:
                self._subject = (
                    ui.select(
                        self._found.subjects,
                        value=self._found.subject,
                        label="For task and model",
                        on_change=self._change_subject,
                    )
                    .props("outlined dense options-dense")
                    .style("max-width:280px")
                )
            self._effective = Text("", "log effective", "pre").props('tabindex="0"')
            self._notes = box("stack small muted")
        self._show_effective(self._found)

    def _show_effective(self, found: ConfigFileText) -> None:
        self._effective.show(found.effective_yaml or "It cannot be loaded: see what is wrong with it.")
        self._notes.clear()
        with self._notes:
            for note in found.notes:
                Text(note, tag="p")

    async def _change_subject(self) -> None:
        name = self._name if self._found.own else self._found.file.rpartition("/")[2].removesuffix(".yaml")
        try:
            found = await self._view.get(
                f"/config/{self._kind}/{quote(name, safe='')}?subject={quote(self._subject.value)}",
                ConfigFileText,
            )
        except DaemonTrouble as error:
            self._effective.show(str(error))
            return
        self._show_effective(found)


class _Diff:
    """A unified diff, line by line."""

    def __init__(self) -> None:
        self._lines = box("log diff hidden")
        self._nothing = Text("Nothing is edited.", "empty", "p")

    def show(self, diff: str) -> None:
        lines = _without_head(diff.splitlines())
        self._lines.clear()
        with self._lines:
            for line in lines:
                Text(line or " ", {"+": "added", "-": "removed", "@": "place"}.get(line[:1], ""), "div")
        set_visible(self._lines, bool(lines))
        set_visible(self._nothing, not lines)


def _without_head(lines: Sequence[str]) -> list[str]:
    return list(lines[2:])


def _name_problem(name: str | None) -> str | None:
    fine = name and len(name) <= 64 and name[0].isalnum() and name.replace("-", "").replace("_", "").isalnum()
    return None if fine and name and name.isascii() else "letters, digits, - and _"


def _button(text: str, on_click: Callable[[], Any]) -> ui.button:
    return ui.button(text, color=None, on_click=on_click).props("flat no-caps").classes("plain")
