"""Our hooks in Axolotl: a plugin that the configuration lists.

Axolotl trains; everything that decides about the training (when it ends, what is best, what is submitted)
is the session's. What Axolotl's own builders would do of that is switched off here, and what its builder
for preference and reward training silently ignores is put back.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from axolotl.integrations.base import BasePlugin

from core.choices import EvalMetric, Parallelism
from core.evaluation import GRPO_COMPLETION, GRPO_GENERATIONS
from core.plan import TrainingPlan
from core.tasks import TaskType
from trainer import axolotl_patches
from trainer.callbacks.clock import Clock
from trainer.callbacks.ema import MovingAverage
from trainer.callbacks.failures import catch_all
from trainer.callbacks.guard import StopFile, dump_stacks_on_request, end_with
from trainer.callbacks.meter import Meter
from trainer.callbacks.ranks import ranks_here
from trainer.callbacks.report import Report
from trainer.callbacks.session import Judge, Session
from trainer.callbacks.submission import Submission
from trainer.hf_host import AVERAGE_FILE, HfHost, SessionCallback, resume_state
from trainer.hf_patches import add_kl, count_tokens
from trainer.judges import EngineJudge, HeldOutJudge, frozen_base, has_adapter
from trainer.scoring.generation import PROMPTS
from trainer.sheet import Sheet

SUPERVISED = (TaskType.INSTRUCT, TaskType.CHAT)


class GodMinerPlugin(BasePlugin):  # type: ignore[misc]
    """One per training process."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = int(os.environ.get("RANK", "0"))
        self.sheet = Sheet.read()
        self.plan = TrainingPlan.from_json(Path(self.sheet.plan_path).read_bytes())
        self.report = Report(Path(self.sheet.run.progress_path) if self.rank == 0 else None)
        self.session: Session | None = None

    @property
    def supervised(self) -> bool:
        return self.plan.task.task_type in SUPERVISED

    def register(self, cfg: dict[str, Any]) -> None:
        """The engine goes on without a plugin that it could not load: the marker tells the wrapper that ours
        is there."""
        catch_all(self.sheet, self.rank, lambda: self.session.moment if self.session else "load")
        axolotl_patches.apply(cfg)
        dump_stacks_on_request()
        end_with(self.sheet.wrapper_pid)
        if self.rank == 0:
            self.sheet.marker_path.touch()
            self.report.stage("load", "the engine reads rows and model")

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> None:
        """The first hook with the checked configuration."""
        import torch

        # Axolotl pins several processes to accelerators by their rank, also where there is none.
        if not torch.cuda.is_available():
            cfg.device_map = None
        # The session does both, for every kind of task and in the validator's metric.
        cfg.early_stopping_patience = None
        cfg.load_best_model_at_end = False

    def pre_model_load(self, cfg: Any) -> None:
        """The engine seeds only when the trainer is made: an adapter's weights are drawn before."""
        from transformers import set_seed

        set_seed(self.plan.seed)

    def post_model_load(self, cfg: Any, model: Any) -> None:
        axolotl_patches.freeze_senses(model)
        planned, used = self.plan.precision.attention.value, cfg.attn_implementation
        if used is not None and used != planned:
            self.report.note("attention", f"{used} in place of {planned}, which this model cannot take here")

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        """Laid over what the builder made, for preference and reward training too."""
        import torch

        loader = self.plan.loader
        arguments: dict[str, Any] = {
            # The upper bound: the session ends the run where the clock says, and the clock may be generous.
            "max_steps": self._most_steps(),
            "eval_strategy": "no",
            "save_strategy": "no",
            "load_best_model_at_end": False,
            "eval_on_start": False,
            # A loss that is no number is shown and counted, not replaced by the mean of those before.
            "logging_nan_inf_filter": False,
            "dataloader_persistent_workers": loader.persistent_workers and loader.workers > 0,
        }
        if not torch.cuda.is_available():
            arguments["use_cpu"] = True
        if not self.supervised:
            arguments["ddp_find_unused_parameters"] = False
            arguments["dataloader_drop_last"] = loader.drop_last
            if self.plan.precision.neftune_alpha:
                arguments["neftune_noise_alpha"] = self.plan.precision.neftune_alpha
        return arguments

    def _most_steps(self) -> int:
        steps = self.plan.steps
        return max(steps.wanted or steps.total, steps.total, 1)

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        average = _average(self.plan, trainer, self.report)
        coefficient = self.sheet.run.kl_coefficient if self.supervised else None
        base = self._base(trainer) if coefficient else None
        host = HfHost(trainer, self._judge(trainer, base), average)
        self.session = self._session(trainer, host)
        meter = Meter(self.plan)
        count_tokens(trainer, meter)
        if coefficient:
            add_kl(trainer, coefficient, base)
        return [SessionCallback(self.sheet, self.session, host, meter)]

    def _session(self, trainer: Any, host: HfHost) -> Session:
        run = self.sheet.run
        stop = StopFile(Path(run.stop_path))
        session = Session(
            plan=self.plan,
            clock=Clock(self.plan, end_by=run.end_by, now=time.time),
            submission=Submission(
                Path(run.submission_dir), run.model_id, Path(run.model_path), run.task_type
            ),
            report=self.report,
            ranks=ranks_here(trainer.args.device),
            host=host,
            stop_asked=lambda: stop.asked,
        )
        if self.sheet.resume_from and (state := resume_state(Path(self.sheet.resume_from))):
            session.restore(state)
            _restore_average(host.average, Path(self.sheet.resume_from), state)
        return session

    def _base(self, trainer: Any) -> Any:
        """For the KL term: a full fine-tune keeps the base beside it, a LoRA has it inside."""
        model = trainer.accelerator.unwrap_model(trainer.model)
        return None if has_adapter(model) else frozen_base(self.sheet.run.model_path, model)

    def _judge(self, trainer: Any, base: Any) -> Judge | None:
        # The loss of a training by rewards says nothing: it is near zero for every model.
        by_loss = self.plan.steps.eval_metric is EvalMetric.LOSS
        if by_loss and self.plan.task.task_type is not TaskType.GRPO:
            return EngineJudge(trainer) if trainer.eval_dataset is not None else None
        if not self.sheet.prepared.eval_rows:
            return None
        ranks = ranks_here(trainer.args.device)
        return HeldOutJudge(self.sheet, trainer, ranks, base, together=_prompts(self.plan))

    def create_lr_scheduler(self, cfg: Any, trainer: Any, optimizer: Any, num_training_steps: int) -> Any:
        """The engine's own schedules know nothing of the clock."""
        from torch.optim.lr_scheduler import LambdaLR

        session = self.session
        if session is None:
            return None
        return LambdaLR(optimizer, lambda _: session.rate)


def _prompts(plan: TrainingPlan) -> int:
    """Sharded, an evaluation generates no more tokens at once than a step of the training does: its ranks can
    not take halves where memory runs out, as one that has all of the model does."""
    if plan.parallelism is not Parallelism.FSDP:
        return PROMPTS
    tokens = plan.batch.micro * plan.batch.accumulation * (plan.sequence.completion_limit or GRPO_COMPLETION)
    return max(min(tokens // (GRPO_GENERATIONS * GRPO_COMPLETION), PROMPTS), 1)


def _average(plan: TrainingPlan, trainer: Any, report: Report) -> MovingAverage | None:
    if plan.ema is None:
        return None
    if trainer.is_fsdp_enabled:
        # The weights that there are now are taken apart and replaced when the training begins: an average of
        # them would stand still, and keep a whole model in memory.
        report.note("ema", "no moving average: the model is sharded, and its weights lie on several GPUs")
        return None
    trained = {name: weight for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    return MovingAverage(trained, plan.ema.decay, plan.ema.every)


def _restore_average(average: MovingAverage | None, folder: Path, state: dict[str, Any]) -> None:
    if average is None or not (folder / AVERAGE_FILE).is_file():
        return
    from safetensors.torch import load_file

    average.restore(load_file(folder / AVERAGE_FILE), int(state.get("average_updates", 0)))
