/* Events: marks in streams that threads and other streams wait for. */
#include "fakegpu.h"

#include <stdlib.h>

struct CUevent_st {
    unsigned long recorded, done; /* recordings, counted: how many were queued, and which is done */
    double done_at;
    int users; /* the handle, and queued work */
};

/* Work on a stream: one recording of an event, made or awaited. */
struct mark {
    struct CUevent_st *event;
    unsigned long recording;
};

static void leave(struct CUevent_st *event) {
    if (--event->users == 0) free(event);
}

static void release_mark(void *state) {
    leave(((struct mark *)state)->event);
    free(state);
}

static enum progress record(void *state) {
    const struct mark *mark = state;
    if (mark->recording > mark->event->done) {
        mark->event->done = mark->recording;
        mark->event->done_at = seconds_now();
    }
    return DONE;
}

static enum progress await(void *state) {
    const struct mark *mark = state;
    return mark->event->done >= mark->recording ? DONE : WAITS;
}

/* A mark for the recording that is the newest now, or for a new one. */
static struct mark *make_mark(struct CUevent_st *event, bool is_new) {
    struct mark *mark = malloc(sizeof *mark);
    device_lock();
    if (is_new) event->recorded++;
    event->users++;
    *mark = (struct mark){event, event->recorded};
    device_unlock();
    return mark;
}

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    ENTER();
    (void)flags; /* timing and blocking make no difference here */
    *event = calloc(1, sizeof **event);
    (*event)->users = 1;
    return cudaSuccess;
}

API cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

API cudaError_t cudaEventDestroy(cudaEvent_t event) {
    ENTER();
    device_lock();
    leave(event);
    device_unlock();
    return cudaSuccess;
}

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    ENTER();
    (void)flags;
    return stream_enqueue(stream, &(struct work){.step = record,
                                                 .release = release_mark,
                                                 .state = make_mark(event, true),
                                                 .comm_rank = -1});
}

API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return cudaEventRecordWithFlags(event, stream, 0);
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    ENTER();
    (void)flags;
    return stream_enqueue(stream, &(struct work){.step = await,
                                                 .release = release_mark,
                                                 .state = make_mark(event, false),
                                                 .comm_rank = -1});
}

API cudaError_t cudaEventQuery(cudaEvent_t event) {
    ENTER();
    device_lock();
    bool done = event->done >= event->recorded;
    device_unlock();
    return done ? cudaSuccess : device_error(cudaErrorNotReady);
}

API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    ENTER();
    device_lock();
    unsigned long newest = event->recorded;
    while (event->done < newest && device_sticky() == cudaSuccess) device_wait(-1);
    device_unlock();
    return device_error(device_sticky());
}

API cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    ENTER();
    device_lock();
    bool done = start->done >= start->recorded && end->done >= end->recorded;
    bool recorded = start->recorded > 0 && end->recorded > 0;
    *milliseconds = (float)((end->done_at - start->done_at) * 1e3);
    device_unlock();
    if (!recorded) return device_error(cudaErrorInvalidResourceHandle);
    return done ? cudaSuccess : device_error(cudaErrorNotReady);
}
