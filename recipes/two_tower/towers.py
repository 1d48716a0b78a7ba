"""The two networks: each turns the ids of a person, or of a film, into a vector of length 1."""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn import functional
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType


def build_tables(rows: Mapping[str, int], dim: int) -> EmbeddingBagCollection:
    """Return one table per feature; the rows of a bag are averaged."""
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=name,
                num_embeddings=count,
                embedding_dim=dim,
                feature_names=[name],
                pooling=PoolingType.MEAN,
            )
            for name, count in rows.items()
        ]
    )


class Tower(nn.Module):
    """Tables and two layers."""

    def __init__(self, rows: Mapping[str, int], dim: int, hidden: int, out: int) -> None:
        """rows: of each feature's table. dim: numbers per embedding. out: numbers per vector."""
        super().__init__()
        self.tables = build_tables(rows, dim)
        self.layers = nn.Sequential(
            nn.Linear(len(rows) * dim, hidden), nn.ReLU(), nn.Linear(hidden, out)
        )

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        """Return (batch_size, out)."""
        return functional.normalize(self.layers(self.tables(ids).values()), dim=1)
