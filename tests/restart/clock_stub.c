/* Shifts the wall clock of the processes that it is preloaded into, as an operator or NTP does that
 * sets it: CLOCK_REALTIME is ahead by the seconds in the file that CLOCK_STUB_FILE names, and right
 * while there is no such file. A time namespace shifts monotonic clocks only.
 *
 * Python's locks wait by that clock, as they do where it was built for a glibc before 2.30.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static time_t ahead_s(void) {
    const char *path = getenv("CLOCK_STUB_FILE");
    char text[32];
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) return 0;
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    if (length < 0) length = 0;
    text[length] = 0;
    return atol(text);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += ahead_s();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int failed = (int)syscall(SYS_gettimeofday, now, zone);
    if (!failed) now->tv_sec += ahead_s();
    return failed;
}

time_t time(time_t *now) {
    struct timespec read;
    clock_gettime(CLOCK_REALTIME, &read);
    if (now) *now = read.tv_sec;
    return read.tv_sec;
}

int sem_clockwait(sem_t *restrict semaphore, clockid_t clock, const struct timespec *restrict until) {
    const struct timespec slice = {0, 5 * 1000 * 1000};
    const time_t began_ahead_s = ahead_s();
    while (sem_trywait(semaphore)) {
        struct timespec now;
        syscall(SYS_clock_gettime, clock, &now);
        now.tv_sec += ahead_s() - began_ahead_s;
        if (now.tv_sec > until->tv_sec || (now.tv_sec == until->tv_sec && now.tv_nsec >= until->tv_nsec)) {
            errno = ETIMEDOUT;
            return -1;
        }
        nanosleep(&slice, NULL);
    }
    return 0;
}
