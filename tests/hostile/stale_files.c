/* A file system that has failed: below STALE_BELOW nothing is found, opened, read or written any more (ESTALE)
 * once the file exists that STALE_ONCE names. In the processes that it is preloaded into.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static int is_stale(const char *path) {
    const char *below = getenv("STALE_BELOW"), *once = getenv("STALE_ONCE");
    if (!below || !once || !path || strncmp(path, below, strlen(below)) != 0) return 0;
    if (syscall(SYS_access, once, F_OK) != 0) return 0;
    errno = ESTALE;
    return 1;
}

static int is_stale_fd(int fd) {
    char name[32], path[4096];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    int before = errno;
    ssize_t length = syscall(SYS_readlink, name, path, sizeof path - 1);
    errno = before;
    if (length < 0) return 0;
    path[length] = 0;
    return is_stale(path);
}

int stat64(const char *restrict path, struct stat64 *restrict found) {
    return is_stale(path) ? -1 : (int)syscall(SYS_newfstatat, AT_FDCWD, path, found, 0);
}

int lstat64(const char *restrict path, struct stat64 *restrict found) {
    return is_stale(path) ? -1 : (int)syscall(SYS_newfstatat, AT_FDCWD, path, found, AT_SYMLINK_NOFOLLOW);
}

int fstatat64(int at, const char *restrict path, struct stat64 *restrict found, int flags) {
    return is_stale(path) ? -1 : (int)syscall(SYS_newfstatat, at, path, found, flags);
}

int fstat64(int fd, struct stat64 *found) {
    return is_stale_fd(fd) ? -1 : (int)syscall(SYS_fstat, fd, found);
}

ssize_t read(int fd, void *buffer, size_t size) {
    return is_stale_fd(fd) ? -1 : syscall(SYS_read, fd, buffer, size);
}

ssize_t write(int fd, const void *data, size_t size) {
    return is_stale_fd(fd) ? -1 : syscall(SYS_write, fd, data, size);
}

int open64(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    return is_stale(path) ? -1 : (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}
