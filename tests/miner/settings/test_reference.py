"""The documents of the settings are written from the declarations and have not drifted from them."""

import io
import re
from pathlib import Path

from dotenv import dotenv_values

from miner.settings import Settings, load_settings
from miner.settings.reference import entries, env_example, settings_page
from tests.doubles.each import each

ROOT = Path(__file__).parents[3]


def test_the_committed_env_example_is_what_the_declarations_say() -> None:
    assert (ROOT / ".env.example").read_text() == env_example(), "run: god-miner config env > .env.example"


def test_the_committed_page_is_what_the_declarations_say() -> None:
    written = (ROOT / "docs/settings.md").read_text()
    assert written == settings_page(), "run: god-miner config docs > docs/settings.md"


@each("name", list(Settings.model_fields))
def test_every_setting_says_what_it_means_and_stands_in_both_documents(name: str) -> None:
    (entry,) = [entry for entry in entries() if entry.name == name]
    assert entry.section
    assert len(entry.meaning) > 10
    assert entry.meaning.endswith(".")
    assert f"\n#{name.upper()}=" in env_example()
    assert f"| `{name.upper()}` |" in settings_page()


def test_the_example_changes_nothing_as_it_is() -> None:
    assert dotenv_values(stream=io.StringIO(env_example())) == {}


def test_the_example_with_every_line_taken_in_gives_the_defaults(tmp_path: Path) -> None:
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
