// The one FFI handler of every CUDA kernel: it launches the function of a cubin that comes with the call.
//
// Operands are the kernel's first parameters, then come the results, then the scalars. The driver is loaded when first needed, so
// that this file needs neither a header nor a library of CUDA.

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// --- the driver's interface: its types, as far as they are needed --------------------------------------------------------

using Status = int;
using Stream = void*;
using Context = void*;
using Module = void*;
using Function = void*;
using Pointer = std::uint64_t;

constexpr int kMaxDynamicSharedMemory = 8;  // of a function's attributes
constexpr int kCooperative = 2;             // of a launch's

struct LaunchAttribute {
  int id;
  int padding;
  union {
    char bytes[64];
    int cooperative;
  };
};
static_assert(sizeof(LaunchAttribute) == 72 && alignof(LaunchAttribute) == 4);

struct alignas(8) AlignedAttribute : LaunchAttribute {};

struct LaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_memory;
  Stream stream;
  AlignedAttribute* attributes;
  unsigned number_of_attributes;
};
static_assert(offsetof(LaunchConfig, stream) == 32 && sizeof(LaunchConfig) == 56);

class Driver {
 public:
  Status (*stream_context)(Stream, Context*);
  Status (*push)(Context);
  Status (*pop)(Context*);
  Status (*load)(Module*, const void*);
  Status (*function)(Function*, Module, const char*);
  Status (*set_attribute)(Function, int, int);
  Status (*fill)(Pointer, unsigned char, std::size_t, Stream);
  Status (*launch)(const LaunchConfig*, Function, void**, void**);
  Status (*name_of)(Status, const char**);
  Status (*text_of)(Status, const char**);
  std::string missing;

  static const Driver& get() {
    static const Driver driver;
    return driver;
  }

  std::string describe(std::string_view what, Status status) const {
    const char *name = nullptr, *text = nullptr;
    name_of(status, &name);
    text_of(status, &text);
    return std::string(what) + ": " + (name ? name : std::to_string(status)) + " (" + (text ? text : "unknown error") + ")";
  }

 private:
  Driver() {
    library_ = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library_ == nullptr) {
      missing = std::string("CUDA's driver cannot be loaded: ") + dlerror();
      return;
    }
    find(stream_context, "cuStreamGetCtx");
    find(push, "cuCtxPushCurrent_v2");
    find(pop, "cuCtxPopCurrent_v2");
    find(load, "cuModuleLoadData");
    find(function, "cuModuleGetFunction");
    find(set_attribute, "cuFuncSetAttribute");
    find(fill, "cuMemsetD8Async");
    find(launch, "cuLaunchKernelEx");
    find(name_of, "cuGetErrorName");
    find(text_of, "cuGetErrorString");
  }

  template <typename T>
  void find(T& function, const char* name) {
    function = reinterpret_cast<T>(dlsym(library_, name));
    if (function == nullptr && missing.empty()) missing = std::string("CUDA's driver is too old: it has no ") + name;
  }

  void* library_;
};

// Makes a stream's context current, and the former one again at the end.
class Current {
 public:
  Current(const Driver& driver, Context context) : driver_(driver), status(driver.push(context)) {}
  ~Current() {
    Context popped;
    if (status == 0) driver_.pop(&popped);
  }

 private:
  const Driver& driver_;

 public:
  const Status status;
};

// --- functions that were loaded --------------------------------------------------------------------------------------------

struct Kernel {
  std::string_view key, entry;
  ffi::Span<const std::uint8_t> cubin;
  int shared_memory;
};

// Loads a kernel once for each context. Modules stay: executables that hold their cubin may run at any time. Loading may wait for what
// runs on the device, such as a collective that waits for another device's thread: so the lock is not held. Should two threads
// of a context load the same at once, both copies work.
Function find(const Driver& driver, Context context, const Kernel& kernel, std::string& error) {
  static std::mutex mutex;
  static std::map<std::tuple<Context, std::string, std::string, int>, Function> known;
  const auto key =
      std::make_tuple(context, std::string(kernel.key), std::string(kernel.entry), kernel.shared_memory);
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (const auto found = known.find(key); found != known.end()) return found->second;
  }
  Module module;
  Function function;
  if (const Status status = driver.load(&module, kernel.cubin.begin()); status != 0) {
    error = driver.describe("loading a kernel", status);
  } else if (const Status status = driver.function(&function, module, std::get<2>(key).c_str()); status != 0) {
    error = driver.describe("finding a kernel", status);
  } else if (const Status status = driver.set_attribute(function, kMaxDynamicSharedMemory, kernel.shared_memory);
             status != 0) {
    error = driver.describe("giving a kernel " + std::to_string(kernel.shared_memory) + " bytes of shared memory", status);
  } else {
    const std::lock_guard<std::mutex> lock(mutex);
    return known[key] = function;
  }
  return nullptr;
}

ffi::Error Launch(Stream stream, ffi::RemainingArgs operands, ffi::RemainingRets results, std::string_view key,
                  std::string_view entry, ffi::Span<const std::uint8_t> cubin, std::int32_t grid, std::int32_t threads,
                  std::int32_t shared_memory, std::int32_t cooperative, std::int32_t zeroed,
                  ffi::Span<const std::int32_t> scalars) {
  const Driver& driver = Driver::get();
  if (!driver.missing.empty()) return ffi::Error(ffi::ErrorCode::kFailedPrecondition, driver.missing);
  const auto failed = [&](std::string_view what, Status status) {
    return ffi::Error(ffi::ErrorCode::kInternal, std::string(entry) + ", " + driver.describe(what, status));
  };

  Context context;
  if (const Status status = driver.stream_context(stream, &context); status != 0) return failed("asking for the context", status);
  const Current current(driver, context);
  if (current.status != 0) return failed("entering the context", current.status);
  std::string error;
  const Function function = find(driver, context, {key, entry, cubin, shared_memory}, error);
  if (function == nullptr) return ffi::Error(ffi::ErrorCode::kInternal, std::string(entry) + ", " + error);

  std::vector<void*> buffers;
  for (std::size_t i = 0; i < operands.size(); ++i) {
    const auto operand = operands.get<ffi::AnyBuffer>(i);
    if (operand.has_error()) return operand.error();
    buffers.push_back(operand->untyped_data());
  }
  for (std::size_t i = 0; i < results.size(); ++i) {
    auto result = results.get<ffi::AnyBuffer>(i);
    if (result.has_error()) return result.error();
    buffers.push_back((*result)->untyped_data());
    if (i + static_cast<std::size_t>(zeroed) < results.size()) continue;
    const auto at = reinterpret_cast<Pointer>(buffers.back());
    if (const Status status = driver.fill(at, 0, (*result)->size_bytes(), stream); status != 0) return failed("clearing a result", status);
  }
  std::vector<std::int32_t> values(scalars.begin(), scalars.end());
  std::vector<void*> parameters;
  for (void*& buffer : buffers) parameters.push_back(&buffer);
  for (std::int32_t& value : values) parameters.push_back(&value);

  AlignedAttribute attribute = {};
  attribute.id = kCooperative;
  attribute.cooperative = 1;
  const LaunchConfig config = {{static_cast<unsigned>(grid), 1, 1},
                               {static_cast<unsigned>(threads), 1, 1},
                               static_cast<unsigned>(shared_memory),
                               stream,
                               &attribute,
                               cooperative != 0 ? 1u : 0u};
  const Status status = driver.launch(&config, function, parameters.data(), nullptr);
  return status == 0 ? ffi::Error::Success() : failed("launching", status);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(ejkernel_cuda_launch, Launch,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<Stream>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<std::string_view>("key")
                                  .Attr<std::string_view>("entry")
                                  .Attr<ffi::Span<const std::uint8_t>>("cubin")
                                  .Attr<std::int32_t>("grid")
                                  .Attr<std::int32_t>("threads")
                                  .Attr<std::int32_t>("shared_memory")
                                  .Attr<std::int32_t>("cooperative")
                                  .Attr<std::int32_t>("zeroed")
                                  .Attr<ffi::Span<const std::int32_t>>("scalars"));
