// The backend "convoke" of torch.distributed: a c10d::Backend on the table of functions of libconvoke.
//
// It translates tensors and options to calls, and results to works and futures. It contains no Python, so one build
// serves every Python version. docs/internals/pytorch.md describes it.
//
// A thread of the runtime must destroy no tensor: a tensor may belong to a Python object, and its release needs the
// interpreter's lock, which a thread cannot take while the interpreter ends. So the callback of a finished operation
// only marks it as done, and puts it into a list. Threads that call the backend empty the list.
//
// Prebuilt parts must load with glibc 2.28 and the C++ library of GCC 11. So this uses the wait of atomics, which is all in
// headers, and not std::condition_variable, which asks for the library of GCC 12.

#include "convoke.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>
#include <torch/version.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

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

// ---------------------------------------------------------------------------------------------------------------
// Operations in progress

class ConvokeWork;

// An operation that was begun. Its work, the callback of the runtime and the list of finished operations share it.
struct Operation {
    Tensors tensors;                // memory that the call uses, and where its results go
    std::function<void()> deliver;  // moves results to their place
    cvk_work* handle = nullptr;
    std::mutex mutex;
    bool is_begun = false, is_finished = false;
    std::atomic<bool> is_done{false};
    ConvokeWork* work = nullptr;  // null after the work was destroyed
    c10::intrusive_ptr<c10::ivalue::Future> future;
    c10::IValue result;

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

// Never destroyed: threads of the runtime may use it while the process ends.
Finished& finished() {
    static auto* list = new Finished;
    return *list;
}

// The thread that completes futures. Their callbacks are the program's code and may wait for operations, so no thread
// of the runtime can run them.
class FutureThread {
  public:
    void complete(c10::intrusive_ptr<c10::ivalue::Future> future, c10::IValue result, std::exception_ptr error) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (is_stopped_) return leak(std::move(future), std::move(result));
        tasks_.push_back({std::move(future), std::move(result), std::move(error)});
        if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
        wake();
    }
    // Completes what is queued and ends the thread. The program calls this before the interpreter ends.
    void stop() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            is_stopped_ = true;
            wake();
        }
        if (thread_.joinable()) thread_.join();
    }

  private:
    struct Task {
        c10::intrusive_ptr<c10::ivalue::Future> future;
        c10::IValue result;
        std::exception_ptr error;
    };
    static void leak(c10::intrusive_ptr<c10::ivalue::Future> future, c10::IValue result) {
        (void)future.release();
        new c10::IValue(std::move(result));
    }
    void wake() {
        events_++;
        events_.notify_one();
    }
    void run() {
        for (;;) {
            const uint32_t seen = events_;
            std::unique_lock<std::mutex> lock(mutex_);
            if (tasks_.empty()) {
                if (is_stopped_) return;
                lock.unlock();
                events_.wait(seen);
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
    std::thread thread_;
    bool is_stopped_ = false;
};

FutureThread& future_thread() {
    static auto* thread = new FutureThread;
    return *thread;
}

class ConvokeWork final : public c10d::Work {
  public:
    // `inputs` are shown in profiles. `results` are what the future returns, for several lists of tensors as well.
    ConvokeWork(OpType type, const char* title, const Tensors& inputs, std::vector<Tensors> results, uint64_t seq)
        : Work(-1, type, title, inputs), results_(std::move(results)), seq_(seq) {}

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
        return results_.empty() ? Tensors() : results_[0];
    }
    void synchronize() override {}
    uint64_t getSequencenumber() const override { return seq_; }

    bool wait(Milliseconds timeout) override {
        finished().release();
        if (operation_ && !operation_->is_done) {
            const bool is_limited = timeout != kNoTimeout && timeout.count() > 0;
            const uint64_t limit = is_limited ? static_cast<uint64_t>(timeout.count()) : CVK_FOREVER;
            if (api->work_wait(operation_->handle, limit, nullptr) == CVK_STATUS_PENDING) {
                std::rethrow_exception(error_of(c10::str(
                    "wait timed out after ", timeout.count(), " ms; the operation goes on, until its own time limit")));
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
        auto element = c10::ListType::create(c10::TensorType::get());
        future_ = c10::make_intrusive<c10::ivalue::Future>(
            results_.size() > 1 ? c10::TypePtr(c10::ListType::create(element)) : c10::TypePtr(element));
        c10::IValue value =
            results_.size() > 1 ? c10::IValue(results_) : c10::IValue(results_.empty() ? Tensors() : results_[0]);
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
    OperationPtr operation_;  // null if the operation was carried out at once
    std::vector<Tensors> results_;
    const uint64_t seq_;
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
    if (future) future_thread().complete(std::move(future), std::move(result), error);
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

// ---------------------------------------------------------------------------------------------------------------
// Tensors as buffers

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
    Tensor tensor;
    bool is_copied;

    explicit Target(const Tensor& to, bool is_read = true) : tensor(to) {
        is_copied = !to.is_contiguous() || to.is_conj() || to.is_neg();
        at::AutoDispatchBelowADInplaceOrView guard;
        memory = !is_copied ? to : is_read ? in_one_piece(to).clone() : at::empty(to.sizes(), to.options().memory_format(at::MemoryFormat::Contiguous));
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

// ---------------------------------------------------------------------------------------------------------------
// Calls

// A call of the runtime, and what must live as long as it.
struct Call {
    cvk_call raw{};
    Tensors tensors;
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

  private:
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

// ---------------------------------------------------------------------------------------------------------------
// The backend

// The name of an operation in profiles. Scripts that name gloo find it there.
#define TITLE(operation) (is_gloo_ ? "gloo:" operation : "convoke:" operation)

class ConvokeBackend final : public c10d::Backend {
  public:
    struct Options : c10d::Backend::Options {
        Options(const char* name, Milliseconds timeout) : c10d::Backend::Options(name, timeout) {}
    };

    ConvokeBackend(cvk_group* group, Milliseconds timeout, bool is_gloo)
        : Backend(static_cast<int>(api->group_rank(group)), static_cast<int>(api->group_size(group))),
          group_(group), is_gloo_(is_gloo),
          options_(c10::make_intrusive<Options>(is_gloo ? "gloo" : "convoke", timeout)) {
        init();
    }
    ~ConvokeBackend() override { release_group(); }

    const std::string getBackendName() const override { return options_->backend; }
    c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() OVERRIDE_SINCE_9 { return options_; }
    void setTimeout(Milliseconds timeout) OVERRIDE_SINCE_9 { options_->timeout = timeout; }
    uint64_t getSequenceNumberForGroup() override { return seq_; }
    bool supportsCoalescing() const override { return true; }

    void abort() override { (void)api->group_abort(group_, "the program called abort"); }
    void shutdown() override { (void)api->group_destroy(group_); }
    c10d::ErrorType getError() override {
        const char* failure = api->group_failure_json(group_);
        if (!failure) return c10d::ErrorType::SUCCESS;
        return std::strstr(failure, "\"code\":\"timeout\"") ? c10d::ErrorType::TIMEOUT : c10d::ErrorType::COMM_ERROR;
    }
    std::string failure() const {
        const char* failure = api->group_failure_json(group_);
        return failure ? failure : "";
    }

    // Works of the operations between both calls are waited for by one work.
    void startCoalescing() override {
        TORCH_CHECK(!is_coalescing_, "startCoalescing was called twice");
        is_coalescing_ = true;
    }
    WorkPtr endCoalescing() override {
        is_coalescing_ = false;
        return c10::make_intrusive<JointWork>(OpType::COALESCED, std::move(coalesced_), Tensors());
    }

    WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
        Target target(only(tensors), opts.rootRank == rank_);
        Call call(CVK_KIND_BROADCAST, opts.rootRank);
        call.recv(target.memory);
        if (opts.rootRank != rank_) call.then([target] { target.deliver(); });
        return carry_out(OpType::BROADCAST, TITLE("broadcast"), call, tensors, {tensors}, opts);
    }

    WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
        if (tensors.size() == 1 && tensors[0].is_sparse()) return allreduce_sparse(tensors, opts);
        return reduce_all(only(tensors), tensors, opts, OpType::ALLREDUCE, TITLE("all_reduce"));
    }

    // Gathers the indices and values of all ranks, and adds them. It waits, also if the options do not ask for it.
    WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
        TORCH_CHECK(tensors.size() == 1 && tensors[0].is_sparse() && tensors[0].device().is_cpu(),
                    "allreduce_sparse takes one sparse CPU tensor");
        TORCH_CHECK(opts.reduceOp == c10d::ReduceOp::SUM, "sparse tensors can only be added");
        seq_++;
        at::AutoDispatchBelowADInplaceOrView guard;
        const Tensor input = tensors[0].coalesce();
        const int64_t sparse_dim = input.sparse_dim(), entries = input._nnz();
        const Tensor mine = at::full({1}, entries, at::kLong), counts = at::empty({size_}, at::kLong);
        run_now(Call(CVK_KIND_ALL_GATHER).send(mine).recv(counts), opts.timeout);
        const auto* count = counts.const_data_ptr<int64_t>();
        const int64_t all = counts.sum().item<int64_t>();
        const Tensor values = input._values().contiguous(), indices = input._indices().t().contiguous();
        auto shape = values.sizes().vec();
        shape[0] = all;
        const int64_t row = entries > 0 ? values.numel() / entries : c10::multiply_integers(shape.begin() + 1, shape.end());
        const Tensor all_values = at::empty(shape, values.options()), all_indices = at::empty({all, sparse_dim}, at::kLong);
        Call of_values(CVK_KIND_ALL_GATHER_V), of_indices(CVK_KIND_ALL_GATHER_V);
        const auto times = element_type(values).times;
        for (int rank = 0; rank < size_; rank++) {
            of_values.recv_counts.push_back(static_cast<size_t>(count[rank] * row * times));
            of_indices.recv_counts.push_back(static_cast<size_t>(count[rank] * sparse_dim));
        }
        run_now(of_values.send(values).recv(all_values), opts.timeout);
        run_now(of_indices.send(indices).recv(all_indices), opts.timeout);
        tensors[0].copy_(at::sparse_coo_tensor(all_indices.t(), all_values, input.sizes()).coalesce());
        auto work = c10::make_intrusive<ConvokeWork>(OpType::_ALLREDUCE_SPARSE, TITLE("all_reduce"), tensors,
                                                     std::vector<Tensors>{tensors}, seq_);
        work->end(nullptr, -1);
        return work;
    }

    WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
        check_equal_types(tensors);
        auto pieces = std::make_shared<Pieces>(tensors, true);
        if (tensors.empty()) return nothing(OpType::ALLREDUCE_COALESCED);
        Call call(CVK_KIND_ALL_REDUCE);
        call.recv(pieces->memory, total(tensors)).by(opts.reduceOp, tensors[0]).then([pieces] { pieces->deliver(); });
        return carry_out(OpType::ALLREDUCE_COALESCED, TITLE("all_reduce_coalesced"), call, tensors, {tensors}, opts);
    }

    WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
        // In place on the root; the tensors of other ranks must not change.
        const Tensor& tensor = only(tensors);
        const bool is_root = opts.rootRank == rank_;
        Call call(CVK_KIND_REDUCE, opts.rootRank);
        call.by(opts.reduceOp, tensor);
        if (is_root) {
            Target target(tensor);
            auto input = at::empty_like(target.memory);
            input.copy_(target.memory);
            call.send(input).recv(target.memory).then([target] { target.deliver(); });
        } else {
            call.send(in_one_piece(tensor));
        }
        return carry_out(OpType::REDUCE, TITLE("reduce"), call, tensors, {tensors}, opts);
    }

    WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
        const Tensor& input = only(inputs);
        TORCH_CHECK(outputs.size() == 1, "convoke gathers one list of tensors, and got ", outputs.size());
        check_list(outputs[0], input, "output");
        return gather_all(std::make_shared<Pieces>(outputs[0], false), input, input.numel(), OpType::ALLGATHER, TITLE("all_gather"),
                          inputs, outputs, opts);
    }

    WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& opts) override {
        check_tensor(input);
        check_size(output, input, size_, "output");
        return gather_all(std::make_shared<Pieces>(Tensors{output}, false), input, input.numel(), OpType::_ALLGATHER_BASE,
                          TITLE("_all_gather_base"), {input}, {{output}}, opts);
    }

    WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                const c10d::AllgatherOptions& opts) override {
        // outputs[rank][i] gets inputs[i] of that rank.
        TORCH_CHECK(outputs.size() == static_cast<size_t>(size_), "all_gather_coalesced needs a list for each of ", size_,
                    " ranks, and got ", outputs.size());
        Tensors all;
        for (const auto& list : outputs) {
            TORCH_CHECK(list.size() == inputs.size(), "all_gather_coalesced got ", inputs.size(), " inputs and a list of ",
                        list.size(), " outputs");
            for (size_t i = 0; i < list.size(); i++) {
                TORCH_CHECK(list[i].numel() == inputs[i].numel() && list[i].scalar_type() == inputs[i].scalar_type(),
                            "output ", i, " of all_gather_coalesced has another size or type than input ", i);
                all.push_back(list[i]);
            }
        }
        if (inputs.empty()) return nothing(OpType::ALLGATHER_COALESCED);
        return gather_all(std::make_shared<Pieces>(all, false), Pieces(inputs, true).memory, total(inputs),
                          OpType::ALLGATHER_COALESCED, TITLE("all_gather"), inputs, outputs, opts);
    }

    WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                            const c10d::AllgatherOptions& opts) override {
        TORCH_CHECK(outputs.size() == inputs.size(), "got ", inputs.size(), " inputs and ", outputs.size(), " outputs");
        std::vector<WorkPtr> works;
        for (size_t i = 0; i < inputs.size(); i++)
            works.push_back(_allgather_base(outputs[i], inputs[i], asynchronous(opts)));
        return joined(COALESCED_AS(ALLGATHER_INTO_TENSOR_COALESCED), std::move(works), outputs, is_async(opts));
    }

    WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
        const Tensor& input = only(inputs);
        Call call(CVK_KIND_GATHER, opts.rootRank);
        call.send(in_one_piece(input));
        if (opts.rootRank == rank_) {
            TORCH_CHECK(outputs.size() == 1, "the root of gather needs one list of tensors, and got ", outputs.size());
            check_list(outputs[0], input, "output");
            auto pieces = std::make_shared<Pieces>(outputs[0], false);
            call.recv(pieces->memory, size_ * input.numel()).then([pieces] { pieces->deliver(); });
        } else {
            TORCH_CHECK(outputs.empty() || outputs[0].empty(), "only the root of gather takes outputs");
        }
        return carry_out(OpType::GATHER, TITLE("gather"), call, inputs, outputs, opts);
    }

    WorkPtr gather_into_tensor(Tensor& output, Tensor& input, const c10d::GatherOptions& opts) OVERRIDE_SINCE_14 {
        check_tensor(input);
        Call call(CVK_KIND_GATHER, opts.rootRank);
        call.send(in_one_piece(input));
        if (opts.rootRank == rank_) {
            check_size(output, input, size_, "output");
            Target target(output, false);
            call.recv(target.memory).then([target] { target.deliver(); });
        }
        return carry_out(OpType::GATHER, TITLE("gather"), call, {input}, {{output}}, opts);
    }

    WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override {
        const Tensor& output = only(outputs);
        Target target(output, false);
        Call call(CVK_KIND_SCATTER, opts.rootRank);
        call.recv(target.memory).then([target] { target.deliver(); });
        if (opts.rootRank == rank_) {
            TORCH_CHECK(inputs.size() == 1, "the root of scatter needs one list of tensors, and got ", inputs.size());
            check_list(inputs[0], output, "input");
            call.send(Pieces(inputs[0], true).memory, size_ * output.numel());
        } else {
            TORCH_CHECK(inputs.empty() || inputs[0].empty(), "only the root of scatter takes inputs");
        }
        return carry_out(OpType::SCATTER, TITLE("scatter"), call, inputs.empty() ? Tensors() : inputs[0], {outputs}, opts);
    }

    WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                           const c10d::ReduceScatterOptions& opts) override {
        const Tensor& output = only(outputs);
        TORCH_CHECK(inputs.size() == 1, "convoke scatters one list of tensors, and got ", inputs.size());
        check_list(inputs[0], output, "input");
        return scatter_sum(output, Pieces(inputs[0], true).memory, OpType::REDUCE_SCATTER, TITLE("reduce_scatter"),
                           inputs[0], opts);
    }

    WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& opts) override {
        check_tensor(output);
        check_size(input, output, size_, "input");
        return scatter_sum(output, in_one_piece(input), OpType::_REDUCE_SCATTER_BASE, TITLE("_reduce_scatter_base"),
                           {input}, opts);
    }

    WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                            const c10d::ReduceScatterOptions& opts) override {
        TORCH_CHECK(outputs.size() == inputs.size(), "got ", inputs.size(), " inputs and ", outputs.size(), " outputs");
        std::vector<WorkPtr> works;
        for (size_t i = 0; i < inputs.size(); i++)
            works.push_back(_reduce_scatter_base(outputs[i], inputs[i], asynchronous(opts)));
        return joined(COALESCED_AS(REDUCE_SCATTER_TENSOR_COALESCED), std::move(works), outputs, is_async(opts));
    }

    WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_splits,
                          std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) override {
        check_equal_types({output, input});
        Target target(output, false);
        Call call(output_splits.empty() && input_splits.empty() ? CVK_KIND_ALL_TO_ALL : CVK_KIND_ALL_TO_ALL_V);
        call.send(in_one_piece(input)).recv(target.memory).then([target] { target.deliver(); });
        if (call.raw.kind == CVK_KIND_ALL_TO_ALL) {
            TORCH_CHECK(input.numel() == output.numel(), "all_to_all without split sizes needs tensors of one size, and got ",
                        input.numel(), " and ", output.numel(), " elements");
        } else {
            const auto times = element_type(input).times;
            call.send_counts = scaled(split_counts(input, input_splits, "input"), times);
            call.recv_counts = scaled(split_counts(output, output_splits, "output"), times);
        }
        return carry_out(OpType::ALLTOALL_BASE, TITLE("all_to_all"), call, {input}, {{output}}, opts);
    }

    WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
        TORCH_CHECK(outputs.size() == static_cast<size_t>(size_) && inputs.size() == outputs.size(),
                    "all_to_all needs lists of ", size_, " tensors, and got ", inputs.size(), " inputs and ", outputs.size(),
                    " outputs");
        Pieces from(inputs, true);
        auto to = std::make_shared<Pieces>(outputs, false);
        TORCH_CHECK(inputs[0].scalar_type() == outputs[0].scalar_type(), "inputs and outputs must have one type");
        Call call(CVK_KIND_ALL_TO_ALL_V);
        call.send(from.memory, total(inputs)).recv(to->memory, total(outputs)).then([to] { to->deliver(); });
        const auto times = element_type(inputs[0]).times;
        for (const auto& tensor : inputs) call.send_counts.push_back(static_cast<size_t>(tensor.numel() * times));
        for (const auto& tensor : outputs) call.recv_counts.push_back(static_cast<size_t>(tensor.numel() * times));
        return carry_out(OpType::ALLTOALL, TITLE("all_to_all"), call, inputs, {outputs}, opts);
    }

    WorkPtr send(Tensors& tensors, int to, int tag) override {
        Call call(CVK_KIND_SEND, to, tag);
        call.send(in_one_piece(only(tensors)));
        return begin(OpType::SEND, TITLE("send"), call, tensors, {tensors}, options_->timeout);
    }
    WorkPtr recv(Tensors& tensors, int from, int tag) override {
        return receive(tensors, from, tag, OpType::RECV, TITLE("recv"));
    }
    WorkPtr recvAnysource(Tensors& tensors, int tag) override {
        return receive(tensors, CVK_ANY_RANK, tag, OpType::RECVANYSOURCE, TITLE("recvAnySource"));
    }

    WorkPtr barrier(const c10d::BarrierOptions& opts) override {
        return carry_out(OpType::BARRIER, TITLE("barrier"), Call(CVK_KIND_BARRIER), {}, {}, opts);
    }

    void monitoredBarrier(const c10d::BarrierOptions& opts, bool names_all) override {
        finished().release();
        const bool is_unset = opts.timeout == c10d::kUnsetTimeout;
        const auto timeout = is_unset ? options_->timeout : opts.timeout;
        if (timeout.count() <= 0) {
            std::rethrow_exception(error_of(c10::str("Rank ", rank_, " timed out in monitoredBarrier: its time limit is ",
                                                     timeout.count(), " ms")));
        }
        const cvk_status status = api->monitored_barrier(group_, static_cast<uint64_t>(timeout.count()));
        if (status != CVK_STATUS_TIMEOUT) return check(status);
        // Scripts know the texts of gloo. All ranks get the missing ranks.
        const std::string ranks = missing_ranks(names_all);
        std::string text = rank_ == 0
            ? c10::str(names_all ? "Ranks " : "Rank ", ranks, " failed to pass monitoredBarrier in ", timeout.count(), " ms")
            : c10::str("Rank ", rank_, " successfully reached monitoredBarrier, but received errors while waiting for send/recv "
                       "from rank 0");
        std::rethrow_exception(error_of(c10::str(text, ": ", api->error_message())));
    }

  private:
    // The ranks for which the last failed call waited, or the first of them.
    static std::string missing_ranks(bool all) {
        const std::string json = api->error_json(), key = "\"missing\":[";
        const auto start = json.find(key);
        if (start == std::string::npos) return "?";
        const auto begin = start + key.size();
        std::string ranks;
        for (const char c : json.substr(begin, json.find(']', begin) - begin)) {
            if (c == ',' && !all) break;
            ranks += c == ',' ? std::string(", ") : std::string(1, c);
        }
        return ranks;
    }

    void release_group() {
        finished().release();
        api->group_free(group_);
    }

    Milliseconds limit(Milliseconds timeout) const {
        return timeout == c10d::kUnsetTimeout || timeout.count() <= 0 ? options_->timeout : timeout;
    }

    // torch 2.7 does not tell whether the program waits at once.
    template <typename O>
    static bool is_async(const O& opts) {
        if constexpr (requires { opts.asyncOp; }) return opts.asyncOp;
        return true;
    }

    template <typename O>
    static O asynchronous(O opts) {
        if constexpr (requires { opts.asyncOp; }) opts.asyncOp = true;
        return opts;
    }

    WorkPtr nothing(OpType type) {
        return c10::make_intrusive<ConvokeWork>(type, nullptr, Tensors(), std::vector<Tensors>(), seq_);
    }

    WorkPtr joined(OpType type, std::vector<WorkPtr> works, Tensors results, bool is_async) {
        auto joint = c10::make_intrusive<JointWork>(type, std::move(works), std::move(results));
        if (!is_async) joint->wait(kNoTimeout);
        return joint;
    }

    static int64_t total(const Tensors& tensors) {
        int64_t total = 0;
        for (const auto& tensor : tensors) total += tensor.numel();
        return total;
    }

    void check_list(const Tensors& list, const Tensor& one, const char* what) const {
        TORCH_CHECK(list.size() == static_cast<size_t>(size_), "there are ", size_, " ranks, and the list has ", list.size(), " ",
                    what, " tensors");
        for (const auto& tensor : list) {
            check_tensor(tensor);
            TORCH_CHECK(tensor.numel() == one.numel() && tensor.scalar_type() == one.scalar_type(), "an ", what,
                        " tensor has ", tensor.numel(), " elements of ", tensor.scalar_type(), ", and this rank's other tensor ",
                        one.numel(), " of ", one.scalar_type());
        }
    }

    void check_size(const Tensor& large, const Tensor& small, int times, const char* what) const {
        check_tensor(large);
        TORCH_CHECK(large.scalar_type() == small.scalar_type(), "input and output must have one type, and have ",
                    large.scalar_type(), " and ", small.scalar_type());
        TORCH_CHECK(large.numel() == small.numel() * times, "the ", what, " tensor has ", large.numel(), " elements; ", times,
                    " ranks with ", small.numel(), " elements each need ", small.numel() * times);
    }

    // Elements for each rank, of split sizes along the first dimension; equal ones if there are none.
    std::vector<int64_t> split_counts(const Tensor& tensor, const std::vector<int64_t>& splits, const char* what) const {
        const int64_t length = tensor.dim() == 0 ? 1 : tensor.size(0), row = length == 0 ? 1 : tensor.numel() / length;
        if (splits.empty()) {
            TORCH_CHECK(length % size_ == 0, "the ", what, " tensor has length ", length, ", which ", size_,
                        " ranks do not divide: give split sizes");
            return std::vector<int64_t>(static_cast<size_t>(size_), length / size_ * row);
        }
        TORCH_CHECK(splits.size() == static_cast<size_t>(size_), "there are ", size_, " ranks, and ", splits.size(), " ", what,
                    " split sizes");
        int64_t sum = 0;
        std::vector<int64_t> counts;
        for (int64_t split : splits) {
            sum += split;
            counts.push_back(split * row);
        }
        TORCH_CHECK(sum == length, "the ", what, " split sizes add up to ", sum, ", and the tensor has length ", length);
        return counts;
    }

    template <typename O>
    WorkPtr reduce_all(const Tensor& tensor, const Tensors& inputs, const O& opts, OpType type, const char* title) {
        Target target(tensor);
        Call call(CVK_KIND_ALL_REDUCE);
        call.recv(target.memory).by(opts.reduceOp, tensor);
        if (target.is_copied) call.then([target] { target.deliver(); });
        return carry_out(type, title, call, inputs, {inputs}, opts);
    }

    template <typename O>
    WorkPtr gather_all(std::shared_ptr<Pieces> to, const Tensor& input, int64_t count, OpType type, const char* title,
                       const Tensors& inputs, std::vector<Tensors> outputs, const O& opts) {
        Call call(CVK_KIND_ALL_GATHER);
        call.send(in_one_piece(input), count).recv(to->memory, size_ * count);
        if (to->is_copied) call.then([to] { to->deliver(); });
        return carry_out(type, title, call, inputs, std::move(outputs), opts);
    }

    WorkPtr scatter_sum(const Tensor& output, const Tensor& input, OpType type, const char* title, const Tensors& inputs,
                        const c10d::ReduceScatterOptions& opts) {
        Target target(output, false);
        Call call(CVK_KIND_REDUCE_SCATTER);
        call.send(input, size_ * output.numel()).recv(target.memory).by(opts.reduceOp, output);
        if (target.is_copied) call.then([target] { target.deliver(); });
        return carry_out(type, title, call, inputs, {{output}}, opts);
    }

    WorkPtr receive(Tensors& tensors, int64_t from, int tag, OpType type, const char* title) {
        Target target(only(tensors));
        Call call(CVK_KIND_RECV, from, tag);
        call.recv(target.memory);
        if (target.is_copied) call.then([target] { target.deliver(); });
        return begin(type, title, call, tensors, {tensors}, options_->timeout);
    }

    // Carries out a call without a work.
    void run_now(Call& call, Milliseconds timeout) {
        set_pointers(call, limit(timeout));
        check(api->run(group_, &call.raw, 1, nullptr));
    }

    // Waits for the call if the options say so.
    template <typename O>
    WorkPtr carry_out(OpType type, const char* title, Call call, const Tensors& inputs, std::vector<Tensors> results,
                      const O& opts) {
        const auto timeout = limit(opts.timeout);
        seq_++;
        if (is_async(opts) || is_coalescing_) {
            return begin(type, title, std::move(call), inputs, std::move(results), timeout);
        }
        finished().release();
        auto work = c10::make_intrusive<ConvokeWork>(type, title, inputs, std::move(results), seq_);
        try {
            run_now(call, timeout);
            if (call.deliver) call.deliver();
        } catch (...) {
            work->end(std::current_exception(), -1);
            throw;
        }
        work->end(nullptr, -1);
        return work;
    }

    WorkPtr begin(OpType type, const char* title, Call call, const Tensors& inputs, std::vector<Tensors> results,
                  Milliseconds timeout) {
        finished().release();
        auto work = c10::make_intrusive<ConvokeWork>(type, title, inputs, std::move(results), seq_);
        auto operation = std::make_shared<Operation>();
        operation->tensors = std::move(call.tensors);
        operation->deliver = std::move(call.deliver);
        work->begin_with(operation);
        set_pointers(call, timeout);
        auto* context = new OperationPtr(operation);
        call.raw.on_complete = on_complete;
        call.raw.on_complete_context = context;
        const cvk_status status = api->start(group_, &call.raw, &operation->handle);
        if (status != CVK_STATUS_OK) {
            delete context;
            auto error = last_error(status);
            operation->is_done = true;
            work->end(error, -1);
            std::rethrow_exception(error);
        }
        bool is_finished;
        {
            std::lock_guard<std::mutex> lock(operation->mutex);
            operation->is_begun = true;
            is_finished = operation->is_finished;
        }
        if (is_finished) complete(operation);
        if (is_coalescing_) coalesced_.push_back(work);
        return work;
    }

    void set_pointers(Call& call, Milliseconds timeout) {
        if (!call.send_counts.empty()) call.raw.send_counts = call.send_counts.data();
        if (!call.recv_counts.empty()) call.raw.recv_counts = call.recv_counts.data();
        call.raw.timeout_ms = static_cast<uint64_t>(timeout.count());
    }

    cvk_group* const group_;
    const bool is_gloo_;  // the backend has taken the place of gloo
    c10::intrusive_ptr<Options> options_;
    std::atomic<uint64_t> seq_{0};
    bool is_coalescing_ = false;
    std::vector<WorkPtr> coalesced_;
};

// ---------------------------------------------------------------------------------------------------------------
// Operators for Python

// Makes the table of functions known. The address is that of a `cvk_api_table`.
void set_table(int64_t address) { api = reinterpret_cast<const cvk_api_table*>(address); }

// Makes the backend the one of CPU tensors of `group`.
void use(const c10::intrusive_ptr<c10d::ProcessGroup>& group, c10::intrusive_ptr<ConvokeBackend> backend) {
    // Also in the place of gloo: torch casts a backend of the type GLOO to its own class.
    group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM, std::move(backend));
}

// Joins the other ranks at a store.
void attach(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::string& name, const std::string& store,
            int64_t rank, int64_t size, int64_t timeout_ms, bool is_gloo) {
    cvk_init_options options{};
    options.size = sizeof options;
    options.store = store.empty() ? "localhost:1" : store.c_str();  // a group of one rank asks no store
    options.rank = static_cast<size_t>(rank);
    options.world_size = static_cast<size_t>(size);
    options.name = name.c_str();
    options.timeout_ms = options.init_timeout_ms = static_cast<uint64_t>(timeout_ms);
    cvk_group* joined = nullptr;
    check(api->init(&options, &joined));
    use(group, c10::make_intrusive<ConvokeBackend>(joined, Milliseconds(timeout_ms), is_gloo));
}

ConvokeBackend* convoke_backend(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
    // A group without CPU tensors has no such backend, which is an error of `getBackend`.
    return dynamic_cast<ConvokeBackend*>(group->getBackend(c10::DeviceType::CPU).get());
}

// The error that ended a group, as JSON; empty if none did.
std::string failure(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
    auto* backend = convoke_backend(group);
    TORCH_CHECK(backend, "the group's backend for CPU tensors is ",
                group->getBackend(c10::DeviceType::CPU)->getBackendName(), " and not convoke");
    return backend->failure();
}

// Ends the thread that completes futures. Called before the interpreter ends.
void stop() {
    future_thread().stop();
    finished().release();
}

}  // namespace

TORCH_LIBRARY(convoke, library) {
    constexpr auto key = c10::DispatchKey::CompositeExplicitAutograd;
    library.def("set_table(int address) -> ()");
    library.impl("set_table", key, TORCH_FN(set_table));
    library.def("attach(__torch__.torch.classes.c10d.ProcessGroup group, str name, str store, int rank, int size, int timeout_ms, bool is_gloo) -> ()");
    library.impl("attach", key, TORCH_FN(attach));
    library.def("failure(__torch__.torch.classes.c10d.ProcessGroup group) -> str");
    library.impl("failure", key, TORCH_FN(failure));
    library.def("stop() -> ()");
    library.impl("stop", key, TORCH_FN(stop));
}
