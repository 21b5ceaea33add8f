/* A stand-in for libnvidia-ml.so.1: a host of H100s whose state lies in a file.
 *
 * The file named by NVML_STUB_STATE is read again on every call, so that a test can break a card, take it away
 * or give it back while somebody watches. It holds one flat JSON object; keys of one card begin with its number:
 *
 *   count, init_error, topology ("switch", "pairs" or "none"), driver
 *   N.uuid, N.name, N.total_mib, N.used_mib, N.error, N.delay_ms, N.processes, N.slices
 *
 * `error` is what every call about that card returns (15: the GPU is lost), `delay_ms` how long it takes to.
 *
 *   gcc -shared -fPIC -Wl,-soname,libnvidia-ml.so.1 -o libnvidia-ml.so.1 nvml_stub.c
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, VERSION_MISMATCH = 25
};
enum { MOST_CARDS = 16, MOST_SLICES = 7, LINKS_OF_SWITCH = 18, LINKS_OF_PAIR = 12 };
enum { REMOTE_IS_GPU = 0, REMOTE_IS_SWITCH = 2 };

typedef int nvmlReturn;
typedef unsigned long long bytes;
/* A card, or one of its slices (slice >= 0). */
typedef struct device { int card; int slice; } *nvmlDevice;

static struct device cards[MOST_CARDS];
static struct device slices[MOST_CARDS][MOST_SLICES];
static int initialized;

/* The text behind "key": in the state file, in `buffer`; NULL where there is none. */
static const char *state_of(const char *key, char *buffer, size_t size) {
    const char *path = getenv("NVML_STUB_STATE");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return NULL;
    ssize_t length = read(file, buffer, size - 1);
    close(file);
    if (length < 0) return NULL;
    buffer[length] = 0;
    char quoted[80];
    snprintf(quoted, sizeof quoted, "\"%s\"", key);
    char *found = strstr(buffer, quoted);
    if (!found) return NULL;
    found += strlen(quoted);
    return found + strspn(found, " :");
}

static long number(const char *key, long otherwise) {
    char buffer[8192];
    const char *found = state_of(key, buffer, sizeof buffer);
    return found ? strtol(found, NULL, 0) : otherwise;
}

static void text(const char *key, const char *otherwise, char *out, unsigned size) {
    char buffer[8192];
    const char *found = state_of(key, buffer, sizeof buffer);
    if (found && *found == '"')
        snprintf(out, size, "%.*s", (int)strcspn(found + 1, "\""), found + 1);
    else
        snprintf(out, size, "%s", otherwise);
}

static long card_number(int card, const char *what, long otherwise) {
    char key[64];
    snprintf(key, sizeof key, "%d.%s", card, what);
    return number(key, otherwise);
}

static void card_text(int card, const char *what, const char *otherwise, char *out, unsigned size) {
    char key[64];
    snprintf(key, sizeof key, "%d.%s", card, what);
    text(key, otherwise, out, size);
}

/* What every call about a device comes through: the hang and the fault that the file asks for. */
static nvmlReturn gate(nvmlDevice device) {
    if (!initialized) return UNINITIALIZED;
    if (!device) return INVALID_ARGUMENT;
    long delay = card_number(device->card, "delay_ms", 0);
    if (delay) usleep((useconds_t)delay * 1000);
    return (nvmlReturn)card_number(device->card, "error", SUCCESS);
}

#define THROUGH_GATE(device) { nvmlReturn refused = gate(device); if (refused) return refused; }

static int topology_is(const char *word) {
    char found[16];
    text("topology", "switch", found, sizeof found);
    return strcmp(found, word) == 0;
}

nvmlReturn nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    nvmlReturn refused = (nvmlReturn)number("init_error", SUCCESS);
    if (refused) return refused;
    for (int card = 0; card < MOST_CARDS; card++) {
        cards[card] = (struct device){ card, -1 };
        for (int slice = 0; slice < MOST_SLICES; slice++) slices[card][slice] = (struct device){ card, slice };
    }
    initialized = 1;
    return SUCCESS;
}

nvmlReturn nvmlShutdown(void) { initialized = 0; return SUCCESS; }

const char *nvmlErrorString(nvmlReturn code) { (void)code; return "an error of the stub"; }

nvmlReturn nvmlSystemGetDriverVersion(char *out, unsigned size) {
    if (!initialized) return UNINITIALIZED;
    text("driver", "550.127.05", out, size);
    return SUCCESS;
}

nvmlReturn nvmlDeviceGetCount_v2(unsigned *count) {
    if (!initialized) return UNINITIALIZED;
    *count = (unsigned)number("count", 4);
    return SUCCESS;
}

nvmlReturn nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice *out) {
    if (!initialized) return UNINITIALIZED;
    if (index >= (unsigned)number("count", 4)) return INVALID_ARGUMENT;
    *out = &cards[index];
    return SUCCESS;
}

nvmlReturn nvmlDeviceGetName(nvmlDevice device, char *out, unsigned size) {
    THROUGH_GATE(device)
    card_text(device->card, "name", "NVIDIA H100 80GB HBM3", out, size);
    return SUCCESS;
}

nvmlReturn nvmlDeviceGetUUID(nvmlDevice device, char *out, unsigned size) {
    THROUGH_GATE(device)
    char usual[64];
    if (device->slice >= 0) {
        snprintf(out, size, "MIG-%08x-0000-4000-8000-00000000000%x", device->card, device->slice);
        return SUCCESS;
    }
    snprintf(usual, sizeof usual, "GPU-%08x-0000-4000-8000-000000000000", device->card);
    card_text(device->card, "uuid", usual, out, size);
    return SUCCESS;
}

static bytes total_bytes(nvmlDevice device) {
    bytes whole = (bytes)card_number(device->card, "total_mib", 81559) << 20;
    return device->slice < 0 ? whole : whole / 2;
}

struct memory_v1 { bytes total, free, used; };
struct memory_v2 { unsigned version; bytes total, reserved, free, used; };
enum { MEMORY_V2 = 0x02000028 };

nvmlReturn nvmlDeviceGetMemoryInfo(nvmlDevice device, struct memory_v1 *out) {
    THROUGH_GATE(device)
    bytes used = (bytes)card_number(device->card, "used_mib", 4) << 20;
    *out = (struct memory_v1){ total_bytes(device), total_bytes(device) - used, used };
    return SUCCESS;
}

nvmlReturn nvmlDeviceGetMemoryInfo_v2(nvmlDevice device, struct memory_v2 *out) {
    if (card_number(device ? device->card : 0, "is_old", 0)) return NOT_SUPPORTED;
    if (out->version != MEMORY_V2) return VERSION_MISMATCH;
    THROUGH_GATE(device)
    out->total = total_bytes(device);
    out->reserved = (bytes)551 << 20;
    out->used = (bytes)card_number(device->card, "used_mib", 4) << 20;
    out->free = out->total - out->reserved - out->used;
    return SUCCESS;
}

nvmlReturn nvmlDeviceGetCudaComputeCapability(nvmlDevice device, int *major, int *minor) {
    THROUGH_GATE(device)
    *major = 9;
    *minor = 0;
    return SUCCESS;
}

struct process { unsigned pid; bytes memory; unsigned instance, compute_instance; };

nvmlReturn nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice device, unsigned *count, struct process *out) {
    THROUGH_GATE(device)
    unsigned there = (unsigned)card_number(device->card, "processes", 0), room = *count;
    *count = there;
    if (there > room) return INSUFFICIENT_SIZE;
    for (unsigned one = 0; one < there; one++) out[one] = (struct process){ 1000 + one, 0, ~0u, ~0u };
    return SUCCESS;
}

struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };

static void fill_pci(struct pci *out, const char *prefix, int number_on_bus) {
    memset(out, 0, sizeof *out);
    out->bus = (unsigned)number_on_bus;
    snprintf(out->bus_id, sizeof out->bus_id, "%s:%02X:00.0", prefix, number_on_bus);
}

nvmlReturn nvmlDeviceGetPciInfo_v3(nvmlDevice device, struct pci *out) {
    THROUGH_GATE(device)
    fill_pci(out, "00000000", 0x18 + device->card);
    return SUCCESS;
}

/* Links: eighteen to a switch, or twelve to the card beside it. */

static unsigned link_count(void) {
    return topology_is("switch") ? LINKS_OF_SWITCH : topology_is("pairs") ? LINKS_OF_PAIR : 0;
}

nvmlReturn nvmlDeviceGetNvLinkState(nvmlDevice device, unsigned link, unsigned *is_active) {
    THROUGH_GATE(device)
    if (link_count() == 0) return NOT_SUPPORTED;
    if (link >= link_count()) return INVALID_ARGUMENT;
    *is_active = 1;
    return SUCCESS;
}

nvmlReturn nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice device, unsigned link, unsigned *type) {
    THROUGH_GATE(device)
    if (link >= link_count()) return INVALID_ARGUMENT;
    *type = topology_is("switch") ? REMOTE_IS_SWITCH : REMOTE_IS_GPU;
    return SUCCESS;
}

nvmlReturn nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice device, unsigned link, struct pci *out) {
    THROUGH_GATE(device)
    if (link >= link_count()) return INVALID_ARGUMENT;
    if (topology_is("switch"))
        fill_pci(out, "00000000", 0xC0 + (int)link % 4);
    else
        fill_pci(out, "00000000", 0x18 + (device->card ^ 1));
    return SUCCESS;
}

/* Slices (MIG): a card that is cut up has `slices` of them, of half its memory each. */

nvmlReturn nvmlDeviceGetMigMode(nvmlDevice device, unsigned *current, unsigned *pending) {
    THROUGH_GATE(device)
    *current = *pending = card_number(device->card, "slices", -1) >= 0;
    return SUCCESS;
}

nvmlReturn nvmlDeviceGetMaxMigDeviceCount(nvmlDevice device, unsigned *count) {
    THROUGH_GATE(device)
    *count = MOST_SLICES;
    return SUCCESS;
}

nvmlReturn nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice device, unsigned index, nvmlDevice *out) {
    THROUGH_GATE(device)
    if ((long)index >= card_number(device->card, "slices", 0)) return NOT_FOUND;
    *out = &slices[device->card][index];
    return SUCCESS;
}
