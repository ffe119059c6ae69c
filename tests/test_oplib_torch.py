"""Op libraries under torch, without a GPU: `retain` in the body of a custom op, under torch.compile, and the gate while
`arena.torch` is installed. torch's current stream is the simulated driver's here."""

import types
import weakref

import native
import pytest
from conftest import run_python

import arena
from arena import _registry

torch = pytest.importorskip("torch")

import arena.torch  # noqa: E402 - not where torch is missing

pytestmark = pytest.mark.filterwarnings("ignore:Failed to initialize NumPy")


class Binding:
    """What an op library makes before the capture; the op gets its key."""

    live = weakref.WeakValueDictionary()

    def __init__(self, key, retains=True):
        self.scratch = torch.full((4,), 2.0)
        self.retains = retains
        self.answers = []
        Binding.live[key] = self


@torch.library.custom_op("arena_oplib::scale", mutates_args=())
def scale(x: torch.Tensor, key: int) -> torch.Tensor:
    binding = Binding.live[key]
    if binding.retains:
        binding.answers.append(arena.retain(binding.scratch))
    return x * binding.scratch


@scale.register_fake
def _(x, key):
    return torch.empty_like(x)


def once(x):
    return torch.ops.arena_oplib.scale(x, 1) + 1


def lives_through(simulated, function, binding):
    """Runs it in a capture, drops the binding; whether its scratch lives as long as the graph, and no longer."""
    stream = simulated.Stream()
    scratch = weakref.ref(binding.scratch)
    with stream, stream.capture("relaxed") as capture:
        assert torch.equal(function(torch.ones(4)), torch.full((4,), 3.0))
    binding.scratch = None
    kept = scratch() is not None
    capture.graph.destroy()
    arena.reclaim(5)
    assert scratch() is None
    return kept


def test_a_custom_ops_body_retains_into_the_capture_of_the_current_stream(simulated):
    binding = Binding(1)
    once(torch.ones(4))
    assert lives_through(simulated, once, binding)
    assert binding.answers == [False, True]


def test_without_it_the_same_op_loses_its_scratch(simulated):
    """The control."""
    binding = Binding(1, retains=False)
    assert not lives_through(simulated, once, binding)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_body_retains_at_each_run_of_compiled_code(simulated, backend):
    torch._dynamo.reset()
    binding = Binding(1)
    compiled = torch.compile(once, fullgraph=True, backend=backend)
    compiled(torch.ones(4))
    assert lives_through(simulated, compiled, binding)
    assert binding.answers == [False, True]
    torch._dynamo.reset()


@pytest.mark.parametrize("form", ["retain(x)", "retain(x, 5)", "retain(x, stream=5)", "retain(owner=x)"])
def test_a_traced_retain_is_false_does_nothing_and_breaks_no_graph(simulated, form):
    torch._dynamo.reset()
    names = {"retain": arena.retain}
    exec(f"def traced(x):\n    return x + 1 if {form} else x + 2\n", names)
    compiled = torch.compile(names["traced"], fullgraph=True, backend="eager")
    stream = simulated.Stream()
    before = arena.stats().retained
    with stream, stream.capture("relaxed") as capture:
        assert torch.equal(compiled(torch.ones(4)), torch.full((4,), 3.0))
    assert arena.stats().retained == before
    capture.graph.destroy()
    assert arena.retain(1) is False  # outside of tracing it is what it was
    torch._dynamo.reset()


COMPILE = """
import warnings
warnings.simplefilter("ignore")
import sys, torch, arena
if {before}: import torch._dynamo
if {taught}: import arena.torch
print("torch._dynamo" in sys.modules)
def function(x):
    arena.retain(x)
    return x + 1
try:
    print(torch.compile(function, fullgraph=True, backend="eager")(torch.ones(1)).item())
except torch._dynamo.exc.Unsupported as error:
    print("Unsupported" if "arena" in str(error) else error)
print(torch._dynamo.__spec__.loader.__class__.__name__)
"""


@pytest.mark.parametrize("before", [True, False], ids=["dynamo first", "arena.torch first"])
def test_dynamo_is_told_whenever_it_is_loaded_and_not_loaded_for_it(before):
    run = run_python(COMPILE.format(before=before, taught=True), timeout=100)
    assert run.stdout.split() == [str(before), "2.0", "SourceFileLoader"], run.stderr


def test_without_arena_torch_a_traced_retain_is_refused():
    """The control: Dynamo itself does not know what to do with it."""
    run = run_python(COMPILE.format(before=False, taught=False), timeout=100)
    assert run.stdout.split() == ["False", "Unsupported", "SourceFileLoader"], run.stderr


# ---- the gate ----


@pytest.fixture
def gate():
    ops = native.load(native.c_extension("op_client"))
    ops.import_arena()
    ops.only_torch()
    yield ops.maybe_capturing
    if arena.torch.installed():
        arena.torch.uninstall()
    _registry.watched(False)


def test_the_gate_is_exact_while_arena_torch_is_installed(gate):
    assert gate()
    arena.torch.install()
    assert not gate()
    arena.torch.install()
    assert not gate()
    arena.torch.uninstall()
    assert gate()


def test_an_install_in_the_middle_of_a_capture_leaves_the_gate_open(simulated, gate):
    stream = simulated.Stream()
    with stream, stream.capture("relaxed") as capture:
        arena.torch.install()
        assert gate()
    capture.graph.destroy()


def test_a_capture_that_could_not_be_managed_opens_the_gate(simulated, gate, monkeypatch):
    def refuse():
        raise arena.DriverError("no")

    monkeypatch.setattr(_registry, "begin", refuse)
    arena.torch.install()
    assert not gate()
    arena.torch.capture_begin(types.SimpleNamespace(_arena_capture=None), lambda self: None)
    assert gate()
