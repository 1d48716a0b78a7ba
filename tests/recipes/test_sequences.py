"""Films in order of time: who is left out, what a window holds, and the towers' loss by hand."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from lightning_distrec.errors import DataError
from recipes.movielens.folder import Ratings, read_folder
from recipes.movielens.sequences import leave_one_out
from recipes.sasrec.data import Windows, window_ends
from recipes.sasrec.model import SASRec
from recipes.two_tower.data import NextFilmDataModule
from recipes.two_tower.features import FILM, PERSON
from recipes.two_tower.model import TwoTower
from recipes.two_tower.serve import film_of, film_vectors, recommend, titles_of
from recipes.two_tower.towers import in_batch_loss
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


def test_the_sampled_loss_is_against_the_films_drawn_but_for_the_right_one() -> None:
    torch.manual_seed(1)
    model = SASRec(num_items=20, length=6, dim=8, num_negatives=9)
    hidden, following = torch.randn(5, 8), torch.tensor([3, 0, 7, 3, 20])  # 0: no film follows
    candidates = model.sparse_inputs({"following": following})["candidates"]
    actual = model._sampled_loss(hidden, following, candidates)
    drawn = candidates[5:].tolist()
    assert len(drawn) == 9
    assert set(drawn) & {3, 7, 20}
    rows = model.items.weight
    losses = []
    for place, film in enumerate(following.tolist()):
        if film:
            films = [film, *(other for other in drawn if other != film)]
            losses.append(
                functional.cross_entropy((rows[films] @ hidden[place])[None], torch.tensor([0]))
            )
    torch.testing.assert_close(actual, torch.stack(losses).mean())


def test_the_loss_leaves_out_the_same_film_and_corrects_by_its_share() -> None:
    torch.manual_seed(1)
    people, films = torch.randn(4, 3), torch.randn(4, 3)
    items, shares = torch.tensor([7, 8, 7, 9]), torch.tensor([0.5, 0.1, 0.5, 0.2])
    losses = []
    for own_part in range(4):
        scores = [
            (people[own_part] @ films[other] / 0.1 - shares[other].log()).item()
            for other in range(4)
            if other == own_part or items[other] != items[own_part]
        ]
        local = sum(1 for other in range(own_part) if items[other] != items[own_part])
        losses.append(functional.cross_entropy(torch.tensor([scores]), torch.tensor([local])))
    expected = torch.stack(losses).mean()
    torch.testing.assert_close(
        in_batch_loss(people, films, items, shares.log(), temperature=0.1), expected
    )


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
        film, _, row = batch["label"][number].tolist()
        assert (film, row) == (sequences.items[event] - 1, number)
        assert users[bags["user"][number]] == str(1 + sequences.users[event])
        initial = sequences.items[sequences.starts[event] : event] - 1
        known = [catalogue[position] for position in initial[-20:]]
        assert [items[row] for row in bags["history"][number]] == [
            film if film in items else None for film in known
        ]
        assert [position for position in seen[number].tolist() if position >= 0] == initial.tolist()


def test_every_tenth_example_trains_with_an_unknown_person(data: NextFilmDataModule) -> None:
    for batch in data.train_dataloader():
        users = batch["ids"]["user"].values()
        torch.testing.assert_close(users == 0, batch["label"][:, 2] % 10 == 0)


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


def test_a_title_is_found_and_a_wrong_one_named(tmp_path: Path) -> None:
    titles = titles_of(read_folder(write_movielens_folder(tmp_path / "made")))
    assert titles[:2] == ["Film 0 (V)", "Film 1 (1934)"]
    assert film_of(" film 1 (1934)", titles) == 1
    with pytest.raises(
        DataError, match=r"no film 'Film 1 \(1935\)'; did you mean 'film 1 \(1934\)'"
    ):
        film_of("Film 1 (1935)", titles)
