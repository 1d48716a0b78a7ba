"""Finds the embeddings whose weight the module's own code reads, by its source: tied output layers,
for example."""

import ast
import inspect
import textwrap
from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import nn

from lightning_distrec.sharding.planning.table_options import TableOptions
from lightning_distrec.sharding.tables import Table
from lightning_distrec.sharding.weights.shard_operations import words

HARMLESS = words("""
    data grad requires_grad requires_grad_ shape size numel dim ndim dtype device
""")
SUMS = words("pow square abs norm sum mean")
"""What is exact on a shard, or over all ranks, without the full weight: see
sharding/weights/shard_weight.py."""
ANY = "*"
"""In the place of a name: any child, of a ModuleDict or ModuleList."""
BEFORE_SHARDING = words("""
    setup configure_model configure_optimizers reset_parameters prepare_data
""")
LIBRARIES = words("torch torchrec lightning builtins lightning_distrec")


def weight_reads(root: nn.Module) -> dict[int, str]:
    """Return id of an embedding -> where its weight is read, such as "SASRec.forward", for what the
    source shows."""
    reads: dict[int, str] = {}
    for module in root.modules():
        for kind in type(module).__mro__:
            # Their code reads weights by the way (reset_parameters, extra_repr), and knows how to.
            if _is_of_library(kind):
                continue
            for method, chain in _find_reads(kind):
                for read in _resolve(module, chain):
                    if isinstance(read, (nn.Embedding, nn.EmbeddingBag)):
                        reads.setdefault(id(read), f"{kind.__name__}.{method}")
    return reads


def _is_of_library(member: Any) -> bool:
    return member.__module__.split(".")[0] in LIBRARIES


@cache
def _find_reads(kind: type) -> list[tuple[str, tuple[str, ...]]]:
    """Return the methods of a class that read `self.<names>.weight`, with the names."""
    reads = []
    for name, member in vars(kind).items():
        method: Any = member.fget if isinstance(member, property) else member
        function = inspect.unwrap(method) if callable(method) else None
        if name in BEFORE_SHARDING or "init" in name or not inspect.isfunction(function):
            continue
        code = function.__code__
        arguments = code.co_varnames[1 : code.co_argcount]
        reads += [(name, chain) for chain in _chains_in(function, dict.fromkeys(arguments, ("",)))]
    return reads


def _chains_in(
    function: Any, arguments: dict[str, tuple[str, ...]], callers: tuple[Any, ...] = ()
) -> list[tuple[str, ...]]:
    """Return the chains before each read of `.weight` in a function, and in functions of its module
    that it calls."""
    try:
        # By source, since a trial run would have side effects, and reads behind a branch would be
        # missed.
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # made at run time: there the read itself raises
        return []
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    variables = _variables(tree, arguments)
    chains = []
    for node in ast.walk(tree):
        chain = _chain(node, variables)
        if chain and chain[-1] == "weight" and not _is_harmless(node, parents):
            chains.append(chain[:-1])
        helper = function.__globals__.get(node.id) if isinstance(node, ast.Name) else None
        if inspect.isfunction(helper) and helper not in callers and not _is_of_library(helper):
            chains += _chains_in(helper, {}, (*callers, helper))
    return chains


def _variables(tree: ast.AST, variables: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return the local variables that are children of a module: `table = self.items`, `for table in
    self.all`.

    Other names may stand for the module itself, as `self` does. variables: those that do not.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            chain = _chain(node.value, variables)
            if chain:
                variables[node.targets[0].id] = chain
        elif isinstance(node, (ast.For, ast.comprehension)) and isinstance(node.target, ast.Name):
            values = node.iter
            # of a ModuleDict
            if isinstance(values, ast.Call) and isinstance(values.func, ast.Attribute):
                values = values.func.value
            chain = _chain(values, variables)
            if chain:
                variables[node.target.id] = (*chain, ANY)
    return variables


def _chain(node: ast.AST, variables: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return ("tables", ANY, "weight") for `self.tables[i].weight`, () for what is none."""
    names: list[str] = []
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        if isinstance(node, ast.Attribute):
            names.append(node.attr)
        else:
            names.append(str(node.slice.value) if isinstance(node.slice, ast.Constant) else ANY)
        node = node.value
    return (*variables.get(node.id, ()), *reversed(names)) if isinstance(node, ast.Name) else ()


def _is_harmless(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    parent = parents[node]
    if isinstance(parent, ast.Attribute):
        return parent.attr in HARMLESS | SUMS
    if isinstance(parent, ast.Call) and isinstance(parent.func, ast.Attribute):
        called = ast.unparse(parent.func)
        return (
            "init" in called
            or parent.func.attr in SUMS
            or called in ("torch.linalg.vector_norm", "sharded_l2")
        )
    return False


def _resolve(module: nn.Module, chain: tuple[str, ...]) -> list[nn.Module]:
    """Return the submodules that the names may stand for."""
    modules = [module]
    for name in chain:
        named = [pair for parent in modules for pair in parent.named_children()]
        modules = [child for key, child in named if name in (key, ANY)]
    return modules


def read_tables(
    module: nn.Module, tables: list[Table], options: Mapping[str, TableOptions]
) -> dict[str, str]:
    """Return full name -> where the module reads the weight, of plain tables that have not
    gathered_weight=True."""
    reads = weight_reads(module) if any(table.plain is not None for table in tables) else {}
    read = {}
    for table in tables:
        method = reads.get(id(table.original))
        if method is not None and not options[table.full_name].gathered_weight:
            read[table.full_name] = method
    return read
