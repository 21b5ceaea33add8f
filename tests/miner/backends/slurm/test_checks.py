"""What doctor makes of the cluster's own words."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from miner.backends.slurm import checks
from miner.backends.slurm.checks import Cluster, explained, way_to_the_controller
from miner.backends.slurm.commands import SlurmCommands
from miner.settings import Settings, load_settings
from miner.support.findings import Finding, FindingStatus
from tests.doubles.each import each

OK, WARN, FAIL, SKIP = FindingStatus.OK, FindingStatus.WARN, FindingStatus.FAIL, FindingStatus.SKIP
PARTITION = {
    "PartitionName": "train",
    "Default": "YES",
    "State": "UP",
    "MaxTime": "UNLIMITED",
    "AllowAccounts": "ALL",
    "AllowQos": "ALL",
    "AllowGroups": "ALL",
    "Nodes": "n[1-2]",
    "TotalNodes": "2",
    "PreemptMode": "OFF",
}
NODE = {"NodeName": "n1", "Partitions": "train", "State": "IDLE", "Gres": "gpu:h100:4(S:0-1)"}
CONFIG = {
    "ClusterName": "big",
    "SLURM_VERSION": "23.11.4",
    "SelectType": "select/cons_tres",
    "ProctrackType": "proctrack/cgroup",
    "MinJobAge": "300 sec",
    "AccountingStorageType": "accounting_storage/slurmdbd",
    "PrivateData": "none",
}


def given(**settings: Any) -> Settings:
    return load_settings(env={}, env_file=None, backend="slurm", **settings)


def failed(detail: str) -> Finding:
    return Finding(FAIL, "trial run", detail, "correct what it says")


def worst(findings: Iterable[Finding]) -> Finding:
    order = (FAIL, WARN, SKIP, OK)
    return min(findings, key=lambda finding: order.index(finding.status))


@each(
    ("here", "status"),
    [("slurm-wlm 22.05.8", OK), ("slurm 24.11.5", OK), ("slurm 21.08.8-2", FAIL), ("slurm 20.02.7", FAIL)],
)
def test_releases_before_the_first_that_was_tried_are_refused(here: str, status: FindingStatus) -> None:
    found = checks.version(here, CONFIG)
    assert found.status is status
    assert "23.11.4" in found.detail


@each(
    ("settings", "partition", "status", "said"),
    [
        ({}, {}, OK, "train, with the nodes n[1-2]"),
        ({}, {"Default": "NO"}, FAIL, "no default partition"),
        ({"slurm_partition": "gpu"}, {}, FAIL, "gpu is unknown"),
        ({"slurm_partition": "train"}, {"State": "DRAIN"}, FAIL, "is DRAIN"),
        ({"slurm_account": "a"}, {"AllowAccounts": "b,c"}, FAIL, "AllowAccounts=b,c"),
        ({"slurm_account": "c"}, {"AllowAccounts": "b,c"}, OK, "train"),
        ({"slurm_account": "c"}, {"DenyAccounts": "c"}, FAIL, "DenyAccounts"),
        ({"slurm_qos": "long"}, {"AllowQos": "short"}, FAIL, "SLURM_QOS=long"),
        ({"max_hours": 20}, {"MaxTime": "1-00:00:00"}, OK, "train"),
        ({"max_hours": 25}, {"MaxTime": "1-00:00:00"}, WARN, "after 24 hours"),
        ({}, {"MaxTime": "02:30:00"}, WARN, "after 2.5 hours"),
        ({}, {"PreemptMode": "REQUEUE"}, WARN, "PreemptMode=REQUEUE"),
    ],
)
def test_a_partition_that_cannot_be_used_says_why(
    settings: dict[str, Any], partition: dict[str, str], status: FindingStatus, said: str
) -> None:
    findings = checks.partition_findings(given(**settings), [{**PARTITION, **partition}], frozenset())
    found = worst(findings)
    assert (found.status, said in found.detail) == (status, True), found


@each(
    ("settings", "node", "named", "status", "said"),
    [
        ({}, {}, (), OK, "1 of 1 can be used, with 4 GPUs"),
        ({}, {"Gres": "gpu:h100:4,gpu:a100:2"}, (), OK, "with 6 GPUs"),
        ({}, {"State": "MIXED"}, (), OK, "1 of 1"),
        ({}, {"State": "IDLE+DRAIN", "Reason": "fan [eve@1795487978]"}, (), FAIL, "0 of 1"),
        ({}, {"State": "DOWN*"}, (), FAIL, "0 of 1"),
        ({}, {"Gres": "(null)"}, (), FAIL, "with 0 GPUs"),
        ({"gpus": "cpu"}, {"Gres": "(null)"}, (), OK, "with 0 GPUs"),
        ({}, {"Partitions": "other"}, (), FAIL, "0 of 0"),
        ({}, {}, ("n1", "n7"), FAIL, "n7"),
        ({"slurm_constraint": "h100&ib"}, {"AvailableFeatures": "h100,ib"}, (), OK, "1 of 1"),
        (
            {"slurm_constraint": "h100&ib"},
            {"AvailableFeatures": "h100"},
            (),
            FAIL,
            "no node has the feature ib",
        ),
    ],
)
def test_nodes_that_cannot_be_used_are_named(
    settings: dict[str, Any],
    node: dict[str, str],
    named: tuple[str, ...],
    status: FindingStatus,
    said: str,
) -> None:
    known = Cluster(CONFIG, [PARTITION], [{**NODE, **node}], named)
    found = worst(checks.node_findings(given(**settings), known))
    assert (found.status, said in found.detail) == (status, True), found


def test_a_drained_node_is_shown_with_its_reason_and_who_gave_it() -> None:
    drained = {**NODE, "NodeName": "n2", "State": "IDLE+DRAIN", "Reason": "fan broken [eve@1795487978]"}
    first, second = checks.node_findings(given(), Cluster(CONFIG, [PARTITION], [NODE, drained]))
    assert (first.status, first.detail) == (WARN, "n2 is IDLE+DRAIN: fan broken (eve)")
    assert second.detail == "1 of 2 can be used, with 4 GPUs"


@each(
    ("config", "status", "said"),
    [
        ({}, OK, ""),
        ({"ProctrackType": "proctrack/linuxproc"}, WARN, "leaves its session"),
        ({"ConstrainDevices": "no"}, WARN, "ConstrainDevices=no"),
        ({"SelectType": "select/linear"}, FAIL, "select/linear"),
        ({"AccountingStorageType": "accounting_storage/none"}, OK, ""),
        ({"AccountingStorageType": "accounting_storage/none", "MinJobAge": "10 sec"}, WARN, "after 10 s"),
        ({"PrivateData": "cloud,jobs"}, WARN, "PrivateData=jobs"),
    ],
)
def test_the_site_s_configuration_is_judged_for_trainings(
    config: dict[str, str], status: FindingStatus, said: str
) -> None:
    found = worst(checks.configuration_findings({**CONFIG, **config}))
    assert (found.status, said in found.detail) == (status, True), found


@each(
    ("message", "way"),
    [
        ("Munge decode failed: Expired credential", "same clock"),
        ("Could not establish a configuration source", "SLURM_CONF"),
        ("Unable to contact slurm controller (connect failure)", "scontrol ping"),
        ("/usr/bin/scontrol has not answered for 30 s", "munge -n"),
    ],
)
def test_a_controller_that_does_not_answer_has_a_way_out(message: str, way: str) -> None:
    assert way in way_to_the_controller(message)


@each(
    ("reason", "status", "way"),
    [
        ("Resources", WARN, "when a node is free"),
        ("Priority", WARN, "when a node is free"),
        ("PartitionDown", FAIL, "another SLURM_PARTITION"),
        ("PartitionTimeLimit", FAIL, "of this length"),
        ("QOSMaxGRESPerUser", FAIL, "your account's limit"),
        ("AssocGrpGRES", FAIL, "your account's limit"),
        ("JobHeldAdmin", FAIL, "release it"),
        ("ReqNodeNotAvail,_UnavailableNodes:n1", FAIL, "sinfo -R"),
        ("BadConstraints", FAIL, "SLURM_CONSTRAINT"),
        ("SomethingNew", FAIL, "man squeue"),
    ],
)
def test_a_trial_that_does_not_begin_is_explained_by_slurms_reason(
    reason: str, status: FindingStatus, way: str
) -> None:
    found = explained(failed(f"Slurm did not begin it within 61 s: {reason}; Slurm job 7: CANCELLED"))
    assert (found.status, way in found.fix, reason in found.detail) == (status, True, True), found


@each(
    ("message", "way"),
    [
        ("Invalid account or account/partition combination specified", "SLURM_ACCOUNT"),
        ("Invalid qos specification", "SLURM_QOS"),
        ("Requested reservation is invalid", "SLURM_RESERVATION"),
        ("Invalid feature specification", "SLURM_CONSTRAINT"),
        ("Invalid generic resource (gres) specification", "sinfo -N"),
        ("unrecognized option '--foo'", "SLURM_OPTIONS"),
        (
            "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
            "SLURM_QOS",
        ),
    ],
)
def test_what_sbatch_refuses_has_a_way_out(message: str, way: str) -> None:
    for said in ("'trial-1' cannot be submitted", "it ended with not-started: refused by Slurm"):
        assert way in explained(failed(f"{said}: sbatch: error: {message}")).fix


def test_other_trials_are_left_as_they_are() -> None:
    for trial in (failed("no torch"), Finding(OK, "trial run", "axolotl can train")):
        assert explained(trial) == trial


def test_a_trial_that_an_exit_breaks_off_is_still_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(checks, "atexit", SimpleNamespace(register=at_exit.append, unregister=at_exit.remove))
    cancelled: list[str] = []

    def answer(program: str, *arguments: str) -> str:
        if program == "scancel":
            cancelled.extend(arguments)
        return "god-miner-1-other\ngod-miner-1-key\n"

    commands = SlurmCommands()
    monkeypatch.setattr(SlurmCommands, "run_blocking", lambda _, *words: answer(*words))
    with checks._cancelled_at_exit(commands, "key"):
        pass
    assert at_exit == []
    with pytest.raises(RuntimeError), checks._cancelled_at_exit(commands, "key"):
        raise RuntimeError("cannot schedule new futures after shutdown")
    at_exit.pop()()
    assert cancelled == ["--name=god-miner-1-key"]


def test_commands_that_are_not_there_are_named(tmp_path: Path) -> None:
    (found,) = checks.check(given(slurm_bin_dir=tmp_path))
    assert found.detail == f"there is no sbatch, scontrol, squeue, scancel in {tmp_path}"
    assert "SLURM_BIN_DIR" in found.fix
