from __future__ import annotations

from pathlib import Path

import pytest

from core.domain.errors import ConfigError
from core.domain.tasks import ImageModelType, TaskType
from core.models.facts import ModelFacts
from core.models.identify import facts_from_name
from core.profile.resolve import LoadedProfile, load_profile, resolve_profile
from core.profile.schema import ResolvedProfile
from tests.core.profile.test_resolve_load import write
from tests.doubles.each import each


def model(params: float = 8.03e9, name: str = "llama") -> ModelFacts:
    return facts_from_name(name, round(params))


def picture(kind: ImageModelType) -> ModelFacts:
    return facts_from_name(kind.value, None, kind)


def from_text(folder: Path, text: str, **others: str) -> LoadedProfile:
    return load_profile("mine", [write(folder, mine=text, **others)])


def resolved(folder: Path, text: str, **others: str) -> ResolvedProfile:
    return resolve_profile(from_text(folder, text, **others), TaskType.INSTRUCT, model())


def test_later_files_win_and_values_have_an_origin(tmp_path: Path) -> None:
    profile = resolved(
        tmp_path,
        "extends: parent\ntargets:\n  lora_r: 32\n",
        parent="targets: {lora_r: 16, lora_alpha: 5}\nlimits: {gpu_memory: 70GB}\n",
    )
    assert (profile.targets.lora_r, profile.targets.lora_alpha) == (32, 5)
    assert profile.limits.gpu_memory == 70_000_000_000
    assert str(profile.origin("targets.lora_r")) == "mine.yaml:3"
    assert str(profile.origin("targets.lora_alpha")) == "parent.yaml:1"
    assert str(profile.origin("targets.learning_rate")) == "default"
    assert profile.is_set("targets.lora_r")
    assert not profile.is_set("targets.learning_rate")


def test_null_takes_back_what_a_parent_has_set(tmp_path: Path) -> None:
    parent = "targets: {num_epochs: 8}"
    profile = resolved(tmp_path, "extends: parent\ntargets: {num_epochs: null}", parent=parent)
    assert profile.targets.num_epochs is None
    assert profile.is_set("targets.num_epochs")


def test_a_section_beats_a_general_value_even_of_a_later_file(tmp_path: Path) -> None:
    profile = resolved(
        tmp_path,
        "extends: parent\ntargets: {lora_r: 32}",
        parent="sections: {small: {when: {size: <13B}, targets: {lora_r: 8}}}",
    )
    assert profile.targets.lora_r == 8
    assert profile.sections == ("small",)
    assert str(profile.origin("targets.lora_r")) == "parent.yaml:1 (small)"


def test_a_section_of_the_same_name_is_merged_into_the_parent_s_in_its_place(tmp_path: Path) -> None:
    profile = resolved(
        tmp_path,
        "extends: parent\nsections: {one: {targets: {lora_r: 99, lora_dropout: 0.3}}}",
        parent="sections:\n  one: {when: {task: instruct}, targets: {lora_r: 1, lora_alpha: 2}}\n"
        "  two: {targets: {lora_r: 7}}",
    )
    assert profile.sections == ("one", "two")
    assert (profile.targets.lora_r, profile.targets.lora_alpha, profile.targets.lora_dropout) == (7, 2, 0.3)


def test_a_section_of_the_same_name_may_change_the_selector(tmp_path: Path) -> None:
    parent = "sections: {one: {when: {task: instruct}, targets: {lora_r: 1}}}"
    text = "extends: parent\nsections: {one: {when: {task: dpo}}}"
    assert resolved(tmp_path, text, parent=parent).sections == ()


@pytest.mark.parametrize(
    ("when", "task", "facts", "matches"),
    [
        ("{task: dpo}", TaskType.DPO, model(), True),
        ("{task: [chat, dpo]}", TaskType.INSTRUCT, model(), False),
        ("{size: 7B-13B}", TaskType.CHAT, model(7e9), True),
        ("{size: 7B-13B}", TaskType.CHAT, model(13e9), False),
        ("{size: <7B}", TaskType.CHAT, model(6.99e9), True),
        ("{size: '>=70B'}", TaskType.CHAT, model(70e9), True),
        ("{family: [qwen]}", TaskType.CHAT, model(name="Qwen/Qwen2.5-7B"), True),
        ("{family: llama}", TaskType.CHAT, model(name="Qwen/Qwen2.5-7B"), False),
        ("{image: flux}", TaskType.IMAGE, picture(ImageModelType.FLUX), True),
        ("{image: flux}", TaskType.IMAGE, picture(ImageModelType.SDXL), False),
        ("{image: flux}", TaskType.DPO, model(), False),
        ("{task: image}", TaskType.IMAGE, picture(ImageModelType.KREA2), True),
        ("{}", TaskType.GRPO, model(), True),
        ("{task: dpo, size: <7B}", TaskType.DPO, model(8e9), False),
    ],
)
def test_all_that_a_selector_says_must_hold(
    tmp_path: Path, when: str, task: TaskType, facts: ModelFacts, matches: bool
) -> None:
    profile = from_text(tmp_path, f"sections: {{a: {{when: {when}, targets: {{lora_r: 3}}}}}}")
    assert (resolve_profile(profile, task, facts).targets.lora_r == 3) is matches


def test_factors_of_all_matching_sections_multiply_at_the_very_end(tmp_path: Path) -> None:
    profile = resolved(
        tmp_path,
        "targets: {lora_r: 512, learning_rate: 4e-4, micro_batch_size: 3}\n"
        "sections:\n"
        "  a: {scale: {lora_r: 1.4, learning_rate: 1.2}}\n"
        "  b: {targets: {lora_r: 256}, scale: {lora_r: 0.5, micro_batch_size: 0.1}}\n",
    )
    assert profile.targets.lora_r == 176, "256 · 0.7, to a multiple of 8"
    assert profile.targets.learning_rate == 0.00048
    assert profile.targets.micro_batch_size == 1
    assert profile.before_scale == {"lora_r": 256, "learning_rate": 0.0004, "micro_batch_size": 3}
    assert str(profile.origin("scale.lora_r")) == "mine.yaml:4 (b)"


@pytest.mark.parametrize(("rank", "factor", "scaled"), [(4, 0.5, 2), (1, 0.1, 1), (8, 0.9, 8), (8, 1.6, 16)])
def test_scaled_ranks_are_whole_and_at_least_one(
    tmp_path: Path, rank: int, factor: float, scaled: int
) -> None:
    text = f"targets: {{lora_r: {rank}}}\nsections: {{a: {{scale: {{lora_r: {factor}}}}}}}"
    assert resolved(tmp_path, text).targets.lora_r == scaled


def test_a_factor_on_what_is_not_set_changes_nothing(tmp_path: Path) -> None:
    profile = resolved(tmp_path, "sections: {a: {scale: {num_epochs: 2}}}")
    assert (profile.targets.num_epochs, profile.before_scale) == (None, {})


def test_environment_and_engine_keys_are_merged_key_by_key(tmp_path: Path) -> None:
    profile = resolved(
        tmp_path,
        "extends: parent\nenv: {B: 2}\nengine_config: {axolotl: {x: 1}, ai-toolkit: {train.steps: 3}}\n"
        "sections: {a: {env: {C: 3}, engine_config: {axolotl: {y: [1]}}}}",
        parent="env: {A: 1, B: 1}\nengine_config: {axolotl: {x: 0, z: null}}",
    )
    assert profile.env == {"A": "1", "B": "2", "C": "3"}
    assert profile.engine_config.axolotl == {"x": 1, "y": [1], "z": None}
    assert profile.engine_config.ai_toolkit == {"train.steps": 3}
    assert str(profile.origin("env.C")) == "mine.yaml:4 (a)"
    assert profile.origin("engine_config.ai_toolkit.train.steps").line == 3


def test_a_section_may_run_elsewhere_on_the_cluster(tmp_path: Path) -> None:
    profile = resolved(
        tmp_path,
        "extends: parent\nsections: {a: {slurm: {partition: big, options: [--nice=5, --exclusive]}}}",
        parent="slurm: {partition: gpu, account: lab}",
    )
    assert profile.slurm.by_name() == {
        "partition": "big",
        "account": "lab",
        "options": "--nice=5 --exclusive",
    }
    assert str(profile.origin("slurm.partition")) == "mine.yaml:2 (a)"
    for wrong in ("{options: [--wrap=id]}", "{partition: a b}", "{options: [nice]}"):
        with pytest.raises(ConfigError):
            resolved(tmp_path, f"slurm: {wrong}")


def test_contradictory_limits_are_reported_with_both_places(tmp_path: Path) -> None:
    profile = from_text(
        tmp_path,
        "limits: {max_gpus: 2}\nsections:\n  a:\n    when: {task: instruct}\n    limits: {min_gpus: 4}",
    )
    with pytest.raises(ConfigError) as caught:
        resolve_profile(profile, TaskType.INSTRUCT, model())
    assert "mine.yaml:5 (a) and mine.yaml:1: min_gpus has value 4: is above max_gpus (2)" in str(caught.value)
    assert resolve_profile(profile, TaskType.DPO, model()).limits.max_gpus == 2


def test_tasks_that_match_the_same_sections_share_one_result(tmp_path: Path) -> None:
    profile = from_text(tmp_path, "sections: {a: {when: {size: <7B}}}")
    large, other = (resolve_profile(profile, TaskType.DPO, model(params)) for params in (8e9, 1e9))
    assert resolve_profile(profile, TaskType.CHAT, model(9e9)) is large is not other


@each(
    ("band", "pictures", "matches"),
    [
        ("<10", 9, True),
        ("<10", 10, False),
        (">=28", 28, True),
        ("10-28", 10, True),
        ("10-28", 28, False),
        ("<31", None, True),  # where nothing is known, plans assume 30
        ("<30", None, False),
    ],
)
def test_a_section_may_ask_for_pictures(
    tmp_path: Path, band: str, pictures: int | None, matches: bool
) -> None:
    profile = from_text(
        tmp_path, f"sections: {{s: {{when: {{pictures: '{band}'}}, targets: {{lora_r: 3}}}}}}"
    )
    found = resolve_profile(profile, TaskType.IMAGE, picture(ImageModelType.KREA2), pictures)
    assert (found.targets.lora_r == 3) is matches
    assert str(profile.selectors[0][1].pictures) == band


def test_text_tasks_have_no_pictures(tmp_path: Path) -> None:
    profile = from_text(tmp_path, "sections: {s: {when: {pictures: '>=0'}, targets: {lora_r: 3}}}")
    assert resolve_profile(profile, TaskType.INSTRUCT, model()).sections == ()


@each(
    ("band", "why"),
    [
        ("10", "is written <10, 10-28 or >=28, not '10'"),
        ("=10", "is written"),
        ("<10B", "without a unit, like 10, not '10B'"),
        ("<9.5", "whole"),
        ("28-10", "is empty"),
    ],
)
def test_a_number_of_pictures_is_whole_and_its_ends_are_in_order(tmp_path: Path, band: str, why: str) -> None:
    with pytest.raises(ConfigError, match="pictures") as caught:
        from_text(tmp_path, f"sections: {{s: {{when: {{pictures: '{band}'}}, targets: {{lora_r: 3}}}}}}")
    assert why in str(caught.value)


def test_a_section_for_hours_is_refused_with_what_to_write_instead(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ask for the pictures, like pictures: '<28'"):
        from_text(tmp_path, "sections: {s: {when: {image: krea2, hours: <0.9h}, targets: {lora_r: 3}}}")
