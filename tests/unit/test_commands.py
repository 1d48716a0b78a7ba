"""The console script: its help, its exit codes, and what it says where something cannot be done."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.cli import LightningCLI

from lightning_distrec.cli import commands, main
from tests.support.lone_rank import by_rows, write_folder

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs the script in an empty folder; it returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def of(*args: str) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = main.main(args)
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        return (code, *capsys.readouterr())

    return of


def _folder(name: str, value: float = 1.0, **more: Any) -> str:
    table = torch.full((300, 16), value)
    plan = {"films": {"cut": "row_wise", "kernel": "fused", "ranks": [0, 1]}}
    state = {"films.weight": by_rows(table, 100), "top.weight": torch.ones(3)}
    write_folder(Path(name), {"state_dict": state, "optimizer_states": [], **more}, plan=plan)
    return name


def test_help_lists_all_commands(run: Run) -> None:
    code, text, _ = run("--help")
    assert code == 0
    for name in (*LightningCLI.subcommands(), "advise", "bench", "export", "checkpoint"):
        assert f"\n    {name} " in text, name
    assert "Look into checkpoints: inspect, diff." in text
    assert run("-h") == (0, text, "")
    assert run() == (2, "", text)


def test_what_lightning_can_is_named_in_full() -> None:
    assert set(commands.OF_LIGHTNING) == set(LightningCLI.subcommands())


@pytest.mark.parametrize(
    "command",
    [("advise",), ("bench",), ("export",), ("checkpoint",), ("checkpoint", "inspect"), ("checkpoint", "diff")],
)
def test_each_command_has_help_in_plain_words(run: Run, command: tuple[str, ...]) -> None:
    code, text, _ = run(*command, "--help")
    wanted = {
        "advise": ("--device-memory", "Say which strategy suits a model, and why", "nothing is trained."),
        "bench": ("--strategies", "Exit code 1: nothing could be measured."),
        "export": ("--overwrite", "Replace OUT if it is there.", "*.ckpt: a Lightning checkpoint"),
        "checkpoint": ("inspect", "diff", "Show in what two checkpoints differ."),
        "inspect": ("--json", "--all", "Exit code 2: it is not."),
        "diff": ("--values", "--json", "Exit code 0: in nothing; 1: in something"),
    }
    assert code == 0
    assert all(part in " ".join(text.split()) for part in wanted[command[-1]])


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("exprot", "a", "b"), "invalid choice: 'exprot' (choose from 'fit', 'validate', 'test', 'predict'"),
        (("checkpoint", "inspct", "a"), "invalid choice: 'inspct'"),
        (("checkpoint", "inspect"), "arguments are required: checkpoint.inspect.path"),
        (("export", "a.ckpt"), "arguments are required: export.out"),
        (("export", "a.ckpt", "b.pt", "--overwite"), "--overwite"),
    ],
)
def test_what_is_not_understood_ends_with_2_and_says_so(run: Run, args: tuple[str, ...], said: str) -> None:
    code, out, error = run(*args)
    assert (code, out) == (2, "")
    assert said in error


@pytest.mark.parametrize("args", [("fit", "--help"), ("--config", "x.yaml", "fit"), ("--print_config",), ("predict",)])
def test_lightnings_commands_and_options_reach_lightning(
    run: Run, args: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []
    monkeypatch.setattr(main, "run_lightning", given.append)
    assert run(*args)[0] == 0
    assert given == [list(args)]


def test_a_command_named_by_the_environment_reaches_lightning(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(main, "run_lightning", given.append)
    monkeypatch.setenv("PL_SUBCOMMAND", "fit")
    assert run()[0] == 0
    assert given == [[]]


def test_export_writes_the_file_once_and_again_only_when_told(run: Run) -> None:
    _folder("a.ckpt")
    assert run("export", "a.ckpt", "out.pt") == (0, "", "")
    assert torch.load("out.pt", weights_only=True)["films.weight"].sum() == 4800
    code, out, error = run("export", _folder("b.ckpt", 2.0), "out.pt")
    assert (code, out) == (2, "")
    assert error == ("lightning-distrec: out.pt exists already. Choose another name, or replace it with --overwrite.\n")
    assert run("export", "b.ckpt", "out.pt", "--overwrite") == (0, "", "")
    assert torch.load("out.pt", weights_only=True)["films.weight"].sum() == 9600


def test_inspect_prints_for_people_and_for_programs(run: Run) -> None:
    code, text, error = run("checkpoint", "inspect", _folder("a.ckpt"))
    assert (code, error) == (0, "")
    assert text.startswith("a.ckpt: checkpoint of lightning_distrec, complete, ")
    assert "films.weight" in text
    code, text, error = run("checkpoint", "inspect", "a.ckpt", "--json")
    found = json.loads(text)
    assert (code, error) == (0, "")
    assert (found["complete"], found["step"], [t["name"] for t in found["tensors"]]) == (
        True,
        30,
        ["films.weight", "top.weight"],
    )


def test_inspect_lists_all_tensors_when_asked(run: Run) -> None:
    torch.save({f"[red]weight {i}": torch.ones(i) for i in range(40)}, "many.pt")
    assert run("checkpoint", "inspect", "many.pt")[1].count("[red]weight") == 20
    assert run("checkpoint", "inspect", "many.pt", "--all")[1].count("[red]weight") == 40


def test_inspect_of_what_is_incomplete_ends_with_2_and_one_line(run: Run) -> None:
    Path(_folder("a.ckpt"), "complete.json").unlink()
    code, text, error = run("checkpoint", "inspect", "a.ckpt")
    assert code == 2
    assert text.startswith("a.ckpt: folder, CANNOT BE LOADED")
    assert error.startswith("lightning-distrec: a.ckpt is not a complete checkpoint: complete.json")
    assert error.count("\n") == 1
    code, text, error_again = run("checkpoint", "inspect", "a.ckpt", "--json")
    assert (code, error_again) == (2, error)
    found = json.loads(text)
    assert (found["complete"], found["problem"]) == (False, error.removeprefix("lightning-distrec: ").strip())


def test_diff_ends_with_0_1_or_2(run: Run) -> None:
    _folder("a.ckpt"), _folder("b.ckpt", 3.0), _folder("c.ckpt", global_step=31)
    assert run("checkpoint", "diff", "a.ckpt", "b.ckpt")[0] == 0
    code, text, error = run("checkpoint", "diff", "a.ckpt", "b.ckpt", "--values")
    assert (code, error) == (1, "")
    assert text.splitlines()[:2] == ["A: a.ckpt", "B: b.ckpt"]
    assert text.splitlines()[-2].split() == ["state_dict/films.weight", "2"]
    assert text.splitlines()[-1] == "1 of 2 tensors are equal"
    assert run("checkpoint", "diff", "a.ckpt", "c.ckpt")[0] == 1
    code, out, error = run("checkpoint", "diff", "a.ckpt", "none.ckpt")
    assert (code, out, error) == (2, "", "lightning-distrec: there is no checkpoint none.ckpt.\n")
    code, text, _ = run("checkpoint", "diff", "a.ckpt", "b.ckpt", "--values", "--json")
    assert (code, json.loads(text)["values"]) == (1, {"state_dict/films.weight": 2.0})


def test_errors_that_nobody_expected_are_not_hidden(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_distrec.checkpoint.tools import describe

    def fail(path: Path) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(describe, "describe", fail)
    with pytest.raises(RuntimeError, match="ours"):
        run("checkpoint", "inspect", "a.ckpt")


def test_the_commands_load_neither_torchrec_nor_a_process_group(tmp_path: Path) -> None:
    _folder(str(tmp_path / "a.ckpt"))
    code = """
        import sys
        from lightning_distrec.cli.main import main
        codes = [
            main(["checkpoint", "inspect", "a.ckpt"]),
            main(["export", "a.ckpt", "a.pt"]),
            main(["export", "a.pt", "b.safetensors"]),
            main(["checkpoint", "diff", "a.pt", "a.ckpt", "--values"]),
        ]
        import torch.distributed as dist
        slow = {"torchrec", "fbgemm_gpu", "lightning.pytorch.cli"}
        print(codes, sorted(slow & set(sys.modules)), dist.is_initialized())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 0] [] False", done.stderr


def test_an_export_that_is_asked_to_end_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_distrec.checkpoint.tools import contents, torch_file

    def ask_to_end(piece: torch.Tensor) -> memoryview:
        os.kill(os.getpid(), signal.SIGTERM)
        return contents.bytes_of(piece)

    before = signal.getsignal(signal.SIGTERM)
    _folder(str(tmp_path / "a.ckpt"))
    monkeypatch.setattr(torch_file, "bytes_of", ask_to_end)
    with pytest.raises(SystemExit) as leaving:
        main.main(["export", str(tmp_path / "a.ckpt"), str(tmp_path / "out.pt")])
    assert leaving.value.code == 128 + signal.SIGTERM
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]
    assert signal.getsignal(signal.SIGTERM) == before
