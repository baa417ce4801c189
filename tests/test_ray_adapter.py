"""The names inside Ray that raytrainer leans on, each in the shape that it expects; none of this starts Ray.

Tried with Ray 2.60.0. For another version: make these tests pass, run `tests/test_ray_run.py`, look at what
`tests/benchmarks/startup.py` says, then add it to `TRIED_RAY_VERSIONS`.
"""

import ast
import fcntl
import inspect
import os
import re
from importlib import metadata
from pathlib import Path

import pytest

from raytrainer.cluster.ray_session import TRIED_RAY_VERSIONS, explain_missing
from raytrainer.errors import UsageError

ray = pytest.importorskip("ray")

from raytrainer.cluster import ray_adapter, ray_train  # noqa: E402

# A module or name that begins with an underscore, as in ray._private.
PRIVATE = re.compile(r"ray\.(.*\.)?_")

CLUSTER = Path(ray_adapter.__file__).parent


def parameters(function):
    return list(inspect.signature(function).parameters)


def test_this_version_of_ray_was_tried():
    version = metadata.version("ray")
    if version not in TRIED_RAY_VERSIONS:
        pytest.skip(f"Ray {version} was not tried yet, only {TRIED_RAY_VERSIONS}")


def test_node():
    assert {"ray_params", "head", "shutdown_at_exit", "spawn_reaper"} <= set(parameters(ray_adapter.Node))
    assert hasattr(ray_adapter.Node, "start_api_server")
    assert {"check_alive", "allow_graceful"} <= set(parameters(ray_adapter.Node.kill_all_processes))
    fields = parameters(ray_adapter.parameter.RayParams)
    wanted = ["no_monitor", "include_log_monitor", "include_dashboard", "temp_dir", "metrics_agent_port"]
    wanted += ["runtime_env_agent_port", "dashboard_agent_listen_port", "num_cpus", "labels"]
    assert set(wanted) <= set(fields)


def test_replaced_functions_are_looked_up_where_they_are_replaced():
    assert callable(ray_adapter.ray_utils.get_dashboard_dependency_error)
    assert "utils.get_dashboard_dependency_error()" in inspect.getsource(ray_adapter.services.start_raylet)
    assert parameters(ray_adapter.ray_worker.listen_error_messages) == ["worker", "threads_stopped"]
    assert "target=listen_error_messages" in inspect.getsource(ray_adapter.ray_worker.connect)


def test_key_value_store():
    store = ray_adapter.internal_kv
    assert parameters(store._internal_kv_put)[:2] == ["key", "value"]
    assert {"overwrite", "namespace"} <= set(parameters(store._internal_kv_put))
    assert parameters(store._internal_kv_get) == ["key", "namespace"]
    assert parameters(store._internal_kv_del) == ["key", "del_by_prefix", "namespace"]


def test_controller():
    source = inspect.getsource(ray_train.TrainController)
    assert "self._health_check_interval_s = float(" in source
    assert "self.worker_group_cls.create(" in source
    assert "status = self._worker_group.poll_status(" in source
    assert inspect.iscoroutinefunction(ray_train.TrainController.run)
    # Neither may start an actor of its own.
    assert "ENABLE_PREEMPTION_WATCHER_ENV_VAR" in source
    assert parameters(ray_train.TrainController.get_result) == ["self"]


def test_trainer():
    trainer = ray_train.DataParallelTrainer
    for name in ("_get_train_func", "_create_default_callbacks", "_initialize_and_run_controller"):
        assert callable(getattr(trainer, name))
    assert "train_fn_ref = ObjectRefWrapper(train_fn)" in inspect.getsource(trainer.fit)


def test_worker_group():
    group = ray_train.WorkerGroup
    assert parameters(group._start_impl) == ["self", "worker_group_state_builder"]
    assert parameters(group._poll_workers_and_collect_errors) == ["self", "timeout"]
    assert parameters(group._create_placement_group) == ["self", "scaling_config", "worker_group_context"]
    assert parameters(group._assign_worker_ranks)[0] == "workers"
    state = list(ray_train.WorkerGroupState.__dataclass_fields__)
    assert state == ["start_time", "placement_group_handle", "workers", "sync_actor"]
    metadata_fields = list(ray_train.ActorMetadata.__dataclass_fields__)
    assert metadata_fields == ["hostname", "node_id", "node_ip", "pid", "accelerator_ids"]
    status = ray_train.WorkerStatus(running=False)
    assert (status.error, status.return_value, status.training_report) == (None, None, None)


def test_scaling_policy():
    policy = ray_train.FixedScalingPolicy
    for name in ("after_controller_start", "before_controller_shutdown", "before_controller_abort"):
        assert name in dir(policy)
    assert "_maybe_send_resource_request" in inspect.getsource(policy)


def test_what_killed_drivers_left_is_removed(tmp_path):
    for name in ("abandoned", "in_use", "fresh"):
        folder = tmp_path / f"rt-{name}"
        folder.mkdir()
        (folder / "driver.lock").touch()
        if name != "fresh":
            os.utime(folder / "driver.lock", (0, 0))
    (tmp_path / "rt-somebody_elses").mkdir()
    with open(tmp_path / "rt-in_use" / "driver.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.utime(tmp_path / "rt-in_use" / "driver.lock", (0, 0))
        ray_adapter.remove_abandoned(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rt-fresh", "rt-in_use", "rt-somebody_elses"]


def test_private_names_stay_in_the_adapter():
    for path in CLUSTER.glob("*.py"):
        if path.name in ("ray_adapter.py", "ray_train.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom | ast.Import):
                names = (
                    [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
                )
                for name in names:
                    assert not PRIVATE.match(name), f"{path.name}: {name}"


def test_a_ray_without_such_a_name_is_explained():
    error = explain_missing(ImportError("cannot import name 'Node'", name="ray._private.node"))
    assert isinstance(error, UsageError)
    assert TRIED_RAY_VERSIONS[-1] in str(error)
    assert not isinstance(explain_missing(ImportError("no mlflow", name="mlflow")), UsageError)
