"""A server that follows publications has the rows and the answers of an export at their step."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_distrec import PublishRows
from lightning_distrec.errors import ConfigError
from lightning_distrec.serving.answer import Server
from lightning_distrec.serving.artifact import export_for_serving
from lightning_distrec.serving.follow import manifest_crc32
from tests.support.parameters import slow_except
from tests.support.publishing_model import (
    JOBS,
    DiesInPublication,
    FillsDisk,
    LosesRows,
    WritesRows,
    export_step,
    one_by_one,
    served_as,
    train_and_publish,
)
from tests.support.ranks import RankFailed, run_on_ranks, run_on_warm_ranks

NUM_STEPS = 13


def assert_serves_as(server: Server, expected: Server, kind: str = "tables") -> None:
    """Compare tables, weights and answers, to ids of early and late batches."""
    for name, rows in expected.tables.items():
        assert torch.equal(server.tables[name], rows), name
    # What training alone reads of a mapping is not published.
    unread = ("ids_used", "ids_made_for", "ids_initial_rows", "_hash_zch_metadata", "_mch_last")
    weights = server.program.state_dict()
    for name, weight in expected.program.state_dict().items():
        if not any(word in name for word in (*unread, "_mch_counts", "_current_iter")):
            assert torch.equal(weights[name], weight), name
    for number in (0, 7, 11, 39):
        batch = JOBS[kind][1](number)
        assert torch.equal(server.answer(batch), expected.answer(batch))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks trained 13 steps: publications after 3, 6, 9, 12 and 13."""
    folder = tmp_path_factory.mktemp("job")
    run_on_warm_ranks(train_and_publish, 2, str(folder), NUM_STEPS, {"full_every": 4})
    return folder


@pytest.fixture(scope="module")
def exported(folder: Path) -> Path:
    """The export of step 3."""
    export_step(folder, "step=3")
    return folder / "served-step=3-None"


def test_follows_to_the_digit(folder: Path, exported: Path) -> None:
    server = Server(exported)
    exports = {6: export_step(folder, "step=6"), 12: served_as(folder, "step=12", exported)}
    file = exported / "tables.safetensors"
    before = file.read_bytes()
    steps = []
    for published, manifest in one_by_one(folder / "published"):
        # The export is of the step of publication 1.
        assert server.apply(str(published)) == (manifest["sequence"] > 1)
        steps.append(server.published["step"])
        if manifest["step"] in exports:
            assert_serves_as(server, exports[manifest["step"]])
        if manifest["sequence"] > 1:
            changed = sum(
                file["num_rows"] for t in manifest["tables"].values() for file in t["changed"]
            )
            assert 0 < changed < 100  # of 270
    assert steps == [3, 6, 9, 12, 13]
    assert server.apply(str(published)) == 0
    assert file.read_bytes() == before


@pytest.mark.slow
def test_serves_packed_rows(folder: Path) -> None:
    server = export_step(folder, "step=3", bits=4)
    for published, manifest in one_by_one(folder / "published"):
        server.apply(str(published))
        if manifest["step"] == 12:
            assert_serves_as(server, export_step(folder, "step=12", bits=4))


def test_a_late_server_takes_all_rows_first(folder: Path, exported: Path) -> None:
    published = folder / "late"
    shutil.copytree(folder / "published", published)
    for number in (1, 2, 3):
        (published / f"manifest-{number:08d}.json").unlink()
    server = Server(exported)
    assert server.apply(str(published)) == 2
    assert server.published["sequence"] == 5
    newest = served_as(folder, "step=12", exported)
    newest.apply(str(folder / "published"))
    assert_serves_as(server, newest)


def test_a_damaged_manifest_is_stepped_over(folder: Path, exported: Path, tmp_path: Path) -> None:
    published = tmp_path / "published"
    shutil.copytree(folder / "published", published)
    (published / "manifest-00000002.json").write_text("{")
    server = Server(exported)
    assert server.apply(str(published)) == 2  # by all rows of publication 4
    assert server.published["sequence"] == 5


def test_keeps_what_it_has(folder: Path, exported: Path, tmp_path: Path) -> None:
    """Of a gap, damage, another model and another job: the server says which, and goes on."""
    published = tmp_path / "published"
    shutil.copytree(folder / "published", published)
    server = served_as(folder, "step=6", exported)
    (published / "manifest-00000004.json").unlink()
    with pytest.raises(
        ValueError, match="publication 5 does not go on from what is served, of step 9"
    ):
        server.apply(str(published))
    assert server.published["step"] == 9
    assert_serves_as(server, served_as(folder, "step=9", exported))
    shutil.copy(folder / "published" / "manifest-00000004.json", published)
    manifest = json.loads((published / "manifest-00000004.json").read_text())
    (file,) = manifest["tables"]["bags.embedding_bags.by_row.weight"]["changed"][:1]
    damaged = bytearray((published / file["file"]).read_bytes())
    damaged[40] ^= 1
    (published / file["file"]).write_bytes(damaged)
    assert server.apply(str(published)) == 2  # by all rows of publication 4
    assert server.published["step"] == 13
    for name, text, change in (
        ("job", "is of the job other", {"job": "other"}),
        ("num_rows", "is of another model: of .* it has the shape", {}),
        ("format", "has the format 9", {"format": 9}),
    ):
        server = served_as(folder, "step=9", exported)
        _rewrite(published / "manifest-00000004.json", manifest, name, change)
        (published / "manifest-00000005.json").unlink(missing_ok=True)
        with pytest.raises(ValueError, match=text):
            server.apply(str(published))
        assert server.published["step"] == 9


def _rewrite(path: Path, manifest: dict[str, Any], name: str, change: dict[str, Any]) -> None:
    manifest = {**json.loads(json.dumps(manifest)), **change}
    if name == "num_rows":
        manifest["tables"]["bags.embedding_bags.by_row.weight"]["num_rows"] = 7
    path.write_text(json.dumps(manifest | {"crc32": manifest_crc32(manifest)}))


@pytest.mark.parametrize("kind", slow_except(["mch"], ["hash_zch", "mch"]))
def test_managed_collections(kind: str, tmp_path: Path) -> None:
    """Of HashZch, one that evicts nothing: TorchRec's own, unsharded on a CPU, cannot be called
    where it evicts."""
    run_on_warm_ranks(train_and_publish, 2, str(tmp_path), 16, None, kind)
    server = export_step(tmp_path, "step=3", kind)
    num_deleted = 0
    for published, manifest in one_by_one(tmp_path / "published"):
        server.apply(str(published))
        for table in manifest["tables"].values():
            num_deleted += sum(file["num_rows"] for file in table["deleted"])
        if manifest["step"] == 15:
            assert_serves_as(server, export_step(tmp_path, "step=15", kind), kind)
    assert (num_deleted > 0) == (kind == "mch")


def test_dense_updates_publish_all_rows(exported: Path, tmp_path: Path) -> None:
    run_on_warm_ranks(train_and_publish, 2, str(tmp_path), 6, None, "tables", "Adam")
    server = served_as(tmp_path, "step=3", exported)
    server.apply(str(tmp_path / "published"))
    assert_serves_as(server, served_as(tmp_path, "step=6", exported))


@pytest.fixture(scope="module")
def between(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks published after steps 4, 8, 10 and 11, the end, with a checkpoint of step 6."""
    folder = tmp_path_factory.mktemp("between")
    run_on_warm_ranks(train_and_publish, 2, str(folder), 11, {"every_n_steps": 4})
    return folder


@pytest.mark.parametrize(
    "form", slow_except(["ranks", "emptied"], ["ranks", "emptied", "sharding", "writes"])
)
def test_goes_on_from_a_checkpoint(
    between: Path, exported: Path, tmp_path: Path, form: str
) -> None:
    """Resumed at step 6, where 11 steps were published: what those changed is published again."""
    shutil.copytree(between / "checkpoints", tmp_path / "checkpoints")
    shutil.copytree(between / "published", tmp_path / "published")
    server = served_as(tmp_path, "step=3", exported)
    published = str(tmp_path / "published")
    assert server.apply(published) == 3
    for name in ("step=9.ckpt", "end.ckpt"):
        (tmp_path / "checkpoints" / name).unlink()
    if form == "emptied":
        shutil.rmtree(published)
    callbacks = (WritesRows(),) if form == "writes" else ()
    by_row = {"sharding_types": ["row_wise"]}
    tables = {"small": by_row, "by_column": by_row} if form == "sharding" else None
    checkpoint = str(tmp_path / "checkpoints" / "step=6.ckpt")
    job = ({"every_n_steps": 4}, "tables", "Adagrad", checkpoint, callbacks, tables)
    run_on_warm_ranks(train_and_publish, 3 if form == "ranks" else 2, str(tmp_path), 12, *job)
    manifests = sorted((tmp_path / "published").glob("manifest-*"))
    # The first of the resumed job, which has all rows where it cannot be known which changed.
    manifest = json.loads(manifests[0 if form == "emptied" else 3].read_text())
    assert manifest["step"] == 8
    assert manifest["is_snapshot"] == (form == "emptied")
    assert server.apply(published) >= 1
    assert_serves_as(server, served_as(tmp_path, "end", exported))


def test_rows_that_a_restart_has_lost_are_published_where_no_other_is_trained(
    between: Path, exported: Path, tmp_path: Path
) -> None:
    shutil.copytree(between / "checkpoints", tmp_path / "checkpoints")
    shutil.copytree(between / "published", tmp_path / "published")
    server = served_as(tmp_path, "step=3", exported)
    server.apply(str(tmp_path / "published"))
    checkpoint = str(tmp_path / "checkpoints" / "step=6.ckpt")
    (tmp_path / "checkpoints" / "end.ckpt").unlink()
    job = ({"every_n_steps": 4}, "empty", "Adagrad", checkpoint)
    run_on_warm_ranks(train_and_publish, 2, str(tmp_path), 7, *job)
    assert server.apply(str(tmp_path / "published")) == 1
    assert_serves_as(server, served_as(tmp_path, "end", exported))


def test_publishes_what_callbacks_write(exported: Path, tmp_path: Path) -> None:
    """A callback that comes after PublishRows in the list, and that writes after the last step."""
    job = (None, "tables", "Adagrad", None, (WritesRows(),))
    run_on_warm_ranks(train_and_publish, 2, str(tmp_path), 6, *job)
    server = served_as(tmp_path, "step=3", exported)
    assert server.apply(str(tmp_path / "published")) == 2
    assert_serves_as(server, served_as(tmp_path, "end", exported))


def test_a_folder_with_other_things(folder: Path, exported: Path, tmp_path: Path) -> None:
    """Characters of patterns in its name, files of the user, and old publications that cannot be
    removed."""
    path = tmp_path / "layers=[64,32]"
    (path / "published" / "rows-2024").mkdir(parents=True)
    (path / "published" / "rows-2024.parquet").write_bytes(b"of the user")
    job = ({"full_every": 1, "keep": 1}, "tables", "Adagrad", None, (LosesRows(),))
    run_on_warm_ranks(train_and_publish, 2, str(path), 12, *job)
    assert (path / "published" / "rows-2024").is_dir()
    assert (path / "published" / "rows-2024.parquet").is_file()
    server = served_as(path, "step=3", exported)
    server.apply(str(path / "published"))
    assert_serves_as(server, served_as(path, "step=12", exported))
    untrained = tmp_path / "untrained"
    export_for_serving(JOBS["tables"][0](), JOBS["tables"][1](0), untrained)
    with pytest.raises(ValueError, match="gives ids rows of .*mapped.*: export a checkpoint"):
        Server(untrained).apply(str(folder / "published"))


def test_a_rank_dies_in_a_publication(exported: Path, tmp_path: Path) -> None:
    job = (None, "tables", "Adagrad", None, (DiesInPublication(3),))
    with pytest.raises(RankFailed):
        run_on_ranks(train_and_publish, 2, str(tmp_path), 13, *job)
    published = tmp_path / "published"
    assert (
        sorted(path.name for path in published.glob("manifest-*"))[-1] == "manifest-00000002.json"
    )
    assert list(published.glob("rows-00000003-*"))
    server = served_as(tmp_path, "step=3", exported)
    assert server.apply(str(published)) == 1
    checkpoint = str(tmp_path / "checkpoints" / "step=6.ckpt")
    run_on_warm_ranks(train_and_publish, 2, str(tmp_path), 9, None, "tables", "Adagrad", checkpoint)
    assert len(list(published.glob("rows-00000003-*"))) == 1
    assert server.apply(str(published)) == 1
    assert_serves_as(server, served_as(tmp_path, "step=9", exported))


def test_a_full_disk(exported: Path, tmp_path: Path) -> None:
    """The publication that fails on rank 1 is told; the next one has its rows, too."""
    job = ("tables", "Adagrad", None, (FillsDisk(5),))
    run_on_warm_ranks(train_and_publish, 2, str(tmp_path), 9, {"on_error": "warn"}, *job)
    steps = [manifest["step"] for _, manifest in one_by_one(tmp_path / "published")]
    assert steps == [3, 9]
    server = served_as(tmp_path, "step=3", exported)
    server.apply(str(tmp_path / "published"))
    assert_serves_as(server, served_as(tmp_path, "step=9", exported))
    job = ("tables", "Adagrad", None, (FillsDisk(2),))
    with pytest.raises(RankFailed, match=r"publication 1 of step 3 cannot be written to .*rank 1"):
        run_on_ranks(train_and_publish, 2, str(tmp_path / "other"), 9, None, *job)


def test_a_folder_of_another_job(folder: Path) -> None:
    with pytest.raises(RankFailed) as failed:
        run_on_ranks(train_and_publish, 2, str(folder), 3)
    text = "ConfigError: (rank 0: )?PublishRows: folder=.* has the publications of another job"
    assert len(re.findall(text, str(failed.value))) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "set every_n_steps or every_seconds"),
        ({"every_n_steps": 3, "every_seconds": 1.0}, "and not both"),
        ({"every_n_steps": 0}, "every_n_steps=0 must be above 0"),
        ({"every_n_steps": 1, "keep": -1}, "keep=-1 must be above 0"),
        ({"every_n_steps": 1, "on_error": "ignore"}, "must be 'raise' or 'warn'"),
        ({"every_n_steps": 1, "folder": "nothing://x"}, "Protocol not known: nothing"),
    ],
)
def test_refuses_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PublishRows(**({"folder": "published"} | options))


def test_needs_sharded_tables(tmp_path: Path) -> None:
    trainer = pl.Trainer(
        max_steps=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        callbacks=[PublishRows(str(tmp_path), every_n_steps=1)],
    )
    module, batch = JOBS["mch"][0](), JOBS["mch"][1](0)
    with pytest.raises(ConfigError, match="this fit has none"):
        trainer.fit(module, [batch])
