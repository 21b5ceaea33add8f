from __future__ import annotations

from core.domain.tasks import TaskType
from core.submission.faults import FaultKind
from core.submission.folder import SubmissionKind, kind_of, select_files
from tests.doubles.each import each

AXOLOTL = {
    "adapter_config.json",
    "adapter_model.safetensors",
    "README.md",
    "config.json",
    "tokenizer.json",
    "debug.log",
    "checkpoint-10/optimizer.pt",
    "checkpoint-10/adapter_model.safetensors",
}


def test_of_an_adapter_run_only_the_adapter_and_its_tokenizer_are_taken() -> None:
    chosen = select_files(AXOLOTL, SubmissionKind.ADAPTER)
    assert set(chosen.files) == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "README.md",
        "tokenizer.json",
    }
    reasons = {fault.where: fault.kind for fault in chosen.left_out}
    assert reasons["checkpoint-10/optimizer.pt"] is FaultKind.PICKLE
    assert reasons["debug.log"] is FaultKind.STRAY


def test_the_full_model_that_dpo_leaves_beside_an_adapter_is_left_out_with_the_reason() -> None:
    chosen = select_files(AXOLOTL | {"model.safetensors"}, SubmissionKind.ADAPTER)
    assert "model.safetensors" not in chosen.files
    reasons = {fault.where: fault.kind for fault in chosen.left_out}
    assert reasons["model.safetensors"] is FaultKind.BOTH_KINDS


def test_the_reference_that_grpo_leaves_in_a_folder_of_its_own_is_left_out() -> None:
    names = {"config.json", "model.safetensors", "ref/model.safetensors", "ref/config.json"}
    assert set(select_files(names, SubmissionKind.FULL).files) == {"config.json", "model.safetensors"}


def test_all_parts_of_a_model_are_taken_and_nothing_that_looks_alike() -> None:
    parts = {f"model-{n:05}-of-00002.safetensors" for n in (1, 2)}
    others = {"model-1-of-2.safetensors", "x/model-00001-of-00002.safetensors", "model-00001-of-00002.bin"}
    names = parts | others | {"config.json", "model.safetensors.index.json"}
    assert set(select_files(names, SubmissionKind.FULL).files) == names - others


@each(
    ("names", "best"),
    [
        ({"last.safetensors"}, "last.safetensors"),
        ({"checkpoint/last.safetensors"}, "checkpoint/last.safetensors"),
        ({"checkpoints/last.safetensors"}, "checkpoints/last.safetensors"),
        ({"last-000010.safetensors", "last-000009.safetensors"}, "last-000010.safetensors"),
        ({"last-000010.safetensors", "last.safetensors"}, "last.safetensors"),
    ],
)
def test_an_image_model_is_published_where_evaluators_look(names: set[str], best: str) -> None:
    chosen = select_files(names | {"sample/1.png"}, SubmissionKind.IMAGE)
    assert chosen.files == {"checkpoint/last.safetensors": best}


@each(
    ("names", "task_type", "kind"),
    [
        ({"adapter_config.json", "model.safetensors"}, None, SubmissionKind.ADAPTER),
        ({"config.json", "model.safetensors"}, TaskType.DPO, SubmissionKind.FULL),
        ({"last.safetensors"}, None, SubmissionKind.IMAGE),
        ({"last.safetensors", "config.json"}, None, SubmissionKind.FULL),
        ({"adapter_config.json"}, TaskType.IMAGE, SubmissionKind.IMAGE),
        (set(), None, SubmissionKind.FULL),
    ],
)
def test_the_kind_is_decided_as_evaluators_do(
    names: set[str], task_type: TaskType | None, kind: SubmissionKind
) -> None:
    assert kind_of(names, task_type) is kind
