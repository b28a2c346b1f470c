/* The state of each GPU as NVML shows it: that of a healthy, idle H200, and what lines "gpu N
 * NAME=VALUE" of the control file say otherwise (README.md has the names). */
#include "nvml_state.h"

#include "fakegpu.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct gpu_state states[MAX_DEVICES];
static unsigned long generation;

static void forget(void) {
    pthread_mutex_init(&lock, NULL);
    generation = 0;
}

__attribute__((constructor)) static void forget_in_children(void) {
    pthread_atfork(NULL, NULL, forget);
}

static const struct gpu_state healthy = {
    .temperature_c = 38,
    .memory_temperature_c = 45,
    .power_w = 120,
    .clock_mhz = 1980,
    .memory_clock_mhz = 3201,
    .pcie_width = 16,
    .pcie_generation = 5,
    .links = 0x3ffff,  /* 18 */
    .fabric_state = 3, /* NVML_GPU_FABRIC_STATE_COMPLETED */
};

/* --- reading ---------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    size_t offset;
} numbers[] = {
#define NUMBER(name) {#name, offsetof(struct gpu_state, name)}
    NUMBER(temperature_c),
    NUMBER(memory_temperature_c),
    NUMBER(power_w),
    NUMBER(clock_mhz),
    NUMBER(memory_clock_mhz),
    NUMBER(utilization_percent),
    NUMBER(memory_used_mib),
    NUMBER(throttle_reasons),
    NUMBER(pcie_width),
    NUMBER(pcie_generation),
    NUMBER(pcie_replays),
    NUMBER(ecc_corrected),
    NUMBER(ecc_uncorrected),
    NUMBER(rows_remapped),
    NUMBER(rows_pending),
    NUMBER(rows_failed),
    NUMBER(links),
    NUMBER(link_errors),
    NUMBER(fabric_state),
    NUMBER(fabric_status),
    NUMBER(fabric_health),
    NUMBER(recovery_action),
    NUMBER(lost),
#undef NUMBER
};

/* "79" or "31,79": each number is an event, in this order. */
static void read_xids(struct gpu_state *state, const char *text) {
    state->xid_count = 0;
    while (*text != '\0') {
        char *end;
        unsigned long xid = strtoul(text, &end, 10);
        if (end == text || state->xid_count == MAX_XIDS)
            fatal("control file: xid=%s: write xid=79 or xid=31,79, at most %d", text, MAX_XIDS);
        state->xids[state->xid_count++] = (unsigned)xid;
        text = *end == ',' ? end + 1 : end;
    }
}

static void read_word(struct gpu_state *state, char *word) {
    char *value = strchr(word, '=');
    if (value == NULL) fatal("control file: gpu: %s: write NAME=VALUE", word);
    *value++ = '\0';
    if (strcmp(word, "xid") == 0) {
        read_xids(state, value);
        return;
    }
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (strcmp(word, numbers[i].name) == 0) {
            char *end;
            unsigned long long number = strtoull(value, &end, 0);
            if (end == value || *end != '\0')
                fatal("control file: %s=%s: not a number", word, value);
            *(unsigned long long *)((char *)state + numbers[i].offset) = number;
            return;
        }
    fatal("control file: gpu: %s: unknown; README.md of the fake GPU has the names", word);
}

/* "gpu 3 temperature_c=95"; "gpu * ..." is all of them. */
static void read_line(char *line) {
    char *rest = NULL, *word = strtok_r(line, " \t\r", &rest);
    if (word == NULL || strcmp(word, "gpu") != 0) return;
    char *which = strtok_r(NULL, " \t\r", &rest);
    if (which == NULL) fatal("control file: gpu: write gpu NUMBER NAME=VALUE");
    bool all = strcmp(which, "*") == 0;
    int first = all ? 0 : atoi(which), last = all ? MAX_DEVICES - 1 : first;
    if (first < 0 || first >= MAX_DEVICES) fatal("control file: gpu %s: no such GPU", which);
    while ((word = strtok_r(NULL, " \t\r", &rest)) != NULL)
        for (int gpu = first; gpu <= last; gpu++) {
            char copy[256];
            snprintf(copy, sizeof copy, "%s", word);
            read_word(&states[gpu], copy);
        }
}

struct gpu_state gpu_state(int gpu) {
    pthread_mutex_lock(&lock);
    char *text = control_text(&generation), *rest = NULL;
    if (text != NULL) {
        for (int each = 0; each < MAX_DEVICES; each++) states[each] = healthy;
        for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest))
            read_line(line);
        free(text);
    }
    struct gpu_state state = states[gpu];
    pthread_mutex_unlock(&lock);
    return state;
}
