"""The documents of the settings are written from the declarations and have not drifted from them."""

import io
import re
from pathlib import Path

from dotenv import dotenv_values

from miner.settings import Settings, load_settings
from miner.settings.reference import env_example, setting_docs, settings_page

ROOT = Path(__file__).parents[3]


def test_the_committed_documents_are_what_the_declarations_say() -> None:
    assert (ROOT / ".env.example").read_text() == env_example(), "run: make docs"
    assert (ROOT / "docs/settings.md").read_text() == settings_page(), "run: make docs"


def test_every_setting_is_in_a_section_and_has_a_meaning() -> None:
    entries = setting_docs()
    assert [entry.name for entry in entries] == list(Settings.model_fields)
    assert [entry.name for entry in entries if len(entry.meaning) <= 10 or entry.meaning[-1] != "."] == []


def test_the_example_changes_nothing_and_with_every_line_taken_in_gives_the_defaults(tmp_path: Path) -> None:
    assert dotenv_values(stream=io.StringIO(env_example())) == {}
    file = tmp_path / ".env"
    file.write_text(re.sub(r"^#(?=[A-Z_]+=)", "", env_example(), flags=re.MULTILINE))
    settings = load_settings(env={}, env_file=file)
    assert settings.model_dump() == load_settings(env={}, env_file=None).model_dump()
    assert settings.warnings == ()
    assert settings.source_of("netuid") == ".env"


def test_no_table_row_is_broken_by_what_stands_in_it() -> None:
    rows = [line for line in settings_page().splitlines() if line.startswith("| `")]
    assert len(rows) == len(Settings.model_fields)
    assert all(row.replace("\\|", "").count("|") == 5 for row in rows)
