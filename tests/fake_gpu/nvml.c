// NVML for the fake GPUs. FAKE_NVML="Init=12,Name=3" lets nvmlInit and nvmlDeviceGetName end with those codes.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static int code(const char* name) {
  char wanted[64];
  const char* set = getenv("FAKE_NVML");
  snprintf(wanted, sizeof wanted, "%s=", name);
  const char* found = set ? strstr(set, wanted) : 0;
  return found ? atoi(found + strlen(wanted)) : 0;
}
#define ANSWER(name, what) { int error = code(name); if (error) return error; what; return 0; }
static int count(void) { const char* set = getenv("FAKE_GPU_COUNT"); return set ? atoi(set) : 1; }
static int place(void* gpu) { return (int)(long)gpu - 1; }
static void name_of(int device, char* out) {
  out += sprintf(out, "GPU-");
  for (int i = 0; i < 16; i++) out += sprintf(out, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", (unsigned char)(16 * device + i));
}
int nvmlInit_v2(void) ANSWER("Init", )
int nvmlInitWithFlags(unsigned flags) ANSWER("Init", )
int nvmlShutdown(void) { return 0; }
const char* nvmlErrorString(int error) { static char text[32]; snprintf(text, sizeof text, "fake NVML error %d", error); return text; }
int nvmlSystemGetDriverVersion(char* out, unsigned size) { snprintf(out, size, "580.82"); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int* version) { *version = 13000; return 0; }
int nvmlDeviceGetCount_v2(unsigned* out) ANSWER("Count", *out = count())
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void** gpu) ANSWER("HandleByIndex", *gpu = (void*)(long)(i + 1))
int nvmlDeviceGetHandleByUUID(const char* uuid, void** gpu) {
  char own[80];
  for (int device = 0; device < count(); device++) {
    name_of(device, own);
    if (!strcmp(own, uuid)) ANSWER("HandleByUUID", *gpu = (void*)(long)(device + 1))
  }
  return 6;
}
int nvmlDeviceGetUUID(void* gpu, char* out, unsigned size) { char own[80]; name_of(place(gpu), own); ANSWER("UUID", snprintf(out, size, "%s", own)) }
int nvmlDeviceGetName(void* gpu, char* out, unsigned size) ANSWER("Name", snprintf(out, size, "%s", getenv("FAKE_GPU_NAME") ? getenv("FAKE_GPU_NAME") : "NVIDIA H100 80GB HBM3"))
int nvmlDeviceGetUtilizationRates(void* gpu, unsigned* out) ANSWER("Utilization", (out[0] = 97, out[1] = 40))
int nvmlDeviceGetMemoryInfo(void* gpu, unsigned long long* out) ANSWER("MemoryInfo", (out[0] = 80ull << 30, out[1] = 78ull << 30, out[2] = 2ull << 30))
int nvmlDeviceGetPowerUsage(void* gpu, unsigned* out) ANSWER("Power", *out = 350000)
int nvmlDeviceGetTemperature(void* gpu, int which, unsigned* out) ANSWER("Temperature", *out = 60)
int nvmlDeviceGetClockInfo(void* gpu, int which, unsigned* out) ANSWER("Clock", *out = 1980)
int nvmlDeviceGetCurrentClocksThrottleReasons(void* gpu, unsigned long long* out) ANSWER("Reasons", *out = 4)
int nvmlDeviceGetCudaComputeCapability(void* gpu, int* major, int* minor) ANSWER("Capability", sscanf(getenv("FAKE_GPU_CAPABILITY") ? getenv("FAKE_GPU_CAPABILITY") : "9.0", "%d.%d", major, minor))
int nvmlDeviceGetMigMode(void* gpu, unsigned* now, unsigned* later) ANSWER("MigMode", *now = *later = 0)
int nvmlDeviceGetComputeMode(void* gpu, int* out) ANSWER("ComputeMode", *out = 0)
int nvmlDeviceGetComputeRunningProcesses_v3(void* gpu, unsigned* out, void* infos) ANSWER("Processes", *out = 0)
int nvmlDeviceGetCurrPcieLinkWidth(void* gpu, unsigned* out) ANSWER("Pcie", *out = 16)
int nvmlDeviceGetMaxPcieLinkWidth(void* gpu, unsigned* out) ANSWER("Pcie", *out = 16)
// By these names torch's allocator asks who else holds memory where none is left.
int nvmlDeviceGetHandleByPciBusId_v2(const char* bus, void** gpu) ANSWER("HandleByPciBusId", *gpu = (void*)1)
int nvmlDeviceGetComputeRunningProcesses(void* gpu, unsigned* out, void* infos) ANSWER("Processes", *out = 0)
int nvmlDeviceGetNvLinkRemoteDeviceType(void* gpu, unsigned link, int* type) { return 3; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void* gpu, unsigned link, void* info) { return 3; }
