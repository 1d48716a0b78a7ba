"""What the two towers see: the columns of a person and of a film, and how each becomes rows of a
table."""

from lightning_distrec.data import Bucketize, Columns, Vocabulary
from lightning_distrec.data.features import Feature
from recipes.movielens.columns import AGE_EDGES, YEAR_EDGES

# Sizes are fixed, with room to spare, so that a checkpoint does not depend on the folder it was
# trained on.
PERSON: dict[str, Feature] = {
    "user": Vocabulary(rows=16_384),
    "history": Vocabulary(rows=8_192, max_length=20),
    "age": Bucketize(boundaries=AGE_EDGES),
    "gender": Vocabulary(rows=8),
    "occupation": Vocabulary(rows=64),
}
FILM: dict[str, Feature] = {
    "item": Vocabulary(rows=8_192),
    "genres": Vocabulary(rows=64, max_length=32, separator=" "),
    "year": Bucketize(boundaries=YEAR_EDGES),
}


def table_rows(features: dict[str, Feature]) -> dict[str, int]:
    """Return the rows of each feature's table."""
    return {name: table.rows for name, table in Columns(features).tables.items()}
