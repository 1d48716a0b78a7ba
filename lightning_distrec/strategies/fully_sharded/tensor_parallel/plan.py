"""Which layers are split, and how: by the plan's paths, or found in a module; refused where it cannot be exact."""

from collections.abc import Iterator
from difflib import get_close_matches
from fnmatch import fnmatch

from torch import nn

from lightning_distrec._compat.tensors import is_compiled
from lightning_distrec.errors import ConfigError, UnsupportedError
from lightning_distrec.strategies.fully_sharded.tensor_parallel.options import TensorParallelOptions

BY_ELEMENT = (nn.ReLU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.Dropout, nn.Identity)
"""What computes each element from itself, so that "auto" splits the layers around it."""
WITH_PAIRS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def planned_layers(module: nn.Module, options: TensorParallelOptions, num_shards: int) -> dict[str, str]:
    """Return path -> style of the layers that are split.

    num_shards: ranks over which each of their shards is sharded again.
    Raises ConfigError: a path is not in the module, or its sizes cannot be divided; UnsupportedError: a layer cannot be
    split exactly.
    """
    found = dict(_pairs(module)) if options.plan == "auto" else _named(module, options.plan)  # type: ignore[arg-type]
    if not found:
        raise ConfigError(
            "tensor_parallel: plan='auto' finds no pair of layers to split: two nn.Linear in an nn.Sequential with an "
            "activation in between, or torch's transformer layers. Name the layers, plan={'path': 'colwise', ...}."
        )
    for path, style in found.items():
        _refuse(module, path, style, options.size, num_shards)
    return found


def _named(module: nn.Module, plan: dict[str, str]) -> dict[str, str]:
    paths = [path for path, _ in module.named_modules() if path]
    styles: dict[str, str] = {}
    for pattern, style in plan.items():
        matching = [path for path in paths if _matches(path, pattern)]
        if not matching:
            near = get_close_matches(pattern, paths, n=3)
            hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise ConfigError(f"tensor_parallel: the module has no layer '{pattern}'.{hint}")
        for path in matching:
            if styles.setdefault(path, style) != style:
                raise ConfigError(f"tensor_parallel: plan has both {styles[path]} and {style} for '{path}'. Keep one.")
    return styles


def _matches(path: str, pattern: str) -> bool:
    """As torch's parallelize_module: name by name, `*` within one."""
    names, patterns = path.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatch, names, patterns))


def _pairs(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(module, WITH_PAIRS):
        yield f"{prefix}linear1", "colwise"
        yield f"{prefix}linear2", "rowwise"
        return
    waiting: str | None = None
    for name, child in module.named_children():
        if type(module) is nn.Sequential and type(child) is nn.Linear:
            if waiting is None:
                waiting = f"{prefix}{name}"
            else:
                yield waiting, "colwise"
                yield f"{prefix}{name}", "rowwise"
                waiting = None
        elif not isinstance(child, BY_ELEMENT):
            waiting = None
        yield from _pairs(child, f"{prefix}{name}.")


def _refuse(module: nn.Module, path: str, style: str, size: int, num_shards: int) -> None:
    layer, name = module.get_submodule(path), f"tensor_parallel: '{path}'"
    above = [module.get_submodule(".".join(path.split(".")[:i])) for i in range(path.count(".") + 1)]
    if any(isinstance(parent, nn.MultiheadAttention) for parent in above):
        raise UnsupportedError(
            f"{name} is in an nn.MultiheadAttention, which uses its layers' weights without calling the layers. Leave "
            "it out, or write attention with an nn.Linear each for queries, keys, values and output."
        )
    if not any(isinstance(layer, kind) and type(layer).forward is kind.forward for kind in (nn.Linear, nn.Embedding)):
        raise UnsupportedError(
            f"{name} is a {type(layer).__name__}, and torch splits nn.Linear and nn.Embedding. Name those in it."
        )
    if not {of for of, _ in layer.named_parameters()} <= {"weight", "bias"}:
        raise UnsupportedError(
            f"{name} computes its weight from others (a parametrization, as weight_norm). Leave it out, or remove that."
        )
    if isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.scale_grad_by_freq):
        raise UnsupportedError(
            f"{name} has max_norm or scale_grad_by_freq, which look at all rows. Leave it out, or remove them."
        )
    if any(is_compiled(part) for part in [*above, layer]):
        raise UnsupportedError(
            f"{name} is in a module that torch.compile has compiled, which was not tried with layers that are split. "
            "Remove torch.compile, or tensor_parallel."
        )
    others = {id(p): other for other, m in module.named_modules() for p in m.parameters(False) if m is not layer}
    for parameter in layer.parameters(False):
        if id(parameter) in others:
            raise UnsupportedError(
                f"{name} shares a weight with '{others[id(parameter)]}' (tied weights), and splitting would part them. "
                "Leave both out of plan."
            )
    if style == "colwise" and not any(path.startswith(f"{outer}.") for outer in called_parts(module)):
        raise UnsupportedError(
            f"{name} is called by the LightningModule itself, whose steps would get its output split. Use "
            "colwise_gather_output for it, or put it and the rowwise layer into a module of their own (nn.Sequential)."
        )
    _refuse_sizes(name, layer, style, size, num_shards)


def _refuse_sizes(name: str, layer: nn.Module, style: str, size: int, num_shards: int) -> None:
    rows, columns = (int(length) for length in layer.weight.shape)  # type: ignore[union-attr, operator]
    by_rows = (style == "rowwise") == isinstance(layer, nn.Embedding)
    length, parts = (rows, size * num_shards) if by_rows else (columns, size)
    names = ("rows", "columns") if isinstance(layer, nn.Embedding) else ("output features", "input features")
    if length % parts:
        ranks = f"{size} ranks" + (f", and over {num_shards} more by FSDP" if by_rows and num_shards > 1 else "")
        raise ConfigError(
            f"{name} has {length} {names[not by_rows]}, which cannot be divided evenly over {ranks}. Use another size, "
            "or leave it out of plan."
        )


def can_be_called(module: nn.Module) -> bool:
    """Return whether a module has a forward."""
    return type(module).forward is not nn.Module.forward


def called_parts(module: nn.Module) -> dict[str, nn.Module]:
    """Return path -> the outermost submodules that are called, those in an nn.ModuleList for example."""
    found: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        if can_be_called(child):
            found[name] = child
        else:
            found |= {f"{name}.{path}": part for path, part in called_parts(child).items()}
    return found
