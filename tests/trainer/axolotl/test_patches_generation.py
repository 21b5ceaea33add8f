"""Generation of sharded models: the same answers, gathered once, and as it was afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.domain.choices import Parallelism
from core.domain.evaluation import Era, evaluation_rules
from core.domain.tasks import TaskType
from tests.core.recipes.cases import text_plan
from tests.trainer import tiny
from tests.trainer.forks import ForkServer
from tests.trainer.session.simulated import Simulation, plan_of
from tests.trainer.sharding import Gathers, adapted, split, together
from trainer.axolotl.patches import kept_parts, patch_generate, run_first_pass, sharded_parts
from trainer.axolotl.plugin import _prompts
from trainer.inputs.tokens import PromptRow
from trainer.scoring.completions import AGREES
from trainer.scoring.generation import _rounds, sample_completions

OFFERS = evaluation_rules(Era.OFFERS)
MOMENTS: list[str] = []


@contextmanager
def moment() -> Iterator[None]:
    MOMENTS.append("generation")
    yield
    MOMENTS.append("over")


def asked(model: Any, tokens: int) -> torch.Tensor:
    ids = torch.arange(5, 13).reshape(2, 4)
    return model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
        do_sample=False, pad_token_id=4,
    )  # fmt: skip


def one_generates_longer_than_the_other(rank: int) -> None:
    """What each rank generates is what it would have generated alone, and nobody waits for anybody."""
    tokens = 5 + 12 * rank
    expected = asked(adapted(), tokens)
    model = split(adapted(), adapter=True)
    parts = sharded_parts(model)
    patch_generate(model, 1, True, moment)
    gathers = Gathers()
    assert kept(parts) == [False] * len(parts)
    assert torch.equal(asked(model, tokens), expected)
    assert gathers.count == len(parts) == 1 + 2 + 2 * 7 * 2
    assert kept(parts) == [False] * len(parts)
    # A pass with gradients after it gathers layer by layer again, and trains.
    before = {name: weight.full_tensor().clone() for name, weight in model.named_parameters()}
    optimizer = torch.optim.SGD((one for one in model.parameters() if one.requires_grad), lr=0.1)
    model.train()
    model(
        input_ids=torch.arange(5, 13).reshape(2, 4), labels=torch.arange(5, 13).reshape(2, 4)
    ).loss.backward()
    optimizer.step()
    assert all(type(weight).__name__ == "DTensor" for weight in model.parameters())
    changed = {
        name for name, weight in model.named_parameters() if not weight.full_tensor().equal(before[name])
    }
    assert changed
    assert all("lora_" in name for name in changed)
    again = gathers.count
    asked(model, 6)
    assert gathers.count == again + len(parts)
    # A failure, as of memory that runs out, leaves all as it was too.
    with pytest.raises(ValueError, match="no_such_option"):
        model.generate(no_such_option=1)
    assert kept(parts) == [False] * len(parts)
    assert all(type(weight).__name__ == "DTensor" for weight in model.parameters())


def weights_stay_after_a_pass_where_the_plan_says_so(rank: int) -> None:
    model = split(adapted(), adapter=True)
    parts = sharded_parts(model)
    model.set_reshard_after_forward(False)
    patch_generate(model, 1, False, moment)
    asked(model, 5)
    assert kept(parts) == [True] * len(parts)
    assert all(type(weight).__name__ == "DTensor" for weight in model.parameters())


def compiled_it_generates_as_well(rank: int) -> None:
    """Whoever registers generating with FSDP finds no part of it in the compiled model's wrapper."""
    expected = asked(adapted(), 9)
    for whole in (1, 0):
        model = torch.compile(split(adapted(), adapter=True, registered=False))
        patch_generate(model, whole, True, moment)
        assert torch.equal(asked(model, 9), expected)
        ids = torch.arange(5, 13).reshape(2, 4)
        model._orig_mod(input_ids=ids, labels=ids).loss.backward()


def norms_in_fp32_keep_their_casts(rank: int) -> None:
    """A part without children that is no adapter's matrix."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    half, single = torch.bfloat16, torch.float32
    answers = []
    for whole in (0, 1):
        model = adapted().to(half)
        for name, part in model.named_modules():
            if name.endswith("norm"):
                part.to(single)
                own = MixedPrecisionPolicy(param_dtype=single, reduce_dtype=single, output_dtype=half)
                fully_shard(part, mp_policy=own)
        model = split(
            model, adapter=True, mp_policy=MixedPrecisionPolicy(param_dtype=half, output_dtype=half)
        )
        patch_generate(model, whole, True, moment)
        answers.append(asked(model, 12))
    assert torch.equal(*answers)


def the_base_is_scored_first(rank: int) -> None:
    """In bf16, with the adapter switched off and all weights gathered, as a session begins: it trains all the
    same, also after more of that."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    half = torch.bfloat16
    ids = torch.arange(5, 21).reshape(2, 8)
    for apart in (True, False):
        model = adapted()
        for name, weight in model.named_parameters():
            if "lora_" not in name:
                weight.data = weight.data.to(half)
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half, output_dtype=half)
        model = split(model, adapter=apart, mp_policy=policy).train()
        run_first_pass(model)
        patch_generate(model, 1, True, moment)
        for _ in range(2):
            with torch.no_grad(), model.disable_adapter():
                asked(model, 4 + rank)
                model(input_ids=ids)
            model(input_ids=ids, labels=ids).loss.backward()
            trained = [weight for weight in model.parameters() if weight.requires_grad]
            assert len(trained) == 2 * 7 * 2
            assert {weight.grad.dtype for weight in trained if weight.grad is not None} == {torch.float32}
            assert all(weight.grad is not None for weight in trained)


def kept(parts: list[Any]) -> list[bool]:
    """Of each part, whether its weights stay gathered after a forward pass."""
    return [
        group.post_forward_mesh_info is None
        for part in parts
        for group in part._get_fsdp_state()._fsdp_param_groups
    ]


def in_bf16_as_accelerate_sets_it(rank: int) -> None:
    """Base in bf16, adapter in fp32 and computed with in bf16: the same tokens as with FSDP's own casts."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    kinds = torch.bfloat16
    policy = MixedPrecisionPolicy(param_dtype=kinds, reduce_dtype=kinds, output_dtype=kinds)
    answers = []
    for whole in (0, 1):
        model = adapted()
        for name, weight in model.named_parameters():
            if "lora_" not in name:
                weight.data = weight.data.to(kinds)
        model = split(model, adapter=True, mp_policy=policy)
        patch_generate(model, whole, True, moment)
        answers.append(asked(model, 24))
    assert torch.equal(*answers)


def no_room_for_all_of_it(rank: int) -> None:
    """Layer by layer for every token; together, as torch has it, until the last one is done."""
    tokens = 5 + 12 * rank
    expected = asked(tiny.model().eval(), tokens)
    model = split(tiny.model().eval())
    patch_generate(model, 0, True, moment)
    gathers = Gathers()
    assert torch.equal(asked(model, tokens), expected)
    assert gathers.count >= 17 * 2


def room_for_half_of_it(rank: int) -> None:
    """The root and the first of two layers stay; the other comes for every token, the other rank's too."""
    tokens = 5 + 12 * rank
    expected = asked(adapted(), tokens)
    for apart in (False, True):
        model = split(adapted(), adapter=apart)
        parts = sharded_parts(model)
        a_layer = 1 + 7 * 2 * apart
        assert len(parts) == 1 + 2 * a_layer
        patch_generate(model, 1 / 2, True, moment)
        gathers = Gathers()
        for again in (1, 2):
            assert torch.equal(asked(model, tokens), expected)
            assert gathers.count == again * (1 + a_layer + 17 * a_layer)
            assert kept(parts) == [False] * len(parts)
            assert all(type(weight).__name__ == "DTensor" for weight in model.parameters())
        ids = torch.arange(5, 13).reshape(2, 4)
        model(input_ids=ids, labels=ids).loss.backward()


class Longer:
    """In the place of reward functions."""

    def __len__(self) -> int:
        return 1

    def call(self, place: int, completions: list[str], **columns: Any) -> list[float]:
        return [float(len(one)) for one in completions]


def ranks_with_unequal_shares(rank: int) -> None:
    """Seven rows in rounds of two: four for one rank, three for the other; long prompts make more passes."""
    rows = [PromptRow("apples and pears " * (1 + 9 * (place % 2)), None) for place in range(7)]
    tokenizer, rewards = tiny.tokenizer(), Longer()
    named: dict[str, Any] = {"rank": rank, "world": 2, "together": 2, "completion": 6, "window": 512}
    for whole in (1, 1 / 2, 0):
        base, one = tiny.model(seed=3).eval(), tiny.model().eval()
        if whole < 1:
            setattr(one, AGREES, False)  # ours is not for parts of a model: the engine's samples are expected
        alone = sample_completions(one, rows, tokenizer, rewards, OFFERS, reference=base, **named)  # type: ignore[arg-type]
        model = split(tiny.model().eval())
        patch_generate(model, whole, True, moment)
        sampled = sample_completions(model, rows, tokenizer, rewards, OFFERS, reference=split(base), **named)  # type: ignore[arg-type]
        assert sampled.rewards == alone.rewards
        assert (sampled.kl_prompts, len(sampled.rewards[0])) == ((4, 8) if rank == 0 else (3, 6))
        assert sampled.kl_total == pytest.approx(alone.kl_total, rel=1e-4)


def everything(rank: int) -> None:
    one_generates_longer_than_the_other(rank)
    weights_stay_after_a_pass_where_the_plan_says_so(rank)
    compiled_it_generates_as_well(rank)
    norms_in_fp32_keep_their_casts(rank)
    in_bf16_as_accelerate_sets_it(rank)
    the_base_is_scored_first(rank)
    no_room_for_all_of_it(rank)
    room_for_half_of_it(rank)
    ranks_with_unequal_shares(rank)


def test_two_ranks(forks: ForkServer, tmp_path: Path) -> None:
    assert together(forks, tmp_path, everything)


def test_a_model_of_one_gpu_generates_as_ever_and_is_wrapped_once() -> None:
    model = tiny.model().eval()
    expected = asked(model, 6)
    MOMENTS.clear()
    patch_generate(model, 1, True, moment)
    patch_generate(model, 1, True, moment)
    assert torch.equal(asked(model, 6), expected)
    assert MOMENTS == ["generation", "over"]


class Part(torch.nn.Module):
    """Stands in for what FSDP has split."""

    def __init__(self, **inside: torch.nn.Module) -> None:
        super().__init__()
        for name, module in inside.items():
            setattr(self, name, module)


def layers(count: int, matrices: int = 0) -> torch.nn.ModuleList:
    return torch.nn.ModuleList(Part(**{f"m{n}": Part() for n in range(matrices)}) for _ in range(count))


@pytest.mark.parametrize(
    ("whole", "expected"), [(0, []), (1 / 8, [0]), (3 / 8, [0, 1, 2]), (7 / 8, list(range(7)))]
)
def test_layers_are_counted_that_read_text_with_all_that_is_inside(
    monkeypatch: pytest.MonkeyPatch, whole: float, expected: list[int]
) -> None:
    monkeypatch.setattr("torch.distributed.fsdp.FSDPModule", Part)
    plain = torch.nn.Module
    model: Any = Part(visual=plain(), language_model=plain(), head=Part())
    model.visual.blocks = layers(5)
    model.language_model.layers = layers(8, matrices=3)
    model.language_model.norm = Part()
    parts = kept_parts(model, whole)
    text = model.language_model.layers
    named = [part for number in expected for part in text[number].modules()]
    assert parts == ([model, *named] if whole else [])
    assert len(kept_parts(model, 1)) == 1 + 5 + 8 * 4 + 1 + 1


def test_all_ranks_make_as_many_rounds_and_every_row_counts_once() -> None:
    for count in range(1, 12):
        for world in (1, 2, 3, 8):
            shares = [list(_rounds(count, rank, world, 2)) for rank in range(world)]
            assert len({len(share) for share in shares}) == 1
            assert all(places for share in shares for places, _ in share)
            counted = [place for share in shares for places, counts in share if counts for place in places]
            assert sorted(counted) == list(range(count))


def test_a_failure_inside_is_the_generations(tmp_path: Path) -> None:
    one = Simulation(tmp_path, plan=plan_of(5, 5, 1.0), seconds=100.0, step_s=lambda step: 1.0).session
    one.phase = "train"
    model: Any = SimpleNamespace(generate=lambda: None, modules=list)
    patch_generate(model, 0, True, one.generating)
    model.generate()
    assert one.phase == "train"

    def full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = SimpleNamespace(generate=full, modules=list)
    patch_generate(model, 0, True, one.generating)
    with pytest.raises(torch.OutOfMemoryError):
        model.generate()
    assert one.phase == "generation"


@pytest.mark.parametrize(
    ("parallelism", "micro", "completion", "together", "prompts"),
    [
        (Parallelism.DDP, 1, 256, None, 16),  # runs out and goes on in halves
        (Parallelism.DDP, 16, 256, None, 32),
        (Parallelism.DDP, 64, 256, None, 64),
        (Parallelism.DDP, 64, 256, 12, 6),
        (Parallelism.FSDP, 8, 256, None, 16),
        (Parallelism.FSDP, 1, 256, None, 2),
        (Parallelism.FSDP, 8, 64, None, 4),
        (Parallelism.FSDP, 1, 16, None, 1),
        (Parallelism.FSDP, 8, 256, 4, 2),
    ],
)
def test_ranks_that_share_a_model_generate_no_more_at_once_than_in_a_step(
    parallelism: Parallelism, micro: int, completion: int, together: int | None, prompts: int
) -> None:
    plan = text_plan(TaskType.GRPO, parallelism=parallelism, gpus=2)
    batch = plan.batch.model_copy(update={"micro": micro, "accumulation": 4})
    sequence = plan.sequence.model_copy(update={"completion_limit": completion})
    grpo = plan.grpo.model_copy(update={"together": together})
    assert _prompts(plan.model_copy(update={"batch": batch, "sequence": sequence, "grpo": grpo})) == prompts
