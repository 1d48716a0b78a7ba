"""What ranks of several nodes with GPUs come to: sums by node, and times of devices, of which some
are not read yet."""

import pytest

from lightning_distrec.observe.rank_records import (
    RankRecord,
    Totals,
    print_summary,
    rank_numbers,
    summarize_ranks,
)


def _record(rank: int, device_ms: dict[str, float]) -> RankRecord:
    totals = Totals()
    for _ in range(4):
        totals.add(0.1, 0.05, 8, {"forward": 0.02, "wait for data": 0.01})
        totals.add_device({name: ms / 1000 for name, ms in device_ms.items()})
        totals.add_device({})  # the device had passed no event
    return RankRecord(
        rank,
        totals,
        totals,
        host=f"host{rank // 2}",
        node=rank // 2,
        local_rank=rank % 2,
        device=f"cuda:{rank % 2}",
        gpu_use=50 + rank,
        memory={"process": 2**30 * (rank + 1)},
    )


def test_nodes_are_summed_up_and_devices_named(capsys: pytest.CaptureFixture[str]) -> None:
    records = [_record(rank, {"forward": 10.0 + rank, "backward": 20.0}) for rank in range(3)]
    records.append(_record(3, {}))
    numbers = rank_numbers(records)
    assert numbers["ranks/device_forward_ms_mean"] == pytest.approx(11.0)
    assert numbers["ranks/gpu_use_percent_max"] == 53
    summary = summarize_ranks([RankRecord.read(record.text) for record in records], [], 0.1)
    first, second = summary["by_node"]
    assert (first["ranks"], second["host"]) == ([0, 1], "host1")
    assert first["samples_per_second"] == second["samples_per_second"] == pytest.approx(2 * 8 / 0.1)
    assert second["memory_bytes"]["process"] == 7 * 2**30
    print_summary(summary | {"bytes_sent_per_step": {}, "exchanges_per_step": {}})
    text = capsys.readouterr().out
    assert "node 1 (host1): rank 2, 3, 160 samples/s" in text
    assert "cuda:1" in text
    assert "ranks waited for data 10.0% of the time" in text
    assert "mean loss" not in text  # no step returned one
    assert records[3].place == "host1 (node 1, local rank 1, cuda:1)"
