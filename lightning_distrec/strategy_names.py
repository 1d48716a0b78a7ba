"""The names by which a Trainer is given a strategy of ours. Nothing here loads torch."""

STRATEGIES = {
    "torchrec_sharded": (
        "TorchRecShardedStrategy",
        "Embedding tables sharded over the ranks by TorchRec, other layers as under DDP",
    ),
    "ddp_tuned": ("TunedDDPStrategy", "DDP tuned to the module, with crash-safe checkpoints"),
    "fsdp_tuned": ("TunedFSDPStrategy", "Parameters, gradients and optimizer state sharded over the ranks by FSDP2"),
    "pipeline_parallel": ("PipelineParallelStrategy", "A chain of blocks split into stages over the ranks"),
}
"""Name -> class, and what it does."""


def class_path(name: str) -> str:
    """Return the class_path by which a YAML gives the strategy options; "" for a name that is not ours."""
    return f"lightning_distrec.{STRATEGIES[name][0]}" if name in STRATEGIES else ""


def short_name(path: str) -> str:
    """Return the name of a strategy of ours that is given by name or class_path; others as they are."""
    names = {class_name: name for name, (class_name, _) in STRATEGIES.items()}
    return names.get(path.rpartition(".")[2], path)
