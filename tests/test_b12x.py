"""What a captured B12X op keeps, on the real wheel: its own Python plans and binds on the CPU, and our tables of its bindings
and calls are held against it. What its registered calls do is in test_b12x_calls.py. By default 1.5.1; the last test runs both
files on the other known versions."""

import copy
import dataclasses
import importlib
import importlib.metadata
import inspect
import logging
import os
import pickle
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

import arena

torch = pytest.importorskip("torch")

import b12x_wheel as wheel  # noqa: E402
from b12x_wheel import named, prepared, same  # noqa: E402

import arena.b12x  # noqa: E402
from arena._b12x_families import CALLS, KEPT, KNOWN  # noqa: E402

b12x, installed = wheel.b12x, wheel.installed  # fixtures


def storages(owners):
    return {id(each) for each in owners if isinstance(each, torch.UntypedStorage)}


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


# ---- versions ----


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif("ARENA_TEST_B12X" in os.environ, reason="this is one of those runs")
@pytest.mark.parametrize("version", sorted(version for name, version in KNOWN if name == "b12x" and version != "1.5.1"))
def test_all_of_this_holds_for(version):
    wheel.tree(version)  # skips where it cannot be fetched
    files = [str(Path(__file__).parent / name) for name in ("test_b12x.py", "test_b12x_calls.py", "test_capture_resources.py")]
    # Not what opens processes of its own: that is the same for every version.
    what = "not compiled and not later and not flashinfer and not without_any"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", what, *files]
    environment = {**os.environ, "ARENA_TEST_B12X": version}
    run = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert run.returncode == 0, run.stdout[-3000:]
    assert " passed" in run.stdout
