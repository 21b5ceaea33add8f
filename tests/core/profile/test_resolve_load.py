from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from core.domain.errors import ConfigError, Problem
from core.profile.resolve import PROFILE_KIND, load_profile, profile_files
from tests.doubles.each import each

#: A key of each part of a profile, and a slip of the finger in it.
TYPOS: tuple[tuple[str, str, str], ...] = (
    ("", "targts: {}", "targets"),
    ("targets", "targets:\n  lora_rr: 5", "lora_r"),
    ("limits", "limits:\n  gpu_memry: 75GB", "gpu_memory"),
    ("container", "container:\n  memry: 75GB", "memory"),
    ("engine_config", "engine_config:\n  axolotle: {}", "axolotl"),
    ("sections.a", "sections:\n  a:\n    target: {}", "targets"),
    ("sections.a.when", "sections:\n  a:\n    when: {tsk: dpo}", "task"),
    ("sections.a.targets", "sections:\n  a:\n    targets: {num_epoch: 1}", "num_epochs"),
    ("sections.a.scale", "sections:\n  a:\n    scale: {lora_rx: 1}", "lora_r"),
    ("sections.a.limits", "sections:\n  a:\n    limits: {max_gpu: 1}", "max_gpus"),
    ("sections.a.engine_config", "sections:\n  a:\n    engine_config: {koyha: {}}", "kohya"),
    ("targets.gpus_by_size", "targets:\n  gpus_by_size: [{abov: 7B, gpus: 1}]", "above"),
    ("targets.lanes", "targets:\n  lanes: {x: {gpu: [1]}}", "gpus"),
    ("targets.lr_stages", "targets:\n  lr_stages: [{share: 1, factr: 1}]", "factor"),
)


@each(("part", "text", "meant"), TYPOS)
def test_a_typo_in_any_part_names_the_file_the_line_the_key_and_the_nearest_key(
    part: str, text: str, meant: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        PROFILE_KIND.parse(f"description: x\n{text}\n", "mine.yaml")
    problem = next(problem for problem in caught.value.problems if "no such key" in problem.rule)
    assert problem.where.startswith("mine.yaml:")
    line = int(problem.where.split(":")[1])
    assert line == text.count("\n") + 2
    assert problem.where.split(": ")[1].startswith(part)
    assert meant in problem.rule


@each(
    ("text", "advice"),
    [
        ("targets: {network_dim: 4}", "here it is called lora_r"),
        ("targets: {max_memory_MB: 75000}", "gpu_memory, and it belongs under limits"),
        ("gpu_memory: 75GB", "belongs under limits"),
        ("lora_r: 4", "belongs under targets"),
        ("limits: {shm_size: 4GB}", "shm, and it belongs under container"),
        ("targets: {epoch: 60}", "here it is called num_epochs"),
    ],
)
def test_names_of_other_tools_and_misplaced_keys_get_advice(text: str, advice: str) -> None:
    with pytest.raises(ConfigError, match="no such key") as caught:
        PROFILE_KIND.parse(text, "p.yaml")
    assert advice in str(caught.value)


@each(
    ("text", "expected"),
    [
        ("targets: {lora_r: true}", "targets.lora_r has value true"),
        ('targets: {lora_r: "64"}', 'has value "64"'),
        ("targets: {learning_rate: .nan}", 'has value ".nan"'),
        ("targets: {lr_scheduler: cosin}", "nearest is cosine"),
        ("targets: {lr_cycles: 10-5}", "5-10"),
        ("targets: {lr_stages: [{share: 0.5, factor: 1}]}", "add up to 0.5"),
        ("targets: 5", "keys with values are needed"),
        ("limits: {gpu_memory: 75}", "written with its unit"),
        ("env: {NCCL_DEBUG: on}", "quote it"),
        ("env: {'A B': x}", "pattern"),
        ("container: {cpus: all}", "pattern"),
        ("container: {cpus: 0-99999999999}", "pattern"),  # would be counted one by one
        ("sections: {a: {when: {size: 13B-7B}}}", "is empty"),
        ("sections: {a: {when: {task: dop}}}", "instruct, chat, dpo, grpo, image"),
        ("sections: {a: {when: {family: lama}}}", "nearest is llama"),
        ("", "is empty; write what the profile says"),
        ("# only a comment\n", "is empty"),
        ("targets:\n  learning_rate: 8e4\n", "must be at most 1; did you mean 8e-4?"),
        ("targets:\n  learning_rate: fast\n", "a number is needed"),
        ("targets:\n  lora_r: 4.5\n", "a whole number is needed"),
        ("targets:\n  bf16: 3\n", "yes or no is needed"),
        ("targets:\nlimits: {}\n", "keys with values are needed below it, indented"),
        ("targets:\n\tlora_r: 4\n", "indented with a tab: YAML takes blanks only"),
        ("targets:\n  lora_r: 4\n    lora_alpha: 8\n", "a line is indented further than the one above it"),
        ("targets:\n  lora_r: 4\n lora_alpha: 8\n", "begin in the same column"),
        ("targets: {lora_r: 4\n", "not closed"),
        ("- a", "a mapping of keys"),
    ],
)
def test_a_mistake_is_explained_in_plain_words(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PROFILE_KIND.parse(text, "mine.yaml")
    assert expected in str(caught.value)
    assert all("mine.yaml" in problem.where for problem in caught.value.problems)
    assert not re.search(r"Input should|valid (number|integer|boolean)|dictionary", str(caught.value))


def test_all_mistakes_are_reported_at_once_in_the_order_of_the_file() -> None:
    text = "targets:\n  lora_r: -1\n  lora_rr: 1\nlimits:\n  gpu_memory: 5\n"
    with pytest.raises(ConfigError) as caught:
        PROFILE_KIND.parse(text, "p.yaml")
    lines = [problem.where.split(": ")[0] for problem in caught.value.problems]
    assert lines == ["p.yaml:2", "p.yaml:3", "p.yaml:5"]


def test_one_task_may_be_written_without_a_list_and_numbers_as_environment() -> None:
    profile = PROFILE_KIND.parse(
        "sections: {a: {when: {task: dpo, family: qwen}}}\nenv: {NCCL_NTHREADS: 8}", "p.yaml"
    )
    assert [task.value for task in profile.sections["a"].when.task or ()] == ["DpoTask"]
    assert profile.env == {"NCCL_NTHREADS": "8"}


def write(folder: Path, **texts: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder


def test_an_operator_s_file_hides_the_shipped_one_and_may_extend_it(tmp_path: Path) -> None:
    mine = write(tmp_path, steady="extends: steady\ntargets: {lora_r: 77}")
    profile = load_profile("steady", [mine])
    assert [layer.file.name for layer in profile.layers] == ["base.yaml", "steady.yaml", "steady.yaml"]
    assert profile.layers[-1].content.targets.lora_r == 77
    assert profile.hardware == "4xH100"
    assert profile_files([mine])["steady"] == mine / "steady.yaml"
    assert "h100x4" in profile_files([mine])


def test_a_profile_is_found_by_path_and_its_parent_beside_it(tmp_path: Path) -> None:
    write(tmp_path, child="extends: ./parent.yaml", parent="extends: h100x4\ndescription: p")
    profile = load_profile(str(tmp_path / "child.yaml"))
    assert [layer.name for layer in profile.layers] == ["base", "h100x4", "parent", "child"]


@pytest.mark.parametrize("where", ["{elsewhere}/secret.yaml", "../elsewhere/secret.yaml", "/proc/x.yaml"])
def test_a_text_that_is_checked_reads_no_file_outside_of_the_folders_of_profiles(
    tmp_path: Path, where: str
) -> None:
    elsewhere = write(tmp_path / "elsewhere", secret="targets: {lora_r: SECRET}")
    mine, text = tmp_path / "profiles", f"description: x\nextends: {where.format(elsewhere=elsewhere)}"
    with pytest.raises(ConfigError, match=r"a\.yaml:2: extends .*must name a file in") as caught:
        PROFILE_KIND.layers_of_text(text, mine / "a.yaml", [mine])
    assert "SECRET" not in str(caught.value)
    assert str(mine) in str(caught.value)


def test_a_file_of_the_operators_extends_any_other(tmp_path: Path) -> None:
    write(tmp_path / "other", up="targets: {lora_r: 7}")
    mine = write(tmp_path / "profiles", a="extends: ../other/up.yaml")
    assert load_profile("a", [mine]).layers[0].content.targets.lora_r == 7
    layers = PROFILE_KIND.layers_of_text("extends: ./a.yaml", mine / "b.yaml", [mine])
    assert [layer.name for layer in layers] == ["up", "a", "b"]


def test_circular_extends_is_reported_with_files_and_line(tmp_path: Path) -> None:
    mine = write(tmp_path, a="extends: b", b="description: x\nextends: c", c="extends: a")
    with pytest.raises(ConfigError) as caught:
        load_profile("a", [mine])
    assert "a.yaml → b.yaml → c.yaml → a.yaml" in str(caught.value)
    assert "c.yaml:1: extends" in str(caught.value)


def test_a_missing_parent_is_reported_with_the_known_names(tmp_path: Path) -> None:
    mine = write(tmp_path, a="description: x\nextends: h100x5")
    with pytest.raises(ConfigError, match=r"a\.yaml:2: extends has value h100x5: .*h100x4") as caught:
        load_profile("a", [mine])
    assert "steady" in str(caught.value)


@each("name", ["nope", "no/such.yaml", "", "..", "a\x00b"])
def test_a_missing_profile_is_reported_with_the_known_names(name: str) -> None:
    with pytest.raises(ConfigError, match="no such profile; known by name: base, "):
        load_profile(name)


def test_an_endless_chain_of_extends_is_rejected(tmp_path: Path) -> None:
    mine = write(tmp_path, **{f"p{n}": f"extends: p{n + 1}" for n in range(30)}, p30="")
    with pytest.raises(ConfigError, match="extends"):
        load_profile("p0", [mine])


def test_a_file_that_is_not_text_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_profile("a", [tmp_path])


def test_a_change_of_any_layer_changes_the_digest(tmp_path: Path) -> None:
    mine = write(tmp_path, a="extends: b", b="targets: {lora_r: 1}")
    before = load_profile("a", [mine]).digest
    assert load_profile("a", [mine]).digest == before
    write(tmp_path, b="targets: {lora_r: 2}")
    assert load_profile("a", [mine]).digest != before


WORDS = st.sampled_from(
    ["targets", "limits", "sections", "when", "scale", "lora_r", "size", "task", "gpu_memory", "env", "a", ""]
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["75GB", "dpo", "7B-13B", "cosine", "90m"])
)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(WORDS | st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(TREES)
def test_any_tree_of_yaml_is_a_profile_or_a_config_error(tree: Any) -> None:
    with contextlib.suppress(ConfigError):
        PROFILE_KIND.parse(yaml.safe_dump(tree), "p.yaml")


@given(st.dictionaries(st.sampled_from(PROFILE_KIND.keys.keys_at(("targets",))), LEAVES, max_size=5))
def test_any_targets_are_accepted_or_rejected_key_by_key(targets: dict[str, Any]) -> None:
    problems: list[Problem] = []
    try:
        PROFILE_KIND.parse(json.dumps({"targets": targets}), "p.yaml")
    except ConfigError as error:
        problems = error.problems
    assert all(problem.where.startswith("p.yaml:1") for problem in problems)
