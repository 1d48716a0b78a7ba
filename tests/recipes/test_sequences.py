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
from recipes.two_tower.features import PERSON_TABLES, build_catalogue
from recipes.two_tower.model import TwoTower
from recipes.two_tower.serve import film_of, film_vectors, recommend
from recipes.two_tower.towers import in_batch_loss
from tests.support.movielens_folder import write_movielens_folder


def ratings(*events: tuple[int, int, float]) -> Ratings:
    """Events as (user, item, time), each from 0."""
    users, items, times = (np.array(column) for column in zip(*events, strict=True))
    return Ratings(users=users, items=items, ratings=np.ones(len(users)), times=times)


@pytest.fixture
def data(tmp_path: Path) -> NextFilmDataModule:
    data = NextFilmDataModule(data_dir=str(write_movielens_folder(tmp_path / "made")), batch_size=32)
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
            losses.append(functional.cross_entropy((rows[films] @ hidden[place])[None], torch.tensor([0])))
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
    torch.testing.assert_close(in_batch_loss(people, films, items, shares.log(), temperature=0.1), expected)


def test_a_batch_says_who_what_and_what_was_seen(data: NextFilmDataModule) -> None:
    batch = next(iter(data.val_dataloader()))
    events = data.sequences.parts["val"][: len(batch["item"])]
    bags = batch["person_ids"].split(batch["person_lengths"].tolist())
    size = len(events)
    assert [bag.item() for bag in bags[:size]] == (1 + data.sequences.users[events]).tolist()
    histories = bags[list(PERSON_TABLES).index("history") * size :][:size]
    for event, history, seen in zip(events, histories, batch["seen"], strict=True):
        initial = data.sequences.items[data.sequences.starts[event] : event].tolist()
        assert history.tolist() == initial[-20:]
        assert [film for film in seen.tolist() if film] == initial
    train = data.train_dataloader().dataset.__getitems__(range(20))
    users = train["person_ids"][:20].tolist()
    assert [number for number in range(20) if users[number] == 0] == [0, 10]


def test_serving_recommends_what_scores_best_and_was_not_watched(data: NextFilmDataModule) -> None:
    torch.manual_seed(1)
    model = TwoTower(dim=8, hidden=16, out=8)
    model.configure_model()
    vectors = film_vectors(model.eval(), data.catalogue)
    assert vectors.shape == (20, 8)
    actual, scores = recommend(model, data.catalogue, vectors, user=3, watched=[4, 9], k=5)
    with torch.no_grad():
        person = model.encode_people(data.catalogue.person_batch(torch.tensor([3]), torch.tensor([[4, 9]])))[0]
    expected = sorted(set(range(1, 21)) - {4, 9}, key=lambda film: -float(vectors[film - 1] @ person))[:5]
    assert actual == expected
    assert scores == sorted(scores, reverse=True)
    assert len(recommend(model, data.catalogue, vectors, 0, [], k=50)[0]) == 20


def test_a_title_is_found_and_a_wrong_one_named(tmp_path: Path) -> None:
    catalogue = build_catalogue(read_folder(write_movielens_folder(tmp_path / "made")))
    assert catalogue.titles[:3] == ["", "Film 0 (V)", "Film 1 (1934)"]
    assert film_of(" film 1 (1934)", catalogue) == 2
    with pytest.raises(DataError, match=r"no film 'Film 1 \(1935\)'; did you mean 'film 1 \(1934\)'"):
        film_of("Film 1 (1935)", catalogue)
