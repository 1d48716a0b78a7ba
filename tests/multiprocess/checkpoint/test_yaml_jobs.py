"""Jobs of a YAML: saved on one number of ranks, resumed on another, with the numbers of one
process."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from lightning_distrec.cli.main import main
from tests.support.embedding_models import too_far
from tests.support.parameters import slow_except
from tests.support.plain_loop import train_plain
from tests.support.ranks import run_on_warm_ranks
from tests.support.yaml_jobs import STEPS, Clicks, Weighted, batch_of

DYNAMIC = {
    "convert_embeddings": "all",
    "tables": {
        "users": {"ids": "dynamic", "rows": 24, "buckets": 12, "evict": "lfu"},
        "goods": {"ids": "dynamic", "rows": 60, "buckets": 12, "min_sights": 2},
        "first": {"ids": "dynamic", "rows": 36, "buckets": 12},
    },
}
OF_USERS = "mc._managed_collision_collection._managed_collision_modules.users"
BY_TABLE = {"narrow": {"sharding_types": ["column_wise"], "min_partition": 4}}


@dataclass
class Job:
    """What a YAML says of a job, and the numbers of ranks on which it is saved and resumed."""

    model: str
    strategy: dict[str, Any]
    resumed: dict[str, Any]
    num_ranks: tuple[int, int]
    plain: type | None
    callbacks: tuple[str, ...] = ()


def in_groups(size: int) -> dict[str, Any]:
    return {"sharding_groups": {"size": size}}


GROUPS: dict[str, Any] = {"tables": {"wide": {"sharding_types": ["row_wise"]}, **BY_TABLE}}
JOBS = {
    "dynamic ids": Job(
        "Dynamic", DYNAMIC, DYNAMIC, (2, 3), None, ("lightning_distrec.DynamicIds",)
    ),
    "managed collisions": Job("Mch", {}, {}, (2, 3), None, ("lightning_distrec.DynamicIds",)),
    "a feature processor": Job("Weighted", GROUPS, {}, (2, 3), Weighted),
    "groups": Job("Clicks", GROUPS | in_groups(2), in_groups(1), (4, 2), Clicks),
    "out of groups": Job("Clicks", in_groups(1), {}, (2, 3), Clicks),
}


def write_yaml(
    folder: Path, job: Job, strategy: dict[str, Any], num_ranks: int, epochs: int
) -> str:
    """Write the job's YAML, which saves a checkpoint at the end; return its path."""
    saving = {"dirpath": str(folder / f"until {epochs}"), "filename": "end"}
    callbacks = [{"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": saving}]
    logger = {
        "class_path": "lightning.pytorch.loggers.CSVLogger",
        "init_args": {"save_dir": str(folder)},
    }
    trainer = {
        **{
            "accelerator": "cpu",
            "devices": num_ranks,
            "max_epochs": epochs,
            "log_every_n_steps": 1,
        },
        **{"reload_dataloaders_every_n_epochs": 1, "use_distributed_sampler": False},
        **{"enable_progress_bar": False, "enable_model_summary": False},
        **{
            "logger": logger,
            "callbacks": callbacks + [{"class_path": name} for name in job.callbacks],
        },
        "strategy": {
            "class_path": "lightning_distrec.TorchRecShardedStrategy",
            "init_args": strategy,
        },
    }
    config = {
        "trainer": trainer,
        "model": {"class_path": f"tests.support.yaml_jobs.{job.model}"},
        "data": {
            "class_path": "tests.support.yaml_jobs.Batches",
            "init_args": {"mapped": job.plain is None},
        },
    }
    path = folder / f"{num_ranks} ranks, {epochs}.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path)


def run_each(runs: list[list[str]]) -> None:
    for arguments in runs:
        assert main(["fit", *arguments]) == 0


def saved_in(folder: Path, epochs: int) -> dict[str, Tensor]:
    state: dict[str, Tensor] = torch.load(
        folder / f"until {epochs}" / "end.ckpt", weights_only=True
    )["state_dict"]
    return state


@pytest.mark.parametrize("name", slow_except(["managed collisions"], JOBS))
def test_a_yaml_trains_and_resumes_on_another_number_of_ranks(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = JOBS[name]
    first = ["--config", write_yaml(tmp_path, job, job.strategy, job.num_ranks[0], 1)]
    run_on_warm_ranks(run_each, job.num_ranks[0], [first])
    later = ["--config", write_yaml(tmp_path, job, job.resumed, job.num_ranks[1], 2)]
    later += ["--ckpt_path", str(tmp_path / "until 1" / "end.ckpt")]
    run_on_warm_ranks(run_each, job.num_ranks[1], [later])
    assert main(["plan", *first]) == 0
    assert f"{job.num_ranks[0]} ranks on 1 node" in capsys.readouterr().out
    actual, old = saved_in(tmp_path, 2), saved_in(tmp_path, 1)
    if job.plain is None:
        (single := tmp_path / "alone").mkdir()
        run_on_warm_ranks(run_each, 1, [["--config", write_yaml(single, job, job.strategy, 1, 2)]])
        expected = saved_in(single, 2)
        ids = actual["first.ids"] if "first.ids" in actual else actual[f"{OF_USERS}._mch_counts"]
        assert int((ids > 0).sum()) > 15
    else:
        expected = train_plain(job.plain(), [batch_of(False, step) for step in range(2 * STEPS)])
    assert actual.keys() == expected.keys()
    assert too_far(actual, expected, 1e-5) == {}
    assert (
        min(
            float((actual[key].float() - old[key].float()).abs().max())
            for key in actual
            if "weight" in key
        )
        > 1e-4
    )
    if job.callbacks:
        assert (
            "/occupancy" in (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text()
        )
