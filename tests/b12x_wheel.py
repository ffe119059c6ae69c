"""The real B12X on a machine without a GPU: its wheel, unpacked, with its compilers stubbed, so that all of its Python imports
and every family's bindings can be built on the CPU. One version per process (ARENA_TEST_B12X): its torch ops register once.
"""

import contextlib
import dataclasses
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import types
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import arena.b12x

VERSION = os.environ.get("ARENA_TEST_B12X", "1.5.1")
PREPARED = not VERSION.startswith("1.2.")  # from 1.5 on a session prepares plans, and bindings name them
prepared = pytest.mark.skipif(not PREPARED, reason="sessions prepare plans from 1.5 on")
TOKENS, HIDDEN = 8, 4096
RECIPE = {"rms_eps": 1e-6, "hc_eps": 1e-6, "sinkhorn_iters": 20}


FOLDER = Path(tempfile.gettempdir()) / f"arena-test-b12x-{os.getuid()}"


def tree(version):
    """The folder with that version's package and metadata; skips the test where it is not here and cannot be fetched."""
    why = fetch(version)
    if why:
        pytest.skip(f"b12x {version} is not here and cannot be fetched: {why}")
    return FOLDER / version


@functools.cache
def fetch(version):
    """Fetches that wheel once per machine, and unpacks it. Why that was not possible, or an empty string."""
    if (FOLDER / version / "b12x").is_dir():
        return ""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--disable-pip-version-check", "--retries", "1"]
    with tempfile.TemporaryDirectory() as temporary:
        try:
            subprocess.run([*pip, "-d", temporary, f"b12x=={version}"], check=True, capture_output=True, timeout=60)
        except (subprocess.SubprocessError, OSError) as error:
            return str(error)
        with zipfile.ZipFile(next(Path(temporary).glob("*.whl"))) as wheel:
            wheel.extractall(Path(temporary) / version)
        FOLDER.mkdir(exist_ok=True)
        with contextlib.suppress(OSError):  # another process was faster
            shutil.move(Path(temporary) / version, FOLDER / version)
    return ""


@contextlib.contextmanager
def opened():
    """The package, importable in this process: the installed one if it is that version, else its wheel. What stands for its
    compilers is gone afterwards: others of this process ask whether these are there."""
    try:
        there = importlib.metadata.version("b12x") == VERSION
    except importlib.metadata.PackageNotFoundError:
        there = False
    if not there and (folder := str(tree(VERSION))) not in sys.path:
        sys.path.insert(0, folder)
    finder = StubFinder()
    sys.meta_path.append(finder)
    try:
        yield importlib.import_module("b12x")
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, StubModule)]:
            del sys.modules[name]
        for asked in vars(importlib.import_module("torch.utils._triton")).values():
            if hasattr(asked, "cache_clear"):
                asked.cache_clear()


@pytest.fixture(autouse=True, scope="module")
def b12x():
    with opened() as package:
        yield package


@pytest.fixture
def installed():
    arena.b12x.install()
    yield
    arena.b12x.uninstall()


# ---- compilers that are not here ----


class StubType(type):
    """A class that stands for anything in a compiler: to be called, indexed, derived from, used as a decorator."""

    def __getattr__(cls, name):
        if name.startswith("__") and "mlir" not in name:
            raise AttributeError(name)
        return stub(name)

    def __call__(cls, *args, **kwargs):
        if "derived" in vars(cls):
            return super().__call__(*args, **kwargs)
        if len(args) == 1 and isinstance(args[0], (types.FunctionType, type)):
            if isinstance(args[0], types.FunctionType):
                args[0].fn = args[0]
            return args[0]  # as a decorator
        return stub(cls.__name__)

    def __getitem__(cls, item):
        return cls

    def __iter__(cls):
        return iter(())

    def __contains__(cls, item):
        return False

    __or__ = __ror__ = __mul__ = __rmul__ = __add__ = __sub__ = __getitem__
    __lt__ = __gt__ = __le__ = __ge__ = lambda cls, other: False

    def __hash__(cls):
        return id(cls)

    def __int__(cls):
        return 0


def stub(name):
    def derive(cls, **_):
        cls.derived = True

    return StubType(name, (), {"__init_subclass__": classmethod(derive)})


class StubModule(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__") and "mlir" not in name:
            raise AttributeError(name)
        value = stub(name)
        setattr(self, name, value)
        return value


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Last on `sys.meta_path`: only for what is not installed."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("cuda", "cutlass", "nvidia_cutlass_dsl", "triton", "tvm_ffi"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = StubModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        pass


# ---- plans and bindings on the CPU ----


class Programs:
    """Stands for the compiled programs that a session keeps loaded for a plan."""


def prepare(plan, state):
    """What a session does at the end of preparing: `state` and its programs are installed on the plan."""
    from b12x.preparation.types import _Prepared

    payload = _Prepared(
        state=state, selection=None, programs=frozenset(), retained=Programs(), owners=(), closers=(),
        device=SimpleNamespace(ordinal=None), scratch=(),
    )  # fmt: skip
    plan._install(payload)
    return plan


def release(plan):
    """What `session.release()` does to a plan that nobody shares."""
    payload = plan._prepared
    plan._clear()
    payload.closed, payload.retained, payload.state = True, None, None


def outputs():
    return {
        "y": torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16),
        "post": torch.zeros(TOKENS, 4),
        "comb": torch.zeros(TOKENS, 4, 4),
        "out": torch.zeros(TOKENS, 4, HIDDEN, dtype=torch.bfloat16),
    }


def mhc_plan(operation):
    from b12x.norm import mhc

    caps = mhc.Caps(device="cpu", max_tokens=TOKENS, hidden_size=HIDDEN, split_k=64)
    if not PREPARED:
        return mhc.plan(caps)
    from b12x.norm.mhc import _impl

    plan = mhc.plan(caps, invocation={"operation": operation, "output_mode": "provided", **RECIPE})
    layout = _impl._layout_mhc_scratch(caps)
    specs = (_impl.scratch_buffer_spec("mhc.scratch", nbytes=layout.nbytes, device=caps.device),)
    state = _impl._MhcState(caps=caps, layout=layout, _scratch_specs=specs, config=None, query=plan.query, launchers={})
    prepare(plan, state)
    plan._prepared.scratch = specs
    return plan


def mhc_binding(operation="pre", plan=None):
    """(binding, scratch): bound by B12X itself to new caller-owned buffers."""
    from b12x.norm import mhc

    plan = plan or mhc_plan(operation)
    (spec,) = plan.scratch_specs()
    scratch = torch.empty(spec.shape, dtype=spec.dtype, device=spec.device)
    return mhc.bind(plan, scratch=scratch, tokens=TOKENS, **outputs()), scratch


@contextlib.contextmanager
def launches(monkeypatch, launch):
    """The two MHC calls end in `launch(binding)` instead of their kernels, which a CPU cannot run."""
    from b12x.norm.mhc import _impl

    with monkeypatch.context() as patched:
        for name in ("_b12x_mhc_pre_impl", "_b12x_mhc_post_pre_impl"):
            patched.setattr(_impl, name, lambda *args, binding, **kwargs: launch(binding))
        yield


def run_pre(binding):
    from b12x.norm import mhc

    return mhc.run_pre(None, None, None, None, **RECIPE, binding=binding)


def run_post_pre(binding):
    from b12x.norm import mhc

    return mhc.run_post_pre(None, None, None, None, None, None, None, **RECIPE, binding=binding)


# ---- any binding, filled by hand ----


def filled(kind):
    """(object, tensors by field): one of a dataclass of B12X, with a tensor of its own in every field that takes one."""
    values, tensors = {}, {}
    for field in dataclasses.fields(kind):
        if not field.init:
            continue
        value = value_for(str(field.type), field.name)
        if isinstance(value, torch.Tensor):
            tensors[field.name] = value
        elif isinstance(value, tuple):
            tensors.update({f"{field.name}[{index}]": each for index, each in enumerate(value)})
        values[field.name] = value
    return build(kind, values), tensors


def build(kind, values):
    """Without the class's own checks, which want a GPU's tensors."""
    made = object.__new__(kind)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


class Handle:
    """Stands for a stream, an event, a launcher: something that is not a tensor and owns something."""


def value_for(annotation, name):
    if name in ("state", "_state") or "Stream" in annotation or "Event" in annotation:
        return Handle()
    if "tuple[torch.Tensor" in annotation:
        return (torch.zeros(3), torch.zeros(3))
    if "Tensor" in annotation and "GeometryTensors" not in annotation:
        return torch.zeros(3)
    if annotation in ("int", "bool", "float", "str") or name in ("device", "dtype"):
        return 1
    return None


# ---- what tests ask of it ----


def named(name):
    """What B12X calls that ("module.attribute" below its root), or None where this version has no such module."""
    where, _, label = name.rpartition(".")
    try:
        module = importlib.import_module("b12x." + where)
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("b12x"):
            raise
        return None
    return getattr(module, label, None)


def same(owners, expected):
    """The same objects, in that order. By identity: B12X's `==` computes, and a storage's repr prints every byte."""
    assert len(owners) == len(expected), [type(each).__name__ for each in owners]
    assert all(a is b for a, b in zip(owners, expected, strict=True)), [type(each).__name__ for each in owners]
