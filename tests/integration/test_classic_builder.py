"""What the check of Dockerfiles says, beside what the classic builder of a real Docker Engine does."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator

import pytest
from docker.errors import APIError

from miner.tournament.check.dockerfiles import read_dockerfile
from tests.doubles import base_image
from tests.doubles.backend_fixtures import own_dockerd
from tests.doubles.dockerd import Dockerd

pytestmark = [pytest.mark.docker, pytest.mark.thorough]

LINES = {
    "plain": "COPY trainer /app/trainer",
    "glob": "COPY trainer/*.py core/a.* /app/",
    "list": 'COPY ["trainer", "/app/trainer"]',
    "everything": "COPY . /app",
    "owner": "COPY --chown=1:1 ./trainer/ /app/",
    "stage by number": "COPY --from=0 /made /made",
    "stage by name": "COPY --from=tools /made /made",
    "comment inside": "RUN true \\\n  # Why.\n\n  && true",
    "here-document in quotes": "RUN echo 'a <<b'",
    "default": "ARG LATER=\nRUN echo $LATER",
    "unknown stage": "COPY --from=tolls /made /made",
    "later stage": "COPY --from=5 /made /made",
    "missing": "COPY trainers /app",
    "outside": "COPY ../trainer /app",
    "several": "COPY trainer core /app",
    "mode": "COPY --chmod=755 trainer /app/trainer",
    "link": "COPY --link trainer /app/trainer",
    "parents": "COPY --parents trainer /app/trainer",
    "exclude": "COPY --exclude=*.py trainer /app/trainer",
    "checksum": "ADD --checksum=sha256:00 trainer /app/trainer",
    "mount": "RUN --mount=type=cache,target=/made true",
    "network": "RUN --network=none true",
    "security": "RUN --security=insecure true",
    "here-document": "RUN cat <<EOF\nx\nEOF",
    "here-document to a file": "COPY <<EOF /a\nx\nEOF",
    "set by BuildKit": 'ARG TARGETARCH\nRUN test -n "$TARGETARCH"',
    "unknown": "COPPY trainer /app",
    "half a name": "FROM ${BASE} as",
    "no value": "FROM ${BAZE}",
}
FILES = ("trainer/a.py", "core/a.py")


def dockerfile(line: str) -> str:
    stages = f"ARG BASE={base_image.NAME}\nFROM ${{BASE}} AS tools\nRUN mkdir /made\nFROM ${{BASE}}\n"
    return f'{stages}{line}\nENTRYPOINT ["python"]\n'


def is_built(dockerd: Dockerd, text: str) -> bool:
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as archive:
        for name, content in {"Dockerfile": text, **dict.fromkeys(FILES, "")}.items():
            info = tarfile.TarInfo(name)
            info.size = len(content.encode())
            archive.addfile(info, io.BytesIO(content.encode()))
    context.seek(0)
    try:
        dockerd.build("entry:1", fileobj=context, custom_context=True)
    except (AssertionError, APIError):
        return False
    return True


@pytest.fixture(scope="module")
def dockerd() -> Iterator[Dockerd]:
    with own_dockerd() as dockerd:
        base_image.load(dockerd.host)
        yield dockerd


@pytest.mark.parametrize("line", LINES.values(), ids=list(LINES))
def test_the_check_and_the_builder_agree(dockerd: Dockerd, line: str) -> None:
    text = dockerfile(line)
    problems = read_dockerfile(text, FILES).problems
    assert is_built(dockerd, text) == (not problems), problems
