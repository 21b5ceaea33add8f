"""The log of a job: its end as it grows, and a search through all of it."""

from __future__ import annotations

from nicegui import ui

from miner.api.jobs import LogChunk
from miner.dashboard.daemons import DaemonTrouble
from miner.dashboard.layout import PageView
from miner.dashboard.parts import Text, box, panel, set_visible

#: Lines that are followed, and at most found.
TAIL_LINES, MAX_FOUND = 200, 300
#: A search reads so many pieces of a megabyte at most.
MAX_PIECES = 32
PIECE_BYTES = 1 << 20


class JobLog:
    def __init__(self, view: PageView, path: str) -> None:
        self._view, self._path = view, path
        with panel("Log") as self._panel:
            with box("row"):
                self._search = ui.input("Search the whole log").props("outlined dense clearable")
                self._search.style("width:280px").on("keydown.enter", self._find)
                self._search.on("clear", self._show_tail)
                ui.button("Search", color=None, on_click=self._find).props("flat no-caps").classes("plain")
                self._back = ui.button("Back to the end", color=None, on_click=self._show_tail)
                self._back.props("flat no-caps").classes("plain quiet hidden")
                self._about = Text("", "small muted")
            # The last line stays in view: the box is filled from its end.
            with box("log tail") as self._tail:
                self._text = Text("", tag="pre")
            self._tail.props('tabindex="0" role="log" aria-label="End of the log" aria-live="off"')
            with box("log hidden") as self._found:
                self._matches = Text("", tag="pre")
            self._found.props('tabindex="0" aria-label="Lines that match"')

    def start(self) -> None:
        with self._panel:
            self._view.live(f"{self._path}/log?tail={TAIL_LINES}", LogChunk, self._show, every=2.0)

    def _show(self, answer: LogChunk) -> None:
        self._text.show(answer.text or "(nothing is written yet)")
        if "hidden" in self._found.classes:
            ended = ", which has ended" if answer.ended else ""
            self._about.show(f"the last {TAIL_LINES} lines of attempt {answer.attempt}{ended}")

    def _show_tail(self) -> None:
        self._search.value = ""
        set_visible(self._tail, True)
        set_visible(self._found, False)
        set_visible(self._back, False)

    async def _find(self) -> None:
        wanted = str(self._search.value or "").strip()
        if not wanted:
            self._show_tail()
            return
        try:
            found, lines, whole = await self._matching(wanted.lower())
        except DaemonTrouble as error:
            self._about.show(str(error))
            return
        self._matches.show("\n".join(found) or "(no line has it)")
        most = f", the last {MAX_FOUND} are shown" if lines > MAX_FOUND else ""
        self._about.show(
            f"{lines} lines have it{most}" + ("" if whole else "; the log is longer than is searched")
        )
        set_visible(self._tail, False)
        set_visible(self._found, True)
        set_visible(self._back, True)

    async def _matching(self, wanted: str) -> tuple[list[str], int, bool]:
        """The last lines with this text, how many there are, and whether all of the log was read."""
        found: list[str] = []
        count, number, rest, start = 0, 0, "", ""
        for _ in range(MAX_PIECES):
            piece = await self._view.get(f"{self._path}/log?from={start}&limit={PIECE_BYTES}", LogChunk)
            lines = (rest + piece.text).split("\n")
            rest = lines.pop()
            for line in lines:
                number += 1
                if wanted in line.lower():
                    count += 1
                    found.append(f"{number:>6}  {line}")
            del found[:-MAX_FOUND]
            if piece.next == start or not piece.text:
                if wanted in rest.lower() and rest:
                    count += 1
                    found.append(f"{number + 1:>6}  {rest}")
                return found, count, True
            start = piece.next
        return found, count, False
