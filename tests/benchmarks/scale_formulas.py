"""What docs/scale.md reckons on paper. The page prints these expressions; a test evaluates them
against estimates."""

from dataclasses import dataclass

from lightning_distrec.sharding.planning.bandwidths import DEFAULTS

INTRA_NODE, CROSS_NODE, DEVICE = (
    DEFAULTS[name] for name in ("intra_node", "cross_node", "device_memory")
)
"""torchrec's bandwidths, bytes a second of one rank."""


@dataclass(frozen=True)
class Formula:
    """Bytes that a rank sends in a step for one table cut this way: the mean over ranks. Python
    expressions.

    R ranks, L on each node, N = R / L nodes, B examples a rank, one feature of p ids an example, D
    columns of 4 bytes, H rows that the ranks share evenly. Rows go forward and as many bytes of
    gradients come back.
    """

    ids: str
    rows: str
    """One way; for data_parallel, gradients of the whole table."""
    ids_across: str
    """Of those, what leaves the node; where N > 1."""
    rows_across: str


FORMULAS = {
    "table_wise": Formula(
        "(R - 1) / R * 4 * B * (1 + p)",
        "(R - 1) / R * 4 * B * D",
        "(R - L) / R * 4 * B * (1 + p)",
        "(R - L) / R * 4 * B * D",
    ),
    "row_wise": Formula(
        "(R - 1) * 4 * B * (1 + p / R)",
        "(R - 1) * 4 * B * D",
        "(R - L) * 4 * B * (1 + p / R)",
        "(R - 1) / L * 4 * B * D",
    ),
    "table_row_wise": Formula(
        "(R - 1) / R * 4 * B * (L + p)",
        "((L - 1) + (N - 1) / N) * 4 * B * D",
        "(R - L) / R * 4 * B * (L + p)",
        "(N - 1) / N * 4 * B * D",
    ),
    "data_parallel": Formula(
        "0", "2 * (R - 1) / R * 4 * H * D", "0", "2 * (R - 1) / R * 4 * H * D / L"
    ),
}


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """What the letters of a formula stand for."""

    R: int
    L: int
    B: int = 512
    D: int = 128
    p: float = 10.0
    H: int = 1_000_000

    def of(self, expression: str) -> float:
        """Return the value of an expression of `FORMULAS`."""
        letters = {
            "R": self.R,
            "L": self.L,
            "N": self.R / self.L,
            "B": self.B,
            "D": self.D,
            "p": self.p,
            "H": self.H,
        }
        return float(eval(expression, {"__builtins__": {}}, letters))  # ours, from this file

    def sent(self, cut: str) -> float:
        """Return the bytes of all kinds."""
        formula = FORMULAS[cut]
        return self.of(formula.ids) + self._ways(cut) * self.of(formula.rows)

    def sent_across(self, cut: str) -> float:
        """Return those that leave the node."""
        formula = FORMULAS[cut]
        if self.R == self.L:
            return 0.0
        return self.of(formula.ids_across) + self._ways(cut) * self.of(formula.rows_across)

    @staticmethod
    def _ways(cut: str) -> int:
        return 1 if cut == "data_parallel" else 2


def most_ids_for_links(num_ranks: int, ranks_on_node: int, dim: int) -> float:
    """Return the ids per example up to which links between nodes decide about whole tables;
    infinite where always.

    Then what crosses nodes takes longer than what stays on one and the lookups together: forward
    reads p rows, backward reads and writes them, each 4 * dim bytes of the GPU's memory.
    """
    away, near = (num_ranks - ranks_on_node) / num_ranks, (ranks_on_node - 1) / num_ranks
    per_byte = away / CROSS_NODE - near / INTRA_NODE
    per_id = 12 * dim / DEVICE - 4 * per_byte
    return max(0.0, per_byte * (4 + 8 * dim) / per_id) if per_id > 0 else float("inf")


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """Groups of ranks that each hold all tables, uncut, against all ranks that hold them once."""

    num_ranks: int
    group: int
    """Ranks that hold all tables together."""
    ranks_on_node: int = 8
    num_tables: int = 1000
    table_bytes: float = 10e12
    batch_size: int = 512
    dim: int = 128
    ids: float = 10.0
    message_seconds: float = 5e-6
    """What an exchange costs for each rank that takes part, however little it is sent: assumed, not
    measured."""

    @property
    def copies(self) -> int:
        """Groups that there are."""
        return self.num_ranks // self.group

    @property
    def bytes_per_rank(self) -> float:
        """Rows that a rank holds."""
        return self.table_bytes / self.group

    @property
    def exchanged_bytes(self) -> float:
        """Ids, rows and gradients of a rank, wherever they go."""
        return self.num_tables * self.batch_size * (4 * (1 + self.ids) + 8 * self.dim)

    @property
    def saved_seconds(self) -> float:
        """What smaller groups save in a step where the copies of a shard are on one node:
        messages."""
        return 3 * self.message_seconds * (self.num_ranks - self.group)

    @property
    def saved_byte_seconds(self) -> float:
        """What crosses no node any more where a group's ranks follow one another instead."""
        fewer = self.ranks_on_node / self.group - self.ranks_on_node / self.num_ranks
        return self.exchanged_bytes * fewer / CROSS_NODE

    @property
    def average_seconds(self) -> float:
        """What one average of all weights over the copies takes, in a ring: within nodes if they
        have room for it."""
        sent = 2 * (self.copies - 1) / self.copies * self.bytes_per_rank
        return sent / (INTRA_NODE if self.copies <= self.ranks_on_node else CROSS_NODE)

    @property
    def least_steps(self) -> float:
        """Steps between two averages from which on groups pay."""
        return self.average_seconds / self.saved_seconds if self.copies > 1 else float("inf")

    @property
    def most_distinct_rows(self) -> float:
        """Distinct rows of a table for an example, up to which averages of touched rows pay within
        nodes."""
        per_row = (
            (self.copies - 1) * self.num_tables * self.batch_size * (4 * self.dim + 8) / INTRA_NODE
        )
        return self.saved_seconds / per_row

    def exchange_seconds(self, grouped: bool) -> float:
        """Return what three exchanges of a step take: bytes that cross nodes, and messages."""
        ranks = self.group if grouped else self.num_ranks
        away = (self.num_ranks - self.ranks_on_node) / self.num_ranks
        return self.exchanged_bytes * away / CROSS_NODE + 3 * self.message_seconds * (ranks - 1)
