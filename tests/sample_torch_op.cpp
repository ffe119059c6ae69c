// A sample op library in C++: a torch custom op whose scratch is made before the call and dropped after it. torch calls it
// without the GIL; in a capture the graph has to keep the scratch. Built against an installed arena and torch by
// test_oplib_wheel.py; with SAMPLE_CUDA it looks for the current stream itself.
#include <Python.h>

#include <ATen/ATen.h>
#include <torch/library.h>

#include <arena.h>

#include <atomic>
#include <utility>
#ifdef SAMPLE_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

namespace {

at::Tensor prepared; // of the next call
std::atomic<int64_t> held{0}, dropped{0}, with_gil{0}; // for the tests to see

void drop(void *scratch) {
    delete static_cast<at::Tensor *>(scratch);
    dropped++;
}

void prepare(const at::Tensor &x) { prepared = at::full_like(x, 2); }

// out = 2 x, by way of the scratch. `stream`: a handle; 0: torch's current one.
void scale(const at::Tensor &x, at::Tensor out, int64_t stream, bool retain) {
    void *handle = reinterpret_cast<void *>(stream);
#ifdef SAMPLE_CUDA
    if (!handle) handle = static_cast<void *>(c10::cuda::getCurrentCUDAStream(x.device().index()).stream());
#endif
    with_gil += PyGILState_Check();
    at::Tensor scratch = std::exchange(prepared, at::Tensor());
    TORCH_CHECK(scratch.defined(), "prepare() comes before each scale()");
    if (retain && arena_maybe_capturing()) {
        auto *copy = new at::Tensor(scratch); // one more reference to the same memory
        int kept = arena_retain_opaque(copy, drop, handle);
        if (kept == ARENA_RETAINED) held++;
        else delete copy;
        TORCH_CHECK(kept >= 0, "the op's scratch could not be retained: ", kept);
    }
    at::mul_out(out, x, scratch);
}

std::vector<int64_t> state() { return {arena_there(), held, dropped, with_gil}; }

} // namespace

TORCH_LIBRARY(arena_sample, m) {
    m.def("prepare(Tensor x) -> ()");
    m.def("scale(Tensor x, Tensor(a!) out, int stream=0, bool retain=True) -> ()");
    m.def("state() -> int[]", state);
}
TORCH_LIBRARY_IMPL(arena_sample, CPU, m) {
    m.impl("prepare", prepare);
    m.impl("scale", scale);
}
TORCH_LIBRARY_IMPL(arena_sample, CUDA, m) {
    m.impl("prepare", prepare);
    m.impl("scale", scale);
}

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "sample_torch_op", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit_sample_torch_op() {
    if (arena_import() < 0) PyErr_Clear();
    return PyModule_Create(&definition);
}
