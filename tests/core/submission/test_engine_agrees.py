"""Our reader of weights and our mended configurations, before the libraries that will load them."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

from core.submission import configs
from core.submission.safetensors import BadHeader, read_header
from tests.core.recipes.conftest import training_python as training_python
from tests.core.submission.folders import BASE_CONFIG, bf16, safetensors

_LOAD = """
import json, sys
from pathlib import Path
from safetensors import safe_open

def loads(path):
    try:
        with safe_open(path, "pt") as file:
            list(file.keys())
        return True
    except Exception:
        return False

folder = Path(sys.argv[1])
json.dump({path.name: loads(path) for path in sorted(folder.glob("*.safetensors"))}, sys.stdout)
"""

_SAVE = """
import json, sys
from pathlib import Path
from transformers import AutoConfig
folder, found = Path(sys.argv[1]), {}
for each in sorted(folder.iterdir()):
    config = AutoConfig.from_pretrained(each)
    config.save_pretrained(each / "saved")
    found[each.name] = config.to_dict()["rope_parameters"]
json.dump(found, sys.stdout)
"""


def asked(python: str, code: str, folder: Path) -> Any:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [python, "-c", code, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def is_read(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            read_header(file)
    except BadHeader:
        return False
    return True


def test_what_the_library_can_not_load_is_never_called_good(training_python: str, tmp_path: Path) -> None:
    good = safetensors({"a": bf16(4, 2), "b": ("F16", [2, 2], b"\0" * 8), "c": ("I8", [3], b"abc")}, {"k": "v"})
    (tmp_path / "good.safetensors").write_bytes(good)
    chance = random.Random(7)
    for number in range(400):
        content = bytearray(good)
        for _ in range(chance.randint(1, 3)):
            content[chance.randrange(len(content))] = chance.choice(b'0123456789[]{},:" \0abF')
        (tmp_path / f"{number}.safetensors").write_bytes(content[: len(content) - chance.choice([0, 0, 0, 1])])
    theirs = asked(training_python, _LOAD, tmp_path)
    ours = {name: is_read(tmp_path / name) for name in theirs}
    assert ours["good.safetensors"]
    assert theirs["good.safetensors"]
    assert [name for name in theirs if ours[name] and not theirs[name]] == []
    assert [name for name in theirs if theirs[name] and not ours[name]] == []


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
        mended = configs.restored(saved, config)
        # What an evaluator's older transformers reads, it reads as in the base's own file.
        old = {key: mended.get(key) for key in config if key != "transformers_version"}
        assert old == {key: value for key, value in config.items() if key != "transformers_version"}
        assert not list(configs.differences(mended, config))
        (tmp_path / "mended" / name).mkdir(parents=True)
        (tmp_path / "mended" / name / "config.json").write_text(json.dumps(mended))
    assert asked(training_python, _SAVE, tmp_path / "mended") == meant
