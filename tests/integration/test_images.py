"""The Dockerfiles, built by a real Docker Engine on stand-in bases, without a network.

The stand-ins have a Python and what the real bases have by name. Packages are those of the tests'
environment, at the versions of `requirements/`. The text trainer's image needs a training
environment and is built in `test_rehearsal.py`.
"""

from __future__ import annotations

import io
import sys
import sysconfig
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from core.domain.wire import TournamentType
from miner.tournament.prepare import prepare_entry
from tests.doubles import base_image
from tests.doubles.backend_fixtures import own_dockerd
from tests.doubles.dockerd import Dockerd

pytestmark = pytest.mark.docker

ROOT = Path(__file__).parents[2]
SITE = sysconfig.get_path("purelib")
PYTHON = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"

#: Packages that are visible there count as installed, in the versions that they have; nothing is fetched.
DAEMON_BASE = f"""
FROM {base_image.NAME}
ENV PATH={PYTHON.parent}:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \\
    PYTHONPATH={SITE} PIP_NO_INDEX=1 PIP_NO_BUILD_ISOLATION=0
"""

#: sd-scripts or ai-toolkit, with an old Python of its own that has torch.
ENGINE_BASE = f"""
FROM {base_image.NAME}
COPY engine /opt/engine
RUN chmod 755 /opt/engine/bin/*
COPY app /app
ENV PATH=/opt/engine/bin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
"""
ENGINE_PYTHON = f'#!/bin/sh\nPYTHONPATH=/opt/engine/lib exec {PYTHON} "$@"\n'
ENGINE_FILES = {
    "engine/bin/python": ENGINE_PYTHON,
    "engine/bin/python3": ENGINE_PYTHON,
    "engine/lib/torch.py": "",
    "engine/lib/accelerate.py": "",
    "app/sd-scripts/sdxl_train_network.py": "",
    "app/sd-scripts/flux_train_network.py": "",
    "app/ai-toolkit/run.py": "",
}

#: `uv venv --python VERSION FOLDER` and `uv pip install --python PYTHON …`, with what is there already.
UV = f"""#!/bin/sh
set -eu
case "$1" in
venv)
    {PYTHON} -m venv --without-pip "$4"
    for site in "$4"/lib/python*/site-packages; do echo {SITE} > "$site/there.pth"; done ;;
pip) exec "$4" -m pip install --no-index $(shift 4; echo "$@") ;;
esac
"""
UV_BASE = f"FROM {base_image.NAME}\nCOPY uv /uv\nRUN chmod 755 /uv\n"


#: Without what only the network has: the evaluator's stack and files.
OFFLINE = {"COMFYUI_COMMIT": "", "EVALUATOR_FILES": "no"}


@pytest.fixture(scope="module")
def dockerd() -> Iterator[Dockerd]:
    """With the tests' environment and its interpreter in every container."""
    import ensurepip

    wheels = Path("/usr/share/python-wheels")  # where Debian keeps what ensurepip installs
    seen = [Path(sys.prefix), Path(sys.base_prefix), Path(ensurepip.__file__).parent, wheels]
    places = [place for place in seen if place != Path("/usr") and place.exists()]
    with own_dockerd(mounted=places) as dockerd:
        yield dockerd


def build_base(dockerd: Dockerd, tag: str, dockerfile: str, files: Mapping[str, str | bytes]) -> None:
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as archive:
        for name, content in {"Dockerfile": dockerfile, **files}.items():
            data = content.encode() if isinstance(content, str) else content
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    context.seek(0)
    dockerd.build(tag, fileobj=context, custom_context=True)


def test_the_daemons_image_is_built_and_starts(dockerd: Dockerd) -> None:
    build_base(dockerd, "daemon-base:1", DAEMON_BASE, {})
    path = "dockerfiles/miner.dockerfile"
    dockerd.build("miner:1", path=str(ROOT), dockerfile=path, buildargs={"BASE": "daemon-base:1"})
    code, log = dockerd.run("miner:1", ["config", "show"])
    assert code == 0, log[-3000:]
    assert "DATA_DIR" in log


@pytest.mark.kept("standalone-image-trainer")
@pytest.mark.parametrize("name", ["standalone-image-trainer", "standalone-image-toolkit-trainer"])
def test_an_image_trainers_image_is_built_and_starts(dockerd: Dockerd, name: str) -> None:
    build_base(dockerd, "uv:1", UV_BASE, {"uv": UV})
    build_base(dockerd, "engine-base:1", ENGINE_BASE, ENGINE_FILES)
    arguments = {"BASE_IMAGE": "engine-base:1", "UV_IMAGE": "uv:1", **OFFLINE}
    dockerd.build(
        f"{name}:1", path=str(ROOT), dockerfile=f"dockerfiles/{name}.dockerfile", buildargs=arguments
    )
    code, log = dockerd.run(f"{name}:1", ["--help"])
    assert code == 0, log[-3000:]
    assert "--expected-repo-name" in log


@pytest.mark.thorough
def test_a_prepared_entrys_image_is_built_and_starts(dockerd: Dockerd, tmp_path: Path) -> None:
    """Nothing is missing that a training by the chosen profile needs."""
    build_base(dockerd, "uv:1", UV_BASE, {"uv": UV})
    build_base(dockerd, "engine-base:1", ENGINE_BASE, ENGINE_FILES)
    entry = prepare_entry(ROOT, tmp_path / "entry", kinds=[TournamentType.IMAGE], profile="h100-fast")
    name = "dockerfiles/standalone-image-toolkit-trainer.dockerfile"
    arguments = {"BASE_IMAGE": "engine-base:1", "UV_IMAGE": "uv:1", **OFFLINE}
    dockerd.build("entry:1", path=str(entry.directory), dockerfile=name, buildargs=arguments)
    with dockerd.client() as client:
        assert "GOD_MINER_PROFILE=h100-fast" in client.images.get("entry:1").attrs["Config"]["Env"]
    code, log = dockerd.run("entry:1", ["--help"])
    assert code == 0, log[-3000:]
    assert "--expected-repo-name" in log
