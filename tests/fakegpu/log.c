/* The log that tests read, and the end of a process whose test has made a mistake. */
#include "fakegpu.h"

#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

void log_event(const char *event, const char *fields, ...) {
    const char *path = settings()->log_file;
    if (path == NULL) return;
    char line[1024];
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    int length = snprintf(line, sizeof line, "%ld.%06ld rank=%d pid=%d %s ", (long)now.tv_sec,
                          now.tv_nsec / 1000, settings()->rank, getpid(), event);
    va_list arguments;
    va_start(arguments, fields);
    length += vsnprintf(line + length, sizeof line - (size_t)length, fields, arguments);
    va_end(arguments);
    if (length > (int)sizeof line - 1) length = (int)sizeof line - 1;
    line[length] = '\n';
    /* Opened each time: nothing is left open that a fork or a restart would have to close, and one
     * write at the end of a file is never mixed with another. */
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (file < 0) return;
    if (write(file, line, (size_t)length + 1) < 0) { /* a full disk: the log ends here */
    }
    close(file);
}

void fatal(const char *problem, ...) {
    va_list arguments;
    va_start(arguments, problem);
    fputs("fakegpu: ", stderr);
    vfprintf(stderr, problem, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    abort();
}
