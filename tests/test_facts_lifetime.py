"""When the driver runs a user object's destructor, on which thread, and when it never does.

Each test is one row of what was measured on a real driver, and runs on it and on the simulated one with the same body.
Where a real driver was seen to do one of two things, the simulated one has to do the one that is harder on the code
under test: that is the only difference a body may make between them.
"""

import json
import threading
from types import SimpleNamespace

import pytest
from conftest import refused, run_python, stays, until


def holding(cuda, *tags, nodes=1):
    """A template that is the only holder of one object for each tag; and the objects."""
    graph = cuda.Graph()
    for _ in range(nodes):
        graph.add_node()
    objects = [cuda.UserObject(tag) for tag in tags]
    for obj in objects:
        graph.retain(obj, move=True)
    return graph, *objects


def ran(cuda):
    return [(run.tag, run.thread) for run in cuda.destructors]


def running(executable, cuda):
    """A launch of it that is in flight, and the gate that it waits for."""
    stream, gate = cuda.Stream(), cuda.Event()
    executable.launch(stream, until=gate)
    assert not stream.query()
    return stream, gate


# Templates


def test_last_template_destroyed_runs_the_destructor_at_once_on_the_callers_thread(cuda):
    graph, obj = holding(cuda, "a")
    graph.destroy()
    assert obj.destroyed
    assert [tuple(run) for run in cuda.destructors] == [("a", "caller", threading.get_native_id())]


def test_template_destroyed_on_another_thread_runs_the_destructor_there(cuda):
    graph, _ = holding(cuda, "a")
    ids = []

    def destroy():
        ids.append(threading.get_native_id())
        graph.destroy()

    thread = threading.Thread(target=destroy)
    thread.start()
    thread.join(5)
    assert [tuple(run) for run in cuda.destructors] == [("a", "caller", ids[0])]
    assert ids[0] != threading.get_native_id()


def test_template_destroyed_while_an_executable_lives_runs_nothing(cuda):
    graph, obj = holding(cuda, "a")
    executable = graph.instantiate()
    graph.destroy()
    assert stays(lambda: not obj.destroyed)
    executable.destroy()
    assert until(lambda: obj.destroyed)


def test_object_held_by_the_program_outlives_the_template(cuda):
    graph = cuda.Graph()
    obj = cuda.UserObject("a")
    graph.retain(obj)
    graph.destroy()
    assert stays(lambda: not obj.destroyed)
    obj.release()
    assert obj.destroyed


def test_clone_holds_its_own_reference(cuda):
    graph, obj = holding(cuda, "a")
    clone = graph.clone()
    graph.destroy()
    assert stays(lambda: not obj.destroyed)
    clone.destroy()
    assert ran(cuda) == [("a", "caller")]


def test_parent_template_holds_the_childs_objects(cuda):
    child, obj = holding(cuda, "a")
    parent = cuda.Graph()
    parent.add_child(child)
    child.destroy()
    assert stays(lambda: not obj.destroyed)
    parent.destroy()
    assert obj.destroyed


def test_parent_executable_holds_the_childs_objects(cuda):
    child, obj = holding(cuda, "a")
    parent = cuda.Graph()
    parent.add_child(child)
    executable = parent.instantiate()
    child.destroy()
    parent.destroy()
    assert stays(lambda: not obj.destroyed)
    executable.destroy()
    assert until(lambda: obj.destroyed)


def test_objects_of_one_graph_are_destroyed_in_the_order_they_were_retained(cuda):
    graph, *_ = holding(cuda, *range(8))
    graph.destroy()
    assert [run.tag for run in cuda.destructors] == list(range(8))


def test_objects_of_one_executable_are_destroyed_in_the_order_they_were_retained(cuda):
    graph, *objects = holding(cuda, *range(8))
    executable = graph.instantiate()
    graph.destroy()
    executable.destroy()
    assert until(lambda: all(obj.destroyed for obj in objects))
    assert [run.tag for run in cuda.destructors] == list(range(8))


def test_retain_on_a_destroyed_graph_is_status_1(cuda):
    graph = cuda.Graph()
    obj = cuda.UserObject("a")
    graph.destroy()
    with refused(1):
        graph.retain(obj)
    obj.release()  # the refused call took no reference: this one was the last
    assert obj.destroyed


# Executables


def test_idle_executable_destroyed_runs_the_destructor_soon(cuda, face):
    graph, obj = holding(cuda, "a")
    executable = graph.instantiate()
    graph.destroy()
    stream = cuda.Stream()
    executable.launch(stream)
    stream.synchronize()
    executable.destroy()
    assert until(lambda: obj.destroyed)
    [run] = cuda.destructors
    assert (run.thread == "caller") == (run.thread_id == threading.get_native_id())
    if face == "simulated":  # the harder of the two that were seen
        assert run.thread == "driver"


def test_executable_destroyed_in_flight_returns_at_once_and_the_destructor_waits_for_the_launch(cuda):
    graph, obj = holding(cuda, "a")
    executable = graph.instantiate()
    graph.destroy()
    stream, gate = running(executable, cuda)
    executable.destroy()
    assert not stream.query()  # had the call waited for the launch, it would be over
    assert stays(lambda: not obj.destroyed)
    gate.set()
    assert until(lambda: obj.destroyed)
    assert ran(cuda) == [("a", "driver")]
    assert until(stream.query)


def test_executable_destroyed_with_several_launches_in_flight_waits_for_the_last(cuda):
    graph, obj = holding(cuda, "a")
    executable = graph.instantiate()
    graph.destroy()
    stream, first = running(executable, cuda)
    last = cuda.Event()
    executable.launch(stream, until=last)
    executable.destroy()
    first.set()
    assert stays(lambda: not obj.destroyed)
    last.set()
    assert until(lambda: obj.destroyed)
    assert ran(cuda) == [("a", "driver")]


def test_second_executable_of_a_template_holds_the_object_too(cuda):
    graph, obj = holding(cuda, "a")
    first, second = graph.instantiate(), graph.instantiate()
    graph.destroy()
    first.destroy()
    assert stays(lambda: not obj.destroyed)
    second.destroy()
    assert until(lambda: obj.destroyed)


def test_owners_counts_what_templates_and_executables_hold(simulated):
    child, _ = holding(simulated, "child")
    graph, *_ = holding(simulated, "a", "b")
    graph.add_child(child)
    executable = graph.instantiate()
    assert (child.owners, executable.owners, cloned_owners(graph)) == (1, 3, graph.owners)
    child.destroy()
    graph.destroy()
    assert executable.owners == 3
    executable.destroy()
    assert until(lambda: len(simulated.destructors) == 3)


def cloned_owners(graph):
    clone = graph.clone()
    owners = clone.owners
    clone.destroy()
    return owners


def test_object_retained_on_the_template_after_instantiation_is_not_held_by_the_executable(cuda):
    graph = cuda.Graph()
    graph.add_node()
    executable = graph.instantiate()
    obj = cuda.UserObject("a")
    graph.retain(obj, move=True)
    graph.destroy()
    assert ran(cuda) == [("a", "caller")]
    executable.destroy()


def test_object_released_from_the_template_after_instantiation_is_still_held_by_the_executable(cuda):
    graph, obj = holding(cuda, "a")
    executable = graph.instantiate()
    graph.release(obj)
    assert stays(lambda: not obj.destroyed)
    graph.destroy()
    assert stays(lambda: not obj.destroyed)
    executable.destroy()
    assert until(lambda: obj.destroyed)


def test_object_released_from_the_template_before_instantiation_is_not_held_by_the_executable(cuda):
    graph = cuda.Graph()
    obj = cuda.UserObject("a")
    graph.retain(obj)
    graph.release(obj)
    executable = graph.instantiate()
    obj.release()
    assert ran(cuda) == [("a", "caller")]
    executable.destroy()
    graph.destroy()


def test_object_released_from_a_still_capturing_graph_is_not_held_by_the_executable(cuda):
    stream = cuda.Stream()
    obj = cuda.UserObject("a")
    with stream.capture() as capture:
        stream.kernel()
        capture.graph.retain(obj)
        capture.graph.release(obj)
    graph = capture.graph
    executable = graph.instantiate()
    obj.release()
    assert ran(cuda) == [("a", "caller")]
    executable.destroy()
    graph.destroy()


def test_object_retained_while_capturing_is_held_by_the_executable(cuda):
    stream = cuda.Stream()
    obj = cuda.UserObject("a")
    with stream.capture() as capture:
        stream.kernel()
        capture.graph.retain(obj, move=True)
    executable = capture.graph.instantiate()
    capture.graph.destroy()
    assert stays(lambda: not obj.destroyed)
    executable.destroy()
    assert until(lambda: obj.destroyed)


# Updates


def test_successful_update_holds_the_new_sources_objects_and_drops_the_old(cuda):
    graph, old = holding(cuda, "old")
    executable = graph.instantiate()
    graph.destroy()
    source, new = holding(cuda, "new")
    executable.update(source)
    source.destroy()
    assert until(lambda: old.destroyed)
    assert stays(lambda: not new.destroyed)
    executable.destroy()
    assert until(lambda: new.destroyed)


def test_successful_update_keeps_the_old_objects_while_a_launch_is_in_flight(cuda):
    graph, old = holding(cuda, "old")
    executable = graph.instantiate()
    graph.destroy()
    _, gate = running(executable, cuda)
    source, new = holding(cuda, "new")
    executable.update(source)
    source.destroy()
    assert stays(lambda: not old.destroyed)
    gate.set()
    assert until(lambda: old.destroyed)
    assert not new.destroyed
    executable.destroy()
    assert until(lambda: new.destroyed)


def test_objects_gained_by_an_update_do_not_cover_earlier_launches(cuda):
    graph = cuda.Graph()
    graph.add_node()
    executable = graph.instantiate()
    graph.destroy()
    stream, gate = running(executable, cuda)
    source, new = holding(cuda, "new")
    executable.update(source)
    source.destroy()
    assert stays(lambda: not new.destroyed)
    executable.destroy()
    assert until(lambda: new.destroyed)
    assert not stream.query()
    gate.set()


def test_failed_update_is_status_910_and_changes_nothing(cuda):
    graph, current = holding(cuda, "current")
    executable = graph.instantiate()
    graph.destroy()
    source, rejected = holding(cuda, "rejected", nodes=2)
    with refused(910):
        executable.update(source)
    assert stays(lambda: not current.destroyed and not rejected.destroyed)
    source.destroy()
    assert ran(cuda) == [("rejected", "caller")]
    executable.destroy()
    assert until(lambda: current.destroyed)


# Conditional bodies


def conditional(cuda):
    """A template with a conditional node, and the body of that, filled by a capture."""
    graph = cuda.Graph()
    body = graph.add_conditional()
    stream = cuda.Stream()
    with stream.capture(into=body):
        stream.kernel()
    return graph, body


def test_object_of_a_conditional_body_is_held_by_the_parents_executable(cuda):
    graph, body = conditional(cuda)
    obj = cuda.UserObject("a")
    body.retain(obj, move=True)
    executable = graph.instantiate()
    graph.destroy()
    assert stays(lambda: not obj.destroyed)
    executable.destroy()
    assert until(lambda: obj.destroyed)


def test_object_released_from_a_conditional_body_before_instantiation_is_not_held(cuda):
    graph, body = conditional(cuda)
    obj = cuda.UserObject("a")
    body.retain(obj)
    body.release(obj)
    executable = graph.instantiate()
    obj.release()
    assert obj.destroyed
    executable.destroy()
    graph.destroy()


# Captures that fail


def test_invalidated_capture_reports_no_graph_and_destroys_it_when_it_ends(cuda):
    stream = cuda.Stream()
    obj = cuda.UserObject("a")
    with refused(901), stream.capture() as capture:
        stream.kernel()
        capture.graph.retain(obj, move=True)
        stream.invalidate()
        assert cuda.query(stream) == (0, 2, 0, 0)
        assert stays(lambda: not obj.destroyed)
    assert [tuple(run) for run in cuda.destructors] == [("a", "caller", threading.get_native_id())]
    assert cuda.query(stream) == (0, 0, 0, 0)


def test_invalidated_capture_into_a_graph_destroys_the_users_graph(cuda):
    graph, obj = holding(cuda, "a")
    stream = cuda.Stream()
    stream.begin_capture(into=graph)
    stream.kernel()
    stream.invalidate()
    assert stays(lambda: not obj.destroyed)
    with refused(901):
        stream.end_capture()
    assert ran(cuda) == [("a", "caller")]


def test_capture_ended_with_unjoined_work_destroys_its_graph(cuda):
    stream, side = cuda.Stream(), cuda.Stream()
    obj = cuda.UserObject("a")
    with refused(904), stream.capture() as capture:
        capture.graph.retain(obj, move=True)
        side.wait(stream)
        side.kernel()
    assert ran(cuda) == [("a", "caller")]
    assert cuda.query(stream) == (0, 0, 0, 0)


# Contexts


def test_without_a_context_objects_events_and_executables_still_work(cuda):
    graph, held = holding(cuda, "held")
    executable = graph.instantiate()
    template = cuda.Graph()
    event, stream = cuda.Event(), cuda.Stream()
    with cuda.no_context():
        obj = cuda.UserObject("made without")
        template.retain(obj, move=True)
        event.record(stream)
        assert until(event.query)
        executable.destroy()
    graph.destroy()
    template.destroy()
    assert until(lambda: held.destroyed)
    assert obj.destroyed


def test_without_a_context_the_current_device_is_status_201(cuda):
    assert cuda.call("cuCtxGetDevice") == 0
    with cuda.no_context():
        assert cuda.call("cuCtxGetDevice") == 201


# The ends of processes. Each body prints what it saw as JSON; on a real driver destructors also speak for themselves
# on stderr, since at that time nobody else can.

PREAMBLE = """
import atexit, json, os, sys
from conftest import stays, until
from real_driver import open_driver
opened = open_driver({face!r})  # kept, or it would close itself
cuda = opened.__enter__()
if {face!r} == "real":
    cuda.speak(2)
def report(**seen):
    print(json.dumps(seen), flush=True)
def tags():
    return [run.tag for run in cuda.destructors]
graph = cuda.Graph()
graph.add_node()
obj = cuda.UserObject("a")
graph.retain(obj, move=True)
executable = graph.instantiate()
"""


def saw(face, code):
    """What a process with a live template and executable printed, a dictionary for each line; and its stderr."""
    done = run_python(PREAMBLE.format(face=face) + code, timeout=60)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_context_reset_never_runs_the_destructor(face):
    code = """
cuda.reset_context()
report(silent=stays(lambda: not tags(), 0.3))
os._exit(0)
"""
    lines, stderr = saw(face, code)
    assert lines == [{"silent": True}]
    assert "destructor" not in stderr


def test_process_exit_with_a_live_graph_runs_no_destructor(face):
    code = """
atexit.register(lambda: report(tags=tags()))
"""
    lines, stderr = saw(face, code)
    assert lines == [{"tags": []}]
    assert "destructor" not in stderr


def test_os_exit_runs_no_destructor(face):
    code = """
atexit.register(lambda: report(atexit=True))
report(tags=tags())
os._exit(0)
"""
    lines, stderr = saw(face, code)
    assert lines == [{"tags": []}]
    assert "destructor" not in stderr


def test_destructor_of_a_living_process_speaks(face):
    """The control of the two tests above: what they wait for in vain is seen when it happens."""
    code = """
executable.destroy()
graph.destroy()
report(ran=until(lambda: tags() == ["a"]))
os._exit(0)
"""
    lines, stderr = saw(face, code)
    assert lines == [{"ran": True}]
    assert stderr == ("destructor 1 initialized 1\n" if face == "real" else "")


def test_graph_destroyed_after_python_is_gone_runs_the_destructor(real):
    code = """
from real_driver import address, helper
executable.destroy()
helper().call_at_exit(address(cuda.library.cuGraphDestroy), graph.handle)
atexit.register(lambda: report(tags=tags()))
"""
    lines, stderr = saw("real", code)
    assert lines == [{"tags": []}]
    assert stderr == "destructor 1 initialized 0\n"


def test_forked_child_sees_the_parents_capture_and_runs_no_destructor(face):
    code = """
stream = cuda.Stream()
stream.begin_capture()
other = cuda.Graph()
child = os.fork()
if not child:
    def code_of(function):
        try:
            function()
        except cuda.Error as error:
            return error.code
        return 0
    mine = []
    report(
        active=cuda.query(stream)[:2] == (0, 1),
        create=code_of(lambda: mine.append(cuda.UserObject("child"))),
        retain=code_of(lambda: other.retain(mine[0])),
        destroy=code_of(graph.destroy),
        tags=tags(),
    )
    sys.exit()
report(child_ended=until(lambda: os.waitpid(child, os.WNOHANG)[0], 20) == child)
stream.kernel()
stream.end_capture()
report(tags=tags())
os._exit(0)
"""
    lines, stderr = saw(face, code)
    assert lines == [
        {"active": True, "create": 0, "retain": 0, "destroy": 3, "tags": []},
        {"child_ended": True},
        {"tags": []},
    ]
    assert "destructor" not in stderr


def test_query_of_the_legacy_stream_in_a_forked_child_is_status_3(face):
    code = """
report(before=cuda.query(cuda.legacy))
child = os.fork()
if not child:
    report(after=cuda.query(cuda.legacy)[0])
    sys.exit()
report(child_ended=until(lambda: os.waitpid(child, os.WNOHANG)[0], 20) == child)
os._exit(0)
"""
    lines, stderr = saw(face, code)
    assert lines == [{"before": [0, 0, 0, 0]}, {"after": 3}, {"child_ended": True}]
    assert "destructor" not in stderr


# What is documented about destructors


def test_destructor_that_calls_the_driver_gets_status_800_and_the_context_survives(real):
    from real_driver import address, helper, made

    helper().forbid(address(real.library.cuCtxSynchronize))
    graph = real.Graph()
    obj = made("cuUserObjectCreate", None, address(helper().forbidden_destructor), 1, 1)
    assert real.library.cuGraphRetainUserObject(graph.handle, obj, 1, 1) == 0
    graph.destroy()
    assert helper().forbidden_answer() == 800
    assert real.call("cuCtxSynchronize") == 0


def test_object_without_the_no_destructor_sync_flag_is_status_1(real):
    from real_driver import address, helper, made

    with refused(1):
        made("cuUserObjectCreate", None, address(helper().nothing), 1, 0)


# torch


def test_exception_inside_torch_cuda_graph_ends_the_capture_and_objects_live_until_its_reset(real):
    torch = pytest.importorskip("torch")
    torch.cuda.init()
    data = torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    obj = real.UserObject("a")

    def capture():
        with torch.cuda.graph(graph):
            data.add_(1)
            _, _, _, handle = real.query(SimpleNamespace(handle=torch.cuda.current_stream().cuda_stream))
            assert real.library.cuGraphRetainUserObject(handle, obj.handle, 1, 1) == 0
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        capture()
    assert stays(lambda: not obj.destroyed)
    graph.reset()
    assert until(lambda: obj.destroyed)
