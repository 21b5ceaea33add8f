"""The scripts of other launchers: word for word as they were looked at, and whole as a shell reads them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from core.domain.choices import Engine, Parallelism
from core.domain.tasks import ImageModelType, TaskType
from core.planning.plan import FsdpPlan, TrainingPlan
from core.recipes.base import RecipeError
from core.recipes.launch import Launcher, launch_script, parse_launcher
from core.recipes.render import render
from tests.core.recipes.cases import image_inputs, image_plan, inputs, text_plan
from tests.doubles.each import each

pytestmark = pytest.mark.process


SNAPSHOTS = Path(__file__).parent / "snapshots"


def rendered(plan: TrainingPlan, launcher: Launcher, nodes: int = 1) -> str:
    files = image_inputs(plan.task.image_type) if plan.task.image_type else inputs(plan.task.task_type)
    script = launch_script(launcher, plan, files, render(plan, files), "/opt/god-miner", nodes)
    # The job's name changes with every field that a plan gets.
    return script.replace(plan.digest[:12], "0123456789ab")


NATIVE = text_plan(
    TaskType.INSTRUCT, engine=Engine.NATIVE, gpus=8, parallelism=Parallelism.FSDP, fsdp=FsdpPlan()
)
AXOLOTL = text_plan(TaskType.INSTRUCT)
CASES = {
    "native-accelerate.sh": lambda: rendered(NATIVE, Launcher.ACCELERATE),
    "native-torchrun.sh": lambda: rendered(NATIVE, Launcher.TORCHRUN),
    "native-two-nodes.sbatch": lambda: rendered(NATIVE, Launcher.SLURM, nodes=2),
    "axolotl-torchrun.sh": lambda: rendered(AXOLOTL, Launcher.TORCHRUN),
    "axolotl.sbatch": lambda: rendered(AXOLOTL, Launcher.SLURM),
    "kohya.sbatch": lambda: rendered(image_plan(ImageModelType.SDXL, gpus=2), Launcher.SLURM),
}


@pytest.mark.parametrize("name", CASES)
def test_a_shell_can_read_a_script_and_reviewed_ones_are_unchanged(name: str, tmp_path: Path) -> None:
    path, snapshot = tmp_path / name, SNAPSHOTS / name
    path.write_text(CASES[name](), "utf-8")
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True).stderr == ""
    if snapshot.exists():
        assert path.read_text("utf-8") == snapshot.read_text("utf-8")


def test_every_snapshot_is_compared() -> None:
    assert {path.name for path in SNAPSHOTS.iterdir()} <= CASES.keys()


def test_only_a_job_on_one_machine_uses_the_loopback() -> None:
    assert "PET_LOCAL_ADDR" not in rendered(NATIVE, Launcher.SLURM, nodes=2)
    assert "PET_LOCAL_ADDR" in rendered(NATIVE, Launcher.SLURM)


@each(
    ("plan", "launcher", "nodes", "why"),
    [
        (NATIVE, Launcher.TORCHRUN, 2, "--launcher slurm"),
        (NATIVE, Launcher.SLURM, 3, "cannot be split"),
        (image_plan(ImageModelType.KREA2), Launcher.SLURM, 1, "starts itself"),
    ],
)
def test_what_a_launcher_cannot_do_is_refused(
    plan: TrainingPlan, launcher: Launcher, nodes: int, why: str
) -> None:
    with pytest.raises(RecipeError, match=why):
        rendered(plan, launcher, nodes)


def test_an_unknown_launcher_is_refused() -> None:
    with pytest.raises(RecipeError, match="accelerate, torchrun, slurm"):
        parse_launcher("mpirun")


def test_the_script_waits_for_a_step_that_is_asked_to_save_and_goes_back_into_the_queue(
    tmp_path: Path,
) -> None:
    """Slurm's part is played by the shell: srun runs, scancel and scontrol are noted."""
    programs = tmp_path / "bin"
    programs.mkdir()
    srun = f"""#!/bin/bash
case "$*" in
*--over) echo '{{"end": "stopped"}}' > {tmp_path}/run/result.json; exit 0 ;;
*trainer.native.external_launch*) echo sheet; exit 0 ;;
esac
kill -USR1 $PPID
while [ ! -e {tmp_path}/run/stop ]; do sleep 0.05; done
sleep 0.2; touch {tmp_path}/saved
"""
    for name, text in {
        "srun": srun,
        "scontrol": f'#!/bin/sh\n[ "$1" = show ] && echo n1 || echo "$@" >> {tmp_path}/said\n',
        "scancel": "#!/bin/sh\n",
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (tmp_path / "run").mkdir()
    script = rendered(NATIVE, Launcher.SLURM).replace("/usr/local/bin:", f"{programs}:/usr/local/bin:")
    (tmp_path / "job").write_text(script)
    done = subprocess.run(
        ["bash", str(tmp_path / "job"), str(tmp_path / "run")],
        env={"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n1", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "saved").exists()
    assert (tmp_path / "said").read_text() == "requeue 77\n"
