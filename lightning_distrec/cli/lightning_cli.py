"""Builds the module of a YAML by LightningCLI, without a Trainer, for `advise`, `plan` and `export`.

What jsonargparse says of a wrong value becomes one sentence that names the file, the key and the nearest name.
"""

import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, TypeVar

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from typing_extensions import override

from lightning_distrec.errors import ConfigError, MissingPackageError, did_you_mean, missing_package
from lightning_distrec.registration import register
from lightning_distrec.versions import find_installed, problem_with

register()  # YAMLs name our strategies


class OneBlockParser(LightningArgumentParser):
    """A parser that raises ConfigError with one sentence in place of jsonargparse's usage and lists of types.

    configs, classes: what `one_sentence` gets.
    """

    def __init__(
        self, *args: Any, configs: Sequence[str] = (), classes: Mapping[str, str] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._configs, self._classes = configs, classes

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        # Parsers that jsonargparse makes for the arguments of a class; it adds the class to what they raise.
        if not self.exit_on_error:
            super().error(message, ex)
        installed = find_installed()
        # A class_path whose module imports torchrec is refused as a wrong value, without what to install.
        if not installed.torchrec or not installed.fbgemms:
            raise MissingPackageError(str(problem_with(installed))) from ex
        raise ConfigError(one_sentence(message, self._configs, self._classes)) from ex


class RecipeBuilder(LightningCLI):
    """Parses what `fit` parses, and builds the module, its data and its callbacks."""

    on_meta = False
    """Whether the module is built on the meta device."""
    datamodule: LightningDataModule | None
    settings: Any
    """The Trainer's arguments, as plain values."""

    def before_instantiate_classes(self) -> None:
        trainer = self.config.fit.trainer
        # A copy, from before the changes below.
        self.settings = SimpleNamespace(**vars(trainer))
        # A logger or a strategy may need packages, GPUs or a launcher that this machine does not have.
        trainer.logger, trainer.strategy = False, "auto"

    def instantiate_classes(self) -> None:
        with torch.device("meta") if self.on_meta else nullcontext():
            super().instantiate_classes()

    def instantiate_trainer(self, **_: Any) -> Any:
        # A Trainer would choose devices and start loggers; LightningCLI calls nothing but its `fit`.
        self.settings.callbacks = self.config_init.fit.trainer.callbacks or []
        return SimpleNamespace(fit=lambda **_: None)


class MetaRecipeBuilder(RecipeBuilder):
    """Builds the module on the meta device, where it takes no memory."""

    on_meta = True


Builder = TypeVar("Builder", bound=RecipeBuilder)


def build_recipe(configs: Sequence[str], builder: type[Builder]) -> Builder:
    """Return a builder that has built what the YAML files describe. Raises ConfigError: they are rejected."""
    arguments = [argument for config in configs for argument in ("--config", config)]
    with warnings.catch_warnings():
        # It warns of arguments next to those of sys.argv, which are another command's here.
        warnings.filterwarnings("ignore", ".*LightningCLI's args parameter")
        return builder(
            subclass_mode_model=True,
            subclass_mode_data=True,
            # Nothing runs that a saved config would describe.
            save_config_callback=None,
            parser_kwargs={"default_env": True},
            parser_class=partial(OneBlockParser, configs=configs),  # type: ignore[arg-type]  # it is only called
            args=["fit", *arguments],
        )


def full_precision_name(precision: Any) -> str:
    """Return the full name of `Trainer(precision=)`, as the Trainer itself resolves it."""
    short = {"32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed", "64": "64-true"}
    return short.get(str(precision or "32-true"), str(precision or "32-true"))


def is_on_gpu(accelerator: Any) -> bool:
    """Return whether `Trainer(accelerator=)` would use GPUs on this machine."""
    if accelerator == "auto":
        return torch.cuda.is_available()
    return accelerator in ("gpu", "cuda")


def count_devices(devices: Any, device: str) -> int:
    """Return the number of devices per node that `Trainer(devices=)` selects. Raises ConfigError: no GPU."""
    if isinstance(devices, list):
        return len(devices)
    if str(devices).isdecimal() and int(devices):
        return int(devices)
    if isinstance(devices, str) and "," in devices:
        return len([device for device in devices.split(",") if device.strip()])
    # "auto" is one process there: CPUAccelerator.auto_device_count.
    if device == "cpu":
        return 1
    if not torch.cuda.is_available():
        raise ConfigError(f"trainer.devices={devices!r}: there is no GPU on this machine to count. Set --devices 8.")
    return torch.cuda.device_count()


NOISE = re.compile(
    r"Does not validate against|Subtypes: |Errors:|Given value|Expected a (<class 'NoneType'>|path|dot import)"
    r"|Not a valid subclass|Subclass types expect|a class path \(str\)|a dict with(out)? |Problem with given"
)
"""Lines that list what a value might have been instead."""
KEY = re.compile(r"""(?:Parser key "(?P<key>.+)"|Problem with given class_path '(?P<path>.+)'):""")
KINDS = re.compile(r"Expected an? (?:<class '([\w.]+)'>|typing\.Literal\[(.+)\]|(.+?))(?:\. Got value: .*)?")


def one_sentence(message: str, configs: Sequence[str] = (), classes: Mapping[str, str] | None = None) -> str:
    """Return it.

    message: of jsonargparse. configs: the YAML files, of which the one that has the fault is named. classes: key ->
    class_path, which jsonargparse does not always name.
    """
    keys: list[str] = []
    reasons: list[str] = []
    kinds: list[str] = []
    value = ""
    for line in (line.strip(" -") for line in message.splitlines()):
        if match := KEY.fullmatch(line):
            keys.append(match["key"] or match["path"])
            kinds.clear()  # those of the key around it
        elif line.startswith("Given value: ") and not value:
            value = line.removeprefix("Given value: ")
        elif match := KINDS.fullmatch(line):
            kinds += [next(filter(None, match.groups())).rpartition(".")[2]] if "NoneType" not in line else []
            value = line.partition("Got value: ")[2] or value
        elif line and not NOISE.match(line):
            reasons.append(line)
    paths = [key for key in keys if importable_name(key)]
    if not paths and keys and keys[0] in (classes or {}):
        paths = [(classes or {})[keys[0]]]
        keys.insert(1, paths[0])
    reasons, word = _explained(paths, reasons)
    if not reasons and kinds:
        reasons, word = [f"{value} is none of {', '.join(kinds)}"], value
    named = ": ".join(keys[:1] + [key.rpartition(".")[2] if key in paths else key for key in keys[1:]])
    text = "; ".join(dict.fromkeys(reasons)) or " ".join(message.split())
    return f"{_place(word, configs)}{named}{': ' if named else ''}{text}"


def importable_name(key: str) -> bool:
    """Return whether a key is a class_path, and no option's."""
    return "." in key and key.rpartition(".")[2][:1].isupper()


def _explained(classes: Sequence[str], reasons: list[str]) -> tuple[list[str], str]:
    """Return the reasons with near names, and the word that is wrong; "" where none is known."""
    for path in classes:
        if (reason := class_problem(path)) is not None:
            return [reason], path
    for number, reason in enumerate(reasons):
        if match := re.fullmatch(r"Option '(.+)' is not accepted", reason):
            name = match[1]
            near = did_you_mean(name, _arguments(classes[-1])) if classes else "."
            return [*reasons[:number], f"there is no option '{name}'{near}"], name
    return reasons, ""


def class_problem(path: str) -> str | None:
    """Return why a class_path cannot be imported; None: it can be."""
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        return _missing_module(module_name, error.name or "")
    # Of the user's code: jsonargparse reports it too.
    except Exception as error:
        return f"importing {module_name} fails: {type(error).__name__}: {error}"
    if hasattr(module, name):
        return None
    public = [word for word in dir(module) if not word.startswith("_")]
    return f"'{module_name}' has no '{name}'{did_you_mean(name, public)}"


def _missing_module(module: str, missing: str) -> str:
    if f"{module}.".startswith(f"{missing}."):
        return f"there is no module '{module}'{did_you_mean(module, _modules_near(module))} Searched: {os.getcwd()}"
    return missing_package(missing.partition(".")[0], module)


def _modules_near(module: str) -> list[str]:
    parent, _, _ = module.rpartition(".")
    spec = importlib.util.find_spec(parent.partition(".")[0]) if parent else None
    folders = [os.getcwd()] if spec is None else list(spec.submodule_search_locations or [])
    prefix = "" if spec is None else f"{parent}."
    return [prefix + module.name for module in pkgutil.iter_modules(folders)]


def _arguments(path: str) -> list[str]:
    module, _, name = path.rpartition(".")
    names: list[str] = []
    for kind in inspect.getmro(getattr(importlib.import_module(module), name)):
        if "__init__" not in vars(kind):
            continue
        parameters = inspect.signature(kind).parameters.values()
        names += [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
        # Strategies hand **run_options on to the class above.
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
            break
    return names


def _place(word: str, configs: Sequence[str]) -> str:
    """Return "file, line N: " of the first file that has the word; "" where none has."""
    for config in configs if word else ():
        if Path(config).is_file():
            for number, line in enumerate(Path(config).read_text("utf-8", errors="replace").splitlines(), start=1):
                if re.search(rf"(?<![\w.]){re.escape(word)}(?![\w.])", line):
                    return f"{config}, line {number}: "
    return ""
