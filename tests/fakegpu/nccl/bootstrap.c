/* How the ranks of a communicator meet: in a file that all map. It also carries what collectives
 * and messages move. */
#include "nccl/internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* --- processes -------------------------------------------------------------------------------- */

/* When a process was started, in the kernel's ticks; 0: it is gone, or a zombie. */
static unsigned long start_of(int pid) {
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    ssize_t length = read(file, text, sizeof text - 1);
    close(file);
    if (length <= 0) return 0;
    text[length] = '\0';
    const char *rest = strrchr(text, ')'); /* the name before it may hold anything */
    char state;
    unsigned long started;
    if (rest == NULL || sscanf(rest + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d "
                                         "%*d %*d %*d %*d %*d %lu", &state, &started) != 2)
        return 0;
    return state == 'Z' || state == 'X' ? 0 : started;
}

bool bootstrap_is_dead(ncclComm_t comm, int rank) {
    const struct member *member = &comm->meeting.members[rank];
    int pid = atomic_load(&member->pid);
    return pid != 0 && start_of(pid) != atomic_load(&member->started);
}

static void pause_shortly(void) { nanosleep(&(struct timespec){.tv_nsec = 500000}, NULL); }

/* --- the root --------------------------------------------------------------------------------- */

API ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    ENTER_NCCL(NULL);
    struct interface interface;
    int device = device_current();
    if (!interface_find(&interface)) {
        nccl_warn(device, "bootstrap.cc:45", "Bootstrap : no socket interface found");
        return nccl_passed(device, "init.cc:82", ncclInvalidUsage);
    }
    nccl_info(LOG_BOOTSTRAP, device, "Bootstrap: Using %s:%s<0>", interface.name,
              interface.address);
    struct unique_id made = {.pid = getpid(), .started = start_of(getpid())};
    if (getrandom(&made.number, sizeof made.number, 0) != sizeof made.number)
        return ncclSystemError;
    made.port = 32768 + (int)(made.number % 28232); /* shown in messages only */
    memset(id, 0, sizeof *id);
    memcpy(id->internal, &made, sizeof made);
    return ncclSuccess;
}

static long setting(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text != NULL && *text != '\0' ? atol(text) : otherwise;
}

/* Sleep, unless the communicator is aborted. */
static void sleep_for(const ncclComm_t comm, double seconds) {
    double end = seconds_now() + seconds;
    while (seconds_now() < end && !atomic_load(&comm->aborted)) pause_shortly();
}

/* NCCL tries again after 100 ms, 200 ms, ..., 34 times. */
ncclResult_t bootstrap_reach_root(ncclComm_t comm, const struct unique_id *id) {
    struct interface interface;
    if (!interface_find(&interface)) {
        nccl_warn(comm->device, "bootstrap.cc:45", "Bootstrap : no socket interface found");
        return nccl_passed(comm->device, "init.cc:82", ncclInvalidUsage);
    }
    long retries = setting("NCCL_SOCKET_RETRY_CNT", 34);
    long pause_ms = setting("NCCL_SOCKET_RETRY_SLEEP_MSEC", 100);
    for (long retry = 1; start_of(id->pid) != id->started; retry++) {
        if (atomic_load(&comm->aborted)) return ncclInternalError;
        if (retry > retries) {
            nccl_warn(comm->device, "misc/socket.cc:578",
                      "socketPollConnect: connect to %s<%d> returned Connection refused, exceeded "
                      "error retry count after %ld attempts", interface.address, id->port, retry);
            nccl_passed(comm->device, "misc/socket.cc:647", ncclRemoteError);
            return nccl_passed(comm->device, "bootstrap.cc:620", ncclRemoteError);
        }
        nccl_info(LOG_ALL, comm->device,
                  "socketPollConnect: connect to %s<%d> returned Connection refused, retrying "
                  "(%ld/%ld) after sleep for %ld msec", interface.address, id->port, retry, retries,
                  retry * pause_ms);
        sleep_for(comm, (double)(retry * pause_ms) * 1e-3);
    }
    return ncclSuccess;
}

/* NCCL's words for the network that it chooses, with the devices that a test says there are:
 * FAKEGPU_NCCL_NETWORK is ib, roce, none (no device is found) or the name of a plugin's network. */
void bootstrap_say_network(ncclComm_t comm) {
    const char *found = getenv("FAKEGPU_NCCL_NETWORK"), *net = getenv("NCCL_NET");
    bool is_verbs = found != NULL && (!strcmp(found, "ib") || !strcmp(found, "roce"));
    bool is_plugin = found != NULL && !is_verbs && strcmp(found, "none") != 0;
    bool is_off = setting("NCCL_IB_DISABLE", 0) != 0;
    bool wants_socket = net != NULL && strcasecmp(net, "Socket") == 0;
    struct interface interface = {0};
    if (!interface_find(&interface)) return;
    if (is_off) nccl_info(LOG_ENV, comm->device, "NCCL_IB_DISABLE set by environment to 1.");
    if (wants_socket) nccl_info(LOG_ENV, comm->device, "NCCL_NET set by environment to %s.", net);
    const char *name = is_plugin ? found : "Socket";
    if (!is_plugin && !is_off && !wants_socket) {
        if (is_verbs) {
            name = "IB";
            nccl_info(LOG_INIT | LOG_NET, comm->device,
                      "NET/IB : Using [0]mlx5_0:1/%s [1]mlx5_1:1/%s [RO]; OOB %s:%s<0>",
                      strcmp(found, "ib") == 0 ? "IB" : "RoCE",
                      strcmp(found, "ib") == 0 ? "IB" : "RoCE", interface.name, interface.address);
        } else {
            nccl_info(LOG_INIT | LOG_NET, comm->device, "NET/IB : No device found.");
        }
    }
    if (strcmp(name, "Socket") == 0)
        nccl_info(LOG_INIT | LOG_NET, comm->device, "NET/Socket : Using [0]%s:%s<0>",
                  interface.name, interface.address);
    nccl_info(LOG_INIT | LOG_NET, comm->device, "Using network %s", name);
}

/* --- the file --------------------------------------------------------------------------------- */

static size_t whole_pages(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

static ncclResult_t map(struct meeting *meeting, uint64_t id, int ranks) {
    size_t count = (size_t)ranks, members = whole_pages(count * sizeof(struct member));
    size_t channels = whole_pages(count * count * sizeof(struct channel));
    size_t slots = count * 2 * SLOT_BYTES, pieces = count * count * PIECE_BYTES;
    mkdir(settings()->meeting_directory, 0700);
    snprintf(meeting->path, sizeof meeting->path, "%s/%016lx", settings()->meeting_directory, id);
    meeting->bytes = members + channels + slots + pieces;
    meeting->ranks = ranks;
    int file = open(meeting->path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, (off_t)meeting->bytes) != 0)
        fatal("%s: %s; FAKEGPU_MEETING names a directory that can be written", meeting->path,
              strerror(errno));
    char *start = mmap(NULL, meeting->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE,
                       file, 0);
    close(file);
    if (start == MAP_FAILED) return ncclSystemError;
    meeting->members = (struct member *)start;
    meeting->channels = (struct channel *)(start + members);
    meeting->slots = start + members + channels;
    meeting->pieces = meeting->slots + slots;
    meeting->map = start; /* last: whether there is one is asked by other threads */
    return ncclSuccess;
}

static int present(const struct meeting *meeting) {
    int count = 0;
    for (int rank = 0; rank < meeting->ranks; rank++)
        count += atomic_load(&meeting->members[rank].pid) != 0;
    return count;
}

/* Ranks with different names of their host are on different ones, as NCCL sees it. */
static unsigned long host(void) {
    unsigned long number = 0;
    const char *name = getenv("NCCL_HOSTID");
    for (; name != NULL && *name != '\0'; name++) number = 31 * number + (unsigned char)*name;
    return number;
}

/* Two ranks on one GPU of one host: NCCL refuses. */
static ncclResult_t check_gpus(ncclComm_t comm) {
    for (int rank = 0; rank < comm->ranks; rank++) {
        const struct member *other = &comm->meeting.members[rank];
        if (rank == comm->rank || other->gpu != comm->gpu || other->host != host()) continue;
        nccl_warn(comm->device, "init.cc:943",
                  "Duplicate GPU detected : rank %d and rank %d both on CUDA device %x", comm->rank,
                  rank, gpu_pci_bus(comm->gpu) << 12);
        return nccl_passed(comm->device, "init.cc:1459", ncclInvalidUsage);
    }
    return ncclSuccess;
}

/* A rank that has come, and was gone when the last one came: its neighbours find the connection
 * closed. */
static ncclResult_t check_processes(ncclComm_t comm) {
    for (int rank = 0; rank < comm->ranks; rank++) {
        if (!bootstrap_is_dead(comm, rank)) continue;
        struct interface interface = {.address = "127.0.0.1"};
        interface_find(&interface);
        nccl_warn(comm->device, "misc/socket.cc:50",
                  "socketProgress: Connection closed by remote peer %s<%d>", interface.address,
                  32768 + atomic_load(&comm->meeting.members[rank].pid) % 28232);
        return nccl_passed(comm->device, "bootstrap.cc:740", ncclRemoteError);
    }
    return ncclSuccess;
}

/* NCCL waits for the others without end: each waits at the root, which gives no news before all are
 * there. */
ncclResult_t bootstrap_meet(ncclComm_t comm) {
    struct meeting *meeting = &comm->meeting;
    ncclResult_t error = map(meeting, comm->id, comm->ranks);
    if (error != ncclSuccess) return error;
    struct member *self = &meeting->members[comm->rank];
    self->gpu = comm->gpu;
    self->host = host();
    atomic_store(&self->started, start_of(getpid()));
    atomic_store(&self->pid, getpid());
    while (present(meeting) < comm->ranks) {
        if (atomic_load(&comm->aborted)) return ncclInternalError;
        pause_shortly();
    }
    unlink(meeting->path); /* all have it open */
    error = check_processes(comm);
    return error == ncclSuccess ? check_gpus(comm) : error;
}

void bootstrap_leave(ncclComm_t comm) {
    struct meeting *meeting = &comm->meeting;
    if (meeting->map == NULL) return;
    atomic_store(&meeting->members[comm->rank].has_left, true);
}

ncclResult_t bootstrap_exchange(ncclComm_t comm, int color, int key, int *colors, int *keys) {
    struct member *members = comm->meeting.members;
    unsigned long number = comm->splits++, newest = number % 2;
    members[comm->rank].split[newest].color = color;
    members[comm->rank].split[newest].key = key;
    atomic_store(&members[comm->rank].splits, number + 1);
    for (int rank = 0; rank < comm->ranks; rank++) {
        while (atomic_load(&members[rank].splits) <= number) {
            if (atomic_load(&comm->aborted)) return ncclInternalError;
            pause_shortly();
        }
        colors[rank] = members[rank].split[newest].color;
        keys[rank] = members[rank].split[newest].key;
    }
    return ncclSuccess;
}

/* --- places in it ----------------------------------------------------------------------------- */

static size_t pair(const struct meeting *meeting, int from, int to) {
    return (size_t)from * (size_t)meeting->ranks + (size_t)to;
}

struct channel *channel_between(const struct meeting *meeting, int from, int to) {
    return &meeting->channels[pair(meeting, from, to)];
}

char *channel_piece(const struct meeting *meeting, int from, int to) {
    return meeting->pieces + pair(meeting, from, to) * PIECE_BYTES;
}

char *slot_of(const struct meeting *meeting, int rank, unsigned long round) {
    return meeting->slots + ((size_t)rank * 2 + round % 2) * SLOT_BYTES;
}
