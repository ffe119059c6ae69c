"""What a captured B12X op keeps, on the real wheel: its own Python plans and binds on the CPU, its calls run registered on the
simulated driver with their kernels left out. By default 1.5.1; the last test runs this file on the other known versions.
"""

import contextlib
import copy
import dataclasses
import gc
import importlib
import importlib.metadata
import inspect
import logging
import os
import pickle
import subprocess
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

import arena.b12x  # noqa: E402
from arena._b12x_families import CALLS, KEPT, KNOWN  # noqa: E402

prepared = pytest.mark.skipif(not wheel.PREPARED, reason="sessions prepare plans from 1.5 on")


@pytest.fixture(autouse=True, scope="module")
def b12x():
    with wheel.opened() as package:
        yield package


@pytest.fixture
def installed():
    arena.b12x.install()
    yield
    arena.b12x.uninstall()


@pytest.fixture
def cuda(simulated):
    return simulated


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


def storages(owners):
    return {id(each) for each in owners if isinstance(each, torch.UntypedStorage)}


def same(owners, expected):
    """The same objects, in that order. By identity: B12X's `==` computes, and a storage's repr prints every byte."""
    assert len(owners) == len(expected), [type(each).__name__ for each in owners]
    assert all(a is b for a, b in zip(owners, expected, strict=True)), [type(each).__name__ for each in owners]


# ---- owners ----


def test_an_mhc_binding_keeps_its_scratch_and_what_was_prepared_and_no_output():
    binding, scratch = wheel.mhc_binding("post_pre")
    expected = [scratch.untyped_storage()]
    if wheel.PREPARED:
        expected += [binding.state, binding.plan._prepared.retained, binding.plan]
    same(arena.b12x.owners(binding), expected)


@prepared
def test_a_plan_keeps_what_it_was_prepared_with():
    plan = wheel.mhc_plan("pre")
    same(arena.b12x.owners(plan), [plan._prepared.state, plan._prepared.retained, plan])
    wheel.release(plan)
    same(arena.b12x.owners(plan), [plan])


@prepared
def test_a_binding_of_a_released_plan_still_keeps_its_state():
    plan = wheel.mhc_plan("pre")
    binding, scratch = wheel.mhc_binding(plan=plan)
    arena.b12x.owners(binding)
    wheel.release(plan)
    same(arena.b12x.owners(binding), [scratch.untyped_storage(), binding.state, plan])


@prepared
def test_a_plan_of_several_token_counts_keeps_the_programs_of_each():
    """A composite plan has none of its own, and its session lets go of theirs together with it."""
    from b12x.preparation.types import _CompositePlan

    children = {8: wheel.mhc_plan("pre"), 16: wheel.mhc_plan("pre")}
    plan = _CompositePlan(component_id="norm.mhc", capacity_metadata={}, variants=children, _assemble=None)
    wheel.prepare(plan, wheel.Programs())
    plan._prepared.retained, plan._prepared.variants = None, plan.variants
    binding, scratch = wheel.mhc_binding(plan=children[8])
    binding = dataclasses.replace(binding, plan=plan)  # as fused_moe binds
    programs = [each._prepared.retained for each in children.values()]
    storage, state, assembled, kept, last = arena.b12x.owners(binding)
    same([storage, state, assembled, last], [scratch.untyped_storage(), binding.state, plan._prepared.state, plan])
    same(kept, programs)
    wheel.release(children[16])
    same(arena.b12x.owners(plan)[1], programs[:1])
    wheel.release(children[8])
    same(arena.b12x.owners(plan), [plan._prepared.state, plan])


@prepared
def test_a_plan_that_is_prepared_again_is_asked_again():
    plan = wheel.mhc_plan("pre")
    binding, _ = wheel.mhc_binding(plan=plan)
    arena.b12x.owners(binding)
    wheel.release(plan)
    state = wheel.Handle()
    wheel.prepare(plan, state)
    assert any(each is state for each in arena.b12x.owners(binding))


# The fields of each binding that are its caller's, in any known version: activations, outputs, weights, caches. What is
# neither here nor retained makes the test below fail.
CALLERS = {
    "attention._shared.contiguous.api.AttentionBinding": "q k v output attention_sink_bias",
    "attention._shared.contiguous.api.VarlenAttentionBinding": "q k v output attention_sink_bias",
    "attention._shared.mla.merge.SparseMLASplitDecodeMergeBinding": "output attn_sink",
    "attention._shared.static_fp8_quant.Binding": "source scale",
    "attention.compressed_mla._scratch.B12XCompressedMLABinding": "q indexed_indices",
    "attention.compressed_sparse_mla._scratch.B12XCompressedSparseMLABinding": "q indexed_indices",
    "attention.dense_mla._scratch.Binding": "q kv_cache output kv_scale q_scale",
    "attention.dense_mla.api.Binding": "q kv_cache output kv_scale q_scale",
    "attention.dsa_indexer.api.Binding": "q_fp8 query_weights index_k_cache output_indices output_scores q_mxfp4 q_scales",
    "attention.dsa_indexer.mxfp4.MXFP4Binding": "q_mxfp4 q_scales query_weights index_k_cache output_indices output_scores",
    "attention.dsa_indexer.mxfp4.MXFP4Runtime": "candidate_indices candidate_output candidate_output_lengths",
    "attention.dsa_indexer.persistent_topk.B12XPersistentTopK2048Binding": "logits output_indices",
    "attention.dsa_indexer.scratch.B12XIndexerContiguousBinding": "output_values output_indices",
    "attention.dsa_indexer.scratch.B12XIndexerMSAContiguousBinding": "block_scores q2k_indices",
    "attention.dsa_indexer.scratch.B12XIndexerMSAPagedBinding": "block_scores q2k_indices",
    "attention.dsa_indexer.scratch.B12XIndexerPagedBinding": "",
    "attention.mla_compress._impl.Binding": "values gates weight out emitted emitted_slots",
    "attention.paged._scratch.B12XPagedAttentionBinding": "q k_cache v_cache output k_descale v_descale attention_sink_bias "
    "relative_attention_bias",
    "attention.qsa._contract.Binding": "main_k_cache main_v_cache k_descale v_descale compressed_k_cache raw_k_ring "
    "index_q_norm_weight index_k_norm_weight rope_cos rope_sin output selected_positions",
    "attention.sparse_mla._paged_index_remap.Binding": "logical_indices input_counts",
    "attention.sparse_mla._scratch.B12XSparseMLABinding": "q selected_indices kv_cache",
    "attention.sparse_mla.api.Binding": "kv_cache attention_sink q selected_indices",
    "attention.sparse_mla.strided.Binding": "kv_cache selected_indices selected_counts",
    "attention.varlen._preparation.BatchedBinding": "sink_source",
    "attention.varlen._preparation.VarlenBinding": "sink_source",
    "gemm._shared.block_fp8.BlockFP8LinearBinding": "source output bias",
    "gemm._shared.wo_mxfp8.WOProjectionBinding": "source_tgd output",
    "gemm._shared.wo_mxfp8.WOProjectionInvRopeBinding": "o cos_sin_cache output",
    "gemm.bf16_vocab_projection._contracts.Binding": "source weight",
    "moe._shared.kernels.w4a16.mixed_trellis.MixedTrellis3Binding": "",
    "moe._shared.kernels.w4a16.mixed_trellis.MixedTrellisBinding": "",
    "moe.ep_moe._impl.EPMoEFP4Binding": "a topk_weights topk_ids output",
    "moe.fused_moe._impl.TPMoEFP4Binding": "a topk_weights topk_ids output output_cast_target activation_amax",
    "moe.fused_moe._impl.TPMoERouteBinding": "hidden_states gate_weight gate_bias router_logits correction_bias "
    "image_correction_bias image_mask",
    "moe.fused_moe._impl.TPMoESparseFP4Binding": "hidden_states gate_weight gate_bias router_logits correction_bias "
    "image_correction_bias image_mask output activation_amax",
    "norm.hyperconnection._impl.HyperConnectionBinding": "normalized_capacity bottleneck_capacity block_input_capacity",
    "norm.mhc._impl.B12XMHCBinding": "y post_buffer comb_buffer out pre_out",
    "sequence._shared.delta_prefill.contract.Binding": "q k v raw_g raw_beta A_log dt_bias recurrent_state output",
    "sequence.engram._impl.Binding": "token_ids token_mask hash_ids",
    "sequence.engram._impl.LookupBinding": "weight scale_bytes hash_ids out",
    "sequence.gdn_decode._commit.KdaCommitBinding": "",
    "sequence.gdn_decode._impl.Binding": "mixed_qkv a b z A_log dt_bias norm_weight recurrent_state output",
    "sequence.gdn_decode._impl.KdaBinding": "mixed_qkv raw_g raw_beta z A_log dt_bias norm_weight recurrent_state output "
    "correction_cache kg_cache",
    "sequence.gdn_prefill._impl.Binding": "q k v raw_g raw_beta A_log dt_bias recurrent_state output",
    "sequence.gdn_prefill._parallel.ParallelBinding": "",
    "sequence.kda_prefill._impl.Binding": "q k v raw_g raw_beta A_log dt_bias recurrent_state output",
    "sequence.mtp_feedback._impl.Binding": "token_embedding multi_state token_norm_weight state_norm_weight "
    "embedding_fc_weight hidden_fc_weight output",
    "sequence.ple._contracts.LayerBinding": "residual key value k_norm_weight q_norm_weight u_norm_weight conv_weight "
    "conv_state out",
    "sequence.ple_embedding._contracts.Binding": "weight weight_scale weight_scale_2 token_ids out",
    "sequence.ple_hash._contracts.Binding": "token_ids out",
}


def test_the_table_of_callers_is_whole():
    assert CALLERS.keys() == KEPT.keys()


@pytest.mark.parametrize("name", KEPT)
def test_whatever_memory_a_binding_names_is_retained_or_its_callers(name):
    kind = named(name)
    if kind is None or not dataclasses.is_dataclass(kind):
        pytest.skip(f"B12X {wheel.VERSION} has no {name}")
    binding, tensors = wheel.filled(kind)
    kept = arena.b12x.owners(binding)
    expected = {label for label in tensors if label not in CALLERS[name].split()}
    assert {label for label, each in tensors.items() if id(each.untyped_storage()) in storages(kept)} == expected
    handles = [getattr(binding, field.name) for field in dataclasses.fields(kind)]
    for each in (each for each in handles if isinstance(each, wheel.Handle)):  # its state, streams, events
        assert any(each is other for other in kept)


def test_every_binding_class_of_the_wheel_is_known(b12x):
    inner = {  # between the kernels' own modules: never given to a public call, and made of what the outer binding holds
        "IndexerContiguousLogitsKernelBinding", "IndexerPagedLogitsKernelBinding", "IndexerPagedTiledLogitsKernelBinding",
        "IndexerPagedSupertileLogitsKernelBinding", "_PackedInputBindingViews",
    }  # fmt: skip
    known = {name.rpartition(".")[2] for name in KEPT}
    unknown = []
    root = Path(b12x.__path__[0])
    for file in root.rglob("*.py"):
        for line in file.read_text().splitlines():
            if line.startswith("class ") and "Binding" in line and "testing" not in file.parts:
                label = line.removeprefix("class ").split("(")[0].rstrip(":")
                if label not in known | inner | {"ParameterBinding"}:
                    unknown.append(f"{file.relative_to(root)}: {label}")
    assert not unknown


def test_metadata_is_walked_and_raw_pointers_are_kept_with_what_they_name():
    kind = named("attention.dsa_indexer.scratch.B12XIndexerPagedBinding") or named(
        "attention.nsa_indexer.scratch.B12XIndexerPagedBinding"
    )
    binding, tensors = wheel.filled(kind)
    inner = sys.modules[kind.__module__].IndexerPagedDecodeMetadata
    metadata, named_by_it = wheel.filled(inner)
    object.__setattr__(binding, "metadata", metadata)
    assert {id(each.untyped_storage()) for each in named_by_it.values()} <= storages(arena.b12x.owners(binding))
    if wheel.PREPARED:
        binding, tensors = wheel.filled(named("sequence.gdn_decode._commit.KdaCommitBinding"))
        assert {id(each.untyped_storage()) for each in tensors.values()} == storages(arena.b12x.owners(binding))


def test_an_object_that_is_filled_later_is_kept_itself_and_looked_at_each_time():
    binding, _ = wheel.filled(named("attention.paged._scratch.B12XPagedAttentionBinding"))
    scratch, tensors = wheel.filled(named("attention.paged._scratch.B12XPagedAttentionScratch"))
    object.__setattr__(binding, "scratch", scratch)
    first = arena.b12x.owners(binding)
    assert any(each is scratch for each in first)
    assert {id(each.untyped_storage()) for each in tensors.values()} <= storages(first)
    scratch.page_table = torch.zeros(5)
    assert id(scratch.page_table.untyped_storage()) in storages(arena.b12x.owners(binding))


def test_owners_are_found_once_per_binding_and_never_compared(monkeypatch):
    looks = []
    monkeypatch.setattr(arena.b12x.Found, "add_fields", lambda found, holder: looks.append(holder))
    plan = wheel.mhc_plan("pre")
    binding, twin = (wheel.mhc_binding(plan=plan)[0] for _ in range(2))
    with pytest.raises(RuntimeError, match="ambiguous"):
        assert binding == twin  # the control: what an equality of bindings does
    for _ in range(3):
        arena.b12x.owners(binding)
        arena.b12x.owners(twin)
    assert [each is binding for each in looks] == [True, False]


def test_what_was_found_dies_with_the_binding_and_is_not_copied():
    binding, scratch = wheel.mhc_binding()
    alive = weakref.ref(binding)
    arena.b12x.owners(binding)
    assert arena.b12x.FOUND not in {field.name for field in dataclasses.fields(binding)}
    other = copy.copy(binding)
    object.__setattr__(other, "partials", torch.zeros(4))
    copied = pickle.loads(pickle.dumps(arena.b12x.find(binding)))
    assert copied is None
    del binding
    assert alive() is None
    assert scratch is not None


def test_of_an_unknown_binding_everything_is_retained_and_it_is_named_once(caplog):
    @dataclasses.dataclass(frozen=True)
    class NewBinding:
        q: torch.Tensor
        tables: dict
        count: int = 3

    with caplog.at_level(logging.WARNING, "arena"):
        for _ in range(2):
            new = NewBinding(torch.zeros(2), {"a": [torch.zeros(2)]})
            assert len(storages(arena.b12x.owners(new))) == 2
    assert caplog.text.count("NewBinding") == 1


@pytest.mark.parametrize("thing", [None, 3, "binding", object(), [1]])
def test_what_is_neither_binding_nor_plan_is_refused(thing):
    with pytest.raises(TypeError, match="binding or plan"):
        arena.b12x.owners(thing)


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


# ---- which calls are registered ----


def public_calls(b12x):
    """Every public function of every op that takes a binding or a plan to run it: (op, name, function)."""
    for meta in b12x.list_ops():
        api = importlib.import_module(f"b12x.{b12x._op_module_path(meta.qualname)}.api")
        for name in meta.entry_points:
            call = getattr(api, name, None)
            if inspect.isfunction(call) and not name.startswith(("bind", "plan", "query", "invocation", "prewarm")):
                yield meta.qualname, name, call


# Public and taking a plan or a binding, but launching nothing themselves, or only by calls that are registered.
LAUNCH_NOTHING = {
    ("moe.fused_moe", "prepare_weights"), ("moe.fused_moe", "route"), ("moe.fused_moe", "run_sparse"),
    ("moe.fused_moe", "run"), ("moe.ep_moe", "run"),
    ("attention.paged", "compile"), ("attention.dense_mla", "compile"), ("attention.dsa_indexer", "scratch_specs"),
    ("gemm.blockscaled", "workspace_size"), ("quantization.nvfp4", "allocate_outputs"), ("moe.fused_moe", "required_nbytes"),
    ("sequence.ple_embedding", "allocate_storage"), ("attention.qsa", "draft_selection_plan"),
}  # fmt: skip


def test_every_public_call_that_runs_a_binding_or_a_plan_is_registered(b12x, installed):
    missing, seen = [], 0
    for op, name, call in public_calls(b12x):
        if {"binding", "bindings", "plan"} & set(inspect.signature(call).parameters) and (op, name) not in LAUNCH_NOTHING:
            seen += 1
            if not hasattr(call, "_arena"):
                missing.append(f"{op}.{name}")
    assert not missing
    assert seen > (60 if wheel.PREPARED else 20)


def test_every_call_and_class_of_the_tables_is_of_some_known_version():
    """A name misspelt in a table would protect nobody: each is found here, or in the other line of versions."""
    other = "1.2.6" if wheel.PREPARED else "1.5.1"
    trees = [wheel.tree(wheel.VERSION), wheel.tree(other)]

    def defined(module, label, keyword):
        files = [each / "b12x" / (module.replace(".", "/") + ".py") for each in trees]
        return any(f"\n{keyword} {label}" in each.read_text() for each in files if each.exists())

    for module, calls in CALLS.items():
        for each in calls.split():
            kind, _, label = each.rpartition(".")
            assert defined(module, kind or f"{label}(", "class" if kind else "def"), f"{module}: {each}"
    for name in KEPT:
        module, _, label = name.rpartition(".")
        assert defined(module, label, "class"), name


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


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif("ARENA_TEST_B12X" in os.environ, reason="this is one of those runs")
@pytest.mark.parametrize("version", sorted(version for name, version in KNOWN if name == "b12x" and version != "1.5.1"))
def test_all_of_this_holds_for(version):
    wheel.tree(version)  # skips where it cannot be fetched
    files = [str(Path(__file__).parent / name) for name in ("test_b12x.py", "test_capture_resources.py")]
    # Not what opens processes of its own: that is the same for every version.
    what = "not compiled and not later and not flashinfer and not without_any"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", what, *files]
    environment = {**os.environ, "ARENA_TEST_B12X": version}
    run = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert run.returncode == 0, run.stdout[-3000:]
    assert " passed" in run.stdout
