"""``hpcfsdp <verb>``: finds the verb, and turns errors into a message on stderr and an exit code.

The output of verbs passes through ``_Output``, so that no control characters reach a terminal.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hpcfsdp._version import __version__
from hpcfsdp.cli import failure
from hpcfsdp.errors import HpcfsdpError, UsageError, nearest
from hpcfsdp.text.terminal import shown_lines, shown_styled

# verb -> module with main(arguments) -> exit code, and one line for the help
VERBS = {
    "train": ("hpcfsdp.cli.train", "train a byte-level GPT (run it with mpirun or srun)"),
    "plan": ("hpcfsdp.cli.plan", "predict memory, traffic and time of a training, and recommend how to shard"),
    "bench": ("hpcfsdp.cli.bench", "measure hpcfsdp and its peers (run it with mpirun or srun)"),
    "ls": ("hpcfsdp.cli.ls", "list checkpoints in a folder, or tensors in a checkpoint"),
    "report": ("hpcfsdp.cli.report", "write a page about a run: figures, findings, checkpoints, restarts"),
    "watch": ("hpcfsdp.cli.watch", "follow a running job in a terminal"),
    "doctor": ("hpcfsdp.cli.doctor", "check whether a training would run here (alone, or with mpirun or srun)"),
    "hang": ("hpcfsdp.cli.hang", "ask a running job where its ranks are, and who waits for whom"),
    "show": ("hpcfsdp.cli.show", "show facts of a checkpoint, or of one of its tensors"),
    "export": ("hpcfsdp.cli.export", "write a checkpoint as safetensors, .pt, a DCP folder or a PEFT adapter"),
    "import": ("hpcfsdp.cli.import_", "write a checkpoint from safetensors, .pt or a DCP folder"),
    "average": ("hpcfsdp.cli.average", "write a checkpoint with the mean of the weights of others"),
    "stats": ("hpcfsdp.cli.stats", "show minimum, maximum, mean, norm, NaN and Inf of tensors"),
    "verify": ("hpcfsdp.cli.verify", "check every byte of checkpoints"),
    "diff": ("hpcfsdp.cli.diff", "show the differences of two checkpoints"),
    "prune": ("hpcfsdp.cli.prune", "remove old checkpoints of a folder"),
    "plot": ("hpcfsdp.cli.plot", "draw histograms, norms per layer, or the loss"),
    "completion": ("hpcfsdp.cli.completion", "print a script that completes commands in bash, zsh or fish"),
}

_USAGE = """\
usage: hpcfsdp <verb> [PATH] [options]

{verbs}

hpcfsdp <verb> --help shows the options of a verb, hpcfsdp --version the version.
Data goes to stdout, messages to stderr. Exit codes: 0 fine, 1 failure, 2 usage,
3 environment, 4 checkpoint corrupt, 75 checkpointed after a signal (run me again),
76 the job hung (see RUN_DIR/hang), 141 the reader of the output has closed it."""

_EXTRA = ("jinja2", "jsonargparse", "rich", "yaml")
"""Modules that the extra `cli` installs."""

EXIT_BROKEN_PIPE = 128 + signal.SIGPIPE
"""As of a program that this signal has ended; Python turns it into an error. Not 0, since the output is incomplete."""


def usage() -> str:
    """Return the text of ``hpcfsdp --help``."""
    return _USAGE.format(verbs="\n".join(f"  {verb:10} {text}" for verb, (_, text) in VERBS.items()))


class OutputError(HpcfsdpError):
    """stdout could not be written to. An error of hpcfsdp's own, so that a job of many ranks ends together."""

    kind = "output"

    def __init__(self, error: OSError) -> None:
        super().__init__(f"cannot write to stdout: {os.strerror(error.errno or errno.EIO)}")
        if isinstance(error, BrokenPipeError):
            self.exit_code = EXIT_BROKEN_PIPE


class _Output:
    """A stream of printable text, line ends and tabs. Its own errors are ``OutputError``. For ``printing.console``:

    `styled` is the same stream for text that also sets colours, `moving` for a display that moves the cursor, and makes
    its texts printable itself.
    """

    def __init__(self, stream: Any, cleaned: Callable[[str], str] = shown_lines) -> None:
        self._stream, self._cleaned = stream, cleaned

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def moving(self) -> _Output:
        return _Output(self._stream, str)

    @property
    def styled(self) -> _Output:
        return _Output(self._stream, shown_styled)

    def write(self, text: str) -> int:
        cleaned = self._cleaned(text)
        if not cleaned.isascii():  # the terminal may know ASCII only
            encoding = getattr(self._stream, "encoding", None) or "utf-8"
            cleaned = cleaned.encode(encoding, "backslashreplace").decode(encoding)
        with _output_errors():
            self._stream.write(cleaned)
        return len(text)

    def flush(self) -> None:
        with _output_errors():
            self._stream.flush()


@contextlib.contextmanager
def _output_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(error) from error


def main(arguments: Sequence[str]) -> int:
    """Run one command; its exit code. Errors of hpcfsdp are printed, others propagate."""
    try:
        return _run(arguments)
    except HpcfsdpError as error:
        if error.exit_code != EXIT_BROKEN_PIPE:  # the reader of the output, such as `head`, has read enough
            failure.report(error, arguments[1:])
            _flush_or_drop(sys.stderr)
        _flush_or_drop(sys.stdout)
        return error.exit_code
    except Exception as error:
        failure.print_object(error, arguments[1:])
        raise


def _run(arguments: Sequence[str]) -> int:
    if sys.stdout is None:  # it was closed before this process began
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            return _command(arguments)
    with contextlib.redirect_stdout(_Output(sys.stdout)):
        try:
            code = _command(arguments)
        except SystemExit:  # the help of a verb
            sys.stdout.flush()
            raise
        sys.stdout.flush()  # here, where an error still changes the exit code
        return code


def _command(arguments: Sequence[str]) -> int:
    if not arguments:
        raise UsageError(f"which verb?\n\n{usage()}")
    verb, *rest = arguments
    if verb in ("-h", "--help", "help"):
        print(usage())
        return 0
    if verb == "--version":
        print(f"hpcfsdp {__version__}")
        return 0
    if verb not in VERBS:
        meant = f"; did you mean 'hpcfsdp ls {verb}'?" if os.path.exists(verb) else nearest(verb, VERBS)
        raise UsageError(f"unknown verb {verb!r}{meant}\n\n{usage()}")
    try:
        return importlib.import_module(VERBS[verb][0]).main(rest)
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        raise HpcfsdpError(f"hpcfsdp {verb} needs {error.name}: pip install 'hpcfsdp[cli]'") from None


def _flush_or_drop(stream: Any) -> None:
    """Flush a stream, or drop its buffer: the interpreter would fail again when it ends."""
    if stream is None:
        return
    try:
        stream.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def run() -> None:
    """Entry point of the console script."""
    sys.exit(main(sys.argv[1:]))
