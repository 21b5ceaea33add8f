"""Slurm's commands: their end, and what they print."""

from __future__ import annotations

from pathlib import Path

import pytest

from miner.backends.slurm.commands import SlurmCommands, SlurmRefused, SlurmUnreachable, records, seconds

pytestmark = pytest.mark.process


LINE = (
    "JobId=7 JobName=gm-1 UserId=root(0) JobState=RUNNING Reason=None ExitCode=0:0 StartTime=1700000000 "
    "NodeList=n1 ReqB:S:C:T=0:0:*:* JOB_GRES=gpu:h100:2   Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:h100:2(IDX:0-1) "
    "Comment=(null) WorkDir=/a folder/b Power= \n"
)


def commands(folder: Path, program: str, text: str) -> SlurmCommands:
    path = folder / program
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return SlurmCommands(str(folder))


def test_a_record_has_its_fields_also_those_with_spaces() -> None:
    (record,) = records(LINE)
    assert record["JobState"] == "RUNNING"
    assert record["ReqB:S:C:T"] == "0:0:*:*"
    assert record["GRES"] == "gpu:h100:2(IDX:0-1)"
    assert record["WorkDir"] == "/a folder/b"
    assert record["Power"] == ""
    assert not list(records("No jobs in the system\n"))


def test_times_are_seconds_or_unknown() -> None:
    assert seconds("1700000000") == 1_700_000_000
    assert [seconds(text) for text in ("Unknown", "N/A", "", None)] == [None] * 4


async def test_what_a_command_prints_is_returned_and_nothing_of_ours_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    slurm = commands(tmp_path, "squeue", 'cat; echo "$1 $SLURM_TIME_FORMAT $HF_TOKEN."')
    assert await slurm.run("squeue", "--me", script="in ") == "in --me %s .\n"


async def test_a_refusal_and_no_answer_are_told_apart(tmp_path: Path) -> None:
    refused = commands(tmp_path, "sbatch", "echo 'sbatch: error: invalid partition' >&2; exit 1")
    with pytest.raises(SlurmRefused, match="invalid partition"):
        await refused.run("sbatch")
    away = commands(tmp_path, "scontrol", "echo 'Unable to contact slurm controller (connect)' >&2; exit 1")
    with pytest.raises(SlurmUnreachable, match="Unable to contact"):
        await away.run("scontrol")
    killed = commands(tmp_path, "sbatch", "echo 'sbatch: starting' >&2; kill -KILL $$")
    with pytest.raises(SlurmUnreachable, match="ended by signal 9"):
        await killed.run("sbatch")
    hanging = commands(tmp_path, "sinfo", "exec sleep 100")
    with pytest.raises(SlurmUnreachable, match="not answered"):
        await hanging.run("sinfo", limit_s=0.2)
    with pytest.raises(SlurmUnreachable, match="there is no sacct in"):
        await hanging.run("sacct")
