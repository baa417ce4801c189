"""What the sinks leave behind: records whole and in order, readable by others."""

import json
import struct

import pytest
import torch
from tensorboardX.proto.event_pb2 import Event

from raytrainer.loggers import JsonlSink, Logger, ObserverSink, TensorBoardSink
from raytrainer.rundir import RunDirectory


def events(content):
    """The events in a file of TensorBoard's: length, its checksum, the event, its checksum."""
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        yield Event.FromString(content[12 : 12 + length])
        content = content[16 + length :]


@pytest.mark.parametrize("root", ["{tmp}/run", "memory://loggers/run"])
def test_every_record_reaches_every_sink_in_order(tmp_path, root):
    run_dir = RunDirectory(root.format(tmp=tmp_path), "token")
    run_dir.storage.make_folder()
    seen = []
    logger = Logger([ObserverSink(seen.append), JsonlSink(run_dir), TensorBoardSink(run_dir, step=3)])
    for step in (4, 5, 6):
        logger.log({"step": step, "time_s": 1.0, "loss": torch.tensor(step / 4), "eval/accuracy": 0.5})
    logger.log({"step": 7, "loss": float("nan")})
    logger.close()
    assert [record["loss"] for record in seen[:3]] == [1.0, 1.25, 1.5]
    names = [name for name in run_dir.storage.list() if name.startswith("metrics.jsonl")]
    lines = b"".join(run_dir.storage.read(name) for name in names).splitlines()
    assert [json.loads(line)["step"] for line in lines] == [4, 5, 6, 7]
    assert json.loads(lines[-1])["loss"] is None
    (file,) = run_dir.storage.list("tb")
    written = list(events(run_dir.storage.read(f"tb/{file}")))
    assert any(event.session_log.status == event.session_log.START and event.step == 4 for event in written)
    values = [
        (event.step, value.tag, value.simple_value) for event in written for value in event.summary.value
    ]
    assert values[:2] == [(4, "train/loss", 1.0), (4, "eval/accuracy", 0.5)]
    assert len(values) == 7


def test_a_sink_that_fails_is_told_to_the_training_thread():
    def fail(record):
        raise OSError(28, "No space left on device")

    logger = Logger([ObserverSink(fail)])
    logger.log({"step": 1})
    with pytest.raises(OSError, match="No space left"):
        logger.close()
