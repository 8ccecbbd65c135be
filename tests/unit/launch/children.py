"""Starts processes as the argument says while it handles the signals of schedulers, and prints what becomes of them.

``python children.py METHOD`` prints a JSON object of booleans, all of them true where all is well.
"""

import concurrent.futures
import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver, resource_tracker

from hpcfsdp.launch.signals import STOP_SIGNALS, StopSignals


def from_outside(pid, *numbers):
    """Signals as a scheduler sends them: not by a process of the job's own."""
    for number in numbers:
        subprocess.run(["kill", f"-{int(number)}", str(pid)], check=True)


def echo(pipe):
    """Send back what comes, or what the call of that name returns."""
    own = []
    while True:
        with contextlib.suppress(InterruptedError):
            asked = pipe.recv()
            if asked == "handle":
                for number in STOP_SIGNALS:
                    signal.signal(number, lambda number, _: own.append(number) or pipe.send(number))
                asked = "ready"
            elif asked == "program":
                with subprocess.Popen(["sleep", "60"]) as program:
                    program.terminate()
                    asked = program.wait(20)
            elif asked == "nested":
                asked = outlives(multiprocessing.get_context(sys.argv[1]))
            pipe.send(asked)


def answers(pipe, asked, expected, seconds=20):
    pipe.send(asked)
    return pipe.poll(seconds) and pipe.recv() == expected


class Started:
    """A process that runs ``echo``, and a pipe to it."""

    def __init__(self, context):
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=echo, args=(theirs,), daemon=False)
        self.process.start()

    def lives(self):
        time.sleep(0.3)
        return answers(self.pipe, 7, 7) and self.process.exitcode is None

    def end(self):
        self.process.terminate()
        self.process.join(20)
        return self.process.exitcode


def outlives(context):
    """A process outlives what a scheduler sends while it starts, and later; its parent ends it."""
    started = Started(context)
    from_outside(started.process.pid, *STOP_SIGNALS)  # at once: a new program may not have begun to run
    early = started.lives()
    from_outside(started.process.pid, *STOP_SIGNALS, *STOP_SIGNALS)
    return early and started.lives() and started.end() == -signal.SIGTERM


def ends_while_it_starts(context):
    """A SIGTERM of the parent's is not lost behind one that waits: signals of one number do not queue."""
    started = Started(context)
    from_outside(started.process.pid, signal.SIGTERM)
    return started.end() == -signal.SIGTERM


def handles(context):
    """Handlers of the process's own are called, and at once: within a read."""
    started = Started(context)
    ready = answers(started.pipe, "handle", "ready")
    from_outside(started.process.pid, signal.SIGUSR1, signal.SIGTERM)
    first = started.pipe.poll(20) and started.pipe.recv() == signal.SIGUSR1
    quiet = not started.pipe.poll(0.3)  # the TERM was not the parent's
    started.process.terminate()
    second = started.pipe.poll(20) and started.pipe.recv() == signal.SIGTERM
    started.process.kill()
    return ready and first and quiet and second


class Signalled(multiprocessing.process.BaseProcess):
    """The signal arrives while it starts."""

    _start_method = None

    @staticmethod
    def _Popen(process):
        os.kill(os.getpid(), signal.SIGUSR2)
        return multiprocessing.get_context(sys.argv[1]).Process._Popen(process)


def loses_nothing(context, stop):
    process = Signalled(target=int)
    process.start()
    process.join()
    return stop.received == signal.SIGUSR2


def helpers_outlive(context):
    """The server that forks, and what tracks resources."""
    lock = context.Lock()
    started = Started(context)
    pids = [getattr(forkserver._forkserver, "_forkserver_pid", None), resource_tracker._resource_tracker._pid]
    for pid in filter(None, pids):
        from_outside(pid, *STOP_SIGNALS)
    again = Started(context)
    with lock:
        return all(each.lives() and each.end() == -signal.SIGTERM for each in (started, again))


def pools_end(context):
    with context.Pool(2) as pool:
        for process in pool._pool:
            from_outside(process.pid, signal.SIGTERM)
        one = pool.map(abs, [-1, -2], 1) == [1, 2]
    with concurrent.futures.ProcessPoolExecutor(1, context) as executor:
        return one and executor.submit(abs, -3).result(20) == 3


def programs_end(context):
    """Programs get signals as ever, started here or by a process."""
    with subprocess.Popen(["sleep", "60"]) as program:
        from_outside(program.pid, signal.SIGUSR2)
        here = program.wait(20) == -signal.SIGUSR2
    started = Started(context)
    return here and answers(started.pipe, "program", -signal.SIGTERM) and started.end() == -signal.SIGTERM


def nested(context):
    started = Started(context)
    return answers(started.pipe, "nested", True) and started.end() == -signal.SIGTERM


if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    with StopSignals() as stop:
        calls = [outlives, ends_while_it_starts, handles, helpers_outlive, pools_end, programs_end, nested]
        found = {call.__name__: bool(call(context)) for call in calls}
        found["nothing came here"] = not stop.received
        found["loses_nothing"] = loses_nothing(context, stop)
    print(json.dumps(found))
