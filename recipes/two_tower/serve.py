"""Makes an index of all films from a checkpoint, and answers queries from it. One process, no ranks.

    python -m recipes.two_tower.serve export outputs/two_tower/version_0/checkpoints/best.ckpt index
    python -m recipes.two_tower.serve query index --user 42
    python -m recipes.two_tower.serve query index --films "Toy Story (1995); Star Wars (1977)"

The index is a folder: films.safetensors has the vectors, row k that of film k + 1; titles.txt their titles; films.faiss
the same vectors for faiss, where that is installed; model.ckpt the checkpoint, whose tower of people answers.
"""

import importlib.util
import shutil
import sys
from pathlib import Path

import torch
from jsonargparse import auto_cli
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightning_distrec.errors import ConfigError, DataError, DistRecError, did_you_mean
from recipes.movielens.folder import read_folder
from recipes.movielens.sequences import leave_one_out
from recipes.two_tower.features import Catalogue, build_catalogue
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
    catalogue = build_catalogue(read_folder(Path(data_dir)))
    vectors = film_vectors(load_model(Path(checkpoint)), catalogue)
    folder.mkdir(parents=True)
    save_file({"vectors": vectors}, folder / "films.safetensors")
    (folder / "titles.txt").write_text("\n".join(catalogue.titles[1:]) + "\n", encoding="utf-8")
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
        user: a person of the data, from 1: their films so far are taken, and not recommended again. 0: somebody else.
        films: titles that somebody else has watched, the latest last, separated by ";".
        k: how many films to print.
        data_dir: the folder that the index was made with.
    """
    folder = read_folder(Path(data_dir))
    catalogue = build_catalogue(folder)
    num_users = len(folder.user_columns["age"])
    if user:
        if not 1 <= user <= num_users:
            raise ConfigError(f"--user {user}: there are {num_users}, numbered from 1.")
        sequences = leave_one_out(folder.ratings)
        watched = sequences.items[sequences.users == user - 1].tolist()
    else:
        watched = [film_of(title, catalogue) for title in films.split(";") if title.strip()]
    model = load_model(Path(index) / "model.ckpt")
    vectors = load_file(Path(index) / "films.safetensors")["vectors"]
    best, scores = recommend(model, catalogue, vectors, user, watched, k)
    print(f"After {'; '.join(catalogue.titles[film] for film in watched[-3:]) or 'nothing'}:")
    text = Table()
    for heading in ("film", "score"):
        text.add_column(heading)
    for film, score in zip(best, scores, strict=True):
        text.add_row(catalogue.titles[film], f"{score:.3f}")
    Console(markup=False, highlight=False).print(text)


def load_model(checkpoint: Path) -> TwoTower:
    """Return the trained model on the CPU, unsharded, whatever number of ranks has trained it."""
    if not checkpoint.exists():
        raise ConfigError(f"{checkpoint}: there is no such checkpoint.")
    return TwoTower.load_from_checkpoint(checkpoint, map_location="cpu").eval()


@torch.no_grad()
def film_vectors(model: TwoTower, catalogue: Catalogue) -> Tensor:
    """Return the vectors of films 1 to num_films, (num_films, out)."""
    return model.encode_films(catalogue.film_batch(1 + torch.arange(catalogue.num_films)))


@torch.no_grad()
def recommend(
    model: TwoTower, catalogue: Catalogue, vectors: Tensor, user: int, watched: list[int], k: int, history: int = 20
) -> tuple[list[int], list[float]]:
    """Return the ids and scores of the k best films that were not watched yet.

    vectors: (num_films, out). user: 0 for somebody unknown. watched: ids, the latest last; the last `history` count.
    """
    latest = torch.tensor([watched[-history:] or [0]])
    person = model.encode_people(catalogue.person_batch(torch.tensor([user]), latest))[0]
    scores = vectors @ person
    scores[torch.tensor(watched, dtype=torch.int64) - 1] = float("-inf")
    best = scores.topk(min(k, len(scores) - len(set(watched))))
    return (1 + best.indices).tolist(), best.values.tolist()


def film_of(title: str, catalogue: Catalogue) -> int:
    """Return the id of a title. Raises DataError: there is none, with near ones."""
    film_by_title = {text.casefold(): film for film, text in enumerate(catalogue.titles)}
    if (film := film_by_title.get(title.strip().casefold(), 0)) == 0:
        raise DataError(f"there is no film {title.strip()!r}{did_you_mean(title.strip().casefold(), film_by_title)}")
    return film


if __name__ == "__main__":
    try:
        auto_cli([export, query])
    except (DistRecError, OSError) as error:
        sys.exit(f"serve: {error}")
