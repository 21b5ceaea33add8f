"""Debian's Prometheus and promtool with what they are given here: metrics, rules, the dashboard's queries."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from core.config.files import config_dir
from miner.dev.stack import ChildProcess, DevStack, free_ports
from tests.doubles.each import each
from tests.doubles.nvml import NvmlHost, compiled, training, uuid
from tests.doubles.required import missing
from tests.miner.http.daemon_in_process import open_daemon
from tests.miner.http.scraped import dashboard_queries, know_everything

RULES = config_dir() / "prometheus" / "rules.yml"
LIMIT_S = 240.0


def program(name: str) -> str:
    return shutil.which(name) or missing(f"{name} is not installed (Debian's package is prometheus)")


def promtool(*arguments: str, text: str | None = None) -> None:
    done = subprocess.run(
        [program("promtool"), *arguments], input=text, capture_output=True, text=True, cwd=RULES.parent
    )
    assert done.returncode == 0, done.stdout + done.stderr


async def test_the_names_follow_the_conventions(tmp_path: Path) -> None:
    async with open_daemon(tmp_path, GPUS="2xH100") as running:
        await know_everything(running, tmp_path)
        reply = await running.operator.get("/metrics")
    promtool("check", "metrics", text=reply.text)


@each("arguments", [("check", "rules", "rules.yml"), ("test", "rules", "rules_test.yml")])
def test_the_rules_are_sound(arguments: tuple[str, ...]) -> None:
    promtool(*arguments)


class Prometheus:
    def __init__(self, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
        self.url, self.process, self.log = f"http://127.0.0.1:{port}", process, log

    def get(self, path: str, **query: str) -> Any:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=30) as reply:
            answer = json.load(reply)
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, query: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("query", query=query)["result"]
        return found

    def until(self, holds: Callable[[], Any]) -> Any:
        end = time.monotonic() + LIMIT_S
        found: object = None
        while time.monotonic() < end and self.process.poll() is None:
            try:
                if found := holds():
                    return found
            except OSError as error:  # it does not listen yet, or is not ready
                found = error
            time.sleep(0.05)
        raise AssertionError(f"it did not come to that: {found}\n{self.log.read_text()}")


@contextmanager
def started_prometheus(folder: Path, stack: DevStack) -> Iterator[Prometheus]:
    """With our rules; it scrapes the operator's port of a stack, as docs/prometheus.md says."""
    (port,) = free_ports(1)
    scrape = {
        "job_name": "god-miner",
        "authorization": {"credentials_file": str(stack.data_dir / "operator-token")},
        "static_configs": [{"targets": [f"127.0.0.1:{stack.operator_port}"]}],
    }
    times = {"scrape_interval": "1s", "evaluation_interval": "1s", "scrape_timeout": "1s"}
    config = {"global": times, "rule_files": [str(RULES)], "scrape_configs": [scrape]}
    file, log = folder / "prometheus.yml", folder / "prometheus.log"
    file.write_text(yaml.safe_dump(config))
    command = [
        program("prometheus"),
        f"--config.file={file}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            yield Prometheus(port, process, log)
        finally:
            process.terminate()


def test_prometheus_scrapes_a_daemon_and_understands_rules_and_dashboard(
    stack: DevStack, running: Callable[..., ChildProcess], tmp_path: Path
) -> None:
    program("prometheus")
    gpus = NvmlHost(compiled(tmp_path), tmp_path / "nvml.json", 2)
    gpus.gpu(0, **training(temperature=71))
    gpus.gpu(1, **training(temperature=93))
    running(GPUS="nvml", **gpus.environment)
    with started_prometheus(tmp_path, stack) as prometheus:
        hot = prometheus.until(lambda: prometheus.query("god_miner_gpu_temperature_celsius > 85"))
        assert [(one["metric"]["gpu"], one["value"][1]) for one in hot] == [(uuid(1), "93")]
        prometheus.until(lambda: prometheus.query("god_miner:gpu_memory:ratio"))

        def rules() -> list[dict[str, Any]]:
            found = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
            return found if all(rule["health"] != "unknown" for rule in found) else []

        evaluated = prometheus.until(rules)
        assert [rule["name"] for rule in evaluated if rule["health"] != "ok"] == []
        for query in dashboard_queries():
            prometheus.query(query)
