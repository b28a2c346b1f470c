/* Collectives: in rounds, each rank puts a part of its contribution where all others find it, and
 * takes what it needs when all have. A rank that does something else in a round than another leaves
 * both waiting. */
#include "nccl/internal.h"

#include <string.h>

const char *const kind_names[KINDS] = {
    [ALL_REDUCE] = "AllReduce",         [BROADCAST] = "Broadcast", [REDUCE] = "Reduce",
    [ALL_GATHER] = "AllGather",         [REDUCE_SCATTER] = "ReduceScatter",
    [ALL_TO_ALL] = "AlltoAll",          [SEND] = "Send",           [RECV] = "Recv",
};

/* --- running, with the device lock held ------------------------------------------------------- */

/* Elements that each rank contributes. */
static size_t contributed(const struct operation *operation) {
    bool is_for_each = operation->kind == REDUCE_SCATTER || operation->kind == ALL_TO_ALL;
    return operation->count * (is_for_each ? (size_t)operation->comm->ranks : 1);
}

/* Elements that each rank receives. */
static size_t received(const struct operation *operation) {
    bool is_of_each = operation->kind == ALL_GATHER || operation->kind == ALL_TO_ALL;
    return operation->count * (is_of_each ? (size_t)operation->comm->ranks : 1);
}

static bool is_root(const struct operation *operation) {
    return operation->root == operation->comm->rank;
}

static bool has_good_addresses(const struct operation *operation) {
    size_t bytes = type_bytes(operation->type);
    bool sends = operation->kind != BROADCAST || is_root(operation);
    bool receives = operation->kind != REDUCE || is_root(operation);
    return (!sends || memory_accessible(operation->source, contributed(operation) * bytes)) &&
           (!receives || memory_accessible(operation->target, received(operation) * bytes));
}

static struct call call_of(const struct operation *operation) {
    return (struct call){.kind = (int)operation->kind,
                         .root = operation->root,
                         .bytes = operation->count * type_bytes(operation->type)};
}

static void premultiply(const struct operation *operation, char *values, size_t count) {
    const struct premultiplied *made = &operation->premultiplied;
    long double scalar = made->residence == ncclScalarDevice
                             ? type_load(operation->type, made->device_scalar)
                             : made->scalar;
    size_t bytes = type_bytes(operation->type);
    for (size_t place = 0; place < count * bytes; place += bytes)
        type_store(operation->type, values + place,
                   scalar * type_load(operation->type, values + place));
}

/* Give the others this rank's next `count` elements. */
static void post(struct operation *operation, size_t count) {
    ncclComm_t comm = operation->comm;
    struct member *self = &comm->meeting.members[comm->rank];
    size_t bytes = type_bytes(operation->type);
    char *slot = slot_of(&comm->meeting, comm->rank, comm->round);
    if (operation->kind != BROADCAST || is_root(operation))
        memcpy(slot, operation->source + operation->done * bytes, count * bytes);
    if (operation->premultiplied.is_used) premultiply(operation, slot, count);
    self->calls[comm->round % 2] = call_of(operation);
    atomic_store(&self->posted, comm->round + 1);
    operation->is_posted = true;
}

/* Whether all ranks have posted this round, and of the same collective. */
static bool all_posted(struct operation *operation) {
    ncclComm_t comm = operation->comm;
    const struct call own = call_of(operation);
    for (int rank = 0; rank < comm->ranks; rank++)
        if (atomic_load(&comm->meeting.members[rank].posted) <= comm->round) return false;
    for (int rank = 0; rank < comm->ranks; rank++) {
        const struct call call = comm->meeting.members[rank].calls[comm->round % 2];
        if (call.kind == own.kind && call.bytes == own.bytes && call.root == own.root) continue;
        if (!operation->is_mismatched)
            log_event("nccl-mismatch",
                      "comm=%s comm_rank=%d kind=%s bytes=%zu peer=%d peer_kind=%s peer_bytes=%zu",
                      comm->name, comm->rank, kind_names[own.kind], own.bytes, rank,
                      kind_names[call.kind], call.bytes);
        operation->is_mismatched = true;
        return false;
    }
    return true;
}

/* What is for this rank in elements [done, done + count) of each contribution to a reduce-scatter
 * or all-to-all: `first` of the round, and the place in its own result. */
struct share {
    size_t first, count, place;
};

static struct share share_of(const struct operation *operation, size_t count) {
    size_t begin = operation->done, end = begin + count;
    size_t own_begin = (size_t)operation->comm->rank * operation->count;
    size_t own_end = own_begin + operation->count;
    if (begin < own_begin) begin = own_begin;
    if (end > own_end) end = own_end;
    if (begin >= end) return (struct share){0, 0, 0};
    return (struct share){begin - operation->done, end - begin, begin - own_begin};
}

/* Take this rank's part of a round that all have posted. */
static void take(const struct operation *operation, size_t count) {
    ncclComm_t comm = operation->comm;
    size_t bytes = type_bytes(operation->type), done = operation->done;
    struct share share = share_of(operation, count);
    char *slots[comm->ranks], *shares[comm->ranks], *target = operation->target;
    for (int rank = 0; rank < comm->ranks; rank++) {
        slots[rank] = slot_of(&comm->meeting, rank, comm->round);
        shares[rank] = slots[rank] + share.first * bytes;
    }
    switch (operation->kind) {
    case REDUCE:
        if (!is_root(operation)) break;
        __attribute__((fallthrough));
    case ALL_REDUCE:
        reduce(target + done * bytes, slots, comm->ranks, count, operation->type,
               operation->reduction);
        break;
    case BROADCAST: memcpy(target + done * bytes, slots[operation->root], count * bytes); break;
    case ALL_GATHER:
        for (size_t rank = 0; rank < (size_t)comm->ranks; rank++)
            memcpy(target + (rank * operation->count + done) * bytes, slots[rank], count * bytes);
        break;
    case REDUCE_SCATTER:
        reduce(target + share.place * bytes, shares, comm->ranks, share.count, operation->type,
               operation->reduction);
        break;
    case ALL_TO_ALL:
        for (size_t rank = 0; rank < (size_t)comm->ranks; rank++)
            memcpy(target + (rank * operation->count + share.place) * bytes, shares[rank],
                   share.count * bytes);
        break;
    default: break;
    }
}

enum progress collective_step(struct operation *operation, bool *has_moved) {
    size_t left = contributed(operation) - operation->done;
    size_t count = SLOT_BYTES / type_bytes(operation->type);
    if (count > left) count = left;
    if (!operation->is_posted) {
        if (!has_good_addresses(operation)) return BAD_ADDRESS;
        post(operation, count);
        *has_moved = true;
    }
    if (!all_posted(operation)) return WAITS;
    take(operation, count);
    operation->is_posted = false;
    operation->done += count;
    operation->comm->round++;
    *has_moved = true;
    return count == left ? DONE : WAITS;
}

/* --- calling ---------------------------------------------------------------------------------- */

static ncclResult_t invalid(const struct operation *operation, const char *what, int value,
                            int last) {
    nccl_warn(operation->comm->device, "misc/argcheck.cc:39",
              "%s : invalid %s %d (%s should be in the 0..%d range)", kind_names[operation->kind],
              what, value, what, last);
    return nccl_passed(operation->comm->device, "enqueue.cc:2012", ncclInvalidArgument);
}

static ncclResult_t check(struct operation *operation) {
    ncclComm_t comm = operation->comm;
    ncclResult_t error = communicator_ready(comm, kind_names[operation->kind]);
    if (error != ncclSuccess) return error;
    if ((unsigned)operation->type >= ncclNumTypes)
        return invalid(operation, "type", (int)operation->type, ncclNumTypes - 1);
    if (operation->root < 0 || operation->root >= comm->ranks)
        return invalid(operation, "root", operation->root, comm->ranks - 1);
    if (operation->reduction < ncclNumOps) return ncclSuccess;
    unsigned made = (unsigned)operation->reduction - ncclNumOps;
    if (made >= CREATED_OPS || !comm->created[made].is_used)
        return invalid(operation, "op", (int)operation->reduction, ncclNumOps - 1);
    operation->premultiplied = comm->created[made];
    operation->reduction = ncclSum;
    return ncclSuccess;
}

ncclResult_t operation_add(struct operation operation, cudaStream_t stream) {
    ncclResult_t error = check(&operation);
    if (error != ncclSuccess) return error;
    ncclComm_t comm = operation.comm;
    operation.stream = stream;
    nccl_info(LOG_COLL, comm->device,
              "%s: opCount %lx sendbuff %p recvbuff %p count %zu datatype %d op %d root %d comm %p "
              "[nranks=%d] stream %p", kind_names[operation.kind], comm->operations,
              (void *)operation.source, (void *)operation.target, operation.count, operation.type,
              operation.reduction, operation.root, (void *)comm, comm->ranks, (void *)stream);
    log_event("nccl-call", "kind=%s count=%zu type=%d root=%d comm=%s comm_rank=%d number=%lu",
              kind_names[operation.kind], operation.count, operation.type, operation.root,
              comm->name, comm->rank, comm->operations);
    comm->operations++;
    return operation.count == 0 ? ncclSuccess : group_add(&operation);
}

API ncclResult_t ncclAllReduce(const void *source, void *target, size_t count, ncclDataType_t type,
                               ncclRedOp_t reduction, ncclComm_t comm, cudaStream_t stream) {
    ENTER_NCCL(comm);
    return operation_add((struct operation){.kind = ALL_REDUCE, .source = source, .target = target,
                                            .count = count, .type = type, .reduction = reduction,
                                            .comm = comm}, stream);
}

API ncclResult_t ncclReduce(const void *source, void *target, size_t count, ncclDataType_t type,
                            ncclRedOp_t reduction, int root, ncclComm_t comm, cudaStream_t stream) {
    ENTER_NCCL(comm);
    return operation_add((struct operation){.kind = REDUCE, .source = source, .target = target,
                                            .count = count, .type = type, .reduction = reduction,
                                            .root = root, .comm = comm}, stream);
}

API ncclResult_t ncclReduceScatter(const void *source, void *target, size_t count,
                                   ncclDataType_t type, ncclRedOp_t reduction, ncclComm_t comm,
                                   cudaStream_t stream) {
    ENTER_NCCL(comm);
    return operation_add((struct operation){.kind = REDUCE_SCATTER, .source = source,
                                            .target = target, .count = count, .type = type,
                                            .reduction = reduction, .comm = comm}, stream);
}

API ncclResult_t ncclBroadcast(const void *source, void *target, size_t count, ncclDataType_t type,
                               int root, ncclComm_t comm, cudaStream_t stream) {
    ENTER_NCCL(comm);
    return operation_add((struct operation){.kind = BROADCAST, .source = source, .target = target,
                                            .count = count, .type = type, .root = root,
                                            .comm = comm}, stream);
}

API ncclResult_t ncclBcast(void *buffer, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
    return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}

API ncclResult_t ncclAllGather(const void *source, void *target, size_t count, ncclDataType_t type,
                               ncclComm_t comm, cudaStream_t stream) {
    ENTER_NCCL(comm);
    return operation_add((struct operation){.kind = ALL_GATHER, .source = source, .target = target,
                                            .count = count, .type = type, .comm = comm}, stream);
}

API ncclResult_t ncclAlltoAll(const void *source, void *target, size_t count, ncclDataType_t type,
                              ncclComm_t comm, cudaStream_t stream) {
    ENTER_NCCL(comm);
    return operation_add((struct operation){.kind = ALL_TO_ALL, .source = source, .target = target,
                                            .count = count, .type = type, .comm = comm}, stream);
}

/* --- operations that the program makes -------------------------------------------------------- */

API ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *reduction, void *scalar, ncclDataType_t type,
                                          ncclScalarResidence_t residence, ncclComm_t comm) {
    ENTER_NCCL(comm);
    ncclResult_t error = communicator_ready(comm, "RedOpCreatePreMulSum");
    if (error != ncclSuccess) return error;
    int free = 0;
    while (free < CREATED_OPS && comm->created[free].is_used) free++;
    if (free == CREATED_OPS) return ncclInternalError;
    struct premultiplied made = {.is_used = true, .residence = residence};
    if (residence == ncclScalarDevice) made.device_scalar = scalar; /* read when it runs */
    else made.scalar = type_load(type, scalar);
    comm->created[free] = made;
    *reduction = (ncclRedOp_t)(ncclNumOps + free);
    return ncclSuccess;
}

API ncclResult_t ncclRedOpDestroy(ncclRedOp_t reduction, ncclComm_t comm) {
    ENTER_NCCL(comm);
    unsigned made = (unsigned)reduction - ncclNumOps;
    if (comm == NULL || made >= CREATED_OPS || !comm->created[made].is_used)
        return ncclInvalidArgument;
    comm->created[made].is_used = false; /* operations that use it have a copy */
    return ncclSuccess;
}
