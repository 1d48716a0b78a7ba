"""The first batches of a YAML's data, for what they look up in tables; nothing is trained."""

from itertools import islice
from typing import Any

from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_distrec.errors import ConfigError
from lightning_distrec.pipeline.peek import first_batches, loaders_in, why_not
from lightning_distrec.sharding.planning.id_counts import IdStatistics


def look_at_data(module: Any, data: Any, num_batches: int) -> IdStatistics:
    """Return what the first batches of each training dataloader look up, as one rank would draw them.

    module, data: as the YAML describes them; hooks run as `fit` runs them on one rank. What a module computes of a
    batch is seen where it has `sparse_inputs`. Raises ConfigError: there is no data, or it fails.
    """
    found = IdStatistics()
    declare = getattr(module, "sparse_inputs", None)
    try:
        for loader in loaders_in(_loaders(module, data)):
            batches = first_batches(loader, num_batches) if not why_not(loader) else islice(iter(loader), num_batches)
            for batch in batches:
                found.look_at(batch, *([] if declare is None else [declare(batch)]))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"--from-data: the data cannot be read ({type(error).__name__}: {' '.join(str(error).split())[:200]}). "
            "It is built as for fit, but without a Trainer; plan without --from-data, or set pooling_factor."
        ) from error
    if not found.num_batches:
        raise ConfigError("--from-data: the training dataloader has no batch.")
    return found


def _loaders(module: Any, data: Any) -> Any:
    if data is not None:
        data.prepare_data()
        data.setup("fit")
        return data.train_dataloader()
    if not is_overridden("train_dataloader", module):
        raise ConfigError("--from-data: the YAML has no data, and its module no train_dataloader.")
    return module.train_dataloader()
