"""Every rendered key leads back to the profile's own word for it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from core.choices import Engine
from core.profile import Targets
from core.recipes import origins
from core.recipes.schema import table

MAPS = {
    Engine.AXOLOTL: origins.AXOLOTL,
    Engine.KOHYA: origins.KOHYA,
    Engine.AI_TOOLKIT: origins.AI_TOOLKIT,
}


@pytest.mark.parametrize("known", MAPS.values(), ids=MAPS)
def test_every_origin_is_a_target_of_the_profile(known: Mapping[str, str]) -> None:
    assert set(known.values()) <= set(Targets.model_fields)


def test_every_key_is_one_that_the_engine_has() -> None:
    assert origins.AXOLOTL.keys() <= table(Engine.AXOLOTL).objects["AxolotlInputConfig"].keys()
    assert origins.KOHYA.keys() <= table(Engine.KOHYA).objects["flux_train_network"].keys()
    objects = table(Engine.AI_TOOLKIT).objects
    sections = {
        "datasets[0]": "DatasetConfig",
        "model": "ModelConfig",
        "network": "NetworkConfig",
        "save": "SaveConfig",
        "train": "TrainConfig",
    }
    for path in origins.AI_TOOLKIT:
        section, _, key = path.partition(".")
        assert key in objects[sections[section]], path
