"""What a strategy has once its ranks have met, in this run and in later ones."""

from dataclasses import dataclass

from lightning.pytorch import LightningModule

from lightning_distrec.checkpoint.options import CheckpointOptions, InMemoryOptions
from lightning_distrec.cluster.consensus import (
    Consensus,
    consensus_of_all_ranks,
    consensus_of_checkpoints,
    consensus_of_copies,
)
from lightning_distrec.strategies.checkpoints.checkpointing import Checkpointing
from lightning_distrec.strategies.checkpoints.in_memory.copies import Copies


@dataclass(frozen=True, kw_only=True)
class Session:
    """Made by `setup_environment`, because hooks outside of a run need it too: `trainer.save_checkpoint` after fit."""

    consensus: Consensus
    """For everything that is agreed on now and then."""
    step_consensus: Consensus
    """For what is exchanged once in every step; see `consensus_of_all_ranks` for why it has a group of its own."""
    checkpoints: Checkpointing


def start_session(
    module: LightningModule, options: CheckpointOptions, timeout_seconds: float, node: int, earlier: Session | None
) -> Session:
    """Collective, once the ranks have met. Return the earlier session while its process groups are still there.

    node: the number of this node.
    """
    consensus, step_consensus = consensus_of_all_ranks(timeout_seconds)
    if earlier is not None and earlier.consensus is consensus:
        return earlier
    copies = _copies(options.in_memory, consensus, timeout_seconds, node) if options.in_memory else None
    checkpoints = Checkpointing(options, consensus, consensus_of_checkpoints(timeout_seconds), module, copies)
    return Session(consensus=consensus, step_consensus=step_consensus, checkpoints=checkpoints)


def _copies(options: InMemoryOptions, consensus: Consensus, timeout_seconds: float, node: int) -> Copies:
    """Collective. Return what copies the state to memory. Raises ConfigError on every rank: nodes are unequal."""
    of_ranks = consensus.all_gather(node)
    nodes = [tuple(r for r, each in enumerate(of_ranks) if each == number) for number in dict.fromkeys(of_ranks)]
    on_node = next(list(ranks) for ranks in nodes if consensus.rank in ranks)
    of_thread, of_node = consensus_of_copies(timeout_seconds, on_node)
    return Copies(options, consensus, of_thread, of_node, nodes)
