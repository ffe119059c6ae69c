"""Makes vLLM's source tree usable where its compiled kernels or a GPU are missing, and puts what is under test in its place.

`usable()` is for every test that imports vLLM, before anything of it is imported. As a pytest plugin (`-p vllm_plugin`, for
runs of vLLM's own tests in a process of their own) this also does what ARENA_VLLM_MODE says with vLLM's workspace:
`stock` leaves it; `swapped` puts the module ARENA_VLLM_MODULE (arena.workspace) in the place of vllm.v1.worker.workspace;
`plugin` loads arena's entry point as vLLM does, which replaces the class inside vLLM's module.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import sys

WORKSPACE = "vllm.v1.worker.workspace"
GROUP = "vllm.general_plugins"
_libraries = []  # a torch.library.Library takes its operators with it when it goes


def usable():
    """Gives vLLM a platform, and the operator that its graphs need, wherever the installed vLLM brings none of its own."""
    import torch

    if importlib.util.find_spec("vllm._C") or importlib.util.find_spec("vllm._C_stable_libtorch"):
        return
    if torch.cuda.is_available():
        plain_cuda()
        weak_references()
        return
    from vllm.platforms import current_platform

    type(current_platform)._global_graph_pool = (0, 1)  # asked for by wrappers that never capture here
    torch.accelerator.empty_cache = torch.accelerator.synchronize = lambda *_, **__: None  # would raise


def plain_cuda():
    """vLLM's own CUDA platform imports its kernels; this one knows the device and nothing more."""
    import torch
    import vllm.platforms
    from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum

    class PlainCuda(Platform):
        _enum = PlatformEnum.OOT  # with CUDA here, modules look for kernels while they are imported
        device_name = device_type = "cuda"
        dispatch_key = "CUDA"
        ray_device_key = "GPU"
        device_control_env_var = "CUDA_VISIBLE_DEVICES"
        supported_quantization = []

        def is_cuda_alike(self):
            return True

        @classmethod
        def import_kernels(cls):
            pass

        @classmethod
        def get_device_capability(cls, device_id=0):
            return DeviceCapability(*torch.cuda.get_device_capability(device_id))

        @classmethod
        def get_device_name(cls, device_id=0):
            return torch.cuda.get_device_name(device_id)

        @classmethod
        def num_compute_units(cls, device_id=0):
            return torch.cuda.get_device_properties(device_id).multi_processor_count

    vllm.platforms._current_platform = PlainCuda()


def weak_references():
    """`_C::weak_ref_tensor`: the same memory, which it does not keep."""
    import torch

    def alias(tensor):
        memory = tensor.untyped_storage()
        borrowed = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), tensor.device, memory.nbytes())
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(borrowed, tensor.storage_offset(), tensor.shape, tensor.stride())

    library = torch.library.Library("_C", "FRAGMENT")
    library.define("weak_ref_tensor(Tensor input) -> Tensor")
    library.impl("weak_ref_tensor", alias, "CUDA")
    _libraries.append(library)


def put(mode):
    """What vLLM's tests will find as `vllm.v1.worker.workspace`, before any of vLLM's modules has taken names from it."""
    if mode == "swapped":
        package = importlib.import_module(WORKSPACE.rpartition(".")[0])
        ours = importlib.import_module(os.environ.get("ARENA_VLLM_MODULE", "arena.workspace"))
        stock = sys.modules.get(WORKSPACE)
        taken = [
            name
            for name, module in list(sys.modules.items())
            if name.startswith("vllm.") and module is not stock and hasattr(module, "current_workspace_manager")
        ]
        assert not taken, f"these have taken names from vLLM's own workspace already: {taken}"
        sys.modules[WORKSPACE] = package.workspace = ours
        return ours
    stock = importlib.import_module(WORKSPACE)
    if mode == "plugin":
        os.environ["ARENA_VLLM"] = "1"
        found = [each for each in importlib.metadata.entry_points(group=GROUP) if each.value.startswith("arena.")]
        assert found, f"no entry point {GROUP} of arena: is the installed distribution as old as that?"
        found[0].load()()
        assert stock.WorkspaceManager.__module__.startswith("arena"), "the plugin replaced nothing"
    return stock


def pytest_configure(config):
    usable()
    config.arena_workspace = put(os.environ["ARENA_VLLM_MODE"])


def pytest_report_header(config):
    module = config.arena_workspace
    return f"workspace: {module.__name__} in {module.__file__}, WorkspaceManager of {module.WorkspaceManager.__module__}"


def pytest_runtest_setup(item):
    assert importlib.import_module(WORKSPACE) is item.config.arena_workspace, "the module under test was replaced"
