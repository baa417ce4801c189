"""How the driver reaches the ranks that outlive a lost one, also those that hang: a TCP port of each.

Nothing goes over it while all is well. A rank answers in a thread of its own, since its main thread may be
stuck in a collective operation until the group is ended.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from raytrainer.cluster.channel import Channel
from raytrainer.cluster.survivor import SAVE_S, Survivor, choose_survivor

# For a rank to be reached and to answer what it holds.
OFFER_S = 5.0
_MAX_AT_ONCE = 32

Address = tuple[str, int]


def answer_rescues(listener: socket.socket, token: str, survivor: Survivor) -> None:
    """Answers the driver, which knows `token`, on `listener` from a thread, as long as the process lives."""
    threading.Thread(
        target=_answer_all, args=(listener, token, survivor), name="raytrainer-rescue", daemon=True
    ).start()


def _answer_all(listener: socket.socket, token: str, survivor: Survivor) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # closed
            return
        connection.settimeout(SAVE_S)
        with closing(Channel(connection)) as channel:
            while not channel.closed:
                for message in channel.receive(wait=True):
                    if message.get("token") != token:
                        channel.closed = True
                        break
                    if "save" in message:
                        channel.send({"answer": survivor.save(message["save"])})
                    else:
                        channel.send({"answer": survivor.finished_step()})


def rescue(addresses: Mapping[int, Address], token: str, committed_step: int) -> int | None:
    """Has one of the ranks at `addresses` save its last finished step; the step, None if none was saved.

    addresses: by rank, of those that may be alive. A rank that is lost meanwhile, or too slow, changes
    nothing: the run goes on from the checkpoint.
    """
    if not addresses:
        return None
    with ThreadPoolExecutor(min(_MAX_AT_ONCE, len(addresses))) as pool:
        asked = {rank: pool.submit(_ask, address, {"token": token}) for rank, address in addresses.items()}
    rank = choose_survivor({rank: each.result() for rank, each in asked.items()}, committed_step)
    if rank is None:
        return None
    return _ask(addresses[rank], {"token": token, "save": committed_step}, SAVE_S)


def _ask(address: Address, message: dict, answer_s: float = OFFER_S) -> int | None:
    """The rank's answer; None as well where there is none within `answer_s`."""
    try:
        connection = socket.create_connection(address, timeout=OFFER_S)
    except OSError:
        return None
    connection.settimeout(answer_s)
    with closing(Channel(connection)) as channel:
        channel.send(message)
        while not channel.closed:
            for answer in channel.receive(wait=True):
                return answer["answer"]
    return None
