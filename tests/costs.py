"""List the test files that take longest, the tests that count as slow or as nightly, and the tests that must run alone."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

COMMON = ("fedavg", "fixbn", "fedbn", "hbn", "fbn", "fedtan", "gn")
"""Methods that differ most. The others are variants of these. If a test takes long for each method, its cases with the others are slow."""

ALONE = ("tests/deployment/test_dead_apps.py", "tests/exchange/", "tests/integration/test_workers.py")
"""Folders and files with slow tests that measure how long processes take to answer."""

LONGEST = (
    "tests/deployment/test_signed_runs.py",
    "tests/deployment/test_own_code_sent.py",
    "tests/deployment/test_own_app_runs.py",
    "tests/deployment/test_operating.py",
    "tests/deployment/test_federation.py",
    "tests/equivalence/test_table.py",
    "tests/deployment/test_audit_totals.py",
    "tests/deployment/test_stolen_key.py",
    "tests/deployment/test_who_may.py",
    "tests/loops/test_real_networks.py",
    "tests/own_loop/test_derived_weights.py",
    "tests/experiment/test_cli.py",
    "tests/methods/test_composition.py",
    "tests/training/test_vectorised.py",
    "tests/experiment/test_resume.py",
    "tests/hostile/test_fuzz.py",
    "tests/flower/test_secure_training.py",
    "tests/flower/test_layer_by_layer.py",
    "tests/integration/test_workers.py",
    "tests/experiment/test_kills_at_writes.py",
    "tests/sweeps/test_evidence_page.py",
    "tests/hostile/test_own_app.py",
    "tests/doors/test_federation_workers.py",
    "tests/hostile/test_gate.py",
    "tests/loops/test_frozen.py",
    "tests/hostile/test_one_liar.py",
    "tests/integration/test_in_process.py",
    "tests/hostile/test_claims.py",
    "tests/hostile/test_lying_in_earlier_rounds.py",
    "tests/flower/test_recovery.py",
    "tests/sweeps/test_experiments.py",
    "tests/hostile/test_lying_server.py",
    "tests/hostile/test_declared.py",
    "tests/examples/test_flower_apps.py",
    "tests/examples/test_quickstart.py",
)
"""The files that take longest, in descending order. Each runs in one worker, so these begin first. A wrong order only costs time."""

LONG = (
    "tests/loops/test_kinds.py::test_timm_s_layers_keep_their_activation",
    "tests/loops/test_batches.py::test_a_network_compiled_before_the_round",
    "tests/test_hybrid.py::test_compiled",
    "tests/training/test_dice.py::test_loss_and_metric_are_those_of_monai_and_torchmetrics",
    "tests/training/test_vectorised.py::test_keys_of_a_run",
    "tests/examples/test_flower_apps.py::test_niid_bench_has_its_schedule_and_its_best_model",
    "tests/sweeps/test_evidence.py::test_every_committed_result_is_found_though_its_run_ignored_keys",
    "tests/doors/test_federation_workers.py::test_what_a_script_or_a_notebook_defines_works_without_a_guard",
    "tests/experiment/test_cli.py::test_the_resumed_run_has_the_bits_of_one_that_nobody_interrupted",
    "tests/sweeps/test_experiments.py::test_every_variant_is_a_sweep",
    "tests/packaging/test_new.py::test_it_runs_in_one_process_and_learns",
    "tests/sweeps/test_evidence_page.py::test_the_page_says_what_the_results_say",
    "tests/packaging/test_houses.py::test_no_command_of_a_research_user_loads_another_house",
    "tests/training/test_recalibration.py::test_the_errors_of_a_deep_network_do_not_multiply",
    "tests/sweeps/test_paper_settings_000_001.py::test_the_paper_s_variant_is_the_paper_key_by_key",
    "tests/sweeps/test_paper_settings_002.py::test_every_cell_has_the_paper_s_keys",
    "tests/sweeps/test_paper_settings_003_004.py::test_every_key_is_the_papers",
    "tests/integration/test_workers.py::test_the_command_s_workers_start_before_torch_is_loaded",
    "tests/deployment/test_membership.py::test_a_stolen_server_key_is_worth_nothing_once_the_authority_is_new",
    "tests/experiment/test_cli.py::test_compare_then_again",
    "tests/hostile/test_fuzz.py::test_mutated_messages_and_sequences_of_calls",
    "tests/sweeps/test_evidence_page.py::test_every_claim_whose_seeds_divide_the_data_says_so",
    "tests/hostile/test_declared.py::test_every_field_of_every_honest_message_is_declared",
    "tests/integration/test_in_process.py::test_the_pictures_show_something",
    "tests/flower/test_compat.py::test_a_plain_run_loads_nothing_of_secure_aggregation",
    "tests/examples/test_flower_apps.py::test_before_it_is_plain_flower",
    "tests/examples/test_flower_apps.py::test_niid_bench_with_fedavg_is_the_app_before",
    "tests/experiment/test_cli.py::test_a_pipe_and_the_log_file_get_a_short_line_per_round",
    "tests/experiment/test_options.py::test_a_new_process_knows_it",
    "tests/data/test_dataset.py::test_nothing_heavy_is_imported_before_it_is_needed",
    "tests/experiment/test_start_up.py::test_a_run_imports_nothing_that_its_rounds_do_not_need",
    "tests/hostile/test_declared.py::test_the_scenarios_hold_every_kind_of_message",
    "tests/hostile/test_lying_server.py::test_a_client_refuses_what_departs_from_the_protocol",
    "tests/hostile/test_exchange_addresses.py::test_the_exchange_of_a_round_and_of_statistics_is_where_the_site_allows_it",
    "tests/hostile/test_exchange_addresses.py::test_errors_do_not_tell_an_open_port_from_a_closed_one",
    "tests/hostile/test_fuzz.py::test_control_a_broken_session_is_found",
    "tests/test_loopback.py::test_programs_that_fl_bn_starts_reach_this_machine_without_the_proxy",
    "tests/test_loopback.py::test_fl_bn_reaches_this_machine_without_the_proxy",
    "tests/integration/test_workers.py::test_workers_give_the_bits_of_one_after_the_other",
    "tests/integration/test_workers.py::test_workers_load_a_module_before_their_first_task",
    "tests/flower/test_introductions.py::test_where_too_few_come_the_run_fails_in_time",
    "tests/experiment/test_pictures.py::test_labels_are_bars_one_upon_the_other",
    "tests/experiment/test_studies.py::test_the_papers_order_over_100_rounds",
    "tests/hostile/test_lying_in_earlier_rounds.py::test_told_each_what_it_was_told_before_their_masks_do_not_cancel",
    "tests/hostile/test_lying_in_earlier_rounds.py::test_what_others_were_told_without_a_client_it_cannot_know_and_its_site_may_refuse",
    "tests/flower/test_own_strategies.py::test_a_subclass_of_each_strategy_for_own_apps_has_each_hook_called",
    "tests/examples/test_flower_apps.py::test_own_metrics_are_combined_as_before",
    "tests/examples/test_flower_apps.py::test_fedbn_s_own_code_and_the_method_agree",
    "tests/flower/test_secure_training.py::test_privacy_is_accounted_and_its_noise_is_not_the_seed_s",
    "tests/flower/test_secure_aggregation.py::test_a_reference_far_away_is_replaced_until_the_statistics_are_right",
    "tests/experiment/test_cli.py::test_ctrl_c_leaves_a_folder_and_says_how_to_go_on",
    "tests/sweeps/test_paper_settings_003_004.py::test_our_defaults_are_off",
    "tests/deployment/test_compose.py::test_compose_itself_accepts_the_files",
    "tests/exchange/test_grpc.py::test_all_fail_when_the_service_stops_and_a_new_one_takes_its_port",
    "tests/flower/test_superlink.py::test_it_is_flowers_own_program_otherwise",
    "tests/flower/test_own_strategies.py::test_with_rounds_the_same_class_serves_fl_bn_s_own_clients_and_has_each_hook_called",
    "tests/experiment/test_adapt.py::test_the_command_end_to_end",
    "tests/experiment/test_task_runs.py::test_npz_files_of_values_and_of_sets_of_labels",
)
"""Slow tests that have no mark in their files: they take seconds and check what seldom changes, or they start many processes."""

ENOUGH = {
    "tests/experiment/test_resume.py::test_a_run_in_pieces_is_the_run_itself": ("[hbn]", "few of", "moon, yogi"),
    "tests/experiment/test_resume.py::test_without_any_of_it_the_run_would_be_another": ("server yogi", "[hbn"),
    "tests/experiment/test_resume.py::test_a_damaged_checkpoint_costs_the_rounds_since_the_one_before_and_no_more": ("[fedbn-",),
    "tests/experiment/test_kills_at_writes.py::test_a_kill_in_the_middle_of_a_write": ("half written", "renamed"),
    "tests/examples/test_quickstart.py::test_every_method_runs_in_it": ("[fedtan]",),
    "tests/hostile/test_lying_in_earlier_rounds.py::test_control_honest_clients_of_other_rounds_are_all_in_the_sum": ("[fedbn",),
    "tests/flower/test_secure_training.py::test_a_secure_run_is_the_plain_one_up_to_rounding": ("[hbn]", "[fedbn]"),
    "tests/flower/test_streaming.py::test_a_run_has_the_bits_of_one_that_keeps_all_replies": ("[fbn]",),
    "tests/methods/test_composition.py::test_an_objective_of_strength_0_is_none_bit_for_bit": ("[fbn-", "[fedtan-"),
    "tests/methods/test_composition.py::test_momentum_clipping_and_precision_go_along": ("[fixbn", "[fedtan", "[fbn", "[silobn"),
    "tests/integration/test_workers.py::test_workers_end_soon_after_a_process_that_is_killed": ("[SIGTERM]",),
    "tests/flower/test_secure_training.py::test_gradients_epochs_and_uniform_weights": ("settings1",),
    "tests/training/test_vectorised.py::test_options_of_a_federation": ("fedprox",),
    "tests/loops/test_frozen.py::test_a_loop_cannot_thaw": ("-train-own", "[fixbn-train-flower", "[hbn-there", "[fbn-every"),
    "tests/test_conversion.py::test_torchvision": ("-fedavg]", "-gn]", "-fixup]", "-hbn]", "-fbn]", "-fedtan]"),
    "tests/loops/test_batches.py::test_what_is_reported_is_that_of_the_batch": ("[fbn-v", "[fbn-c", "[fbn-a_sk", "[hbn-clo"),
    "tests/hostile/test_one_liar.py::test_in_a_secure_round_too": ("[setup", "[pk2", "[plan", "[dsts of text", "[status code x", "[nids"),
    "tests/hostile/test_lying_set_up.py::test_told_otherwise_the_sum_is_noise": ("[the threshold", "[all weights", "[one bit"),
    "tests/doors/test_checkpoints.py::test_a_federation_goes_on_with_the_bits_of_one_never_interrupted": (  # noqa: E501
        "[at home",
        "[moon",
        "[fedadam",
        "[one p",
    ),
    "tests/loops/test_kinds.py::test_timm_s_layers_keep_their_activation": ("[gn]", "[hbn]"),
    "tests/doors/test_centring.py::test_the_sum_over_the_inputs_stays_in_every_door": ("[fbn-", "[hbn-own", "[gn-flower", "n-fed"),
    "tests/examples/test_flower_apps.py::test_with_fedavg_it_is_the_app_before": ("[advanced",),
    "tests/examples/test_flower_apps.py::test_after_it_trains_by_the_method": ("pytorch]", "[fedbn"),
    "tests/flower/test_layer_by_layer.py::test_a_robust_rule_pools_every_layer": ("[median-odd", "[nnm"),
    "tests/flower/test_layer_by_layer.py::test_one_message_finds_the_bits_of_a_pass_per_layer": ("[hbn-resnet", "[fedtan-chain"),
    "tests/flower/test_mixed_precision.py::test_what_travels_and_what_is_kept_stays_float32": ("[fedbn", "[hbn", "[fbn", "[fedtan-"),
    "tests/experiment/test_resume.py::test_whatever_a_run_is_called_it_goes_on_and_clears_up_after_itself": ("[a:b", "quoted"),
    "tests/doors/test_own_loop.py::test_objectives_equal_the_application_s_bit_for_bit": ("[scaffold-", "[fedsam-own"),
    "tests/methods/test_composition.py::test_statistics_do_not_pass_a_server_optimizer": ("[fixbn", "[hbn", "[fbn"),
    "tests/hostile/test_claims.py::test_under_a_defence_claims_change_no_bit": ("[mean", "[median", "[krum", "[nnm+median"),
    "tests/hostile/test_own_app.py::test_an_evaluation_that_no_client_makes_is_not_counted": ("[accuracy", "[no num", "[a long"),
    "tests/doors/test_federation_workers.py::test_workers_give_the_bits_of_one_after_the_other": ("[hbn-with",),
    "tests/doors/test_per_client.py::test_each_client_has_its_own_optimiser": ("[sequential", "[vectorised"),
    "tests/loops/test_batches.py::test_a_round_of_many_steps_is_compiled_twice": ("[fixbn]",),
    "tests/flower/test_malformed_replies.py::test_a_reply_is_gone_from_memory_once_it_was_read": ("[header", "[nothing"),
}
"""Test that takes long and is repeated for many methods or options -> parts of the names of the cases that run by default.

All other cases of the test are slow ones.
"""

EVERY_THIRD = (
    "tests/loops/test_frozen.py::test_no_server_optimizer_moves_a_frozen_scale",
    "tests/loops/test_held.py::test_what_the_user_froze_does_not_move",
    "tests/loops/test_which_passes_count.py::test_the_report_has_the_batches_of_the_step",
    "tests/loops/test_held.py::test_a_network_whose_every_batch_norm_is_held",
    "tests/own_loop/test_parameters.py::test_an_integer_parameter_changes_nothing",
    "tests/robust/test_attack_size.py::test_rows_with_one_number_that_is_none_leave",
    "tests/robust/test_attack_size.py::test_an_attack_does_not_hide_what_rows_have_in_common",
    "tests/robust/test_attack_size.py::test_the_size_of_an_attack_is_nothing",
    "tests/robust/test_invariances.py::test_a_common_shift_moves_the_value_by_itself",
    "tests/robust/test_report.py::test_distances_are_those_to_the_value",
    "tests/training/test_adaptation.py::test_statistics_are_those_of_the_clients_own_data_in_every_layer",
    "tests/models/test_build.py::test_ours_fit_the_images_and_learn",
    "tests/flower/test_byzantine_rounds.py::test_claims_change_no_bit_under_a_defence",
    "tests/flower/test_byzantine_rounds.py::test_moments_without_a_variance_leave_the_shared_one_among_the_honest",
    "tests/loops/test_batches.py::test_fedtan_s_step_is_the_union_s_in_any_form_of_inputs",
    "tests/methods/test_conformance.py::test_the_statistics_pass_measures_every_batch_norm_and_changes_nothing",
    "tests/methods/test_conformance.py::test_gradients_are_finite_and_reach_every_parameter",
    "tests/deployment/test_leaving.py::test_a_site_counts_what_the_server_reports",
    "tests/exchange/test_grpc_misdeeds.py::test_under_shrink_the_others_go_on_with_weights_over_them_and_under_abort_all_fail_at_once",
    "tests/flower/test_byzantine_rounds.py::test_a_lie_about_the_one_changes_no_bit_of_the_other",
    "tests/experiment/test_resume.py::test_a_damaged_folder_is_one_sentence",
    "tests/flower/test_byzantine_rounds.py::test_every_attack_can_be_made_on_every_method",
    "tests/flower/test_byzantine_rounds.py::test_robust_rules_stay_near_the_honest_mean_and_the_mean_does_not",
    "tests/flower/test_codec.py::test_a_run_has_the_same_bits_whether_arrays_are_handed_over_or_encoded",
    "tests/flower/test_messaging.py::test_a_run_whose_nodes_die_and_come_back_is_the_same_to_the_bit",
    "tests/flower/test_secure_aggregation.py::test_secure_statistics_are_the_plain_ones_up_to_the_bound",
    "tests/hostile/test_exchange_addresses.py::test_a_client_connects_to_no_address_that_its_site_does_not_allow",
    "tests/hostile/test_claims.py::test_a_batch_above_a_client_s_own_samples_is_refused_by_name",
    "tests/hostile/test_fuzz.py::test_control_where_nobody_lies_everyone_counts",
    "tests/hostile/test_lying_server.py::test_a_sum_whose_instruction_lacks_a_number_is_refused_by_its_name",
    "tests/hostile/test_one_bad_round.py::test_a_client_recovers_from_one_bad_round",
    "tests/hostile/test_one_liar.py::test_an_introduction_that_no_client_makes_costs_that_client_its_part",
    "tests/hostile/test_one_liar.py::test_one_finite_report_does_not_end_an_undefended_run",
    "tests/hostile/test_own_app.py::test_an_introduction_that_is_unlike_the_others_costs_that_node_its_part",
    "tests/loops/test_batches.py::test_a_batch_is_one_step",
    "tests/loops/test_held.py::test_what_the_user_froze_does_not_move",
    "tests/loops/test_kinds.py::test_registered_kinds",
    "tests/methods/test_composition.py::test_any_two_go_together",
    "tests/methods/test_conformance.py::test_a_frozen_round_reports_nothing_and_changes_no_statistic",
    "tests/own_loop/test_derived_weights.py::test_one_local_step_is_plain_pytorch_s_on_the_union",
    "tests/packaging/test_houses.py::test_without_the_extra_a_command_of_a_deployment_says_what_to_install",
)
"""Tests with many cases, of which neighbours are similar. Every third case runs by default; the others are slow ones."""

MANY = (
    "tests/experiment/test_resume.py::test_wherever_it_stops",
    "tests/loops/test_real_networks.py::test_a_round_is_what_plain_pytorch_computes",
    *ENOUGH,
    *EVERY_THIRD,
)
"""Tests with many slow cases. About one of three runs in ``.ci/run``; the others are nightly."""

DRILLS = (
    "tests/deployment/test_audit_totals.py::test_the_log_of_every_site_says_what_the_server_says[fedbn]",
    "tests/deployment/test_audit_totals.py::test_the_log_of_every_site_says_what_the_server_says[fedtan]",
    "tests/deployment/test_audit_totals.py::test_the_log_of_every_site_says_what_the_server_says[hbn]",
    "tests/deployment/test_dead_apps.py::test_a_message_whose_process_is_killed_is_done_again",
    "tests/deployment/test_federation.py::test_a_deployed_run_ends_with_the_bits_of_one_in_process",
    "tests/deployment/test_federation.py::test_a_site_s_policy_bounds_its_evaluations",
    "tests/deployment/test_federation.py::test_sites_come_and_go_while_the_others_stay",
    "tests/deployment/test_operating.py::test_a_site_that_comes_back_with_an_old_version_is_refused_by_name",
    "tests/deployment/test_operating.py::test_two_submits_at_once_an_abort_and_a_resume",
    "tests/deployment/test_own_app_runs.py::test_an_app_that_does_not_tell_its_rounds_is_said_to",
    "tests/deployment/test_own_app_runs.py::test_an_interrupted_run_ends_and_is_to_be_submitted_again",
    "tests/deployment/test_own_code_sent.py::test_a_network_of_one_s_own_trains_on_data_that_a_site_s_own_loader_reads",
    "tests/deployment/test_own_code_sent.py::test_an_app_of_fl_bn_new_trains_at_the_sites",
    "tests/deployment/test_own_code_sent.py::test_where_only_installed_code_runs_the_site_s_own_copy_of_a_module_is_called",
    "tests/deployment/test_signed_runs.py::test_a_run_signed_on_another_machine_is_submitted_as_it_is",
    "tests/deployment/test_signed_runs.py::test_each_policy_lets_in_what_it_says_and_nothing_of_the_rest_is_kept",
    "tests/deployment/test_stolen_key.py::test_a_run_goes_on_with_another_authority_and_the_thief_is_refused",
    "tests/examples/test_examples.py::test_the_notebook",
    "tests/examples/test_flower_apps.py::test_its_tracker_gets_every_metric",
    "tests/exchange/test_grpc_leaks.py::test_two_hundred_rounds_leave_nothing_behind",
    "tests/integration/test_ray.py::test_a_failing_run_exits_non_zero_and_says_which_file_is_missing",
    "tests/integration/test_ray.py::test_a_wrong_number_of_supernodes_says_what_to_set",
    "tests/integration/test_ray.py::test_the_exchange_under_tls_gives_the_same_bits",
    "tests/integration/test_ray.py::test_with_too_few_workers_the_exchange_says_before_round_1_how_many_it_needs",
    "tests/newest/test_newest_flower.py::test_a_converted_app_runs[niid_bench]",
    "tests/newest/test_newest_flower.py::test_a_new_app_runs_with_a_superlink_and_two_supernodes",
    "tests/own_loop/test_saved_files.py::test_every_classifier_of_torchvision",
    "tests/packaging/test_wheel.py::test_a_new_app_runs_on_it",
    "tests/sweeps/test_evidence_page.py::test_the_page_says_what_the_results_say",
    "tests/sweeps/test_run.py::test_an_interrupted_sweep_goes_on_where_it_was[9]",
)
"""Slow tests that take longest and drill one misfortune each, mostly of real processes. They are nightly.

``.ci/run`` has another test of the same machinery: a secure deployed run has the bits of one in this process, a run goes on
after the server's death, sites are refused by key and policy, an own app's exchange has TLS, a site whose host stays away is left out.
"""

PLACES = {file: place for place, file in enumerate(LONGEST)}


def place(nodeid: str) -> int:
    """Return the position of the test's file in ``LONGEST``; files that are not listed share the position after the last one."""
    return PLACES.get(nodeid.partition("::")[0], len(PLACES))


def long(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the tests that the tables ``LONG``, ``ENOUGH`` and ``EVERY_THIRD`` declare to be slow."""
    seen = Counter[str]()
    found = []
    for item in items:
        test, _, _ = item.nodeid.partition("[")
        few = test in ENOUGH and not any(part in item.nodeid for part in ENOUGH[test])
        if test in LONG or few or (test in EVERY_THIRD and seen[test] % 3):
            found.append(item)
        seen[test] += 1
    return found


def nightly(item: pytest.Item) -> bool:
    """Return whether a slow case may wait for the night: a drill, or one of many cases that is not of the third that a hash chooses.

    A position would not do: in a product, each third case can have the same method.
    """
    test, _, _ = item.nodeid.partition("[")
    if test in DRILLS or item.nodeid in DRILLS:
        return True
    return test in MANY and item.get_closest_marker("slow") is not None and zlib.crc32(item.nodeid.encode()) % 3 != 0


def alone(item: pytest.Item) -> bool:
    """Return whether no other test may run at the same time: tests with Ray or containers, and slow tests in ``ALONE``."""
    if any(item.get_closest_marker(mark) for mark in ("ray", "docker")):
        return True
    return item.nodeid.startswith(ALONE) and item.get_closest_marker("slow") is not None


def common_first(methods: Iterable[str]) -> list[Any]:
    """Return the methods as cases of ``parametrize``. Methods that are not in ``COMMON`` become slow tests."""
    return [name if name in COMMON else slow(name) for name in methods]


def slow(*values: Any) -> Any:
    """Return a case of ``parametrize`` that is marked as slow; ``values`` are its parameters."""
    return pytest.param(*values, marks=pytest.mark.slow)
