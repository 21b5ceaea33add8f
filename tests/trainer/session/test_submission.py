"""The submission folder: what is in it, and that it is whole at every instant."""

# Once: it needs nothing of the training stack.

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from core.submission.faults import BadSubmission
from tests.trainer.session.simulated import safetensors, scored, write_adapter
from trainer.session.submission import Submission, submission_kind

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
    empty = Submission(tmp_path / "out" / "submission", "org/model", base)
    empty.prepare()
    return empty


def write_full(folder: Path, shards: int = 1) -> None:
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors())
    names = [f"model-{at + 1:05d}-of-{shards:05d}.safetensors" for at in range(shards)]
    if shards > 1:
        for at, name in enumerate(names):
            (folder / name).write_bytes(safetensors(name=f"layer{at}"))
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


def test_an_adapter_names_the_base_model_by_its_hub_name(submission: Submission) -> None:
    def write(folder: Path) -> None:
        write_adapter(folder)
        config: dict[str, Any] = {"base_model_name_or_path": "/cache/models/x", "peft_type": "LORA"}
        (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")

    submission.put(write, None)
    config = json.loads((submission.place / "adapter_config.json").read_text("utf-8"))
    assert config == {"base_model_name_or_path": "org/model", "peft_type": "LORA"}


@pytest.mark.parametrize("shards", [1, 3])
def test_a_full_model_keeps_the_bases_own_config_and_tokenizer(submission: Submission, shards: int) -> None:
    submission.put(lambda folder: write_full(folder, shards), scored(1.0))
    config = json.loads((submission.place / "config.json").read_text("utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["torch_dtype"] == "float32"  # what the weights are in
    assert (submission.place / "tokenizer.json").is_file()
    assert submission_kind(submission.place) == "full"
    assert (submission.place / "config.json").read_text("utf-8").count("LlamaForCausalLM") == 1
    assert len(list(submission.place.glob("*.safetensors"))) == shards


def test_plain_weights_are_not_called_quantised_because_the_base_came_so(
    submission: Submission, base: Path
) -> None:
    config = json.loads((base / "config.json").read_text("utf-8"))
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (base / "config.json").write_text(json.dumps(config), encoding="utf-8")
    submission.put(write_full, scored(1.0))
    assert "quantization_config" not in json.loads((submission.place / "config.json").read_text("utf-8"))


@pytest.mark.parametrize("name", ["org/model", "/cache/models/x"])
def test_the_card_has_front_matter_that_the_hub_accepts(tmp_path: Path, base: Path, name: str) -> None:
    submission = Submission(tmp_path / "submission", name, base)
    submission.put(write_adapter, None)
    card = (submission.place / "README.md").read_text("utf-8")
    front = yaml.safe_load(card.split("---")[1])
    assert front["library_name"] == "peft"
    assert front.get("base_model") == (name if name == "org/model" else None)


def test_everybody_may_read_it(submission: Submission) -> None:
    def write(folder: Path) -> None:
        write_adapter(folder)
        (folder / "adapter_model.safetensors").chmod(0o600)

    submission.put(write, None)
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in submission.place.iterdir())


@pytest.mark.parametrize("content", [b"", b"\x08\0\0\0\0\0\0\0{}", safetensors()[:-1], safetensors() + b"x"])
def test_half_written_weights_are_refused_and_leave_the_old_submission(
    submission: Submission, content: bytes
) -> None:
    submission.put(write_adapter, scored(2.0))
    before = (submission.place / "adapter_model.safetensors").read_bytes()

    def write(folder: Path) -> None:
        write_adapter(folder)
        (folder / "adapter_model.safetensors").write_bytes(content)

    with pytest.raises(BadSubmission, match="not a valid submission"):
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


def test_a_death_in_the_middle_of_it_is_mended_by_the_next_attempt(submission: Submission) -> None:
    submission.put(write_adapter, scored(2.0))
    submission.place.rename(submission.place.parent / ".submission.old")
    (submission.place.parent / ".submission.new").mkdir()
    submission.prepare()
    assert submission_kind(submission.place) == "adapter"
    assert submission.score == scored(2.0)
    assert not (submission.place.parent / ".submission.new").exists()


def test_a_new_folder_with_the_number_of_an_old_one_has_not_its_score(submission: Submission) -> None:
    submission.put(write_adapter, scored(2.0))
    shutil.rmtree(submission.place)
    submission.place.mkdir()
    write_adapter(submission.place)
    assert submission.score is None


def test_weights_with_the_wrong_number_of_tokens_are_refused(submission: Submission) -> None:
    """Evaluators could not load them: nothing may resize the base model's embeddings."""
    head = {"lm_head.weight": {"dtype": "F32", "shape": [8, 1], "data_offsets": [0, 32]}}

    def write(folder: Path) -> None:
        text = json.dumps(head).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(32))

    with pytest.raises(BadSubmission, match="must have the base model's 7 rows"):
        submission.put(write, scored(1.0))
    assert not submission.exists


#: Forks a writer for every line it reads: an interpreter of its own for each of them would take a minute.
WRITER = """
import os
import sys
from pathlib import Path
from tests.doubles.deaths import die_before
from tests.trainer.session.simulated import safetensors, scored, write_adapter
from trainer.session.submission import Submission

place = Path(sys.argv[1])


def write(step: int) -> None:
    submission = Submission(place, "org/model", place.parent / "base")
    submission.prepare()
    at = 0
    while True:
        at += 1
        submission.put(lambda folder: write_adapter(folder, safetensors(20_000 + at)), scored(1 / at, at))
        if at == 1:
            print(os.getpid(), flush=True)
            if step:
                die_before(step)


for line in sys.stdin:
    child = os.fork()
    if child == 0:
        write(int(line))
    os.waitpid(child, 0)
    print("dead", flush=True)
"""


SEED = int(os.environ.get("GOD_MINER_SEED", "56"))
#: More than two submissions take.
STEPS = range(1, 40)


def assert_whole_whenever_it_dies(tmp_path: Path, deaths: Iterable[tuple[int, float]]) -> None:
    """Of a process that does nothing but submit, killed before a step or after seconds. A tournament uploads
    what is there then."""
    place = tmp_path / "submission"
    command = [sys.executable, "-u", "-c", WRITER, str(place)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as forks:
        assert forks.stdin is not None
        assert forks.stdout is not None
        for step, after_s in deaths:
            forks.stdin.write(f"{step}\n")
            writer = int(forks.stdout.readline())
            if not step:
                time.sleep(after_s)
                os.kill(writer, signal.SIGKILL)
            assert forks.stdout.readline() == "dead\n"
            assert submission_kind(place) == "adapter", f"death before step {step}, after {after_s} s"
            names = sorted(path.name for path in place.iterdir())
            assert names == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
            values = (len((place / "adapter_model.safetensors").read_bytes()) - 100) // 4
            score = Submission(place, "org/model", place.parent / "base").score
            assert score is not None
            assert abs(values - (20_000 + score.step)) < 50
        forks.stdin.close()


@pytest.mark.process
def test_kill_9_before_any_step_never_leaves_half_a_submission(tmp_path: Path) -> None:
    assert_whole_whenever_it_dies(tmp_path, [(step, 0.0) for step in STEPS])


@pytest.mark.campaign
def test_kill_9_at_random_instants_never_leaves_half_a_submission(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    assert_whole_whenever_it_dies(tmp_path, [(0, chance.uniform(0, 0.02)) for _ in range(50)])
