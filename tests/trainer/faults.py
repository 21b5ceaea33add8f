"""What can go wrong in a training, brought about on purpose; and looks behind the engine's curtain.

Applied in the training process before the engine begins, as the fork server is asked to.
"""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any


def _wrap_step(change: Any) -> None:
    """`change(trainer, inputs)` before each micro step of supervised training."""
    from axolotl.core.trainers import AxolotlTrainer
    from transformers import Trainer

    plain = Trainer.training_step

    def step(self: Any, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        change(self, inputs)
        return plain(self, model, inputs, *rest, **named)

    AxolotlTrainer.training_step = step


def out_of_memory_above_one_row() -> None:
    def change(trainer: Any, inputs: Any) -> None:
        import torch

        if inputs["input_ids"].shape[0] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    _wrap_step(change)


def broken_after_ten_steps() -> None:
    """Weights become NaN, as after a step that was much too large."""

    def change(trainer: Any, inputs: Any) -> None:
        import torch

        if trainer.state.global_step == 10:
            with torch.no_grad():
                next(weight for weight in trainer.model.parameters() if weight.requires_grad).fill_(math.nan)

    _wrap_step(change)


def raises_at_step_five() -> None:
    def change(trainer: Any, inputs: Any) -> None:
        if trainer.state.global_step == 5:
            raise RuntimeError("device-side assert triggered")

    _wrap_step(change)


def slower_steps() -> None:
    """A fifth of a second each: a machine whose speed the plan has not guessed."""
    _wrap_step(lambda trainer, inputs: time.sleep(0.2))


def worse_every_time() -> None:
    """The held-out score after the first evaluation."""
    from trainer.axolotl.plugin import HeldOutScorer

    scores: list[float] = []

    def score(self: HeldOutScorer) -> float:
        scores.append(5.0 + len(scores))
        self.rewarded = None
        return scores[-1]

    HeldOutScorer.score = score  # type: ignore[method-assign]


def better_every_time() -> None:
    """Judged every other step and in no time: so often is there a submission."""
    from trainer.axolotl.plugin import HeldOutScorer
    from trainer.session.clock import RunClock

    scores: list[float] = []

    def score(self: HeldOutScorer) -> float:
        scores.append(1.0 / (len(scores) + 2))
        self.rewarded = None
        return scores[-1] if self.lower_is_better else -scores[-1]

    HeldOutScorer.score = score  # type: ignore[method-assign]
    RunClock._evaluation_due = lambda self: self.done % 2 == 0  # type: ignore[method-assign]


def all_rows_are_judged() -> None:
    """However slow this machine is: on a busy one a scorer affords some of them, which score otherwise."""
    from trainer.axolotl.plugin import HeldOutScorer

    plain = HeldOutScorer.score_base
    HeldOutScorer.score_base = lambda self, _, untouched: plain(self, 1e9, untouched)  # type: ignore[method-assign]


def judged_every(steps: str) -> None:
    """At these steps and at the end, however long steps and evaluations take."""
    from trainer.session import session
    from trainer.session.clock import RunClock

    session.AGREE_S = 0.0  # else the speed decides which steps are asked about
    RunClock._evaluation_due = lambda self: self.done % int(steps) == 0  # type: ignore[method-assign]


def _ends_by(session: Any, moment: float) -> None:
    session.clock.end_by = moment
    Path(os.environ["GOD_MINER_LAUNCH_SPEC"]).with_name("end_by").write_text(str(moment))


def cut_off(seconds: str) -> None:
    """The time is over so long after the training has begun, however long it took to begin."""
    from trainer.session.session import Session

    plain = Session.begin

    def begin(self: Session) -> None:
        _ends_by(self, self.clock.now() + float(seconds))
        plain(self)

    Session.begin = begin  # type: ignore[method-assign]


def steps_take(seconds: str) -> None:
    """By the session's clock, which stands still otherwise: how fast this machine is makes no difference."""
    from trainer.session import session
    from trainer.session.session import Session

    session.AGREE_S = 0.0
    begin, stepped, began = Session.begin, Session.stepped, time.time()

    def with_own_clock(self: Session) -> None:
        self.clock.now = lambda: began + self.step * float(seconds)
        begin(self)

    Session.begin = with_own_clock  # type: ignore[method-assign]
    Session.stepped = lambda self, _: stepped(self, float(seconds))  # type: ignore[method-assign]


def _after_a_submission(act: Any) -> None:
    """`act(session)` after each."""
    from trainer.session.session import Session

    plain = Session.write

    def write(self: Session, *rest: Any) -> None:
        plain(self, *rest)
        act(self)

    Session.write = write  # type: ignore[method-assign]


def goes_on_after_the_first_submission() -> None:
    """Not before some more evaluations would have had room, however slow the machine is."""
    extended = []

    def extend(session: Any) -> None:
        if not extended:
            extended.append(True)
            _ends_by(session, max(session.clock.end_by, time.time() + 3 + 3 * session.clock.eval_s))

    _after_a_submission(extend)


def asked_to_stop_after_the_first_submission() -> None:
    from trainer.handoff import LaunchSpec

    # Rows are prepared in a process of their own, which has no launch yet.
    _after_a_submission(lambda session: Path(LaunchSpec.read().run.stop_path).touch())


def searches_in_few_steps(most: str) -> None:
    """However much time there is for it."""
    from trainer.session import learning_rate

    learning_rate.MAX_STEPS = int(most)


def unseeded() -> None:
    """As a process begins in which something has drawn before."""
    import torch

    torch.seed()


def dumps_arguments() -> None:
    """The arguments that the engine's trainer really has, beside the launch spec."""
    from transformers import Trainer

    plain = Trainer.train

    def train(self: Any, *rest: Any, **named: Any) -> Any:
        place = Path(os.environ["GOD_MINER_LAUNCH_SPEC"]).with_name("arguments.json")
        arguments = {
            key: value for key, value in vars(self.args).items() if isinstance(value, int | float | str)
        }
        arguments["callbacks"] = [type(one).__name__ for one in self.callback_handler.callbacks]
        arguments["trainer"] = type(self).__name__
        arguments["loss"] = self.compute_loss.__qualname__
        function = getattr(self.accelerator.unwrap_model(self.model), "loss_function", None)
        arguments["at_labels"] = getattr(getattr(function, "__self__", None), "at_labels", None)
        place.write_text(json.dumps(arguments), encoding="utf-8")
        return plain(self, *rest, **named)

    Trainer.train = train


def asks_after(step: str, micro: str, duty: str) -> None:
    """The control file comes after this step; it is looked at after every one."""
    from core.runs.run_files import RunControl, write_control
    from trainer.handoff import LaunchSpec
    from trainer.session import session
    from trainer.session.control import ControlFile
    from trainer.session.session import Session

    session.AGREE_S = 0.0
    take, stepped = ControlFile.take, Session.stepped

    def take_now(self: ControlFile) -> Any:
        self._next = 0.0
        return take(self)

    def step_and_ask(self: Session, seconds: float) -> Any:
        path = LaunchSpec.read().run.control_path
        if self.step + 1 == int(step) and self.ranks.rank == 0 and path is not None:
            write_control(Path(path), RunControl(number=7, micro=int(micro), duty=float(duty)))
        return stepped(self, seconds)

    ControlFile.take = take_now  # type: ignore[method-assign]
    Session.stepped = step_and_ask  # type: ignore[method-assign]
