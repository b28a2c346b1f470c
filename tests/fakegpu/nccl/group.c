/* Groups of operations, and how they run: those of one group on one stream go as one, in which each
 * communicator's part is a launch. Launches of a communicator run one after the other, on whatever
 * streams, as NCCL's do. */
#include "nccl/internal.h"

#include <stdlib.h>

struct launch {
    struct launch *next; /* of its batch */
    ncclComm_t comm;
    unsigned long number;
    struct operation *operations;
    bool has_begun, is_finished;
    struct fault fault;  /* of "comm:NAME" */
    double begun_at;
};

struct batch {
    cudaStream_t stream;
    struct launch *launches;
};

static struct point device_points[KINDS] = {
    [ALL_REDUCE] = {.name = "device:allreduce"},
    [BROADCAST] = {.name = "device:broadcast"},
    [REDUCE] = {.name = "device:reduce"},
    [ALL_GATHER] = {.name = "device:allgather"},
    [REDUCE_SCATTER] = {.name = "device:reducescatter"},
    [ALL_TO_ALL] = {.name = "device:alltoall"},
    [SEND] = {.name = "device:send"},
    [RECV] = {.name = "device:recv"},
};

/* --- running, with the device lock held ------------------------------------------------------- */

/* Collectives run in their order, and so do messages from one rank to another. */
static bool has_to_wait(const struct launch *launch, const struct operation *operation) {
    bool is_message = operation_is_message(operation);
    for (const struct operation *each = launch->operations; each != operation; each = each->next) {
        if (each->is_finished) continue;
        bool same = is_message ? each->kind == operation->kind && each->root == operation->root
                               : !operation_is_message(each);
        if (same) return true;
    }
    return false;
}

static enum progress run_operations(struct launch *launch) {
    bool has_moved, is_done;
    do {
        has_moved = false;
        is_done = true;
        for (struct operation *each = launch->operations; each != NULL; each = each->next) {
            if (each->is_finished) continue;
            is_done = false;
            if (has_to_wait(launch, each)) continue;
            enum progress progress = operation_is_message(each)
                                         ? point_to_point_step(each, &has_moved)
                                         : collective_step(each, &has_moved);
            if (progress == BAD_ADDRESS) return BAD_ADDRESS;
            if (progress == DONE) each->is_finished = has_moved = true;
        }
    } while (has_moved);
    return is_done ? DONE : WAITS;
}

/* Whether a rule for the communicator keeps the launch from running. With an error, the
 * communicator fails and its kernel never ends, as when a connection is lost. */
static bool held_up(struct launch *launch) {
    ncclComm_t comm = launch->comm;
    if (!launch->has_begun) {
        launch->has_begun = true;
        launch->begun_at = seconds_now();
        launch->fault = rules_match(&comm->point, comm->rank);
    }
    const struct fault *fault = &launch->fault;
    if (fault->rule == 0) return false;
    if (fault->hang == HANG_FOREVER) return true;
    if (atomic_load(&comm->stopped)) return false;
    if (seconds_now() < launch->begun_at + fault->delay_s) return true;
    if (fault->error != 0 && atomic_load(&comm->result) == ncclSuccess) {
        nccl_warn_while_running(comm->device, (ncclResult_t)fault->error);
        communicator_fail(comm, (ncclResult_t)fault->error);
    }
    return fault->error != 0 || (fault->hang == HANG && rules_in_force(fault));
}

static enum progress run_launch(struct launch *launch) {
    ncclComm_t comm = launch->comm;
    if (launch->number != comm->finished) return WAITS;
    transport_look(comm);
    if (held_up(launch)) return WAITS;
    enum progress progress = atomic_load(&comm->stopped) ? DONE : run_operations(launch);
    if (progress == DONE) {
        launch->is_finished = true;
        comm->finished++;
        device_changed();
    }
    return progress;
}

static enum progress run_batch(void *state) {
    enum progress whole = DONE;
    for (struct launch *each = ((struct batch *)state)->launches; each != NULL; each = each->next) {
        if (each->is_finished) continue;
        enum progress progress = run_launch(each);
        if (progress == BAD_ADDRESS) return BAD_ADDRESS;
        if (progress == WAITS) whole = WAITS;
    }
    return whole;
}

static void release_batch(void *state) {
    struct batch *batch = state;
    for (struct launch *launch = batch->launches, *next; launch != NULL; launch = next) {
        next = launch->next;
        launch->comm->ended++;
        for (struct operation *each = launch->operations, *behind; each != NULL; each = behind) {
            behind = each->next;
            free(each);
        }
        free(launch);
    }
    free(batch);
    device_changed();
}

/* --- queueing --------------------------------------------------------------------------------- */

/* What the group of this thread has collected. */
static __thread int depth;
static __thread struct operation *collected;

bool group_is_open(void) { return depth > 0; }

static struct launch *launch_of(struct batch *batch, ncclComm_t comm) {
    struct launch **place = &batch->launches;
    while (*place != NULL && (*place)->comm != comm) place = &(*place)->next;
    if (*place == NULL) {
        *place = calloc(1, sizeof **place);
        (*place)->comm = comm;
    }
    return *place;
}

static void append(struct operation **list, struct operation *operation) {
    while (*list != NULL) list = &(*list)->next;
    operation->next = NULL;
    *list = operation;
}

/* Take what goes to the stream of the first operation out of what was collected. */
static struct batch *take_batch(void) {
    struct batch *batch = calloc(1, sizeof *batch);
    batch->stream = collected->stream;
    for (struct operation **place = &collected; *place != NULL;) {
        struct operation *operation = *place;
        if (operation->stream != batch->stream) {
            place = &operation->next;
            continue;
        }
        *place = operation->next;
        append(&launch_of(batch, operation->comm)->operations, operation);
    }
    return batch;
}

static ncclResult_t enqueue(struct batch *batch) {
    ncclComm_t first = batch->launches->comm;
    device_lock();
    for (struct launch *each = batch->launches; each != NULL; each = each->next)
        each->number = each->comm->launched++;
    device_unlock();
    struct work work = {.point = &device_points[batch->launches->operations->kind],
                        .step = run_batch,
                        .release = release_batch,
                        .state = batch,
                        .given_up = &first->stopped,
                        .comm_rank = first->rank,
                        .polled = true};
    if (stream_enqueue(batch->stream, &work) == cudaSuccess) return ncclSuccess;
    nccl_warn_of(first->device, ncclUnhandledCudaError);
    return nccl_passed(first->device, "enqueue.cc:1453", ncclUnhandledCudaError);
}

static void drop_collected(void) {
    while (collected != NULL) {
        struct operation *first = collected;
        collected = first->next;
        free(first);
    }
}

/* Once the ranks are connected. */
static ncclResult_t enqueue_collected(void) {
    ncclResult_t result = connect_ranks(collected);
    if (result != ncclSuccess) drop_collected();
    while (collected != NULL) {
        ncclResult_t error = enqueue(take_batch());
        if (result == ncclSuccess) result = error;
    }
    return result;
}

/* In a thread of its own, which has collected nothing. */
static ncclResult_t enqueue_connected(ncclComm_t comm) {
    collected = comm->to_connect;
    comm->to_connect = NULL;
    return enqueue_collected();
}

static ncclResult_t queue(void) {
    if (collected == NULL || collected->comm->is_blocking || !connect_is_needed(collected))
        return enqueue_collected();
    ncclComm_t comm = collected->comm;
    comm->to_connect = collected;
    collected = NULL;
    return communicator_begin(comm, enqueue_connected);
}

ncclResult_t group_add(const struct operation *operation) {
    struct operation *copy = malloc(sizeof *copy);
    *copy = *operation;
    append(&collected, copy);
    return depth > 0 ? ncclSuccess : queue();
}

API ncclResult_t ncclGroupStart(void) {
    ENTER_NCCL(NULL);
    depth++;
    return ncclSuccess;
}

API ncclResult_t ncclGroupEnd(void) {
    static struct point point = {.name = __func__};
    if (depth == 0) {
        nccl_warn(device_current(), "group.cc:500", "ncclGroupEnd: not in a group call.");
        return ncclInvalidUsage;
    }
    if (--depth > 0) return ncclSuccess;
    ncclResult_t error = nccl_enter(&point, collected != NULL ? collected->comm : NULL);
    if (error != ncclSuccess) drop_collected();
    else error = queue();
    end_aborted();
    return error;
}
