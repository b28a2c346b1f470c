/* The control file, which a test rewrites while the job runs: rules (rules.c) and the state of GPUs
 * as NVML shows it (nvml_state.c). */
#include "fakegpu.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned long version;
static struct stat seen;
static char *text;

static void unlock_in_child(void) { pthread_mutex_init(&lock, NULL); }

__attribute__((constructor)) static void prepare_fork(void) {
    pthread_atfork(NULL, NULL, unlock_in_child);
}

static bool same_file(const struct stat *a, const struct stat *b) {
    return a->st_ino == b->st_ino && a->st_size == b->st_size &&
           a->st_mtim.tv_sec == b->st_mtim.tv_sec && a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

static char *read_all(const char *path) {
    FILE *file = fopen(path, "re");
    if (file == NULL) return strdup("");
    char *content = NULL;
    size_t size = 0;
    FILE *memory = open_memstream(&content, &size);
    char part[4096];
    for (size_t got; (got = fread(part, 1, sizeof part, file)) > 0;) fwrite(part, 1, got, memory);
    fclose(memory);
    fclose(file);
    return content;
}

/* With the lock held. The file is to be replaced by renaming: a half-written one would be read. */
static void look(void) {
    const char *path = settings()->control_file;
    struct stat now = {0};
    if (path != NULL && stat(path, &now) != 0) memset(&now, 0, sizeof now);
    if (version > 0 && same_file(&now, &seen)) return;
    free(text);
    text = now.st_ino != 0 ? read_all(path) : strdup("");
    seen = now;
    version++;
}

char *control_text(unsigned long *generation) {
    pthread_mutex_lock(&lock);
    look();
    char *changed = version != *generation ? strdup(text) : NULL;
    *generation = version;
    pthread_mutex_unlock(&lock);
    return changed;
}
