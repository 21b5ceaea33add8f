"""The uploader's rules: what gets into the repository, and what an evaluator loads of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miner.tournament.rehearsal.upload import as_published, choose_image_file, what_is_uploaded

MODEL = "org/real-model"
CARD = "---\nlibrary_name: peft\nbase_model: 0123456789abcdef\n---\nbase_model: twice\n"


def adapter(folder: Path, size: int = 4000) -> Path:
    folder.mkdir(parents=True)
    config = {"base_model_name_or_path": "0123456789abcdef", "r": 8}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "adapter_model.safetensors").write_bytes(bytes(size))
    (folder / "README.md").write_text(CARD, encoding="utf-8")
    return folder


def test_a_submission_is_uploaded_whole_and_names_the_real_model(tmp_path: Path) -> None:
    upload = what_is_uploaded(adapter(tmp_path / "folder"), MODEL)
    assert upload.problems == ()
    names = [path.name for path in upload.files]
    assert names == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    repository = as_published(upload, tmp_path / "repository")
    config = json.loads((repository / "adapter_config.json").read_text("utf-8"))
    assert config == {"base_model_name_or_path": MODEL, "r": 8}
    card = (repository / "README.md").read_text("utf-8").splitlines()
    assert [line for line in card if line.startswith("base_model:")] == [f"base_model: {MODEL}"] * 2
    # The trainer's own folder stays as it was.
    assert "0123456789abcdef" in (tmp_path / "folder/adapter_config.json").read_text("utf-8")
    assert (tmp_path / "folder/README.md").read_text("utf-8") == CARD


def test_weights_in_a_subfolder_replace_the_submission(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "folder")
    adapter(folder / "checkpoint-500", size=2000)
    upload = what_is_uploaded(folder, MODEL)
    assert upload.from_subfolder == "checkpoint-500"
    assert "checkpoint-500/ holds weights and is uploaded instead" in upload.problems[0]
    repository = as_published(upload, tmp_path / "repository")
    assert (repository / "adapter_model.safetensors").stat().st_size == 2000


@pytest.mark.parametrize("name", ["folder", "folder/README.md", "folder/states", "folder/states/deep/model"])
def test_a_link_out_is_not_followed(name: str, tmp_path: Path) -> None:
    own = adapter(tmp_path / "own files")
    link = tmp_path / name
    if name != "folder":
        adapter(tmp_path / "folder")
        (tmp_path / "folder" / "inside.md").symlink_to("adapter_config.json")
        assert what_is_uploaded(tmp_path / "folder", MODEL).problems == ()
        link.unlink(missing_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(own / "README.md" if name.endswith(".md") else own)
    upload = what_is_uploaded(tmp_path / "folder", MODEL)
    assert (upload.files, upload.rewrites) == ((), ())
    assert "is a link out of the folder" in upload.problems[0]


@pytest.mark.parametrize(
    ("characters", "said"), [(100_000, "RecursionError"), (5 << 20, "more than 4,194,304")]
)
def test_a_configuration_in_depth_or_of_any_size_is_a_problem(
    tmp_path: Path, characters: int, said: str
) -> None:
    (adapter(tmp_path / "folder") / "adapter_config.json").write_text("[" * characters)
    (problem,) = what_is_uploaded(tmp_path / "folder", MODEL).problems
    assert "cannot be read" in problem
    assert said in problem


def test_weights_two_levels_down_replace_nothing(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "folder")
    adapter(folder / "states" / "checkpoint-500")
    upload = what_is_uploaded(folder, MODEL)
    assert upload.from_subfolder is None
    assert Path("states/checkpoint-500/adapter_model.safetensors") in upload.files


def test_small_files_and_git_metadata_count_as_empty(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "weights.safetensors").write_bytes(bytes(1024))
    (folder / ".gitattributes").write_bytes(bytes(5000))
    assert any("for empty" in problem for problem in what_is_uploaded(folder, MODEL).problems)
    (folder / "weights.safetensors").write_bytes(bytes(1025))
    assert what_is_uploaded(folder, MODEL).problems == ()


def test_a_folder_without_weights_or_no_folder_at_all_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "folder" / "logs").mkdir(parents=True)
    problems = what_is_uploaded(tmp_path / "folder", MODEL).problems
    assert len(problems) == 1
    assert "no *.safetensors" in problems[0]
    assert "is not a directory" in what_is_uploaded(tmp_path / "none", MODEL).problems[0]


def test_an_adapters_configuration_that_cannot_be_read_stops_the_uploader(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "folder")
    (folder / "adapter_config.json").write_text("{", encoding="utf-8")
    assert "adapter_config.json cannot be read" in what_is_uploaded(folder, MODEL).problems[0]


def test_states_of_the_optimizer_are_skipped(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "folder")
    for name in ("optimizer.pt", "rng_state_0.pth", "training_args.bin", "logs.txt"):
        (folder / name).write_text("x", encoding="utf-8")
    upload = what_is_uploaded(folder, MODEL)
    assert {path.name for path in upload.skipped} == {"optimizer.pt", "rng_state_0.pth", "training_args.bin"}
    assert Path("logs.txt") in upload.files
    repository = as_published(upload, tmp_path / "repository")
    assert not (repository / "optimizer.pt").exists()


def test_pictures_lie_below_checkpoints(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "last.safetensors").write_bytes(bytes(4000))
    upload = what_is_uploaded(folder, MODEL, image=True)
    assert upload.problems == ()
    assert (as_published(upload, tmp_path / "repository") / "checkpoints/last.safetensors").is_file()


@pytest.mark.parametrize(
    ("names", "older", "newer"),
    [
        ("last last-000010", "last", "last"),
        ("zimage zimage_000002750", "zimage", "zimage_000002750"),
        ("last-000002 last-000010", "last-000010", "last-000010"),
        ("only", "only", "only"),
        ("a/last b/last", "a/last", None),
        ("xlast zimage_7", "xlast", "zimage_7"),
        ("", None, None),
    ],
)
def test_evaluators_choose_one_file_of_pictures(names: str, older: str | None, newer: str | None) -> None:
    choice = choose_image_file(f"checkpoints/{name}.safetensors" for name in names.split())
    assert choice.older == (older and f"checkpoints/{older}.safetensors")
    assert choice.newer == (newer and f"checkpoints/{newer}.safetensors")
    assert bool(choice.problems) == (older != newer or older is None)


def test_pictures_of_which_evaluators_may_load_either_are_a_problem(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("zimage.safetensors", "zimage_000002750.safetensors"):
        (folder / name).write_bytes(bytes(4000))
    problems = what_is_uploaded(folder, MODEL, image=True).problems
    assert len(problems) == 1
    assert "leave exactly one last.safetensors" in problems[0]
