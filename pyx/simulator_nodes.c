/* What the nodes of simulated graphs say when an audit reads them: kernels with their parameters, copies, fills, inner graphs;
 * and memory that can be planted, so that a pointer has something to point into. Any thread may call what is in the table or
 * in simulator.h; what else is shared wants the mutex held. Nothing here is on a hot path.
 */
#include "simulator_state.h"

#define ALIGNMENT 512            /* of planted memory, as of the real */
#define FIRST_ADDRESS 0x7f0000000000u
#define PLANTED (1 << 16)

/* A kernel that was ever named: its name and parameters. Never freed, as a loaded module's are not. */
typedef struct kernel {
    struct kernel *next;
    char *name;
    uint32_t count;   /* parameters */
    uint32_t *sizes;  /* bytes of each */
    size_t *offsets;  /* where each lies in the parameter block */
} kernel;

/* One node; next is its younger sibling. values[i] points into bytes. */
struct node {
    struct node *next;
    int type;              /* CU_GRAPH_NODE_TYPE_... */
    uint32_t inner;        /* child or body: which of the graph's inner ones; bodies are always one */
    CUgraph body;          /* what cuGraphNodeGetParams shows of a conditional node */
    kernel *launched;      /* KERNEL */
    unsigned char *bytes;  /* of its parameters */
    void **values;         /* one for each parameter */
    void *extra[5];        /* of a packed one: the block and its size */
    size_t size;           /* of the block */
    sim_node copied;       /* MEMCPY and MEMSET: addresses and length */
};

/* One planted allocation. */
typedef struct memory {
    uint64_t address; /* 0: no longer there; the slot is used again */
    uint64_t size;    /* as asked for */
    uint64_t room;    /* rounded up: what the next of that size gets */
    uint64_t id;      /* never given out twice */
    int host;
} memory;

static kernel *kernels;
static memory planted[PLANTED];
static uint32_t planted_count;
static uint64_t next_address = FIRST_ADDRESS, next_id = 1;

static kernel *kernel_find(const char *name, uint32_t count, const uint32_t *sizes) {
    for (kernel *each = kernels; each; each = each->next)
        if (!strcmp(each->name, name) && each->count == count && !memcmp(each->sizes, sizes, count * sizeof *sizes)) return each;
    kernel *made = calloc(1, sizeof *made);
    uint32_t *copied = calloc(count + 1, sizeof *copied);
    size_t *offsets = calloc(count + 1, sizeof *offsets), end = 0;
    char *named = strdup(name);
    if (!made || !copied || !offsets || !named) {
        free(made), free(copied), free(offsets), free(named);
        return NULL;
    }
    for (uint32_t i = 0; i < count; i++) {
        size_t alignment = sizes[i] >= 8 ? 8 : sizes[i] >= 4 ? 4 : 1;
        end = (end + alignment - 1) / alignment * alignment;
        copied[i] = sizes[i];
        offsets[i] = end;
        end += sizes[i];
    }
    *made = (kernel){kernels, named, count, copied, offsets};
    return kernels = made;
}

static size_t kernel_bytes(const kernel *of) {
    return of->count ? of->offsets[of->count - 1] + of->sizes[of->count - 1] : 0;
}

static int node_set_kernel(struct node *set, kernel *launched, const unsigned char *values) {
    set->launched = launched;
    if (!launched->count) return 0;
    set->bytes = calloc(1, kernel_bytes(launched) + 8);
    set->values = calloc(launched->count, sizeof *set->values);
    if (!set->bytes || !set->values) return -1;
    for (uint32_t i = 0; i < launched->count; i++) {
        set->values[i] = set->bytes + launched->offsets[i];
        memcpy(set->values[i], values, launched->sizes[i]);
        values += launched->sizes[i];
    }
    return 0;
}

static void node_free(struct node *freed) {
    if (!freed) return;
    free(freed->bytes);
    free(freed->values);
    free(freed);
}

void nodes_free(graph *of) {
    for (struct node *next, *each = of->first_node; each; each = next) {
        next = each->next;
        node_free(each);
    }
    of->first_node = of->last_node = NULL;
    of->nodes = 0;
}

static void append(graph *to, struct node *added) {
    *(to->first_node ? &to->last_node->next : &to->first_node) = added;
    to->last_node = added;
    to->nodes++;
}

/* One more node: `what` it does, or NULL: a kernel without parameters. 0, or -1: no memory, and nothing has changed. */
int node_add(graph *to, const sim_node *what) {
    static const sim_node plain = {.type = CU_GRAPH_NODE_TYPE_KERNEL, .name = "kernel"};
    struct node *made = calloc(1, sizeof *made);
    if (!made) return -1;
    if (!what) what = &plain;
    made->type = what->type;
    made->copied = *what;
    if (what->type == CU_GRAPH_NODE_TYPE_KERNEL) {
        kernel *launched = kernel_find(what->name, what->count, what->sizes);
        if (!launched || node_set_kernel(made, launched, what->values)) {
            node_free(made);
            return -1;
        }
    }
    append(to, made);
    return 0;
}

/* A node that stands for the graph's inner graph number `inner`. */
int node_add_inner(graph *to, int type, uint32_t inner) {
    const sim_node what = {.type = type};
    if (node_add(to, &what)) return -1;
    to->last_node->inner = inner;
    return 0;
}

int nodes_copy(graph *to, const graph *from) {
    for (const struct node *each = from->first_node; each; each = each->next) {
        struct node *made = calloc(1, sizeof *made);
        if (!made) return -1;
        made->type = each->type;
        made->inner = each->inner;
        made->copied = each->copied;
        append(to, made);
        if (!each->launched) continue;
        made->launched = each->launched;
        if (!each->launched->count) continue;
        size_t bytes = kernel_bytes(each->launched);
        made->bytes = malloc(bytes + 8);
        made->values = calloc(each->launched->count, sizeof *made->values);
        if (!made->bytes || !made->values) return -1;
        memcpy(made->bytes, each->bytes, bytes);
        for (uint32_t i = 0; i < each->launched->count; i++) made->values[i] = made->bytes + each->launched->offsets[i];
    }
    return 0;
}

static graph *inner_of(const struct node *asked) {
    for EACH (graph, each, graph_pool) {
        if (!lives(each)) continue;
        for (const struct node *node = each->first_node; node; node = node->next)
            if (node == asked) {
                graph *inner = each->inner;
                for (uint32_t i = 0; inner && i < asked->inner; i++) inner = inner->next;
                return inner;
            }
    }
    return NULL;
}

/* ---- the table ---- */

static CUresult get_nodes(CUgraph handle, CUgraphNode *nodes, size_t *count) {
    ENTER(cuGraphGetNodes);
    lock();
    graph *asked = pool_find(&graph_pool, handle);
    if (!asked || !count) return unlocked(CUDA_ERROR_INVALID_VALUE);
    size_t room = nodes ? *count : 0, at = 0;
    for (struct node *each = asked->first_node; each && at < room; each = each->next) nodes[at++] = (CUgraphNode)each;
    while (nodes && at < room) nodes[at++] = NULL;
    *count = asked->nodes;
    return unlocked(CUDA_SUCCESS);
}

static CUresult get_type(CUgraphNode handle, CUgraphNodeType *type) {
    ENTER(cuGraphNodeGetType);
    *type = ((struct node *)handle)->type;
    return CUDA_SUCCESS;
}

static CUresult get_kernel(CUgraphNode handle, kernel_node *answer) {
    ENTER(cuGraphKernelNodeGetParams);
    struct node *asked = (struct node *)handle;
    if (asked->type != CU_GRAPH_NODE_TYPE_KERNEL) return CUDA_ERROR_INVALID_VALUE;
    memset(answer, 0, sizeof *answer);
    answer->func = (CUfunction)asked->launched;
    if (!asked->copied.packed) {
        answer->kernelParams = asked->values;
        return CUDA_SUCCESS;
    }
    asked->size = kernel_bytes(asked->launched);
    void *extra[] = {(void *)NODE_EXTRA_BUFFER, asked->bytes, (void *)NODE_EXTRA_SIZE, &asked->size, (void *)NODE_EXTRA_END};
    memcpy(asked->extra, extra, sizeof extra);
    answer->extra = asked->extra;
    return CUDA_SUCCESS;
}

static CUresult get_copy(CUgraphNode handle, memcpy_node *answer) {
    ENTER(cuGraphMemcpyNodeGetParams);
    const sim_node *copied = &((struct node *)handle)->copied;
    memset(answer, 0, sizeof *answer);
    answer->srcMemoryType = copied->from_host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
    answer->dstMemoryType = copied->to_host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
    if (copied->from_host) answer->srcHost = (void *)copied->from;
    else answer->srcDevice = copied->from;
    if (copied->to_host) answer->dstHost = (void *)copied->to;
    else answer->dstDevice = copied->to;
    answer->WidthInBytes = copied->length;
    answer->Height = answer->Depth = 1;
    return CUDA_SUCCESS;
}

static CUresult get_fill(CUgraphNode handle, memset_node *answer) {
    ENTER(cuGraphMemsetNodeGetParams);
    const sim_node *copied = &((struct node *)handle)->copied;
    *answer = (memset_node){.dst = copied->to, .elementSize = 1, .width = copied->length, .height = 1};
    return CUDA_SUCCESS;
}

static CUresult get_child(CUgraphNode handle, CUgraph *child) {
    ENTER(cuGraphChildGraphNodeGetGraph);
    lock();
    *child = (CUgraph)inner_of((struct node *)handle);
    return unlocked(*child ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

static CUresult get_any(CUgraphNode handle, any_node *answer) {
    ENTER(cuGraphNodeGetParams);
    struct node *asked = (struct node *)handle;
    memset(answer, 0, sizeof *answer);
    answer->type = asked->type;
    if (asked->type != CU_GRAPH_NODE_TYPE_CONDITIONAL) return CUDA_SUCCESS;
    lock();
    asked->body = (CUgraph)inner_of(asked);
    answer->conditional.size = 1;
    answer->conditional.phGraph_out = &asked->body;
    return unlocked(CUDA_SUCCESS);
}

static CUresult get_name(const char **name, CUfunction function) {
    ENTER(cuFuncGetName);
    *name = ((kernel *)function)->name;
    return CUDA_SUCCESS;
}

static CUresult get_parameter(CUfunction function, size_t index, size_t *offset, size_t *size) {
    ENTER(cuFuncGetParamInfo);
    const kernel *asked = (kernel *)function;
    if (index >= asked->count) return CUDA_ERROR_INVALID_VALUE;
    *offset = asked->offsets[index];
    if (size) *size = asked->sizes[index];
    return CUDA_SUCCESS;
}

static CUresult get_library_name(const char **name, CUkernel function) {
    return get_name(name, (CUfunction)function);
}

static CUresult get_library_parameter(CUkernel function, size_t index, size_t *offset, size_t *size) {
    return get_parameter((CUfunction)function, index, offset, size);
}

/* Of an address that is nobody's: zeros, and success, as the real one says. */
static CUresult get_attributes(unsigned int count, CUpointer_attribute *asked, void **answers, CUdeviceptr address) {
    ENTER(cuPointerGetAttributes);
    lock();
    const memory *found = NULL;
    for (uint32_t i = 0; i < planted_count; i++)
        if (planted[i].address && address >= planted[i].address && address < planted[i].address + planted[i].size)
            found = &planted[i];
    for (unsigned int i = 0; i < count; i++)
        switch (asked[i]) {
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
            *(unsigned int *)answers[i] = !found ? 0 : found->host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
            break;
        case CU_POINTER_ATTRIBUTE_BUFFER_ID:
            *(unsigned long long *)answers[i] = found ? found->id : 0;
            break;
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
            *(int *)answers[i] = found ? 0 : -2;
            break;
        case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
            *(uint64_t *)answers[i] = found ? found->address : 0;
            break;
        case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
            *(size_t *)answers[i] = found ? found->size : 0;
            break;
        default:
            *(uint64_t *)answers[i] = 0;
        }
    return unlocked(CUDA_SUCCESS);
}

const node_table *sim_node_table(void) {
    static const node_table table = {
        .cuGraphGetNodes = get_nodes,
        .cuGraphNodeGetType = get_type,
        .cuGraphKernelNodeGetParams = get_kernel,
        .cuGraphMemcpyNodeGetParams = get_copy,
        .cuGraphMemsetNodeGetParams = get_fill,
        .cuGraphChildGraphNodeGetGraph = get_child,
        .cuFuncGetName = get_name,
        .cuFuncGetParamInfo = get_parameter,
        .cuKernelGetName = get_library_name,
        .cuKernelGetParamInfo = get_library_parameter,
        .cuPointerGetAttributes = get_attributes,
        .cuGraphNodeGetParams = get_any,
    };
    return &table;
}

/* ---- planted memory ---- */

CUresult sim_memory_plant(uint64_t size, int host, uint64_t *address) {
    VISIT();
    if (!size) return CUDA_ERROR_INVALID_VALUE;
    uint64_t room = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    lock();
    memory *slot = NULL;
    uint64_t again = 0;
    for (uint32_t i = 0; i < planted_count && !again; i++)
        if (!planted[i].address) {
            slot = &planted[i];
            if (slot->room == room && slot->host == host) again = slot->id; /* its address lies there, see below */
        }
    if (again) {
        *address = again;
    } else {
        *address = next_address;
        next_address += room;
        if (planted_count < PLANTED) slot = &planted[planted_count++];
        if (!slot) return unlocked(CUDA_ERROR_OUT_OF_MEMORY);
    }
    *slot = (memory){*address, size, room, next_id++, host};
    return unlocked(CUDA_SUCCESS);
}

/* A freed slot keeps its address where the id was: the next of that size is given it, as a real allocator does. */
CUresult sim_memory_free(uint64_t address) {
    VISIT();
    lock();
    for (uint32_t i = 0; i < planted_count; i++)
        if (planted[i].address == address && address) {
            planted[i].id = address;
            planted[i].address = 0;
            return unlocked(CUDA_SUCCESS);
        }
    return unlocked(CUDA_ERROR_INVALID_VALUE);
}

void memory_forget(void) { planted_count = 0; }
