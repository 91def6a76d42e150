"""Command lines, exit statuses, and the error of a chain to report."""

import argparse
import ctypes
import inspect
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from typing import NoReturn

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def say(text: str) -> None:
    """A line on stderr, at once."""
    print(text, file=sys.stderr, flush=True)


def one_line(error: object) -> str:
    """The text of an error, however long, in a line."""
    return " ".join(str(error).split())[:300]


def hard_exit(status: int) -> NoReturn:
    """Ends this process without exit handlers.

    After a failure, a handler may wait for peers that hang in a collective; after a success,
    communicator threads sometimes abort the process during teardown.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def status_of(main: Callable[[], int | None]) -> int:
    """Exit status of ``main``; 0 if the reader of its output, such as head, closes the pipe.

    The last lines are written here: in the interpreter's own last flush a closed pipe is a
    traceback and status 120.
    """
    try:
        try:
            status = main() or 0
        # 0 of --help, 2 of a wrong word, or the line of an error.
        except SystemExit as ended:
            status = (
                ended.code
                if isinstance(ended.code, int)
                else int(ended.code is not None)
            )
            if isinstance(ended.code, str):
                print(ended.code, file=sys.stderr)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    return status


def run_and_exit(main: Callable[[], int]) -> NoReturn:
    """``hard_exit`` with the status of ``main``."""
    hard_exit(status_of(main))


def front(
    name: str, about: str | None, settings: str, commands: Mapping[str, str]
) -> argparse.ArgumentParser:
    """Parser of ``python -m name``; settings are options too. commands: descriptions by name."""
    width = max(map(len, commands)) + 1
    return argparse.ArgumentParser(
        prog=f"python -m {name}",
        usage=f"%(prog)s [--SETTING VALUE ...] {settings}\n       %(prog)s COMMAND --help",
        description=about,
        epilog="commands:\n"
        + "\n".join(
            f"  {command:<{width}} {text}" for command, text in commands.items()
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        # Else each new option could change what an abbreviation in somebody's script means.
        allow_abbrev=False,
    )


def run_command(
    command: Callable[..., int | None],
    name: str,
    program: str,
    arguments: list[str],
    environ: Mapping[str, str],
) -> int:
    """Runs ``python -m name``, printing an error in one line as ``program``; returns the exit
    status.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {name}", description=inspect.getdoc(command),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    try:
        return command(parser, arguments, environ) or 0
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        # Our own ValueErrors carry an exit_status and speak to the user. Any other is a defect,
        # whose traceback is wanted.
        if not isinstance(error, OSError) and not hasattr(error, "exit_status"):
            raise
        print(f"{program}: error: {error}", file=sys.stderr)
        return 2


def end_with(parent: int) -> None:
    """Has the kernel kill this process with the one that started it, however that ends (Linux
    only).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # already dead
            os._exit(1)


def limit_cpu(seconds: int) -> None:
    """Has the kernel end this process (SIGXCPU) after so many more seconds of its own work.

    Not of the clock: what else the machine does must not look like an endless loop.
    """
    usage = resource.getrusage(resource.RUSAGE_SELF)
    # The kernel counts whole seconds from the start of the process.
    most = int(usage.ru_utime + usage.ru_stime) + 1 + seconds
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (most, hard))


def root_cause(error: BaseException) -> BaseException:
    """The first error of a chain of causes and contexts."""
    # "raise ... from None" hides its context on purpose.
    while earlier := error.__cause__ or (
        None if error.__suppress_context__ else error.__context__
    ):
        error = earlier
    return error
