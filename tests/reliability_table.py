"""Prints the reliability table: every line that must hold, the tests that hold it, and their outcome.

    python tests/reliability_table.py              run all named tests, print the table
    python tests/reliability_table.py C S          only the lines of these groups, or single lines: C4 B1
    python tests/reliability_table.py --collect    only check that pytest finds the tests

Exit code 1 if a line has no test, or a test fails or is not found. Add a test to a line by adding its name to ROWS.
"""

from __future__ import annotations

import argparse
import ast
import collections
import itertools
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent
FAULTS = "runtime/checkpoint/test_faults.py::"
DAMAGE = "runtime/checkpoint/test_damage.py::"
SAVES = "runtime/checkpoint/test_save_and_load.py::"
ANY_PLAN = "runtime/checkpoint/test_any_plan.py::"
WEIGHTS = "runtime/checkpoint/test_weights.py::"
GUARD = "runtime/test_guard.py::"
LOCAL = "launchers/test_local.py::"
CALLS = "comm/test_call_check.py::"
BOMBS = "cli/test_input_bombs.py::"
OUTPUT = "cli/test_broken_output.py::"
SECURITY = "security/test_security.py::"
LOAD = "load/test_load.py::"
ENVIRONMENT = "comm/test_environment.py::"
RENDEZVOUS = "comm/test_rendezvous.py::"
SURVIVAL = "launchers/test_survival.py::"
LAUNCHED = "launchers/test_launched.py::"
HOSTS = "launchers/test_launched_hosts.py::"
MISTAKES = "comm/test_call_mistakes.py::"

TOGETHER = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-m", "not alone")
ALONE = ("-m", "alone")
"""As `make test` runs them: two files at a time, then what is watched by the clock."""

# line, what must hold, names of tests (under tests/), what they leave out
ROWS: list[tuple[str, str, list[str], str]] = [
    (
        "F1",
        "SIGKILL of a rank: restarted, equal weights",
        [
            SURVIVAL + "test_a_disturbed_run_equals_an_undisturbed_one",
            SURVIVAL + "test_equal_under_every_family_of_plans",
            SURVIVAL + "test_without_checkpoints_it_starts_again",
            LAUNCHED + "test_torchrun_restarts_after_kills",
        ],
        "its seconds, printed with their bounds (benchmarks/recovery.py)",
    ),
    (
        "F2",
        "SIGSTOP: detected in time, the rank named",
        [
            SURVIVAL + "test_a_stopped_rank_is_named",
            SURVIVAL + "test_hangs_are_survived",
            "comm/test_heartbeat.py::test_f2_torchrun_ranks_find_a_hang_within_15_seconds",
            "comm/test_heartbeat.py::test_f2_a_hang_is_named_by_step_and_phase_where_no_call_is_known",
        ],
        "",
    ),
    (
        "F3",
        "SIGTERM, SIGUSR1: step finished, saved, exit 0",
        [
            SURVIVAL + "test_preemption",
            "cli/test_train_checkpoints.py::test_preemption",
            LAUNCHED + "test_a_signal_to_all_ranks_saves_and_a_resumed_run_ends_equal",
            "launchers/test_early_signals.py",
            "launchers/test_slurm.py::test_sbatch_preempted_and_resumed",
            "launchers/test_scripts_survive.py::test_signals_are_passed_on_and_nothing_stays",
        ],
        "",
    ),
    (
        "F4",
        "SIGINT twice; a second SIGTERM",
        [SURVIVAL + "test_two_interrupts", SURVIVAL + "test_a_second_signal_stops_at_once"],
        "",
    ),
    (
        "F5",
        "a crash: the first failing rank is shown",
        [
            SURVIVAL + "test_the_rank_that_failed_is_named",
            SURVIVAL + "test_the_rank_that_failed_is_named_in_more_cells",
            LOCAL + "test_an_error_names_the_rank",
            LOCAL + "test_a_killed_rank_is_reported_with_its_signal",
            LOCAL + "test_other_failures",
            LOCAL + "test_if_all_fail_the_first_is_reported",
            "comm/test_survivors.py",
            LAUNCHED + "test_a_failure_on_another_rank_is_printed_once",
        ],
        "",
    ),
    (
        "F6",
        "GIL held, deadlocked data worker: still told",
        [
            SURVIVAL + "test_a_rank_that_keeps_the_interpreter_lock_is_named",
            SURVIVAL + "test_a_deadlocked_data_worker",
        ],
        "",
    ),
    (
        "F7",
        "out of memory: reported as memory",
        [
            SURVIVAL + "test_the_kernel_ends_a_rank_for_lack_of_memory",
            "comm/test_fault_injection.py::test_memory_runs_out",
        ],
        "",
    ),
    (
        "F8",
        "launcher killed: no orphans",
        [
            LOCAL + "test_killing_the_launcher_ends_its_ranks",
            SURVIVAL + "test_nothing_is_left_behind",
            LAUNCHED + "test_a_killed_agent_leaves_no_ranks",
        ],
        "",
    ),
    ("F9", "two ranks at once", [SURVIVAL + "test_two_ranks_at_once_during_a_save"], ""),
    (
        "F10",
        "crash loop: stops after 3 restarts, exit 5",
        [
            SURVIVAL + "test_a_crash_loop_ends_with_a_report",
            "loop/test_restarts.py::test_three_restarts_without_progress_are_enough",
            "loop/test_restarts.py::test_an_exception_that_comes_again_ends_the_run",
            "loop/test_restarts.py::test_an_exception_is_the_same_by_its_type_and_line",
        ],
        "",
    ),
    ("F11", "fault during recovery", [SURVIVAL + "test_a_fault_during_recovery"], ""),
    (
        "F12",
        "lost rank without a spare: fewer ranks, same batch",
        [
            SURVIVAL + "test_fewer_ranks_then_all_again",
            "loop/test_restarts.py::test_fewer_ranks_when_one_does_not_come_back",
        ],
        "",
    ),
    (
        "F13",
        "rank returns",
        [
            SURVIVAL + "test_fewer_ranks_then_all_again",
            "loop/test_restarts.py::test_the_full_size_is_tried_again",
            HOSTS + "test_torchrun_elastic_loses_a_host_and_gets_it_back",
        ],
        "",
    ),
    (
        "F14",
        "network: port taken, slow link, half open, 1% loss, 10 s cut",
        [
            RENDEZVOUS + "test_a_taken_port",
            HOSTS + "test_one_command_on_each_side",
            HOSTS + "test_torchrun_elastic_loses_a_host_and_gets_it_back",
            "comm/test_lossy_network.py::test_f14_lost_frames_and_a_partition_that_heals_change_nothing",
            "comm/test_lossy_network.py::test_f14_connections_that_stay_half_open_end_the_ranks_on_both_sides",
        ],
        "",
    ),
    ("F15", "clock jump does not trip timeouts", [SURVIVAL + "test_a_clock_that_jumps_by_an_hour"], ""),
    (
        "F16",
        "soak of random faults",
        [SURVIVAL + "test_a_minute_of_random_faults"],
        "29 of its 30 minutes (benchmarks/soak.py)",
    ),
    (
        "N1",
        "wrong collective: refused, ranks and lines named",
        [
            MISTAKES + "test_n1_a_mistake_is_refused_on_all_ranks",
            MISTAKES + "test_n1_a_call_behind_many_open_ones_is_refused",
            MISTAKES + "test_n1_a_call_in_place_of_a_bucket_of_ddp_is_refused",
            MISTAKES + "test_n1_with_three_ranks",
            MISTAKES + "test_n1_named_tensors_of_one_line_in_another_order_are_refused",
            MISTAKES + "test_n1_buckets_in_another_order_are_refused",
            CALLS + "test_different_calls_are_reported_on_every_rank",
            CALLS + "test_crossed_calls_are_reported",
            CALLS + "test_a_call_refused_on_one_rank_is_reported_on_all",
            CALLS + "test_an_extra_call_at_the_end",
        ],
        "unnamed tensors of one line in a constant wrong order",
    ),
    (
        "N2",
        "NaN, Inf: caught before the update, rank named",
        [
            GUARD + "test_caught_before_the_update",
            GUARD + "test_skipped_steps_have_no_effect",
            "runtime/test_guard_split.py::test_originating_rank_is_named",
        ],
        "",
    ),
    ("N3", "loss spike: flagged; transient told apart", [GUARD + "test_spikes", GUARD + "test_transient_fault"], ""),
    (
        "N4",
        "flipped bit in a replica: found, rank named",
        [
            GUARD + "test_flipped_bit_is_detected_and_its_rank_named",
            GUARD + "test_every_flipped_bit_changes_the_digest",
            "runtime/test_guard_split.py::test_flipped_bit_in_a_part",
        ],
        "",
    ),
    (
        "N5",
        "gradients of every plan equal one rank's",
        [
            "runtime/test_parity.py::test_pairwise",
            "runtime/test_parity.py::test_the_table_covers_all_that_the_engine_runs",
            "runtime/test_verify_can_fail.py",
        ],
        "",
    ),
    (
        "N6",
        "slowed rank: named with its phase; no false alarm in 1000 clean steps",
        [
            "runtime/test_slowest_rank.py::test_slowed_rank_is_named_within_20_steps",
            "runtime/test_slowest_rank.py::test_no_alarm_in_1000_clean_steps",
            "runtime/test_slowest_rank.py::test_no_alarm_in_1000_recorded_steps",
            "runtime/test_slowest_rank.py::test_no_alarm_in_1000_steps_of_two_even_ranks",
            "runtime/test_slowest_rank.py",
            "runtime/test_slow_link.py",
        ],
        "",
    ),
    (
        "C1",
        "kill at every operation of a save",
        [FAULTS + "test_kill_at_every_operation", FAULTS + "test_kill_during_cleanup", FAULTS + "test_killed_process"],
        "",
    ),
    (
        "C2",
        "disk full, read-only, quota, EIO, slow",
        [
            FAULTS + "test_failing_disk",
            FAULTS + "test_save_after_the_disk_has_space_again",
            FAULTS + "test_slow_disk_does_not_block_training",
            "cli/test_real_disks.py::test_full_disk",
            "cli/test_real_disks.py::test_full_disk_without_checkpoints",
            "cli/test_real_disks.py::test_read_only_disk",
            OUTPUT + "test_a_full_disk_under_the_record_of_steps",
        ],
        "",
    ),
    (
        "C3",
        "every damage refused by name, falls back",
        [
            DAMAGE + "test_a_thousand_flipped_bits",
            DAMAGE + "test_damage_is_named_and_the_previous_checkpoint_is_loaded",
            DAMAGE + "test_all_damaged",
            SAVES + "test_another_job_is_refused",
            ANY_PLAN + "test_another_model_is_refused_on_every_rank",
        ],
        "",
    ),
    (
        "C4",
        "save under one plan, load under another",
        [
            ANY_PLAN + "test_saved_on_four_loaded_on_any",
            ANY_PLAN + "test_saved_on_fewer_loaded_on_four",
            ANY_PLAN + "test_saved_on_four_loaded_on_eight",
            "runtime/checkpoint/test_split_engines.py::test_from_plan_to_plan",
            "runtime/checkpoint/test_split_models.py::test_any_layout_to_any_other",
        ],
        "",
    ),
    (
        "C5",
        "resume equals uninterrupted, every k <= 20",
        [
            ANY_PLAN + "test_restart_after_every_k",
            ANY_PLAN + "test_k_steps_restart_k_steps_equal_2k_steps",
            SAVES + "test_everything_is_restored",
            SAVES + "test_random_state",
            ANY_PLAN + "test_loss_scale",
        ],
        "",
    ),
    (
        "C6",
        "every sample once per epoch over restarts",
        [
            ANY_PLAN + "test_every_sample_once_an_epoch",
            "datasets/test_loader.py::test_every_sample_once_an_epoch_over_restarts",
            "datasets/test_stream.py::test_every_sample_once_an_epoch",
            "datasets/test_packed_reading.py::test_ledger",
            ANY_PLAN + "test_every_packed_sample_once_an_epoch",
        ],
        "",
    ),
    (
        "C7",
        "background save: short stall, a crash loses only it",
        [
            FAULTS + "test_slow_disk_does_not_block_training",
            FAULTS + "test_background_save_writes_the_state_at_the_call",
            FAULTS + "test_killed_process",
        ],
        "the ratio to a synchronous save",
    ),
    (
        "C8",
        "two jobs on one folder: the second refuses",
        [
            "loop/test_run_lock.py::test_a_second_job_is_refused_and_a_dead_one_is_replaced",
            "loop/test_run_lock.py::test_another_host_counts_as_dead_when_its_heartbeat_stops",
            "loop/test_run_lock.py::test_two_trainings_in_one_folder",
            SAVES + "test_two_jobs_on_one_folder",
            SAVES + "test_lock_of_another_host",
        ],
        "",
    ),
    (
        "C9",
        "retention never deletes the last good one",
        [
            SAVES + "test_old_checkpoints_are_removed",
            SAVES + "test_damaged_checkpoints_do_not_count_as_kept",
            "cli/test_real_disks.py::test_full_disk",
        ],
        "",
    ),
    (
        "C10",
        "export loads in plain torch and transformers",
        [
            WEIGHTS + "test_single_file",
            WEIGHTS + "test_tied_weight_under_each_name",
            WEIGHTS + "test_shards_with_an_index",
            WEIGHTS + "test_export_of_any_plan",
        ],
        "",
    ),
    (
        "B1",
        "config: empty, binary, bombs, wrong types, encodings",
        [
            BOMBS + "test_refused_in_time_and_by_name",
            BOMBS + "test_a_document_with_a_key_twice_is_damaged",
            "test_files.py::test_wrong_types_name_the_key",
            "test_files.py::test_keys",
            "test_files.py::test_a_byte_order_mark_is_skipped",
            "interop/test_yaml_text.py",
            "interop/test_deepspeed.py::test_any_config_is_read_or_refused",
        ],
        "",
    ),
    (
        "B2",
        "plan: does not divide, zero ranks, other hardware",
        [
            "plans/test_plan.py::test_refused",
            "plans/test_plan.py::test_conflicts",
            "plans/test_plan.py::test_counts_in_files_are_whole_numbers",
            "runtime/test_bad_split.py",
            "runtime/test_trial_split.py::test_too_many_stages_are_refused_before_the_machine_is_measured",
        ],
        "",
    ),
    (
        "B3",
        "cluster: hosts, bandwidths, units",
        [
            "clusters/test_checks.py::test_errors_name_file_line_and_key",
            "clusters/test_spec.py::test_units_are_parsed",
            SECURITY + "test_hosts_in_a_cluster_file_are_no_commands",
            RENDEZVOUS + "test_bad_node_lists",
            RENDEZVOUS + "test_endless_node_lists",
        ],
        "",
    ),
    (
        "B4",
        "environment: missing, wrong, contradicting",
        [
            ENVIRONMENT + "test_invalid_values",
            ENVIRONMENT + "test_a_rank_above_the_size",
            ENVIRONMENT + "test_missing_master_address",
            ENVIRONMENT + "test_half_of_the_variables",
            RENDEZVOUS + "test_sizes_that_differ_are_refused_at_once",
            RENDEZVOUS + "test_two_ranks_with_one_number",
            RENDEZVOUS + "test_bad_addresses",
            RENDEZVOUS + "test_a_taken_port",
        ],
        "",
    ),
    (
        "B5",
        "data: empty, few, failing, missing",
        [
            "datasets/test_stream.py::test_invalid_datasets_are_refused",
            "datasets/test_stream.py::test_a_sample_that_raises_is_named",
            "datasets/test_loader.py::test_a_worker_that_dies_is_an_error",
            "datasets/test_packed_reading.py::test_every_flipped_bit_is_found",
            "datasets/test_packed_reading.py::test_damaged_shards_are_named",
            "datasets/test_packed_reading.py::test_a_damaged_index_is_refused",
            "datasets/test_pack_faults.py::test_killed_at_every_change_on_disk",
            "runtime/test_bad_input.py::test_fewer_samples_than_ranks",
            "runtime/test_bad_input.py::test_failing_sample_is_named",
        ],
        "",
    ),
    (
        "B6",
        "model: odd kinds supported or refused by name",
        [
            "runtime/test_odd_models.py",
            "runtime/test_rare_models.py::test_complex_weights",
            "runtime/test_bad_input.py::test_frozen_model",
            "tracing/test_any_model.py",
        ],
        "",
    ),
    (
        "B7",
        "configs from the wild: imported or listed",
        [
            "interop/test_configs.py::test_all_files_are_listed_and_there_are_many",
            "interop/test_configs.py::test_every_key_is_followed_or_reported",
        ],
        "",
    ),
    (
        "B8",
        "terminal: narrow, no TTY, closed, C locale, no home",
        [
            OUTPUT + "test_commands",
            OUTPUT + "test_training_goes_on_without_its_screen",
            OUTPUT + "test_a_path_that_is_not_ascii_in_the_c_locale",
            "cli/test_without_home.py::test_nothing_is_found_in_a_home_that_cannot_be_used",
            "cli/test_without_home.py::test_train",
            "cli/test_commands.py::TestPlan::test_narrow_terminal",
            "runtime/test_log.py::test_terminal_of_40_columns",
            SECURITY + "test_run_names_are_names",
        ],
        "",
    ),
    (
        "S1",
        "malicious pickles never run",
        [
            SECURITY + "test_pickles_in_place_of_inputs",
            SECURITY + "test_pickles_in_a_run_folder",
            SECURITY + "test_pickles_in_the_cache",
            DAMAGE + "test_pickle_instead_of_a_file",
            WEIGHTS + "test_nothing_is_unpickled",
            WEIGHTS + "test_a_checkpoint_of_torch_with_code_in_it",
        ],
        "",
    ),
    (
        "S2",
        "paths in manifests and indexes stay inside",
        [
            SECURITY + "test_paths_in_a_run_folder",
            SECURITY + "test_writing_does_not_follow_a_link",
            WEIGHTS + "test_paths_in_an_index",
            DAMAGE + "test_damage_is_named_and_the_previous_checkpoint_is_loaded",
            "loop/test_run_lock.py::test_a_link_in_place_of_the_lock_is_not_followed",
        ],
        "",
    ),
    (
        "S3",
        "shell metacharacters are literal",
        [
            SECURITY + "test_script_and_arguments_are_passed_literally",
            SECURITY + "test_run_names_are_names",
            SECURITY + "test_hosts_in_a_cluster_file_are_no_commands",
        ],
        "",
    ),
    (
        "S4",
        "markup in reports is inert",
        [
            "reports/test_page.py::test_markup_in_names_is_text",
            "reports/test_page.py::test_nothing_is_fetched_and_only_our_script_runs",
            "reports/test_page_in_browser.py::test_names_that_are_markup_are_inert",
            "reports/test_page_in_browser.py::test_a_page_opens_from_disk",
        ],
        "",
    ),
    (
        "S5",
        "ports: loopback only; a foreign client is noticed",
        [
            SECURITY + "test_a_local_run_listens_on_the_loopback_interface_only",
            SECURITY + "test_another_user_cannot_open_the_store_of_a_local_run",
            LAUNCHED + "test_a_foreign_client_of_the_store_is_noticed",
            "comm/test_signed_store.py",
        ],
        "what torch itself writes when a group is made",
    ),
    (
        "S6",
        "no secrets in reports and logs",
        [
            SECURITY + "test_secrets_stay_out_of_the_run_folder_and_the_screen",
            "reports/test_run.py::test_secrets_never_enter_the_value",
        ],
        "",
    ),
    (
        "S7",
        "private temporary files, no guessable names",
        [SECURITY + "test_files_of_the_ranks_are_private", SECURITY + "test_outputs_follow_the_umask"],
        "",
    ),
    (
        "S8",
        "no dangerous call in the package",
        [
            "security/test_source.py::test_nothing_dangerous_is_called",
            "security/test_source.py::test_the_check_can_fail",
            "security/test_source.py::test_linter_rules_of_security_are_on",
        ],
        "pip-audit, which needs a network",
    ),
    (
        "L1",
        "simulator: 16,384 ranks, 10^7 events",
        [
            LOAD + "test_thousands_of_simulated_ranks",
            LOAD + "test_events_leave_nothing_behind",
            LOAD + "test_flows_leave_nothing_behind",
        ],
        "",
    ),
    (
        "L2",
        "planner: whole space for 1,024 devices, interruptible",
        [
            "planner/test_data_parallel_candidates.py::test_a_large_space_is_searched_quickly",
            "planner/test_alternatives.py::test_an_interrupted_search_returns_the_best_so_far",
        ],
        "",
    ),
    (
        "L3",
        "runtime: 10,000 steps without growth, 2% over DDP",
        [
            LOAD + "test_ten_thousand_steps_without_growth",
            LOAD + "test_the_engine_takes_at_most_two_percent_more_than_ddp",
            LOAD + "test_a_repeated_call_over_gloo_takes_microseconds",
        ],
        "the clock (benchmarks/overhead.py)",
    ),
    (
        "L4",
        "64 processes meet, or are refused",
        [LOAD + "test_sixty_four_processes_meet", LOAD + "test_more_processes_than_the_limit_are_refused"],
        "",
    ),
    (
        "L5",
        "a million lines: small page, offline",
        [
            "reports/test_run.py::test_a_million_steps_make_a_small_page",
            "reports/test_run.py::test_a_long_training_is_read",
            "reports/test_page.py::test_nothing_is_fetched_and_only_our_script_runs",
        ],
        "",
    ),
    (
        "L6",
        "--help quick, wheel small, no compiler",
        [
            LOAD + "test_help_is_quick",
            LOAD + "test_the_wheel_is_small",
            LOAD + "test_nothing_is_compiled_at_installation",
        ],
        "",
    ),
]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one line."""

    status: str
    """`passed`, `failed`, `MISSING`, `not applicable` or `found`."""
    detail: str = ""


def defined(name: str) -> bool:
    """Whether a test of that name is defined: `file.py`, `file.py::test_x` or `file.py::TestX::test_y`."""
    file, *parts = name.split("::")
    path = TESTS / file
    if not path.is_file() or not path.name.startswith("test_"):
        return False
    body: list[ast.stmt] = ast.parse(path.read_text()).body
    for part in parts:
        nodes = [n for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == part]
        if not nodes or not part.lower().startswith("test"):
            return False
        body = nodes[-1].body
    return True


def run(names: list[str], *, collect: bool) -> dict[str, collections.Counter[str]]:
    """Outcomes of each name's tests: how many passed, failed, were skipped (with the reason) or found."""
    counts: dict[str, collections.Counter[str]] = {name: collections.Counter() for name in names}
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-p", "no:cacheprovider"]
        if collect:
            done = subprocess.run([*words, "--collect-only", *names], cwd=TESTS, capture_output=True, text=True)
            for line in done.stdout.splitlines():
                for name in names:
                    if line.removeprefix("tests/").startswith(name) and "::" in line:
                        counts[name]["found"] += 1
            return counts
        reports = [Path(folder, "together.xml"), Path(folder, "alone.xml")]
        for report, how in zip(reports, (TOGETHER, ALONE), strict=True):
            subprocess.run([*words, *how, f"--junitxml={report}", *names], cwd=TESTS)
        for case in itertools.chain(*(ET.parse(report).iter("testcase") for report in reports)):  # pytest's own
            found = f"{case.get('classname', '')}.{case.get('name', '')}".removeprefix("tests.")
            skipped = case.find("skipped")
            bad = case.find("failure") is not None or case.find("error") is not None
            bad |= skipped is not None and skipped.get("type") == "pytest.xfail"  # known, but it does not hold
            status = "failed" if bad else "passed" if skipped is None else f"skipped: {skipped.get('message')}"
            for name in names:
                dotted = name.replace("/", ".").replace(".py", "").replace("::", ".")
                if found == dotted or found.startswith((f"{dotted}[", f"{dotted}.")):
                    counts[name][status] += 1
    return counts


def outcome(names: list[str], counts: dict[str, collections.Counter[str]]) -> Outcome:
    """The outcome of a line from those of its tests."""
    if not names:
        return Outcome("MISSING")
    total: collections.Counter[str] = sum((counts[name] for name in names), collections.Counter())
    absent = [name for name in names if not counts[name]]
    if total["failed"] or absent:
        return Outcome("failed", f"not found: {', '.join(absent)}" if absent else f"{total['failed']} tests")
    for status in ("passed", "found"):
        if total[status]:
            return Outcome(status, f"{total[status]} tests")
    return Outcome("not applicable", next(iter(total)).removeprefix("skipped: "))


def main(arguments: list[str]) -> int:
    """Print the table; 1 if a line has no test or does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lines", nargs="*", help="groups such as C, or lines such as C4")
    parser.add_argument("--collect", action="store_true", help="only check that pytest finds the tests")
    given = parser.parse_args(arguments)
    collect, wanted = given.collect, given.lines
    known = {r[0] for r in ROWS} | {r[0].rstrip("0123456789") for r in ROWS}
    if unknown := [w for w in wanted if w not in known]:
        parser.error(f"no line {', '.join(unknown)}; groups are {', '.join(sorted(k for k in known if k.isalpha()))}")
    rows = [r for r in ROWS if not wanted or r[0] in wanted or r[0].rstrip("0123456789") in wanted]
    names = list(dict.fromkeys(name for row in rows for name in row[2]))
    counts = run(names, collect=collect) if names else {}
    outcomes = [outcome(row[2], counts) for row in rows]
    for (line, what, tests, without), result in zip(rows, outcomes, strict=True):
        print(f"{line:<4} {what:<56} {result.status} {result.detail}{f'; without {without}' if without else ''}")
        for name in tests:
            print(f"       {name}  {', '.join(f'{n} {k}' for k, n in counts[name].items())}")
    total = collections.Counter(result.status for result in outcomes)
    print(f"\n{len(rows)} lines: " + ", ".join(f"{n} {status}" for status, n in total.items()))
    return 1 if total["MISSING"] or total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
