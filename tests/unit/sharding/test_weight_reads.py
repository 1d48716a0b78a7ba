"""Which embeddings' weights a module reads, as far as its source shows."""

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
