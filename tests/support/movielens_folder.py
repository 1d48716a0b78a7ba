"""Writes a small made-up folder in the format of the MovieLens recipe, for tests that must not
download."""

import random
from pathlib import Path

GENRES = ("Action", "Comedy", "Drama", "Children's")
JOBS = ("artist", "lawyer")
ZIP_CODES = ("04567", "14567", "V3N4P", "")


def write_movielens_folder(
    path: Path, *, num_users: int = 30, num_items: int = 20, num_events: int = 600, seed: int = 0
) -> Path:
    """Write made.inter, made.user and made.item under `path`, which is made, and return `path`.

    Every user likes one genre (rating 5 there, mostly 2 elsewhere), so there is something to learn.
    Times span some days and many are equal, within a user and between users; lines are not in order
    of time; some values are missing.
    """
    rng = random.Random(seed)
    path.mkdir(parents=True)
    genres = [rng.sample(GENRES, k=rng.randint(1, 2)) for _ in range(num_items)]
    items = [
        f"{item + 1}\tFilm {item}\t{1930 + 4 * item if item else 'V'}\t{' '.join(genres[item])}"
        for item in range(num_items)
    ]
    users = [
        "\t".join([
            str(user + 1),
            str(15 + user) if user else "",
            rng.choice("MF"),
            rng.choice(JOBS),
            rng.choice(ZIP_CODES),
        ])
        for user in range(num_users)
    ]
    taste = [rng.choice(GENRES) for _ in range(num_users)]
    events = []
    for _ in range(num_events):
        user, item = rng.randrange(num_users), rng.randrange(num_items)
        likes = taste[user] in genres[item] or rng.random() < 0.1
        # 60 different times, an hour and a half apart: ties are the rule.
        events.append(
            f"{user + 1}\t{item + 1}\t{5 if likes else 2}\t{880000000 + 5400 * rng.randrange(60)}"
        )
    write_lines(
        path / "made.inter", "user_id:token\titem_id:token\trating:float\ttimestamp:float", events
    )
    write_lines(
        path / "made.user",
        "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token",
        users,
    )
    write_lines(
        path / "made.item",
        "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq",
        items,
    )
    return path


def write_lines(file: Path, header: str, lines: list[str]) -> None:
    """Write a header and lines, each ending in a newline."""
    file.write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")
