// Memory of a group for tensors: an all-reduce of such a tensor copies nothing.
#pragma once

#include "base.hpp"

#include <atomic>
#include <map>
#include <mutex>
#include <numeric>

namespace {

// Blocks of memory that all ranks allocated together. Tensors are freed when each rank's interpreter drops them, so the
// ranks agree on the block of a new tensor. They do so in a group of their own: a call there does not wait for the
// operations in progress.
class Pool : public std::enable_shared_from_this<Pool> {
  public:
    // `group` must live as long as `allocate` is called.
    Pool(cvk_group* group, size_t size) : group_(group) {
        std::vector<size_t> ranks(size);
        std::iota(ranks.begin(), ranks.end(), 0);
        check(api->group_subgroup(group, ranks.data(), size, nullptr, &agreement_));
    }
    ~Pool() {
        for (auto& [size, blocks] : blocks_)
            for (auto& block : blocks) api->memory_free(block->memory);
        api->group_free(agreement_);
    }

    // Returns a tensor of one dimension. All ranks call it, with equal sizes.
    Tensor allocate(int64_t count, const at::TensorOptions& options) {
        const size_t needed = static_cast<size_t>(count) * options.dtype().itemsize();
        Block& block = block_for(rounded(needed));
        check(api->memory_limit_use(block.memory, needed));
        auto pool = shared_from_this();
        return at::from_blob(api->memory_address(block.memory), {count}, [pool, &block](void*) { block.is_free = true; },
                             options.device(at::kCPU));
    }

  private:
    struct Block {
        cvk_memory* memory = nullptr;
        std::atomic<bool> is_free{true};
    };
    // A block has one bit where ranks agree on it.
    static constexpr size_t kMost = 64;

    // Sizes in steps of an eighth of their power of two, so that tensors of about one size share blocks.
    static size_t rounded(size_t bytes) {
        size_t step = 4096;
        while (step * 16 <= bytes) step *= 2;
        return std::max<size_t>((bytes + step - 1) / step, 1) * step;
    }

    Block& block_for(size_t bytes) {
        std::lock_guard<std::mutex> lock(mutex_);
        auto& blocks = blocks_[bytes];
        uint64_t free = 0;
        for (size_t i = 0; i < blocks.size(); i++) free |= static_cast<uint64_t>(blocks[i]->is_free) << i;
        check(api->all_reduce(agreement_, nullptr, &free, 1, CVK_TYPE_U64, CVK_OP_BAND));
        for (size_t i = 0; i < blocks.size(); i++) {
            if (free >> i & 1) {
                blocks[i]->is_free = false;
                return *blocks[i];
            }
        }
        TORCH_CHECK(blocks.size() < kMost, "more than ", kMost, " tensors of about ", bytes,
                    " bytes are in memory of the group: free some, or allocate others with torch.empty");
        auto block = std::make_unique<Block>();
        check(api->alloc(group_, bytes, &block->memory));
        block->is_free = false;
        blocks.push_back(std::move(block));
        return *blocks.back();
    }

    cvk_group* const group_;
    cvk_group* agreement_ = nullptr;
    std::mutex mutex_;
    std::map<size_t, std::vector<std::unique_ptr<Block>>> blocks_;
};

}  // namespace
