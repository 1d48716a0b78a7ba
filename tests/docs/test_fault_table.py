"""Each row of the page's table of faults has a test, and no row comes without one."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/how_to/restarts.md"
CLUSTER, CHECKPOINTS = "cluster", "multiprocess/checkpoint"
TESTS = {
    "a rank is killed or out of memory; a node goes down": [
        f"{CLUSTER}/test_restarts.py test_a_job_whose_ranks_are_killed",
        f"{CLUSTER}/test_requeue.py test_a_job_whose_node_goes_down_is_requeued",
        f"{CLUSTER}/test_replaced_node.py test_a_job_goes_on_when_a_node_is_rep",
    ],
    "a node is lost or comes": [f"{CLUSTER}/test_replaced_node.py test_an_elastic_job_shrinks"],
    "SIGTERM, Slurm's time limit": [
        f"{CLUSTER}/test_requeue.py test_a_requeued_job_goes_on_as_if_it_had_never_stopped",
        f"{CLUSTER}/test_signals.py test_sigterm_in_any_order_ends_all_ranks",
    ],
    "a rank ends before the ranks have met": [
        "multiprocess/cluster/test_launching.py test_a_rank_that_ends",
    ],
    "a rank sleeps or hangs": [
        f"{CLUSTER}/test_dead_ranks.py test_ranks_that_wait_in_different_exchanges",
    ],
    "a rank is stopped": [
        f"{CLUSTER}/test_dead_ranks.py "
        "test_a_rank_that_was_stopped_is_named_and_ended_once_it_goes_on",
    ],
    "an exception on a rank": [
        f"{CLUSTER}/test_dead_ranks.py test_an_exception_in_a_hook_of_one_rank_is_named_on_",
    ],
    "ranks go different ways": [
        f"{CLUSTER}/test_dead_ranks.py test_ranks_that_exchange_different_things",
    ],
    "a link that is down for less than `watchdog_seconds`; a port scanner": [
        f"{CLUSTER}/test_two_machines.py test_a_link_that_comes_back_costs_time_alone",
        "unit/cluster/test_meeting.py test_a_port_scanner_keeps_no_rank_out",
    ],
    "killed while a checkpoint is written; a checkpoint is damaged": [
        f"{CHECKPOINTS}/test_checkpoint_crashes.py test_a_writer_that_dies_at_any_line",
        f"{CLUSTER}/test_dead_ranks.py test_a_rank_that_was_killed_is_named",
        f"{CHECKPOINTS}/test_restarting.py test_damaged_and_unfinished_checkpoints",
    ],
    "killed before the first checkpoint; the file system is gone": [
        f"{CHECKPOINTS}/test_restarting.py test_a_job_restarted_by_its_launcher",
        f"{CHECKPOINTS}/test_restarting.py test_a_job_whose_folder_is_gone",
    ],
    "killed after the fit": [
        f"{CHECKPOINTS}/test_restarting.py test_a_job_restarted_by_its_launcher",
    ],
    "Ctrl-C": [
        f"{CLUSTER}/test_signals.py test_ctrl_c_ends_all_ranks_within_seconds_and_with_one_line",
    ],
    "no space or no inodes": [
        f"{CHECKPOINTS}/test_checkpoint_faults.py test_a_disk_that_fails_on_one_rank",
        "unit/checkpoint/test_inodes.py test_a_checkpoint_that_gets_no_inode",
    ],
    "checkpoints on `s3://`": [
        f"{CHECKPOINTS}/test_restarting.py test_a_restart_names_the_checkpoint",
    ],
}
"""How a row begins -> file and beginning of the name of each of its tests."""


def test_each_row_of_the_table_of_faults_has_a_test() -> None:
    table = PAGE.read_text("utf-8").partition("| Fault |")[2].partition("\n\n")[0]
    faults = [line.split("|")[1].strip() for line in table.splitlines()[2:]]
    assert len(faults) == len(TESTS)
    for start in TESTS:
        assert sum(fault.startswith(start) for fault in faults) == 1, start
    for test in sum(TESTS.values(), []):
        file, name = test.split()
        assert f"\ndef {name}" in (ROOT / "tests" / file).read_text("utf-8"), test
