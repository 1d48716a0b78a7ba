"""Which embeddings' weights a module reads, as far as its source shows."""

from typing import Any

from torch import Tensor, nn

from lightning_distrec.strategies.tables.weight_reads import weight_reads


class Codes(nn.Embedding):
    """Reads its own weight."""

    def similar(self, code: Tensor) -> Tensor:
        return code @ self.weight.T


class Features(nn.Module):
    """Embeddings of features by name, in a list, and as attributes; some weights are read, some
    only looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.item = "item"
        self.named = nn.ModuleDict({"item": nn.Embedding(9, 8), "user": nn.Embedding(9, 8)})
        self.numbered = nn.ModuleList([nn.Embedding(9, 8), nn.Embedding(9, 8)])
        self.mask, self.codes, self.looked_up = nn.Embedding(1, 8), Codes(9, 8), nn.Embedding(9, 8)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.looked_up.weight)

    @property
    def user_weight(self) -> Tensor:
        return self.named["user"].weight

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.looked_up(ids) + self.looked_up.weight.norm()
        return rows @ self.numbered[len(self.item)].weight.T + self.mask.weight.expand(9, 8)


def scores(rows: Tensor, model: nn.Module) -> Tensor:
    """Read a weight outside of the class."""
    return rows @ model.helped.weight.T


class Renamed(nn.Module):
    """Reads weights by other names than `self`."""

    def __init__(self) -> None:
        super().__init__()
        self.named, self.helped, self.nested, self.by_lambda, self.unread = (
            nn.Embedding(9, 8) for _ in range(5)
        )

    def forward(s, ids: Tensor) -> Tensor:  # noqa: N805
        return s.unread(ids) @ s.named.weight.T

    def by_functions(self, ids: Tensor) -> Tensor:
        model = self

        def read(part: Any) -> Tensor:
            return part.nested.weight.T

        transposed = lambda model: model.by_lambda.weight.T  # noqa: E731
        return scores(self.unread(ids), self) @ read(model) + transposed(self)

    def of_batch(self, unread: Any, batch: Any) -> Tensor:
        return batch.unread.weight * batch.weight


def _reads(model: nn.Module) -> dict[str, str]:
    actual = weight_reads(model)
    return {name: actual[id(child)] for name, child in model.named_modules() if id(child) in actual}


def test_weights_that_are_read_are_found_by_name_by_place_and_in_properties() -> None:
    expected = {
        "numbered.0": "Features.forward",
        "numbered.1": "Features.forward",
        "mask": "Features.forward",
    }
    expected |= {"codes": "Codes.similar", "named.user": "Features.user_weight"}
    assert _reads(Features()) == expected


def test_weights_that_are_read_under_other_names_and_in_functions_are_found() -> None:
    expected = {
        "named": "Renamed.forward",
        **dict.fromkeys(["helped", "nested", "by_lambda"], "Renamed.by_functions"),
    }
    assert _reads(Renamed()) == expected
