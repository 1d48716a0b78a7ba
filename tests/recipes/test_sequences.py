"""Films in order of time: who is left out, what a window holds, and what losses are over."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lightning_distrec.errors import DataError
from recipes.movielens.folder import Ratings
from recipes.movielens.sequences import leave_one_out
from recipes.sasrec.data import Windows, window_ends
from recipes.sasrec.model import SASRec
from recipes.two_tower.data import NextFilmDataModule
from recipes.two_tower.features import FILM, PERSON
from recipes.two_tower.model import TwoTower
from recipes.two_tower.serve import film_vectors, recommend
from tests.support.movielens_folder import write_movielens_folder


def ratings(*events: tuple[int, int, float]) -> Ratings:
    """Events as (user, item, time), each from 0."""
    users, items, times = (np.array(column) for column in zip(*events, strict=True))
    return Ratings(users=users, items=items, ratings=np.ones(len(users)), times=times)


@pytest.fixture
def data(tmp_path: Path) -> NextFilmDataModule:
    data = NextFilmDataModule(
        data_dir=str(write_movielens_folder(tmp_path / "made")), batch_size=32
    )
    data.setup()
    return data


def test_the_last_film_tests_and_the_one_before_validates() -> None:
    # User 1 has two films only: they train.
    split = leave_one_out(ratings((0, 5, 3), (0, 6, 1), (1, 7, 0), (0, 8, 2), (1, 9, 1), (0, 4, 0)))
    films = {part: split.items[events].tolist() for part, events in split.parts.items()}
    assert films == {"train": [5, 7, 8, 10], "val": [9], "test": [6]}
    assert split.histories(split.parts["test"], 2)[0].tolist() == [[7, 9]]
    assert split.histories(split.parts["val"], 4)[0].tolist() == [[0, 0, 5, 7]]
    with pytest.raises(DataError, match="nobody has 3 or more"):
        leave_one_out(ratings((0, 1, 0), (0, 2, 1)))


def test_each_place_of_a_window_predicts_the_film_after_it() -> None:
    split = leave_one_out(ratings(*((0, item, item) for item in range(7))))  # films 1 to 5 train
    ends = window_ends(split, stride=2)
    assert split.items[ends].tolist() == [3, 5]
    batch = Windows(split, ends, length=3).__getitems__([0, 1])
    assert batch["items"].tolist() == [[1, 2, 0], [2, 3, 4]]
    assert batch["following"].tolist() == [[2, 3, 0], [3, 4, 5]]
    assert batch["length"].tolist() == [2, 3]


def test_sasrec_does_not_look_ahead() -> None:
    torch.manual_seed(1)
    model = SASRec(num_items=20, length=6, dim=8, hidden=16, num_heads=2).eval()
    items = torch.randint(1, 21, (3, 6))
    changed = items.clone()
    changed[:, 4:] = changed[:, 4:] % 20 + 1
    torch.testing.assert_close(model(items)[:, :4], model(changed)[:, :4])
    assert not torch.allclose(model(items)[:, 4:], model(changed)[:, 4:])


@pytest.fixture
def sasrec() -> SASRec:
    torch.manual_seed(1)
    model = SASRec(num_items=20, length=3, dim=8, hidden=16).eval()
    torch.nn.init.normal_(model.items.weight)
    return model


@pytest.fixture
def windows() -> dict[str, Tensor]:
    """Three of them; 0 is no film."""
    return {
        "items": torch.tensor([[4, 9, 0], [1, 2, 3], [7, 0, 0]]),
        "following": torch.tensor([[9, 5, 0], [2, 3, 20], [11, 0, 0]]),
        "length": torch.tensor([2, 3, 1]),
    }


def test_sasrec_trains_on_the_softmax_over_all_films(
    sasrec: SASRec, windows: dict[str, Tensor]
) -> None:
    scores = sasrec(windows["items"]) @ sasrec.items.weight.T
    targets = windows["following"].flatten()
    expected = functional.cross_entropy(scores.flatten(0, 1), targets, ignore_index=0)
    torch.testing.assert_close(sasrec.training_step(windows, 0), expected)
    sasrec.hparams["num_negatives"] = 100_000
    sampled = sasrec.training_step(windows, 0)
    assert not torch.equal(sampled, expected)
    torch.testing.assert_close(sampled, expected, atol=2e-2, rtol=0)


def test_no_film_is_neither_predicted_nor_ahead_of_a_target(
    sasrec: SASRec, windows: dict[str, Tensor]
) -> None:
    with torch.no_grad():
        queries = sasrec.queries(windows)
        sasrec.items.weight[0] = 100 * queries.sum(0)  # the highest score of all
        scores = (queries @ sasrec.items.weight.T)[:, 1:]
        assert (queries @ sasrec.items.weight[0] > scores.amax(1)).all()
    films = torch.tensor([[5], [20], [11]])  # the last of each window
    ranks = 1 + (scores > scores.gather(1, films - 1)).sum(1)
    sasrec.validation_step(windows, 0)
    expected = (1 / torch.log2(1 + ranks)).where(ranks <= 10, 0).mean()
    torch.testing.assert_close(sasrec.val_metrics.compute()["val_ndcg_at_10"], expected)
    predicted = sasrec.predict_step(windows, 0)["items"]
    assert torch.equal(predicted, 1 + scores.topk(10).indices)


def test_towers_train_on_the_films_of_a_batch_of_which_the_same_one_is_no_negative(
    data: NextFilmDataModule,
) -> None:
    torch.manual_seed(1)
    model = TwoTower(dim=8, hidden=16, out=8, temperature=0.1)
    model.configure_model()
    model.eval()
    batch = next(iter(data.train_dataloader()))
    ids = model.sparse_inputs(batch)
    scores = model.encode_people(ids["people"]) @ model.encode_films(ids["films"]).T / 0.1
    film = batch["label"][:, 0]
    own = torch.arange(len(film))
    is_other = (film[:, None] == film).fill_diagonal_(False)
    assert is_other.any()
    expected = functional.cross_entropy(scores.masked_fill(is_other, -torch.inf), own)
    torch.testing.assert_close(model.training_step(batch, 0), expected)


def test_a_batch_says_who_what_and_what_was_seen(data: NextFilmDataModule) -> None:
    plain = data.columns.to_plain()["vocabularies"]
    users, items = ([None, *plain[table]] for table in ("user", "history"))
    events, sequences = data.sequences.parts["val"], data.sequences
    catalogue, seen = data.films["item"].to_pylist(), data.seen("val")
    size = min(32, len(events))
    batch = next(iter(data.val_dataloader()))
    bags = {name: bag.to_dense() for name, bag in batch["ids"].to_dict().items()}
    assert list(bags) == [*PERSON, *FILM]
    for number, event in enumerate(events[:size]):
        film, row = batch["label"][number].tolist()
        assert (film, row) == (sequences.items[event] - 1, number)
        assert users[bags["user"][number]] == str(1 + sequences.users[event])
        initial = sequences.items[sequences.starts[event] : event] - 1
        known = [catalogue[position] for position in initial[-20:]]
        assert [items[row] for row in bags["history"][number]] == [
            film if film in items else None for film in known
        ]
        assert [position for position in seen[number].tolist() if position >= 0] == initial.tolist()


def test_serving_recommends_what_scores_best_and_was_not_watched(data: NextFilmDataModule) -> None:
    torch.manual_seed(1)
    model = TwoTower(dim=8, hidden=16, out=8)
    model.configure_model()
    vectors = film_vectors(model.eval(), data.columns, data.films)
    assert vectors.shape == (20, 8)
    batch = next(iter(data.test_dataloader()))
    with torch.no_grad():
        scores = vectors @ model.predict_step(batch, 0)[0]
    person = data.raw_rows()[0]
    actual, best = recommend(model, data.columns, vectors, person, watched=[4, 9], k=5)
    assert actual == sorted(set(range(20)) - {4, 9}, key=lambda film: -float(scores[film]))[:5]
    torch.testing.assert_close(torch.tensor(best), scores[actual])
    nobody = dict.fromkeys(PERSON)
    assert len(recommend(model, data.columns, vectors, nobody, [], k=50)[0]) == 20
