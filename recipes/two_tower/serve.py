"""Makes an index of all films from a checkpoint, and answers queries from it. One process, no
ranks.

    python -m recipes.two_tower.serve export outputs/two_tower/version_0/checkpoints/best.ckpt index
    python -m recipes.two_tower.serve query index --user 42 python -m recipes.two_tower.serve query
    index --films "Toy Story (1995); Star Wars (1977)"

The index is a folder: films.safetensors has the vectors in the order of the .item file; titles.txt
their titles; films.faiss the same vectors for faiss, where that is installed; model.ckpt the
checkpoint, whose tower of people answers.
"""

import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from jsonargparse import auto_cli
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightning_distrec.data import Columns
from lightning_distrec.errors import ConfigError, DataError, DistRecError, did_you_mean
from recipes.movielens.columns import film_table, people_table
from recipes.movielens.folder import Folder, read_folder
from recipes.movielens.sequences import leave_one_out
from recipes.two_tower.features import FILM, PERSON
from recipes.two_tower.model import TwoTower

FOLDER = "data/movielens-100k"


def export(checkpoint: str, out: str, data_dir: str = FOLDER) -> None:
    """Compute the vectors of all films.

    Args:
        checkpoint: of a training run.
        out: a new folder.
        data_dir: the folder of films that the run was trained on.
    """
    folder = Path(out)
    if folder.exists():
        raise ConfigError(f"{folder} exists already. Remove it, or name another folder.")
    data, model = read_folder(Path(data_dir)), load_model(Path(checkpoint))
    vectors = film_vectors(model, load_columns(Path(checkpoint)), film_table(data))
    folder.mkdir(parents=True)
    save_file({"vectors": vectors}, folder / "films.safetensors")
    (folder / "titles.txt").write_text("\n".join(titles_of(data)) + "\n", encoding="utf-8")
    if importlib.util.find_spec("faiss"):
        import faiss

        index = faiss.IndexFlatIP(vectors.shape[1])
        index.add(vectors.numpy())
        faiss.write_index(index, str(folder / "films.faiss"))
    shutil.copyfile(checkpoint, folder / "model.ckpt")
    files = ", ".join(sorted(file.name for file in folder.iterdir()))
    print(f"{len(vectors):,} films of {vectors.shape[1]} numbers each: {files}")
    print(f"Ask it: python -m recipes.two_tower.serve query {out} --user 42")


def query(index: str, user: int = 0, films: str = "", k: int = 10, data_dir: str = FOLDER) -> None:
    """Print the films that somebody may watch next.

    Args:
        index: the folder that `export` wrote.
        user: a person of the data, from 1: their films so far are taken, and not recommended again.
        0: somebody else.
        films: titles that somebody else has watched, the latest last, separated by ";".
        k: how many films to print.
        data_dir: the folder that the index was made with.
    """
    folder = read_folder(Path(data_dir))
    titles, people, items = titles_of(folder), people_table(folder), film_table(folder)["item"]
    person: dict[str, Any] = dict.fromkeys(PERSON)
    if user:
        if not 1 <= user <= len(people):
            raise ConfigError(f"--user {user}: there are {len(people)}, numbered from 1.")
        sequences = leave_one_out(folder.ratings)
        watched = (sequences.items[sequences.users == user - 1] - 1).tolist()
        person |= people.slice(user - 1, 1).to_pylist()[0]
    else:
        watched = [film_of(title, titles) for title in films.split(";") if title.strip()]
    person["history"] = items.take(watched).to_pylist()
    checkpoint = Path(index) / "model.ckpt"
    vectors = load_file(Path(index) / "films.safetensors")["vectors"]
    best, scores = recommend(
        load_model(checkpoint), load_columns(checkpoint), vectors, person, watched, k
    )
    print(f"After {'; '.join(titles[film] for film in watched[-3:]) or 'nothing'}:")
    text = Table()
    for heading in ("film", "score"):
        text.add_column(heading)
    for film, score in zip(best, scores, strict=True):
        text.add_row(titles[film], f"{score:.3f}")
    Console(markup=False, highlight=False).print(text)


def load_model(checkpoint: Path) -> TwoTower:
    """Return the trained model on the CPU, unsharded, whatever number of ranks has trained it."""
    if not checkpoint.exists():
        raise ConfigError(f"{checkpoint}: there is no such checkpoint.")
    return TwoTower.load_from_checkpoint(checkpoint, map_location="cpu").eval()


def load_columns(checkpoint: Path) -> Columns:
    """Return the mapping that the model was trained with."""
    saved = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
    return Columns.from_plain(saved["NextFilmDataModule"]["columns"])


@torch.no_grad()
def film_vectors(model: TwoTower, columns: Columns, films: pa.Table) -> Tensor:
    """Return the vectors of films, (num_films, out)."""
    return model.encode_films(columns.select(FILM)(films)["ids"])


@torch.no_grad()
def recommend(
    model: TwoTower,
    columns: Columns,
    vectors: Tensor,
    person: dict[str, Any],
    watched: list[int],
    k: int,
) -> tuple[list[int], list[float]]:
    """Return the positions and scores of the k best films that were not watched yet.

    vectors: (num_films, out). person: a value for each column of PERSON; None is unknown. watched:
    positions.
    """
    row = {name: [person[name]] for name in PERSON}
    scores = vectors @ model.encode_people(columns.select(PERSON)(row)["ids"])[0]
    scores[watched] = float("-inf")
    best = scores.topk(min(k, len(scores) - len(set(watched))))
    return best.indices.tolist(), best.values.tolist()


def titles_of(folder: Folder) -> list[str]:
    """Return title and year of each film."""
    films = folder.item_columns
    pairs = zip(films["title"], films["release_year"], strict=True)
    return [f"{title} ({year})" if year else title for title, year in pairs]


def film_of(title: str, titles: list[str]) -> int:
    """Return the position of a title. Raises DataError: there is none, with near ones."""
    film_by_title = {text.casefold(): film for film, text in enumerate(titles)}
    if (film := film_by_title.get(title.strip().casefold())) is None:
        raise DataError(
            "there is no film "
            f"{title.strip()!r}{did_you_mean(title.strip().casefold(), film_by_title)}"
        )
    return film


if __name__ == "__main__":
    try:
        auto_cli([export, query])
    except (DistRecError, OSError) as error:
        sys.exit(f"serve: {error}")
