"""PID 1 of a local container: starts one program and leaves nothing of it running, ever.

The local runner starts `python -I -S shim.py <runner's pid> <report descriptor> -- program ...`, by
path and isolated, so that it is up in some milliseconds and no environment of the program's can
break it; hence the standard library only, and no import of Backstay.

It asks the kernel for SIGTERM when the runner's main thread is gone, adopts whatever its
descendants leave behind (subreaper: daemons that fork twice end up here), and ends only when no
descendant lives.

- the program ends: its leftovers are killed (as with a container), the end is reported
- SIGTERM (or the runner died): everything is killed at once
- SIGUSR1: SIGTERM is passed on to the program, which may take its time

Reports, one JSON object a line: {"started": pid}, then {"exit": code, "signal": number}.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_RESCAN_SECONDS = 0.05
_CANNOT_START = 127
_KILL_ALL = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
_HANDLED = _KILL_ALL | {signal.SIGUSR1, signal.SIGCHLD}


def main(arguments: list[str]) -> int:
    """Run the program; return what the shim itself ends with."""
    runner, report = int(arguments[0]), int(arguments[1])
    program = arguments[3:]
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != runner:
        return 1  # it died before the kernel was asked
    os.set_inheritable(report, False)
    child = _start(program)
    _say(report, {"started": child})
    status = _watch(child)
    _kill_descendants()
    code = -signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status)
    _say(report, {"exit": max(code, 0), "signal": max(-code, 0)})
    return 0


def _watch(child: int) -> int | None:
    """Wait for the program's end (its status) or for the order to kill everything (None)."""
    while True:
        number = signal.sigwait(_HANDLED)
        if number in _KILL_ALL:
            return None
        if number == signal.SIGUSR1:
            os.kill(child, signal.SIGTERM)
        status = _reap(child)
        if status is not None:
            return status


def _reap(child: int) -> int | None:
    """Collect all that ended; the program's status if it is among them."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == child:
            found = status


def _kill_descendants() -> None:
    """Kill until there is no child left; orphans of the killed come here and are next."""
    while True:
        for pid in _descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap(0)
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        signal.sigtimedwait({signal.SIGCHLD}, _RESCAN_SECONDS)


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            parent = _parent(int(name))
            children.setdefault(parent, []).append(int(name))
    found, todo = [], [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _parent(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def _start(program: list[str]) -> int:
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them; programs expect not
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
        os.execvp(program[0], program)
    except OSError as error:
        os.write(2, f"backstay: can't start {program[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(_CANNOT_START)


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def _say(report: int, what: dict[str, int]) -> None:
    with contextlib.suppress(BrokenPipeError):  # the runner is gone
        os.write(report, json.dumps(what).encode() + b"\n")


_LIBC = ctypes.CDLL(None, use_errno=True)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
