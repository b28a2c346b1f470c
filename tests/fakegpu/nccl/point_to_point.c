/* Messages from one rank to another, in pieces: each is sent when the one before has been received.
 * A message and the buffer it comes to that differ in size leave both ranks waiting. */
#include "nccl/internal.h"

#include <string.h>

static size_t next_piece(const struct operation *operation, size_t bytes) {
    size_t left = bytes - operation->done;
    return left < PIECE_BYTES ? left : PIECE_BYTES;
}

static enum progress send_step(struct operation *operation, size_t bytes, bool *has_moved) {
    ncclComm_t comm = operation->comm;
    struct channel *channel = channel_between(&comm->meeting, comm->rank, operation->root);
    if (atomic_load(&channel->sent) != atomic_load(&channel->received)) return WAITS;
    if (operation->done == bytes) return DONE;
    size_t count = next_piece(operation, bytes);
    if (!memory_accessible(operation->source, bytes)) return BAD_ADDRESS;
    memcpy(channel_piece(&comm->meeting, comm->rank, operation->root),
           operation->source + operation->done, count);
    channel->bytes = bytes;
    operation->done += count;
    atomic_fetch_add(&channel->sent, 1);
    *has_moved = true;
    return WAITS;
}

static enum progress receive_step(struct operation *operation, size_t bytes, bool *has_moved) {
    ncclComm_t comm = operation->comm;
    struct channel *channel = channel_between(&comm->meeting, operation->root, comm->rank);
    if (atomic_load(&channel->sent) == atomic_load(&channel->received)) return WAITS;
    if (channel->bytes != bytes) {
        if (!operation->is_mismatched)
            log_event("nccl-mismatch",
                      "comm=%s comm_rank=%d kind=Recv bytes=%zu peer=%d peer_kind=Send "
                      "peer_bytes=%zu",
                      comm->name, comm->rank, bytes, operation->root, channel->bytes);
        operation->is_mismatched = true;
        return WAITS;
    }
    size_t count = next_piece(operation, bytes);
    if (!memory_accessible(operation->target, bytes)) return BAD_ADDRESS;
    memcpy(operation->target + operation->done,
           channel_piece(&comm->meeting, operation->root, comm->rank), count);
    operation->done += count;
    atomic_fetch_add(&channel->received, 1);
    *has_moved = true;
    return operation->done == bytes ? DONE : WAITS;
}

enum progress point_to_point_step(struct operation *operation, bool *has_moved) {
    size_t bytes = operation->count * type_bytes(operation->type);
    return operation->kind == SEND ? send_step(operation, bytes, has_moved)
                                   : receive_step(operation, bytes, has_moved);
}

API ncclResult_t ncclSend(const void *source, size_t count, ncclDataType_t type, int peer,
                          ncclComm_t comm, cudaStream_t stream) {
    ENTER_NCCL(comm);
    return operation_add((struct operation){.kind = SEND, .source = source, .count = count,
                                            .type = type, .root = peer, .comm = comm}, stream);
}

API ncclResult_t ncclRecv(void *target, size_t count, ncclDataType_t type, int peer,
                          ncclComm_t comm, cudaStream_t stream) {
    ENTER_NCCL(comm);
    return operation_add((struct operation){.kind = RECV, .target = target, .count = count,
                                            .type = type, .root = peer, .comm = comm}, stream);
}
