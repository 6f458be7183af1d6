"""Two hosts on this machine: network namespaces, each with its own name, address and /etc/hosts.

What runs on such a host shares nothing with the other one but the disk, as the machines of a
cluster do.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import pytest

INSTALL = "apt-get install slurm-wlm munge openmpi-bin iproute2"


def require(*programs: str) -> None:
    """Fails, as these tests were asked for, where a program that they need is not there."""
    missing = [name for name in programs if shutil.which(name) is None]
    if missing:
        pytest.fail(f"no {', '.join(missing)} here: {INSTALL}", pytrace=False)


@dataclass(frozen=True)
class Host:
    name: str
    address: str
    namespace: str
    interface: str = "net0"

    def command(self, *words: object) -> list[str]:
        """What runs `words` on this host."""
        named = ["sh", "-c", 'hostname "$0" && exec "$@"', self.name, *map(str, words)]
        return ["ip", "netns", "exec", self.namespace, "unshare", "--uts", *named]

    def set_hosts_file(self, text: str) -> None:
        """Writes the /etc/hosts that programs see that are started from now on."""
        (_settings_of(self.namespace) / "hosts").write_text(text)

    def unplug(self) -> None:
        _ip("-n", self.namespace, "link", "set", self.interface, "down")

    def sent_bytes(self) -> int:
        """What has left this host so far, frames and all."""
        file = f"/sys/class/net/{self.interface}/statistics/tx_bytes"
        return int(subprocess.check_output(self.command("cat", file)))


@contextlib.contextmanager
def two_hosts() -> Generator[tuple[Host, Host]]:
    """Two hosts that are joined by a cable and reach nothing else; ends all that runs on them."""
    require("ip", "unshare", "hostname")
    if os.geteuid() != 0:
        pytest.fail("hosts of their own need network namespaces: run this as root", pytrace=False)
    hosts = tuple(
        Host(f"mt-host{number}", f"10.77.0.{number + 1}", f"mt{os.getpid()}-{number}")
        for number in range(2)
    )
    known = "".join(f"{host.address} {host.name}\n" for host in hosts)
    try:
        for host in hosts:
            _ip("netns", "add", host.namespace)
            _settings_of(host.namespace).mkdir(parents=True)
            host.set_hosts_file(f"127.0.0.1 localhost\n{known}")
        ends = [("name", host.interface, "netns", host.namespace) for host in hosts]
        _ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for host in hosts:
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.interface)
            _ip("-n", host.namespace, "link", "set", host.interface, "up")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        yield hosts
    finally:
        for host in hosts:
            _end_all(host)
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.namespace], check=False)
            shutil.rmtree(_settings_of(host.namespace), ignore_errors=True)
        with contextlib.suppress(OSError):
            _settings_of("").rmdir()  # unless it is somebody else's too


def _end_all(host: Host) -> None:
    """Ends everything that runs on a host, whoever started it."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        found = subprocess.run(
            ["ip", "netns", "pids", host.namespace], capture_output=True, text=True, check=False
        ).stdout.split()
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.1)


def _settings_of(namespace: str) -> Path:
    return Path("/etc/netns") / namespace  # ip binds these files over those in /etc


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
