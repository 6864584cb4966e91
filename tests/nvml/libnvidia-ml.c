/* A stand-in for NVIDIA's libnvidia-ml.so.1, for tests: it answers from the text file that the variable
 * STAND_IN_NVML names, read anew at each nvmlInit and each count. tests/nvml/machine.py writes that file:
 * one word and its values a line, `gpu` and `mig` begin a new device:
 *
 *   init 0 | driver 535.104.05 | cuda 12020
 *   gpu 1.. | uuid X | pci 00000000:07:00.0 | name X | memory TOTAL RESERVED USED | mode 0 | capability 9 0
 *   compute PID BYTES | graphics PID BYTES | utilization GPU MEMORY | temperature C | power MILLIWATTS LIMIT
 *   mig (a MIG instance of the last gpu; uuid, name, memory, compute follow) | migmode 1
 *   pstate 0 | ecc UNCORRECTED | cpus MASK | link PEER (an NVLink; PEER is a gpu's number, -1 a switch)
 *   number NAME VALUE (pcie_gen, pcie_gen_max, pcie_width, pcie_width_max, throttle, persistence, ecc_mode, bar1,
 *                      remapped, remap_pending, remap_failed, retired_pending, fabric_state, fabric_status)
 *   near PEER LEVEL (of the topology, 10 to 50; 30 unless told) | nopeer PEER (no peer-to-peer with it)
 *   fail WHAT CODE (WHAT: handle, uuid, name, pci, memory, memory_v2, compute, ..., or all)
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7 };
enum { MAX_GPUS = 32, MAX_MIGS = 8, MAX_PROCESSES = 32, MAX_FAILS = 16, MAX_LINKS = 18, MAX_NUMBERS = 24, WORDS = 96 };

typedef unsigned long long u64;
typedef struct { unsigned pid; u64 bytes; unsigned gpu_instance, compute_instance; } Process;
typedef struct { char what[WORDS]; int code; } Fail;
typedef struct { char name[WORDS]; u64 value; } Number;
typedef struct Device {
    int index; /* of the GPU, or of the instance in it */
    struct Device *parent, *migs[MAX_MIGS];
    int mig_count;
    char uuid[WORDS], pci[32], name[WORDS];
    u64 total, reserved, used;
    Process compute[MAX_PROCESSES], graphics[MAX_PROCESSES];
    int compute_count, graphics_count, mig_mode, fail_count, has_mig;
    unsigned mode, gpu_use, memory_use, temperature, power, power_limit;
    int major, minor, link_count, links[MAX_LINKS], near[MAX_GPUS], nopeer[MAX_GPUS];
    unsigned pstate;
    u64 ecc, cpus;
    int number_count;
    Number numbers[MAX_NUMBERS];
    Fail fails[MAX_FAILS];
} Device;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, sub_id; char bus_id[32]; } Pci;
typedef struct { u64 total, free, used; } Memory;
typedef struct { unsigned version; u64 total, reserved, free, used; } Memory2;
typedef struct { unsigned gpu, memory; } Utilization;

static Device gpus[MAX_GPUS], instances[MAX_GPUS * MAX_MIGS];
static int gpu_count, instance_count, init_code, cuda_version = 12020, started;
static char driver[WORDS] = "535.104.05";

static void add_process(Process *list, int *count, const char *values) {
    Process *one = &list[*count];
    if (*count < MAX_PROCESSES && sscanf(values, "%u %llu", &one->pid, &one->bytes) == 2) (*count)++;
    one->gpu_instance = one->compute_instance = 0xFFFFFFFF;
}

static Device *new_gpu(void) {
    Device *made = &gpus[gpu_count];
    memset(made, 0, sizeof *made);
    made->index = gpu_count++;
    return made;
}

static Device *new_instance(void) {
    Device *gpu = &gpus[gpu_count - 1], *made = &instances[instance_count++];
    memset(made, 0, sizeof *made);
    made->parent = gpu;
    made->index = gpu->mig_count;
    gpu->migs[gpu->mig_count++] = made;
    gpu->mig_mode = gpu->has_mig = 1;
    return made;
}

static void read_line(const char *word, const char *values, Device **here) {
    Device *d = *here;
    int peer, level;
    if (!strcmp(word, "init")) init_code = atoi(values);
    else if (!strcmp(word, "driver")) snprintf(driver, sizeof driver, "%s", values);
    else if (!strcmp(word, "cuda")) cuda_version = atoi(values);
    else if (!strcmp(word, "gpu")) *here = new_gpu();
    else if (d == NULL) return;
    else if (!strcmp(word, "mig")) *here = new_instance();
    else if (!strcmp(word, "uuid")) snprintf(d->uuid, WORDS, "%s", values);
    else if (!strcmp(word, "name")) snprintf(d->name, WORDS, "%s", values);
    else if (!strcmp(word, "pci")) snprintf(d->pci, 32, "%s", values);
    else if (!strcmp(word, "memory")) sscanf(values, "%llu %llu %llu", &d->total, &d->reserved, &d->used);
    else if (!strcmp(word, "compute")) add_process(d->compute, &d->compute_count, values);
    else if (!strcmp(word, "graphics")) add_process(d->graphics, &d->graphics_count, values);
    else if (!strcmp(word, "mode")) d->mode = (unsigned)atoi(values);
    else if (!strcmp(word, "migmode")) d->has_mig = 1, d->mig_mode = atoi(values);
    else if (!strcmp(word, "pstate")) d->pstate = (unsigned)atoi(values);
    else if (!strcmp(word, "ecc")) d->ecc = strtoull(values, NULL, 10);
    else if (!strcmp(word, "cpus")) d->cpus = strtoull(values, NULL, 0);
    else if (!strcmp(word, "link") && d->link_count < MAX_LINKS) d->links[d->link_count++] = atoi(values);
    else if (!strcmp(word, "near") && sscanf(values, "%d %d", &peer, &level) == 2) d->near[peer % MAX_GPUS] = level;
    else if (!strcmp(word, "nopeer")) d->nopeer[atoi(values) % MAX_GPUS] = 1;
    else if (!strcmp(word, "number") && d->number_count < MAX_NUMBERS &&
             sscanf(values, "%95s %llu", d->numbers[d->number_count].name, &d->numbers[d->number_count].value) == 2)
        d->number_count++;
    else if (!strcmp(word, "capability")) sscanf(values, "%d %d", &d->major, &d->minor);
    else if (!strcmp(word, "utilization")) sscanf(values, "%u %u", &d->gpu_use, &d->memory_use);
    else if (!strcmp(word, "temperature")) d->temperature = (unsigned)atoi(values);
    else if (!strcmp(word, "power")) sscanf(values, "%u %u", &d->power, &d->power_limit);
    else if (!strcmp(word, "fail") && d->fail_count < MAX_FAILS &&
             sscanf(values, "%95s %d", d->fails[d->fail_count].what, &d->fails[d->fail_count].code) == 2)
        d->fail_count++;
}

static void read_machine(void) {
    char line[512], word[64];
    const char *path = getenv("STAND_IN_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    Device *here = NULL;
    gpu_count = instance_count = init_code = 0;
    if (file == NULL) {
        init_code = 9; /* DRIVER_NOT_LOADED */
        return;
    }
    while (fgets(line, sizeof line, file)) {
        int used = 0;
        line[strcspn(line, "\n")] = 0;
        if (sscanf(line, "%63s %n", word, &used) == 1) read_line(word, line + used, &here);
    }
    fclose(file);
}

/* What this device answers to WHAT: 0, or the failure that the file asks for. */
static int answer(const Device *d, const char *what) {
    if (!started) return UNINITIALIZED;
    if (d == NULL) return INVALID;
    for (int i = 0; i < d->fail_count; i++)
        if (!strcmp(d->fails[i].what, what) || (!strcmp(d->fails[i].what, "all") && strcmp(what, "handle")))
            return d->fails[i].code;
    return OK;
}

static int text(const Device *d, const char *what, const char *value, char *out, unsigned size) {
    int code = answer(d, what);
    if (code) return code;
    if (strlen(value) >= size) return TOO_SMALL;
    strcpy(out, value);
    return OK;
}

static int number(const Device *d, const char *what, unsigned value, unsigned *out) {
    int code = answer(d, what);
    if (!code) *out = value;
    return code;
}

static int processes(const Device *d, const char *what, const Process *list, int count, unsigned *size, Process *out) {
    int code = answer(d, what);
    if (code) return code;
    if (*size < (unsigned)count || (count && out == NULL)) {
        *size = (unsigned)count;
        return TOO_SMALL;
    }
    if (count) memcpy(out, list, sizeof *list * (size_t)count);
    *size = (unsigned)count;
    return OK;
}

int nvmlInit_v2(void) { read_machine(); started = init_code == 0; return init_code; }
int nvmlInitWithFlags(unsigned flags) { (void)flags; return nvmlInit_v2(); }
int nvmlShutdown(void) { return started ? OK : UNINITIALIZED; } /* others may still be using it */
const char *nvmlErrorString(int code) { (void)code; return "an error of the stand-in"; }

int nvmlSystemGetDriverVersion(char *out, unsigned size) { snprintf(out, size, "%s", driver); return started ? OK : UNINITIALIZED; }
int nvmlSystemGetNVMLVersion(char *out, unsigned size) { snprintf(out, size, "12.%s", driver); return started ? OK : UNINITIALIZED; }
int nvmlSystemGetCudaDriverVersion(int *out) { *out = cuda_version; return started ? OK : UNINITIALIZED; }
int nvmlSystemGetCudaDriverVersion_v2(int *out) { return nvmlSystemGetCudaDriverVersion(out); }

int nvmlDeviceGetCount_v2(unsigned *out) {
    if (!started) return UNINITIALIZED;
    read_machine();
    *out = (unsigned)gpu_count;
    return OK;
}

static int handle(Device *d, Device **out) {
    int code = answer(d, "handle");
    if (!code) *out = d;
    return code;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **out) {
    return index < (unsigned)gpu_count ? handle(&gpus[index], out) : INVALID;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Device **out) {
    for (int i = 0; i < gpu_count; i++)
        if (!strcmp(gpus[i].uuid, uuid)) return handle(&gpus[i], out);
    for (int i = 0; i < instance_count; i++)
        if (!strcmp(instances[i].uuid, uuid)) return handle(&instances[i], out);
    return NOT_FOUND;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *id, Device **out) {
    for (int i = 0; i < gpu_count; i++)
        if (!strcmp(gpus[i].pci, id)) return handle(&gpus[i], out);
    return NOT_FOUND;
}

int nvmlDeviceGetIndex(Device *d, unsigned *out) { return number(d, "index", (unsigned)d->index, out); }
int nvmlDeviceGetMinorNumber(Device *d, unsigned *out) { return number(d, "minor", (unsigned)d->index, out); }
int nvmlDeviceGetUUID(Device *d, char *out, unsigned size) { return text(d, "uuid", d->uuid, out, size); }
int nvmlDeviceGetName(Device *d, char *out, unsigned size) { return text(d, "name", d->name, out, size); }

int nvmlDeviceGetPciInfo_v3(Device *d, Pci *out) {
    int code = answer(d, "pci");
    if (code) return code;
    if (d->parent) d = d->parent;
    memset(out, 0, sizeof *out);
    sscanf(d->pci, "%x:%x:%x", &out->domain, &out->bus, &out->device);
    snprintf(out->bus_id, sizeof out->bus_id, "%s", d->pci);
    snprintf(out->legacy, sizeof out->legacy, "%.4s%.11s", d->pci + 4, d->pci + 8);
    return OK;
}

int nvmlDeviceGetMemoryInfo(Device *d, Memory *out) {
    int code = answer(d, "memory");
    if (code) return code;
    out->total = d->total;
    out->used = d->used + d->reserved; /* as the first version of that call counts */
    out->free = d->total - out->used;
    return OK;
}

int nvmlDeviceGetMemoryInfo_v2(Device *d, Memory2 *out) {
    int code = answer(d, "memory");
    if (!code) code = answer(d, "memory_v2");
    if (code) return code;
    out->total = d->total, out->used = d->used, out->reserved = d->reserved;
    out->free = d->total - d->used - d->reserved;
    return OK;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Device *d, unsigned *n, Process *out) { return processes(d, "compute", d->compute, d->compute_count, n, out); }
int nvmlDeviceGetComputeRunningProcesses_v2(Device *d, unsigned *n, Process *out) { return nvmlDeviceGetComputeRunningProcesses_v3(d, n, out); }
int nvmlDeviceGetGraphicsRunningProcesses_v3(Device *d, unsigned *n, Process *out) { return processes(d, "graphics", d->graphics, d->graphics_count, n, out); }
int nvmlDeviceGetGraphicsRunningProcesses_v2(Device *d, unsigned *n, Process *out) { return nvmlDeviceGetGraphicsRunningProcesses_v3(d, n, out); }
int nvmlDeviceGetComputeMode(Device *d, unsigned *out) { return number(d, "mode", d->mode, out); }
int nvmlDeviceGetTemperature(Device *d, int sensor, unsigned *out) { (void)sensor; return number(d, "temperature", d->temperature, out); }
int nvmlDeviceGetPowerUsage(Device *d, unsigned *out) { return number(d, "power", d->power, out); }
int nvmlDeviceGetEnforcedPowerLimit(Device *d, unsigned *out) { return number(d, "power", d->power_limit, out); }
int nvmlDeviceGetPowerManagementLimit(Device *d, unsigned *out) { return number(d, "power", d->power_limit, out); }
int nvmlDeviceGetFanSpeed(Device *d, unsigned *out) { (void)d, (void)out; return NOT_SUPPORTED; }

/* A number that the machine's file gives; where it gives none, this device does not support the question. */
static int given(const Device *d, const char *name, u64 *out) {
    int code = answer(d, name);
    for (int i = 0; !code && i < d->number_count; i++)
        if (!strcmp(d->numbers[i].name, name)) return *out = d->numbers[i].value, OK;
    return code ? code : NOT_SUPPORTED;
}

static int given_unsigned(const Device *d, const char *name, unsigned *out) {
    u64 value = 0;
    int code = given(d, name, &value);
    if (!code) *out = (unsigned)value;
    return code;
}

int nvmlDeviceGetPersistenceMode(Device *d, unsigned *out) {
    int code = given_unsigned(d, "persistence", out);
    if (code == NOT_SUPPORTED) return *out = 1, OK;
    return code;
}

int nvmlDeviceGetCurrPcieLinkGeneration(Device *d, unsigned *out) { return given_unsigned(d, "pcie_gen", out); }
int nvmlDeviceGetMaxPcieLinkGeneration(Device *d, unsigned *out) { return given_unsigned(d, "pcie_gen_max", out); }
int nvmlDeviceGetCurrPcieLinkWidth(Device *d, unsigned *out) { return given_unsigned(d, "pcie_width", out); }
int nvmlDeviceGetMaxPcieLinkWidth(Device *d, unsigned *out) { return given_unsigned(d, "pcie_width_max", out); }
int nvmlDeviceGetCurrentClocksThrottleReasons(Device *d, u64 *out) { return given(d, "throttle", out); }
int nvmlDeviceGetCurrentClocksEventReasons(Device *d, u64 *out) { return given(d, "throttle", out); }
int nvmlDeviceGetRetiredPagesPendingStatus(Device *d, unsigned *out) { return given_unsigned(d, "retired_pending", out); }

int nvmlDeviceGetRemappedRows(Device *d, unsigned *correctable, unsigned *uncorrectable, unsigned *pending, unsigned *failed) {
    int code = given_unsigned(d, "remapped", uncorrectable);
    *correctable = *pending = *failed = 0;
    if (!code) given_unsigned(d, "remap_pending", pending), given_unsigned(d, "remap_failed", failed);
    return code;
}

int nvmlDeviceGetEccMode(Device *d, unsigned *now, unsigned *pending) {
    int code = given_unsigned(d, "ecc_mode", now);
    if (!code) *pending = *now;
    return code;
}

int nvmlDeviceGetBAR1MemoryInfo(Device *d, Memory *out) {
    int code = given(d, "bar1", &out->total);
    if (!code) out->used = 0, out->free = out->total;
    return code;
}

typedef struct { unsigned char cluster[16]; int status; unsigned clique; unsigned char state; } Fabric;

int nvmlDeviceGetGpuFabricInfo(Device *d, Fabric *out) {
    unsigned state = 0, status = 0;
    int code = given_unsigned(d, "fabric_state", &state);
    if (!code) {
        memset(out, 0, sizeof *out);
        given_unsigned(d, "fabric_status", &status);
        out->state = (unsigned char)state, out->status = (int)status;
    }
    return code;
}

int nvmlDeviceGetPerformanceState(Device *d, unsigned *out) { return number(d, "pstate", d->pstate, out); }
int nvmlDeviceGetDisplayActive(Device *d, unsigned *out) { return number(d, "display", 0, out); }
int nvmlDeviceGetDisplayMode(Device *d, unsigned *out) { return number(d, "display", 0, out); }
int nvmlDeviceGetDriverModel(Device *d, unsigned *now, unsigned *pending) { (void)d, (void)now, (void)pending; return NOT_SUPPORTED; }
int nvmlDeviceGetDriverModel_v2(Device *d, unsigned *now, unsigned *pending) { return nvmlDeviceGetDriverModel(d, now, pending); }
int nvmlDeviceGetProcessUtilization(Device *d, void *out, unsigned *n, u64 since) { (void)d, (void)out, (void)n, (void)since; return NOT_FOUND; }

int nvmlDeviceGetEncoderUtilization(Device *d, unsigned *out, unsigned *period) { *period = 100000; return number(d, "encoder", 0, out); }
int nvmlDeviceGetDecoderUtilization(Device *d, unsigned *out, unsigned *period) { *period = 100000; return number(d, "decoder", 0, out); }

int nvmlDeviceGetTotalEccErrors(Device *d, int kind, int counter, u64 *out) {
    int code = answer(d, "ecc");
    (void)counter;
    if (!code) *out = kind == 1 ? d->ecc : 0; /* 1: uncorrected */
    return code;
}

int nvmlDeviceGetCpuAffinity(Device *d, unsigned size, u64 *out) {
    int code = answer(d, "affinity");
    if (code) return code;
    memset(out, 0, size * sizeof *out);
    if (size) out[0] = d->cpus;
    return d->cpus ? OK : NOT_SUPPORTED;
}

int nvmlDeviceGetTopologyCommonAncestor(Device *a, Device *b, unsigned *out) {
    int code = answer(a, "topology");
    if (!code) code = answer(b, "topology");
    if (!code) *out = a->near[b->index] ? (unsigned)a->near[b->index] : 30;
    return code;
}

int nvmlDeviceGetP2PStatus(Device *a, Device *b, int kind, unsigned *out) {
    int code = answer(a, "p2p");
    (void)kind;
    if (!code) *out = a->nopeer[b->index] ? 2 : 0; /* 2: the GPU does not support it */
    return code;
}

int nvmlDeviceGetNvLinkState(Device *d, unsigned link, unsigned *out) {
    int code = answer(d, "nvlink");
    if (!code && !d->link_count) code = NOT_SUPPORTED;
    if (!code && link >= MAX_LINKS) code = INVALID;
    if (!code) *out = link < (unsigned)d->link_count;
    return code;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(Device *d, unsigned link, unsigned *out) {
    if (link >= (unsigned)d->link_count) return INVALID;
    *out = d->links[link] < 0 ? 2 : 0; /* a switch, a GPU */
    return answer(d, "nvlink");
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(Device *d, unsigned link, Pci *out) {
    if (link >= (unsigned)d->link_count) return INVALID;
    if (d->links[link] >= 0) return nvmlDeviceGetPciInfo_v3(&gpus[d->links[link]], out);
    memset(out, 0, sizeof *out);
    snprintf(out->bus_id, sizeof out->bus_id, "00000000:F0:00.0");
    return answer(d, "nvlink");
}

int nvmlDeviceGetCudaComputeCapability(Device *d, int *major, int *minor) {
    int code = answer(d, "capability");
    if (!code) *major = d->major, *minor = d->minor;
    return code;
}

int nvmlDeviceGetUtilizationRates(Device *d, Utilization *out) {
    int code = answer(d, "utilization");
    if (!code) code = d->parent ? NOT_SUPPORTED : OK;
    if (!code) out->gpu = d->gpu_use, out->memory = d->memory_use;
    return code;
}

int nvmlDeviceGetMigMode(Device *d, unsigned *now, unsigned *pending) {
    int code = answer(d, "migmode");
    if (!code && !d->has_mig) code = NOT_SUPPORTED;
    if (!code) *now = *pending = (unsigned)d->mig_mode;
    return code;
}

int nvmlDeviceGetMaxMigDeviceCount(Device *d, unsigned *out) { return number(d, "migs", d->has_mig ? MAX_MIGS : 0, out); }

int nvmlDeviceGetMigDeviceHandleByIndex(Device *d, unsigned index, Device **out) {
    int code = answer(d, "migs");
    if (code) return code;
    return index < (unsigned)d->mig_count ? handle(d->migs[index], out) : NOT_FOUND;
}

int nvmlDeviceIsMigDeviceHandle(Device *d, unsigned *out) { *out = d->parent != NULL; return OK; }
int nvmlDeviceGetGpuInstanceId(Device *d, unsigned *out) { *out = (unsigned)d->index + 1; return d->parent ? OK : NOT_SUPPORTED; }
int nvmlDeviceGetComputeInstanceId(Device *d, unsigned *out) { *out = 0; return d->parent ? OK : NOT_SUPPORTED; }

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Device *d, Device **out) {
    *out = d->parent;
    return d->parent ? OK : INVALID;
}
