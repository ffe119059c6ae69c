"""What a captured B12X op must keep: `owners()` finds it, and `install()` registers it whenever such an op runs in a capture.

B12X binds views of its caller's scratch and launches what a session prepared; the graph records pointers into both. This module
knows each family's bindings field by field and patches the families' public calls in place, in modules loaded already and in
those loaded later. It imports no part of B12X that is not loaded anyway. Any thread may call any of it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]

from arena import retain
from arena._b12x_families import CALLS, KEPT, KNOWN, PLANS, ROOTS

__all__ = ["install", "installed", "owners", "uninstall"]

log = logging.getLogger("arena")

# A call's owners are what it is given under one of these names. The first two hold the plan and the scratch they run with.
HOLDERS = ("self", "binding", "bindings", "plan", "scratch", "workspace")
WHOLE = HOLDERS[:2]


# ---- what a binding must keep ----


def owners(binding: object) -> tuple[object, ...]:
    """What must live as long as a graph that captured a run of `binding`.

    The storages of its scratch, of its metadata and of what its pointer tables name; its streams and events; the state that
    its plan was prepared with and the programs that this holds loaded (`session.release` lets go of both, whether or not the
    plan lives); the plan, which compiled code knows by number only. Not its activations, outputs, weights and caches: made
    inside the capture they lie in the graph's own pool, made outside they are the caller's to retain.

    Args:
        binding: A B12X binding or plan. Of a class that the tables do not know, whatever it holds is retained: safe, but it
            may hold the graph's pool; the class is named in a warning, once.

    Returns:
        The owners, each once, scratch first. Nothing is compared, hashed or launched.

    Raises:
        TypeError: It is neither a binding nor a plan.
    """
    found = getattr(binding, FOUND, None)  # not of its `__dict__`: asking for that makes one
    if type(found) is not Found:
        found = find(binding)
    if not found.plans:
        return tuple(found.kept)
    kept, seen = found.kept.copy(), found.seen
    for plan in found.plans:
        payload = plan._prepared
        if payload is not None:  # else it was released, or never prepared
            state, programs = payload.state, payload.retained
            if state is not None and id(state) not in seen:
                kept.append(state)
            if programs is None:
                programs = programs_of(payload)
            if programs is not None and id(programs) not in seen:
                kept.append(programs)
        kept.append(plan)
    return tuple(kept)


def programs_of(payload: Any) -> tuple[object, ...] | None:
    """What the plans of a composite one keep loaded, a plan per token count. It has their states, and nothing of its own."""
    variants = getattr(payload, "variants", None)
    if not variants:
        return None
    payloads = [each._prepared for each in variants.values()]
    return tuple(each.retained for each in payloads if each is not None and each.retained is not None) or None


FOUND = "_arena_found"


def find(binding: object) -> Found:
    found = Found()
    kind: Any = type(binding)
    known = _kinds.get(kind)
    if known is None:
        if is_plan(binding):
            found.plans.append(binding)
            return found
        if not hasattr(kind, "__dataclass_fields__"):
            raise TypeError(f"a B12X binding or plan is needed, not {kind.__name__}")
    found.add_fields(binding)
    if not found.changing:
        # No field; dies with the binding, and holds nothing that the binding does not hold.
        object.__setattr__(binding, FOUND, found)
    return found


class Found:
    """What a walk through a binding found. Plans are asked anew each time: a session may prepare one again."""

    __slots__ = ("changing", "kept", "plans", "seen")

    def __init__(self) -> None:
        self.kept: list[object] = []  # each once, by identity
        self.plans: list[Any] = []
        self.seen: set[int] = set()  # ids of what is in `kept` or was walked through
        self.changing = False  # something in it may be filled or exchanged later

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of a binding looks for itself

    def add_fields(self, holder: object) -> None:
        kind: Any = type(holder)
        known = _kinds.get(kind)
        if known is None:
            known = _kinds[kind] = fields_of(kind)
        fields, changing = known
        if changing:
            self.changing = True
            self.kept.append(holder)  # and with it what it will be filled with
        kept, seen = self.kept, self.seen
        for name, role in fields:
            value = getattr(holder, name, None)
            if value is None:
                continue
            if role is WALKED:
                if type(value) is not torch.Tensor:
                    self.add(value)
                    continue
                value = value.untyped_storage()
            elif role is PLAN and is_plan(value):
                self.add_plan(value)
                continue
            if id(value) not in seen:
                seen.add(id(value))
                kept.append(value)

    def add(self, value: Any) -> None:
        kind: Any = type(value)
        if kind is torch.Tensor:
            self.keep(value.untyped_storage())
        elif kind in NOTHING or id(value) in self.seen:
            return
        elif isinstance(value, torch.Tensor):
            self.keep(value.untyped_storage())
        elif isinstance(value, Mapping):
            for each in value.values():
                self.add(each)
        elif isinstance(value, (tuple, list)):
            for each in value:
                self.add(each)
        elif is_plan(value):
            self.add_plan(value)
        elif hasattr(kind, "__dataclass_fields__"):
            self.seen.add(id(value))
            self.add_fields(value)
        elif not isinstance(value, (Enum, type)):
            self.keep(value)

    def add_plan(self, plan: object) -> None:
        if id(plan) not in self.seen:
            self.seen.add(id(plan))
            self.plans.append(plan)

    def keep(self, owner: object) -> None:
        if id(owner) not in self.seen:
            self.seen.add(id(owner))
            self.kept.append(owner)


NOTHING = {type(None), int, float, bool, str, bytes, torch.dtype, torch.device, torch.Size, frozenset}
WALKED, KEPT_WHOLE, PLAN = "walked", "kept whole", "plan"
ROLES = {"state": KEPT_WHOLE, "_state": KEPT_WHOLE, "plan": PLAN}  # a state's insides are B12X's own


Fields = tuple[tuple[tuple[str, str], ...], bool]
_kinds: dict[type, Fields] = {}  # what was said of each class so far


def fields_of(kind: type) -> Fields:
    """The fields of that class to look at, with their roles; and whether its objects change."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    words = KEPT.get(short_name(name) or "", "").split()
    names = [field.name for field in dataclasses.fields(kind)]
    if not words:
        if "Binding" in kind.__name__:
            log.warning("%s is not a class that arena.b12x knows: all that it holds is retained", name)
    elif words[0] == "all":
        names = [each for each in names if each not in words[1:]]
    else:
        names = [each for each in words if each in names]
    return tuple((each, ROLES.get(each, WALKED)) for each in names), not kind.__dataclass_params__.frozen  # type: ignore[attr-defined]


def is_plan(value: object) -> bool:
    return hasattr(type(value), "_prepared")


# ---- registering ----


def registering(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, with what it was given retained first: what cannot be retained must not be captured."""
    given = inspect.signature(call).parameters
    places = {name: index for index, (name, each) in enumerate(given.items()) if each.kind is each.POSITIONAL_OR_KEYWORD}
    holders = [(name, places.get(name, sys.maxsize)) for name in HOLDERS if name in given]
    if not holders:
        return call
    first, place = holders[0]

    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        holder = args[place] if place < len(args) else kwargs.get(first)
        if holder is not None and first in WHOLE:
            if not tracing():
                retain(holder)
        elif not tracing():
            if first == "bindings" and holder is not None and not isinstance(holder, (tuple, list)):  # may be read once only
                args, kwargs = with_holder(tuple(holder), args, kwargs)
            retain_given(holders, args, kwargs)
        return call(*args, **kwargs)

    def with_holder(bindings: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if place < len(args):
            return (*args[:place], bindings, *args[place + 1 :]), kwargs
        return args, {**kwargs, first: bindings}

    return run


def retain_given(holders: list[tuple[str, int]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Retains what a call was given: its bindings, or else its plan, scratch and workspace."""
    for name, place in holders:
        given = args[place] if place < len(args) else kwargs.get(name)
        if given is None:
            continue
        for each in given if name == "bindings" else (given,):
            retain(each)
        if name in WHOLE or name == "bindings":
            return


def registering_plan(call: Callable[[int], Any]) -> Callable[[int], Any]:
    """`plan_from_handle`, which the bodies of B12X's custom ops call: all that compiled code hands them is the number."""

    @functools.wraps(call)
    def plan_from_handle(handle: int) -> Any:
        plan = call(handle)
        retain(plan)
        return plan

    return plan_from_handle


# Tracing, Dynamo would stop at retain(); what it compiles reaches plan_from_handle().
tracing = torch.compiler.is_dynamo_compiling


# ---- in place ----

_lock = threading.RLock()
_installed = False
_calls: dict[int, tuple[Callable[..., Any], Callable[..., Any]]] = {}  # id of B12X's own: (it, ours)
_members: list[tuple[type, str, Any]] = []  # (class, name, B12X's own; None: it had none)


def install() -> None:
    """From now on B12X's calls retain, in each capture, what they run on. Twice is once.

    Reaches modules that are loaded already, wherever a call was imported by value, and those that are loaded later.

    Raises:
        ImportError: No B12X is installed here.
        RuntimeError: This one's version is not known; nothing was patched.
    """
    global _installed
    with _lock:
        if _installed:
            return
        check_versions()
        _installed = True
        sys.meta_path.insert(0, watch)
        for name, module in list(sys.modules.items()):
            if short_name(name) in WATCHED and isinstance(module, ModuleType):
                patch(module)
        exchange({key: new for key, (_, new) in _calls.items()})


def uninstall() -> None:
    """Puts B12X's own calls back, in every module. What graphs retained stays theirs."""
    global _installed
    with _lock:
        if not _installed:
            return
        _installed = False
        sys.meta_path.remove(watch)
        exchange({id(new): old for old, new in _calls.values()})
        while _members:
            kind, name, own = _members.pop()
            if own is None:
                delattr(kind, name)
            else:
                setattr(kind, name, own)
        _calls.clear()


def installed() -> bool:
    """Whether `install()` is in force."""
    return _installed


def check_versions() -> None:
    here = [each for each in (provider(root) for root in ROOTS) if each is not None]
    if not here:
        raise ImportError("no B12X here: neither b12x nor a FlashInfer that carries it is installed")
    if here[0] not in KNOWN:
        known = ", ".join(" ".join(each) for each in sorted(KNOWN))
        raise RuntimeError(f"arena.b12x does not know the B12X of {' '.join(here[0])}; it knows those of {known}")


@functools.cache
def provider(root: str) -> tuple[str, str] | None:
    """(distribution, version) of what is, or would be, imported as that root. Importing nothing but for the answer."""
    top, _, inside = root.partition(".")
    spec = importlib.util.find_spec(top)
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    if inside and not (folder.joinpath(*inside.split("."), "__init__.py")).exists():
        return None
    vendored = bool(inside) or folder.parent.name == "experimental" or not (folder / "_lib").is_dir()
    distribution = "flashinfer-python" if vendored else "b12x"
    try:
        return distribution, importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return distribution, "(of no version: it was not installed)"


def short_name(module: str) -> str | None:
    """The module's name below the root that it is in; None: it is not B12X's."""
    root = root_of(module)
    return None if root is None else module[len(root) + 1 :]


def root_of(module: str) -> str | None:
    return next((root for root in ROOTS if module.startswith(root + ".")), None)


def patch(module: ModuleType) -> None:
    """Exchanges that module's own calls, and gives its classes `__cuda_owners__`. Again is nothing."""
    short, root = short_name(module.__name__), root_of(module.__name__)
    if root is None or provider(root) not in KNOWN:
        log.warning("the B12X of %s is not known: nothing of %s is registered", provider(root or "b12x"), module.__name__)
        return
    for name in CALLS.get(short or "", "").split():
        kind, _, method = name.rpartition(".")
        if kind:
            replace_member(vars(module).get(kind), method)
            continue
        call = vars(module).get(name)
        if inspect.isfunction(call) and call.__module__ == module.__name__ and not hasattr(call, "_arena"):
            ours: Any = registering_plan(call) if name == "plan_from_handle" else registering(call)
            if ours is not call:
                ours._arena = True
                _calls[id(call)] = call, ours
                exchange({id(call): ours}, [module])
    for name in (*KEPT, *PLANS):
        where, _, label = name.rpartition(".")
        owned: Any = vars(module).get(label) if where == short else None
        if isinstance(owned, type) and "__cuda_owners__" not in vars(owned):
            _members.append((owned, "__cuda_owners__", None))
            setattr(owned, "__cuda_owners__", owners)  # noqa: B010 - no class declares it


def replace_member(kind: Any, name: str) -> None:
    own = vars(kind).get(name) if isinstance(kind, type) else None
    if inspect.isfunction(own) and not hasattr(own, "_arena"):
        ours: Any = registering(own)
        ours._arena = True
        _members.append((kind, name, own))
        setattr(kind, name, ours)


def exchange(by_id: Mapping[int, Any], modules: Iterable[Any] | None = None) -> None:
    """Replaces module variables by the identity of their values; in all modules, if none are given."""
    for module in list(sys.modules.values()) if modules is None else modules:
        names = getattr(module, "__dict__", None)
        if type(names) is dict:
            for name, value in list(names.items()):
                if id(value) in by_id:
                    names[name] = by_id[id(value)]


class Watch:
    """On `sys.meta_path`: patches a module of B12X as soon as it was executed, before others import from it by value."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if short_name(name) not in WATCHED:
            return None
        finders = (each for each in sys.meta_path if each is not self and hasattr(each, "find_spec"))
        spec = next((spec for spec in (each.find_spec(name, path, target) for each in finders) if spec is not None), None)
        execute = getattr(spec.loader, "exec_module", None) if spec is not None else None
        if spec is None or execute is None:
            return spec

        def exec_module(module: ModuleType) -> None:
            execute(module)
            with _lock:
                if _installed:
                    patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[union-attr, method-assign]
        return spec


WATCHED = {*CALLS, *(name.rpartition(".")[0] for name in (*KEPT, *PLANS))}
watch: Any = Watch()
