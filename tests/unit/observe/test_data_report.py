"""The table of what ranks read has whole names, in an output of 80 columns, too."""

from io import StringIO

from rich.console import Console

from lightning_distrec.observe.data_report import _table


def test_long_names_of_features_are_not_cut() -> None:
    names = [f"a_feature_with_a_name_of_40_characters_{number}" for number in range(9)]
    counts = {"device": "cuda:0", "batch_size": 65_536, "samples": None}
    rows = [counts | {"rank": rank, "ids": dict.fromkeys(names, [0, 9_999])} for rank in range(2)]
    rows.append(counts | {"rank": 2, "ids": {}})
    output = StringIO()
    Console(width=80, file=output).print(_table(rows, 1))
    text = output.getvalue()
    words = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
    cells = [cells for cells in words if len(cells) == 6]
    assert "".join(row[4] for row in cells) == 2 * "".join(names[:8])
    assert [row[0] for row in cells if row[0]] == ["0", "1", "2"]
    assert "1 more features are logged" in text
