// Calls of the runtime, made from tensors.
#pragma once

#include "tensors.hpp"

#include <array>
#include <cstring>
#include <functional>

namespace {

// A call of the runtime, and what must live as long as it.
struct Call {
    cvk_call raw{};
    KeptTensors tensors;
    std::vector<size_t> send_counts, recv_counts;
    std::shared_ptr<std::array<char, 16>> factor;
    std::function<void()> deliver;

    explicit Call(cvk_kind kind, int64_t peer = 0, int64_t tag = 0) {
        raw.size = sizeof raw;
        raw.kind = static_cast<uint32_t>(kind);
        raw.peer = peer;
        raw.tag = static_cast<uint32_t>(tag);
    }
    Call& send(const Tensor& tensor) { return send(tensor, tensor.numel()); }
    Call& send(const Tensor& tensor, int64_t count) {
        raw.send = tensor.const_data_ptr();
        sent_ = tensors.size();
        raw.send_count = keep(tensor, count);
        return *this;
    }
    Call& recv(const Tensor& tensor) { return recv(tensor, tensor.numel()); }
    Call& recv(const Tensor& tensor, int64_t count) {
        raw.recv = tensor.mutable_data_ptr();
        raw.recv_count = keep(tensor, count);
        return *this;
    }
    Call& by(const c10d::ReduceOp& op, const Tensor& like) {
        TORCH_CHECK(element_type(like).is_reducible, "convoke cannot reduce elements of type ", like.scalar_type(),
                    "; it can move them");
        raw.reduce_op = reduction(op);
        if (op.op_ == c10d::ReduceOp::PREMUL_SUM) set_factor(op, like);
        return *this;
    }
    Call& then(std::function<void()> function) {
        deliver = std::move(function);
        return *this;
    }

    // Copies what is sent if the call writes to the same memory, as torch allows.
    void separate() {
        const auto* send = static_cast<const char*>(raw.send);
        const auto* recv = static_cast<const char*>(raw.recv);
        if (!send || !recv) return;
        const Tensor sent = tensors[sent_];
        const auto bytes = [&](size_t count) { return count * sent.element_size() / static_cast<size_t>(element_type(sent).times); };
        if (send < recv + bytes(raw.recv_count) && recv < send + bytes(raw.send_count)) this->send(sent.clone(), sent.numel());
    }

  private:
    size_t sent_ = 0;  // where in `tensors` the sent tensor is
    // Keeps a tensor as long as the call. Returns the number of elements of the call's type for `count` of the tensor's.
    size_t keep(const Tensor& tensor, int64_t count) {
        const auto type = element_type(tensor);
        raw.dtype = type.type;
        tensors.push_back(tensor);
        return static_cast<size_t>(count * type.times);
    }
    void set_factor(const c10d::ReduceOp& op, const Tensor& like) {
        const auto* supplement = static_cast<PreMulSumSupplement*>(op.supplement_.get());
        TORCH_CHECK(supplement, "PREMUL_SUM has no factor");
        const auto type = like.scalar_type();
        const auto factor_type = type == at::kHalf || type == at::kBFloat16 ? at::kFloat : type;
        const Tensor value = supplement->tensor_factor.defined()
            ? supplement->tensor_factor.detach().to(factor_type).contiguous()
            : at::full({1}, supplement->double_factor, at::TensorOptions(factor_type));
        factor = std::make_shared<std::array<char, 16>>();
        std::memcpy(factor->data(), value.const_data_ptr(), value.nbytes());
        raw.factor = factor->data();
    }
};

std::vector<size_t> scaled(const std::vector<int64_t>& counts, int64_t times) {
    std::vector<size_t> scaled;
    for (int64_t count : counts) scaled.push_back(static_cast<size_t>(count * times));
    return scaled;
}

}  // namespace
