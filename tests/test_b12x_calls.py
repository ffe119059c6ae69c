"""B12X's calls, registered, on the real wheel and the simulated driver with their kernels left out: each retains in the capture
where it runs, and is reached however it is called and imported, in whichever B12X that is known. What is kept of a binding is
in test_b12x.py, which runs this file on the other known versions."""

import contextlib
import gc
import sys
import textwrap
import threading
import types
import weakref
from pathlib import Path

import pytest
from conftest import run_python, stays, until

import arena

torch = pytest.importorskip("torch")

import b12x_wheel as wheel  # noqa: E402
from b12x_wheel import named, prepared, same  # noqa: E402

import arena.b12x  # noqa: E402
from arena._b12x_families import KNOWN  # noqa: E402

b12x, installed = wheel.b12x, wheel.installed  # fixtures


@pytest.fixture
def cuda(simulated):
    return simulated


# ---- registered calls ----


@contextlib.contextmanager
def mhc(monkeypatch, stream, ran=None):
    with wheel.launches(monkeypatch, lambda binding: (stream.kernel(), ran is not None and ran.append(binding))):
        yield


def test_a_binding_made_outside_is_retained_where_it_runs(cuda, installed, monkeypatch):
    stream = cuda.Stream()
    binding, scratch = wheel.mhc_binding("post_pre")
    alive = weakref.ref(scratch.untyped_storage())
    count = len(arena.b12x.owners(binding))
    with mhc(monkeypatch, stream), stream:
        wheel.run_post_pre(binding)
        assert arena.stats().owners == 0  # eager
        with stream.capture() as capture:
            wheel.run_post_pre(binding)
        assert arena.stats().owners == count
        wheel.run_post_pre(binding)
        assert arena.stats().owners == count
    executable = capture.graph.instantiate()
    capture.graph.destroy()
    del binding, scratch
    gc.collect()
    assert stays(lambda: alive() is not None)
    executable.destroy()
    assert until(lambda: arena.reclaim(0.01) is not None and alive() is None)


def test_without_install_the_scratch_is_lost_while_the_graph_lives(cuda, monkeypatch):
    """The control."""
    stream = cuda.Stream()
    binding, scratch = wheel.mhc_binding("post_pre")
    alive = weakref.ref(scratch.untyped_storage())
    with mhc(monkeypatch, stream), stream.capture() as capture:
        wheel.run_post_pre(binding)
    executable = capture.graph.instantiate()
    capture.graph.destroy()
    del binding, scratch
    gc.collect()
    assert alive() is None
    executable.destroy()


@prepared
def test_a_released_plans_state_and_programs_live_as_long_as_the_graph(cuda, installed, monkeypatch):
    stream = cuda.Stream()
    plan = wheel.mhc_plan("post_pre")
    binding, _ = wheel.mhc_binding(plan=plan)
    alive = [weakref.ref(binding.state), weakref.ref(plan._prepared.retained)]
    with mhc(monkeypatch, stream), stream.capture() as capture:
        wheel.run_post_pre(binding)
    executable = capture.graph.instantiate()
    capture.graph.destroy()
    wheel.release(plan)
    del binding, plan
    gc.collect()
    assert all(each() is not None for each in alive)
    executable.destroy()
    assert until(lambda: arena.reclaim(0.01) is not None and all(each() is None for each in alive))


def test_where_nothing_captures_a_call_costs_one_question(cuda, installed, monkeypatch):
    stream = cuda.Stream()
    binding, _ = wheel.mhc_binding()
    ran = []
    with mhc(monkeypatch, stream, ran), stream:
        before = cuda.calls("cuStreamGetCaptureInfo")
        monkeypatch.setattr(arena.b12x, "find", None)  # nothing is looked for
        for _ in range(10):
            wheel.run_pre(binding)
        assert cuda.calls("cuStreamGetCaptureInfo") - before <= 10
    assert len(ran) == 10


def test_retain_of_a_binding_keeps_its_owners_and_not_itself(cuda, installed):
    stream = cuda.Stream()
    binding, scratch = wheel.mhc_binding()
    alive, storage = weakref.ref(binding), weakref.ref(scratch.untyped_storage())
    with stream.capture() as capture:
        stream.kernel()
        assert arena.retain(binding)
    executable = capture.graph.instantiate()
    capture.graph.destroy()
    del binding, scratch
    gc.collect()
    assert alive() is None
    assert storage() is not None
    executable.destroy()


def test_a_capture_that_is_broken_fails_the_call_and_not_silently(cuda, installed, monkeypatch):
    stream = cuda.Stream()
    binding, _ = wheel.mhc_binding()
    ran = []
    with mhc(monkeypatch, stream, ran), pytest.raises(cuda.Error), stream.capture():
        stream.invalidate()
        with pytest.raises(arena.CaptureError):
            wheel.run_pre(binding)
    assert not ran


def test_threads_of_one_capture_register_into_its_graph(cuda, installed, monkeypatch):
    stream = cuda.Stream()
    bindings = [wheel.mhc_binding()[0] for _ in range(4)]
    count = sum(len(arena.b12x.owners(each)) for each in bindings)

    def run(binding):
        with stream:
            wheel.run_pre(binding)

    with mhc(monkeypatch, stream), stream.capture("relaxed") as capture:
        threads = [threading.Thread(target=run, args=(each,)) for each in bindings]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert arena.stats().owners == count
    capture.graph.destroy()


def test_bindings_that_can_be_read_only_once_reach_the_call(cuda, installed):
    """B12X makes a tuple of them itself, so that a generator will do."""
    stream = cuda.Stream()
    given = [wheel.mhc_binding()[0] for _ in range(2)]

    @arena.b12x.registering
    def run_lookups(bindings, token_counts):
        return tuple(bindings)

    with stream, stream.capture() as capture:
        stream.kernel()
        same(run_lookups(iter(given), [1, 1]), given)
        same(run_lookups(token_counts=[1, 1], bindings=iter(given)), given)
        assert arena.stats().owners == 2 * sum(len(arena.b12x.owners(each)) for each in given)
    capture.graph.destroy()
    with pytest.raises(TypeError, match="bindings"):
        run_lookups(token_counts=[])


def test_the_calls_of_a_bindings_own_methods_are_registered(cuda, installed, monkeypatch):
    stream = cuda.Stream()
    binding, _ = wheel.mhc_binding("pre")
    with mhc(monkeypatch, stream), stream.capture() as capture:
        binding.pre(None, None, None, None, **wheel.RECIPE)
        assert arena.stats().owners == len(arena.b12x.owners(binding))
    capture.graph.destroy()
    if wheel.PREPARED:
        kind = named("gemm._shared.wo_mxfp8.WOProjectionBinding")
        assert hasattr(kind.run, "_arena")


# ---- how calls are reached ----


def test_calls_imported_by_value_before_install_are_reached_and_put_back():
    from b12x.norm import mhc as public
    from b12x.norm.mhc import _impl, api

    user = types.ModuleType("somebody_elses_module")
    user.call, own = public.run_pre, public.run_pre
    sys.modules[user.__name__] = user
    try:
        arena.b12x.install()
        arena.b12x.install()
        assert arena.b12x.installed()
        for namespace, name in ((_impl, "b12x_mhc_pre"), (api, "run_pre"), (public, "run_pre"), (user, "call")):
            assert getattr(namespace, name).__wrapped__ is own
        assert _impl.B12XMHCBinding.__cuda_owners__ is arena.b12x.owners
        late = public.run_pre
        user.late = late
    finally:
        arena.b12x.uninstall()
        del sys.modules[user.__name__]
    arena.b12x.uninstall()
    assert not arena.b12x.installed()
    for namespace, name in ((_impl, "b12x_mhc_pre"), (api, "run_pre"), (public, "run_pre")):
        assert getattr(namespace, name) is own
    assert not hasattr(_impl.B12XMHCBinding, "__cuda_owners__")
    assert not any(isinstance(each, arena.b12x.Watch) for each in sys.meta_path)


IN_A_PROCESS_OF_ITS_OWN = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parent)!r}]
import b12x_wheel as wheel
"""


def test_install_imports_nothing_and_reaches_what_is_imported_later():
    run = run_python(
        IN_A_PROCESS_OF_ITS_OWN
        + """
sys.path.insert(0, str(wheel.tree(wheel.VERSION)))
sys.meta_path.append(wheel.StubFinder())
import arena.b12x
before = set(sys.modules)
arena.b12x.install()
assert {each.partition(".")[0] for each in set(sys.modules) - before} <= {"b12x"}, set(sys.modules) - before
assert len([each for each in sys.modules if each.startswith("b12x")]) <= 12
from b12x.norm.mhc import run_pre
import b12x.norm.mhc._impl as impl
assert run_pre is impl.b12x_mhc_pre and run_pre._arena
assert impl.__spec__.loader.get_source("b12x.norm.mhc._impl").startswith('\"\"\"')
arena.b12x.uninstall()
assert not hasattr(impl.b12x_mhc_pre, "_arena")
import b12x.gemm._bmm.api as late
assert not hasattr(late.bmm, "_arena")
""",
        timeout=60,
        env={"ARENA_TEST_B12X": wheel.VERSION},
    )
    assert run.returncode == 0, run.stderr


# ---- compiled callers ----


@prepared
def test_a_compiled_caller_traces_through_and_its_op_registers_the_plan():
    """An op in B12X's manner: all that reaches its body is the plan's number."""
    run = run_python(
        f"""
import sys
sys.path[:0] = [{str(wheel.tree(wheel.VERSION))!r}]
import arena, arena.b12x, torch
from arena.testing import simulated_driver
arena.b12x.install()
from b12x.preparation import types as preparation

class Plan:
    _prepared = None
plan, ran = Plan(), []
preparation._PLANS[7] = plan

@torch.library.custom_op("arena_test::planned", mutates_args=())
def planned(x: torch.Tensor, handle: int) -> torch.Tensor:
    preparation.plan_from_handle(handle)
    ran.append(arena.stats().owners)
    return x.clone()

planned.register_fake(lambda x, handle: torch.empty_like(x))
call = arena.b12x.registering(lambda x, *, plan: planned(x, 7))
compiled = torch.compile(lambda x: call(x, plan=plan) + 1, fullgraph=True, backend="eager")
with simulated_driver() as cuda:
    stream = cuda.Stream()
    with stream:
        compiled(torch.zeros(2))
    with stream.capture() as capture:
        stream.kernel()
        compiled(torch.zeros(2))
    assert ran == [0, 1], ran
""",
        timeout=60,
    )
    assert run.returncode == 0, run.stderr


# ---- versions and roots ----


def test_an_unknown_version_is_refused_by_name_and_nothing_is_patched(monkeypatch):
    from b12x.norm.mhc import _impl

    monkeypatch.setattr(arena.b12x, "KNOWN", KNOWN - {("b12x", wheel.VERSION)})
    with pytest.raises(RuntimeError, match=rf"does not know the B12X of b12x {wheel.VERSION}.*knows those of b12x"):
        arena.b12x.install()
    assert not arena.b12x.installed()
    assert not hasattr(_impl.b12x_mhc_pre, "_arena")


def test_without_any_b12x_install_says_so():
    run = run_python(
        "import arena.b12x\ntry: arena.b12x.install()\nexcept ImportError as error: print(error)",
        timeout=60,
    )
    assert "neither b12x nor a FlashInfer that carries it" in run.stdout, run.stderr


def flashinfer_tree(folder, version, inside):
    """A FlashInfer that carries the wheel's B12X under `inside` and, as FlashInfer does, serves it as `b12x` too."""
    metadata = folder / f"flashinfer_python-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: flashinfer-python\nVersion: {version}\n")
    home = folder / "flashinfer" / Path(*inside.split("."))
    home.parent.mkdir(parents=True)
    for each in {folder / "flashinfer", home.parent}:
        (each / "__init__.py").touch()
    home.symlink_to(wheel.tree(wheel.VERSION) / "b12x")
    alias = folder / "b12x" / "__init__.py"
    alias.parent.mkdir()
    alias.write_text(
        textwrap.dedent(f"""
        import importlib.util, sys
        place = {str(home)!r}
        spec = importlib.util.spec_from_file_location("b12x", place + "/__init__.py", submodule_search_locations=[place])
        sys.modules["b12x"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["b12x"])
        """)
    )


@pytest.mark.parametrize(("version", "known"), [("0.7.4", True), ("9.9.9", False)])
def test_the_b12x_that_flashinfer_carries_is_reached(tmp_path, version, known):
    flashinfer_tree(tmp_path, version, "experimental.b12x")
    run = run_python(
        IN_A_PROCESS_OF_ITS_OWN
        + f"""
sys.path.insert(0, {str(tmp_path)!r})
sys.meta_path.append(wheel.StubFinder())
import arena.b12x
try:
    arena.b12x.install()
except RuntimeError as error:
    print(error)
    sys.exit(3)
import b12x.norm.mhc._impl as impl
assert "flashinfer" in impl.__file__
assert impl.b12x_mhc_pre._arena and impl.B12XMHCBinding.__cuda_owners__ is arena.b12x.owners
""",
        timeout=60,
        env={"ARENA_TEST_B12X": wheel.VERSION},
    )
    assert run.returncode == (0 if known else 3), run.stderr
    assert known or "flashinfer-python 9.9.9" in run.stdout


def test_a_root_of_flashinfers_own_is_reached_too(tmp_path):
    """`flashinfer.b12x`, whose modules import each other by relative names: a family made in B12X's manner."""
    metadata = tmp_path / "flashinfer_python-0.7.4.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: flashinfer-python\nVersion: 0.7.4\n")
    family = tmp_path / "flashinfer" / "b12x" / "norm" / "mhc"
    family.mkdir(parents=True)
    for each in (family, *family.parents[:3]):
        (each / "__init__.py").touch()
    (family / "_impl.py").write_text(
        "from dataclasses import dataclass\n"
        "@dataclass(frozen=True)\nclass B12XMHCBinding:\n    partials: object = None\n    y: object = None\n"
        "def b12x_mhc_pre(*, binding): return binding\n"
    )
    (family / "api.py").write_text("from ._impl import b12x_mhc_pre as run_pre\n")
    run = run_python(
        f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import arena, arena.b12x, torch
arena.b12x.install()
from flashinfer.b12x.norm.mhc.api import run_pre
from flashinfer.b12x.norm.mhc._impl import B12XMHCBinding
scratch, y = torch.zeros(3), torch.zeros(3)
with arena.collect() as owners:
    run_pre(binding=B12XMHCBinding(scratch[:2], y))
assert [each is scratch.untyped_storage() for each in owners] == [True]
""",
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
