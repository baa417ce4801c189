"""The number of workers follows the nodes of a real Ray cluster."""

import queue
import threading
from pathlib import Path

import pytest

from raytrainer.cluster.ray_run import run_on_ray
from raytrainer.cluster.signals import StopSignal
from raytrainer.config.connection import RaySection
from raytrainer.config.scaling import ScalingSection

ROOT = str(Path(__file__).parents[1])


def run_in(cluster, folder, on_record):
    return run_on_ray(
        {
            "entry": "tests.ray_entries:follow_the_cluster",
            "import_paths": [ROOT],
            "folder": str(folder),
            "last_attempt": 2,
        },
        ScalingSection(num_workers={"min": 1, "max": 4}, grow_within_s=5.0),
        RaySection(address=cluster.address),
        on_record=on_record,
        stop=StopSignal(),
        max_failures=1,
        storage_path="runs",
        name="test",
        verbose=False,
        committed_step=lambda: None,
        num_microbatches=4,
    )


@pytest.mark.ray
@pytest.mark.filterwarnings("default")
def test_a_node_that_joins_is_used_and_one_that_dies_is_left(ray_cluster, tmp_path):
    """1 worker; a node joins: 2; it is killed: 1 at once, without waiting for it."""
    records, nodes, actions, outcomes = [], [], queue.Queue(), []

    def on_record(record):
        records.append(record)
        if record.get("event") == "resumed" and record["step"] == 0:
            actions.put(lambda: nodes.append(ray_cluster.add_node(num_cpus=1)))
        elif record.get("event") == "resized" and record["to"] == 2:
            actions.put(lambda: ray_cluster.remove_node(nodes[0], allow_graceful=False))

    def train():
        try:
            outcomes.append(run_in(ray_cluster, tmp_path, on_record))
        finally:
            actions.put(None)

    # Ray starts nodes in the main thread only.
    training = threading.Thread(target=train)
    training.start()
    while (action := actions.get()) is not None:
        action()
    training.join()
    (outcome,) = outcomes
    assert (outcome.status, outcome.result["world_size"]) == ("finished", 1)
    resized = [record for record in records if record.get("event") == "resized"]
    assert [(each["from"], each["to"]) for each in resized] == [(1, 2), (2, 1)]
    assert [each["lost_steps"] for each in resized] == [0, 0]
    assert len(outcome.restarts) == 1
    print([each["seconds"] for each in resized])
