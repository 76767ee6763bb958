// Functions that the program or torch's own flight recorder registers at a group: for finished operations, and for its end.
#pragma once

#include "base.hpp"

#include <atomic>
#include <functional>
#include <map>
#include <mutex>

namespace {

// Functions by the number under which they were registered.
template <typename... Args>
class Hooks {
  public:
    void add(int64_t id, std::function<void(Args...)> function) {
        std::lock_guard<std::mutex> lock(mutex_);
        functions_[id] = std::move(function);
        is_empty_ = false;
    }
    void remove(int64_t id) {
        std::lock_guard<std::mutex> lock(mutex_);
        functions_.erase(id);
        is_empty_ = functions_.empty();
    }
    bool is_empty() const { return is_empty_; }
    // Any thread calls this, also threads of the runtime, which no exception may pass.
    void call(Args... args) {
        if (is_empty_) return;
        std::map<int64_t, std::function<void(Args...)>> functions;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            functions = functions_;
        }
        for (const auto& [id, function] : functions) {
            try {
                function(args...);
            } catch (const std::exception& error) {
                TORCH_WARN("convoke: a registered hook failed: ", error.what());
            }
        }
    }

  private:
    std::mutex mutex_;
    std::map<int64_t, std::function<void(Args...)>> functions_;
    std::atomic<bool> is_empty_{true};
};

// The hooks of a group. Operations share them, because they may outlive the backend.
class GroupHooks {
  public:
    // `key`: of the work; `ms`: how long the operation took.
    Hooks<uint64_t, float> completion;
    Hooks<> abort;

    // The key of a new work, and the time at which it begins.
    struct Start {
        uint64_t key = 0;
        std::chrono::steady_clock::time_point at;
    };
    // Costs a load if there are no hooks.
    Start start() { return completion.is_empty() ? Start{} : Start{++last_key_, std::chrono::steady_clock::now()}; }
    void done(const Start& start) {
        if (start.key == 0) return;
        const std::chrono::duration<float, std::milli> taken = std::chrono::steady_clock::now() - start.at;
        completion.call(start.key, taken.count());
    }
    // Call this after a failed call: an error that leaves the group as it was calls no hook.
    void failed() {
        if (!abort.is_empty() && api->error_ends_group()) abort.call();
    }

  private:
    std::atomic<uint64_t> last_key_{0};
};

}  // namespace
