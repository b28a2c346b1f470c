/* How communicators come to be: from a unique id, or from a communicator that is there. */
#include "nccl/internal.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* "comm 0x... rank 0 nranks 2 ...", which NCCL writes when a communicator begins and when it is
 * there. */
static void show(const ncclComm_t comm, const char *state) {
    nccl_info(LOG_INIT, comm->device,
              "%s comm %p rank %d nranks %d cudaDev %d nvmlDev %d busId %x commId 0x%lx - Init %s",
              comm->begun_by->name, (void *)comm, comm->rank, comm->ranks, comm->device, comm->gpu,
              gpu_pci_bus(comm->gpu) << 12, comm->id, state);
}

static ncclResult_t initialize(ncclComm_t comm) {
    double began = seconds_now();
    log_event("nccl-begin", "comm=%s comm_rank=%d id=%016lx", comm->name, comm->rank, comm->id);
    ncclResult_t error = nccl_enter(comm->begun_by, comm);
    if (error != ncclSuccess) return error;
    show(comm, "START");
    if (comm->root.pid != 0) error = bootstrap_reach_root(comm, &comm->root);
    if (error == ncclSuccess) bootstrap_say_network(comm);
    if (error == ncclSuccess) error = bootstrap_meet(comm);
    log_event("nccl-init", "comm=%s comm_rank=%d ranks=%d function=%s error=%d", comm->name,
              comm->rank, comm->ranks, comm->begun_by->name, error);
    if (error != ncclSuccess) return nccl_passed(comm->device, "init.cc:1788", error);
    show(comm, "COMPLETE");
    double took = seconds_now() - began;
    nccl_info(LOG_INIT, comm->device,
              "Init timings - %s: rank %d nranks %d total %.2f (kernels 0.00, alloc 0.00, "
              "bootstrap %.2f, allgathers 0.00, topo 0.00, graphs 0.00, connections 0.00, rest "
              "0.00)",
              comm->begun_by->name, comm->rank, comm->ranks, took, took);
    return ncclSuccess;
}

static ncclResult_t refuse(int device, const char *place, int rank, int ranks) {
    nccl_warn(device, place, "Invalid rank requested : %d/%d", rank, ranks);
    return nccl_passed(device, "init.cc:1836", ncclInvalidArgument);
}

/* --- from a unique id ------------------------------------------------------------------------- */

static ncclResult_t from_id(ncclComm_t *made, int ranks, int rank, const ncclUniqueId *id,
                            const ncclConfig_t *config, struct point *function) {
    *made = NULL;
    int device = device_current();
    if (ranks < 1 || rank < 0 || rank >= ranks) return refuse(device, "init.cc:1800", rank, ranks);
    if (device_sticky() != cudaSuccess) {
        nccl_warn_of(device, ncclUnhandledCudaError);
        return nccl_passed(device, "init.cc:1811", ncclUnhandledCudaError);
    }
    if (rank == 0) nccl_show_version(device);
    struct unique_id root;
    memcpy(&root, id->internal, sizeof root);
    ncclComm_t comm = communicator_new(root.number, ranks, rank, config, NULL);
    comm->root = root;
    comm->begun_by = function;
    *made = comm; /* before it is there, so that another thread can abort it */
    return communicator_begin(comm, initialize);
}

API ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank,
                                        ncclConfig_t *config) {
    static struct point function = {.name = __func__};
    return from_id(comm, ranks, rank, &id, config, &function);
}

API ncclResult_t ncclCommInitRank(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank) {
    static struct point function = {.name = __func__};
    return from_id(comm, ranks, rank, &id, NULL, &function);
}

/* Several roots make the bootstrap of many ranks faster; the first one is enough here. */
API ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int ranks, int rank, int ids,
                                          ncclUniqueId *id, ncclConfig_t *config) {
    static struct point function = {.name = __func__};
    return ids < 1 ? ncclInvalidArgument : from_id(comm, ranks, rank, &id[0], config, &function);
}

/* All devices in one process: each communicator waits for the others, so each has a thread. */
struct init {
    ncclComm_t *comm;
    int ranks, rank, device;
    ncclUniqueId id;
    ncclResult_t result;
    pthread_t thread;
};

static void *init_one(void *state) {
    struct init *init = state;
    static struct point function = {.name = "ncclCommInitAll"};
    cudaSetDevice(init->device);
    init->result = from_id(init->comm, init->ranks, init->rank, &init->id, NULL, &function);
    return NULL;
}

API ncclResult_t ncclCommInitAll(ncclComm_t *comms, int ranks, const int *devices) {
    ncclUniqueId id;
    ncclResult_t result = ncclGetUniqueId(&id);
    if (result != ncclSuccess) return result;
    struct init *all = calloc((size_t)ranks, sizeof *all);
    for (int rank = 0; rank < ranks; rank++) {
        int device = devices != NULL ? devices[rank] : rank;
        all[rank] = (struct init){.comm = &comms[rank], .ranks = ranks, .rank = rank,
                                  .device = device, .id = id};
        pthread_create(&all[rank].thread, NULL, init_one, &all[rank]);
    }
    for (int rank = 0; rank < ranks; rank++) {
        pthread_join(all[rank].thread, NULL);
        if (result == ncclSuccess) result = all[rank].result;
    }
    free(all);
    return result;
}

/* --- from a communicator ---------------------------------------------------------------------- */

/* The same on all ranks of the new communicator, and another for each that is ever made. */
static uint64_t derived(uint64_t id, uint64_t number) {
    uint64_t mixed = (id ^ number) * 0x9e3779b97f4a7c15u; /* as in splitmix64 */
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9u;
    return mixed ^ (mixed >> 31);
}

/* The rank and the number of ranks among those with the same color, by key and then by rank. */
static void place_in_split(const ncclComm_t parent, const int *colors, const int *keys, int *rank,
                           int *ranks) {
    int self = parent->rank;
    *rank = *ranks = 0;
    for (int each = 0; each < parent->ranks; each++) {
        if (colors[each] != colors[self]) continue;
        *ranks += 1;
        if (keys[each] < keys[self] || (keys[each] == keys[self] && each < self)) *rank += 1;
    }
}

static ncclResult_t split(ncclComm_t parent, int color, int key, ncclComm_t *made,
                          const ncclConfig_t *config, struct point *function) {
    int *colors = calloc((size_t)parent->ranks, sizeof(int));
    int *keys = calloc((size_t)parent->ranks, sizeof(int));
    uint64_t number = parent->splits;
    ncclResult_t error = bootstrap_exchange(parent, color, key, colors, keys);
    if (error == ncclSuccess && color != NCCL_SPLIT_NOCOLOR) {
        int rank, ranks;
        place_in_split(parent, colors, keys, &rank, &ranks);
        uint64_t id = derived(derived(parent->id, 2 * number), (uint64_t)color);
        *made = communicator_new(id, ranks, rank, config, parent);
        (*made)->begun_by = function;
        error = communicator_begin(*made, initialize);
    }
    free(colors);
    free(keys);
    return error;
}

/* All ranks of the parent take part; it is waited for here even where communicators are not
 * blocking. */
API ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t *made,
                               ncclConfig_t *config) {
    static struct point function = {.name = __func__};
    *made = NULL;
    ncclResult_t error = communicator_ready_as_parent(parent, "CommSplit");
    if (error != ncclSuccess) return error;
    atomic_fetch_add(&parent->busy, 1);
    error = split(parent, color, key, made, config, &function);
    atomic_fetch_sub(&parent->busy, 1);
    return error;
}

/* The ranks that stay make it; the others need not be alive. */
API ncclResult_t ncclCommShrink(ncclComm_t parent, int *excluded, int count, ncclComm_t *made,
                                ncclConfig_t *config, int flags) {
    static struct point function = {.name = __func__};
    *made = NULL;
    if (parent == NULL || count < 1 || count >= parent->ranks) return ncclInvalidArgument;
    if (flags == NCCL_SHRINK_ABORT) {
        communicator_stop(parent);
        /* It can be used again, in good order or not. */
        atomic_store(&parent->stopped, atomic_load(&parent->revoked));
    } else {
        ncclResult_t error = communicator_ready_as_parent(parent, "CommShrink");
        if (error != ncclSuccess) return error;
    }
    uint64_t id = derived(parent->id, 2 * parent->shrinks++ + 1);
    int rank = parent->rank;
    for (int each = 0; each < count; each++) {
        if (excluded[each] == parent->rank)
            return refuse(parent->device, "init.cc:2210", rank, count);
        if (excluded[each] < parent->rank) rank--;
        id = derived(id, (uint64_t)excluded[each]);
    }
    *made = communicator_new(id, parent->ranks - count, rank, config, parent);
    (*made)->begun_by = &function;
    return communicator_begin(*made, initialize);
}

/* What the ranks of the parent and those that are new all know the grown communicator by. */
static uint64_t grown_id(const ncclComm_t parent) {
    return derived(derived(parent->id, 2 * parent->grows + 1), UINT64_MAX);
}

/* One rank of the parent asks for it before it calls ncclCommGrow, for the ranks that are new. */
API ncclResult_t ncclCommGetUniqueId(ncclComm_t parent, ncclUniqueId *id) {
    ENTER_NCCL(parent);
    ncclResult_t error = communicator_ready_as_parent(parent, "CommGetUniqueId");
    if (error == ncclSuccess) error = ncclGetUniqueId(id);
    if (error != ncclSuccess) return error;
    struct unique_id made;
    memcpy(&made, id->internal, sizeof made);
    made.number = grown_id(parent);
    memcpy(id->internal, &made, sizeof made);
    return ncclSuccess;
}

/* Ranks of the parent keep their numbers. One that is new has no parent, and gives its number. */
API ncclResult_t ncclCommGrow(ncclComm_t parent, int ranks, const ncclUniqueId *id, int rank,
                              ncclComm_t *made, ncclConfig_t *config) {
    static struct point function = {.name = __func__};
    *made = NULL;
    if (parent == NULL)
        return id == NULL ? ncclInvalidArgument
                          : from_id(made, ranks, rank, id, config, &function);
    ncclResult_t error = communicator_ready_as_parent(parent, "CommGrow");
    if (error != ncclSuccess) return error;
    if (ranks <= parent->ranks || rank != -1)
        return refuse(parent->device, "init.cc:2300", rank, ranks);
    uint64_t number = grown_id(parent);
    parent->grows++;
    *made = communicator_new(number, ranks, parent->rank, config, parent);
    (*made)->begun_by = &function;
    return communicator_begin(*made, initialize);
}
