"""Runs one command and ends all that it started: when it has ended, and when whoever asked for it is gone.

Run as a file, by itself (`python -I -S supervise.py FD COMMAND...`), so that it starts in milliseconds and
has nothing to fail on. FD is a socket to its parent, which writes signal numbers, a byte each, and reads
lines: "pid N", "exit STATUS MAXRSS" or "error TEXT". When that socket closes, nothing may stay.

Three ties hold the command's processes, since each alone has a gap. The command has a session of its own, and
its process group is killed (a process may leave its group). This process takes in orphans, and kills whatever
is below it (it may be killed itself). The kernel kills the group when this process is gone (F_SETSIG on a
pipe that the command inherits).
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys

# For what the command left behind to clean up after itself, as torch's shared memory does.
TIDY_S = 1.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_RESTORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ)


def main() -> None:
    """Start the command, do what the parent says, report the end."""
    control = int(sys.argv[1])
    os.set_blocking(control, True)
    # Whoever signals a whole job must not take this process before it has cleaned up.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _get_out_of_reach(control)
    prctl = _prctl()
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    wake_read, wake_write = os.pipe()
    for end in (wake_read, wake_write):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    pid = _start(sys.argv[2:], control, prctl)
    _say(control, f"pid {pid}")
    # The command's output ends when the command and what it started have ended.
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    ended, told = False, True
    while not ended and told:
        readable, _, _ = select.select([control, wake_read], [], [])
        if wake_read in readable:
            _drain(wake_read)
            ended = _has_ended(pid)
        if control in readable and not ended:
            told = _obey(control, pid)
    if not ended:
        # The parent is gone. First the command alone: what it started may then clean up by itself.
        _kill(pid)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    _end_the_rest(pid, wake_read)
    _, status, usage = os.wait4(pid, 0)
    _end_orphans()
    _say(control, f"exit {os.waitstatus_to_exitcode(status)} {usage.ru_maxrss}")


def _get_out_of_reach(control: int) -> None:
    """Goes on in a child of this process, which only waits for it.

    A Ray worker that ends kills its own children with SIGKILL, this one among them, but not theirs.
    """
    pid = os.fork()
    if pid:
        os.close(control)
        os.waitpid(pid, 0)
        os._exit(0)


def _start(command: list[str], control: int, prctl) -> int:
    life_read, life_write = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.close(life_read)
        # Kept open, and never written to, as long as this process lives.
        os.set_inheritable(life_write, False)
        return pid
    try:
        os.setsid()
        os.close(life_write)
        os.set_inheritable(life_read, True)
        if hasattr(fcntl, "F_SETSIG"):
            fcntl.fcntl(life_read, fcntl.F_SETOWN, -os.getpid())
            fcntl.fcntl(life_read, fcntl.F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(life_read, fcntl.F_SETFL, fcntl.fcntl(life_read, fcntl.F_GETFL) | os.O_ASYNC)
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        for number in (*_RESTORED, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        # Ray's workers block SIGINT, and what they start would never hear of it.
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.execvp(command[0], command)
    except BaseException as error:
        _say(control, f"error {command[0]}: {error}")
        os._exit(127)


def _prctl():
    if sys.platform != "linux":
        return lambda option, value: None
    import ctypes

    return lambda option, value: ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _say(control: int, line: str) -> None:
    data = line.encode(errors="replace") + b"\n"
    try:
        while data:
            data = data[os.write(control, data) :]
    except OSError:
        # The parent is gone, which the loop notices.
        return


def _drain(fd: int) -> None:
    try:
        while os.read(fd, 4096):
            pass
    except BlockingIOError:
        return


def _has_ended(pid: int) -> bool:
    """Whether the command has ended; it is left uncollected, so that its group's number stays its own."""
    while True:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if ended is None:
            return False
        if ended.si_pid == pid:
            return True
        os.waitpid(ended.si_pid, 0)


def _obey(control: int, pid: int) -> bool:
    """Pass the signals on that the parent asks for; False when it is gone."""
    try:
        numbers = os.read(control, 64)
    except OSError:
        return False
    for number in numbers:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            break
    return bool(numbers)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _end_the_rest(pid: int, wake_read: int) -> None:
    """Give what the ended command left a moment, then kill its group."""
    import time

    deadline = time.monotonic() + TIDY_S
    while (left_s := deadline - time.monotonic()) > 0 and _others(pid):
        # Not all of them are children of this process yet, whose end it is told of.
        select.select([wake_read], [], [], min(left_s, 0.05))
        _drain(wake_read)
        _collect_orphans(pid)
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _others(pid: int) -> bool:
    """Whether anything but the ended command is left, below this process or in the command's group."""
    if sys.platform != "linux":
        return False
    me = str(os.getpid())
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == pid:
            continue
        state, parent, group = _stat(name)
        if state != "Z" and (parent == me or group == str(pid)):
            return True
    return False


def _stat(name: str) -> tuple[str, str, str]:
    try:
        with open(f"/proc/{name}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return "Z", "", ""
    return fields[0].decode(), fields[1].decode(), fields[2].decode()


def _collect_orphans(pid: int) -> None:
    for name in _children():
        if name != pid:
            try:
                os.waitpid(name, os.WNOHANG)
            except ChildProcessError:
                continue


def _children() -> list[int]:
    if sys.platform != "linux":
        return []
    me = str(os.getpid())
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _stat_parent(name) == me]


def _stat_parent(name: str) -> str:
    try:
        with open(f"/proc/{name}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[1].decode()
    except OSError:
        return ""


def _end_orphans() -> None:
    """Kill what left the group: with its parents gone it has become a child of this process, one by one."""
    while children := _children():
        for child in children:
            _kill(child)
            try:
                os.waitpid(child, 0)
            except ChildProcessError:
                continue


if __name__ == "__main__":
    main()
