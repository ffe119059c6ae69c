"""The workspace beside vLLM's own module: the same requests, each with arguments made anew, in inference mode, in rounds that
take turns and in the thread's own time, because these machines are shared; the closing table has the ratios of medians.
Skipped where vLLM cannot be imported (ARENA_VLLM_TREE names a source tree of it). With a GPU each row is measured there too.
"""

import itertools
import threading
from statistics import median
from time import thread_time

import pytest

torch = pytest.importorskip("torch")

import stock  # noqa: E402

from arena import workspace  # noqa: E402

CALLS = 200  # a round
bf16, f32, i32, u8 = torch.bfloat16, torch.float32, torch.int32, torch.uint8

# What a step asks for, by the number of shapes; 2 is the form of every MoE layer.
FORMS = {
    1: lambda n: (((n, 64), bf16),),
    2: lambda n: (((n, 128), bf16), ((n, 64), bf16)),
    3: lambda n: (((n, 64), bf16), ((n, 8), f32), ((n,), i32)),
    6: lambda n: (((n, 64), bf16), ((n, 8), f32), ((n,), i32), ((n, 2, 4), bf16), ((n, 16), u8), ((4, n), f32)),
}
REUSE_TARGETS = {1: 15, 2: 20, 3: 25, 6: 30}
pytestmark = pytest.mark.benchmark(timer=thread_time)

WAYS = ["new", "reuse"]  # new objects each time, or the same ones


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return request.param


@pytest.fixture
def theirs(monkeypatch):
    module = stock.module()
    if module is None:
        pytest.skip(stock.why[0])
    if not torch.accelerator.is_available():
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    return module


@pytest.fixture
def make(theirs, device):
    """make(who, ubatches): a manager."""

    def run(who, ubatches=1):
        if who == "stock":
            return theirs.WorkspaceManager(torch.device(device), ubatches)
        return workspace.WorkspaceManager(torch.device(device), ubatches, reuse_views=who == "reuse")

    return run


def ask(call, requests):
    with torch.inference_mode():
        for specs in requests:
            call(*specs)


@pytest.fixture
def beside(benchmark, fact, device):
    """beside(label, work, stock, ours, target): times `work(*ours())`, and in turn with it `work(*stock())`."""

    def run(label, work, stock, ours, target=None, rounds=300, limit=None):
        took = []

        def setup():
            arguments = stock()
            begin = thread_time()
            work(*arguments)
            took.append(thread_time() - begin)
            return ours(), {}

        benchmark.group = f"{label}, {device}"
        benchmark.extra_info.update(calls=CALLS, floor=False, target=None)
        benchmark.pedantic(work, setup=setup, rounds=rounds, warmup_rounds=10)
        theirs, mine = (each / CALLS * 1e9 for each in (median(took), benchmark.stats.stats.median))
        text = f"{theirs:8.0f} ns, ours {mine:7.0f} ns: {theirs / mine:5.2f} ×"
        text += f" (target ≥ {target} ×)" if target else ""
        text += f" (≤ {limit} ns)" if limit else ""
        fact(f"{benchmark.group:<58} vLLM", text)

    return run


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shapes", FORMS)
def test_seen(beside, make, device, shapes, way):
    form = FORMS[shapes]
    target = REUSE_TARGETS[shapes] if way == "reuse" else 5
    limit = 250 if (shapes, way, device) == (2, "reuse", "cpu") else None
    beside(f"seen before, {way}, {shapes} shapes", ask, *(seen(make(who), form) for who in ("stock", way)), target, limit=limit)


def seen(manager, form):
    ask(manager.get_simultaneous, [form(32)] * 3)
    return lambda: (manager.get_simultaneous, [form(32) for _ in range(CALLS)])


@pytest.mark.parametrize("way", WAYS)
def test_seen_on_a_dbo_thread(beside, make, theirs, way):
    """The thread that measures is one of two that work on an ubatch each."""
    from vllm.v1.worker import ubatching

    threads = ubatching._THREAD_ID_TO_CONTEXT
    threads.update({threading.get_ident(): 1, -1: 0})
    try:
        managers = [make(who, 2) for who in ("stock", way)]
        setups = [seen(each, FORMS[2]) for each in managers]
        assert [each._current_workspaces[0] for each in managers] == [None, None]
        beside(f"on a DBO thread, {way}, 2 shapes", ask, *setups, 15 if way == "reuse" else None)
    finally:
        threads.clear()


@pytest.mark.parametrize("way", WAYS)
def test_a_working_set_of_64(beside, make, way):
    def setup(who):
        manager = make(who)
        ask(manager.get_simultaneous, [FORMS[2](4096)])
        for _ in range(3):
            ask(manager.get_simultaneous, [FORMS[2](rows) for rows in range(1, 65)])
        return lambda: (manager.get_simultaneous, [FORMS[2](1 + each % 64) for each in range(CALLS)])

    beside(f"64 requests in turn, {way}, 2 shapes", ask, setup("stock"), setup(way), 5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shapes", FORMS)
def test_never_seen(beside, make, shapes, way):
    """No request comes twice; the slot is large enough."""

    def setup(who):
        rows = itertools.count(1)
        manager = make(who)
        ask(manager.get_simultaneous, [FORMS[shapes](1 << 17)])
        return lambda: (manager.get_simultaneous, [FORMS[shapes](next(rows)) for _ in range(CALLS)])

    beside(f"never seen, {way}, {shapes} shapes", ask, setup("stock"), setup(way), 2)


def persistent(call, keys):
    for key in keys:
        call(key, (8,), i32, zero_init=True)


def resource(call, keys):
    for key in keys:
        call(key, object)


def keys_of(kind):
    """A tuple is made anew for each call, as callers do."""
    stream = object()
    return lambda: ["locks" if kind == "a name" else ("locks", stream) for _ in range(CALLS)]


@pytest.mark.parametrize("key", ["a name", "a tuple"])
@pytest.mark.parametrize("name", ["get_persistent", "get_persistent_resource"])
def test_persistent(beside, make, name, key):
    keys = keys_of(key)
    work, target = {"get_persistent": (persistent, 5), "get_persistent_resource": (resource, 2)}[name]

    def setup(who):
        call = getattr(make(who), name)
        work(call, keys()[:3])
        return lambda: (call, keys())

    beside(f"{name}, {key}", work, setup("stock"), setup("new"), target)


def current(call):
    for _ in itertools.repeat(None, CALLS):
        call()


def test_current_workspace_manager(beside, theirs):
    modules = theirs, workspace
    for each in modules:
        each.init_workspace_manager(torch.device("cpu"))
    try:
        calls = [(each.current_workspace_manager,) for each in modules]
        beside("current_workspace_manager()", current, *(lambda call=call: call for call in calls), 1)
    finally:
        for each in modules:
            each.reset_workspace_manager()
