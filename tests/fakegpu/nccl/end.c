/* The end of communicators: finalized, destroyed, revoked, aborted. */
#include "nccl/internal.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

/* Until all that was launched has left its stream. An aborted kernel does so when its turn comes:
 * one that another communicator's kernel holds up is waited for, as NCCL does (pull request 150690
 * of pytorch has the case). Aborts in one group, or in several threads, do not hold each other
 * up. */
static void wait_for_launches(ncclComm_t comm) {
    device_lock();
    while (comm->ended < comm->launched) device_wait(-1);
    device_unlock();
}

static void wait_for_threads(const ncclComm_t comm) {
    while (atomic_load(&comm->busy) > 0) nanosleep(&(struct timespec){.tv_nsec = 500000}, NULL);
}

static void stop(ncclComm_t comm) {
    atomic_store(&comm->stopped, true);
    device_lock();
    device_changed();
    device_unlock();
}

void communicator_stop(ncclComm_t comm) {
    stop(comm);
    wait_for_launches(comm);
}

/* The last ones to end are kept, so that one that is handed in again is noticed. The one that has
 * ended before them is freed. */
#define ENDED_KEPT 64

static void keep_for_a_while(ncclComm_t comm) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static ncclComm_t ended[ENDED_KEPT];
    static unsigned long count;
    pthread_mutex_lock(&lock);
    ncclComm_t *place = &ended[count++ % ENDED_KEPT];
    ncclComm_t oldest = *place;
    *place = comm;
    pthread_mutex_unlock(&lock);
    free(oldest);
}

static void take_down(ncclComm_t comm, const char *how) {
    bootstrap_leave(comm);
    device_lock();
    if (comm->meeting.map != NULL) munmap(comm->meeting.map, comm->meeting.bytes);
    comm->meeting.map = NULL;
    device_unlock();
    nccl_info(LOG_INIT, comm->device, "comm %p rank %d nranks %d cudaDev %d busId %x - %s COMPLETE",
              (void *)comm, comm->rank, comm->ranks, comm->device, gpu_pci_bus(comm->gpu) << 12,
              how);
    log_event("nccl-end", "comm=%s comm_rank=%d ranks=%d how=%s", comm->name, comm->rank,
              comm->ranks, how);
    keep_for_a_while(comm);
}

/* --- aborting --------------------------------------------------------------------------------- */

/* Those that the group of this thread has put off. */
struct put_off {
    struct put_off *next;
    ncclComm_t comm;
};
static __thread struct put_off *put_off;

static void finish_abort(ncclComm_t comm) {
    wait_for_launches(comm);
    wait_for_threads(comm);
    take_down(comm, "Abort");
}

void end_aborted(void) {
    while (put_off != NULL) {
        struct put_off *first = put_off;
        put_off = first->next;
        finish_abort(first->comm);
        free(first);
    }
}

/* NCCL has freed it then, and whoever hands it in again reads and frees what may be anyone's. Here
 * that is noticed of the last ENDED_KEPT. */
static void end_once(ncclComm_t comm, const char *function) {
    if (atomic_exchange(&comm->aborted, true))
        fatal("%s of communicator %s, which is destroyed or aborted already", function, comm->name);
}

API ncclResult_t ncclCommAbort(ncclComm_t comm) {
    static struct point point = {.name = __func__};
    if (comm == NULL) return ncclSuccess;
    end_once(comm, __func__);
    stop(comm);
    ncclResult_t error = (ncclResult_t)rules_suffer(&point, comm->rank, NULL);
    if (group_is_open()) {
        struct put_off *last = malloc(sizeof *last);
        *last = (struct put_off){put_off, comm};
        put_off = last;
    } else {
        finish_abort(comm);
    }
    return error;
}

/* Operations end as they are; the communicator can still be split, shrunk, destroyed or aborted. It
 * has no errors any more, and is revoked once. */
API ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags) {
    ENTER_NCCL(comm);
    if (comm == NULL) return ncclSuccess;
    if (flags != 0 || atomic_exchange(&comm->revoked, true)) return ncclInvalidArgument;
    communicator_stop(comm);
    atomic_store(&comm->result, ncclSuccess);
    log_event("nccl-revoke", "comm=%s comm_rank=%d", comm->name, comm->rank);
    return ncclSuccess;
}

/* --- ending in good order --------------------------------------------------------------------- */

static ncclResult_t finalize(ncclComm_t comm) {
    wait_for_launches(comm);
    return ncclSuccess;
}

API ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    ENTER_NCCL(comm);
    ncclResult_t error = communicator_ready(comm, "CommFinalize");
    return error == ncclSuccess ? communicator_begin(comm, finalize) : error;
}

API ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    ENTER_NCCL(comm);
    if (comm == NULL) return ncclSuccess;
    wait_for_threads(comm);
    wait_for_launches(comm);
    end_once(comm, __func__);
    atomic_store(&comm->stopped, true);
    take_down(comm, "Destroy");
    return ncclSuccess;
}
