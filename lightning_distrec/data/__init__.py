"""From columns of files to batches of ids and numbers, the same in training and in serving."""

from lightning_distrec.errors import require

require("pyarrow", "lightning_distrec.data")  # before the imports below fail without a way out

from lightning_distrec.data.columns import Columns, FeatureTable  # noqa: E402
from lightning_distrec.data.data_module import ColumnData  # noqa: E402
from lightning_distrec.data.features import (  # noqa: E402
    Age,
    Bucketize,
    Cross,
    Hash,
    Number,
    Time,
    Vector,
    Vocabulary,
)

__all__ = [
    "Age",
    "Bucketize",
    "ColumnData",
    "Columns",
    "Cross",
    "FeatureTable",
    "Hash",
    "Number",
    "Time",
    "Vector",
    "Vocabulary",
]
