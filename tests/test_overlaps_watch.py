"""The watch itself: how it is asked for, that it changes nothing of what is watched and fails nobody, and that nothing of it is
there when it is off. What it says is in test_overlaps.py."""

import gc
import os
import threading
import weakref

import pytest
from conftest import run_python

import arena

torch = pytest.importorskip("torch")

import watch_rig  # noqa: E402
from watch_rig import SPEC  # noqa: E402

from arena import ordering, overlaps  # noqa: E402
from arena.overlaps import watch  # noqa: E402
from arena.workspace import WorkspaceManager, use_workspace_lane  # noqa: E402

manager, found, streams, watched = watch_rig.manager, watch_rig.found, watch_rig.streams, watch_rig.watched  # fixtures


# ---- what a watch does to requests ----


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("reuse", [False, True])
def test_watched_views_are_what_unwatched_ones_are(inference, reuse):
    specs = [((4, 8), torch.bfloat16), ((0, 3), torch.int8), ((), torch.float64), ((5,), torch.bool)]
    manager = WorkspaceManager(torch.device("cpu"), reuse_views=reuse)

    def told(views):
        base = manager._current_workspaces[0].data_ptr()
        return [
            (
                each.dtype,
                each.shape,
                each.stride(),
                each.storage_offset(),
                each.untyped_storage().nbytes(),
                each.data_ptr() - base if each.numel() else None,
                each.device,
                each.requires_grad,
                each.is_inference(),
                type(each),
            )
            for each in views
        ]

    with torch.inference_mode(inference):
        plain = told(manager.get_simultaneous(*specs))
        with watch(manager):
            views = manager.get_simultaneous(*specs)
            assert told(views) == plain
            assert manager.get_simultaneous(*specs)[0] is not views[0]
        assert told(manager.get_simultaneous(*specs)) == plain


def test_a_watched_view_alone_keeps_its_bytes(manager):
    with watch(manager):
        view = manager.get_simultaneous(SPEC)[0].fill_(5)
        storage = torch.multiprocessing.reductions.StorageWeakRef(manager._current_workspaces[0].untyped_storage())
        block = weakref.ref(manager._current_workspaces.parts[0].current)
        manager.get_simultaneous(((4096,), torch.float32))
        assert block() is None
        assert not storage.expired()
        assert (view == 5).all()
        del view
        assert storage.expired()


def test_a_dead_manager_is_let_go_of():
    manager = WorkspaceManager(torch.device("cpu"))
    with watch(manager) as watching:
        manager.get_simultaneous(SPEC)
        gone = weakref.ref(manager)
        del manager
        gc.collect()
        assert gone() is None
        assert len(watching.slots) == 0


def test_a_request_under_a_fake_mode_is_left_alone(manager, watched, found):
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode():
        assert isinstance(manager.get_simultaneous(SPEC)[0], FakeTensor)
    assert manager.watch is watched
    assert type(manager.get_simultaneous(SPEC)[0]) is torch.Tensor


def test_a_watch_that_cannot_go_on_says_so_and_ends(manager, caplog):
    def fails(device):
        raise RuntimeError("no streams today")

    with watch(manager, current_stream=fails):
        assert manager.get_simultaneous(SPEC)[0].shape == (256,)
        assert manager.watch is None
        manager.get_simultaneous(SPEC)
    assert ["not watched any more" in each.message for each in caplog.records] == [True]
    assert "no streams today" in caplog.text


def test_a_use_that_cannot_be_looked_at_fails_nobody(manager, streams, watched, found, monkeypatch, caplog):
    view = manager.get_simultaneous(SPEC)[0]
    monkeypatch.setattr(watched, "current_stream", lambda device: 1 // 0)
    overlaps.used(view)
    assert "is not seen" in caplog.text
    assert found == []


def test_threads_share_one_watch(watched, manager, streams, found):
    def work(lane):
        try:
            with use_workspace_lane(lane):
                for size in range(1, 200):
                    view = manager.get_simultaneous(((size,), torch.float32))[0].fill_(lane)
                    overlaps.used(view)
                    assert (view == lane).all()
        except BaseException as error:
            failed.append(error)

    failed = []
    threads = [threading.Thread(target=work, args=(lane,)) for lane in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == found == []


# ---- off ----


def names_of(owner):
    return {name: value for name, value in vars(owner).items() if name not in ("__dict__", "__weakref__")}


def test_off_nothing_is_there(manager):
    """Release mode: no hook, no patch, no slow way; and after a watch it is so again."""
    owners = [owner for owner, _ in ordering.PATCHED]
    before = [names_of(owner) for owner in owners]

    def compiled():
        """Whether a request seen before is answered by the compiled way: then, reusing, by the very same object."""
        with torch.no_grad():
            manager.get_simultaneous(SPEC)
            return manager.get_simultaneous(SPEC)[0] is manager.get_simultaneous(SPEC)[0]

    manager.reuse_views = True
    assert manager.watch is None
    assert compiled()
    with watch(manager) as watching:
        assert manager.watch is watching
        assert not compiled()
        assert [names_of(owner) for owner in owners] != before
    assert manager.watch is None
    assert compiled()
    assert [names_of(owner) for owner in owners] == before
    assert overlaps._watches == []


def test_the_module_is_not_even_imported_without_being_asked():
    ended = run_python(
        "import sys, torch, arena.workspace as w\n"
        "m = w.WorkspaceManager(torch.device('cpu')); m.get_simultaneous(((4,), torch.int8))\n"
        "assert m.watch is None and 'arena.overlaps' not in sys.modules and 'arena.ordering' not in sys.modules",
        timeout=60,
        env={"ARENA_WATCH": "", "ARENA_POISON": ""} if "ARENA_WATCH" in os.environ else None,
    )
    assert ended.returncode == 0, ended.stderr


def test_retain_pays_nothing_once_the_watch_has_ended(manager):
    told = []
    arena._registry.watch_retains(lambda owner, stream: told.append(owner))
    arena.retain("one")
    arena._registry.watch_retains(None)
    arena.retain("two")
    assert told == ["one"]


def test_methods_that_others_patched_since_stay_theirs(manager, monkeypatch):
    own = torch.cuda.Event.record
    watching = watch(manager)
    ours = torch.cuda.Event.record
    theirs = lambda *args: ours(*args)  # noqa: E731
    monkeypatch.setattr(torch.cuda.Event, "record", theirs)
    watching.stop()
    assert torch.cuda.Event.record is theirs
    monkeypatch.undo()
    torch.cuda.Event.record = own


def test_two_watches_end_in_any_order():
    one, two = WorkspaceManager(torch.device("cpu")), WorkspaceManager(torch.device("cpu"))
    own = torch.cuda.Event.record
    first, second = watch(one), watch(two)
    first.stop()
    assert torch.cuda.Event.record is not own
    first.stop()
    second.stop()
    assert torch.cuda.Event.record is own


def test_watching_all_managers(manager):
    with watch() as watching:
        assert manager.watch is watching
    assert manager.watch is None


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"poison": 256}, ValueError, "0 to 255, not 256"),
        ({"report": "shout"}, ValueError, "not 'shout'"),
    ],
)
def test_what_cannot_be_watched_for_is_refused(manager, options, error, match):
    with pytest.raises(error, match=match):
        watch(manager, **options)
    assert manager.watch is None
    assert overlaps._watches == []


def test_a_manager_has_one_watch(manager, watched):
    with pytest.raises(RuntimeError, match="is watched already"):
        watch(manager)
    assert manager.watch is watched


# ---- by the environment ----


@pytest.mark.parametrize(
    ("environment", "report", "poison"),
    [
        ({"ARENA_WATCH": "1"}, "warn", None),
        ({"ARENA_WATCH": "warn", "ARENA_POISON": "0xFF"}, "warn", 255),
        ({"ARENA_WATCH": "raise"}, "raise", None),
        ({"ARENA_POISON": "17"}, "warn", 17),
    ],
)
def test_a_manager_is_watched_from_the_start_where_the_environment_asks(monkeypatch, environment, report, poison):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    manager = WorkspaceManager(torch.device("cpu"))
    try:
        assert (manager.watch.report, manager.watch.poison) == (report, poison)
        assert manager.get_simultaneous(SPEC)[0].shape == (256,)
    finally:
        manager.watch.stop()


@pytest.mark.parametrize("environment", [{}, {"ARENA_WATCH": "0"}, {"ARENA_WATCH": ""}])
def test_and_not_where_it_does_not(monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert WorkspaceManager(torch.device("cpu")).watch is None


@pytest.mark.parametrize(
    ("environment", "match"),
    [
        ({"ARENA_WATCH": "loud"}, "ARENA_WATCH is 0, 1, warn or raise, not 'loud'"),
        ({"ARENA_POISON": "nan"}, "ARENA_POISON is the value of a byte, as 0xFF, not 'nan'"),
        ({"ARENA_POISON": "0x100"}, "0 to 255, not 256"),
    ],
)
def test_an_environment_that_says_something_else_is_refused(monkeypatch, environment, match):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=match):
        WorkspaceManager(torch.device("cpu"))
