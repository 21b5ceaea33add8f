"""An entry made out of this repository, and whether it is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from core.domain.errors import ConfigError
from core.domain.wire import TournamentType
from miner.backends.docker.images import source_root
from miner.tournament.check.checks import check_copies, is_admitted, run_checks
from miner.tournament.check.entry import FindingState, open_entry
from miner.tournament.check.licence import NoUpstream
from miner.tournament.checkout import git_output
from miner.tournament.prepare import (
    OWN_LICENSE,
    REVIEW_PAGE,
    CannotPrepare,
    PreparedEntry,
    prepare_entry,
)
from tests.miner.tournament.entries import NOW, SMALL
from tests.miner.tournament.repositories import make_repository

pytestmark = pytest.mark.process


LICENSE, NOTICE = b"Some Licence\r\n\r\n1. Terms \n", b"Some Notice\n"
BOTH = (TournamentType.TEXT, TournamentType.IMAGE)


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stand-in for a checkout of the validators' repository."""
    folder = tmp_path_factory.mktemp("upstream")
    (folder / "LICENSE.md").write_bytes(LICENSE)
    (folder / "NOTICE").write_bytes(NOTICE)
    return folder


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory, upstream: Path) -> PreparedEntry:
    """Out of this checkout, with a profile of the operator's own that extends a shipped one of its name."""
    folder = tmp_path_factory.mktemp("prepared")
    own = folder / "h100x4.yaml"
    own.write_text("# Mine.\nextends: h100x4\ntargets:\n  lora_r: 48\n")
    return prepare_entry(source_root(), folder / "entry", kinds=BOTH, profile=str(own), upstream=upstream)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    make_repository(tmp_path / "small", SMALL)
    return tmp_path / "small"


def test_a_prepared_entry_breaks_no_rule_of_admission(
    entry: PreparedEntry, upstream: Path, tmp_path: Path
) -> None:
    opened = open_entry(str(entry.directory), tmp_path, upstream=upstream, offline=True, now=NOW)
    findings = {finding.number: finding for finding in run_checks(opened)}
    assert is_admitted(list(findings.values())), findings
    passed = [number for number, finding in findings.items() if finding.state is FindingState.PASSED]
    assert passed == [2, 3, 7, 8, 9, 13]  # the settings are not given here; the rest depends on others


def test_it_is_one_clean_commit_with_only_what_a_training_needs(entry: PreparedEntry) -> None:
    assert git_output(entry.directory, "rev-list", "--all") == entry.commit
    assert git_output(entry.directory, "status", "--porcelain") == ""
    assert {path.name for path in entry.directory.iterdir()} == {
        *(
            ".git",
            ".gitignore",
            ".dockerignore",
            "README.md",
            REVIEW_PAGE,
            "LICENSE.md",
            "NOTICE",
            OWN_LICENSE,
        ),
        *("core", "trainer", "configs", "dockerfiles", "requirements"),
    }
    assert {path.name for path in (entry.directory / "configs").iterdir()} == {"base", "profiles"}
    assert len(list((entry.directory / "dockerfiles").iterdir())) == 3


def test_a_page_tells_the_reviewer_what_each_download_is_for(entry: PreparedEntry) -> None:
    page = (entry.directory / REVIEW_PAGE).read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    assert (len(rows), entry.unexplained) == (entry.explained, ())
    assert all(why.strip(" |") != "-" for _, _, why in rows), page
    for what, why in (
        ("axolotlai/axolotl:", "kernels"),
        ("comfyanonymous/ComfyUI", "the evaluator's commit"),
        ("t5xxl_fp16.safetensors", "checked by digest"),
        ("runs a text by exec", "reward functions"),
    ):
        assert any(what in row[1] and why in row[2] for row in rows), what


def test_a_download_without_a_word_is_named(tmp_path: Path) -> None:
    dockerfile = 'FROM debian\nRUN curl -O https://host.io/w.safetensors\nENTRYPOINT ["python"]\n'
    make_repository(
        tmp_path / "small", {**SMALL, "dockerfiles/standalone-text-trainer.dockerfile": dockerfile}
    )
    made = prepare_entry(tmp_path / "small", tmp_path / "entry", kinds=[TournamentType.TEXT])
    assert made.unexplained == (
        "dockerfiles/standalone-text-trainer.dockerfile:2 fetches: curl -O https://host.io/w.safetensors",
    )


def test_licences_are_copied_byte_for_byte_and_it_says_whose_work_it_is(entry: PreparedEntry) -> None:
    assert (entry.directory / "LICENSE.md").read_bytes() == LICENSE
    assert (entry.directory / "NOTICE").read_bytes() == NOTICE
    assert (entry.directory / OWN_LICENSE).read_text().startswith("MIT License")
    readme = (entry.directory / "README.md").read_text()
    assert f"a copy of god-miner at commit `{entry.made_from}`" in readme
    assert "Gradients" in readme


def test_its_trainer_is_whole_and_trains_by_the_chosen_profile(entry: PreparedEntry) -> None:
    """The checks that end a build of the Dockerfiles, and what the planner reads in the container."""
    assert entry.profile == "h100x4-own"
    for path in (entry.directory / "dockerfiles").iterdir():
        assert 'ENV GOD_MINER_PROFILE=h100x4-own\nENTRYPOINT ["python", "-m"' in path.read_text()
    code = """
import json, os
import trainer.image, trainer.text, trainer.runner.check_engines, trainer.runner.planning as planning
import core
from core.profile.resolve import load_profile
def values(name):
    found = load_profile(name)
    return [layer.content.model_dump(mode="json", exclude_unset=True) for layer in found.layers]
print(json.dumps({
    "core": core.__file__,
    "chosen": values(os.environ[planning.PROFILE_VARIABLE]),
    "others": [len(values(name)) for name in (planning.PROFILE, planning.PROFILE_CPU)],
}))
"""
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(entry.directory),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONSAFEPATH": "1",
        "GOD_MINER_PROFILE": entry.profile,
    }
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout)
    assert Path(said["core"]).is_relative_to(entry.directory)
    assert said["chosen"][-1] == {"extends": "h100x4", "targets": {"lora_r": 48}}
    assert len(said["chosen"]) == 3  # base, h100x4 as shipped, the operator's own
    assert said["others"] == [2, 2]


def test_two_who_prepare_the_same_are_copies_of_each_other(
    small: Path, upstream: Path, tmp_path: Path
) -> None:
    for name in ("mine", "theirs"):
        prepare_entry(small, tmp_path / name, kinds=[TournamentType.TEXT], upstream=upstream)
    (tmp_path / "clones").mkdir()
    others = [str(tmp_path / "theirs")]
    opened = open_entry(str(tmp_path / "mine"), tmp_path / "clones", others=others, offline=True, now=NOW)
    assert check_copies(opened).state is FindingState.FAILED


@pytest.mark.parametrize("kind", [TournamentType.TEXT, TournamentType.ENVIRONMENT])
def test_the_usual_profile_of_an_entry_for_texts_needs_no_variable(
    small: Path, tmp_path: Path, kind: TournamentType
) -> None:
    made = prepare_entry(small, tmp_path / "entry", kinds=[kind])
    assert (made.profile, made.licensed) == ("steady", False)
    files = git_output(made.directory, "ls-files").split()
    assert files == sorted(
        {*SMALL, OWN_LICENSE, "README.md", REVIEW_PAGE, ".gitignore", ".dockerignore"}
        - {"LICENSE", "miner/c.py", "tests/test_a.py", "configs/policies/base.yaml"}
    )
    assert "GOD_MINER_PROFILE" not in (made.directory / files[-3]).read_text()
    assert "tournaments refuse the entry" in (made.directory / "README.md").read_text()


def test_profiles_by_way_of_others_get_names_of_their_own(small: Path, tmp_path: Path) -> None:
    own = tmp_path / "profiles"
    own.mkdir()
    (own / "base.yaml").write_text("extends: base\ntargets: {lora_r: 8}\n")
    (own / "mine.yaml").write_text("extends: ./base.yaml\ntargets: {lora_r: 16}\n")
    made = prepare_entry(
        small, tmp_path / "entry", kinds=[TournamentType.TEXT], profile="mine", profile_directories=[own]
    )
    assert made.layers == ("base", "base-own", "mine")
    place = made.directory / "configs/profiles"
    assert (place / "base.yaml").read_text() == SMALL["configs/profiles/base.yaml"]
    assert (place / "base-own.yaml").read_text() == (own / "base.yaml").read_text()
    assert (place / "mine.yaml").read_text() == "extends: base-own\ntargets: {lora_r: 16}\n"


def test_what_cannot_be_made_leaves_nothing(small: Path, upstream: Path, tmp_path: Path) -> None:
    place = tmp_path / "entry"
    with pytest.raises(CannotPrepare, match="no dockerfiles/standalone-image-trainer"):
        prepare_entry(small, place, kinds=[TournamentType.IMAGE])
    with pytest.raises(ConfigError, match="no such profile"):
        prepare_entry(small, place, kinds=[TournamentType.TEXT], profile="nothing")
    with pytest.raises(NoUpstream):
        prepare_entry(small, place, kinds=[TournamentType.TEXT], upstream=small)
    with pytest.raises(CannotPrepare, match="made from a checkout"):
        prepare_entry(upstream, place, kinds=[TournamentType.TEXT])
    own = tmp_path / "own"
    own.mkdir()
    (own / "base.yaml").write_text("description: Another\n")
    (own / "inline.yaml").write_text("{extends: base}\n")
    with pytest.raises(CannotPrepare, match="on a line of its own"):
        prepare_entry(small, place, kinds=[TournamentType.TEXT], profile=str(own / "inline.yaml"))
    assert {path.name for path in tmp_path.iterdir()} == {"small", "own"}
    place.mkdir()
    (place / "mine").write_text("mine")
    with pytest.raises(CannotPrepare, match="not an empty directory"):
        prepare_entry(small, place, kinds=[TournamentType.TEXT])
    assert [path.name for path in place.iterdir()] == ["mine"]


def test_what_is_not_committed_is_named_and_not_in_the_entry(small: Path, tmp_path: Path) -> None:
    (small / "trainer/b.py").write_text("y = 2\n")
    (small / "trainer/new name.py").write_text("z = 2\n")
    made = prepare_entry(small, tmp_path / "entry", kinds=(TournamentType.TEXT,))
    assert made.uncommitted == ("trainer/b.py", "trainer/new name.py")
    assert (made.directory / "trainer/b.py").read_text() == SMALL["trainer/b.py"]
    assert made.made_from == git_output(small, "rev-parse", "HEAD")
