"""What tests of different parts share: one Ray for all that need Ray, since a start costs seconds."""

import os
import shutil
import tempfile

import pytest

# Before torch is imported: a thread for every core, in every process of a test, only makes them wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def ray_address():
    """The address of a Ray of this session's own, with 2 CPUs; ends with the session."""
    from raytrainer.cluster import ray_adapter

    environment = dict(os.environ)
    temp_dir = tempfile.mkdtemp(prefix="rt", dir="/tmp")
    node = ray_adapter.start_node({"num_cpus": 2, "resources": {"probe": 1}}, temp_dir)
    yield node.address
    ray_adapter.end_node(node)
    shutil.rmtree(temp_dir, ignore_errors=True)
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture
def ray_cluster():
    """A Ray cluster of this test's own whose nodes come and go; at first a head with one CPU."""
    from ray.cluster_utils import Cluster

    environment = dict(os.environ)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield cluster
    cluster.shutdown()
    os.environ.clear()
    os.environ.update(environment)
