"""TensorBoard's event files, scalars only: the bytes of one event a record, whatever the number of values.

An event file is a sequence of TFRecords (https://www.tensorflow.org/tutorials/load_data/tfrecord), each an
Event of tensorboard/compat/proto/event.proto. tensorboardX, which writes an event a value through a queue
between processes, took 1 ms a record of seven: a tenth of a step of 10 ms where every step is logged.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping


def file_name() -> str:
    """As TensorBoard looks for them, in order of time."""
    return f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"


def opening(step: int, wall_time_s: float) -> bytes:
    """The records that open a file: its version, and that what came before after `step` no longer counts."""
    version = b"\x1a" + _sized(b"brain.Event:2")  # Event.file_version
    session_start = b"\x3a" + _sized(b"\x08\x01")  # Event.session_log, SessionLog.status = START
    return _record(_event(0, wall_time_s) + version) + _record(_event(step, wall_time_s) + session_start)


def scalars(step: int, wall_time_s: float, values: Mapping[str, float]) -> bytes:
    """The record of one step's values by tag."""
    summary = b"".join(
        # Summary.value: Value.tag, Value.simple_value
        b"\x0a" + _sized(b"\x0a" + _sized(tag.encode()) + b"\x15" + _float32(value))
        for tag, value in values.items()
    )
    return _record(_event(step, wall_time_s) + b"\x2a" + _sized(summary))  # Event.summary


def _event(step: int, wall_time_s: float) -> bytes:
    return b"\x09" + struct.pack("<d", wall_time_s) + b"\x10" + _varint(step)  # Event.wall_time, Event.step


def _float32(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return struct.pack("<f", float("inf") if value > 0 else float("-inf"))


def _sized(content: bytes) -> bytes:
    return _varint(len(content)) + content


def _varint(number: int) -> bytes:
    groups = bytearray()
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    groups.append(number)
    return bytes(groups)


def _record(content: bytes) -> bytes:
    length = struct.pack("<Q", len(content))
    return length + _masked_crc(length) + content + _masked_crc(content)


def _crc32c_table() -> tuple[int, ...]:
    table = []
    for entry in range(256):
        for _ in range(8):
            entry = entry >> 1 ^ (0x82F63B78 if entry & 1 else 0)
        table.append(entry)
    return tuple(table)


_TABLE = _crc32c_table()


def _masked_crc(content: bytes) -> bytes:
    crc, table = 0xFFFFFFFF, _TABLE
    for byte in content:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    # Masked, as the format has it, so that a checksum of checksums is not degenerate.
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
