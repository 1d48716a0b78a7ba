"""What is wrong with a command line of `fit`, as far as it shows without torch, which takes seconds to load."""

import ast
import difflib
import os
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from lightning_distrec.cli.command_line import LIGHTNING_COMMANDS
from lightning_distrec.errors import ConfigError, did_you_mean
from lightning_distrec.registration import class_path

SHARED = ("config", "help", "print_config", "seed_everything", "model", "data", "trainer", "optimizer", "lr_scheduler")
ARGUMENTS = {
    "fit": ("ckpt_path", "weights_only"),
    "validate": ("ckpt_path", "verbose", "weights_only"),
    "test": ("ckpt_path", "verbose", "weights_only"),
    "predict": ("ckpt_path", "out", "columns", "return_predictions", "weights_only"),
}
"""Arguments of the Trainer's methods, and options of ours."""
KEYWORDS = ("best", "last", "hpc", "registry")
"""Values of ckpt_path that are no paths."""
STRATEGY = "--trainer.strategy"
SMALLEST = {
    **dict.fromkeys(("devices", "max_epochs", "max_steps", "num_sanity_val_steps"), -1),
    **dict.fromkeys(("num_nodes", "accumulate_grad_batches", "check_val_every_n_epoch"), 1),
    **dict.fromkeys(("min_epochs", "min_steps", "log_every_n_steps", "gradient_clip_val", "overfit_batches"), 0),
}
"""Arguments of the Trainer -> the smallest number that they can be; -1 is for all, or without end."""
CLASS_KEYS = ("model", "data", "trainer.strategy")


def checked_arguments(args: Sequence[str]) -> tuple[list[str], Namespace]:
    """Return the command line as LightningCLI takes it, and the options that are ours.

    Raises ConfigError: an option, a file or a key is wrong. A line that begins with no command is left as it is.
    """
    options = Namespace(configs=[], classes={}, out=None, columns=[])
    if not args or args[0] not in LIGHTNING_COMMANDS:
        return list(args), options
    command, tokens = args[0], list(args[1:])
    if command == "predict":
        tokens, options.out = _without(tokens, "--out")
        tokens, columns = _without(tokens, "--columns")
        options.columns = [name.strip() for name in (columns or "").split(",") if name.strip()]
    names = [*SHARED, *ARGUMENTS[command]]
    strategy, checkpoint = "", None
    for option, value in _options(tokens):
        _check_option(command, option, names)
        _check_number(f"--{option}={value}", option.removeprefix("trainer."), value)
        if option == "config":
            options.configs.append(value)
            content = _read_config(command, value, names)
            options.classes.update(_classes_in(content))
            strategy = _strategy_name(content) or strategy
            checkpoint = content.get("ckpt_path", checkpoint)
        elif option.removesuffix(".class_path") in CLASS_KEYS:
            options.classes[option.removesuffix(".class_path")] = value
            strategy = value if option == "trainer.strategy" else strategy
        elif option == "ckpt_path":
            checkpoint = value
    check_checkpoint(checkpoint)
    if options.columns and options.out is None:
        raise ConfigError("predict: --columns is for --out FILE.parquet.")
    if (path := class_path(strategy)) != "":
        options.classes["trainer.strategy"] = path
    return [command, *_with_class_path(tokens, path)], options


def _without(tokens: list[str], option: str) -> tuple[list[str], str | None]:
    """Return the tokens without an option, and its value; None where it is not there."""
    for place, token in enumerate(tokens):
        name, equals, value = token.partition("=")
        if name == option:
            if not equals and place + 1 == len(tokens):
                raise ConfigError(f"predict: {option} has no value. {_see('predict')}")
            remaining = tokens[:place] + tokens[place + (1 if equals else 2) :]
            return remaining, value if equals else tokens[place + 1]
    return tokens, None


def _options(tokens: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of each option; the value of one without "=" is the next token, if that is no option."""
    for token, following in pairwise([*tokens, "--"]):
        if token == "--":
            return
        if not token.startswith("-") or _is_number(token):
            continue
        name, equals, value = token.lstrip("-").partition("=")
        name = {"c": "config", "h": "help"}.get(name, name)
        yield name, value if equals else "" if following.startswith("--") else following


def _is_number(token: str) -> bool:
    return token[1:2].isdigit() or token[1:2] == "."


def _check_option(command: str, option: str, names: Sequence[str]) -> None:
    first, _, keys = option.partition(".")
    if first.rstrip("+") not in names:
        raise ConfigError(f"{command}: there is no option --{option}{did_you_mean(first, names)} {_see(command)}")
    argument = keys.partition(".")[0].rstrip("+")
    if first == "trainer" and argument and argument not in ("help", *trainer_arguments()):
        near = did_you_mean(argument, trainer_arguments())
        raise ConfigError(f"{command}: the Trainer has no argument '{argument}' (--{option}){near} {_see(command)}")


def _check_number(setting: str, argument: str, value: Any) -> None:
    try:
        is_too_small = float(value) < SMALLEST.get(argument, float(value))
    except (TypeError, ValueError):  # "auto", a list, ...
        return
    if is_too_small:
        raise ConfigError(f"{setting}: must be at least {SMALLEST[argument]}.")


def _see(command: str) -> str:
    return f"List all: lightning-distrec {command} --help."


@cache
def trainer_arguments() -> tuple[str, ...]:
    """Return the arguments of Lightning's Trainer, read from its source: importing it takes seconds."""
    file = Path(find_spec("lightning").origin).parent / "pytorch/trainer/trainer.py"  # type: ignore[union-attr,arg-type]
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return tuple(
                argument.arg for argument in [*node.args.args, *node.args.kwonlyargs] if argument.arg != "self"
            )
    return ()


def _read_config(command: str, value: str, names: Sequence[str]) -> dict[str, Any]:
    """Return what a YAML file holds for the command. Raises ConfigError: there is none, or it has unknown keys."""
    import yaml

    path = Path(value)
    # jsonargparse takes YAML instead of a file's name, too.
    if not path.is_file() and ("{" in value or "\n" in value):
        return {}
    if not path.is_file():
        _refuse_path("--config", value, "file")
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{value} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, Mapping):
        raise ConfigError(f"{value} holds no settings. Name the model, the data and the trainer: see `recipes list`.")
    if isinstance(content.get(command), Mapping):
        content = content[command]
    for key in content:
        if str(key).partition(".")[0] not in (*names, "fit", "validate", "test", "predict"):
            raise ConfigError(f"{value}: there is no key '{key}'{did_you_mean(str(key), names)}")
    trainer = content.get("trainer")
    for key in trainer if isinstance(trainer, Mapping) else ():
        if key not in trainer_arguments():
            near = did_you_mean(str(key), trainer_arguments())
            raise ConfigError(f"{value}: trainer: there is no key '{key}'{near}")
        _check_number(f"{value}: trainer.{key}={trainer[key]}", key, trainer[key])  # type: ignore[index]
    return dict(content)


def _classes_in(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (key, class_path) of what a file gives by class."""
    for key in CLASS_KEYS:
        value: Any = content
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if isinstance(value, Mapping) and isinstance(value.get("class_path"), str):
            yield key, value["class_path"]


def _strategy_name(content: Mapping[str, Any]) -> str:
    trainer = content.get("trainer")
    strategy = trainer.get("strategy") if isinstance(trainer, Mapping) else None
    return strategy if isinstance(strategy, str) else ""


def _with_class_path(tokens: list[str], path: str) -> list[str]:
    """Let options of a strategy follow its name, where jsonargparse wants its class. path: of that, "" if not ours."""
    places = [place for place, token in enumerate(tokens) if token.startswith(f"{STRATEGY}.")]
    if not path or not places or ".help" in tokens[places[0]]:
        return tokens
    return [*tokens[: places[0]], f"{STRATEGY}={path}", *tokens[places[0] :]]


def check_checkpoint(value: Any) -> None:
    """Raise ConfigError: ckpt_path names no file and no folder."""
    if not isinstance(value, str) or value in ("", "null", "None") or value.partition(":")[0] in KEYWORDS:
        return
    if "://" not in value and not Path(value).exists():
        _refuse_path("ckpt_path", value, "file or folder")


def _refuse_path(option: str, value: str, kind: str) -> NoReturn:
    parent = Path(value).parent
    near = difflib.get_close_matches(Path(value).name, os.listdir(parent) if parent.is_dir() else [], n=1)
    answer = f"; did you mean '{parent / near[0]}'?" if near else f". The working directory is {Path.cwd()}."
    raise ConfigError(f"{option} {value}: there is no such {kind}{answer}")
