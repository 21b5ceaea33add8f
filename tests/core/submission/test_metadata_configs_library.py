"""Our mended configurations before the library that will load them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from core.submission import metadata
from tests.core.submission.engine import asked
from tests.core.submission.folders import BASE_CONFIG

pytestmark = pytest.mark.training


_SAVE = """
import json, sys
from pathlib import Path
from transformers import AutoConfig
folder, scaling = Path(sys.argv[1]), {}
for each in sorted(folder.iterdir()):
    config = AutoConfig.from_pretrained(each)
    config.save_pretrained(each / "saved")
    scaling[each.name] = config.to_dict()["rope_parameters"]
json.dump(scaling, sys.stdout)
"""


SCALED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
BASES = {
    "plain": BASE_CONFIG,
    "scaled": {**BASE_CONFIG, "rope_scaling": SCALED},
    "qwen": {**BASE_CONFIG, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rope_theta": 1e6},
    "neox": {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 64,
        "rotary_pct": 0.25,
        "rotary_emb_base": 10000,
        "max_position_embeddings": 128,
    },
}


def test_a_configuration_that_transformers_saved_and_we_mended_means_the_same(
    training_python: str, tmp_path: Path
) -> None:
    for name, config in BASES.items():
        (tmp_path / "bases" / name).mkdir(parents=True)
        (tmp_path / "bases" / name / "config.json").write_text(json.dumps(config))
    meant = asked(training_python, _SAVE, tmp_path / "bases")
    for name, config in BASES.items():
        saved = json.loads((tmp_path / "bases" / name / "saved" / "config.json").read_text())
        mended = metadata.restored_config(saved, config)
        # What an evaluator's older transformers reads, it reads as in the base's own file.
        old = {key: mended.get(key) for key in config if key != "transformers_version"}
        assert old == {key: value for key, value in config.items() if key != "transformers_version"}
        assert not list(metadata.config_faults(mended, config))
        (tmp_path / "mended" / name).mkdir(parents=True)
        (tmp_path / "mended" / name / "config.json").write_text(json.dumps(mended))
    assert asked(training_python, _SAVE, tmp_path / "mended") == meant
