/* What a rank notices of the end of a peer. It depends on how they are connected, as
 * FAKEGPU_NCCL_TRANSPORT has it: within a host (p2p) nothing but a line in the log, through sockets
 * at once, through InfiniBand when the adapter has given up sending again. */
#include "nccl/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const double look_every_s = 0.02;

enum transport { P2P, SOCKET, INFINIBAND };

static enum transport transport(void) {
    const char *name = getenv("FAKEGPU_NCCL_TRANSPORT");
    if (name == NULL || *name == '\0' || strcmp(name, "p2p") == 0) return P2P;
    if (strcmp(name, "socket") == 0) return SOCKET;
    if (strcmp(name, "ib") == 0) return INFINIBAND;
    fatal("FAKEGPU_NCCL_TRANSPORT=%s: write p2p, socket or ib", name);
}

/* An adapter waits 4.096 us * 2^timeout for an answer, and sends again so many times. */
static double patience_s(enum transport transport) {
    if (transport != INFINIBAND) return 0;
    const char *timeout = getenv("NCCL_IB_TIMEOUT"), *retries = getenv("NCCL_IB_RETRY_CNT");
    return 4.096e-6 * pow(2, timeout != NULL ? atof(timeout) : 20) *
           (retries != NULL ? atof(retries) : 7);
}

static bool is_gone(ncclComm_t comm, int rank) {
    return rank != comm->rank && (atomic_load(&comm->meeting.members[rank].has_left) ||
                                  bootstrap_is_dead(comm, rank));
}

/* Data goes around a ring: a rank has connections to the one before and the one behind it. */
static int gone_neighbour(ncclComm_t comm) {
    int next = (comm->rank + 1) % comm->ranks;
    int before = (comm->rank + comm->ranks - 1) % comm->ranks;
    if (is_gone(comm, next)) return next;
    return is_gone(comm, before) ? before : -1;
}

static void lose(ncclComm_t comm, enum transport transport, int peer) {
    struct interface interface = {.address = "127.0.0.1"};
    interface_find(&interface);
    int port = 32768 + atomic_load(&comm->meeting.members[peer].pid) % 28232;
    if (transport == SOCKET)
        nccl_warn(comm->device, "misc/socket.cc:50",
                  "socketProgress: Connection closed by remote peer %s<%d>", interface.address,
                  port);
    else
        nccl_warn(comm->device, "transport/net_ib.cc:2453",
                  "NET/IB: Got completion from peer %s<%d> with status=12 opcode=0 len=0 vendor "
                  "err 129 (Send) localGid ::ffff:%s remoteGids::ffff:%s hca mlx5_%d",
                  interface.address, port, interface.address, interface.address, comm->gpu);
    nccl_passed(comm->device, "transport/net.cc:1298", ncclRemoteError);
    nccl_passed(comm->device, "proxy.cc:694", ncclRemoteError);
    communicator_fail(comm, ncclRemoteError);
}

void transport_look(ncclComm_t comm) {
    double now = seconds_now();
    bool is_usable = comm->meeting.map != NULL && !atomic_load(&comm->stopped) &&
                     atomic_load(&comm->result) == ncclSuccess;
    if (!is_usable || now < comm->looked_at + look_every_s) return;
    comm->looked_at = now;
    enum transport through = transport();
    int peer = gone_neighbour(comm);
    if (peer < 0) return;
    if (comm->lost_at == 0) {
        comm->lost_at = now;
        if (through == P2P)
            nccl_info(LOG_INIT | LOG_NET | LOG_PROXY, comm->device,
                      "[Service thread] Connection closed by localRank %d", peer);
    }
    bool is_waiting = comm->finished < comm->launched;
    if (through != P2P && is_waiting && now >= comm->lost_at + patience_s(through))
        lose(comm, through, peer);
}
