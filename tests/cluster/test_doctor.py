"""The doctor, alone and under a real Slurm; and what it makes of findings."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_distrec.cli.main import main
from lightning_distrec.observe.doctor import Findings, Link, Rank, find_problems
from tests.support.slurm import Slurm

DOCTOR = [sys.executable, "-m", "lightning_distrec", "doctor"]


def test_alone_it_looks_at_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", f"--folder={tmp_path}"]) == 0
    printed = capsys.readouterr().out
    assert "1 rank on 1 node, started by no launcher" in printed
    assert "torchrec" in printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_ranks_of_a_step_measure_what_is_between_them(slurm: Slurm) -> None:
    arguments = ["--json", f"--folder={slurm.folder}"]
    done = slurm.srun(["-N2", "-n3"], [*DOCTOR, *arguments])
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [(rank["rank"], rank["host"]) for rank in report["ranks"]] == [
        (0, "node1"),
        (1, "node1"),
        (2, "node2"),
    ]
    assert all(rank["sees_folder"] for rank in report["ranks"])
    links = [(link["first"], link["second"], link["across_nodes"]) for link in report["links"]]
    assert links == [(0, 1, False), (0, 2, True)]
    assert all(
        0 < link["latency_seconds"] < 0.1 and link["bytes_per_second"] > 1e6
        for link in report["links"]
    )


FINE = Rank(
    0, 0, "a", "3.11.4", "torch 2.13", None, ("H200",) * 2, 8, 1 << 36, 65536, 1 << 34, True
)
OTHER = replace(FINE, rank=1, node=1, host="b")
LINK = Link(0, 1, True, 1e-5, 1e9)


def _describe_problems(rank: Rank = FINE, other: Rank = OTHER, link: Link = LINK) -> list[str]:
    findings = Findings("srun", 2, "/shared", (rank, other), (link,))
    return [
        f"{problem.kind}: {problem.description} {problem.advice}"
        for problem in find_problems(findings)
    ]


def test_nothing_is_reported_where_all_is_well() -> None:
    assert _describe_problems() == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"sees_folder": False},
            "error: rank 1 on b do not see what rank 0 wrote into /shared. Checkpoints need",
        ),
        (
            {"versions": "torch 2.14"},
            "error: ranks have different versions: torch 2.13, Python 3.11; torch 2.14",
        ),
        ({"versions_problem": "no torchrec"}, "error: rank 1 on b: no torchrec Install"),
        ({"node": 0, "devices": (), "host": "a"}, ""),
        (
            {"open_files": 250},
            "error: rank 1 on b may have 250 files open. Ranks connect to each other: ulimit -n "
            "262.",
        ),
        ({"open_files": 1024}, "warning: rank 1 on b may have 1024 files open. Workers"),
        ({"shared_memory_bytes": 64_000_000}, "warning: rank 1 on b have 64.0 MB free in /dev/shm"),
    ],
)
def test_what_stands_in_the_way_is_reported_with_what_to_do(changes: dict, message: str) -> None:
    (line,) = _describe_problems(other=replace(OTHER, **changes)) or [""]
    assert line.startswith(message)
