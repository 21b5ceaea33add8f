"""The submission folder: what is in it, and that it is whole at every instant."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.callbacks.simulated import safetensors, scored, write_adapter
from trainer.callbacks import swap
from trainer.callbacks.submission import BadSubmission, Submission, kind_of
from trainer.callbacks.swap import beside, exchange, restore

ROOT = Path(__file__).parents[3]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "vocab_size": 7}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    return folder


@pytest.fixture
def submission(tmp_path: Path, base: Path) -> Submission:
    made = Submission(tmp_path / "out" / "submission", "org/model", base)
    made.prepare()
    return made


def write_full(folder: Path, shards: int = 1) -> None:
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors())
    names = [f"model-{at + 1:05d}-of-{shards:05d}.safetensors" for at in range(shards)]
    if shards > 1:
        for name in names:
            (folder / name).write_bytes(safetensors())
        index = {"weight_map": {f"layer{at}": name for at, name in enumerate(names)}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    changed = {"architectures": ["Other"], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(changed), encoding="utf-8")


def test_an_adapter_is_weights_config_and_card_and_nothing_else(submission: Submission) -> None:
    def write(folder: Path) -> None:
        write_adapter(folder)
        for name in ("config.json", "tokenizer.json", "training_args.bin", "adapter_model.bin"):
            (folder / name).write_text("{}", encoding="utf-8")
        for name in ("ref", "checkpoint-10"):
            (folder / name).mkdir()
            write_adapter(folder / name)

    submission.put(write, scored(1.0))
    names = sorted(path.name for path in submission.place.iterdir())
    assert names == ["README.md", "adapter_config.json", "adapter_model.safetensors"]


def test_an_adapter_names_the_base_model_by_its_hub_name_and_nothing_by_null(
    submission: Submission,
) -> None:
    def write(folder: Path) -> None:
        write_adapter(folder)
        config: dict[str, Any] = {"base_model_name_or_path": "/cache/models/x", "r": 8, "megatron": None}
        (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")

    submission.put(write, None)
    config = json.loads((submission.place / "adapter_config.json").read_text("utf-8"))
    assert config == {"base_model_name_or_path": "org/model", "inference_mode": True, "r": 8}


@pytest.mark.parametrize("shards", [1, 3])
def test_a_full_model_keeps_the_bases_own_config_and_tokenizer(submission: Submission, shards: int) -> None:
    submission.put(lambda folder: write_full(folder, shards), scored(1.0))
    config = json.loads((submission.place / "config.json").read_text("utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["torch_dtype"] == "float32"  # what the weights are in
    assert (submission.place / "tokenizer.json").is_file()
    assert kind_of(submission.place) == "full"
    assert len(list(submission.place.glob("*.safetensors"))) == shards


@pytest.mark.parametrize(("name", "line"), [("org/model", "base_model: org/model"), ("/cache/x", None)])
def test_the_card_has_front_matter_that_the_hub_accepts(
    tmp_path: Path, base: Path, name: str, line: str | None
) -> None:
    submission = Submission(tmp_path / "submission", name, base)
    submission.put(write_adapter, None)
    card = (submission.place / "README.md").read_text("utf-8").splitlines()
    assert card[0] == card[-1] == "---"
    assert ("base_model" in "".join(card)) is (line is not None)
    assert line is None or line in card


def test_everybody_may_read_it(submission: Submission) -> None:
    def write(folder: Path) -> None:
        write_adapter(folder)
        (folder / "adapter_model.safetensors").chmod(0o600)

    submission.put(write, None)
    assert {path.stat().st_mode & 0o777 for path in submission.place.iterdir()} == {0o644}


@pytest.mark.parametrize("content", [b"", b"\x08\0\0\0\0\0\0\0{}", safetensors()[:-1], safetensors() + b"x"])
def test_half_written_weights_are_refused_and_leave_the_old_submission(
    submission: Submission, content: bytes
) -> None:
    submission.put(write_adapter, scored(2.0))
    before = (submission.place / "adapter_model.safetensors").read_bytes()

    def write(folder: Path) -> None:
        write_adapter(folder)
        (folder / "adapter_model.safetensors").write_bytes(content)

    with pytest.raises(BadSubmission, match="no whole weights"):
        submission.put(write, scored(1.0))
    assert (submission.place / "adapter_model.safetensors").read_bytes() == before
    assert submission.score == scored(2.0)
    assert [path.name for path in submission.place.parent.glob(".*.new")] == []


def test_the_score_belongs_to_the_folder_that_is_there(submission: Submission) -> None:
    assert submission.score is None
    submission.put(write_adapter, scored(2.0, 10))
    submission.put(write_adapter, scored(1.0, 20))
    assert Submission(submission.place, "org/model", submission.base).score == scored(1.0, 20)
    submission.put(write_adapter, None)
    assert submission.score is None


def test_without_an_exchange_the_folders_are_moved_one_after_the_other(
    submission: Submission, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap, "exchange", lambda one, other: False)
    submission.put(write_adapter, scored(2.0))
    submission.put(write_adapter, scored(1.0))
    assert submission.score == scored(1.0)
    assert not beside(submission.place, "old").exists()


def test_a_death_between_the_two_moves_is_mended(submission: Submission) -> None:
    submission.put(write_adapter, scored(2.0))
    submission.place.rename(beside(submission.place, "old"))
    beside(submission.place, "new").mkdir()
    restore(submission.place)
    assert kind_of(submission.place) == "adapter"
    assert submission.score == scored(2.0)
    assert not beside(submission.place, "new").exists()


def test_two_folders_change_places_in_one_step(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    assert exchange(tmp_path / "one", tmp_path / "other")
    assert (tmp_path / "one" / "file").read_text() == "other"
    with pytest.raises(FileNotFoundError):
        exchange(tmp_path / "one", tmp_path / "missing")


#: Forks a writer for every line it reads: an interpreter of its own for each of them would take a minute.
WRITER = """
import os
import sys
from pathlib import Path
from tests.trainer.callbacks.simulated import safetensors, scored, write_adapter
from trainer.callbacks.submission import Submission

place = Path(sys.argv[1])


def write() -> None:
    submission = Submission(place, "org/model", place.parent / "base")
    submission.prepare()
    at = 0
    while True:
        at += 1
        submission.put(lambda folder: write_adapter(folder, safetensors(20_000 + at)), scored(1 / at, at))
        if at == 1:
            print(os.getpid(), flush=True)


for _ in sys.stdin:
    child = os.fork()
    if child == 0:
        write()
    os.waitpid(child, 0)
    print("dead", flush=True)
"""


def test_kill_9_at_random_instants_never_leaves_half_a_submission(tmp_path: Path) -> None:
    """Fifty deaths of a process that does nothing but submit. A tournament uploads what lies there then."""
    chance, place = random.Random(56), tmp_path / "submission"
    command = [sys.executable, "-u", "-c", WRITER, str(place)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as forks:
        assert forks.stdin is not None
        assert forks.stdout is not None
        for death in range(50):
            forks.stdin.write("another\n")
            writer = int(forks.stdout.readline())
            time.sleep(chance.uniform(0, 0.02))
            os.kill(writer, signal.SIGKILL)
            assert forks.stdout.readline() == "dead\n"
            assert kind_of(place) == "adapter", f"death {death}"
            names = sorted(path.name for path in place.iterdir())
            assert names == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
            values = (len((place / "adapter_model.safetensors").read_bytes()) - 100) // 4
            score = Submission(place, "org/model", place.parent / "base").score
            assert score is not None
            assert abs(values - (20_000 + score.step)) < 50
        forks.stdin.close()
