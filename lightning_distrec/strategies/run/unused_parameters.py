"""DDP's error about layers that a step did not use, with the option that allows them."""

import re


def name_unused_option(exception: BaseException, strategy: str) -> None:
    """Let DDP's error about parameters without a gradient name the option of `strategy`; other errors stay.

    Lightning would name its own DDPStrategy, which shards nothing.
    """
    exception.args = tuple(_reworded(text, strategy) if isinstance(text, str) else text for text in exception.args)


def _reworded(text: str, strategy: str) -> str:
    if "Expected to have finished reduction in the prior iteration" not in text:
        return text
    indices = re.search(r"Parameter indices which did not receive grad for rank \d+: [\d ]+", text)
    return (
        "the loss of the step before did not depend on some parameters of the module, so that their gradients were "
        f"not averaged over the ranks. If that is intended, set {strategy}(find_unused_parameters=True)."
        f"{f' {indices[0].strip()}.' if indices else ''}"
    )
