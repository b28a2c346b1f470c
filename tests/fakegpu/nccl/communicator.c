/* Communicators: what they are made of, whether they can be used, what they answer. */
#include "nccl/internal.h"

#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool is_blocking(const ncclConfig_t *config, const struct ncclComm *parent) {
    const char *set = getenv("NCCL_COMM_BLOCKING");
    if (set != NULL && *set != '\0') return atoi(set) != 0;
    if (config != NULL && config->blocking != INT_MIN) return config->blocking != 0;
    return parent == NULL || parent->is_blocking;
}

/* How many this process has made: those without a name are called "2/4", the second, of four
 * ranks. */
static atomic_int made;

ncclComm_t communicator_new(uint64_t id, int ranks, int rank, const ncclConfig_t *config,
                            const struct ncclComm *parent) {
    ncclComm_t comm = calloc(1, sizeof *comm);
    comm->id = id;
    comm->ranks = ranks;
    comm->rank = rank;
    comm->device = parent != NULL ? parent->device : device_current();
    comm->gpu = device_gpu(comm->device);
    comm->is_blocking = is_blocking(config, parent);
    bool is_named = config != NULL && config->size >= sizeof *config && config->commName != NULL;
    if (is_named) snprintf(comm->name, sizeof comm->name, "%s", config->commName);
    else snprintf(comm->name, sizeof comm->name, "%d/%d", atomic_fetch_add(&made, 1) + 1, ranks);
    snprintf(comm->point_name, sizeof comm->point_name, "comm:%s", comm->name);
    comm->point.name = comm->point_name;
    return comm;
}

/* --- errors ----------------------------------------------------------------------------------- */

void communicator_fail(ncclComm_t comm, ncclResult_t error) {
    int none = ncclSuccess;
    if (!atomic_compare_exchange_strong(&comm->result, &none, (int)error)) return;
    log_event("nccl-error", "comm=%s comm_rank=%d error=%d", comm->name, comm->rank, error);
}

void nccl_warn_of(int device, ncclResult_t error) {
    switch (error) {
    case ncclUnhandledCudaError: {
        cudaError_t sticky = device_sticky();
        cudaError_t shown = sticky != cudaSuccess ? sticky : cudaErrorInvalidValue;
        nccl_warn(device, "enqueue.cc:1446", "Cuda failure %d '%s'", shown,
                  cudaGetErrorString(shown));
        break;
    }
    case ncclSystemError:
        nccl_warn(device, "misc/socket.cc:484", "socketStartConnect: Connect to 127.0.0.1<43519> "
                                                "failed : Software caused connection abort");
        break;
    case ncclInternalError:
        nccl_warn(device, "bootstrap.cc:98",
                  "Message truncated : received 1024 bytes instead of 256");
        break;
    case ncclRemoteError:
        nccl_warn(device, "misc/socket.cc:50",
                  "socketProgress: Connection closed by remote peer 127.0.0.1<43519>");
        break;
    case ncclInvalidUsage:
        nccl_warn(device, "init.cc:1052",
                  "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 18000");
        break;
    default: nccl_warn(device, "misc/argcheck.cc:30", "Error: corrupted comm object detected");
    }
}

void nccl_warn_while_running(int device, ncclResult_t error) {
    if (error == ncclSystemError)
        nccl_warn(device, "include/ibvwrap.h:116",
                  "ibv_post_send() failed with error Connection timed out, Bad WR 0x7f00, First WR "
                  "0x7f00");
    else if (error != ncclInternalError) nccl_warn_of(device, error);
}

ncclResult_t nccl_enter(struct point *point, ncclComm_t comm) {
    int rank = comm != NULL ? comm->rank : -1;
    int error = rules_suffer(point, rank, comm != NULL ? &comm->stopped : NULL);
    if (error == 0) return ncclSuccess;
    int device = comm != NULL ? comm->device : device_current();
    nccl_warn_of(device, (ncclResult_t)error);
    bool makes_one = strncmp(point->name, "ncclComm", strlen("ncclComm")) == 0;
    return nccl_passed(device, makes_one ? "init.cc:1892" : "enqueue.cc:2091", (ncclResult_t)error);
}

ncclResult_t communicator_ready_as_parent(ncclComm_t comm, const char *function) {
    if (comm == NULL) {
        nccl_warn(device_current(), "misc/argcheck.cc:23", "%s : comm argument is NULL", function);
        return ncclInvalidArgument;
    }
    if (atomic_load(&comm->aborted))
        return nccl_passed(comm->device, "init.cc:571", ncclInternalError);
    int result = atomic_load(&comm->result);
    if (result != ncclSuccess) {
        nccl_warn(comm->device, "init.cc:580", "Attempt to use communicator before the previous "
                                               "operation returned ncclSuccess");
        return result == ncclInProgress ? ncclInvalidArgument : (ncclResult_t)result;
    }
    return ncclSuccess;
}

ncclResult_t communicator_ready(ncclComm_t comm, const char *function) {
    ncclResult_t error = communicator_ready_as_parent(comm, function);
    if (error != ncclSuccess) return error;
    if (atomic_load(&comm->stopped)) {
        nccl_warn(comm->device, "init.cc:584", "%s : communicator has been revoked", function);
        return ncclInvalidUsage;
    }
    return ncclSuccess;
}

/* --- what goes on without the caller ---------------------------------------------------------- */

struct task {
    ncclComm_t comm;
    ncclResult_t (*begin)(ncclComm_t comm);
};

static ncclResult_t run(struct task task) {
    ncclResult_t result = task.begin(task.comm);
    atomic_store(&task.comm->result, result);
    atomic_fetch_sub(&task.comm->busy, 1);
    return result;
}

static void *run_in_thread(void *argument) {
    struct task task = *(struct task *)argument;
    free(argument);
    cudaSetDevice(task.comm->device);
    run(task);
    return NULL;
}

ncclResult_t communicator_begin(ncclComm_t comm, ncclResult_t (*begin)(ncclComm_t comm)) {
    struct task task = {comm, begin};
    atomic_store(&comm->result, ncclInProgress);
    atomic_fetch_add(&comm->busy, 1);
    if (comm->is_blocking) return run(task);
    struct task *copy = malloc(sizeof *copy);
    *copy = task;
    pthread_t thread;
    if (pthread_create(&thread, NULL, run_in_thread, copy) != 0)
        fatal("no thread can be started for a communicator that is not blocking");
    pthread_detach(thread);
    return ncclInProgress;
}

/* --- answers ---------------------------------------------------------------------------------- */

API ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
    ENTER_NCCL(comm);
    if (comm == NULL) return ncclInvalidArgument;
    device_lock();
    transport_look(comm);
    device_unlock();
    *error = (ncclResult_t)atomic_load(&comm->result);
    return ncclSuccess;
}

API ncclResult_t ncclCommCount(const ncclComm_t comm, int *count) {
    ENTER_NCCL(comm);
    *count = comm->ranks;
    return ncclSuccess;
}

API ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device) {
    ENTER_NCCL(comm);
    *device = comm->device;
    return ncclSuccess;
}

API ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) {
    ENTER_NCCL(comm);
    *rank = comm->rank;
    return ncclSuccess;
}

/* --- memory that is known to a communicator: nothing becomes faster here ---------------------- */

struct registration {
    ncclComm_t comm;
    void *address;
    size_t bytes;
};

static ncclResult_t enroll(ncclComm_t comm, void *address, size_t bytes, void **handle) {
    *handle = NULL;
    ncclResult_t error = communicator_ready(comm, "CommRegister");
    if (error != ncclSuccess) return error;
    struct registration *made = malloc(sizeof *made);
    *made = (struct registration){comm, address, bytes};
    *handle = made;
    nccl_info(LOG_REG, comm->device, "register comm %p buffer %p size %zu", (void *)comm, address,
              bytes);
    return ncclSuccess;
}

static ncclResult_t strike_off(ncclComm_t comm, void *handle) {
    struct registration *made = handle;
    if (made != NULL && made->comm != comm) return ncclInvalidArgument;
    free(made);
    return ncclSuccess;
}

API ncclResult_t ncclCommRegister(const ncclComm_t comm, void *address, size_t bytes,
                                  void **handle) {
    ENTER_NCCL(comm);
    return enroll(comm, address, bytes, handle);
}

API ncclResult_t ncclCommDeregister(const ncclComm_t comm, void *handle) {
    ENTER_NCCL(comm);
    return strike_off(comm, handle);
}

API ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *address, size_t bytes, void **window,
                                        int flags) {
    ENTER_NCCL(comm);
    (void)flags;
    return enroll(comm, address, bytes, window);
}

API ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, void *window) {
    ENTER_NCCL(comm);
    return strike_off(comm, window);
}

API ncclResult_t ncclMemAlloc(void **address, size_t bytes) {
    ENTER_NCCL(NULL);
    return cudaMalloc(address, bytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

API ncclResult_t ncclMemFree(void *address) {
    ENTER_NCCL(NULL);
    return cudaFree(address) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
