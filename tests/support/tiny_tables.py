"""Tables of one to five rows, a gender or a weekday."""

from torch import Tensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from tests.support.click_model import FEATURES, ClickModel


class TinyTables(ClickModel):
    """A click model over six tables of few rows and one of more."""

    def _build(self) -> None:
        sizes = enumerate((1000, 1, 2, 3, 4, 5, 1))
        configs = [
            EmbeddingBagConfig(name=f"t{i}", embedding_dim=8, num_embeddings=n, feature_names=["a"])
            for i, n in sizes
        ]
        self.ebc = EmbeddingBagCollection(tables=configs)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        zeros = batch["ids"] * 0
        features = KeyedJaggedTensor(keys=FEATURES, values=zeros, lengths=batch["lengths"])
        return self.mlp(self.ebc(features).values()).squeeze(-1)
