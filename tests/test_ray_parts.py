"""What the Ray backend decides, without Ray: requests, places, failures, and the way of the records."""

import socket
from contextlib import ExitStack

import pytest

from raytrainer.cluster import ray_link
from raytrainer.cluster.outcome import RankFailure
from raytrainer.cluster.ray_failure import Retries, describe_loss, judge
from raytrainer.cluster.ray_place import RankPlace, rank_environments, thread_environment, visible_gpus
from raytrainer.cluster.ray_request import (
    NodeCapacity,
    WorkerRequest,
    check_request,
    count_fitting,
    matches,
    plan_request,
)
from raytrainer.cluster.ray_rescue import answer_rescues, rescue
from raytrainer.cluster.signals import StopSignal
from raytrainer.config.scaling import ScalingSection
from raytrainer.errors import ClusterRequestError

GPU_NODE = NodeCapacity({"CPU": 8.0, "GPU": 2.0, "accelerator_type:H200": 1.0}, {"zone": "a"})
CPU_NODE = NodeCapacity({"CPU": 4.0, "memory": 8 * 2.0**30}, {"zone": "b"})


@pytest.mark.parametrize(
    ("nodes", "gpus", "wanted"),
    [([CPU_NODE], "auto", None), ([CPU_NODE, GPU_NODE], "auto", 1), ([GPU_NODE], 0, None), ([], 0.25, 0.25)],
)
def test_gpus_are_asked_for_where_there_are_some(nodes, gpus, wanted):
    request = plan_request(ScalingSection(num_workers=1, gpus_per_worker=gpus), nodes)
    assert request.resources.get("GPU") == wanted


@pytest.mark.parametrize(
    ("request_", "wanted"),
    [
        (WorkerRequest(9, {"CPU": 1}), 12),
        (WorkerRequest(9, {"CPU": 3}), 3),
        (WorkerRequest(9, {"CPU": 1, "GPU": 1}), 2),
        (WorkerRequest(9, {"CPU": 0.1, "GPU": 0.1}), 20),
        (WorkerRequest(9, {"CPU": 1}, "STRICT_PACK"), 8),
        (WorkerRequest(9, {"CPU": 1}, "STRICT_SPREAD"), 2),
        (WorkerRequest(9, {"CPU": 1}, labels={"zone": "b"}), 4),
        (WorkerRequest(9, {"CPU": 1}, labels={"zone": "!b"}), 8),
        (WorkerRequest(9, {"CPU": 1}, accelerator_type="H200"), 8),
        (WorkerRequest(9, {"CPU": 1}, accelerator_type="A100"), 0),
        (WorkerRequest(9, {"memory": 4 * 2**30}), 2),
        (WorkerRequest(9, {"CPU": 1, "scratch": 1}), 0),
    ],
)
def test_how_many_workers_fit(request_, wanted):
    assert count_fitting(request_, [GPU_NODE, CPU_NODE]) == wanted


@pytest.mark.parametrize(
    ("condition", "holds"),
    [("a", True), ("b", False), ("!a", False), ("in(a, b)", True), ("!in(a,b)", False)],
)
def test_label_conditions(condition, holds):
    assert matches({"zone": condition}, {"zone": "a"}) is holds


@pytest.mark.parametrize(
    ("request_", "parts"),
    [
        (WorkerRequest(13, {"CPU": 1}), ["can hold 12 of 13 workers", "CPU: 12", "scaling.num_workers: 12"]),
        (WorkerRequest(1, {"CPU": 16}), ["0 of 1 worker", "scaling.cpus_per_worker: 8"]),
        (WorkerRequest(1, {"GPU": 4}), ["GPU: 4", "GPU: 2", "scaling.gpus_per_worker: 2"]),
        (WorkerRequest(1, {"scratch": 1}), ["scratch: 1", "scratch: 0", "resources_per_worker.scratch"]),
        (WorkerRequest(1, {"CPU": 1}, accelerator_type="A100"), ["A100", "accelerator types: H200"]),
        (WorkerRequest(1, {"CPU": 1}, labels={"zone": "c"}), ["label zone: c", "label zone: a, b"]),
        (
            WorkerRequest(1, {"GPU": 1, "memory": 2.0**30}),
            ["memory: 1.0 GiB", "no single node has all of it"],
        ),
    ],
)
def test_a_refusal_names_what_was_asked_and_what_there_is(request_, parts):
    with pytest.raises(ClusterRequestError) as caught:
        check_request(request_, [GPU_NODE, CPU_NODE])
    for part in parts:
        assert part in str(caught.value)


def test_what_fits_is_not_refused():
    check_request(WorkerRequest(12, {"CPU": 1}), [GPU_NODE, CPU_NODE])


def places(*gpu_ids):
    return [
        RankPlace(rank, 4, rank % 2, 2, rank // 2, f"10.0.0.{rank // 2}", 100 + rank, 5000 + rank, ids)
        for rank, ids in enumerate(gpu_ids)
    ]


def test_environments_are_those_of_torchrun():
    environments = rank_environments(places((), (), (), ()), attempt=2)
    assert environments[3]["RANK"] == "3"
    assert environments[3]["LOCAL_RANK"] == "1"
    assert environments[3]["GROUP_RANK"] == "1"
    assert environments[3]["GROUP_WORLD_SIZE"] == "2"
    assert environments[3]["TORCHELASTIC_RESTART_COUNT"] == "2"
    assert {(each["MASTER_ADDR"], each["MASTER_PORT"]) for each in environments} == {("10.0.0.0", "5000")}
    assert {each["CUDA_VISIBLE_DEVICES"] for each in environments} == {""}


def test_ranks_see_the_cards_of_their_node_or_their_own():
    one_each = places(("1",), ("0",), ("4",), ("5",))
    assert [visible_gpus(place, one_each) for place in one_each] == [["1", "0"]] * 2 + [["4", "5"]] * 2
    two_each = places(("0", "1"), ("2", "3"))
    assert visible_gpus(two_each[1], two_each) == ["2", "3"]


def test_threads():
    given = {"cpus_per_worker": 4.0, "num_workers": 2}
    assert thread_environment({}, machine_is_ours=False, **given) == {"OMP_NUM_THREADS": "4"}
    assert thread_environment({"OMP_NUM_THREADS": "3"}, machine_is_ours=True, **given) == {
        "OMP_NUM_THREADS": "3"
    }
    fraction = {"cpus_per_worker": 0.5, "num_workers": 10_000}
    assert thread_environment({}, machine_is_ours=False, **fraction) == {"OMP_NUM_THREADS": "1"}
    assert thread_environment({}, machine_is_ours=True, **fraction) == {"OMP_NUM_THREADS": "1"}


LOST = RankFailure(1, "lost", message="gone", time=2.0)
ECHO = RankFailure(0, "collateral", "RuntimeError", "Connection closed by peer", time=1.0)
OWN = RankFailure(0, "user", "ValueError", "bad", time=3.0)


@pytest.mark.parametrize(
    ("failures", "before", "step", "stopping", "limit", "retry", "count"),
    [
        ([LOST, ECHO], Retries(), None, False, 1, True, 1),
        ([LOST], Retries(None, 1), None, False, 1, False, 2),
        ([LOST], Retries(None, 1), 10, False, 1, True, 1),
        ([LOST], Retries(10, 1), 10, False, 1, False, 2),
        ([LOST], Retries(None, 99), None, False, -1, True, 100),
        ([LOST], Retries(), None, False, 0, False, 1),
        ([LOST], Retries(), None, True, 3, False, 1),
        ([ECHO], Retries(), None, False, 3, True, 1),
        ([OWN], Retries(), None, False, 3, False, 1),
        ([ECHO, OWN], Retries(), None, False, 3, False, 1),
    ],
)
def test_only_what_a_new_start_can_mend_is_tried_again(failures, before, step, stopping, limit, retry, count):
    verdict = judge(failures, before, step=step, stopping=stopping, max_failures=limit)
    assert verdict.retry is retry
    assert verdict.retries == Retries(step, count)


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        ("Worker unexpectedly exits with a connection error code 2. (1) killed by the OOM killer", "SIGKILL"),
        ("The actor died because its node has died. Node Id: 1", "its node died"),
        ("Task was killed due to the node running low on memory.", "was running out of memory"),
        ("The actor died unexpectedly before finishing this task.\n\tpid: 3\nwent away", "went away"),
    ],
)
def test_a_loss_is_explained(told, wanted):
    failure = describe_loss(1, told, "pid 7 on 10.0.0.2", 1.5, 3.0)
    assert failure.kind == "lost"
    assert wanted in failure.message
    assert "pid 7 on 10.0.0.2" in failure.message
    assert "node died" in wanted or "1.5 GiB" in failure.message


@pytest.fixture
def store(monkeypatch):
    values = {}

    def delete_prefix(prefix):
        for key in [key for key in values if key.startswith(prefix)]:
            del values[key]

    monkeypatch.setattr(ray_link.ray_adapter, "kv_put", values.__setitem__)
    monkeypatch.setattr(ray_link.ray_adapter, "kv_get", values.get)
    monkeypatch.setattr(ray_link.ray_adapter, "kv_delete", values.pop)
    monkeypatch.setattr(ray_link.ray_adapter, "kv_delete_prefix", delete_prefix)
    return values


def test_records_arrive_in_order_and_leave_nothing(store):
    got = []
    driver = ray_link.DriverLink("run", got.append)
    for attempt in range(2):
        driver.start_attempt(attempt)
        assert not driver.training
        ranks = [ray_link.RankLink(ray_link.Keys("run", attempt), rank, StopSignal()) for rank in (0, 1)]
        for number in range(100):
            for rank, link in enumerate(ranks):
                link.observe({"step": number, "attempt": attempt, "rank": rank})
        for link in ranks:
            link.close()
        driver.poll()
        assert driver.training
    assert [(record["attempt"], record["step"]) for record in got] == [
        (a, n) for a in (0, 1) for n in range(100)
    ]
    assert {record["rank"] for record in got} == {0}
    driver.close()
    assert store == {}


def test_a_stop_reaches_rank_0(store):
    stop = StopSignal()
    link = ray_link.RankLink(ray_link.Keys("run", 0), 0, stop)
    ray_link.DriverLink("run", print).request_stop("SIGTERM")
    with stop.listening(link._closing.set):
        link._thread.join(10)
    assert stop.requested == "SIGTERM"


def test_a_rank_tells_its_size(store, monkeypatch):
    monkeypatch.setattr(ray_link, "peak_memory_gib", lambda: 1.25)
    link = ray_link.RankLink(ray_link.Keys("run", 0), 3, StopSignal())
    link._send_memory()
    link.close()
    driver = ray_link.DriverLink("run", print)
    assert driver.memory_gib(3) == 1.25
    assert driver.memory_gib(0) is None


def test_metrics_are_dropped_and_events_kept_when_nobody_reads(store, monkeypatch):
    monkeypatch.setattr(ray_link, "MAX_PENDING_RECORDS", 2)
    monkeypatch.setattr(ray_link, "POLL_S", 3600.0)
    link = ray_link.RankLink(ray_link.Keys("run", 0), 0, StopSignal())
    for number in range(5):
        link.observe({"step": number})
    link.observe({"event": "checkpointed"})
    link.close()
    got = []
    ray_link.DriverLink("run", got.append).poll()
    assert got == [{"step": 0}, {"step": 1}, {"event": "checkpointed"}]


class Holding:
    """A survivor's side: what it holds, and what it was told to save."""

    def __init__(self, step):
        self.step, self.saved = step, None

    def finished_step(self):
        return self.step

    def save(self, committed_step):
        self.saved = committed_step
        return self.step


def test_the_rank_that_holds_most_saves_and_the_dead_are_passed_over():
    ranks = {rank: Holding(step) for rank, step in enumerate([4, 7, 7, None])}
    addresses = {}
    with ExitStack() as open_ones:
        for rank, holding in ranks.items():
            listener = open_ones.enter_context(socket.create_server(("127.0.0.1", 0)))
            open_ones.callback(listener.shutdown, socket.SHUT_RDWR)
            addresses[rank] = listener.getsockname()
            answer_rescues(listener, "token", holding)
        with socket.create_server(("127.0.0.1", 0)) as closed:
            addresses[4] = closed.getsockname()
        assert rescue(addresses, "another run's token", 3) is None
        assert rescue(addresses, "token", 7) is None
        assert [holding.saved for holding in ranks.values()] == [None] * 4
        assert rescue(addresses, "token", 3) == 7
        assert [holding.saved for holding in ranks.values()] == [None, 3, None, None]
    assert rescue({}, "token", 3) is None
