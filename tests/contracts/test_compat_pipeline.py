"""The same contracts, of what fetching ahead and sending ids ahead use."""

import signal
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torchrec import KeyedJaggedTensor, KeyedTensor
from torchrec.distributed import comm_ops as torchrec_comm_ops
from torchrec.distributed import types as torchrec_types
from torchrec.distributed.train_pipeline import train_pipelines
from torchrec.sparse.jagged_tensor import JaggedTensor

from lightning_distrec._compat import lightning as _lightning
from lightning_distrec._compat import lightning_data as _lightning_data
from lightning_distrec._compat import tensors as _tensors
from lightning_distrec._compat import torch as _torch
from lightning_distrec._compat import torchrec_ids as _torchrec_ids
from lightning_distrec._compat import torchrec_modules as _torchrec
from tests.support.click_model import (
    FEATURES,
    NO_OUTPUT,
    ClickModel,
    make_batch,
    seeded,
    train_sharded,
)
from tests.support.ranks import run_each_on_ranks


class Loader(DataLoader):
    """A loader whose state is the number of batches that it gave."""

    inputs = 0

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            self.inputs += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.inputs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inputs = state["given"]


class Hooked(BoringModel):
    """Notes what Lightning does to batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.hooked: list[float] = []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.hooked.append(float(batch[0]))
        return batch + 0.5

    def forward(self, batch: Any) -> Any:
        return super().forward(batch.view(-1, 1))


def make_trainer(**options: Any) -> pl.Trainer:
    options = NO_OUTPUT | {"limit_val_batches": 0} | options
    return pl.Trainer(accelerator="cpu", max_epochs=1, **options)


def loader() -> Loader:
    return Loader(torch.arange(8.0), batch_size=2)


def test_override_loader_states_decides_what_a_checkpoint_holds() -> None:
    combined = CombinedLoader(loader(), "max_size_cycle")
    assert _lightning_data.combining_mode(combined) == "max_size_cycle"
    next(iter(combined))
    assert _lightning_data.loader_states(combined) == [{"given": 1}]
    trainer = make_trainer()
    trainer.fit_loop._combined_loader = combined
    _lightning_data.override_loader_states(combined, lambda: [{"given": 7}])
    assert trainer.fit_loop.on_save_checkpoint()["combined_loader"] == [{"given": 7}]
    assert _lightning_data.loader_states(combined) == [{"given": 1}]
    _lightning_data.override_loader_states(combined, None)
    assert trainer.fit_loop.on_save_checkpoint()["combined_loader"] == [{"given": 1}]


def test_train_dataloaders_are_asked_for_once_more_before_lightning_does_so_itself() -> None:
    requests: list[str] = []
    seen: list[Any] = []
    handed: list[Any] = []

    class WithData(Hooked):
        def train_dataloader(self) -> Any:
            requests.append(self.trainer.state.stage.value)
            return loader()

    class Looks(pl.Callback):
        def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
            handed.append(_lightning.given_train_loaders(trainer))
            seen.append(_lightning.train_dataloaders(trainer))

    make_trainer(callbacks=[Looks()]).fit(WithData())
    assert len(requests) == 2
    assert type(seen[0]) is Loader
    inputs = {"a": loader()}
    make_trainer(callbacks=[Looks()], limit_train_batches=0).fit(Hooked(), inputs)
    assert seen[1] is inputs
    assert handed == [None, inputs]
    assert _lightning.given_train_loaders(make_trainer()) is None
    assert _lightning.train_dataloaders(make_trainer()) is None


def test_replace_fetchers_applies_to_one_trainer_until_undone() -> None:
    class Counting(_lightning.DataFetcher):
        drawn = 0

        def __next__(self) -> Any:
            Counting.drawn += 1
            return super().__next__()

    stages = []

    def make(stage: Any) -> Any:
        stages.append(stage.value)
        return Counting()

    trainer = make_trainer()
    with _lightning.replace_fetchers(trainer, make):
        make_trainer().fit(Hooked(), loader())
        assert not stages, "another trainer's fetchers were made too"
        trainer.fit(Hooked(), loader())
    assert stages == ["train"]
    assert Counting.drawn == 4
    trainer.fit(Hooked(), loader())
    assert stages == ["train"]


def test_skip_transfer_hook_when_skips_batches_that_are_done() -> None:
    module, trainer = Hooked(), make_trainer()
    patches = _lightning.skip_transfer_hook_when(module, lambda batch: bool(batch[0] == 4))
    trainer.fit(module, loader())
    assert module.hooked == [0, 2, 6]
    assert float(_lightning.call_transfer_hook(module, torch.tensor([4.0]), 0)) == 4.5
    patches.close()
    assert "_on_before_batch_transfer" not in vars(module)


def test_stop_between_steps_notes_a_signal_and_stops_the_loop_once_agreed() -> None:
    trainer, requests, codes = make_trainer(), [], [None, 143]
    patches = _lightning.stop_between_steps(trainer, requests.append, codes.pop)
    trainer._signal_connector._sigterm_notifier_fn(signal.SIGTERM, None)
    trainer._signal_connector._slurm_sigusr_handler_fn(signal.SIGUSR1, None)
    assert requests == [False, True]
    assert not trainer.received_sigterm
    with pytest.raises(SIGTERMException) as raised:
        trainer.fit_loop.epoch_loop.advance(None)
    assert raised.value.code == 143
    assert trainer.received_sigterm
    with pytest.raises(TypeError):  # Lightning's own goes on, and finds nothing to fetch from
        trainer.fit_loop.epoch_loop.advance(None)
    assert codes == []
    patches.close()
    assert not vars(trainer.fit_loop.epoch_loop).keys() & {"_broadcast_sigterm_tensor", "advance"}
    assert not vars(trainer._signal_connector).keys() & {
        "_sigterm_notifier_fn",
        "_slurm_sigusr_handler_fn",
    }
    trainer._signal_connector.received_sigterm = False
    _lightning.mark_stop(trainer)
    assert trainer.received_sigterm


@pytest.mark.parametrize(
    "layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.jagged, torch.strided]
)
def test_parts_of_a_tensor_are_dense_and_share_its_memory(layout: torch.layout) -> None:
    dense = torch.eye(2)
    if layout == torch.jagged:
        tensor = torch.nested.nested_tensor([dense[0], dense[1, :1]], layout=layout)
    else:
        tensor = dense if layout == torch.strided else dense.to_sparse(layout=layout)
    parts = _tensors.parts_of(tensor)
    assert all(part.layout == torch.strided for part in parts)
    values = (
        tensor._values()
        if layout == torch.sparse_coo
        else dense
        if layout == torch.strided
        else tensor.values()
    )
    assert values.data_ptr() in {part.data_ptr() for part in parts}
    assert len(_tensors.parts_of(torch.nested.nested_tensor([dense[0]]))) == 1


def test_jagged_fields_are_those_of_a_keyed_jagged_tensor() -> None:
    values, offsets = torch.arange(3), torch.tensor([0, 2, 3])
    jagged = KeyedJaggedTensor(keys=["a"], values=values, offsets=offsets)
    parts = _torchrec.jagged_fields(jagged)
    assert list(parts) == ["values", "weights", "lengths", "offsets"]
    assert parts["values"] is values
    assert parts["offsets"] is offsets
    assert parts["lengths"] is None
    assert jagged.lengths().tolist() == [2, 1]
    assert _torchrec.jagged_fields(jagged)["lengths"] is not None, "it keeps what it computes"


def test_keep_length_per_key_spares_a_keyed_jagged_tensor_the_sums() -> None:
    jagged = KeyedJaggedTensor(
        keys=["a", "b"], values=torch.arange(3), lengths=torch.tensor([2, 1])
    )
    retained = [2, 1]
    assert _torchrec.keep_length_per_key(jagged, retained)
    assert jagged.length_per_key() is retained
    assert not _torchrec.keep_length_per_key(jagged, [1, 2])


def test_version_of_counts_writes_in_place() -> None:
    tensor = torch.zeros(3)
    initial = _torch.version_of(tensor)
    tensor[:1].add_(1)
    assert _torch.version_of(tensor) == initial + 1
    assert _torch.versions_of([tensor, torch.zeros(3)]) == [initial + 1, 0]
    with torch.inference_mode():
        assert _torch.version_of(torch.zeros(3)) is None


def test_saved_tensors_are_hooked_inside_of_a_checkpoint() -> None:
    seen = []

    def block(x: torch.Tensor) -> torch.Tensor:
        seen.append(_torch.saved_tensors_are_hooked())
        return (x * 2).exp()

    checkpoint(block, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert seen == [True, True]
    assert not _torch.saved_tensors_are_hooked()


def test_profiler_runs_while_a_profiler_records() -> None:
    assert not _torch.profiler_runs()
    schedule = torch.profiler.schedule(wait=1, warmup=0, active=1)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule
    ) as profile:
        waits = not _torch.profiler_runs()
        profile.step()
        assert _torch.profiler_runs()
    assert waits
    assert not _torch.profiler_runs()


def test_order_backward_decides_which_node_runs_first() -> None:
    ran: list[str] = []

    def run(ordered: bool) -> list[str]:
        ran.clear()
        x = torch.ones(2, requires_grad=True)
        since = _torch.next_backward_number()
        early = x.sin()
        early.grad_fn.register_prehook(lambda _: ran.append("early"))  # type: ignore[union-attr]
        if ordered:
            assert _torch.order_backward([early], since, _torch.FIRST_ORDERED) == 1
            assert early.grad_fn._sequence_nr() == _torch.FIRST_ORDERED
        late = x.cos()
        late.grad_fn.register_prehook(lambda _: ran.append("late"))  # type: ignore[union-attr]
        (early + late).sum().backward()
        return list(ran)

    assert run(False) == ["late", "early"]
    assert run(True) == ["early", "late"]


def test_register_container_lets_torch_take_a_container_apart() -> None:
    class Box:
        def __init__(self, inside: Any) -> None:
            self.inside = inside

    _torch.register_container(Box, lambda box: ([box.inside], None), lambda inside, _: Box(*inside))
    leaves, form = tree_flatten({"a": Box(3)})
    assert leaves == [3]
    assert tree_unflatten([4], form)["a"].inside == 4


def test_keyed_and_jagged_tensors_keep_their_values_where_lazy_ones_put_them() -> None:
    keyed = KeyedTensor(["a"], [2], torch.ones(3, 2))
    assert vars(keyed)[_torchrec.KEYED_TENSOR_VALUES] is keyed.values()
    jagged = JaggedTensor(torch.ones(3), lengths=torch.tensor([3]))
    assert set(_torchrec.JAGGED_TENSOR_FIELDS) <= set(vars(jagged))


def exchanged(sharding_type: str) -> dict[str, Any]:
    model = seeded(ClickModel, torch.optim.SGD, {"lr": 0.1})
    seen: dict[str, Any] = {}

    class Look(pl.Callback):
        def on_train_end(self, trainer: Any, module: Any) -> None:
            look(next(iter(trainer.strategy.run_tables.shards.sharded.values())))

    def look(sharded: Any) -> None:
        ways = _ways_to_send(make_batch(dist.get_rank()))
        seen["equal"] = {name: _arrives_as_upstream(sharded, *way) for name, way in ways.items()}
        contexts, splits = _prepare(sharded, ways["as usual"][:2])
        fused = _torchrec_ids.FusedSplits(splits, contexts, (dist.get_rank(), 7), [True, True])
        seen["said"] = fused.wait_for_numbers()
        early = [awaitable.wait() for awaitable in fused.start_ids()]
        infos = [
            info
            for type_values in sharded.sharding_type_to_sharding_infos.values()
            for info in type_values
        ]
        seen["meta"] = all(info.param.is_meta for info in infos) and len(infos) > 0
        seen["streams"] = all(hasattr(thing, "record_stream") for thing in (*early, *contexts))

    train_sharded(model, 2, {"sharding_types": [sharding_type]}, callbacks=[Look()])
    return seen


def _ways_to_send(batch: Any) -> dict[str, tuple[Any, Any, bool, int]]:
    """Return name -> features of two lookups, whether their ids are small, and how many ranks are
    packed for."""
    ids, lengths = batch["ids"], batch["lengths"]
    wide = torch.where(ids % 2 == 0, ids + 2**40, -ids)
    two_sizes_values = {
        "stride_per_key_per_rank": [[lengths.numel() // len(FEATURES)]] * len(FEATURES)
    }

    def features(
        ids: Any, dtype: Any = None, lengths: Any = lengths, **options: Any
    ) -> KeyedJaggedTensor:
        weights = None if dtype is None else torch.rand(len(ids)).to(dtype)
        return KeyedJaggedTensor(
            keys=FEATURES, values=ids, lengths=lengths, weights=weights, **options
        )

    usual = features(ids)
    return {
        "as usual": (usual, usual, True, 64),
        "one by one": (usual, features(ids, torch.float32), True, 1),
        "wide": (features(wide), features(wide, torch.float32), False, 64),
        "of 32 bits": (features(ids.int()), features(ids, lengths=lengths.int()), True, 64),
        "double": (features(ids, torch.float64), usual, True, 64),
        "batch sizes of their own": (
            features(ids, **two_sizes_values),
            features(ids, torch.float32, **two_sizes_values),
            True,
            64,
        ),
    }


def _prepare(sharded: Any, lookups: Any) -> tuple[list[Any], list[Any]]:
    contexts, splits = [sharded.create_context() for _ in lookups], []
    for context, features in zip(contexts, lookups, strict=True):
        with _torchrec_ids.defer_ids_exchange(sharded):
            splits.append(sharded.input_dist(context, features))
    return contexts, splits


def _arrives_as_upstream(
    sharded: Any, first: Any, other: Any, is_small: bool, max_packed: int
) -> bool:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_torchrec_ids, "MAX_PACKED_RANKS", max_packed)
        contexts, splits = _prepare(sharded, (first, other))
        started = _torchrec_ids.FusedSplits(splits, contexts, (), [is_small] * 2).start_ids()
    actual = [awaitable.wait() for awaitable in started]
    for features, context, ids in zip((first, other), contexts, actual, strict=True):
        stock = sharded.create_context()
        expected = sharded.input_dist(stock, features).wait().wait()
        for a, b in zip(ids.features, expected.features, strict=True):
            for local, his in (
                (a.values(), b.values()),
                (a.lengths(), b.lengths()),
                (a.weights_or_none(), b.weights_or_none()),
            ):
                if (local is None) != (his is None) or (
                    local is not None and (local.dtype != his.dtype or not torch.equal(local, his))
                ):
                    return False
        for local, his in zip(context.sharding_contexts, stock.sharding_contexts, strict=True):
            if local.batch_size_per_rank != his.batch_size_per_rank:
                return False
    return True


# which FBGEMM permutes on a GPU only
def test_fused_splits_send_weights_of_half_precision_as_they_are() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        weights = torch.rand(7).to(dtype)
        part = _torchrec_ids._Part.packed(weights, [7], [7], is_small=True)
        part.arrived = part.numbers
        assert torch.equal(part.take(), weights)


def test_skip_idle_record_functions_names_exchanges_where_a_profiler_runs() -> None:
    with _torchrec.skip_idle_record_functions():
        replaced = torchrec_types.record_function
        assert torchrec_comm_ops.record_function is replaced
        assert not isinstance(
            torchrec_types.record_function("idle"), torch.profiler.record_function
        )
        with torch.profiler.profile() as profile, torchrec_types.record_function("an exchange"):
            torch.zeros(1)
        assert "an exchange" in {event.name for event in profile.events()}
        with _torchrec.skip_idle_record_functions():
            assert torchrec_types.record_function is replaced
        assert torchrec_types.record_function is replaced
    assert torchrec_types.record_function is not replaced


def test_replace_train_pipelines_reaches_all_that_compute_and_can_be_undone() -> None:
    names = ("Base", "PT2", "SparseDist", "SparseDistLite", "FusedSparseDist", "SemiSync")
    kinds = [getattr(train_pipelines, f"TrainPipeline{name}") for name in names]
    kinds += [
        train_pipelines.PrefetchTrainPipelineSparseDist,
        train_pipelines.EvalPipelineSparseDist,
    ]
    progress = [kind.progress for kind in kinds]
    with _torchrec.replace_train_pipelines(lambda pipeline, batches: "replaced"):
        assert [kind.progress(None, None) for kind in kinds] == ["replaced"] * len(kinds)
    assert [kind.progress for kind in kinds] == progress


def _routes() -> tuple[bool, bool]:
    """Return whether weights that stay have routes, and their places arrive in the order of the
    ids."""
    model = seeded(ClickModel, torch.optim.SGD, {"lr": 0.1}, weighted=True)
    actual: list[Any] = []

    class Look(pl.Callback):
        def on_train_end(self, trainer: Any, module: Any) -> None:
            sharded = next(iter(trainer.strategy.run_tables.shards.sharded.values()))
            batch = make_batch(dist.get_rank())
            places = torch.arange(len(batch["ids"]), dtype=torch.int32).view(torch.float32)
            features = KeyedJaggedTensor(
                FEATURES, batch["ids"], lengths=batch["lengths"], weights=places
            )
            contexts, splits = _prepare(sharded, [features])
            started = _torchrec_ids.FusedSplits(
                splits, contexts, (), [True], [features.weights()]
            ).start_ids()
            (ids,) = started[0].wait()
            (route,) = _torchrec_ids.weight_routes(started[0])
            sent = batch["ids"][route.sent_places.view(torch.int32)]
            arrived = sent.new_empty(sum(route.received))
            dist.all_to_all_single(arrived, sent, route.received, route.sent)
            is_equal = torch.equal(arrived[ids.weights().view(torch.int32)], ids.values())
            actual.extend((is_equal, len(_torchrec.lookups_of(sharded)) == 1))

    train_sharded(model, 1, {"sharding_types": ["table_wise"]}, callbacks=[Look()])
    return tuple(actual)


def test_fused_splits_send_the_ids_of_an_ordinary_call_and_routes_lead_where_they_are() -> None:
    # Also the use of free_unsharded_tables, and the use of record_stream, which runs on a GPU only.
    calls = {name: (exchanged, name) for name in ("table_wise", "row_wise")}
    for actual in run_each_on_ranks(calls | {"routes": (_routes,)}, 2):
        assert actual.pop("routes") == (True, True)
        for seen in actual.values():
            assert all(seen.pop("equal").values()), seen
            assert seen == {"said": [[0, 7], [1, 7]], "meta": True, "streams": True}
