/* Faults that a test has asked for, by FAKEGPU_RULES (rules separated by ";") and by the control
 * file (one a line). README.md has the language. */
#include "fakegpu.h"

#include <fnmatch.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

struct rule {
    struct rule *next;
    uint64_t
        identity; /* of its text: a rule that is still there after a change has gone on counting */
    char point[96];
    char thread[16];           /* "": any */
    int rank, comm_rank;       /* -1: any */
    unsigned long first, last; /* passings of the point to which it applies */
    unsigned long times, applied;
    struct fault fault;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct rule *rules;
static unsigned long generation;

/* Counts of the parent are none of the child's. */
static void forget(void) {
    pthread_mutex_init(&lock, NULL);
    rules = NULL;
    generation = 0;
}

__attribute__((constructor)) static void forget_in_children(void) {
    pthread_atfork(NULL, NULL, forget);
}

/* --- reading ---------------------------------------------------------------------------------- */

static uint64_t identity_of(const char *text) {
    uint64_t hash = 14695981039346656037u; /* FNV-1a */
    for (; *text != '\0'; text++) hash = (hash ^ (unsigned char)*text) * 1099511628211u;
    return hash | 1;
}

static unsigned long whole(const char *text, const char *word, char **end) {
    unsigned long value = strtoul(text, end, 10);
    if (*end == text) fatal("rule: %s: not a number", word);
    return value;
}

static int index_of(const char *text, const char *word) {
    char *end;
    unsigned long value = whole(text, word, &end);
    if (*end != '\0' || value > INT_MAX) fatal("rule: %s: not a number", word);
    return (int)value;
}

/* "3", "3-" (from there on) or "3-5". */
static void read_passings(struct rule *rule, const char *text, const char *word) {
    char *end;
    rule->first = rule->last = whole(text, word, &end);
    if (*end == '-') {
        end++;
        rule->last = ULONG_MAX;
        if (*end != '\0') rule->last = whole(end, word, &end);
    }
    if (*end != '\0' || rule->first == 0 || rule->last < rule->first)
        fatal("rule: %s: write nth=3, nth=3- or nth=3-5", word);
}

static void read_error(struct rule *rule, const char *text) {
    char *end;
    long value = strtol(text, &end, 10);
    rule->fault.error = *end == '\0' && end != text ? (int)value : error_number(text);
    if (rule->fault.error <= 0) fatal("rule: error=%s: no error of CUDA, NCCL or NVML", text);
}

static void read_delay(struct rule *rule, const char *text) {
    char *end;
    rule->fault.delay_s = strtod(text, &end);
    if (end == text || *end != '\0' || rule->fault.delay_s < 0)
        fatal("rule: delay=%s: not a number of seconds", text);
}

static void read_point(struct rule *rule, const char *word) {
    snprintf(rule->point, sizeof rule->point, "%s", word);
    /* A rule for a function that does not exist would never apply, and its test could not fail. */
    if (strpbrk(word, ":*?[") == NULL && own_symbol(word) == NULL)
        fatal("rule: %s: no function of this name", word);
}

static void read_word(struct rule *rule, char *word) {
    const char *value = strchr(word, '=');
    size_t length = value != NULL ? (size_t)(value - word) : strlen(word);
    value = value != NULL ? value + 1 : "";
#define IS(key) (length == strlen(key) && strncmp(word, key, length) == 0)
    if (IS("rank")) rule->rank = index_of(value, word);
    else if (IS("comm_rank")) rule->comm_rank = index_of(value, word);
    else if (IS("thread")) snprintf(rule->thread, sizeof rule->thread, "%s", value);
    else if (IS("nth")) read_passings(rule, value, word);
    else if (IS("times")) rule->times = (unsigned long)index_of(value, word);
    else if (IS("error")) read_error(rule, value);
    else if (IS("delay")) read_delay(rule, value);
    else if (IS("hang") && *value == '\0') rule->fault.hang = HANG;
    else if (IS("hang") && strcmp(value, "forever") == 0) rule->fault.hang = HANG_FOREVER;
    else fatal("rule: %s: unknown; README.md of the fake GPU has the language", word);
#undef IS
}

static struct rule *read_rule(char *text) {
    struct rule *rule = calloc(1, sizeof *rule);
    rule->rank = rule->comm_rank = -1;
    rule->first = 1;
    rule->last = rule->times = ULONG_MAX;
    rule->fault.rule = rule->identity = identity_of(text);
    char *rest = NULL;
    for (char *word = strtok_r(text, " \t\r", &rest); word; word = strtok_r(NULL, " \t\r", &rest))
        if (rule->point[0] == '\0') read_point(rule, word);
        else read_word(rule, word);
    if (rule->fault.error == 0 && rule->fault.delay_s == 0 && rule->fault.hang == NO_HANG)
        fatal("rule: %s: write what happens: error=NAME, delay=SECONDS or hang", rule->point);
    return rule;
}

/* Lines for NVML ("gpu ...") and comments are not for us. */
static bool is_rule(const char *text) {
    text += strspn(text, " \t\r");
    return *text != '\0' && *text != '#' && strncmp(text, "gpu ", 4) != 0;
}

static void read_rules(const char *text, struct rule ***end) {
    char *copy = strdup(text), *rest = NULL;
    for (char *line = strtok_r(copy, ";\n", &rest); line; line = strtok_r(NULL, ";\n", &rest)) {
        if (!is_rule(line)) continue;
        **end = read_rule(line);
        *end = &(**end)->next;
    }
    free(copy);
}

static void keep_count(struct rule *rule, const struct rule *before) {
    for (; before != NULL; before = before->next)
        if (before->identity == rule->identity) rule->applied = before->applied;
}

/* With the lock held. */
static void refresh(void) {
    char *control = control_text(&generation);
    if (control == NULL) return;
    struct rule *before = rules, **end = &rules;
    rules = NULL;
    read_rules(settings()->rules, &end);
    read_rules(control, &end);
    free(control);
    for (struct rule *rule = rules; rule != NULL; rule = rule->next) keep_count(rule, before);
    while (before != NULL) {
        struct rule *next = before->next;
        free(before);
        before = next;
    }
}

/* --- asking ----------------------------------------------------------------------------------- */

static bool runs_in_thread(const char *name) {
    char own[16] = "";
    prctl(PR_GET_NAME, own);
    return strcmp(own, name) == 0;
}

static bool applies(const struct rule *rule, const char *point, unsigned long passing,
                    int comm_rank) {
    return passing >= rule->first && passing <= rule->last && rule->applied < rule->times &&
           (rule->rank < 0 || rule->rank == settings()->rank) &&
           (rule->comm_rank < 0 || rule->comm_rank == comm_rank) &&
           fnmatch(rule->point, point, 0) == 0 &&
           (rule->thread[0] == '\0' || runs_in_thread(rule->thread));
}

struct fault rules_match(struct point *point, int comm_rank) {
    struct fault found = {0};
    unsigned long passing = atomic_fetch_add(&point->passings, 1) + 1;
    pthread_mutex_lock(&lock);
    refresh();
    for (struct rule *rule = rules; rule != NULL && found.rule == 0; rule = rule->next)
        if (applies(rule, point->name, passing, comm_rank)) {
            rule->applied++;
            found = rule->fault;
        }
    pthread_mutex_unlock(&lock);
    if (found.rule != 0)
        log_event("fault", "point=%s passing=%lu comm_rank=%d error=%d delay=%g hang=%d",
                  point->name, passing, comm_rank, found.error, found.delay_s, found.hang);
    return found;
}

bool rules_in_force(const struct fault *fault) {
    pthread_mutex_lock(&lock);
    refresh();
    const struct rule *rule = rules;
    while (rule != NULL && rule->identity != fault->rule) rule = rule->next;
    pthread_mutex_unlock(&lock);
    return rule != NULL;
}

static bool holds(const struct fault *fault, double since, const atomic_bool *given_up) {
    if (fault->hang == HANG_FOREVER) return true;
    if (given_up != NULL && atomic_load(given_up)) return false;
    return seconds_now() < since + fault->delay_s || (fault->hang == HANG && rules_in_force(fault));
}

int rules_suffer(struct point *point, int comm_rank, const atomic_bool *given_up) {
    struct fault fault = rules_match(point, comm_rank);
    if (fault.rule == 0) return 0;
    double since = seconds_now();
    /* A file that changes and a flag that another thread sets announce nothing. */
    while (holds(&fault, since, given_up)) nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    return fault.error;
}
