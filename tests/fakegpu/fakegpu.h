/* What the sources of the fake GPU offer each other. Nothing here leaves the library: a symbol that
 * torch is to find is marked API. README.md has the design. */
#ifndef FAKEGPU_H
#define FAKEGPU_H

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* A function of NVIDIA's libraries. All others are hidden (-fvisibility=hidden). */
#define API __attribute__((visibility("default")))

enum { MAX_DEVICES = 64 };

/* --- settings.c: the environment, read once in each process ----------------------------------- */

struct settings {
    int devices;                   /* FAKEGPU_DEVICES: GPUs of this host, 8 where unset */
    size_t memory_bytes;           /* FAKEGPU_MEMORY_GIB: memory of each, 141 where unset */
    int rank;                      /* RANK at the first call; -1 where unset */
    const char *rules;             /* FAKEGPU_RULES; "" where unset */
    const char *control_file;      /* FAKEGPU_CONTROL; NULL where unset */
    const char *log_file;          /* FAKEGPU_LOG; NULL where unset */
    const char *meeting_directory; /* FAKEGPU_MEETING: where the ranks of a communicator find each
                                      other; /dev/shm/fakegpu-UID where unset */
    bool strict;                   /* FAKEGPU_STRICT: a kernel that is not simulated is an error */
    const char *visible_devices;   /* CUDA_VISIBLE_DEVICES; NULL where unset */
};

/* A forked child reads it anew: its environment may be another. */
const struct settings *settings(void);

/* Seconds of CLOCK_MONOTONIC. */
double seconds_now(void);

/* --- log.c: one line for each event, for tests to read ---------------------------------------- */

/* Append "TIME rank=R pid=P EVENT FIELDS" to FAKEGPU_LOG, whole lines only; any thread. */
void log_event(const char *event, const char *fields, ...) __attribute__((format(printf, 2, 3)));

/* --- rules.c: faults that a test has asked for ------------------------------------------------ */

/* A place that a rule can name: a function of the API by its name, or work that begins to run on
 * the device ("device:copy", "device:allreduce"). One static variable for each place: it counts. */
struct point {
    const char *name;
    atomic_ulong passings;
};

enum hang { NO_HANG, HANG, HANG_FOREVER };

struct fault {
    uint64_t rule; /* 0: no rule applies, and all else is 0 too */
    int error;     /* in the numbers of the library that is called; 0: none */
    double delay_s;
    enum hang hang; /* HANG ends when the rule is taken out of the control file or the caller is
                       given up (an aborted communicator); HANG_FOREVER only with the process */
};

/* Count a passing of `point` and return what the first rule that applies has in store for it.
 * `comm_rank` is the rank within a communicator, -1 where there is none. */
struct fault rules_match(struct point *point, int comm_rank);

/* Whether the rule of `fault` is still in force (the control file is looked at again). */
bool rules_in_force(const struct fault *fault);

/* rules_match, and then its delay or hang in the calling thread, which ends early once `given_up`
 * (may be NULL) is true. Returns the rule's error, 0 for none. Call it without the device lock. */
int rules_suffer(struct point *point, int comm_rank, const atomic_bool *given_up);

/* --- errors.c: errors by name ----------------------------------------------------------------- */

/* The error number of a name such as ncclSystemError, cudaErrorLaunchFailure or
 * NVML_ERROR_GPU_IS_LOST; -1 for an unknown one. */
int error_number(const char *name);

/* --- symbols.c: this library as a library ----------------------------------------------------- */

/* A function of NVIDIA's API in this library by its name, generated stubs included; NULL: none. */
void *own_symbol(const char *name);

/* Report a mistake of the test, such as a rule that cannot be read, and end the process. */
void fatal(const char *problem, ...) __attribute__((format(printf, 1, 2), noreturn));

/* --- control.c: the control file -------------------------------------------------------------- */

/* The text of FAKEGPU_CONTROL where it has changed since `generation` (the caller's, 0 at first),
 * "" where there is no file any more; NULL where it has not changed. The caller frees it. */
char *control_text(unsigned long *generation);

/* --- device.c: devices, their lock, the errors of CUDA ---------------------------------------- */

/* One lock for all streams, events and memory of the process. `step` and `release` of work are
 * called with it held. */
void device_lock(void);
void device_unlock(void);

/* What a wait on the device may have waited for has changed; with the lock held. Wakes the engine
 * and all threads in device_wait. */
void device_changed(void);

/* Wait for device_changed, with the lock held; at most `timeout_s` (negative: without end). */
void device_wait(double timeout_s);

/* The calling thread's current device, in CUDA's numbers. */
int device_current(void);

/* Devices that CUDA_VISIBLE_DEVICES leaves visible, and the GPU (NVML's number) of one of them. */
int device_count(void);
int device_gpu(int device);

/* Whether the process has a context on the device: torch asks before it makes one. */
bool device_has_context(int device);

/* What a GPU is called, by NVML's number. `text` has room for "GPU-" and 36 characters. */
void gpu_uuid(int gpu, char *text);
void gpu_uuid_bytes(int gpu, unsigned char bytes[16]);
int gpu_pci_bus(int gpu);

/* At the start of each function of CUDA: the sticky error, or that of a rule, or cudaSuccess.
 * Functions that only ask which devices there are do without the sticky error: torch asks them
 * before it reports one. Only the runtime's functions note what they return as the thread's last
 * error. */
cudaError_t device_enter(struct point *point, bool uses_context);
#define ENTER_AS(type, uses_context, note)                                                         \
    do {                                                                                           \
        static struct point point = {.name = __func__};                                            \
        type entered = (type)note(device_enter(&point, uses_context));                             \
        if (entered != 0) return entered;                                                          \
    } while (0)
#define ENTER() ENTER_AS(cudaError_t, true, device_error)
#define ENTER_QUERY() ENTER_AS(cudaError_t, false, device_error)
#define ENTER_DRIVER() ENTER_AS(CUresult, true, )
#define ENTER_DRIVER_QUERY() ENTER_AS(CUresult, false, )

/* Note `error` as the calling thread's last one, and return it. Errors that corrupt a context (an
 * illegal address, a failed launch, an ECC error ...) become sticky. */
cudaError_t device_error(cudaError_t error);

/* An error of work on the device: sticky whatever it is; what is queued is dropped. */
void device_corrupt(cudaError_t error);

/* The sticky error of the process; cudaSuccess where there is none. */
cudaError_t device_sticky(void);

/* --- memory.c and virtual_memory.c: what addresses are device memory -------------------------- */

/* What `address` belongs to; with the device lock held. */
enum memory_kind { PAGEABLE, PINNED, DEVICE_MEMORY, NO_MEMORY };
struct memory {
    enum memory_kind kind; /* NO_MEMORY: device memory once, or reserved and not mapped */
    int device;
    void *start;
    size_t bytes;
};
struct memory memory_at(const void *address);

/* Whether work on the device may touch all `bytes` from `address`; with the device lock held. */
bool memory_accessible(const void *address, size_t bytes);

/* As memory_at, among the addresses that are reserved and mapped apart; PAGEABLE: none of them. */
struct memory mapped_memory_at(const void *address);

/* Count memory of a device as taken, with the device lock held; false: there is not as much left.
 */
bool memory_take(int device, size_t bytes);
void memory_give_back(int device, size_t bytes);
size_t memory_taken(int device);

/* --- stream.c: streams, and the engine that runs what is queued ------------------------------- */

enum progress {
    WAITS,
    DONE,
    BAD_ADDRESS, /* the work touches what is no memory: the context is corrupt */
};

/* Work on a stream: runs when all before it is done. */
struct work {
    struct point *point; /* "device:NAME": rules are asked when it is first in its stream */
    enum progress (*step)(void *state); /* do what can be done now, without blocking; called again
                                      when something on the device has changed, while it WAITS */
    void (*release)(void *state);       /* called once, after DONE or when dropped; may be NULL */
    void *state;
    const atomic_bool *given_up; /* may be NULL: once true, a delay or HANG of a rule is over, and
                                    `step` is called to find out for itself */
    int comm_rank;               /* for rules; -1 outside communicators */
    bool polled;                 /* what `step` waits for changes outside this process, which
                                    cannot announce it: `step` is called every millisecond */
    void (*host)(void *state);   /* instead of `step`: called by the engine, without the lock */
};

/* Queue `work` (it is copied). Does not wait. The caller must not hold the device lock. */
cudaError_t stream_enqueue(cudaStream_t stream, const struct work *work);

/* The device of a stream, in CUDA's numbers; the default streams belong to the current device. */
int stream_device(cudaStream_t stream);

/* Wait until all that is queued now is done; the sticky error where there is one. */
cudaError_t stream_synchronize(cudaStream_t stream);

/* The same for all streams of a device. */
cudaError_t streams_synchronize(int device);

/* Drop what is queued on all streams; with the lock held. */
void streams_drop(void);

/* --- elementwise.c, reduction.c: kernels that are computed ------------------------------------ */

/* Whether the kernel with this mangled name is one of them; then `work` gets its `step`, `release`
 * and `state`, with all that it needs of the arguments of the launch. */
bool elementwise_read(const char *name, void **arguments, struct work *work);
bool reduction_read(const char *name, void **arguments, struct work *work);

#endif
