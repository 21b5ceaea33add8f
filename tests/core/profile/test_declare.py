from __future__ import annotations

from core.domain.choices import Engine
from core.planning.plan import TrainingPlan
from core.profile.declare import NameSystem
from core.profile.limits import ContainerTargets, ProfileLimits
from core.profile.schema import FIELD_NAMES
from core.profile.targets import Targets
from core.recipes.schema import engine_table

FIELDS = {field for model in (Targets, ProfileLimits, ContainerTargets) for field in model.model_fields}


def test_every_row_is_about_a_field_of_the_profile() -> None:
    assert {field for names in FIELD_NAMES.values() for field in names.values()} <= FIELDS


def test_every_key_is_one_that_the_engine_has() -> None:
    assert FIELD_NAMES[NameSystem.AXOLOTL].keys() <= _keys(Engine.AXOLOTL, "AxolotlInputConfig")
    assert FIELD_NAMES[NameSystem.KOHYA].keys() <= _keys(Engine.KOHYA, "flux_train_network")
    sections = {
        "datasets[0]": "DatasetConfig",
        "model": "ModelConfig",
        "network": "NetworkConfig",
        "save": "SaveConfig",
        "train": "TrainConfig",
    }
    for path in FIELD_NAMES[NameSystem.AI_TOOLKIT]:
        section, _, key = path.partition(".")
        assert key in _keys(Engine.AI_TOOLKIT, sections[section]), path


def _keys(engine: Engine, name: str) -> set[str]:
    return set(engine_table(engine).objects[name])


def test_every_number_of_the_plan_is_one_that_it_has() -> None:
    parts = {path.partition(".")[0] for path in FIELD_NAMES[NameSystem.PLAN]}
    assert parts <= TrainingPlan.model_fields.keys()
