/* The environment of the process, and the clock. */
#include "fakegpu.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static _Atomic(const struct settings *) known;

/* A fork server gives its children an environment of their own. */
static void forget(void) { atomic_store(&known, NULL); }

__attribute__((constructor)) static void forget_in_children(void) {
    pthread_atfork(NULL, NULL, forget);
}

static double number(const char *name, double otherwise) {
    const char *text = getenv(name);
    if (text == NULL || *text == '\0') return otherwise;
    char *end;
    double value = strtod(text, &end);
    if (*end != '\0' || value < 0) fatal("%s=%s is not a number of at least 0", name, text);
    return value;
}

/* A copy: Python may change the environment while the process runs. */
static const char *copy(const char *name) {
    const char *text = getenv(name);
    return text == NULL ? NULL : strdup(text);
}

const struct settings *settings(void) {
    const struct settings *found = atomic_load(&known);
    if (found != NULL) return found;
    struct settings *read = calloc(1, sizeof *read);
    read->devices = (int)number("FAKEGPU_DEVICES", 8);
    if (read->devices > MAX_DEVICES)
        fatal("FAKEGPU_DEVICES=%d: at most %d", read->devices, MAX_DEVICES);
    read->memory_bytes = (size_t)(number("FAKEGPU_MEMORY_GIB", 141) * (1 << 30));
    const char *rank = getenv("RANK");
    read->rank = rank != NULL && *rank != '\0' ? atoi(rank) : -1;
    const char *rules = copy("FAKEGPU_RULES");
    read->rules = rules != NULL ? rules : "";
    read->control_file = copy("FAKEGPU_CONTROL");
    read->log_file = copy("FAKEGPU_LOG");
    read->visible_devices = copy("CUDA_VISIBLE_DEVICES");
    read->strict = number("FAKEGPU_STRICT", 0) != 0;
    read->meeting_directory = copy("FAKEGPU_MEETING");
    if (read->meeting_directory == NULL) {
        char directory[64];
        snprintf(directory, sizeof directory, "/dev/shm/fakegpu-%u", getuid());
        read->meeting_directory = strdup(directory);
    }
    if (atomic_compare_exchange_strong(&known, &found, read)) return read;
    return found; /* another thread was first; ours is lost, once */
}

double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}
