"""What a strategy has once its ranks have met, in this run and in later ones."""

from dataclasses import dataclass

from lightning.pytorch import LightningModule

from lightning_distrec.checkpoint.options import CheckpointOptions
from lightning_distrec.cluster.consensus import Consensus, job_consensus
from lightning_distrec.strategies.checkpoints.checkpointing import Checkpointing


@dataclass(frozen=True, kw_only=True)
class Session:
    """Made by `setup_environment`, because hooks outside of a run need it too: `trainer.save_checkpoint` after fit."""

    consensus: Consensus
    """For everything that is agreed on now and then."""
    step_consensus: Consensus
    """For what is exchanged once in every step; see `JobConsensus` for why it has a group of its own."""
    checkpoints: Checkpointing


def start_session(
    module: LightningModule, options: CheckpointOptions, timeout_seconds: float, earlier: Session | None
) -> Session:
    """Collective, once the ranks have met. Return the earlier session while its process groups are still there."""
    job = job_consensus(timeout_seconds)
    if earlier is not None and earlier.consensus is job.general:
        return earlier
    checkpoints = Checkpointing(options, job.general, job.checkpoints, module)
    return Session(consensus=job.general, step_consensus=job.steps, checkpoints=checkpoints)
