/* NCCL's own log, in its form: NCCL_DEBUG, NCCL_DEBUG_SUBSYS, NCCL_DEBUG_FILE. Like the library
 * that torch's packages bring, it is built without trace lines: TRACE writes what INFO does. */
#include "nccl/internal.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum level { SILENT, VERSION, WARN, INFO };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool is_read, version_shown;
static enum level level;
static int subsystems;
static FILE *output;
static char host[64], last_error[1024];

/* A child has an environment of its own. */
static void forget(void) {
    pthread_mutex_init(&lock, NULL);
    is_read = version_shown = false;
}

__attribute__((constructor)) static void forget_in_children(void) {
    pthread_atfork(NULL, NULL, forget);
}

/* --- settings, with the lock held ------------------------------------------------------------- */

static enum level level_of(const char *name) {
    static const char *const names[] = {"NONE", "VERSION", "WARN", "INFO"};
    if (name == NULL) return SILENT;
    for (int each = SILENT; each <= INFO; each++)
        if (strcasecmp(name, names[each]) == 0) return (enum level)each;
    return strcasecmp(name, "ABORT") == 0 || strcasecmp(name, "TRACE") == 0 ? INFO : SILENT;
}

static int subsystem_of(const char *name) {
    static const struct {
        const char *name;
        int bits;
    } known[] = {{"INIT", LOG_INIT},   {"COLL", LOG_COLL},           {"P2P", LOG_P2P},
                 {"NET", LOG_NET},     {"ENV", LOG_ENV},             {"PROXY", LOG_PROXY},
                 {"REG", LOG_REG},     {"BOOTSTRAP", LOG_BOOTSTRAP}, {"ALL", LOG_ALL}};
    for (size_t each = 0; each < sizeof known / sizeof *known; each++)
        if (strcasecmp(known[each].name, name) == 0) return known[each].bits;
    return 0; /* one that writes nothing here */
}

/* "INIT,COLL", or "^NET" for all but NET. */
static int subsystems_of(const char *list) {
    if (list == NULL) return LOG_INIT | LOG_BOOTSTRAP | LOG_ENV;
    bool is_inverted = *list == '^';
    char *copy = strdup(list + is_inverted), *rest = NULL;
    int bits = 0;
    for (char *name = strtok_r(copy, ",", &rest); name; name = strtok_r(NULL, ",", &rest))
        bits |= subsystem_of(name);
    free(copy);
    return is_inverted ? ~bits : bits;
}

/* The file's name, where %h is the host and %p the process. */
static void expand(const char *name, char *expanded, size_t size) {
    size_t length = 0;
    for (; *name != '\0' && length + sizeof host < size; name++) {
        if (*name != '%') expanded[length++] = *name;
        else if (*++name == 'h') length += (size_t)sprintf(expanded + length, "%s", host);
        else if (*name == 'p') length += (size_t)sprintf(expanded + length, "%d", getpid());
        else if (*name == '\0') break;
        else expanded[length++] = *name;
    }
    expanded[length] = '\0';
}

static void read_environment(void) {
    is_read = true;
    gethostname(host, sizeof host - 1);
    host[strcspn(host, ".")] = '\0';
    level = level_of(getenv("NCCL_DEBUG"));
    subsystems = subsystems_of(getenv("NCCL_DEBUG_SUBSYS"));
    output = stdout;
    const char *file = getenv("NCCL_DEBUG_FILE");
    if (file == NULL || level <= VERSION) return;
    char path[1024];
    expand(file, path, sizeof path);
    FILE *opened = fopen(path, "we");
    if (opened != NULL) output = opened;
}

/* --- lines ------------------------------------------------------------------------------------ */

/* With the lock held; one write, so that lines of several ranks do not mix. */
static void put(const char *line) {
    fputs(line, output);
    fflush(output);
}

static void name_thread(char *text, size_t size, int device) {
    snprintf(text, size, "%s:%d:%ld [%d]", host, getpid(), syscall(SYS_gettid), device);
}

void nccl_info(enum subsystem subsystem, int device, const char *text, ...) {
    pthread_mutex_lock(&lock);
    if (!is_read) read_environment();
    if (level >= INFO && (subsystems & subsystem) != 0) {
        char line[2048], message[1024], thread[128];
        va_list arguments;
        va_start(arguments, text);
        vsnprintf(message, sizeof message, text, arguments);
        va_end(arguments);
        name_thread(thread, sizeof thread, device);
        snprintf(line, sizeof line, "%s NCCL INFO %s\n", thread, message);
        put(line);
    }
    pthread_mutex_unlock(&lock);
}

void nccl_warn(int device, const char *place, const char *text, ...) {
    pthread_mutex_lock(&lock);
    if (!is_read) read_environment();
    va_list arguments;
    va_start(arguments, text);
    vsnprintf(last_error, sizeof last_error, text, arguments);
    va_end(arguments);
    if (level >= WARN) {
        char line[2048], thread[128], at[32];
        time_t now = time(NULL);
        struct tm local;
        strftime(at, sizeof at, "%F %T", localtime_r(&now, &local));
        name_thread(thread, sizeof thread, device);
        snprintf(line, sizeof line, "\n[%s] %s %s NCCL WARN %s\n", at, thread, place, last_error);
        put(line);
    }
    pthread_mutex_unlock(&lock);
    log_event("nccl-warn", "%s", last_error);
}

ncclResult_t nccl_passed(int device, const char *place, ncclResult_t result) {
    nccl_info(LOG_ALL, device, "%s -> %d", place, result);
    return result;
}

API const char *ncclGetLastError(ncclComm_t comm) {
    (void)comm; /* NCCL keeps one for the process */
    return last_error;
}

/* Texts are NCCL's: signatures of logs look for them. */
API const char *ncclGetErrorString(ncclResult_t result) {
    switch (result) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError:
        return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError:
        return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument: return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInProgress: return "NCCL operation in progress";
    case ncclTimeout: return "timeout";
    }
    return "unknown result code";
}

/* --- version ---------------------------------------------------------------------------------- */

int nccl_version(void) {
    const char *set = getenv("FAKEGPU_NCCL_VERSION");
    return set != NULL && *set != '\0' ? atoi(set) : 22907; /* 2.29.7, which torch 2.13 asks for */
}

void nccl_show_version(int device) {
    int version = nccl_version();
    char text[64];
    snprintf(text, sizeof text, "NCCL version %d.%d.%d+cuda13.0", version / 10000,
             version / 100 % 100, version % 100);
    pthread_mutex_lock(&lock);
    if (!is_read) read_environment();
    bool is_alone = !version_shown && (level == VERSION || level == WARN);
    bool is_info = !version_shown && level >= INFO;
    version_shown = true;
    if (is_alone) {
        put(text);
        put("\n");
    }
    pthread_mutex_unlock(&lock);
    if (is_info) nccl_info(LOG_ALL, device, "%s", text);
}

API ncclResult_t ncclGetVersion(int *version) {
    *version = nccl_version();
    return ncclSuccess;
}
