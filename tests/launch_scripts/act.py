"""Does what its arguments say, without torch: `act.py FOLDER RANK=ACTION ...`, `*` for every other rank."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

folder = Path(sys.argv[1])
rank = os.environ["RANK"]
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
actions = dict(each.split("=", 1) for each in sys.argv[2:])
action = actions.get(rank, actions.get("*", "nothing"))


def note(name, text=""):
    (folder / f"{name}_{rank}").write_text(str(text))


def wait():
    while True:
        signal.pause()


def start_children():
    """A forked process, one in a session of its own, and one below that."""
    pause = "import signal; signal.pause()"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', '{pause}']).wait()"
    apart = subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True)
    child = os.fork()
    if child == 0:
        wait()
    return f"{apart.pid} {child}"


def save_and_end(number, frame):
    note("told", signal.Signals(number).name)
    sys.exit(int(os.environ.get("SAVED_CODE", 0)))


note("pid", os.getpid())
if action in ("exit_3", "raise", "killed") and actions.get("0") in ("save", "ignore", "wait"):
    # Not before the other is ready for what follows.
    while not (folder / "ready_0").exists():
        time.sleep(0.01)
if action == "exit_3":
    sys.stderr.write("about to fail\n")
    sys.exit(3)
elif action == "raise":
    raise ValueError("the label of sample 7 is -1")
elif action == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
elif action == "wait":
    note("ready")
    wait()
elif action == "save":
    signal.signal(signal.SIGTERM, save_and_end)
    signal.signal(signal.SIGINT, save_and_end)
    note("ready")
    wait()
elif action == "ignore":
    signal.signal(signal.SIGTERM, lambda *_: note("told"))
    note("ready")
    wait()
elif action == "children":
    note("children", start_children())
    note("ready")
    wait()
elif action == "leave":
    note("children", start_children())
elif action == "fail_once":
    note(f"attempt{attempt}")
    sys.exit(7 if attempt == 0 else 0)
elif action == "until_restart":
    if attempt == 0:
        note("ready")
        wait()
    note("world_size", os.environ["WORLD_SIZE"])
elif action == "late":
    deadline = time.monotonic() + 20
    while not (folder / "go").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
elif action == "print":
    for number in range(3):
        print(f"out {number}")
        print(f"err {number}", file=sys.stderr)
    os.write(1, b"\xff\x00binary\n")
    sys.stderr.write("\r10%\r100%\n")
elif action == "flood":
    block = b"x" * 99 + b"\n"
    for _ in range(100):
        os.write(1, block * 10_000)
