"""Our reader of weights before the library that will load them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from core.domain.tasks import ImageModelType
from core.submission.faults import FaultKind
from core.submission.safetensors import BadHeader, read_header
from tests.core.submission.engine import asked
from tests.core.submission.folders import IMAGE_MODULES, bf16, safetensors
from tests.core.submission.test_check_image_adapter import checked, kinds

pytestmark = pytest.mark.training


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


def is_read(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            read_header(file)
    except BadHeader:
        return False
    return True


def test_what_the_library_cannot_load_is_never_accepted(training_python: str, tmp_path: Path) -> None:
    good = safetensors(
        {"a": bf16(4, 2), "b": ("F16", [2, 2], b"\0" * 8), "c": ("I8", [3], b"abc")}, {"k": "v"}
    )
    (tmp_path / "good.safetensors").write_bytes(good)
    chance = random.Random(7)
    for number in range(400):
        content = bytearray(good)
        for _ in range(chance.randint(1, 3)):
            content[chance.randrange(len(content))] = chance.choice(b'0123456789[]{},:" \0abF')
        (tmp_path / f"{number}.safetensors").write_bytes(
            content[: len(content) - chance.choice([0, 0, 0, 1])]
        )
    theirs = asked(training_python, _LOAD, tmp_path)
    ours = {name: is_read(tmp_path / name) for name in theirs}
    assert ours["good.safetensors"]
    assert theirs["good.safetensors"]
    assert [name for name in theirs if ours[name] and not theirs[name]] == []
    assert [name for name in theirs if theirs[name] and not ours[name]] == []


_SAVE = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import save_file

folder = Path(sys.argv[1])
for name, facts in json.loads((folder / "made.json").read_text()).items():
    for label, up in (("zero", torch.zeros(4, 2)), ("trained", torch.randn(4, 2))):
        tensors = {}
        for module in facts["modules"]:
            for part in facts["parts"]:
                is_up = "lora_B" in part or "lora_up" in part
                value = torch.tensor(2.0) if part == "alpha" else up if is_up else torch.randn(2, 4)
                tensors[f"{module}.{part}"] = value.to(torch.bfloat16).clone()
        save_file(tensors, folder / f"{name}.{label}.safetensors")
print("[]")
"""


def test_files_of_the_real_library_are_distinguished(tmp_path: Path, training_python: str) -> None:
    (tmp_path / "made.json").write_text(json.dumps(IMAGE_MODULES), encoding="utf-8")
    asked(training_python, _SAVE, tmp_path)
    for made in IMAGE_MODULES:
        trained = (tmp_path / f"{made}.trained.safetensors").read_bytes()
        zero = (tmp_path / f"{made}.zero.safetensors").read_bytes()
        assert checked(tmp_path / f"{made}-t", trained, ImageModelType(made.split()[0])).faults == ()
        assert kinds(checked(tmp_path / f"{made}-z", zero, ImageModelType(made.split()[0]))) == [
            FaultKind.ZERO_DELTA
        ]
