"""Settings come from the environment and .env, and everything wrong with them is reported at once."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.domain.errors import ConfigError, Problem
from core.domain.tasks import TaskType
from miner.settings import SECRET_FIELDS, ChainKind, Settings, load_settings
from tests.doubles.each import each

ALICE = "5GrwvaEF5zXb26Fz9rcQpDWS57CtERHpNehXCPcNoHGKutQY"
BOB = "5FHneW46xGXgs5mUiveU4sbTyGBzmstUspZC92UhjJM694ty"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
URL = "https://github.com/someone/something"


def load(env_file: Path | None = None, **env: str) -> Settings:
    return load_settings(env=env, env_file=env_file)


def problems(env_file: Path | None = None, **env: str) -> dict[str, Problem]:
    with pytest.raises(ConfigError) as caught:
        load(env_file, **env)
    found = {problem.where: problem for problem in caught.value.problems}
    assert len(found) == len(caught.value.problems), "each is reported once"
    return found


def test_without_anything_set_the_defaults_hold() -> None:
    settings = load()
    assert settings.chain is ChainKind.FILE
    assert settings.nodes_file == settings.data_dir / "nodes.json"
    assert settings.data_dir == Path.cwd() / ".god-miner"
    assert settings.wallet_path == Path.home() / ".bittensor/wallets"
    assert settings.min_free_disk_bytes == 20 * 1000**3
    assert settings.task_types is None
    assert settings.policy_dir == settings.data_dir / "policies"


def test_the_environment_wins_over_the_file_and_overrides_win_over_both(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.write_text("NETUID=1\nPUBLIC_PORT=1001\nexport MAX_JOBS=11\n")
    settings = load_settings(env={"NETUID": "2", "PUBLIC_PORT": "1002"}, env_file=file, netuid=3)
    assert (settings.netuid, settings.public_port, settings.max_jobs) == (3, 1002, 11)
    assert [settings.source_of(name) for name in ("netuid", "public_port", "max_jobs", "max_hours")] == [
        "override",
        "env",
        ".env",
        "default",
    ]


def test_an_empty_value_counts_as_not_set(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.write_text("PUBLIC_IP=\nMAX_HOURS=\n")
    settings = load(file, NETUID="")
    assert (settings.netuid, settings.public_ip, settings.max_hours) == (56, None, None)
    assert settings.source_of("max_hours") == "default"


def test_the_process_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MAX_JOBS", "7")
    (tmp_path / ".env").write_text("\ufeffMAX_HOURS=3")
    settings = load_settings()
    assert (settings.max_jobs, settings.max_hours) == (7, 3.0)
    assert Settings().max_jobs != 7, "the class itself reads nothing from outside"


def test_all_problems_are_reported_at_once_with_variable_value_and_rule() -> None:
    found = problems(
        NETUID="x",
        PUBLIC_PORT="99999",
        TASK_TYPES="chat,poetry",
        OPERATOR_HOST="0.0.0.0",
        TRAINING_REPO_TEXT_COMMIT="main",
        TRAINING_REPO_IMAGE_URL=URL,
        WALLET_PASSWORD="abc",
    )
    assert {name: problem.value for name, problem in found.items()} == {
        "NETUID": "'x'",
        "PUBLIC_PORT": "'99999'",
        "TASK_TYPES": "'poetry'",
        "TRAINING_REPO_TEXT_COMMIT": "'main'",
        "WALLET_PASSWORD": "***",
        "OPERATOR_TOKEN": "",
        "TRAINING_REPO_IMAGE_COMMIT": "",
    }
    assert "40 hexadecimal digits" in found["TRAINING_REPO_TEXT_COMMIT"].rule
    assert "TRAINING_REPO_IMAGE_URL" in found["TRAINING_REPO_IMAGE_COMMIT"].rule
    assert "65535" in found["PUBLIC_PORT"].rule


def test_a_rule_between_settings_is_not_checked_if_one_of_them_is_wrong_itself() -> None:
    assert set(problems(OPERATOR_PORT="7999")) == {"OPERATOR_PORT"}
    assert set(problems(PUBLIC_PORT="many", OPERATOR_PORT="7999")) == {"PUBLIC_PORT"}


WRONG_VALUES = {
    "ALLOW_HOTKEYS": (ALICE[:-1],),
    "DATA_DIR": ("~nobody-of-that-name/x",),
    "HOTKEY_NAME": ("a/b",),
    "LOG_LEVEL": ("LOUD",),
    "MIN_FREE_DISK_BYTES": ("4 parsecs",),
    "MAX_HOURS": ("nan", "inf"),
    "MIN_STAKE_THRESHOLD": ("-1",),
    "OPERATOR_TOKEN": ("short",),
    "PUBLIC_HOST": ("http://0.0.0.0", "0.0.0.0:7999", "1.2.3"),
    "PUBLIC_IP": ("0.0.0.0", "2001:db8::1", "my.host"),
    "REQUIRE_VALIDATOR_PERMIT": ("perhaps",),
    "SLURM_CONSTRAINT": ("h100; rm", "$(id)"),
    "SLURM_CONTAINER": ("docker:image", "apptainer:relative.sif", "pyxis:"),
    "SLURM_MODULES": ("cuda;id",),
    "SLURM_NODES": ("n1 n2", "n[1"),
    "SLURM_OPTIONS": (
        *("--job-name=x", "--out=/x", "--requeue", "--no-requeue", "--wrap=id", "-p x", "x"),
        *("--partition=x", "--gres=gpu:1", "--comment=$(id)"),
    ),
    "SLURM_PARTITION": ("a b", "a;b", "-x"),
    "SUBTENSOR_ADDRESS": ("https://node", "ws://node:99999"),
    "SUBTENSOR_NETWORK": ("finey",),
    "TRAINING_REPO_IMAGE_DATASETS": ("a/b,c/d,e/f", "https://hf.co/a"),
    "TRAINING_REPO_IMAGE_URL": (
        "https://gitlab.com/a/b",
        "https://me:pw@github.com/a/b",
        "https://github.com/a/..",
    ),
    "WALLET_NAME": ("../other",),
}


@each(
    ("env", "wrong"),
    [
        *(({name: value}, name) for name, values in WRONG_VALUES.items() for value in values),
        ({"OPERATOR_PORT": "7999"}, "OPERATOR_PORT"),
        ({"OPERATOR_HOST": "192.168.1.5"}, "OPERATOR_TOKEN"),
        ({"CHAIN": "bittensor", "PUBLIC_IP": "192.168.1.5"}, "PUBLIC_IP"),
        ({"CHAIN": "bittensor", "PUBLIC_PORT": "0"}, "PUBLIC_PORT"),
        ({"ALLOW_HOTKEYS": ALICE, "DENY_HOTKEYS": f"{BOB} {ALICE}"}, "ALLOW_HOTKEYS"),
        ({"HF_ENDPOINT": "http://hub.example.org", "HF_TOKEN": "hf_something"}, "HF_ENDPOINT"),
        ({"TRAINING_REPO_TEXT_COMMIT": COMMIT}, "TRAINING_REPO_TEXT_URL"),
        ({"TRAINING_REPO_TEXT_TOKEN": "ghp_something"}, "TRAINING_REPO_TEXT_TOKEN"),
        ({"TRAINING_REPO_TEXT_DATASETS": "a/b"}, "TRAINING_REPO_TEXT_DATASETS"),
    ],
)
def test_a_wrong_value_is_refused_and_named(env: dict[str, str], wrong: str) -> None:
    found = problems(**env)
    assert wrong in found
    assert "None" not in found[wrong].rule


@each(
    ("env", "name", "value"),
    [
        ({"MIN_FREE_DISK_BYTES": "4MB"}, "min_free_disk_bytes", 4_000_000),
        ({"MIN_FREE_DISK_BYTES": "2 MiB"}, "min_free_disk_bytes", 2 * 1024**2),
        (
            {"TASK_TYPES": "chat, DPOTask\timage,,"},
            "task_types",
            (TaskType.CHAT, TaskType.DPO, TaskType.IMAGE),
        ),
        ({"ALLOW_HOTKEYS": f"{ALICE},{BOB} {ALICE}"}, "allow_hotkeys", (ALICE, BOB)),
        ({"LOG_LEVEL": "debug"}, "log_level", "DEBUG"),
        ({"REQUIRE_VALIDATOR_PERMIT": "yes"}, "require_validator_permit", True),
        ({"DATA_DIR": "/x/../y"}, "nodes_file", Path("/x/../y/nodes.json")),
        ({"DATA_DIR": "/x"}, "store_dir", Path("/x")),
        ({"DATA_DIR": "/x", "STORE_DIR": "/y"}, "store_dir", Path("/y")),
        (
            {"SLURM_OPTIONS": "--nice=100  --exclude=n[1-2],n7"},
            "slurm_options",
            ("--nice=100", "--exclude=n[1-2],n7"),
        ),
        ({"SLURM_PARTITION": "gpu,preempt"}, "slurm_partition", "gpu,preempt"),
        ({"SLURM_NODES": "n[1-4,7],big7"}, "slurm_nodes", "n[1-4,7],big7"),
        ({"SLURM_MODULES": "cuda/12.4 gcc"}, "slurm_modules", ("cuda/12.4", "gcc")),
        ({"PUBLISHED_PORT": "40001"}, "axon_port", 40001),
        ({"CHAIN": "bittensor", "PUBLIC_IP": "10.0.0.1", "ALLOW_PRIVATE_AXON": "1"}, "public_ip", "10.0.0.1"),
        ({"OPERATOR_HOST": "::1"}, "operator_host", "::1"),
        ({"netuid": "9"}, "netuid", 9),
    ],
)
def test_values_are_read_as_people_write_them(env: dict[str, str], name: str, value: Any) -> None:
    assert getattr(load(**env), name) == value


def test_a_tournament_repository_is_complete_or_absent() -> None:
    settings = load(
        TRAINING_REPO_TEXT_URL=URL + ".git",
        TRAINING_REPO_TEXT_COMMIT=COMMIT.upper(),
        TRAINING_REPO_TEXT_TOKEN="ghp_something",
        TRAINING_REPO_TEXT_DATASETS="a/b c",
    )
    repo = settings.training_repo("text")
    assert (repo.url, repo.commit, repo.datasets) == (URL, COMMIT, ("a/b", "c"))
    assert repo.token is not None
    assert settings.training_repo("image") is None
    assert settings.training_repo("no such type") is None


def test_a_line_that_sets_nothing_is_a_problem_and_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "my.env"
    for line in ("PUBLIC_PORT 7999", "just words", "'PUBLIC_PORT=7999"):
        file.write_text(f"# fine\n\nNETUID=5\n{line}\n")
        with pytest.raises(ConfigError, match=r"my\.env line 4: is not of the form NAME=value") as caught:
            load(file)
        assert line not in str(caught.value)


def test_a_named_file_that_cannot_be_read_is_a_problem_but_a_missing_default_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_settings(env={}).netuid == 56
    Path("binary.env").write_bytes(b"\xff\xfeN\x00")
    Path("directory.env").mkdir()
    rules = {"missing.env": "no such file", "binary.env": "UTF-8", "directory.env": "directory"}
    for name, rule in rules.items():
        assert rule in problems(Path(name))[name].rule


def test_wrong_values_in_the_file_are_named_and_misspelled_names_and_repeats_warned_of(
    tmp_path: Path,
) -> None:
    file = tmp_path / ".env"
    file.write_text("NETUID=x")
    assert set(problems(file)) == {"NETUID (in .env)"}
    file.write_text("MIN_STAKE_TRESHOLD=0\nWANDB_PROJECT=x\nNETUID=1\nNETUID=2\n")
    settings = load(file)
    assert settings.netuid == 2
    typo, repeat = settings.warnings
    assert typo == "MIN_STAKE_TRESHOLD is not a setting; did you mean MIN_STAKE_THRESHOLD?"
    assert repeat.startswith("NETUID is set twice")
    assert "line 4" in repeat


def test_the_old_name_of_a_setting_is_refused_with_the_new_one(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("ENGINE=docker\n")
    with pytest.raises(ConfigError, match=r"ENGINE.*: is BACKEND now"):
        load(tmp_path / ".env")
    for name, value in (("ENGINE", "docker,slurm"), ("ENGINE", "docker, slurm"), ("engine", "none")):
        with pytest.raises(ConfigError, match=rf"{name}: is BACKEND now"):
            load_settings(env={name: value}, env_file=None)
    for value in ("of another program", ""):
        assert load_settings(env={"ENGINE": value}, env_file=None).backend == ("auto",)


def test_a_setting_that_is_gone_is_warned_of_once_wherever_it_is_set(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.write_text("REPORT_HOUR=7\n")
    gone_from_file, gone_from_environment = sorted(load(file, STALL_FACTOR="9").warnings)
    assert gone_from_file == "REPORT_HOUR is no longer a setting: its value is fixed; remove it"
    assert gone_from_environment.startswith("STALL_FACTOR is no longer")


def test_an_unknown_override_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="NETUIDD has value 3: is not a setting; did you mean NETUID"):
        load_settings(env={}, env_file=None, netuidd=3)


def test_names_are_replaced_in_the_file_but_not_inside_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BASE", "/srv")
    file = tmp_path / ".env"
    file.write_text("DATA_DIR=${BASE}/god-miner\nWALLET_PASSWORD='pa${BASE}ss'\n")
    settings = load(file)
    assert settings.data_dir == Path("/srv/god-miner")
    assert list(settings.secrets()) == ["pa${BASE}ss"]


def test_secrets_appear_in_no_print_of_the_settings_nor_in_an_error() -> None:
    secrets = {
        name.upper(): f"hush-hush-{number:02}-0123456789" for number, name in enumerate(sorted(SECRET_FIELDS))
    }
    secrets["NOTIFY_URLS"] = f"tgram://{secrets['NOTIFY_URLS']}/42"
    address = "wss://me:hush-hush-pw@node.example.org/v1/hush-hush-path-key-0123?key=hush-hush-query-key-01"
    repos = {
        f"TRAINING_REPO_{kind}_{part}": value
        for kind in ("TEXT", "IMAGE", "ENVIRONMENT")
        for part, value in (("URL", URL), ("COMMIT", COMMIT))
    }
    settings = load(**secrets, **repos, SUBTENSOR_ADDRESS=address)
    plain = set(settings.secrets())
    assert plain >= {*secrets.values(), "hush-hush-pw", "hush-hush-path-key-0123", "hush-hush-query-key-01"}
    assert settings.subtensor_address == address
    shown = [settings.printable(name) for name in Settings.model_fields]
    assert "hush-hush" not in f"{settings} {settings!r} {shown}"
    wrong = problems(**secrets, SUBTENSOR_ADDRESS=address.replace("wss:", "http:"))
    assert len(wrong) == 4
    assert "hush-hush" not in str([str(problem) for problem in wrong.values()])


def test_a_very_long_value_is_shortened() -> None:
    assert len(problems(NETUID="9" * 10_000)["NETUID"].value) < 100


@given(
    st.dictionaries(
        st.sampled_from([name.upper() for name in Settings.model_fields]),
        st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40),
        max_size=8,
    )
)
def test_any_text_in_any_variable_gives_settings_or_a_named_problem(env: dict[str, str]) -> None:
    found: list[Problem] = []
    try:
        load(**env)
    except ConfigError as error:
        found = error.problems
        assert found
    assert all(problem.where.lower() in Settings.model_fields and problem.rule for problem in found)


HEAVY = ("fastapi", "httpx", "bittensor", "rich", "typer")


@pytest.mark.process
def test_importing_the_settings_loads_no_framework() -> None:
    program = f"import sys, miner.settings; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
