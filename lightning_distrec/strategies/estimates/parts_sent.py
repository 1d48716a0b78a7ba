"""What the ranks of a tensor-parallel group send each other in a step, so that each computes a part of some layers."""

from collections.abc import Mapping

from lightning_distrec.strategies.estimates.block_profile import BlockProfile


def parts_sent(split_layers: Mapping[str, str], profile: BlockProfile, size: int) -> float:
    """Return the bytes that a rank sends, by rings.

    split_layers: path -> style. size: ranks of a group, which compute the batch of the profile together.
    A rowwise layer sums its outputs over the ranks, a colwise one the gradients of its inputs, where these have any; of
    the same input, layers sum theirs once.
    """
    reduced = gathered = 0
    of_inputs: dict[int, int] = {}
    for path, style in split_layers.items():
        if style == "rowwise":
            reduced += profile.output_bytes.get(path, 0)
        elif path in profile.learns_from:
            of_inputs[profile.learns_from[path]] = profile.input_bytes[path]
        if style == "colwise_gather_output":
            gathered += profile.output_bytes.get(path, 0)
    share = (size - 1) / size
    return share * (2 * (reduced + sum(of_inputs.values())) + gathered)
