"""A child with everything it starts."""

# Once: it needs nothing of the training stack.

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.process


ROOT = Path(__file__).parents[3]

#: A launcher that starts a worker in a session of its own and dies of the first signal.
LAUNCHER = """
import subprocess, sys, time
worker = subprocess.Popen(
    [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"],
    start_new_session=True,
)
print("worker", worker.pid, flush=True)
time.sleep(float(sys.argv[1]))
"""


def run(code: str, *arguments: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    """In a process of its own: what is tested kills every child of whoever calls it."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def alive(pid: int) -> bool:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] not in "ZX"


def test_closing_a_child_ends_workers_in_sessions_of_their_own(tmp_path: Path) -> None:
    done = run(
        f"""
        import os, sys, time
        from pathlib import Path
        from core.system.wrapper import adopt_orphans, descendant_pids
        from trainer.runner.processes import EngineProcess

        adopt_orphans()
        command = [sys.executable, "-c", {LAUNCHER!r}, "600"]
        child = EngineProcess(command, os.environ, Path({str(tmp_path)!r}))
        while not any(line.startswith("worker") for line in child.tail):
            time.sleep(0.01)
        assert len(descendant_pids()) == 2
        code = child.close()
        print("code", code, "left", len(descendant_pids()), flush=True)
        """
    )
    assert "code -9 left 0" in done.stdout, done.stderr
    worker = int(done.stdout.split()[1])
    assert not alive(worker)


def test_a_worker_whose_launcher_died_is_still_ours_to_end(tmp_path: Path) -> None:
    done = run(
        f"""
        import os, sys, time
        from pathlib import Path
        from core.system.wrapper import adopt_orphans, descendant_pids
        from trainer.runner.processes import EngineProcess

        adopt_orphans()
        child = EngineProcess([sys.executable, "-c", {LAUNCHER!r}, "0"], os.environ, Path({str(tmp_path)!r}))
        while child.ended() is None:
            time.sleep(0.01)
        assert len(descendant_pids()) == 1, descendant_pids()
        print("code", child.close(), "left", len(descendant_pids()), flush=True)
        """
    )
    assert "code 0 left 0" in done.stdout, done.stderr


def test_the_last_lines_are_remembered_as_a_reader_of_the_screen_saw_them(tmp_path: Path) -> None:
    done = run(
        """
        import os, sys
        from pathlib import Path
        from trainer.runner.processes import EngineProcess

        said = r"import sys; sys.stdout.write('  1%|\\r 50%|\\r100%| done\\nbroken\\xff\\n')"
        child = EngineProcess([sys.executable, "-c", said], os.environ, Path("."))
        while child.ended() is None:
            pass
        child.close()
        print(list(child.tail))
        """
    )
    assert "'100%| done'" in done.stdout, done.stderr


def test_a_line_that_is_not_understood_does_not_stop_the_engine(tmp_path: Path) -> None:
    """Whoever writes into a pipe that nobody reads waits for ever."""
    done = run(
        """
        import os, sys
        from pathlib import Path
        from trainer.runner.processes import EngineProcess

        def heard(line):
            raise ValueError("what is this?")

        said = "for number in range(20000): print('line', number)"
        child = EngineProcess([sys.executable, "-c", said], os.environ, Path("."), heard)
        while child.ended() is None:
            pass
        print("code", child.close(), child.tail[-1])
        """
    )
    assert "code 0 line 19999" in done.stdout, done.stderr[-2000:]


def test_stacks_are_requested_only_of_processes_that_can_dump_them(tmp_path: Path) -> None:
    """SIGUSR1 ends a process that has no handler for it, and a launcher has none."""
    deaf = "import time; print('up', flush=True); time.sleep(600)"
    done = run(
        f"""
        import os, subprocess, sys, time
        from core.system.wrapper import dump_stacks

        deaf = subprocess.Popen([sys.executable, "-c", {deaf!r}], stdout=subprocess.PIPE)
        deaf.stdout.readline()
        dump_stacks()
        time.sleep(0.2)
        print("still there", deaf.poll() is None)
        deaf.kill()
        """
    )
    assert "still there True" in done.stdout, done.stderr


def test_what_a_tree_computes_and_reads_is_added_up(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(3_000_000))
    done = run(
        f"""
        import os, subprocess, sys, time
        from trainer.runner.processes import tree_use

        place = {str(tmp_path / "large")!r}
        reads = f"import time; open({{place!r}}, 'rb').read(); sum(range(10**7)); time.sleep(600)"
        child = subprocess.Popen(["sh", "-c", sys.executable + ' -c "' + reads + '"; true'])
        until = time.monotonic() + 60
        while (use := tree_use(child.pid)).read_bytes < 3_000_000 or use.cpu_s < 0.1:
            if time.monotonic() > until:
                break
            time.sleep(0.05)
        whole = tree_use(os.getpid())
        print("grew", use.read_bytes >= 3_000_000, use.cpu_s >= 0.1, whole.read_bytes >= use.read_bytes)
        from trainer.runner.processes import kill_descendants
        kill_descendants()
        """
    )
    assert "grew True True True" in done.stdout, done.stdout + done.stderr


def test_orphans_that_ended_leave_no_zombies(tmp_path: Path) -> None:
    done = run(
        """
        import os, subprocess, sys, time
        from pathlib import Path
        from core.system.wrapper import adopt_orphans, reap

        def zombie(pid):
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                return False
            return fields[0] == "Z" and int(fields[1]) == os.getpid()

        adopt_orphans()
        pid = int(subprocess.run(["sh", "-c", "sleep 0.1 >&2 & echo $!"], stdout=subprocess.PIPE).stdout)
        until = time.monotonic() + 60
        while not zombie(pid) and time.monotonic() < until:
            time.sleep(0.01)
        before = zombie(pid)
        reap()
        print("before", before, "after", zombie(pid))
        """
    )
    assert "before True after False" in done.stdout, done.stdout + done.stderr
