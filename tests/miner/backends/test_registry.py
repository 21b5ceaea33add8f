"""Backends are found by their folders, and a new one is nothing but a folder and a line."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from core.system import wrapper
from miner.backends.environment import SOURCE_ROOT
from miner.backends.registry import AUTOMATIC, NoBackend, backend_kinds, build_backend, plugin_of
from miner.settings import load_settings
from tests.doubles.backend_bench import context_in

pytestmark = pytest.mark.process


async def test_an_unknown_backend_is_rejected_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(NoBackend, match="docker, process, slurm"):
        await build_backend(load_settings(env={}, env_file=None, data_dir=tmp_path), "abacus")


def test_every_folder_is_registered_under_its_name() -> None:
    folders = {path.parent.name for path in (SOURCE_ROOT / "miner" / "backends").glob("*/plugin.py")}
    assert folders == set(backend_kinds())
    for kind in backend_kinds():
        assert plugin_of(kind).kind is kind
        assert (plugin_of(kind).gpu_source is not None) == kind.is_cluster
    assert set(AUTOMATIC) <= {kind for kind in backend_kinds() if not kind.is_cluster}


def test_the_wrapper_is_copied_under_a_name_by_its_content(tmp_path: Path) -> None:
    context = context_in(tmp_path)
    path = context.wrapper_file()
    assert path.read_bytes() == Path(wrapper.__file__).read_bytes()
    assert path.stat().st_mode & 0o444 == 0o444
    assert context.wrapper_file() == path


#: Everything that the folder of another backend holds.
ABACUS = {
    "__init__.py": "",
    "settings.py": """
from miner.settings.fields import Section, setting

class AbacusSection(Section):
    title = "Abacus"
    abacus_namespace: str = setting("default", "Namespace of the pods.")

SECTION = AbacusSection
""",
    "plugin.py": """
from core.domain.hardware import parse_gpus
from miner.backends.abacus.settings import AbacusSection
from miner.backends.registry import BackendPlugin
from miner.fleet.sources import FixedGpuSource
from miner.settings import BackendKind
from miner.support.findings import ok

def check(settings):
    yield ok("abacus", settings.section(AbacusSection).abacus_namespace)

class AbacusBackend:
    name, can_sandbox = "abacus", False
    def __init__(self, settings, context):
        self.data_id = context.data_id

def gpu_source(settings, cluster):
    return FixedGpuSource(parse_gpus("2xH100"), "abacus")

PLUGIN = BackendPlugin(BackendKind.ABACUS, AbacusBackend, check, fix="kubectl", gpu_source=gpu_source)
""",
}
SCRIPT = """
import json, sys
from miner.backends.build_fleet import scan_once
from miner.backends.registry import build_here
from miner.doctor import CheckContext, all_checks
from miner.settings import load_settings
from miner.settings.reference import setting_docs

settings = load_settings(env_file=None)
check = next(check for check in all_checks(settings) if check.name == "abacus")
print(json.dumps({
    "documented": "abacus_namespace" in [doc.name for doc in setting_docs()],
    "findings": [finding.as_dict() for finding in check.run(CheckContext(settings))],
    "backend": build_here(settings, settings.backend[0]).name,
    "fleet": [len(scan_once(settings)[0].inventory.gpus), scan_once(settings)[1]],
}))
"""


def test_a_folder_and_a_line_add_a_backend_to_settings_doctor_and_fleet(tmp_path: Path) -> None:
    for package in ("core", "miner", "configs"):
        shutil.copytree(
            SOURCE_ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    folder = tmp_path / "miner" / "backends" / "abacus"
    folder.mkdir()
    for name, text in ABACUS.items():
        (folder / name).write_text(text)
    values = tmp_path / "miner" / "settings" / "values.py"
    line = '    ABACUS = "abacus", "cluster"\n'
    values.write_text(re.sub(r"(?=    NONE = )", line, values.read_text(), count=1))
    environment = {
        "BACKEND": "abacus",
        "ABACUS_NAMESPACE": "training",
        "DATA_DIR": str(tmp_path / "data"),
    }
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    found = json.loads(done.stdout)
    assert found["documented"]
    assert found["backend"] == "abacus"
    assert found["fleet"] == [2, "abacus"]
    assert [(finding["what"], finding["detail"]) for finding in found["findings"]] == [("abacus", "training")]
