"""Tests with the marker `full`, which `make test` leaves out: a file, or a test with all its parameters.

`make test` takes five minutes on two cores and asks each question once. It runs the unit tests, a server in fp32 with a
host tier against the oracle, a server with FP8 rows and EAGLE, and two tensor-parallel processes. This list holds tests
that take long, repeat a question with other settings, or cover the benchmarks and the test helpers.
"""

FULL = frozenset(
    {
        # Servers with other settings.
        "server/test_commands.py",
        "server/test_faults.py",
        "server/test_operations.py",
        "server/test_rejections.py",
        "server/test_server_disaggregation.py",
        "server/test_server_bf16.py",
        "server/test_server_dp.py",
        "server/test_server_dp_tp.py",
        "server/test_server_dspark.py",
        "server/test_server_events.py",
        "server/test_server_fp8.py",
        "server/test_server_host.py",
        "server/test_server_prefill_graphs.py",
        "server/test_server_prefix.py",
        "server/test_server_requests.py",
        "server/test_server_speculation.py",
        "server/test_server_storage.py",
        "server/test_server_tp.py::test_a_kernel_that_fails_in_one_process_ends_both",
        "server/test_server_tp.py::test_more_than_fits",
        "server/test_server_tp.py::test_the_command_checks_all_processes",
        "server/test_server_tp.py::test_the_command_names_what_is_wrong",
        "server/test_server_tp.py::test_the_first_process_counts",
        "server/test_server_v41.py",
        "server/test_tokenizer_workers.py",
        # With a GPU, test_server_gpu.py stays.
        "server/test_server_disaggregation_gpu.py",
        "server/test_server_drafts_gpu.py",
        "server/test_server_dspark_gpu.py",
        "server/test_server_host_gpu.py",
        "server/test_server_sleep_gpu.py",
        # SGLang's scheduler in a process of its own.
        "test_drafts.py::test_drafts_are_right_some_of_the_time",
        "test_scheduler_drafts.py",
        "test_scheduler_faults.py",
        "test_scheduler_sleep.py",
        "test_scheduler_speculation.py",
        # Triton kernels.
        "interpreted_kernels.py::test_attend",
        "interpreted_kernels.py::test_attend_shapes",
        "interpreted_kernels.py::test_schedule",
        "interpreted_kernels.py::test_sparse_prefill",
        "interpreted_kernels.py::test_attend_of_v41",
        "interpreted_kernels.py::test_selection_of_v41",
        "test_attention_kernels_interpreted.py",
        # Long runs of randomised state machines, and simulations.
        "test_host_cache.py::test_a_hundred_thousand_operations_with_late_copies",
        "test_prefix_sglang.py::test_random_steps_keep_every_block_and_slot_accounted_for",
        "test_prefix_sglang.py::test_the_simulation_and_sglangs_tree_agree",
        "test_prefix_trace.py",
        "test_trace.py",
        # Repeated numerical checks.
        "test_make_tiny.py",
        "test_manager.py::test_interleaved_requests",
        "test_processors.py",
        "test_standalone_sharing.py",
        "test_v41_cache.py::test_chunks_and_single_tokens_equal_dense",
        # Builds, commands as processes, pages.
        "test_benchmarks.py",
        "test_build.py::test_is_compiled_once_for_all_architectures",
        "test_build.py::test_takes_only_the_stable_abi_from_torch",
        "test_cli.py::test_doctor_passes_here_and_sees_what_is_missing",
        "test_plan.py::test_plot",
        "test_plan.py::test_recipe",
        "test_plan.py::test_splits_on_the_page",
        "test_plan.py::test_the_command_runs_without_noise",
        "test_alerts.py",
        "test_security.py",
        # Test helpers.
        "test_liveness.py",
    }
)
