"""The operator's options of a rehearsal, and model and data of a task: the operator's, or stand-ins.

Stand-in models are made by `stand_in_worker` inside the image. There are none for image tasks."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from core.data.archives import BadArchive
from core.data.pictures import inspect_picture_zip
from core.data.rows import BadRows, JsonRows
from core.domain.tournament_rules import MOST_TEST_ROWS, TEST_SHARE
from core.domain.units import show_bytes
from miner.backends.docker.client import DockerClient
from miner.observe.redact import Redactor
from miner.tournament.rehearsal import stand_in_worker
from miner.tournament.rehearsal.build import find_dockerfile, no_dockerfile
from miner.tournament.rehearsal.cache_layout import BadInput, require_model
from miner.tournament.rehearsal.container import run_helper
from miner.tournament.rules import TournamentTask, training_pictures

STAND_IN_MODEL = "stand-in/tiny"
#: Shows a line of progress.
Say = Callable[[str], None]
#: Writes down what is known so far.
Save = Callable[[], None]


@dataclass(frozen=True)
class RehearsalInputs:
    """The operator's inputs of one task; the rest is made up."""

    model: Path | None = None
    model_id: str = STAND_IN_MODEL
    data: Path | None = None


@dataclass(frozen=True)
class Opponent:
    """Another entry, such as the champion's, that trains on the same inputs."""

    #: An address or a directory.
    source: str
    #: Its default branch's head, if none is named.
    commit: str | None = None


@dataclass(frozen=True)
class RehearsalOptions:
    output: Path
    tasks: Sequence[TournamentTask]
    commit: str | None = None
    inputs: Mapping[str, RehearsalInputs] = field(default_factory=dict)
    #: None: what the kind usually gets, or `STAND_IN_HOURS`.
    hours: float | None = None
    #: Directories of datasets that the entry requests, by their names on the hub.
    datasets: Mapping[str, Path] = field(default_factory=dict)
    hub_cache: Path | None = None
    trigger_word: str | None = None
    gpus: tuple[str, ...] = ()
    build_arguments: Mapping[str, str] = field(default_factory=dict)
    build_network: str | None = None
    #: A submission, or who makes one here.
    against: Path | Opponent | None = None
    #: Kill one more training after its first submission.
    kill: bool = False
    #: Removes secrets from a text.
    hide: Callable[[str], str] = field(default_factory=Redactor)
    #: Leave images, caches and checkpoints behind.
    keep: bool = False


# — stand-ins

#: Of the pictures two are kept for the score.
TRAIN_ROWS, TEST_ROWS, TEST_PROMPTS, PICTURES = 400, 60, 8, 14
#: Environment tasks get as many records, all with one sentence.
DUMMY_RECORDS = 1000
WORDS = (  # noqa: SIM905 - as a list it fills a page
    "the quick brown fox jumps over a lazy dog while seven wise owls count green apples and red pears "
    "near old river stones under bright moon light and nobody knows why rain falls on empty fields"
).split()


def stand_in_rows(task: TournamentTask, count: int, seed: int) -> list[dict[str, object]]:
    """Rows with the fields of the task's dataset type."""
    if task.task_type == "EnvTask":
        return [{"prompt": "Interact with this environment."} for _ in range(DUMMY_RECORDS)]
    chance = random.Random(seed)  # noqa: S311 - repeatable rows, no secrets
    return [_ROWS[str(task.task_type)](chance) for _ in range(count)]


def _words(chance: random.Random, most: int = 8) -> list[str]:
    return [chance.choice(WORDS) for _ in range(chance.randint(2, most))]


def _answer(words: list[str]) -> str:
    return "backwards it reads " + " ".join(reversed(words))


def _instruct(chance: random.Random) -> dict[str, object]:
    words = _words(chance)
    instruction = "write it backwards: " + " ".join(words)
    return {"instruct": instruction, "input": "", "output": _answer(words)}


def _chat(chance: random.Random) -> dict[str, object]:
    turns = []
    for _ in range(chance.randint(1, 3)):
        words = _words(chance)
        turns += [{"from": "user", "value": " ".join(words)}, {"from": "assistant", "value": _answer(words)}]
    return {"conversations": turns}


def _pair(chance: random.Random) -> dict[str, object]:
    words = _words(chance)
    return {"prompt": " ".join(words), "chosen": _answer(words), "rejected": " ".join(_words(chance))}


def _prompt(chance: random.Random) -> dict[str, object]:
    return {"prompt": " ".join(_words(chance))}


_ROWS: Mapping[str, Callable[[random.Random], dict[str, object]]] = {
    "InstructTextTask": _instruct,
    "ChatTask": _chat,
    "DpoTask": _pair,
    "GrpoTask": _prompt,
}


def stand_in_pictures(count: int = PICTURES, width: int = 512, height: int = 512) -> bytes:
    """A zip of PNG files with captions, as validators send it."""
    out = io.BytesIO()
    chance = random.Random(0)  # noqa: S311
    with zipfile.ZipFile(out, "w") as archive:
        for number in range(1, count + 1):
            colours = [tuple(chance.randrange(256) for _ in range(3)) for _ in range(2)]
            archive.writestr(f"{number}.png", _png(width, height, colours, chance.randrange(width)))
            archive.writestr(f"{number}.txt", f"two plain fields of colour, {' '.join(_words(chance))}")
    return out.getvalue()


def _png(width: int, height: int, colours: Sequence[Sequence[int]], edge: int) -> bytes:
    """Two fields of colour side by side."""
    row = b"\0" + bytes(colours[0]) * edge + bytes(colours[1]) * (width - edge)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(row * height)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + data


STATISTICS = "statistics.json"
#: For the checkout, logs and the submissions of small models.
FREE_BYTES = 10**9
#: Columns that every row has, as keys of the dataset's type.
_NEEDED_FIELDS = {
    "InstructTextTask": ("field_instruction", "field_output"),
    "ChatTask": ("chat_column",),
    "DpoTask": ("field_prompt", "field_chosen", "field_rejected"),
    "GrpoTask": ("field_prompt",),
}
_WORKER = Path(stand_in_worker.__file__)
_STATISTICS_KINDS = {"InstructTextTask": "instruct", "ChatTask": "instruct", "DpoTask": "dpo"}
_STATISTICS_KINDS |= {"GrpoTask": "grpo", "EnvTask": "env"}


def check_inputs(options: RehearsalOptions) -> None:
    """`BadInput` for what would fail after the build: paths, models, rows, space on the disk."""
    copied = 0
    for task in options.tasks:
        given = options.inputs.get(task.name, RehearsalInputs())
        if task.image_type is not None and given.model is None:
            raise BadInput(
                f"there is no stand-in for a model of {task.name}: name one by --model {task.name}=DIRECTORY"
            )
        for path in (given.model, given.data):
            if path is not None and not path.exists():
                raise BadInput(f"{task.name}: {path} is not there")
        if given.model is not None:
            require_model(given.model, task)
        if given.data is not None:
            _require_data(given.data, task)
        copied += sum(_copied_bytes(path, options.output) for path in (given.model, given.data) if path)
    for name, path in options.datasets.items():
        files = _files_in(path)
        if not files:
            raise BadInput(f"--dataset {name}: {path} is not a directory with files")
        if broken := next((one for one in files if not one.exists()), None):
            raise BadInput(f"--dataset {name}: {broken} is a link to nothing")
        texts = sum(task.image_type is None for task in options.tasks)
        copied += _copied_bytes(path, options.output) * (texts if options.keep else 1)
    if isinstance(options.against, Path) and not any(options.against.rglob("*.safetensors")):
        raise BadInput(
            f"--against {options.against}: there is no *.safetensors in it: name the folder of a submission"
        )
    free = shutil.disk_usage(_existing(options.output)).free
    if free < copied + FREE_BYTES:
        raise BadInput(
            f"{options.output} has {show_bytes(free)} free, and models and data take {show_bytes(copied)} "
            "there: name a directory on their own disk by --output, where they are linked and not copied"
            if copied
            else f"{options.output} has {show_bytes(free)} free: name one on another disk by --output"
        )


def check_entry(checkout: Path, tasks: Sequence[TournamentTask]) -> None:
    """`BadInput` for a task that the entry cannot train, as far as its files tell."""
    for task in tasks:
        if find_dockerfile(checkout, task.dockerfile) is None:
            raise BadInput(f"{task.name}: {no_dockerfile(task.dockerfile)}")
        types = checkout / "core/domain/tasks.py"
        ours = types.is_file() and (checkout / "trainer/text.py").is_file()
        if task.task_type == "EnvTask" and ours and "EnvTask" not in types.read_text("utf-8"):
            raise BadInput(
                "this entry's trainer trains no environment tasks yet: leave out --task environment"
            )


def _require_data(path: Path, task: TournamentTask) -> None:
    """The first row, or the pictures."""
    if task.image_type is not None:
        try:
            inspect_picture_zip(path)
        except BadArchive as error:
            raise BadInput(f"{path} cannot be read as a zip of pictures: {error}") from None
        return
    try:
        with path.open("rb") as file:
            row = next(iter(JsonRows(file)), None)
    except (OSError, BadRows) as error:
        raise BadInput(f"{path} cannot be read as rows: {error}") from None
    wanted = [task.dataset[key] for key in _NEEDED_FIELDS.get(str(task.task_type), ())]
    if row is None or (missing := [name for name in wanted if name not in row]):
        lacks = f"its first row lacks {', '.join(missing)}" if row is not None else "it has no rows"
        raise BadInput(f"{path} is no data of {task.name}: {lacks}; wanted: {', '.join(wanted)}")


def _copied_bytes(path: Path, output: Path) -> int:
    """Files of another disk are copied, others are linked."""
    files = [path] if path.is_file() else _files_in(path)
    device = _existing(output).stat().st_dev
    return sum(one.stat().st_size for one in files if one.exists() and one.stat().st_dev != device)


def _files_in(path: Path) -> list[Path]:
    """List the files below a directory, following links; empty if the directory does not exist."""
    return [Path(at) / name for at, _, names in os.walk(path, followlinks=True) for name in names]


def _existing(path: Path) -> Path:
    return next(one for one in (path, *path.parents) if one.exists())


def training_data(task: TournamentTask, given: RehearsalInputs, folder: Path) -> tuple[Path, Path]:
    """Return the data to train on and to score on: rows, or a directory of pictures. `folder` gets both."""
    if task.image_type is not None:
        source = given.data or folder / "made-up.zip"
        if given.data is None:
            source.write_bytes(stand_in_pictures())
        return split_pictures(source, folder)
    train, test = folder / "train.json", folder / "test.json"
    if given.data is None:
        seed = zlib.crc32(task.name.encode())
        rows = stand_in_rows(task, TRAIN_ROWS, seed)
        # Answers to prompts are generated, token by token.
        kept = stand_in_rows(task, TEST_PROMPTS if task.task_type == "GrpoTask" else TEST_ROWS, seed + 1)
    else:
        rows, kept = split_rows(given.data)
    train.write_text(json.dumps(rows), encoding="utf-8")
    test.write_text(json.dumps(kept), encoding="utf-8")
    return train, test


def make_model_and_statistics(
    client: DockerClient, image: str, task: TournamentTask, given: RehearsalInputs, rows: Path, made: Path
) -> list[str]:
    """Make, in the image, a tiny model for texts if the operator names none, and the validators' statistics
    of model and data. Return what is missing."""
    made.mkdir(exist_ok=True)
    seen = {_WORKER: "/worker.py", rows: "/rows.json"}
    model = "/rehearsal/model"
    if given.model is not None:
        seen, model = {**seen, given.model: "/model"}, "/model"
    kind = _STATISTICS_KINDS[str(task.task_type)]
    target = f"/rehearsal/{STATISTICS}"
    command = ["python", "/worker.py", kind, "/rows.json", model, target, task.stand_in]
    code, output = run_helper(client, image, command, made, read_only=seen)
    if code == 0:
        return []
    last = "; ".join(output.strip().splitlines()[-3:])[-500:]
    if given.model is None:
        raise BadInput(f"the image cannot make a model (exit code {code}): name one by --model; {last}")
    return [f"no statistics of model and data: the image cannot make them; {last}"]


def split_pictures(source: Path, folder: Path) -> tuple[Path, Path]:
    """Split a zip into the training part, as a zip, and as many pictures with captions as validators keep for
    the test, as a directory."""
    captions = {pair.image: pair.caption for pair in inspect_picture_zip(source).pairs}
    count = len(captions) - training_pictures(len(captions))
    if count == len(captions):
        raise BadInput(f"{source} has {count} picture, which validators would keep for the test: add some")
    names = random.Random(0).sample(sorted(captions), count)  # noqa: S311 - repeatable
    train, test = folder / "pictures.zip", folder / "test-pictures"
    test.mkdir()
    with zipfile.ZipFile(source) as given, zipfile.ZipFile(train, "w") as rest:
        for number, name in enumerate(names, 1):
            picture = test / f"{number}{PurePosixPath(name).suffix.lower()}"
            picture.write_bytes(given.read(name))
            if caption := captions[name]:
                text = given.read(caption).decode("utf-8-sig", "replace")
                picture.with_suffix(".txt").write_text(text.strip(), encoding="utf-8")
        kept = {*names, *(captions[name] for name in names)}
        for entry in given.infolist():
            if not entry.is_dir() and entry.filename not in kept:
                rest.writestr(entry, given.read(entry))
    return train, test


def split_rows(path: Path) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """An operator's rows: those to train on, and those to score on."""
    try:
        with path.open("rb") as file:
            rows = list(JsonRows(file))
    except (OSError, BadRows) as error:
        raise BadInput(f"{path} cannot be read as rows: {error}") from None
    if len(rows) < 2:
        raise BadInput(f"{path} has {len(rows)} row, which is kept for the score: add some")
    count = min(max(1, int(len(rows) * TEST_SHARE)), MOST_TEST_ROWS)
    random.Random(0).shuffle(rows)  # noqa: S311 - repeatable
    return rows[count:], rows[:count]
