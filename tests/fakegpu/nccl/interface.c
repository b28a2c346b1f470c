/* The network interface that bootstrap uses, as NCCL_SOCKET_IFNAME has it. */
#include "nccl/internal.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* "eth,ib0" are prefixes, "=eth0" is a name, "^docker" excludes: one sign for the whole list. */
static bool is_listed(const char *name, const char *list, bool is_exact) {
    char *copy = strdup(list), *rest = NULL;
    bool found = false;
    for (char *each = strtok_r(copy, ",", &rest); each; each = strtok_r(NULL, ",", &rest))
        found = found || (is_exact ? strcmp(name, each) == 0
                                   : strncmp(name, each, strlen(each)) == 0);
    free(copy);
    return found;
}

static bool allowed(const char *name, const char *setting) {
    bool is_excluding = *setting == '^';
    setting += is_excluding;
    bool is_exact = *setting == '=';
    setting += is_exact;
    return is_listed(name, setting, is_exact) != is_excluding;
}

/* The first allowed one with an address; `loopback`: among those of loopback. */
static bool find(const struct ifaddrs *all, const char *setting, bool loopback,
                 struct interface *found) {
    for (const struct ifaddrs *each = all; each != NULL; each = each->ifa_next) {
        if (each->ifa_addr == NULL || each->ifa_addr->sa_family != AF_INET) continue;
        if (((each->ifa_flags & IFF_LOOPBACK) != 0) != loopback) continue;
        if (setting != NULL && !allowed(each->ifa_name, setting)) continue;
        const struct sockaddr_in *address = (const struct sockaddr_in *)each->ifa_addr;
        snprintf(found->name, sizeof found->name, "%s", each->ifa_name);
        inet_ntop(AF_INET, &address->sin_addr, found->address, sizeof found->address);
        return true;
    }
    return false;
}

bool interface_find(struct interface *found) {
    struct ifaddrs *all;
    if (getifaddrs(&all) != 0) return false;
    const char *setting = getenv("NCCL_SOCKET_IFNAME");
    if (setting != NULL && *setting == '\0') setting = NULL;
    bool is_found = find(all, setting, false, found) || find(all, setting, true, found);
    freeifaddrs(all);
    return is_found;
}
