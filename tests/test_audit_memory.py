"""What arena.memory makes of torch's allocator, on a stand-in that answers as torch does, in the forms of several versions; the
real one is asked in test_audit_gpu.py. And what it sees of owners is in test_audit.py."""

import sys
import types

import pytest

from arena import memory, reporting
from arena.memory import Block, TorchAllocator


class Torch:
    """The few functions of torch that are asked. `forms`: the arguments that its snapshot takes; `clears`: it can forget."""

    def __init__(self, forms=(3, 2, None), clears=True, history=False):
        self.forms, self.clears, self.history, self.trace, self.frees = forms, clears, history, [], 0
        self.segments = []
        self.between = None  # what another thread does between a reading and the forgetting
        self._C = types.SimpleNamespace(
            _cuda_memorySnapshot=self.snapshot, _cuda_memoryStats=self.stats, _cuda_isHistoryEnabled=lambda: self.history
        )
        module = types.SimpleNamespace(_record_memory_history=self.record)
        self.cuda = types.SimpleNamespace(device_count=lambda: 1, memory=module)

    def snapshot(self, argument):
        if (None if argument is None else len(argument)) not in self.forms:
            raise RuntimeError("a tuple of another length was expected")
        whole = argument is None or argument[:2] == (0, 0)
        told = {"segments": self.segments if whole else [], "device_traces": [list(self.trace)]}
        if self.between:
            self.between()
        return told

    def stats(self, device):
        return {"allocation": {"all": {"freed": self.frees}}}

    def record(self, enabled, **options):
        if "clear_history" in options:
            if not self.clears:
                raise TypeError("unexpected keyword argument 'clear_history'")
            self.trace.clear()
        self.history = True

    def do(self, action, address, size=512):
        if self.history:
            self.trace.append({"action": action, "addr": address, "size": size, "time_us": memory.now(), "stream": 0})
        self.frees += action == "free_requested"


@pytest.mark.parametrize("forms", [(3, 2, None), (2, None), (None,)], ids=["newest", "older", "oldest"])
def test_blocks_are_read_in_each_form_of_a_snapshot(forms):
    torch = Torch(forms)
    torch.segments = [
        {
            "address": 4096,
            "segment_pool_id": (0, 3),
            "blocks": [
                {"size": 512, "requested_size": 400, "state": "active_allocated"},
                {"size": 1024, "requested_size": 1000, "state": "active_awaiting_free"},
                {"size": 512, "requested_size": 0, "state": "inactive"},
            ],
        }
    ]
    assert TorchAllocator(torch).blocks() == [
        Block(4096, 512, True, (0, 3), 4096, 400),
        Block(4608, 1024, False, (0, 3), 4096, 1000),
        Block(5632, 512, False, (0, 3), 4096, 0),
    ]


def test_a_snapshot_that_fails_in_every_form_says_so():
    with pytest.raises(RuntimeError, match="another length"):
        TorchAllocator(Torch(forms=())).blocks()


def test_history_is_taken_over_and_kept():
    torch = Torch()
    source = TorchAllocator(torch)
    source.watch()
    began = memory.now()
    torch.do("alloc", 4096)
    torch.do("free_requested", 4096)
    torch.do("free_completed", 4096)
    torch.do("segment_free", 0, 1 << 20)
    events, whole = source.events(began)
    assert ([each.action for each in events], whole) == (["alloc", "free", "unmap"], True)
    assert torch.trace == []
    torch.do("alloc", 4096)
    assert [each.action for each in source.events(began)[0]] == ["alloc", "free", "unmap", "alloc"]
    assert [each.action for each in source.events(events[-1].when + 1)[0]] in ([], ["alloc"])


def test_history_does_not_reach_behind_its_begin():
    source = TorchAllocator(Torch())
    began = memory.now() - 1
    source.watch()
    assert source.events(began) == ([], False)
    assert source.events(memory.now()) == ([], True)


def test_what_another_thread_frees_between_reading_and_forgetting_is_noticed():
    torch = Torch()
    source = TorchAllocator(torch)
    source.watch()
    began = memory.now()
    torch.between = lambda: torch.do("free_requested", 4096)
    assert source.events(began)[1] is False
    torch.between = None
    assert source.events(memory.now())[1] is True


def test_an_overflow_is_noticed(monkeypatch):
    monkeypatch.setattr(memory, "HISTORY", 4)
    torch = Torch()
    source = TorchAllocator(torch)
    source.watch()
    began = memory.now()
    for _ in range(4):
        torch.do("alloc", 4096)
    assert source.events(began)[1] is False


def test_what_is_kept_is_bounded_and_says_where_it_begins(monkeypatch):
    monkeypatch.setattr(memory, "HISTORY", 4)
    torch = Torch()
    source = TorchAllocator(torch)
    source.watch()
    began = memory.now()
    for _ in range(10):
        torch.do("alloc", 4096)
        source.events(began)
    assert len(source.kept) <= 8
    assert source.events(began)[1] is False


def test_somebody_elses_history_is_read_and_left_alone():
    torch = Torch(history=True)
    torch.do("alloc", 4096)
    began = memory.now()
    torch.do("free_requested", 4096)
    source = TorchAllocator(torch)
    source.watch()
    events, whole = source.events(began)
    assert ([each.action for each in events], whole) == (["free"], True)
    assert len(torch.trace) == 2


def test_somebody_elses_history_reaches_back_as_far_as_that_of_each_device(monkeypatch):
    """Each device's overflows by itself, at a size that we do not know."""
    torch = Torch(history=True)
    source, traces = TorchAllocator(torch), [[], [], []]
    monkeypatch.setattr(torch._C, "_cuda_memorySnapshot", lambda form: {"segments": [], "device_traces": traces})
    assert source.events(100) == ([], False)
    for device, first in ((0, 50), (2, 150)):
        traces[device].append({"action": "alloc", "addr": 4096, "size": 512, "time_us": first})
    assert [source.events(since)[1] for since in (49, 50, 149, 150)] == [False, False, False, True]
    del traces[2]
    assert [source.events(since)[1] for since in (49, 50)] == [False, True]


def test_a_torch_that_cannot_forget_is_read_all_over():
    torch = Torch(clears=False)
    source = TorchAllocator(torch)
    source.watch()
    torch.do("alloc", 4096)
    torch.do("alloc", 4096)
    assert len(source.events(0)[0]) == len(source.events(0)[0]) == 2


def test_history_that_was_switched_off_is_not_believed():
    torch = Torch()
    source = TorchAllocator(torch)
    source.watch()
    began = memory.now()
    torch.history = False
    torch.do("free_requested", 4096)
    assert source.events(began) == ([], False)
    source.watch()
    assert source.events(began)[1] is False


@pytest.mark.parametrize(
    ("backend", "kind"), [("native", TorchAllocator), ("cudaMallocAsync", memory.Nothing), ("pluggable", memory.Nothing)]
)
def test_only_torchs_own_allocator_is_asked(monkeypatch, backend, kind):
    """The others have no snapshot: they raise."""
    torch = Torch(forms=())
    torch.cuda.is_initialized, torch.cuda.get_allocator_backend = lambda: True, lambda: backend
    torch.cuda.memory_reserved = lambda device: 4096 if backend == "native" else 1 / 0
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(memory, "_torch", None)
    source = memory.allocator()
    assert isinstance(source, kind)
    assert reporting._reserved() == (4096 if backend == "native" else 0)
    if backend != "native":
        assert (source.blocks(), source.events(0)) == ([], ([], False))
