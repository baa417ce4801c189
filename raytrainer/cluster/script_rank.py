"""What a rank's process does for a script: starts it when all ranks are there, carries its output, passes
signals on, tells the driver how it ended.

`run_script` is the entry of the ranks, on Ray and in the local backend. What the ranks have to agree on (the
port of rank 0, the start, the end after a failure) goes through the driver's `script_hub`.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from raytrainer.cluster.channel import Channel
from raytrainer.cluster.outcome import RankFailed, RankFailure, describe_exit, is_echo
from raytrainer.cluster.script_environment import ScriptPlace, script_command, script_environment
from raytrainer.cluster.script_output import Output, shorten
from raytrainer.cluster.script_process import ScriptProcess, read_error_file
from raytrainer.cluster.signals import StopSignal
from raytrainer.errors import UsageError

ENTRY = "raytrainer.cluster.script_rank:run_script"

# After another rank's failure a script gets this long to end when it is told to.
END_GRACE_S = 8.0
# After a request to stop: it may save; 30 s is what a pod has.
STOP_GRACE_S = 25.0
# For the others to end, before this rank's failure is told to the backend, which then ends them.
CLOSE_S = 13.0
CONNECT_S = 10.0
OUTPUT_S = 5.0


def run_script(payload: dict, process: Any, observer: Any, stop: StopSignal) -> dict:
    """Runs the script of `payload["script"]` (see `launch.script_plan`) as rank `process.rank`.

    Returns {"status": "finished" or "stopped", "exit_code"}; raises RankFailed when the script failed, or was
    ended since another one did.
    """
    with ExitStack() as resources:
        return _ScriptRank(payload["script"], process, stop, resources).run(observer)


class _ScriptRank:
    """One rank of one start."""

    def __init__(self, plan: dict, process: Any, stop: StopSignal, resources: ExitStack):
        self._plan, self._process, self._stop, self._resources = plan, process, stop, resources
        self._attempt = plan["first_attempt"] + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        self._script: ScriptProcess | None = None
        self._output: Output | None = None
        # Why the script was told to end: None, "end" (another rank failed), or the name of a signal.
        self._told: str | None = None
        self._deadline: float | None = None
        self._start: dict | None = None
        self._closed = False
        self._killed = False
        self._directory = plan["working_dir"] or (plan["cwd"] if plan["local"] else os.getcwd())

    def run(self, observer: Any) -> dict:
        rank = self._process.rank
        self._hub = Channel(self._connect(self._plan["control_port"]))
        self._resources.callback(self._hub.close)
        if rank == 0:
            # From now on a request to stop is passed on, and does not end this process.
            observer({"event": "started", "world_size": self._process.world_size})
        problem = self._find_problem()
        hello = {"token": self._plan["token"], "rank": rank, "attempt": self._attempt, "problem": problem}
        hello["world_size"] = self._process.world_size
        if rank == 0:
            hello["master_addr"] = os.environ["MASTER_ADDR"]
            hello["master_port"] = self._hold_port()
        self._hub.send(hello)
        while self._start is None and self._told is None and not self._hub.closed:
            self._hear(self._hub.receive(wait=True))
        if problem is not None:
            raise UsageError(problem)
        if self._told is not None:
            return self._conclude(-signal.SIGTERM)
        if self._start is None:
            raise RankFailed(RankFailure(rank, "lost", message="the command is gone", time=time.time()))
        with tempfile.TemporaryDirectory(prefix="raytrainer-script-") as scratch:
            error_file = Path(scratch) / "error.json"
            self._launch(str(error_file))
            self._watch()
            return self._conclude(self._script.returncode, read_error_file(error_file))

    # Before the start

    def _connect(self, port: int) -> socket.socket:
        problems = []
        for host in self._plan["hosts"]:
            try:
                connection = socket.create_connection((host, port), CONNECT_S)
                connection.settimeout(None)
                return connection
            except OSError as error:
                problems.append(f"{host}: {error}")
        raise UsageError(
            f"{socket.gethostname()} cannot reach the machine where the command runs, on port {port}\n"
            f"  {'; '.join(problems)}\n"
            "  run the command on a node of the cluster (its head, or a submitted job)"
        )

    def _find_problem(self) -> str | None:
        """Why the script cannot run here."""
        here = socket.gethostname()
        if not os.path.isdir(self._directory):
            return (
                f"the working directory {self._directory} does not exist on {here}\n"
                "  name a folder that every node has (--working-dir), or leave it out: then the folder where "
                "the command is given goes along"
            )
        path = os.path.join(self._directory, self._plan["path"])
        if not self._plan["module"] and not os.path.exists(path):
            return (
                f"there is no {self._plan['path']} in {self._directory} on {here}\n"
                "  only the folder where the command is given goes along: start it from one that holds the "
                "script, or use a folder that every node has"
            )
        return None

    def _hold_port(self) -> int:
        """A free port that nobody else is given: bound, so that it is taken, and not listened on.

        The script's own store may bind it as well, since it allows for a port in use.
        """
        holder = self._resources.enter_context(socket.socket())
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        wanted = self._plan["master_port"]
        try:
            holder.bind(("", wanted or 0))
            if wanted is not None:
                # Somebody who listens on one address only would not be noticed by that.
                with socket.create_server(("", wanted)):
                    pass
        except OSError as error:
            raise UsageError(
                f"script.master_port = {wanted}\n  the port is taken on {socket.gethostname()} "
                f"({error.strerror})\n  write another one, or leave it out: then a free one is found"
            ) from error
        return holder.getsockname()[1]

    # The script

    def _launch(self, error_file: str) -> None:
        process, plan = self._process, self._plan
        place = ScriptPlace(
            *process[:5],
            num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)),
            master_addr=self._start["master_addr"],
            master_port=self._start["master_port"],
            attempt=self._attempt,
            error_file=error_file,
        )
        self._output = self._open_output()
        self._script = ScriptProcess(
            script_command(sys.executable, plan, place),
            script_environment(os.environ, plan, place),
            self._directory,
            self._output.stdout,
            self._output.stderr,
        )
        self._resources.callback(self._script.close)
        self._output.start()

    def _open_output(self) -> Output:
        plan, rank = self._plan, self._process.rank
        shown = rank == 0 or plan["tee"] == "all"
        log_path = None
        if _is_same_folder(plan["run_dir"], plan["run_token"]):
            log_path = Path(plan["run_dir"]) / "logs" / f"rank_{rank}.log"
            log_path.parent.mkdir(exist_ok=True)
        connection = None
        if shown or log_path is None:
            connection = self._connect(plan["output_port"])
            self._resources.callback(connection.close)
            connection.sendall(f"{plan['token']}{rank:08d}".encode())
        return Output(
            log_path,
            connection,
            shown=shown,
            prefix=f"[rank={rank}] ".encode() if plan["tee"] == "all" else b"",
            separate=shown and plan["separate_streams"],
        )

    def _watch(self) -> None:
        """Wait until the script has ended, doing what the driver says."""
        wake_read, wake_write = socket.socketpair()
        with wake_read, wake_write, selectors.DefaultSelector() as selector:
            wake_write.setblocking(False)

            def wake() -> None:
                with suppress(OSError):
                    wake_write.send(b"w")

            selector.register(self._script, selectors.EVENT_READ)
            selector.register(self._hub, selectors.EVENT_READ)
            selector.register(wake_read, selectors.EVENT_READ)
            with self._stop.listening(wake):
                while self._script.returncode is None:
                    self._apply_stop()
                    for key, _ in selector.select(self._left_s()):
                        if key.fileobj is self._script:
                            self._script.read()
                        elif key.fileobj is self._hub:
                            self._hear(self._hub.receive())
                            if self._hub.closed:
                                selector.unregister(self._hub)
                                self._kill()
                        else:
                            wake_read.recv(64)
                    if self._deadline is not None and time.monotonic() >= self._deadline:
                        self._kill()

    def _left_s(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def _apply_stop(self) -> None:
        if self._stop.requested:
            self._tell(self._stop.requested)

    def _hear(self, messages: list[dict]) -> None:
        for message in messages:
            if "start" in message:
                self._start = message["start"]
            elif "tell" in message:
                self._tell(message["tell"])
            elif "close" in message:
                self._closed = True

    def _tell(self, reason: str) -> None:
        """Have the script end, once: with the signal that the user sent, else with SIGTERM."""
        if self._told is not None:
            return
        self._told = reason
        self._deadline = time.monotonic() + self._plan["end_grace_s" if reason == "end" else "stop_grace_s"]
        if self._script is not None:
            self._script.send_signal(getattr(signal, reason, signal.SIGTERM))

    def _kill(self) -> None:
        self._deadline = None
        self._killed = True
        if self._script is not None:
            self._script.send_signal(signal.SIGKILL)

    # The end

    def _conclude(self, code: int, recorded: str | None = None) -> dict:
        if self._output is not None:
            self._output.finish(OUTPUT_S)
        failed = code != 0 and self._told is None
        self._hub.send({"ended": {"code": code, "failed": failed, "killed": self._killed}})
        if failed:
            failure = self._describe(code, recorded)
            self._wait_for_the_others()
            raise RankFailed(failure)
        if self._told == "end" and code != 0:
            message = "ended since another rank failed"
            raise RankFailed(RankFailure(self._process.rank, "collateral", message=message, time=time.time()))
        if self._told not in (None, "end"):
            return {"status": "stopped", "exit_code": exit_code_of(code), "stop_reason": self._told}
        return {"status": "finished", "exit_code": 0}

    def _wait_for_the_others(self) -> None:
        deadline = time.monotonic() + CLOSE_S
        with selectors.DefaultSelector() as selector:
            selector.register(self._hub, selectors.EVENT_READ)
            while not self._closed and not self._hub.closed:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return
                self._hear(self._hub.receive())

    def _describe(self, code: int, recorded: str | None) -> RankFailure:
        rank, tail = self._process.rank, self._output.tail
        if self._script.lost:
            return RankFailure(rank, "lost", message="its supervisor process was killed", time=time.time())
        if self._script.error:
            return RankFailure(rank, "usage", "UsageError", self._script.error, time=time.time())
        if code < 0:
            message = describe_exit(rank, code, self._script.rss_gib).message
        else:
            message = f"exited with code {code}"
        shown = self._output.shown
        text = "" if shown else shorten(tail)
        if recorded and recorded.strip().splitlines()[-1] not in tail:
            text = recorded.strip()
        return RankFailure(
            rank,
            "collateral" if code > 0 and is_echo(tail) else "script",
            message=f"{message} on {socket.gethostname()}",
            traceback=text,
            exit_code=exit_code_of(code),
            rss_gib=self._script.rss_gib,
            time=time.time(),
        )


def exit_code_of(returncode: int) -> int:
    """As a shell gives it: 128 + N for signal N."""
    return returncode if returncode >= 0 else 128 - returncode


def _is_same_folder(run_dir: str | None, token: str) -> bool:
    """Whether the driver's run directory is this machine's too."""
    if run_dir is None:
        return False
    try:
        return (Path(run_dir) / "token").read_text() == token
    except OSError:
        return False
