"""Tests with the marker `full`, which `make test` leaves out: a file, or a test with all its parameters.

`make test` takes five minutes on two cores and asks each question once. It runs the unit tests, a server in fp32 with a
host cache against the oracle, a server with FP8 entries and EAGLE, and two tensor-parallel processes. This list holds
tests that take long, repeat a question with other settings, or cover the benchmarks.
"""

from pathlib import Path

SERVER_TESTS = sorted((Path(__file__).parent / "server").glob("test_*.py"))
FAST_SERVERS = ("test_server_exact.py", "test_server_fp8_prefix.py", "test_server_gpu.py", "test_server_tp.py")

FULL = frozenset(
    {
        # Servers with other settings.
        *(f"server/{file.name}" for file in SERVER_TESTS if file.name not in FAST_SERVERS),
        "server/test_server_tp.py::test_a_kernel_that_fails_in_one_process_ends_both",
        "server/test_server_tp.py::test_more_than_fits",
        "server/test_server_tp.py::test_the_command_checks_all_processes",
        "server/test_server_tp.py::test_the_command_names_what_is_wrong",
        # SGLang's scheduler in a process of its own.
        "testing/test_drafts.py::test_drafts_are_right_some_of_the_time",
        "attention/test_scheduler_drafts.py",
        "attention/test_scheduler_faults.py",
        "features/test_scheduler_sleep.py",
        "attention/test_scheduler_speculation.py",
        # Triton kernels.
        "attention/interpreted_kernels.py::test_attend",
        "attention/interpreted_kernels.py::test_attend_shapes",
        "attention/interpreted_kernels.py::test_schedule",
        "attention/interpreted_kernels.py::test_sparse_prefill",
        "attention/interpreted_kernels.py::test_attend_of_v41",
        "attention/interpreted_kernels.py::test_selection_of_v41",
        "attention/test_kernels_compile.py",
        # Long runs of randomised state machines, and simulations.
        "host_cache/test_host_cache.py::test_a_hundred_thousand_operations_with_late_copies",
        "prefix_cache/test_prefix_sglang.py::test_random_steps_keep_every_block_and_slot_accounted_for",
        "prefix_cache/test_prefix_sglang.py::test_the_simulation_and_sglangs_tree_agree",
        "benchmarks/test_prefix_trace.py",
        "benchmarks/test_trace.py",
        # Repeated numerical checks.
        "testing/test_make_tiny.py",
        "ops/test_processors.py",
        "cache/test_v41_cache.py::test_chunks_and_single_tokens_equal_dense",
        # Builds, commands as processes, pages.
        "benchmarks/test_benchmarks.py",
        "ops/test_build.py::test_is_compiled_once_for_all_architectures",
        "ops/test_build.py::test_takes_only_the_stable_abi_from_torch",
        "cli/test_cli.py::test_doctor_passes_here_and_sees_what_is_missing",
        "planner/test_plan.py::test_recipe",
        "planner/test_plan.py::test_splits_on_the_page",
        "planner/test_plan.py::test_the_command_runs_without_noise",
        "repository/test_alerts.py",
        "repository/test_security.py",
    }
)
