"""The steps of the Dockerfile, which is a script: they install what the page says, and check what
is installed."""

import re
from pathlib import Path

from lightning_distrec.versions import DEFAULT_TORCH, TRIPLES
from tests.docs.snippets import blocks_of

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docker/install.sh"


def test_the_script_installs_as_the_page_says() -> None:
    script = re.sub(r"\$\{\w+:=([^}]*)\}", r"\1", SCRIPT.read_text("utf-8")).replace(
        "$TORCH", "torch==2.13.0"
    )
    lines = [
        re.sub(r"[\"']", "", line.strip()) for line in script.splitlines() if "pip install" in line
    ]
    (by_hand,) = (
        block.text
        for block in blocks_of((ROOT / "docs/installing.md").read_text("utf-8"))
        if "$ pip" in block.text
    )
    shown = [line.partition("#")[0].removeprefix("$ ").strip() for line in by_hand.splitlines()]
    assert lines == [line.replace("'", "") for line in shown]
    (triple,) = (triple for triple in TRIPLES if DEFAULT_TORCH.startswith(triple.torch))
    assert lines[0] == f"pip install torch=={DEFAULT_TORCH}"
    assert lines[2] == (
        f"pip install --no-deps fbgemm-gpu-cpu=={triple.fbgemm} torchrec=={triple.torchrec}"
    )


def test_the_dockerfile_runs_the_script_with_the_same_versions() -> None:
    text = (ROOT / "Dockerfile").read_text("utf-8")
    assert "RUN /source/docker/install.sh $STEPS" in text
    for argument in re.findall(r"^ARG ((?:TORCH|FBGEMM)=.*)$", text, re.MULTILINE):
        assert argument.replace("=", ":=", 1) in SCRIPT.read_text("utf-8")
