"""The version table, the check at import, and what `make install` installs, without touching what
is installed."""

import subprocess
import sys

import pytest

from lightning_distrec import versions
from lightning_distrec.errors import DistRecError, VersionError
from lightning_distrec.versions import (
    DEFAULT_TORCH,
    TRIPLES,
    Installed,
    build_of,
    cuda_of,
    linked_cuda,
    matching,
    minor,
    problem_with,
    require_matching_versions,
    torch_to_install,
    triple_for,
)

CPU = Installed(torch="2.13.0+cpu", torch_build="cpu", fbgemm_cpu="1.8.0", torchrec="1.8.0")
CUDA = Installed(
    torch="2.13.0+cu130",
    torch_build="cuda",
    fbgemm_cuda="1.8.0",
    torchrec="1.8.0",
    has_nvidia_driver=True,
)
NO_DRIVER = Installed(torch="2.13.0", torch_build="cuda")


def changed(installed: Installed, **changes: object) -> Installed:
    return Installed(**{**vars(installed), **changes})


# ------------------------------------------------------------------------------------------------------- the check


def test_every_triple_of_the_table_is_accepted_in_both_builds():
    for triple in TRIPLES:
        found = {"torch": f"{triple.torch}.0", "torchrec": triple.torchrec}
        assert problem_with(changed(CPU, **found, fbgemm_cpu=triple.fbgemm)) is None
        assert problem_with(changed(CUDA, **found, fbgemm_cuda=triple.fbgemm)) is None


def test_local_suffixes_and_patch_releases_match_by_minor():
    for torch in ("2.13.0", "2.13.1+cu130", "2.13.0+cpu", "2.13.0.dev2026", "2.13.0a0+git1"):
        assert problem_with(changed(CPU, torch=torch)) is None
    assert problem_with(changed(CPU, fbgemm_cpu="1.8.3+cpu", torchrec="1.8.1+cpu")) is None
    assert (minor("2.13.1+cu130"), minor("2.13")) == ("2.13", "2.13")
    assert triple_for("2.13.5").fbgemm == "1.8.0"
    assert triple_for("") is None


@pytest.mark.parametrize(
    ("installed", "because"),
    [
        (Installed(), "no torch, no fbgemm, no torchrec"),
        (changed(CPU, torch=None), "torch must be one of"),
        (
            changed(CPU, torch="2.15.0"),
            "one of: torch 2.11 with fbgemm 1.6 and torchrec 1.6, .* torch 2.14",
        ),
        (changed(CPU, torch="2.1.3"), "torch must be one of"),
        (changed(CPU, torch="unknown"), "torch must be one of"),
        (changed(CPU, torch_build="rocm"), "CPU and CUDA builds of torch only"),
        (changed(CPU, fbgemm_cuda="1.8.0"), "fbgemm-gpu must be removed"),
        (changed(CUDA, fbgemm_cpu="1.8.0"), "fbgemm-gpu-cpu must be removed"),
        (changed(CPU, fbgemm_cpu=None, fbgemm_cuda="1.8.0"), "cannot be loaded with a CPU build"),
        (changed(CUDA, has_nvidia_driver=False), "without the NVIDIA driver"),
        (
            changed(CUDA, torch="2.13.0+cu129", torch_cuda="12", fbgemm_links_cuda="13"),
            r"needs CUDA 13 \(libcudart.so.13\); this torch brings CUDA 12(.|\n)*install torch==2.13.0\+cu130",
        ),
        (
            changed(
                CUDA,
                torch="2.11.0+cu130",
                fbgemm_cuda="1.6.0",
                torchrec="1.6.0",
                torch_cuda="13",
                fbgemm_links_cuda="12",
            ),
            r"needs CUDA 12(.|\n)*install torch==2.11.0\+cu126",
        ),
        (changed(CPU, fbgemm_cpu=None), "fbgemm is missing"),
        (changed(CPU, torchrec=None), "torchrec is missing"),
        (changed(CPU, fbgemm_cpu="1.7.0"), "this fbgemm was made for another torch"),
        (changed(CUDA, fbgemm_cuda="1.9.0"), "this fbgemm was made for another torch"),
        (changed(CPU, torchrec="1.9.2"), "this torchrec was made for another torch"),
        (changed(CPU, torch="2.14.0"), "this fbgemm was made for another torch"),
    ],
)
def test_any_other_set_is_reported_with_what_is_installed_and_what_to_run(installed, because):
    problem = problem_with(installed)
    assert problem is not None
    assert problem.startswith(f"Installed: {installed}. ")
    assert "To fix this, run:\n\n    python -m pip " in problem
    with pytest.raises(AssertionError, match=because):
        raise AssertionError(problem)


def test_fbgemm_without_cuda_kernels_is_an_error_only_where_the_tables_are_on_cuda():
    installed = changed(CUDA, fbgemm_cuda=None, fbgemm_cpu="1.8.0")
    assert problem_with(installed) is None
    assert "no CUDA kernels" in problem_with(installed, on_cuda=True)
    assert problem_with(CUDA, on_cuda=True) is None


INSTALL_CPU = "python -m pip install --no-deps fbgemm-gpu-cpu==1.8.0 torchrec==1.8.0"


@pytest.mark.parametrize(
    ("installed", "line"),
    [
        (Installed(), f"python -m pip install torch=={DEFAULT_TORCH}"),
        (changed(CPU, torchrec=None), INSTALL_CPU),
        (
            changed(CUDA, torch="2.11.0", fbgemm_cuda="1.8.0"),
            "python -m pip install --no-deps fbgemm-gpu==1.6.0 torchrec==1.6.1",
        ),
        (
            changed(CPU, fbgemm_cuda="1.8.0"),
            f"python -m pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu && {INSTALL_CPU}",
        ),
        (
            changed(CUDA, has_nvidia_driver=False),
            f"python -m pip uninstall -y fbgemm-gpu && {INSTALL_CPU}",
        ),
    ],
)
def test_the_line_to_run_is_exact(installed, line):
    assert f"\n    {line}\n" in problem_with(installed)


def test_what_is_wrong_is_raised_as_a_version_error_that_is_also_an_import_error(monkeypatch):
    monkeypatch.setattr(versions, "find_installed", lambda: changed(CPU, torchrec=None))
    with pytest.raises(VersionError, match="torchrec is missing") as caught:
        require_matching_versions()
    assert isinstance(caught.value, DistRecError)
    assert isinstance(caught.value, ImportError)


def test_the_installed_versions_match():
    require_matching_versions()


@pytest.mark.parametrize(
    ("version", "version_file", "build"),
    [
        ("2.13.0+cpu", "cuda: Optional[str] = '13.0'", "cpu"),
        ("2.13.0+cu130", "", "cuda"),
        ("2.13.0+rocm6.4", "", "rocm"),
        ("2.13.0", "cuda: Optional[str] = '13.0'\nhip: Optional[str] = None", "cuda"),
        ("2.13.0", "cuda: Optional[str] = None\nhip: Optional[str] = None", "cpu"),
        ("2.13.0", "cuda = None\nhip = '6.4.1'", "rocm"),
        ("2.13.0", "", "cpu"),
    ],
)
def test_the_build_of_torch_is_read_from_its_version_and_else_from_its_version_file(
    version, version_file, build
):
    assert build_of(version, version_file) == build


# -------------------------------------------------------------------------------------------------
# what to install


@pytest.mark.parametrize(
    ("installed", "requested", "requirements"),
    [
        (Installed(torch="2.13.0+cpu"), "", "fbgemm-gpu-cpu==1.8.0 torchrec==1.8.0"),
        (Installed(torch="2.11.0"), "", "fbgemm-gpu-cpu==1.6.0 torchrec==1.6.1"),
        (
            Installed(torch="2.14.1+cu130", torch_build="cuda", has_nvidia_driver=True),
            "",
            "fbgemm-gpu==1.9.0 torchrec==1.9.0",
        ),
        (NO_DRIVER, "", "fbgemm-gpu-cpu==1.8.0 torchrec==1.8.0"),
        (NO_DRIVER, "fbgemm-gpu", "fbgemm-gpu==1.8.0 torchrec==1.8.0"),
        # it was chosen before
        (changed(CUDA, has_nvidia_driver=False), "", "fbgemm-gpu==1.8.0 torchrec==1.8.0"),
        (changed(CUDA, fbgemm_cpu="1.8.0"), "", "fbgemm-gpu==1.8.0 torchrec==1.8.0"),
        (CUDA, "fbgemm-gpu-cpu", "fbgemm-gpu-cpu==1.8.0 torchrec==1.8.0"),
    ],
)
def test_fbgemm_and_torchrec_are_chosen_by_torch_its_build_and_the_driver(
    installed, requested, requirements
):
    assert " ".join(matching(installed, requested)) == requirements


@pytest.mark.parametrize(
    ("choose", "because"),
    [
        (lambda: torch_to_install(Installed(), "torch>=2.13"), "names no single version"),
        (lambda: torch_to_install(Installed(), "torch==2.15.0"), "no matching fbgemm"),
        (lambda: matching(changed(CPU, torch="2.15.0"), ""), "torch must be one of"),
        (lambda: matching(changed(CPU, torch_build="rocm"), ""), "CPU and CUDA builds"),
        (lambda: matching(CPU, "cuda"), "is no fbgemm package"),
        (lambda: matching(CPU, "fbgemm-gpu"), "cannot be loaded with torch 2.13.0.cpu"),
    ],
)
def test_what_cannot_be_installed_is_refused(choose, because):
    with pytest.raises(ValueError, match=because):
        choose()


def test_the_file_runs_by_its_path_with_the_standard_library_alone():
    command = [sys.executable, "-I", "-S", versions.__file__]  # -S: no site-packages
    table = subprocess.run([*command, "table"], capture_output=True, text=True, check=True)
    assert table.stdout.strip() == versions.markdown_table()
    torch = subprocess.run([*command, "torch"], capture_output=True, text=True, check=True)
    assert torch.stdout.strip() == f"torch=={DEFAULT_TORCH}"
    usage = subprocess.run(command, capture_output=True, text=True, check=False)
    assert usage.returncode == 2
    assert "versions.py matching" in usage.stderr


def test_cuda_of_torch_and_of_fbgemm_is_read_without_loading_them(tmp_path):
    assert [cuda_of(f"2.13.0+cu{cuda}", "") for cuda in ("118", "126", "130")] == ["11", "12", "13"]
    assert cuda_of("2.13.0", "cuda: Optional[str] = '13.0'\n") == "13"
    assert cuda_of("2.13.0+cpu", "cuda: Optional[str] = None\n") == cuda_of("", "") == ""
    (tmp_path / "empty.so").touch()
    assert linked_cuda(tmp_path) == ""
    (tmp_path / "fbgemm_gpu_py.so").write_bytes(b"\x7fELF\0libc.so.6\0libcudart.so.13\0")
    assert linked_cuda(tmp_path) == "13"
    assert problem_with(changed(CUDA, torch_cuda="13", fbgemm_links_cuda="13")) is None
    assert problem_with(changed(CUDA, torch_cuda="13", fbgemm_links_cuda="")) is None
