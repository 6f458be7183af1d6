"""Fresh Python processes without the seconds that imports take: forked from a server.

The server has imported what runs need and has started nothing: no thread, no device. A process
forked from it is what `python PROGRAM` is, with these modules there already. Where a test is about
imports or the start of Python itself, start a real one (`subprocess`).

Run as a program, this is the server: it reads requests from standard input, a line of JSON each,
and answers on standard output.
"""

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

# JAX and Python read these when they are imported, and a fork comes after that.
_READ_AT_THE_START = ("JAX", "PYTHON", "LD_")


class Server:
    """Forks processes for one environment, as far as imports depend on it."""

    def __init__(self, environment):
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **request):
        """Its answer to a request."""
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, "the server of forks has ended"
        return json.loads(answer)


_SERVERS: dict[tuple, Server] = {}


class Fork:
    """A process that runs `python ARGUMENTS`; used as a `subprocess.Popen` that captures text."""

    def __init__(self, *arguments, env):
        at_start = {k: v for k, v in env.items() if k.startswith(_READ_AT_THE_START)}
        key = tuple(sorted(at_start.items()))
        if key not in _SERVERS:
            _SERVERS[key] = Server(env)
        self._server = _SERVERS[key]
        words = [str(argument) for argument in arguments]
        self.returncode = None
        self.pid, *self._files = self._server.ask(
            run=words, environment=env, directory=str(Path.cwd())
        )

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
        """Waits for its end; what it wrote on standard output and on standard error."""
        self.wait(timeout)
        out, errors = (Path(file).read_text() for file in self._files)
        return out, errors

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


# ---------------------------------------------------------------- the server


def imports():
    """What runs spend their first seconds with."""
    import tensorboardX  # noqa: F401

    import multitower_command  # noqa: F401


def serve(requests, answers, directory):
    """Answers until there are no more requests; in a forked process, returns what it shall run."""
    for number, line in enumerate(requests):
        request = json.loads(line)
        if "wait" in request:
            answer = ended(request["wait"], request["timeout_s"])
        else:
            files = [f"{directory}/{number}.out", f"{directory}/{number}.errors"]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # JAX warns of forks: it has started no thread here
                child = os.fork()
            if child == 0:
                become(request, files)
                return request["run"]
            answer = [child, *files]
        print(json.dumps(answer), file=answers, flush=True)
    return None


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


def become(request, files):
    """Makes a fork the process that was asked for; it writes to `files`."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell ignores it


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


def main():
    imports()
    directory = tempfile.mkdtemp(prefix="forks-")
    with os.fdopen(os.dup(1), "w") as to_client:
        words = serve(sys.stdin, to_client, directory)
    if words is None:
        shutil.rmtree(directory)
    else:
        run(words)


if __name__ == "__main__":
    main()
