"""What is changed before a failed training is tried again."""

from __future__ import annotations

from typing import Any

import pytest

from core.domain.choices import Attention
from core.domain.tasks import TaskType
from core.planning.plan import TaskSpec, TrainingPlan
from core.planning.planner import plan_task
from core.runs.remedies import MAX_ATTEMPTS, MAX_OOM_STEPS
from core.runs.run_files import RunEnd
from tests.core.builders import instruct_data, llama_8b, resolved
from tests.core.planning.candidates import host
from tests.doubles.each import each
from trainer.runner.planning import FailedLaunch, Remedy, remedy_for


def failed(end: RunEnd, **changes: Any) -> FailedLaunch:
    return FailedLaunch(**{"end": end, "moment": "train", "start_s": 60.0, "left_s": 3600.0, **changes})


def planned(**targets: Any) -> TrainingPlan:
    """Llama 3.1 8B on one H100."""
    asked: dict[str, Any] = {
        "micro_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "learning_rate": 3e-4,
        **targets,
    }
    return plan_task(
        TaskSpec(task_type=TaskType.INSTRUCT, hours=3),
        llama_8b(),
        instruct_data(),
        host("1xH100"),
        resolved(**asked),
    )


def test_out_of_memory_goes_down_one_rung_and_resumes() -> None:
    remedy = remedy_for(planned(), failed(RunEnd.OOM), [])
    assert remedy is not None
    assert remedy.plan.batch.micro == 4
    assert remedy.plan.batch.effective == planned().batch.effective
    assert remedy.resumes
    assert str(remedy) == "after oom: micro_batch_size 8 → 4"


def test_a_model_that_broke_starts_again_once_with_a_lower_rate() -> None:
    remedy = remedy_for(planned(), failed(RunEnd.NAN), [])
    assert remedy is not None
    assert remedy.plan.optimizer.learning_rate == pytest.approx(9e-5)
    assert not remedy.resumes
    assert remedy_for(remedy.plan, failed(RunEnd.NAN), [remedy]) is None


@each(("end", "attempts"), [(RunEnd.CRASHED, 2), (RunEnd.HUNG, 2), (RunEnd.KILLED, MAX_ATTEMPTS)])
def test_a_crash_is_tried_again_from_the_last_checkpoint(end: RunEnd, attempts: int) -> None:
    earlier: list[Remedy] = []
    while (remedy := remedy_for(planned(), failed(end), earlier)) is not None:
        assert remedy.plan == planned()
        assert remedy.resumes
        earlier.append(remedy)
    assert len(earlier) == attempts - 1


@each(
    ("kind", "said", "used"),
    [
        ("flash_attention_2", "RuntimeError: FlashAttention only supports Ampere GPUs or newer.", "sdpa"),
        (
            "flash_attention_3",
            "CUDA error (/x/hopper/flash_fwd_launch_template.h:188): no kernel image is available",
            "flash_attention_2",
        ),
        (
            "flash_attention_2",
            "in _flash_attn_forward\nCUDA error: no kernel image is available for execution on the device",
            "sdpa",
        ),
        ("flash_attention_2", "CUDA error: no kernel image is available for execution on the device", None),
        (
            "flash_attention_2",
            "FlashAttention backward for head dim > 192 requires A100/A800 or H100/H800",
            "sdpa",
        ),
        (
            "flash_attention_2",
            "/lib/libc.so.6: version `GLIBC_2.32' not found (required by /x/flash_attn_2_cuda.so)",
            "sdpa",
        ),
        ("flash_attention_2", "libc.so.6: version `GLIBC_2.32' not found (required by /x/other.so)", None),
        ("flash_attention_2", "ImportError: /x/flash_attn_2_cuda.so: undefined symbol: _ZN3c10", "sdpa"),
        ("flash_attention_2", "it ended with 1; its last words:\nundefined symbol: flash_attn_fwd", "sdpa"),
        (
            "flash_attention_2",
            "attn_implementation: flash_attention_2 is set, but no flash-attn build is available",
            "sdpa",
        ),
        ("flash_attention_2", "FlashAttention forward only supports head dimension at most 256", "sdpa"),
        ("flash_attention_2", "flash attention 2 is used\nCUDA error: unspecified launch failure", None),
        ("sdpa", "CUDA error: no kernel image is available for execution on the device", None),
    ],
)
def test_an_attention_kernel_that_fails_is_done_without(kind: str, said: str, used: str | None) -> None:
    """The same plan again would fail in the same way."""
    remedy = remedy_for(planned(attention=Attention(kind)), failed(RunEnd.CRASHED, detail=said), [])
    assert remedy is not None
    assert remedy.resumes
    assert remedy.plan.precision.attention == (used or kind)
    assert (f"attention {kind} → {used}" in str(remedy)) is (used is not None)


LIGER = 'File "/x/liger_kernel/ops/rms_norm.py", line 9, in rms_norm_forward'
LORA = 'File "/x/axolotl/kernels/lora.py", line 9, in forward'


def with_kernels() -> TrainingPlan:
    return planned(liger=True, lora_kernels=True)


@each(
    ("said", "left"),
    [
        (f"{LIGER}\ntriton.compiler.errors.CompilationError: at 9:1", {"lora_kernels"}),
        (
            "RuntimeError: Triton Error [CUDA]: device kernel image is invalid (Liger: rms_norm)",
            {"lora_kernels"},
        ),
        # Liger's loss calls the model, whose layer calls what failed.
        (f"{LIGER}\n{LORA}\ntriton.runtime.errors.OutOfResources: out of resource", {"liger"}),
        (f"{LORA}\n{LIGER}\nRuntimeError: shape", {"lora_kernels"}),
        ("triton.runtime.errors.OutOfResources: out of resource: shared memory", set()),
        ("CUDA error: an illegal memory access was encountered", set()),
        ("ModuleNotFoundError: No module named 'triton'", set()),
        ("ValueError: size mismatch", {"liger", "lora_kernels"}),
    ],
)
def test_a_kernel_that_a_crash_names_is_left_out_once(said: str, left: set[str]) -> None:
    before = with_kernels()
    remedy = remedy_for(before, failed(RunEnd.CRASHED, detail=said), [])
    assert remedy is not None
    assert {name for name in ("liger", "lora_kernels") if getattr(remedy.plan.precision, name)} == left
    assert (remedy.plan == before) is (len(left) == 2)
    assert remedy.resumes
    assert remedy_for(remedy.plan, failed(RunEnd.CRASHED, detail=said), [remedy]) is None


def test_without_liger_a_pass_holds_what_fits_without_it() -> None:
    kernels = {"liger": True, "lora_kernels": False, "gradient_checkpointing": True}
    budget = planned(**kernels).memory.total_bytes
    before = planned(**kernels, limits={"gpu_memory": budget})
    assert before.batch.micro == planned(**kernels).batch.micro
    remedy = remedy_for(before, failed(RunEnd.CRASHED, detail=LIGER), [])
    assert remedy is not None
    assert remedy.plan.batch.micro < before.batch.micro
    assert remedy.plan.batch.effective == before.batch.effective
    assert remedy.plan.memory.total_bytes <= budget


@each("end", [RunEnd.BAD_DATA, RunEnd.BAD_MODEL, RunEnd.BAD_REWARD, RunEnd.DISK_FULL, RunEnd.STOPPED])
def test_nothing_helps_against_bad_input(end: RunEnd) -> None:
    assert remedy_for(planned(), failed(end), []) is None


def test_without_the_time_to_begin_again_it_is_left_alone() -> None:
    assert remedy_for(planned(), failed(RunEnd.OOM, left_s=100.0), []) is None
    assert remedy_for(planned(), failed(RunEnd.CRASHED, left_s=-5.0), []) is None


def test_the_ladder_has_an_end() -> None:
    earlier: list[Remedy] = []
    now = planned()
    while (remedy := remedy_for(now, failed(RunEnd.OOM), earlier)) is not None:
        earlier.append(remedy)
        now = remedy.plan
    assert 3 <= len(earlier) <= MAX_OOM_STEPS
    assert now.precision.gradient_checkpointing
    assert now.batch.micro == 1
