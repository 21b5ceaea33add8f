"""A real Docker Engine of the tests' own: another socket, other folders, pretend GPUs, and it may be killed.

Without a bridge and without iptables, so that nothing of the machine's network is touched; in a cgroup of its
own, so that what a killed one leaves can be told from anybody else's.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.doubles import gpu_hook

START_LIMIT_S = 120.0
STOP_LIMIT_S = 60.0
#: For a build or a container; importing a training stack on a busy machine takes minutes.
WORK_LIMIT_S = 500
#: What `--gpus` knows; the UUIDs are those of the NVML stub.
GPUS = tuple(f"GPU-fa4e0000-0000-4000-8000-00000000000{index}" for index in range(4))
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CGROUPS = Path("/sys/fs/cgroup")


def why_not() -> str | None:
    """Why no Docker Engine can be run here."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a Docker Engine of one's own needs root on Linux"
    missing = [
        name for name in ("dockerd", "containerd", "runc") if not shutil.which(name, path=_SYSTEM_PATH)
    ]
    return (
        f"{', '.join(missing)} not installed (Debian and Ubuntu: apt install docker.io)" if missing else None
    )


_RUNTIME = """#!{python} -I
import json
import os
import sys

arguments = sys.argv[1:]
if "create" in arguments:
    path = os.path.join(arguments[arguments.index("--bundle") + 1], "config.json")
    with open(path) as file:
        spec = json.load(file)
    spec["mounts"] += [
        {{"destination": path, "source": path, "type": "bind", "options": ["rbind", "ro"]}}
        for path in {mounted}
    ]
    with open(path, "w") as file:
        json.dump(spec, file)
os.execvp("runc", ["runc", *arguments])
"""


class Dockerd:
    """Use as `with`. `folder` must be short: a socket's path has 107 letters at most."""

    def __init__(
        self,
        folder: Path,
        *,
        live_restore: bool = False,
        nvml: Path | None = None,
        mounted: Sequence[Path] = (),
    ) -> None:
        """`mounted`: paths of this machine that every container sees at their own places, read-only, those
        of builds too: gigabytes of packages need not be copied into an image for a test."""
        self.folder = folder
        self.live_restore = live_restore
        self.nvml = nvml
        self.mounted = tuple(mounted)
        self.name = f"god-miner-{folder.parent.name}"
        self.process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def host(self) -> str:
        return f"unix://{self.folder}/docker.sock"

    @property
    def log_file(self) -> Path:
        return self.folder / "log"

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True)
        self._lay_out_hook()
        self._lay_out_runtime()
        self._guard = self._guarded()
        try:
            self.start()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.end()

    def start(self) -> None:
        # After SIGKILL these name processes that may be somebody else's by now, or that nobody collected:
        # where the machine has no init to do it, Docker would take its dead containerd for a living one.
        for name in ("pid", "exec/containerd/containerd.pid"):
            (self.folder / name).unlink(missing_ok=True)
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                self._command(),
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        ends = time.monotonic() + START_LIMIT_S
        while not self.answers():
            if self.process.poll() is not None or time.monotonic() > ends:
                raise RuntimeError(f"dockerd did not start:\n{self.log_tail()}")
            time.sleep(0.05)

    def kill(self) -> None:
        """As a crash: its containerd dies with it or not, containers go on."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self.kill()

    def freeze(self) -> None:
        """It takes connections and never answers."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    @contextmanager
    def client(self, timeout_s: float = 120) -> Iterator[Any]:
        """The library's own client, as any other program has it; `.api` is the API itself."""
        import docker

        client = docker.DockerClient(base_url=self.host, version="auto", timeout=timeout_s)
        try:
            yield client
        finally:
            client.close()

    def build(self, tag: str, **how: Any) -> None:
        """Build an image without a network."""
        import docker

        with self.client(WORK_LIMIT_S) as client:
            try:
                client.images.build(tag=tag, network_mode="none", forcerm=True, **how)
            except docker.errors.BuildError as error:
                output = "".join(line.get("stream", "") for line in error.build_log)
                raise AssertionError(output[-4000:]) from None

    def run(self, image: str, command: Sequence[str], **more: Any) -> tuple[int, str]:
        """Run a container without network and capabilities to its end: exit code and log."""
        with self.client(WORK_LIMIT_S) as client:
            container = client.containers.create(
                image, list(command), network_mode="none", cap_drop=["ALL"], **more
            )
            try:
                container.start()
                code = int(container.wait(timeout=WORK_LIMIT_S)["StatusCode"])
                return code, container.logs().decode("utf-8", "replace")
            finally:
                container.remove(force=True)

    def answers(self) -> bool:
        with suppress(OSError), socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(2)
            asking.connect(f"{self.folder}/docker.sock")
            asking.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
            return asking.recv(64).startswith(b"HTTP/1.0 200")
        return False

    def gpu_requests(self) -> list[dict[str, str]]:
        """What the pretend hook was asked for, oldest first."""
        path = self.folder / "hook.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def log_tail(self, lines: int = 20) -> str:
        return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-lines:])

    def _guarded(self) -> subprocess.Popen[bytes]:
        """Ends Docker when the tests were killed and could not. In a session of its own: what kills the
        tests, such as `timeout`, signals their whole group."""
        command = f'cat >/dev/null; kill "$(cat {shlex.quote(str(self.folder))}/pid)"'
        return subprocess.Popen(
            ["sh", "-c", command],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def end(self) -> None:
        """Kill it, which is faster than stopping, and clear away everything that it left."""
        if self.process is not None:
            self.kill()
        if self._guard is not None:
            self._guard.communicate()
        for pid in self._own_processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
        self._unmount()
        self._remove_cgroups()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _command(self) -> list[str]:
        flags = ["--bridge=none", "--iptables=false", f"--cgroup-parent=/{self.name}", "--exec-opt"]
        flags += ["native.cgroupdriver=cgroupfs", "--storage-driver", self._storage()]
        if self.live_restore:
            flags.append("--live-restore")
        if self.mounted:
            flags += [f"--add-runtime=mounting={self._runtime}", "--default-runtime=mounting"]
        places = ["--data-root", f"{self.folder}/root", "--exec-root", f"{self.folder}/exec"]
        return ["dockerd", "-H", self.host, "--pidfile", f"{self.folder}/pid", *places, *flags]

    def _storage(self) -> str:
        """Overlay on overlay is refused by the kernel, as in a container. A copy of the whole image for
        each container, which is what Docker makes then, is slow: worth trying anywhere."""
        if wanted := os.environ.get("GOD_MINER_TEST_STORAGE"):
            return wanted
        kind = subprocess.run(
            ["stat", "-f", "-c", "%T", str(self.folder)], capture_output=True, text=True, check=True
        )
        return "vfs" if kind.stdout.strip() == "overlayfs" else "overlay2"

    def _environment(self) -> dict[str, str]:
        nvml = {"FAKE_NVML_LIB": str(self.nvml)} if self.nvml else {}
        return {
            "PATH": f"{self.folder}/bin:{_SYSTEM_PATH}",
            "FAKE_GPUS": ",".join([*map(str, range(len(GPUS))), *GPUS]),
            "FAKE_HOOK_LOG": f"{self.folder}/hook.jsonl",
            **nvml,
        }

    def _lay_out_hook(self) -> None:
        hook = self.folder / "bin" / gpu_hook.NAME
        hook.parent.mkdir()
        call = shlex.join([sys.executable, "-I", gpu_hook.__file__])
        hook.write_text(f'#!/bin/sh\nexec {call} "$@"\n')
        hook.chmod(0o755)

    @property
    def _runtime(self) -> Path:
        return self.folder / "bin" / "mounting-runc"

    def _lay_out_runtime(self) -> None:
        """runc, with a few more mounts in what it is told to create."""
        self._runtime.write_text(_RUNTIME.format(python=sys.executable, mounted=list(map(str, self.mounted))))
        self._runtime.chmod(0o755)

    def _own_processes(self) -> Iterator[int]:
        """Its containerd and the shims, by the folder in their commands, and all in its cgroups."""
        for top in ("", "*/"):
            for procs in CGROUPS.glob(f"{top}{self.name}/**/cgroup.procs"):
                with suppress(OSError):
                    yield from map(int, procs.read_text().split())
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                    if b"containerd" in words[0] and any(
                        f"{self.folder}/".encode() in word for word in words
                    ):
                        yield int(entry.name)

    def _unmount(self) -> None:
        points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        for point in reversed(points):
            if point == str(self.folder) or point.startswith(f"{self.folder}/"):
                subprocess.run(["umount", "-l", point], capture_output=True, check=False)

    def _remove_cgroups(self) -> None:
        for top in (*CGROUPS.glob(f"*/{self.name}"), CGROUPS / self.name):
            for folder in sorted((path for path in top.rglob("*") if path.is_dir()), reverse=True):
                with suppress(OSError):
                    folder.rmdir()
            with suppress(OSError):
                top.rmdir()
