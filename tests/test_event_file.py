"""Event files are read back by tensorboardX's definitions of the format, and their checksums by its code."""

import math
import struct

import pytest
from tensorboardX.crc32c import crc32c
from tensorboardX.proto.event_pb2 import Event

from raytrainer import event_file
from raytrainer.loggers import TensorBoardSink
from raytrainer.rundir import RunDirectory


def events(content):
    """The events of a file; every length and checksum is checked."""
    found = []
    while content:
        (length,) = struct.unpack_from("<Q", content)
        body = content[12 : 12 + length]
        assert content[8:12] == masked(content[:8])
        assert content[12 + length : 16 + length] == masked(body)
        found.append(Event.FromString(body))
        content = content[16 + length :]
    return found


def masked(content):
    crc = crc32c(content)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def test_one_event_holds_all_values_of_a_step():
    values = {"train/loss": 0.1, "eval/accuracy": 97.5, "train/world_size": 2, "größe": -3e-7}
    (event,) = events(event_file.scalars(300_000, 1.75e9, values))
    assert (event.step, event.wall_time) == (300_000, 1.75e9)
    assert {value.tag: value.simple_value for value in event.summary.value} == {
        tag: pytest.approx(value, rel=1e-6) for tag, value in values.items()
    }


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300, -1e300])
def test_what_a_float32_cannot_hold_is_still_an_event(value):
    (event,) = events(event_file.scalars(0, 0.0, {"a": value}))
    read = event.summary.value[0].simple_value
    assert math.isnan(read) if math.isnan(value) else read == math.copysign(math.inf, value)


def test_a_file_opens_with_its_version_and_a_new_start_after_the_step():
    version, start = events(event_file.opening(120, 5.0))
    assert version.file_version == "brain.Event:2"
    assert start.step == 120
    assert start.session_log.status == start.session_log.START


def test_the_sink_writes_numbers_alone_and_shows_them_at_a_flush(tmp_path):
    sink = TensorBoardSink(RunDirectory(str(tmp_path), "token"), step=7)
    sink.write({"step": 8, "time_s": 9.0, "loss": 0.5, "eval/accuracy": 0.75, "text": "no number"})
    sink.flush()
    (file,) = (tmp_path / "tb").iterdir()
    _, start, event = events(file.read_bytes())
    assert (start.step, event.step, event.wall_time) == (7, 8, 9.0)
    shown = {value.tag: value.simple_value for value in event.summary.value}
    assert shown == {"train/loss": 0.5, "eval/accuracy": 0.75}
    sink.close()
    assert len(events(file.read_bytes())) == 3


def test_its_name_is_one_that_tensorboard_looks_for():
    assert "tfevents" in event_file.file_name()
