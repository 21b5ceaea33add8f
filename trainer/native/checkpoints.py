"""Checkpoints to resume from, and models to submit.

A checkpoint holds what is trained, the optimizer and the position in the data, nothing of the frozen base.
Tensors are copied to the host between two steps and written by a thread; a directory gets its name when all
of it is on disk, so a kill leaves whole ones only.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.errors import TrainingError
from trainer.native.distributed import NativeCommunicator, full_tensor
from trainer.native.model import without_adapters
from trainer.native.optimizer import Stepper
from trainer.session.ema import MovingAverage

_NAME = re.compile(r"checkpoint-(\d+)")
#: What reading a torn or foreign file raises, by file kind.
_TORN = (OSError, ValueError, TypeError, KeyError, EOFError, RuntimeError, pickle.UnpicklingError)


class BadCheckpoint(TrainingError):
    """A checkpoint of another run, or not a complete one."""

    code = "bad_checkpoint"


@dataclass(frozen=True)
class TrainingPosition:
    """Position of a run in its steps."""

    step: int
    #: Of the numbers that decide what a step is: a run resumes only from checkpoints of the same shape.
    shape: str
    #: What the session needs to resume.
    session: dict[str, Any] = field(default_factory=dict)


class Saver:
    """One writing thread; a second save waits for the first."""

    def __init__(self, folder: Path, ranks: NativeCommunicator, keep: int) -> None:
        self._folder, self._ranks, self._keep = folder, ranks, keep
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None

    def save(
        self,
        stepper: Stepper,
        position: TrainingPosition,
        on_written: Callable[[Path], None],
        average: MovingAverage | None = None,
    ) -> None:
        """Copy now, write later, then call `on_written` with the folder, in the thread; on every rank."""
        self.wait()
        weights = trained_weights(stepper.net, keep=self._ranks.rank == 0)
        # Each rank's own shards of the optimizer, and its own random numbers.
        rank_state = {"masters": _on_host(stepper.masters.state()), "random": _random_state(self._ranks)}
        if average is not None:
            rank_state["average"] = {"means": _on_host(average.state()), "updates": average.updates}
        if self._ranks.world > 1:
            folder = self._unfinished(position.step)
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(rank_state, folder / f"rank{self._ranks.rank}.pt")
            self._ranks.barrier()
            rank_state = {}
        if self._ranks.rank == 0:
            work = (weights, rank_state, position, on_written)
            self._thread = threading.Thread(target=self._write_safely, args=work, name="saving")
            self._thread.start()

    def wait(self) -> None:
        """Wait until everything is on disk; a failed write is raised here."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed

    def _unfinished(self, step: int) -> Path:
        return self._folder / f".checkpoint-{step}.tmp"

    def _write_safely(
        self,
        weights: dict[str, Tensor],
        rank_state: dict[str, Any],
        position: TrainingPosition,
        on_written: Callable[[Path], None],
    ) -> None:
        try:
            on_written(self._write(weights, rank_state, position))
        except BaseException as error:  # noqa: BLE001 - raised again by `wait`
            self._failed = error

    def _write(
        self, weights: dict[str, Tensor], rank_state: dict[str, Any], position: TrainingPosition
    ) -> Path:
        from safetensors.torch import save_file

        folder, finished = self._unfinished(position.step), self._folder / f"checkpoint-{position.step}"
        folder.mkdir(parents=True, exist_ok=True)
        save_file(weights, folder / "trained.safetensors")
        if rank_state:
            torch.save(rank_state, folder / "rank0.pt")
        (folder / "position.json").write_text(json.dumps(asdict(position) | {"world": self._ranks.world}))
        sync_folder(folder)
        shutil.rmtree(finished, ignore_errors=True)
        folder.rename(finished)
        for _, old in checkpoints_in(self._folder)[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)
        return finished


def load_checkpoint(
    folder: Path,
    stepper: Stepper,
    ranks: NativeCommunicator,
    shape: str,
    average: MovingAverage | None = None,
) -> TrainingPosition:
    """Load a checkpoint. `BadCheckpoint`, on all ranks and with nothing changed, where it is not this
    run's."""
    loaded, problem = None, ""
    try:
        loaded = _read_checkpoint(folder, stepper, ranks, shape)
    except BadCheckpoint as error:
        problem = str(error)
    if ranks.any(loaded is None) or loaded is None:
        raise BadCheckpoint(problem or f"{folder}: another process cannot read its part")
    position, weights, state = loaded
    _copy_weights(stepper.net, weights)
    stepper.masters.load_state(state["masters"])
    if average is not None and "average" in state:
        average.restore(state["average"]["means"], state["average"]["updates"])
    torch.set_rng_state(state["random"]["cpu"].cpu())
    if ranks.device.type == "cuda":
        torch.cuda.set_rng_state(state["random"]["cuda"].cpu(), ranks.device)
    return position


def _read_checkpoint(
    folder: Path, stepper: Stepper, ranks: NativeCommunicator, shape: str
) -> tuple[TrainingPosition, dict[str, Tensor], dict[str, Any]]:
    """All of it, and that it fits, before anything is changed."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        record = json.loads((folder / "position.json").read_text())
        world = record.pop("world")
        position = TrainingPosition(**record)
        weights = load_file(folder / "trained.safetensors")
        # Our own file, of this trainer's making; tensors and plain values are all that is read from it.
        own = folder / f"rank{ranks.rank}.pt"
        state = torch.load(own, map_location=ranks.device, weights_only=True) if world == ranks.world else {}
    except (*_TORN, SafetensorError) as error:
        raise BadCheckpoint(f"{folder} is not a whole state of this trainer: {error}") from error
    if position.shape != shape:
        raise BadCheckpoint(f"{folder} is of another run: {position.shape}, where this one is {shape}")
    if world != ranks.world:
        raise BadCheckpoint(
            f"{folder} was written by {world} processes and cannot be resumed with {ranks.world}"
        )
    own_weights = {name: weight for name, weight in stepper.net.named_parameters() if weight.requires_grad}
    wrong = [
        name
        for name in own_weights.keys() | weights.keys()
        if name not in own_weights or name not in weights or own_weights[name].shape != weights[name].shape
    ]
    if wrong:
        raise BadCheckpoint(f"{folder} is of another model: {sorted(wrong)[:3]} do not fit")
    if state["masters"].get("layout") != stepper.masters.layout:
        raise BadCheckpoint(f"{folder} is of another optimizer, or of other master weights")
    return position, weights, state


def newest_checkpoint(folder: Path) -> Path | None:
    complete = checkpoints_in(folder)
    return complete[-1][1] if complete else None


def checkpoints_up_to(folder: Path) -> list[Path]:
    """This state and the older ones beside it, newest first."""
    last = step_of(folder)
    return [path for step, path in reversed(checkpoints_in(folder.parent)) if step <= last]


def step_of(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def checkpoints_in(folder: Path) -> list[tuple[int, Path]]:
    """Whole states, oldest first."""
    if not folder.is_dir():
        return []
    named = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), path) for match, path in named if match)


def trained_weights(net: nn.Module, keep: bool = True) -> dict[str, Tensor]:
    """Return the trained weights, whole and on the host. Every rank must call this, for shards to be
    gathered; ranks that do not `keep` them copy nothing: a machine has less memory than a model for each GPU.
    """
    named = ((name, weight.detach()) for name, weight in net.named_parameters() if weight.requires_grad)
    return _whole(named, keep)


def _whole(named: Iterable[tuple[str, Tensor]], keep: bool) -> dict[str, Tensor]:
    weights = {}
    for name, weight in named:
        whole = full_tensor(weight)
        if keep:
            weights[name] = whole.to("cpu", copy=True).contiguous()
    return weights


def export_model(net: nn.Module, folder: Path | None, ranks: NativeCommunicator) -> None:
    """The model as transformers and PEFT load it: an adapter, or the whole. Every rank calls this."""
    model, writes = net.model, ranks.rank == 0 and folder is not None
    trained = {name.removeprefix("model."): value for name, value in trained_weights(net, writes).items()}
    if not hasattr(model, "peft_config"):
        # Frozen weights and tied ones, which are listed twice here, come from the model itself.
        known = {
            name.removeprefix("model.") for name, weight in net.named_parameters() if weight.requires_grad
        }
        others = without_adapters(model).state_dict().items()
        trained |= _whole(((name, value) for name, value in others if name not in known), writes)
    if folder is None or ranks.rank:
        return
    folder.mkdir(parents=True, exist_ok=True)
    dtype = without_adapters(model).dtype
    if not hasattr(model, "peft_config"):
        trained = {name: value.to(dtype) for name, value in trained.items()}
    model.save_pretrained(folder, state_dict=trained)


def sync_folder(folder: Path) -> None:
    """Every file and the folder itself on disk."""
    for path in [*(path for path in folder.rglob("*") if path.is_file()), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@torch.no_grad()
def _copy_weights(net: nn.Module, weights: dict[str, Tensor]) -> None:
    for name, weight in net.named_parameters():
        if not weight.requires_grad:
            continue
        if hasattr(weight, "full_tensor"):
            from torch.distributed.tensor import distribute_tensor

            sharded: Any = weight
            weight.copy_(
                distribute_tensor(weights[name].to(sharded.device), sharded.device_mesh, sharded.placements)
            )
        else:
            weight.copy_(weights[name])


def _random_state(ranks: NativeCommunicator) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if ranks.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(ranks.device)
    return state


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _on_host(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on_host(item) for item in value)
    return value
