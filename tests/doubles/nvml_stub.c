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
 * What a sample reads:
 *
 *   N.utilization (%), N.temperature, N.power_mw, N.power_limit_mw, N.sm_clock, N.max_sm_clock, N.throttle (bits),
 *   N.ecc, N.tensor, N.dram (%), N.pcie_mib, N.nvlink_mib (per second and direction),
 *   N.pcie_counter, N.nvlink_counter (bytes, KiB), N.counted_at (microseconds of both),
 *   N.xid, N.xids (the error, and how many of it there were), N.lacks (words: what is not supported),
 *   N.sample_delay_ms (samples hang, scans do not)
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
    INSUFFICIENT_SIZE = 7, TIMEOUT = 10, VERSION_MISMATCH = 25
};
enum { STATE_BYTES = 32768, MOST_CARDS = 16, MOST_SLICES = 7, LINKS_OF_SWITCH = 18, LINKS_OF_PAIR = 12 };
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
    char buffer[STATE_BYTES];
    const char *found = state_of(key, buffer, sizeof buffer);
    return found ? strtol(found, NULL, 0) : otherwise;
}

static void text(const char *key, const char *otherwise, char *out, unsigned size) {
    char buffer[STATE_BYTES];
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

nvmlReturn nvmlDeviceGetGpuInstanceId(nvmlDevice device, unsigned *out) {
    THROUGH_GATE(device)
    if (device->slice < 0) return NOT_SUPPORTED;
    *out = (unsigned)device->slice + 1;
    return SUCCESS;
}

/* Samples. Each call can be taken from a card by its word in `lacks`. */

static int lacks(nvmlDevice device, const char *word) {
    char words[256];
    card_text(device->card, "lacks", "", words, sizeof words);
    return strstr(words, word) != NULL;
}

static nvmlReturn sample_gate(nvmlDevice device, const char *word) {
    THROUGH_GATE(device)
    long delay = card_number(device->card, "sample_delay_ms", 0);
    if (delay) usleep((useconds_t)delay * 1000);
    return lacks(device, word) ? NOT_SUPPORTED : SUCCESS;
}

#define MEASURED(device, word, target, otherwise) { \
    nvmlReturn refused = sample_gate(device, word); \
    if (refused) return refused; \
    *(target) = (unsigned)card_number((device)->card, word, otherwise); \
    return SUCCESS; \
}

struct utilization { unsigned gpu, memory; };

nvmlReturn nvmlDeviceGetUtilizationRates(nvmlDevice device, struct utilization *out) {
    out->memory = 0;
    if (device && device->slice >= 0) return NOT_SUPPORTED;
    MEASURED(device, "utilization", &out->gpu, 0)
}

nvmlReturn nvmlDeviceGetTemperature(nvmlDevice device, unsigned sensor, unsigned *out) {
    (void)sensor;
    MEASURED(device, "temperature", out, 30)
}

nvmlReturn nvmlDeviceGetPowerUsage(nvmlDevice device, unsigned *out) { MEASURED(device, "power_mw", out, 70000) }

nvmlReturn nvmlDeviceGetEnforcedPowerLimit(nvmlDevice device, unsigned *out) {
    MEASURED(device, "power_limit_mw", out, 700000)
}

nvmlReturn nvmlDeviceGetClockInfo(nvmlDevice device, unsigned kind, unsigned *out) {
    (void)kind;
    MEASURED(device, "sm_clock", out, 345)
}

nvmlReturn nvmlDeviceGetMaxClockInfo(nvmlDevice device, unsigned kind, unsigned *out) {
    (void)kind;
    MEASURED(device, "max_sm_clock", out, 1980)
}

nvmlReturn nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice device, bytes *out) {
    MEASURED(device, "throttle", out, 1) /* idle */
}

nvmlReturn nvmlDeviceGetTotalEccErrors(nvmlDevice device, unsigned type, unsigned counter, bytes *out) {
    (void)type;
    (void)counter;
    MEASURED(device, "ecc", out, 0)
}

nvmlReturn nvmlDeviceGetPcieThroughput(nvmlDevice device, unsigned counter, unsigned *out) {
    (void)counter;
    MEASURED(device, "pcie_now", out, 0) /* KiB per second */
}

union value { double real; unsigned whole; bytes large; };
struct field { unsigned id, scope; long long at, latency; unsigned type; nvmlReturn result; union value value; };
enum { NVLINK_TX = 138, NVLINK_RX = 139, PCIE_TX = 197, PCIE_RX = 198, LARGE = 3 };

nvmlReturn nvmlDeviceGetFieldValues(nvmlDevice device, int count, struct field *out) {
    THROUGH_GATE(device)
    for (int one = 0; one < count; one++) {
        int is_pcie = out[one].id == PCIE_TX || out[one].id == PCIE_RX;
        const char *word = is_pcie ? "pcie_counter" : "nvlink_counter";
        out[one].result = lacks(device, word) ? NOT_SUPPORTED : SUCCESS;
        out[one].type = LARGE;
        out[one].value.large = (bytes)card_number(device->card, word, 0);
        out[one].at = card_number(device->card, "counted_at", 0);
    }
    return SUCCESS;
}

/* GPM: a sample remembers its card; the metrics are those of the file when two samples are compared. */

typedef struct gpm_sample { nvmlDevice device; } *gpmSample;
struct gpm_info { char *short_name, *long_name, *unit; };
struct gpm_metric { unsigned id; nvmlReturn result; double value; struct gpm_info info; };
struct gpm_metrics { unsigned version, count; gpmSample first, second; struct gpm_metric metrics[]; };
struct gpm_support { unsigned version, is_supported; };

nvmlReturn nvmlGpmQueryDeviceSupport(nvmlDevice device, struct gpm_support *out) {
    THROUGH_GATE(device)
    out->is_supported = !lacks(device, "gpm");
    return SUCCESS;
}

nvmlReturn nvmlGpmSampleAlloc(gpmSample *out) {
    *out = calloc(1, sizeof **out);
    return SUCCESS;
}

nvmlReturn nvmlGpmSampleFree(gpmSample sample) {
    free(sample);
    return SUCCESS;
}

nvmlReturn nvmlGpmSampleGet(nvmlDevice device, gpmSample sample) {
    THROUGH_GATE(device)
    sample->device = device;
    return SUCCESS;
}

nvmlReturn nvmlGpmMigSampleGet(nvmlDevice device, unsigned instance, gpmSample sample) {
    THROUGH_GATE(device)
    sample->device = &slices[device->card][instance - 1];
    return SUCCESS;
}

nvmlReturn nvmlGpmMetricsGet(struct gpm_metrics *asked) {
    if (!asked->first->device || asked->first->device != asked->second->device) return INVALID_ARGUMENT;
    nvmlDevice device = asked->second->device;
    for (unsigned one = 0; one < asked->count; one++) {
        unsigned id = asked->metrics[one].id;
        const char *word = id == 1 ? "utilization" : id == 5 ? "tensor" : id == 10 ? "dram"
            : id == 20 || id == 21 ? "pcie_mib" : "nvlink_mib";
        asked->metrics[one].result = lacks(device, word) ? NOT_SUPPORTED : SUCCESS;
        asked->metrics[one].value = (double)card_number(device->card, word, 0);
    }
    return SUCCESS;
}

/* Events: `xids` counts the errors of a card; those from before the registration are old. */

typedef struct event_set { int is_watched[MOST_CARDS]; long told[MOST_CARDS]; } *eventSet;
struct event { nvmlDevice device; bytes type, data; unsigned instance, compute_instance; };
enum { XID = 8 };

nvmlReturn nvmlEventSetCreate(eventSet *out) {
    *out = calloc(1, sizeof **out);
    return SUCCESS;
}

nvmlReturn nvmlEventSetFree(eventSet set) {
    free(set);
    return SUCCESS;
}

nvmlReturn nvmlDeviceRegisterEvents(nvmlDevice device, bytes types, eventSet set) {
    THROUGH_GATE(device)
    if (lacks(device, "events") || types != XID) return NOT_SUPPORTED;
    set->is_watched[device->card] = 1;
    set->told[device->card] = card_number(device->card, "xids", 0);
    return SUCCESS;
}

nvmlReturn nvmlEventSetWait_v2(eventSet set, struct event *out, unsigned timeout) {
    (void)timeout;
    for (int card = 0; card < MOST_CARDS; card++) {
        if (!set->is_watched[card] || set->told[card] >= card_number(card, "xids", 0)) continue;
        set->told[card]++;
        *out = (struct event){ &cards[card], XID, (bytes)card_number(card, "xid", 79), ~0u, ~0u };
        return SUCCESS;
    }
    return TIMEOUT;
}
