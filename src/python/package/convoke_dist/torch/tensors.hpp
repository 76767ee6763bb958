// Tensors as memory that the runtime reads and writes.
#pragma once

#include "base.hpp"

namespace {

struct ElementType {
    uint32_t type;
    int64_t times;      // elements of that type in an element of the tensor
    bool is_reducible;  // the runtime can add elements of the tensor
};

ElementType element_type(const Tensor& tensor) {
    switch (tensor.scalar_type()) {
        case at::kChar: return {CVK_TYPE_I8, 1, true};
        case at::kByte: return {CVK_TYPE_U8, 1, true};
        case at::kShort: return {CVK_TYPE_I16, 1, true};
        case at::kInt: return {CVK_TYPE_I32, 1, true};
        case at::kLong: return {CVK_TYPE_I64, 1, true};
        case at::kHalf: return {CVK_TYPE_F16, 1, true};
        case at::kBFloat16: return {CVK_TYPE_BF16, 1, true};
        case at::kFloat: return {CVK_TYPE_F32, 1, true};
        case at::kDouble: return {CVK_TYPE_F64, 1, true};
        case at::kBool: return {CVK_TYPE_BOOL, 1, true};
        case at::kComplexFloat: return {CVK_TYPE_COMPLEX_F32, 1, true};
        case at::kComplexDouble: return {CVK_TYPE_COMPLEX_F64, 1, true};
        case at::kUInt16: return {CVK_TYPE_U16, 1, true};
        case at::kUInt32: return {CVK_TYPE_U32, 1, true};
        case at::kUInt64: return {CVK_TYPE_U64, 1, true};
        // Other types can be moved, as bytes.
        default: return {CVK_TYPE_U8, static_cast<int64_t>(tensor.element_size()), false};
    }
}

uint32_t reduction(const c10d::ReduceOp& op) {
    switch (op.op_) {
        case c10d::ReduceOp::SUM: return CVK_OP_SUM;
        case c10d::ReduceOp::AVG: return CVK_OP_AVG;
        case c10d::ReduceOp::PRODUCT: return CVK_OP_PRODUCT;
        case c10d::ReduceOp::MIN: return CVK_OP_MIN;
        case c10d::ReduceOp::MAX: return CVK_OP_MAX;
        case c10d::ReduceOp::BAND: return CVK_OP_BAND;
        case c10d::ReduceOp::BOR: return CVK_OP_BOR;
        case c10d::ReduceOp::BXOR: return CVK_OP_BXOR;
        case c10d::ReduceOp::PREMUL_SUM: return CVK_OP_PREMUL_SUM;
        default: TORCH_CHECK(false, "convoke has no reduction number ", static_cast<int>(op.op_));
    }
}

void check_tensor(const Tensor& tensor) {
    TORCH_CHECK(tensor.device().is_cpu(), "convoke moves CPU tensors, and this one is on ", tensor.device(),
                ": use the backend \"cpu:convoke,cuda:nccl\" for tensors on GPUs");
    TORCH_CHECK(tensor.layout() == at::kStrided, "convoke moves dense tensors, and this one is ", tensor.layout());
}

const Tensor& only(const Tensors& tensors) {
    TORCH_CHECK(tensors.size() == 1, "convoke takes one tensor for each rank, and got ", tensors.size());
    check_tensor(tensors[0]);
    return tensors[0];
}

void check_equal_types(const Tensors& tensors) {
    for (const auto& tensor : tensors) {
        check_tensor(tensor);
        TORCH_CHECK(tensor.scalar_type() == tensors[0].scalar_type(), "all tensors of a call must have one type, and these have ",
                    tensors[0].scalar_type(), " and ", tensor.scalar_type());
    }
}

// The elements of a tensor in one piece, in the order of its indices: the tensor itself, or a copy.
Tensor in_one_piece(const Tensor& tensor) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto plain = tensor.resolve_conj().resolve_neg();
    return plain.is_contiguous() ? plain : plain.contiguous();
}

void copy_to(const Tensor& to, const Tensor& from) {
    at::AutoDispatchBelowADInplaceOrView guard;
    to.copy_(from.view_as(to));
}

// Memory into which the runtime writes a tensor: the tensor itself if it is in one piece.
struct Target {
    Tensor memory;
    Tensor tensor;  // undefined if nothing is copied
    bool is_copied;

    explicit Target(const Tensor& to, bool is_read = true) : is_copied(!to.is_contiguous() || to.is_conj() || to.is_neg()) {
        if (!is_copied) {
            memory = to;
            return;
        }
        tensor = to;
        at::AutoDispatchBelowADInplaceOrView guard;
        memory = is_read ? in_one_piece(to).clone() : at::empty(to.sizes(), to.options().memory_format(at::MemoryFormat::Contiguous));
    }
    void deliver() const {
        if (is_copied) copy_to(tensor, memory);
    }
};

// Tensors of one type as one piece of memory: they themselves if they follow each other there.
struct Pieces {
    Tensors tensors;
    Tensor memory;
    bool is_copied = false;

    // `is_filled`: the memory gets the elements of the tensors.
    Pieces(Tensors list, bool is_filled) : tensors(std::move(list)) {
        at::AutoDispatchBelowADInplaceOrView guard;
        check_equal_types(tensors);
        if (tensors.empty()) return;
        int64_t count = 0;
        const char* next = static_cast<const char*>(tensors[0].const_data_ptr());
        for (const auto& tensor : tensors) {
            const bool follows = tensor.numel() == 0 || tensor.const_data_ptr() == next;
            is_copied = is_copied || !follows || !tensor.is_contiguous() || tensor.is_conj() || tensor.is_neg() ||
                !tensor.storage().is_alias_of(tensors[0].storage());
            next += tensor.nbytes();
            count += tensor.numel();
        }
        if (!is_copied) {
            memory = tensors[0];
            return;
        }
        memory = at::empty({count}, tensors[0].options().memory_format(at::MemoryFormat::Contiguous).requires_grad(false));
        if (is_filled) each([](Tensor part, const Tensor& tensor) { part.copy_(tensor.resolve_conj().resolve_neg().reshape({-1})); });
    }
    void deliver() const {
        at::AutoDispatchBelowADInplaceOrView guard;
        if (is_copied) each([](const Tensor& part, const Tensor& tensor) { tensor.copy_(part.view_as(tensor)); });
    }

  private:
    template <typename F>
    void each(F copy) const {
        int64_t start = 0;
        for (const auto& tensor : tensors) {
            copy(memory.narrow(0, start, tensor.numel()), tensor);
            start += tensor.numel();
        }
    }
};

}  // namespace
