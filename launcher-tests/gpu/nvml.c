// Stands in for NVIDIA's management library (libnvidia-ml.so.1), beside driver.c.
// Environment:
//   SIMULATED_GPUS=2      so many GPUs (1)
//   SIMULATED_MIG=3       the first is cut into so many instances
//   SIMULATED_LOST_GPU=1  the library never answers, as with a GPU that fell off the bus
//   SIMULATED_ECC=1       so many errors of the first one's memory that could not be corrected (0)
//   SIMULATED_DRIVER=550  version of the driver (570.00)
//   SIMULATED_PROCESS=7   this process computes on the first GPU
//   SIMULATED_THROTTLE=64 bits of the reasons for which the first GPU is slowed down (0)
// Build: cc -shared -fPIC -o libnvidia-ml.so.1 nvml.c
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_FOUND = 6, UNKNOWN = 999 };
// Handles: 1 + GPU, 100 + instance.

typedef struct {
  char bus_id_legacy[16];
  unsigned domain, bus, device, pci_device_id, pci_sub_system_id;
  char bus_id[32];
} pci_info;

static unsigned number(const char *name, unsigned otherwise) {
  const char *given = getenv(name);
  return given ? (unsigned)atoi(given) : otherwise;
}

static void *sleep_forever(void *unused) {
  for (;;) pause();
  return unused;
}

// As NVIDIA's library, this starts a thread that does not end with nvmlShutdown.
int nvmlInit_v2(void) {
  pthread_t thread;
  if (getenv("SIMULATED_LOST_GPU")) sleep_forever(NULL);
  return pthread_create(&thread, NULL, sleep_forever, NULL) == 0 ? SUCCESS : UNKNOWN;
}

int nvmlShutdown(void) { return SUCCESS; }

int nvmlDeviceGetCount_v2(unsigned *into) {
  *into = number("SIMULATED_GPUS", 1);
  return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **into) {
  if (index >= number("SIMULATED_GPUS", 1)) return INVALID_ARGUMENT;
  *into = (void *)(uintptr_t)(index + 1);
  return SUCCESS;
}

int nvmlDeviceGetUUID(void *device, char *into, unsigned length) {
  unsigned handle = (unsigned)(uintptr_t)device;
  const char *form = handle >= 100 ? "MIG-00000000-0000-0000-0000-%012x" : "GPU-00000000-0000-0000-0000-%012x";
  snprintf(into, length, form, handle >= 100 ? handle - 100 : handle - 1);
  return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **into) {
  unsigned index;
  if (sscanf(uuid, "GPU-00000000-0000-0000-0000-%12x", &index) != 1) return NOT_FOUND;
  return nvmlDeviceGetHandleByIndex_v2(index, into);
}

int nvmlDeviceGetPciInfo_v3(void *device, pci_info *into) {
  memset(into, 0, sizeof *into);
  snprintf(into->bus_id, sizeof into->bus_id, "00000000:%02X:00.0", (unsigned)(uintptr_t)device);
  return SUCCESS;
}

int nvmlDeviceGetMigMode(void *device, unsigned *now, unsigned *pending) {
  *now = *pending = (uintptr_t)device == 1 && getenv("SIMULATED_MIG");
  return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *into) {
  (void)device;
  *into = 7;
  return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned index, void **into) {
  (void)device;
  if (index >= number("SIMULATED_MIG", 0)) return NOT_FOUND;
  *into = (void *)(uintptr_t)(100 + index);
  return SUCCESS;
}

int nvmlDeviceGetTotalEccErrors(void *device, int kind, int counter, unsigned long long *into) {
  (void)kind, (void)counter;
  *into = (uintptr_t)device == 1 ? number("SIMULATED_ECC", 0) : 0;
  return SUCCESS;
}

int nvmlSystemGetDriverVersion(char *into, unsigned length) {
  const char *given = getenv("SIMULATED_DRIVER");
  snprintf(into, length, "%s", given ? given : "570.00");
  return SUCCESS;
}

typedef struct {
  unsigned pid;
  unsigned long long used_memory;
  unsigned gpu_instance, compute_instance;
} process_info;

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, process_info *into) {
  unsigned pid = (uintptr_t)device == 1 ? number("SIMULATED_PROCESS", 0) : 0;
  if (pid) memset(into, 0, sizeof *into), into->pid = pid;
  *count = pid != 0;
  return SUCCESS;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *into) {
  *into = (uintptr_t)device == 1 ? number("SIMULATED_THROTTLE", 0) : 0;
  return SUCCESS;
}
