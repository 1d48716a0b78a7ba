"""A resumed epoch goes on with the batches that were left, on any number of ranks; Lightning takes
the loader for one that can."""

import io
import warnings
from collections.abc import Callable, Iterator
from copy import copy
from itertools import islice
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from lightning_distrec.prefetch.even_batches import even
from lightning_distrec.prefetch.position import (
    PositionedLoader,
    State,
    adapt_progress,
    merge_states,
    num_batches,
    rescale,
    resumable,
)
from tests.support.trainers import one_process_trainer

Batches = list[list[int]]


class Numbers(Dataset[int]):
    """Sample i is i; `loaded` are those that were asked for in this process."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.loaded.append(index)
        return index


def _never(message: str) -> None:
    raise AssertionError(message)


def _wrapped(
    loader: DataLoader[int], rank: int = 0, num_ranks: int = 1, say: Callable[[str], None] = _never
) -> Any:
    wrapped = resumable(loader, rank, num_ranks, say)
    assert isinstance(wrapped, PositionedLoader)
    return wrapped


def _dealt(
    length: int,
    num_ranks: int,
    rank: int,
    batch_size: int,
    epoch: int = 0,
    drop_last: bool = False,
    drop_uneven: bool = False,
    shuffle: bool = True,
    seed: int = 0,
) -> DataLoader[int]:
    """Return the loader of one rank, its samples dealt by a DistributedSampler."""
    numbers = Numbers(length)
    sampler = DistributedSampler(numbers, num_ranks, rank, shuffle, seed, drop_uneven)
    sampler.set_epoch(epoch)
    return DataLoader(numbers, batch_size, sampler=sampler, drop_last=drop_last)


def _all_of(loader: Any) -> Batches:
    return [batch.tolist() for batch in loader]


def _first_of(loader: Any, count: int) -> Batches:
    return [batch.tolist() for batch in islice(iter(loader), count)]


def _stored(state: State) -> State:
    """Return the state as it comes out of a checkpoint that may hold nothing but tensors and plain
    types."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return dict(torch.load(file, weights_only=True))


def _resumed(wrapped: Any, state: State) -> Batches:
    wrapped.load_state_dict(_stored(state))
    return _all_of(wrapped)


def _dealt_back(rank_batches: list[Batches]) -> list[int]:
    """Return all ranks' samples in the order in which they were dealt."""
    columns = [[sample for batch in batches for sample in batch] for batches in rank_batches]
    assert len({len(column) for column in columns}) == 1, "ranks have unequal numbers of samples"
    return [sample for row in zip(*columns, strict=True) for sample in row]


JOBS = {
    "length": st.integers(1, 40),
    "shuffle": st.booleans(),
    "drop_last": st.booleans(),
    "drop_uneven": st.booleans(),
    "epoch": st.integers(0, 3),
}
RANKS, SIZES = st.integers(1, 4), st.integers(1, 5)


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    ranks=st.tuples(RANKS, RANKS, RANKS),
    sizes=st.tuples(SIZES, SIZES, SIZES),
    **JOBS,
)
def test_on_other_ranks_each_sample_that_is_left_is_trained_once(
    data, ranks, sizes, length, shuffle, drop_last, drop_uneven, epoch
):
    order = [i for (i,) in _all_of(_dealt(length, 1, 0, 1, epoch, shuffle=shuffle))]
    trained, state, progress = 0, None, 0
    for num_ranks, batch_size in zip(ranks, sizes, strict=True):
        loaders = [
            _wrapped(
                _dealt(length, num_ranks, rank, batch_size, epoch, drop_last, drop_uneven, shuffle)
            )
            for rank in range(num_ranks)
        ]
        whole = len(loaders[0])
        if state is not None:
            progress = rescale(progress, state, num_ranks, batch_size)
            assert num_batches(state, num_ranks, batch_size) == whole
            for loader in loaders:
                loader.load_state_dict(_stored(state))
                assert loader.state_dict()["batches"] == progress
                assert len(loader) == whole
        if progress == whole:
            return  # nothing is left that makes a batch
        iterators = [iter(loader) for loader in loaders]
        num_left = whole - progress
        count = data.draw(st.integers(1, num_left), label="batches before the next interruption")
        drawn = [[batch.tolist() for batch in islice(iterator, count)] for iterator in iterators]
        assert [len(batches) for batches in drawn] == [count] * num_ranks
        states = [loader.state_dict() for loader in loaders]
        samples = _dealt_back(drawn)
        padded = order[trained:] + order * num_ranks
        assert samples == padded[: len(samples)]
        remaining = _dealt_back([[batch.tolist() for batch in iterator] for iterator in iterators])
        assert len(remaining) == 0 if count == num_left else len(remaining) > 0
        if not drop_last:
            uneven = (length - trained) % num_ranks
            end = length - uneven if drop_uneven else length
            num_padded = 0 if drop_uneven else -uneven % num_ranks
            assert samples + remaining == order[trained:end] + (order * num_ranks)[:num_padded]
        trained, state, progress = trained + len(samples), states[0], progress + count
        assert state["batches"] == progress
        if count == num_left:
            return
        assert state["samples"] == trained


@pytest.mark.parametrize(
    ("shuffle", "own_generator", "num_ranks"),
    [(False, False, 2), (True, False, 3), (True, True, 2)],
)
def test_samples_of_one_rank_are_dealt_to_many_and_back(shuffle, own_generator, num_ranks):
    def of_one() -> DataLoader[int]:
        generator = torch.Generator().manual_seed(5) if own_generator else None
        return DataLoader(Numbers(21), 2, shuffle=shuffle, generator=generator)

    torch.manual_seed(3)
    order = _dealt_back([_all_of(of_one())])
    assert (order == sorted(order)) is not shuffle
    torch.manual_seed(3)
    first = _wrapped(of_one())
    assert _dealt_back([_first_of(first, 3)]) == order[:6]
    torch.manual_seed(99)
    many = [
        _wrapped(_dealt(21, num_ranks, rank, 2, epoch=1), rank, num_ranks)
        for rank in range(num_ranks)
    ]
    for loader in many:
        loader.load_state_dict(_stored(first.state_dict()))
    assert _dealt_back([_first_of(loader, 2) for loader in many]) == order[6 : 6 + 4 * num_ranks]
    assert (
        _dealt_back([_resumed(_wrapped(of_one()), many[0].state_dict())])
        == order[6 + 4 * num_ranks :]
    )


def _even_first() -> DataLoader[int]:
    class EvenFirst(Sampler[list[int]]):
        """Batches of its own making, shuffled by torch."""

        def __len__(self) -> int:
            return 7

        def __iter__(self) -> Iterator[list[int]]:
            for i in torch.randperm(7).tolist():
                yield [i, i + 7]

    return DataLoader(Numbers(14), batch_sampler=EvenFirst())


LOADERS: dict[str, Callable[[], DataLoader[int]]] = {
    "in order": lambda: DataLoader(Numbers(13), 2),
    "shuffled": lambda: DataLoader(Numbers(13), 2, shuffle=True),
    "with replacement": lambda: DataLoader(
        Numbers(13), 2, sampler=RandomSampler(range(13), True, 70)
    ),
    "more than once": lambda: DataLoader(
        Numbers(13), 2, sampler=RandomSampler(range(13), num_samples=30)
    ),
    "weighted": lambda: DataLoader(
        Numbers(13), 2, sampler=WeightedRandomSampler(torch.arange(1.0, 14), 13)
    ),
    "a list as sampler": lambda: DataLoader(Numbers(13), 2, sampler=[3, 1, 4, 5, 9, 2, 6]),
    "a batch sampler of torch's": lambda: DataLoader(
        Numbers(13), batch_sampler=BatchSampler(RandomSampler(range(13)), 3, False)
    ),
    "a custom batch sampler": _even_first,
    "without batches": lambda: DataLoader(Numbers(13), None, shuffle=True, collate_fn=torch.tensor),
    "batches as samples": lambda: DataLoader(
        [*range(13)], None, sampler=RandomSampler(range(13)), collate_fn=torch.tensor
    ),
    "two workers": lambda: DataLoader(Numbers(13), 2, shuffle=True, num_workers=2),
    "workers that stay": lambda: DataLoader(
        Numbers(13), 2, shuffle=True, num_workers=1, persistent_workers=True
    ),
}


@pytest.mark.parametrize("name", LOADERS)
def test_one_rank_goes_on_with_the_batches_that_were_left_and_draws_no_random_numbers_for_it(name):
    make = LOADERS[name]
    torch.manual_seed(11)
    loader = make()
    plain = [_all_of(loader), _all_of(loader)]
    torch.manual_seed(11)
    wrapped = _wrapped(make())
    iterator = iter(wrapped)
    begin = [next(iterator).tolist() for _ in range(3)]
    assert begin == plain[0][:3]
    state = wrapped.state_dict()
    assert begin + [batch.tolist() for batch in iterator] == plain[0]
    assert _all_of(wrapped) == plain[1]  # wrapped loaders draw the random numbers of plain ones
    torch.manual_seed(11)
    list(make())
    rng_state = torch.get_rng_state()  # at the end of the epoch, as if a checkpoint had brought it
    resumed = _wrapped(make())
    assert _resumed(resumed, state) == plain[0][3:]
    assert torch.equal(torch.get_rng_state(), rng_state)
    if "weighted" not in name:  # its numbers are drawn by the loop, those of the rest
        assert _all_of(resumed) == plain[1]


def test_a_generator_of_the_samplers_own_goes_on_from_epoch_to_epoch():
    def make() -> DataLoader[int]:
        return DataLoader(Numbers(10), 2, shuffle=True, generator=torch.Generator().manual_seed(1))

    wrapped = _wrapped(make())
    _all_of(wrapped)
    _first_of(wrapped, 2)
    state = wrapped.state_dict()
    loader = make()
    epochs = [_all_of(loader) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    resumed = _wrapped(make())
    assert [_resumed(resumed, state), _all_of(resumed)] == [epochs[1][2:], epochs[2]]


def _state_after(loader: DataLoader[int], count: int, rank: int = 0, num_ranks: int = 1) -> State:
    wrapped = _wrapped(loader, rank, num_ranks)
    assert len(_first_of(wrapped, count)) == count
    return dict(wrapped.state_dict())


def test_samplers_wrapped_by_lightning_go_on_with_the_order_of_the_wrapped_one():
    def make(num_ranks: int, rank: int) -> DataLoader[int]:
        numbers = Numbers(12)
        weighted = WeightedRandomSampler(torch.ones(12), 12, replacement=False)
        return DataLoader(
            numbers, 1, sampler=DistributedSamplerWrapper(weighted, num_ranks, rank, seed=4)
        )

    torch.manual_seed(0)
    order = _dealt_back([_all_of(make(1, 0))])
    torch.manual_seed(0)
    state = _state_after(make(2, 0), 2)
    assert [_resumed(_wrapped(make(2, rank)), state) for rank in range(2)] == [
        [[sample] for sample in order[4 + rank :: 2]] for rank in range(2)
    ]
    assert (
        _dealt_back([_resumed(_wrapped(make(3, rank)), state) for rank in range(3)])
        == order[4:] + order[:1]
    )


def _of_ranks(num_ranks: int, uneven: int = 0) -> list[DataLoader[int]]:
    """Loaders that each shuffle on their own, as with use_distributed_sampler=False."""
    return [DataLoader(Numbers(10 + uneven * rank), 2, shuffle=True) for rank in range(num_ranks)]


def test_ranks_with_orders_of_their_own_go_on_from_their_own_states():
    orders, states = [], []
    for rank, loader in enumerate(_of_ranks(2, uneven=3)):
        torch.manual_seed(rank)
        wrapped = _wrapped(loader, rank, 2)
        iterator = iter(wrapped)
        orders.append([next(iterator).tolist() for _ in range(2)])
        states.append(wrapped.state_dict())
        orders[-1] += [batch.tolist() for batch in iterator]
    assert orders[0] != orders[1]
    assert rescale(2, states[1], 2, 2) == 2
    resumed = [_wrapped(loader, rank, 2) for rank, loader in enumerate(_of_ranks(2, uneven=3))]
    assert [_resumed(*pair) for pair in zip(resumed, states, strict=True)] == [
        order[2:] for order in orders
    ]


def test_one_state_is_made_of_all_ranks_only_where_it_is_the_same_to_all():
    dealt = [[_state_after(_dealt(40, 2, rank, 2), 3)] for rank in range(2)]
    (state,) = merge_states(dealt)
    assert (state["order"], state["batches"]) == ("DistributedSampler", 3)
    unequal = [[_state_after(_dealt(40, 2, rank, 2 + rank), 3)] for rank in range(2)]
    (state,) = merge_states(unequal)
    assert (state["order"], state["rank"]) == (None, None)
    assert merge_states([[{"_snapshot": 1}], [{"_snapshot": 2}]]) == []
    rank_states = [_state_after(LOADERS["weighted"](), 3), {"_snapshot": 1}]
    assert merge_states([rank_states]) == rank_states
    assert merge_states([rank_states[:1]]) == rank_states[:1]
    assert merge_states([[], []]) == []


def _joined(loaders: list[DataLoader[int]], count: int) -> State:
    states = [
        _state_after(loader, count, rank, len(loaders)) for rank, loader in enumerate(loaders)
    ]
    return merge_states([[state] for state in states])[0]


REFUSED: dict[str, tuple[Callable[[], State], Callable[[], Any], str]] = {
    "own orders, another rank's state": (
        lambda: _state_after(_of_ranks(2)[0], 3, 0, 2),
        lambda: (_of_ranks(2)[1], 1, 2),
        r"20 samples on 2 rank\(s\) in the order of None, and now there are 20 samples on 2 rank\(s\)",
    ),
    "own orders, joined": (
        lambda: _joined(_of_ranks(2), 3),
        lambda: (_of_ranks(2)[0], 0, 2),
        r"20 samples on 2 rank\(s\) in the order of None, and now there are 20 samples on 2 rank\(s\)",
    ),
    "own orders, more ranks": (
        lambda: _joined(_of_ranks(2), 3),
        lambda: (_of_ranks(3)[2], 2, 3),
        r"on 2 rank\(s\).* on 3 rank\(s\)",
    ),
    "unequal batches, more ranks": (
        lambda: _joined([_dealt(40, 2, rank, 2 + rank) for rank in range(2)], 3),
        lambda: (_dealt(40, 3, 0, 2), 0, 3),
        r"on 2 rank\(s\) in the order of None.* on 3 rank\(s\)",
    ),
    "samples more than once, now two ranks": (
        lambda: _state_after(LOADERS["more than once"](), 3),
        lambda: (_dealt(30, 2, 0, 2), 0, 2),
        "order of None.* order of DistributedSampler",
    ),
    "one custom order, other data": (
        lambda: _state_after(LOADERS["weighted"](), 3),
        lambda: (DataLoader(Numbers(9), 2, sampler=WeightedRandomSampler(torch.ones(9), 9)), 0, 1),
        "of 13 samples .* are 9 samples",
    ),
    "other data": (
        lambda: _state_after(_dealt(40, 2, 0, 2), 3),
        lambda: (_dealt(41, 2, 0, 2), 0, 2),
        "of 40 samples .* are 41 samples",
    ),
    "a state of another loader": (
        lambda: {"_snapshot": 1},
        lambda: (_dealt(41, 2, 0, 2), 0, 2),
        "does not hold the position of such a dataloader",
    ),
    "a state without random numbers": (
        lambda: {**_state_after(_dealt(40, 2, 0, 2), 3), "generator": None},
        lambda: (_dealt(40, 2, 0, 2), 0, 2),
        "does not hold the position of such a dataloader",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_position_that_cannot_be_used_is_reported_and_the_epoch_starts_over(name):
    make_state, make_loader, reason = REFUSED[name]
    messages: list[str] = []
    torch.manual_seed(1)
    state = make_state()
    loader, rank, num_ranks = make_loader()
    wrapped = _wrapped(loader, rank, num_ranks, messages.append)
    torch.manual_seed(2)
    resumed = _resumed(wrapped, state)
    torch.manual_seed(2)
    assert resumed == _all_of(loader)
    (message,) = messages
    with pytest.raises(
        ValueError, match=f"middle of an epoch: .*{reason}.*restarts.*Resume with the same"
    ):
        raise ValueError(message)
    if "ranks" in name or "joined" in name:  # these the state itself tells
        assert rescale(state["batches"], state, num_ranks, 2) == 0
        assert rescale(state["batches"] - 1, state, num_ranks, 2) == -1


def test_a_position_of_another_epoch_is_not_used():
    # say, Trainer(limit_train_batches=2) ended the epoch
    state = _state_after(_dealt(12, 2, 0, 2, epoch=1), 2)
    loader = _dealt(12, 2, 0, 2, epoch=0)
    wrapped = _wrapped(loader)
    wrapped.load_state_dict(state)
    iterator = iter(wrapped)
    loader.sampler.set_epoch(2)  # Lightning does so after it began the loader
    assert [batch.tolist() for batch in iterator] == _all_of(_dealt(12, 2, 0, 2, epoch=2))
    assert wrapped.state_dict()["batches"] == 3


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_epoch_may_be_set_after_the_loader_was_begun(num_workers):
    plain = _all_of(_dealt(12, 2, 0, 2, epoch=3))
    state = _state_after(_dealt(12, 2, 0, 2, epoch=3), 1)
    template = _dealt(12, 2, 0, 2)
    wrapped = _wrapped(
        DataLoader(template.dataset, 2, sampler=template.sampler, num_workers=num_workers)
    )
    wrapped.load_state_dict(state)
    for expected in (plain[1:], plain):
        template.sampler.set_epoch(0)
        iterator = iter(wrapped)
        template.sampler.set_epoch(3)
        assert [batch.tolist() for batch in iterator] == expected


class TwoRanks:
    """Ranks for `even`: the other one has 3 batches."""

    num_ranks = 2

    def all_reduce_min(self, value: int) -> int:
        return value

    def all_gather(self, value: Any) -> list[Any]:
        return [value, (3, True)]


def test_a_shortened_loader_goes_on_to_where_it_was_shortened():
    shortened = even(DataLoader(Numbers(10), 2, shuffle=True), TwoRanks(), "stop", str)
    wrapped = _wrapped(shortened, 0, 2)
    assert len(wrapped) == 3
    whole = _all_of(wrapped)
    iterator = iter(wrapped)
    whole = [next(iterator).tolist()]
    state = wrapped.state_dict()
    whole += [batch.tolist() for batch in iterator]
    assert len(whole) == 3
    assert _resumed(_wrapped(copy(shortened), 0, 2), state) == whole[1:]


class Recorder(pl.LightningModule):
    """Keeps the batches it is trained on, and draws random numbers in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[tuple[int, int, list[int]]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append((self.current_epoch, batch_idx, batch.tolist()))
        return self.layer(torch.rand(2, 1)).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


def _fit(
    make: Callable[[], Any], seed: int, ckpt_path: Path | None = None, **options: Any
) -> list[Any]:
    """Return (epoch, batch index, batch) of every step, of loaders that Lightning can resume."""
    pl.seed_everything(seed, verbose=False)
    module = options.pop("module", Recorder)()
    module.train_dataloader = make
    has_callbacks = "callbacks" in options
    trainer = one_process_trainer(
        **{"max_epochs": 3, "enable_checkpointing": has_callbacks} | options
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not resumable.*")
        trainer.fit(module, ckpt_path=ckpt_path)
    return module.seen


def _every_step(folder: Path) -> list[pl.Callback]:
    options = {"save_top_k": -1, "every_n_train_steps": 1, "auto_insert_metric_name": False}
    return [ModelCheckpoint(folder, "step{step}", **options)]


FITTED: dict[str, Callable[[], DataLoader[int]]] = {
    "shuffled": lambda: DataLoader(Numbers(9), 2, shuffle=True),
    "dealt": lambda: _dealt(17, 2, 1, 2),
}


def _move(path: Path, num_ranks: int) -> None:
    """Do to a checkpoint what a strategy does that loads it on `num_ranks` ranks."""
    checkpoint = torch.load(path, weights_only=True)
    adapt_progress(checkpoint["loops"]["fit_loop"], num_ranks)
    torch.save(checkpoint, path)


@pytest.mark.parametrize(("num_ranks", "drop_last"), [(1, False), (1, True), (3, True), (4, False)])
def test_a_fit_on_other_ranks_ends_the_epoch_after_its_rest(tmp_path, num_ranks, drop_last):
    def make(num_ranks: int, rank: int) -> DataLoader[int]:
        return _dealt(41, num_ranks, rank, 4, drop_last=drop_last)

    _fit(lambda: _wrapped(make(2, 0)), seed=1, callbacks=_every_step(tmp_path))
    # in the second epoch, after 32 of 41 samples
    path = tmp_path / f"step{len(make(2, 0)) + 4}.ckpt"
    (state,) = torch.load(path, weights_only=True)["loops"]["fit_loop"]["state_dict"][
        "combined_loader"
    ]
    first = rescale(4, state, num_ranks, 4)
    _move(path, num_ranks)
    for rank in range(num_ranks):
        seen = _fit(lambda rank=rank: _wrapped(make(num_ranks, rank)), seed=2, ckpt_path=path)
        loader = make(num_ranks, rank)
        loader.sampler.set_epoch(1)
        # what is left for 3 or 4 ranks makes no whole batch
        has_rest = not drop_last or num_ranks == 1
        remaining = _resumed(_wrapped(loader), state) if has_rest else []
        assert first + len(remaining) == len(loader)
        loader.sampler.set_epoch(2)
        expected = [(1, first + i, batch) for i, batch in enumerate(remaining)]
        assert seen == expected + [(2, i, batch) for i, batch in enumerate(_all_of(loader))]


@pytest.mark.parametrize(("name", "failed"), [("shuffled", 6), ("dealt", 2), ("dealt", 9)])
def test_a_step_that_failed_is_made_again(tmp_path, name, failed):
    class Failing(Recorder):
        """Has an exception in one of its steps."""

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if len(self.seen) == failed:
                raise KeyError("failed")
            return super().training_step(batch, batch_idx)

    def wrapped() -> Any:
        return _wrapped(FITTED[name]())

    plain = _fit(FITTED[name], seed=1)
    with pytest.raises(KeyError, match="failed"):
        _fit(wrapped, seed=1, module=Failing, callbacks=[OnExceptionCheckpoint(tmp_path, "failed")])
    _move(tmp_path / "failed.ckpt", 2 if name == "dealt" else 1)
    # of 5 steps in an epoch; numbers that the failed step would have drawn differ in later ones
    num_left = -failed % 5
    assert (
        _fit(wrapped, seed=2, ckpt_path=tmp_path / "failed.ckpt")[:num_left]
        == plain[failed : failed + num_left]
    )
