/* A CUDA driver without a device: the function table of driver.h, and the calls beyond it that a test makes (captures,
 * graphs, launches that take time, forbidden calls, faults). Pure C. Any thread may call, with or without the GIL; only
 * sim_open(), sim_finish() and sim_close() are one thread's business. Every CUresult means what it means in cuda.h;
 * handles are never-freed slots, so a stale one is refused, or answers for its successor, but never crashes.
 */
#ifndef ARENA_SIMULATOR_H
#define ARENA_SIMULATOR_H

#include <stdint.h>

#include "driver.h"
#include "nodes.h"

/* What cuda.h calls these; they are beyond what the project itself relies on. */
enum {
    SIM_ERROR_ILLEGAL_STATE = 401,
    SIM_ERROR_CAPTURE_UNMATCHED = 903,
    SIM_ERROR_CAPTURE_ISOLATION = 905,
};

/* What a node does, for whom an audit reads it. */
typedef struct sim_node {
    int type;                    /* CU_GRAPH_NODE_TYPE_KERNEL, _MEMCPY or _MEMSET */
    const char *name;            /* a kernel's */
    uint32_t count;              /* its parameters */
    const uint32_t *sizes;       /* bytes of each */
    const unsigned char *values; /* one behind the other */
    uint64_t to, from, length;   /* a copy's; a fill has no from */
    int to_host, from_host;
    int packed; /* its parameters are told as one block, as of a launch that gave them so */
} sim_node;

/* One destructor that ran. */
typedef struct sim_record {
    int64_t number;    /* what sim_object_number() gave the object, or -1 */
    int32_t thread_id; /* of the operating system */
    int32_t on_driver; /* 1: on the driver's own thread */
} sim_record;

/* ---- life: sim_open, use, sim_finish, last calls through the table, sim_close ---- */

int sim_open(void);     /* 0, or -1: one is open already, or -2: no thread to be had */
void sim_finish(void);  /* ends captures and launches, destroys graphs and executables, joins the driver's thread */
void sim_close(void);   /* forgets the rest; from now on the table's calls return CUDA_ERROR_DEINITIALIZED */
const driver_table *sim_table(void);
const node_table *sim_node_table(void);

/* ---- switches and gauges ---- */

const char *sim_error_name(CUresult code); /* or NULL; unlike cuGetErrorName, at any time */
int sim_symbol(const char *name);          /* its number, or -1 */
const char *sim_symbol_name(int symbol);   /* NULL past the last one */
int sim_fail(int symbol, uint64_t nth, CUresult code); /* -1: too many at once */
uint64_t sim_calls(int symbol);
int64_t sim_records(int64_t first, int64_t count, sim_record *records); /* how many there are in all; copies some */
uint32_t sim_generation(const void *handle);             /* of a handle that was given out; odd while it lives */
int sim_lives(const void *handle, uint32_t generation); /* whether it still is the one that was given out */

/* ---- the calling thread ---- */

CUresult sim_device(int *device);   /* of the current context */
CUresult sim_push_device(int device); /* -1: no context */
CUresult sim_pop_device(void);
CUresult sim_reset_context(void);
CUresult sim_call(const char *name, CUstream stream, int again); /* a bare call; `again` as below */

/* ---- streams and captures ---- */

CUresult sim_stream_create(CUstream *stream, int blocking, int device); /* device -1: the current one */
CUresult sim_stream_destroy(CUstream stream);
CUresult sim_stream_enter(CUstream stream, int device); /* device counts for the NULL stream alone */
CUresult sim_stream_leave(void);
CUresult sim_stream_kernel(CUstream stream, const sim_node *what); /* NULL: a kernel without parameters */
CUresult sim_stream_wait_stream(CUstream stream, CUstream other);
CUresult sim_stream_wait_event(CUstream stream, CUevent event);
CUresult sim_stream_query(CUstream stream);
CUresult sim_stream_synchronize(CUstream stream, int again); /* NOT_READY after 50 ms: call again, with again = 1 */
CUresult sim_capture_begin(CUstream stream, CUstreamCaptureMode mode, CUgraph into, uint64_t *id, CUgraph *graph);
CUresult sim_capture_end(CUstream stream, CUgraph *graph);
CUresult sim_capture_invalidate(CUstream stream);

CUresult sim_event_set(CUevent event);
CUresult sim_event_synchronize(CUevent event, int again);

/* ---- objects, graphs, executables ---- */

void sim_destructor(void *unused); /* for objects of which nothing is wanted but the record */
CUresult sim_object_number(CUuserObject object, int64_t number);
CUresult sim_object_retain(CUuserObject object, unsigned int count);
CUresult sim_graph_create(CUgraph *graph);
CUresult sim_graph_destroy(CUgraph graph);
CUresult sim_graph_clone(CUgraph *clone, CUgraph graph);
CUresult sim_graph_add_node(CUgraph graph, const sim_node *what);
CUresult sim_graph_add_child(CUgraph graph, CUgraph child);
CUresult sim_graph_add_conditional(CUgraph graph, CUgraph *body);
CUresult sim_graph_owners(CUgraph graph, int64_t *owners);
CUresult sim_graph_instantiate(CUgraphExec *exec, CUgraph graph);
CUresult sim_exec_launch(CUgraphExec exec, CUstream stream, int64_t nanoseconds, CUevent until);
CUresult sim_exec_update(CUgraphExec exec, CUgraph graph);
CUresult sim_exec_destroy(CUgraphExec exec);
CUresult sim_exec_owners(CUgraphExec exec, int64_t *owners);

/* ---- memory: addresses that cuPointerGetAttributes knows; nothing lies there ---- */

CUresult sim_memory_plant(uint64_t size, int host, uint64_t *address);
CUresult sim_memory_free(uint64_t address);

#endif
