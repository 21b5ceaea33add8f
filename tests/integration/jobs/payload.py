"""A trainer for the fault tests: keeps to the contract of run.json, and fails as its dataset says.

It is handed to the interpreter as text, so it runs wherever a Python is: as a process, in a sandbox, in a
container without any package. What it is to do stands in the first row of its dataset, by attempt:

    {"_do": {"1": {"steps": 20, "step_s": 0.05, "save": [5, 10], "at": {"12": "oom"}}, "*": {"steps": 6}}}

With "wait_at" it stays at that step, and says so, until a file `go` lies in its attempt's folder: it is still
there when a test looks, however long that takes.
"""

import faulthandler
import json
import os
import random
import signal
import struct
import sys
import time

RUN = json.load(open(sys.argv[sys.argv.index("--run") + 1]))  # noqa: SIM115 - short-lived
ATTEMPT = os.path.basename(os.path.dirname(RUN["progress_path"])).split("_")[1]
HIDDEN, RANK = 16, 4


class State:
    asked = False
    saved = False
    best = None


def on_term(*_):
    State.asked = True


def say(event, **more):
    line = json.dumps({"t": time.time(), "event": event, **more}).encode() + b"\n"
    handle = os.open(RUN["progress_path"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(handle, line)
    os.close(handle)


def score(value, step):
    return {"value": value, "metric": "eval_loss", "lower_is_better": True, "step": step}


def weights():
    """Return numbers that look like weights."""
    return [[struct.pack("<f", random.uniform(-1, 1)) for _ in range(HIDDEN * RANK)] for _ in "AB"]


def save(step, value):
    """A complete adapter, written beside and renamed in."""
    work, place = RUN["work_dir"], RUN["submission_dir"]
    fresh = os.path.join(work, f"fresh-{step}-{time.time()}")
    os.makedirs(fresh)
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    header, data = {}, b""
    for name, shape, numbers in zip("AB", ([RANK, HIDDEN], [HIDDEN, RANK]), weights(), strict=True):
        content = b"".join(numbers)
        offsets = [len(data), len(data) + len(content)]
        header[f"{layer}.lora_{name}.weight"] = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
        data += content
    text = json.dumps(header).encode()
    with open(os.path.join(fresh, "adapter_model.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)
        file.flush()
        os.fsync(file.fileno())
    config = {
        "base_model_name_or_path": RUN["model_id"],
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
    }
    with open(os.path.join(fresh, "adapter_config.json"), "w") as file:
        json.dump(config, file)
    if os.path.exists(place):
        os.rename(place, fresh + ".old")
    os.rename(fresh, place)
    State.saved, State.best = True, score(value, step)
    say("submission", score=score(value, step), step=step)


def end(how, code=None, detail="", moment=None):
    result = {"end": how, "submission": State.saved, "detail": detail, "best": State.best, "moment": moment}
    beside = RUN["result_path"] + ".part"
    with open(beside, "w") as file:
        json.dump(result, file)
    os.rename(beside, RUN["result_path"])
    say("end", end=how, submission=State.saved, text=detail)
    sys.exit(0 if State.saved else code)


def fail(what, step):
    if what == "oom":
        say("oom", moment="train", text="CUDA out of memory: tried to allocate 2.00 GiB")
        end("oom", 30, "CUDA out of memory", "train")
    if what == "nan":
        end("nan", 31, f"the loss is NaN at step {step}")
    if what == "bad_data":
        end("bad_data", 20, "no row has an answer")
    if what == "crash":
        raise RuntimeError("a bug of the trainer")
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "hang":
        while True:
            time.sleep(1)
    if what == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(0.05)
            say("stage", stage="train")
    if what == "eat":
        hoard = []
        while True:
            hoard.append(bytearray(os.urandom(1 << 20)) * 8)
    if what == "fill":
        fill()


def fill():
    path = os.path.join(RUN["work_dir"], "filler")
    try:
        with open(path, "wb") as file:
            while True:
                file.write(bytes(1 << 20))
                file.flush()
    except OSError as error:
        os.unlink(path)
        end("disk_full", 32, f"no space left: {error.strerror}")


def over(do):
    return State.asked or os.path.exists(RUN["stop_path"]) or time.time() >= RUN["end_by"]


def wait(do):
    go = os.path.join(os.path.dirname(RUN["progress_path"]), "go")
    while not (os.path.exists(go) or over(do)):
        time.sleep(0.05)
        say("stage", stage="train")


def train(do):
    steps, pause = do.get("steps", 10), do.get("step_s", 0.02)
    for step in range(1, steps + 1):
        if over(do):
            save(step, 1.0 / step)
            end("clock" if time.time() >= RUN["end_by"] else "stopped")
        say("step", step=step, total=steps, loss=2.0 / step, tokens_s=1000.0)
        if step in do.get("save", []):
            save(step, do.get("score", 1.0) / step)
        if step in do.get("checkpoint", []):
            place = os.path.join(RUN["work_dir"], f"checkpoint-{step}")
            os.makedirs(place)
            with open(os.path.join(place, "trainer_state.json"), "w") as file:
                file.write("{}")
            say("checkpoint", step=step, path=place)
        what = do.get("at", {}).get(str(step))
        if what:
            fail(what, step)
        if step == do.get("wait_at"):
            wait(do)
        time.sleep(pause)
    save(steps, do.get("score", 1.0) / steps)
    end("finished")


def main():
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    signal.signal(signal.SIGTERM, on_term)
    with open(os.path.join(os.path.dirname(RUN["progress_path"]), "launches"), "a") as file:
        file.write("x")
    with open(RUN["data_path"]) as file:
        rows = json.load(file)
    do = rows[0].get("_do", {})
    do = do.get(ATTEMPT, do.get("*", {}))
    print("attempt", ATTEMPT, "resumes from", RUN["resume_from"], flush=True)
    if do.get("tell"):
        print(*(f"{name}={value}" for name, value in os.environ.items()), sys.argv, sep="\n", flush=True)
    say("stage", stage="load")
    train(do)


main()
