"""A SLURM of its own: munged, slurmctld and a slurmd on each of two hosts (network_hosts.py).

Everything it needs is in one directory, and everything it has started is on the hosts, so that
they end it.
"""

import os
import re
import subprocess
from pathlib import Path

from network_hosts import Host
from processes import clean_environment
from waiting import wait_until

# No accounting, no cgroups, no real GPUs; nodes that claim to be larger than they are.
CONF = """\
ClusterName=tests
SlurmctldHost={first.name}({first.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire={requeue_s}
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0
ReturnToService=2
GresTypes=gpu
MpiDefault=none
NodeName={first.name} NodeAddr={first.address} CPUs=64 Gres=gpu:4
NodeName={second.name} NodeAddr={second.address} CPUs=64 Gres=gpu:4
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE
"""
# A requeued job waits for as long as credentials live, two minutes by default.
REQUEUE_S = 5


class Slurm:
    """A cluster in `directory`, whose path is short, as that of a socket in it must be."""

    def __init__(self, directory: Path, hosts: tuple[Host, Host]) -> None:
        self.directory = directory
        self._hosts = hosts
        conf = directory / "slurm.conf"
        first, second = hosts
        conf.write_text(
            CONF.format(directory=directory, first=first, second=second, requeue_s=REQUEUE_S)
        )
        (directory / "gres.conf").write_text("Name=gpu File=/dev/tty[0-3]\n")
        # Without it slurmd looks for a version of cgroups, which are not there on such a host.
        (directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self._env = {**clean_environment(), "SLURM_CONF": str(conf)}
        for name in ("state", *(f"spool-{host.name}" for host in hosts)):
            (directory / name).mkdir()
        self._daemons: list[subprocess.Popen[bytes]] = []
        try:
            self._start_all()
        except BaseException:
            self.stop()
            raise

    def _start_all(self) -> None:
        conf, (first, _) = self.directory / "slurm.conf", self._hosts
        self._start_munge()
        self._start(first, "slurmctld", "-D", "-f", conf)
        for host in self._hosts:
            self._start(host, "slurmd", "-D", "-f", conf, "-N", host.name)
        wait_until(self._is_up, 60, self.logs)

    def _start_munge(self) -> None:
        key = self.directory / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        flags = [f"--{flag}={self.directory}/munge.{name}" for flag, name in files.items()]
        flags.append(f"--key-file={key}")
        self._start(self._hosts[0], "munged", "--foreground", "--force", *flags)
        wait_until((self.directory / "munge.socket").exists, 20, self.logs)

    def _start(self, host: Host, program: str, *words: object) -> None:
        with (self.directory / f"{program}-{host.name}.out").open("w") as out:
            daemon = subprocess.Popen(
                host.command(program, *words),
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self._daemons.append(daemon)

    def stop(self) -> None:
        """Ends the daemons; what they have started ends with the hosts."""
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait()

    def _is_up(self) -> bool:
        return self.call("sinfo", "--noheader", "--format=%T%D", check=False).strip() == "idle2"

    def call(self, *words: object, check: bool = True, **settings: str) -> str:
        """What a command of SLURM's writes, with `settings` in its environment."""
        done = subprocess.run(
            self._hosts[0].command(*words),
            env={**self._env, **settings},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0 or not check, f"{done.stderr}\n{self.logs()}"
        return done.stdout

    def submit(self, *words: object, **settings: str) -> str:
        """Submits a script; returns the number of the job."""
        return self.call("sbatch", "--parsable", *words, **settings).strip()

    def state(self, job: str) -> str:
        """Such as RUNNING."""
        return self._shown(job, "JobState")

    def restarts(self, job: str) -> int:
        return int(self._shown(job, "Restarts"))

    def _shown(self, job: str, name: str) -> str:
        found = re.search(rf"\b{name}=(\S+)", self.call("scontrol", "show", "job", job))
        assert found, name
        return found[1]

    def processes(self, job: str) -> dict[int, int]:
        """The id of each process of a job's step: those that srun has started, by their rank."""
        found: dict[int, int] = {}
        for directory in Path("/proc").iterdir():
            try:
                text = (directory / "environ").read_text(errors="replace")
                is_python = b"\0-m\0multitower\0" in (directory / "cmdline").read_bytes()
            except OSError:
                continue  # no process, or none any more
            env = dict(line.split("=", 1) for line in text.split("\0") if "=" in line)
            wanted = {"SLURM_CONF": self._env["SLURM_CONF"], "SLURM_JOB_ID": job}
            # The script itself has a number too, but is no step with one.
            is_step = env.get("SLURM_STEP_ID", "").isdecimal()
            if is_python and is_step and env.items() >= wanted.items():
                found[int(env["SLURM_PROCID"])] = int(directory.name)
        return found

    def logs(self, job: str | None = None) -> str:
        """What there is to see when something has failed."""
        shown = self.call("scontrol", "show", "job", job, check=False) if job else ""
        files = sorted([*self.directory.glob("*.log"), *self.directory.glob("*.out")])
        return shown + "\n".join(f"==> {file}\n{file.read_text()[-4000:]}" for file in files)
