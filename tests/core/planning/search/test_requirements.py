"""Which kernels a plan has, and what they do to its memory."""

from __future__ import annotations

from typing import Any

import pytest

from core.data.facts import assumed_facts
from core.domain.choices import Attention, Engine, Method
from core.domain.hardware import GPU_KINDS, GpuSet, Hardware
from core.domain.tasks import TaskType
from core.models.identify import facts_from_name
from core.models.kernels import LIGER_PARTS, LORA_KERNELS, LigerPart
from core.planning.candidate import LossKind
from core.planning.memory.peak import peak_bytes
from core.planning.plan import TaskSpec, TrainingPlan
from core.planning.planner import plan_task
from tests.core.planning.candidates import a_candidate, host, resolved
from tests.doubles.each import each

SFT, DPO, GRPO = TaskType.INSTRUCT, TaskType.DPO, TaskType.GRPO
LLAMA = "meta-llama/Llama-3.2-3B"
T4 = GPU_KINDS["RTX-3090"].model_copy(update={"name": "T4", "compute_capability": (7, 5)})


def plan_of(
    targets: dict[str, Any], task: TaskType = SFT, architecture: str = "llama", gpus: str = "1xH100"
) -> TrainingPlan:
    model = facts_from_name(LLAMA).model_copy(update={"architecture": architecture})
    hardware = Hardware(gpus=GpuSet(kind=T4, count=1)) if gpus == "T4" else host(gpus)
    spec = TaskSpec(task_type=task, hours=4)
    return plan_task(spec, model, assumed_facts(task, 20_000), hardware, resolved(None, **targets))


def conceded(plan: TrainingPlan, field: str) -> str | None:
    return next((one.reason for one in plan.concessions if one.field == field), None)


@each(
    ("asked", "given", "got", "reason"),
    [
        (False, {}, False, None),
        (None, {}, True, None),
        (None, {"task": DPO}, True, None),
        (None, {"task": GRPO}, False, None),
        (True, {"task": GRPO}, True, None),
        (None, {"architecture": "falcon"}, False, None),
        (True, {"architecture": "falcon"}, False, "Liger has none for falcon"),
        (None, {"gpus": "1xRTX-3090"}, True, None),
        (None, {"gpus": "T4"}, False, None),
        (True, {"gpus": "T4"}, False, "T4 cannot run them"),
        (None, {"gpus": "cpu"}, False, None),
        (True, {"gpus": "cpu"}, False, "needs a GPU"),
        (None, {"engine": Engine.NATIVE}, False, None),
    ],
)
def test_liger_is_planned_where_gpu_model_and_engine_can(
    asked: bool | None, given: dict[str, Any], got: bool, reason: str | None
) -> None:
    targets = {"liger": asked, **({"engine": given.pop("engine")} if "engine" in given else {})}
    plan = plan_of(targets, **given)
    assert plan.precision.liger is got
    assert (conceded(plan, "liger") or "").find(reason or "") >= 0
    assert (conceded(plan, "liger") is None) is (reason is None)


@each(
    ("asked", "given", "got", "reason"),
    [
        (None, {}, True, None),
        (False, {}, False, None),
        (None, {"task": DPO}, False, None),
        (None, {"gpus": "cpu"}, False, None),
        # Axolotl stops while it rewrites these: the run would end before its first step.
        *((None, {"architecture": kind}, False, None) for kind in ("phi3", "gpt_neox", "gemma2", "cohere")),
        (True, {"architecture": "phi3"}, False, "Axolotl has none for phi3"),
    ],
)
def test_lora_kernels_are_planned_for_models_that_axolotl_has_them_for(
    asked: bool | None, given: dict[str, Any], got: bool, reason: str | None
) -> None:
    plan = plan_of({"lora_kernels": asked, "method": Method.LORA}, **given)
    assert plan.precision.lora_kernels is got
    assert conceded(plan, "lora_kernels") == reason


def test_every_architecture_with_kernels_is_one_that_is_known() -> None:
    from core.models.table import MODEL_ROWS

    known = {row.architecture for row in MODEL_ROWS} | {"gemma3_text", "mixtral"}
    assert LIGER_PARTS.keys() | LORA_KERNELS <= known | {"mistral", "starcoder2"}


def test_logits_and_activations_need_less_memory_with_liger() -> None:
    wide = {"effective_batch_size": 64, "micro_batch_size": 64, "gradient_checkpointing": True}
    plain, fast = (plan_of({"liger": asked, **wide}, gpus="1xRTX-4090") for asked in (False, None))
    assert plain.candidate.loss is LossKind.CHUNKED
    assert fast.candidate.loss is LossKind.FUSED
    assert fast.batch.micro > plain.batch.micro
    assert fast.batch.effective == plain.batch.effective
    assert fast.candidate.liger == frozenset(LigerPart)


@each("full", [True, False])
def test_what_a_layer_saves_with_liger_is_what_was_counted(full: bool) -> None:
    """In bytes per token and layer, for an MLP of 4 widths; saved tensors in Triton's interpreter, bf16:
    64.75 widths to 52.75 with LoRA, 54.375 to 38.375 without."""
    from core.planning.memory.activations import layer_bytes

    method = {"method": Method.FULL} if full else {}
    shape = a_candidate(LLAMA).shape
    shape = type(shape)(
        **{name: getattr(shape, name) for name in shape.__slots__} | {"mlp": 4 * shape.hidden}
    )
    plain = a_candidate(LLAMA, **method, shape=shape, checkpointing=False)
    fast = a_candidate(LLAMA, **method, shape=shape, checkpointing=False, liger=frozenset(LigerPart))
    assert (layer_bytes(plain) - layer_bytes(fast)) / shape.hidden == (16 if full else 12)
    assert peak_bytes(fast) < peak_bytes(plain)


def test_granites_loss_stays_with_axolotl() -> None:
    plan = plan_of({"liger": None}, architecture="granite")
    assert plan.precision.liger
    assert plan.candidate.loss is LossKind.CHUNKED


@pytest.mark.parametrize("task", [DPO, GRPO])
def test_losses_of_preferences_and_rewards_keep_their_logits(task: TaskType) -> None:
    plan = plan_of({"liger": True}, task=task)
    assert plan.precision.liger
    assert plan.candidate.loss is LossKind.FULL


def test_attention_is_left_to_what_the_gpu_has() -> None:
    for gpus, kernel in (("T4", Attention.SDPA), ("1xH100", Attention.FLASH_2)):
        assert plan_of({}, gpus=gpus).precision.attention is kernel


@each(
    ("architecture", "engine"),
    [
        ("granite", Engine.NATIVE),
        ("falcon_h1", Engine.NATIVE),
        ("lfm2", Engine.NATIVE),
        ("phi", Engine.AXOLOTL),
    ],
)
def test_the_native_trainer_is_for_heads_that_it_computes_whole(architecture: str, engine: Engine) -> None:
    plan = plan_of({"engine": Engine.NATIVE}, architecture=architecture)
    assert plan.engine is engine
    given = [one.reason for one in plan.concessions if one.field == "engine"]
    assert given == ([] if engine is Engine.NATIVE else ["it leaves out a part of phi's head"])


MIXTRAL, QWEN = "mistralai/Mixtral-8x7B-v0.1", "Qwen/Qwen3-30B-A3B"
LORA = {"method": Method.LORA, "lora_dropout": 0.0, "lora_r": 64}


def ranked(
    targets: dict[str, Any], model: str = QWEN, gpus: str = "8xH200", task: TaskType = TaskType.INSTRUCT
) -> TrainingPlan:
    data = assumed_facts(task, 20_000)
    profile = resolved(**{**LORA, **targets})
    return plan_task(TaskSpec(task_type=task, hours=8), facts_from_name(model), data, host(gpus), profile)


def notes_of(plan: TrainingPlan) -> list[str]:
    return [note for note in plan.notes if "the adapter reaches" in note]


@each(
    ("model", "targets", "text"),
    [
        (QWEN, {}, "the adapter reaches 3.0% of the weights: routed experts are left out"),
        (MIXTRAL, {}, "the adapter reaches 2.9% of the weights: routed experts are left out"),
        ("Qwen/Qwen2.5-7B", {"lora_target_modules": ["q_proj", "v_proj"]}, "reaches 5.4% of the weights"),
        (
            "tiiuae/Falcon-H1-1.5B-Base",
            {},
            "reaches 73.0% of the weights: out_proj of its Mamba layers cannot have one",
        ),
    ],
)
def test_a_plan_says_what_part_of_the_weights_the_adapter_reaches(
    model: str, targets: dict[str, Any], text: str
) -> None:
    (note,) = notes_of(ranked(targets, model))
    assert text in note


@each(("model", "targets"), [("Qwen/Qwen2.5-7B", {}), (QWEN, {"method": "full"})])
def test_there_is_nothing_to_say_of_a_dense_model_or_a_full_fine_tune(
    model: str, targets: dict[str, Any]
) -> None:
    assert notes_of(ranked(targets, model)) == []


@pytest.mark.parametrize("task", [TaskType.INSTRUCT, TaskType.DPO])
def test_four_bit_experts_are_made_anew_in_every_pass(task: TaskType) -> None:
    """Without checkpointing the weights of every layer would be kept in bf16."""
    plan = ranked({"micro_batch_size": 1}, MIXTRAL, "1xH100", task)
    assert plan.method is Method.QLORA
    assert plan.precision.gradient_checkpointing
    assert plan.memory["dequantised"] == 2 * 8 * 3 * 4096 * 14336
