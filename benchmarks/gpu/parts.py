"""The parts, each in a process of its own: python -m benchmarks.gpu.parts NAME ROOT ANSWERS UNTIL [small].

What a part has measured goes line by line into the file ANSWERS, so that its end, whatever kind, costs
nothing of that. UNTIL is a time of the monotonic clock, which all processes share. `benchmarks.gpu.run`
starts them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.figures import Figure
from benchmarks.gpu.shapes import shape
from benchmarks.gpu.trainings import (
    DEVICE,
    FULL,
    GB,
    HOPPER,
    LORA,
    Variant,
    Workbench,
    hugging_face,
    native_steps,
    run_of,
    synchronize,
)
from core.data.facts import assumed_facts
from core.domain.tasks import ImageModelType, TaskType
from core.models.facts import ModelFacts
from core.models.identify import facts_from_name
from core.planning.candidate import vary
from core.planning.measured import MeasuredTraining
from core.planning.plan import TaskSpec, TrainingPlan
from core.planning.planner import plan_task
from core.planning.time import speed
from core.profile.resolve import load_profile, resolve_profile
from core.runs.run_files import RunResult
from miner.jobs.native_runs import NativeMode
from trainer.inputs.model_loading import block_imports
from trainer.runner.planning import detect_machine, model_facts, visible_gpus

#: The directory of the model that `own` trains.
MODEL_VARIABLE = "GPU_CHECK_MODEL"


class Answers:
    """The file that the parent reads."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def figure(self, *figures: Figure) -> None:
        for figure in figures:
            self._write("figure", figure.model_dump(mode="json"))

    def training(self, training: MeasuredTraining | None) -> None:
        if training is not None:
            self._write("training", training.model_dump(mode="json"))

    def note(self, *texts: str) -> None:
        for text in texts:
            self._write("note", text)

    def _write(self, kind: str, content: Any) -> None:
        self._file.write(json.dumps({kind: content}) + "\n")
        self._file.flush()


def calculated(
    name: str,
    value: float,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    plan: float | None = None,
    on_any: bool = False,
) -> Figure:
    bounds_for = "" if on_any else HOPPER
    return Figure(name=name, value=value, unit=unit, plan=plan, low=low, high=high, bounds_for=bounds_for)


def seconds_of(work: Callable[[], Any], rounds: int = 10) -> float:
    """The median of timed rounds, after three that are not."""
    taken = []
    for number in range(3 + rounds):
        synchronize()
        began = time.perf_counter()
        work()
        synchronize()
        if number >= 3:
            taken.append(time.perf_counter() - began)
    return median(taken)


def ceilings(bench: Workbench, out: Answers) -> None:
    kind, side = visible_gpus().kind, 512 if bench.small else 8192
    left, right = (torch.randn(side, side, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    rate = 2 * side**3 / seconds_of(lambda: left @ right) / 1e12
    plan = speed.GEMM_SHARE * kind.bf16_flops / 1e12
    out.figure(calculated(f"bf16 product {side}³", rate, "TFLOP/s", 600, 800, plan))
    source = torch.empty((1 << 24) if bench.small else (4 << 30), device=DEVICE, dtype=torch.uint8)
    target = torch.empty_like(source)
    rate = 2 * source.numel() / seconds_of(lambda: target.copy_(source)) / 1e12
    out.figure(calculated("copy, read and written", rate, "TB/s", 2.6, None, 0.85 * kind.bandwidth / 1e12))


LORA_VARIANTS = (
    # What is sure to run comes first; compiling takes a minute or two.
    Variant(
        "LoRA 8B recomputed",
        "llama-8b",
        {**LORA, "gradient_checkpointing": True},
        {"speed": (6500, 8500), "peak": (33, 38), "a save blocks": (None, 1)},
    ),
    Variant(
        "LoRA 8B compiled",
        "llama-8b",
        {**LORA, "compile_mode": "default"},
        {
            "speed": (11_000, 14_200),
            "MFU": (34, 43),
            "first step": (30, 90),
            "graphs compiled later": (None, 0),
        },
    ),
    Variant("LoRA 8B eager", "llama-8b", LORA, {"speed": (8500, 11_000), "peak": (58, 66)}),
)
FULL_VARIANTS = (
    Variant(
        "full 1.5B compiled",
        "qwen-1.5b",
        {**FULL, "compile_mode": "default"},
        {"MFU": (38, 50), "first step": (20, 90), "graphs compiled later": (None, 0)},
    ),
    # The update's bounds were calculated for 1.24B parameters, and grow with them.
    Variant(
        "full 1.5B eager",
        "qwen-1.5b",
        FULL,
        {"optimizer's update": (18 * 1.24, 25 * 1.24), "a save blocks": (3, 8)},
    ),
)


def native(bench: Workbench, out: Answers, variants: Iterable[Variant], save: str) -> None:
    for number, variant in enumerate(variants):
        # A variant takes about as long as its model's loading, its compilation and a few seconds of steps.
        if number and bench.left < 15:
            out.note(f"{variant.name}: no time was left")
            continue
        timed, more = native_steps(bench, variant, save=variant.name == save)
        out.figure(*timed.figures(variant), *more)
        out.training(timed.measured())
        out.note(*timed.notes)


def lora(bench: Workbench, out: Answers) -> None:
    native(bench, out, LORA_VARIANTS, save="LoRA 8B recomputed")


def own(bench: Workbench, out: Answers) -> None:
    """The operator's own model, as the first part of LoRA."""
    targets = {**LORA, "compile_mode": "default"}
    native(bench, out, [Variant("own model, LoRA compiled", os.environ[MODEL_VARIABLE], targets)], save="")


def full(bench: Workbench, out: Answers) -> None:
    native(bench, out, FULL_VARIANTS, save="full 1.5B eager")
    _loss(bench, out)


def _loss(bench: Workbench, out: Answers) -> None:
    """The loss of an 8B model's head, forward and backward, with chunks of logits as trained, and larger."""
    from trainer.native import model as nets

    wanted, tokens = shape("llama-8b", bench.small), 256 if bench.small else 8192
    make = {"device": DEVICE, "dtype": torch.bfloat16}
    head, hidden = (
        torch.randn(wanted.vocabulary, wanted.hidden, **make),
        torch.randn(tokens, wanted.hidden, **make),
    )
    targets, usual = torch.randint(wanted.vocabulary, (tokens,), device=DEVICE), nets.CHUNK_BYTES
    for name, chunk, low, high in (
        ("adapter", usual, 45, 60),
        ("full", usual, 95, 115),
        ("full, chunks of 2 GiB", 2 << 30, 70, 80),
    ):
        nets.CHUNK_BYTES = chunk
        of_head = head.clone().requires_grad_(name != "adapter")
        of_hidden = hidden.clone().requires_grad_()
        taken = seconds_of(lambda: nets.token_losses(of_hidden, of_head, targets).sum().backward(), 5)  # noqa: B023
        what = f"loss of {tokens:,} × {wanted.vocabulary:,}, {name}"
        out.figure(calculated(what, 1e3 * taken, "ms", low, high))
    nets.CHUNK_BYTES = usual


def trainers(bench: Workbench, out: Answers) -> None:
    """The same with Hugging Face's Trainer and Axolotl, beside what the native trainer reached."""
    ours = _figures_so_far(bench)
    liger = importlib.util.find_spec("liger_kernel") is not None and DEVICE == "cuda"
    for like in (FULL_VARIANTS[1], LORA_VARIANTS[0]):
        subject = like.name.rpartition(" ")[0]
        for with_liger in (False, True) if liger else (False,):
            what = f"{subject}, HF Trainer{' with Liger' if with_liger else ''}"
            if bench.left < 15:
                out.note(f"{what}: no time was left")
                continue
            theirs = hugging_face(bench, like, with_liger)
            out.figure(Figure(name=what, value=theirs, unit="tokens/s"))
            reached = [ours[name] for name in ours if name.startswith(subject) and name.endswith(": speed")]
            if (same := ours.get(f"{like.name}: speed")) is not None:
                out.figure(Figure(name=f"{like.name}, native ÷ {what}", value=same / theirs))
                out.figure(calculated(f"native's best ÷ {what}", max(reached) / theirs, "", 1.15, None))
    if not liger:
        out.note("no Liger kernels here")


def axolotl(bench: Workbench, out: Answers) -> None:
    """Axolotl as a user's run launches it; speed and memory are those of its result file."""
    missing = [name for name in ("axolotl", "trl", "datasets") if importlib.util.find_spec(name) is None]
    if missing:
        out.note(f"{', '.join(missing)} not installed: nothing to compare with")
        return
    ours = _figures_so_far(bench)
    for like in (LORA_VARIANTS[0], FULL_VARIANTS[1]):
        if bench.left < 20:
            out.note(f"{like.name}: no time was left")
            continue
        more = {"engine": "axolotl", "max_steps": 12, "num_epochs": None}
        variant = like._replace(name=f"{like.name} by Axolotl", targets={**like.targets, **more})
        run = run_of(bench, variant, hours=bench.left / 3600)
        _run_trainer(run.work_dir, bench.left - 3, out)
        try:
            result = RunResult.model_validate_json(Path(run.result_path).read_bytes())
        except OSError:
            out.note(f"{variant.name} left no result")
            continue
        if result.tokens_s is None:
            out.note(f"{variant.name}: {result.end}: {result.detail.strip()[-300:]}")
            continue
        out.figure(Figure(name=variant.name, value=result.tokens_s, unit="tokens/s"))
        if (same := ours.get(f"{like.name}: speed")) is not None:
            out.figure(Figure(name=f"native ÷ {variant.name}", value=same / result.tokens_s))


def _run_trainer(work_dir: str, seconds: float, out: Answers) -> int | None:
    """`trainer.text` over the run beside `work_dir`; None where it had to be ended."""
    folder = Path(work_dir).parent
    child = subprocess.Popen([sys.executable, "-m", "trainer.text", "--run", str(folder / "run.json")])
    try:
        return child.wait(timeout=max(seconds, 1))
    except subprocess.TimeoutExpired:
        child.terminate()
        out.note(f"{folder.name} was ended after {seconds:.0f} s")
        try:
            child.wait(timeout=10)
        except subprocess.TimeoutExpired:
            child.kill()
        return None


def _figures_so_far(bench: Workbench) -> dict[str, float]:
    try:
        parts = json.loads((bench.root / "so-far.json").read_text("utf-8"))["parts"]
    except (OSError, ValueError):
        return {}
    return {figure["name"]: figure["value"] for part in parts for figure in part["figures"]}


def attention(bench: Workbench, out: Answers) -> None:
    """Packed rows: a dense mask under SDPA, each row alone, and torch's kernel for rows of many lengths."""
    heads, width, length = (4, 16, 256) if bench.small else (32, 128, 8192)
    lengths = [length // 16] * 4 + [length // 8] * 2 + [length // 4] * 2
    make = {"device": DEVICE, "dtype": torch.bfloat16, "requires_grad": True}
    query, key, value = (torch.randn(1, heads, length, width, **make) for _ in range(3))
    rows = torch.repeat_interleave(
        torch.arange(len(lengths), device=DEVICE), torch.tensor(lengths, device=DEVICE)
    )
    mask = (rows[:, None] == rows[None]) & torch.ones(length, length, dtype=torch.bool, device=DEVICE).tril()
    borders = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)

    def masked() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask[None, None])

    def alone() -> Tensor:
        parts = [tensor.split(lengths, dim=2) for tensor in (query, key, value)]
        return torch.cat(
            [F.scaled_dot_product_attention(*one, is_causal=True) for one in zip(*parts, strict=True)], 2
        )

    def whole() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def cudnn() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return whole()

    def varlen() -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        flat = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
        # Borders and the longest row are known once per batch; a window of (-1, 0) is causal.
        made: Any = varlen_attn(*flat, borders, borders, max(lengths), max(lengths), window_size=(-1, 0))
        return made.transpose(0, 1)[None]  # type: ignore[no-any-return]

    reference = alone().detach()
    calls = {"rows alone": alone, "dense mask": masked, "varlen": varlen, "one row": whole}
    for name, call in {**calls, "one row, cuDNN": cudnn}.items():
        try:
            taken = seconds_of(lambda: call().sum().backward(), 5)  # noqa: B023
        except (ImportError, RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            out.note(f"{name}: {str(error).splitlines()[0][:200]}")
            continue
        out.figure(
            Figure(name=f"attention, {name}", value=1e3 * taken, unit="ms", note=f"by {_kernel(call)}")
        )
        if name in ("dense mask", "varlen"):
            off = float((call().detach() - reference).abs().max())
            out.figure(calculated(f"{name} beside rows alone", off, "", None, 2e-2, on_any=True))
    _packed_model(bench, out)


def _kernel(call: Callable[[], Any]) -> str:
    """The slowest kernel of a forward pass."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CUDA if DEVICE == "cuda" else ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        call()
        synchronize()
    by = "self_device_time_total" if DEVICE == "cuda" else "self_cpu_time_total"
    slowest = max(profiler.key_averages(), key=lambda event: getattr(event, by), default=None)
    return slowest.key[:80] if slowest is not None else "no kernel that the profiler saw"


def _packed_model(bench: Workbench, out: Answers) -> None:
    """A whole model over packed rows, as the native trainer calls it, beside the same rows alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        bench.model("tiny"), dtype=torch.bfloat16, attn_implementation="sdpa"
    ).to(DEVICE)
    lengths = (50, 30, 48)
    ids = torch.randint(4, 2000, (1, sum(lengths)), device=DEVICE)
    positions = torch.cat([torch.arange(length) for length in lengths])[None].to(DEVICE)
    with torch.no_grad():
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        apart = torch.cat([model(input_ids=row, use_cache=False).logits for row in ids.split(lengths, 1)], 1)
    off = float((packed - apart).abs().max() / apart.abs().max())
    out.figure(calculated("a model's packed rows beside rows alone", off, "", None, 2e-2, on_any=True))


def fp8(bench: Workbench, out: Answers) -> None:
    """The products of an 8B layer in fp8 beside bf16, the scaling of activations included."""
    capable = DEVICE == "cuda" and torch.cuda.get_device_capability() >= (8, 9)
    if not capable:
        out.note("this device has no fp8 units")
    wanted, tokens = shape("llama-8b", bench.small), 256 if bench.small else 8192
    total = {"bf16": 0.0, "fp8": 0.0}
    for name, inner, outer in (
        ("attention", wanted.hidden, wanted.hidden),
        ("up", wanted.hidden, wanted.inner),
        ("down", wanted.inner, wanted.hidden),
    ):
        rows = torch.randn(tokens, inner, device=DEVICE, dtype=torch.bfloat16)
        weight = torch.randn(outer, inner, device=DEVICE, dtype=torch.bfloat16)
        total["bf16"] += seconds_of(lambda: rows @ weight.T, 5)  # noqa: B023
        if capable:
            taken, error = _fp8_product(rows, weight)
            total["fp8"] += taken
            out.figure(calculated(f"fp8's error, {name}", error, "", None, 0.06))
    out.figure(Figure(name="bf16 products of a layer", value=1e3 * total["bf16"], unit="ms"))
    if capable:
        out.figure(
            calculated(
                "fp8 ÷ bf16, their time", total["fp8"] / total["bf16"], "", 0.5, 0.9, speed.FP8_PRODUCTS
            )
        )
    if capable and importlib.util.find_spec("torchao") and bench.left > 40:
        targets = {**FULL, "compile_mode": "default", "fp8": True}
        native(bench, out, [Variant("full 1.5B fp8 compiled", "qwen-1.5b", targets)], save="")


def _fp8_product(rows: Tensor, weight: Tensor) -> tuple[float, float]:
    """Seconds, and the error relative to bf16's result."""
    kind = torch.float8_e4m3fn
    most = torch.finfo(kind).max

    def scaled(tensor: Tensor) -> tuple[Tensor, Tensor]:
        scale = (tensor.abs().amax().float() / most).clamp(min=1e-12)
        return (tensor / scale).to(kind), scale

    small_weight, weight_scale = scaled(weight)

    def product() -> Tensor:
        small_rows, row_scale = scaled(rows)
        return torch._scaled_mm(
            small_rows, small_weight.T, scale_a=row_scale, scale_b=weight_scale, out_dtype=torch.bfloat16
        )

    exact = rows.float() @ weight.T.float()
    error = float((product().float() - exact).norm() / exact.norm())
    return seconds_of(product, 5), error


def dpo(bench: Workbench, out: Answers) -> None:
    targets = {**LORA, "sequence_len": bench.length // 4, "sample_packing": False, "micro_batch_size": 4}
    targets |= {"effective_batch_size": 4, "gradient_checkpointing": True}
    variant = Variant("DPO 3B adapter", "llama-3b", targets, mode=NativeMode.DPO)
    timed, _ = native_steps(bench, variant)
    out.figure(*timed.figures(variant), variant.figure("pairs", timed.samples_s, "pairs/s"))
    out.training(timed.measured())
    out.note(*timed.notes, "prompts are not shared between the two answers")


def grpo(bench: Workbench, out: Answers) -> None:
    """Sampling, which is most of a GRPO step: ours with 32 and with 512 completions, and transformers'."""
    from transformers import AutoModelForCausalLM

    from trainer.scoring.sampling import SamplingRules, sample

    model = AutoModelForCausalLM.from_pretrained(
        bench.model("qwen-1.5b"), dtype=torch.bfloat16, attn_implementation="sdpa"
    ).to(DEVICE)
    model.eval()
    each, prompt, longest = 8, 64 if bench.small else 256, 16 if bench.small else 128
    # No token ends a completion: all are as long as the plan takes them to be.
    rules = SamplingRules(temperature=1.0, top_k=0, longest=longest, ends=(), pad=0)
    spent: dict[int, float] = {}
    with torch.no_grad():
        sample(model, [[4] * prompt], each, rules._replace(longest=4), seed=0)  # warms up
    for count in (32, 512 if not bench.small else 64):
        prompts = torch.randint(4, 2000, (count // each, prompt)).tolist()
        with torch.no_grad():
            synchronize()
            began = time.perf_counter()
            sample(model, prompts, each, rules, seed=1)
            synchronize()
        spent[count] = time.perf_counter() - began
        plan = _planned_generation(bench, count, prompt, longest)
        name, rate = f"our sampler, {count} completions", count * longest / spent[count]
        # The published rate is of a sampler with as many as it likes.
        out.figure(calculated(name, rate, "tokens/s", 1581 if count > 32 else None, None, plan))
    few, many = sorted(spent)
    ratio = spent[many] / spent[few]
    out.figure(calculated(f"a token's time, {many} beside {few} completions", ratio, "", None, 2))
    ids = torch.randint(4, 2000, (few, prompt), device=DEVICE)
    with torch.no_grad():
        synchronize()
        began = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            min_new_tokens=longest,
            max_new_tokens=longest,
        )
        synchronize()
    theirs = few * longest / (time.perf_counter() - began)
    out.figure(Figure(name=f"transformers' generate, {few} completions", value=theirs, unit="tokens/s"))
    out.figure(Figure(name="ours ÷ theirs", value=few * longest / spent[few] / theirs))


def _plan(task: TaskSpec, facts: ModelFacts, rows: int) -> TrainingPlan:
    """The plan of a task on this machine by the profile `steady`."""
    kind = task.task_type
    profile = resolve_profile(load_profile("steady"), kind, facts)
    data = assumed_facts(kind, rows, task.hours, task.image_type)
    return plan_task(task, facts, data, detect_machine(Path.cwd()), profile, explained=False)


def _planned_generation(bench: Workbench, count: int, prompt: int, longest: int) -> float | None:
    """Tokens per second that a GRPO plan of the same model and numbers expects."""
    facts = model_facts(bench.model("qwen-1.5b"), "qwen-1.5b")
    plan = _plan(TaskSpec(task_type=TaskType.GRPO, hours=8), facts, 5000)
    length = prompt + longest
    candidate = vary(
        plan.candidate, micro=count, accumulation=1, length=length, completion=longest, together=0
    )
    seconds = speed.generate_seconds(candidate)
    return count * longest / seconds if seconds else None


def memory(bench: Workbench, out: Answers) -> None:
    """Out of memory on purpose: the trainer's own remedy, the next launch, and a request to stop."""
    from trainer.native.trace import prepare_launch

    targets = {**LORA, "micro_batch_size": 8, "effective_batch_size": 8, "gradient_checkpointing": True}
    run = run_of(bench, Variant("out of memory", "qwen-1.5b", targets), hours=2)
    plan = prepare_launch(run).plan
    held: list[Tensor] = []
    if DEVICE == "cuda":
        # Somebody else has the card but for two thirds of what the plan needs.
        free, _ = torch.cuda.mem_get_info()
        hold = free - int(0.66 * plan.memory.total_bytes)
        held.append(torch.empty(max(hold, 1), device=DEVICE, dtype=torch.uint8))
    else:
        out.note("on a CPU nothing runs out: only the request to stop is tried")
    ended, events = _until_it_steps(run, bench.left - 10)
    remedies = [event["text"] for event in events if event.get("kind") == "remedy"]
    out.note(*(f"remedy: {text[:200]}" for text in remedies), ended[:300])
    out.figure(calculated("remedies after running out", len(remedies), "", 1, None))
    stepped = float(any(event.get("event") == "step" for event in events))
    out.figure(calculated("the launch after them makes steps", stepped, "", 1, None, on_any=True))
    held.clear()


def _until_it_steps(run: Any, seconds: float) -> tuple[str, list[dict[str, Any]]]:
    """Run until the first step and a submission, then ask to stop, as a validator's deadline does."""
    folder, progress = Path(run.work_dir).parent, Path(run.progress_path)
    child = subprocess.Popen([sys.executable, "-m", "trainer.text", "--run", str(folder / "run.json")])
    until, asked, events = time.monotonic() + seconds, 0.0, list[dict[str, Any]]()
    while child.poll() is None and time.monotonic() < until:
        time.sleep(0.2)
        events = [json.loads(line) for line in progress.read_text().splitlines()] if progress.exists() else []
        if not asked and any(event.get("event") == "step" for event in events):
            asked = time.monotonic()
            child.terminate()
    if child.poll() is None:
        child.kill()
        return f"ended from outside after {seconds:.0f} s, {len(events)} events", events
    took = f", {time.monotonic() - asked:.1f} s after SIGTERM" if asked else ""
    return f"the run ended with {child.wait()}{took}", events


SEEDED = Variant(
    "seeded",
    "tiny",
    {
        **LORA,
        "lora_r": 8,
        "learning_rate": 1e-3,
        "micro_batch_size": 4,
        "effective_batch_size": 4,
        "sequence_len": 128,
    },
    steps=17,
)


def seeded(bench: Workbench, out: Answers) -> None:
    """The same training on a CPU and here: the same rows in the same order, losses step by step."""
    here, _ = native_steps(bench, SEEDED)
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu.parts",
        "seeded-cpu",
        str(bench.root),
        "-",
        str(bench.until),
    ]
    command += ["small"] if bench.small else []
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, timeout=max(bench.left, 1)
    )
    if done.returncode:
        out.note(f"on the CPU it failed: {done.stderr.strip()[-300:]}")
        return
    there = json.loads(done.stdout.strip().splitlines()[-1])
    off = max(abs(ours / theirs - 1) for ours, theirs in zip(here.losses, there, strict=True))
    fell = here.losses[0] - here.losses[-1]
    out.figure(calculated("losses beside the CPU's, at most apart", 100 * off, "%", None, 2, on_any=True))
    out.figure(calculated("the loss falls by", fell, "nats", 0.01, None, on_any=True))


def pictures(bench: Workbench, out: Answers) -> None:
    """Flux's transformer with random weights and an adapter: a training step of a 1024² picture."""
    if importlib.util.find_spec("diffusers") is None:
        out.note("diffusers is not installed")
        return
    from diffusers import FluxTransformer2DModel
    from peft import LoraConfig

    blocks = {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2, "attention_head_dim": 32}
    config = {**blocks, "joint_attention_dim": 64, "axes_dims_rope": (8, 12, 12)} if bench.small else {}
    torch.manual_seed(0)
    with torch.device(DEVICE):
        torch.set_default_dtype(torch.bfloat16)
        net = FluxTransformer2DModel(guidance_embeds=True, **config)
        torch.set_default_dtype(torch.float32)
    net.requires_grad_(False)
    net.add_adapter(LoraConfig(r=16, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    net.enable_gradient_checkpointing()
    side = 8 if bench.small else 64
    make = {"device": DEVICE, "dtype": torch.bfloat16}
    inputs = {
        "hidden_states": torch.randn(1, side * side, 64, **make),
        "encoder_hidden_states": torch.randn(1, 512, net.config.joint_attention_dim, **make),
        "pooled_projections": torch.randn(1, 768, **make),
        "timestep": torch.tensor([0.5], **make),
        "guidance": torch.tensor([1.0], **make),
        "img_ids": torch.zeros(side * side, 3, **make),
        "txt_ids": torch.zeros(512, 3, **make),
    }
    taken = seconds_of(lambda: net(**inputs).sample.float().pow(2).mean().backward(), 5)
    params = sum(weight.numel() for weight in net.parameters()) / 1e9
    plan_s, plan_bytes = _planned_picture()
    planned = None if bench.small else plan_s
    out.figure(
        Figure(name=f"Flux adapter, {params:.1f}B, 1024²", value=taken, unit="s/picture", plan=planned)
    )
    if DEVICE == "cuda":
        peak = torch.cuda.max_memory_reserved() / GB
        out.figure(Figure(name="Flux adapter: peak", value=peak, unit="GB", plan=plan_bytes / GB))


def _planned_picture() -> tuple[float, float]:
    """Seconds and memory of a picture by a plan with one resolution; encoders and VAE are in its memory."""
    family = ImageModelType.FLUX
    task = TaskSpec(task_type=TaskType.IMAGE, hours=1, image_type=family)
    plan = _plan(task, facts_from_name("flux", None, family), 20)
    return plan.time.step_s / plan.batch.effective, float(plan.memory.total_bytes)


PARTS: dict[str, Callable[[Workbench, Answers], None]] = {
    "ceilings": ceilings,
    "lora": lora,
    "own": own,
    "full": full,
    "trainers": trainers,
    "axolotl": axolotl,
    "attention": attention,
    "fp8": fp8,
    "dpo": dpo,
    "grpo": grpo,
    "memory": memory,
    "pictures": pictures,
    "seeded": seeded,
}


def main(name: str, root: str, answers: str, until: str, *small: str) -> None:
    block_imports("sklearn")
    bench = Workbench(Path(root), bool(small), float(until))
    if name == "seeded-cpu":
        timed, _ = native_steps(bench, SEEDED)
        print(json.dumps(timed.losses))
        return
    PARTS[name](bench, Answers(Path(answers)))


if __name__ == "__main__":
    main(*sys.argv[1:])
