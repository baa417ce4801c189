"""The number of workers follows the nodes of a real Ray cluster."""

import os
import threading
from pathlib import Path

import pytest

from raytrainer.cluster.ray_run import run_on_ray
from raytrainer.cluster.signals import StopSignal
from raytrainer.config.connection import RaySection
from raytrainer.config.scaling import ScalingSection

ROOT = str(Path(__file__).parents[1])


@pytest.fixture
def cluster():
    from ray.cluster_utils import Cluster

    environment = dict(os.environ)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield cluster
    cluster.shutdown()
    os.environ.clear()
    os.environ.update(environment)


@pytest.mark.ray
@pytest.mark.filterwarnings("default")
def test_a_node_that_joins_is_used_and_one_that_dies_is_left(cluster, tmp_path):
    """1 worker; a node joins: 2; it is killed: 1 at once, without waiting for it."""
    records, nodes, threads = [], [], []

    def act(do):
        threads.append(threading.Thread(target=do))
        threads[-1].start()

    def on_record(record):
        records.append(record)
        if record.get("event") == "resumed" and record["step"] == 0:
            act(lambda: nodes.append(cluster.add_node(num_cpus=1)))
        elif record.get("event") == "resized" and record["to"] == 2:
            act(lambda: cluster.remove_node(nodes[0], allow_graceful=False))

    outcome = run_on_ray(
        {
            "entry": "tests.ray_entries:follow_the_cluster",
            "import_paths": [ROOT],
            "folder": str(tmp_path),
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
    for thread in threads:
        thread.join()
    assert (outcome.status, outcome.result["world_size"]) == ("finished", 1)
    resized = [record for record in records if record.get("event") == "resized"]
    assert [(each["from"], each["to"]) for each in resized] == [(1, 2), (2, 1)]
    assert [each["lost_steps"] for each in resized] == [0, 0]
    assert len(outcome.restarts) == 1
    assert not [record for record in records if record.get("event") == "waiting"]
    print([each["seconds"] for each in resized])
