"""Dockerfiles as the classic builder reads them, each rule with a file that breaks it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from miner.backends.docker.images import source_root
from miner.tournament.check.dockerfiles import (
    MOST_BYTES,
    check_dockerfiles,
    context_files,
    first_dockerfile,
    json_list,
    read_dockerfile,
)
from tests.miner.tournament.entries import open_small

DIGEST = "sha256:" + "0" * 64
GOOD = f"""\
# A comment.
ARG BASE=engine:1@{DIGEST}
ARG TOOLS=tools:1@{DIGEST}
FROM ${{TOOLS}} AS tools
FROM ${{BASE}}
ARG PACKAGES="one two"
ARG TOOLS
COPY --from=tools /tool /usr/local/bin/tool
COPY trainer /app/trainer
RUN for name in ${{PACKAGES}}; do \\
        # A comment between continued lines.

        echo "$name" <<< "$TOOLS"; \\
    done
ENTRYPOINT ["python", "-m", "trainer.text"]
"""
CONTEXT = ["trainer/text.py", "core/a.py", "pyproject.toml"]


def test_a_dockerfile_for_the_classic_builder_has_no_problem() -> None:
    found = read_dockerfile(GOOD, CONTEXT)
    assert found.problems == []
    assert found.notes == []


@pytest.mark.parametrize(
    ("good", "bad", "problem"),
    [
        (f"ARG BASE=engine:1@{DIGEST}", "ARG BASE", "ARG BASE before FROM has no default"),
        ("FROM ${BASE}", "FROM ${BAZE}", "FROM ${BAZE} has an argument without a value"),
        (
            'ARG PACKAGES="one two"',
            "ARG PACKAGES",
            "PACKAGES is used and has no value: validators give no arguments",
        ),
        (
            'ARG PACKAGES="one two"',
            "ARG PACKAGES=$TARGETARCH\nARG TARGETARCH\nRUN echo $TARGETARCH",
            "BuildKit",
        ),
        ("RUN for", "RUN --mount=type=cache,target=/root/.cache for", "RUN --mount needs BuildKit"),
        ("RUN for", "RUN --network=none for", "RUN --network needs BuildKit"),
        ("RUN for", "RUN cat <<EOF\nx\nEOF\nRUN for", "a here-document needs BuildKit"),
        ("RUN for", "RUN cat <<'EOF'\nx\nEOF\nRUN for", "a here-document needs BuildKit"),
        ("COPY trainer", "COPY --chmod=755 trainer", "COPY --chmod needs BuildKit"),
        ("COPY trainer", "COPY --link trainer", "COPY --link needs BuildKit"),
        ("COPY --from=tools", "COPY --from=tolls", "--from=tolls: no stage before this one"),
        ("COPY --from=tools", "COPY --from=2", "--from=2: no stage before this one"),
        ("COPY trainer", "COPY trainers", "trainers is not there for the build"),
        ("COPY trainer", "COPY ../trainer", "../trainer is not there"),
        ("COPY trainer /app/trainer", "COPY trainer core /app", "several sources need a place"),
        ("COPY trainer /app/trainer", "COPY trainer", "COPY needs a source and a place"),
        ('ENTRYPOINT ["python", "-m", "trainer.text"]', "CMD python", "it has no ENTRYPOINT"),
        ('["python", "-m", "trainer.text"]', "python -m trainer.text", "ENTRYPOINT is a shell's line"),
        ('["python", "-m", "trainer.text"]', "['python', '-m', 'a']", "ENTRYPOINT is a shell's line"),
        ('["python", "-m", "trainer.text"]', '["sh", "-c", "python a.py"]', "drops the task's arguments"),
        ('["python", "-m", "trainer.text"]', "[]", "ENTRYPOINT is an empty list"),
        ("# A comment.", "RUN true", "RUN stands before the first FROM"),
        ("COPY trainer", "COPPY trainer", "COPPY is not an instruction"),
        ("FROM ${BASE}", "FROM ${BASE} as", "FROM takes an image"),
        ("ARG TOOLS\n", "ENV HF_TOKEN=0123456789\n", "ENV HF_TOKEN is a secret"),
        ("ARG TOOLS\n", "ARG API_KEY=0123456789\n", "ARG API_KEY is a secret"),
        ("ARG TOOLS\n", "RUN login hf_" + "a" * 34 + "\n", "what looks like a secret (hf_a…)"),
    ],
)
def test_each_mistake_is_named(good: str, bad: str, problem: str) -> None:
    assert good in GOOD
    found = read_dockerfile(GOOD.replace(good, bad, 1), CONTEXT)
    assert any(problem in line for line in found.problems), found.problems
    assert all("aaaa" not in line for line in found.problems)


@pytest.mark.parametrize(
    ("good", "other", "note"),
    [
        (f"engine:1@{DIGEST}", "engine:1", "engine:1 has no digest"),
        ("# A comment.", "# syntax=docker/dockerfile:1", "only a comment to the classic builder"),
        ("ARG TOOLS\n", "ARG HF_TOKEN\n", "asks for a secret"),
        ("COPY --from=tools", "COPY --from=tools:2", "files are copied from the image tools:2"),
        ("ARG TOOLS\n", "RUN hf download org/model\n", "seems to fetch a model"),
    ],
)
def test_what_need_not_fail_is_only_noted(good: str, other: str, note: str) -> None:
    found = read_dockerfile(GOOD.replace(good, other, 1), CONTEXT)
    assert found.problems == []
    assert any(note in line for line in found.notes), found.notes


@pytest.mark.parametrize(
    "line",
    [
        "COPY trainer/*.py core/a.* /app/",
        'COPY ["trainer", "/app/trainer"]',
        "COPY . /app",
        "ADD https://example.com/file /app/",
        "COPY --chown=1:1 ./trainer/ /app/",
        'ARG EMPTY\nRUN echo "${EMPTY:-nothing}"',
        "ARG http_proxy\nRUN echo $http_proxy",
        "ARG LATER=\nRUN echo $LATER",
        "RUN echo 'a <<b' \"c <<d\"",
        "ARG LATER\nENV LATER=1\nRUN echo $LATER",
        'ENTRYPOINT ["sh", "-c", "exec python a.py \\"$@\\"", "sh"]',
    ],
)
def test_what_the_classic_builder_takes_is_no_problem(line: str) -> None:
    assert read_dockerfile(GOOD.replace("COPY trainer /app/trainer", line), CONTEXT).problems == []


def test_another_escape_letter_is_followed() -> None:
    text = f'# escape=`\nFROM a@{DIGEST}\nRUN one `\n  two\nENTRYPOINT ["a"]\n'
    assert read_dockerfile(text, []).problems == []


def test_a_file_without_a_stage_is_none() -> None:
    assert read_dockerfile("ARG A=1\n", []).problems == ["it has no FROM"]


def test_what_dockerignore_leaves_out_does_not_reach_the_build(tmp_path: Path) -> None:
    (tmp_path / ".dockerignore").write_text(
        "# Comment\ntests\n/docs/\n**/*.log\n*.md\n!README.md\nconfigs/*\n!configs/base\n"
    )
    files = [
        *("tests/a.py", "docs/b.txt", "trainer/x.log", "a.log", "NOTES.md", "README.md"),
        *("configs/base/a.yaml", "configs/x.yaml", "sub/NOTES.md", "trainer/a.py"),
    ]
    assert context_files(tmp_path, files) == [
        *("README.md", "configs/base/a.yaml", "sub/NOTES.md", "trainer/a.py"),
    ]
    found = read_dockerfile(GOOD.replace("COPY trainer", "COPY tests"), context_files(tmp_path, files))
    assert "tests is not there for the build" in found.problems[0]


def test_the_first_directory_that_has_it_counts(tmp_path: Path) -> None:
    for place in ("dockerfiles", "ops/docker"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "a.dockerfile").write_text("")
    assert first_dockerfile(tmp_path, "a.dockerfile") == "ops/docker/a.dockerfile"
    assert first_dockerfile(tmp_path, "b.dockerfile") is None


def test_our_own_have_no_problem() -> None:
    root = source_root()
    context = context_files(root, [str(path.relative_to(root)) for path in root.glob("[a-z]*/*")])
    for path in root.glob("dockerfiles/standalone-*.dockerfile"):
        assert read_dockerfile(path.read_text("utf-8"), context).problems == []


def test_a_list_of_texts_is_one() -> None:
    assert json_list('["a", "b"]') == ["a", "b"]
    assert json_list("['a']") is None
    assert json_list("[1]") is None


@pytest.mark.parametrize("piece", ['\\"', '"\\\n', "${A", "'", "--link ", "<< "])
def test_no_dockerfile_keeps_its_reader_busy(piece: str) -> None:
    """A Dockerfile of the size that is read: each of these took minutes, or hours."""
    text = "FROM a\nCOPY " + (piece * MOST_BYTES)[:MOST_BYTES] + "\n"
    began = time.process_time()
    assert read_dockerfile(text, []).problems
    assert time.process_time() - began < 20


@pytest.mark.process
def test_a_dockerfile_too_large_to_be_written_by_hand_is_refused(tmp_path: Path) -> None:
    name = "dockerfiles/standalone-text-trainer.dockerfile"
    entry = open_small(tmp_path, {name: GOOD + "# \n" * MOST_BYTES})
    found = check_dockerfiles(entry)
    assert any("larger than 256 kB" in line for line in (found.text, *found.notes))
