"""Train and score the cells of one family, in the Python that has ComfyUI's packages.

python -m benchmarks.pictures.worker ORDER

ORDER is a `WorkOrder` as JSON; each figure is a line of JSON on stdout. `time.time` and `time.monotonic`
count this process's CPU seconds, so that what else the machine does decides nothing.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.pictures.cells import FIELD_SHARE, NOISES, SIDE, PictureCell, WorkOrder


def _count_cpu_seconds() -> None:
    start, began = time.time(), time.process_time()
    time.time = time.monotonic = lambda: start + time.process_time() - began  # type: ignore[assignment]


class Rig:
    """ComfyUI with one family's base, and what trains and scores adapters of it."""

    def __init__(self, order: WorkOrder) -> None:
        import comfyui_evaluation as separate

        separate.load_comfyui(order.checkout)
        import comfy.cli_args

        # As on a GPU.
        comfy.cli_args.args.use_pytorch_cross_attention = True
        from benchmarks.pictures.bases import make_base
        from core.models.image_families import IMAGE_FAMILIES
        from core.runs.picture_run import PictureModel
        from trainer.pictures import measure, session

        measure._LONG_SIDE = SIDE
        # Seconds where a tournament has an hour: what is kept free shrinks with them.
        session.SLACK_S = 0.3
        self.order, self.family = order, order.family
        self.folder = Path(order.folder) / order.family
        place = Path(order.bases) / order.family
        if not (place / "trained.json").is_file():
            losses = make_base(order.family, place, Path(order.checkout), order.base_s, SIDE)
            (place / "trained.json").write_text(json.dumps(losses))
        tell(kind="base", family=order.family, **json.loads((place / "trained.json").read_bytes()))
        record = separate.read_record(place / "model.json")
        self.model = PictureModel.model_validate(record)
        self.evaluator = separate.Evaluator(record, None, NOISES, SIDE)
        rules = IMAGE_FAMILIES[self.model.family].flow
        assert rules is not None
        self.recipe = rules.recipe.model_copy(
            update={"rate": rules.recipe.rate * order.scale, "checkpointing": False}
        )

    def ours(self, cell: PictureCell) -> Path:
        """The trainer, from its first line to the outcome."""
        from trainer.pictures import train as trainer
        from trainer.session.progress_log import ProgressLog

        run = self._run(cell)
        submission = self._submission(run)
        with _quiet(Path(run.work_dir) / "log"):
            trainer.train(run, ProgressLog(Path(run.progress_path)), submission)
        return Path(run.submission_dir) / run.submission_file

    def _run(self, cell: PictureCell) -> Any:
        from core.runs.picture_run import PictureRun

        folder = self.folder / str(cell)
        shutil.rmtree(folder / "run", ignore_errors=True)
        (folder / "run").mkdir(parents=True)
        paths = {"submission_dir": "submission", "work_dir": "", "progress_path": "progress.jsonl"}
        paths |= {"outcome_path": "outcome.json", "stop_path": "stop"}
        places = {name: str(folder / "run" / path) for name, path in paths.items()}
        return PictureRun(
            model=self.model,
            recipe=self.recipe,
            pictures_dir=str(folder / "pictures"),
            model_id=f"small/{self.family}",
            end_by=time.time() + self.order.seconds,
            seed=cell.seed,
            **places,
        )

    def _submission(self, run: Any) -> Any:
        from core.domain.tasks import TaskType
        from trainer.session.submission import Submission

        place, base = Path(run.submission_dir), Path(run.model.base_path)
        return Submission(place, run.model_id, base, TaskType.IMAGE, image_type=run.model.family)

    def peer(self, cell: PictureCell, rate: float) -> Iterator[tuple[str, Path]]:
        """The recipe of ai-toolkit on the same model, with the same layers: uniform times, the empty text for
        half of the steps, a constant rate. Yield two checkpoints: after as much of the clock as the field's
        steps for so many pictures take, and at the clock's end."""
        import torch

        from core.models.image_families import PictureRecipe
        from trainer.pictures import adapter as adapters

        seconds, recipe = self.order.seconds, PictureRecipe(rank=32)
        end_by = time.time() + seconds
        field_by = end_by - seconds * max(1 - FIELD_SHARE[self.family] * cell.pictures, 0.0)
        stack, base, pictures = self._loaded(cell)
        adapter = adapters.Adapter(base.model.diffusion_model, recipe, stack.device)
        adapter.begin(cell.seed)
        drawn, noise_of = random.Random(cell.seed), torch.Generator().manual_seed(cell.seed)
        parameters = list(adapter.parameters.values())
        optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=1e-4)
        queue: list[Any] = []
        ended = False

        def saved(name: str) -> tuple[str, Path]:
            file = self.folder / str(cell) / f"{name}.safetensors"
            adapters.save_adapter(adapter.weights(), file)
            return name, file

        while time.time() < end_by:
            if not ended and time.time() >= field_by:
                ended = True
                yield saved("field")
            queue = queue or drawn.sample(pictures, len(pictures))
            picture = queue.pop()
            text = "" if drawn.random() < 0.5 else picture.caption
            loss = self._loss(stack, base, adapter, picture, text, drawn.uniform(0.002, 0.998), noise_of)
            optimizer.zero_grad(set_to_none=True)
            loss()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
        if not ended:
            yield saved("field")
        yield saved("last")

    def _loaded(self, cell: PictureCell) -> tuple[Any, Any, list[Any]]:
        from trainer.pictures.dataset import read_pictures
        from trainer.pictures.stack import Stack, make_trainable

        stack = Stack(self.model)
        base = stack.load_base(self.model.base_path)
        make_trainable(base.model.diffusion_model)
        pictures = read_pictures(self.folder / str(cell) / "pictures", lambda *_: None)
        encoded = stack.encode_pictures(base, pictures)
        stack.encode_texts(["", *(picture.caption for picture in encoded)])
        return stack, base, encoded

    @staticmethod
    def _loss(
        stack: Any, base: Any, adapter: Any, picture: Any, text: str, sigma: float, noise_of: Any
    ) -> Any:
        import torch

        from trainer.pictures.measure import flow_losses, noisy

        noise = torch.randn(picture.latent.shape, generator=noise_of)
        noised, target = noisy(picture.latent, noise, sigma), noise - picture.latent

        def visit(predict: Any) -> None:
            denoised = predict(noised, torch.full((1,), sigma))
            flow_losses(noised, denoised, target, sigma).mean().backward()

        def backward() -> None:
            with stack.training(), adapter.trained():
                stack.predicting(base, picture, text, visit)

        return backward

    def long_run(self, cell: PictureCell) -> Iterator[tuple[int, Path]]:
        """One training at the family's rate that goes on past its optimum; its states as files, by step."""
        import torch

        from trainer.pictures import adapter as adapters
        from trainer.pictures.dataset import split, training_cases
        from trainer.session.ema import MovingAverage

        end_by = time.time() + self.order.long_s
        stack, base, pictures = self._loaded(cell)
        adapter = adapters.Adapter(base.model.diffusion_model, self.recipe, stack.device)
        adapter.begin(cell.seed)
        optimizer = torch.optim.AdamW(
            adapter.parameters.values(), lr=self.recipe.rate, betas=(0.9, 0.99), weight_decay=0.01
        )
        average = MovingAverage(adapter.parameters, self.recipe.ema_decay)
        trained = split(pictures, self.recipe.held_out_share, self.recipe.held_out_least).trained
        cases, noise_of = training_cases(trained, cell.seed), torch.Generator().manual_seed(cell.seed)
        step, due = 0, 48.0
        while time.time() < end_by:
            case = next(cases)
            sigma = (case.band + 0.5) / 16
            backward = self._loss(stack, base, adapter, case.picture, case.text, sigma, noise_of)
            optimizer.zero_grad(set_to_none=True)
            backward()
            torch.nn.utils.clip_grad_norm_(list(adapter.parameters.values()), 1.0)
            optimizer.step()
            step += 1
            average.stepped(step)
            if step >= due:
                due *= 1.5
                file = self.folder / str(cell) / f"long-{step}.safetensors"
                with average.applied():
                    adapters.save_adapter(adapter.weights(), file)
                yield step, file


@contextmanager
def _quiet(log: Path) -> Iterator[None]:
    """The trainer's own lines go to a file."""
    stdout, stderr = sys.stdout, sys.stderr
    with log.open("w") as file:
        sys.stdout = sys.stderr = file
        try:
            yield
        finally:
            sys.stdout, sys.stderr = stdout, stderr


def tell(**figures: Any) -> None:
    print(json.dumps(figures), flush=True)


def main(order: WorkOrder) -> None:
    import torch

    torch.set_num_threads(1)
    _count_cpu_seconds()
    rig = Rig(order)
    for cell in order.cells:
        folder = rig.folder / str(cell)
        shutil.rmtree(folder, ignore_errors=True)
        cell.write(folder)
        rig.evaluator.read(folder / "unseen", NOISES, SIDE)
        tell(kind="score", cell=str(cell), side="base", **scored(rig, "base"))
        # A training's states are scored when it is over: that takes none of its time.
        for rate in order.peer_rates:
            for side, file in list(rig.peer(cell, rate)):
                tell(kind="score", cell=str(cell), side=side, rate=rate, **scored(rig, str(file)))
        if order.ours:
            tell(kind="score", cell=str(cell), side="ours", **scored(rig, str(rig.ours(cell))))
        if order.long_s:
            for step, file in list(rig.long_run(cell)):
                tell(kind="score", cell=str(cell), side="long", step=step, **scored(rig, str(file)))


def scored(rig: Rig, adapter: str) -> dict[str, Any]:
    began = time.process_time()
    row = rig.evaluator.score(adapter)
    return {"score": row["score"], "cpu_s": round(time.process_time() - began, 1)}


if __name__ == "__main__":
    main(WorkOrder.read(sys.argv[1]))
