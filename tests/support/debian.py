"""Programs that tests need, installed from Debian's packages where they are missing and the tests
are root's."""

import fcntl
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest


def require(programs: Sequence[str], packages: Sequence[str]) -> None:
    """Install packages if a program is missing, or skip the test with the reason why they cannot be
    had."""
    if reason := _why_not(tuple(programs), tuple(packages)):
        pytest.skip(reason)


@functools.cache
def _why_not(programs: tuple[str, ...], packages: tuple[str, ...]) -> str:
    with open("/tmp/install-for-tests.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = ", ".join(name for name in programs if not shutil.which(name))
        if not missing:
            return ""
        if not sys.platform.startswith("linux") or not shutil.which("apt-get"):
            return f"{missing} not found, and no apt-get to install them with"
        if os.geteuid() != 0:
            return f"{missing} not found, and only root can install them"
        return _install(packages)


def _install(packages: tuple[str, ...]) -> str:
    # Debian asks this script before a package starts its services; what a test needs of them it
    # starts by itself.
    policy = Path("/usr/sbin/policy-rc.d")
    is_ours = not policy.exists()
    if is_ours:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    apt = ["apt-get", "-qq", "-y", "-o", "DPkg::Lock::Timeout=60"]
    install = [*apt, "install", "--no-install-recommends", *packages]
    try:
        # Lists that are missing or old are fetched, then it is tried again.
        for command in (install, [*apt, "update"], install):
            done = subprocess.run(
                command, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"}, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
            if command is install and done.returncode == 0:
                return ""
        return f"apt-get could not install {', '.join(packages)}: {done.stdout[-500:]}"
    finally:
        if is_ours:
            policy.unlink()
