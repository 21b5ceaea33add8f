"""What all tests share: the tier of each, and what a fast one must not do."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.doubles import outside, watch

# The training environment runs the trainer's tests without the daemon's packages.
if importlib.util.find_spec("pydantic_settings") is not None:
    from tests.doubles.engine_fixtures import (  # noqa: F401
        docker_host,
        slurm,
        unread_replies_collected,
    )

ROOT = Path(__file__).parents[1]

#: The tier of a file, a folder or a single test, by what its id starts with; the longest name counts. All
#: others are fast: such a test fails if it starts a process, opens a socket or imports torch.
TIERS: dict[str, tuple[str, ...]] = {
    "process": (
        "benchmarks/test_tools.py",
        "core/recipes/axolotl/test_rules_with_axolotl.py",
        "core/recipes/test_launch_launchers.py",
        "core/submission/test_folder.py",
        "core/submission/test_swap.py::test_a_trainer_killed_before",
        "doubles/test_slurm.py",
        "doubles/test_watch.py",
        "fuzz",
        "integration",
        "miner/http/test_config.py",
        "miner/backends/slurm",
        "miner/http/test_jobs.py",
        "miner/http/test_offers.py::test_a_backtest",
        "miner/http/test_offers.py::test_one_backtest",
        "miner/http/test_limits",
        "miner/http/test_subnet_signed.py",
        "miner/chain/test_metagraph_refresh_source.py::test_the_daemons_side_of_it_never_imports_the_sdk",
        "miner/chain/test_metagraph_refresh_on_chain.py",
        "miner/chain/test_sdk",
        "miner/cli/test_backtest.py",
        "miner/cli/test_chain.py",
        "miner/cli/test_dev.py",
        "miner/cli/test_doctor.py::test_all_real_checks_run_on_a_bare_machine_and_none_of",
        "miner/cli/test_train_eval.py",
        "miner/cli/test_jobs.py",
        "miner/cli/test_models.py",
        "miner/cli/test_plan.py",
        "miner/cli/test_submission.py::test_a_person_publishes_to_the_hub_and_keeps_the_card",
        "miner/cli/test_submission.py::test_the_embedded_default_is_a_folder",
        "miner/cli/test_tournament_calendar.py",
        "miner/cli/test_tournament_field.py",
        "miner/cli/test_tournament.py",
        "miner/cli/test_train.py",
        "miner/cli/test_environments.py",
        "benchmarks/test_load.py",
        "miner/dev/test_demo_inputs_site.py",
        "miner/dev/test_stack.py",
        "miner/dev/test_tour.py::test_the_tour_holds",
        "miner/tournament/rehearsal/test_kills.py",
        "miner/doctor/checks/test_training_gpus.py",
        "miner/doctor/checks/test_subnet_hub.py",
        "miner/doctor/test_checks.py",
        "core/system/test_wrapper.py",
        "miner/backends/docker/test_client.py::test_a_socket_that",
        "miner/backends/slurm/test_job_script.py",
        "miner/backends/process/test_interpreter.py",
        "miner/backends/process/test_sandbox.py::test_a_sandbox_that_isolates_nothing",
        "miner/backends/test_registry.py",
        "miner/backends/test_ownership.py::test_all_that_carry_the_mark",
        "miner/fleet/test_inventory.py",
        "miner/fleet/test_dcgm.py",
        "miner/fleet/test_nvml",
        "miner/inputs/test_fetch_workers.py",
        "miner/inputs/test_connection.py",
        "miner/inputs/test_dataset_fetch.py",
        "miner/inputs/test_download.py",
        "miner/inputs/test_fetch.py",
        "miner/inputs/test_model_cache.py::test_one_process_holds_a_lock",
        "miner/inputs/test_model_fetch",
        "miner/inputs/test_worker.py",
        "miner/jobs/test_launch.py::test_a_port_",
        "miner/jobs/test_worker_in_every_stage.py",
        "miner/jobs/test_worker_mishaps.py",
        "miner/publish/test_local_hub.py",
        "miner/publish/test_publisher",
        "miner/publish/test_reachable.py",
        "miner/settings/test_load.py::test_importing_the_settings",
        "miner/store/test_database.py::test_a_file_that_is_up_to_date_is_not_migrated",
        "miner/support/test_subprocess.py",
        "miner/chain/test_identity.py",
        "miner/chain/test_hotkey_worker.py",
        "miner/observe/test_logs.py::test_no_secret_given_to_a_real_program_is_in_anything_it_prints",
        "miner/test_daemon_client.py",
        "miner/tournament/check/test_arguments.py",
        "miner/tournament/check/test_confinement.py",
        "miner/tournament/check/test_copies.py",
        "miner/tournament/check/test_dockerfiles.py::test_a_dockerfile_too_large",
        "miner/tournament/check/test_entering.py",
        "miner/tournament/check/test_entry.py",
        "miner/tournament/check/test_licence.py",
        "miner/tournament/check/test_sources.py",
        "miner/tournament/test_checkout.py",
        "miner/tournament/test_checkout_hostile.py",
        "miner/tournament/field/test_pull.py",
        "miner/tournament/test_polite_client.py",
        "miner/tournament/test_prepare.py",
        "miner/tournament/test_public_api.py",
        "miner/notify/test_worker.py",
        "miner/cli/test_native_runs_follow.py",
        "scripts/test_engine_tables.py",
        "scripts/test_hashes.py::test_a_file_is_installed_only_with_its_hash",
        "scripts/test_real_image_engines.py::test_one_attempt_that_fails",
        "scripts/test_real_image_engines.py::test_the_script_says",
        "scripts/test_run_tests.py",
        "test_dockerfiles.py::test_every_command_of_a_build_is_a_command",
        "test_dockerfiles.py::test_the_text_image_has_what_validators_rewards_import_and_is_built",
        "test_operations.py",
        "trainer/environments/test_generation.py",
        "trainer/environments/test_task.py",
        "trainer/environments/test_models.py",
        "trainer/session/test_failures.py",
        "trainer/session/test_watchdog.py",
        "trainer/session/test_submission.py::test_kill_9_before",
        "trainer/runner/test_check_engines.py",
        "trainer/environments/test_intercode_machine.py",
        "trainer/environments/test_intercode_prompts.py::test_rewards",
        "trainer/environments/test_intercode_rows.py",
        "trainer/rewards/test_sandbox.py",
        "trainer/runner/test_image_choice.py",
        "trainer/runner/test_image_runner",
        "trainer/runner/test_processes.py",
    ),
    "docker": (
        "integration/jobs/test_docker_dies.py",
        "integration/test_classic_builder.py",
        "integration/test_engines_docker.py",
        "integration/test_images.py",
        "miner/cli/test_images.py",
        "miner/doctor/checks/test_training_engine.py",
        "miner/tournament/rehearsal/test_build.py",
        "miner/tournament/rehearsal/test_leftovers.py",
        "miner/tournament/rehearsal/test_rehearse.py",
    ),
    "training": (
        "benchmarks/test_memory_model.py::test_the_model_holds_against_torchs_own_bookkeeping",
        "core/planning/test_planner_grid.py::test_axolotl_itself",
        "core/recipes/kohya/test_recipe_toml.py",
        "core/submission/test_metadata_configs_library.py",
        "core/submission/test_safetensors_library.py",
        "integration/jobs/test_torch.py",
        "integration/test_dashboard.py::test_a_training_is_live",
        "integration/test_demo.py",
        "integration/test_native_runs.py",
        "integration/test_rules.py",
        "integration/test_same_task.py",
        "integration/test_rehearsal.py",
        "integration/test_trainer_image.py",
    ),
    "campaign": (
        "integration/jobs/test_daemon_dies.py::test_jobs_outlive_the_daemon_and_each_is_launched_and",
        "integration/jobs/test_disk_full.py::test_at_whatever_instant",
        "integration/jobs/test_docker_dies.py::test_at_whatever_instant",
        "integration/jobs/test_slurm_dies.py::test_at_whatever_instant",
        "integration/jobs/test_faults.py::test_at_whatever_instant",
        "integration/test_inputs.py::test_workers_killed_at_random_instants",
        "integration/test_crash.py::test_what_was_acknowledged_survives_kill_9_at_any_instant",
        "integration/test_engines_crash.py::test_a_daemon_killed_at_any_instant",
        "integration/test_engines_docker.py::test_an_engine_killed_at_any_instant",
        "miner/jobs/test_worker_in_chaos.py",
        "integration/test_kills.py",
        "trainer/runner/test_image_runner_kills.py::test_killed_at_any_instant",
        "trainer/session/test_submission_kills.py::test_killed_at_any_instant",
        "trainer/session/test_submission.py::test_kill_9_at_random_instants",
    ),
}

#: Of the training tier, what needs torch and no Axolotl: the demo's small environment will do.
SMALL = (
    "integration/test_dashboard.py::test_a_training_is_live",
    "integration/test_demo.py",
    "integration/test_rules.py",
    "trainer/native/",
    "trainer/session/test_watchdog_hang.py",
)

#: A test of several engines.
DOCKER = re.compile(r"\[(?:[^]]*-)?docker(?:-[^]]*)?\]$")

#: Of the tests of every engine, those that `make test` runs with Slurm too: its jobs take a second to begin.
SLURM_TESTS = (
    "integration/test_engines.py::test_a_killed_wrapper",
    "integration/test_engines.py::test_a_restarted_daemon",
    "integration/test_engines.py::test_an_end_has_its_code_and_cause[slurm-raise",
    "integration/test_engines.py::test_an_end_is_known_after",
    "integration/test_engines.py::test_force_kills",
    "integration/test_engines.py::test_stop_lets",
    "integration/test_engines.py::test_the_run_gets_its",
    "integration/test_engines.py::test_what_is_submitted_again",
    "integration/test_engines_hostile.py::test_it_sees_its_own_files",
)
SLURM = re.compile(r"::[^[]*\[slurm[]-]")

#: What `make test` leaves to `make test-all`: each of these takes long, and most of what it would find is
#: found by a shorter test too.
THOROUGH = (
    "integration/test_slurm_kills.py::test_a_controller_that_is_gone",
    "integration/test_slurm_kills.py::test_a_job_without_its_supervisor",
    "integration/test_same_task.py",
    "benchmarks/test_memory_model.py::test_the_model_holds_against_torchs_own_bookkeeping",
    "integration/jobs/test_disk_full.py::test_at_whatever_save",
    "integration/jobs/test_faults.py::test_at_whatever_step",
    "integration/jobs/test_torch.py",
    "integration/test_classic_builder.py",
    "integration/test_images.py::test_a_prepared_entrys_image_is_built",
    "integration/test_native_runs.py::test_a_pretraining_from_text_or_tokens_ends_with_a_better_model[text",
    "integration/test_rehearsal.py::test_an_environment_task_passes_from_clone_to_score",
    "integration/test_rehearsal.py::test_every_other_kind_of_text_passes",
    "integration/test_rules.py::test_a_gpu_that_fills",
    "integration/test_slurm_two_nodes.py::test_a_node_whose_trainer_is_killed",
    "integration/test_slurm_two_nodes.py::test_two_nodes_train_one_model[axolotl",
    "integration/test_starting.py::test_a_signal_during_the_start_ends_it_and_the_next_start_works[lock_taken",
    "integration/test_starting.py::test_a_signal_during_the_start_ends_it_and_the_next_start_works[run_file_w",
    "integration/test_trainer_image.py",
    "miner/cli/test_tournament.py::test_an_entry_is_prepared_and_passes_what_can_pass",
    "miner/publish/test_publisher_faults.py::test_killed_at_the_end_a_deduplicated_file",
    "miner/chain/test_identity.py::test_a_damaged_encrypted_hotkey",
    "trainer/axolotl/test_kernels.py::test_loss_and_gradients_are_the_same_for_every_architecture",
    "trainer/environments/players/test_clobber.py::test_a_won_end_is_won[4",
    "trainer/environments/test_play.py::test_mcts_plays_every_game[gin_rummy",
    "trainer/inputs/test_text_fuzzed.py",
    "trainer/native/test_master_weights.py::test_small_steps_rounded_at_random_learn_as_much_as_with_masters[muon",
    "trainer/runner/test_machines.py::test_a_rank_that_is_killed",
    "trainer/runner/test_machines.py::test_a_request_to_stop",
    "trainer/runner/test_machines.py::test_two_machines_train_one_model",
    "trainer/runner/test_text_runner_models.py::test_a_tokenizer_that_never_encodes_a_row_is_a_bad_model_and_not_a_crash[normalizer",
    "trainer/runner/test_text_runner.py::test_a_task_with_rewards_raises_them[full",
    "trainer/runner/test_text_runner.py::test_cut_off_at_a_random_moment",
    "trainer/runner/test_text_runner_models.py::test_an_adapter_on_routed_experts",
    "trainer/runner/test_text_runner_sharded.py::test_an_adapter_on_routed_experts",
    "trainer/runner/test_text_runner_control.py::test_smaller_or_larger_passes_from_the_middle_on_change_no_loss[axolotl-Dpo",
    "trainer/runner/test_text_runner_knobs.py::test_preferences_are_trained",
    "trainer/runner/test_text_runner_knobs.py::test_rates_are_tried_out_without_a_trace[GrpoTask",
    "trainer/runner/test_text_runner_launches.py::test_asked_to_stop_two_processes",
    "trainer/runner/test_text_runner_launches.py::test_killed_with_its_runner",
    "trainer/runner/test_text_runner_launches.py::test_two_processes_train",
    "trainer/runner/test_text_runner_sharded.py",
)

#: Of these tables `make test` runs the named rows only: the others take the same way, and differ in what a
#: shorter test tries as well.
ROWS: dict[str, tuple[str, ...]] = {
    "integration/test_slurm_kills.py::test_a_training_outlives": ("controller", "node's daemon"),
    "integration/test_slurm_kills.py::test_killed_before_the_answer": ("running",),
    "integration/test_slurm_kills.py::test_killed_between_the_claim": ("node's daemon", "node"),
    "integration/test_slurm_kills.py::test_what_saves_while": ("node's daemon",),
    "integration/jobs/test_docker_dies.py::test_an_engine_that_is_killed_while_inputs": ("live-restore",),
    "integration/jobs/test_docker_dies.py::test_what_the_trainer_finished": ("no live-restore",),
    "integration/jobs/test_faults.py::test_a_crash_is_tried": ("process-crash", "process-bad data"),
    "integration/jobs/test_faults.py::test_a_hang_is_seen": ("process",),
    "integration/jobs/test_faults.py::test_the_deadline_is_kept": ("process",),
    "integration/jobs/test_faults.py::test_what_a_changed_plan": ("process-oom", "process-nan"),
    "integration/jobs/test_network.py::test_a_dataset_behind_a_bad_network": ("cut",),
    "integration/jobs/test_network.py::test_a_hub_behind_a_bad_network": ("no reply",),
    "integration/test_demo.py::test_a_little_model": ("process",),
    "integration/test_disk.py::test_a_database_that_is_removed": ("",),
    "integration/test_disk.py::test_a_file_of_somebody_else": ("god-miner.sqlite3",),
    "integration/test_disk.py::test_a_folder_that_can_not_be_written": ("False",),
    "integration/test_disk.py::test_a_start_on_a_full_disk": ("limited",),
    "integration/test_disk.py::test_nothing_is_lost_when_it_stops": ("limited",),
    "integration/test_images.py::test_an_image_trainers_image": ("standalone-image-trainer",),
    "integration/test_last_gpu.py::test_exactly_as_many": ("4xH100-4",),
    "integration/test_secrets.py::test_no_secret_gets_out": ("console",),
    "integration/test_starting.py::test_a_file_that_cannot_be_used": ("no database",),
    "integration/test_starting.py::test_a_port_in_use": ("PUBLIC_PORT",),
    "integration/test_starting.py::test_an_address_of_another_machine": (
        "OPERATOR_HOST-no-such-host.invalid",
    ),
    "integration/test_stopping.py::test_a_second_signal": ("15",),
    "integration/test_stopping.py::test_a_signal_lets_requests": ("15",),
    "integration/test_stopping.py::test_what_does_not_end_within_the_grace": ("0",),
    "miner/chain/test_sdk.py::test_a_node_in_trouble": (
        "SubnetInfoRuntimeApi_get_metagraph-Fault.SILENT",
        "SubnetInfoRuntimeApi_get_metagraph-Fault.CLOSE_1000",
        "SubnetInfoRuntimeApi_get_metagraph-Fault.RANDOM_BYTES",
        "state_getRuntimeVersion-Fault.SILENT",
        "state_getRuntimeVersion-Fault.WRONG_TYPE",
    ),
    "miner/chain/test_sdk.py::test_a_submission_whose_fate_is_unknown": ("Fault.SILENT",),
    "miner/tournament/rehearsal/test_rehearse.py::test_an_interrupted_rehearsal": ("2",),
    "miner/publish/test_publisher.py::test_a_full_model_is_published": ("3",),
    "miner/publish/test_publisher_faults.py::test_a_hub_in_trouble": ("POST /api/repos/create-500",),
}

#: Importing one of these is what makes a test of the trainer's one of the training stack.
STACK = (
    r"(?:torch|numpy|transformers|datasets|axolotl|trl|peft|accelerate|safetensors"
    r"|tests\.trainer\.(?:tiny|native|tasks)|trainer\.scoring\.forward)"
)
NEEDS_STACK = re.compile(
    rf"^(?:(?:from|import) {STACK}\b|from tests\.trainer import .*\btiny\b"
    r"|.*importorskip\(\"(?:pyspiel|torch)\"\))",
    re.MULTILINE,
)
TORCH = importlib.util.find_spec("torch") is not None

# A shared machine makes any single example slow once in a while: that is no finding.
settings.register_profile("few", deadline=None, max_examples=15, derandomize=True, database=None)
settings.register_profile("all", deadline=None, max_examples=100, derandomize=True, database=None)
settings.register_profile("campaign", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile(os.environ.get("GOD_MINER_EXAMPLES", "few"))


def needs_stack(file: Path) -> bool:
    """Whether a file of tests imports the training stack, or the little models made with it."""
    return NEEDS_STACK.search(file.read_text("utf-8")) is not None


def tier_of(node: str) -> str:
    """The tier of a test's id, or of a file's path."""
    name = node.removeprefix("tests/")
    found = [
        (len(start), tier) for tier, starts in TIERS.items() for start in starts if name.startswith(start)
    ]
    if found:
        tier = max(found)[1]
        return "docker" if tier == "process" and DOCKER.search(node) else tier
    file = ROOT / node.partition("::")[0]
    trainers = name.startswith("trainer/") and file.is_file() and needs_stack(file)
    return "training" if trainers else "fast"


def row_of(name: str) -> str:
    return name.partition("[")[2].removesuffix("]")


def is_thorough(name: str) -> bool:
    if name.startswith("integration/test_engines") and SLURM.search(name):
        return not name.startswith(SLURM_TESTS)
    kept = [rows for start, rows in ROWS.items() if name.startswith(start)]
    return name.startswith(THOROUGH) or any(row_of(name) not in rows for rows in kept)


def check_names(names: list[str]) -> None:
    """A test that was renamed would run in another tier, or at other times, unseen."""
    files = {name.partition("::")[0] for name in names}
    for start in (*itertools.chain(*TIERS.values()), *THOROUGH, *SLURM_TESTS, *ROWS):
        file, colons, _ = start.partition("::")
        if colons and file in files and not any(name.startswith(start) for name in names):
            raise pytest.UsageError(f"tests/conftest.py names {start}, and there is no such test")


def check_rows(names: list[str]) -> None:
    """A row that was renamed would leave its test to `make test-all` unseen."""
    for start, rows in ROWS.items():
        found = {row_of(name) for name in names if name.startswith(start)}
        if found and not found.issuperset(rows):
            raise pytest.UsageError(f"ROWS in tests/conftest.py: {start} has {sorted(found)}, not {rows}")


def pytest_configure(config: pytest.Config) -> None:
    watch.start(config)
    outside.watch()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not any("::" in argument for argument in config.args):
        names = [item.nodeid.removeprefix("tests/") for item in items]
        check_names(names)
        check_rows(names)
    for item in items:
        tier = tier_of(item.nodeid)
        item.add_marker(getattr(pytest.mark, tier))
        item.user_properties.append(("tier", tier))
        if is_thorough(item.nodeid.removeprefix("tests/")):
            item.add_marker(pytest.mark.thorough)
        if item.nodeid.removeprefix("tests/").startswith(SMALL):
            item.add_marker(pytest.mark.small)
    # Several workers end together when the long ones come first.
    order = {"docker": 0, "training": 1, "process": 2, "campaign": 3, "fast": 4}
    items.sort(key=lambda item: order[dict(item.user_properties)["tier"]])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    found = yield
    if item.get_closest_marker("fast") and outside.reached:
        pytest.fail(
            f"a fast test {', '.join(dict.fromkeys(outside.reached))}: see TIERS in tests/conftest.py"
        )
    return found


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Half a surrogate pair cannot be sent from a worker; the tests print some."""
    report = yield
    report.sections = [(name, _printable(text)) for name, text in report.sections]
    if report.failed and _printable(report.longreprtext) != report.longreprtext:
        report.longrepr = _printable(report.longreprtext)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup() -> Generator[None, object, object]:
    outside.forget()
    return (yield)
