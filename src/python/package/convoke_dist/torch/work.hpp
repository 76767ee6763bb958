// Operations in progress, and their works and futures.
//
// A thread of the runtime must destroy no tensor: a tensor may belong to a Python object, and its release needs the
// interpreter's lock, which a thread cannot take while the interpreter ends. So the callback of a finished operation
// only marks it as done, and puts it into a list. Threads that call the backend empty the list.
//
// Prebuilt parts must load with glibc 2.28 and the C++ library of GCC 11. So this uses the wait of atomics, which is all in
// headers, and not std::condition_variable, which asks for the library of GCC 12.
#pragma once

#include "hooks.hpp"

#include <atomic>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include <pthread.h>

namespace {

class ConvokeWork;

// An operation that was begun. Its work, the callback of the runtime and the list of finished operations share it.
struct Operation {
    KeptTensors tensors;            // memory that the call uses, and where its results go
    std::function<void()> deliver;  // moves results to their place
    cvk_work* handle = nullptr;
    std::mutex mutex;
    bool is_begun = false, is_finished = false;
    std::atomic<bool> is_done{false};
    ConvokeWork* work = nullptr;  // null after the work was destroyed
    c10::intrusive_ptr<c10::ivalue::Future> future;
    c10::IValue result;
    std::shared_ptr<GroupHooks> hooks;
    GroupHooks::Start start;

    ~Operation() { api->work_free(handle); }
};

using OperationPtr = std::shared_ptr<Operation>;

// Finished operations and completed futures, for threads that may destroy tensors.
class Finished {
  public:
    void add(std::shared_ptr<void> kept) {
        std::lock_guard<std::mutex> lock(mutex_);
        kept_.push_back(std::move(kept));
        is_empty_ = false;
    }
    // Destroys them. Only threads that call the backend call this.
    void release() {
        if (is_empty_) return;
        std::vector<std::shared_ptr<void>> kept;  // destroyed after the lock is released
        std::lock_guard<std::mutex> lock(mutex_);
        kept.swap(kept_);
        is_empty_ = true;
    }

  private:
    std::mutex mutex_;
    std::atomic<bool> is_empty_{true};
    std::vector<std::shared_ptr<void>> kept_;
};

Finished& finished();

// The threads that complete futures. Their callbacks are the program's code and may wait for operations and for other
// futures, as PowerSGD's do. So no thread of the runtime can run them, and there is another thread while all wait.
class FutureThreads {
  public:
    void complete(c10::intrusive_ptr<c10::ivalue::Future> future, c10::IValue result, std::exception_ptr error) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (is_stopped_) return leak(std::move(future), std::move(result));
        tasks_.push_back({std::move(future), std::move(result), std::move(error)});
        if (tasks_.size() > idle_ && threads_.size() < kMost) threads_.emplace_back([this] { run(); });
        wake();
    }
    // Completes what is queued and ends the threads. The program calls this before the interpreter ends.
    void stop() {
        std::vector<std::thread> threads;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            is_stopped_ = true;
            threads.swap(threads_);
            wake();
        }
        for (auto& thread : threads) thread.join();
    }

  private:
    struct Task {
        c10::intrusive_ptr<c10::ivalue::Future> future;
        c10::IValue result;
        std::exception_ptr error;
    };
    // Callbacks that wait for each other are seldom nested deeper.
    static constexpr size_t kMost = 8;

    static void leak(c10::intrusive_ptr<c10::ivalue::Future> future, c10::IValue result) {
        (void)future.release();
        new c10::IValue(std::move(result));
    }
    void wake() {
        events_++;
        events_.notify_all();
    }
    void run() {
        for (;;) {
            const uint32_t seen = events_;
            std::unique_lock<std::mutex> lock(mutex_);
            if (tasks_.empty()) {
                if (is_stopped_) return;
                idle_++;
                lock.unlock();
                events_.wait(seen);
                lock.lock();
                idle_--;
                continue;
            }
            Task task = std::move(tasks_.front());
            tasks_.pop_front();
            lock.unlock();
            if (task.error) {
                task.future->setError(task.error);
            } else {
                task.future->markCompleted(std::move(task.result));
            }
            finished().add(std::make_shared<c10::intrusive_ptr<c10::ivalue::Future>>(std::move(task.future)));
        }
    }
    std::mutex mutex_;
    std::atomic<uint32_t> events_{0};
    std::deque<Task> tasks_;
    std::vector<std::thread> threads_;
    size_t idle_ = 0;
    bool is_stopped_ = false;
};

// What all groups of a process share. Never destroyed: threads of the runtime may use it while the process ends. A forked
// child gets its own, since it has no thread of its parent, and its parent's locks may be locked for ever.
struct ProcessState {
    Finished finished;
    FutureThreads future_threads;
};

std::atomic<ProcessState*> current_state{nullptr};

ProcessState& process_state() {
    static const int installed = [] {
        current_state = new ProcessState;
        return pthread_atfork(nullptr, nullptr, [] { current_state = new ProcessState; });
    }();
    (void)installed;
    return *current_state;
}

Finished& finished() { return process_state().finished; }
FutureThreads& future_threads() { return process_state().future_threads; }

// What the future of a work returns: a list of tensors, or several lists.
struct Results {
    Tensors list;                // the first
    std::vector<Tensors> lists;  // all, if there are several

    Results() = default;
    Results(Tensors list) : list(std::move(list)) {}
    Results(std::vector<Tensors> all) {
        if (!all.empty()) list = all.size() == 1 ? std::move(all[0]) : all[0];
        if (all.size() > 1) lists = std::move(all);
    }
    c10::TypePtr type() const {
        auto element = c10::ListType::create(c10::TensorType::get());
        return lists.empty() ? c10::TypePtr(element) : c10::TypePtr(c10::ListType::create(element));
    }
    c10::IValue value() const { return lists.empty() ? c10::IValue(list) : c10::IValue(lists); }
};

class ConvokeWork final : public c10d::Work {
  public:
    // `inputs` are shown in profiles.
    ConvokeWork(OpType type, const char* title, const Tensors& inputs, Results results, uint64_t seq, uint64_t key)
        : ConvokeWork(is_profiled(), type, title, inputs, std::move(results), seq, key) {}

    ~ConvokeWork() override {
        if (!operation_) return;
        std::lock_guard<std::mutex> lock(operation_->mutex);
        operation_->work = nullptr;
    }

    void begin_with(OperationPtr operation) {
        operation_ = std::move(operation);
        operation_->work = this;
    }

    // The operation has ended; ends its range in profiles.
    void end(std::exception_ptr error, int source) {
        source_ = source;
        finish(std::move(error));
    }

    bool isCompleted() override { return !operation_ || operation_->is_done; }
    bool isSuccess() const override { return (!operation_ || operation_->is_done) && !exception(); }
    std::exception_ptr exception() const override {
        std::lock_guard<std::mutex> lock(mutex_);
        return exception_;
    }
    int sourceRank() const override { return source_; }
    Tensors result() override {
        TORCH_CHECK(isCompleted(), "The work is not completed: wait for it before you ask for its result.");
        return results_.list;
    }
    void synchronize() override {}
    uint64_t getSequencenumber() const override { return seq_; }
    uint64_t getCompletionKey() const OVERRIDE_SINCE_15 { return key_; }

    bool wait(Milliseconds timeout) override {
        finished().release();
        if (operation_ && !operation_->is_done) {
            const bool is_limited = timeout != kNoTimeout && timeout.count() > 0;
            const uint64_t limit = is_limited ? static_cast<uint64_t>(timeout.count()) : CVK_FOREVER;
            const auto begin = std::chrono::steady_clock::now();
            if (api->work_wait(operation_->handle, limit, nullptr) == CVK_STATUS_PENDING) {
                const auto waited = std::chrono::ceil<Milliseconds>(std::chrono::steady_clock::now() - begin);
                const bool is_over = is_limited && waited >= timeout;
                std::rethrow_exception(error_of(c10::str(
                    is_over ? "wait timed out after " : "wait was interrupted by a signal after ",
                    is_over ? timeout.count() : waited.count(), " ms; the operation goes on, until its own time limit")));
            }
            // The thread that found the operation finished delivers its results.
            operation_->is_done.wait(false);
        }
        finished().release();
        if (auto error = exception()) std::rethrow_exception(error);
        return true;
    }

    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
        std::unique_lock<std::mutex> own(future_mutex_);
        if (future_) return future_;
        future_ = c10::make_intrusive<c10::ivalue::Future>(results_.type());
        c10::IValue value = results_.value();
        if (operation_) {
            std::lock_guard<std::mutex> lock(operation_->mutex);
            if (!operation_->is_done) {
                operation_->future = future_;
                operation_->result = std::move(value);
                return future_;
            }
        }
        if (auto error = exception()) {
            future_->setError(error);
        } else {
            future_->markCompleted(std::move(value));
        }
        return future_;
    }

  private:
    // The base makes a record of the title and the inputs, which costs 0.2 us, also if nobody profiles.
    ConvokeWork(bool is_profiled, OpType type, const char* title, const Tensors& inputs, Results results, uint64_t seq, uint64_t key)
        : Work(-1, type, is_profiled ? title : nullptr, is_profiled ? std::optional(inputs) : std::nullopt),
          results_(std::move(results)), seq_(seq), key_(key) {}
    static bool is_profiled() { return at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE).has_value(); }

    OperationPtr operation_;  // null if the operation was carried out at once
    Results results_;
    const uint64_t seq_, key_;
    std::atomic<int> source_{-1};
    std::mutex future_mutex_;
    c10::intrusive_ptr<c10::ivalue::Future> future_;
};

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Delivers the results of an operation that was begun and is finished, and tells all who wait for it.
void complete(const OperationPtr& operation) {
    cvk_message message{};
    const cvk_status status = api->work_wait(operation->handle, 0, &message);
    std::exception_ptr error;
    if (status != CVK_STATUS_OK) {
        error = last_error(status);
        operation->hooks->failed();
    } else if (operation->deliver) {
        try {
            operation->deliver();
        } catch (...) {
            error = std::current_exception();
        }
    }
    c10::intrusive_ptr<c10::ivalue::Future> future;
    c10::IValue result;
    {
        std::lock_guard<std::mutex> lock(operation->mutex);
        if (operation->work) operation->work->end(error, static_cast<int>(message.source));
        future = std::move(operation->future);
        result = std::move(operation->result);
        operation->is_done = true;
    }
    operation->is_done.notify_all();
    if (!error) operation->hooks->done(operation->start);
    if (future) future_threads().complete(std::move(future), std::move(result), error);
}

// Called by the runtime, once, when an operation is finished.
void on_complete(void* context) {
    std::unique_ptr<OperationPtr> kept(static_cast<OperationPtr*>(context));
    OperationPtr operation = std::move(*kept);
    bool is_begun;
    {
        std::lock_guard<std::mutex> lock(operation->mutex);
        operation->is_finished = true;
        is_begun = operation->is_begun;
    }
    // If it is not, the thread that begins it completes it.
    if (is_begun) complete(operation);
    finished().add(std::move(operation));
}

// The work of several works.
class JointWork final : public c10d::Work {
  public:
    JointWork(OpType type, std::vector<WorkPtr> works, Tensors results)
        : Work(-1, type), works_(std::move(works)), results_(std::move(results)) {}
    bool isCompleted() override {
        return std::all_of(works_.begin(), works_.end(), [](const WorkPtr& work) { return work->isCompleted(); });
    }
    bool isSuccess() const override {
        return std::all_of(works_.begin(), works_.end(), [](const WorkPtr& work) { return work->isSuccess(); });
    }
    std::exception_ptr exception() const override {
        for (const auto& work : works_)
            if (auto error = work->exception()) return error;
        return nullptr;
    }
    void synchronize() override {}
    bool wait(Milliseconds timeout) override {
        for (const auto& work : works_) work->wait(timeout);
        return true;
    }
    Tensors result() override { return results_; }
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
        c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(c10::FutureType::create(c10::ListType::create(c10::TensorType::get())));
        for (const auto& work : works_) futures.push_back(work->getFuture());
        auto all = c10::collectAll(futures);
        auto results = results_;
        return all->then(
            [all, results](c10::ivalue::Future&) {
                for (const c10::IValue& future : all->value().toListRef()) future.toFuture()->value();
                return c10::IValue(results);
            },
            c10::ListType::create(c10::TensorType::get()));
    }

  private:
    std::vector<WorkPtr> works_;
    Tensors results_;
};

}  // namespace
