/* Streams as queues that are worked off in order, and the engine: a thread that does so.
 *
 * Work that can be done at once is done in the thread that queues it, since any order in which
 * streams run is one that a GPU could have chosen. What has to wait is left to the engine. */
#include "fakegpu.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>

struct queued {
    struct queued *next;
    struct work work;
    bool asked;   /* rules have been asked, at the time when it was first in its stream */
    bool running; /* the engine is in its `host`, without the lock */
    struct fault fault;
    double asked_at;
};

struct CUstream_st {
    struct CUstream_st *next; /* of all streams */
    struct queued *head, *tail;
    int device, priority;
    unsigned flags;
    unsigned long long id;
    unsigned long queued, left; /* how much has ever been queued, and has left the queue since */
    bool destroyed;             /* freed when it is empty */
};

static struct CUstream_st *streams;
static struct CUstream_st default_streams[MAX_DEVICES];
static unsigned long long next_id;
static bool engine_runs;

/* A forked child has no engine, and may use no device that its parent has used. */
static void forget_engine(void) { engine_runs = false; }

__attribute__((constructor)) static void prepare(void) {
    for (int device = 0; device < MAX_DEVICES; device++) {
        struct CUstream_st *stream = &default_streams[device];
        *stream = (struct CUstream_st){.next = streams, .device = device, .id = ++next_id};
        streams = stream;
    }
    pthread_atfork(NULL, NULL, forget_engine);
}

/* The per-thread default stream is taken for the legacy one: torch uses only that. */
static struct CUstream_st *stream_of(cudaStream_t handle) {
    if (handle == NULL || handle == cudaStreamLegacy || handle == cudaStreamPerThread)
        return &default_streams[device_current()];
    return handle;
}

int stream_device(cudaStream_t stream) { return stream_of(stream)->device; }

/* --- working off, with the lock held ---------------------------------------------------------- */

/* Whether a rule keeps what is first in its stream from running. */
static bool held_up(struct queued *first) {
    const struct fault *fault = &first->fault;
    if (!first->asked && first->work.point != NULL) {
        first->asked = true;
        first->asked_at = seconds_now();
        first->fault = rules_match(first->work.point, first->work.comm_rank);
    }
    if (fault->rule == 0) return false;
    if (fault->hang == HANG_FOREVER) return true;
    if (first->work.given_up != NULL && atomic_load(first->work.given_up)) return false;
    return seconds_now() < first->asked_at + fault->delay_s ||
           (fault->hang == HANG && rules_in_force(fault));
}

static void call_host(struct queued *first) {
    first->running = true;
    device_unlock();
    first->work.host(first->work.state);
    device_lock();
    first->running = false;
}

static void drop_first(struct CUstream_st *stream) {
    struct queued *first = stream->head;
    stream->head = first->next;
    if (stream->head == NULL) stream->tail = NULL;
    stream->left++;
    if (first->work.release != NULL) first->work.release(first->work.state);
    free(first);
    device_changed();
}

/* Do what is first, if it can be done now; true: it is done. Only the engine calls into the host.
 */
static bool work_off_first(struct CUstream_st *stream, bool is_engine) {
    struct queued *first = stream->head;
    if (first->running || held_up(first)) return false;
    if (first->fault.error != 0) {
        device_corrupt((cudaError_t)first->fault.error);
        return false;
    }
    if (first->work.host != NULL) {
        if (!is_engine) return false;
        call_host(first);
        drop_first(stream);
        return true;
    }
    enum progress progress = first->work.step(first->work.state);
    if (progress == BAD_ADDRESS) device_corrupt(cudaErrorIllegalAddress);
    if (progress == DONE) drop_first(stream);
    return progress == DONE;
}

static void free_if_done(struct CUstream_st *stream) {
    if (!stream->destroyed || stream->head != NULL) return;
    struct CUstream_st **place = &streams;
    while (*place != stream) place = &(*place)->next;
    *place = stream->next;
    free(stream);
}

/* All that can be done now, on all streams. */
static void work_off_all(void) {
    for (bool again = true; again;) {
        again = false;
        for (struct CUstream_st *stream = streams; stream != NULL && !again; stream = stream->next)
            while (stream->head != NULL && work_off_first(stream, true)) again = true;
    }
    for (struct CUstream_st *stream = streams, *next; stream != NULL; stream = next) {
        next = stream->next;
        free_if_done(stream);
    }
}

/* Whether something first in its stream waits for what no thread of this process announces. */
static bool anything_polled(void) {
    for (const struct CUstream_st *stream = streams; stream != NULL; stream = stream->next)
        if (stream->head != NULL && (stream->head->work.polled || stream->head->fault.rule != 0))
            return true;
    return false;
}

static void *run_engine(void *unused) {
    (void)unused;
    prctl(PR_SET_NAME, "fakegpu");
    device_lock();
    for (;;) {
        work_off_all();
        device_wait(anything_polled() ? 0.001 : -1);
    }
    return NULL;
}

static void start_engine(void) {
    if (engine_runs) return;
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all); /* signals are for the program's own threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (pthread_create(&thread, NULL, run_engine, NULL) != 0)
        fatal("no thread can be started for the streams");
    pthread_detach(thread);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    engine_runs = true;
}

void streams_drop(void) {
    for (struct CUstream_st *stream = streams; stream != NULL; stream = stream->next)
        while (stream->head != NULL && !stream->head->running) drop_first(stream);
}

cudaError_t stream_enqueue(cudaStream_t handle, const struct work *work) {
    struct queued *queued = calloc(1, sizeof *queued);
    queued->work = *work;
    device_lock();
    struct CUstream_st *stream = stream_of(handle);
    if (stream->tail != NULL) stream->tail->next = queued;
    else stream->head = queued;
    stream->tail = queued;
    stream->queued++;
    if (device_sticky() != cudaSuccess) streams_drop();
    else if (stream->head == queued) work_off_first(stream, false);
    if (stream->head != NULL) {
        start_engine();
        device_changed();
    }
    device_unlock();
    return device_error(device_sticky());
}

/* --- the API ---------------------------------------------------------------------------------- */

cudaError_t stream_synchronize(cudaStream_t handle) {
    device_lock();
    struct CUstream_st *stream = stream_of(handle);
    unsigned long last = stream->queued;
    while (stream->left < last) device_wait(-1);
    device_unlock();
    return device_error(device_sticky());
}

API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    ENTER();
    return stream_synchronize(stream);
}

static bool all_empty(int device) {
    for (const struct CUstream_st *stream = streams; stream != NULL; stream = stream->next)
        if (stream->device == device && stream->head != NULL) return false;
    return true;
}

cudaError_t streams_synchronize(int device) {
    device_lock();
    while (!all_empty(device)) device_wait(-1);
    device_unlock();
    return device_error(device_sticky());
}

API cudaError_t cudaDeviceSynchronize(void) {
    ENTER();
    return streams_synchronize(device_current());
}

API cudaError_t cudaStreamQuery(cudaStream_t handle) {
    ENTER();
    device_lock();
    bool empty = stream_of(handle)->head == NULL;
    device_unlock();
    return device_error(empty ? device_sticky() : cudaErrorNotReady);
}

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *handle, unsigned flags, int priority) {
    ENTER();
    struct CUstream_st *stream = calloc(1, sizeof *stream);
    stream->device = device_current();
    stream->flags = flags;
    stream->priority = priority;
    device_lock();
    stream->id = ++next_id;
    stream->next = streams;
    streams = stream;
    device_unlock();
    *handle = stream;
    return cudaSuccess;
}

API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *handle, unsigned flags) {
    return cudaStreamCreateWithPriority(handle, flags, 0);
}

API cudaError_t cudaStreamCreate(cudaStream_t *handle) {
    return cudaStreamCreateWithPriority(handle, cudaStreamDefault, 0);
}

API cudaError_t cudaStreamDestroy(cudaStream_t handle) {
    ENTER();
    device_lock();
    handle->destroyed = true; /* what is queued is still done, as CUDA has it */
    free_if_done(handle);
    device_unlock();
    return cudaSuccess;
}

API cudaError_t cudaStreamGetPriority(cudaStream_t handle, int *priority) {
    ENTER();
    *priority = stream_of(handle)->priority;
    return cudaSuccess;
}

API cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned *flags) {
    ENTER();
    *flags = stream_of(handle)->flags;
    return cudaSuccess;
}

API cudaError_t cudaStreamGetId(cudaStream_t handle, unsigned long long *id) {
    ENTER();
    *id = stream_of(handle)->id;
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    ENTER_QUERY();
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

/* --- functions of the host in a stream -------------------------------------------------------- */

static struct point host_point = {.name = "device:host"};

API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    ENTER();
    return stream_enqueue(
        stream,
        &(struct work){.point = &host_point, .host = function, .state = data, .comm_rank = -1});
}

struct callback {
    cudaStreamCallback_t function;
    cudaStream_t stream;
    void *data;
};

static void call_back(void *state) {
    struct callback *callback = state;
    callback->function(callback->stream, device_sticky(), callback->data);
}

API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function,
                                      void *data, unsigned flags) {
    ENTER();
    (void)flags;
    struct callback *callback = malloc(sizeof *callback);
    *callback = (struct callback){function, stream, data};
    return stream_enqueue(stream, &(struct work){.point = &host_point,
                                                 .host = call_back,
                                                 .release = free,
                                                 .state = callback,
                                                 .comm_rank = -1});
}

/* --- capture: graphs are not simulated, so no stream is ever captured ------------------------- */

API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    ENTER();
    (void)stream;
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

#if CUDART_VERSION >= 13000
#define EDGES , const cudaGraphEdgeData **edges
#else
#define EDGES
#endif
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                         unsigned long long *id, cudaGraph_t *graph,
                                         const cudaGraphNode_t **nodes EDGES, size_t *count) {
    if (id != NULL) *id = 0;
    if (graph != NULL) *graph = NULL;
    if (nodes != NULL) *nodes = NULL;
#if CUDART_VERSION >= 13000
    if (edges != NULL) *edges = NULL;
#endif
    if (count != NULL) *count = 0;
    return cudaStreamIsCapturing(stream, status);
}

API cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    static __thread enum cudaStreamCaptureMode own = cudaStreamCaptureModeGlobal;
    enum cudaStreamCaptureMode before = own;
    own = *mode;
    *mode = before;
    return cudaSuccess;
}
