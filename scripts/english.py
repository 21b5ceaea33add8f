"""Check the English of docstrings, comments, messages and pages: python scripts/english.py [PATH ...].

A docstring begins with an imperative or a noun. A list of forms that read as translated is refused wherever
they stand. Exits with 1 if anything is found; each line says where and what.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PATHS = (
    "core",
    "miner",
    "trainer",
    "scripts",
    "benchmarks",
    "docs",
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
)
#: First words that make a docstring a fragment of a sentence.
FRAGMENT = re.compile(r"(What|Whether|How|Of|Where|Which|Who|So|As|If|For|None)\b")
#: Forms that a native speaker would read twice, and better ones.
FORMS = {
    r"\banew\b": "again",
    r"\bof no help\b": "does not help",
    r"\bwhat came of it\b": "the result",
    r"\bwhatever came of it\b": "whatever the result",
    r"\bis no (?:file|folder|directory|number|game|model|integer|list|text)\b": "is not a …",
    r"\bnone of ours\b": "not ours",
    r"\bsays nothing of\b": "does not show",
    r"\bcome to nothing\b": "fail",
    r"; None: ": "…, or None if …",
    r"\bin the way of anything else\b": "blocking anything else",
}
FORM = re.compile("|".join(f"({form})" for form in FORMS), re.IGNORECASE)
SUGGESTIONS = list(FORMS.values())


class Finding(NamedTuple):
    file: Path
    line: int
    text: str


def refused_forms(file: Path, line: int, text: str) -> Iterator[Finding]:
    for match in FORM.finditer(text):
        better = SUGGESTIONS[(match.lastindex or 1) - 1]
        at = line + text.count("\n", 0, match.start())
        yield Finding(file, at, f"{match[0].strip()!r} reads as translated: {better}")


def in_python(file: Path) -> Iterator[Finding]:
    text = file.read_text("utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring and FRAGMENT.match(docstring):
                first = docstring.split("\n")[0]
                yield Finding(
                    file, node.body[0].lineno, f"a docstring begins with an imperative or a noun: {first}"
                )
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from refused_forms(file, node.lineno, node.value)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield from refused_forms(file, token.start[0], token.string)


def findings(paths: list[Path]) -> Iterator[Finding]:
    for path in paths:
        files = (
            [file for kind in ("*.py", "*.md") for file in sorted(path.rglob(kind))]
            if path.is_dir()
            else [path]
        )
        for file in files:
            if file == Path(__file__).resolve():
                continue  # it lists the forms
            if file.suffix == ".py":
                yield from in_python(file)
            else:
                yield from refused_forms(file, 1, file.read_text("utf-8"))


def main(arguments: list[str]) -> int:
    found = list(findings([Path(given).resolve() for given in arguments] or [ROOT / name for name in PATHS]))
    for file, line, text in found:
        print(f"{file.relative_to(ROOT)}:{line}: {text}")
    print(f"{len(found)} findings" if found else "English: all good")
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
