/* Ranks connect when they first need it, and wait for each other in the call that does: all of a
 * communicator for each of the two ways that collectives go, and both ends of a message. */
#include "nccl/internal.h"

#include <stdlib.h>
#include <time.h>

/* Small all-reduces go along a tree, all other collectives around the ring: each way is connected by
 * itself. NCCL_RUNTIME_CONNECT=0 has NCCL connect both when a communicator is made. */
enum way { TREE = 1, RING = 2 };

static unsigned way_of(const struct operation *operation) {
    const char *set = getenv("NCCL_RUNTIME_CONNECT");
    if (set != NULL && atoi(set) == 0) return 0;
    return operation->kind == ALL_REDUCE ? TREE : RING;
}

static struct channel *channel_of(const struct operation *operation) {
    const ncclComm_t comm = operation->comm;
    return operation->kind == SEND
               ? channel_between(&comm->meeting, comm->rank, operation->root)
               : channel_between(&comm->meeting, operation->root, comm->rank);
}

/* Tell the others that this rank is there. Harmless where it has been said. */
static void come(const struct operation *operation) {
    ncclComm_t comm = operation->comm;
    if (!operation_is_message(operation))
        atomic_fetch_or(&comm->meeting.members[comm->rank].ways, way_of(operation));
    else if (operation->kind == SEND)
        atomic_store(&channel_of(operation)->has_sender, true);
    else
        atomic_store(&channel_of(operation)->has_receiver, true);
}

static bool are_there(const struct operation *operation) {
    const ncclComm_t comm = operation->comm;
    if (operation_is_message(operation)) {
        const struct channel *channel = channel_of(operation);
        return atomic_load(&channel->has_sender) && atomic_load(&channel->has_receiver);
    }
    unsigned way = way_of(operation);
    for (int rank = 0; rank < comm->ranks; rank++)
        if ((atomic_load(&comm->meeting.members[rank].ways) & way) != way) return false;
    return true;
}

/* NCCL says no more of an abort. */
static ncclResult_t wait_for_others(const struct operation *operation) {
    while (!are_there(operation)) {
        if (atomic_load(&operation->comm->stopped))
            return nccl_passed(operation->comm->device, "transport.cc:197", ncclInternalError);
        nanosleep(&(struct timespec){.tv_nsec = 500000}, NULL);
    }
    return ncclSuccess;
}

/* Until `release` no abort takes down what the ranks share. False: one has begun. */
static bool hold(const struct operation *operation) {
    atomic_fetch_add(&operation->comm->busy, 1);
    return !atomic_load(&operation->comm->stopped);
}

static void release(const struct operation *operation) {
    atomic_fetch_sub(&operation->comm->busy, 1);
}

bool connect_is_needed(const struct operation *operations) {
    bool is_needed = false;
    for (const struct operation *each = operations; each != NULL; each = each->next) {
        if (hold(each)) is_needed = is_needed || !are_there(each);
        release(each);
    }
    return is_needed;
}

ncclResult_t connect_ranks(const struct operation *operations) {
    ncclResult_t error = ncclSuccess;
    for (const struct operation *each = operations; each != NULL; each = each->next) {
        if (hold(each)) come(each);
        release(each);
    }
    for (const struct operation *each = operations; each != NULL; each = each->next) {
        if (hold(each) && error == ncclSuccess) error = wait_for_others(each);
        release(each);
    }
    return error;
}
