"""The values that Slurm's commands may be given: of settings, and of profiles."""

from __future__ import annotations

import re

NAME = r"[A-Za-z0-9_][A-Za-z0-9_.@+-]{0,99}"
NAMES = rf"{NAME}(,{NAME})*"
CONSTRAINT = r"[A-Za-z0-9_\[(][A-Za-z0-9_.,:&|*!=()\[\]-]{0,199}"
NODES = r"[A-Za-z0-9_.-]+(\[[0-9,-]+\])?[A-Za-z0-9_.-]*(,[A-Za-z0-9_.-]+(\[[0-9,-]+\])?[A-Za-z0-9_.-]*)*"
#: Options of sbatch that the backend sets itself, or that would take a run from its control.
_OURS = (
    "account array batch bcast begin chdir clusters constraint container cpus-per-gpu cpus-per-task "
    "deadline delay-boot dependency error export export-file get-user-env gid gpus gpus-per-node "
    "gpus-per-socket gpus-per-task gres help hold ignore-pbs input job-name kill-on-invalid-dep mem "
    "mem-per-cpu mem-per-gpu no-requeue nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu "
    "ntasks-per-node ntasks-per-socket open-mode output parsable partition qos quiet requeue reservation "
    "signal test-only time time-min uid usage verbose version wait wrap"
)


def check_option(option: str) -> str:
    """The option of sbatch; `ValueError` where it is none, or one that the backend sets."""
    found = re.fullmatch(r"--([a-z][a-z0-9-]*)(=[A-Za-z0-9_.,:@%+/=\[\]()*&|!-]+)?", option)
    if not found:
        raise ValueError("must be options of sbatch in their long form, such as --nice=100")
    # sbatch takes the beginning of a name for the name.
    if any(name.startswith(found[1]) for name in _OURS.split()):
        raise ValueError(f"cannot hold --{found[1]}: god-miner sets it, or has a setting for it")
    return option
