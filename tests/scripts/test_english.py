"""The English that `make english` refuses, and the English that it lets pass."""

from __future__ import annotations

from pathlib import Path

from scripts import english
from tests.doubles.each import each


@each(
    ("text", "lines"),
    [
        ('"""Delete one batch of old records; return the count."""', []),
        ('"""What it deletes."""', [1]),
        ('def f():\n    """Whether it is there."""', [2]),
        ("# an attempt that begins anew\n", [1]),
        ('raise ValueError(f"{path} is no file")', [1]),
        ('TEXT = """first\nis none of ours\n"""', [2]),
    ],
)
def test_python_is_searched_for_fragments_and_translated_forms(
    text: str, lines: list[int], tmp_path: Path
) -> None:
    file = tmp_path / "module.py"
    file.write_text(text)
    assert [finding.line for finding in english.findings([tmp_path])] == lines


def test_pages_are_searched_for_forms_only(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("What it is.\n\nThat says nothing of the GPU.\n")
    assert [finding.line for finding in english.findings([tmp_path])] == [3]
