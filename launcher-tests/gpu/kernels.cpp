// The kernels of this repository for devices that are not there: compiled for the host, where one thread does what all threads of
// a GPU would, one after the other. driver.c finds them in what this becomes, a library that lies beside it.
// Build: c++ -std=c++17 -O1 -shared -fPIC -o libsimulated-kernels.so kernels.cpp
#include <cmath>
#include <cstring>
#include <ctime>
#include <functional>
#include <tuple>

// --- what CUDA has without a header ---

#define __global__
#define __device__

namespace {

struct place { unsigned x; };
thread_local place threadIdx, blockIdx, blockDim, gridDim;

[[maybe_unused]] float __uint_as_float(unsigned bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

[[maybe_unused]] unsigned __float_as_uint(float value) {
  unsigned bits;
  memcpy(&bits, &value, 4);
  return bits;
}

// A tick is a nanosecond.
long long clock64() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}

void __nanosleep(unsigned time) {
  timespec moment = {0, time};
  nanosleep(&moment, nullptr);
}

}  // namespace

#include "../../src/examples/digits/device/kernels.cu"
#include "../../src/tools/gpu_check/kernels.cu"
#include "../../src/train/device/add.cu"

// --- how driver.c calls them ---

namespace {

using bound = std::function<void()>;

struct kernel {
  const char *name;
  std::function<bound(void **)> bind;
};

// Arguments are copied when a kernel is launched, as CUDA does.
template <class... A>
std::function<bound(void **)> binder(void (*of)(A...)) {
  return [of](void **given) {
    size_t i = 0;
    std::tuple<A...> arguments{*static_cast<A *>(given[i++])...};
    return [of, arguments] { std::apply(of, arguments); };
  };
}

#define KERNEL(name) {#name, binder(name)}

const kernel kernels[] = {
    KERNEL(add_bf16), KERNEL(add_f16), KERNEL(add_f32), KERNEL(add_f64), KERNEL(add_loss), KERNEL(add_one),
    KERNEL(bias_gradient), KERNEL(descend), KERNEL(errors_before), KERNEL(forward), KERNEL(gather), KERNEL(softmax),
    KERNEL(spin), KERNEL(sum), KERNEL(weights_gradient),
};

}  // namespace

extern "C" const void *simulated_kernel(const char *name) {
  for (const kernel &each : kernels)
    if (!strcmp(each.name, name)) return &each;
  return nullptr;
}

extern "C" void *simulated_bind(const void *of, void **arguments) {
  return new bound(static_cast<const kernel *>(of)->bind(arguments));
}

extern "C" void simulated_run(void *given, unsigned blocks, unsigned threads) {
  bound *of = static_cast<bound *>(given);
  gridDim.x = blocks, blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
    for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++) (*of)();
  delete of;
}
