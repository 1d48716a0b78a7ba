"""The console script: its help, its exit codes and its errors."""

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import Namespace
from lightning.pytorch.cli import LightningCLI
from torch import nn

from lightning_distrec.cli import command_line, fit_cli, main
from lightning_distrec.sharding.weights.shard_access import without_guard
from tests.support.checkpoint_folders import by_rows, write_folder
from tests.support.command import Run, run_command
from tests.support.console import finished


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs the script in an empty folder; it returns exit code, stdout and
    stderr."""
    monkeypatch.chdir(tmp_path)

    return lambda *args: run_command(capsys, *args)


def _folder(name: str, value: float = 1.0, **entries: Any) -> str:
    table = torch.full((300, 16), value)
    plan = {"films": {"cut": "row_wise", "kernel": "fused", "ranks": [0, 1]}}
    state = {"films.weight": by_rows(table, 100), "top.weight": torch.ones(3)}
    write_folder(Path(name), {"state_dict": state, "optimizer_states": [], **entries}, plan=plan)
    return name


def test_help_lists_all_commands(run: Run) -> None:
    code, text, _ = run("--help")
    assert code == 0
    for name in (*LightningCLI.subcommands(), *command_line.COMMANDS):
        assert f"\n    {name} " in text, name
    assert "Inspect a checkpoint, or merge a difference." in text
    assert set(command_line.LIGHTNING_COMMANDS) == set(LightningCLI.subcommands())
    assert run("-h") == (0, text, "")
    assert run() == (2, "", text)


@pytest.mark.parametrize(
    "command",
    [
        *((name,) for name in command_line.COMMANDS),
        ("checkpoint", "inspect"),
        ("checkpoint", "merge"),
        ("publish", "inspect"),
        ("columns", "fit"),
    ],
)
def test_each_command_has_help(run: Run, command: tuple[str, ...]) -> None:
    code, text, _ = run(*command, "--help")
    expected = {
        "advise": (
            "--device-memory",
            "Print which strategy suits a module, and why",
            "nothing is trained.",
        ),
        "bench": ("--strategies", "Exit code 1: no case could be measured."),
        "export": ("--overwrite", "Replace OUT if it exists.", "*.ckpt: a Lightning checkpoint"),
        "checkpoint": (
            "inspect",
            "merge",
            "Write a difference and its base as one full checkpoint.",
        ),
        "inspect": ("--verify", "2: i"),
        "columns": ("fit", "Fit the features of columns before a job"),
        "fit": ("--scheduler", "Read all training rows once"),
        "publish": ("inspect", "Print the publications of a folder."),
        "merge": ("difference", "out", "Exit codes: 0: written; 2: it cannot be."),
        "recipes": ("list", "copy", "List the jobs that come with the package"),
        "completion": ("bash", "Print a script with which a shell completes"),
        "slurm": ("--ranks-per-node RANKS_PER_NODE", "--signal-seconds", "Write an sbatch script"),
        "doctor": ("--timeout", "Check the ranks, machines and network links"),
        "plan": ("--batch-size", "--save-plan", "Exit codes: 0: the tables fit; 1: they do not;"),
    }
    assert code == 0
    assert text.startswith(f"usage: lightning-distrec {command[0]} ")
    for part in expected[command[-1]]:
        assert part in " ".join(text.split())
    assert not [word for word in text.split() if word.startswith("--") and "_" in word], (
        "options have hyphens"
    )
    assert "lambda" not in text
    assert "%%" not in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ("exprot", "a", "b"),
            "unknown command 'exprot'; did you mean 'export' or 'checkpoint'? List all commands:",
        ),
        (("pre",), "unknown command 'pre'; did you mean 'predict'?"),
        (("xyz",), "unknown command 'xyz'. List all commands: lightning-distrec --help."),
        (("checkpoint", "inspct", "a"), "invalid choice: 'inspct'"),
        (("checkpoint", "inspect"), "arguments are required: inspect.path"),
        (("export", "a.ckpt"), "arguments are required: out"),
        (("export", "a.ckpt", "b.pt", "--overwite"), "--overwite"),
    ],
)
def test_a_wrong_command_line_ends_with_2_and_a_reason(
    run: Run, args: tuple[str, ...], message: str
) -> None:
    code, out, error = run(*args)
    assert (code, out) == (2, "")
    assert message in error


@pytest.mark.parametrize(
    "args", [("fit", "--help"), ("--config", "x.yaml", "fit"), ("--print_config",), ("predict",)]
)
def test_lightnings_commands_and_options_reach_lightning(
    run: Run, args: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[list[str]] = []
    monkeypatch.setattr(fit_cli, "run_lightning", lines.append)
    assert run(*args)[0] == 0
    monkeypatch.setenv("PL_SUBCOMMAND", "fit")
    assert run()[0] == 0
    assert lines == [list(args), []]


def test_a_second_fit_in_the_same_folder_replaces_its_config(tmp_path: Path) -> None:
    boring = "lightning.pytorch.demos.boring_classes"
    options = [
        f"--model={boring}.BoringModel",
        f"--data={boring}.BoringDataModule",
        "--trainer.accelerator=cpu",
    ]
    options += ["--trainer.max_steps=1", "--trainer.limit_val_batches=0", "--trainer.logger=false"]
    options += ["--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false"]
    for seed in (1, 2):
        main.main([
            "fit",
            *options,
            f"--trainer.default_root_dir={tmp_path}",
            f"--seed_everything={seed}",
        ])
        assert f"seed_everything: {seed}" in (tmp_path / "config.yaml").read_text()


def test_export_replaces_a_file_only_with_overwrite(run: Run) -> None:
    _folder("a.ckpt")
    code, text, error = run("export", "a.ckpt", "out.pt")
    assert (code, error) == (0, "")
    assert re.fullmatch(r"Wrote out\.pt, [\d.]+ KiB\.\n", text)
    assert torch.load("out.pt", weights_only=True)["films.weight"].sum() == 4800
    code, out, error = run("export", _folder("b.ckpt", 2.0), "out.pt")
    assert (code, out) == (2, "")
    assert error == (
        "lightning-distrec: out.pt exists already. Choose another name, or replace "
        "it with --overwrite.\n"
    )
    assert run("export", "b.ckpt", "out.pt", "--overwrite")[0] == 0
    assert torch.load("out.pt", weights_only=True)["films.weight"].sum() == 9600


def test_inspect_prints_for_people_and_for_programs(run: Run) -> None:
    code, text, error = run("checkpoint", "inspect", _folder("a.ckpt"))
    assert (code, error) == (0, "")
    assert text.startswith("a.ckpt: checkpoint of lightning_distrec, complete, ")
    assert "films.weight" in text
    code, text, error = run("checkpoint", "inspect", "a.ckpt", "--json")
    description = json.loads(text)
    assert (code, error) == (0, "")
    assert (
        description["complete"],
        description["step"],
        [t["name"] for t in description["tensors"]],
    ) == (
        True,
        30,
        ["films.weight", "top.weight"],
    )


def test_inspect_of_what_is_incomplete_ends_with_2_and_one_line(run: Run) -> None:
    Path(_folder("a.ckpt"), "complete.json").unlink()
    code, text, error = run("checkpoint", "inspect", "a.ckpt")
    assert code == 2
    assert text.startswith("a.ckpt: folder, CANNOT BE LOADED")
    assert error.startswith("lightning-distrec: a.ckpt is not a complete checkpoint: complete.json")
    assert error.count("\n") == 1
    code, text, error_again = run("checkpoint", "inspect", "a.ckpt", "--json")
    assert (code, error_again) == (2, error)
    description = json.loads(text)
    assert not description["complete"]
    assert description["problem"] == error.removeprefix("lightning-distrec: ").strip()


def test_commands_and_help_load_neither_torchrec_nor_a_process_group(tmp_path: Path) -> None:
    _folder(str(tmp_path / "a.ckpt"))
    (tmp_path / "job.yaml").write_text("")
    code = """
        import contextlib, runpy, sys
        from lightning_distrec.cli.command_line import COMMANDS
        from lightning_distrec.cli.main import main

        def loaded(*names):
            return [name for name in names if name in sys.modules]

        for args in (["--help"], ["doctor", "--help"], ["slurm", "--help"]):
            with contextlib.suppress(SystemExit):
                main(args)
            print(*args, loaded("torchrec", "fbgemm_gpu", "lightning.pytorch.cli"), file=sys.stderr)
        codes = [
            main(["checkpoint", "inspect", "a.ckpt"]),
            main(["export", "a.ckpt", "a.pt"]),
            main(["export", "a.pt", "b.safetensors"]),
            main(["slurm", "--config", "job.yaml", "--nodes", "2", "--ranks-per-node", "8"]),
        ]
        print(codes, loaded("torchrec", "fbgemm_gpu", "lightning.pytorch.cli"), file=sys.stderr)
        for command in ("advise", "plan", "export", "checkpoint"):
            COMMANDS[command].parser(command).format_help()
            print(command, loaded("torchrec", "fbgemm_gpu"), file=sys.stderr)
        import torch.distributed as dist
        print("a group:", dist.is_initialized(), file=sys.stderr)
        sys.argv = ["lightning_distrec", "xyz"]
        runpy.run_module("lightning_distrec", run_name="__main__", alter_sys=True)
    """
    done = finished([sys.executable, "-c", textwrap.dedent(code)], tmp_path)
    assert done.returncode == 2, done.stderr
    assert [line for line in done.stderr.splitlines() if line.endswith(("]", "e"))] == [
        *("--help []", "doctor --help []", "slurm --help []", "[0, 0, 0, 0] []"),
        *("advise []", "plan []", "export []", "checkpoint []", "a group: False"),
    ]
    assert "unknown command 'xyz'" in done.stderr, "python -m lightning_distrec"


def test_where_torchrec_is_not_installed_the_line_that_installs_it_is_printed(
    tmp_path: Path,
) -> None:
    (tmp_path / "clicks.py").write_text("import torchrec\n")
    (tmp_path / "job.yaml").write_text("model: clicks.Model\n")
    program = textwrap.dedent("""
        import importlib.metadata, sys
        sys.modules["torchrec"] = None
        version = importlib.metadata.version
        def without(name):
            if name.startswith(("torchrec", "fbgemm")):
                raise importlib.metadata.PackageNotFoundError(name)
            return version(name)
        importlib.metadata.version = without
        from lightning.pytorch import Trainer
        from lightning_distrec.cli.main import main
        from lightning_distrec.errors import VersionError
        for command in (["--version"], ["fit", "--config", "job.yaml"]):
            try:
                print("exit code", main(command))
            except SystemExit as exit_:
                print("exit code", exit_.code)
        try:
            Trainer(strategy="torchrec_sharded", accelerator="cpu", logger=False)
        except VersionError as error:
            print("VersionError:", error)
    """)
    command = [sys.executable, "-c", program]
    done = finished(command, tmp_path)
    assert done.stdout.count("pip install --no-deps fbgemm-gpu-cpu==") == 2, done.stdout
    assert "torchrec_sharded cannot be used. Installed: torch" in done.stdout
    assert "exit code 2" in done.stdout
    assert "VersionError: Installed: torch" in done.stdout
    assert done.stderr.count("pip install --no-deps fbgemm-gpu-cpu==") == 1, done.stderr


def test_a_shell_completes_each_command_with_its_options(run: Run) -> None:
    code, text, _ = run("completion", "bash")
    assert code == 0
    script = text + textwrap.dedent("""
        COMP_WORDS=(lightning-distrec slurm --lau); COMP_CWORD=2; _shtab_lightning_distrec
        echo "options: ${COMPREPLY[*]}"
        COMP_WORDS=(lightning-distrec fit --trainer.max_e); COMP_CWORD=2; _shtab_lightning_distrec
        echo "options: ${COMPREPLY[*]}"
        COMP_WORDS=(lightning-distrec checkpoint m); COMP_CWORD=2; _shtab_lightning_distrec
        echo "options: ${COMPREPLY[*]}"
    """)
    done = subprocess.run(["bash"], input=script, capture_output=True, text=True, check=True)
    assert [line for line in done.stdout.splitlines() if line.startswith("options:")] == [
        "options: --launcher",
        "options: --trainer.max_epochs",
        "options: merge",
    ]


def test_a_logger_without_its_package_is_one_block(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "job.yaml"
    config.write_text(
        "model: lightning.pytorch.demos.boring_classes.BoringModel\n"
        "trainer:\n  logger:\n    class_path: lightning.pytorch.loggers.TensorBoardLogger\n"
        "    init_args: {save_dir: a}\n"
    )
    for name in ("_TENSORBOARD_AVAILABLE", "_TENSORBOARDX_AVAILABLE"):
        monkeypatch.setattr(f"lightning.fabric.loggers.tensorboard.{name}", False)
    code, _, errors = run("fit", "--config", str(config))
    assert code == 2
    assert "Traceback" not in errors
    complaint = errors.partition("lightning-distrec: ")[2]
    assert "Neither `tensorboard` nor `tensorboardX` is available" in complaint


def test_the_console_builds_tables_without_rows_where_its_strategy_shards_them() -> None:
    class_path = "lightning_distrec.TorchRecShardedStrategy"
    few = Namespace(
        class_path=class_path, init_args=Namespace(min_rows=10, convert_embeddings="auto")
    )
    built = {}
    for name, strategy in {
        "ddp": "ddp",
        "name": "torchrec_sharded",
        "few": few,
        "none": None,
    }.items():
        with fit_cli.tables_context(strategy):
            tables = nn.Embedding(100_000, 4), nn.Embedding(20, 4)
        with without_guard():
            built[name] = [table.weight.is_meta for table in tables]
    assert built == {
        "ddp": [False, False],
        "name": [True, False],
        "few": [True, True],
        "none": [False, False],
    }
