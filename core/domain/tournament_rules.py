"""Upstream's facts on tournaments: each with its file there, the commit at which it was read, and its day.

Facts in our own words: no code of upstream's. `FACTS` lists them; `god-miner tournament rules --check`
compares those that have a constant with upstream's present files (`miner/tournament/rules_watch.py`). A new
fact is one call of `UpstreamFile.fact`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from statistics import fmean
from typing import NamedTuple, TypeVar

from core.domain.evaluation import DPO_BETA, GRPO_GENERATIONS, GRPO_KL_LENGTH, GRPO_KL_WEIGHT
from core.domain.records import Record
from core.domain.tasks import INTERCODE, PVP_GAMES, SWE, ImageModelType, TaskType
from core.domain.wire import TournamentType

T = TypeVar("T")
TEXT, IMAGE, ENVIRONMENT = TournamentType.TEXT, TournamentType.IMAGE, TournamentType.ENVIRONMENT

UPSTREAM = "https://github.com/gradients-ai/G.O.D"


class UpstreamFile(NamedTuple):
    """A file of upstream's repository as it was read."""

    path: str
    commit: str
    #: The last day on which upstream is known to have used this text: copies carry no date of their own.
    day: date

    def fact(self, name: str, value: T, constant: str | None, uses: str, unit: float = 1.0) -> T:
        """Write a fact down; return its value."""
        _FACTS.append(Fact(name, value, self, constant, unit, uses))
        return value

    def facts(self, uses: str, *rows: tuple[str, object, str]) -> None:
        """Write facts down that only people read here: a name, the value, and upstream's constant."""
        for name, value, constant in rows:
            self.fact(name, value, constant, uses)

    def __str__(self) -> str:
        return f"{self.path}@{self.commit[:8]}"


@dataclass(frozen=True, slots=True)
class Fact:
    name: str
    value: object
    source: UpstreamFile
    #: Upstream's name of the value in that file; None if only people find it, in their code or guide.
    constant: str | None
    #: Ours is theirs times this.
    unit: float
    #: What of ours depends on it.
    uses: str


_FACTS: list[Fact] = []
_WHOLE_TREE, _SEPTEMBER = date(2026, 7, 15), date(2026, 9, 17)
_CONSTANTS = UpstreamFile(
    "validator/tournament/constants.py", "0791bb6e345533cae8088ffcc4d214c70c22efaf", _SEPTEMBER
)
#: What a later version of the same file has, by the code that reads it and its test.
_LATER = date(2026, 9, 26)
_IMAGE_ROUNDS = UpstreamFile("validator/tournament/constants.py", "17a27237", _LATER)
_TASKS = UpstreamFile("validator/tournament/task_creator.py", "17a27237", _LATER)
_BRACKET = UpstreamFile("validator/tournament/tournament_manager.py", "e524ce62", _LATER)
_REVIEW = UpstreamFile("validator/tournament/challenger_code_review.py", "e524ce62", _LATER)
_RESULTS = UpstreamFile(
    "validator/tournament/round_results.py", "0522663bdddd744d28b124908c9e971bf0f38242", _SEPTEMBER
)
_GUIDE = UpstreamFile("docs/miner.md", "0a029299b2233f6f7928803ada56e31feb7e6fad", _SEPTEMBER)
_WEIGHTS = UpstreamFile("validator/scoring/weights.py", _GUIDE.commit, _SEPTEMBER)
_SCORING = UpstreamFile("validator/scoring/constants.py", _RESULTS.commit, _SEPTEMBER)
_ADMISSION = UpstreamFile("validator/tournament/github_validation.py", "38ae0312", date(2026, 9, 4))
_GPUS = UpstreamFile(
    "validator/tournament/gpu_requirements.py", "7d1d4dd264864684b57194ff8510797b21ac6dee", _WHOLE_TREE
)
_TRAINER = UpstreamFile("trainer/constants.py", "385bcb6", _WHOLE_TREE)
_UPLOADER = UpstreamFile("trainer/containers/uploader.py", "385bcb6", _WHOLE_TREE)
_LICENSE = UpstreamFile("LICENSE.md", "385bcb6", _WHOLE_TREE)
_NOTICE = UpstreamFile("NOTICE", "385bcb6", _WHOLE_TREE)
_ROWS = UpstreamFile(
    "validator/tasks/datasets/constants.py", "0323bd06e675716f263bab45c7cead3c73b3e28b", _WHOLE_TREE
)
_SYNTHETICS = UpstreamFile(
    "validator/tasks/synthetics/constants.py", "4f04b779757d20aa1f19e03d230b40541e30ed70", _WHOLE_TREE
)
_POOL = UpstreamFile("core/oversampled_later_models.json", "60d12a4c", _LATER)
_ENV_MODELS = UpstreamFile(
    "core/whitelisted_env_models.json", "5ceaea719d73284936988711f4e7f26299d58351", _WHOLE_TREE
)
_ENVIRONMENTS = UpstreamFile("core/constants/environments.py", "385bcb6", _WHOLE_TREE)
_WHITELIST = UpstreamFile(
    "core/datasets/whitelisted_sft_datasets.json", "4f04b779757d20aa1f19e03d230b40541e30ed70", _WHOLE_TREE
)
_IMAGE_MODELS = UpstreamFile("core/models/image_models.py", "49c16d39", date(2026, 9, 21))
_PICTURES = UpstreamFile("validator/evaluation/evaluators/diffusion.py", "49c16d39", date(2026, 9, 21))

_COPIES = UpstreamFile("validator/tournament/repo_diff_report_config.json", "385bcb6", _WHOLE_TREE)
_EVALUATION = UpstreamFile("validator/evaluation/constants.py", "385bcb6", _WHOLE_TREE)
_PVP = UpstreamFile("core/pvp/constants.py", "385bcb6", _WHOLE_TREE)

#: The rules as a whole are of this day: fees, hours and gates were read then.
AS_OF = _CONSTANTS.day.isoformat()


# — admission

START_WEEKDAY = 0
#: Everything should be over by then; validators end a tournament by hand.
_CONSTANTS.facts(
    "tournament rules",
    ("deadline: weekday", 4, "TOURNAMENT_DEADLINE_DAY_OF_WEEK"),
    ("deadline: hour", 14, "TOURNAMENT_DEADLINE_HOUR"),
)
#: An entry must have been registered for so long before the start.
REGISTERED_FOR = _GUIDE.fact("registered before the start for", timedelta(hours=1), None, "check, rule 12")
LICENSE_NAMES = _ADMISSION.fact(
    "names of the licence",
    ("LICENSE.md", "LICENSE", "license.md", "license", "License.md", "License"),
    None,
    "check, rule 2; prepare",
)
NOTICE_NAMES = _ADMISSION.fact(
    "names of the notice",
    ("NOTICE", "NOTICE.txt", "notice.txt", "Notice.txt", "notice", "Notice"),
    None,
    "check, rule 2; prepare",
)
#: sha256 of upstream's files after their own normalisation: every line without blanks at its end.
LICENSE_DIGEST = _LICENSE.fact(
    "digest of LICENSE.md",
    "af05747c3872fb8aabca8338ee6a0d999bd3d8a8a89121c01d8ae549d503b34d",
    "digest",
    "check, rule 2: prepare the entry again, with a new checkout of upstream",
)
NOTICE_DIGEST = _NOTICE.fact(
    "digest of NOTICE",
    "556b66fee4670b95bf6f1eaedbdbdaeb21d9e7249bfa64d4ff5fa59ee1d1cf24",
    "digest",
    "check, rule 2: prepare the entry again, with a new checkout of upstream",
)
LICENSE_READ = _LICENSE.day.isoformat()
CLONE_LIMIT_S = _ADMISSION.fact("clone: seconds", 60.0, None, "check, rule 3; rehearse")
_ADMISSION.fact("obfuscation detector: seconds", 60.0, None, "docs/tournaments.md")
#: Above this a clone within the limit is doubtful: our own figure.
LARGE_REPOSITORY_BYTES = 200_000_000
#: Of `requested_datasets` the first two of these are given, the others are left out silently. Not for images.
DATASETS = _WHITELIST.fact(
    "datasets that entries may request",
    (
        "SoelMgd/Poker_Dataset",
        "RZ412/PokerBench",
        "albarji/ballmatro",
        "Mahesh111000/Hanabi_dataset",
        "hkust-nlp/agentboard",
        "tasksource/Boardgame-QA",
        "GoodStartLabs/gin-rummy-trajectories-32k",
        "gradients-io-tournaments/ArkadiumGinrummy",
        "the-acorn-ai/textarena-player-game-traces",
        "gradients-io-tournaments/env_training_gradients",
        "gradients-io-tournaments/intercode_bigcode_combined_12k",
        "gradients-io-tournaments/pvp-tool-calling-sft",
        "gradients-io-tournaments/SWE-ZERO-12M-trajectories-filtered",
    ),
    "*",
    "check, rule 10; rehearse --dataset; environments",
)
MOST_DATASETS = _GUIDE.fact("datasets: at most", 2, None, "check, rule 10; rehearse --dataset")
#: Where the container finds them, each in a directory `org--name`.
DATASETS_FOLDER = "miner_datasets"
_REVIEW.fact(
    "review before round 2",
    "a language model reads every entry but the champion's for cheating; a flag stops the tournament until a "
    "person decides, and an accepted one is the entry's end",
    None,
    "check; docs/tournaments.md",
)


# — copies: T1 is the digest over the normalized texts of an entry's files

_COPIES_USES = "check, rule 5"
#: Parts of a path, names and endings that the digest leaves out; zero bytes leave a file out as well.
LEFT_OUT_PARTS = _COPIES.fact(
    "copies: directories left out",
    frozenset(
        {
            *(".git", ".hg", ".svn", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache"),
            *("node_modules", "dist", "build", ".next", ".venv", "venv"),
        }
    ),
    "excluded_parts",
    _COPIES_USES,
)
LEFT_OUT_NAMES = _COPIES.fact(
    "copies: names left out", frozenset({"LICENSE", "LICENSE.md", "NOTICE"}), "excluded_names", _COPIES_USES
)
LEFT_OUT_SUFFIXES = _COPIES.fact(
    "copies: endings left out",
    frozenset(
        {
            *(".png", ".jpg", ".jpeg", ".gif", ".webp", ".pdf"),
            *(".zip", ".tar", ".gz", ".bz2", ".xz", ".7z"),
            *(".bin", ".pt", ".pth", ".safetensors", ".onnx", ".npy", ".npz", ".lock"),
        }
    ),
    "excluded_suffixes",
    _COPIES_USES,
)
#: A zero byte among so many makes a file binary.
LOOKED_AT_BYTES = 4096


# — build and run

#: Where a Dockerfile may be; the first directory that has it counts.
DOCKERFILE_DIRECTORIES = ("ops/docker", "dockerfiles")
TEXT_DOCKERFILE = "standalone-text-trainer.dockerfile"
IMAGE_DOCKERFILE = "standalone-image-trainer.dockerfile"
TOOLKIT_DOCKERFILE = "standalone-image-toolkit-trainer.dockerfile"
for _name, _file in (
    ("TEXT", TEXT_DOCKERFILE),
    ("IMAGE", IMAGE_DOCKERFILE),
    ("IMAGE_TOOLKIT", TOOLKIT_DOCKERFILE),
):
    _TRAINER.fact(
        f"places of {_file}",
        tuple(f"{directory}/{_file}" for directory in DOCKERFILE_DIRECTORIES),
        f"{_name}_DOCKERFILE_PATHS",
        "check, rule 7; prepare; rehearse",
    )
BUILD_LIMIT_S = _TRAINER.fact("build: seconds", 1800.0, None, "rehearse")
MEMORY_PER_GPU = 1024**3 * _TRAINER.fact("memory for a GPU, GB", 110, "MEMORY_PER_GPU_GB", "rehearse; plan")
CPUS_PER_GPU = _TRAINER.fact("CPUs for a GPU", 24, "CPUS_PER_GPU", "rehearse; plan")
CACHE = _TRAINER.fact("cache", "/cache", "CACHE_ROOT_PATH", "rehearse; the trainer's paths")
CHECKPOINTS = _TRAINER.fact(
    "checkpoints", "/app/checkpoints", "OUTPUT_CHECKPOINTS_PATH", "rehearse; the trainer's paths"
)
#: After an exit code other than zero a fresh container finds what the first one left.
MAX_TRAINING_ATTEMPTS = _CONSTANTS.fact("attempts", 2, "MAX_TRAINING_ATTEMPTS", "rehearse")
WANDB_VARIABLES = _TRAINER.fact(
    "variables of W&B",
    ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_ARTIFACT_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR"),
    "WANDB_DIRECTORIES",
    "rehearse",
)
_GUIDE.fact(
    "arguments of texts",
    "--task-id --model --dataset --dataset-type --task-type --file-format --expected-repo-name "
    "--hours-to-complete",
    None,
    "trainer/runner/command_line.py; check, rule 9; rehearse",
)
_GUIDE.fact(
    "arguments of pictures",
    "--task-id --model --dataset-zip --model-type --expected-repo-name --hours-to-complete [--trigger-word]",
    None,
    "trainer/runner/command_line.py; check, rule 9; rehearse",
)


# — upload

#: Matched with the path in the repository.
NOT_UPLOADED = _UPLOADER.fact(
    "not uploaded",
    (
        "trainer_state.json",
        "training_args.bin",
        "optimizer.pt",
        "optimizer.bin",
        "scheduler.pt",
        "scaler.pt",
        "rng_state*.pth",
    ),
    None,
    "rehearse",
)
#: A folder with no larger file and no subfolder counts as empty.
EMPTY_BYTES = _UPLOADER.fact("an empty folder's largest file, bytes", 1024, None, "rehearse")
#: Where pictures' files are put in the repository; the evaluator looks at paths that begin like this.
IMAGE_SUBFOLDER = _TRAINER.fact(
    "pictures: folder", "checkpoints", "IMAGE_TASKS_HF_SUBFOLDER_PATH", "rehearse"
)
IMAGE_PREFIX = "checkpoint"


# — data, hours and GPUs of a task

TEST_SHARE = _ROWS.fact(
    "rows for the test: share", 0.1, "TRAIN_TEST_SPLIT_PERCENTAGE", "rehearse; hidden pictures of replay"
)
MOST_TEST_ROWS = _ROWS.fact("rows for the test: at most", 1000, "MAX_TEST_DATA_POINTS", "rehearse")
_ROWS.facts(
    "plan; docs/tournaments.md",
    ("rows: fewest", 8_000, "MINIMUM_DATASET_ROWS"),
    ("rows: most", 175_000, "MAXIMUM_DATASET_ROWS"),
    ("hours: fewest", 0.75, "TRAINING_HOURS_MIN"),
    ("hours: most", 6.0, "MAX_TRAINING_HOURS"),
    ("hours: epochs", 2.0, "TARGET_TRAINING_EPOCHS"),
    (
        "GRPO: hours by billions",
        ((4.0, 1.5), (12.0, 2.5), (40.0, 4.0), (float("inf"), 6.0)),
        "GRPO_HOURS_BY_PARAMS_B",
    ),
)
_SYNTHETICS.facts(
    "rehearse; docs/tournaments.md",
    ("KL coefficient: least", 0.1, "INSTRUCT_KL_COEFFICIENT_MIN"),
    ("KL coefficient: most", 1.5, "INSTRUCT_KL_COEFFICIENT_MAX"),
    ("pictures: fewest", 10, "MIN_IMAGE_SYNTH_PAIRS"),
    ("pictures: most", 50, "MAX_IMAGE_SYNTH_PAIRS"),
    ("pictures: fewest hours", 0.5, "MIN_IMAGE_COMPETITION_HOURS"),
    ("pictures: most hours", 1.0, "MAX_IMAGE_COMPETITION_HOURS"),
    ("qwen-image: hours more", 0.5, "QWEN_IMAGE_EXTRA_COMPETITION_HOURS"),
)
CONTINUOUS_HOURS = _CONSTANTS.fact("continuous chat: hours", 4.0, "CONTINUOUS_SFT_TRAINING_HOURS", "rehearse")
#: Up to this effective number of parameters so many H100s; an unknown size gets one.
GPU_STEPS: tuple[tuple[float, int], ...] = (
    *(
        (1e9 * _GPUS.fact(f"{gpus} GPU: up to billions", size, constant, "plan; rehearse"), gpus)
        for size, gpus, constant in (
            (4.0, 1, "TOURNAMENT_GPU_THRESHOLD_FOR_2X_H100"),
            (12.0, 2, "TOURNAMENT_GPU_THRESHOLD_FOR_4X_H100"),
            (40.0, 4, "TOURNAMENT_GPU_THRESHOLD_FOR_8X_H100"),
        )
    ),
    (float("inf"), 8),
)
KL_FACTOR = _GPUS.fact("KL counts parameters", 2, "TOURNAMENT_KL_GPU_MULTIPLIER", "plan; rehearse")
for _type, _name in ((TaskType.DPO, "DPO"), (TaskType.GRPO, "GRPO")):
    _GPUS.fact(
        f"{_name} counts parameters",
        _type.traits.size_factor,
        f"TOURNAMENT_{_name}_GPU_MULTIPLIER",
        "plan; rehearse",
    )
#: Whatever the model's size. A miner reports one or two for round 1; the code passes no size.
ENVIRONMENT_GPUS = _GPUS.fact("environments: GPUs", 4, None, "plan; rehearse")
CONTINUOUS_GPUS = _GPUS.fact("continuous chat: GPUs", 4, None, "plan; rehearse")
ENVIRONMENT_HOURS = _CONSTANTS.fact("environments: hours", 1.5, "ENV_TRAINING_HOURS", "rehearse; plan")
_CONSTANTS.facts(
    "plan; docs/environments.md",
    ("swe_infinite: hours", 2.5, "ENV_TRAINING_HOURS_SWE_INFINITE"),
    (
        "swe_infinite: model",
        "gradients-io-tournaments/swe-base-qwen3-8b-continuous",
        "ENV_TARGET_TOURN_MODEL",
    ),
    ("environments from scratch: hours", 3.0, "ENV_TRAINING_HOURS_BOSS_ROUND_FROM_SCRATCH"),
    ("environments: more in each round", 2, "ENV_ENVS_PER_ROUND_MULTIPLIER"),
    ("environments, round 1: always", INTERCODE, "FORCED_R1_ENVIRONMENT"),
    ("environments, boss: always", SWE, "FORCED_BOSS_ENVIRONMENT"),
    ("environments: group of a small field", 4, "SMALL_ENVIRONMENT_GROUP_SIZE"),
    ("environments: a small field, at most", 7, "SMALL_ENVIRONMENT_MAX_PARTICIPANTS"),
)


def gpus_for(task_type: TaskType, params: float, *, kl: bool = False, continuous: bool = False) -> int:
    """H100s for a task: parameters count three times for DPO, twice for GRPO or a KL term."""
    if not task_type.is_text:
        return 1
    if task_type.makes_rows:
        return ENVIRONMENT_GPUS
    if continuous:
        return CONTINUOUS_GPUS
    size = task_type.traits.size_factor * (KL_FACTOR if kl else 1) * params
    return next(gpus for most, gpus in GPU_STEPS if size <= most)


# — models


class PoolModel(NamedTuple):
    """A model of the pool of newer ones, from which one task of text's round 1 comes."""

    name: str
    billions: float
    #: As its config.json says.
    model_type: str


POOL = (
    PoolModel("LiquidAI/LFM2.5-230M", 0.23, "lfm2"),
    PoolModel("LiquidAI/LFM2.5-350M", 0.35, "lfm2"),
    PoolModel("LiquidAI/LFM2.5-1.2B-Base", 1.17, "lfm2"),
    PoolModel("LiquidAI/LFM2.5-1.2B-Instruct", 1.17, "lfm2"),
    PoolModel("LiquidAI/LFM2.5-2.6B-Base", 2.7, "lfm2"),
    PoolModel("LiquidAI/LFM2.5-2.6B", 2.7, "lfm2"),
    PoolModel("tiiuae/Falcon-H1-0.5B-Base", 0.52, "falcon_h1"),
    PoolModel("tiiuae/Falcon-H1-1.5B-Base", 1.55, "falcon_h1"),
    PoolModel("tiiuae/Falcon-H1-1.5B-Deep-Base", 1.55, "falcon_h1"),
    PoolModel("tiiuae/Falcon-H1-3B-Base", 3.15, "falcon_h1"),
    PoolModel("ibm-granite/granite-4.1-3b", 3.4, "granite"),
    PoolModel("ibm-granite/granite-4.1-3b-base", 3.4, "granite"),
    PoolModel("openbmb/MiniCPM5-1B", 1.08, "llama"),
    PoolModel("openbmb/MiniCPM5-2B", 2.52, "llama"),
    PoolModel("openbmb/MiniCPM5-2B-Base", 2.52, "llama"),
    PoolModel("kakaocorp/kanana-2-3b-instruct", 3.51, "qwen3"),
    PoolModel("Nanbeige/Nanbeige4.1-3B", 3.93, "llama"),
)
_POOL.fact(
    "text, round 1: pool of newer models",
    frozenset(model.name for model in POOL),
    "models.model_id",
    "plan; the trainer's architectures",
)
_ENV_MODELS.fact(
    "environments: models",
    frozenset(
        {
            "unsloth/Llama-3.2-3B-Instruct",
            "unsloth/Meta-Llama-3.1-8B-Instruct",
            "Qwen/Qwen3-4B-Instruct-2507",
            "Qwen/Qwen2.5-1.5B-Instruct",
            "Qwen/Qwen2.5-3B-Instruct",
            "Qwen/Qwen2.5-7B-Instruct",
        }
    ),
    "*",
    "environments: templates and parsers",
)
#: A chat model's line, continued in each boss round from its last winner; by its name the first model.
LINEAGES = _CONSTANTS.fact(
    "continuous chat: lines",
    {"qwen3-14b": "Qwen/Qwen3-14B"},
    "CONTINUOUS_SFT_LINEAGES",
    "rehearse --task boss; docs/tournaments.md",
)
_ENVIRONMENTS.fact(
    "environments", frozenset((*PVP_GAMES, INTERCODE, SWE)), "EnvironmentName", "trainer/environments"
)
_IMAGE_MODELS.fact(
    "picture families",
    frozenset(str(one) for one in ImageModelType),
    "ImageModelType",
    "core/models/image_families.py",
)


# — rounds


class RoundTask(Record):
    """Equal tasks of a round."""

    #: Its name in `miner.tournament.rules.TASKS`, as in `rehearse --task`.
    task: str
    count: int = 1
    #: The chance of this kind, where one kind is drawn.
    share: float = 1.0
    #: Billions of parameters of a text's model.
    least_b: float | None = None
    most_b: float | None = None
    #: The model is one of `POOL`.
    pool: bool = False


class Round(Record):
    #: round1, knockout, boss: as in `rehearse --task`.
    name: str
    tasks: tuple[RoundTask, ...]
    #: Entries of a group that go on; groups have at most `group` entries, None: all are in one.
    advance: int = 1
    group: int | None = None
    #: One of the tasks is drawn for each pair; else all are played.
    drawn: bool = False
    text: str


class TournamentRules(Record):
    kind: TournamentType
    fee_tao: float
    #: Mondays, UTC: a tournament begins within this hour, if none of the kind runs.
    start_hour: int
    least_entries: int
    #: Share of the emission at balanced entries, and at most; see `emission_shares`.
    weight: float
    most_weight: float
    rounds: tuple[Round, ...]
    #: Tasks of the boss round that a challenger may lose, and kinds of which none may be lost.
    may_lose: int
    not_lost: tuple[str, ...] = ()

    def round(self, name: str) -> Round | None:
        return next((one for one in self.rounds if one.name == name), None)


_ROUND_ONE_TASKS = _CONSTANTS.fact(
    "round 1: tasks of text and pictures", 3, "SMALL_TOURNAMENT_GROUP_TASKS", "rehearse --task round1"
)
_ROUND_ONE_ADVANCE = _CONSTANTS.fact(
    "round 1: entries that go on", 2, "SMALL_TOURNAMENT_ADVANCE", "odds; docs/tournaments.md"
)
_ROUND_ONE_MOST_B = _TASKS.fact("text, round 1: billions at most", 4.0, None, "plan; rehearse --task round1")
_STANDARD_B = _TASKS.fact("text later: billions", (0.1, 12.0), None, "plan; rehearse --task boss")
_LARGE_B = (
    _CONSTANTS.fact("text, boss: billions at least", 30.0, "BOSS_ROUND_LARGE_INSTRUCT_MIN_SIZE_B", "plan"),
    _CONSTANTS.fact("text, boss: billions at most", 72.0, "BOSS_ROUND_LARGE_INSTRUCT_MAX_SIZE_B", "plan"),
)
_BOSS_TEXTS = _CONSTANTS.fact(
    "text, boss: tasks",
    {"InstructTextTask": 3, "DpoTask": 1, "GrpoTask": 1},
    "FINAL_ROUND_TEXT_TASK_DISTRIBUTION",
    "rehearse --task boss; odds",
)
_CONSTANTS.fact("text, boss: tasks on the pool", 0, "FINAL_ROUND_OVERSAMPLED_TASKS", "rehearse --task boss")
_KNOCKOUT_SHARES = (
    _SYNTHETICS.fact(
        "text, knockout: instruct", 0.75, "PERCENTAGE_OF_TASKS_THAT_SHOULD_BE_INSTRUCT_TEXT", "odds"
    ),
    _SYNTHETICS.fact("text, knockout: DPO", 0.2, "PERCENTAGE_OF_TASKS_THAT_SHOULD_BE_DPO", "odds"),
)
_ROUND_TWO_FAMILIES = _IMAGE_ROUNDS.fact(
    "pictures, knockout: families",
    ("qwen-image", "krea2"),
    "ROUND_TWO_IMAGE_MODEL_TYPES",
    "rehearse --task image-knockout; odds",
)
_BOSS_FAMILIES = _CONSTANTS.fact(
    "pictures, boss: tasks",
    {"krea2": 2, "ideogram4": 2, "qwen-image": 1, "z-image": 1},
    "FINAL_ROUND_IMAGE_TASK_DISTRIBUTION",
    "rehearse --task image-boss; odds",
)
_ENV_GROUP = _CONSTANTS.fact("environments: group with the champion", 5, "MAX_ENVIRONMENT_GROUP_SIZE", "odds")
_ENV_ADVANCE = _CONSTANTS.fact("environments: entries that go on", 1, "ENV_ADVANCE_PER_GROUP", "odds")
_ENV_BOSS_TASKS = _CONSTANTS.fact(
    "environments, boss: tasks", 3, "ENV_FINAL_ROUND_TASK_COUNT", "odds; docs/environments.md"
)
_MAY_LOSE = _RESULTS.fact("boss: tasks that may be lost", 1, None, "odds")
_BRACKET.fact("bracket of text and pictures", "all in one group, a knockout of two, the boss", None, "odds")

_TEXT_ROUNDS = (
    Round(
        name="round1",
        text="all in one group; instruct only; the best two by mean place go on",
        advance=_ROUND_ONE_ADVANCE,
        tasks=(
            RoundTask(task="instruct", count=_ROUND_ONE_TASKS - 1, least_b=0.1, most_b=_ROUND_ONE_MOST_B),
            RoundTask(task="instruct-pool", least_b=0.1, most_b=_ROUND_ONE_MOST_B, pool=True),
        ),
    ),
    Round(
        name="knockout",
        text="the two, one task; instruct has a KL term; the winner meets the champion",
        drawn=True,
        tasks=tuple(
            RoundTask(task=task, share=share, least_b=_STANDARD_B[0], most_b=_STANDARD_B[1])
            for task, share in (
                ("instruct-kl", _KNOCKOUT_SHARES[0]),
                ("dpo", _KNOCKOUT_SHARES[1]),
                ("grpo", round(1 - sum(_KNOCKOUT_SHARES), 6)),
            )
        ),
    ),
    Round(
        name="boss",
        text="against the champion; a drawn task gets one decider; lose at most one, and not the continuous",
        tasks=(
            RoundTask(
                task="instruct-kl",
                count=_BOSS_TEXTS["InstructTextTask"] - 1,
                least_b=_STANDARD_B[0],
                most_b=_STANDARD_B[1],
            ),
            RoundTask(task="instruct-large", least_b=_LARGE_B[0], most_b=_LARGE_B[1]),
            RoundTask(
                task="dpo", count=_BOSS_TEXTS["DpoTask"], least_b=_STANDARD_B[0], most_b=_STANDARD_B[1]
            ),
            RoundTask(
                task="grpo", count=_BOSS_TEXTS["GrpoTask"], least_b=_STANDARD_B[0], most_b=_STANDARD_B[1]
            ),
            RoundTask(task="continuous", count=len(LINEAGES), least_b=14.0, most_b=15.0),
        ),
    ),
)
#: Which three families, their constant does not say in any version that was read: Flux is one of them.
_IMAGE_ROUNDS_PLAYED = (
    Round(
        name="round1",
        text="all in one group; three families, Flux among them; the best two go on",
        advance=_ROUND_ONE_ADVANCE,
        tasks=(RoundTask(task="flux"), RoundTask(task="another family", count=_ROUND_ONE_TASKS - 1)),
    ),
    Round(
        name="knockout",
        text="the two, one task of a family drawn for all; the winner meets the champion",
        drawn=True,
        tasks=tuple(
            RoundTask(task=family, share=1 / len(_ROUND_TWO_FAMILIES)) for family in _ROUND_TWO_FAMILIES
        ),
    ),
    Round(
        name="boss",
        text="against the champion; lose at most one",
        tasks=tuple(RoundTask(task=family, count=count) for family, count in _BOSS_FAMILIES.items()),
    ),
)
_ENV_ROUNDS = (
    Round(
        name="round1",
        text="two environments, the shell tasks among them; the best of each group goes on",
        advance=_ENV_ADVANCE,
        group=_ENV_GROUP,
        tasks=(RoundTask(task="environment"),),
    ),
    Round(
        name="knockout",
        text="two more environments in each round, from the own model of the round before",
        advance=_ENV_ADVANCE,
        group=_ENV_GROUP,
        tasks=(RoundTask(task="environment"),),
    ),
    Round(
        name="boss",
        text="a continuation, one from scratch, and software repairs; none lost, repairs at least as good",
        tasks=(RoundTask(task="environment", count=_ENV_BOSS_TASKS),),
    ),
)


def _tournament(
    kind: TournamentType,
    *,
    fee: float,
    hour: int,
    entries: tuple[int, str],
    weight: float,
    rounds: tuple[Round, ...],
    may_lose: int = _MAY_LOSE,
    not_lost: tuple[str, ...] = (),
) -> TournamentRules:
    name = kind.name
    _CONSTANTS.fact(
        f"{kind}: weekday of the start",
        START_WEEKDAY,
        f"TOURNAMENT_SCHEDULE_{name}_DAY_OF_WEEK",
        "check, rule 12; tournament rules",
    )
    return TournamentRules(
        kind=kind,
        fee_tao=_CONSTANTS.fact(
            f"{kind}: fee, TAO",
            fee,
            f"TOURNAMENT_{name}_PARTICIPATION_FEE_RAO",
            "check, rule 11; odds",
            unit=1e-9,
        ),
        start_hour=_CONSTANTS.fact(
            f"{kind}: hour of the start, UTC",
            hour,
            f"TOURNAMENT_SCHEDULE_{name}_HOUR",
            "check, rule 12; tournament rules",
        ),
        least_entries=_CONSTANTS.fact(f"{kind}: entries needed", entries[0], entries[1], "odds"),
        weight=_SCORING.fact(f"{kind}: emission", weight, f"TOURNAMENT_{name}_WEIGHT", "odds"),
        most_weight=_SCORING.fact(f"{kind}: emission at most", 0.5, f"MAX_{name}_TOURNAMENT_WEIGHT", "odds"),
        rounds=rounds,
        may_lose=may_lose,
        not_lost=not_lost,
    )


TOURNAMENTS: Mapping[TournamentType, TournamentRules] = {
    ENVIRONMENT: _tournament(
        ENVIRONMENT,
        fee=0.6,
        hour=9,
        entries=(5, "MIN_MINERS_FOR_ENV_TOURN"),
        weight=0.25,
        rounds=_ENV_ROUNDS,
        may_lose=0,
    ),
    TEXT: _tournament(
        TEXT,
        fee=0.7,
        hour=11,
        entries=(4, "MIN_MINERS_FOR_TOURN"),
        weight=0.35,
        rounds=_TEXT_ROUNDS,
        not_lost=("continuous",),
    ),
    IMAGE: _tournament(
        IMAGE,
        fee=0.4,
        hour=13,
        entries=(4, "MIN_MINERS_FOR_TOURN"),
        weight=0.25,
        rounds=_IMAGE_ROUNDS_PLAYED,
    ),
}


# — the gate of the boss round


class BossGate(Record):
    """The gate of a task of the boss round, at the lower bound of a bootstrap over its rows."""

    #: Rows that differ by less are won by nobody.
    dead_zone: float
    win_rate: float
    #: Of the mean loss: so much, and this share of the champion's.
    min_gap: float
    gap_share: float
    confidence: float
    resamples: int
    seed: int


_USES_GATE = "god-miner eval; rehearse --against; odds"
#: Of the champion's score in GRPO and on pictures: by so much a challenger's must be better.
LEAST_GAIN = _CONSTANTS.fact("boss: margin", 0.01, "BOSS_ROUND_WIN_MARGIN", _USES_GATE)
BOSS_GATE = BossGate(
    dead_zone=_CONSTANTS.fact("boss: dead zone, nats", 0.01, "BOSS_ROUND_TIE_DEADZONE_NATS", _USES_GATE),
    win_rate=_CONSTANTS.fact("boss: rows won", 0.55, "BOSS_ROUND_MIN_WIN_RATE", _USES_GATE),
    min_gap=_CONSTANTS.fact("boss: mean gap, nats", 0.01, "BOSS_ROUND_MIN_MEAN_GAP_NATS", _USES_GATE),
    gap_share=LEAST_GAIN,
    confidence=_CONSTANTS.fact("boss: confidence", 0.99, "BOSS_ROUND_BOOTSTRAP_CONFIDENCE", _USES_GATE),
    resamples=_CONSTANTS.fact("boss: resamples", 10_000, "BOSS_ROUND_BOOTSTRAP_RESAMPLES", _USES_GATE),
    seed=_CONSTANTS.fact("boss: seed", 20260808, "BOSS_ROUND_BOOTSTRAP_SEED", _USES_GATE),
)
#: Kinds whose losses are compared row by row; the others by `LEAST_GAIN`.
_CONSTANTS.fact(
    "boss: compared row by row",
    ("InstructTextTask", "DpoTask", "ChatTask"),
    "PAIRED_BOSS_ROUND_TASK_TYPES",
    _USES_GATE,
)
_PICTURE_USES = "trainer/pictures; god-miner eval; replay"
#: Noise levels at which pictures are evaluated, and noise draws for each.
BANDS = _PICTURES.fact("pictures: noise levels", 16, "DEFAULT_STRATA", _PICTURE_USES)
NOISES = _PICTURES.fact("pictures: noises", 16, "DEFAULT_NOISES", _PICTURE_USES)
_IMAGE_MODELS.fact("pictures: version of the score", "image-denoising-l2-v1", None, _PICTURE_USES)
_IMAGE_MODELS.fact("pictures: share of the caption", 0.5, None, _PICTURE_USES)
_PICTURES.fact("pictures: ComfyUI", "694815f4", None, "the image's ComfyUI (requirements, dockerfiles)")


_EVALUATION.facts(
    "core/domain/evaluation.py; god-miner eval; the trainer's held-out scores",
    ("DPO: beta", DPO_BETA, "BETA_DPO"),
    ("GRPO: cost of a nat of KL", GRPO_KL_WEIGHT, "BETA_GRPO"),
    ("GRPO: completions of a prompt", GRPO_GENERATIONS, "GRPO_DEFAULT_NUM_GENERATIONS"),
    ("GRPO: prompt for the KL, tokens", GRPO_KL_LENGTH, "GRPO_KL_SEQUENCE_LENGTH"),
)


class MatchLimits(Record):
    """A match of two models in a game."""

    #: Wall time for a game's pairs, and for a turn.
    seconds: float
    turn_seconds: float
    #: Tokens of a turn's answer, and of the notes after a game.
    turn_tokens: int
    reflection_tokens: int
    #: A model's notes: slots for a game and for the match, and tokens in each.
    working_slots: int
    long_term_slots: int
    slot_tokens: int
    #: So many forfeits of one side end a match.
    forfeits: int
    #: So many losses in a row end a match of at most so many games; a longer one ends after twice as many.
    losses: int


def _match(name: str, value: T, constant: str, source: UpstreamFile = _PVP) -> T:
    return source.fact(f"match: {name}", value, constant, "trainer/environments; docs/environments.md")


MATCH = MatchLimits(
    seconds=_match("seconds", 900.0, "PVP_MATCHUP_TIME_BUDGET_SECONDS"),
    turn_seconds=_match("seconds of a turn", 30.0, "PVP_TURN_TIMEOUT_SECONDS"),
    turn_tokens=_match("tokens of a turn", 512, "PVP_TURN_MAX_TOKENS"),
    reflection_tokens=_match("tokens of the notes after a game", 384, "PVP_REFLECTION_MAX_TOKENS"),
    working_slots=_match("slots for a game", 4, "PVP_WORKING_MEM_SLOTS"),
    long_term_slots=_match("slots for the match", 8, "PVP_LONGTERM_MEM_SLOTS"),
    slot_tokens=_match("tokens of a slot", 128, "PVP_WORKING_SLOT_TOKENS"),
    forfeits=_match("forfeits that end it", 10, "PVP_EPISODE_FORFEIT_THRESHOLD", _EVALUATION),
    losses=_match("losses in a row that end it", 10, "PVP_CONSECUTIVE_LOSS_FORFEIT", _EVALUATION),
)


# — emission


class Emission(Record):
    """The pay of champions: the three kinds' shares sum to 1, nothing is burned, and none fades."""

    #: Strength with which a kind of many entries loses to the others. Counted are the `window` tournaments
    #: before the last one, without those of fewer than `least_entrants`.
    alpha: float
    floor: float
    window: int
    least_entrants: int
    #: So many places are paid, each this share of the one before.
    paid_ranks: int
    decay: float
    #: A second place is paid until the next results, so many days.
    runner_up_days: int
    #: Weight of every entry of a running tournament.
    participation: float
    #: A new champion's boost: the rate times what it is better by, beyond the threshold.
    boost_threshold: float
    boost_rate: float
    #: Alpha that all miners of the subnet get in a day.
    daily_alpha: float


def _emission(name: str, value: T, constant: str, source: UpstreamFile = _SCORING) -> T:
    return source.fact(f"emission: {name}", value, constant, "odds; docs/tournaments.md")


EMISSION = Emission(
    alpha=_emission("balance", 1.25, "EMISSION_BALANCE_ALPHA"),
    floor=_emission("floor", 0.05, "EMISSION_BALANCE_FLOOR"),
    window=_emission("tournaments counted", 4, "EMISSION_BALANCE_ROLLING_WINDOW"),
    least_entrants=_emission("entries that count", 3, "EMISSION_MIN_ENTRANTS_FOR_BALANCE"),
    paid_ranks=_emission("places paid", 3, "TOURNAMENT_PAID_RANKS"),
    decay=_emission("a place's share of the one before", 0.25, "TOURNAMENT_SIMPLE_DECAY_BASE"),
    runner_up_days=_emission("days of a second place", 7, "RUNNER_UP_EMISSION_DAYS", _CONSTANTS),
    participation=_emission("weight of an entry", 0.0001, "TOURNAMENT_PARTICIPATION_WEIGHT"),
    boost_threshold=_emission("boost: from", 0.1, "EMISSION_MULTIPLIER_THRESHOLD"),
    boost_rate=_emission("boost: rate", 2.0, "EMISSION_MULTIPLIER_RATE"),
    daily_alpha=_emission("alpha of miners in a day", 2952.0, "DAILY_ALPHA_TO_MINERS"),
)
_WEIGHTS.fact(
    "emission: burned", "nothing; a champion's share does not fade", None, "odds; docs/tournaments.md"
)

#: In a tournament's results this hotkey stands for the reigning champion.
CHAMPION_NAME = _SCORING.fact(
    "results: the champion's hotkey",
    "5GU4Xkd3dCGTU3s8VLcHGc5wsD5M8XyxDca5yDQhYm1mVXFu",
    "EMISSION_BURN_HOTKEY",
    "odds; field show --hotkey",
)

#: Every fact, in the order of this file.
FACTS: tuple[Fact, ...] = tuple(_FACTS)


def emission_shares(entrants: Mapping[TournamentType, float | None]) -> dict[TournamentType, float]:
    """Return each kind's share by the mean number of its entries lately, before a champion's boost.

    Entries are None if not known. A kind with more entries than its weight stands for loses to the others."""
    pool = sum(rules.weight for rules in TOURNAMENTS.values())
    pressure = {
        kind: count * pool / rules.weight
        for kind, rules in TOURNAMENTS.items()
        if (count := entrants.get(kind)) is not None and count > 0
    }
    usual = fmean(pressure.values()) if pressure else 1.0
    wanted = {
        kind: rules.weight * pressure.get(kind, usual) ** -EMISSION.alpha
        for kind, rules in TOURNAMENTS.items()
    }
    total = sum(wanted.values())
    shares = {kind: max(EMISSION.floor, pool * one / total) for kind, one in wanted.items()}
    capped = {kind: min(TOURNAMENTS[kind].most_weight, one) for kind, one in shares.items()}
    total = sum(capped.values())
    return {kind: one / total for kind, one in capped.items()}


def place_shares(places: int = EMISSION.paid_ranks) -> tuple[float, ...]:
    """Return the share of each place in its kind's; two places are paid if no third one is clear."""
    raw = [EMISSION.decay**place for place in range(min(places, EMISSION.paid_ranks))]
    return tuple(one / sum(raw) for one in raw)
