"""Predictions of columns over ranks are those of one, in the order of the rows, beside columns of
the data."""

from pathlib import Path

import torch
from pyarrow import parquet

from lightning_distrec import PredictionWriter
from tests.support.column_models import FEATURES, ColumnModel, click_data, write_clicks
from tests.support.ranks import run_on_warm_ranks
from tests.support.trainers import make_trainer


def predict(folder: Path) -> None:
    """Write the predictions of 61 rows, of which a rank repeats one where batches have one row
    each."""
    file = str(folder / "clicks.parquet")
    for batch_size, num_workers in ((1, 0), (8, 1)):
        options = {"batch_size": batch_size, "num_workers": num_workers}
        data = click_data(file, predict=[file], keep=["user", "row"], **options)
        trainer = make_trainer(
            callbacks=PredictionWriter(str(folder / f"{batch_size}.out.parquet"))
        )
        trainer.predict(ColumnModel(), data, return_predictions=False)


def test_predictions_over_two_ranks_are_in_the_order_of_the_rows(tmp_path: Path) -> None:
    source = parquet.read_table(write_clicks(tmp_path, 61))
    run_on_warm_ranks(predict, 2, tmp_path)
    data, model = click_data(tmp_path / "clicks.parquet"), ColumnModel()
    data.prepare_data()
    data.setup("predict")
    with torch.no_grad():
        expected = model.predict_step(data.columns(source.select(list(FEATURES))), 0)
    for batch_size in (1, 8):
        written = parquet.read_table(tmp_path / f"{batch_size}.out.parquet").to_pydict()
        assert list(written) == ["index", "prediction", "user", "row"]
        assert written["index"] == list(range(61))
        torch.testing.assert_close(torch.tensor(written["prediction"]), expected)
        assert {name: written[name] for name in ("user", "row")} == source.select([
            "user",
            "row",
        ]).to_pydict()
