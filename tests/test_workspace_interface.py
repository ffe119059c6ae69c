"""What vLLM's callers rely on in `arena.workspace`, on a CPU: names and parameters, globals that anybody may replace, the lock
and its words, lanes and ubatches, collectors, and what torch.compile traces. How requests are answered is in
test_workspace.py."""

import contextvars
import inspect
import logging
import sys
import threading

import pytest
from conftest import run_python

torch = pytest.importorskip("torch")

import slots  # noqa: E402
import stock  # noqa: E402
from slots import CPU, KB, MOE, block_of, f32, grow, serve_thrice, size_of, storage  # noqa: E402

from arena import workspace  # noqa: E402
from arena.workspace import WorkspaceManager  # noqa: E402

no_manager_left, manager = slots.no_manager_left, slots.manager  # fixtures


# ---- the interface ----

# vLLM 0.33's: names, kinds and defaults of the parameters. "*": keyword only from here; ours may have more of those.
INTERFACE = {
    "use_workspace_lane": "lane",
    "is_workspace_manager_initialized": "",
    "current_workspace_manager": "",
    "init_workspace_manager": "device num_ubatches=None num_lanes=1 alloc_context=nullcontext",
    "lock_workspace": "",
    "unlock_workspace": "",
    "reset_workspace_manager": "",
    "WorkspaceManager": "device num_ubatches=None num_lanes=1 alloc_context=nullcontext",
    "WorkspaceManager._workspace_size_bytes": "workspace",
    "WorkspaceManager.lock": "self",
    "WorkspaceManager.unlock": "self",
    "WorkspaceManager.is_locked": "self",
    "WorkspaceManager._get_workspace_id": "self",
    "WorkspaceManager.get_persistent_resource": "self key factory",
    "WorkspaceManager.get_persistent": "self key shape dtype * zero_init=False",
    "WorkspaceManager.get_simultaneous": "self *shapes_and_dtypes",
    "WorkspaceManager._ensure_workspace_size": "self required_bytes",
}


def parameters(function, known=None):
    words = []
    for each in inspect.signature(function).parameters.values():
        if each.kind is each.KEYWORD_ONLY:
            if known is not None and each.name not in known:
                assert each.default is not each.empty, f"{each.name} would have to be given"
                continue
            if "*" not in words:
                words.append("*")
        word = f"*{each.name}" if each.kind is each.VAR_POSITIONAL else each.name
        if each.default is not each.empty:
            word += f"={getattr(each.default, '__name__', each.default)}"
        words.append(word)
    return " ".join(words)


def named(module, path):
    for name in path.split("."):
        module = getattr(module, name)
    return module


@pytest.mark.parametrize("name", INTERFACE)
def test_every_name_of_vllms_module_is_there_with_its_parameters(name):
    assert parameters(named(workspace, name), INTERFACE[name]) == INTERFACE[name]


def test_the_recorded_interface_is_vllms():
    theirs = stock.module()
    if theirs is None:
        pytest.skip(stock.why[0])
    assert {name: parameters(named(theirs, name)) for name in INTERFACE} == INTERFACE
    public = {
        name
        for name, value in vars(theirs).items()
        if getattr(value, "__module__", "") == theirs.__name__ and callable(value) and not name.startswith("_")
    }
    assert {name.split(".")[0] for name in INTERFACE} == public - {"T"}


def test_what_all_promises_is_there():
    assert all(hasattr(workspace, name) for name in workspace.__all__)


def test_attributes_that_callers_read_are_vllms():
    manager = WorkspaceManager(CPU, 2, 3)
    assert (manager._device, manager._num_ubatches, manager._num_lanes, manager._locked) == (CPU, 2, 3, False)
    assert manager._current_workspaces == [None] * 6
    assert manager._persistent_resources == [{}] * 6


def test_the_result_is_a_list_of_its_own(manager):
    seen = serve_thrice(manager, *MOE)
    assert all(type(each) is list for each in seen)
    seen[0].clear()
    seen[1].append(None)
    assert [len(each) for each in seen] == [0, 3, 2]
    assert len(manager.get_simultaneous(*MOE)) == 2


# ---- globals are looked up at each call ----


def test_the_manager_may_be_replaced_by_anything(monkeypatch):
    assert not workspace.is_workspace_manager_initialized()
    with pytest.raises(AssertionError, match=r"WorkspaceManager not initialized\. Call init_workspace_manager"):
        workspace.current_workspace_manager()
    theirs = object()
    monkeypatch.setattr(workspace, "_manager", theirs)
    assert workspace.current_workspace_manager() is theirs
    assert workspace.is_workspace_manager_initialized()
    monkeypatch.undo()
    assert not workspace.is_workspace_manager_initialized()


def test_the_ubatch_function_may_be_replaced_at_any_time(monkeypatch):
    manager = WorkspaceManager(CPU, 3)
    here = [storage(serve_thrice(manager, *MOE)[-1][0])]
    for ubatch in (1, 2):
        monkeypatch.setattr(workspace, "dbo_current_ubatch_id", lambda ubatch=ubatch: ubatch)
        here.append(storage(serve_thrice(manager, *MOE)[-1][0]))
    assert here == [storage(block_of(manager, place)) for place in range(3)]
    assert len(set(here)) == 3
    for _ in range(3):  # there and back, without anything else between
        monkeypatch.setattr(workspace, "dbo_current_ubatch_id", lambda: 1)
        assert storage(manager.get_simultaneous(*MOE)[0]) == here[1]
        monkeypatch.undo()
        assert storage(manager.get_simultaneous(*MOE)[0]) == here[0]


def test_the_ubatch_function_is_called_each_time(monkeypatch):
    manager = WorkspaceManager(CPU, 2)
    now, here = [0], []
    monkeypatch.setattr(workspace, "dbo_current_ubatch_id", lambda: now[0])
    for now[0] in [0, 1] * 4:
        here.append(storage(manager.get_simultaneous(*MOE)[0]))
    assert here[0::2] == here[:1] * 4
    assert here[1::2] == here[1:2] * 4
    assert here[0] != here[1]


@pytest.mark.parametrize("kind", ["ContextVar", "anything with get()"])
def test_the_lane_may_be_replaced_at_any_time(monkeypatch, kind):
    manager = WorkspaceManager(CPU, 1, 2)
    before = storage(serve_thrice(manager, *MOE)[-1][0])

    class Lane:
        @staticmethod
        def get():
            return 1

    theirs = contextvars.ContextVar("theirs", default=1) if kind == "ContextVar" else Lane()
    monkeypatch.setattr(workspace, "_workspace_lane", theirs)
    assert storage(manager.get_simultaneous(*MOE)[0]) == storage(block_of(manager, 1)) != before
    monkeypatch.undo()
    assert storage(manager.get_simultaneous(*MOE)[0]) == before


def test_an_ubatch_that_the_manager_has_not_is_an_index_error(monkeypatch):
    manager = WorkspaceManager(CPU, 2)
    for ubatch in (2, -1):
        monkeypatch.setattr(workspace, "dbo_current_ubatch_id", lambda ubatch=ubatch: ubatch)
        for ask in (
            lambda: manager.get_simultaneous(*MOE),
            lambda: manager.get_persistent("k", (1,), f32),
            manager.available_bytes,
        ):
            with pytest.raises(IndexError):
                ask()


def test_empty_cache_is_looked_up_at_each_growth(monkeypatch, manager):
    calls = []
    for name in ("first", "second"):
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda name=name: calls.append(name))
        grow(manager, size_of(manager) + KB)
        grow(manager, size_of(manager))
    assert calls == ["first", "second"]


# ---- locking ----


def test_the_lock_error_names_sizes_and_caller(manager):
    grow(manager, 3 * KB * KB)
    manager.lock()
    assert manager.is_locked()
    with pytest.raises(AssertionError) as seen:
        grow(manager, 12 * KB * KB)
    frame = inspect.getsourcelines(grow)[1] + 1
    assert str(seen.value) == (
        f"Workspace is locked but allocation from 'slots.py:{frame}:grow' requires 12.00 MB, "
        "current size is 3.00 MB. Workspace growth is not allowed after locking."
    )
    assert size_of(manager) == 3 * KB * KB
    manager.unlock()
    assert not manager.is_locked()
    assert grow(manager, 12 * KB * KB).numel() == 12 * KB * KB


def test_vllms_lock_error_is_the_same(monkeypatch):
    theirs = stock.module()
    if theirs is None:
        pytest.skip(stock.why[0])
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    texts = []
    for kind in (theirs.WorkspaceManager, WorkspaceManager):
        each = kind(CPU)
        each.get_simultaneous(*MOE)
        each.lock()
        with pytest.raises(AssertionError) as seen:
            each.get_simultaneous(((1 << 20,), f32))
        texts.append(str(seen.value))
        with pytest.raises(AssertionError) as seen:
            each.get_persistent("x", (1,), f32)
        texts.append(str(seen.value))
    assert texts[:2] == texts[2:]


def test_a_locked_workspace_goes_on_serving_what_fits(manager):
    """B2: the refusal changes nothing."""
    base = grow(manager, 3 * KB).data_ptr()
    manager.lock()
    for _ in range(3):
        with pytest.raises(AssertionError, match="Workspace is locked"):
            grow(manager, 12 * KB)
        assert grow(manager, 2 * KB).data_ptr() == base
    assert manager.is_locked()
    assert size_of(manager) == 3 * KB


def test_locking_by_the_modules_functions():
    workspace.init_workspace_manager(CPU)
    manager = workspace.current_workspace_manager()
    workspace.lock_workspace()
    assert manager.is_locked()
    workspace.unlock_workspace()
    assert not manager.is_locked()


@pytest.mark.parametrize("value", ["1", "0"])
def test_the_debug_variable_is_read_at_each_use(monkeypatch, caplog, value):
    caplog.set_level(logging.INFO)
    manager = WorkspaceManager(CPU)
    grow(manager, KB)
    assert not caplog.records
    monkeypatch.setenv("VLLM_DEBUG_WORKSPACE", value)
    grow(manager, 2 * KB * KB)
    manager.lock()
    manager.unlock()
    monkeypatch.delenv("VLLM_DEBUG_WORKSPACE")
    manager.lock()
    said = [each.getMessage() for each in caplog.records]
    frame = inspect.getsourcelines(grow)[1] + 1
    assert said == (
        [
            f"[WORKSPACE DEBUG] Resized workspace from 'slots.py:{frame}:grow': 0.00 MB -> 2.00 MB (ubatch 0, lane 0)",
            "[WORKSPACE DEBUG] Workspace locked. Current sizes: [2.0]",
            "[WORKSPACE DEBUG] Workspace unlocked. Current sizes: [2.0]",
        ]
        if value == "1"
        else []
    )


# ---- lanes and ubatches ----


def test_lanes_are_independent():
    """B10."""
    manager = WorkspaceManager(CPU, 1, 2)
    with workspace.use_workspace_lane(0):
        target = grow(manager, 16 * KB)
    with workspace.use_workspace_lane(1):
        draft = grow(manager, 32 * KB)
    assert storage(target) == storage(block_of(manager, 0)) != storage(draft)
    with pytest.raises(ValueError, match="Workspace lane must be non-negative, got -1"), workspace.use_workspace_lane(-1):
        pass
    with workspace.use_workspace_lane(2):
        with pytest.raises(RuntimeError, match=r"Workspace lane 2 is not configured; manager has 2 lane\(s\)\."):
            grow(manager, KB)
        with pytest.raises(RuntimeError, match="lane 2"):
            manager.get_persistent("k", (1,), f32)
    with pytest.raises(KeyError), workspace.use_workspace_lane(1):
        raise KeyError
    assert storage(grow(manager, KB)) == storage(target)
    with pytest.raises(ValueError, match="num_lanes must be at least one, got 0"):
        WorkspaceManager(CPU, 1, 0)


def test_a_thread_begins_at_lane_0():
    manager = WorkspaceManager(CPU, 1, 2)
    seen = []
    with workspace.use_workspace_lane(1):
        thread = threading.Thread(target=lambda: seen.append(storage(grow(manager, KB))))
        thread.start()
        thread.join()
    inherits = getattr(sys.flags, "thread_inherit_context", 0)
    assert seen == [storage(block_of(manager, 1 if inherits else 0))]


def test_the_ubatch_may_be_named_and_wins_over_the_function(monkeypatch):
    manager = WorkspaceManager(CPU, 3)
    monkeypatch.setattr(workspace, "dbo_current_ubatch_id", lambda: 2)
    with workspace.use_workspace_ubatch_id(1):
        assert storage(grow(manager, KB)) == storage(block_of(manager, 1))
        with workspace.use_workspace_ubatch_id(0):
            assert storage(grow(manager, KB)) == storage(block_of(manager, 0))
            assert manager._get_workspace_id() == 0
    assert storage(grow(manager, KB)) == storage(block_of(manager, 2))
    with pytest.raises(ValueError, match="must be non-negative, got -2"), workspace.use_workspace_ubatch_id(-2):
        pass


def test_a_subclass_may_say_itself_which_slot_it_is():
    class Theirs(WorkspaceManager):
        def _get_workspace_id(self):
            return 1

    manager = Theirs(CPU, 2)
    assert storage(serve_thrice(manager, *MOE)[-1][0]) == storage(block_of(manager, 1))
    assert manager.get_persistent("k", (1,), f32) is manager._persistent_resources[1][(torch.Tensor, "k")]


UBATCHING = """
import sys, threading, types, torch
from arena import workspace
for name in ("vllm", "vllm.v1", "vllm.v1.worker"):
    sys.modules[name] = types.ModuleType(name)
manager = workspace.WorkspaceManager(torch.device("cpu"), 2, reuse_views=True)
spec = ((8,), torch.float32)
def place():
    view = manager.get_simultaneous(spec)[0]
    return [each is not None and each.data_ptr() == view.data_ptr() for each in manager._current_workspaces].index(True)
assert place() == 0, "before vLLM is loaded"
module = types.ModuleType("vllm.v1.worker.ubatching")
exec('''
import threading
_THREAD_ID_TO_CONTEXT: dict = {}
def dbo_current_ubatch_id() -> int:
    if len(_THREAD_ID_TO_CONTEXT) == 0:
        return 0
    return _THREAD_ID_TO_CONTEXT[threading.get_ident()]
''', vars(module))
sys.modules[module.__name__] = module
def run(work):
    answer = []
    def target():
        try: answer.append(work())
        except BaseException as error: answer.append(type(error))
    thread = threading.Thread(target=target); thread.start(); thread.join()
    return answer[0]
def on_a_dbo_thread(ubatch):
    def work():
        module._THREAD_ID_TO_CONTEXT[threading.get_ident()] = ubatch
        try: return [place() for _ in range(3)]
        finally: del module._THREAD_ID_TO_CONTEXT[threading.get_ident()]
    return run(work)
"""


@pytest.mark.parametrize("how", ["ours", "theirs"])
def test_the_ubatch_of_a_dbo_thread_is_vllms(how):
    """`ours`: the function that this module has; `theirs`: vLLM's own put in its place."""
    run = run_python(
        UBATCHING
        + f"""
if {how!r} == "theirs": workspace.dbo_current_ubatch_id = module.dbo_current_ubatch_id
assert [place() for _ in range(3)] == [0, 0, 0], "no DBO thread"
for _ in range(2):
    assert on_a_dbo_thread(0) == [0, 0, 0] and on_a_dbo_thread(1) == [1, 1, 1]
module._THREAD_ID_TO_CONTEXT[-1] = 1
assert run(place) is KeyError, "a thread without an ubatch beside DBO threads fails as vLLM's does"
with workspace.use_workspace_ubatch_id(1): assert place() == 1
""",
        timeout=60,
    )
    assert run.returncode == 0, run.stderr


def test_a_patched_or_different_ubatch_function_is_called():
    run = run_python(
        UBATCHING
        + """
module.dbo_current_ubatch_id = lambda: 1  # before the first request that saw the module: not vLLM's body
assert [place() for _ in range(3)] == [1, 1, 1]
module.dbo_current_ubatch_id = lambda: 0
assert [place() for _ in range(3)] == [0, 0, 0]
""",
        timeout=60,
    )
    assert run.returncode == 0, run.stderr


def test_without_vllm_it_is_never_imported():
    run = run_python(
        "import sys, torch\nfrom arena import workspace\n"
        "workspace.init_workspace_manager(torch.device('cpu'))\n"
        "workspace.current_workspace_manager().get_simultaneous(((4,), torch.float32))\n"
        "assert not any(name.split('.')[0] == 'vllm' for name in sys.modules)\n",
        timeout=60,
    )
    assert run.returncode == 0, run.stderr


# ---- collectors ----


def test_what_is_retained_inside_is_collected_without_a_capture():
    one, two, three = object(), [], torch.zeros(2)
    assert workspace.retain_cuda_graph_capture_resource(one) is False
    with workspace.collect_cuda_graph_capture_resources() as outer:
        assert type(outer) is list
        assert workspace.retain_cuda_graph_capture_resource(one) is True
        with workspace.suspend_cuda_graph_capture_resources():
            assert workspace.retain_cuda_graph_capture_resource(two) is False
            with workspace.collect_cuda_graph_capture_resources() as inner:
                assert workspace.retain_cuda_graph_capture_resource(three) is True
        assert workspace.retain_cuda_graph_capture_resource(one) is True
    assert [each is one for each in outer] == [True, True]
    assert inner[0] is three
    assert workspace.retain_cuda_graph_capture_resource(one) is False
    assert len(outer) == 2


# ---- torch.compile ----


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, backend="eager", fullgraph=True)


def test_the_three_functions_that_trace_go_on_tracing():
    workspace.init_workspace_manager(CPU)

    def step(x):
        if workspace.is_workspace_manager_initialized() and not workspace.current_workspace_manager().is_locked():
            return x + 1
        return x - 1

    assert compiled(step)(torch.zeros(2)).tolist() == [1, 1]
    workspace.lock_workspace()
    assert compiled(step)(torch.zeros(2)).tolist() == [-1, -1]
    workspace.reset_workspace_manager()
    assert compiled(step)(torch.zeros(2)).tolist() == [-1, -1]


@torch.library.custom_op("arena_test_workspace::through_scratch", mutates_args=())
def through_scratch(x: torch.Tensor) -> torch.Tensor:
    scratch = workspace.current_workspace_manager().get_simultaneous((tuple(x.shape), x.dtype))[0]
    PLACES.append(storage(scratch))
    return torch.add(x, 1, out=scratch).clone()


through_scratch.register_fake(torch.empty_like)
PLACES = []


def test_inside_a_custom_op_the_slot_is_chosen_at_each_call(monkeypatch):
    """E5: not when the operation is traced."""
    workspace.init_workspace_manager(CPU, 2)
    manager = workspace.current_workspace_manager()
    run = compiled(lambda x: through_scratch(x) * 2)
    PLACES.clear()
    for ubatch in (0, 1, 0, 1):
        monkeypatch.setattr(workspace, "dbo_current_ubatch_id", lambda ubatch=ubatch: ubatch)
        assert run(torch.ones(8)).tolist() == [4] * 8
    assert [storage(block_of(manager, ubatch)) for ubatch in (0, 1, 0, 1)] == PLACES


def test_outside_a_custom_op_a_compiled_function_gets_real_scratch(manager):
    torch._dynamo.reset()

    def step(x):
        scratch = manager.get_simultaneous(((4,), f32))[0]
        return scratch.copy_(x) + 1

    run = torch.compile(step, backend="eager")
    for number in range(4):
        assert run(torch.full((4,), float(number))).tolist() == [number + 1.0] * 4
    assert all(type(each[0]) is torch.Tensor for each in serve_thrice(manager, ((4,), f32)))
