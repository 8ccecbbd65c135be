"""Python processes that begin with torch loaded.

``python arguments`` takes over a second to import torch; hundreds of jobs with some ranks each do little else. A server
imports it once and forks a process for each request. What a launcher starts instead of Python is a client: it hands
its arguments, environment, folder, cores and standard streams to the server, passes signals on to the forked process,
and ends as that ends; a client that is killed takes the process with it.

The forked process differs from one that was started: its parent is the server, its processor time begins with the fork,
and all have one seed of hashes. A test that looks at processes starts them afresh.
"""

import json
import os
import signal
import socket
import sys

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1"}
READ_AT_START = ("PYTHON", "TORCH_", "OMP_", "MKL_", "LD_")
"""What Python and torch read when they are loaded: variables whose names begin so must be those of the server."""


class Server:
    """Of the tests of one process, or of one worker of pytest; ends with `close`, or with that process.

    Args:
        folder: for its socket; a short path, as those of sockets must be.
    """

    def __init__(self, folder):
        import subprocess

        self.path = f"{folder}/socket"
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", self.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=ENVIRON,
            start_new_session=True,
        )
        assert self._process.stdout.readline() == b"ready\n", "the server of preloaded processes has failed"

    def command(self, arguments, environ):
        """What to start instead of ``python arguments``, or None where the server cannot stand for Python."""
        if arguments[0].startswith("-") and arguments[0] not in ("-m", "-c"):
            return None
        for name in {*environ, *ENVIRON}:
            if name.startswith(READ_AT_START) and environ.get(name) != ENVIRON.get(name):
                return None
        return [sys.executable, "-I", "-S", __file__, self.path, *arguments]

    def close(self):
        self._process.communicate()


def ask(path, arguments):
    """Have a process do `arguments`; never returns."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        request = json.dumps([arguments, dict(os.environ), os.getcwd(), sorted(os.sched_getaffinity(0))]).encode()
        socket.send_fds(server, [len(request).to_bytes(4, "big")], [0, 1, 2])
        server.sendall(request)
        for number in FORWARDED:
            signal.signal(number, lambda number, _: server.sendall(bytes([number])))
        answer = server.recv(4)
    code = int.from_bytes(answer, "big", signed=True) if answer else -signal.SIGKILL
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def received(client, nbytes):
    """So many bytes from a client; empty if it ends before."""
    text = b""
    while len(text) < nbytes:
        if not (piece := client.recv(nbytes - len(text))):
            return b""
        text += piece
    return text


def serve(path):
    """Fork a process for each request, until standard input ends. Returns in each of them: what it is to do."""
    import contextlib
    import gc
    import selectors

    gc.freeze()  # collections in the forked processes leave torch's objects, and the memory that they share, alone
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    print("ready", flush=True)
    events = selectors.DefaultSelector()
    events.register(sys.stdin.fileno(), selectors.EVENT_READ, sys.exit)

    def accept():
        client, _ = listener.accept()
        request = streams = None
        with contextlib.suppress(ConnectionError):
            head, streams, *_ = socket.recv_fds(client, 4, 3)
            request = received(client, int.from_bytes(head, "big"))
        process = os.fork() if request else None
        if process == 0:
            return request, streams
        for stream in streams or ():
            os.close(stream)
        if not request:  # the client was killed before it had asked
            client.close()
            return None
        end = os.pidfd_open(process)
        events.register(client, selectors.EVENT_READ, lambda: forward(client, process))
        events.register(end, selectors.EVENT_READ, lambda: finish(client, process, end))

    def forward(client, process):
        numbers = b""  # the client was killed
        with contextlib.suppress(ConnectionError):
            numbers = client.recv(1)
        if not numbers:
            events.unregister(client)
        os.kill(process, numbers[0] if numbers else signal.SIGKILL)

    def finish(client, process, end):
        events.unregister(end)
        os.close(end)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if client in events.get_map():
            events.unregister(client)
            with contextlib.suppress(OSError):  # the client was killed at this moment
                client.sendall(code.to_bytes(4, "big", signed=True))
        client.close()

    events.register(listener, selectors.EVENT_READ, accept)
    while True:
        for key, _ in events.select():
            if key.fd in events.get_map() and (request := key.data()) is not None:
                return request


def become(text, streams):
    """Make this forked process the one that was asked for. Returns the code to execute as ``__main__``."""
    import ctypes
    import random

    import numpy

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: nothing outlives the server
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, 1024)
    os.setsid()
    arguments, environ, folder, cores = json.loads(text)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    os.sched_setaffinity(0, cores)
    random.seed()
    numpy.random.seed()
    first, *rest = arguments
    if first == "-m":
        sys.path[0] = folder
        sys.argv = rest
        return f"import runpy; runpy.run_module({rest[0]!r}, run_name='__main__', alter_sys=True)", "<preloaded>"
    if first == "-c":
        sys.path[0] = ""
        sys.argv = ["-c", *rest[1:]]
        return rest[0], "<string>"
    script = os.path.abspath(first)
    sys.path[0] = os.path.dirname(script)
    sys.argv = arguments
    with open(script, "rb") as file:
        return file.read(), script


if __name__ == "__main__":
    if sys.argv[1] != "--serve":
        ask(sys.argv[1], sys.argv[2:])
    import gc

    import h5py  # noqa: F401
    import torch
    import torch.distributed.checkpoint
    import torch.distributed.tensor

    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # the first optimizer loads torch's compiler

    request = serve(sys.argv[2])
    gc.collect()  # objects of the server close what they have open, now and not when those numbers are of other files
    source, name = become(*request)
    main = type(sys)("__main__")
    if name[0] != "<":
        main.__file__ = name
    sys.modules["__main__"] = main
    exec(compile(source, name, "exec"), main.__dict__)
