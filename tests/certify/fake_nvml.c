/* Stands in for libnvidia-ml.so.1, with NVML's own structures: two GPUs, of which FAKE_NVML_MISSING names, between commas, the
 * functions that this driver says it does not support (all: every one but those that find a GPU). */
#include <stdlib.h>
#include <string.h>

typedef unsigned long long u64;
typedef struct { void *device; u64 type, data; unsigned instance, compute; } event;

enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, TIMEOUT = 10 };

static int devices[2] = {0, 1};
static int xids = 2;

static int missing(const char *name) {
  const char *list = getenv("FAKE_NVML_MISSING");
  return list && (!strcmp(list, "all") || strstr(list, name));
}

#define ANSWER(name, parameters, body) \
  int name parameters { \
    if (missing(#name)) return NOT_SUPPORTED; \
    body; \
    return SUCCESS; \
  }

int nvmlInitWithFlags(unsigned flags) { return flags ? NOT_SUPPORTED : SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { return code ? "an error" : "none"; }
int nvmlDeviceGetHandleByUUID(const char *uuid, int **device) {
  if (strncmp(uuid, "GPU-", 4) || uuid[4] < '0' || uuid[4] > '1') return NOT_FOUND;
  *device = &devices[uuid[4] - '0'];
  return SUCCESS;
}
ANSWER(nvmlDeviceGetClockInfo, (int *d, int kind, unsigned *mhz), *mhz = kind == 1 ? 1980 - 600 * *d : 2619)
ANSWER(nvmlDeviceGetPowerUsage, (int *d, unsigned *milliwatts), *milliwatts = 700500 - 100000 * *d)
ANSWER(nvmlDeviceGetTemperature, (int *d, int sensor, unsigned *celsius), *celsius = sensor ? 0 : 65 + 20 * *d)
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned number, int **device) { *device = &devices[number]; return SUCCESS; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { strncpy(text, "560.35.03", size); return SUCCESS; }
#define MORE(name, parameters, body) int name parameters { body; return SUCCESS; }
MORE(nvmlDeviceGetName, (int *d, char *text, unsigned size), strncpy(text, *d ? "H100" : "H200", size))
MORE(nvmlDeviceGetVbiosVersion, (int *d, char *text, unsigned size), strncpy(text, "96.00.74", size + 0 * *d))
MORE(nvmlDeviceGetMemoryInfo, (int *d, u64 *memory), memory[0] = 80ull << 30; memory[1] = memory[2] = 0 * *d)
MORE(nvmlDeviceGetRemappedRows, (int *d, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed),
  *corrected = 5; *uncorrected = 2; *pending = *d; *failed = 0)
MORE(nvmlDeviceGetEccMode, (int *d, unsigned *now, unsigned *later), *now = 1; *later = 1 + 0 * *d)
MORE(nvmlDeviceGetEnforcedPowerLimit, (int *d, unsigned *milliwatts), *milliwatts = 700000 + 0 * *d)
ANSWER(nvmlDeviceGetTotalEccErrors, (int *d, int type, int counter, u64 *count), *count = counter ? 99 : 3 * type + *d)
ANSWER(nvmlDeviceGetCurrPcieLinkGeneration, (int *d, unsigned *generation), *generation = 5 - *d)
ANSWER(nvmlDeviceGetMaxPcieLinkGeneration, (int *d, unsigned *generation), *generation = 5 + 0 * *d)
ANSWER(nvmlDeviceGetCurrPcieLinkWidth, (int *d, unsigned *width), *width = *d ? 8 : 16)
ANSWER(nvmlDeviceGetMaxPcieLinkWidth, (int *d, unsigned *width), *width = 16 + 0 * *d)
ANSWER(nvmlDeviceGetPcieReplayCounter, (int *d, unsigned *count), *count = 4 + *d)
ANSWER(nvmlDeviceGetNvLinkState, (int *d, unsigned link, unsigned *up), if (link >= 4) return NOT_SUPPORTED; *up = link < 2 + 0u * *d)
ANSWER(nvmlDeviceGetNvLinkErrorCounter, (int *d, unsigned link, int counter, u64 *count), *count = 10 * link + counter + 0 * *d)
#ifndef OLD_DRIVER
ANSWER(nvmlDeviceGetCurrentClocksEventReasons, (int *d, u64 *reasons), *reasons = *d ? 0x40 : 0x4)
#else
ANSWER(nvmlDeviceGetCurrentClocksThrottleReasons, (int *d, u64 *reasons), *reasons = *d ? 0x40 : 0x4)
#endif
ANSWER(nvmlEventSetCreate, (void **set), *set = &devices)
ANSWER(nvmlDeviceRegisterEvents, (int *d, u64 types, void *set), if (types != 8 || !set || !d) return NOT_SUPPORTED)
int nvmlEventSetWait_v2(void *set, event *found, unsigned timeout) {
  if (!set || timeout || !xids) return TIMEOUT;
  found->device = &devices[0];
  found->type = 8;
  found->data = 78 + xids--; /* 80, then 79: the GPU has fallen off the bus */
  return SUCCESS;
}
