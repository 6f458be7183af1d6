"""Fresh Python processes without the seconds that imports take: forked from a server.

The server has imported what runs need and has started nothing: no thread, no device. A process
forked from it is what `python PROGRAM` is, with these modules there already. Where a test is about
imports or the start of Python itself, start a real one (`subprocess`).

Run as a program, `python forks.py DESCRIPTOR`, this is the server: it answers requests in JSON on
that socket, which brings the pipes that a new process writes to.
"""

import importlib
import itertools
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

# JAX and Python read these when they are imported, and a fork comes after that.
_READ_AT_THE_START = ("JAX", "PYTHON", "LD_")
# But these a fork can still set, so that one server does for all values.
_SET_IN_A_FORK = ("JAX_COMPILATION_CACHE_DIR", "JAX_DISABLE_MOST_OPTIMIZATIONS")
_LONGEST_MESSAGE = 1 << 17
# What runs spend their first seconds with.
_IMPORTED = (
    "matplotlib.backends.backend_svg",
    "matplotlib.figure",
    "multitower.cli.main",
    "multitower.runs.report",
    "multitower.runs.train",
    "multitower_command",
    "optax",
    "orbax.checkpoint",
    "tensorboardX",
)


class Server:
    """Forks processes for one environment, as far as imports depend on it."""

    def __init__(self, environment):
        self._socket, its = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with its:
            words = [sys.executable, __file__, str(its.fileno())]
            self._process = subprocess.Popen(words, env=environment, pass_fds=[its.fileno()])

    def ask(self, *descriptors, **request):
        """Its answer to a request."""
        socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
        answer = self._socket.recv(_LONGEST_MESSAGE)
        assert answer, "the server of forks has ended"
        return json.loads(answer)


_SERVERS: dict[tuple, Server] = {}
_SEEDS = itertools.cycle("01")


def _server(environment):
    """Neighbours are forked from two servers: they order sets in two ways, as real processes do."""
    environment = {**environment, "PYTHONHASHSEED": next(_SEEDS)}
    at_start = {k: v for k, v in environment.items() if k.startswith(_READ_AT_THE_START)}
    key = tuple(sorted(item for item in at_start.items() if item[0] not in _SET_IN_A_FORK))
    if key not in _SERVERS:
        _SERVERS[key] = Server(environment)
    return _SERVERS[key]


class Fork:
    """A process that runs `python ARGUMENTS`; used as a `subprocess.Popen` that captures text."""

    def __init__(self, *arguments, env):
        self._server = _server(env)
        self._readers = [_Reader(), _Reader()]
        self.returncode = None
        self.pid = self._server.ask(
            *(reader.to_write for reader in self._readers),
            run=[str(argument) for argument in arguments],
            environment=env,
            directory=str(Path.cwd()),
        )
        for reader in self._readers:
            os.close(reader.to_write)

    def poll(self):
        """The exit code, negative for a signal; None while it runs."""
        return self._wait(0)

    def wait(self, timeout=None):
        """The exit code, negative for a signal."""
        if self._wait(timeout) is None:
            raise subprocess.TimeoutExpired(["python"], timeout)
        return self.returncode

    def _wait(self, timeout_s):
        if self.returncode is None:
            self.returncode = self._server.ask(wait=self.pid, timeout_s=timeout_s)
        return self.returncode

    def communicate(self, timeout=None):
        """Waits for its end, and that of all who write for it; its standard output and error."""
        deadline = None if timeout is None else time.monotonic() + timeout
        self.wait(timeout)
        for reader in self._readers:
            reader.join(deadline and max(deadline - time.monotonic(), 0))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(["python"], timeout)
        return tuple(reader.text for reader in self._readers)

    def send_signal(self, number):
        """Unless it is known to have ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self):
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


class _Reader(threading.Thread):
    """Reads a pipe to its end."""

    def __init__(self):
        super().__init__(daemon=True)
        self._to_read, self.to_write = os.pipe()
        self.text = ""
        self.start()

    def run(self):
        with os.fdopen(self._to_read) as file:
            self.text = file.read()


# ---------------------------------------------------------------- the server


def serve(client):
    """Answers until nobody asks any more; in a forked process, returns what it shall run."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(client, _LONGEST_MESSAGE, 2)
        if not message:
            return None
        request = json.loads(message)
        if "wait" in request:
            answer = ended(request["wait"], request["timeout_s"])
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # JAX warns of forks: it has started no thread here
                answer = os.fork()
            if answer == 0:
                become(request, descriptors)
                return request["run"]
            for descriptor in descriptors:
                os.close(descriptor)
        client.send(json.dumps(answer).encode())


def ended(pid, timeout_s):
    """The exit code of a process; None if it still runs after so many seconds."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        found, status = os.waitpid(pid, 0 if deadline is None else os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.005)


def become(request, to_write):
    """Makes a fork the process that was asked for."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, descriptor in enumerate(to_write, start=1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell ignores it
    set_jax()


def set_jax():
    """What JAX has read from the server's environment, from that of the fork."""
    import jax

    directory, quickly = map(os.environ.get, _SET_IN_A_FORK)
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_disable_most_optimizations", quickly == "1")


def compiling_quickly():
    """Variables that a process of tests sets before it starts its devices.

    JAX before 0.11 can do without XLA's newer emitter, which takes most of the time in which small
    programs are compiled: 35 milliseconds with these flags, 210 without.
    """
    import jax

    if jax.__version_info__ >= (0, 11):
        return {}
    flags = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    return {"XLA_FLAGS": flags}


def run(words):
    """`python WORDS`, with -m, -c or a file first."""
    how, *rest = words
    if how == "-m":
        sys.argv = ["-m", *rest[1:]]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif how == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = words
        sys.path[0] = str(Path(how).resolve().parent)
        runpy.run_path(how, run_name="__main__")


def main(descriptor):
    for name in _IMPORTED:
        importlib.import_module(name)
    with socket.socket(fileno=int(descriptor)) as client:
        words = serve(client)
    if words is not None:
        run(words)


if __name__ == "__main__":
    main(sys.argv[1])
