"""What operators are given outside of the package agrees with the package."""

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from miner.server import DaemonExitCode
from miner.settings import Settings, load_settings
from miner.store import database
from tests.doubles.each import each

pytestmark = pytest.mark.process


ROOT = Path(__file__).parents[1]
OPERATIONS = (ROOT / "docs/operations.md").read_text()
DOCKERFILE = (ROOT / "dockerfiles/miner.dockerfile").read_text()
needs_node = pytest.mark.skipif(
    shutil.which("node") is None and os.environ.get("CI") != "true", reason="node is not installed"
)


def app(tmp_path: Path, env_file: str | None = None, name: str = "god-miner", **env: str) -> dict[str, Any]:
    """What pm2 would be told, with the file lying in a directory of its own."""
    shutil.copy(ROOT / "ecosystem.config.js", tmp_path)
    if env_file is not None:
        (tmp_path / ".env").write_text(env_file)
    script = "console.log(JSON.stringify(require('./ecosystem.config.js').apps))"
    done = subprocess.run(
        ["node", "-e", script],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], **env},
        capture_output=True,
        text=True,
        check=True,
    )
    reported = {one["name"]: one for one in json.loads(done.stdout)}
    assert set(reported) == {"god-miner", "god-miner-dashboard"}
    return dict(reported[name])


@needs_node
def test_pm2_runs_the_installed_daemon_once_and_never_for_a_changed_file(tmp_path: Path) -> None:
    reported = app(tmp_path)
    assert reported["script"] == str(tmp_path / ".venv/bin/god-miner")
    assert (reported["cwd"], reported["args"], reported["interpreter"]) == (str(tmp_path), "run", "none")
    assert (reported["instances"], reported["watch"], reported["autorestart"]) == (1, False, True)
    assert reported["stop_exit_codes"] == [DaemonExitCode.CONFIG]


@needs_node
def test_pm2_runs_the_page_as_an_application_of_its_own(tmp_path: Path) -> None:
    reported = app(tmp_path, name="god-miner-dashboard")
    assert (reported["script"], reported["args"]) == (str(tmp_path / ".venv/bin/god-miner"), "dashboard")
    assert reported["stop_exit_codes"] == [DaemonExitCode.CONFIG]


@needs_node
@pytest.mark.parametrize(
    ("env_file", "env", "grace"),
    [
        (None, {}, 20),
        ("NETUID=56\nexport SHUTDOWN_GRACE_SECONDS = '45'\n", {}, 45),
        ("#SHUTDOWN_GRACE_SECONDS=45\n", {}, 20),
        ("SHUTDOWN_GRACE_SECONDS=45\n", {"SHUTDOWN_GRACE_SECONDS": "90"}, 90),
    ],
)
def test_pm2_does_not_kill_before_both_servers_had_their_grace(
    env_file: str | None, env: dict[str, str], grace: int, tmp_path: Path
) -> None:
    reported = app(tmp_path, env_file, **env)
    read = load_settings(env=env, env_file=tmp_path / ".env" if env_file else None)
    assert read.shutdown_grace_seconds == grace
    assert reported["kill_timeout"] == (2 * grace + 10) * 1000


@each("code", list(DaemonExitCode))
def test_every_exit_code_is_explained(code: DaemonExitCode) -> None:
    assert re.search(rf"^\| {code.value} \|", OPERATIONS, re.MULTILINE)


def test_only_settings_and_files_that_exist_are_spoken_of() -> None:
    named = set(re.findall(r"`([A-Z]+(?:_[A-Z]+)+)(?:=[^`]*)?`", OPERATIONS)) - {"NAME"}
    assert named
    assert {name.lower() for name in named} <= Settings.model_fields.keys()
    for target in re.findall(r"\]\(([^)#]+)\)", OPERATIONS):
        assert (ROOT / "docs" / target).exists(), target


def test_the_commands_spoken_of_exist() -> None:
    import typer.main

    from miner.__main__ import app as cli

    known = typer.main.get_command(cli)
    for words in set(
        re.findall(r"god-miner ((?:config|doctor|run|chain|dev)(?: [a-z][a-z-]+)?)\b", OPERATIONS)
    ):
        command: Any = known
        for word in words.split():
            commands = getattr(command, "commands", {})
            assert not commands or word in commands, words
            command = commands.get(word, command)


def test_the_backup_command_makes_a_whole_copy_of_a_file_in_use(tmp_path: Path) -> None:
    (snippet,) = re.findall(r"<<'EOF'\n(.*?)\nEOF", OPERATIONS, re.DOTALL)
    path = tmp_path / database.FILE_NAME
    in_use = database.connect(path)
    in_use.execute("CREATE TABLE reservation (kept TEXT)")
    in_use.execute("INSERT INTO reservation VALUES ('yes')")
    assert path.with_name(path.name + "-wal").stat().st_size > 0
    subprocess.run([sys.executable, "-c", snippet, path, tmp_path / "backup"], check=True)
    in_use.close()
    copy = sqlite3.connect(tmp_path / "backup")
    assert copy.execute("SELECT kept FROM reservation").fetchall() == [("yes",)]
    copy.close()


def test_the_image_runs_the_console_script_as_nobody_special_and_looks_at_its_health() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert list(project["scripts"]) == ["god-miner"]
    assert re.search(r"^ARG BASE=python:3\.\d+\.\d+-slim", DOCKERFILE, re.MULTILINE)
    last = DOCKERFILE.split("FROM ${BASE}")[-1]
    assert re.search(r"^USER miner$", last, re.MULTILINE)
    assert 'ENTRYPOINT ["god-miner"]' in last
    assert 'CMD ["run"]' in last
    assert "'/healthz'" in last
    default = load_settings(env={}, env_file=None)
    assert f"EXPOSE {default.public_port}" in last


def test_all_that_the_image_copies_exists_and_reaches_the_build() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    for line in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE):
        for name in line.split():
            assert (ROOT / name).exists()
            assert name not in ignored


def test_the_build_of_the_image_has_all_that_the_wheel_is_made_of() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    copied = {
        name for line in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.MULTILINE) for name in line.split()
    }
    named = {project["project"]["readme"], *project["project"]["license-files"]}
    assert named | set(wheel["packages"]) | set(wheel["force-include"]) <= copied


@each("name", [".env", ".git", ".god-miner", ".venv", "node_modules"])
def test_nothing_secret_or_made_here_reaches_an_image(name: str) -> None:
    assert name in (ROOT / ".dockerignore").read_text().split()


def test_the_health_check_distinguishes_a_living_daemon_from_a_dead_one() -> None:
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from threading import Thread

    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/healthz" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    (check,) = re.findall(r'CMD \["python3", "-c", "(.*)"\]', DOCKERFILE)
    server = HTTPServer(("127.0.0.1", 0), Healthy)
    env = {"PUBLIC_PORT": str(server.server_address[1])}
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    alive = subprocess.run([sys.executable, "-c", check], env=env, check=False)
    server.shutdown()
    thread.join()
    server.server_close()
    dead = subprocess.run([sys.executable, "-c", check], env=env, capture_output=True, check=False)
    assert alive.returncode == 0
    assert dead.returncode != 0
