"""The contract that engines rely on when they collect what a capture needs: which resources, in which order, in whose scope.
Here on the simulated driver, with B12X's own Python from its wheel; with its kernels on a GPU, bench/b12x_mhc.py.
"""

import threading

import pytest

import arena

torch = pytest.importorskip("torch")

import b12x_wheel as wheel  # noqa: E402

import arena.b12x  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def b12x():
    with wheel.opened() as package:
        yield package


@pytest.fixture(autouse=True)
def registered(simulated, b12x, monkeypatch):
    """B12X's calls are registered, and launch one kernel on the current stream."""
    arena.b12x.install()
    stream = simulated.Stream()
    with wheel.launches(monkeypatch, lambda binding: stream.kernel()):
        yield stream
    arena.b12x.uninstall()


def scratch_in(owners):
    return [each for each in owners if isinstance(each, torch.UntypedStorage)]


def same(owners, expected):
    """By identity: B12X's `==` computes."""
    assert len(owners) == len(expected)
    assert all(a is b for a, b in zip(owners, expected, strict=True))


def test_two_mhc_bindings_of_a_capture_are_retained_pre_first_then_post_pre(registered):
    (pre, first), (post_pre, second) = wheel.mhc_binding("pre"), wheel.mhc_binding("post_pre")
    with arena.collect() as owners:
        with registered.capture() as capture:
            wheel.run_pre(pre)
            wheel.run_post_pre(post_pre)
    same(scratch_in(owners), [first.untyped_storage(), second.untyped_storage()])
    same(owners, [*arena.b12x.owners(pre), *arena.b12x.owners(post_pre)])
    assert arena.stats().owners == len(owners)
    capture.graph.destroy()


def test_the_scratch_is_the_callers_own_bytes(registered):
    binding, scratch = wheel.mhc_binding()
    assert scratch.dtype is torch.uint8
    with arena.collect() as owners, registered.capture() as capture:
        wheel.run_pre(binding)
    (storage,) = scratch_in(owners)
    assert storage.data_ptr() == scratch.data_ptr()
    assert storage.nbytes() == scratch.numel()
    assert binding.y.untyped_storage() is not storage
    capture.graph.destroy()


def test_eager_calls_retain_nothing(registered):
    binding, _ = wheel.mhc_binding()
    before = arena.stats().retained
    with registered:
        wheel.run_pre(binding)
    wheel.run_pre(binding)
    with arena.suspend(), registered:
        wheel.run_pre(binding)
    assert arena.stats().retained == before


def test_nested_scopes_see_only_their_own(registered):
    outer_binding, inner_binding, hidden = (wheel.mhc_binding()[0] for _ in range(3))
    with registered.capture() as capture:
        with arena.collect() as outer:
            wheel.run_pre(outer_binding)
            with arena.collect() as inner:
                wheel.run_pre(inner_binding)
            with arena.suspend():
                wheel.run_pre(hidden)
            wheel.run_pre(outer_binding)
    expected = arena.b12x.owners(outer_binding)
    same(outer, [*expected, *expected])
    same(inner, arena.b12x.owners(inner_binding))
    assert arena.stats().owners == len(outer) + len(inner) + len(arena.b12x.owners(hidden))  # the graph keeps all of them
    capture.graph.destroy()


def test_a_scope_of_another_thread_sees_nothing(registered):
    binding, _ = wheel.mhc_binding()
    there = []

    def other(begun, done):
        with arena.collect() as owners:
            begun.set()
            done.wait(5)
            there.extend(owners)

    begun, done = threading.Event(), threading.Event()
    thread = threading.Thread(target=other, args=(begun, done))
    thread.start()
    assert begun.wait(5)
    with arena.collect() as here, registered.capture() as capture:
        wheel.run_pre(binding)
    done.set()
    thread.join()
    assert here
    assert not there
    capture.graph.destroy()


def test_without_registration_a_scope_gets_nothing(registered):
    """The control."""
    arena.b12x.uninstall()
    binding, _ = wheel.mhc_binding()
    with arena.collect() as owners, registered.capture() as capture:
        wheel.run_pre(binding)
    assert not owners
    capture.graph.destroy()
