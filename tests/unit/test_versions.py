"""The version table, the check at import and the installer's decisions, all without touching what is installed."""

import json
import subprocess
import sys

import pytest

from lightning_distrec import versions
from lightning_distrec.errors import DistRecError, VersionError
from lightning_distrec.versions import (
    DEFAULT_TORCH,
    TRIPLES,
    Found,
    build_of,
    minor,
    plan_install,
    problem_with,
    require_matching_versions,
    triple_for,
)

CPU = Found(torch="2.13.0+cpu", torch_build="cpu", fbgemm_cpu="1.8.0", torchrec="1.8.0")
CUDA = Found(torch="2.13.0+cu130", torch_build="cuda", fbgemm_cuda="1.8.0", torchrec="1.8.0", has_nvidia_driver=True)


def changed(found: Found, **changes: object) -> Found:
    return Found(**{**vars(found), **changes})


# ------------------------------------------------------------------------------------------------------- the check


@pytest.mark.parametrize("found", [CPU, CUDA])
@pytest.mark.parametrize("triple", TRIPLES, ids=lambda triple: triple.torch)
def test_every_triple_of_the_table_is_accepted_in_both_builds(found, triple):
    name = "fbgemm_cuda" if found.torch_build == "cuda" else "fbgemm_cpu"
    versions_of_triple = {"torch": f"{triple.torch}.0", name: triple.fbgemm, "torchrec": triple.torchrec}
    assert problem_with(changed(found, **versions_of_triple)) is None


@pytest.mark.parametrize("torch", ["2.13.0", "2.13.1", "2.13.1+cu130", "2.13.0+cpu", "2.13.0.dev2026", "2.13.0a0+git1"])
def test_local_suffixes_and_patch_releases_match_by_minor(torch):
    assert problem_with(changed(CPU, torch=torch)) is None
    assert problem_with(changed(CPU, fbgemm_cpu="1.8.3+cpu", torchrec="1.8.1+cpu")) is None


@pytest.mark.parametrize(
    ("found", "because"),
    [
        (Found(), "no torch, no fbgemm, no torchrec"),
        (changed(CPU, torch=None), "torch must be one of"),
        (changed(CPU, torch="2.15.0"), "one of: torch 2.11 with fbgemm 1.6 and torchrec 1.6, .* torch 2.14"),
        (changed(CPU, torch="2.1.3"), "torch must be one of"),
        (changed(CPU, torch="unknown"), "torch must be one of"),
        (changed(CPU, torch_build="rocm"), "CPU and CUDA builds of torch only"),
        (changed(CPU, fbgemm_cuda="1.8.0"), "so fbgemm-gpu has to go"),
        (changed(CUDA, fbgemm_cpu="1.8.0"), "so fbgemm-gpu-cpu has to go"),
        (changed(CPU, fbgemm_cpu=None, fbgemm_cuda="1.8.0"), "cannot be loaded beside a CPU build"),
        (changed(CUDA, has_nvidia_driver=False), "without the NVIDIA driver"),
        (changed(CPU, fbgemm_cpu=None), "fbgemm is missing"),
        (changed(CPU, torchrec=None), "torchrec is missing"),
        (changed(CPU, fbgemm_cpu="1.7.0"), "this fbgemm was made for another torch"),
        (changed(CUDA, fbgemm_cuda="1.9.0"), "this fbgemm was made for another torch"),
        (changed(CPU, torchrec="1.9.2"), "this torchrec was made for another torch"),
        (changed(CPU, torch="2.14.0"), "this fbgemm was made for another torch"),
    ],
)
def test_anything_else_is_told_with_what_was_found_and_what_to_run(found, because):
    problem = problem_with(found)
    assert problem is not None
    assert problem.startswith(f"Installed: {found}. ")
    assert "To mend it, run:\n\n    python -m pip " in problem
    with pytest.raises(AssertionError, match=because):
        raise AssertionError(problem)


def test_fbgemm_without_cuda_kernels_is_an_error_only_where_the_tables_are_on_cuda():
    found = changed(CUDA, fbgemm_cuda=None, fbgemm_cpu="1.8.0")
    assert problem_with(found) is None
    assert "no CUDA kernels" in problem_with(found, on_cuda=True)
    assert problem_with(CUDA, on_cuda=True) is None


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (Found(), f"python -m pip install torch=={DEFAULT_TORCH}"),
        (changed(CPU, torchrec=None), "python -m pip install --no-deps fbgemm-gpu-cpu==1.8.0 torchrec==1.8.0"),
        (
            changed(CUDA, torch="2.11.0", fbgemm_cuda="1.8.0"),
            "python -m pip install --no-deps fbgemm-gpu==1.6.0 torchrec==1.6.1",
        ),
        (
            changed(CPU, fbgemm_cuda="1.8.0"),
            "python -m pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu && "
            "python -m pip install --no-deps fbgemm-gpu-cpu==1.8.0 torchrec==1.8.0",
        ),
        (
            changed(CUDA, has_nvidia_driver=False),
            "python -m pip uninstall -y fbgemm-gpu && "
            "python -m pip install --no-deps fbgemm-gpu-cpu==1.8.0 torchrec==1.8.0",
        ),
    ],
)
def test_the_line_to_run_is_exact(found, line):
    assert f"\n    {line}\n" in problem_with(found)


def test_what_is_wrong_is_raised_as_a_version_error_that_is_also_an_import_error(monkeypatch):
    monkeypatch.setattr(versions, "find_installed", lambda: changed(CPU, torchrec=None))
    with pytest.raises(VersionError, match="torchrec is missing") as caught:
        require_matching_versions()
    assert isinstance(caught.value, DistRecError)
    assert isinstance(caught.value, ImportError)


def test_what_is_installed_here_belongs_together():
    require_matching_versions()


def test_minors_are_read_from_any_version():
    assert minor("2.13.1+cu130") == "2.13"
    assert minor("2.13") == "2.13"
    assert triple_for("2.13.5").fbgemm == "1.8.0"
    assert triple_for("") is None


@pytest.mark.parametrize(
    ("version", "version_file", "build"),
    [
        ("2.13.0+cpu", "cuda: Optional[str] = '13.0'", "cpu"),
        ("2.13.0+cu130", "", "cuda"),
        ("2.13.0+rocm6.4", "", "rocm"),
        ("2.13.0", "cuda: Optional[str] = '13.0'\nhip: Optional[str] = None", "cuda"),
        ("2.13.0", "cuda: Optional[str] = None\nhip: Optional[str] = None", "cpu"),
        ("2.13.0", "cuda = None\nhip = '6.4.1'", "rocm"),
        ("2.13.0a0+gita1b2", "cuda = '12.9'", "cuda"),
        ("2.13.0", "", "cpu"),
    ],
)
def test_the_build_of_torch_is_read_from_its_version_and_else_from_its_version_file(version, version_file, build):
    assert build_of(version, version_file) == build


# ------------------------------------------------------------------------------------------------------- the installer


def pip_calls(*args: object, **kwargs: object) -> list[str]:
    return [" ".join(step.pip) for step in plan_install(*args, **kwargs)]


PROJECT = "install -e .[recipes,test] torch==2.13.0+cpu"


def test_a_new_environment_gets_torch_first_and_alone():
    assert pip_calls(Found(), None) == [f"install torch=={DEFAULT_TORCH}"]
    assert pip_calls(Found(), "torch==2.14.0") == ["install torch==2.14.0"]


def test_beside_a_cpu_torch_comes_the_project_and_last_the_cpu_fbgemm_without_dependencies():
    assert pip_calls(Found(torch="2.13.0+cpu"), None) == [
        PROJECT,
        "install --no-deps fbgemm-gpu-cpu==1.8.0 torchrec==1.8.0",
    ]


def test_beside_a_cuda_torch_comes_the_cuda_fbgemm():
    found = Found(torch="2.14.1+cu130", torch_build="cuda", has_nvidia_driver=True)
    assert pip_calls(found, None) == [
        "install -e .[recipes,test] torch==2.14.1+cu130",
        "install --no-deps fbgemm-gpu==1.9.0 torchrec==1.9.0",
    ]


def test_a_cuda_torch_without_a_driver_gets_the_cpu_fbgemm_unless_the_other_is_asked_for_or_there():
    found = Found(torch="2.13.0", torch_build="cuda")
    steps = plan_install(found, None)
    assert steps[-1].pip[-2:] == ("fbgemm-gpu-cpu==1.8.0", "torchrec==1.8.0")
    assert "no NVIDIA driver here" in steps[-1].says
    assert "FBGEMM=fbgemm-gpu" in steps[-1].says
    assert plan_install(found, None, "fbgemm-gpu")[-1].pip[-2:] == ("fbgemm-gpu==1.8.0", "torchrec==1.8.0")
    assert plan_install(changed(CUDA, has_nvidia_driver=False), None, project_is_current=True) == []


@pytest.mark.parametrize("found", [CPU, CUDA])
def test_a_second_time_there_is_nothing_to_do(found):
    assert plan_install(found, None, project_is_current=True) == []
    assert plan_install(found, "torch==2.13.0", project_is_current=True) == []


def test_a_changed_pyproject_takes_torchrec_out_first_and_puts_it_back_last():
    assert pip_calls(CPU, None) == ["uninstall -y torchrec", PROJECT, "install --no-deps torchrec==1.8.0"]


def test_only_what_is_missing_or_does_not_match_is_installed():
    def calls(**changes: object) -> list[str]:
        return pip_calls(changed(CPU, **changes), None, project_is_current=True)

    assert calls(torchrec=None) == ["install --no-deps torchrec==1.8.0"]
    assert calls(torchrec="1.9.2") == ["install --no-deps torchrec==1.8.0"]
    assert calls(torchrec="1.8.1") == []
    assert calls(fbgemm_cpu="1.7.0") == ["install --no-deps fbgemm-gpu-cpu==1.8.0"]


def test_the_wrong_fbgemm_goes_and_the_right_one_comes_back_whole():
    swapped = changed(CPU, fbgemm_cpu=None, fbgemm_cuda="1.8.0")
    assert pip_calls(swapped, None, project_is_current=True) == [
        "uninstall -y fbgemm-gpu",
        "install --no-deps fbgemm-gpu-cpu==1.8.0",
    ]
    both = changed(CUDA, fbgemm_cpu="1.8.0")
    assert pip_calls(both, None, project_is_current=True) == [
        "uninstall -y fbgemm-gpu fbgemm-gpu-cpu",
        "install --no-deps fbgemm-gpu==1.8.0",
    ]


def test_another_torch_is_installed_only_if_it_is_asked_for():
    assert pip_calls(CPU, "torch==2.14.0", project_is_current=True) == ["install torch==2.14.0"]
    assert pip_calls(CPU, "torch==2.13.0+cu130", project_is_current=True) == ["install torch==2.13.0+cu130"]


@pytest.mark.parametrize(
    ("found", "torch", "fbgemm", "because"),
    [
        (Found(), "torch>=2.13", None, "names no single version"),
        (Found(), "torch==2.15.0", None, "nothing is known to go with it"),
        (changed(CPU, torch="2.15.0"), None, None, "torch must be one of"),
        (changed(CPU, torch_build="rocm"), None, None, "CPU and CUDA builds"),
        (CPU, None, "cuda", "is no fbgemm package"),
        (CPU, None, "fbgemm-gpu", "cannot be loaded beside torch 2.13.0.cpu"),
    ],
)
def test_a_wish_that_cannot_be_met_stops_the_installer_before_it_starts(found, torch, fbgemm, because):
    with pytest.raises(ValueError, match=because):
        plan_install(found, torch, fbgemm)


@pytest.fixture
def fake_environment(monkeypatch, tmp_path):
    """An environment in which calls of pip are written down and change only what `find_installed` finds."""
    state = {"found": Found(), "calls": [], "status": 0}

    def run_pip(arguments: tuple[str, ...]) -> int:
        state["calls"].append(" ".join(arguments))
        names = {"torch": "torch", "torchrec": "torchrec", "fbgemm-gpu-cpu": "fbgemm_cpu"}
        if arguments[0] == "uninstall":
            changes = {names[name]: None for name in arguments[2:]}
        else:
            pinned = (argument.split("==") for argument in arguments if "==" in argument)
            changes = {names[name]: version for name, version in pinned}
        if state["status"] == 0:
            state["found"] = changed(state["found"], **changes)
        return state["status"]

    monkeypatch.setattr(versions, "_run_pip", run_pip)
    monkeypatch.setattr(versions, "find_installed", lambda: state["found"])
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.delenv("TORCH", raising=False)
    monkeypatch.delenv("FBGEMM", raising=False)
    return state


def test_installing_ends_with_a_matching_set_and_a_stamp_that_makes_the_next_time_empty(
    fake_environment, tmp_path, capsys
):
    assert versions.main(["install"]) == 0
    assert len(fake_environment["calls"]) == 3
    assert problem_with(fake_environment["found"]) is None
    assert json.loads((tmp_path / "lightning_distrec.json").read_text())["torch"] == DEFAULT_TORCH
    assert "fbgemm-gpu-cpu 1.8.0" in capsys.readouterr().out

    assert versions.main(["install"]) == 0
    assert len(fake_environment["calls"]) == 3
    assert "Nothing to install" in capsys.readouterr().out


def test_asking_for_another_torch_brings_everything_that_goes_with_it(fake_environment, monkeypatch):
    assert versions.main(["install"]) == 0
    monkeypatch.setenv("TORCH", "torch==2.14.0")
    assert versions.main(["install"]) == 0
    assert fake_environment["found"] == Found(torch="2.14.0", fbgemm_cpu="1.9.0", torchrec="1.9.0")


def test_a_failing_pip_stops_the_installer_and_leaves_no_stamp(fake_environment, tmp_path, capsys):
    fake_environment["status"] = 1
    assert versions.main(["install"]) == 1
    assert "Stopped: 'pip install torch==" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_wish_that_cannot_be_met_makes_the_installer_fail(fake_environment, monkeypatch, capsys):
    monkeypatch.setenv("TORCH", "torch")
    assert versions.main(["install"]) == 1
    assert "TORCH='torch'" in capsys.readouterr().err
    assert fake_environment["calls"] == []


def test_the_file_runs_by_its_path_with_the_standard_library_alone():
    command = [sys.executable, "-I", "-S", versions.__file__]  # -S: no site-packages
    table = subprocess.run([*command, "table"], capture_output=True, text=True, check=True)
    assert table.stdout.strip() == versions.markdown_table()
    usage = subprocess.run(command, capture_output=True, text=True, check=False)
    assert usage.returncode == 2
    assert "versions.py install" in usage.stderr
