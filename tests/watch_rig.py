"""A workspace that is watched, without a GPU: streams and events that stand in for torch's. Its fixtures are taken by name."""

import pytest
import torch

from arena import ordering
from arena.overlaps import watch
from arena.workspace import WorkspaceManager

SPEC = ((256,), torch.float32)


class Event:
    """What torch.cuda.Event is to the watch."""

    def record(self, stream=None):
        pass

    def wait(self, stream=None):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True


class Stream:
    """What torch.cuda.Stream is to the watch; `busy` until the test says otherwise."""

    def __init__(self, name):
        self.name, self.busy = name, True

    def __repr__(self):
        return f"stream {self.name}"

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event):
        event.wait(self)

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def synchronize(self):
        pass

    def query(self):
        return not self.busy


class Streams:
    """The current stream, as torch's would be."""

    def __init__(self):
        self.one, self.two, self.three = Stream("one"), Stream("two"), Stream("three")
        self.current = self.one

    def __call__(self, device):
        return self.current

    def request(self, stream, manager, *specs):
        self.current = stream
        return manager.get_simultaneous(*(specs or (SPEC,)))


@pytest.fixture
def manager():
    return WorkspaceManager(torch.device("cpu"), 2, 2)


@pytest.fixture
def found():
    return []


@pytest.fixture
def streams(monkeypatch):
    monkeypatch.setattr(ordering, "PATCHED", [*ordering.PATCHED, (Event, ordering.EVENT), (Stream, ordering.STREAM)])
    return Streams()


@pytest.fixture
def watched(manager, streams, found):
    with watch(manager, report=found.append, current_stream=streams) as watching:
        yield watching
