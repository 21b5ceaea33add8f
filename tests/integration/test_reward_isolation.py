"""Reward code on the process backend as root: another user, in namespaces of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path

from miner.backends.base import EndCause
from tests.doubles.backend_bench import process_bench
from tests.doubles.required import missing

#: Speaks as `trainer.rewards.sandbox` does, for which the interpreter of these tests lacks the packages.
TRAINER = '''
import json, os, socket

def asked(talk, question=None):
    if question:
        talk.sendall(json.dumps(question).encode() + b"\\n")
    said = b""
    while not said.endswith(b"\\n"):
        piece = talk.recv(65536)
        assert piece, "the supervisor is gone"
        said += piece
    return json.loads(said)

source = """
import os, subprocess
def f(completions):
    reached = []
    for name, attack in {
        "result": lambda: open("RESULT", "w"),
        "trainer": lambda: os.kill(TRAINER, 9),
    }.items():
        try:
            attack()
            reached.append(name)
        except OSError:
            pass
    assert not reached, reached
    numbers = [one for one in os.listdir("/proc") if one.isdigit()]
    states = [open("/proc/" + one + "/stat").read().rpartition(")")[2].split()[0] for one in numbers]
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    return [os.getuid(), sum(state != "Z" for state in states)]
"""
open("result.json", "w").write("ours")
source = source.replace("RESULT", os.path.abspath("result.json")).replace("TRAINER", str(os.getpid()))
talk = socket.socket(socket.AF_UNIX)
talk.connect(os.environ["GOD_MINER_REWARDS"])
found = [asked(talk)]
for _ in range(2):
    call = {"place": 0, "source": source, "function": "f", "completions": ["a", "b"], "columns": {}}
    found.append(asked(talk, call))
print(json.dumps(found))
'''


async def test_reward_code_is_another_user_that_sees_no_process_of_the_trainer(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        missing("only root starts reward code as another user")
    bench = process_bench(tmp_path / "data", sandbox=True)
    try:
        run, status = await bench.play(TRAINER, hostile=True)
        assert status.why is EndCause.OK, run.log
        hello, first, second = json.loads(run.log)
        assert hello["exposed"] == []
        assert "of its own" in hello["isolation"]
        assert "problem" not in first, first
        assert first["rewards"][0] >= 2_000_000_000
        # Process 1, the supervisor and the worker; the first call's child is gone when the second is made.
        assert second["rewards"] == first["rewards"] == [first["rewards"][0], 3.0]
        assert run.file("result.json") == "ours"
        other, _ = await bench.play(TRAINER, hostile=True)
        assert json.loads(other.log)[1]["rewards"][0] != first["rewards"][0], "a user of each run's own"
    finally:
        await bench.clear()
