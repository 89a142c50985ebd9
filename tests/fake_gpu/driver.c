// libcuda.so.1, as far as anybody asks it; the rest of what torch looks up says yes (libraries.py).
#include <stdlib.h>
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
int cuDeviceGetCount(int* count) { const char* set = getenv("FAKE_GPU_COUNT"); *count = set ? atoi(set) : 1; return 0; }
int cuGetErrorString(int error, const char** text) { *text = "fake GPU"; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) { *flags = 0; *active = 1; return 0; }
int cuCtxGetCurrent(void** context) { *context = (void*)1; return 0; }
