"""FLEET_FILE: read, checked, followed, and laid over what is seen."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ConfigError
from core.hardware import Link, parse_gpus
from miner.fleet.fixed import FixedSource
from miner.fleet.fleet_file import FLEET, FileSource, FleetTerms, Host, follow
from miner.fleet.looks import Look
from tests.doubles.each import each

DOCS = Path(__file__).parents[3] / "docs" / "fleet.md"


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    # Two edits within one tick of the file system's clock would look like one.
    later = path.stat().st_mtime_ns + write.edits * 10_000_000  # type: ignore[attr-defined]
    write.edits += 1  # type: ignore[attr-defined]
    os.utime(path, ns=(later, later))
    return path


write.edits = 1  # type: ignore[attr-defined]


async def seen(path: Path, gpus: str = "4xH100") -> Look:
    return await FileSource(follow(path), FixedSource(parse_gpus(gpus), "GPUS")).look()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "fleet.yaml"


async def test_an_empty_file_changes_nothing(file: Path) -> None:
    assert await seen(write(file, "")) == await FixedSource(parse_gpus("4xH100"), "GPUS").look()


async def test_cards_that_can_not_be_looked_at_are_written_down(file: Path) -> None:
    look = await seen(write(file, "gpus: 2xA100\nids: [GPU-a, GPU-b]"))
    assert [card.id for card in look.cards] == ["GPU-a", "GPU-b"]
    assert look.cards[0].kind.name == "A100-SXM-80GB"
    assert look.cards[0].linked == {"GPU-b"}
    assert look.source == "FLEET_FILE, 2xA100"


async def test_cards_are_excluded_by_index_or_id_with_a_reason(file: Path) -> None:
    look = await seen(write(file, "gpus: 3xH100\nids: [a, b, c]\nexclude: {1: the fan, c: rented out}"))
    assert [card.excluded for card in look.cards] == [None, "the fan", "rented out"]


@pytest.mark.parametrize(
    ("links", "linked", "kind"),
    [
        ("none", [[], [], [], []], Link.PCIE),
        ("all", [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]], Link.NVLINK),
        ("[[0, 3], [1, 2]]", [[3], [2], [1], [0]], Link.NVLINK_PAIR),
        ("[[0, 1, 2, 9]]", [[1, 2], [0, 2], [0, 1], []], Link.NVLINK),
    ],
)
async def test_links_are_as_the_operator_knows_them(
    file: Path, links: str, linked: list[list[int]], kind: Link
) -> None:
    look = await seen(write(file, f"links: {links}"))
    assert [sorted(map(int, card.linked)) for card in look.cards] == linked
    assert look.cards[0].kind.link is kind


def test_what_surrounds_the_cards_is_in_the_planners_words() -> None:
    terms = FLEET.parse("host: {cpu_cores: 8, memory: 1TB, download: 100MB, upload: 20MB, disk: 2GB}", "x")
    assert terms.host.facts() == {
        "cpu_cores": 8,
        "memory_bytes": 10**12,
        "download_rate": 10**8,
        "upload_rate": 2 * 10**7,
        "disk_rate": 2 * 10**9,
    }


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("gpu: 4xH100", r"fleet\.yaml:1: gpu: no such key; nearest is gpus"),
        ("nvlink: all", "here it is called links"),
        ("gpus: 4xPotato", "name no known kind|COUNTxKIND"),
        ("ids: [a]", "write gpus as well"),
        ("gpus: 2xH100\nids: [a, a]", "the same id is written twice"),
        ("extends: other", "stands alone"),
        ("links: some", "all"),
        ("host: {memory: 64}", "written with its unit"),
        ("- a\n- b", "a fleet file is a mapping"),
        ("gpus: [", "not YAML"),
    ],
)
def test_a_wrong_file_is_told_with_its_line(file: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        follow(write(file, text))


def test_a_file_that_is_not_there_is_told(file: Path) -> None:
    with pytest.raises(ConfigError):
        follow(file)


async def test_an_edit_counts_at_the_next_look_and_a_bad_one_keeps_the_last(file: Path) -> None:
    problems: list[ConfigError] = []
    source = FileSource(
        follow(write(file, "exclude: {0: x}"), problems.append), FixedSource(parse_gpus("2xH100"), "GPUS")
    )
    assert [card.excluded for card in (await source.look()).cards] == ["x", None]
    write(file, "exclude: {1: y}")
    assert [card.excluded for card in (await source.look()).cards] == [None, "y"]
    write(file, "exclude: nonsense")
    assert [card.excluded for card in (await source.look()).cards] == [None, "y"]
    file.unlink()
    assert [card.excluded for card in (await source.look()).cards] == [None, "y"]
    assert len(problems) == 2


@given(st.text(max_size=200))
def test_any_text_is_terms_or_told(text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(FLEET.parse(text, "fleet.yaml"), FleetTerms)


@each("name", [*sorted(set(FleetTerms.model_fields) - {"extends"}), *Host.model_fields])
def test_every_key_is_documented(name: str) -> None:
    assert f"`{name}`" in DOCS.read_text()
