// The table of functions, its errors, and the differences between the minors of torch.
#pragma once

#include "convoke.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/version.h>

// The library's headers ask the glibc of the build machine for this (2.32), so that a program of one thread saves atomics.
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}

namespace {

// Differences between the minors of torch.
#define TORCH_SINCE(minor) (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= (minor))
#if TORCH_SINCE(13)
using c10d::PreMulSumSupplement;
#else
using PreMulSumSupplement = c10d::NCCLPreMulSumSupplement;
#endif
#if TORCH_SINCE(15)
#define OVERRIDE_SINCE_15 override
#else
#define OVERRIDE_SINCE_15
#endif
#if TORCH_SINCE(14)
#define OVERRIDE_SINCE_14 override
#define COALESCED_AS(type) OpType::type
#else
#define OVERRIDE_SINCE_14
#define COALESCED_AS(type) OpType::COALESCED
#endif
#if TORCH_SINCE(9)
#define OVERRIDE_SINCE_9 override
#else
#define OVERRIDE_SINCE_9
#endif

using at::Tensor;
using c10d::OpType;
using Tensors = std::vector<Tensor>;
using KeptTensors = c10::SmallVector<Tensor, 4>;
using Milliseconds = std::chrono::milliseconds;

const cvk_api_table* api = nullptr;

std::exception_ptr error_of(const std::string& message) {
    return std::make_exception_ptr(c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, message));
}

// The error of the last failed call of this thread. Scripts look for the word "timeout".
std::exception_ptr last_error(cvk_status status) {
    const char* message = api->error_message();
    const char* kind = status == CVK_STATUS_TIMEOUT ? "convoke timeout error: " : "convoke: ";
    return error_of(c10::str(kind, message ? message : "unknown error"));
}

void check(cvk_status status) {
    if (status != CVK_STATUS_OK) std::rethrow_exception(last_error(status));
}

}  // namespace
