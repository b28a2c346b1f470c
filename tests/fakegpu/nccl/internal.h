/* What the sources of NCCL offer each other. README.md has the design. */
#ifndef NCCL_INTERNAL_H
#define NCCL_INTERNAL_H

#include "fakegpu.h"
#include "nccl/nccl.h"

/* --- log.c: what NCCL writes ------------------------------------------------------------------ */

/* NCCL_DEBUG_SUBSYS, one bit each. */
enum subsystem { LOG_INIT = 1, LOG_COLL = 2, LOG_P2P = 4, LOG_NET = 8, LOG_ENV = 16, LOG_PROXY = 32,
                 LOG_BOOTSTRAP = 64, LOG_REG = 128, LOG_ALL = ~0 };

/* A line of NCCL_DEBUG=INFO, by the calling thread, about a device in CUDA's numbers. */
void nccl_info(enum subsystem subsystem, int device, const char *text, ...)
    __attribute__((format(printf, 3, 4)));

/* A line of NCCL_DEBUG=WARN, which ncclGetLastError returns from then on. `place` is the file and
 * line that NCCL names. */
void nccl_warn(int device, const char *place, const char *text, ...)
    __attribute__((format(printf, 3, 4)));

/* NCCL's way to show where an error has passed: "NCCL INFO init.cc:82 -> 3". Returns `result`. */
ncclResult_t nccl_passed(int device, const char *place, ncclResult_t result);

/* The library's version as ncclGetVersion has it: FAKEGPU_NCCL_VERSION. */
int nccl_version(void);

/* The line that shows the version, once in a process. */
void nccl_show_version(int device);

/* --- interface.c: the network interface that bootstrap uses ----------------------------------- */

struct interface {
    char name[32], address[64]; /* address: "10.0.0.1", no port */
};

/* The first that NCCL_SOCKET_IFNAME allows. False: there is none. */
bool interface_find(struct interface *found);

/* --- bootstrap.c: ranks meet ------------------------------------------------------------------ */

/* What a rank does in a round of a collective: others compare it with what they do. */
struct call {
    int kind, root;
    size_t bytes;
};

/* A rank, as all see it. */
struct member {
    atomic_ulong started; /* start time of its process: a number may be another's by now */
    atomic_int pid;       /* 0: has not come yet */
    atomic_bool has_left; /* it has destroyed or aborted its communicator */
    int gpu;
    unsigned long host;   /* of its NCCL_HOSTID; 0 without */
    atomic_uint ways;     /* of collectives that it has come to be connected for; see connect.c */
    atomic_ulong posted;  /* rounds of collectives that it has begun */
    struct call calls[2]; /* of the newest two */
    atomic_ulong splits;  /* it has begun so many */
    struct {
        int color, key;
    } split[2];           /* the newest two */
};

/* From one rank to another: pieces of messages, one at a time. */
struct channel {
    atomic_ulong sent, received; /* pieces */
    size_t bytes;                /* of the message that the newest piece belongs to */
    atomic_bool has_sender, has_receiver; /* they have come to be connected */
};

enum { SLOT_BYTES = 256 << 10, PIECE_BYTES = 64 << 10 };

struct meeting {
    char path[512];
    void *map;
    size_t bytes;
    int ranks;
    struct member *members;
    struct channel *channels;
    char *slots, *pieces;
};

/* What an ncclUniqueId holds: the process that made it runs the root of the bootstrap. */
struct unique_id {
    uint64_t number;
    int pid, port;
    unsigned long started;
};

ncclResult_t ncclGetUniqueId(ncclUniqueId *id);

/* Fail as NCCL does if the root's process is gone. */
ncclResult_t bootstrap_reach_root(ncclComm_t comm, const struct unique_id *id);

/* Come to the communicator's meeting and wait for all others; ends early when it is aborted. */
ncclResult_t bootstrap_meet(ncclComm_t comm);
/* What NCCL logs of the network that it chooses (FAKEGPU_NCCL_NETWORK). */
void bootstrap_say_network(ncclComm_t comm);

/* Say so to the others, and let go of the file. */
void bootstrap_leave(ncclComm_t comm);

/* Exchange a color and a key with all ranks; those of rank R are in `colors[R]` and `keys[R]`. */
ncclResult_t bootstrap_exchange(ncclComm_t comm, int color, int key, int *colors, int *keys);

/* Whether a rank's process is gone; a zombie is. */
bool bootstrap_is_dead(ncclComm_t comm, int rank);

struct channel *channel_between(const struct meeting *meeting, int from, int to);
char *channel_piece(const struct meeting *meeting, int from, int to);
char *slot_of(const struct meeting *meeting, int rank, unsigned long round);

/* --- communicator.c: communicators ------------------------------------------------------------ */

enum { CREATED_OPS = 64 };

/* An operation made by ncclRedOpCreatePreMulSum. */
struct premultiplied {
    bool is_used;
    ncclScalarResidence_t residence;
    const void *device_scalar;
    long double scalar;
};

/* Never freed: a thread that is still in a call when another aborts the communicator looks at
 * it. */
struct ncclComm {
    uint64_t id; /* "commId" */
    char name[64], point_name[80];
    struct point point; /* "comm:NAME" */
    int ranks, rank, device, gpu;
    bool is_blocking;
    atomic_int result;       /* of what goes on without the caller: ncclInProgress, or an error */
    atomic_bool aborted;
    atomic_bool stopped;     /* aborted or revoked: operations end as they are, and none is taken */
    atomic_bool revoked;     /* it can still be a parent */
    atomic_int busy;         /* threads that initialize, split, connect or finalize it */
    struct unique_id root;   /* of the bootstrap; `pid` 0: ranks know each other from a parent */
    struct point *begun_by;  /* the function that makes it */
    unsigned long splits, shrinks, grows;
    struct operation *to_connect; /* of one that is not blocking: queued when the ranks are there */
    /* With the device lock: */
    struct meeting meeting;
    unsigned long round;     /* of collectives */
    unsigned long launched;  /* launches in all ... */
    unsigned long finished;  /* ... that have run: the next one's turn ... */
    unsigned long ended;     /* ... that have left their streams */
    unsigned long operations; /* "opCount" */
    struct premultiplied created[CREATED_OPS];
    double looked_at;        /* when peers were looked at; see transport.c */
    double lost_at;          /* when one was missed first; 0: never */
};

/* A communicator on the current device that has still to be initialized. `config` and `parent` may
 * be NULL; what one does not set comes from the other. */
ncclComm_t communicator_new(uint64_t id, int ranks, int rank, const ncclConfig_t *config,
                            const struct ncclComm *parent);

/* Whether it can be used now; otherwise the error that NCCL returns. */
ncclResult_t communicator_ready(ncclComm_t comm, const char *function);

/* Likewise, whether others can be made of it: also of one that has been revoked. */
ncclResult_t communicator_ready_as_parent(ncclComm_t comm, const char *function);

/* The error of a rule for `point`, for which NCCL's usual warning is written; ncclSuccess: none. */
ncclResult_t nccl_enter(struct point *point, ncclComm_t comm);
#define ENTER_NCCL(comm)                                  \
    do {                                                  \
        static struct point point = {.name = __func__};   \
        ncclResult_t entered = nccl_enter(&point, comm);  \
        if (entered != ncclSuccess) return entered;       \
    } while (0)

/* The communicator has failed: watchers see it. The first error stays. */
void communicator_fail(ncclComm_t comm, ncclResult_t error);

/* The warning that NCCL usually writes before an error. */
void nccl_warn_of(int device, ncclResult_t error);

/* The same for a communicator that is in use; of an internal error there is none. */
void nccl_warn_while_running(int device, ncclResult_t error);

/* Run `begin` now and return what it returns, or begin it in a thread where the communicator is not
 * blocking. */
ncclResult_t communicator_begin(ncclComm_t comm, ncclResult_t (*begin)(ncclComm_t comm));

/* --- end.c: the end of communicators ---------------------------------------------------------- */

/* Have its operations end as they are, and wait until they have left their streams. */
void communicator_stop(ncclComm_t comm);

/* At the end of a group: what ncclCommAbort has put off until then. */
void end_aborted(void);

/* --- transport.c: what is noticed of the end of a peer ---------------------------------------- */

/* Look whether a peer has gone, now and then, and fail the communicator as its transport would;
 * with the device lock held. */
void transport_look(ncclComm_t comm);

/* --- group.c, collective.c, point_to_point.c: operations -------------------------------------- */

enum kind {
    ALL_REDUCE, BROADCAST, REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, SEND, RECV, KINDS
};

struct operation {
    struct operation *next; /* of its launch */
    ncclComm_t comm;
    cudaStream_t stream;
    enum kind kind;
    const char *source;
    char *target;
    size_t count;           /* elements, as in the call */
    ncclDataType_t type;
    ncclRedOp_t reduction;
    struct premultiplied premultiplied;
    int root;               /* or peer */
    size_t done;            /* elements, or bytes of a message */
    bool is_posted;         /* the round, by this rank */
    bool is_mismatched;     /* others do something else: it never ends */
    bool is_finished;
};

extern const char *const kind_names[KINDS]; /* as NCCL's log has them */

/* Whether it is a message from one rank to another, no collective. */
static inline bool operation_is_message(const struct operation *operation) {
    return operation->kind == SEND || operation->kind == RECV;
}

/* Check the arguments of a call, write it into the log, and queue it. */
ncclResult_t operation_add(struct operation operation, cudaStream_t stream);

/* Queue a copy of `operation`, now or when the calling thread's group ends. */
ncclResult_t group_add(const struct operation *operation);

bool group_is_open(void);

/* Do what can be done now; `has_moved` becomes true if that is anything. With the device lock
 * held. */
enum progress collective_step(struct operation *operation, bool *has_moved);
enum progress point_to_point_step(struct operation *operation, bool *has_moved);

/* --- connect.c: ranks connect when they first need it ----------------------------------------- */

/* Whether ranks that these operations need have not come yet. */
bool connect_is_needed(const struct operation *operations);

/* Come, and wait for the others; ncclInternalError: the communicator was aborted or revoked. */
ncclResult_t connect_ranks(const struct operation *operations);

/* --- arithmetic.c ----------------------------------------------------------------------------- */

size_t type_bytes(ncclDataType_t type);
long double type_load(ncclDataType_t type, const void *address);
void type_store(ncclDataType_t type, void *address, long double value);

/* target[i] = sources[0][i] OP sources[1][i] OP ... */
void reduce(char *target, char *const *sources, int ranks, size_t count, ncclDataType_t type,
            ncclRedOp_t reduction);

#endif
