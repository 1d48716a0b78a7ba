"""From columns of files to batches of ids and numbers, the same in training and in serving."""

from lightning_distrec.data.columns import Columns, FeatureTable
from lightning_distrec.data.data_module import ColumnData
from lightning_distrec.data.features import Bucketize, Cross, Hash, Number, Vocabulary

__all__ = ["Bucketize", "ColumnData", "Columns", "Cross", "FeatureTable", "Hash", "Number", "Vocabulary"]
