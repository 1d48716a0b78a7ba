"""What a process does with its process group at exit."""

from unittest.mock import MagicMock, patch

import pytest

from lightning_distrec.strategies.run import process_runs


@pytest.mark.parametrize(
    ("failed", "backend", "aborted"),
    [(True, "nccl", True), (False, "nccl", False), (True, "gloo", False)],
)
def test_a_failed_rank_gives_up_nccls_collectives_before_it_frees_anything(
    failed: bool, backend: str, aborted: bool
) -> None:
    calls = MagicMock()
    calls.get_backend.return_value = backend
    calls.get_world_size.return_value = 1
    runs = process_runs.ProcessRuns()
    runs.has_failed = failed
    with (
        patch.object(process_runs, "dist", calls),
        patch.object(process_runs, "abort_process_groups", calls.abort),
        patch.object(process_runs, "forget_consensus", calls.forget),
        patch.object(process_runs, "destroy_after_all", calls.destroy_process_group),
    ):
        runs.leave()
    order = [
        name
        for name, _, _ in calls.mock_calls
        if name in ("abort", "forget", "destroy_process_group")
    ]
    assert order == ["abort"] * aborted + ["forget", "destroy_process_group"]
