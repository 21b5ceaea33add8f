"""Our hooks in Axolotl: a plugin that the configuration lists.

Axolotl trains; everything that decides about the training (when it ends, what is best, what is submitted)
is the session's. What Axolotl's own builders would do of that is switched off here, and what its builder
for preference and reward training silently ignores is put back.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from axolotl.integrations.base import BasePlugin
from transformers import PrinterCallback, ProgressCallback

from core.domain.choices import EvalMetric, Parallelism
from core.domain.evaluation import GRPO_COMPLETION, GRPO_GENERATIONS, RewardScore
from core.planning.plan import GrpoPlan, TrainingPlan
from trainer.axolotl import patches
from trainer.axolotl.answer_logits import skip_other_logits
from trainer.axolotl.host import HfHost, SessionCallback, resume_state
from trainer.axolotl.micro_batches import MicroBatchSplitter, order_steps
from trainer.axolotl.patches import add_kl, count_tokens, leave_out_what_fails
from trainer.axolotl.prompt_kl import add_prompt_kl
from trainer.axolotl.trainers import PairTrainer
from trainer.handoff import LaunchSpec
from trainer.inputs.model_loading import block_gpu_kernels
from trainer.inputs.state_space import use_fast_scan
from trainer.rewards.calls import RewardWatch
from trainer.scoring.generation import PROMPTS
from trainer.scoring.held_out import MAX_PROMPTS, HeldOut, HeldOutSums
from trainer.session.failures import record_uncaught
from trainer.session.progress_log import ProgressLog, SpeedMeter
from trainer.session.ranks import Communicator, communicator
from trainer.session.session import Scorer, Session, session_of
from trainer.session.watchdog import dump_stacks_on_request, exit_with_runner

#: Rows that each rank reads at least: fewer are no sample. They also show how long a row takes.
MIN_ROWS = 8


# Scores of a checkpoint


class EngineScorer:
    """The engine's evaluation loss on its evaluation set."""

    metric = "eval_loss"
    lower_is_better = True
    rewarded: RewardScore | None = None

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.pass_seconds = 0.0

    def score_base(self, budget_s: float, untouched: bool) -> float:
        """In a resumed training the first evaluation stands in for the base's: the engine has no other
        model."""
        began = time.monotonic()
        value = self.score()
        self.pass_seconds = time.monotonic() - began
        return value

    def score(self) -> float:
        return float(self._trainer.evaluate()["eval_loss"])


class HeldOutScorer:
    """The validator's metric, computed by all ranks together.

    How many rows an evaluation can afford is measured: every `stride`-th row is read, so that it is the same
    sample each time, whatever the number of ranks.
    """

    def __init__(
        self, spec: LaunchSpec, trainer: Any, ranks: Communicator, base: Any = None, together: int = PROMPTS
    ) -> None:
        """`base`: the untrained model, where one is kept beside the trained one anyway. `together`: prompts
        that are answered at once, where rewards decide."""
        self._spec, self._trainer, self._ranks, self._base = spec, trainer, ranks, base
        self._held = HeldOut.open(spec.run, spec.prepared, trainer.processing_class, together=together)
        self._rows = len(self._held.rows)
        self.metric, self.lower_is_better = "eval_loss", True
        self.rewarded: RewardScore | None = None
        self._stride = 1
        self.pass_seconds = 0.0

    def score_base(self, budget_s: float, untouched: bool) -> float:
        model = self._model()
        if not untouched and not has_adapter(model):
            model = frozen_base(self._spec.run.model_path, model, self._trainer.args.device)
        self._stride = max(math.ceil(self._rows / (MIN_ROWS * self._ranks.world)), 1)
        if not self._spec.run.task_type.generates:
            # The first pass of a process allocates and chooses kernels; beside generating that is nothing.
            self._of_base(model)
        measured = self._timed(model)
        # What one rank found holds for all: they are to read the same sample.
        per_row = self._ranks.from_first([self.pass_seconds / max(self._rows / self._world, 1)])[0]
        affordable = max(budget_s / max(per_row, 1e-6), MIN_ROWS)
        stride = max(math.ceil(self._rows / self._ranks.world / affordable), 1)
        if stride < self._stride:
            self._stride = stride
            measured = self._timed(model)
        self.metric, self.lower_is_better = measured.metric, measured.lower_is_better
        self.rewarded = self._held.rewarded(measured)
        return measured.value

    def _timed(self, model: Any) -> HeldOutSums:
        began = time.monotonic()
        measured = self._of_base(model)
        self.pass_seconds = time.monotonic() - began
        return measured

    def score(self) -> float:
        rank = {"rank": self._ranks.rank, "world": self._world}
        measured = self._together(self._held.score(self._model(), reference=self._reference(), **rank))
        self.rewarded = self._held.rewarded(measured)
        return measured.value

    @property
    def _world(self) -> int:
        return self._ranks.world * self._stride

    def _of_base(self, model: Any) -> HeldOutSums:
        rank = {"rank": self._ranks.rank, "world": self._world}
        with model.disable_adapter() if has_adapter(model) else nullcontext():
            self._held.base = self._together(self._held.remember_base(model, **rank))
        return self._held.base

    def _together(self, measured: HeldOutSums) -> HeldOutSums:
        sums = self._ranks.gather(measured.sums)
        width = len(measured.sums)
        return measured.merged([sum(sums[place::width]) for place in range(width)])

    def _model(self) -> Any:
        """The model to score: sharded weights are gathered only in the wrapped model's forward pass."""
        if self._trainer.is_fsdp_enabled:
            return self._trainer.model
        return self._trainer.accelerator.unwrap_model(self._trainer.model, keep_torch_compile=False)

    def _reference(self) -> Any:
        """The base for the KL. A full GRPO fine-tune without one is scored by rewards alone: against itself
        the KL is zero."""
        kept = self._base if self._base is not None else getattr(self._trainer, "ref_model", None)
        model = self._model()
        if kept is None and self._spec.run.task_type.generates and not has_adapter(model):
            return model
        return kept


def has_adapter(model: Any) -> bool:
    """Return True if disabling the adapter gives the base model."""
    return bool(getattr(model, "peft_config", None))


def frozen_base(path: str, like: Any, device: Any) -> Any:
    """The untrained model in the same format as another, whole on every rank."""
    from transformers import AutoModelForCausalLM

    attention = like.config._attn_implementation
    with _read_by_all_ranks():
        base = AutoModelForCausalLM.from_pretrained(path, dtype=like.dtype, attn_implementation=attention)
    return base.to(device).eval().requires_grad_(False)


@contextmanager
def _read_by_all_ranks() -> Iterator[None]:
    """Under FSDP transformers reads weights on one rank of a machine, and leaves zeros on the others."""
    name = "FSDP_CPU_RAM_EFFICIENT_LOADING"
    before = os.environ.pop(name, None)
    try:
        yield
    finally:
        if before is not None:
            os.environ[name] = before


# The plugin


class GodMinerPlugin(BasePlugin):  # type: ignore[misc]
    """Axolotl creates one in every training process."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = int(os.environ.get("RANK", "0"))
        self.spec = LaunchSpec.read()
        self.plan = self.spec.plan
        self.progress = ProgressLog(Path(self.spec.run.progress_path) if self.rank == 0 else None)
        self.session: Session | None = None

    @property
    def supervised(self) -> bool:
        return self.plan.task.task_type.is_supervised

    def register(self, cfg: dict[str, Any]) -> None:
        """The engine goes on without a plugin that it could not load: the marker shows the runner that ours
        was loaded."""
        record_uncaught(self.spec, self.rank, lambda: self.session.phase if self.session else "load")
        block_gpu_kernels(not self.plan.conditions.workarounds.no_state_kernels)
        patches.apply_patches(cfg)
        leave_out_what_fails(cfg, self.progress.note)
        dump_stacks_on_request()
        exit_with_runner(self.spec.wrapper_pid)
        if self.rank == 0:
            self.spec.marker_path.touch()
            self.progress.stage("load", "the engine reads rows and model")

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> None:
        """The first hook with the checked configuration."""
        import torch

        # Axolotl pins processes to accelerators by their rank, even on machines that have none.
        if not torch.cuda.is_available():
            cfg.device_map = None
        # The session does both, for every kind of task and in the validator's metric.
        cfg.early_stopping_patience = None
        cfg.load_best_model_at_end = False

    def pre_model_load(self, cfg: Any) -> None:
        """The engine seeds only when the trainer is made: an adapter's weights are drawn before."""
        from transformers import set_seed

        set_seed(self.plan.targets.seed)

    def post_model_load(self, cfg: Any, model: Any) -> None:
        patches.freeze_vision(model)
        use_fast_scan(model)
        planned, used = self.plan.precision.attention.value, cfg.attn_implementation
        if used is not None and used != planned:
            self.progress.note(
                "attention", f"{used} in place of {planned}, which this model cannot take here"
            )

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        """Arguments that override what Axolotl's builder made, for preference and reward training too."""
        import torch

        loader, steps = self.plan.loader, self.plan.steps
        arguments: dict[str, Any] = {
            # The upper bound: the session ends the run where the clock says, and the clock may be generous.
            "max_steps": max(steps.wanted or steps.total, steps.total, 1),
            "eval_strategy": "no",
            "save_strategy": "no",
            "load_best_model_at_end": False,
            "eval_on_start": False,
            # A NaN loss is shown and counted, not replaced by the mean of those before.
            "logging_nan_inf_filter": False,
            "dataloader_persistent_workers": loader.persistent_workers and loader.workers > 0,
        }
        if self.plan.grpo is not None and self.plan.grpo.vllm and cfg.vllm:
            # Else vLLM makes room for the longest sequence that the model may take.
            arguments["vllm_max_model_length"] = cfg.vllm.max_model_len
        if not torch.cuda.is_available():
            arguments["use_cpu"] = True
        if not self.supervised:
            arguments["ddp_find_unused_parameters"] = False
            arguments["dataloader_drop_last"] = loader.drop_last
        return arguments

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        # Otherwise the engine would print a line beside each of the session's events.
        trainer.remove_callback(PrinterCallback if trainer.args.disable_tqdm else ProgressCallback)
        coefficient = self.spec.run.kl_coefficient if self.supervised else None
        base = self._base(trainer) if coefficient else None
        if isinstance(trainer, PairTrainer):
            order_steps(trainer, self.plan)
        splitter = MicroBatchSplitter(trainer, self.plan)
        host = HfHost(trainer, self._scorer(trainer, base), splitter)
        session = self.session = self._session(trainer, host)
        splitter.on_undone = lambda micro: session.controls.undo_growth(
            micro, session.step, f"memory ran out: back to {micro} sequences in a pass"
        )
        meter = SpeedMeter(self.plan)
        count_tokens(trainer, meter)
        answers = skip_other_logits(trainer, cfg) if self.supervised else None
        if coefficient:
            add_kl(trainer, coefficient, base, splitter.label_share, answers)
        if self.plan.grpo is not None:
            self._prepare_rewards(trainer, self.plan.grpo, self.plan.targets.grpo_prompt_kl)
        return [SessionCallback(self.spec, self.session, host, meter)]

    def _prepare_rewards(self, trainer: Any, plan: GrpoPlan, prompt_kl: float) -> None:
        """Ours; an operator's raw key may name another trainer."""
        if not hasattr(trainer, "together"):
            return
        trainer.together = plan.together
        if prompt_kl:
            add_prompt_kl(trainer, prompt_kl)
        if self.session is not None:
            trainer.generating = self.session.generating
        if self.rank == 0:
            weights = trainer.reward_weights.tolist()
            trainer.watch = RewardWatch(weights, lambda text: self.progress.note("reward", text))

    def _session(self, trainer: Any, host: HfHost) -> Session:
        session = session_of(self.spec, self.plan, self.progress, communicator(trainer.args.device), host)
        if self.spec.resume_from and (state := resume_state(Path(self.spec.resume_from))):
            session.restore(state)
        return session

    def _base(self, trainer: Any) -> Any:
        """The base for the KL term: a full fine-tune keeps a copy, a LoRA has it inside."""
        model = trainer.accelerator.unwrap_model(trainer.model)
        if has_adapter(model):
            return None
        return frozen_base(self.spec.run.model_path, model, trainer.args.device)

    def _scorer(self, trainer: Any, base: Any) -> Scorer | None:
        # The loss of a GRPO training is meaningless: it is near zero for every model.
        by_loss = self.plan.steps.eval_metric is EvalMetric.LOSS
        if by_loss and not self.plan.task.task_type.generates:
            return EngineScorer(trainer) if trainer.eval_dataset is not None else None
        if not self.spec.prepared.eval_rows:
            return None
        ranks = communicator(trainer.args.device)
        return HeldOutScorer(self.spec, trainer, ranks, base, together=_prompts(self.plan))

    def create_lr_scheduler(self, cfg: Any, trainer: Any, optimizer: Any, num_training_steps: int) -> Any:
        """The engine's own schedules do not know the clock."""
        from torch.optim.lr_scheduler import LambdaLR

        session = self.session
        if session is None:
            return None
        return LambdaLR(optimizer, lambda _: session.rate)


def _prompts(plan: TrainingPlan) -> int:
    """Return the number of prompts to answer at once: as many tokens as a training step generates. A few more
    if memory is not known to be short: a process with the whole model continues in halves when it runs out;
    ranks of a sharded one cannot."""
    together = plan.grpo.together if plan.grpo is not None else None
    completions = together or plan.batch.micro * plan.batch.accumulation
    tokens = completions * (plan.sequence.completion_limit or GRPO_COMPLETION)
    known = tokens // (GRPO_GENERATIONS * GRPO_COMPLETION)
    if plan.parallelism is Parallelism.FSDP:
        return max(min(known, PROMPTS), 1)
    return min(max(known, 1 if together else PROMPTS), MAX_PROMPTS)
