// A CUDA runtime without a GPU, loaded before torch's CUDA build by LD_PRELOAD.
//
// Device memory is host memory, copies are real, and kernels do nothing: emulate.py computes their results. Work is
// done at once, but the host does not know it. An event is unfinished, and what was copied to pinned memory has not
// arrived, until the host has waited for it, or asks for it a second later: a missing wait reads NaN.
// Streams, events, allocators and DDP's reducer are torch's own code.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <fcntl.h>
// NCCL's header wants these for kernels, and what they include is not in all wheels.
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
#include <nccl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace {

std::string setting(const char* name, const char* otherwise) {
  const char* value = getenv(name);
  return value && *value ? value : otherwise;
}

// The n-th of a list by commas, or its last.
std::string nth(const std::string& list, int n) {
  size_t at = 0, comma;
  while (n-- > 0 && (comma = list.find(',', at)) != std::string::npos) at = comma + 1;
  return list.substr(at, list.find(',', at) - at);
}

// ---- devices: FAKE_GPU_COUNT of them, of which CUDA_VISIBLE_DEVICES shows some
int all_devices() { return std::stoi(setting("FAKE_GPU_COUNT", "1")); }

int physical(int shown) {
  const char* visible = getenv("CUDA_VISIBLE_DEVICES");
  if (!visible) return shown < all_devices() ? shown : -1;
  std::string list = visible;
  long commas = std::count(list.begin(), list.end(), ',');
  if (list.empty() || shown > commas) return -1;
  std::string name = nth(list, shown);
  int index = isdigit(name[0]) ? atoi(name.c_str()) : -1;
  return index < all_devices() ? index : -1;
}

int devices() {
  int count = 0;
  while (physical(count) >= 0) count++;
  return count;
}

size_t memory_of(int device) { return std::stoull(nth(setting("FAKE_GPU_MEMORY", "85899345920"), physical(device))); }

thread_local int current = 0;
thread_local cudaError_t last_error = cudaSuccess;
cudaError_t failed(cudaError_t error) { return last_error = error; }

// ---- what is counted, for the tests
enum { LAUNCHES, MALLOCS, HOST_ALLOCS, ALL_HOST_ALLOCS, SYNCS, TO_DEVICE, TO_HOST, PAGEABLE, EVENT_WAITS, COUNTERS };
std::array<std::atomic<unsigned long long>, COUNTERS> counted{};

// ---- memory
enum Kind { PAGEABLE_HOST, DEVICE, PINNED };
struct Range {
  char* end;
  Kind kind;
  int device;
};
std::map<char*, Range> ranges;
std::mutex ranges_lock;
std::array<size_t, 64> held{};

Kind kind_of(const void* pointer) {
  std::lock_guard<std::mutex> guard(ranges_lock);
  auto found = ranges.upper_bound((char*)pointer);
  if (found == ranges.begin() || (char*)pointer >= (--found)->second.end) return PAGEABLE_HOST;
  return found->second.kind;
}

void* take(size_t bytes, Kind kind) {
  size_t pages = (std::max(bytes, size_t(1)) + 4095) / 4096 * 4096;
  std::lock_guard<std::mutex> guard(ranges_lock);
  if (kind == DEVICE && held[current] + pages > memory_of(current)) return nullptr;
  void* memory = mmap(nullptr, pages, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  ranges[(char*)memory] = {(char*)memory + pages, kind, current};
  if (kind == DEVICE) held[current] += pages;
  return memory;
}

void release(void* pointer) {
  std::lock_guard<std::mutex> guard(ranges_lock);
  auto found = ranges.find((char*)pointer);
  if (found == ranges.end()) return;
  size_t bytes = found->second.end - found->first;
  if (found->second.kind == DEVICE) held[found->second.device] -= bytes;
  ranges.erase(found);
  munmap(pointer, bytes);
}

// ---- streams and events
double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// What another thread does for a stream: a collective.
struct Task {
  std::mutex lock;
  std::condition_variable changed;
  bool done = false;
  void finish() {
    { std::lock_guard<std::mutex> guard(lock); done = true; }
    changed.notify_all();
  }
  bool ready() { std::lock_guard<std::mutex> guard(lock); return done; }
  void wait() { std::unique_lock<std::mutex> guard(lock); changed.wait(guard, [&] { return done; }); }
};
using TaskOrNone = std::shared_ptr<Task>;

// What was captured in one: kernels as numbers of emulate.py's, copies and collectives as they are.
struct Node { int kernel; std::function<void()> run; };
struct Graph { std::vector<Node> nodes; };
struct Capture { unsigned long long id; Graph* graph; bool broken = false, over = false; };
using CaptureOrNone = std::shared_ptr<Capture>;

struct Stream { int priority = 0; TaskOrNone behind; CaptureOrNone capture; };
struct Event { unsigned flags; bool recorded = false; unsigned long long at = 0; double ms = 0; TaskOrNone behind; CaptureOrNone capture; };
std::array<Stream, 64> defaults;  // one a device
std::mutex streams_lock;
std::vector<Stream*> made;
std::atomic<unsigned long long> clock_{1}, known{0};  // of what is queued; up to where the host knows it done

Stream* of(cudaStream_t stream) {
  bool special = !stream || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
  return special ? &defaults[current] : (Stream*)stream;
}

TaskOrNone behind(Stream* stream) { std::lock_guard<std::mutex> guard(streams_lock); return stream->behind; }

// Work that follows a collective has to wait for it here, for it is done at once.
void settle(Stream* stream) { if (auto task = behind(stream)) task->wait(); }

void settle_all() {
  std::vector<TaskOrNone> tasks;
  {
    std::lock_guard<std::mutex> guard(streams_lock);
    for (auto& stream : defaults) if (stream.behind) tasks.push_back(stream.behind);
    for (auto* stream : made) if (stream->behind) tasks.push_back(stream->behind);
  }
  for (auto& task : tasks) task->wait();
}

// A capture does not survive what CUDA does not allow in it.
std::atomic<int> captures{0};
cudaError_t broken(const CaptureOrNone& capture, cudaError_t error) { if (capture) capture->broken = true; return failed(error); }
cudaError_t not_while_capturing() {
  std::lock_guard<std::mutex> guard(streams_lock);
  for (auto* stream : made) if (stream->capture) stream->capture->broken = true;  // in any thread
  return failed(cudaErrorStreamCaptureUnsupported);
}

struct Arrival { unsigned long long at; char* to; std::vector<char> bytes; };
std::deque<Arrival> arrivals;  // at pinned memory, in order
std::mutex arrivals_lock;

// The host knows that all is done that was queued before this.
void learn(unsigned long long at) {
  unsigned long long before = known;
  while (before < at && !known.compare_exchange_weak(before, at)) {}
  std::lock_guard<std::mutex> guard(arrivals_lock);
  while (!arrivals.empty() && arrivals.front().at <= at) {
    auto& first = arrivals.front();
    if (kind_of(first.to) == PINNED) memcpy(first.to, first.bytes.data(), first.bytes.size());
    arrivals.pop_front();
  }
}

bool finished(Event* event) {
  if (!event->recorded) return true;
  if (event->behind && !event->behind->ready()) return false;
  if (event->at > known && now_ms() - event->ms < 1000) return false;
  learn(event->at);
  return true;
}

cudaError_t launched(cudaStream_t stream) {
  if (of(stream)->capture) return cudaSuccess;
  counted[LAUNCHES]++;
  settle(of(stream));
  return cudaSuccess;
}

void copy(void* to, const void* from, size_t bytes, bool host_waits) {
  Kind target = kind_of(to), source = kind_of(from);
  if (target == DEVICE && source != DEVICE) counted[TO_DEVICE]++;
  if (target != DEVICE && source == DEVICE) counted[TO_HOST]++;
  if ((target == DEVICE && source == PAGEABLE_HOST) || (source == DEVICE && target == PAGEABLE_HOST)) counted[PAGEABLE]++;
  if (source == DEVICE && target == PINNED && !host_waits) {
    std::lock_guard<std::mutex> guard(arrivals_lock);
    arrivals.push_back({clock_++, (char*)to, std::vector<char>((char*)from, (char*)from + bytes)});
    memset(to, 0xff, bytes);
  } else {
    memmove(to, from, bytes);
  }
}

}  // namespace

extern "C" {

// A kernel of emulate.py's, in what the stream captures.
void fake_gpu_captured(void* stream, int kernel) { of((cudaStream_t)stream)->capture->graph->nodes.push_back({kernel, nullptr}); }
void fake_gpu_break_capture(void* stream) { broken(of((cudaStream_t)stream)->capture, cudaErrorStreamCaptureUnsupported); }
static Graph* instantiated;
void* fake_gpu_last_graph() { return instantiated; }
int fake_gpu_nodes(void* graph) { return ((Graph*)graph)->nodes.size(); }
// Runs it, or returns the number of the kernel.
int fake_gpu_node(void* graph, int i) { auto& node = ((Graph*)graph)->nodes[i]; if (node.run) node.run(); return node.kernel; }
int fake_gpu_is_held(void* begin, size_t bytes) { return kind_of(begin) != PAGEABLE_HOST && (!bytes || kind_of((char*)begin + bytes - 1) != PAGEABLE_HOST); }

void fake_gpu_counts(unsigned long long* out) { for (int i = 0; i < COUNTERS; i++) out[i] = counted[i]; }

// ---- kernels
struct Call { dim3 grid, block; size_t shared; cudaStream_t stream; };
static thread_local std::vector<Call> calls;
void** __cudaRegisterFatBinary(void*) { static void* handle; return &handle; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*, dim3*, int*) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st* stream) { calls.push_back({grid, block, shared, stream}); return 0; }
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  Call call = calls.back();
  calls.pop_back();
  *grid = call.grid, *block = call.block, *shared = call.shared, *(cudaStream_t*)stream = call.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) { *kernel = (cudaKernel_t)function; return cudaSuccess; }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t stream) { return launched(stream); }
cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t stream) { return launched(stream); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void*, void**) { return launched(config->stream); }
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, const void*) {
  memset(out, 0, sizeof *out);
  out->maxThreadsPerBlock = 1024, out->numRegs = 32, out->ptxVersion = out->binaryVersion = 90, out->maxDynamicSharedSizeBytes = 49152;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) { *blocks = 2; return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) { *blocks = 2; return cudaSuccess; }
cudaError_t cudaGetSymbolAddress(void** pointer, const void*) { static char zeros[1 << 16]; *pointer = zeros; return cudaSuccess; }
cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }

// ---- devices
cudaError_t cudaGetDeviceCount(int* count) { return (*count = devices()) ? cudaSuccess : failed(cudaErrorNoDevice); }
cudaError_t cudaGetDevice(int* device) { *device = current; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return physical(device) < 0 ? failed(cudaErrorInvalidDevice) : (current = device, cudaSuccess); }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int device) {
  if (physical(device) < 0) return failed(cudaErrorInvalidDevice);
  memset(out, 0, sizeof *out);
  snprintf(out->name, sizeof out->name, "%s", setting("FAKE_GPU_NAME", "NVIDIA H100 80GB HBM3").c_str());
  for (int i = 0; i < 16; i++) out->uuid.bytes[i] = (char)(16 * physical(device) + i);
  sscanf(setting("FAKE_GPU_CAPABILITY", "9.0").c_str(), "%d.%d", &out->major, &out->minor);
  out->totalGlobalMem = memory_of(device);
  out->multiProcessorCount = 132, out->warpSize = 32, out->l2CacheSize = 50 << 20, out->pciBusID = physical(device) + 1;
  out->maxThreadsPerBlock = out->maxThreadsDim[0] = out->maxThreadsDim[1] = 1024, out->maxThreadsDim[2] = 64;
  out->maxGridSize[0] = 2147483647, out->maxGridSize[1] = out->maxGridSize[2] = 65535;
  out->maxThreadsPerMultiProcessor = 2048, out->maxBlocksPerMultiProcessor = 32;
  out->regsPerBlock = out->regsPerMultiprocessor = 65536, out->textureAlignment = 512;
  out->sharedMemPerBlock = 49152, out->sharedMemPerBlockOptin = 232448, out->sharedMemPerMultiprocessor = 233472;
  out->concurrentKernels = out->unifiedAddressing = out->managedMemory = 1, out->asyncEngineCount = 3;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int device) {
  cudaDeviceProp found;
  if (cudaGetDeviceProperties(&found, device)) return failed(cudaErrorInvalidDevice);
  std::map<int, int> known = {
      {cudaDevAttrComputeCapabilityMajor, found.major}, {cudaDevAttrComputeCapabilityMinor, found.minor},
      {cudaDevAttrMultiProcessorCount, found.multiProcessorCount}, {cudaDevAttrWarpSize, found.warpSize},
      {cudaDevAttrMaxSharedMemoryPerBlock, 49152}, {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448},
      {cudaDevAttrMaxThreadsPerBlock, 1024}, {cudaDevAttrMaxGridDimX, 2147483647},
      {cudaDevAttrMaxGridDimY, 65535}, {cudaDevAttrMaxGridDimZ, 65535}};
  *value = known.count(which) ? known[which] : 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* out, int size, int device) { snprintf(out, size, "0000:%02x:00.0", physical(device) + 1); return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { *least = 0, *greatest = -5; return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { *can = 1; return cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) { *total = memory_of(current), *free = *total - held[current]; return cudaSuccess; }
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorName(cudaError_t) { return "fakeGpuError"; }
const char* cudaGetErrorString(cudaError_t error) {
  static thread_local std::string text;
  text = error == cudaErrorNotSupported ? "the fake GPU does not offer this" : "fake GPU error " + std::to_string(error);
  return text.c_str();
}
cudaError_t cudaDeviceSynchronize() { if (captures) return not_while_capturing(); counted[SYNCS]++; settle_all(); learn(clock_); return cudaSuccess; }
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

// ---- memory
cudaError_t cudaMalloc(void** pointer, size_t bytes) { counted[MALLOCS]++; return (*pointer = take(bytes, DEVICE)) ? cudaSuccess : failed(cudaErrorMemoryAllocation); }
cudaError_t cudaFree(void* pointer) { if (pointer) settle_all(), learn(clock_), release(pointer); return cudaSuccess; }
cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) { counted[ALL_HOST_ALLOCS]++; counted[HOST_ALLOCS] += gettid() == getpid(); return (*pointer = take(bytes, PINNED)) ? cudaSuccess : failed(cudaErrorMemoryAllocation); }
cudaError_t cudaMallocHost(void** pointer, size_t bytes) { return cudaHostAlloc(pointer, bytes, 0); }
cudaError_t cudaFreeHost(void* pointer) { release(pointer); return cudaSuccess; }
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* pointer) {
  memset(out, 0, sizeof *out);
  out->type = std::array{cudaMemoryTypeUnregistered, cudaMemoryTypeDevice, cudaMemoryTypeHost}[kind_of(pointer)];
  out->devicePointer = out->hostPointer = (void*)pointer;
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) { if (captures) return not_while_capturing(); counted[SYNCS]++; settle_all(); learn(clock_); copy(to, from, bytes, true); return cudaSuccess; }
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  if (auto capture = of(stream)->capture) {
    if (kind_of(to) == PAGEABLE_HOST || kind_of(from) == PAGEABLE_HOST) return broken(capture, cudaErrorStreamCaptureUnsupported);
    capture->graph->nodes.push_back({-1, [=] { copy(to, from, bytes, false); }});
    return cudaSuccess;
  }
  settle(of(stream));
  copy(to, from, bytes, false);
  return cudaSuccess;
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) { return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream); }
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
  for (size_t row = 0; row < height; row++) cudaMemcpyAsync((char*)to + row * to_pitch, (char*)from + row * from_pitch, width, kind, stream);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  if (auto capture = of(stream)->capture) { capture->graph->nodes.push_back({-1, [=] { memset(to, value, bytes); }}); return cudaSuccess; }
  counted[LAUNCHES]++; settle(of(stream)); memset(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) { return cudaMemsetAsync(to, value, bytes, nullptr); }

// ---- streams
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned, int priority) {
  auto* stream = new Stream{priority, nullptr, nullptr};
  std::lock_guard<std::mutex> guard(streams_lock);
  made.push_back(stream);
  *out = (cudaStream_t)stream;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) { return cudaStreamCreateWithPriority(out, flags, 0); }
cudaError_t cudaStreamCreate(cudaStream_t* out) { return cudaStreamCreateWithPriority(out, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) { *priority = of(stream)->priority; return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t stream) { auto task = behind(of(stream)); return !task || task->ready() ? cudaSuccess : cudaErrorNotReady; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { if (auto capture = of(stream)->capture) return broken(capture, cudaErrorStreamCaptureUnsupported); counted[SYNCS]++; settle(of(stream)); learn(clock_); return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  auto capture = of(stream)->capture;
  *status = !capture ? cudaStreamCaptureStatusNone : capture->broken ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph, const cudaGraphNode_t** before, const cudaGraphEdgeData** edges, size_t* count) {
  auto capture = of(stream)->capture;
  if (capture && id) *id = capture->id;
  if (capture && graph) *graph = (cudaGraph_t)capture->graph;
  if (before) *before = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaStreamIsCapturing(stream, status);
}
cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t*, const cudaGraphEdgeData*, size_t, unsigned) { return cudaSuccess; }
// What the thread that captures may not do, unless it says "relaxed": ask an event, or wait for one.
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;
thread_local CaptureOrNone own_capture;
bool forbidden_here() { return own_capture && !own_capture->over && thread_mode != cudaStreamCaptureModeRelaxed; }
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  if (of(stream) == &defaults[current] || of(stream)->capture) return failed(cudaErrorStreamCaptureUnsupported);
  static std::atomic<unsigned long long> ids{1};
  captures++;
  of(stream)->capture = std::make_shared<Capture>(Capture{ids++, new Graph});
  if (mode != cudaStreamCaptureModeRelaxed) own_capture = of(stream)->capture;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t ending, cudaGraph_t* graph) {
  auto capture = of(ending)->capture;
  if (!capture) return failed(cudaErrorIllegalState);
  captures--;
  capture->over = true;
  std::lock_guard<std::mutex> guard(streams_lock);
  for (auto& stream : defaults) if (stream.capture == capture) stream.capture = nullptr;
  for (auto* stream : made) if (stream->capture == capture) stream->capture = nullptr;
  *graph = capture->broken ? nullptr : (cudaGraph_t)capture->graph;
  return capture->broken ? failed(cudaErrorStreamCaptureInvalidated) : cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* out, cudaGraph_t graph, unsigned long long) { *out = (cudaGraphExec_t)(instantiated = new Graph(*(Graph*)graph)); return cudaSuccess; }
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { delete (Graph*)graph; return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { delete (Graph*)graph; return cudaSuccess; }
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) { *count = ((Graph*)graph)->nodes.size(); return cudaSuccess; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t stream) { return launched(stream); }  // emulate.py runs its nodes
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) { std::swap(*mode, thread_mode); return cudaSuccess; }
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) { settle(of(stream)); function(data); return cudaSuccess; }
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) { settle(of(stream)); function(stream, cudaSuccess, data); return cudaSuccess; }

// ---- events
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) { *out = (cudaEvent_t) new Event{flags}; return cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t out, cudaStream_t stream) {
  auto* event = (Event*)out;
  event->capture = of(stream)->capture;
  event->recorded = true, event->at = clock_++, event->ms = now_ms(), event->behind = behind(of(stream));
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) { return cudaEventRecord(event, stream); }
cudaError_t cudaEventQuery(cudaEvent_t event) { if (forbidden_here()) return broken(own_capture, cudaErrorStreamCaptureUnsupported); if (auto capture = ((Event*)event)->capture) return broken(capture, cudaErrorCapturedEvent); return finished((Event*)event) ? cudaSuccess : failed(cudaErrorNotReady); }
cudaError_t cudaEventSynchronize(cudaEvent_t waited) {
  auto* event = (Event*)waited;
  if (forbidden_here()) return broken(own_capture, cudaErrorStreamCaptureUnsupported);
  if (event->capture) return broken(event->capture, cudaErrorCapturedEvent);
  counted[EVENT_WAITS]++;
  if (event->behind) event->behind->wait();
  learn(event->at);
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t first, cudaEvent_t second) {
  auto *from = (Event*)first, *to = (Event*)second;
  if (from->capture || to->capture) return broken(to->capture, cudaErrorCapturedEvent);
  if (!from->recorded || !to->recorded || (from->flags | to->flags) & cudaEventDisableTiming) return failed(cudaErrorInvalidResourceHandle);
  if (!finished(from) || !finished(to)) return failed(cudaErrorNotReady);
  *ms = (float)(to->ms - from->ms);
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t waited, unsigned) {
  auto* event = (Event*)waited;
  if (event->capture && !event->capture->over) {
    if (of(stream)->capture && of(stream)->capture != event->capture) return broken(of(stream)->capture, cudaErrorStreamCaptureMerge);
    std::lock_guard<std::mutex> guard(streams_lock);
    of(stream)->capture = event->capture;
    return cudaSuccess;
  }
  if (of(stream)->capture && event->recorded) return broken(of(stream)->capture, cudaErrorStreamCaptureIsolation);
  if (!event->behind || event->behind->ready()) return cudaSuccess;
  std::lock_guard<std::mutex> guard(streams_lock);
  of(stream)->behind = event->behind;
  return cudaSuccess;
}

// ---- the driver, as far as torch asks for it
static CUresult driver_context(CUdevice, unsigned* flags, int* active) { *flags = 0, *active = 1; return CUDA_SUCCESS; }
static CUresult driver_not(...) { return CUDA_ERROR_NOT_SUPPORTED; }
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result) {
  if (result) *result = cudaDriverEntryPointSuccess;
  *function = std::string(name) == "cuDevicePrimaryCtxGetState" ? (void*)driver_context : (void*)driver_not;
  return cudaSuccess;
}

// ---- cuBLAS: everything else of it that torch imports says yes and does nothing (libraries.py)
int cublasGetMathMode(void*, int* mode) { *mode = 0; return 0; }
int cublasLtMatmulDescCreate(void** out, int, int) { *out = calloc(1, 512); return 0; }
int cublasLtMatmulPreferenceCreate(void** out) { *out = calloc(1, 512); return 0; }
int cublasLtMatrixLayoutCreate(void** out, int, uint64_t, uint64_t, int64_t) { *out = calloc(1, 512); return 0; }
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* found, int* count) { memset(found, 0, 96), *count = 1; return 0; }
size_t cublasLtGetVersion() { return 130000; }

}  // extern "C"

#include "nccl.inc"
