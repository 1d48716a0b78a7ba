"""A real Slurm of two nodes on this one machine: its own munged, slurmctld and two slurmd, gone
when it is left."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import processes
from tests.support.debian import require
from tests.support.environments import environment
from tests.support.limits import LIMIT_SECONDS
from tests.support.ports import free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
ENDED = (
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "TIMEOUT",
)
CONFIG = """
ClusterName=tests
SlurmUser=root
SlurmdUser=root
# Only at 127.0.0.1.
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
# No cgroups, which a container may lack.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
# Believe in CPUs and memory that the machine has not.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# Look for jobs to begin once a second. Only the backfill scheduler begins heterogeneous jobs.
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
ReturnToService=2
JobRequeue=1
KillWait=3
InactiveLimit=0
# So long the end of a job can be asked for.
MinJobAge=3600
# A requeued job begins again when its first credential has ended, which is after 120 s if nothing is said. Less than
# 5 s counts as nothing said.
AuthInfo=socket={folder}/munge,cred_expire=5
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
StateSaveLocation={folder}/state
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n
NodeName=node[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]},{ports[2]}] \
CPUs=4 CoresPerSocket=4 RealMemory=1000
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE
"""


class SlurmFailed(AssertionError):
    """A command of Slurm failed, or what was waited for did not come."""


def require_slurm() -> None:
    """Install Slurm and munge where they are missing, or skip the test with the reason."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("a real Slurm of its own can be started by root of a Linux only")
    require(PROGRAMS, ["slurm-wlm", "munge"])


class Slurm:
    """A Slurm with the nodes node1 and node2, from entering it (`with`) until `stop`.

    Each node has four CPUs, whatever the machine has: `srun -N2 -n4` fills the first and puts one
    task on the other, if it can. Commands run in `folder`, with this checkout on PYTHONPATH. All of it ends with the process that
    began it, even if that is killed.
    """

    def __init__(self) -> None:
        # munged wants a folder that all may enter, which those of pytest are not, and its socket a
        # short path.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        self.folder.chmod(0o755)
        self._processes: list[subprocess.Popen[str]] = []
        self.daemons: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> "Slurm":
        folder = self.folder
        try:
            self._daemon(
                "keeper",
                sys.executable,
                "-I",
                processes.__file__,
                str(folder),
                stdin=subprocess.PIPE,
            )
            self._write_config()
            files = (
                f"--{kind}-file={folder}/munged.{kind}" for kind in ("key", "pid", "log", "seed")
            )
            self._daemon("munged", "munged", "--foreground", f"--socket={folder}/munge", *files)
            self._until((folder / "munge").exists, "munged's socket", 20)
            self._daemon("slurmctld", "slurmctld", "-D")
            for node in ("node1", "node2"):
                self._daemon(node, "slurmd", "-D", "-N", node)
            self._until(self._is_ready, "two idle nodes", 60)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Kill all daemons and all processes of jobs, and remove the folder."""
        processes.kill_all_with(str(self.folder))
        for process in self._processes:
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream:
                    stream.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def srun(
        self, args: Sequence[str], command: Sequence[str], **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command under `srun`; options as in `run`."""
        return self.run("srun", *args, *command, **options)

    def sbatch(
        self, script: str, args: Sequence[str] = (), env: Mapping[str, str] | None = None
    ) -> int:
        """Submit a script and return its job. `output` has what it prints, in all its runs if it is
        requeued."""
        path = self.folder / f"{time.monotonic_ns()}.sh"
        path.write_text(script if script.startswith("#!") else f"#!/bin/bash\n{script}")
        ways = ("--parsable", "--open-mode=append", f"--output={self.folder}/%j.out")
        return int(self._checked("sbatch", *ways, *args, str(path), env=env))

    def scontrol(self, *args: str) -> str:
        """Return what `scontrol` prints. Raises SlurmFailed: it failed."""
        return self._checked("scontrol", *args)

    def cancel(self, *args: str) -> None:
        """Run `scancel`, such as `cancel("--signal=USR1", "7")`. Raises SlurmFailed: it failed."""
        self._checked("scancel", *args)

    def cancel_all(self) -> None:
        """Cancel all jobs, kill what they have started, and wait until they are gone."""
        self.cancel("--user=root")
        self._until(self._has_no_jobs, "all jobs to be gone", LIMIT_SECONDS)

    def run(
        self,
        *command: str,
        env: Mapping[str, str] | None = None,
        timeout_seconds: float = LIMIT_SECONDS,
    ) -> subprocess.CompletedProcess[str]:
        """Run any command as a user of this Slurm would; its exit code is the caller's affair. env:
        added variables.

        Raises SlurmFailed: it was not done in time. All jobs are cancelled then.
        """
        process = self.start(*command, env=env)
        try:
            out, err = process.communicate(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            self._kill_jobs()  # what salloc has started is in a group of its own
            out, err = process.communicate()
            failure = SlurmFailed(
                f"waited {timeout_seconds} s for {' '.join(command)}\n{out}\n--- "
                f"stderr\n{err}{self.logs()}"
            )
            with contextlib.suppress(SlurmFailed):
                self._spawn(("scancel", "--user=root"), {}).wait(LIMIT_SECONDS)
            raise failure from None
        self._processes.remove(process)
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def start(self, *command: str, env: Mapping[str, str] | None = None) -> "subprocess.Popen[str]":
        """Start a command as `run` does, and return at once, for `communicate` later. `stop` kills
        it."""
        pipe = subprocess.PIPE
        return self._spawn(command, env or {}, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)

    def state(self, job: int) -> str:
        """Return a job's state, such as PENDING, RUNNING or COMPLETED."""
        return re.findall(r"JobState=(\w+)", self.scontrol("show", "job", str(job)))[0]

    def wait(
        self, job: int, states: Sequence[str] = ENDED, timeout_seconds: float = LIMIT_SECONDS
    ) -> str:
        """Wait until a job has ended, or is in one of `states`, and return its state."""
        self._until(
            lambda: self.state(job) in states,
            f"job {job} to be {'/'.join(states)}",
            timeout_seconds,
            job,
        )
        return self.state(job)

    def wait_for_output(self, job: int, text: str, timeout_seconds: float = LIMIT_SECONDS) -> None:
        """Wait until a job of `sbatch` has printed `text`."""
        self._until(
            lambda: text in self.output(job), f"job {job} to print {text!r}", timeout_seconds, job
        )

    def output(self, job: int) -> str:
        """Return what a job of `sbatch` has printed so far."""
        path = self.folder / f"{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def logs(self) -> str:
        """Return the last lines of each daemon's log."""
        tails = {
            path.stem: path.read_text(errors="replace").splitlines()[-15:]
            for path in self.folder.glob("*.log")
        }
        return "".join(
            f"\n--- log of {name}\n" + "\n".join(lines) for name, lines in sorted(tails.items())
        )

    def _checked(self, *command: str, env: Mapping[str, str] | None = None) -> str:
        done = self.run(*command, env=env)
        if done.returncode:
            raise SlurmFailed(f"{' '.join(command)}: {done.stderr}{self.logs()}")
        return done.stdout

    def _until(
        self, met: Callable[[], bool], name: str, timeout_seconds: float, job: int | None = None
    ) -> None:
        deadline = time.monotonic() + timeout_seconds
        while not met():
            if time.monotonic() > deadline:
                about = f"{self.scontrol('show', 'job', str(job))}{self.output(job)}" if job else ""
                raise SlurmFailed(f"waited {timeout_seconds} s for {name}\n{about}{self.logs()}")
            time.sleep(0.1)

    def _kill_jobs(self) -> None:
        processes.kill_all_with(str(self.folder), "SLURM_JOB_ID=")

    def _has_no_jobs(self) -> bool:
        # Without cgroups Slurm does not find a process whose parent has died, and waits for its end
        # for ever.
        self._kill_jobs()
        return not self._checked("squeue", "-h")

    def _is_ready(self) -> bool:
        if dead := [name for name, daemon in self.daemons.items() if daemon.poll() is not None]:
            raise SlurmFailed(f"ended at once: {', '.join(dead)}{self.logs()}")
        return self.run("sinfo", "-hN", "-o%T").stdout == "idle\nidle\n"

    def _write_config(self) -> None:
        host = socket.gethostname().partition(".")[0]
        text = CONFIG.format(folder=self.folder, host=host, ports=free_ports(3))
        (self.folder / "slurm.conf").write_text(text)
        key = self.folder / "munged.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)

    def _daemon(self, name: str, *command: str, stdin: int = subprocess.DEVNULL) -> None:
        with open(self.folder / f"{name}.log", "w") as log:
            self.daemons[name] = self._spawn(command, {}, stdin=stdin, stdout=log, stderr=log)

    def _spawn(
        self, command: Sequence[str], env: Mapping[str, str], **streams: Any
    ) -> "subprocess.Popen[str]":
        distrec = {
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "SLURM_CONF": f"{self.folder}/slurm.conf",
        }
        process: subprocess.Popen[str] = subprocess.Popen(
            command,
            env={**environment(**distrec), **env},
            cwd=self.folder,
            text=True,
            start_new_session=True,
            **streams,
        )
        self._processes.append(process)
        return process
